"""Balls: what an honest implementation in a declared arithmetic may be off by, element by element.

A ball is (v, m, w, e). The computed value is a sum of monomials, each the product of inputs and of rounding factors
1 + d, |d| <= u, where whatever else may go wrong enters as one more input, of any value up to its bound. Then

    v   is the float64 value
    e   bounds what those extra inputs change
    m   bounds the sum of the absolute values of all monomials, theirs included, so m >= |v| + e
    w   bounds the sum of |d| over the rounding factors of any one monomial

and |computed - v| <= e + expm1(w) m, for nested sums taken in any order and products distributed in any way over them
(Higham 2002, section 3.1). Nothing of second order is left out. The rules:

    a + b         m = ma + mb    w = max(wa + nb u, wb + na u) + u     n additions on the way to each operand
    a b           m = ma mb      w = wa + wb + u                       e = |a| eb + |b| ea + ea eb
    sum, matmul   m = |A| |B|    w = wa + wb + n u                     low-precision operands: e and m + casts ud m
    a / b         m = ma / (|b| - rb)    e = (ea + |a / b| rb) / (|b| - rb)     rb = eb + expm1(wb) mb
    exp, max, ..  start afresh: w = 0, m = |v| + e; those of the shared primitives are in ball_primitives.py

Not covered, hence dishonest: one accumulator over the terms of nested sums multiplied out, quotients of powers
(q_i gamma^i times k_j gamma^-j), exp off by more than declared.

The radius never depends on what an implementation returned. A ball whose majorant leaves the range of the format, or
whose divisor may be zero, makes the reading vacuous: outside the domain of the declared arithmetic, no verdict.

`Ball` plugs into NumPy through `__array_ufunc__` and `__array_function__`; constants are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mixproof.verify.arithmetic import LARGEST, UNDERFLOW, UNIT, Arithmetic, round_to
from mixproof.verify.numbers.ball_primitives import PRIMITIVES

# A quotient is off by at most 2 units of the last place, 4 u: div.full of a GPU; a rounded reciprocal and a product.
QUOTIENT = 4
# Bounds are themselves evaluated in float64, at float64 values.
SLACK = 1 + 2.0**-20


class Reading:
    """One evaluation on balls: the arithmetic, whether a backward pass recomputes softmax from a stored logsumexp,
    and whether the evaluation left the domain of the arithmetic (`vacuous` says how)."""

    def __init__(self, arithmetic: Arithmetic, recomputes: bool = False) -> None:
        self.arithmetic = arithmetic
        self.recomputes = recomputes
        self.vacuous = ""
        self.exp_error = 2 * arithmetic.exp_ulps
        # an error of k units, or its inverse, k <= most, is a factor within exp(k u / (1 - most u)) of one
        most = max(8, 2 * self.exp_error)
        self.unit = arithmetic.unit / (1 - most * arithmetic.unit)
        self.sum_unit = arithmetic.sum_unit / (1 - most * arithmetic.sum_unit)
        self.eta = UNDERFLOW[arithmetic.intermediate]
        self.largest = LARGEST[arithmetic.intermediate]

    def ball(self, x: Any, exact: bool = True) -> Ball:
        """An input. It has no error, unless it is so small that an operation may take it for zero. `exact` says that
        the dot-product format holds it exactly."""
        v = np.asarray(x, dtype=np.float64)
        size = np.abs(v)
        e = np.where(size < self.eta, size, 0.0)
        return Ball(self, v, size + e, e, exact=exact)

    def lift(self, x: Any) -> Ball:
        """x if it is a ball, else a constant; it is rounded where the intermediate format does not hold it."""
        if isinstance(x, Ball):
            return x
        constant = self.ball(x)
        inexact = round_to(constant.v, self.arithmetic.intermediate) != constant.v
        return constant.widened(np.where(inexact, self.unit * constant.m, 0)) if np.any(inexact) else constant

    def around(self, v: np.ndarray, e: np.ndarray, w: float = 0.0, n: int = 1) -> Ball:
        """A result within e of v whose majorant starts afresh: no later sum reaches into it."""
        return Ball(self, v, np.abs(v) + e, e, w, n)

    def merged(self, parts: Sequence[Ball], v: np.ndarray, m: np.ndarray, e: np.ndarray, exact: bool = False) -> Ball:
        """Elements that come from several balls."""
        w, n = max((b.w for b in parts), default=0.0), max((b.n for b in parts), default=1)
        return Ball(self, v, m, e, w, n, exact)

    def check(self, m: np.ndarray) -> None:
        """Note what may leave the range of the intermediate format."""
        if not self.vacuous and m.size and not m.max() <= self.largest / 4:
            self.leave(f"an intermediate result may exceed the largest {self.arithmetic.intermediate}")

    def leave(self, why: str) -> None:
        """Note why the evaluation has left the domain of the arithmetic; the first reason stands."""
        self.vacuous = self.vacuous or why


class Ball:
    """An array of balls. `w`, and `n`, the length of the chain of additions behind it, are numbers: the largest
    over the array. See the module docstring."""

    __slots__ = ("e", "exact", "m", "n", "reading", "v", "w")

    def __init__(
        self,
        reading: Reading,
        v: np.ndarray,
        m: np.ndarray,
        e: np.ndarray,
        w: float = 0.0,
        n: int = 1,
        exact: bool = False,
    ) -> None:
        self.reading, self.v, self.m, self.e, self.w, self.n, self.exact = reading, v, m, e, w, n, exact

    @property
    def radius(self) -> np.ndarray:
        """Bound on |computed - v|."""
        return self.e + np.expm1(self.w) * self.m

    shape = property(lambda self: self.v.shape)
    ndim = property(lambda self: self.v.ndim)
    size = property(lambda self: self.v.size)
    T = property(lambda self: self.each(np.transpose))

    def each(self, f: Callable[[np.ndarray], np.ndarray]) -> Ball:
        """A rearrangement: no rounding."""
        return Ball(self.reading, f(self.v), f(self.m), f(self.e), self.w, self.n, self.exact)

    def widened(self, by: np.ndarray) -> Ball:
        """The same values, off by up to `by` more."""
        return Ball(self.reading, self.v, self.m + by, self.e + by, self.w, self.n, self.exact)

    def reshape(self, *shape: Any) -> Ball:
        return self.each(lambda a: a.reshape(*shape))

    def __len__(self) -> int:
        return len(self.v)

    def __getitem__(self, key: Any) -> Ball:
        return self.each(lambda a: np.asarray(a[key]))

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *args: Any, **kwargs: Any) -> Any:
        if method != "__call__" or kwargs or ufunc not in UFUNCS:
            return NotImplemented
        return UFUNCS[ufunc](self.reading, *args)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func not in FUNCTIONS:
            return NotImplemented
        return FUNCTIONS[func](self.reading, *args, **kwargs)

    def __add__(self, o: Any) -> Ball:
        return _add(self.reading, self, o)

    def __radd__(self, o: Any) -> Ball:
        return _add(self.reading, o, self)

    def __sub__(self, o: Any) -> Ball:
        return _subtract(self.reading, self, o)

    def __rsub__(self, o: Any) -> Ball:
        return _subtract(self.reading, o, self)

    def __mul__(self, o: Any) -> Ball:
        return _multiply(self.reading, self, o)

    def __rmul__(self, o: Any) -> Ball:
        return _multiply(self.reading, o, self)

    def __truediv__(self, o: Any) -> Ball:
        return _divide(self.reading, self, o)

    def __rtruediv__(self, o: Any) -> Ball:
        return _divide(self.reading, o, self)

    def __matmul__(self, o: Any) -> Ball:
        return _matmul(self.reading, self, o)

    def __rmatmul__(self, o: Any) -> Ball:
        return _matmul(self.reading, o, self)

    def __pow__(self, n: Any) -> Ball:
        return _power(self.reading, self, n)

    def __neg__(self) -> Ball:
        return Ball(self.reading, -self.v, self.m, self.e, self.w, self.n, self.exact)

    def __abs__(self) -> Ball:
        return Ball(self.reading, np.abs(self.v), self.m, self.e, self.w, self.n, self.exact)

    def __lt__(self, o: Any) -> np.ndarray:
        return self.v < value(o)

    def __le__(self, o: Any) -> np.ndarray:
        return self.v <= value(o)

    def __gt__(self, o: Any) -> np.ndarray:
        return self.v > value(o)

    def __ge__(self, o: Any) -> np.ndarray:
        return self.v >= value(o)


def tolerance(ball: Ball, dtype: str) -> np.ndarray:
    """What a result stored in `dtype` may differ from `ball.v`. Marks the reading vacuous if it may overflow."""
    e = ball.radius * SLACK
    if not np.all(np.abs(ball.v) + e <= LARGEST[dtype]):
        ball.reading.leave(f"an output may exceed the largest {dtype}")
    return e + UNIT[dtype] * (np.abs(ball.v) + e) + UNDERFLOW[dtype]


def value(x: Any) -> Any:
    """v of a ball; anything else is its own."""
    return x.v if isinstance(x, Ball) else x


def _add(r: Reading, a: Any, b: Any) -> Ball:
    a, b = r.lift(a), r.lift(b)
    # merged into one chain, a term of either sum may meet the additions of the other
    w = max(a.w + b.n * r.sum_unit, b.w + a.n * r.sum_unit) + r.unit
    m = a.m + b.m + r.eta
    r.check(m)
    return Ball(r, a.v + b.v, m, a.e + b.e + r.eta, w, a.n + b.n)


def _subtract(r: Reading, a: Any, b: Any) -> Ball:
    return _add(r, a, -r.lift(b))


def _multiply(r: Reading, a: Any, b: Any) -> Ball:
    a, b = r.lift(a), r.lift(b)
    e = np.abs(a.v) * b.e + a.e * (np.abs(b.v) + b.e) + r.eta
    m = a.m * b.m + r.eta
    r.check(m)
    return Ball(r, a.v * b.v, m, e, a.w + b.w + r.unit, a.n + b.n - 1)


def _divide(r: Reading, a: Any, b: Any) -> Ball:
    a, b = r.lift(a), r.lift(b)
    error = b.radius
    low = np.abs(b.v) - error
    if np.any(low <= 0):
        r.leave("a divisor may be zero")
        low = np.where(low > 0, low, np.abs(b.v) + np.finfo(float).tiny)
    v, m = a.v / np.where(b.v == 0, 1, b.v), a.m / low + r.eta
    r.check(m)
    return Ball(r, v, m, (a.e + np.abs(v) * error) / low + r.eta, a.w + QUOTIENT * r.unit, a.n)


def _matmul(r: Reading, a: Any, b: Any) -> Ball:
    a, b = _operand(r, a), _operand(r, b)
    n = a.shape[-1]
    lost = 2 * n * r.eta  # products and partial sums that underflow
    e = a.e @ (np.abs(b.v) + b.e) + np.abs(a.v) @ b.e + lost
    m = a.m @ b.m + lost
    r.check(m)
    return Ball(r, a.v @ b.v, m, e, a.w + b.w + n * r.sum_unit + r.unit, max(n, 1) + a.n + b.n - 1)


def _operand(r: Reading, x: Any) -> Ball:
    """x as a dot product reads it: rounded to the dot format, as often as the arithmetic says."""
    x = r.lift(x)
    if not r.arithmetic.casts_operand(x.exact):
        return x
    dot, casts = r.arithmetic.dot, r.arithmetic.casts
    if np.any(x.m > LARGEST[dot] / 2):
        r.leave(f"an operand of a dot product may exceed the largest {dot}")
    factor = (1 + UNIT[dot]) ** casts
    return x.widened((factor - 1) * x.m + factor * casts * UNDERFLOW[dot])


def _power(r: Reading, a: Ball, n: Any) -> Ball:
    if not isinstance(n, int) or n < 1:
        raise TypeError(f"balls have whole powers n >= 1 only, not {n!r}; use the primitive `decay` for gamma ** n")
    result = a
    for _ in range(n - 1):
        result = _multiply(r, result, a)
    return result


def _exp(r: Reading, x: Ball) -> Ball:
    """Two more roundings of the argument where exp is a power of two: log2(e), and the product with it."""
    v = np.exp(x.v)
    e = v * np.expm1(np.minimum(x.radius + r.unit * (r.exp_error + 2 * np.abs(x.v)), 700)) + r.eta
    r.check(v + e)
    return r.around(v, e)


def _log(r: Reading, x: Ball) -> Ball:
    """As accurate as exp; absolutely so near one, where lg2.approx is no better. Then a factor log(2), rounded."""
    ratio = x.radius / np.abs(x.v)
    if not np.all((x.v > 0) & (ratio < 1)):
        r.leave("the argument of a logarithm may be zero")
        ratio = np.where(ratio < 1, ratio, 0.5)
    v = np.log(x.v)
    return r.around(v, -np.log1p(-ratio) + r.unit * ((r.exp_error + 2) * np.abs(v) + r.exp_error))


def _log1p(r: Reading, x: Ball) -> Ball:
    low = 1 + x.v - x.radius
    if np.any(low <= 0):
        r.leave("the argument of a logarithm may be zero")
    v = np.log1p(x.v)
    e = x.radius / np.maximum(low, np.finfo(float).tiny) + r.unit * r.exp_error * np.abs(v) + r.eta
    return r.around(v, e)


def _sqrt(r: Reading, x: Ball) -> Ball:
    if np.any(x.v < 0):
        r.leave("the argument of a square root may be negative")
    v = np.sqrt(x.v)
    # |sqrt(x + d) - sqrt(x)| = |d| / (sqrt(x + d) + sqrt(x)), and at most sqrt(|d|); sqrt.approx is off by one ulp
    e = np.minimum(x.radius / np.where(v > 0, v, 1), np.sqrt(x.radius))
    return r.around(v, e, 2 * r.unit)


def _maximum(r: Reading, a: Any, b: Any) -> Ball:
    a, b = r.lift(a), r.lift(b)
    return r.around(np.maximum(a.v, b.v), np.maximum(a.radius, b.radius))


def _compare(op: np.ufunc) -> Callable[..., np.ndarray]:
    return lambda r, a, b: op(value(a), value(b))


UFUNCS: Mapping[np.ufunc, Callable[..., Any]] = {
    np.add: _add,
    np.subtract: _subtract,
    np.multiply: _multiply,
    np.true_divide: _divide,
    np.matmul: _matmul,
    np.power: _power,
    np.negative: lambda r, a: -a,
    np.absolute: lambda r, a: abs(a),
    np.square: lambda r, a: _multiply(r, a, a),
    np.exp: _exp,
    np.log: _log,
    np.log1p: _log1p,
    np.sqrt: _sqrt,
    np.maximum: _maximum,
    **{op: _compare(op) for op in (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal)},
    np.isneginf: lambda r, a: np.isneginf(a.v),
}


def _sum(r: Reading, x: Ball, axis: Any = None, keepdims: bool = False) -> Ball:
    v = np.sum(x.v, axis=axis, keepdims=keepdims)
    n = x.size // max(1, v.size)
    m, e = (np.sum(a, axis=axis, keepdims=keepdims) + n * r.eta for a in (x.m, x.e))
    r.check(m)
    return Ball(r, v, m, e, x.w + n * r.sum_unit, max(n, 1) + x.n - 1)


def _cumsum(r: Reading, x: Ball, axis: int) -> Ball:
    n = x.shape[axis]
    v = np.cumsum(x.v, axis=axis)
    m, e = (np.cumsum(a, axis=axis) + n * r.eta for a in (x.m, x.e))
    r.check(m)
    return Ball(r, v, m, e, x.w + n * r.sum_unit, max(n, 1) + x.n - 1)


def _join(function: Any) -> Callable[..., Ball]:
    def joined(r: Reading, balls: Any, axis: int = 0) -> Ball:
        parts = [r.lift(b) for b in balls]
        v, m, e = (function([getattr(b, name) for b in parts], axis=axis) for name in ("v", "m", "e"))
        return r.merged(parts, v, m, e, all(b.exact for b in parts))

    return joined


def _where(r: Reading, condition: Any, a: Any, b: Any) -> Ball:
    condition, a, b = value(condition), r.lift(a), r.lift(b)
    return r.merged([a, b], *(np.where(condition, getattr(a, n), getattr(b, n)) for n in ("v", "m", "e")))


def _max(r: Reading, x: Ball, axis: Any = None, keepdims: bool = False) -> Ball:
    return r.around(*(np.max(a, axis=axis, keepdims=keepdims) for a in (x.v, x.radius)))


def _broadcast_to(r: Reading, x: Ball, shape: Any) -> Ball:
    return x.each(lambda a: np.broadcast_to(a, shape))


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.sum: _sum,
    np.cumsum: _cumsum,
    np.concatenate: _join(np.concatenate),
    np.stack: _join(np.stack),
    np.where: _where,
    np.max: _max,
    np.broadcast_to: _broadcast_to,
    np.transpose: lambda r, x, axes=None: x.each(lambda a: np.transpose(a, axes)),
    np.expand_dims: lambda r, x, axis: x.each(lambda a: np.expand_dims(a, axis)),
    np.shape: lambda r, x: x.shape,
    np.ndim: lambda r, x: x.ndim,
    np.size: lambda r, x: x.size,
    **PRIMITIVES,
}
