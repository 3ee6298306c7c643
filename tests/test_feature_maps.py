"""The two feature maps of TALA: numbers by hand, autograd, what leaves them unchanged, and how flat B's kernel is.

Two evaluations of one quantity may differ by twice what the gate allows one of them; a sum by the sum of its terms'.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixproof.reference import operator
from mixproof.reference.feature_maps import phi_a, phi_a_softmax, phi_a_vjp, phi_b, phi_b_scaled, phi_b_vjp
from mixproof.verify.arithmetic import natural
from mixproof.verify.numbers.ball import Reading, tolerance
from mixproof.verify.numbers.certified import certified_error, enclose

U = 2.0**-53
FORMS = {"tala.phi_a": (phi_a, phi_a_softmax), "tala.phi_b": (phi_b, phi_b_scaled)}
# numbers that hold their sums with whole numbers, and their products with powers of two, exactly
dyadic = st.integers(-(2**12), 2**12).map(lambda n: n / 2**9)
rows = st.integers(1, 6).flatmap(lambda K: st.lists(dyadic, min_size=K, max_size=K)).map(lambda r: np.array([r]))


def allowed(f, *x):
    """What float64 may be off by; `x` are arrays, or dicts of cotangents."""
    reading = Reading(natural("float64"))
    balls = [{n: reading.ball(a) for n, a in y.items()} if isinstance(y, dict) else reading.ball(y) for y in x]
    result = f(*balls)
    assert not reading.vacuous
    if isinstance(result, dict):
        return {n: tolerance(b, "float64") for n, b in result.items()}
    return tolerance(result, "float64")


def draw(T, K, seed=0, spread=1.0):
    g = np.random.default_rng([seed, T, K])
    return spread * g.standard_normal((T, K)), g.standard_normal((T, K))


# --- values ----------------------------------------------------------------------------------------------------------


def test_numbers_by_hand():
    for form in FORMS["tala.phi_a"]:
        assert np.max(np.abs(form(np.log([[1.0, 2.0]])) - np.array([[1, 2]]) / math.sqrt(5))) <= 16 * U
        assert np.array_equal(form(np.array([[7.0]])), [[1.0]])
    for form in FORMS["tala.phi_b"]:
        assert np.max(np.abs(form(np.array([[3.0, -4.0]])) - np.exp([[0.6, -0.8]]))) <= 16 * U
        assert np.array_equal(form(np.array([[-7.0], [0.0]])), np.exp([[-1.0], [0.0]]))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("spread", [1e-9, 1.0, 60.0])
def test_forms_are_enclosed(name, spread):
    x, _ = draw(5, 4, spread=spread)
    for form in FORMS[name]:
        assert np.all(certified_error(form(x), enclose(form, {"x": x})) <= allowed(FORMS[name][0], x))


def test_entries_far_apart():
    """exp(800) overflows; the square of exp(-400) underflows, so the root of a softmax is zero there. Squares of 1e300
    and of 1e-200 do the same; below norm_eps it is norm_eps that x is divided by."""
    x = np.array([[800.0, 400.0, 400.0]])
    assert np.array_equal(phi_a(x)[0, 1:], [math.exp(-400)] * 2)
    assert np.array_equal(phi_a_softmax(x), [[1.0, 0.0, 0.0]])
    for size in (1e300, 1e-200):
        x = np.array([[3.0, 4.0]]) * size
        assert np.max(np.abs(phi_b(x, norm_eps=1e-250) - np.exp([[0.6, 0.8]]))) <= 16 * U
    assert np.max(np.abs(phi_b(np.array([[3e-13, 4e-13]])) - np.exp([[0.3, 0.4]]))) <= 16 * U


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("sizes", [(1, 1), (1, 4), (6, 3), (3, 9)])
def test_vjp_is_autograd(name, sizes):
    torch = pytest.importorskip("torch")
    x, G = draw(*sizes)
    leaf = torch.tensor(x, requires_grad=True)
    e = leaf.exp() if name == "tala.phi_a" else leaf
    y = e / (e * e).sum(1, keepdim=True).sqrt()
    y = y if name == "tala.phi_a" else y.exp()
    (want,) = torch.autograd.grad((y * torch.tensor(G)).sum(), leaf)
    vjp = operator(name).vjp
    assert np.all(np.abs(vjp({"Y": G}, x)["x"] - want.numpy()) <= 2 * allowed(vjp, {"Y": G}, x)["x"])


def test_gradient_below_the_least_norm():
    """There phi_b is exp(x / norm_eps), also at zero, where it has no gradient of its own."""
    G = np.array([[2.0, -1.0]])
    assert np.array_equal(phi_b_vjp({"Y": G}, np.zeros((1, 2)), norm_eps=0.5)["x"], G / 0.5)
    x = np.array([[0.25, -0.125]])
    want = G * np.exp(x / 0.5) / 0.5
    assert np.max(np.abs(phi_b_vjp({"Y": G}, x, norm_eps=0.5)["x"] - want)) <= 8 * U * np.max(np.abs(want))


@given(rows, st.integers(0, 2**16))
def test_gradients_of_what_leaves_them_unchanged(x, seed):
    """1 . dx = 0 for A, which a shift leaves as it is; x . dx = 0 for B, which a factor does."""
    G = np.random.default_rng(seed).standard_normal(x.shape)
    d, bound = phi_a_vjp({"Y": G}, x)["x"], allowed(phi_a_vjp, {"Y": G}, x)["x"]
    assert abs(np.sum(d)) <= np.sum(bound)
    if np.any(x):
        d, bound = phi_b_vjp({"Y": G}, x)["x"], allowed(phi_b_vjp, {"Y": G}, x)["x"]
        assert abs(np.sum(x * d)) <= np.sum(np.abs(x) * bound)


# --- laws ------------------------------------------------------------------------------------------------------------


@given(rows, st.integers(-64, 64))
def test_a_does_not_see_a_shift(x, c):
    """L45. Not bitwise for every implementation: the maximum comes off first here, a logarithm of a sum elsewhere."""
    assert np.all(np.abs(phi_a(x + c) - phi_a(x)) <= allowed(phi_a, x) + allowed(phi_a, x + c))


@given(rows, st.integers(-200, 200))
def test_b_does_not_see_a_power_of_two(x, p):
    """L47, bit for bit, wherever no norm falls below norm_eps."""
    y = phi_b(x, norm_eps=1e-100)
    assert np.array_equal(phi_b(x * 2.0**p, norm_eps=1e-100), y)


@given(rows, rows)
def test_rows_of_a_are_unit_vectors(q, k):
    """L46: so their products lie in [0, 1]."""
    q, k = (np.resize(a, (1, 6)) for a in (q, k))
    Q, K, errors = phi_a(q), phi_a(k), allowed(phi_a, np.concatenate([q, k]))
    assert abs(np.sum(Q * Q) - 1) <= np.sum(2 * Q * errors[:1]) + 7 * U
    assert 0 <= np.sum(Q * K) <= 1 + np.sum(Q * errors[1:] + K * errors[:1]) + 7 * U


@given(rows)
def test_entries_of_b_lie_between_1_over_e_and_e(x):
    """L48; and phi(-x) is 1 / phi(x)."""
    y, error = phi_b(x), allowed(phi_b, x)
    assert np.all(y >= math.exp(-1) - error)
    assert np.all(y <= math.e + error)
    assert np.all(np.abs(phi_b(-x) * y - 1) <= (y + 1 / y) * error + allowed(phi_b, -x) * y + U)


@given(st.integers(0, 2**16))
def test_a_is_lipschitz(seed):
    """||phi(x) - phi(y)|| <= ||x - y|| / sqrt(2)."""
    (x, y), _ = draw(2, 5, seed), None
    a, b = phi_a(x[None, :]), phi_a((x + 1e-3 * y)[None, :])
    slack = np.linalg.norm(allowed(phi_a, x[None, :]) + allowed(phi_a, (x + 1e-3 * y)[None, :]))
    assert np.linalg.norm(a - b) <= np.linalg.norm(1e-3 * y) / math.sqrt(2) + 2 * slack


def test_a_attains_its_lipschitz_constant():
    """Between two equal entries: phi = (cos, sin) of pi/4; the derivative along (1, -1) / sqrt(2) is 1 / sqrt(2)."""
    G = np.array([[1.0, -1.0]]) / math.sqrt(2)
    d = phi_a_vjp({"Y": G}, np.zeros((1, 2)))["x"]
    assert abs(np.linalg.norm(d) - 1 / math.sqrt(2)) <= 8 * U


@given(st.integers(1, 128), st.integers(0, 2**16))
def test_kernel_of_b_is_nearly_flat(K, seed):
    """K e^(-2/sqrt K) <= phi(q) . phi(k) <= K + 2 sqrt(K) + e^2 - 3. Flat vectors, both negative, attain the lower."""
    x, _ = draw(2, K, seed)
    flat = np.ones((1, K))
    low, high = K * math.exp(-2 / math.sqrt(K)), K + 2 * math.sqrt(K) + math.e**2 - 3
    slack = K * 32 * U * math.e**2
    for q, k in ((x[:1], x[1:]), (x[:1], -x[:1]), (x[:1], x[:1]), (flat, x[:1]), (flat, flat)):
        assert low - slack <= np.vdot(phi_b(q), phi_b(k)) <= high + slack
    assert abs(np.vdot(phi_b(-flat), phi_b(-flat)) - low) <= slack


def test_ratios_of_the_kernel_of_b_for_128_channels():
    """At most 1.4452, of which flat vectors show e^(4 / sqrt(128)) = 1.4241."""
    flat, root = np.ones((1, 128)), math.sqrt(128)
    high, low = 128 + 2 * root + math.e**2 - 3, 128 * math.exp(-2 / root)
    seen = np.vdot(phi_b(flat), phi_b(flat)) / np.vdot(phi_b(-flat), phi_b(-flat))
    assert (f"{high / low:.4f}", f"{seen:.4f}") == ("1.4452", "1.4241")


def test_a_norm_over_the_columns_of_k_leaks():
    """One channel, two tokens, K = (1, x): what the first token gets depends on the second one."""
    columns_b = [math.exp(1 / math.hypot(1, x)) for x in (0, 1, 2)]
    columns_a = [math.exp(1) / math.hypot(math.exp(1), math.exp(x)) for x in (0, 1, 2)]
    assert [f"{y:.5f}" for y in columns_b] == ["2.71828", "2.02811", "1.56395"]
    assert [f"{y:.5f}" for y in columns_a] == ["0.93851", "0.70711", "0.34526"]
    for form in (phi_a, phi_b):
        first = [form(np.array([[1.0], [x]]))[0, 0] for x in (0.0, 1.0, 2.0)]
        assert first[0] == first[1] == first[2]
