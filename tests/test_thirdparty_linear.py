"""Kernels of flash-linear-attention for linear attention with and without decays, against the reference in float64:
outputs, states and gradients, several sequences and heads at once. The gate judges four of them, by its own bounds.

The bounds here are derived as in test_thirdparty.py: a result is a sum of products of inputs and decays, of which each
term meets at most N roundings, so it is off by N u / (1 - N u) times the same result for absolute values.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

if find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch

from mixproof.reference import operator as find_operator
from mixproof.verify import oracle
from mixproof.verify.declare import ATTRIBUTE
from mixproof.verify.laws import law
from mixproof.verify.subject import Subject
from mixproof.verify.subjects.thirdparty import fla_linear
from mixproof.verify.subjects.thirdparty.fla import ops
from mixproof.verify.subjects.triton import interpreter

WHY_NOT = "fla is not installed" if find_spec("fla") is None else interpreter.unavailable()
if WHY_NOT is None and not interpreter.interpreting():
    WHY_NOT = "the bounds are those of float32 products; compiled kernels round their operands to TF32"
needs_fla = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

U = 2.0**-24
B, H, K, V = 2, 2, 5, 3
SCALE = 0.37
STATES = ("S0", "x0", "z0", "S", "x", "z")
Arrays = dict[str, np.ndarray]


def normal(seed: int, *shape: int) -> np.ndarray:
    """Numbers that float32 holds."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32).astype(np.float64)


def problem(T: int, **gates: np.ndarray) -> tuple[Arrays, Arrays]:
    """Inputs and cotangents in the canonical layout (B, H, T, ...)."""
    x = {"q": normal(1, B, H, T, K), "k": normal(2, B, H, T, K), "v": normal(3, B, H, T, V)}
    return x | gates | {"S0": normal(4, B, H, K, V)}, {"O": normal(5, B, H, T, V), "S": normal(6, B, H, K, V)}


def gate(seed: int, T: int, *rest: int) -> np.ndarray:
    """Log-decays; some tokens forget nothing."""
    g = -0.1 * np.abs(normal(seed, B, H, T, *rest))
    return np.where(np.arange(T)[:, None] % 5 == 0, 0, g).astype(np.float32) if rest else g.astype(np.float32)


def swapped(name: str, x: Any) -> Any:
    """Between (B, H, T, ...) and (B, T, H, ...); states stay."""
    return x if name in STATES else x.swapaxes(1, 2)


def theirs(function: Callable[..., Any], x: Arrays, upstream: Arrays, constant: tuple[str, ...] = ()) -> Arrays:
    """Outputs by name and gradients by "d" and name."""
    leaves = {
        n: torch.tensor(swapped(n, y), dtype=torch.float32).requires_grad_(n not in constant) for n, y in x.items()
    }
    outputs = dict(zip(upstream, function(**leaves), strict=True))
    learned = {n: y for n, y in leaves.items() if n not in constant}
    cotangents = [torch.tensor(swapped(n, d), dtype=torch.float32) for n, d in upstream.items()]
    grads = torch.autograd.grad(tuple(outputs.values()), tuple(learned.values()), cotangents)
    found = {n: swapped(n, y) for n, y in outputs.items()}
    found |= {f"d{n}": swapped(n, y) for n, y in zip(learned, grads, strict=True)}
    return {n: y.detach().cpu().double().numpy() for n, y in found.items()}


def ours(name: str, x: Arrays, upstream: Arrays, **fixed: Any) -> Arrays:
    """The recurrence of the operator and its gradients in float64."""
    operator = find_operator(name)
    inputs = x | fixed
    outputs = oracle.plain_forward(operator, inputs, operator.form("recurrent").function)
    outputs = dict(zip((y.name for y in operator.outputs), outputs, strict=True))
    grads = oracle.plain_backward(operator, inputs, {n: upstream.get(n, 0 * y) for n, y in outputs.items()})
    return outputs | {f"d{n}": y for n, y in grads.items()}


def sizes(name: str, x: Arrays, upstream: Arrays, **fixed: Any) -> Arrays:
    """The same for absolute values. The gradient of a gate is summed over what all tokens read and are read for."""
    positive = {n: y if n == "g" else np.abs(y) for n, y in x.items()}
    size = ours(name, positive, {n: np.abs(y) for n, y in upstream.items()}, **fixed)
    if "g" in x:
        flow = positive["q"] * size["dq"] + positive["k"] * size["dk"]
        total = np.sum(flow, axis=2) + np.sum(size["S"] * np.abs(upstream.get("S", 0)), axis=3)
        total = total if x["g"].ndim == 4 else np.sum(total, axis=2)
        size["dg"] = 0 * x["g"] + total[:, :, None]
    return size


def exceeds(got: Arrays, want: Arrays, size: Arrays, N: float) -> dict[str, float]:
    """error / bound, at the worst element, of the results that are out of bounds."""
    worst = {}
    for name, y in got.items():
        assert y.shape == want[name].shape
        error, bound = np.abs(y - want[name]), N * U / (1 - N * U) * size[name]
        if not np.all(error <= bound):  # nan is not
            worst[name] = float(np.max(error / bound))
    return worst


def roundings(T: int, per_token: float = 0.0, summed: np.ndarray | float = 0.0) -> float:
    """K + V + 2 T additions and products, `per_token` for each token that a term decays over, 16 for what remains.

    Sums of logarithms have at most min(T, 128) terms, each addition off by u times what was summed, and so are the
    products with log2(e) and the difference of two of them."""
    C = float(np.max(np.sum(np.abs(summed), axis=2))) if np.ndim(summed) else 0.0
    return K + V + 2 * T + 16 + per_token * T + 2 * (min(T, 128) + 3) * C


def options(S0: torch.Tensor, scale: float = SCALE) -> dict[str, Any]:
    return {"scale": scale, "initial_state": S0, "output_final_state": True}


# -------------------------------------------------------------------------------------------------------------- values

SIMPLE = ("fused_recurrent_simple_gla", "chunk_simple_gla", "fused_chunk_simple_gla")


def lengths(*forms: str) -> list[tuple[str, int]]:
    """Beyond a chunk for the chunked kernels, GLA's with all its blocks of 16; the recurrent ones are slow."""
    beyond = {"chunk_gla": (1, 70)}
    return [(form, T) for form in forms for T in ((1, 13) if "recurrent" in form else beyond.get(form, (1, 17, 70)))]


def simple(form: str) -> Callable[..., Any]:
    return lambda q, k, v, g, S0: getattr(ops("simple_gla"), form)(q, k, v, g, **options(S0))


@needs_fla
@pytest.mark.parametrize(("form", "T"), lengths(*SIMPLE))
def test_simple_gla(form: str, T: int) -> None:
    x, upstream = problem(T, g=gate(7, T))
    got = theirs(simple(form), x, upstream)
    name = "gated_linear_attention.simple"
    want, size = (f(name, x, upstream, scale=SCALE) for f in (ours, sizes))
    assert exceeds(got, want, size, roundings(T, 8, x["g"])) == {}


@needs_fla
@pytest.mark.parametrize("T", [1, 70, 131])
def test_parallel_simple_gla(T: int) -> None:
    """Takes and gives no state; what it returns second are attention scores."""
    x, upstream = problem(T, g=gate(7, T))
    del x["S0"], upstream["S"]
    got = theirs(lambda q, k, v, g: ops("simple_gla").parallel_simple_gla(q, k, v, g, scale=SCALE)[:1], x, upstream)
    name = "gated_linear_attention.simple"
    want, size = (f(name, x, upstream, scale=SCALE) for f in (ours, sizes))
    assert exceeds(got, want, size, roundings(T, 8, x["g"])) == {}


@needs_fla
@pytest.mark.parametrize(("form", "T"), lengths("fused_recurrent_gla", "chunk_gla"))
def test_gla(form: str, T: int) -> None:
    x, upstream = problem(T, g=gate(7, T, K))
    got = theirs(lambda q, k, v, g, S0: getattr(ops("gla"), form)(q, k, v, g, **options(S0)), x, upstream)
    want, size = (f("gated_linear_attention", x, upstream, scale=SCALE) for f in (ours, sizes))
    assert exceeds(got, want, size, roundings(T, 8, x["g"])) == {}


@needs_fla
def test_gla_with_gates_for_keys_and_values_is_elementwise_decay_of_rank_one() -> None:
    T = 12
    alpha, beta = (1 - 2.0 ** -(1.0 + np.arange(H * n).reshape(H, n) % 5) for n in (K, V))
    gates = [torch.tensor(np.log(d), dtype=torch.float32).expand(B, T, H, -1) for d in (alpha, beta)]
    x, upstream = problem(T)
    got = theirs(lambda q, k, v, S0: ops("gla").fused_recurrent_gla(q, k, v, *gates, **options(S0)), x, upstream)
    decays = alpha[:, :, None] * beta[:, None, :]
    want, size = (f("tala.elementwise", x, upstream, scale=SCALE, a=decays) for f in (ours, sizes))
    del want["da"]
    assert exceeds(got, want, size, roundings(T, 16)) == {}


@needs_fla
@pytest.mark.parametrize("form", SIMPLE)
def test_simple_gla_with_one_gate_a_head_is_tala(form: str) -> None:
    """Eq 13: omega_h = 1 - e^-h, of which fla takes the logarithm. The decay of the first head is off by 5 u."""
    T, h = 20, np.arange(1.0, H + 1)
    g = torch.log1p(-torch.exp(-torch.tensor(h, dtype=torch.float32)))
    x, upstream = problem(T)
    got = theirs(lambda q, k, v, S0: getattr(ops("simple_gla"), form)(q, k, v, g_gamma=g, **options(S0)), x, upstream)
    want, size = (f("tala", x, upstream, scale=SCALE, h=h, G=np.ones(H)) for f in (ours, sizes))
    assert exceeds(got, want, size, roundings(T, 14, np.broadcast_to(np.log1p(-np.exp(-h))[:, None], (B, H, T)))) == {}


LINEAR = ("fused_recurrent_linear_attn", "chunk_linear_attn", "fused_chunk_linear_attn")


@needs_fla
@pytest.mark.parametrize("form", LINEAR)
def test_linear_attn_without_normaliser_is_retention_that_forgets_nothing(form: str) -> None:
    x, upstream = problem(70 if "chunk" in form else 12)
    function = getattr(ops("linear_attn"), form)
    got = theirs(lambda q, k, v, S0: function(q, k, v, normalize=False, **options(S0)), x, upstream)
    want, size = (f("retention", x, upstream, scale=SCALE, gamma=np.ones(H)) for f in (ours, sizes))
    assert exceeds(got, want, size, roundings(x["q"].shape[2])) == {}


@needs_fla
@pytest.mark.parametrize("form", LINEAR)
def test_linear_attn_adds_1e_10_to_its_normaliser(form: str) -> None:
    """The scale cancels, except against the 1e-10; tiny features make that as large as the normaliser itself.

    o = n / d with d > 0: n is off by N, d by K + 2 T + 4, and o by their sum and that of a quotient and a product."""
    T = 20
    x = {"q": 1e-5 * np.exp(normal(1, B, H, T, K)), "k": 1e-5 * np.exp(normal(2, B, H, T, K))}
    x = {n: y.astype(np.float32).astype(np.float64) for n, y in x.items()} | {"v": normal(3, B, H, T, V)}
    x |= {"S0": normal(4, B, H, K, V) * 1e-5, "z0": 1e-5 * np.exp(normal(5, B, H, K)).astype(np.float32)}
    function, got = getattr(ops("linear_attn"), form), {}
    q, k, v = (torch.tensor(swapped(n, x[n]), dtype=torch.float32) for n in "qkv")
    S0, z0 = (torch.tensor(x[n], dtype=torch.float32) for n in ("S0", "z0"))
    rest = {"scale": SCALE, "initial_state": (S0, z0[:, None]), "output_final_state": True, "normalize": True}
    got["O"], (got["S"], got["z"]) = function(q, k, v, **rest)
    got = {n: swapped(n, y.cpu().double().numpy()) for n, y in got.items()}
    got["z"] = got["z"][:, 0]
    x["S0"] = S0.cpu().double().numpy()
    form_of_record = find_operator("linear_attention").form("recurrent").function

    def evaluate(x: Arrays) -> Arrays:
        inputs = x | {"eps": 1e-10 / SCALE}
        values = oracle.plain_forward(find_operator("linear_attention"), inputs, form_of_record)
        return dict(zip(("O", "S", "z"), values, strict=True))

    want, size = evaluate(x), evaluate({n: np.abs(y) for n, y in x.items()})
    assert exceeds(got, want, size, 2 * roundings(T) + 16) == {}
    without = oracle.plain_forward(find_operator("linear_attention"), x, form_of_record)[0]
    assert np.max(np.abs(without - want["O"])) > 0.1 * np.max(np.abs(want["O"]))


@needs_fla
def test_rwkv4_is_n1_whose_bonus_is_minus_log_a() -> None:
    """Its recurrence for w = log(-log a), u = -log a and keys that are logarithms; queries are multiplied in outside.

    It rescales its sums by exp at each token, and with exponents of at most M a term meets 4 M + 8 roundings a token
    in them, as often in the normaliser. The gradients of keys and decay pass through logarithms and are left out."""
    T, D = 20, K
    a = np.array([0.5, 0.75])
    x = {"q": np.exp(normal(1, B, H, T, D)), "k": np.exp(normal(2, B, H, T, D)), "v": normal(3, B, H, T, D)}
    x |= {"x0": normal(4, B, H, D), "z0": np.exp(normal(5, B, H, D))}
    x = {n: y.astype(np.float32).astype(np.float64) for n, y in x.items()}
    upstream = {"O": normal(6, B, H, T, D), "x": normal(7, B, H, D), "z": normal(8, B, H, D)}
    log = torch.tensor(np.log(a), dtype=torch.float32).repeat_interleave(D)

    def rwkv4(q, k, v, x0, z0):
        state = torch.stack([x0.flatten(1), z0.flatten(1), 0 * z0.flatten(1)], dim=1)[:, :, None]
        flat = (y.flatten(2).contiguous() for y in (k.log(), v))
        wkv, state = ops("rwkv4").fused_recurrent_rwkv4(torch.log(-log), -log, *flat, state)
        x, z, e = state[:, :, 0].unbind(dim=1)
        return q * wkv.view_as(q), (x * e.exp()).view_as(x0), (z * e.exp()).view_as(z0)

    constant = ("k", "x0", "z0")
    got = theirs(rwkv4, x, upstream, constant)
    want, size = (f("tala.n1", x, upstream, a=a) for f in (ours, sizes))
    M = float(np.max(np.abs(np.log(x["k"])))) + T * float(np.max(np.abs(np.log(a))))
    assert exceeds(got, want, size, 2 * T * (4 * M + 8)) == {}


@pytest.mark.parametrize("wrong", ["scale", "gate", "state", "last token"])
def test_bounds_are_not_vacuous(wrong: str) -> None:
    """A scale, a gate or a state off by 2^-10, and a forgotten token, are seen in float32."""
    T = 70
    x, upstream = problem(T, g=gate(7, T))
    name, off = "gated_linear_attention.simple", 1 + 2.0**-10
    want, size = (f(name, x, upstream, scale=SCALE) for f in (ours, sizes))
    changed = dict(x)
    if wrong == "state":
        changed["S0"] = x["S0"] * off
    if wrong == "gate":
        changed["g"] = x["g"] * off
    if wrong == "last token":
        changed["v"] = np.where(np.arange(T)[:, None] == T - 1, 0, x["v"])
    got = ours(name, changed, upstream, scale=SCALE * off if wrong == "scale" else SCALE)
    assert exceeds(want, want, size, roundings(T, 8, x["g"])) == {}
    assert "O" in exceeds(got, want, size, roundings(T, 8, x["g"]))


# ---------------------------------------------------------------------------------------- what does not hold, or bites


@needs_fla
@pytest.mark.parametrize("form", SIMPLE)
def test_gate_gradient_of_tokens_after_the_loss(form: str) -> None:
    """No gradient should reach them, says the law `gradient_causality`. fused_chunk takes sums over later tokens as a
    total minus a prefix, and leaves what rounding leaves: that is why the gate does not list it."""
    x, upstream = problem(12, g=gate(7, 12))
    upstream = {"O": np.where(np.arange(12)[:, None] < 8, upstream["O"], 0), "S": 0 * upstream["S"]}
    left = np.max(np.abs(theirs(simple(form), x, upstream)["dg"][:, :, 8:]))
    if form == "fused_chunk_simple_gla":
        assert 0 < left < 1e-5
    else:
        assert left == 0


@needs_fla
def test_defaults_are_not_the_operators() -> None:
    """The scale is K^-1/2; linear_attn normalises in chunks, and does not token by token."""
    q, k, v = (torch.tensor(normal(n, 1, 9, 1, 4), dtype=torch.float32).abs() for n in range(3))
    g = torch.zeros(1, 9, 1)
    for function, rest in [(ops("simple_gla").fused_recurrent_simple_gla, (g,)), (ops("gla").fused_recurrent_gla, ())]:
        assert torch.equal(function(q, k, v, *rest)[0], function(q, k, v, *rest, scale=0.5)[0])
    for form, normalises in zip(LINEAR, (False, True, True), strict=True):
        function = getattr(ops("linear_attn"), form)
        assert torch.equal(function(q, k, v, scale=1.0)[0], function(q, k, v, scale=1.0, normalize=normalises)[0])


# --------------------------------------------------------------------------------------------------------- declarations


def declared() -> list[Subject]:
    functions = [f for f in vars(fla_linear).values() if hasattr(f, ATTRIBUTE)]
    return [Subject(d, f) for f in functions for d in getattr(f, ATTRIBUTE)]


def test_declarations() -> None:
    found = {str(s): s.declaration for s in declared()}
    assert set(found) == {
        "tala/fla.fused_recurrent_simple_gla",
        "gated_linear_attention.simple/fla.chunk_simple_gla",
        "gated_linear_attention/fla.fused_recurrent_gla",
        "linear_attention/fla.fused_chunk_linear_attn",
    }
    assert all({"triton", "fla"} <= set(d.requires) and d.slow for d in found.values())
    spans = {n: d.arithmetic("float32").span for n, d in found.items()}
    assert spans["gated_linear_attention.simple/fla.chunk_simple_gla"] == 64
    assert spans["gated_linear_attention/fla.fused_recurrent_gla"] == 1


@needs_fla
def test_a_wrong_scale_is_caught_by_the_gate() -> None:
    """The default of fla, taken for the operator's."""

    def unscaled(q, k, v, g, scale=1.0, S0=None):
        return fla_linear.recurrent(q, k, v, g, q.shape[-1] ** -0.5, S0)

    (declaration,) = getattr(fla_linear.recurrent, ATTRIBUTE)
    subject = Subject(declaration, unscaled)
    case = subject.domain().case({"B": 1, "H": 1, "T": 5, "K": 4, "V": 3})
    assert max(e.ratio for e in law("forward").check(subject, case)) > 1
