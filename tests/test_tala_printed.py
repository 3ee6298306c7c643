"""What the paper prints against what it means: smallest counterexamples over the rationals, the sizes of the errors,
and which of the printed maps let a token see later ones.

`U` is the unit roundoff; bounds of rounding errors count operations to first order in U and take 1.1 for the rest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from mixproof.reference import feature_maps, retention, tala, tala_decays, tala_normalised
from mixproof.reference import tala_masks as masks
from mixproof.reference import tala_printed as printed
from mixproof.reference.primitives import group_norm, softmax
from mixproof.verify.numbers.array import Numbers
from mixproof.verify.numbers.exact import GF, RATIONALS
from mixproof.verify.numbers.objects import System
from mixproof.verify.numbers.symbolic import EXPRESSIONS

U = 2.0**-53
HALF = RATIONALS(1) / 2
SMALL = st.sampled_from([Fraction(n, d) for n in (-2, -1, 0, 1, 1, 3) for d in (1, 2)])
POSITIVE = SMALL.filter(lambda x: x > 0)
EQ16 = {
    "printed": printed.eq16_printed,
    "only zeta": printed.eq16_only_zeta,
    "only xi": printed.eq16_only_xi,
    "a^B ragged": printed.eq16_aB_ragged,
}


def ones(T: int, n: int = 1, system: System = RATIONALS) -> Numbers:
    return system(np.ones((T, n), dtype=int))


def whole(T: int, n: int, seed: int, system: System = RATIONALS) -> Numbers:
    return system(np.random.default_rng([seed, T, n]).integers(1, 10, (T, n)))


def same(x: Any, y: Any) -> bool:
    return x.shape == y.shape and bool(np.all(x == y))


def values(x: Numbers) -> list[Fraction]:
    return list(x.data.flat)


def probe(f: Callable[..., Any], T: int) -> Numbers:
    """The mask of f: with q_n = k_m = 1 and V = I, output (n, m) is the weight of source m in token n."""
    return f(ones(T), ones(T), RATIONALS(np.eye(T, dtype=int)))


# --- (16) ------------------------------------------------------------------------------------------------------------


def test_16_two_tokens() -> None:
    q, k, v = ones(2), ones(2), ones(2)
    assert values(printed.eq16_printed(q, k, v, HALF, chunk=1)[0]) == [1, 2]
    assert values(retention.recurrent(q, k, v, HALF)[0]) == [1, Fraction(3, 2)]


def test_16_needs_both_corrections() -> None:
    I = (ones(3), ones(3), ones(3), HALF)
    last = {name: values(f(*I, chunk=2)[0])[-1] for name, f in EQ16.items()}
    assert last == {"printed": 3, "only zeta": Fraction(5, 2), "only xi": 2, "a^B ragged": Fraction(7, 4)}
    assert values(retention.chunkwise(*I, chunk=2)[0])[-1] == Fraction(7, 4)


def test_16_decays_a_short_chunk_too_much() -> None:
    """The last state: a^B R is 1/4 R, and R is 3/2, or 2 where the write did not decay."""
    I = (ones(3), ones(3), ones(3), HALF)
    assert values(retention.chunkwise(*I, chunk=2)[1]) == [Fraction(7, 4)]
    last = {name: values(f(*I, chunk=2)[1])[0] for name, f in EQ16.items()}
    assert last == {
        "printed": Fraction(3, 2),
        "only zeta": Fraction(7, 4),
        "only xi": Fraction(3, 2),
        "a^B ragged": Fraction(11, 8),
    }


@given(SMALL, st.integers(1, 5), st.integers(1, 4))
def test_16_is_right_only_without_decay_or_without_a_second_chunk(a: Fraction, T: int, B: int) -> None:
    """Also with negative decays, a = -1 and B = 2 among them. Where only the state is wrong, the reader's a^r hides it
    if a = 0 or B = 1; a short last chunk makes the last state wrong, never the output."""
    x, D = RATIONALS(a), masks.geometric(RATIONALS(a), T)
    right = {name: same(probe(lambda *I, f=f: f(*I, x, chunk=B)[0], T), D) for name, f in EQ16.items()}
    single = a == 1 or T <= B
    hidden = single or a == 0 or B == 1
    assert right == {"printed": single, "only zeta": single, "only xi": hidden, "a^B ragged": True}
    I = (whole(T, 1, 0), whole(T, 1, 1), whole(T, 1, 2), x)
    R, (_, want) = printed.eq16_aB_ragged(*I, chunk=B)[1], retention.recurrent(*I)
    b = (T - 1) % B + 1  # tokens of the last chunk
    assert same(R, want) == bool(np.all((x**B - x**b) * _before(I, T - b) == 0))


def _before(I: tuple[Numbers, ...], t: int) -> Numbers:
    """The state after t tokens."""
    q, k, v, a = I
    return retention.recurrent(q[:t], k[:t], v[:t], a)[1]


@given(SMALL, st.integers(1, 3), st.integers(2, 3), st.integers(0, 99))
def test_16_error_in_closed_form(a: Fraction, B: int, chunks: int, seed: int) -> None:
    """Token r of chunk i + 1 is off by q_r (Rhat_i - a^r R_i), and Rhat_i - R_i = sum_{j<=i} a^(B(i-j))
    sum_s (1 - a^(B-s)) k_js^T v_js."""
    T, x = B * chunks, RATIONALS(a)
    q, k, v = whole(T, 2, seed), whole(T, 2, seed + 1), whole(T, 2, seed + 2)
    error = printed.eq16_printed(q, k, v, x, chunk=B)[0] - retention.parallel(q, k, v, x)[0]
    for n in range(T):
        i, r = divmod(n, B)
        R = _before((q, k, v, x), B * i)
        excess = 0 * R
        for j, s in itertools.product(range(i), range(1, B + 1)):
            t = B * j + s - 1
            excess = excess + x ** (B * (i - 1 - j)) * (1 - x ** (B - s)) * k[t][:, None] * v[t][None, :]
        assert same(error[n], q[n] @ (R + excess - x ** (r + 1) * R))


def test_16_errors_have_the_factor_one_minus_a() -> None:
    a = sympy.Symbol("a")
    I = [EXPRESSIONS(np.ones((4, 1), dtype=int))] * 3
    x = EXPRESSIONS(a)
    error = (printed.eq16_printed(*I, x, chunk=2)[0] - retention.parallel(*I, x)[0]).data[:, 0]
    assert [sympy.factor(e) for e in error[:2]] == [0, 0]
    for e, factor in zip(error[2:], (a + 2, a**2 + 2 * a + 2), strict=True):
        assert sympy.expand(e - (1 - a) * factor) == 0


STEADY = {  # relative error of the last row on ones, as the chunks go on: head -> chunks of 16, 64, 256
    1: ("5.89", "23.5", "94.2"),
    2: ("2.30", "8.66", "34.6"),
    4: ("0.401", "1.38", "4.72"),
    6: ("0.058", "0.227", "0.82"),
    8: ("0.0079", "0.032", "0.126"),
    16: ("2.6e-06", "1.1e-05", "4.3e-05"),
}


def steady_error(a: Any, B: int) -> Any:
    """Rhat = B / (1 - a^B) and R = 1 / (1 - a), so the error a token r = B makes is B (1 - a) / (1 - a^B) - a^B."""
    return B * (1 - a) / (1 - a**B) - a**B


@given(st.sampled_from([Fraction(1, 2), Fraction(-1, 3), Fraction(3, 4)]), st.integers(1, 4), st.integers(2, 4))
def test_16_error_on_ones(a: Fraction, B: int, chunks: int) -> None:
    """After i chunks Rhat_i = B (1 - a^(iB)) / (1 - a^B) and R_i = (1 - a^(iB)) / (1 - a): exactly, and in the limit
    the error is `steady_error`."""
    T, i, x = B * chunks, chunks - 1, RATIONALS(a)
    got = printed.eq16_printed(ones(T), ones(T), ones(T), x, chunk=B)[0][-1, 0]
    right = (1 - a**T) / (1 - a)
    excess = B * (1 - a ** (i * B)) / (1 - a**B) - a**B * (1 - a ** (i * B)) / (1 - a)
    assert values(got) == [right + excess]
    assert excess * (1 - a) == steady_error(a, B) * (1 - a ** (i * B))


def rounded(x: Any, like: str) -> float:
    """x to as many significant digits as are printed."""
    return float(mpmath.nstr(mpmath.mpf(x), len(like.split("e")[0].replace(".", "").lstrip("0"))))


@pytest.mark.parametrize("h", STEADY)
def test_16_steady_error(h: int) -> None:
    a = 1 - mpmath.exp(-h)
    assert [rounded(steady_error(a, B), digits) for B, digits in zip((16, 64, 256), STEADY[h], strict=True)] == [
        float(digits) for digits in STEADY[h]
    ]


@pytest.mark.parametrize(("h", "digits"), [(1, "23.5"), (4, "1.38"), (8, "0.032")])
def test_16_steady_error_is_what_the_code_runs_into(h: int, digits: str) -> None:
    """In float64, once the transient is e^-20. All terms are positive and pass through no more than T additions and
    products, so either result is within 2 T U of its exact value."""
    B, a = 64, float(tala.omega(h))
    i = math.ceil(20 * math.exp(h) / B)
    T = B * (i + 1)
    x = np.ones((T, 1))
    got, right = (f(x, x, x, a, chunk=B)[0][-1, 0] for f in (printed.eq16_printed, retention.chunkwise))
    exact = mpmath.mpf(a)
    want = steady_error(exact, B) * (1 - exact ** (i * B)) / (1 - exact**T)
    assert abs(float(got / right) - 1 - want) <= 1.1 * 4 * T * U * (1 + want)
    assert rounded(float(got / right) - 1, digits) == float(digits)


# --- (14) ------------------------------------------------------------------------------------------------------------


def test_14_with_a_free_gain_is_no_recurrence() -> None:
    omega, q = RATIONALS(1), ones(3)
    G = RATIONALS([[1, 0, 0], [1, 1, 0], [2, 1, 1]])
    assert values(printed.eq14_free_G(q, q, q, omega, G)) == [1, 2, 4]
    assert values(tala_decays.in_steps(q, q, q, masks.decays_of(G)[:, None], 1, None)[0]) == [1, 2, 3]
    assert values(printed.eq14_free_G(ones(1), ones(1), ones(1), omega, RATIONALS([[2]]))) == [2]


@given(SMALL, SMALL, st.integers(1, 4))
def test_14_with_a_constant_gain_multiplies_the_first_output(omega: Fraction, g: Fraction, T: int) -> None:
    w, x = RATIONALS(omega), ones(T)
    got = printed.eq14_const_g(x, x, x, w, RATIONALS(g))
    assert same(got[0, 0], RATIONALS(g))
    assert same(got, g * retention.recurrent(x, x, x, w)[0])
    assert same(retention.parallel(x, x, x, w * g)[0], retention.recurrent(x, x, x, w * g)[0])


@pytest.mark.parametrize(("T", "d"), [(5, 3), (3, 5), (3, 1), (1, 3)])
def test_14_to_the_letter_is_ill_shaped(T: int, d: int) -> None:
    """NumPy alone would let a single feature or a single token through, by broadcasting."""
    x = np.ones((T, d))
    with pytest.raises(ValueError, match=rf"q has shape \({T}, {d}\).*as many features as tokens, {T}"):
        printed.eq14_literal(x, x, x, np.tril(np.ones((T, T))))


def test_14_to_the_letter_takes_features_for_tokens() -> None:
    """O_cj = Q_cj sum_{m<=c} D_cm K_mc V_mj: feature c of a key is for token c alone, and lost on tokens before m."""
    T = 3
    q, k, v, D = (whole(T, T, seed) for seed in range(4))
    D = np.tril(D)
    O = printed.eq14_literal(q, k, v, D)
    for c, j in itertools.product(range(T), repeat=2):
        assert same(O[c, j], q[c, j] * np.sum(D[c] * k[:, c] * v[:, j]))
    for m, c in itertools.product(range(T), repeat=2):
        changed = k.copy()
        changed[m, c] = changed[m, c] + 1
        rows = np.flatnonzero(np.any(printed.eq14_literal(q, changed, v, D) != O, axis=1))
        assert rows.tolist() == ([c] if m <= c else [])


@given(st.integers(1, 5), st.integers(1, 3), st.integers(0, 99))
def test_14_elementwise_is_heads_of_one_channel(T: int, d: int, seed: int) -> None:
    q, k, v = (whole(T, d, seed + i) for i in range(3))
    D = np.tril(whole(T, T, seed))
    heads = [masks.mix(*(x[:, i : i + 1] for x in (q, k, v)), D) for i in range(d)]
    assert same(printed.eq14_elementwise(q, k, v, D), np.concatenate(heads, axis=1))


def test_14_elementwise_is_not_a_matrix_product() -> None:
    x, D = ones(1, 2), RATIONALS([[1]])
    assert values(printed.eq14_elementwise(x, x, x, D)) == [1, 1]
    assert values(masks.mix(x, x, x, D)) == [2, 2]


def test_a_gain_of_each_channel_is_no_mask() -> None:
    """G = (1, 0): two keys that one query scores alike, and yet only one of them is remembered."""
    q, v, a = ones(2, 2), RATIONALS([[1], [0]]), RATIONALS([[1], [0]])
    got = [
        tala_decays.in_steps(q, RATIONALS([key, [0, 0]]), v, np.stack([a, a]), 1, None)[0][1]
        for key in ([1, 0], [0, 1])
    ]
    assert [values(x) for x in got] == [[1], [0]]


# --- (12) ------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 4), SMALL, st.integers(0, 99))
def test_12_readings_agree_for_one_channel_alone(T: int, omega: Fraction, seed: int) -> None:
    q, k, v, w = whole(T, 1, seed), whole(T, 1, seed + 1), whole(T, 1, seed + 2), RATIONALS(abs(omega))
    G = whole(T, 1, seed + 3)[:, 0]
    n1, n2, n3 = (printed.eq12_per_source(q, k, v, w, G, reading) for reading in printed.READINGS)
    assert same(n1, q * n2)
    assert same(n3, q * n2)


def test_12_readings_differ_for_two_channels() -> None:
    q, k, v = whole(3, 2, 0), whole(3, 2, 1), whole(3, 2, 2)
    readings = [printed.eq12_per_source(q, k, v, HALF, ones(3)[:, 0], reading) for reading in printed.READINGS]
    assert not any(same(x, y) for x, y in itertools.combinations(readings, 2))


@given(st.integers(1, 4), POSITIVE, POSITIVE, st.integers(0, 99))
def test_12_with_one_gain_for_all_is_the_operator(T: int, omega: Fraction, g: Fraction, seed: int) -> None:
    q, k, v, w = whole(T, 2, seed), whole(T, 2, seed + 1), whole(T, 2, seed + 2), RATIONALS(omega)
    G, a = g * ones(T)[:, 0], w * g
    for reading in printed.READINGS:
        want = getattr(tala_normalised, reading.lower())(q, k, v, a)[0]
        assert same(printed.eq12_per_source(q, k, v, w, G, reading), want)


def test_12_gain_of_each_source_is_no_recurrence() -> None:
    """omega = 1/2 and G = (2, 1): the first token never decays, so no decay of the state fits both."""
    q, G = ones(3), RATIONALS([2, 1, 1])
    D = probe(lambda *I: printed.eq12_per_source(*I, HALF, G, "N3") * (masks.per_source(HALF, G) @ ones(3)), 3)
    assert same(D, RATIONALS([[1, 0, 0], [1, 1, 0], [1, HALF.data[()], 1]]))
    assert masks.semiseparable_rank(D) == 2
    assert values(printed.eq12_per_source(q, q, whole(3, 1, 0), HALF, 0 * G, "N2")) == values(whole(3, 1, 0))  # 0^0 = 1


@given(st.integers(1, 4), POSITIVE, st.integers(0, 99))
def test_12_only_n2_averages_the_values(T: int, omega: Fraction, seed: int) -> None:
    """Constant values c come back as c, but times the sum of the query's features (N3), or feature by feature (N1)."""
    q, k, w = whole(T, 2, seed), whole(T, 2, seed + 1), RATIONALS(omega)
    c, G = RATIONALS([[3, -1]]), whole(T, 1, seed + 2)[:, 0]
    v = np.repeat(c, T, axis=0)
    assert same(printed.eq12_per_source(q, k, v, w, G, "N2"), v)
    assert same(printed.eq12_per_source(q, k, v, w, G, "N1"), q * v)
    assert same(printed.eq12_per_source(q, k, v, w, G, "N3"), np.sum(q, axis=1, keepdims=True) * v)


def test_12_and_14_differ_by_a_factor_per_token_only_in_n2() -> None:
    """So a group norm of each token without eps makes N2 and (14) equal, and N1 and N3 not: their rows are no multiples
    of those of (14), by a determinant that does not vanish."""
    q, k, v = whole(4, 2, 0), whole(4, 2, 1), whole(4, 2, 2)
    G = ones(4)[:, 0]
    O = retention.parallel(q, k, v, HALF)[0]
    parallel = {}
    for reading in printed.READINGS:
        Y = printed.eq12_per_source(q, k, v, HALF, G, reading)
        parallel[reading] = bool(np.all((Y[:, 0] * O[:, 1] - Y[:, 1] * O[:, 0])[1:] == 0))
    assert parallel == {"N1": False, "N2": True, "N3": False}
    factor = np.sum((q @ k.T) * masks.geometric(HALF, 4), axis=1, keepdims=True)
    assert same(printed.eq12_per_source(q, k, v, HALF, G, "N2") * factor, O)


def test_12_has_no_value_where_signed_weights_cancel() -> None:
    for reading in printed.READINGS:
        with pytest.raises(ZeroDivisionError):
            printed.eq12_per_source(ones(2), ones(2), ones(2), RATIONALS(-1), ones(2)[:, 0], reading)
    with pytest.raises(ValueError, match="reading is 'N4'; it must be one of N1, N2, N3"):
        printed.eq12_per_source(ones(2), ones(2), ones(2), HALF, ones(2)[:, 0], "N4")


# --- (11): who sees whom ---------------------------------------------------------------------------------------------


def close(got: float, want: Any, ulps: int) -> None:
    assert abs(got - float(want)) <= ulps * U * abs(float(want)), got


def test_11_the_first_token_sees_the_second() -> None:
    """K = (1, x), q_1 = v_1 = 1: what (14) gives the first token, as printed to six digits and as a formula."""
    digits = {"b": [], "a": []}
    for x in (0.0, 1.0, 2.0):
        K, one = np.array([[1.0], [x]]), np.ones((2, 1))
        for name, phi in (("a", printed.column_phi_a), ("b", printed.column_phi_b)):
            O = retention.parallel(one, phi(K), one, 0.5)[0][0, 0]
            want = math.exp(1 / math.hypot(1, x)) if name == "b" else math.e / math.hypot(math.e, math.exp(x))
            close(O, want, 16)
            digits[name].append(f"{O:.5f}")
    assert digits == {"b": ["2.71828", "2.02811", "1.56395"], "a": ["0.93851", "0.70711", "0.34526"]}


MAPS = {
    "A per token": feature_maps.phi_a,
    "B per token": feature_maps.phi_b,
    "A column": printed.column_phi_a,
    "B column": printed.column_phi_b,
}
MIXERS = {
    "(14)": lambda q, k, v, a: retention.parallel(q, k, v, a)[0],
    "n1": lambda q, k, v, a: tala_normalised.n1(q, k, v, a)[0],
    "n2": lambda q, k, v, a: tala_normalised.n2(q, k, v, a)[0],
    "n3": lambda q, k, v, a: tala_normalised.n3(q, k, v, a)[0],
}


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("phi", MAPS)
def test_11_causality_audit(phi: str, mixer: str) -> None:
    """Another last key: per token nothing before moves, not by a bit. Over columns everything before moves, except that
    the norm of reading A divides out of n1 and n3, where only rounding is left.

    Its bound: a key's feature is one division by a norm that is common to all tokens, U; x and z are sums of T + 4
    rounded terms, n3's dot products have d more; both of numerator and denominator, before and after."""
    T, d, a = 4, 3, 0.75
    moved, rounding = [], []
    for seed in range(8):
        normal = np.random.default_rng(seed).standard_normal
        q, K, v = np.exp(normal((T, d))), normal((T, d)), normal((T, d))
        other = K.copy()
        other[-1] = normal(d)
        before, after = (MIXERS[mixer](q, MAPS[phi](keys), v, a)[:-1] for keys in (K, other))
        moved.append(np.max(np.abs(after - before)))
        sizes = MIXERS[mixer](q, np.exp(K), np.abs(v), a)[:-1]  # the same sums over absolute values
        rounding.append(1.1 * 4 * (T + d + 6) * U * np.max(sizes))
    if "token" in phi:
        assert max(moved) == 0
    elif (phi, mixer) in (("A column", "n1"), ("A column", "n3")):
        assert max(moved) > 0  # so a bitwise probe calls it a leak
        assert all(x <= bound for x, bound in zip(moved, rounding, strict=True))
    else:
        assert min(moved) > 1e-3


@given(st.integers(1, 4), st.integers(1, 3), POSITIVE, st.integers(0, 99))
def test_11_column_norms_of_a_cancel_exactly_in_n1_and_n3(T: int, d: int, a: Fraction, seed: int) -> None:
    """phi_A over columns is exp(K) with one factor per feature, whatever it is: n1 and n3 divide it out, and their
    recurrence needs no norm at all. n2 and (14) keep it."""
    q, E, v, x = whole(T, d, seed), whole(T, d, seed + 1), whole(T, d, seed + 2), RATIONALS(a)
    norm = 1 / whole(1, d, seed + 3)
    for mixer in ("n1", "n3"):
        assert same(MIXERS[mixer](q, E / norm, v, x), MIXERS[mixer](q, E, v, x))


def test_11_column_norms_of_a_stay_in_n2() -> None:
    q, E, v = whole(3, 2, 0), whole(3, 2, 1), whole(3, 2, 2)
    norm = RATIONALS([[1, 2]])
    for mixer in ("n2", "(14)"):
        assert not same(MIXERS[mixer](q, E / norm, v, HALF), MIXERS[mixer](q, E, v, HALF))


@given(st.integers(1, 5), st.integers(1, 3), POSITIVE, st.integers(0, 99))
def test_11_a_running_norm_repairs_a_with_a_vector_of_state(T: int, d: int, a: Fraction, seed: int) -> None:
    """Norms over the tokens so far, n_t: (14) of E / n_t at each t is that of E itself, read by q_t / n_t. The squares
    of n_t are running sums; here any n_t does."""
    q, E, v, x = whole(T, d, seed), whole(T, d, seed + 1), whole(T, d, seed + 2), RATIONALS(a)
    n = whole(T, d, seed + 3)
    each = [masks.mix(q, E / n[t], v, masks.geometric(x, T))[t] for t in range(T)]
    assert same(np.stack(each), masks.mix(q / n, E, v, masks.geometric(x, T)))


def test_11_a_running_norm_does_not_repair_b() -> None:
    """The weight of the first of equal keys goes on changing, e^(1/sqrt(t)), inside the exponential."""
    seen = [printed.column_phi_b(np.ones((t, 1)))[0, 0] for t in (1, 2, 3, 4)]
    for t, weight in enumerate(seen, 1):
        close(weight, math.exp(1 / math.sqrt(t)), 8)
    assert [f"{weight:.3f}" for weight in seen] == ["2.718", "2.028", "1.781", "1.649"]


def test_11_column_norms_leak_through_the_router() -> None:
    W, v = np.array([[0.0, 1.0]]), np.ones((2, 1))
    first = []
    for x in (0.0, 1.0):
        k = printed.column_phi_b(np.array([[1.0], [x]]))
        E = softmax((k * v) @ W)[0]
        close(E[1], 1 / (1 + math.exp(-math.exp(1 / math.hypot(1, x)))), 32)
        first.append([f"{e:.3f}" for e in E])
    assert first == [["0.062", "0.938"], ["0.116", "0.884"]]


# --- (13) ------------------------------------------------------------------------------------------------------------


def test_13_group_norm_over_time_sees_later_tokens() -> None:
    first = []
    for last in (1.0, 3.0):
        x = np.array([[0.0, 1.0], [0.0, last]])
        first.append(printed.group_norm_over_time(x, 0.0)[0].tolist())
        assert group_norm(x, 0.0)[0].tolist() == [-1, 1]
    assert first[0] == [-1, 1]
    close(first[1][0], -1 / math.sqrt(1.5), 4)
    assert first[1][1] == 0
    assert f"{first[1][0]:.3f}" == "-0.816"


def test_13_group_norm_over_chunks_depends_on_their_length() -> None:
    """The paper brings it in against a bias of chunkwise computation."""
    x = np.arange(16.0).reshape(8, 2) ** 2
    first = {B: printed.group_norm_over_time(x[:B], 1e-5)[0, 0] for B in (2, 4, 8)}
    assert len({round(float(y), 3) for y in first.values()}) == 3
    assert len({float(group_norm(x[:B], 1e-5)[0, 0]) for B in first}) == 1


# --- number systems --------------------------------------------------------------------------------------------------

T = 4
FUNCTIONS = {
    **{f"(16) {name}": lambda q, k, v, a, G, f=f: np.concatenate(f(q, k, v, a, chunk=3)) for name, f in EQ16.items()},
    **{
        f"(12) {reading}": lambda q, k, v, a, G, reading=reading: printed.eq12_per_source(q, k, v, a, G[0], reading)
        for reading in printed.READINGS
    },
    "(14) free": lambda q, k, v, a, G: printed.eq14_free_G(q, k, v, a, G),
    "(14) constant": lambda q, k, v, a, G: printed.eq14_const_g(q, k, v, a, G[0, 0]),
    "(14) literal": lambda q, k, v, a, G: printed.eq14_literal(q, k, v, masks.geometric(a, T)),
    "(14) elementwise": lambda q, k, v, a, G: printed.eq14_elementwise(q, k, v, masks.geometric(a, T)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_number_system_gives_the_same(name: str) -> None:
    """Whole numbers and a = 1/2 leave float64 nothing to round but the quotients of (12): its sums are exact, so N1 and
    N2 round once or twice, N3 once in q / z and then in a dot product of T and a sum of T more."""
    f = FUNCTIONS[name]
    inputs = [whole(T, T, seed).data.astype(int) for seed in range(3)] + [
        Fraction(1, 2),
        whole(T, T, 3).data.astype(int),
    ]
    exact, field = f(*map(RATIONALS, inputs)), f(*map(GF, inputs))
    assert same(GF(exact.data), field)
    floats = f(*(np.asarray(x, dtype=float) for x in inputs))
    want = exact.data.astype(float)
    assert np.all(np.abs(floats - want) <= (0 if "(12)" not in name else 1.1 * (2 * T + 3) * U) * want)


@pytest.mark.parametrize("omega", [0.7, 0.0, -0.5])
def test_gradients_of_a_free_gain_are_those_of_autograd(omega: float) -> None:
    torch = pytest.importorskip("torch")
    T, g = 6, np.random.default_rng(0)
    x = {"q": g.normal(size=(T, 3)), "k": g.normal(size=(T, 3)), "v": g.normal(size=(T, 2)), "G": g.normal(size=(T, T))}
    dO = g.normal(size=(T, 2))
    got = printed.eq14_free_G_vjp(dO, **x, omega=np.float64(omega))
    leaves = {n: torch.tensor(a, dtype=torch.float64, requires_grad=True) for n, a in (x | {"omega": omega}).items()}
    powers = [torch.ones((), dtype=torch.float64)]
    for _ in range(T):
        powers.append(powers[-1] * leaves["omega"])
    rows = []
    for n in range(T):
        weights = [powers[n - m] * leaves["G"][n, m] * (leaves["q"][n] @ leaves["k"][m]) for m in range(n + 1)]
        rows.append(sum(w * leaves["v"][m] for m, w in enumerate(weights)))
    want = torch.autograd.grad((torch.stack(rows) * torch.tensor(dO)).sum(), list(leaves.values()))
    assert set(got) == set(leaves)
    for n, w in zip(leaves, want, strict=True):
        # each gradient is a sum of at most T T K V = 216 products of six factors
        size = 222 * 2.0**-53 * 216 * np.abs(dO).max() * max(np.abs(a).max() for a in x.values()) ** 4
        assert np.max(np.abs(got[n] - w.numpy())) <= size, n
