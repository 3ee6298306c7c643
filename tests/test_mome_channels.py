"""Routers that weigh the experts of each key channel by themselves, readings R4 and R6."""

from __future__ import annotations

import numpy as np
import pytest

from mixproof.reference import mome_mixing, mome_routers
from mixproof.reference.primitives import softmax
from mixproof.verify.numbers.exact import GF

T, K, V, X = 7, 3, 2, 4


def recurrence(q, k, v, E, a, S0):
    """y_n = q_n sum_j diag(E_n^j) S^j_n, token by token."""
    S, rows = [S0[j] for j in range(X)], []
    for n in range(len(q)):
        S = [a[j] * S[j] + k[n][:, None] * v[n][None, :] for j in range(X)]
        rows.append(sum(q[n] @ (E[n, :, j][:, None] * S[j]) for j in range(X)))
    return np.stack(rows), np.stack(S)


@pytest.mark.parametrize("chunk", range(1, T + 2))
def test_experts_read_by_channel_are_retentions_over_a_field(chunk):
    g = np.random.default_rng(0)
    x = {"q": (T, K), "k": (T, K), "v": (T, V), "E": (T, K, X), "a": (X,), "S0": (X, K, V)}
    point = {name: GF.draw(g, shape) for name, shape in x.items()}
    for got, want in zip(mome_mixing.by_channel(**point, chunk=chunk), recurrence(**point), strict=True):
        assert np.all(got == want)


def test_equal_weights_of_all_channels_are_the_dense_read_mix():
    g = np.random.default_rng(1)
    point = {n: GF.draw(g, s) for n, s in {"q": (T, K), "k": (T, K), "v": (T, V), "a": (X,), "S0": (X, K, V)}.items()}
    r, ones = GF.draw(g, (T, X)), np.ones((T, X), np.int8)
    q, k, v, a, S0 = (point[n] for n in ("q", "k", "v", "a", "S0"))
    one = mome_mixing.by_channel(q, k, v, np.broadcast_to(r[:, None, :], (T, K, X)), a, S0)
    two = mome_mixing.chunkwise(q, k, v, r, ones, ones, a, S0)
    assert all(bool(np.all(x == y)) for x, y in zip(one, two, strict=True))


@pytest.mark.parametrize("reading", ["R4", "R6"])
@pytest.mark.parametrize("zero", [False, True])
def test_gradients_are_those_of_autograd(reading, zero):
    torch = pytest.importorskip("torch")
    g = np.random.default_rng(2)
    shapes = {"q": (T, V), "k": (T, V), "v": (T, V), "a": (X,), "S0": (X, V, V)}
    x = {n: g.normal(size=s) / 2 for n, s in shapes.items()}
    x["a"] = np.array([0.0 if zero else 0.3, 0.9, -0.5, 1.0])
    W = g.normal(size=X if reading == "R4" else (V, X))
    x["E"] = softmax(getattr(mome_routers, reading)(x["k"], x["v"], W))
    G = {"Y": g.normal(size=(T, V)), "S": g.normal(size=(X, V, V))}
    got = mome_mixing.by_channel_vjp(G, **x, chunk=3)
    leaves = {n: torch.tensor(a, requires_grad=True) for n, a in x.items()}
    S, loss = [leaves["S0"][j] for j in range(X)], 0
    for n in range(T):
        S = [leaves["a"][j] * S[j] + torch.outer(leaves["k"][n], leaves["v"][n]) for j in range(X)]
        y = sum(leaves["q"][n] @ (leaves["E"][n, :, j][:, None] * S[j]) for j in range(X))
        loss = loss + y @ torch.tensor(G["Y"][n])
    loss = loss + sum((S[j] * torch.tensor(G["S"][j])).sum() for j in range(X))
    for n, want in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
        # sums of at most T T V V X = 784 products of six factors, none above 4
        assert np.max(np.abs(got[n] - want.numpy())) <= 790 * 2.0**-53 * 784 * 4, n
