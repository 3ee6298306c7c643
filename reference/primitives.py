"""Functions that the equations share.

Each is plain NumPy. Those marked `overridable` may be answered by another number system, through the same protocol
as NumPy's own functions (`__array_function__`): the plain body is one way to compute them, and honest
implementations use others whose rounding errors differ. A system that has nothing to say runs the plain body.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

Array = Any


def overridable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let an argument whose type has `__array_function__` answer for the function, as it may for NumPy's own."""

    @functools.wraps(function)
    def public(*args: Any, **kwargs: Any) -> Any:
        for x in args:
            if not isinstance(x, np.ndarray) and hasattr(type(x), "__array_function__"):
                answer = x.__array_function__(public, (type(x),), args, kwargs)
                if answer is not NotImplemented:
                    return answer
        return function(*args, **kwargs)

    return public


@overridable
def softmax(s: Array, axis: int = -1) -> Array:
    """exp(s) / sum exp(s) along `axis`. The maximum is subtracted first, and the sum is divided by, not
    log-subtracted: exp(s - logsumexp(s)) loses normalisation for large |s|. A row of -inf, or of no entries, gives
    zeros: nothing is attended to."""
    if s.shape[axis] == 0:
        return s
    top = np.max(s, axis=axis, keepdims=True)
    e = np.exp(s - np.where(np.isneginf(top), 0, top))
    total = np.sum(e, axis=axis, keepdims=True)
    return e / np.where(total == 0, 1, total)


@overridable
def masked(s: Array, keep: np.ndarray, fill: float) -> Array:
    """s where `keep`, else `fill` (select, never multiply: 0 * nan is nan)."""
    return np.where(keep, s, fill)


@overridable
def softplus(w: Array) -> Array:
    """log(1 + exp(w)), without overflow and without losing small results."""
    return np.maximum(w, 0) + np.log1p(np.exp(-np.abs(w)))


def sigmoid(w: Array) -> Array:
    """1 / (1 + exp(-w)), without overflow."""
    e = np.exp(-np.abs(w))
    return np.where(w >= 0, 1 / (1 + e), e / (1 + e))


def silu(w: Array) -> Array:
    """w sigmoid(w)."""
    return w * sigmoid(w)


@overridable
def mahalanobis(x: Array, mu: Array, var: Array) -> Array:
    """Squared distances (T, K) of tokens x (T, R) to means mu (K, R) under diagonal variances var (K, R).

    The difference comes first: x^2 - 2 x mu + mu^2 cancels."""
    E = x[:, None, :] - mu[None, :, :]
    return np.sum(E * E / var[None, :, :], axis=-1)


@overridable
def decay(gamma: Array, n: np.ndarray) -> Array:
    """gamma ** n for whole numbers n >= 0, with 0 ** 0 = 1. gamma may be negative."""
    if isinstance(gamma, (np.ndarray, np.floating)):
        return gamma ** np.asarray(n).astype(gamma.dtype)  # float32 ** int64 would be float64
    return gamma ** np.asarray(n)


@overridable
def segment_products(a: Array) -> Array:
    """P[n, m] = a_{m+1} ... a_n for 0 <= m <= n, and 0 above: what is left after token n of what was there after token
    m.  (T, ...) -> (T + 1, T + 1, ...). A product and not exp(c_n - c_m): a decay may be zero, or negative."""
    T = len(a)
    n, rest = np.arange(T + 1), (1,) * (a.ndim - 1)
    later, seen = ((n[:, None] > n).reshape(T + 1, T + 1, *rest), (n[:, None] >= n).reshape(T + 1, T + 1, *rest))
    steps = np.where(later[1:], a[:, None], 1)
    first = np.where(seen[:1], np.ones((1, T + 1, *a.shape[1:]), a.dtype), 0)
    return np.concatenate([first, np.where(seen[1:], np.multiply.accumulate(steps, axis=0), 0)])


@overridable
def segment_decays(g: Array, start: int, stop: int) -> Array:
    """`segment_products` of a = exp(g) for the tokens start <= t < stop of a sequence with log-decays g (T, ...)."""
    return segment_products(np.exp(g[start:stop]))


@overridable
def weighted_dot(q: Array, P: Array, k: Array) -> Array:
    """sum_i q_ni P_nmi k_mi: scores of queries and keys whose channels decay each at its own rate.

    (T, K), (T, S, K), (S, K) -> (T, S)"""
    return np.sum(q[:, None, :] * P * k[None, :, :], axis=-1)


@overridable
def unit(x: Array, eps: float) -> Array:
    """x / max(||x||, eps), row by row; the squares neither overflow nor underflow."""
    top = np.max(np.abs(x), axis=-1, keepdims=True)
    top = np.where(top == 0, 1, top)
    y = x / top
    return y / np.maximum(np.sqrt(np.sum(y * y, axis=-1, keepdims=True)), eps / top)


@overridable
def group_norm(x: Array, eps: float) -> Array:
    """(x - mean) / sqrt(var + eps) over the last axis, with the population variance; the mean comes off first."""
    n = x.shape[-1]
    E = x - np.sum(x, axis=-1, keepdims=True) / n
    return E / np.sqrt(np.sum(E * E, axis=-1, keepdims=True) / n + eps)


@overridable
def rms_norm(x: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) over the last axis."""
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) / x.shape[-1] + eps)


@overridable
def phi1(z: Array) -> Array:
    """(exp(z) - 1) / z, and 1 at zero: the mean of exp over [0, z]."""
    return np.where(z == 0, 1, np.expm1(z) / np.where(z == 0, 1, z))


@overridable
def phi1_slope(z: Array) -> Array:
    """The derivative of `phi1`: (exp(z) - phi1(z)) / z, and 1/2 at zero, by its series near there, where that
    cancels."""
    near = np.abs(z) < 1
    x, y = np.where(near, z, 0), np.where(near, 1, z)
    series = 1 / 2 + 0 * x
    term = 1 + 0 * x
    for n in range(1, 19):
        term = term * x / n
        series = series + term / (n + 2)
    return np.where(near, series, (np.exp(y) - np.expm1(y) / y) / y)


@overridable
def elu_plus_one(x: Array) -> Array:
    """x + 1 for x > 0, else exp(x): positive everywhere (elu(x) + 1 rounds to zero)."""
    return np.where(x > 0, x + 1, np.exp(np.where(x > 0, 0, x)))


@overridable
def stored(x: Array) -> Array:
    """x itself: marks a result that an implementation may keep in its output dtype and read back."""
    return x


@overridable
def shifted(s: Array, by: Array) -> Array:
    """s itself: marks logits that an implementation may carry with the row constant `by` added."""
    return s


@overridable
def either(x: Array, y: Array) -> Array:
    """x, where x and y are two expressions of one quantity and honest implementations use either."""
    return x


def starts(T: int, chunk: int) -> range:
    """The first token of every chunk. Raises ValueError for a chunk of no token."""
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be at least 1")
    return range(0, T, chunk)


def causal_mask(T: int, S: int | None = None) -> np.ndarray:
    """keep[i, j] = j <= i, a boolean (T, S) matrix."""
    return np.tril(np.ones((T, T if S is None else S), dtype=bool))


@overridable
def cancelled(x: Array, by: Array) -> Array:
    """x itself: marks a sum in which an implementation may have further terms, of size `by`, that cancel."""
    return x


@overridable
def turned(x: Array, n: np.ndarray, theta: Array) -> Array:
    """Pairs of channels (2 i, 2 i + 1) of row n turned by the angle n theta_i.  (T, K), (T,), (K/2,) -> (T, K)"""
    angle = n[:, None] * theta[None, :]
    c, s = np.cos(angle), np.sin(angle)
    if isinstance(x, np.ndarray):
        c, s = c.astype(x.dtype), s.astype(x.dtype)
    a, b = x[:, 0::2], x[:, 1::2]
    return np.stack([a * c - b * s, a * s + b * c], axis=-1).reshape(x.shape)


@overridable
def deviation(x: Array, eps: float) -> Array:
    """sqrt(var + eps) over the last axis, which is kept: what `group_norm` divides by."""
    n = x.shape[-1]
    E = x - np.sum(x, axis=-1, keepdims=True) / n
    return np.sqrt(np.sum(E * E, axis=-1, keepdims=True) / n + eps)


@overridable
def rectified(dy: Array, x: Array) -> Array:
    """dy where x > 0, else 0: back through max(x, 0). Which side of zero a computed x is on may be open."""
    return np.where(x > 0, dy, 0)


@overridable
def settled(x: Array) -> Array:
    """x itself: marks a result that is computed to the end before it is used, so that no later sum reaches into it."""
    return x


@overridable
def substituted(L: Array, B: Array) -> Array:
    """X with (I + L) X = B for a strictly lower triangular L, row by row: nothing is divided by.

    (T, T), (T, V) -> (T, V)"""
    X = B[:0]
    for i in range(len(B)):
        X = np.concatenate([X, B[i : i + 1] - L[i : i + 1, :i] @ X])
    return X
