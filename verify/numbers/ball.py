"""Balls: what an honest implementation in a declared arithmetic may be off by, element by element.

A ball is (v, m, w, e): the float64 value; a majorant, the same expression with every sum turned into a sum of absolute
values; the weight of roundings that a term of that expression may collect; and a radius for all other errors. The
computed value lies within e + w m of v, for every evaluation of the equations in the declared arithmetic, in whatever
order sums are taken and products distributed (Higham 2002, section 3.1: a monomial collects factors 1 + d, |d| <= u):

    a + b         m = ma + mb     w = max(wa + nb u, wb + na u)      n additions on the way to each operand
    a b           m = ma mb       w = wa + wb + u            e = |a| eb + |b| ea + ea eb
    sum, matmul   m = |A| |B|     w = wa + wb + n u
    softmax       centred         d p_j <= p_j [(1 - p_j) r_j + sum_{k != j} p_k r_k]: saturated is well conditioned
    decay         e               n (1 + ulps + 3 |log gamma|) u: repeated product, power, exp of a multiple, any split

The radius never depends on what an implementation returned. A ball whose majorant leaves the range of the format, or
whose divisor may be zero, makes the reading vacuous: outside the domain of the declared arithmetic, no verdict.

`Ball` plugs into NumPy through `__array_ufunc__` and `__array_function__`; constants are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mixproof.reference import primitives
from mixproof.verify.arithmetic import LARGEST, UNDERFLOW, UNIT, Arithmetic

# Weights add where factors (1 + u) multiply: over a whole evaluation that neglects a relative n u <= 2^-8 of the radius
# (n <= 65536 in float32).
SECOND_ORDER = 1 + 2.0**-8


class Reading:
    """One evaluation on balls: the arithmetic, whether a backward pass recomputes softmax from a stored logsumexp,
    and whether the evaluation left the domain of the arithmetic (`vacuous` says how)."""

    def __init__(self, arithmetic: Arithmetic, recomputes: bool = False) -> None:
        self.arithmetic = arithmetic
        self.recomputes = recomputes
        self.vacuous = ""
        self.unit = arithmetic.unit
        self.sum_unit = arithmetic.sum_unit
        self.eta = UNDERFLOW[arithmetic.intermediate]
        self.largest = LARGEST[arithmetic.intermediate]
        self.exp_error = 2 * arithmetic.exp_ulps

    def ball(self, x: Any, exact: bool = True) -> Ball:
        """An input: no error. `exact` says that the dot-product format holds it exactly."""
        v = np.asarray(x, dtype=np.float64)
        return Ball(self, v, np.abs(v), np.zeros_like(v), exact=exact)

    def check(self, m: np.ndarray) -> None:
        """Note what may leave the range of the intermediate format."""
        if not self.vacuous and m.size and not m.max() <= self.largest / 4:
            self.vacuous = f"an intermediate result may exceed the largest {self.arithmetic.intermediate}"


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
        return self.e + self.w * self.m

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
        if method != "__call__" or kwargs.get("out") is not None or ufunc not in UFUNCS:
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
        return self.v < _value(o)

    def __le__(self, o: Any) -> np.ndarray:
        return self.v <= _value(o)

    def __gt__(self, o: Any) -> np.ndarray:
        return self.v > _value(o)

    def __ge__(self, o: Any) -> np.ndarray:
        return self.v >= _value(o)


def tolerance(ball: Ball, dtype: str) -> np.ndarray:
    """What a result stored in `dtype` may differ from `ball.v`. Marks the reading vacuous if it may overflow."""
    e = ball.radius * SECOND_ORDER
    if not ball.reading.vacuous and np.any(np.abs(ball.v) + e > LARGEST[dtype]):
        ball.reading.vacuous = f"an output may exceed the largest {dtype}"
    return e + UNIT[dtype] * (np.abs(ball.v) + e) + UNDERFLOW[dtype]


def _value(x: Any) -> Any:
    return x.v if isinstance(x, Ball) else x


def _lift(r: Reading, x: Any) -> Ball:
    return x if isinstance(x, Ball) else r.ball(x)


def _add(r: Reading, a: Any, b: Any) -> Ball:
    a, b = _lift(r, a), _lift(r, b)
    # merged into one chain, a term of either sum may meet the additions of the other
    w = max(a.w + b.n * r.sum_unit, b.w + a.n * r.sum_unit) + r.unit
    return Ball(r, a.v + b.v, a.m + b.m, a.e + b.e, w, a.n + b.n)


def _subtract(r: Reading, a: Any, b: Any) -> Ball:
    return _add(r, a, -_lift(r, b))


def _multiply(r: Reading, a: Any, b: Any) -> Ball:
    a, b = _lift(r, a), _lift(r, b)
    e = np.abs(a.v) * b.e + a.e * (np.abs(b.v) + b.e) + r.eta
    m = a.m * b.m
    r.check(m)
    return Ball(r, a.v * b.v, m, e, a.w + b.w + r.unit, a.n + b.n - 1)


def _divide(r: Reading, a: Any, b: Any) -> Ball:
    a, b = _lift(r, a), _lift(r, b)
    error = b.radius
    low = np.abs(b.v) - error
    if np.any(low <= 0):
        r.vacuous = r.vacuous or "a divisor may be zero"
        low = np.where(low > 0, low, np.abs(b.v) + np.finfo(float).tiny)
    v, m = a.v / np.where(b.v == 0, 1, b.v), a.m / low
    r.check(m)
    return Ball(r, v, m, (a.e + np.abs(v) * error) / low + r.eta, a.w + 2 * r.unit, a.n)


def _matmul(r: Reading, a: Any, b: Any) -> Ball:
    a, b = _operand(r, a), _operand(r, b)
    n = a.shape[-1]
    e = a.e @ (np.abs(b.v) + b.e) + np.abs(a.v) @ b.e + n * r.eta
    m = a.m @ b.m
    r.check(m)
    return Ball(r, a.v @ b.v, m, e, a.w + b.w + n * r.sum_unit + r.unit, n + a.n + b.n - 1)


def _operand(r: Reading, x: Any) -> Ball:
    x = _lift(r, x)
    if not r.arithmetic.casts_operand(x.exact):
        return x
    dot = r.arithmetic.dot
    if not r.vacuous and np.any(x.m > LARGEST[dot]):
        r.vacuous = f"an operand of a dot product may exceed the largest {dot}"
    return Ball(r, x.v, x.m, x.e + r.arithmetic.casts * (UNIT[dot] * x.m + UNDERFLOW[dot]), x.w, x.n)


def _power(r: Reading, a: Ball, n: Any) -> Ball:
    if not isinstance(n, int) or n < 1:
        raise TypeError(f"balls have whole powers n >= 1 only, not {n!r}; use the primitive `decay` for gamma ** n")
    result = a
    for _ in range(n - 1):
        result = _multiply(r, result, a)
    return result


def _exp(r: Reading, x: Ball) -> Ball:
    v = np.exp(x.v)
    e = v * np.expm1(np.minimum(x.radius + r.unit * (r.exp_error + 3 * np.abs(x.v)), 700)) + r.eta
    r.check(v + e)
    return Ball(r, v, v + e, e)


def _log(r: Reading, x: Ball) -> Ball:
    error = x.radius
    if np.any(x.v <= error):
        r.vacuous = r.vacuous or "the argument of a logarithm may be zero"
    v = np.log(x.v)
    e = -np.log1p(-np.minimum(error / np.abs(x.v), 0.5)) + r.unit * (2 * np.abs(v) + 1)
    return Ball(r, v, np.abs(v) + e, e)


def _log1p(r: Reading, x: Ball) -> Ball:
    v = np.log1p(x.v)
    e = x.radius / np.maximum(1 + x.v - x.radius, np.finfo(float).tiny) + 2 * r.unit * np.abs(v) + r.eta
    return Ball(r, v, np.abs(v) + e, e)


def _sqrt(r: Reading, x: Ball) -> Ball:
    v = np.sqrt(x.v)
    e = np.minimum(x.radius / np.where(v > 0, v, 1), np.sqrt(x.radius)) + r.unit * v
    return Ball(r, v, v + e, e)


def _maximum(r: Reading, a: Any, b: Any) -> Ball:
    a, b = _lift(r, a), _lift(r, b)
    v, e = np.maximum(a.v, b.v), np.maximum(a.radius, b.radius)
    return Ball(r, v, np.abs(v) + e, e)  # no sum is re-associated across a maximum: the majorant starts afresh


def _compare(op: np.ufunc) -> Callable[..., np.ndarray]:
    return lambda r, a, b: op(_value(a), _value(b))


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


def _sum(r: Reading, x: Ball, axis: Any = None, keepdims: bool = False, **unused: Any) -> Ball:
    v = np.sum(x.v, axis=axis, keepdims=keepdims)
    n = x.size // max(1, v.size)
    m, e = (np.sum(a, axis=axis, keepdims=keepdims) for a in (x.m, x.e))
    return Ball(r, v, m, e, x.w + n * r.sum_unit + r.unit, n + x.n - 1)


def _cumsum(r: Reading, x: Ball, axis: int = 0) -> Ball:
    n = x.shape[axis]
    v, m, e = (np.cumsum(a, axis=axis) for a in (x.v, x.m, x.e))
    return Ball(r, v, m, e, x.w + n * r.sum_unit + r.unit, n + x.n - 1)


def _merged(r: Reading, parts: list[Ball], arrays: Any, exact: bool = False) -> Ball:
    v, m, e = arrays
    return Ball(r, v, m, e, max((b.w for b in parts), default=0.0), max((b.n for b in parts), default=1), exact)


def _join(function: Any) -> Callable[..., Ball]:
    def joined(r: Reading, balls: Any, axis: int = 0) -> Ball:
        parts = [_lift(r, b) for b in balls]
        arrays = (function([getattr(b, name) for b in parts], axis=axis) for name in ("v", "m", "e"))
        return _merged(r, parts, arrays, all(b.exact for b in parts))

    return joined


def _where(r: Reading, condition: Any, a: Any, b: Any) -> Ball:
    condition, a, b = _value(condition), _lift(r, a), _lift(r, b)
    return _merged(r, [a, b], (np.where(condition, getattr(a, n), getattr(b, n)) for n in ("v", "m", "e")))


def _max(r: Reading, x: Ball, axis: Any = None, keepdims: bool = False, **unused: Any) -> Ball:
    v, e = (np.max(a, axis=axis, keepdims=keepdims) for a in (x.v, x.radius))
    return Ball(r, v, np.abs(v) + e, e)


def _broadcast_to(r: Reading, x: Ball, shape: Any) -> Ball:
    return x.each(lambda a: np.broadcast_to(a, shape))


def _softmax(r: Reading, s: Ball, axis: int = -1) -> Ball:
    """p~_j = p_j exp(d_j) / sum_k p_k exp(d_k) with |d_k| <= r_k, hence with t_j = (1 - p_j) r_j + sum_{k!=j} p_k r_k
    1 / (1 - t_j) above and 1 / (1 + c t_j) below, c = expm1(2 max r) / (2 max r)."""
    p = primitives.softmax(s.v, axis)
    n = s.shape[axis]
    seen = np.isfinite(s.v)
    S = np.where(seen, s.v, 0)
    top = np.max(np.where(seen, s.v, -np.inf), axis=axis, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0)
    size = np.where(seen, np.abs(S), 0)
    rel = np.where(seen, s.radius, 0) + r.unit * (r.exp_error + 3 * np.abs(S - top) + size)
    rel = np.where(seen, np.minimum(rel, 300), 0)
    mean = np.sum(p * rel, axis=axis, keepdims=True)
    t = (1 - p) * rel + np.maximum(mean - p * rel, 0)
    R = np.max(rel, axis=axis, keepdims=True, initial=0)
    c = np.expm1(2 * R) / np.where(R > 0, 2 * R, 1)
    up = np.where(t < 1, t / np.maximum(1 - t, 1e-300), np.inf)
    down = c * t / (1 + c * t)
    e = np.where(p > 0, p * np.where(p > 0, np.maximum(up, down), 0), 0)
    # an entry that underflows in float64 is below any format's underflow; whatever the errors, p~ lies in [0, 1]
    unknown = np.where(seen & (rel > 0.5), np.minimum(np.exp(np.minimum(S - top + 2 * R, 0)), 1), 0)
    e = np.minimum(np.maximum(e, np.where(p > 0, 0, unknown)), np.maximum(p, 1 - p))
    e = e + np.where(seen, r.eta, 0)
    if r.recomputes:
        # exp(S - lse) from a stored logsumexp is not normalised again: what the two roundings differ by stays
        lse = top + np.log(np.maximum(np.sum(np.where(seen, np.exp(S - top), 0), axis=axis, keepdims=True), 1))
        e = e + (p + e) * np.expm1(r.unit * (2 * np.abs(lse) + 2 * size + 4))
    return Ball(r, p, p + e, e, (n + 2) * r.sum_unit + 2 * r.unit)


def _masked(r: Reading, s: Any, keep: np.ndarray, fill: float) -> Ball:
    s = _lift(r, s)
    return _merged(r, [s], (np.where(keep, s.v, fill), np.where(keep, s.m, 0), np.where(keep, s.e, 0)))


def _mahalanobis(r: Reading, x: Any, mu: Any, var: Any) -> Ball:
    x, mu, var = (_lift(r, a) for a in (x, mu, var))
    error = var.radius
    low = var.v - error
    if np.any(low <= 0):
        r.vacuous = r.vacuous or "a variance may be zero"
        low = np.where(low > 0, low, np.finfo(float).tiny)
    E = x.v[:, None, :] - mu.v[None, :, :]
    dE = x.radius[:, None, :] + mu.radius[None, :, :]
    terms = E * E / var.v
    r.check(E * E)
    v = np.sum(terms, axis=-1)
    e = np.sum(terms * (error / low) + (2 * np.abs(E) + dE) * dE / low + r.eta / low, axis=-1)
    R = E.shape[-1]
    if r.arithmetic.distance == "expanded":
        wide = np.sum((x.m[:, None, :] + mu.m[None, :, :]) ** 2 / low, axis=-1)
        e = e + (R + 8) * max(r.sum_unit, r.unit) * wide
        if r.arithmetic.casts_operand(False):
            e = e + 2 * UNIT[r.arithmetic.dot] * wide
    # two roundings of the difference, squared; one each of product, division or a rounded reciprocal, root
    return Ball(r, v, v + e, e, R * r.sum_unit + 8 * r.unit, R)


def _decay(r: Reading, gamma: Any, n: np.ndarray) -> Ball:
    g = _lift(r, gamma)
    n = np.asarray(n)
    if np.any(g.radius > 0):
        raise TypeError("decay: the base must be an input, not a computed value")
    v = g.v**n
    log = np.abs(np.log(np.where(g.v > 0, g.v, 1)))
    exact = (g.v == 1) | (g.v == 0) | (n == 0)
    rel = np.where(exact, 0, r.unit * (n * (1 + r.exp_error + 3 * log) + r.exp_error))
    e = v * np.expm1(np.minimum(rel, 700)) + np.where(exact, 0, r.eta)
    return Ball(r, v, v + e, e)


def _stored(r: Reading, x: Ball) -> Ball:
    output = r.arithmetic.output
    e = x.e + UNIT[output] * (np.abs(x.v) + x.radius) + UNDERFLOW[output]
    return Ball(r, x.v, x.m, e, x.w, x.n)


def _either(r: Reading, x: Any, y: Any) -> Ball:
    x, y = _lift(r, x), _lift(r, y)
    return _merged(r, [x, y], (x.v, np.maximum(x.m, y.m), np.maximum(x.e, y.e)))


def _shifted(r: Reading, s: Ball, by: Any) -> Ball:
    by = np.abs(_value(by))
    return Ball(r, s.v, s.m + by, s.e, s.w + 2 * r.unit, s.n)


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
    primitives.softmax: _softmax,
    primitives.masked: _masked,
    primitives.mahalanobis: _mahalanobis,
    primitives.decay: _decay,
    primitives.stored: _stored,
    primitives.either: _either,
    primitives.shifted: _shifted,
}
