"""What balls make of primitives for recurrences whose state is read before it is written.

Balls of nested sums grow with every sum that may be merged into another; where each token's result enters those of all
later ones, that is without bound. These rules start afresh: m = |v| + e. u is the reading's unit, su that of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mixproof.reference import primitives
from mixproof.verify.arithmetic import LARGEST, UNIT

if TYPE_CHECKING:
    from mixproof.verify.numbers.ball import Ball, Reading


def _settled(r: Reading, x: Ball) -> Ball:
    return r.around(x.v, x.radius)


def _substituted(r: Reading, L: Any, B: Any) -> Ball:
    """(I + L~) X~ = B~ row by row has |L~ - L| <= dL and |B~ - B| <= dB; a term is rounded once and in the n additions
    of its row, and where sums that L and B are go on there, in theirs. With
    T = (I + L)^-1 and N = (I - |T| dL)^-1 |T| the error X~ - X = T (B~ - B - (L~ - L) X~) is at most N (dB + dL |X|),
    and that of T~ B~, T~ inverted by substitution, at most N (dB + (dL |T| + n roundings) |B|), which is no less.
    Nothing is lost by cancellation in T: where the recurrence is stable, T is bounded, and so is the error."""
    L, B = r.lift(L), r.lift(B)
    n, below = len(B), np.tril(np.ones(L.shape, dtype=bool), -1)
    units = (n + L.n + B.n) * r.sum_unit + 2 * r.unit
    if r.arithmetic.casts_operand(False):
        if max(np.max(L.m, initial=0), np.max(B.m, initial=0)) > LARGEST[r.arithmetic.dot] / 2:
            r.leave(f"an operand of a dot product may exceed the largest {r.arithmetic.dot}")
        units = units + (1 + UNIT[r.arithmetic.dot]) ** (2 * r.arithmetic.casts) - 1
    dL = np.where(below, L.radius + np.expm1(units) * (np.abs(L.v) + L.radius) + r.eta, 0)
    T = np.abs(primitives.substituted(L.v, np.eye(n)))
    wide = T @ (np.abs(B.v) + B.radius)
    r.check(wide)
    dB = B.radius + np.expm1(units) * (np.abs(B.v) + B.radius) + n * r.eta
    e = primitives.substituted(-(T @ dL), T @ (dB + dL @ wide))
    r.check(e)
    return r.around(primitives.substituted(L.v, B.v), e)


RECURRENCES: Mapping[Any, Callable[..., Any]] = {
    primitives.settled: _settled,
    primitives.substituted: _substituted,
}
