"""Linear attention: as printed, in exact arithmetic; its gradients against those of Gaussian mixture attention, whose
algebra is the same, and against autograd."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixproof.reference import gma_mixing, linear_attention, operator
from mixproof.verify.arithmetic import natural
from mixproof.verify.numbers.ball import Reading, tolerance

OPERATOR = operator("linear_attention")


def exact(seed, T, K=3, V=2):
    """Inputs and cotangents, all of them positive rationals with small denominators."""
    g = np.random.default_rng([seed, T, K, V])

    def draw(*shape):
        numbers = [Fraction(int(a), int(b)) for a, b in g.integers(1, 50, size=(math.prod(shape), 2))]
        return np.array([*numbers, None], dtype=object)[:-1].reshape(shape)

    inputs = {"q": draw(T, K), "k": draw(T, K), "v": draw(T, V), "eps": Fraction(1, 7)}
    inputs |= {"S0": draw(K, V), "z0": draw(K)}
    return inputs, {"O": draw(T, V), "S": draw(K, V), "z": draw(K)}


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_two_tokens_by_hand():
    """q = k = 1: means of 3 and of (3, 5); a key of weight two counts twice; eps counts like a value of zero."""
    one = np.ones((2, 1))
    v = np.array([[3.0], [5.0]])
    for form in OPERATOR.forms:
        O, S, z = form.function(one, one, v)
        assert (O.tolist(), S.tolist(), z.tolist()) == ([[3.0], [4.0]], [[8.0]], [2.0])
        assert form.function(one, one * [[2], [1]], v)[0].tolist() == [[3.0], [11 / 3]]
        assert form.function(one, one, v, eps=1.0)[0].tolist() == [[1.5], [8 / 3]]


@pytest.mark.parametrize("T", [0, 1, 2, 5, 8])
def test_forms_are_the_printed_sums(T):
    """(5) restricted to j <= i, with an initial memory, as a double loop."""
    I, _ = exact(0, T)
    K, V = I["S0"].shape
    want = []
    for i in range(T):
        weights = [sum(I["q"][i] * I["k"][j]) for j in range(i + 1)]
        D = sum(weights) + sum(I["q"][i] * I["z0"]) + I["eps"]
        rows = [sum(w * I["v"][j, c] for j, w in enumerate(weights)) for c in range(V)]
        want.append([(rows[c] + sum(I["q"][i] * I["S0"][:, c])) / D for c in range(V)])
    S = I["S0"] + sum((np.outer(I["k"][j], I["v"][j]) for j in range(T)), start=np.full((K, V), Fraction(0)))
    z = I["z0"] + sum(I["k"], start=np.full(K, Fraction(0)))
    want = (np.array(want, dtype=object).reshape(T, V), S, z)
    assert same(linear_attention.recurrent(**I), want)
    assert same(linear_attention.parallel(**I), want)
    assert all(same(linear_attention.chunkwise(**I, chunk=c), want) for c in range(1, T + 2))


@pytest.mark.parametrize("T", [0, 1, 2, 5, 8])
def test_vjp_is_that_of_gaussian_mixture_attention(T):
    """The same algebra with responsibilities for features: there derived token by token."""
    I, G = exact(1, T)
    renamed = {"GQ": I["q"], "GK": I["k"], "V": I["v"], "eps": I["eps"], "S0": I["S0"], "Z0": I["z0"]}
    want = gma_mixing.recurrent_vjp({"O": G["O"], "S": G["S"], "Z": G["z"]}, **renamed)
    names = {"q": "GQ", "k": "GK", "v": "V", "S0": "S0", "z0": "Z0"}
    for chunk in range(1, T + 2):
        got = linear_attention.vjp(G, **I, chunk=chunk)
        assert got.keys() == names.keys()
        assert all(np.array_equal(got[n], want[m]) for n, m in names.items())


@pytest.mark.parametrize("eps", [0.0, 0.3])
def test_vjp_is_autograd(eps):
    torch = pytest.importorskip("torch")
    g = np.random.default_rng(3)
    I = {"q": g.random((7, 3)) + 0.1, "k": g.random((7, 3)) + 0.1, "v": g.standard_normal((7, 2))}
    I |= {"S0": g.standard_normal((3, 2)), "z0": g.random(3)}
    G = {"O": g.standard_normal((7, 2)), "S": g.standard_normal((3, 2)), "z": g.standard_normal(3)}
    x = {n: torch.tensor(a, requires_grad=True) for n, a in I.items()}
    A = (x["q"] @ x["k"].T).tril()
    O = (x["q"] @ x["S0"] + A @ x["v"]) / (x["q"] @ x["z0"] + A.sum(1) + eps)[:, None]
    outputs = {"O": O, "S": x["S0"] + x["k"].T @ x["v"], "z": x["z0"] + x["k"].sum(0)}
    sum((outputs[n] * torch.tensor(G[n])).sum() for n in G).backward()
    reading = Reading(natural("float64"))
    balls, upstream = ({n: reading.ball(a) for n, a in some.items()} for some in (I, G))
    bounds = linear_attention.vjp(upstream, **balls, eps=eps)
    assert not reading.vacuous
    for n, d in linear_attention.vjp(G, **I, eps=eps).items():
        assert np.all(np.abs(d - x[n].grad.numpy()) <= 2 * tolerance(bounds[n], "float64")), n


@given(st.permutations(range(6)), st.integers(0, 99))
def test_the_order_of_the_past_is_forgotten(order, seed):
    """Without decay the last token reads a set: any order of it and those before gives the same, exactly."""
    I, _ = exact(seed, 7)
    moved = I | {n: np.concatenate([I[n][list(order)], I[n][6:]]) for n in "kv"}
    (a, *states), (b, *others) = linear_attention.chunkwise(**I, chunk=3), linear_attention.chunkwise(**moved, chunk=3)
    assert np.array_equal(a[6], b[6])
    assert same(states, others)


def test_no_state_is_a_state_of_zeros():
    I, G = exact(2, 5)
    zeros = I | {"S0": 0 * I["S0"], "z0": 0 * I["z0"]}
    absent = {n: x for n, x in I.items() if n not in ("S0", "z0")}
    for form in OPERATOR.forms:
        assert same(form.function(**absent), form.function(**zeros))
    got, want = linear_attention.vjp(G, **absent), linear_attention.vjp(G, **zeros)
    assert all(np.array_equal(got[n], want[n]) for n in want)
