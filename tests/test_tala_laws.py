"""Laws of TALA that no cell of the gate and no other test holds, numbered as in the design record, each in its class.

Bitwise: of the recurrent form in a fixed order of summation, which NumPy keeps for long doubles: no BLAS has them.
Equalities up to rounding: over the rationals, where there is no rounding, in every form. Inequalities: over the
rationals, with a case that attains them; over floats, with the slack that roundings of the gate's arithmetic need.
Next to each stands a case in which the law does not hold, or why a wrong result would show.
"""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixproof.reference import mome_mixing, operator, retention, tala, tala_masks, tala_normalised
from mixproof.reference.feature_maps import phi_a, phi_b, phi_b_vjp
from mixproof.reference.mome_routers import R3
from mixproof.reference.multi_scale_retention import group_norm_vjp
from mixproof.reference.primitives import group_norm, softmax
from mixproof.verify.arithmetic import natural
from mixproof.verify.numbers.ball import Reading, tolerance
from mixproof.verify.numbers.exact import RATIONALS

BY_TOKEN = ("tala.time_varying", "tala.key_channel", "tala.value_channel")
DECAYS = (*BY_TOKEN, "tala.elementwise")
SPREAD = {  # decays as (T, K, V)
    "retention": np.s_[None, None, None],
    "tala.time_varying": np.s_[:, None, None],
    "tala.key_channel": np.s_[:, :, None],
    "tala.value_channel": np.s_[:, None, :],
    "tala.elementwise": np.s_[None],
}
FORMS = ("chunkwise", "parallel", "recurrent")
seeds = st.integers(0, 2**16)
few = settings(max_examples=25)


def take(name, I, axis, index):
    """The inputs with entries `index` of their axis T, K or V."""
    axes = {x.name: x.axes for x in operator(name).inputs}
    return {n: np.take(x, index, axes[n].index(axis)) if axis in axes[n] else x for n, x in I.items()}


# --- bitwise ---------------------------------------------------------------------------------------------------------


def floats(name, seed, T=9, K=4, V=3):
    """Long doubles from doubles: all bits of a double's mantissa are in use, so their products must be rounded."""
    random, sizes = np.random.default_rng([seed, T, K, V]), {"T": T, "K": K, "V": V}
    return {
        x.name: np.abs(a) if x.domain in ("positive", "mass", "decay", "head") else a
        for x in operator(name).inputs
        if x.role != "scalar"
        for a in [random.normal(size=tuple(sizes[n] for n in x.axes)) * np.longdouble(1)]
    }


def run(name, I):
    return operator(name).form("recurrent").function(**I)


def bits(got, want):
    return all(g.dtype == np.longdouble and np.array_equal(g, w) for g, w in zip(got, want, strict=True))


def scaled(I, **factors):
    return I | {n: x * I[n] for n, x in factors.items() if n in I}


RESCALED = {  # inputs scaled by powers of c, and the factors of O and S
    "L4": lambda I, c: (scaled(I, v=c, S0=c), c, c),
    "L5": lambda I, c: (scaled(I, q=c), c, 1),
    "L6": lambda I, c: (scaled(I, k=c, v=1 / c), 1, 1),
    "L10": lambda I, c: (
        scaled(I, q=c ** _K(I), k=1 / c ** _K(I), S0=1 / c ** _K(I)[:, None]),
        1,
        c ** -_K(I)[:, None],
    ),
    "of degree three": lambda I, c: ({n: x for n, x in scaled(I, q=c, k=c, v=c).items() if n != "S0"}, c**3, c**2),
}
STATELESS = ("of degree three",)


def _K(I):
    return np.arange(I["k"].shape[1])


def rescaled(law, name, seed, c):
    """Are the results of rescaled inputs the results, rescaled, to the last bit?"""
    I = floats(name, seed)
    changed, of_O, of_S = RESCALED[law](I, np.longdouble(c))
    O, S = run(name, {n: x for n, x in I.items() if n in changed})
    return bits(run(name, changed), (of_O * O, of_S * S))


@few
@given(st.sampled_from(("tala", *DECAYS)), seeds, st.integers(-20, 20), st.sampled_from((1.0, -1.0)))
def test_powers_of_two_of_either_sign_round_nothing(name, seed, p, sign):
    """L4 to L7, L10, and trilinear without a state. L7 is p = 0 with the other sign."""
    for law in RESCALED:
        assert rescaled(law, name, seed, sign * 2.0**p), law


@pytest.mark.parametrize("name", ["tala", *DECAYS])
@pytest.mark.parametrize("law", RESCALED)
def test_three_is_no_power_of_two(law, name):
    assert not all(rescaled(law, name, seed, 3.0) for seed in range(4))


@few
@given(st.sampled_from(("tala", *DECAYS)), seeds, st.lists(st.integers(0, 2), max_size=5))
def test_value_channels_do_not_see_each_other(name, seed, kept):
    """L8 and L24: permuted, repeated, left out, or run apart, each gives the same."""
    I = floats(name, seed)
    O, S = run(name, I)
    assert bits(run(name, take(name, I, "V", kept)), (O[:, kept], S[:, kept]))


@pytest.mark.parametrize("name", ["tala", *DECAYS])
def test_key_channels_are_added_in_some_order(name):
    """L9 is no bitwise law: the other order of four terms shows somewhere in O, though not in S."""
    order, differ = [3, 2, 1, 0], []
    for seed in range(4):
        I = floats(name, seed)
        (O, S), (moved, states) = run(name, I), run(name, take(name, I, "K", order))
        assert bits([states], [S[order]])
        differ.append(not bits([moved], [O]))
    assert any(differ)


@few
@given(st.sampled_from(("tala", *DECAYS)), seeds, st.integers(0, 9))
def test_a_prefix_does_not_see_what_follows_and_its_state_is_all_that_the_rest_sees(name, seed, at):
    """L1 to L3. Without the state, the rest is another."""
    I, other = floats(name, seed), floats(name, seed + 1)
    O, S = run(name, I)
    first, rest = (take(name, I, "T", tokens) for tokens in (np.arange(at), np.arange(at, 9)))
    future = {n: np.concatenate([x[:at], other[n][at:]]) if n in ("q", "k", "v") else x for n, x in I.items()}
    before, state = run(name, first)
    assert bits([before, before], [O[:at], run(name, future)[0][:at]])
    assert bits(run(name, rest | {"S0": state}), (O[at:], S))
    if at < 9:
        assert not bits(run(name, scaled(rest, S0=0)), (O[at:], S))


@few
@given(st.sampled_from(BY_TOKEN), seeds, st.integers(0, 8))
def test_resets_and_empty_tokens_leave_no_bit_behind(name, seed, at):
    """L16: from a decay of zero on; L19: after keys of zero that follow no state. A decay of 2^-40 leaves something."""
    I = floats(name, seed)
    rest = scaled(take(name, I, "T", np.arange(at, 9)), S0=0)
    here, want = np.arange(9) == at, run(name, rest)

    def decayed(by):
        mask = here.reshape(-1, *(1,) * (I["a"].ndim - 1))
        O, S = run(name, I | {"a": np.where(mask, by, I["a"])})
        return O[at:], S

    assert bits(decayed(0), want)
    assert not bits(decayed(np.longdouble(2.0**-40)), want)
    O, S = run(name, scaled(I, k=(np.arange(9) >= at)[:, None], S0=0))
    assert bits((O[at:], S), want)


@few
@given(seeds, st.integers(-20, 20))
def test_n2_does_not_see_powers_of_two(seed, p):
    """L29 and L30: one for each query; one for all keys and the state."""
    I = floats("tala.n2", seed)
    O, S, z = run("tala.n2", I)
    for c, exact in ((np.longdouble(2.0**p), True), (np.longdouble(3.0), False)):
        queries = run("tala.n2", scaled(I, q=c ** np.arange(9)[:, None]))
        keys = run("tala.n2", scaled(I, k=c, S0=c, z0=c))
        if exact:
            assert bits(queries, (O, S, z))
            assert bits(keys, (O, c * S, c * z))
        else:
            assert not (bits(queries, (O, S, z)) and bits(keys, (O, c * S, c * z)))


@given(seeds, st.integers(-200, 200))
def test_group_norm_without_eps_does_not_see_powers_of_two(seed, p):
    """L44. With eps it sees them."""
    x = np.random.default_rng(seed).normal(size=(3, 5))
    assert np.array_equal(group_norm(x * 2.0**p, 0.0), group_norm(x, 0.0))
    assert p == 0 or not np.array_equal(group_norm(x * 2.0**p, 0.1), group_norm(x, 0.1))


# --- equalities, over the rationals ----------------------------------------------------------------------------------


def fractions(random, *shape):
    return RATIONALS(random.integers(1, 10, shape) * random.choice([-1, 1], shape)) / RATIONALS(7)


def rational(name, seed, T=5, K=2, V=2):
    """No decay is zero and no two are equal, of the sizes above: no law holds by that chance."""
    random, sizes = np.random.default_rng([seed, T, K, V]), {"T": T, "K": K, "V": V}
    I = {"scale": RATIONALS(Fraction(3, 8))}
    for x in operator(name).exact_inputs:
        if x.role != "scalar":
            shape = tuple(sizes[n] for n in x.axes)
            distinct = random.permutation([n for n in range(-12, 13) if n])[: math.prod(shape)].reshape(shape)
            I[x.name] = RATIONALS(distinct) / RATIONALS(8) if x.name in ("a", "gamma") else fractions(random, *shape)
    return I


def exact(name, I, form):
    return operator(name).form(form).function(**I, **({"chunk": 2} if form == "chunkwise" else {}))


def same(got, want):
    return all(g.shape == w.shape and bool(np.all(g == w)) for g, w in zip(got, want, strict=True))


def spread(name, I):
    """Decays as (T, K, V)."""
    (T, K), V = I["q"].shape, I["v"].shape[1]
    return np.broadcast_to(I["gamma" if name == "retention" else "a"][SPREAD[name]], (T, K, V))


EXACT = ("retention", *DECAYS)
any_form = (st.sampled_from(EXACT), st.sampled_from(FORMS), seeds)


@few
@given(*any_form)
def test_orthogonal_changes_of_the_basis_of_keys_need_decays_without_key_channels(name, form, seed):
    """L11: of queries, keys and the state."""
    I, U = rational(name, seed), RATIONALS([[3, 4], [-4, 3]]) / RATIONALS(5)
    O, S = exact(name, I, form)
    turned = I | {"q": I["q"] @ U, "k": I["k"] @ U, "S0": U.T @ I["S0"]}
    assert same(exact(name, turned, form), (O, U.T @ S)) == (name not in ("tala.key_channel", "tala.elementwise"))


@few
@given(*any_form)
def test_linear_maps_of_values_need_decays_without_value_channels(name, form, seed):
    """L12."""
    I, M = rational(name, seed), RATIONALS([[1, 2], [3, -1]])
    O, S = exact(name, I, form)
    mapped = exact(name, I | {"v": I["v"] @ M, "S0": I["S0"] @ M}, form)
    assert same(mapped, (O @ M, S @ M)) == (name not in ("tala.value_channel", "tala.elementwise"))


@few
@given(*any_form)
def test_values_and_states_superpose(name, form, seed):
    """L13, L14, L34: in particular a difference of states decays as they do. Keys with values do not superpose."""
    I, other = rational(name, seed), rational(name, seed + 1)
    (O, S), (P, R) = (exact(name, I | {n: x[n] for n in ("v", "S0")}, form) for x in (I, other))
    assert same(exact(name, I | {n: I[n] + other[n] for n in ("v", "S0")}, form), (O + P, S + R))
    both = exact(name, I | {n: I[n] + other[n] for n in ("k", "v", "S0")}, form)
    assert not same(both, (O + P, S + R))
    _, R = exact(name, I | {"S0": other["S0"]}, form)
    assert same([S - R], [np.cumprod(spread(name, I), axis=0)[-1] * (I["S0"] - other["S0"])])


@few
@given(*any_form)
def test_key_channels_add(name, form, seed):
    """L25: what the first of three reads, and what the others do; their states one above the other."""
    I = rational(name, seed, K=3)
    (O, S), (P, R) = (exact(name, take(name, I, "K", part), form) for part in ([0], [1, 2]))
    assert same(exact(name, I, form), (O + P, np.concatenate([S, R])))


def join(x, y):
    """First the tokens x, then the tokens y: (decay, what is written)."""
    return x[0] * y[0], y[0] * x[1] + y[1]


@few
@given(st.sampled_from(DECAYS), seeds, st.randoms(use_true_random=False))
def test_tokens_may_be_joined_in_any_order_of_pairs(name, seed, random):
    """L49: so there is a parallel scan, whatever the decays are. Joined the other way round, tokens change places."""
    I = rational(name, seed)
    A, W = spread(name, I), I["k"][:, :, None] * I["v"][:, None, :]

    def scan(start, stop):
        if stop - start == 1:
            return A[start], W[start]
        at = random.randint(start + 1, stop - 1)
        return join(scan(start, at), scan(at, stop))

    decays, written = scan(0, 5)
    _, S = exact(name, I, "recurrent")
    assert same([decays * I["S0"] + written], [S])
    assert not same([join((A[1], W[1]), (A[0], W[0]))[1]], [join((A[0], W[0]), (A[1], W[1]))[1]])


def upstream(I, seed):
    random = np.random.default_rng([seed, 1])
    return {"O": fractions(random, *I["v"].shape), "S": fractions(random, *I["S0"].shape)}


@few
@given(st.sampled_from(BY_TOKEN), st.sampled_from(FORMS), seeds)
def test_gradients_of_values_are_the_layer_itself_backwards_in_time(name, form, seed):
    """L50: keys read what queries write; the decay of a token acts one token earlier, on what comes from later ones.
    The cotangent of the final state is the state to begin with, that of the initial state what is left in the end."""
    I = rational(name, seed)
    G, a = upstream(I, seed), I["a"]
    shifted = np.concatenate([a[:1] ** 0, a[:0:-1]])
    back = {"q": I["k"][::-1], "k": I["q"][::-1], "v": I["scale"] * G["O"][::-1], "a": shifted, "S0": G["S"]}
    d, (O, S) = operator(name).vjp(G, **I, chunk=2), exact(name, back, form)
    first = spread(name, I)[0]
    assert same((O[::-1], first * S), (d["v"], d["S0"]))
    assert not same(exact(name, back | {"a": a[::-1]}, form), (O, S))


@few
@given(st.sampled_from(EXACT), seeds)
def test_gradients_follow_from_the_degrees(name, seed):
    """q . dq = o . do and k . dk = v . dv for every token; all keys, with the state, are of degree one in O and S."""
    I = rational(name, seed)
    G = upstream(I, seed)
    d, (O, S) = operator(name).vjp(G, **I, chunk=2), exact(name, I, "recurrent")
    q, k, v = (np.sum(I[n] * d[n], axis=1) for n in "qkv")
    assert same((q, k), (np.sum(O * G["O"], axis=1), v))
    state = np.sum(I["S0"] * d["S0"])
    left = np.sum(S * G["S"])
    assert same([np.sum(k) + state], [np.sum(O * G["O"]) + left])
    assert not same([np.sum(k)], [np.sum(O * G["O"])])


@few
@given(st.sampled_from(BY_TOKEN), seeds)
def test_gradients_of_log_decays_without_states(name, seed):
    """What later tokens read, less what they write, and the final state, which is what is most often forgotten."""
    I = rational(name, seed)
    G = upstream(I, seed)
    d, (O, S) = operator(name).vjp(G, **I, chunk=2), exact(name, I, "recurrent")
    left, flow = S * G["S"], I["q"] * d["q"] - I["k"] * d["k"]
    if name == "tala.value_channel":
        left, flow = np.sum(left, axis=0), O * G["O"] - I["v"] * d["v"]
    elif name == "tala.key_channel":
        left = np.sum(left, axis=1)
    else:
        left, flow = np.sum(left), np.sum(flow, axis=1)
    later = np.cumsum(flow[::-1], axis=0)[::-1]
    assert same([later + left], [I["a"] * d["a"]])
    assert not same([later], [I["a"] * d["a"]])


# --- structure -------------------------------------------------------------------------------------------------------


@few
@given(st.sampled_from(FORMS), seeds)
def test_the_mask_does_not_see_the_tokens(form, seed):
    """L51: with V = I, whatever queries and keys are, O_nm = D_nm (q_n . k_m). That of `mome` moves with its keys and
    values, by 0.1 and more."""
    random = np.random.default_rng(seed)
    a, T = rational("tala.time_varying", seed)["a"], 5
    for _ in range(2):
        q, k = (RATIONALS(random.integers(1, 9, (T, 2))) for _ in range(2))
        I = {"q": q, "k": k, "v": RATIONALS(np.eye(T, dtype=int)), "a": a}
        O, _ = exact("tala.time_varying", I, form)
        assert same([O / (q @ k.T)], [tala_masks.cocycle(a)])


def test_the_mask_of_memory_experts_sees_the_tokens():
    random, a = np.random.default_rng(0), np.array([0.25, 0.75])
    W, ones = random.normal(size=(3, 2)), np.ones((5, 2))
    D, other = (
        mome_mixing.mask(softmax(R3(random.normal(size=(5, 3)), random.normal(size=(5, 3)), W)), ones, ones, a)
        for _ in range(2)
    )
    assert np.max(np.abs(D - other)) > 0.1
    assert np.array_equal(np.triu(D, 1), 0 * D)


# --- inequalities, over the rationals --------------------------------------------------------------------------------

SIGNED = st.sampled_from([Fraction(n, 4) for n in (-5, -4, -2, 0, 1, 3, 4, 6)])
DECAY = st.sampled_from([Fraction(n, 4) for n in (0, 1, 2, 3)])


def largest(x):
    """The largest entry: of k^T v it is that of k times that of v."""
    return max(abs(y) for y in x.data.flat)


def geometric(a, n):
    """(1 - a^n) / (1 - a), or n."""
    return sum((a**i for i in range(n)), start=Fraction(0))


@few
@given(SIGNED, seeds)
def test_states_stay_within_what_is_written(a, seed):
    """L33, for differences: |S_n - S'_n| <= |a|^n |S_0 - S'_0| + max |k| max |v - v'| (1 - |a|^n) / (1 - |a|), also
    where |a| >= 1. With S' = 0 it bounds the state, with small differences what disturbances come to."""
    I, other = rational("retention", seed), rational("retention", seed + 1)
    for n in range(6):
        S, R = (
            retention.recurrent(I["q"][:n], I["k"][:n], x["v"][:n], RATIONALS(a), S0=x["S0"])[1] for x in (I, other)
        )
        start, each = largest(I["S0"] - other["S0"]), largest(I["k"]) * largest(I["v"] - other["v"])
        assert largest(S - R) <= abs(a) ** n * start + each * geometric(abs(a), n)


@given(st.sampled_from([Fraction(1, 2), Fraction(1), Fraction(3, 2)]), st.integers(0, 6))
def test_constant_tokens_attain_it(a, n):
    one, S0 = RATIONALS(np.ones((n, 2), dtype=int)), RATIONALS(np.full((2, 2), 3))
    S = retention.recurrent(one, one, one, RATIONALS(a), S0=S0)[1]
    assert same([S], [RATIONALS(np.full((2, 2), 3 * a**n + geometric(a, n)))])


@few
@given(DECAY, DECAY, st.sampled_from(FORMS), seeds)
def test_slower_decays_read_more_of_what_is_not_negative(a, b, form, seed):
    """L35."""
    a, b = sorted((a, b))
    I = {n: abs(x) for n, x in rational("retention", seed).items()}
    slow, fast = (exact("retention", I | {"gamma": RATIONALS(x)}, form) for x in (b, a))
    assert all(bool(np.all(x >= y)) for x, y in zip(slow, fast, strict=True))


def test_slower_decays_may_read_less_of_what_is_negative():
    one, v = RATIONALS([[1], [1]]), RATIONALS([[-1], [0]])
    slow, fast = (retention.parallel(one, one, v, RATIONALS(Fraction(n, 4)))[0] for n in (3, 1))
    assert slow[1, 0] < fast[1, 0]


@few
@given(DECAY, st.integers(1, 5), seeds)
def test_windows_and_gains(a, W, seed):
    """L36: the tokens before the last W are worth at most max (q . k) max |v| a^W / (1 - a); all of n tokens at most
    max (q . k) max |v| (1 - a^n) / (1 - a). For ones the latter is attained, and the former but for a^n / (1 - a)."""
    I = rational("retention", seed)
    T, one = 5, RATIONALS(np.ones((5, 1), dtype=int))
    for q, k, v in ((abs(I["q"]), abs(I["k"]), I["v"]), (one, one, one)):
        each = largest(q @ k.T) * largest(v)
        O = retention.recurrent(q, k, v, RATIONALS(a))[0]
        seen = retention.recurrent(q[-W:], k[-W:], v[-W:], RATIONALS(a))[0]
        assert largest((O - seen[-1])[-1:]) <= each * a**W / (1 - a)
        assert all(largest(O[n : n + 1]) <= each * geometric(a, n + 1) for n in range(T))
    assert same([O[-1]], [RATIONALS([geometric(a, T)])])
    assert same([O[-1] - seen[-1]], [RATIONALS([(a**W - a**T) / (1 - a)])])


def test_horizons():
    """Tokens until a weight is 2^-24: a float32 sum no longer sees the first."""
    assert [round(24 * math.log(2) / -float(tala.log_omega(h))) for h in (1.0, 8.0)] == [36, 49582]


# --- inequalities, over floats ---------------------------------------------------------------------------------------


@few
@given(st.sampled_from([0.25, -0.5, 0.875, 1.0]), seeds)
def test_roundings_of_the_state(a, seed):
    """|fl(S_n) - S_n| <= sum_m gamma_{2(n-m)+2} |a|^(n-m) |k_m| |v_m| with gamma_j = j u / (1 - j u): a product, a sum,
    and two roundings for each later token. a itself is a float. A 512th of the bound is too little."""
    T, u, random = 24, Fraction(1, 2**24), np.random.default_rng(seed)
    k, v = random.normal(size=(T, 2)).astype(np.float32), random.normal(size=(T, 3)).astype(np.float32)
    a, A = np.float32(a), RATIONALS(Fraction(a))
    lag = np.arange(T)[::-1]
    got = RATIONALS(retention.recurrent(k, k, v, a)[1])
    want = retention.recurrent(RATIONALS(k), RATIONALS(k), RATIONALS(v), A)[1]

    def bound(roundings):
        gamma = RATIONALS(np.array([j * u / (1 - j * u) for j in map(int, roundings)]))
        return abs(RATIONALS(k)).T @ ((gamma * abs(A) ** lag)[:, None] * abs(RATIONALS(v)))

    assert bool(np.all(abs(got - want) <= bound(2 * lag + 2)))
    assert not bool(np.all(abs(got - want) * 512 <= bound(2 * lag + 2)))


def with_tolerance(f, G, x, *rest):
    """f({"Y": G}, x) for each row of G and the same x, and the gate's tolerance of it."""
    reading, x = Reading(natural("float64")), np.repeat(x, len(G), axis=0)
    error = tolerance(f(reading.ball(G), reading.ball(x), *rest), "float64")
    assert not reading.vacuous
    return f(G, x, *rest), error


@given(st.integers(1, 6), st.integers(-30, 30), seeds)
def test_phi_b_is_as_steep_as_its_row_is_short(K, p, seed):
    """Its Jacobian has norm e / ||x|| at most: no constant for all x. That of two opposite entries is known."""
    x = np.random.default_rng(seed).normal(size=(1, K)) * 2.0**p
    J, error = with_tolerance(lambda G, y: phi_b_vjp({"Y": G}, y)["x"], np.eye(K), x)
    r = np.linalg.norm(x)
    assert np.linalg.norm(J, 2) <= math.e / r + np.linalg.norm(error)
    pair = np.array([[r, -r]]) / math.sqrt(2)
    J, error = with_tolerance(lambda G, y: phi_b_vjp({"Y": G}, y)["x"], np.eye(2), pair)
    assert abs(np.linalg.norm(J, 2) - math.sqrt(math.cosh(math.sqrt(2))) / r) <= np.linalg.norm(error)


def test_phi_b_jumps_at_zero():
    """One channel, two tokens, values 0 and 1: what n2 returns as the first key passes zero."""
    q, v = np.ones((2, 1)), np.array([[0.0], [1.0]])
    last = [
        float(tala_normalised.n2(q, phi_b(np.array([[x], [1.0]])), v, np.float64(1.0))[0][1, 0]) for x in (1e-9, -1e-9)
    ]
    assert last[0] == 0.5
    assert f"{last[1]:.4f}" == "0.8808"
    assert abs(last[1] - 1 / (1 + math.exp(-2))) <= 16 * 2.0**-53


@given(st.integers(2, 6), st.sampled_from([1e-5, 1e-2, 1.0]), st.integers(-10, 3), seeds)
def test_group_norm_is_no_steeper_than_one_over_the_root_of_eps(V, eps, p, seed):
    """Attained at constant rows, along what sums to zero."""
    x = np.random.default_rng(seed).normal(size=(1, V)) * 2.0**p
    for row, attained in ((x, False), (0 * x + x[:, :1], True)):
        J, error = with_tolerance(lambda G, y: group_norm_vjp(G, y, eps), np.eye(V), row)
        steepest, slack = np.linalg.norm(J, 2), np.linalg.norm(error)
        assert steepest <= 1 / math.sqrt(eps) + slack
        if attained:
            assert steepest >= 1 / math.sqrt(eps) - slack


@settings(max_examples=10)
@given(st.sampled_from([0.5, 0.9]), st.sampled_from([1.0, 8.0]), seeds)
def test_a_layer_with_phi_a_is_lipschitz(a, r, seed):
    """On rows with ||x|| <= r: |W_V| (1 + r (|W_Q| + |W_K|) / sqrt(2)) (1 - a^T) / (1 - a), in the largest row of what
    changes. For features that are not bounded there is no such constant, and phi_b jumps."""
    random, T, D = np.random.default_rng(seed), 6, 3
    W_Q, W_K, W_V = random.normal(size=(3, D, D))
    X, direction = random.normal(size=(2, T, D))
    X = 0.9 * r * X / np.linalg.norm(X, axis=1, keepdims=True)
    Q, K, V = (np.linalg.norm(W, 2) for W in (W_Q, W_K, W_V))
    most = V * (1 + r * (Q + K) / math.sqrt(2)) * (1 - a**T) / (1 - a)

    def slope(phi, X, Y):
        one, two = (retention.parallel(phi(x @ W_Q), phi(x @ W_K), x @ W_V, a)[0] for x in (X, Y))
        return np.max(np.linalg.norm(one - two, axis=1)) / np.max(np.linalg.norm(X - Y, axis=1))

    assert slope(phi_a, X, X + 1e-3 * direction) <= most
    assert slope(lambda x: 1e3 * x, X, X + 1e-3 * direction) > most
    near = 1e-9 * direction
    assert slope(phi_b, np.concatenate([X[:-1], near[-1:]]), np.concatenate([X[:-1], -near[-1:]])) > most
