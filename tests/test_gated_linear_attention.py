"""Gated linear attention: TALA's decays by their logarithms, and the two expressions of the log-decays' gradient.

Tolerances are those of the gate: the same functions on balls. `within` adds those of two honest evaluations.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mixproof.reference import gated_linear_attention as gla
from mixproof.reference import operator
from mixproof.verify.arithmetic import natural
from mixproof.verify.numbers.array import Disagreement
from mixproof.verify.numbers.ball import Reading, tolerance
from mixproof.verify.numbers.certified import certified_error, enclose

DECAYED = {"gated_linear_attention.simple": "tala.time_varying", "gated_linear_attention": "tala.key_channel"}
NAMES = tuple(DECAYED)


def draw(name, T=13, K=3, V=2, depth=1.0, seed=0):
    """`depth` is the size of log-decays; states and queries without a scale of their own."""
    random = np.random.default_rng([seed, T, K, V])
    sizes = {"T": T, "K": K, "V": V}
    I = {x.name: random.standard_normal([sizes[n] for n in x.axes]) for x in operator(name).inputs}
    I |= {"g": -depth * np.abs(I["g"]), "scale": 0.375}
    return I, {"O": random.standard_normal((T, V)), "S": random.standard_normal((K, V))}


def decays(I):
    return {n: x for n, x in I.items() if n != "g"} | {"a": np.exp(I["g"])}


def forward_bounds(name, I, dtype="float64"):
    reading = Reading(natural(dtype))
    balls = {n: reading.ball(x) if n != "scale" else x for n, x in I.items()}
    found = operator(name).evaluate(balls)
    assert not reading.vacuous
    return [tolerance(x, dtype) for x in found.values()]


def backward_bounds(name, I, G, dtype="float64"):
    reading = Reading(natural(dtype))
    balls = {n: reading.ball(x) if n != "scale" else x for n, x in I.items()}
    found = operator(name).vjp({n: reading.ball(x) for n, x in G.items()}, **balls)
    assert not reading.vacuous
    return {n: tolerance(x, dtype) if hasattr(x, "w") else np.zeros(np.shape(x)) for n, x in found.items()}


def within(got, want, *bounds):
    assert np.all(np.isfinite(got))
    assert got.shape == want.shape
    assert np.all(np.abs(got - want) <= sum(bounds))


# --- forward ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("T", [0, 1, 7, 70])
def test_forms_are_those_of_the_decays(name, T):
    I, _ = draw(name, T)
    bounds = forward_bounds(name, I)
    other = forward_bounds(DECAYED[name], decays(I))
    for form in ("chunkwise", "parallel", "recurrent"):
        want = operator(DECAYED[name]).form(form).function(**decays(I))
        for got, w, *error in zip(operator(name).form(form).function(**I), want, bounds, other, strict=True):
            within(got, w, *error)
    for chunk in (1, 2, 5, T + 1):
        for got, w, *error in zip(operator(name).evaluate(I, chunk=chunk).values(), want, bounds, other, strict=True):
            within(got, w, *error)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["chunkwise", "parallel", "recurrent"])
def test_forms_are_enclosed(name, form):
    I, _ = draw(name, 6)
    function = operator(name).form(form).function
    for got, enclosure, error in zip(function(**I), enclose(function, I), forward_bounds(name, I), strict=True):
        assert np.all(certified_error(got, enclosure) <= error)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lowest", [-200.0, -1e4, -np.inf])
def test_full_decay_beside_none(name, lowest):
    """exp(g) is tiny, underflows, or is zero: the results are those of the decays, not nan."""
    I, G = draw(name)
    gone = (np.arange(13) % 3 == 0).reshape(-1, *(1,) * (I["g"].ndim - 1))
    I["g"] = np.where(np.broadcast_to(gone, I["g"].shape), lowest, 0.0)
    steps = decays(I)
    bounds = forward_bounds(DECAYED[name], steps)
    for form in ("chunkwise", "parallel", "recurrent"):
        got, want = operator(name).form(form).function(**I), operator(DECAYED[name]).form(form).function(**steps)
        for x, y, error in zip(got, want, bounds, strict=True):
            within(x, y, 2 * error)
    got, want = operator(name).vjp(G, **I, chunk=4), operator(DECAYED[name]).vjp(G, **steps)
    error = backward_bounds(DECAYED[name], steps, G)
    for n in ("q", "k", "v", "S0"):
        within(got[n], want[n], 2 * error[n])
    within(got["g"], steps["a"] * want["a"], 2 * error["a"])


# --- gradients -------------------------------------------------------------------------------------------------------


def autograd(I, G):
    """Gradients of the recurrence, token by token."""
    leaves = {n: torch.tensor(x, requires_grad=True) for n, x in I.items() if n != "scale"}
    S, loss = leaves["S0"], torch.zeros((), dtype=torch.float64)
    for q, k, v, g, dO in zip(*(leaves[n] for n in "qkvg"), torch.tensor(G["O"]), strict=True):
        S = torch.exp(g)[..., None] * S + torch.outer(k, v)
        loss = loss + I["scale"] * (q @ S) @ dO
    (loss + (S * torch.tensor(G["S"])).sum()).backward()
    return {n: np.zeros(x.shape) if x.grad is None else x.grad.numpy() for n, x in leaves.items()}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("T", [1, 2, 13, 70])
@pytest.mark.parametrize("depth", [0.0, 0.1, 3.0])
def test_vjp_is_autograd(name, T, depth):
    I, G = draw(name, T, depth=depth)
    want, error = autograd(I, G), backward_bounds(name, I, G)
    for chunk in (1, 5, 64):
        got = operator(name).vjp(G, **I, chunk=chunk)
        assert got.keys() == want.keys()
        for n in want:
            within(got[n], want[n], 2 * error[n])


@pytest.mark.parametrize("name", NAMES)
def test_vjp_is_enclosed(name):
    I, G = draw(name, 6)
    got, error = operator(name).vjp(G, **I, chunk=4), backward_bounds(name, I, G)
    for n, enclosure in enclose(operator(name).vjp, {"cotangents": G, **I}).items():
        assert np.all(enclosure.radius <= error[n] / 8)
        assert np.all(certified_error(got[n], enclosure) <= error[n]), n


@pytest.mark.parametrize("name", NAMES)
def test_gradient_is_that_of_the_decays_times_the_decays(name):
    I, G = draw(name)
    got, of_a = operator(name).vjp(G, **I), operator(DECAYED[name]).vjp(G, **decays(I))
    within(got["g"], np.exp(I["g"]) * of_a["a"], 2 * backward_bounds(name, I, G)["g"])


@settings(max_examples=10)
@given(st.sampled_from(NAMES), st.integers(0, 5), st.integers(1, 3), st.integers(1, 2), st.integers(0, 999))
def test_both_expressions_of_the_gradient_are_one(name, T, K, V, seed):
    """Enclosures of a_n da_n and of the sum over later tokens overlap, or `either` would raise."""
    I, G = draw(name, T, K, V, seed=seed)
    enclose(operator(name).vjp, {"cotangents": G, **I})


@pytest.mark.parametrize("name", NAMES)
def test_two_expressions_that_differ_are_told_apart(name, monkeypatch):
    """Without <S, dS>, which is what is most often left out, enclosures do not overlap."""
    I, G = draw(name, 4)
    honest = gla.state_gradients
    monkeypatch.setattr(gla, "state_gradients", lambda *args: (lambda grads, S: (grads, 0 * S))(*honest(*args)))
    with pytest.raises(Disagreement, match="two expressions of one quantity differ"):
        enclose(operator(name).vjp, {"cotangents": G, **I})


# --- the tolerance of the log-decays' gradient -----------------------------------------------------------------------


def without_states(I, G, dtype=np.float32, final=True):
    """dg by running sums over the whole sequence, in `dtype`: the formula of the libraries' recurrent kernels."""
    q, k, v, g, S0, dO, dS = (np.asarray(x, dtype) for x in (*(I[n] for n in ("q", "k", "v", "g", "S0")), *G.values()))
    a = np.exp(g)[:, None] if g.ndim == 1 else np.exp(g)
    scale, S, R = dtype(I["scale"]), S0, dS
    dq, dk = np.zeros_like(q), np.zeros_like(k)
    for n in range(len(q)):
        S = a[n][:, None] * S + np.outer(k[n], v[n])
        dq[n] = S @ dO[n] * scale
    for n in reversed(range(len(q))):
        R = R + np.outer(q[n], dO[n]) * scale
        dk[n] = R @ v[n]
        R = a[n][:, None] * R
    flow, left = q * dq - k * dk, np.sum(S * dS, axis=1)
    if g.ndim == 1:
        flow, left = np.sum(flow, axis=1), np.sum(left)
    return np.cumsum(flow[::-1], axis=0, dtype=dtype)[::-1] + final * left


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("depth", [0.02, 0.3, 2.0])
def test_running_sums_stay_within_the_tolerance(name, depth):
    """They cancel, so their error is far above that of stored states; and leaving <S, dS> out is far above theirs."""
    I, G = draw(name, 129, 4, 3, depth=depth)
    I, G = ({n: x if n == "scale" else np.float64(np.float32(x)) for n, x in d.items()} for d in (I, G))
    want, bound = operator(name).vjp(G, **I)["g"], backward_bounds(name, I, G, "float32")["g"]
    within(without_states(I, G), want, bound)
    wrong = np.abs(without_states(I, G, final=False) - want)
    assert np.max(wrong / bound) > 100
