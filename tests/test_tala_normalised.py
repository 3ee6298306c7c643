"""The three normalised readings of TALA: as printed, in exact arithmetic; gradients; what each of them keeps.

Everything but the group norms is rational, so most laws are checked with fractions and hold to the last digit.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixproof.reference import linear_attention, operator, retention, tala_normalised
from mixproof.reference.primitives import group_norm
from mixproof.verify.arithmetic import natural
from mixproof.verify.numbers.ball import Reading, tolerance
from mixproof.verify.numbers.exact import RATIONALS

NAMES = ("tala.n1", "tala.n2", "tala.n3")
ONE = Fraction(1)
seeds = st.integers(0, 10**6)


def fractions(g, *shape):
    numbers = [Fraction(int(a), int(b)) for a, b in g.integers(1, 40, size=(math.prod(shape), 2))]
    return np.array([*numbers, None], dtype=object)[:-1].reshape(shape)


def exact(name, seed, T, K=3, V=2, state=True, a=None):
    """Inputs and cotangents in positive fractions."""
    g = np.random.default_rng([seed, T, K, V])
    sizes = {"T": T, "K": K, "V": V, "D": K}
    o = operator(name)
    I = {x.name: fractions(g, *(sizes[s] for s in x.axes)) for x in o.inputs if state or x.role != "state"}
    I |= {x.name: fractions(g)[()] for x in o.inputs if not x.axes}
    I["a"] = Fraction(int(g.integers(1, 9)), 8) if a is None else a
    return I, {y.name: fractions(g, *(sizes[s] for s in y.axes)) for y in o.outputs}


def real(name, seed, T=7, K=3, V=2, eps=0.0):
    g = np.random.default_rng(seed)
    sizes = {"T": T, "K": K, "V": V, "D": K}
    o = operator(name)
    I = {x.name: g.standard_normal(tuple(sizes[s] for s in x.axes)) for x in o.inputs if x.axes}
    I = {n: np.exp(x / 2) if n in ("q", "k", "z0") else x for n, x in I.items()}
    I |= {"a": np.float64(0.8)} | ({"eps": eps} if name == "tala.n2" else {})
    return I, {y.name: g.standard_normal(tuple(sizes[s] for s in y.axes)) for y in o.outputs}


def over_rationals(f):
    """f of arrays of fractions. The reference's own constants (a scale of 1.0) would turn those into floats."""

    def wrapped(*cotangents, **inputs):
        def lift(x):
            return RATIONALS(x) if isinstance(x, np.ndarray | Fraction) else x

        found = f(*({n: lift(x) for n, x in c.items()} for c in cotangents), **{n: lift(x) for n, x in inputs.items()})
        return {n: x.data for n, x in found.items()} if isinstance(found, dict) else tuple(x.data for x in found)

    return wrapped


n1, n2, n3, n1_vjp, n2_vjp, n3_vjp = (
    over_rationals(getattr(tala_normalised, name)) for name in ("n1", "n2", "n3", "n1_vjp", "n2_vjp", "n3_vjp")
)


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def printed(name, q, k, v, a, eps=0, S0=None, x0=None, z0=None):
    """(12) as a double sum, state and all, by the element."""
    T, K = k.shape
    D = v.shape[1]
    zero = Fraction(0)
    rows = []
    for t in range(T):
        w = [a ** (t - i) for i in range(t + 1)]

        def z(c, w=w, t=t):
            return sum((w[i] * k[i, c] for i in range(t + 1)), zero) + (0 if z0 is None else a ** (t + 1) * z0[c])

        def S(c, d, w=w, t=t):
            first = S0[c, d] if S0 is not None else x0[c] if x0 is not None else 0
            return sum((w[i] * k[i, c] * v[i, d] for i in range(t + 1)), zero) + a ** (t + 1) * first

        if name == "tala.n1":
            rows.append([q[t, c] * S(c, c) / z(c) for c in range(K)])
        elif name == "tala.n2":
            den = sum(q[t, c] * z(c) for c in range(K)) + eps
            rows.append([sum(q[t, c] * S(c, d) for c in range(K)) / den for d in range(D)])
        else:
            rows.append([sum(q[t, c] / z(c) * S(c, d) for c in range(K)) for d in range(D)])
    return np.array(rows, dtype=object).reshape(T, D)


# --- forms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("T", [0, 1, 2, 5, 8])
def test_forms_are_the_printed_sums(name, T):
    for state in (True, False):
        I, _ = exact(name, 0, T, state=state)
        chunkwise, parallel, recurrent = (over_rationals(f.function) for f in operator(name).forms)
        want = recurrent(**I)
        assert np.array_equal(want[0], printed(name, **I))
        assert same(parallel(**I), want)
        assert all(same(chunkwise(**I, chunk=c), want) for c in range(1, T + 2))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_do_not_depend_on_the_chunk(name):
    I, G = exact(name, 1, 7)
    vjp = over_rationals(operator(name).vjp)
    want = vjp(G, **I, chunk=7)
    for chunk in (1, 2, 3, 5, 64):
        got = vjp(G, **I, chunk=chunk)
        assert got.keys() == want.keys()
        assert all(np.array_equal(got[n], want[n]) for n in want)


def torch_forward(name, x, eps):
    """Token by token."""
    import torch

    matrix = name != "tala.n1"
    S, z, rows = x["S0" if matrix else "x0"], x["z0"], []
    for q, k, v in zip(x["q"], x["k"], x["v"], strict=True):
        S, z = x["a"] * S + (torch.outer(k, v) if matrix else k * v), x["a"] * z + k
        if name == "tala.n1":
            rows.append(q * S / z)
        elif name == "tala.n2":
            rows.append(q @ S / (q @ z + eps))
        else:
            rows.append(q / z @ S)
    return {"O": torch.stack(rows), "S" if matrix else "x": S, "z": z}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("eps", [0.0, 0.3])
def test_vjp_is_autograd(name, eps):
    torch = pytest.importorskip("torch")
    I, G = real(name, 2, eps=eps)
    arrays = {n: a for n, a in I.items() if n != "eps"}
    x = {n: torch.tensor(a, requires_grad=True) for n, a in arrays.items()}
    outputs = torch_forward(name, x, eps)
    sum((outputs[n] * torch.tensor(G[n])).sum() for n in G).backward()
    reading = Reading(natural("float64"))
    balls, upstream = ({n: reading.ball(a) for n, a in some.items()} for some in (arrays, G))
    bounds = operator(name).vjp(upstream, **(I | balls))
    got = operator(name).vjp(G, **I)
    assert not reading.vacuous
    assert got.keys() == x.keys()
    for n, d in got.items():
        assert np.all(np.abs(d - x[n].grad.numpy()) <= 2 * tolerance(bounds[n], "float64")), n


# --- the three against each other, and against neighbours ------------------------------------------------------------


@given(seeds)
@settings(max_examples=10)
def test_n1_is_n2_channel_by_channel(seed):
    """N1 = q * N2 with heads of one channel; of one channel, N2 = N1 / q = N3 / q."""
    I, _ = exact("tala.n1", seed, 5)
    O, x, z = n1(**I, chunk=2)
    for c in range(3):
        one = {n: I[n][:, c : c + 1] for n in "qkv"} | {"a": I["a"]}
        state = {"S0": I["x0"][c : c + 1, None], "z0": I["z0"][c : c + 1]}
        (mean, S, Z), (third, _, _) = n2(**one, **state, chunk=3), n3(**one, **state, chunk=3)
        assert np.array_equal(one["q"] * mean, O[:, c : c + 1])
        assert np.array_equal(third, O[:, c : c + 1])
        assert (S[0, 0], Z[0]) == (x[c], z[c])


@pytest.mark.parametrize("seed", range(5))
def test_n1_is_rwkv4(seed):
    """RWKV-4 adds e^u k to undecayed sums of the past and then decays them: with a e^u = 1 it is N1 / q, exactly."""
    I, _ = exact("tala.n1", seed, 6)
    a, bonus = I["a"], 1 / I["a"]
    A, B, rows = I["x0"], I["z0"], []
    for k, v in zip(I["k"], I["v"], strict=True):
        rows.append((A + bonus * k * v) / (B + bonus * k))
        A, B = a * A + k * v, a * B + k
    O, x, z = n1(**I, chunk=4)
    assert np.array_equal(O, I["q"] * np.stack(rows))
    assert same((x, z), (A, B))


@pytest.mark.parametrize("seed", range(5))
def test_n2_without_decay_is_linear_attention(seed):
    I, G = exact("tala.n2", seed, 6, a=ONE)
    plain = {n: x for n, x in I.items() if n != "a"}
    form, vjp = over_rationals(linear_attention.chunkwise), over_rationals(linear_attention.vjp)
    assert same(n2(**I, chunk=4), form(**plain, chunk=5))
    got, want = n2_vjp(G, **I, chunk=4), vjp(G, **plain, chunk=5)
    assert all(np.array_equal(got[n], want[n]) for n in want)


def test_a_decay_of_zero_reads_the_token_itself():
    I, _ = exact("tala.n2", 0, 5, a=Fraction(0))
    assert np.array_equal(n2(**(I | {"eps": 0}))[0], I["v"])
    I, _ = exact("tala.n1", 0, 5, a=Fraction(0))
    assert np.array_equal(n1(**I)[0], I["q"] * I["v"])


def test_a_negative_decay_can_divide_by_zero():
    one = np.array([[ONE], [ONE]])
    with pytest.raises(ZeroDivisionError):
        n2(q=one, k=one, v=one, a=Fraction(-1))


@pytest.mark.parametrize("seed", range(3))
def test_column_constants_of_k_cancel_where_channels_are_normalised_apart(seed):
    """A norm over K's columns is a constant per channel: N1 and N3 do not see it, N2 does."""
    c = np.array([Fraction(3, 2), Fraction(1, 5), Fraction(7)])
    for name, form, unchanged in (("tala.n1", n1, True), ("tala.n2", n2, False), ("tala.n3", n3, True)):
        I, _ = exact(name, seed, 5, state=False)
        O, scaled = form(**I)[0], form(**(I | {"k": I["k"] * c}))[0]
        assert np.array_equal(O, scaled) is unchanged


# --- laws ------------------------------------------------------------------------------------------------------------


@given(seeds)
@settings(max_examples=10)
def test_n2_is_a_mean_of_past_values(seed):
    """L26 to L28, L31, L32 without eps and state: in the hull, constants kept, shifts followed, the first value first,
    no change of v grows; and a constant under N1 and N3 is q times it, and sum q times it."""
    I, _ = exact("tala.n2", seed, 6, state=False)
    I["eps"] = 0
    v = I["v"] - fractions(np.random.default_rng(seed + 1), 6, 2)
    O = n2(**(I | {"v": v}), chunk=4)[0]
    assert all(np.min(v[: t + 1, c]) <= O[t, c] <= np.max(v[: t + 1, c]) for t in range(6) for c in range(2))
    assert np.array_equal(O[0], v[0])
    assert np.array_equal(n2(**(I | {"v": v + Fraction(5, 3)}), chunk=4)[0], O + Fraction(5, 3))
    other = n2(**I, chunk=4)[0]
    assert np.max(np.abs(O - other)) <= np.max(np.abs(v - I["v"]))
    c = np.full((6, 2), Fraction(5, 3))
    assert np.array_equal(n2(**(I | {"v": c}))[0], c)
    matrix = {n: I[n] for n in "qka"}
    assert np.array_equal(n3(**matrix, v=c)[0], c * np.sum(I["q"], axis=1)[:, None])
    assert np.array_equal(n1(**matrix, v=np.full((6, 3), Fraction(5, 3)))[0], I["q"] * Fraction(5, 3))


@given(seeds)
@settings(max_examples=10)
def test_n2_does_not_see_the_sizes_of_queries_and_of_all_keys(seed):
    """L29 and L30, for any factors: one per query; one for all keys and the state."""
    I, _ = exact("tala.n2", seed, 5)
    I["eps"] = 0
    c, (O, S, z) = Fraction(7, 3), n2(**I, chunk=2)
    sizes = fractions(np.random.default_rng(seed), 5, 1)
    assert same(n2(**(I | {"q": sizes * I["q"]}), chunk=2), (O, S, z))
    scaled = {n: c * I[n] for n in ("k", "S0", "z0")}
    assert same(n2(**(I | scaled), chunk=2), (O, c * S, c * z))


@given(seeds)
@settings(max_examples=10)
def test_gradients_of_n2_follow_from_that(seed):
    """q . dq = 0 for every token; <k, dk> + <S0, dS0> + <z0, dz0> = <S, dS> + <z, dz>. With eps, neither."""
    I, G = exact("tala.n2", seed, 5)
    for eps, zero in ((0, True), (Fraction(1, 3), False)):
        I["eps"] = eps
        d, (_, S, z) = n2_vjp(G, **I, chunk=2), n2(**I, chunk=2)
        assert all((x == 0) is zero for x in np.sum(I["q"] * d["q"], axis=1))
        left = sum(np.sum(I[n] * d[n]) for n in ("k", "S0", "z0"))
        assert (left == np.sum(S * G["S"]) + np.sum(z * G["z"])) is zero


@given(seeds)
@settings(max_examples=10)
def test_gradients_of_n1_and_n3_are_of_degree_one_in_q(seed):
    """q . dq = o . do for every token, and the keys and states as for N2."""
    for name, form, vjp in (("tala.n1", n1, n1_vjp), ("tala.n3", n3, n3_vjp)):
        I, G = exact(name, seed, 5)
        d, (O, S, z) = vjp(G, **I, chunk=2), form(**I, chunk=2)
        assert np.array_equal(np.sum(I["q"] * d["q"], axis=1), np.sum(O * G["O"], axis=1))
        first = "S0" if name == "tala.n3" else "x0"
        left = sum(np.sum(I[n] * d[n]) for n in ("k", first, "z0"))
        assert left == np.sum(S * G["S" if name == "tala.n3" else "x"]) + np.sum(z * G["z"])


@pytest.mark.parametrize("seed", range(5))
def test_a_group_norm_takes_out_the_normaliser_of_n2_alone(seed):
    """L43 for eps = 0: a positive factor per row. Those of N1 and N3, one per channel, stay; an eps of 1e-5 shows."""
    I, _ = real("tala.n2", seed, T=9, K=4, V=4)
    I = {n: I[n] for n in ("q", "k", "v", "a")}
    reading = Reading(natural("float64"))
    balls = {n: reading.ball(x) for n, x in I.items()}

    def normed(form, eps, x):
        return group_norm(form(**x)[0], eps)

    plain = retention.chunkwise(I["q"], I["k"], I["v"], I["a"])[0]
    bound = tolerance(group_norm(retention.chunkwise(*balls.values())[0], 0.0), "float64")
    bound = bound + tolerance(normed(tala_normalised.n2, 0.0, balls), "float64")
    assert not reading.vacuous
    assert np.all(np.abs(normed(tala_normalised.n2, 0.0, I) - group_norm(plain, 0.0)) <= bound)
    for form in (tala_normalised.n1, tala_normalised.n3):
        assert np.max(np.abs(normed(form, 0.0, I) - group_norm(plain, 0.0))) > 0.01
    assert np.max(np.abs(normed(tala_normalised.n2, 1e-5, I) - group_norm(plain, 1e-5)) / bound) > 100
