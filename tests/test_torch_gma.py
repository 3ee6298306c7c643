"""PyTorch implementations of Gaussian mixture attention against the float64 reference, and what they promise besides.

Every tolerance is a first-order rounding bound: a count of roundings times a majorant, which is the same expression
with every term replaced by its absolute value. `gamma_error` bounds responsibilities; `close` uses it for the rest.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mixproof.reference import gma as reference
from mixproof.reference import operator
from mixproof.reference.gma_multi_head import multi_head, multi_head_vjp
from mixproof.reference.primitives import sigmoid, softplus
from mixproof.verify.subjects.torch import gma
from mixproof.verify.subjects.torch.gma_module import GaussianMixtureAttention, State

CROSS = {"eager": gma.cross, "chunkwise": gma.chunkwise_cross, "recompute": gma.recompute_cross}
CAUSAL = {"eager": gma.causal, "chunkwise": gma.chunkwise_causal, "recompute": gma.recompute_causal}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
UNIT = {dtype: torch.finfo(dtype).eps / 2 for dtype in DTYPES}
SCALARS = {"eps": 1e-3, "v_min": 0.01}
OUTPUTS = ("O", "S", "Z")
B, H, K, R, V = 2, 3, 5, 4, 6


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """These tensors are small: threads would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def wide(dtype):
    return dtype if dtype == torch.float64 else torch.float32


def draw(T, S=None, *, dtype=torch.float64, state=False, seed=0, sizes=(B, H, K, R, V)):
    """Inputs in the layout B T H D; leaves, so that gradients can be asked for."""
    B, H, K, R, V = sizes
    generator = torch.Generator().manual_seed(seed)
    S = T if S is None else S
    token = {"q": (B, T, H, R), "k": (B, S, H, R), "v": (B, S, H, V)}
    other = {"mu": (H, K, R), "omega": (H, K, R), "alpha": (H, K)} | (
        {"S0": (B, H, K, V), "Z0": (B, H, K)} if state else {}
    )
    normal = {n: torch.randn(shape, generator=generator, dtype=torch.float64) for n, shape in (token | other).items()}
    if state:
        normal["Z0"] = normal["Z0"].abs()
    return {n: x.to(dtype if n in token else wide(dtype)).requires_grad_() for n, x in normal.items()}


def run(function, inputs, chunk=4, **scalars):
    """Outputs as a tuple."""
    options = {} if function in (gma.cross, gma.causal) else {"chunk": chunk}
    outputs = function(**inputs, **(SCALARS | scalars), **options)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def cotangents_of(outputs, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype) for o in outputs]


def gradients(outputs, inputs, cotangents):
    """Gradients by name, None where an input does not matter; `cotangents` may have gaps."""
    pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if c is not None]
    found = torch.autograd.grad(
        [o for o, _ in pairs], list(inputs.values()), [c for _, c in pairs], allow_unused=True, retain_graph=True
    )
    return dict(zip(inputs, found, strict=True))


# --- oracle and bounds -----------------------------------------------------------------------------------------------
def head(inputs, b, h):
    """One head of one sequence, as float64 arrays."""
    arrays = {}
    for name, x in inputs.items():
        x = x.detach().double().numpy()
        arrays[name] = (
            x[b, :, h] if name in ("x", "q", "k", "v", "O") else x[b, h] if name in ("S0", "Z0", "S", "Z") else x[h]
        )
    return arrays


def gamma_error(x, mu, omega, alpha, v_min, u):
    """Largest relative error of a responsibility computed in the log domain with unit roundoff u.

    Roundings: 6 in var (exp 2, log1p 2, two sums), so 10 in each (x - mu)^2 / var and 6 + 2 |log var| in each log;
    then one an addition. An absolute error of a logit is a relative error of its exp, of 2 roundings itself."""
    var = softplus(omega) + v_min
    square = np.sum((x[:, None] - mu) ** 2 / var, axis=-1)
    logs = np.sum(np.abs(np.log(var)), axis=-1)
    bias = alpha - np.sum(np.log(var), axis=-1) / 2
    s = bias - square / 2
    n = mu.shape[1]
    ds = u * ((n + 10) * square / 2 + 3 * n + (n + 2) * logs / 2 + np.abs(bias) + np.abs(s))
    top = np.argmax(s, axis=1)[:, None]
    t = s - np.take_along_axis(s, top, 1)
    dt = ds + np.take_along_axis(ds, top, 1) + u * np.abs(t)
    gamma = reference.responsibilities(x, mu, omega, alpha, v_min)
    return np.max(dt + np.sum(gamma * dt, axis=1, keepdims=True), initial=0) + (len(mu) + 6) * u


def majorants(a, G, causal, eps, v_min):
    """Outputs and gradients of one head with every term positive: (O, S, Z), {input: gradient}."""
    GQ, GK = (reference.responsibilities(a[n], a["mu"], a["omega"], a["alpha"], v_min) for n in ("q", "k"))
    keep = np.tril(np.ones((len(GQ), len(GK)))) if causal else np.ones((len(GQ), len(GK)))
    v, size = np.abs(a["v"]), (GK.shape[1], a["v"].shape[1])
    S0, Z0 = np.abs(a.get("S0", np.zeros(size))), a.get("Z0", np.zeros(size[0]))
    shapes = {"O": (len(GQ), size[1]), "S": size, "Z": size[:1]}
    dO, dS, dZ = (np.abs(G.get(n, np.zeros(shape))) for n, shape in shapes.items())
    M = keep * (GQ @ GK.T)
    D = (M.sum(1) + GQ @ Z0 + eps)[:, None]
    O = (GQ @ S0 + M @ v) / D
    dU = dO / D
    dD = np.sum(dU * O, axis=1, keepdims=True)
    P = keep * (dU @ v.T + dD)
    dGQ, dGK = dU @ S0.T + dD * Z0 + P @ GK, v @ dS.T + dZ + P.T @ GQ
    sums = {"v": GK @ dS + M.T @ dU, "S0": dS + GQ.T @ dU, "Z0": dZ + (GQ * dD).sum(0)}
    var = softplus(a["omega"]) + v_min
    dmu = dvar = dalpha = 0
    for name, gamma, dgamma in (("q", GQ, dGQ), ("k", GK, dGK)):
        ds = gamma * (dgamma + np.sum(gamma * dgamma, axis=1, keepdims=True))
        W = np.abs(a[name][:, None] - a["mu"]) / var
        sums[name] = np.einsum("tk,tkr->tr", ds, W)
        dmu = dmu + np.einsum("tk,tkr->kr", ds, W)
        dvar = dvar + (np.einsum("tk,tkr->kr", ds, W * W) + ds.sum(0)[:, None] / var) / 2
        dalpha = dalpha + ds.sum(0)
    return (O, S0 + GK.T @ v, Z0 + GK.sum(0)), sums | {"mu": dmu, "omega": dvar * sigmoid(a["omega"]), "alpha": dalpha}


def close(got, want, majorant, roundings, dtype):
    """|got - want| <= roundings * majorant, and half a unit in the last place of the dtype for storing the result."""
    assert got.dtype == dtype
    error = np.abs(got.detach().double().numpy() - want)
    assert np.all(np.isfinite(error))
    bound = (1 + UNIT[dtype]) * roundings * majorant + UNIT[dtype] * np.abs(want) + torch.finfo(dtype).tiny
    worst = np.max(error / bound, initial=0)
    assert worst <= 1, f"error is {worst:.3g} of the bound"


def check(function, inputs, outputs, cotangents, found, causal, **scalars):
    """Outputs, and gradients if `found`, against the reference, head by head; parameters' gradients are summed."""
    scalars = SCALARS | scalars
    op = operator("gma.causal" if causal else "gma.cross")
    names = OUTPUTS[: len(outputs)]
    dtype = inputs["q"].dtype
    u = UNIT[wide(dtype)] + UNIT[torch.float64]  # the reference rounds as well
    lengths = 4 * (inputs["q"].shape[1] + sum(inputs["v"].shape) + inputs["mu"].shape[1] + inputs["mu"].shape[2] + 20)
    totals: dict[tuple[str, int], list] = {}
    for b, h in np.ndindex(inputs["q"].shape[0], inputs["q"].shape[2]):
        a = head(inputs, b, h)
        G = head({n: c for n, c in zip(names, cotangents, strict=True) if c is not None}, b, h)
        mixture = (a["mu"], a["omega"], a["alpha"], scalars["v_min"])
        eta = max(gamma_error(a["q"], *mixture, u), gamma_error(a["k"], *mixture, u))
        want = op.evaluate(a | scalars)
        above, slopes = majorants(a, G, causal, **scalars)
        # O is a quotient of sums of products of two responsibilities: 4 eta. Every index is summed over at most once.
        for name, output, m in zip(names, outputs, above, strict=False):
            got = output[b, :, h] if name == "O" else output[b, h]
            close(got, want[name], m, 4 * eta + lengths * u, dtype if name == "O" else wide(dtype))
        if found is None:
            continue
        zero = {n: np.zeros_like(want[n]) for n in want}
        wanted = op.vjp(zero | G, **a, **scalars)
        for name in found:
            totals.setdefault((name, h if name in ("mu", "omega", "alpha") else (b, h)), []).append(
                (wanted[name], slopes[name], eta)
            )
    # A gradient has at most nine responsibilities as factors (U / D: 4, dU: 2, the other side's: 1, softmax's: 2), and
    # no index is summed over more than four times.
    for (name, where), terms in totals.items():
        want, m = sum(t[0] for t in terms), sum(t[1] for t in terms)
        got = found[name]
        token = name in ("q", "k", "v")
        got = got[where[0], :, where[1]] if token else got[where]
        close(got, want, m, 9 * max(t[2] for t in terms) + lengths * u, inputs[name].dtype)


# --- agreement with the reference ------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CROSS)
@pytest.mark.parametrize(("T", "S"), [(9, 9), (3, 14), (0, 5)])
def test_cross_and_its_gradients_agree_with_the_reference(name, dtype, T, S):
    inputs = draw(T, S, dtype=dtype, seed=T + S)
    outputs = run(CROSS[name], inputs)
    cotangents = cotangents_of(outputs)
    check(CROSS[name], inputs, outputs, cotangents, gradients(outputs, inputs, cotangents), causal=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize(("T", "state"), [(0, True), (1, False), (13, True)])
def test_causal_and_its_gradients_agree_with_the_reference(name, dtype, T, state):
    inputs = draw(T, dtype=dtype, state=state, seed=T)
    outputs = run(CAUSAL[name], inputs)
    cotangents = cotangents_of(outputs)
    check(CAUSAL[name], inputs, outputs, cotangents, gradients(outputs, inputs, cotangents), causal=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_responsibilities_agree_with_the_reference(dtype):
    inputs = draw(11, dtype=dtype)
    inputs = {"x": inputs["q"]} | {n: inputs[n] for n in ("mu", "omega", "alpha")}
    gamma = gma.responsibilities(**inputs, v_min=0.01)
    for b, h in np.ndindex(B, H):
        a = head(inputs, b, h)
        u = UNIT[wide(dtype)] + UNIT[torch.float64]
        want = reference.responsibilities(**a, v_min=0.01)
        close(gamma[b, :, h], want, want, gamma_error(**a, v_min=0.01, u=u), dtype)


@pytest.mark.parametrize("chunk", [1, 3, 7, 8, 100])
@pytest.mark.parametrize("name", ["chunkwise", "recompute"])
def test_every_chunk_size_agrees(name, chunk):
    inputs = draw(7, state=True)
    outputs = run(CAUSAL[name], inputs, chunk=chunk)
    cotangents = cotangents_of(outputs)
    check(CAUSAL[name], inputs, outputs, cotangents, gradients(outputs, inputs, cotangents), causal=True)


@pytest.mark.parametrize("values", [[20.5, 25.0, 45.0, 1.0, 0.0, 3.0], [-5.0, -18.0, -90.0, 0.0, 1.0, 89.0]], ids=str)
@pytest.mark.parametrize("name", CAUSAL)
def test_softplus_far_from_zero(name, values):
    """At omega = 20.5 a softplus that switches to the identity is off by 1e-9 in float64."""
    inputs = draw(6, state=True)
    inputs["omega"] = torch.tensor(values, dtype=torch.float64).repeat(H * K * R // 6).reshape(H, K, R).requires_grad_()
    outputs = run(CAUSAL[name], inputs)
    cotangents = cotangents_of(outputs)
    check(CAUSAL[name], inputs, outputs, cotangents, gradients(outputs, inputs, cotangents), causal=True)


def test_the_difference_comes_first():
    """x^2 - 2 x mu + mu^2 gives (0.5, 0.5) here in float32; the means are 2.25 and 0.25 apart, squared and scaled."""
    omega = math.log(math.expm1(0.25))
    inputs = {
        "x": torch.full((1, 1, 1, 1), 10000.75),
        "mu": torch.tensor([10000.0, 10001.0]).reshape(1, 2, 1),
        "omega": torch.full((1, 2, 1), omega),
        "alpha": torch.zeros(1, 2),
    }
    want = np.array([[0.268941, 0.731059]])
    error = np.abs(gma.responsibilities(**inputs)[0, :, 0].numpy() - want)
    assert np.max(error) <= gamma_error(**head(inputs, 0, 0), v_min=0.0, u=UNIT[torch.float32]) + 5e-7  # digits of want


# --- gradients in every combination ----------------------------------------------------------------------------------
@pytest.mark.parametrize("present", [p for p in itertools.product([True, False], repeat=3) if any(p)], ids=str)
@pytest.mark.parametrize("name", ["chunkwise", "recompute"])
def test_any_cotangent_may_be_absent(name, present):
    inputs = draw(10, state=True)
    outputs = run(CAUSAL[name], inputs)
    cotangents = [c if p else None for c, p in zip(cotangents_of(outputs), present, strict=True)]
    found = gradients(outputs, inputs, cotangents)
    found = {n: torch.zeros_like(inputs[n]) if g is None else g for n, g in found.items()}
    check(CAUSAL[name], inputs, outputs, cotangents, found, causal=True)


@pytest.mark.parametrize("causal", [False, True])
def test_any_input_may_be_constant(causal):
    """Every gradient asked for alone, and every one left out alone, is bit-equal to itself among all the others."""
    function = CAUSAL["recompute"] if causal else CROSS["recompute"]
    inputs = draw(10, state=causal)
    outputs = run(function, inputs)
    cotangents = cotangents_of(outputs)
    want = gradients(outputs, inputs, cotangents)
    for needed in [{n} for n in inputs] + [set(inputs) - {n} for n in inputs]:
        some = {n: x.detach().requires_grad_(n in needed) for n, x in inputs.items()}
        found = gradients(run(function, some), {n: some[n] for n in needed}, [c for c in cotangents])
        assert all(torch.equal(found[n], want[n]) for n in needed)


@pytest.mark.parametrize("causal", [False, True])
def test_recompute_agrees_with_autograd_in_float64(causal):
    """Two derivations of one gradient; `check` bounds the distance of each from a third."""
    inputs = draw(33, 33 if causal else 21, state=causal, seed=5)
    forms = CAUSAL if causal else CROSS
    for name in ("eager", "recompute"):
        outputs = run(forms[name], inputs, chunk=8, eps=1e-6)
        cotangents = cotangents_of(outputs)
        found = gradients(outputs, inputs, cotangents)
        assert all(torch.count_nonzero(g) == g.numel() for g in found.values())
        check(forms[name], inputs, outputs, cotangents, found, causal, eps=1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_second_derivatives_of_recompute(causal):
    """Gradients dX of <O, G> are linear in v, so <v, d<dX, w>/dv> = <dX, w>; and d<dv, w>/dG is O at v = w."""
    function = (CAUSAL if causal else CROSS)["recompute"]
    inputs = draw(9, sizes=(1, 1, K, R, V))
    outputs = run(function, inputs)
    (G, *_) = (c.requires_grad_() for c in cotangents_of(outputs))
    found = dict(zip(inputs, torch.autograd.grad(outputs[0], list(inputs.values()), G, create_graph=True), strict=True))
    w = dict(zip(inputs, cotangents_of(list(found.values()), seed=3), strict=True))
    a = head(inputs, 0, 0)
    u = 2 * UNIT[torch.float64]
    mixture = (a["mu"], a["omega"], a["alpha"], SCALARS["v_min"])
    roundings = (
        9 * max(gamma_error(a["q"], *mixture, u), gamma_error(a["k"], *mixture, u)) + 4 * (9 + 9 + K + R + V + 20) * u
    )
    _, slopes = majorants(a, head({"O": G}, 0, 0), causal, **SCALARS)
    for n in ("q", "k", "mu", "omega", "alpha"):
        once = torch.sum(found[n] * w[n])
        (slope,) = torch.autograd.grad(once, [inputs["v"]], retain_graph=True)
        bound = 2 * roundings * np.sum(np.abs(head(w, 0, 0)[n]) * slopes[n])
        assert abs(torch.sum(inputs["v"] * slope) - once) <= bound
    (slope,) = torch.autograd.grad(torch.sum(found["v"] * w["v"]), [G])
    check(function, inputs | {"v": w["v"]}, (slope,), [None], None, causal)


# --- strides, mutation, repetition -----------------------------------------------------------------------------------
def strange(x):
    """The same values with other strides: every second element of a buffer whose axes are reversed."""
    buffer = torch.full((*x.shape[::-1], 2), float("nan"), dtype=x.dtype)
    view = buffer[..., 0].permute(*reversed(range(x.ndim)))
    view.copy_(x.detach())
    assert not view.is_contiguous()
    return view


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", CAUSAL)
def test_strides_of_inputs_and_cotangents_do_not_matter(name, causal):
    function = (CAUSAL if causal else CROSS)[name]
    inputs = {n: strange(x).requires_grad_() for n, x in draw(9, state=causal).items()}
    outputs = run(function, inputs)
    cotangents = [strange(c) for c in cotangents_of(outputs)]
    check(function, inputs, outputs, cotangents, gradients(outputs, inputs, cotangents), causal)
    ones = [torch.ones((), dtype=torch.float64).expand(o.shape) for o in outputs]  # as sum().backward() makes them
    check(function, inputs, outputs, ones, gradients(outputs, inputs, ones), causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", CAUSAL)
def test_expanded_inputs(name, causal):
    function = (CAUSAL if causal else CROSS)[name]
    leaves = {n: x[:1] if n in ("q", "k", "v", "S0", "Z0") else x for n, x in draw(9, state=causal).items()}
    inputs = {n: x.detach().expand(B, *x.shape[1:]) if len(x) == 1 else x for n, x in leaves.items()}
    inputs = {n: x.requires_grad_() if n not in leaves or x.is_leaf else x for n, x in inputs.items()}
    outputs = run(function, inputs)
    cotangents = cotangents_of(outputs)
    check(function, inputs, outputs, cotangents, gradients(outputs, inputs, cotangents), causal)


@pytest.mark.parametrize("T", [0, 9])
@pytest.mark.parametrize("name", CAUSAL)
def test_nothing_is_mutated_or_aliased_and_runs_repeat(name, T):
    inputs = draw(T, state=True)
    before = {n: (x.detach().clone(), x._version) for n, x in inputs.items()}
    runs = []
    for _ in range(2):
        outputs = run(CAUSAL[name], inputs)
        cotangents = cotangents_of(outputs)
        versions = [c._version for c in cotangents]
        runs.append([*outputs, *gradients(outputs, inputs, cotangents).values()])
        assert versions == [c._version for c in cotangents]
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))
    for n, x in inputs.items():
        assert torch.equal(x, before[n][0])
        assert x._version == before[n][1]
    storages = {x.untyped_storage().data_ptr() for x in inputs.values() if x.numel()}
    assert storages.isdisjoint(o.untyped_storage().data_ptr() for o in outputs if o.numel())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", CAUSAL)
def test_autocast_does_not_round_responsibilities(name, causal):
    """Forward under autocast, backward outside it as PyTorch advises; "recompute" does not mind either way."""
    function = (CAUSAL if causal else CROSS)[name]
    inputs = draw(9, dtype=torch.float32)
    outputs = run(function, inputs)
    cotangents = cotangents_of(outputs)
    want = [*outputs, *gradients(outputs, inputs, cotangents).values()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = run(function, inputs)
        with torch.autocast("cpu", enabled=name == "recompute", dtype=torch.bfloat16):
            found = [*outputs, *gradients(outputs, inputs, cotangents).values()]
    assert all(torch.equal(x, y) for x, y in zip(found, want, strict=True))


# --- causality, states -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CAUSAL)
def test_the_future_does_not_reach_the_past(name, dtype):
    T = 11
    inputs = draw(T, dtype=dtype, state=True)
    (want, *_) = run(CAUSAL[name], inputs)
    for i in range(T):
        changed = {n: x.detach().clone() for n, x in inputs.items()}
        for n in ("q", "k", "v"):
            changed[n][:, i:] *= -1e4
        (got, *_) = run(CAUSAL[name], changed)
        assert torch.equal(got[:, :i], want[:, :i])
        assert not torch.equal(got[:, i], want[:, i])


def test_a_nan_in_the_future_does_not_reach_the_past_of_the_eager_form():
    inputs = {n: x.detach() for n, x in draw(6).items()}
    (want, *_) = run(gma.causal, inputs)
    for n in ("q", "k", "v"):
        inputs[n][:, 4:] = float("nan")
    (got, *_) = run(gma.causal, inputs)
    assert torch.equal(got[:, :4], want[:, :4])


@pytest.mark.parametrize("name", CAUSAL)
def test_gradients_do_not_go_forward_in_time(name):
    """dL/dk_j and dL/dv_j are exactly zero when only rows before j matter, and dL/dq_i when row i does not."""
    inputs = draw(11)
    outputs = run(CAUSAL[name], inputs)
    G = torch.zeros_like(outputs[0])
    G[:, 5] = 1
    found = gradients(outputs, inputs, [G, None, None])
    assert all(torch.count_nonzero(found[n][:, 6:]) == 0 for n in ("q", "k", "v"))
    assert torch.count_nonzero(found["q"][:, :5]) == 0
    assert torch.count_nonzero(found["v"][:, :6]) == found["v"][:, :6].numel()


@pytest.mark.parametrize("cut", [0, 1, 4, 6, 11])
@pytest.mark.parametrize("name", CAUSAL)
def test_split_and_resume(name, cut):
    """Both parts together, gradients through the carried state included, are as close to the reference as the whole."""
    inputs = draw(11, state=True)
    first, second = dict(inputs), dict(inputs)
    for n in ("q", "k", "v"):
        first[n], second[n] = inputs[n][:, :cut], inputs[n][:, cut:]
    O1, second["S0"], second["Z0"] = run(CAUSAL[name], first)
    O2, S, Z = run(CAUSAL[name], second, chunk=3)
    outputs = (torch.cat([O1, O2], dim=1), S, Z)
    cotangents = cotangents_of(outputs)
    check(CAUSAL[name], inputs, outputs, cotangents, gradients(outputs, inputs, cotangents), causal=True)


# --- memory ----------------------------------------------------------------------------------------------------------
MANY = (1, 2, 16, 3, 5)  # more components than channels, so that N K stands out


def saved(function, T):
    """What autograd stores for the backward: bytes of its storages, the largest size, and whether all are inputs."""
    inputs = draw(T, sizes=MANY)
    kept, numbers = {}, [0]

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = (x, x.untyped_storage().nbytes())
        numbers.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        outputs = run(function, inputs, chunk=8)
    addresses = {x.untyped_storage().data_ptr() for x in inputs.values()}
    assert outputs[0].requires_grad
    return sum(n for _, n in kept.values()), max(numbers), set(kept) <= addresses


@pytest.mark.parametrize("forms", [CROSS, CAUSAL], ids=["cross", "causal"])
def test_recompute_saves_its_inputs_and_nothing_else(forms):
    B, H, K, R, V = MANY
    parameters = 8 * H * K * (2 * R + 1)
    for T in (16, 32, 64, 100):
        total, largest, inputs_only = saved(forms["recompute"], T)
        assert inputs_only
        assert total == 8 * T * B * H * (2 * R + V) + parameters
        assert largest < B * H * T * K
        total, largest, inputs_only = saved(forms["eager"], T)  # so that the test can tell
        assert largest >= B * H * T * K
        assert not inputs_only


class Largest(TorchDispatchMode):
    """Notes the most numbers that any intermediate tensor has."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.numbers = max(self.numbers, x.numel())
        return result


@pytest.mark.parametrize("causal", [False, True])
def test_recompute_never_forms_all_responsibilities(causal):
    """Neither forward nor backward makes a tensor that grows with N K; the eager form does."""
    B, H, K, R, V = MANY
    function = (CAUSAL if causal else CROSS)["recompute"]
    largest = {}
    for T in (64, 128):
        for form in (function, gma.cross):
            inputs = draw(T, sizes=MANY)
            with Largest() as mode:
                outputs = run(form, inputs, chunk=8)
                gradients(outputs, inputs, cotangents_of(outputs))
            largest[T, form] = mode.numbers
    assert largest[128, function] == 128 * B * H * max(R, V)
    assert largest[128, gma.cross] >= 128 * B * H * K * R


# --- messages --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": (B, 5, H, R)}, r"k has shape \(2, 5, 3, 4\): axis T is 5, but q has T=6"),
        ({"mu": (1, K, R)}, r"mu has shape \(1, 5, 4\): axis H is 1, but q has H=3"),
        ({"omega": (K, R)}, r"omega has shape \(5, 4\); expected axes \(H, K, R\)"),
        ({"Z0": (B, H, K, 1)}, r"Z0 has shape \(2, 3, 5, 1\); expected axes \(B, H, K\)"),
        ({"S0": (B, H, K, R)}, r"S0 has shape \(2, 3, 5, 4\): axis V is 4, but v has V=6"),
    ],
)
@pytest.mark.parametrize("name", CAUSAL)
def test_shapes_that_contradict_each_other(name, changes, message):
    inputs = draw(6, state=True) | {n: torch.zeros(shape) for n, shape in changes.items()}
    with pytest.raises(ValueError, match=message):
        run(CAUSAL[name], inputs)


@pytest.mark.parametrize("function", [f for forms in (CROSS, CAUSAL) for n, f in forms.items() if n != "eager"])
def test_chunk_must_be_positive(function):
    with pytest.raises(ValueError, match="chunk is 0; it must be at least 1"):
        run(function, draw(6), chunk=0)


# --- the layer -------------------------------------------------------------------------------------------------------
D = 12


def layer(**options):
    torch.manual_seed(0)
    made = GaussianMixtureAttention(D, H, K, v_min=0.01, eps=1e-3, chunk=4, **options).double()
    with torch.no_grad():  # a prior and variances that differ, so that slips show
        made.omega.normal_(), made.alpha.normal_()
    return made


def tokens(*shape):
    return torch.randn(*shape, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def quarters(*shape, seed):
    """Multiples of 1/4 in [-1, 1]: their products and sums are exact, so projections round nowhere."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).double() / 4


@pytest.mark.parametrize("implementation", CAUSAL)
@pytest.mark.parametrize("mixture", ["per_head", "shared"])
@pytest.mark.parametrize("mode", ["causal", "bidirectional", "cross"])
def test_layer_and_its_gradients_agree_with_the_reference(mode, mixture, implementation):
    made = layer(causal=mode == "causal", mixture=mixture, implementation=implementation)
    with torch.no_grad():
        for i, W in enumerate((made.W_Q, made.W_K, made.W_V, made.W_O)):
            W.weight.copy_(quarters(D, D, seed=i))
    X = quarters(B, 9, D, seed=4).requires_grad_()
    Y = quarters(B, 5, D, seed=5).requires_grad_() if mode == "cross" else None
    G = quarters(B, 9, D, seed=6)
    y, _ = made(X, Y)
    y.backward(G)

    # weights (H, M, R) of the heads, W_O (H, V, M)
    weights = {
        n: getattr(made, n).weight.detach().numpy().reshape(H, D // H, D).swapaxes(1, 2) for n in ("W_Q", "W_K", "W_V")
    }
    W_O = made.W_O.weight.detach().numpy().T
    parameters = {n: getattr(made, n).detach().numpy() for n in ("mu", "omega", "alpha")}
    options = {"causal": mode == "causal", "mixture": mixture} | {"eps": made.eps, "v_min": made.v_min}
    want: dict[str, list] = {}
    above: dict[str, list] = {}
    u, eta = 2 * UNIT[torch.float64], 0.0
    for b in range(B):
        x, c, g = X[b].detach().numpy(), (X if Y is None else Y)[b].detach().numpy(), G[b].numpy()
        inputs = weights | parameters | {"W_O": W_O} | options
        inputs |= {} if Y is None else {"Y": c}
        out = multi_head(x, **inputs)
        found = multi_head_vjp({"O": g}, x, **inputs) | {"y": out}
        m = {n: np.zeros_like(a) for n, a in found.items()}
        for h in range(H):
            W = {n: np.abs(w[h]) for n, w in weights.items()} | {"W_O": W_O[h * D // H : (h + 1) * D // H]}
            own = parameters if mixture == "shared" else {n: p[h] for n, p in parameters.items()}
            a = {"q": x @ weights["W_Q"][h], "k": c @ weights["W_K"][h], "v": c @ weights["W_V"][h]} | own
            eta = max(eta, *(gamma_error(a[n], *own.values(), made.v_min, u) for n in ("q", "k")))
            (O, _, _), slopes = majorants(a, {"O": g @ W["W_O"].T}, mode == "causal", made.eps, made.v_min)
            m["y"] += O @ np.abs(W["W_O"])
            m["W_O"][h * D // H : (h + 1) * D // H] = O.T @ np.abs(g)
            for n, source, target in (
                ("q", x, "X"),
                ("k", c, "X" if Y is None else "Y"),
                ("v", c, "X" if Y is None else "Y"),
            ):
                m[f"W_{n.upper()}"][h] = np.abs(source).T @ slopes[n]
                m[target] += slopes[n] @ W[f"W_{n.upper()}"].T
            for n in parameters:
                m[n][... if mixture == "shared" else h] += slopes[n]
        for n in found:
            want.setdefault(n, []).append(found[n])
            above.setdefault(n, []).append(m[n])
    # nine responsibilities as factors, no index summed over more than four times, as in `check`
    roundings = 9 * eta + 4 * (9 + 5 + K + D + H + 20) * u
    got = {"y": y, "X": X.grad, "W_O": made.W_O.weight.grad.T} | ({} if Y is None else {"Y": Y.grad})
    got |= {n: getattr(made, n).grad for n in parameters}
    got |= {n: getattr(made, n).weight.grad.reshape(H, D // H, D).transpose(1, 2) for n in weights}
    assert set(got) == set(want)
    for n, value in got.items():
        combine = np.stack if n in ("y", "X", "Y") else sum
        close(value, combine(want[n]), combine(above[n]), roundings, torch.float64)


@pytest.mark.parametrize("implementation", CAUSAL)
def test_decoding_steps_equal_the_whole(implementation):
    """Prefill of 0, 1, 4 or 7 tokens, then one token at a time, against the reference for all of them at once."""
    made = layer(causal=True, implementation=implementation)
    x = tokens(B, 7)
    inputs = {n: W(x).reshape(B, 7, H, D // H) for n, W in (("q", made.W_Q), ("k", made.W_K), ("v", made.W_V))}
    inputs |= {n: getattr(made, n) for n in ("mu", "omega", "alpha")}
    captured = []
    made.W_O.register_forward_pre_hook(lambda _, args: captured.append(args[0]))
    for start in (0, 1, 4, 7):
        captured.clear()
        y, state = made(x[:, :start])
        for t in range(start, 7):
            y, state = made.step(x[:, t], state)
            assert y.shape == (B, D)
        outputs = (torch.cat(captured, dim=1).reshape(B, 7, H, D // H), state.S, state.Z)
        check(None, inputs, outputs, [None] * 3, None, causal=True)


@pytest.mark.parametrize("mixture", ["per_head", "shared"])
def test_layer_parameters_are_those_of_the_papers_tables(mixture):
    mixtures = H if mixture == "per_head" else 1
    count = sum(p.numel() for p in layer(mixture=mixture).parameters())
    assert count == 4 * D**2 + mixtures * K * (2 * D // H + 1)


@pytest.mark.parametrize("mixture", ["per_head", "shared"])
@pytest.mark.parametrize("implementation", CAUSAL)
def test_every_parameter_of_the_layer_learns(implementation, mixture):
    made = layer(causal=True, implementation=implementation, mixture=mixture)
    y, _ = made(tokens(B, 9))
    y.square().sum().backward()
    assert all(torch.count_nonzero(p.grad) == p.numel() for p in made.parameters())


def test_layer_starts_with_unit_variances_and_a_uniform_prior():
    made = GaussianMixtureAttention(D, H, K).double()
    deviation = torch.nn.functional.softplus(made.omega) - 1
    assert torch.max(torch.abs(deviation)) <= 4 * UNIT[torch.float32]  # omega is stored in float32
    assert torch.count_nonzero(made.alpha) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 5}, "d_model is 12, which 5 heads do not divide"),
        ({"components": 0}, "components is 0; it must be at least 1"),
        ({"chunk": -1}, "chunk is -1; it must be at least 1"),
        ({"eps": -1e-6}, "eps is -1e-06; it must be finite and not negative"),
        ({"v_min": math.nan}, "v_min is nan; it must be finite and not negative"),
        ({"mixture": "global"}, "mixture is 'global'; it must be one of per_head, shared"),
        ({"implementation": "fast"}, "implementation is 'fast'; it must be one of eager, chunkwise, recompute"),
    ],
)
def test_layer_refuses_options(options, message):
    with pytest.raises(ValueError, match=message):
        GaussianMixtureAttention(**({"d_model": D, "heads": H, "components": K} | options))


def test_layer_refuses_arguments():
    made, causal = layer(), layer(causal=True)
    x = tokens(B, 9)
    state = State(torch.zeros(B, H, K, D // H), torch.zeros(B, H, K))
    for call, message in (
        (lambda: made(x[0]), r"x has shape \(9, 12\); expected \(B, tokens, 12\)"),
        (lambda: made(x, x[:1]), r"context has shape \(1, 9, 12\); expected \(2, tokens, 12\)"),
        (lambda: causal(x, x), "context was given to a causal layer"),
        (lambda: made(x, state=state), "state was given to a layer with causal=False"),
        (lambda: made.step(x[:, 0]), "step needs a causal layer"),
        (lambda: causal.step(x), r"x has shape \(2, 9, 12\); step expects \(B, 12\)"),
        (lambda: causal(x, state=State(state.S[:1], state.Z)), r"S0 has shape \(1, 3, 5, 4\): axis B is 1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
