"""Steps of compressed convolutional attention before attention itself, and their gradients.

Source: survey, sections 15 and 16; Figliola et al. 2025; the code of ZAYA for the padding. Convolutions run over rows
that are all there: W + J - 2 of them come before the T tokens of a call, zeros or what earlier calls left.

    letter  shape                meaning
    x       (W + J - 2 + T, .., K)  rows of queries or keys, their heads in any number of axes
    w1 b1   (.., K, W) (.., K)   taps over time of each channel, the last one for the token itself
    w2 b2   (.., K, K, J)        taps among the channels of a head, out and in; b2 (.., K)
    v       (T, G, V)            values; of the G V channels side by side the second half is one token late
"""

from __future__ import annotations

from math import prod

import numpy as np

from .latent_attention import swapped
from .primitives import Array, unit

Filter = tuple[Array, Array, Array, Array]


def convolved(x: Array, w1: Array, b1: Array, w2: Array, b2: Array) -> Array:
    """y_t = b2 + sum_j w2_j a_(t-J+1+j) with a_t = b1 + sum_i w1_i x_(t-W+1+i).  -> (T, .., K)"""
    a, W2 = _depthwise(_heads_first(x), w1, b1), _flat(w2, 3)
    y = _windows(a, w2.shape[-1]) @ _stacked(np.transpose(W2, (0, 3, 2, 1))) + _flat(b2, 1)[:, None]
    return _tokens_first(y, x)


def convolved_vjp(dy: Array, x: Array, w1: Array, b1: Array, w2: Array, b2: Array) -> tuple[Array, ...]:
    """Gradients of <convolved(x, ..), dy> for x, w1, b1, w2 and b2: what a row gave to later ones it gets back."""
    X, Y, W1, W2, W, J = _heads_first(x), _heads_first(dy), _flat(w1, 2), _flat(w2, 3), w1.shape[-1], w2.shape[-1]
    a = _depthwise(X, w1, b1)
    da = _windows(_padded(Y, J - 1), J) @ _stacked(np.transpose(W2, (0, 3, 1, 2))[:, ::-1])
    dx = np.sum(_split(_windows(_padded(da, W - 1), W), W) * swapped(W1)[:, None, ::-1], axis=2)
    dw1 = swapped(np.sum(da[:, :, None] * _split(_windows(X, W), W), axis=1))
    dw2 = np.transpose(_split(swapped(Y) @ _windows(a, J), J), (0, 1, 3, 2))
    grads = (dw1, np.sum(da, axis=1), dw2, np.sum(Y, axis=1))
    shaped = (g.reshape(w.shape) for g, w in zip(grads, (w1, b1, w2, b2), strict=True))
    return _tokens_first(dx, x), *shaped


def history(x0: Array | None, x: Array, w1: Array, b1: Array, w2: Array) -> Array:
    """The rows before the call, zeros if there are none, and those of the call."""
    n = w1.shape[-1] + w2.shape[-1] - 2
    return np.concatenate([np.broadcast_to(0 * b1, (n, *b1.shape)) if x0 is None else x0, x])


def from_last(v0: Array | None, v: Array) -> Array:
    """The row before the call, zero if there is none, and those of the call.  -> (T + 1, G, V)"""
    return np.concatenate([(np.sum(0 * v[:0], axis=0) if v0 is None else v0)[None], v])


def shifted(v: Array) -> Array:
    """Channels side by side, the second half those of the token before.  (T + 1, G, V) -> (T, G, V)"""
    T, G, V = len(v) - 1, *v.shape[1:]
    if G * V % 2:
        raise ValueError(f"v has {G} x {V} channels, of which half are one token late")
    flat, half = v.reshape(T + 1, G * V), G * V // 2
    return np.concatenate([flat[1:, :half], flat[:T, half:]], axis=1).reshape(T, G, V)


def shifted_vjp(dy: Array) -> Array:
    """The gradient of <shifted(v), dy>.  (T, G, V) -> (T + 1, G, V)"""
    T, G, V = dy.shape
    flat, half = dy.reshape(T, G * V), G * V // 2
    none = np.sum(0 * flat[:0], axis=0)[None]
    now, late = np.concatenate([none, flat]), np.concatenate([flat, none])
    return np.concatenate([now[:, :half], late[:, half:]], axis=1).reshape(T + 1, G, V)


def unit_vjp(G: Array, x: Array, eps: float) -> Array:
    """dx = (G - u (u . G)) / ||x|| with u = unit(x); G / eps where ||x|| < eps."""
    u = unit(x, eps)
    size = np.sum(x * u, axis=-1, keepdims=True)
    radial = np.where(size > eps, np.sum(u * G, axis=-1, keepdims=True), 0)
    return (G - u * radial) / np.maximum(size, eps)


def _depthwise(X: Array, w1: Array, b1: Array) -> Array:
    W1, W = _flat(w1, 2), w1.shape[-1]
    return np.sum(_split(_windows(X, W), W) * swapped(W1)[:, None], axis=2) + _flat(b1, 1)[:, None]


def _windows(X: Array, n: int) -> Array:
    """n rows side by side.  (H, T + n - 1, K) -> (H, T, n K)"""
    T = X.shape[1] - n + 1
    return np.concatenate([X[:, i : i + T] for i in range(n)], axis=2)


def _split(X: Array, n: int) -> Array:
    """(H, T, n K) -> (H, T, n, K)"""
    H, T, K = X.shape
    return X.reshape(H, T, n, K // n)


def _stacked(W: Array) -> Array:
    """(H, n, A, B) -> (H, n A, B)"""
    H, n, A, B = W.shape
    return W.reshape(H, n * A, B)


def _padded(d: Array, n: int) -> Array:
    """n rows of zeros before and after.  (H, T, K) -> (H, n + T + n, K)"""
    zeros = np.broadcast_to(np.sum(0 * d[:, :0], axis=1, keepdims=True), (d.shape[0], n, d.shape[2]))
    return np.concatenate([zeros, d, zeros], axis=1)


def _heads_first(x: Array) -> Array:
    """(T, .., K) -> (H, T, K)"""
    return np.transpose(x.reshape(len(x), prod(x.shape[1:-1]), x.shape[-1]), (1, 0, 2))


def _tokens_first(y: Array, like: Array) -> Array:
    """(H, T, K) -> (T, .., K)"""
    return np.transpose(y, (1, 0, 2)).reshape(y.shape[1], *like.shape[1:])


def _flat(w: Array, axes: int) -> Array:
    """The axes of heads, all but the last `axes`, as one."""
    return w.reshape(prod(w.shape[:-axes]), *w.shape[w.ndim - axes :])
