"""Titans with a deep memory: a network of two layers, M(k) = W2 silu(W1 k), that learns while it reads.

Source: survey, section "Titans"; Behrouz et al. 2025 (9) to (15). As titans.py, with the gradient of ||M(k) - v||^2 by
backpropagation, at the memory before the token; both layers decay and keep momentum by the same gates. The memory that
a sequence starts from is learned: of weights that are zero both gradients are zero, and such a memory stays empty.

A write to a layer is a product of two vectors, so a layer is what is left of its start and a sum over tokens: `dual`
computes with the vectors, each a result of its own, and forms a layer only to hand it on.

    letter       shape            meaning
    q k v        (T, K)           what is asked for; keys, of norm one in the paper; values (T, V)
    alpha ..     (T,)             forgetting, momentum eta, step sizes theta, as in titans.py
    I1 I2        (F, K), (V, F)   the memory that is learned
    W1 W2        (F, K), (V, F)   the memory now; W10 and W20 come before the first token, I1 and I2 where absent
    S1 S2        (F, K), (V, F)   momenta; S10 and S20 come before the first token
    a h          (T, F)           W1 k and silu of it, at the memory before the token
    c g          (T, F)           W1 q and silu of it, at the memory after the token
    e b          (T, V), (T, F)   v - M(k), what the memory lacks, and W2^T e
    w1 w2        (T, F), (T, V)   what is written: w1 k^T to layer 1, w2 h^T to layer 2
    A H G        (T + 1, T + 1)   decays, as in titans.py
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .primitives import Array, settled, sigmoid, silu
from .spec import Form, Input, Operator, Output, check_cotangents, check_shapes
from .titans import outer, scans

Result = tuple[Array, Array, Array, Array, Array]


def dual(
    q: Array, k: Array, v: Array, alpha: Array, eta: Array, theta: Array, I1: Array, I2: Array,
    W10: Array = None, W20: Array = None, S10: Array = None, S20: Array = None,
) -> Result:  # fmt: skip
    """What each token writes, one after the other; then all reads at once.  -> y (T, V), W1, W2, S1, S2."""
    W1, W2, S1, S2 = _initial(q, k, v, alpha, eta, theta, I1, I2, W10, W20, S10, S20)
    x = _forward(q, k, v, alpha, eta, theta, W1, W2, S1, S2)
    A, H, G = x.A[-1:], x.H[-1:], x.G[-1:]
    layers = _memories(A, G, W1, S1, x.w1, k), _memories(A, G, W2, S2, x.w2, x.h)
    momenta = _momenta(H, S1, x.w1, k), _momenta(H, S2, x.w2, x.h)
    return x.y, *(last[0] for last in (*layers, *momenta))


def recurrent(
    q: Array, k: Array, v: Array, alpha: Array, eta: Array, theta: Array, I1: Array, I2: Array,
    W10: Array = None, W20: Array = None, S10: Array = None, S20: Array = None,
) -> Result:  # fmt: skip
    """S_t = eta_t S_{t-1} - theta_t grad ||M_{t-1}(k_t) - v_t||^2;  M_t = (1 - alpha_t) M_{t-1} + S_t;  y_t = M_t(q_t),
    with S and M those of each layer.  (10) (13) (14)"""
    W1, W2, S1, S2 = _initial(q, k, v, alpha, eta, theta, I1, I2, W10, W20, S10, S20)
    rows = [v[:0]]
    for t in range(len(q)):
        a = W1 @ k[t]
        h = silu(a)
        e = v[t] - W2 @ h
        d = slope(a) * (W2.T @ e)
        S1 = eta[t] * S1 + 2 * theta[t] * d[:, None] * k[t][None, :]
        S2 = eta[t] * S2 + 2 * theta[t] * e[:, None] * h[None, :]
        W1, W2 = (1 - alpha[t]) * W1 + S1, (1 - alpha[t]) * W2 + S2
        rows.append((W2 @ silu(W1 @ q[t]))[None])
    return np.concatenate(rows), W1, W2, S1, S2


def vjp(
    cotangents: dict[str, Array],
    q: Array, k: Array, v: Array, alpha: Array, eta: Array, theta: Array, I1: Array, I2: Array,
    W10: Array = None, W20: Array = None, S10: Array = None, S20: Array = None,
) -> dict[str, Array]:  # fmt: skip
    """Gradients of <y, dy> + <W1, dW1> + .. . R and Q are the cotangents of a layer and its momentum after each token.
    What a token writes is read by later ones, and by their inner gradients, so the last comes first."""
    check_cotangents(OPERATOR, cotangents, {"q": q, "v": v, "I1": I1})
    W1, W2, S1, S2 = _initial(q, k, v, alpha, eta, theta, I1, I2, W10, W20, S10, S20)
    x = _forward(q, k, v, alpha, eta, theta, W1, W2, S1, S2)
    A, H, G, h, e = x.A, x.H, x.G, x.h, x.e
    W1, W2 = _memories(A, G, W1, S1, x.w1, k), _memories(A, G, W2, S2, x.w2, h)
    S1, S2 = _momenta(H, S1, x.w1, k), _momenta(H, S2, x.w2, h)
    dy, rise, bend, twice = cotangents["y"], slope(x.a), curvature(x.a), 2 * theta[:, None]
    dc = settled((dy[:, None, :] @ W2[1:])[:, 0] * slope(x.c))

    def last(name: str, left: Array, right: Array) -> tuple[Array, Array]:
        """R and Q by what the last layers are and what tokens read."""
        dW, dS = cotangents[f"W{name}"], cotangents[f"S{name}"]
        R = A[-1][:, None, None] * dW + outer(A[1:].T, left, right)
        return R, G[-1][:, None, None] * dW + H[-1][:, None, None] * dS + outer(G[1:].T, left, right)

    (R1, Q1), (R2, Q2) = last("1", dc, q), last("2", dy, silu(x.c))
    da, db, de = 0 * x.a[:0], 0 * x.b[:0], 0 * v[:0]
    for t in reversed(range(len(q))):
        P = G[t + 1 : -1, t + 1 : t + 2].T
        of1 = Q1[t + 1] + outer(P, da, k[t + 1 :])[0]
        of2 = Q2[t + 1] + outer(P, e[t + 1 :], db)[0] - outer(P, de, h[t + 1 :])[0]
        dd = twice[t] * (of1 @ k[t])
        db_t = settled(dd * rise[t])
        de_t = settled(twice[t] * (of2 @ h[t]) + W2[t] @ db_t)
        dh = of2.T @ x.w2[t] - W2[t].T @ de_t
        da_t = settled(dd * x.b[t] * bend[t] + dh * rise[t])
        da, db, de = (np.concatenate([new[None], d]) for new, d in ((da_t, da), (db_t, db), (de_t, de)))
    R1, Q1 = R1 + outer(A[:-1].T, da, k), Q1 + outer(G[:-1].T, da, k)
    R2 = R2 + outer(A[:-1].T, e, db) - outer(A[:-1].T, de, h)
    Q2 = Q2 + outer(G[:-1].T, e, db) - outer(G[:-1].T, de, h)

    dw1, dw2 = (Q1[1:] @ k[:, :, None])[:, :, 0], (Q2[1:] @ h[:, :, None])[:, :, 0]
    grads = {
        "q": (dc[:, None, :] @ W1[1:])[:, 0],
        "k": (x.w1[:, None, :] @ Q1[1:])[:, 0] + (da[:, None, :] @ W1[:-1])[:, 0],
        "v": de,
        "alpha": -np.sum(R1[1:] * W1[:-1], axis=(1, 2)) - np.sum(R2[1:] * W2[:-1], axis=(1, 2)),
        "eta": np.sum(Q1[1:] * S1[:-1], axis=(1, 2)) + np.sum(Q2[1:] * S2[:-1], axis=(1, 2)),
        "theta": 2 * np.sum(dw1 * x.b * rise, axis=1) + 2 * np.sum(dw2 * e, axis=1),
        "S10": Q1[0],
        "S20": Q2[0],
    }
    for name, learned, given, d in (("1", I1, W10, R1[0]), ("2", I2, W20, R2[0])):
        grads |= {f"I{name}": d if given is None else 0 * learned, f"W{name}0": 0 * d if given is None else d}
    return grads


def slope(a: Array) -> Array:
    """The derivative of silu."""
    return _slope(a, sigmoid(a))


def curvature(a: Array) -> Array:
    """The second derivative of silu."""
    s = sigmoid(a)
    return s * (1 - s) * (2 + a * (1 - 2 * s))


def _slope(a: Array, s: Array) -> Array:
    return s * (1 + a * (1 - s))


class _Trace(NamedTuple):
    """y, decays, and what the letters of the table are for every token."""

    y: Array
    A: Array
    H: Array
    G: Array
    a: Array
    h: Array
    e: Array
    b: Array
    w1: Array
    w2: Array
    c: Array


def _forward(
    q: Array, k: Array, v: Array, alpha: Array, eta: Array, theta: Array, W1: Array, W2: Array, S1: Array, S2: Array
) -> _Trace:
    A, H, G = scans(alpha, eta)
    left1 = A[:-1, :1] * (k @ W1.T) + G[:-1, :1] * (k @ S1.T)
    left2 = A[:-1, :1, None] * W2 + G[:-1, :1, None] * S2
    seen, twice = (k @ k.T) * G[:-1, 1:], 2 * theta[:, None]
    hidden, values = k[:0] @ W1.T, v[:0]
    h, w1, w2, a, b, e = hidden, hidden, values, [hidden], [hidden], [values]
    for t in range(len(q)):
        a_t = settled(left1[t] + seen[t, :t] @ w1)
        s_t, left, share = sigmoid(a_t), left2[t], G[t, 1 : t + 1]
        h_t = a_t * s_t
        e_t = settled(v[t] - left @ h_t - (h @ h_t * share) @ w2)
        b_t = settled(left.T @ e_t + (w2 @ e_t * share) @ h)
        new = h_t, twice[t] * b_t * _slope(a_t, s_t), twice[t] * e_t
        h, w1, w2 = (np.concatenate([x, y[None]]) for x, y in zip((h, w1, w2), new, strict=True))
        for rows, x in ((a, a_t), (b, b_t), (e, e_t)):
            rows.append(x[None])
    inside, A1, G1 = G[1:, 1:], A[1:, :1], G[1:, :1]
    c = settled(A1 * (q @ W1.T) + G1 * (q @ S1.T) + ((q @ k.T) * inside) @ w1)
    g = silu(c)
    y = A1 * (g @ W2.T) + G1 * (g @ S2.T) + ((g @ h.T) * inside) @ w2
    return _Trace(y, A, H, G, np.concatenate(a), h, np.concatenate(e), np.concatenate(b), w1, w2, c)


def _memories(A: Array, G: Array, W: Array, S: Array, writes: Array, keys: Array) -> Array:
    """A layer after each number of tokens for which A and G have a row."""
    return A[:, :1, None] * W + G[:, :1, None] * S + outer(G[:, 1:], writes, keys)


def _momenta(H: Array, S: Array, writes: Array, keys: Array) -> Array:
    return H[:, :1, None] * S + outer(H[:, 1:], writes, keys)


def _initial(
    q: Array, k: Array, v: Array, alpha: Array, eta: Array, theta: Array, I1: Array, I2: Array, W10: Array, W20: Array,
    S10: Array, S20: Array,
) -> tuple[Array, Array, Array, Array]:  # fmt: skip
    tokens = {"q": q, "k": k, "v": v, "alpha": alpha, "eta": eta, "theta": theta}
    layers = {"I1": I1, "I2": I2, "W10": W10, "W20": W20, "S10": S10, "S20": S20}
    check_shapes(OPERATOR, tokens | layers)
    W1, W2 = I1 if W10 is None else W10, I2 if W20 is None else W20
    return W1, W2, 0 * I1 if S10 is None else S10, 0 * I2 if S20 is None else S20


OPERATOR = Operator(
    name="titans.mlp",
    summary="titans.linear with M(k) = W2 silu(W1 k): S_t = eta_t S_{t-1} - theta_t grad ||M_{t-1}(k_t) - v_t||^2",
    source="survey, Titans; Behrouz et al. 2025 (9)-(15)",
    inputs=(
        Input("q", ("T", "K"), "token", "query"),
        Input("k", ("T", "K"), "token", "unit"),
        Input("v", ("T", "V"), "token", "target"),
        Input("alpha", ("T",), "token", "unit_gate"),
        Input("eta", ("T",), "token", "unit_gate"),
        Input("theta", ("T",), "token", "learning_rate"),
        Input("I1", ("F", "K"), "parameter", "weight"),
        Input("I2", ("V", "F"), "parameter", "weight"),
        Input("W10", ("F", "K"), "state", "weight", carries="W1"),
        Input("W20", ("V", "F"), "state", "weight", carries="W2"),
        Input("S10", ("F", "K"), "state", "small_weight", carries="S1"),
        Input("S20", ("V", "F"), "state", "small_weight", carries="S2"),
    ),
    outputs=(
        Output("y", ("T", "V")),
        Output("W1", ("F", "K"), "state"),
        Output("W2", ("V", "F"), "state"),
        Output("S1", ("F", "K"), "state"),
        Output("S2", ("V", "F"), "state"),
    ),
    forms=(Form("dual", dual), Form("recurrent", recurrent)),
    vjp=vjp,
    causal=True,
    laws=("relabelling",),
)
