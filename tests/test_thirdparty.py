"""Third-party implementations against the reference in float64: outputs, states and gradients.

Bounds are derived here, apart from the gate's. Every result of retention is a sum of terms +-q k v gamma^n and the
like. A term meets so many roundings at most that the error is N u / (1 - N u) times the sum of the terms' absolute
values, which is the same result for absolute values of the inputs (Higham, Accuracy and Stability, lemma 3.1).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
import pytest

if find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch

from mixproof.reference import retention, softmax_attention
from mixproof.verify.declare import ATTRIBUTE
from mixproof.verify.subjects.thirdparty import fla, torch_sdpa
from mixproof.verify.subjects.triton import interpreter

WHY_NOT = "fla is not installed" if find_spec("fla") is None else interpreter.unavailable()
needs_fla = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
DEVICE = "cpu" if interpreter.interpreting() else "cuda"

U = 2.0**-24
UNIT = {"float64": 2.0**-53, "float32": U, "bfloat16": 2.0**-8, "float16": 2.0**-11}
FORMS = {
    "chunk": fla.chunk,
    "fused_chunk": fla.fused_chunk,
    "fused_recurrent": fla.fused_recurrent,
    "parallel": fla.parallel,
}
# No token, one, and what lies at the edges of a form's blocks; the recurrent form has none. The gate tries more.
LENGTHS = {
    "chunk": (0, 1, 63, 64, 65),
    "fused_chunk": (0, 1, 16, 17, 64, 65),
    "fused_recurrent": (0, 1, 33),
    "parallel": (0, 1, 17, 100),
}
Arrays = dict[str, np.ndarray]
Tensors = dict[str, torch.Tensor]


def tensors(seed: int, dtype: str, **shapes: tuple[int, ...]) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        n: torch.randn(s, generator=generator, dtype=torch.float64).to(getattr(torch, dtype)) for n, s in shapes.items()
    }


def run(function: Callable, inputs: Tensors, cotangents: Tensors, device: str = "cpu", **options) -> Arrays:
    """Outputs by name, and gradients by "d" and name, as float64."""
    leaves = {n: x.detach().clone().to(device).requires_grad_() for n, x in inputs.items()}
    outputs = function(**leaves, **options)
    outputs = dict(zip(cotangents, outputs if isinstance(outputs, tuple) else (outputs,), strict=True))
    upstream = tuple(c.to(device) for c in cotangents.values())
    grads = torch.autograd.grad(tuple(outputs.values()), tuple(leaves.values()), upstream)
    found = outputs | {f"d{n}": g for n, g in zip(leaves, grads, strict=True)}
    return {n: x.detach().cpu().double().numpy() for n, x in found.items()}


def exceeds(got: Arrays, want: Arrays, bound: Arrays) -> dict[str, float]:
    """error / bound, at the worst element, of the results that are out of bounds."""
    worst = {}
    for name, x in got.items():
        assert x.shape == want[name].shape
        ok = np.abs(x - want[name]) <= bound[name]  # nan is not
        if not ok.all():
            worst[name] = float(np.max(np.abs(x - want[name]) / bound[name]))
    return worst


# ---------------------------------------------------------------------------------------------------------- retention


def retention64(x: Arrays, gamma: np.ndarray, scale: float) -> Arrays:
    """Recurrence and gradients, for layout (B, T, H, D); cotangents are the inputs dO and dS."""
    B, _, H, _ = x["q"].shape
    found: dict[str, list] = {}
    for b in range(B):
        for h in range(H):
            head = [x[n][b, :, h] for n in "qkv"] + [gamma[h], scale, x["S0"][b, h]]
            O, S = retention.recurrent(*head)
            grads = retention.vjp({"O": x["dO"][b, :, h], "S": x["dS"][b, h]}, *head)
            for name, y in {"O": O, "S": S, **{f"d{n}": grads[n] for n in ("q", "k", "v", "S0")}}.items():
                found.setdefault(name, []).append(y)
    stacked = {n: np.stack(y).reshape(B, H, *y[0].shape) for n, y in found.items()}
    return {n: y if n in ("S", "dS0") else y.swapaxes(1, 2) for n, y in stacked.items()}


def retention_bound(x: Arrays, want: Arrays, gamma: np.ndarray, scale: float, dtype: str) -> Arrays:
    """K + V + 2 T additions and products, within chunks and across; for each token that a term decays over, one
    product and exp, 3 ulp of NumPy's or, in [1/2, 1), 3 u (log gamma and n log2 gamma are below 1/20 a token, so that
    their roundings add less than one); 16 for what remains, once a chunk or a call.

    Half precision: a term passes four casts (scaled q or weights, decayed v, stored state, cotangent) and the store,
    where float16 may lose 2^-25 outright of a factor whose partners are at most X^2, in a sum of T or of K or V."""
    T, K, V = *x["q"].shape[1::2], x["v"].shape[-1]
    size = retention64({n: np.abs(y) for n, y in x.items()}, gamma, abs(scale))
    N = K + V + 2 * T + 5 * T + 16
    error = {n: N * U / (1 - N * U) * m for n, m in size.items()}
    if dtype == "float32":
        return error
    X = max(np.max(np.abs(y)) for y in x.values())
    lost = 4 * 2.0**-25 * X**2 * (T + K + V) if dtype == "float16" else 0.0
    cast = 4 * UNIT[dtype]
    store = {n: UNIT[dtype] * (1 + cast) if n not in ("S", "dS0") else 0.0 for n in size}
    return {n: e + cast * (1 + cast) * size[n] + lost + store[n] * np.abs(want[n]) for n, e in error.items()}


def retention_problem(T: int, K: int, V: int, dtype: str, state: bool, B: int = 1, H: int = 2):
    tokens = tensors(T, dtype, q=(B, T, H, K), k=(B, T, H, K), v=(B, T, H, V), dO=(B, T, H, V))
    states = tensors(T + 1, "float32", S0=(B, H, K, V), dS=(B, H, K, V))
    x = {n: y if n in tokens or state else 0 * y for n, y in (tokens | states).items()}
    arrays = {n: y.double().numpy() for n, y in x.items()}
    return x, arrays, fla.gamma({"H": H}), 0.37


def check_retention(
    form: str, T: int, K: int, V: int, dtype: str = "float32", B: int = 1, H: int = 2
) -> dict[str, float]:
    stateful = form != "parallel"
    x, arrays, gamma, scale = retention_problem(T, K, V, dtype, stateful, B, H)
    inputs = {n: x[n] for n in ("q", "k", "v", *(["S0"] if stateful else []))}
    cotangents = {"O": x["dO"]} | ({"S": x["dS"]} if stateful else {})
    got = run(FORMS[form], inputs, cotangents, DEVICE, scale=scale)
    want = retention64(arrays, gamma, scale)
    return exceeds(got, want, retention_bound(arrays, want, gamma, scale, dtype))


@needs_fla
@pytest.mark.parametrize(("form", "T"), [(form, T) for form in FORMS for T in LENGTHS[form]])
def test_retention(form: str, T: int) -> None:
    assert check_retention(form, T, 20, 12) == {}


@needs_fla
@pytest.mark.parametrize("form", ["chunk", "fused_chunk", "parallel"])
def test_retention_over_more_tiles(form: str) -> None:
    """Several tiles of features; more than one chunk of 128, the parallel form's, in two sequences of one head."""
    assert check_retention(form, 131, 33, 40, B=2, H=1) == {}


@needs_fla
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("form", FORMS)
def test_retention_in_half_precision(form: str, dtype: str) -> None:
    if dtype == "bfloat16" and not interpreter.bf16_is_right():
        pytest.skip("the interpreter's bfloat16 is wrong")
    assert check_retention(form, LENGTHS[form][-1], 20, 12, dtype) == {}


@needs_fla
@pytest.mark.parametrize("form", ["chunk", "fused_chunk", "fused_recurrent"])
def test_retention_without_a_state_starts_from_zero(form: str) -> None:
    x, *_, scale = retention_problem(20, 5, 3, "float32", True)
    q, k, v = (x[n].to(DEVICE) for n in "qkv")
    without = FORMS[form](q, k, v, scale=scale)
    zero = FORMS[form](q, k, v, scale=scale, S0=torch.zeros_like(x["S0"]).to(DEVICE))
    assert all(torch.equal(a, b) for a, b in zip(without, zero, strict=True))


@needs_fla
def test_retention_of_transposed_inputs() -> None:
    x, *_ = retention_problem(20, 5, 3, "float32", True)
    inputs = {n: x[n].to(DEVICE) for n in ("q", "k", "v", "S0")}
    strided = {n: y.transpose(1, 2).contiguous().transpose(1, 2) for n, y in inputs.items()}
    assert all(torch.equal(a, b) for a, b in zip(fla.chunk(**inputs), fla.chunk(**strided), strict=True))


def test_gamma_is_the_number_that_fla_takes_the_logarithm_of() -> None:
    H = 30
    theirs = 1 - 2.0 ** (-5.0 - torch.arange(H, dtype=torch.float))
    assert np.array_equal(fla.gamma({"H": H}), theirs.double().numpy())


@pytest.mark.parametrize("wrong", ["scale", "decay", "state", "last token"])
def test_retention_bound_is_not_vacuous(wrong: str) -> None:
    """A scale off by 2^-12, a decay by 2^-14, a state by 2^-12, and a forgotten token are seen in float32."""
    _, x, gamma, scale = retention_problem(65, 20, 12, "float32", True)
    want = retention64(x, gamma, scale)
    bound = retention_bound(x, want, gamma, scale, "float32")
    changed = dict(x)
    if wrong == "state":
        changed["S0"] = x["S0"] * (1 + 2.0**-12)
    if wrong == "last token":
        changed["v"] = np.where(np.arange(65)[None, :, None, None] == 64, 0, x["v"])
    off = {"scale": scale * (1 + 2.0**-12)}.get(wrong, scale)
    got = retention64(changed, gamma * (1 + 2.0**-14) if wrong == "decay" else gamma, off)
    assert exceeds(want, want, bound) == {}
    assert "O" in exceeds(got, want, bound)


# ---------------------------------------------------------------------------------------------------- softmax attention


def attention64(x: Arrays, scale: float, causal: bool) -> Arrays:
    """For layout (B, H, T, D)."""
    O = np.stack([[softmax_attention.parallel(*h, scale, causal) for h in zip(*b, strict=True)] for b in heads(x)])
    grads = [
        [softmax_attention.vjp({"O": dO}, *h, scale, causal) for *h, dO in zip(*b, c, strict=True)]
        for b, c in zip(heads(x), x["dO"], strict=True)
    ]
    return {"O": O} | {f"d{n}": np.stack([[g[n] for g in row] for row in grads]) for n in "qkv"}


def heads(x: Arrays):
    return zip(x["q"], x["k"], x["v"], strict=True)


def attention_bound(x: Arrays, want: Arrays, scale: float, causal: bool, dtype: str, rounds_weights: bool) -> Arrays:
    """First-order errors, with a factor 1.01 for the rest (all relative errors are below 2^-7).

    A score is off by D + 6 roundings (the scale may be split between q and k); a weight by that of its score, that of
    exp (2 ulp = 4 u, its argument 3 u |S - max|), of the stored log-sum-exp in the backward pass (2 |lse| + 2 |S| + 4),
    and, through the sum, by the mean of the others. half = u of the input dtype where weights are rounded to it."""
    u = UNIT["float64" if dtype == "float64" else "float32"]
    store, half = (0 if dtype in ("float32", "float64") else UNIT[dtype]), (UNIT[dtype] if rounds_weights else 0)
    q, k, v, dO = (x[n] for n in ("q", "k", "v", "dO"))
    (T, D), (S, V) = q.shape[-2:], v.shape[-2:]
    keep = np.tril(np.ones((T, S), bool)) if causal else np.ones((T, S), bool)
    t = lambda y: y.swapaxes(-1, -2)  # noqa: E731
    scores = np.where(keep, scale * (q @ t(k)), -np.inf)
    lse = np.log(np.sum(np.exp(scores), -1, keepdims=True))
    P, finite = np.exp(scores - lse), np.where(keep, scores, 0)
    top = np.max(scores, -1, keepdims=True)
    r = (D + 6) * u * abs(scale) * (np.abs(q) @ t(np.abs(k)))
    r = r + u * (8 + 3 * np.abs(finite - top) + 3 * np.abs(finite) + 2 * np.abs(lse)) + half
    assert np.max(r) < 2.0**-6
    eP = P * (r + np.sum(P * r, -1, keepdims=True) + (S + 4) * u)
    eO = eP @ np.abs(v) + (S + 4) * u * (P @ np.abs(v)) + store * np.abs(want["O"])
    dP, size = dO @ t(v), np.abs(dO) @ t(np.abs(v))
    edP = (V + 2) * u * size
    delta = np.sum(dO * want["O"], -1, keepdims=True)
    either = np.maximum(np.sum(np.abs(dO) * eO, -1), np.sum(eP * np.abs(dP) + P * edP, -1))[..., None]
    edelta = either + (V + S + 4) * u * np.sum(P * size, -1, keepdims=True)
    dS = P * (dP - delta)
    edS = eP * np.abs(dP - delta) + P * (edP + edelta + 2 * u * (np.abs(dP) + np.abs(delta))) + half * np.abs(dS)
    left, right = abs(scale) * np.abs(dS), abs(scale) * edS
    bound = {
        "O": eO,
        "dq": right @ np.abs(k) + (S + 8) * u * (left @ np.abs(k)),
        "dk": t(right) @ np.abs(q) + (T + 8) * u * (t(left) @ np.abs(q)),
        "dv": t(eP) @ np.abs(dO) + (T + 4) * u * (t(P) @ np.abs(dO)),
    }
    lost = 2.0**-24 * (T + S) * max(np.max(np.abs(y)) for y in x.values()) ** 2 if dtype == "float16" else 0.0
    return {n: 1.01 * (e + store * np.abs(want[n])) + lost for n, e in bound.items()}


def attention_problem(T: int, S: int, D: int, V: int, dtype: str):
    x = tensors(T + S, dtype, q=(2, 2, T, D), k=(2, 2, S, D), v=(2, 2, S, V), dO=(2, 2, T, V))
    return x, {n: y.double().numpy() for n, y in x.items()}


BACKENDS = {"math": torch_sdpa.math, "flash": torch_sdpa.flash}
SHAPES = [(1, 1, 1, 1), (17, 17, 20, 12), (65, 65, 5, 20), (70, 33, 16, 16), (2, 600, 3, 3)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", list(UNIT))
@pytest.mark.parametrize("backend", BACKENDS)
def test_sdpa(backend: str, dtype: str, shape: tuple[int, ...], causal: bool) -> None:
    if causal and shape[0] != shape[1]:
        with pytest.raises(ValueError, match="as many queries as keys, not"):
            BACKENDS[backend](
                *(tensors(0, dtype, x=(1, 1, n, 2))["x"] for n in (shape[0], shape[1], shape[1])), causal=True
            )
        return
    x, arrays = attention_problem(*shape, dtype)
    scale = 0.7
    got = run(BACKENDS[backend], {n: x[n] for n in "qkv"}, {"O": x["dO"]}, scale=scale, causal=causal)
    want = attention64(arrays, scale, causal)
    bound = attention_bound(arrays, want, scale, causal, dtype, backend == "flash" and dtype in ("bfloat16", "float16"))
    assert exceeds(got, want, bound) == {}


@pytest.mark.parametrize("backend", BACKENDS)
def test_sdpa_scales_by_the_inverse_root_of_the_head_dimension(backend: str) -> None:
    x, _ = attention_problem(9, 9, 4, 7, "float32")
    q, k, v = x["q"], x["k"], x["v"]
    assert torch.equal(BACKENDS[backend](q, k, v), BACKENDS[backend](q, k, v, scale=0.5))


@pytest.mark.parametrize("V", [4, 7])
@pytest.mark.parametrize("backend", BACKENDS)
def test_sdpa_of_transposed_inputs(backend: str, V: int) -> None:
    x, arrays = attention_problem(9, 9, 4, V, "float32")
    strided = [x[n].mT.contiguous().mT for n in "qkv"]
    got = {"O": BACKENDS[backend](*strided, scale=0.7).double().numpy()}
    want = attention64(arrays, 0.7, False)
    assert exceeds(got, want, attention_bound(arrays, want, 0.7, False, "float32", False)) == {}


@pytest.mark.parametrize("backend", BACKENDS)
def test_sdpa_without_keys_or_queries(backend: str) -> None:
    empty = BACKENDS[backend](torch.ones(1, 2, 3, 4), torch.ones(1, 2, 0, 4), torch.ones(1, 2, 0, 5))
    assert torch.equal(empty, torch.zeros(1, 2, 3, 5))
    assert BACKENDS[backend](torch.ones(1, 2, 0, 4), torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 5)).shape == (
        1,
        2,
        0,
        5,
    )


def test_attention_bound_is_not_vacuous() -> None:
    """A scale off by 2^-12 and a dropped key are seen in float32."""
    _, x = attention_problem(17, 17, 20, 12, "float32")
    want = attention64(x, 0.7, False)
    bound = attention_bound(x, want, 0.7, False, "float32", False)
    assert set(exceeds(attention64(x, 0.7 * (1 + 2.0**-12), False), want, bound)) == set(want)
    shorter = {n: y[:, :, :16] if n in ("k", "v") else y for n, y in x.items()}
    assert "O" in exceeds({"O": attention64(shorter, 0.7, False)["O"]}, want, bound)


# --------------------------------------------------------------------------------------------------------- declarations


def test_declarations() -> None:
    found = {d.name: d for f in (*FORMS.values(), *BACKENDS.values()) for d in getattr(f, ATTRIBUTE)}
    retentions = {n: d for n, d in found.items() if n.startswith("fla.")}
    assert len(retentions) == 7
    assert len(found) == 9
    assert {d.operator for d in retentions.values()} == {"retention"}
    assert all({"triton", "fla"} <= set(d.requires) and d.slow and "gamma" in d.fixed for d in retentions.values())
    assert {t for d in retentions.values() for t in d.dtypes} == {"float32", "bfloat16", "float16"}
    assert found["torch.sdpa_math"].arithmetic("bfloat16").dot == "float32"
    assert found["torch.sdpa_flash"].arithmetic("bfloat16").dot == "bfloat16"
