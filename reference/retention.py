"""Retention: linear attention whose state decays by a constant factor per token and head.

Source: survey (arXiv text in the design record), section "RetNet"; Sun et al. 2023, equations (1) to (7), without
xPos, gate and group norm. The scale is an argument: the paper folds 1/sqrt(K) into k, libraries put it on q.

    letter  paper      shape     meaning
    q k v   Q K V      (T, K)    tokens' queries, keys; v (T, V)
    gamma   gamma      ()        decay in [0, 1]
    S0 S    S          (K, V)    state before the first and after the last token
"""

from __future__ import annotations

import numpy as np

from .primitives import Array, causal_mask, decay, masked, starts
from .spec import Form, Input, Operator, Output, check_cotangents, check_shapes


def recurrent(q: Array, k: Array, v: Array, gamma: Array, scale: float = 1.0, S0: Array = None) -> tuple[Array, Array]:
    """S_n = gamma S_{n-1} + k_n^T v_n;  o_n = scale q_n S_n.  (T, K), (T, K), (T, V) -> (T, V), (K, V)."""
    S = _initial(q, k, v, S0)
    rows = []
    for n in range(len(q)):
        S = gamma * S + k[n][:, None] * v[n][None, :]
        rows.append(q[n] @ S * scale)
    return (np.stack(rows) if rows else q @ S), S


def parallel(q: Array, k: Array, v: Array, gamma: Array, scale: float = 1.0, S0: Array = None) -> tuple[Array, Array]:
    """O = scale ((Q K^T) * D) V with D_nm = gamma^(n-m) for n >= m, else 0."""
    T = len(q)
    S0 = _initial(q, k, v, S0)
    n = np.arange(T)
    D = masked(decay(gamma, np.maximum(n[:, None] - n[None, :], 0)), causal_mask(T), 0)
    O = ((q @ k.T) * D) @ v * scale + decay(gamma, n + 1)[:, None] * (q @ S0) * scale
    S = (k * decay(gamma, T - 1 - n)[:, None]).T @ v + decay(gamma, np.asarray(T)) * S0
    return O, S


def chunkwise(
    q: Array, k: Array, v: Array, gamma: Array, scale: float = 1.0, S0: Array = None, chunk: int = 64
) -> tuple[Array, Array]:
    """The parallel form inside chunks, the state across them; the last chunk may be short."""
    S = _initial(q, k, v, S0)
    rows = [q[:0] @ S]
    for a in starts(len(q), chunk):
        O, S = parallel(q[a : a + chunk], k[a : a + chunk], v[a : a + chunk], gamma, scale, S)
        rows.append(O)
    return np.concatenate(rows), S


def vjp(
    cotangents: dict[str, Array],
    q: Array,
    k: Array,
    v: Array,
    gamma: Array,
    scale: float = 1.0,
    S0: Array = None,
    chunk: int = 64,
) -> dict[str, Array]:
    """Gradients of <O, dO> + <S, dS> for every input, chunk by chunk backwards with the cotangent R of the state."""
    check_cotangents(OPERATOR, cotangents, {"q": q, "v": v})
    S = _initial(q, k, v, S0)
    first = starts(len(q), chunk)
    states = []
    for a in first:
        states.append(S)
        S = parallel(q[a : a + chunk], k[a : a + chunk], v[a : a + chunk], gamma, scale, S)[1]
    G, R = cotangents["O"], cotangents["S"]
    rows: dict[str, list[Array]] = {"q": [0 * q[:0]], "k": [0 * k[:0]], "v": [0 * v[:0]]}
    dgamma = np.sum(0 * R)
    for a, S in zip(reversed(first), reversed(states), strict=True):
        c = slice(a, a + chunk)
        grads = _vjp_parallel(G[c], R, q[c], k[c], v[c], gamma, scale, S)
        for name, r in rows.items():
            r.append(grads[name])
        dgamma, R = dgamma + grads["gamma"], grads["S0"]
    return {name: np.concatenate(r[::-1]) for name, r in rows.items()} | {"gamma": dgamma, "S0": R}


def _vjp_parallel(
    G: Array, R: Array, q: Array, k: Array, v: Array, gamma: Array, scale: float, S0: Array
) -> dict[str, Array]:
    """With D the decay mask, w_n = gamma^(n+1) the decay of S0 and u_m = gamma^(T-1-m) that of the write of token m."""
    T = len(q)
    n = np.arange(T, dtype=np.int16)  # small, so that float32 times it stays float32
    distance, keep = np.maximum(n[:, None] - n[None, :], 0), causal_mask(T)
    D = masked(decay(gamma, distance), keep, 0)
    w, u = decay(gamma, n + 1)[:, None], decay(gamma, T - 1 - n)[:, None]
    A, dA = q @ k.T, G @ v.T * scale
    dD = masked(distance * decay(gamma, np.maximum(distance - 1, 0)), keep, 0)
    dw, du = (
        (n + 1)[:, None] * decay(gamma, n)[:, None],
        (T - 1 - n)[:, None] * decay(gamma, np.maximum(T - 2 - n, 0))[:, None],
    )
    return {
        "q": (dA * D) @ k + w * (G @ S0.T) * scale,
        "k": (dA * D).T @ q + u * (v @ R.T),
        "v": (A * D).T @ G * scale + u * (k @ R),
        "S0": (w * q).T @ G * scale + decay(gamma, np.asarray(T)) * R,
        "gamma": np.sum((A * dD) @ v * G) * scale  # sum A dA dD, as a product: what meets v may be rounded for it
        + np.sum(dw * (q @ S0) * G) * scale
        + np.sum(du * (k @ R) * v)
        + T * decay(gamma, np.asarray(max(T - 1, 0))) * np.sum(S0 * R),
    }


def _initial(q: Array, k: Array, v: Array, S0: Array) -> Array:
    check_shapes(OPERATOR, {"q": q, "k": k, "v": v, "S0": S0})
    return k[:0].T @ v[:0] if S0 is None else S0


FORMS = (Form("chunkwise", chunkwise, chunked=True), Form("parallel", parallel), Form("recurrent", recurrent))

OPERATOR = Operator(
    name="retention",
    summary="decayed linear attention: S_n = gamma S_{n-1} + k_n^T v_n;  o_n = scale q_n S_n",
    source="survey, RetNet; Sun et al. 2023 (1)-(7)",
    inputs=(
        Input("q", ("T", "K"), "token", "query"),
        Input("k", ("T", "K"), "token", "key"),
        Input("v", ("T", "V"), "token", "value"),
        Input("gamma", (), "parameter", "decay"),
        Input("scale", (), "scalar", "scale", default=1.0, differentiable=False),
        Input("S0", ("K", "V"), "state", "state", carries="S"),
    ),
    outputs=(Output("O", ("T", "V")), Output("S", ("K", "V"), "state")),
    forms=FORMS,
    vjp=vjp,
    causal=True,
    laws=("linearity", "homogeneity", "left_padding", "cocycle", "relabelling", "euler"),
    linear_in="v",
    degrees={"q": 1, "k": 1, "v": 1},
    exact=FORMS,
    exact_inputs=(
        Input("q", ("T", "K"), "token", "field"),
        Input("k", ("T", "K"), "token", "field"),
        Input("v", ("T", "V"), "token", "field"),
        Input("gamma", (), "parameter", "field"),
        Input("scale", (), "scalar", "field"),
        Input("S0", ("K", "V"), "state", "field"),
    ),
)
