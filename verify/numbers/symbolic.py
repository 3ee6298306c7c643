"""Arrays of SymPy expressions: proofs of identities about the very functions that the gate uses as its oracle.

softmax and softplus are written without the tricks that make them safe in floating point (subtracting the maximum,
branching on the sign), which are identities over the reals and would only stand in a proof's way. A comparison that
SymPy cannot decide becomes a Piecewise under np.where. Floats are taken as the fraction that they are
when that is short (0.5, -3.0); others are roundings and are refused.
"""

from __future__ import annotations

import itertools
from fractions import Fraction
from numbers import Integral, Rational
from typing import Any

import numpy as np
import sympy

from mixproof.reference import primitives
from mixproof.verify.numbers.array import NotDefined, Numbers, Stored, boxed
from mixproof.verify.numbers.objects import ARITHMETIC, ObjectSystem, short_dyadic


class Expressions(ObjectSystem):
    """SymPy expressions."""

    name = "SymPy expressions"
    infinite = True

    def __init__(self) -> None:
        maps = {
            name: getattr(sympy, name) for name in ("exp", "log", "sqrt", "sin", "cos", "tan", "tanh", "sinh", "cosh")
        }
        relations = {
            "less": sympy.Lt,
            "less_equal": sympy.Le,
            "greater": sympy.Gt,
            "greater_equal": sympy.Ge,
            "equal": sympy.Eq,
            "not_equal": sympy.Ne,
        }
        super().__init__(
            ARITHMETIC
            | maps
            | {name: _answer(relation) for name, relation in relations.items()}
            | {
                "log1p": lambda x: sympy.log(1 + x),
                "expm1": lambda x: sympy.exp(x) - 1,
                "power": lambda x, n: x ** self.element(n),
                "absolute": sympy.Abs,
                "sign": sympy.sign,
                "maximum": sympy.Max,
                "minimum": sympy.Min,
            }
        )
        self.primitives = {
            primitives.softmax: self._softmax,
            primitives.softplus: lambda w: np.log(1 + np.exp(self(w))),
        }

    def element(self, x: Any) -> sympy.Expr:
        if isinstance(x, sympy.Basic):
            return x  # type: ignore[return-value]
        if isinstance(x, Integral):
            return sympy.Integer(int(x))
        if isinstance(x, (float, np.floating)) and np.isinf(x):
            return sympy.oo if x > 0 else -sympy.oo  # type: ignore[return-value]
        fraction = short_dyadic(float(x)) if isinstance(x, (float, np.floating)) else x
        if isinstance(fraction, Rational):
            return sympy.Rational(int(fraction.numerator), int(fraction.denominator))
        raise NotDefined(f"{x!r} is a rounding or no number: give an int, a Fraction or a sympy.Rational")

    def choose(self, condition: Stored, x: Stored, y: Stored) -> Stored:
        return boxed(np.frompyfunc(lambda c, a, b: sympy.Piecewise((a, c), (b, True)), 3, 1)(condition, x, y))

    def agree(self, x: Stored, y: Stored) -> Stored:
        return boxed(np.frompyfunc(lambda a, b: vanishes(a - b), 2, 1)(x, y)).astype(bool)

    def _softmax(self, s: Any, axis: int = -1) -> Numbers:
        e = np.exp(s)
        total = np.sum(e, axis=axis, keepdims=True)
        return e / np.where(total == 0, 1, total)


def _answer(relation: Any) -> Any:
    """A relation that SymPy decides is a bool, so that NumPy's where and masks see plain truth."""

    def answer(x: Any, y: Any) -> Any:
        r = relation(x, y)
        return bool(r) if r in (sympy.true, sympy.false) else r

    return answer


EXPRESSIONS = Expressions()


def symbols(name: str, shape: tuple[int, ...] = (), **assumptions: bool) -> Numbers:
    """An array of symbols name_i_j, real unless assumptions (positive=True, ...) say otherwise."""
    assumptions = assumptions or {"real": True}
    data = np.empty(shape, dtype=object)
    for index in itertools.product(*map(range, shape)):
        data[index] = sympy.Symbol("_".join([name, *map(str, index)]), **assumptions)
    return Numbers(EXPRESSIONS, data)


def vanishes(x: sympy.Expr) -> bool:
    """Whether SymPy shows that x is zero; False means not shown."""
    return any(sympy.sympify(attempt(x)) == 0 for attempt in (lambda e: e, sympy.expand, sympy.cancel, sympy.simplify))


def proves(x: Any, y: Any) -> bool:
    """Whether SymPy shows x = y in every element (shapes broadcast)."""
    difference = EXPRESSIONS(x) - EXPRESSIONS(y)
    return all(vanishes(e) for e in difference.data.flat)


def jacobian(y: Numbers, x: Numbers) -> Numbers:
    """d y / d x, of shape y.shape + x.shape; x holds symbols."""
    data = np.empty(y.shape + x.shape, dtype=object)
    for i in np.ndindex(y.shape):
        for j in np.ndindex(x.shape):
            data[i + j] = sympy.diff(y.data[i], x.data[j])
    return Numbers(EXPRESSIONS, data)


def substitute(x: Numbers, values: dict[Any, Fraction | int]) -> Numbers:
    """x with symbols replaced by exact values."""
    exact = {symbol: EXPRESSIONS.element(value) for symbol, value in values.items()}
    return Numbers(EXPRESSIONS, boxed(np.frompyfunc(lambda e: e.subs(exact), 1, 1)(x.data)))
