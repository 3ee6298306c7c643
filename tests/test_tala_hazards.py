"""Where the obvious formula for TALA goes wrong in floating point and the reference does not.

One test for each hazard: the obvious formula, in the narrow format that needs the mildest numbers, and then the
reference on the same input in the same format. Bounds count roundings.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from mixproof.reference import (
    feature_maps,
    gated_linear_attention,
    linear_attention,
    retention,
    tala,
    tala_decays,
    tala_normalised,
)
from mixproof.reference.primitives import decay, group_norm, segment_decays, segment_products
from mixproof.verify.arithmetic import round_to

F = np.float32
EPS = 2.0**-23
LOG_OMEGA_1 = math.log1p(-math.exp(-1))


def close(got: Any, want: Any, ulps: Any) -> None:
    """|got - want| <= ulps * eps * |want| in the precision of got, or one of its subnormal numbers."""
    got, want = np.asarray(got), np.asarray(want, dtype=np.float64)
    info = np.finfo(got.dtype)
    tolerance = ulps * float(info.eps) * np.abs(want) + float(info.smallest_subnormal)
    assert np.all(np.abs(got.astype(np.float64) - want) <= tolerance), got


def lags(T: int) -> np.ndarray:
    """n - m for 0 <= m <= n <= T."""
    n = np.arange(T + 1)
    return np.maximum(n[:, None] - n, 0)


# --- the decay -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "first"), [("bfloat16", 7), ("float16", 9), ("float32", 18)])
def test_h1_omega_rounds_to_one(dtype: str, first: int) -> None:
    """Heads from `first` on never forget: 2 of 8 and 10 of 16 in bfloat16."""
    rounded = [float(round_to(tala.omega(np.float64(h)), dtype)) for h in range(1, 25)]
    assert [h for h, omega in enumerate(rounded, 1) if omega == 1] == list(range(first, 25))


def test_h1_logarithm_of_a_rounded_omega() -> None:
    """1 - omega is off by up to half, long before omega is one: in float32 by 44 % for head 17, in bfloat16 by 58 % for
    head 6; what a token weighs 2^20 tokens later follows. The reference's own rounding: exp and log1p 4 ulp each."""

    def forgotten(h: int, dtype: str) -> float:
        return (1 - float(round_to(tala.omega(np.float64(h)), dtype))) / math.exp(-h) - 1

    assert [f"{forgotten(h, 'float32'):+.3f}" for h in (15, 16, 17, 18)] == ["-0.026", "+0.059", "+0.440", "-1.000"]
    assert f"{forgotten(6, 'bfloat16'):+.2f}" == "+0.58"
    n = 2**20
    for h in range(1, 25):
        log_omega = tala.log_omega(F(h))
        want = math.log1p(-math.exp(-h))
        close(log_omega, want, 10)
        close(np.exp(F(n) * log_omega), math.exp(n * want), 4 + 11 * n * abs(want))
    for h in (16, 17, 18):
        assert abs(float(tala.omega(F(h))) ** n / math.exp(n * math.log1p(-math.exp(-h))) - 1) > 5e-3


def test_h1_state_of_a_rounded_omega() -> None:
    """The state of 2^20 ones is off by 3.4e-3 and by 8.0e-3."""
    n, error = 2**20, {}
    for h in (16, 18):
        a = float(tala.omega(F(h)))
        state = n if a == 1 else (1 - a**n) / (1 - a)
        error[h] = state / (-math.expm1(n * math.log1p(-math.exp(-h))) * math.exp(h)) - 1
    assert [f"{x:.1e}" for x in error.values()] == ["-3.4e-03", "8.0e-03"]


def test_h2_powers_apart() -> None:
    """D_nm = omega^n omega^-m overflows at m = 194 and underflows at n = 227, for the first head in float32."""
    w = tala.omega(F(1))
    n = np.arange(1, 513)
    with np.errstate(over="ignore", invalid="ignore"):
        grown, shrunk = w ** (-n).astype(F), w ** n.astype(F)
        D = np.tril(shrunk[:, None] * grown[None, :])
    assert (n[np.isinf(grown)][0], n[shrunk == 0][0]) == (194, 227)
    broken = ~np.isfinite(D)
    assert [int(np.sum(broken[:T, :T])) for T in (193, 224, 512)] == [0, 496, 51040]
    P = segment_products(np.full(512, w))
    tiny = float(np.finfo(F).tiny)
    want = np.tril(float(w) ** lags(512).astype(float))
    assert np.all(np.abs(P - want) <= lags(512) * (EPS / 2 * want + EPS * tiny))  # a rounding a factor, or a subnormal
    one = np.ones((512, 1), F)
    for form in (tala.parallel, tala.chunkwise, tala.recurrent):
        # positive terms: omega's rounding at most 512 times, 512 additions, and the powers' own 2 ulp
        close(form(one, one, one, F(1), F(1))[0][:, 0], (1 - float(w) ** n) / (1 - float(w)), 2 * 512 + 8)


def test_h2_where_powers_overflow() -> None:
    """omega^-m is finite up to this m, head by head: in float16 no head before the sixth gets through 4096 tokens."""
    for largest, limits in (
        (np.finfo(F).max, [193, 610, 1737, 4799, 13123]),
        (np.finfo(np.float16).max, [24, 76, 217, 599, 1640, 4468]),
    ):
        got = [math.log(largest) / -math.log1p(-math.exp(-h)) for h in range(1, 1 + len(limits))]
        assert [math.floor(x) for x in got] == limits


def test_h3_exponential_before_the_mask() -> None:
    """exp(c_n - c_m) is infinite above the diagonal, and no mask of zeros takes that out again."""
    g = np.full(256, F(LOG_OMEGA_1))
    c = np.cumsum(g, dtype=F)
    with np.errstate(over="ignore", invalid="ignore"):
        E = np.exp(c[:, None] - c[None, :])
        D = E * np.tril(np.ones((256, 256), F))
    assert (np.sum(np.isinf(E)), np.sum(np.isnan(D))) == (1953, 1953)
    P = segment_decays(g, 0, 256)
    want = np.tril(np.exp(float(g[0]) * lags(256)))
    assert np.all(np.abs(P - want) <= 3 * EPS * lags(256) * want + 256 * float(np.finfo(F).smallest_subnormal))


def test_h4_differences_of_long_sums() -> None:
    """The decay of one step, as exp of a difference of sums over all tokens: 1.6e-3 off after 131072 of them."""
    g = np.full(2**17, F(LOG_OMEGA_1))
    want = math.exp(float(g[0]))
    c = np.cumsum(g, dtype=F)
    off = np.abs(np.exp(np.diff(c)).astype(float) / want - 1)
    assert [f"{np.max(off[:T]):.1e}" for T in (1024, 16384, 131072)] == ["1.1e-05", "1.8e-04", "1.6e-03"]
    P = segment_decays(g, 2**17 - 64, 2**17)
    close(np.diagonal(P[1:]), want, 2)


def test_h5_logarithm_of_a_reset() -> None:
    a = np.array([0.5, 0, 0.5], F)
    with np.errstate(divide="ignore", invalid="ignore"):
        c = np.cumsum(np.log(a))
        assert np.isnan(np.exp(c[2] - c[1]))
        assert np.isnan(np.exp(0 * np.log(a[1])))  # 0^0
    assert segment_products(a).tolist() == [[1, 0, 0, 0], [0.5, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0.5, 1]]
    assert decay(a[1], np.arange(3)).tolist() == [1, 0, 0]
    one = np.ones((3, 1), F)
    for form in tala_decays.TIME_VARYING.forms:
        assert form.function(one, one, one, a)[0].tolist() == [[1], [1], [1.5]]


def test_h5_gradient_through_the_logarithm_of_a_reset() -> None:
    """(d log a) / a is 0 / 0 at a reset. The state before it, one token, would be read there and, halved, later."""
    a, one = np.array([0.5, 0, 0.5], F), np.ones((3, 1), F)
    grads = tala_decays.TIME_VARYING.vjp({"O": one, "S": np.zeros((1, 1), F)}, one, one, one, a)
    assert grads["a"].tolist() == [0, 1.5, 1]
    with np.errstate(invalid="ignore"):
        flow = np.sum(one * grads["q"] - one * grads["k"], axis=1)
        assert np.isnan((np.cumsum(flow[::-1])[::-1] / a)[1])


# --- the feature map -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "x", "wrong"),
    [
        (F, [90, 0], [math.nan, 0]),
        (F, [45, 44], [0, 0]),
        (F, [-60, -61], [math.inf, math.inf]),
        (np.float16, [6, 5], [0, 0]),
    ],
)
def test_h6_phi_a_without_its_maximum(dtype: type, x: list[float], wrong: list[float]) -> None:
    """exp, or the sum of its squares, leaves the range; one difference of logits and 8 roundings are left."""
    row = np.array([x], dtype)
    with np.errstate(all="ignore"):
        E = np.exp(row)
        assert np.array_equal(E / np.sqrt(np.sum(E * E, axis=1, dtype=dtype)), [wrong], equal_nan=True)
    gap = abs(x[0] - x[1])
    close(feature_maps.phi_a(row), [[1 / math.hypot(1, math.exp(-gap)), 1 / math.hypot(1, math.exp(gap))]], 8 + gap)


@pytest.mark.parametrize(
    ("x", "wrong"),
    [
        ([1e-23, -1e-23], [math.inf, 0]),
        ([1e-23, 0], [math.inf, math.nan]),
        ([0, 0], [math.nan, math.nan]),
        ([1e20, -1e20], [1, 1]),  # silently: the norm is infinite
    ],
)
def test_h7_phi_b_without_scaling(x: list[float], wrong: list[float]) -> None:
    row = np.array([x], F)
    with np.errstate(all="ignore"):
        assert np.array_equal(np.exp(row / np.sqrt(np.sum(row * row, axis=1))), [wrong], equal_nan=True)
    norm = math.hypot(*x) or 1
    close(feature_maps.phi_b(row, norm_eps=1e-30), [[math.exp(y / norm) for y in x]], 8)


# --- the state -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("h", "stuck", "right"), [(4, 48, 54.6), (6, 128, 403), (8, 256, 2202)])
def test_h8_a_short_state_stops_growing(h: int, stuck: float, right: float) -> None:
    """In bfloat16 once what is added to S, 1 - (1 - omega) S, is less than half the distance to the next number.

    The reference in float32: 2 lag + 2 roundings of each term, and lag times that of omega, 2 ulp."""
    a, T = float(F(tala.omega(np.float64(h)))), 4000
    S = 0.0
    for _ in range(T):
        S = float(round_to(round_to(np.float64(a * S), "bfloat16") + 1, "bfloat16"))
    assert S == stuck
    lag, one = np.arange(T), np.ones((T, 1), F)
    weights = np.exp(math.log1p(-math.exp(-h)) * lag)
    want = np.sum(weights)
    assert float(f"{want:.{len(str(right).replace('.', ''))}g}") == right
    got = float(tala.recurrent(one, one, one, F(h), F(1))[1][0, 0])
    assert abs(got - want) <= EPS * np.sum((3 * lag + 1) * weights)


def test_h9_gradient_of_the_decay_as_a_difference_of_sums() -> None:
    """Before the first key that is not zero there is nothing to decay, so the gradient of the decay is zero: as
    da = <R, S> it is, as the sum of all that later tokens read less what they wrote it is what rounding leaves."""
    T, half, op, g = 512, 256, gated_linear_attention.SIMPLE, np.full(512, F(LOG_OMEGA_1))
    residues = []
    for seed in range(4):
        normal = np.random.default_rng(seed).standard_normal
        q, k, v, G = (normal((T, 4)).astype(F) for _ in range(4))
        R = normal((4, 4)).astype(F)
        k[:half] = 0
        d, S = op.vjp({"O": G, "S": R}, q, k, v, g), op.evaluate({"q": q, "k": k, "v": v, "g": g})["S"]
        flow = np.sum(q * d["q"] - k * d["k"], axis=1)
        residues.append((np.cumsum(flow[::-1])[::-1] + np.sum(S * R))[0])
        assert np.all(d["g"][: half + 1] == 0)
        assert np.all(d["g"][half + 1 :] != 0)
    assert np.any(np.array(residues) != 0)


# --- the normalisers -------------------------------------------------------------------------------------------------


def test_h10_group_norm_of_small_heads() -> None:
    """With eps = 1e-5 the norm of s x is s / sqrt(s^2 + eps) of that of x, for a head of unit variance: 0.97 is lost at
    s = 1e-4. A group norm therefore replaces the normaliser of (12) only without eps; n2 needs none."""
    x, eps = np.array([[-1.0, 1.0]]), 1e-5
    lost = {s: 1 - float(group_norm(s * x, eps)[0, 1] / group_norm(x, eps)[0, 1]) for s in (0.1, 0.01, 0.001, 1e-4)}
    for s, got in lost.items():
        assert abs(1 - got - s * math.sqrt((1 + eps) / (s * s + eps))) <= 16 * 2.0**-53
    assert [f"{got:.1e}" for got in lost.values()] == ["4.9e-04", "4.7e-02", "7.0e-01", "9.7e-01"]
    normal = np.random.default_rng(0).standard_normal
    q, k, v, s = np.exp(normal((6, 4))), np.exp(normal((6, 4))), normal((6, 4)), 2.0**-13
    O, small = (retention.chunkwise(q, x, v, 0.5)[0] for x in (k, s * k))
    assert np.array_equal(group_norm(O, 0.0), group_norm(small, 0.0))
    assert np.max(np.abs(group_norm(O, eps) - group_norm(small, eps))) > 0.5
    assert np.array_equal(*(tala_normalised.n2(q, x, v, 0.5)[0] for x in (k, s * k)))


def test_h11_an_absolute_number_in_the_denominator() -> None:
    """1e-10, as a library has it, next to q . z = 1e-12: features are only known up to a factor, values are not."""
    v, s = np.array([[3.0], [-5.0]]), 2.0**-20
    x = np.full((2, 1), s)
    O = linear_attention.chunkwise(x, x, v)[0]
    assert O.tolist() == [[3], [-1]]
    library = linear_attention.chunkwise(x, x, v, eps=1e-10)[0]
    close(library, O * (s * s * np.array([[1], [2]]) / (s * s * np.array([[1], [2]]) + 1e-10)), 8)
    assert np.all(np.abs(library) < 0.02 * np.abs(O))


def test_h12_products_of_gains_overflow() -> None:
    """omega G = 1.00066 for G = 1.001 in head 8: its powers leave float32 after about 133620 tokens, even where all
    that is remembered is one chunk old. The count is uncertain by the rounding of each factor and of omega G."""
    h, G, T = F(8), F(1.001), 64 * 2100
    a = tala.omega(h) * G
    with np.errstate(over="ignore", invalid="ignore"):
        c = np.multiply.accumulate(np.full(T, a))
        assert np.isnan(c[-1] / c[-2])
    growth = math.log1p(-math.exp(-8)) + math.log(1.001)
    steps = math.log(float(np.finfo(F).max)) / growth
    assert round(steps) == 133622
    assert abs(np.argmax(np.isinf(c)) - steps) <= 1 + 3 * EPS * steps / growth
    x = np.zeros((T, 1), F)
    x[-64:] = 1
    O, S = tala.chunkwise(x, x, x, h, G)
    last, alone = tala.chunkwise(x[-64:], x[-64:], x[-64:], h, G)
    assert np.array_equal(O[-64:], last)
    assert np.array_equal(S, alone)
    close(S, [[(float(a) ** 64 - 1) / (float(a) - 1)]], 200)
