"""The backward of the Triton kernels of Gaussian mixture attention: the judge's law on gradients at sizes that the gate
does not reach, where loops over tiles go round more than once; and properties that no law states."""

from __future__ import annotations

import dataclasses
import inspect
import math
from importlib.util import find_spec

import pytest

torch = pytest.importorskip("torch")
if find_spec("triton") is None:  # not imported here: gma says first whether to interpret
    pytest.skip("triton is not installed", allow_module_level=True)

from mixproof.verify.case import parse  # noqa: E402
from mixproof.verify.declare import ATTRIBUTE  # noqa: E402
from mixproof.verify.judge import evaluate  # noqa: E402
from mixproof.verify.laws import law  # noqa: E402
from mixproof.verify.subject import Subject  # noqa: E402
from mixproof.verify.subjects.triton import gma, gma_backward_kernels, gma_kernels  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def subject(name, chunk):
    """With a large eps: at the usual one, a term of the gradients is too small to be missed."""
    function = getattr(gma, name)
    (declaration,) = getattr(function, ATTRIBUTE)
    declaration = dataclasses.replace(declaration, fixed={} if name == "responsibilities" else {"eps": 0.25})
    return Subject(declaration, (lambda **inputs: function(**inputs, chunk=chunk)) if chunk else function)


@pytest.mark.parametrize(
    ("name", "chunk", "case"),
    [
        # four stretches; five launches, each adding to dx; dimensions in two tiles
        ("responsibilities", 0, "B=2 H=1 T=200 K=2 R=1"),
        ("responsibilities", 0, "B=1 H=2 T=5 K=70 R=3"),
        ("responsibilities", 0, "B=1 H=1 T=3 K=2 R=70"),
        ("responsibilities", 0, "B=1 H=1 T=0 K=2 R=3"),
        # more of everything than a tile; several stretches on both sides; an empty side
        ("cross", 0, "B=1 H=2 T=35 S=70 K=17 R=2 V=70"),
        ("cross", 0, "B=1 H=2 T=70 S=35 K=17 R=2 V=17 dtype=float16"),
        ("cross", 0, "B=2 H=1 T=130 S=3 K=3 R=1 V=1 regime=offset"),
        ("cross", 0, "B=1 H=1 T=0 S=3 K=2 R=1 V=2"),
        ("bidirectional", 0, "B=1 H=1 T=150 K=1 R=1 V=3"),
        # chunks of several tiles, of one tile, of parts of a tile, of one token; several chunks in a stretch
        ("causal", 0, "B=1 H=1 T=66 K=17 R=3 V=70 state=random"),
        ("causal", 140, "B=1 H=1 T=150 K=2 R=1 V=2 state=random"),
        ("causal", 20, "B=1 H=1 T=50 K=12 R=2 V=3 dtype=float16 state=random"),
        ("causal", 4, "B=1 H=1 T=18 K=3 R=1 V=1 state=large"),
        ("causal", 1, "B=1 H=1 T=3 K=2 R=2 V=2 state=tiny"),
        ("causal", 0, "B=1 H=1 T=0 K=2 R=1 V=2 state=random"),
    ],
)
def test_gradients_are_the_closed_form(name, chunk, case):
    outcome = evaluate(subject(name, chunk), law("vjp"), parse(f"gma.{name}", case))
    assert not outcome.message
    assert outcome.worst is not None
    assert outcome.vacuous == 0
    assert outcome.ratio <= 1, f"{outcome.ratio:.3g} x bound in {outcome.worst.name}"


# ---- bit for bit ---------------------------------------------------------------------------------------------------


def problem(T, K=18, R=3, V=5, B=1, H=2, dtype=torch.float32):
    """Inputs, and cotangents of O, S, Z and gamma, by name."""
    g = torch.Generator().manual_seed(0)
    sizes = {"q": (B, T, H, R), "k": (B, T, H, R), "v": (B, T, H, V), "mu": (H, K, R), "omega": (H, K, R)}
    sizes |= {"alpha": (H, K), "S0": (B, H, K, V), "Z0": (B, H, K)}
    outputs = {"O": (B, T, H, V), "S": (B, H, K, V), "Z": (B, H, K), "gamma": (B, T, H, K)}
    half = ("q", "k", "v", "O", "gamma")
    inputs, cotangents = (
        {n: torch.randn(*size, generator=g).to(DEVICE, dtype if n in half else torch.float32) for n, size in x.items()}
        for x in (sizes, outputs)
    )
    inputs["Z0"] = inputs["Z0"].abs()
    return inputs, cotangents


class Seed(torch.autograd.Function):
    """A scalar whose gradient is the cotangent, strides and all."""

    @staticmethod
    def forward(ctx, y, cotangent):
        ctx.cotangent = cotangent
        return y.new_zeros(())

    @staticmethod
    def backward(ctx, *scalar):
        return ctx.cotangent, None


OPERATORS = {  # the inputs of each, by the names of its arguments, and its outputs
    "responsibilities": ({"x": "q", "mu": "mu", "omega": "omega", "alpha": "alpha"}, ("gamma",)),
    "cross": ({n: n for n in ("q", "k", "v", "mu", "omega", "alpha")}, ("O",)),
    "causal": ({n: n for n in ("q", "k", "v", "mu", "omega", "alpha", "S0", "Z0")}, ("O", "S", "Z")),
}


def gradients(inputs, cotangents, names=None, operators=tuple(OPERATORS)):
    """By operator and input: of all inputs, or of those `names` alone. Chunks have 20 tokens."""
    found = {}
    for operator in operators:
        arguments, results = OPERATORS[operator]
        leaves = {n: inputs[n].detach().requires_grad_(names is None or n in names) for n in arguments.values()}
        wanted = {n: x for n, x in leaves.items() if x.requires_grad}
        options = {"chunk": 20} if operator == "causal" else {}
        outputs = getattr(gma, operator)(**{name: leaves[n] for name, n in arguments.items()}, **options)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        if wanted:
            scalars = [Seed.apply(y, cotangents[n]).float() for y, n in zip(outputs, results, strict=True)]
            grads = torch.autograd.grad(torch.stack(scalars).sum(), list(wanted.values()))
            found |= {(operator, n): g for n, g in zip(wanted, grads, strict=True)}
    return found


def same(x, y):
    return x.keys() == y.keys() and all(torch.equal(x[n], y[n]) for n in x)


def strided(x):
    """The same values behind other strides: axes reversed, every second element, an offset."""
    y = torch.full([2 * n for n in reversed(x.shape)], math.nan, dtype=x.dtype, device=x.device)
    y = y.permute(*reversed(range(x.dim())))[tuple(slice(1, None, 2) for _ in x.shape)]
    return y.copy_(x)


def test_strides_change_no_bit_and_nothing_given_is_written_to():
    inputs, cotangents = problem(T=22)
    plain = gradients(inputs, cotangents)
    others, upstream = ({n: strided(x) for n, x in given.items()} for given in (inputs, cotangents))
    assert same(gradients(others, upstream), plain)
    assert all(torch.equal(others[n], inputs[n]) for n in inputs)
    assert all(torch.equal(upstream[n], cotangents[n]) for n in cotangents)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_gradient_is_written_and_nothing_unwritten_is_read(monkeypatch, dtype):
    inputs, cotangents = problem(T=19, H=2 if dtype == torch.float32 else 1, dtype=dtype)
    clean = gradients(inputs, cotangents)
    for name in ("empty", "empty_like"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, make=make, **options: make(*args, **options).fill_(math.nan))
    poisoned = gradients(inputs, cotangents)
    assert same(poisoned, clean)
    assert all(x.isfinite().all() for x in clean.values())
    half = {n for n, x in clean.items() if x.dtype == torch.float16}
    assert half == ({n for n in clean if n[1] in "qkv"} if dtype == torch.float16 else set())


@pytest.fixture(scope="module")
def everything():
    """All gradients of nine tokens."""
    return gradients(*problem(T=9, H=1))


@pytest.mark.parametrize("name", ["v", "alpha", "k", "S0"])
def test_one_gradient_alone_has_the_bits_that_it_has_among_all(everything, name):
    inputs, cotangents = problem(T=9, H=1)
    alone = gradients(inputs, cotangents, names=[name])
    assert same(alone, {n: x for n, x in everything.items() if n[1] == name})


def test_rows_of_the_cotangent_before_a_token_change_no_bit_of_its_gradients():
    inputs, cotangents = problem(T=33, K=3, H=1)
    before = gradients(inputs, cotangents, operators=["causal"])
    changed = cotangents["O"].clone()
    changed[:, :25] *= -3
    after = gradients(inputs, cotangents | {"O": changed}, operators=["causal"])
    for n in ("q", "k", "v"):
        assert torch.equal(before["causal", n][:, 25:], after["causal", n][:, 25:])
        assert not torch.equal(before["causal", n][:, :25], after["causal", n][:, :25])


# ---- values known by other means -----------------------------------------------------------------------------------


def test_a_component_without_mass_has_gradient_zero():
    inputs, cotangents = problem(T=9, H=1)
    inputs["alpha"][:, 5] = -1e4
    for (operator, n), x in gradients(inputs, cotangents).items():
        if n in ("mu", "omega", "alpha"):
            assert (x[:, 5] == 0).all(), (operator, n)
            assert (x[:, 6] != 0).any(), (operator, n)


def test_far_tokens_keep_their_gradients():
    """A common offset of 10,000 leaves every gradient as it is: differences come first."""
    inputs, cotangents = problem(T=9, K=3, H=1)
    for n in ("q", "k", "mu", "omega"):
        inputs[n] = (inputs[n] * 64).round() / 64
    near = gradients(inputs, cotangents)
    far = gradients(inputs | {n: inputs[n] + 10000 for n in ("q", "k", "mu")}, cotangents)
    assert same(near, far)


# ---- what is kept --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("operator", ["responsibilities", "cross", "causal"])
def test_nothing_of_tokens_times_components_is_kept(operator, dtype):
    """Besides inputs: two numbers a token, the mass D, O where it is exact; without chunks, also the one state."""
    T, K, V = 33, 40, 3
    inputs, _ = problem(T=T, K=K, V=V, H=1, dtype=dtype)
    leaves = {n: x.requires_grad_() for n, x in inputs.items()}
    own = {x.data_ptr() for x in leaves.values()}
    kept = []

    def pack(x):
        if x.data_ptr() not in own:
            kept.append(x.numel())
        return x

    arguments, _ = OPERATORS[operator]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        getattr(gma, operator)(**{name: leaves[n] for name, n in arguments.items()})
    exact = T * V if dtype == torch.float32 else 0
    want = {"responsibilities": 2 * T, "cross": 5 * T + exact + K * V + K, "causal": 5 * T + exact}
    assert sum(kept) == want[operator]


def test_a_second_derivative_is_refused():
    inputs, _ = problem(T=3, K=2, H=1)
    x = inputs["q"].requires_grad_()
    gamma = gma.responsibilities(x, inputs["mu"], inputs["omega"], inputs["alpha"])
    (dx,) = torch.autograd.grad((gamma * gamma).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_no_kernel_adds_in_an_order_that_may_change():
    for module in (gma_kernels, gma_backward_kernels):
        assert "atomic_" not in inspect.getsource(module)
