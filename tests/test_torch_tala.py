"""What the gate does not ask of TALA and its relatives in PyTorch: exact numbers, second derivatives, what is stored,
what autocast may do, what is said of wrong arguments.

Inputs here are whole numbers and decays are 0, -1, 1, 2 or 1/2, so that float64 rounds nothing: whatever the form,
results and derivatives equal those of one step per token bit for bit. Values exceed 2^24, which float32 would round.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mixproof.verify.subjects.torch import (
    feature_maps,
    gated_linear_attention,
    linear_attention,
    multi_scale_retention,
    retention,
    tala,
    tala_decays,
    tala_normalised,
)

B, T, H, K, V = 2, 7, 2, 3, 4
DECAY = {  # function, its decay, the axes of the decay, and how it is spread over the state
    "retention.chunkwise": (retention.chunkwise, "gamma", (H,), lambda a: a[None, None, :, None, None]),
    "retention.recompute": (retention.recompute, "gamma", (H,), lambda a: a[None, None, :, None, None]),
    "tala.time_varying.chunkwise": (tala_decays.chunkwise, "a", (B, T, H), lambda a: a[..., None, None]),
    "tala.time_varying.recompute": (tala_decays.recompute, "a", (B, T, H), lambda a: a[..., None, None]),
    "tala.key_channel": (tala_decays.chunkwise_key_channel, "a", (B, T, H, K), lambda a: a[..., None]),
    "tala.value_channel": (tala_decays.scan_value_channel, "a", (B, T, H, V), lambda a: a[..., None, :]),
    "tala.elementwise": (tala_decays.scan_elementwise, "a", (H, K, V), lambda a: a[None, None]),
}
RECOMPUTE = {
    "tala": (tala.recompute, tala.chunkwise, {"h": (H,), "G": (H,)}),
    "retention": (retention.recompute, retention.chunkwise, {"gamma": (H,)}),
    "tala.time_varying": (tala_decays.recompute, tala_decays.chunkwise, {"a": (B, T, H)}),
    "gated_linear_attention.simple": (
        gated_linear_attention.recompute,
        gated_linear_attention.chunkwise,
        {"g": (B, T, H)},
    ),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """These tensors are small: threads would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def whole(generator, *shape):
    return torch.randint(-4, 5, shape, generator=generator).double()


def draw(decay, shape, seed=0):
    """Whole q, k, v, S0, and decays of both signs, zero among them; leaves."""
    generator = torch.Generator().manual_seed(seed)
    inputs = {"q": whole(generator, B, T, H, K), "k": whole(generator, B, T, H, K), "v": whole(generator, B, T, H, V)}
    inputs["v"] += 2.0**26 + 1
    choice = torch.tensor([0.0, -1.0, 1.0, 2.0, 0.5], dtype=torch.float64)
    inputs[decay] = choice[torch.randint(0, 5, shape, generator=generator)]
    inputs["S0"] = whole(generator, B, H, K, V)
    return {n: x.requires_grad_() for n, x in inputs.items()}


def normal(decays, dtype=torch.float32, seed=0, tokens=T):
    """Normal q, k, v, S0, and decays, or log-decays, between a half and one; leaves."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"q": (B, tokens, H, K), "k": (B, tokens, H, K), "v": (B, tokens, H, V), "S0": (B, H, K, V)}
    inputs = {n: torch.randn(shape, generator=generator, dtype=dtype) for n, shape in sizes.items()}
    for name, shape in decays.items():
        x = 0.5 + 0.5 * torch.rand([tokens if n == T else n for n in shape], generator=generator, dtype=dtype)
        inputs[name] = x.log() if name == "g" else x
    return {n: x.requires_grad_() for n, x in inputs.items()}


def by_token(q, k, v, A, S0):
    """S_t = A_t * S_{t-1} + k_t^T v_t;  o_t = 2 q_t S_t."""
    A = A.expand(B, T, H, K, V)
    S, rows = S0, []
    for t in range(T):
        S = A[:, t] * S + k[:, t, :, :, None] * v[:, t, :, None, :]
        rows.append(2 * (q[:, t, :, None, :] @ S).squeeze(-2))
    return torch.stack(rows, dim=1), S


def derivatives(outputs, inputs, cotangents):
    """Gradients, zero for what is not reached, and the gradients of a weighted sum of them."""
    pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if c is not None]
    leaves = list(inputs.values())

    def gradients(ys, cs, **options):
        found = torch.autograd.grad(ys, leaves, cs, allow_unused=True, **options)
        return [torch.zeros_like(y) if x is None else x for x, y in zip(found, leaves, strict=True)]

    first = gradients([o for o, _ in pairs], [c for _, c in pairs], create_graph=True)
    generator = torch.Generator().manual_seed(5)
    loss = sum((x * whole(generator, *x.shape)).sum() for x in first)
    return first + gradients([loss], None)


@pytest.mark.parametrize("present", ["O S", "O", "S"])
@pytest.mark.parametrize("chunk", [1, 3, 16])
@pytest.mark.parametrize("name", DECAY)
def test_exact_results_and_derivatives(name, chunk, present):
    """Also second derivatives, with zero decays, and where a cotangent is missing."""
    function, decay, shape, over_state = DECAY[name]
    inputs = draw(decay, shape)
    options = {} if "scan" in function.__name__ else {"chunk": chunk}
    got = function(**inputs, scale=2.0, **options)
    want = by_token(*(inputs[n] for n in "qkv"), over_state(inputs[decay]), inputs["S0"])
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    generator = torch.Generator().manual_seed(1)
    cotangents = [whole(generator, *y.shape) if n in present.split() else None for n, y in zip("OS", want, strict=True)]
    found, expected = (derivatives(y, inputs, cotangents) for y in (got, want))
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert torch.count_nonzero(expected[-1 - len(inputs)])
    assert torch.count_nonzero(expected[-3])  # a second derivative, by v


@pytest.mark.parametrize("name", DECAY)
def test_one_tensor_as_query_and_key(name):
    function, decay, shape, over_state = DECAY[name]
    inputs = draw(decay, shape)
    got = function(**inputs | {"k": inputs["q"]})
    want = by_token(inputs["q"], inputs["q"], inputs["v"], over_state(inputs[decay]), inputs["S0"])
    (one,) = torch.autograd.grad(2 * got[0].sum(), inputs["q"])
    (other,) = torch.autograd.grad(want[0].sum(), inputs["q"])
    assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["n1", "n2", "n3", "linear_attention"])
def test_exact_averages(name):
    """Keys 1, 2, 4, .. and a first mass of one make masses 2, 4, 8, ..: every average is exact."""
    k = (2.0 ** torch.arange(T, dtype=torch.float64))[None, :, None, None].expand(B, T, H, K)
    generator = torch.Generator().manual_seed(0)
    q = torch.full((B, T, H, K), 2.0**-3, dtype=torch.float64)
    v = whole(generator, B, T, H, K) + 2.0**26 + 1
    one = torch.ones(H, dtype=torch.float64)
    z0 = torch.ones(B, H, K, dtype=torch.float64)
    weights = k[..., 0] / 2.0 ** torch.arange(1, T + 1, dtype=torch.float64)[None, :, None]
    want = v * weights[..., None]
    for t in range(1, T):
        want[:, t] += want[:, t - 1] / 2
    if name == "n1":
        O, x, z = tala_normalised.n1(q, k, v, one, z0=z0)
        assert torch.equal(O, q * want)
        assert torch.equal(x, want[:, -1] * z)
        return
    q, k, z0 = (x[..., :1].expand(*x.shape[:-1], 4) for x in (q, k, z0))
    if name == "n3":
        O, S, z = tala_normalised.n3(q, k, v, one, z0=z0)
        want = want / 2  # the sum of four queries
    elif name == "n2":
        O, S, z = tala_normalised.n2(q, k, v, one, z0=z0, chunk=3)
    else:
        O, S, z = linear_attention.chunkwise(q, k, v, z0=z0, chunk=3)
    assert torch.equal(O, want)
    assert torch.equal(S, z[..., None] * (want[:, -1] * (2 if name == "n3" else 1))[..., None, :])


def test_phi_b_of_a_row_of_zeros():
    """exp(x / norm_eps) near zero: one, with the slope 1 / norm_eps."""
    x = torch.zeros(1, 2, 1, 3, dtype=torch.float64, requires_grad=True)
    Y = feature_maps.phi_b(x, norm_eps=2.0**-40)
    assert torch.equal(Y, torch.ones_like(Y))
    (dx,) = torch.autograd.grad(Y.sum(), x)
    assert torch.equal(dx, torch.full_like(x, 2.0**40))


# --- what is stored --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", RECOMPUTE)
def test_recompute_stores_its_inputs_and_nothing_else(name):
    recompute, _, decays = RECOMPUTE[name]
    inputs = normal(decays)
    own = {x.untyped_storage().data_ptr() for x in inputs.values()}
    kept = []

    def pack(x):
        if x.untyped_storage().data_ptr() not in own:
            kept.append(x.untyped_storage().nbytes())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        recompute(**inputs, chunk=2)
    assert sum(kept) <= 4 * 4 * H  # omega, its product with G: one number a head


class Largest(TorchDispatchMode):
    """The most elements that any operation returned."""

    elements = 0

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # or PyTorch imports its compiler

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return result


@pytest.mark.parametrize("form", [0, 1], ids=["recompute", "chunkwise"])
@pytest.mark.parametrize("name", RECOMPUTE)
def test_nothing_grows_with_the_square_of_tokens(name, form):
    """Forward and backward of 400 tokens: a matrix of all pairs of one head has 160000 elements."""
    tokens = 400
    inputs = normal(RECOMPUTE[name][2], tokens=tokens)
    with Largest() as largest:
        O, S = RECOMPUTE[name][form](**inputs, chunk=16)
        (O.sum() + S.sum()).backward()
    assert 0 < largest.elements <= B * H * tokens * max(K, V, 17) < tokens**2


@pytest.mark.parametrize("form", [0, 1], ids=["recompute", "chunkwise"])
@pytest.mark.parametrize("name", RECOMPUTE)
def test_autocast_rounds_nothing(name, form):
    """Forward under autocast, backward outside it as PyTorch advises; "recompute" does not mind either way."""
    function, inputs = RECOMPUTE[name][form], normal(RECOMPUTE[name][2])

    def results(inside):
        with torch.autocast("cpu", enabled=inside, dtype=torch.bfloat16):
            O, S = function(**inputs, chunk=3)
            with torch.autocast("cpu", enabled=inside and form == 0, dtype=torch.bfloat16):
                return [O, S, *torch.autograd.grad([O, S], list(inputs.values()), [O.detach(), S.detach()])]

    assert all(torch.equal(x, y) for x, y in zip(results(True), results(False), strict=True))


# --- arguments -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"k": lambda x: x[:, :5]}, ValueError, r"k has shape \(2, 5, 2, 3\): axis T is 5, but q has T=7"),
        ({"v": lambda x: x[0]}, ValueError, r"v has shape \(7, 2, 4\); expected axes \(B, T, H, V\)"),
        ({"G": lambda x: x[:1]}, ValueError, r"G has shape \(1,\): axis H is 1, but q has H=2"),
        ({"h": lambda x: x * float("nan")}, ValueError, "h contains NaN"),
        ({"S0": lambda x: x[..., :2]}, ValueError, r"S0 has shape \(2, 2, 3, 2\): axis V is 2, but v has V=4"),
        ({"q": lambda x: x.detach().long()}, TypeError, "q is torch.int64; expected a floating-point tensor"),
        ({"G": 1.0}, TypeError, "G is float; expected a floating-point tensor"),
        ({"v": None}, TypeError, "v is NoneType; expected a floating-point tensor"),
        ({"k": lambda x: x.to("meta")}, ValueError, "k is on meta, but q is on cpu"),
        ({"chunk": 0}, ValueError, "chunk is 0; it must be at least 1"),
        ({"scale": float("inf")}, ValueError, "scale is inf; it must be finite"),
    ],
)
def test_arguments_that_make_no_sense(changes, error, message):
    inputs = normal({"h": (H,), "G": (H,)})
    new = {n: x(inputs.get(n)) if callable(x) else x for n, x in changes.items()}
    for function in (tala.chunkwise, tala.recompute):
        with pytest.raises(error, match=message):
            function(**inputs | new)


def test_scalars_that_make_no_sense():
    x = torch.ones(1, 2, 1, 3)
    one = torch.ones(1)
    for call, message in (
        (lambda: feature_maps.phi_b(x, norm_eps=-1.0), "norm_eps is -1.0; it must be finite and not negative"),
        (lambda: linear_attention.chunkwise(x, x, x, eps=-1.0), "eps is -1.0; it must be finite and not negative"),
        (lambda: multi_scale_retention.chunkwise(x, x, x, x, one), "q has 3 channels; they turn in pairs"),
        (
            lambda: multi_scale_retention.chunkwise(x[..., :2], x[..., :2], x, x, one, base=0.0),
            "base is 0.0; it must be finite and positive",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_importing_compiles_nothing():
    modules = "feature_maps, gated_linear_attention, mixformer, retention, tala, tala_decays, tala_normalised"
    code = (
        f"from mixproof.verify.subjects.torch import {modules}\n"
        "import sys\n"
        "print(*[m for m in ('triton', 'torch._dynamo', 'torch._inductor') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout.split() == []
