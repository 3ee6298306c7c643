"""Linformer: softmax attention to X mixtures of the keys and values instead of to S of them.

Source: survey, "Linformer"; Wang et al. 2020 (7). E_k and E_v have a column for every position, so the context has a
fixed length, and every key is in every mixture: the output of the first token reads the last. A short context gets the
first columns only.

    letter    paper     shape          meaning
    q k v     Q K V     (T, K)         queries; keys (S, K) and values (S, V) of the context
    E_k E_v   E F       (X, S)         weights of the keys, of the values, in each mixture; of either sign
    KX VX               (X, K)         mixtures of keys; VX (X, V) of values
    P         P-bar     (T, X)         attention weights
"""

from __future__ import annotations

import numpy as np

from .primitives import Array, either, softmax, stored
from .softmax_attention import width_scale
from .spec import Form, Input, Operator, Output, check_cotangents, check_shapes


def projected(q: Array, k: Array, v: Array, E_k: Array, E_v: Array, scale: float | None = None) -> Array:
    """O = softmax(scale Q (E_k K)^T) E_v V. scale defaults to K^-1/2.  -> (T, V).  (7)"""
    _check(q, k, v, E_k, E_v)
    return _read(q, E_k @ k, E_v @ v, scale)


def streamed(q: Array, k: Array, v: Array, E_k: Array, E_v: Array, scale: float | None = None) -> Array:
    """The same, keys and values absorbed into their mixtures one by one: the context is never held.  -> (T, V)."""
    _check(q, k, v, E_k, E_v)
    KX, VX = E_k[:, :0] @ k[:0], E_v[:, :0] @ v[:0]
    for j in range(len(k)):
        KX = KX + E_k[:, j][:, None] * k[j][None, :]
        VX = VX + E_v[:, j][:, None] * v[j][None, :]
    return _read(q, KX, VX, scale)


def vjp(
    cotangents: dict[str, Array], q: Array, k: Array, v: Array, E_k: Array, E_v: Array, scale: float | None = None
) -> dict[str, Array]:
    """dVX = P^T dO;  dS = P * (dO VX^T - rowsum(dO * O));  dKX = scale dS^T Q;  then dV = E_v^T dVX, dE_v = dVX V^T."""
    check_cotangents(OPERATOR, cotangents, {"q": q, "v": v})
    _check(q, k, v, E_k, E_v)
    KX, VX, G = E_k @ k, E_v @ v, cotangents["O"]
    P = weights(q, KX, scale)
    dP = G @ VX.T
    delta = either(np.sum(G * stored(P @ VX), axis=1, keepdims=True), np.sum(P * dP, axis=1, keepdims=True))
    dS = P * (dP - delta) * width_scale(scale, q.shape[-1])
    dKX, dVX = dS.T @ q, P.T @ G
    return {"q": dS @ KX, "k": E_k.T @ dKX, "v": E_v.T @ dVX, "E_k": dKX @ k.T, "E_v": dVX @ v.T}


def weights(q: Array, KX: Array, scale: float | None = None) -> Array:
    """P = softmax(scale Q KX^T).  (T, K), (X, K) -> (T, X)."""
    return softmax(q @ KX.T * width_scale(scale, q.shape[-1]))


def _read(q: Array, KX: Array, VX: Array, scale: float | None) -> Array:
    return weights(q, KX, scale) @ VX


def _check(q: Array, k: Array, v: Array, E_k: Array, E_v: Array) -> None:
    check_shapes(OPERATOR, {"q": q, "k": k, "v": v, "E_k": E_k, "E_v": E_v})


OPERATOR = Operator(
    name="linformer",
    summary="O = softmax(scale Q (E_k K)^T) E_v V: X mixtures of all keys and values",
    source="survey, Linformer; Wang et al. 2020 (7)",
    inputs=(
        Input("q", ("T", "K"), "token", "query"),
        Input("k", ("S", "K"), "token", "key"),
        Input("v", ("S", "V"), "token", "value"),
        Input("E_k", ("X", "S"), "parameter", "weight"),
        Input("E_v", ("X", "S"), "parameter", "weight"),
        Input("scale", (), "scalar", "scale", differentiable=False),
    ),
    outputs=(Output("O", ("T", "V")),),
    forms=(Form("projected", projected), Form("streamed", streamed)),
    vjp=vjp,
    causal=False,
    laws=("linearity", "constant_value", "relabelling", "homogeneity", "euler"),
    linear_in="v",
    degrees={"v": 1},
)
