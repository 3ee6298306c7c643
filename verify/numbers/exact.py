"""Exact numbers: the rationals, and the prime field GF(p) with p = 2^31 - 1.

Here equality is equality: no rounding, no tolerance. Two forms of an operator whose mixing algebra is polynomial or
rational agree at random points of GF(p) only if they are the same formula, up to a chance of (degree / p) that a
wrong one slips through (Schwartz 1980, Zippel 1979); a wrong term shows at the first draw. The feature maps have no
meaning here: their results are inputs.

What is taken for a number:
                  rationals                         GF(p)
  int, Fraction   itself                            its residue
  float           the fraction that it is, exactly  whole and short ones (7.0, 0.5): 1e-6 and 3**-0.5 are roundings
                                                    of something else, so give eps and scale as field elements
  nan, inf        NotDefined                        NotDefined

GF(p) is stored as int64 residues, not as objects, and its matrix product runs on float64 matrix products of 16-bit
halves, which are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from numbers import Integral, Rational
from typing import Any

import numpy as np

from mixproof.reference import primitives
from mixproof.verify.numbers.array import NotDefined, Numbers, Stored
from mixproof.verify.numbers.objects import ARITHMETIC, ORDER, ObjectSystem, System, short_dyadic, whole

PRIME = 2**31 - 1
_WIDEST = 2**20  # inner length up to which sums of products of 16-bit halves are exact in float64


_REAL = (
    ": the feature maps (exp, softmax, softplus) need real numbers; give their results (e.g. responsibilities) as "
    "inputs instead"
)
_TRANSCENDENTAL = dict.fromkeys(
    ["exp", "expm1", "exp2", "log", "log1p", "log2", "log10", "logaddexp", "sqrt", "cbrt",
     "sin", "cos", "tan", "tanh", "sinh", "cosh", "arctan"],
    _REAL,
)  # fmt: skip
_ORDERED = dict.fromkeys(
    ["less", "less_equal", "greater", "greater_equal", "maximum", "minimum", "absolute", "sign"],
    ": a finite field has no order",
)


def _refusals(system: str) -> dict[Callable[..., Any], Callable[..., Any]]:
    """softmax and softplus refuse under their own names, not at the first exp or maximum in their bodies."""

    def refusal(name: str) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise NotDefined(f"{name} is not defined over {system}{_REAL}")

        return refuse

    return {f: refusal(f.__name__) for f in (primitives.softmax, primitives.softplus)}


class Rationals(ObjectSystem):
    """Python's Fraction. Ordered, so maximum, comparisons and absolute values exist."""

    name = "the rationals"
    reasons = _TRANSCENDENTAL

    def __init__(self) -> None:
        always, never = (lambda x: True), (lambda x: False)
        super().__init__(
            ARITHMETIC
            | ORDER
            | {
                "power": lambda x, n: x ** whole(n),
                "absolute": abs,
                "sign": lambda x: Fraction((x > 0) - (x < 0)),
                "maximum": max,
                "minimum": min,
                "isfinite": always,
                "isinf": never,
                "isnan": never,
            }
        )
        self.primitives = _refusals(self.name)

    def element(self, x: Any) -> Fraction:
        if isinstance(x, Fraction):
            return x
        if isinstance(x, (Integral, Rational)):
            return Fraction(int(x.numerator), int(x.denominator))
        if isinstance(x, (float, np.floating)) and np.isfinite(x):
            return Fraction(float(x))
        raise _no_number(x, self.name)

    def agree(self, x: Stored, y: Stored) -> Stored:
        return np.asarray(x == y, dtype=bool)


class PrimeField(System):
    """Integers modulo PRIME. No order, no size: maximum, < and abs do not exist."""

    name = f"GF({PRIME})"
    dtype = np.int64
    reasons = _TRANSCENDENTAL | _ORDERED

    def __init__(self) -> None:
        def constant(answer: bool) -> Callable[[Stored], Stored]:
            return lambda x: np.full(x.shape, answer)

        self.functions = {
            "add": lambda x, y: (x + y) % PRIME,
            "subtract": lambda x, y: (x - y) % PRIME,
            "multiply": _product,
            "divide": lambda x, y: _product(x, self.inverse(y)),
            "reciprocal": self.inverse,
            "negative": lambda x: -x % PRIME,
            "positive": lambda x: x,
            "square": lambda x: _product(x, x),
            "power": self.power,
            "equal": lambda x, y: x == y,
            "not_equal": lambda x, y: x != y,
            "isfinite": constant(True),
            "isinf": constant(False),
            "isnan": constant(False),
        }
        self.primitives = _refusals(self.name)
        self._elements = np.frompyfunc(self.element, 1, 1)

    def draw(self, random: np.random.Generator, shape: tuple[int, ...] = ()) -> Numbers:
        """Independent uniform field elements: a random point for a polynomial identity."""
        return Numbers(self, np.asarray(random.integers(0, PRIME, size=shape, dtype=np.int64)))

    def element(self, x: Any) -> int:
        if isinstance(x, Integral):
            return int(x) % PRIME
        fraction = short_dyadic(float(x)) if isinstance(x, (float, np.floating)) else x
        if isinstance(fraction, Rational):
            below = int(fraction.denominator) % PRIME
            if not below:
                raise ZeroDivisionError(f"{x} has a denominator that is zero in {self.name}")
            return int(fraction.numerator) * pow(below, -1, PRIME) % PRIME
        raise _no_number(x, self.name)

    def store(self, x: Any) -> Stored:
        if isinstance(x, Numbers):
            return x.data
        x = np.asarray(x)
        if x.dtype.kind == "b":
            return x.astype(np.int64)
        if x.dtype.kind in "iu":
            wide = x.astype(np.uint64 if x.dtype.kind == "u" else np.int64)
            return np.asarray(wide % wide.dtype.type(PRIME), dtype=np.int64)
        return np.asarray(self._elements(x.astype(object)), dtype=np.int64)

    def power(self, x: Stored, n: Any) -> Stored:
        """x ** n by repeated squaring, 0 ** 0 = 1, negative n by inversion."""
        n = np.asarray(np.frompyfunc(whole, 1, 1)(np.asarray(n, dtype=object)), dtype=np.int64)
        x, n = np.broadcast_arrays(x, n)
        if np.any(n < 0):
            x, n = np.where(n < 0, self.inverse(np.where(n < 0, x, 1)), x), np.abs(n)
        result = np.ones(x.shape, dtype=np.int64)
        while np.any(n):
            result = np.where(n & 1, _product(result, x), result)
            x, n = _product(x, x), n >> 1
        return result

    def inverse(self, x: Stored) -> Stored:
        """1 / x = x^(p-2), Fermat."""
        if np.any(x == 0):
            raise ZeroDivisionError(
                f"division by zero in {self.name}. At a random point this happens with a chance of about 5e-10 per "
                "division: draw again, and if it persists a denominator of the equation vanishes"
            )
        return self.power(x, PRIME - 2)

    def fold(self, name: str, rows: Stored) -> Stored:
        if name == "add":  # below 2^31 each, so up to 2^32 of them fit
            return np.asarray(np.sum(rows, axis=-1) % PRIME)
        f, result = self.function(name), rows[..., 0]
        for i in range(1, rows.shape[-1]):
            result = f(result, rows[..., i])
        return np.asarray(result)

    def scan(self, name: str, x: Stored, axis: int) -> Stored:
        if name == "add":
            return np.cumsum(x, axis=axis) % PRIME
        x = np.moveaxis(x, axis, 0).copy()
        for i in range(1, len(x)):
            x[i] = self.function(name)(x[i - 1], x[i])
        return np.moveaxis(x, 0, axis)

    def matmul(self, x: Stored, y: Stored) -> Stored:
        """Float64 products of 16-bit halves stay below 2^32, so 2^20 of them add up exactly below 2^53."""
        n = x.shape[-1]
        if n > _WIDEST:
            one = y.ndim == 1
            parts = [slice(a, a + _WIDEST) for a in range(0, n, _WIDEST)]
            sums = [self.matmul(x[..., p], y[p] if one else y[..., p, :]) for p in parts]
            return np.asarray(sum(sums) % PRIME)
        x1, x0, y1, y0 = (half.astype(np.float64) for half in (x >> 16, x & 0xFFFF, y >> 16, y & 0xFFFF))
        high, middle, low = (np.asarray(z).astype(np.int64) % PRIME for z in (x1 @ y1, x1 @ y0 + x0 @ y1, x0 @ y0))
        return np.asarray((2 * high + (middle << 16) + low) % PRIME)  # 2^32 = 2 in this field

    def agree(self, x: Stored, y: Stored) -> Stored:
        return x == y


def _product(x: Stored, y: Stored) -> Stored:
    return np.asarray(x * y % PRIME)


def _no_number(x: Any, system: str) -> NotDefined:
    if isinstance(x, (float, np.floating)):
        if not np.isfinite(x):
            hint = "" if np.isnan(x) else f"; a mask of -inf belongs to softmax{_REAL}"
            return NotDefined(f"{x} is not in {system}{hint}")
        return NotDefined(f"the float {float(x)!r} is a rounding, not a number of {system}: give an int or a Fraction")
    return NotDefined(f"{x!r} ({type(x).__name__}) is not a number of {system}")


RATIONALS = Rationals()
GF = PrimeField()
