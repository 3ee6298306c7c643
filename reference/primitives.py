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


@overridable
def mahalanobis(x: Array, mu: Array, var: Array) -> Array:
    """Squared distances (T, K) of tokens x (T, R) to means mu (K, R) under diagonal variances var (K, R).

    The difference comes first: x^2 - 2 x mu + mu^2 cancels."""
    E = x[:, None, :] - mu[None, :, :]
    return np.sum(E * E / var[None, :, :], axis=-1)


@overridable
def decay(gamma: Array, n: np.ndarray) -> Array:
    """gamma ** n for whole numbers n >= 0, with 0 ** 0 = 1."""
    return gamma ** np.asarray(n)


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


def causal_mask(T: int, S: int | None = None) -> np.ndarray:
    """keep[i, j] = j <= i, a boolean (T, S) matrix."""
    return np.tril(np.ones((T, T if S is None else S), dtype=bool))
