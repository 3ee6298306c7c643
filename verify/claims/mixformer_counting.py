"""Counting what a form does: it is run on entries that are no numbers, but know how many operations precede them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np


class Entry:
    """Stands for a number of which nothing matters but its `depth`, the operations one after another that it takes.
    `tally` has an item for every product of two entries; powers are taken from a table, and plain numbers are free."""

    __slots__ = ("depth", "tally")

    def __init__(self, tally: list[int], depth: int = 0) -> None:
        self.tally, self.depth = tally, depth

    def __add__(self, other: Any) -> Entry:
        return Entry(self.tally, 1 + max(self.depth, other.depth if isinstance(other, Entry) else 0))

    def __mul__(self, other: Any) -> Entry:
        if isinstance(other, Entry):
            self.tally.append(1)
        return self + other

    def __pow__(self, n: Any) -> Entry:
        return self

    def __ge__(self, other: Any) -> bool:
        return True

    __radd__, __rmul__, __sub__ = __add__, __mul__, __add__


def effort(form: Callable[..., Any], *shapes: tuple[int, ...], **rest: Any) -> tuple[int, int]:
    """How many products of two entries `form` takes for arrays of these shapes, and the depth of what it returns."""
    tally: list[int] = []
    results = form(*(np.full(shape, Entry(tally), dtype=object) for shape in shapes), **rest)
    return len(tally), max(entry.depth for entry in _entries(results))


def products(form: Callable[..., Any], *shapes: tuple[int, ...], **rest: Any) -> int:
    """How many products of two entries `form` takes for arrays of these shapes."""
    return effort(form, *shapes, **rest)[0]


def _entries(results: Any) -> Iterator[Entry]:
    for x in results if isinstance(results, tuple) else (results,):
        yield from (entry for entry in np.asarray(x, dtype=object).flat if isinstance(entry, Entry))
