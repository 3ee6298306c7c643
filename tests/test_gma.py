"""GMA forward: hand-worked numbers, an independent enclosure, the forms against each other, memory.

Tolerances are bounds: `gamma_error` bounds the relative error of responsibilities by counting roundings, `bound` that
of outputs, to first order in U; both are multiplied by 1.1 for the higher orders.
"""

import math
import tracemalloc
from fractions import Fraction

import flint
import mpmath
import numpy as np
import pytest

from mixproof.reference import gma, operator
from mixproof.reference import gma_mixing as mixing

U = 2.0**-53
SIZES = [(1, 1, 1, 1), (2, 3, 1, 2), (7, 5, 3, 4), (33, 2, 4, 3), (65, 6, 2, 5)]  # T, K, R, V


def draw(T, K, R, V, seed=0, S=None):
    rng = np.random.default_rng([seed, T, K, R, V])
    normal = rng.standard_normal
    S = T if S is None else S
    tokens = {"q": normal((T, R)), "k": normal((S, R)), "v": normal((S, V))}
    return tokens | {"mu": normal((K, R)), "omega": normal((K, R)), "alpha": normal(K), "eps": 1e-6, "v_min": 0.05}


def draw_state(K, V, seed=0):
    rng = np.random.default_rng([seed, K, V])
    return {"S0": rng.standard_normal((K, V)), "Z0": 3 * rng.random(K)}


def mixture(I):
    return {name: I[name] for name in ("mu", "omega", "alpha", "v_min")}


def gamma_error(x, mu, omega, alpha, v_min):
    """max_k |computed gamma_k - gamma_k| / gamma_k over all tokens.

    softplus and v_min: 6 U relative. A squared term E E / var: 10 U, summed R + 9. log var: 6 U and 2 U of itself,
    summed R + 1. s: two subtractions. exp(s_k - s_top): both errors and the subtraction. exp, sum, quotient: K + 6."""
    R, K = mu.shape[1], len(mu)
    if not len(x):
        return 0.0
    var = np.logaddexp(omega, 0) + v_min
    maha = np.sum((x[:, None] - mu) ** 2 / var, axis=2)
    logs = np.sum(np.abs(np.log(var)), axis=1)
    s = alpha - np.sum(np.log(var), axis=1) / 2 - maha / 2
    ds = (R + 9) * maha / 2 + 3 * R + (R + 1) * logs / 2 + 2 * (np.abs(alpha) + logs / 2 + maha / 2)
    top = np.max(s, axis=1, keepdims=True)
    dt = ds + np.take_along_axis(ds, np.argmax(s, axis=1)[:, None], axis=1) + np.abs(s - top)
    g = np.exp(s - top) / np.sum(np.exp(s - top), axis=1, keepdims=True)
    return 1.1 * U * float(np.max(dt + np.sum(g * dt, axis=1, keepdims=True) + K + 6))


def bound(I, causal=False):
    """Elementwise bounds of |computed - exact| for O (and S, Z): numerator and normaliser are sums of T + K terms with
    non-negative weights, each with one responsibility of a query and one of a key in it."""
    GQ, GK = (gma.responsibilities(I[x], **mixture(I)) for x in ("q", "k"))
    eta = gamma_error(I["q"], **mixture(I)) + gamma_error(I["k"], **mixture(I))
    n = 1.1 * ((len(GK) + GQ.shape[1] + 6) * U + eta)
    S0 = np.abs(I.get("S0", np.zeros((GQ.shape[1], I["v"].shape[1]))))
    Z0 = I.get("Z0", np.zeros(GQ.shape[1]))
    M = mixing.affinity(GQ, GK, causal)
    size = (GQ @ S0 + M @ np.abs(I["v"])) / (GQ @ Z0 + np.sum(M, axis=1) + I["eps"])[:, None]
    O = 2 * n * size  # once for the numerator, once for the normaliser
    return (O, n * (S0 + GK.T @ np.abs(I["v"])), n * (Z0 + np.sum(GK, axis=0))) if causal else O


def within(got, want, tolerance):
    assert np.all(np.isfinite(got))
    assert got.shape == want.shape
    assert np.all(np.abs(got - want) <= tolerance), float(np.max(np.abs(got - want) / tolerance))


# --- numbers worked by hand ------------------------------------------------------------------------------------------


def test_one_token_between_two_means():
    """K = 2, mu = -+3, unit variances, q = 3, k = -3: gamma is a logistic function of 18, and eps wins over D."""
    unit = np.full((2, 1), math.log(math.e - 1))  # softplus = 1
    x = np.array([[3.0]])
    gamma = gma.responsibilities(x, np.array([[-3.0], [3.0]]), unit, np.zeros(2))
    small = 1 / (1 + math.exp(18))
    error = gamma_error(x, np.array([[-3.0], [3.0]]), unit, np.zeros(2), 0.0)
    within(gamma, np.array([[small, 1 - small]]), error * gamma)
    O = gma.bidirectional(x, -x, np.ones((1, 1)), np.array([[-3.0], [3.0]]), unit, np.zeros(2), eps=1e-6)
    D = 2 * small * (1 - small)
    within(O, np.array([[D / (D + 1e-6)]]), 2.2 * (2 * error + 9 * U) * O)
    assert f"{O[0, 0]:.4f}" == "0.0296"


def test_one_component_is_a_mean():
    """K = 1: gamma = 1, so the output is sum V / (N + eps), the causal one sum_{j <= i} V_j / (i + eps)."""
    I = draw(9, 1, 2, 3)
    n = np.arange(1, 10)[:, None]
    total = np.cumsum(I["v"], axis=0)
    within(gma.bidirectional(**I), np.tile(total[-1:] / (9 + I["eps"]), (9, 1)), bound(I))
    within(gma.chunkwise(**I, chunk=4)[0], total / (n + I["eps"]), bound(I, causal=True)[0])


def test_wider_component_loses_at_the_mean():
    """Equal means, var 1 and 4 in d dimensions, x at the mean: gamma = (1, 2^-d) normalised. Only |Sigma| decides."""
    for d in (1, 2, 7):
        omega = np.stack([np.full(d, math.log(math.expm1(1.0))), np.full(d, math.log(math.expm1(4.0)))])
        x = np.zeros((1, d))
        got = gma.responsibilities(x, np.zeros((2, d)), omega, np.zeros(2))
        want = np.array([[1, 2.0**-d]]) / (1 + 2.0**-d)
        within(got, want, 2 * gamma_error(x, np.zeros((2, d)), omega, np.zeros(2), 0.0) * want)


def test_printed_logits_differ_by_a_constant():
    I = draw(5, 4, 3, 1)
    s, printed = gma.logits(I["q"], **mixture(I)), gma.logits_as_printed(I["q"], **mixture(I))
    constant = -1.5 * math.log(2 * math.pi) - math.log(np.sum(np.exp(I["alpha"])))
    size = np.abs(s) + np.abs(printed) + 2 * np.max(np.abs(I["alpha"])) + 3
    within(printed - s, np.full(s.shape, constant), 2 * gamma_error(I["q"], **mixture(I)) + 8 * U * size)


# --- an independent witness: equation (3) as it stands, densities and all, in Arb balls ------------------------------


def arb_gamma(x, mu, omega, alpha, v_min):
    arb = flint.arb
    var = [[(arb(w).exp() + 1).log() + arb(v_min) for w in row] for row in omega.tolist()]
    pi = [arb(a).exp() for a in alpha.tolist()]

    def density(t, m, v):
        square = sum(((arb(a) - arb(b)) ** 2 / c for a, b, c in zip(t, m, v, strict=True)), arb(0))
        volume = math.prod((2 * arb.pi() * c for c in v), start=arb(1))
        return (-square / 2).exp() / volume.sqrt()

    rows = [[p * density(t, m, v) for p, m, v in zip(pi, mu.tolist(), var, strict=True)] for t in x.tolist()]
    return np.array([[r / sum(row, arb(0)) for r in row] for row in rows], dtype=object).reshape(len(x), len(mu))


def arb_array(x):
    return np.array([flint.arb(float(a)) for a in np.ravel(x)] + [None], dtype=object)[:-1].reshape(np.shape(x))


def middle_and_radius(x):
    middle = np.array([float(a.mid()) for a in x.flat]).reshape(x.shape)
    radius = np.array([float(a.rad()) for a in x.flat]).reshape(x.shape)
    return middle, radius + U * np.abs(middle)  # the midpoint is rounded to float64


@pytest.mark.parametrize("sizes", SIZES[:4])
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_enclosed_by_arb(sizes, spread):
    flint.ctx.prec = 200
    I = draw(*sizes)
    I = I | {"q": spread * I["q"], "k": spread * I["k"]} | draw_state(sizes[1], sizes[3])
    GQ, GK = (arb_gamma(I[x], **mixture(I)) for x in ("q", "k"))
    V, S0, Z0, eps = arb_array(I["v"]), arb_array(I["S0"]), arb_array(I["Z0"]), flint.arb(I["eps"])

    middle, radius = middle_and_radius(GQ)
    assert np.all(radius <= 2 * U * middle + 2.0**-1000)  # the witness is sharp, or the comparison is void
    tiny = 2.0**-1022  # gamma may underflow
    got = gma.responsibilities(I["q"], **mixture(I))
    within(got, middle, gamma_error(I["q"], **mixture(I)) * middle + radius + tiny)

    At = GQ @ GK.T  # forms by affinity; written here, not taken from gma_mixing
    middle, radius = middle_and_radius(At @ V / (np.sum(At, axis=1) + eps)[:, None])
    plain = {name: x for name, x in I.items() if name not in ("S0", "Z0")}
    for form in (gma.bidirectional, gma.bidirectional_dense, gma.cross, gma.cross_dense):
        within(form(**plain), middle, bound(plain) + radius + tiny)

    At = np.where(np.tri(len(V), dtype=bool), At, flint.arb(0))
    O = (GQ @ S0 + At @ V) / (GQ @ Z0 + np.sum(At, axis=1) + eps)[:, None]
    for form in operator("gma.causal").forms:
        for got, want, error in zip(
            form.function(**I), (O, S0 + GK.T @ V, Z0 + np.sum(GK, axis=0)), bound(I, causal=True), strict=True
        ):
            middle, radius = middle_and_radius(want)
            within(got, middle, error + radius + tiny)


# --- forms -----------------------------------------------------------------------------------------------------------


def exact_draw(rng, *shape):
    numbers = [Fraction(int(a), int(b)) for a, b in rng.integers(1, 50, size=(math.prod(shape), 2))]
    return np.array([*numbers, None], dtype=object)[:-1].reshape(shape)


@pytest.mark.parametrize("T", [0, 1, 2, 5, 8])
def test_mixing_forms_agree_exactly_over_the_rationals(T):
    rng = np.random.default_rng(T)
    K, V = 3, 2
    GQ, GK, v = exact_draw(rng, T, K), exact_draw(rng, T, K), exact_draw(rng, T, V)
    S0, Z0, eps = exact_draw(rng, K, V), exact_draw(rng, K), Fraction(1, 7)
    want = mixing.recurrent(GQ, GK, v, eps, S0, Z0)
    for got in [mixing.parallel(GQ, GK, v, eps, S0, Z0)] + [
        mixing.chunkwise(GQ, GK, v, eps, S0, Z0, chunk) for chunk in range(1, T + 2)
    ]:
        assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
    O = mixing.latent(GQ, GK, v, eps)
    assert np.array_equal(O, mixing.dense(GQ, GK, v, eps))
    if T:
        assert np.array_equal(O, mixing.slot_means(GQ, GK, v, eps))
        assert np.array_equal(O[-1], mixing.recurrent(GQ, GK, v, eps)[0][-1])
    G = {"O": exact_draw(rng, T, V), "S": exact_draw(rng, K, V), "Z": exact_draw(rng, K)}
    want = mixing.recurrent_vjp(G, GQ, GK, v, eps, S0, Z0)
    for chunk in range(1, T + 2):
        got = mixing.chunkwise_vjp(G, GQ, GK, v, eps, S0, Z0, chunk)
        assert all(np.array_equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("sizes", SIZES)
def test_forms_agree(sizes):
    I = draw(*sizes) | draw_state(sizes[1], sizes[3])
    error = [2 * e for e in bound(I, causal=True)]
    want = gma.recurrent(**I)
    forms = [gma.parallel(**I)] + [gma.chunkwise(**I, chunk=c) for c in (*range(1, 9), 16, 64, sizes[0], sizes[0] + 5)]
    for got in forms:
        for a, b, e in zip(got, want, error, strict=True):
            within(a, b, e)


def test_cross_forms_agree_also_in_log_space():
    for T, S in ((4, 7), (1, 5), (6, 1), (0, 3)):
        I = draw(T, 3, 2, 2, S=S)
        error = 2 * bound(I)
        within(gma.cross_dense(**I), gma.cross(**I), error)
        # the log-space read takes logarithms of gamma and Z (absolute errors eta and U |log|) and exponentials again
        logs = max(float(np.max(np.abs(gma.log_responsibilities(I[x], **mixture(I))), initial=0)) for x in "qk")
        within(
            gma.cross_log_space(**I), gma.cross(**I), error * (4 + logs) + 16 * U * (1 + logs) * np.max(np.abs(I["v"]))
        )


def test_log_space_reads_where_responsibilities_underflow():
    """Query and key at opposite means: gamma = exp(-735) is subnormal, and so are D and eps. The latent form keeps four
    digits of O = D / (D + eps), the read in logarithms nearly all."""
    a = math.sqrt(735 / 2)
    mu, omega = np.array([[-a], [a]]), np.full((2, 1), math.log(math.e - 1))
    inputs = (np.array([[a]]), np.array([[-a]]), np.ones((1, 1)), mu, omega, np.zeros(2), 1e-319)
    with mpmath.workprec(200):
        var = mpmath.log(1 + mpmath.exp(mpmath.mpf(omega[0, 0])))
        gamma = 1 / (1 + mpmath.exp((2 * mpmath.mpf(a)) ** 2 / 2 / var))
        D = 2 * gamma * (1 - gamma)
        O = float(D / (D + mpmath.mpf(1e-319)))
    tolerance = 8 * gamma_error(inputs[0], mu, omega, np.zeros(2), 0.0) + 16 * U * 735
    assert abs(gma.cross_log_space(*inputs)[0, 0] - O) <= tolerance * O
    assert abs(gma.cross(*inputs)[0, 0] - O) > 1e3 * tolerance * O


def test_split_at_every_position_and_decode():
    I = draw(11, 3, 2, 2)
    want, error = gma.chunkwise(**I, chunk=4), [2 * e for e in bound(I, causal=True)]
    for at in range(12):
        first = I | {x: I[x][:at] for x in "qkv"}
        second = I | {x: I[x][at:] for x in "qkv"}
        for one, two in ((3, 5), (64, 1)):
            A, S, Z = gma.chunkwise(**first, chunk=one)
            B, S, Z = gma.chunkwise(**second, S0=S, Z0=Z, chunk=two)
            for a, b, e in zip((np.concatenate([A, B]), S, Z), want, error, strict=True):
                within(a, b, e)
    state, rows = None, []
    for i in range(11):
        O, state = gma.step(state, *(I[x][i] for x in "qkv"), **mixture(I), eps=I["eps"])
        rows.append(O)
    recurrent = gma.recurrent(**I)
    assert all(np.array_equal(a, b) for a, b in zip((np.stack(rows), *state), recurrent, strict=True))


def test_empty_sequences():
    I = draw(0, 3, 2, 2)
    assert gma.bidirectional(**I).shape == (0, 2)
    O, S, Z = gma.chunkwise(**I)
    assert O.shape == (0, 2)
    assert not np.any(S)
    assert not np.any(Z)
    state = draw_state(3, 2)
    for form in (gma.chunkwise, gma.recurrent, gma.parallel):
        O, S, Z = form(**I, **state)
        assert np.array_equal(S, state["S0"])
        assert np.array_equal(Z, state["Z0"])
    assert not np.any(gma.cross(**draw(3, 3, 2, 2, S=0)))  # no keys: D = 0, and 0 / eps is 0


def test_recurrent_never_looks_ahead():
    """Bitwise, also for nan. The chunkwise form holds it between chunks and, for finite values, inside them."""
    I = draw(9, 3, 2, 2)
    for poison in (np.nan, 1e300):
        J = I | {x: np.concatenate([I[x][:5], np.full_like(I[x][5:], poison)]) for x in "kv"}
        with np.errstate(all="ignore"):
            assert np.array_equal(gma.recurrent(**J)[0][:5], gma.recurrent(**I)[0][:5])
            assert np.array_equal(gma.chunkwise(**J, chunk=5)[0][:5], gma.chunkwise(**I, chunk=5)[0][:5])


def test_attention_matrix():
    I = draw(6, 3, 2, 2)
    weights = {name: x for name, x in I.items() if name != "v"}
    GQ, GK = (gma.responsibilities(I[x], **mixture(I)) for x in "qk")
    A, causal = gma.attention(**weights), gma.attention(**weights, causal=True)
    within(A @ I["v"], gma.bidirectional(**I), 2 * bound(I))
    within(causal @ I["v"], gma.chunkwise(**I)[0], 2 * bound(I, causal=True)[0])
    D = GQ @ np.sum(GK, axis=0)
    slack = 2 * (6 + 3 + 6) * U
    within(np.sum(A, axis=1), D / (D + I["eps"]), slack)
    assert np.all(np.sum(A, axis=1) < 1 + slack)
    assert np.array_equal(causal, np.tril(causal))
    assert np.all(np.diag(causal) > 0)  # hence of full rank, unlike A
    error = np.linalg.norm(A) * slack
    assert np.linalg.svd(A, compute_uv=False)[3] <= error  # rank <= K
    assert np.linalg.svd(causal, compute_uv=False)[-1] > error


def test_long_sequence_in_linear_memory():
    N, K, d = 65536, 64, 32
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, N, d))
    mu, omega, alpha = rng.standard_normal((K, d)), rng.standard_normal((K, d)), rng.standard_normal(K)
    tracemalloc.start()
    try:
        O, S, Z = gma.chunkwise(q, k, v, mu, omega, alpha)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < N * K * d * 8 / 6  # all differences x - mu would take N K d numbers, the affinity N^2
    assert abs(np.sum(Z) - N) <= 2 * N * (N / 64 + 64 + K) * U  # rows of responsibilities sum to 1
    assert np.all(
        np.abs(np.sum(S, axis=0) - np.sum(v, axis=0)) <= 2 * (N / 64 + 64 + K) * U * np.sum(np.abs(v), axis=0)
    )
    last = mixing.broadcast(gma.responsibilities(q[-1:], mu, omega, alpha), S, Z, 1e-6)  # row N reads the final memory
    within(O[-1:], last, 4 * (N / 64 + 64 + K + 6) * U * np.max(np.abs(v)))
