"""Softmax attention.  Source: GMA paper (1); survey, standard attention; Vaswani et al. 2017 (1).

letter  paper   shape             meaning
q k v   Q K V   (T, D) (S, D) (S, V)
P       A       (T, S)            attention weights, rows sum to one
"""

from __future__ import annotations

import numpy as np

from .primitives import Array, causal_mask, either, masked, softmax, stored
from .spec import Form, Input, Operator, Output, check_cotangents


def weights(q: Array, k: Array, scale: float | None = None, causal: bool = False) -> Array:
    """P = softmax(scale Q K^T); a causal row i sees keys j <= i. scale defaults to D^-1/2."""
    S = q @ k.T * width_scale(scale, q.shape[1])
    return softmax(masked(S, causal_mask(*S.shape), -np.inf) if causal else S)


def parallel(q: Array, k: Array, v: Array, scale: float | None = None, causal: bool = False) -> Array:
    """O = P V.  (T, D), (S, D), (S, V) -> (T, V).  (1)"""
    return weights(q, k, scale, causal) @ v


def blockwise(q: Array, k: Array, v: Array, scale: float | None = None, causal: bool = False, chunk: int = 64) -> Array:
    """Online softmax over blocks of keys: running maximum m, mass l and unnormalised output U are rescaled."""
    T, S = len(q), len(k)
    scale = width_scale(scale, q.shape[1])
    keep = causal_mask(T, S) if causal else np.ones((T, S), dtype=bool)
    m = np.full((T, 1), -np.inf)
    l = np.zeros((T, 1))
    U = np.zeros((T, v.shape[1]))
    for a in range(0, S, chunk):
        s = np.where(keep[:, a : a + chunk], q @ k[a : a + chunk].T * scale, -np.inf)
        top = np.maximum(m, np.max(s, axis=1, keepdims=True))
        shift = np.where(np.isneginf(top), 0, top)
        e, r = np.exp(s - shift), np.exp(m - shift)
        l, U, m = r * l + np.sum(e, axis=1, keepdims=True), r * U + e @ v[a : a + chunk], top
    return U / np.where(l == 0, 1, l)


def vjp(
    cotangents: dict[str, Array], q: Array, k: Array, v: Array, scale: float | None = None, causal: bool = False
) -> dict[str, Array]:
    """dV = P^T dO;  dS = P * (dO V^T - rowsum(dO * O));  dQ = scale dS K;  dK = scale dS^T Q."""
    check_cotangents(OPERATOR, cotangents, {"q": q, "v": v})
    scale = width_scale(scale, q.shape[1])
    G = cotangents["O"]
    P = weights(q, k, scale, causal)
    dP = G @ v.T
    delta = either(np.sum(G * stored(P @ v), axis=1, keepdims=True), np.sum(P * dP, axis=1, keepdims=True))
    dS = P * (dP - delta)
    return {"q": dS @ k * scale, "k": dS.T @ q * scale, "v": P.T @ G}


def width_scale(scale: float | None, K: int) -> float:
    """The scale, K^-1/2 unless it is given."""
    return K**-0.5 if scale is None else scale


OPERATOR = Operator(
    name="softmax_attention",
    summary="O = softmax(scale Q K^T) V, full or causal",
    source="GMA (1); Vaswani et al. 2017 (1)",
    inputs=(
        Input("q", ("T", "D"), "token", "query"),
        Input("k", ("S", "D"), "token", "key"),
        Input("v", ("S", "V"), "token", "value"),
        Input("scale", (), "scalar", "scale", differentiable=False),
        Input("causal", (), "scalar", "flag", default=False, differentiable=False),
    ),
    outputs=(Output("O", ("T", "V")),),
    forms=(Form("parallel", parallel), Form("blockwise", blockwise, chunked=True)),
    vjp=vjp,
    causal="causal",
    laws=("linearity", "constant_value", "hull", "row_sums", "permutation"),
    linear_in="v",
    cost="quadratic",
)
