"""Enclosures of the true value: what the float64 oracle is certified against.

`enclose` runs a function of reference/ on its float64 inputs, taken exactly, in ball arithmetic (Arb, from
python-flint) or, where that is not installed, in interval arithmetic (mpmath.iv, far slower); both round
outwards, so the exact result lies inside. `multiprecision` is plain mpmath floating point with many digits: it
rounds to nearest, keeps no bound, and is a witness but NOT an enclosure.

The function that is enclosed is the one that the code computes: a default scale D**-0.5 is a float64 before it
reaches any array, so give scales explicitly where its last bit matters. An element whose value was lost (nan, an
unbounded ball, beyond the range of float64) has midpoint nan and radius inf: no comparison with it holds.

A comparison of overlapping balls is an open question: `if` raises, np.where takes the union of both branches. That is
all that the reference's own softmax needs: the maximum of overlapping balls is a ball, and any shift is a valid one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from numbers import Integral, Rational
from typing import Any, NamedTuple

import mpmath
import numpy as np

from mixproof.reference import primitives
from mixproof.verify.numbers.array import NotDefined, Numbers, Stored, boxed
from mixproof.verify.numbers.objects import ARITHMETIC, ORDER, ObjectSystem

_IV: Any = mpmath.iv
PRECISION = 113  # bits, those of binary128: twice float64 and some to lose


class Enclosure(NamedTuple):
    """|true value - midpoint| <= radius, elementwise, in exact arithmetic on these float64 numbers."""

    midpoint: np.ndarray
    radius: np.ndarray


def enclose(
    function: Callable[..., Any], inputs: dict[str, Any], precision: int = PRECISION, system: Real | None = None
) -> Any:
    """function(**inputs) with an `Enclosure` in place of every array of the result (a tuple, list or dict of arrays
    keeps its form). `inputs` are float64 arrays and floats, cotangents may be a dict of them; flags and counts stay
    what they are. `system` is `balls(precision)` if python-flint is there, else `intervals(precision)`."""
    system = system or certified(precision)
    if not system.encloses:
        raise ValueError(f"{system.name} does not enclose anything")
    return _enclosures(system, function(**system.carry(inputs)))


def certified_error(value: Any, enclosure: Enclosure) -> np.ndarray:
    """An upper bound of |value - true value|, elementwise, itself rounded upwards; inf where nothing is known."""
    value = np.asarray(value, dtype=np.float64)
    if value.shape != enclosure.midpoint.shape:
        raise ValueError(f"the value has shape {value.shape}, its enclosure {enclosure.midpoint.shape}")
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs(value - enclosure.midpoint)
        distance = np.where(distance > 0, np.nextafter(distance, np.inf), distance)  # x - y rounds to 0 only if x = y
        total = distance + enclosure.radius
    total = np.where(enclosure.radius > 0, np.nextafter(total, np.inf), total)
    return np.where(np.isnan(total), np.inf, total)


def certified(precision: int = PRECISION) -> Real:
    """The enclosing number system that this machine has: balls, else intervals."""
    try:
        return balls(precision)
    except ImportError:
        return intervals(precision)


@cache
def balls(precision: int = PRECISION) -> Balls:
    """Arb at a working precision in bits. Raises ImportError where python-flint is missing."""
    return Balls(precision)


@cache
def intervals(precision: int = PRECISION) -> Intervals:
    """mpmath.iv at a working precision in bits."""
    return Intervals(precision)


@cache
def multiprecision(precision: int = PRECISION) -> Multiprecision:
    """mpmath floating point at a working precision in bits: not an enclosure."""
    return Multiprecision(precision)


class Real(ObjectSystem):
    """What balls, intervals and long floats share."""

    infinite = True
    encloses = True
    kind: type  # of the elements

    def __init__(self, name: str, precision: int, functions: dict[str, Callable[..., Any]]) -> None:
        self.name, self.precision = f"{name} of {precision} bits", precision
        self.primitives = {primitives.phi1_slope: _phi1_slope}
        super().__init__(ARITHMETIC | {"power": self.power, "absolute": abs} | functions)

    def number(self, x: Any) -> Any:
        """A Python int or float as an element: exactly, if the precision holds it."""
        raise NotImplementedError

    def enclosure(self, x: Any) -> tuple[float, float]:
        """Midpoint and radius in float64; (nan, inf) for what was lost."""
        raise NotDefined(f"{self.name} does not enclose anything")

    def element(self, x: Any) -> Any:
        if isinstance(x, self.kind):
            return x
        if isinstance(x, Integral):
            return self.number(int(x))
        if isinstance(x, (float, np.floating)):
            return self.number(float(x))
        if isinstance(x, Rational):
            return self.number(int(x.numerator)) / self.number(int(x.denominator))
        raise NotDefined(f"{x!r} ({type(x).__name__}) is not a number of {self.name}")

    def power(self, x: Any, n: Any) -> Any:
        return x ** (int(n) if isinstance(n, Integral) else self.element(n))


class Balls(Real):
    """Arb: midpoint and rigorous radius (Johansson 2017)."""

    def __init__(self, precision: int) -> None:
        import flint

        self.flint, self.kind = flint, flint.arb
        functions = {name: getattr(flint.arb, name) for name in _FUNCTIONS}
        super().__init__(
            "Arb balls",
            precision,
            functions
            | {name: _three_valued(ORDER[name], ORDER[no]) for name, no in _OPPOSITE.items()}
            | {
                "maximum": flint.arb.max,
                "minimum": flint.arb.min,
                # Arb's nan says "anything at all", so it answers none of these.
                "isnan": lambda x: False if x.is_finite() or _infinite(x) else None,
                "isinf": lambda x: False if x.is_finite() else _infinite(x) or None,
                "isfinite": lambda x: x.is_finite() or (False if _infinite(x) else None),
            },
        )

    def at_precision(self) -> AbstractContextManager[Any]:
        return self.flint.ctx.workprec(self.precision)

    def number(self, x: Any) -> Any:
        return self.kind(x)

    def enclosure(self, x: Any) -> tuple[float, float]:
        middle = float(x.mid()) if x.is_finite() else np.nan
        if not np.isfinite(middle):
            return np.nan, np.inf
        bound = abs(x - self.kind(middle)).abs_upper()
        radius = float(bound)
        while not self.kind(radius) >= bound:  # exact, both
            radius = float(np.nextafter(radius, np.inf))
        return middle, radius

    def matmul(self, x: Stored, y: Stored) -> Any:
        if x.ndim != 2 or y.ndim != 2 or 0 in x.shape + y.shape:
            return super().matmul(x, y)
        product = self.flint.arb_mat(x.tolist()) * self.flint.arb_mat(y.tolist())
        result = np.empty(len(x) * y.shape[1], dtype=object)
        result[:] = product.entries()
        return result.reshape(len(x), y.shape[1])

    def choose(self, condition: Stored, x: Stored, y: Stored) -> Any:
        return np.frompyfunc(lambda c, a, b: a.union(b) if c is None else a if c else b, 3, 1)(condition, x, y)

    def agree(self, x: Stored, y: Stored) -> Stored:
        return boxed(np.frompyfunc(self.kind.overlaps, 2, 1)(x, y)).astype(bool)

    def merge(self, x: Stored, y: Stored) -> Any:
        return np.frompyfunc(lambda a, b: a if a == b else a.intersection(b), 2, 1)(x, y)


class Intervals(Real):
    """mpmath.iv: two ends, rounded outwards. Outside a function's domain the whole line is returned."""

    def __init__(self, precision: int) -> None:
        iv = _IV
        self.kind = type(iv.mpf(0))
        functions = {
            "exp": iv.exp,
            "expm1": lambda x: iv.exp(x) - 1,
            "log": iv.log,
            "log1p": lambda x: iv.log(1 + x),
            "sqrt": iv.sqrt,
            "sin": iv.sin,
            "cos": iv.cos,
            "tanh": lambda x: 1 - 2 / (iv.exp(2 * x) + 1),
            "power": self.power,
        }
        # mpmath's own == and <= also say True for two equal intervals, whose members need not be equal.
        certain = {
            "less": lambda x, y: _upper(x) < _lower(y),
            "less_equal": lambda x, y: _upper(x) <= _lower(y),
            "greater": lambda x, y: _lower(x) > _upper(y),
            "greater_equal": lambda x, y: _lower(x) >= _upper(y),
            "equal": lambda x, y: _lower(x) == _upper(x) == _lower(y) == _upper(y),
            "not_equal": lambda x, y: _upper(x) < _lower(y) or _lower(x) > _upper(y),
        }
        super().__init__(
            "mpmath intervals",
            precision,
            {name: _real(f, self.kind, _IV.mpf([-mpmath.inf, mpmath.inf])) for name, f in functions.items()}
            | {name: _three_valued(certain[name], certain[no]) for name, no in _OPPOSITE.items()}
            | {
                "maximum": lambda x, y: iv.mpf([max(_lower(x), _lower(y)), max(_upper(x), _upper(y))]),
                "minimum": lambda x, y: iv.mpf([min(_lower(x), _lower(y)), min(_upper(x), _upper(y))]),
                "isinf": lambda x: _infinite_ends(x, lambda ends: ends == 2 and _lower(x) == _upper(x)),
                "isfinite": lambda x: _infinite_ends(x, lambda ends: ends == 0),
                "isnan": lambda x: None if _infinite_ends(x, bool) is None else False,
            },
        )

    @contextmanager
    def at_precision(self) -> Iterator[None]:
        before, _IV.prec = _IV.prec, self.precision
        try:
            yield
        finally:
            _IV.prec = before

    def number(self, x: Any) -> Any:
        return _IV.mpf(x)

    def enclosure(self, x: Any) -> tuple[float, float]:
        middle = float(_lower(x)) / 2 + float(_upper(x)) / 2
        if not np.isfinite(middle):
            return np.nan, np.inf
        bound = _upper(abs(x - _IV.mpf(middle)))
        radius = float(bound)
        while not bound <= radius:  # compared exactly
            radius = float(np.nextafter(radius, np.inf))
        return middle, radius

    def choose(self, condition: Stored, x: Stored, y: Stored) -> Any:
        def one(c: bool | None, a: Any, b: Any) -> Any:
            union = [min(_lower(a), _lower(b)), max(_upper(a), _upper(b))]
            return _IV.mpf(union) if c is None else a if c else b

        return np.frompyfunc(one, 3, 1)(condition, x, y)

    def agree(self, x: Stored, y: Stored) -> Stored:
        overlap = np.frompyfunc(lambda a, b: _lower(a) <= _upper(b) and _lower(b) <= _upper(a), 2, 1)
        return boxed(overlap(x, y)).astype(bool)

    def merge(self, x: Stored, y: Stored) -> Any:
        def one(a: Any, b: Any) -> Any:
            return _IV.mpf([max(_lower(a), _lower(b)), min(_upper(a), _upper(b))])

        return np.frompyfunc(one, 2, 1)(x, y)


class Multiprecision(Real):
    """mpmath floating point, rounded to nearest: many digits and no bound."""

    encloses = False

    def __init__(self, precision: int) -> None:
        mp = mpmath.mp
        self.kind = mpmath.mpf
        functions = {name: getattr(mp, name) for name in _FUNCTIONS} | {"power": self.power, "divide": operator.truediv}
        super().__init__(
            "mpmath floats",
            precision,
            {name: _real(f, self.kind, mpmath.nan) for name, f in functions.items()}
            | ORDER
            | {
                "maximum": lambda x, y: x if x >= y or mp.isnan(x) else y,
                "minimum": lambda x, y: x if x <= y or mp.isnan(x) else y,
                "isnan": mp.isnan,
                "isinf": mp.isinf,
                "isfinite": mp.isfinite,
            },
        )

    def at_precision(self) -> AbstractContextManager[Any]:
        return mpmath.mp.workprec(self.precision)

    def number(self, x: Any) -> Any:
        return mpmath.mpf(x)


_FUNCTIONS = ("exp", "expm1", "log", "log1p", "sqrt", "sin", "cos", "tan", "tanh", "sinh", "cosh")
_OPPOSITE = {
    "less": "greater_equal",
    "less_equal": "greater",
    "greater": "less_equal",
    "greater_equal": "less",
    "equal": "not_equal",
    "not_equal": "equal",
}


def _phi1_slope(z: Numbers) -> Any:
    """Without the series, which is cut off: the digits that cancel are there."""
    safe = np.where(z == 0, 1, z)
    return np.where(z == 0, 1 / 2, (np.exp(safe) - np.expm1(safe) / safe) / safe)


def _three_valued(yes: Callable[..., bool], no: Callable[..., bool]) -> Callable[..., bool | None]:
    """yes and no answer True only when certain; None is an open question."""
    return lambda x, y: True if yes(x, y) else False if no(x, y) else None


def _infinite(x: Any) -> bool:
    return x.is_exact() and not x.is_finite() and not x.is_nan()


def _lower(x: Any) -> Any:
    return mpmath.mp.make_mpf(x._mpi_[0])  # as it is: mpf(x.a) would round to mpmath's own precision


def _upper(x: Any) -> Any:
    return mpmath.mp.make_mpf(x._mpi_[1])


def _infinite_ends(x: Any, question: Callable[[int], bool]) -> bool | None:
    ends = int(mpmath.isinf(_lower(x))) + int(mpmath.isinf(_upper(x)))
    return question(ends) if ends == 0 or _lower(x) == _upper(x) else None


def _real(f: Callable[..., Any], kind: type, lost: Any) -> Callable[..., Any]:
    """f, with `lost` where its value is not real (mpmath goes on in complex numbers) or does not exist."""

    def real(*x: Any) -> Any:
        try:
            y = f(*x)
        except (ValueError, ZeroDivisionError, OverflowError):
            return lost
        return y if isinstance(y, kind) else lost

    return real


def _enclosures(system: Real, result: Any) -> Any:
    if isinstance(result, dict):
        return {name: _enclosures(system, x) for name, x in result.items()}
    if isinstance(result, (tuple, list)):
        return type(result)(_enclosures(system, x) for x in result)
    if isinstance(result, Numbers):
        with system.working():
            pairs = np.array([system.enclosure(x) for x in result.data.flat], dtype=np.float64).reshape(-1, 2)
        return Enclosure(pairs[:, 0].reshape(result.shape), pairs[:, 1].reshape(result.shape))
    exact = np.asarray(result, dtype=np.float64)  # depends on no input: a plain array is its own value
    known = np.isfinite(exact)
    return Enclosure(np.where(known, exact, np.nan), np.where(known, 0.0, np.inf))
