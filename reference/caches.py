"""Caches that grow: what attentions over the tokens of earlier calls share."""

from __future__ import annotations

import numpy as np

from .primitives import Array


def appended(old: Array, new: Array) -> Array:
    """The cache, if there is one, and what is new."""
    return new if old is None else np.concatenate([old, new])


def paired(**caches: Array) -> None:
    """Raises ValueError for one of two caches that are given or absent together."""
    given, absent = ([n for n, x in caches.items() if (x is None) == missing] for missing in (False, True))
    if given and absent:
        raise ValueError(f"{given[0]} is given without {absent[0]}; a cache has both")


def visible(T: int, S: int, causal: bool = True) -> np.ndarray:
    """keep[i, j] = j <= S - T + i for the last T of S tokens, a boolean (T, S) matrix; all if not causal."""
    return np.tril(np.ones((T, S), dtype=bool), S - T) if causal else np.ones((T, S), dtype=bool)
