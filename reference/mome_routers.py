"""Router logits of a mixture of memory experts: the readings of E_i = Softmax(K_n V_n W_g), and the choice of the top.

Source: MixFormer paper (18) with w_g in R^(1 x k_e). K_n and V_n are rows of d channels, so K_n V_n is no matrix
product. The readings, each with its gradient:

    reading   logits                 W        fits 1 x k_e    what it does
    R2        l = (k_n . v_n) w      (X,)     yes             all tokens rank the experts as w does, or in reverse
    R3        l = (k_n * v_n) W      (D, X)   no              the one that `mome` uses
    R4        l_c = k_nc v_nc w      (X,)     yes             R2 in each channel: logits (D, X) for one token
    R5        l = [k_n, v_n] W       (K+V, X) no              the usual router
    R6        l = (k_n^T v_n) W      (V, X)   no              logits (K, X) for one token: k_n^T (v_n W), of rank one

    letter  paper    shape     meaning
    k v     K V      (T, D)    keys, through the feature map, and values of T tokens; in R5 and R6 v may be (T, V)
    W       w_g W_g  see above router
    l       -        (T, X)    logits of the X experts; (T, D, X) in R4, (T, K, X) in R6
    E       E        as l      weights of the experts: sum_j E_j = 1
"""

from __future__ import annotations

import numpy as np

from .cost import check_sizes
from .primitives import Array, masked, softmax

Gradients = tuple[Array, Array, Array]  # of k, v, W


def R2(k: Array, v: Array, W: Array) -> Array:
    """l_nj = (k_n . v_n) w_j.  (T, D), (T, D), (X,) -> (T, X)."""
    return np.sum(_product(k, v), axis=1, keepdims=True) * W


def R2_vjp(dl: Array, k: Array, v: Array, W: Array) -> Gradients:
    ds = np.sum(dl * W, axis=1, keepdims=True)
    return ds * v, ds * k, np.sum(np.sum(_product(k, v), axis=1, keepdims=True) * dl, axis=0)


def R3(k: Array, v: Array, W: Array) -> Array:
    """l_n = (k_n * v_n) W.  (T, D), (T, D), (D, X) -> (T, X)."""
    return _product(k, v) @ W


def R3_vjp(dl: Array, k: Array, v: Array, W: Array) -> Gradients:
    df = dl @ W.T
    return df * v, df * k, (k * v).T @ dl


def R4(k: Array, v: Array, W: Array) -> Array:
    """l_ncj = k_nc v_nc w_j.  (T, D), (T, D), (X,) -> (T, D, X)."""
    return _product(k, v)[:, :, None] * W


def R4_vjp(dl: Array, k: Array, v: Array, W: Array) -> Gradients:
    df = np.sum(dl * W, axis=2)
    return df * v, df * k, np.sum(np.sum((k * v)[:, :, None] * dl, axis=0), axis=0)


def R5(k: Array, v: Array, W: Array) -> Array:
    """l_n = [k_n, v_n] W.  (T, K), (T, V), (K + V, X) -> (T, X)."""
    return np.concatenate([k, v], axis=1) @ W


def R5_vjp(dl: Array, k: Array, v: Array, W: Array) -> Gradients:
    K = k.shape[1]
    return dl @ W[:K].T, dl @ W[K:].T, np.concatenate([k, v], axis=1).T @ dl


def R6(k: Array, v: Array, W: Array) -> Array:
    """l_n = (k_n^T v_n) W = k_n^T (v_n W).  (T, K), (T, V), (V, X) -> (T, K, X)."""
    return k[:, :, None] * (v @ W)[:, None, :]


def R6_vjp(dl: Array, k: Array, v: Array, W: Array) -> Gradients:
    dvW = np.sum(k[:, :, None] * dl, axis=1)
    return np.sum(dl * (v @ W)[:, None, :], axis=2), dvW @ W.T, v.T @ dvW


def _product(k: Array, v: Array) -> Array:
    if k.shape != v.shape:
        raise ValueError(f"k has shape {k.shape} and v {v.shape}; the router multiplies them element by element")
    return k * v


def selected(l: Array, top: int) -> np.ndarray:
    """Which experts are among the `top` with the largest logits; of equal ones those numbered first.  -> bool, as l.

    An expert's rank is how many come before it: comparisons alone decide, so the choice is the same in every format.
    Raises TypeError or ValueError if `top` is no whole number >= 1."""
    check_sizes(top=top)
    j = np.arange(l.shape[-1])
    before = (l[..., None, :] > l[..., :, None]) | ((l[..., None, :] == l[..., :, None]) & (j < j[:, None]))
    return np.sum(before, axis=-1) < top


def top_weights(l: Array, top: int) -> Array:
    """E = softmax over the selected logits, so that sum_j E_j = 1 as (18) asks; zero elsewhere.  (T, X) -> (T, X)."""
    return softmax(masked(l, selected(l, top), -np.inf))


def softmax_vjp(dE: Array, E: Array) -> Array:
    """dl = E * (dE - E . dE), zero where E is: the choice itself has no gradient.  (T, X), (T, X) -> (T, X)."""
    return E * (dE - np.sum(E * dE, axis=-1, keepdims=True))
