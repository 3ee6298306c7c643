"""What NumPy's functions and the shared primitives do in every lane; see lanes.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mixproof.reference import primitives
from mixproof.verify.arithmetic import round_to
from mixproof.verify.numbers.lanes import Lanes, Workshop, aligned

Function = Callable[..., Any]


def apply(shop: Workshop, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
    """A ufunc. NotImplemented for those that the equations do not use."""
    if method == "accumulate" and ufunc in (np.add, np.multiply):
        return _accumulate(shop, ufunc, inputs[0], options.get("axis", 0))
    if method != "__call__" or options or ufunc not in UFUNCS:
        return NotImplemented
    return UFUNCS[ufunc](shop, *inputs)


def answer(shop: Workshop, function: Function, args: Any, kwargs: Any) -> Any:
    """One of NumPy's functions, or a primitive; NotImplemented runs a primitive's plain body."""
    return FUNCTIONS[function](shop, *args, **kwargs) if function in FUNCTIONS else NotImplemented


def total(x: Lanes, axis: Any = None, keepdims: bool = False) -> Lanes:
    """The sum over one axis, several, or all."""
    x = x.astype(float) if x.dtype == bool else x
    axes = range(x.ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
    axes = tuple(1 + a % x.ndim for a in axes)
    rest = tuple(a for a in range(x.data.ndim) if a not in axes)

    def rows(a: np.ndarray) -> np.ndarray:
        a = np.transpose(a, rest + axes)
        n = int(np.prod(a.shape[len(rest) :], dtype=int))
        return a.reshape(*a.shape[: len(rest)], n)

    out = x.shop.fold(rows(x.data), None if x.raw is None else rows(x.raw))
    if keepdims:
        out = out.reshape(out.shape[0], *(1 if a in axes else x.data.shape[a] for a in range(1, x.data.ndim)))
    return Lanes(x.shop, out)


# --- ufuncs


def _add(shop: Workshop, a: Any, b: Any, sign: float = 1.0) -> Lanes:
    """One product is fused into the sum, where a lane does so."""
    a, b = shop.lift(a), shop.lift(b)
    x, y = aligned(a, b)
    out = shop.rounded(x + sign * y)
    if shop.fused.any() and (a.raw is not None or b.raw is not None):
        first = a.raw is not None
        p, q = aligned(Lanes(shop, a.raw if first else a.data), Lanes(shop, b.data if first else b.raw))  # type: ignore[arg-type]
        out = np.where(shop.mask(shop.fused, out.ndim), shop.rounded(p + sign * q), out)
    return Lanes(shop, out)


def _multiply(shop: Workshop, a: Any, b: Any) -> Lanes:
    x, y = aligned(shop.lift(a), shop.lift(b))
    exact = x * y
    return Lanes(shop, shop.rounded(exact), exact if shop.fused.any() else None)


def _power(shop: Workshop, a: Lanes, n: Any) -> Lanes:
    if not isinstance(n, int) or n < 1:
        raise TypeError(f"lanes have whole powers n >= 1 only, not {n!r}; use the primitive `decay` for gamma ** n")
    result = a
    for _ in range(n - 1):
        result = _multiply(shop, result, a)
    return result


def _rounding(f: Callable[[Workshop, np.ndarray], np.ndarray]) -> Function:
    return lambda shop, x: Lanes(shop, f(shop, x.data))


def _pair(f: Function) -> Function:
    def both(shop: Workshop, a: Any, b: Any) -> Lanes:
        return Lanes(shop, f(*aligned(shop.lift(a), shop.lift(b))))

    return both


def _comparison(f: Function) -> Function:
    """A plain array where it is the same in all lanes, as comparisons of inputs are."""

    def compared(shop: Workshop, *arguments: Any) -> Any:
        out = f(*aligned(*(shop.lift(x) for x in arguments)))
        return out[0] if out.shape[0] == 1 else Lanes(shop, out)

    return compared


def _accumulate(shop: Workshop, ufunc: np.ufunc, x: Lanes, axis: int) -> Lanes:
    """Running sums or products, one after the other."""
    data = np.moveaxis(x.data, 1 + axis % x.ndim, 0)
    rows = [shop.rounded(row) if not i else row for i, row in enumerate(data[:1])]
    for row in data[1:]:
        rows.append(shop.rounded(ufunc(rows[-1], row)))
    out = np.stack(rows) if rows else data
    return Lanes(shop, np.moveaxis(out, 0, 1 + axis % x.ndim))


UFUNCS: Mapping[Any, Function] = {
    np.add: _add,
    np.subtract: lambda shop, a, b: _add(shop, a, b, -1.0),
    np.multiply: _multiply,
    np.true_divide: lambda shop, a, b: Lanes(shop, shop.divide(*aligned(shop.lift(a), shop.lift(b)))),
    np.matmul: lambda shop, a, b: shop.matmul(shop.lift(a), shop.lift(b)),
    np.power: _power,
    np.square: lambda shop, a: _multiply(shop, a, a),
    np.negative: lambda shop, a: a.each(np.negative),
    np.absolute: lambda shop, a: Lanes(shop, np.abs(a.data), exact=a.exact),
    np.exp: _rounding(lambda shop, x: shop.exp(x)),
    np.expm1: _rounding(lambda shop, x: shop.rounded(np.expm1(x))),
    np.log: _rounding(lambda shop, x: shop.log(x)),
    np.log1p: _rounding(lambda shop, x: shop.rounded(np.log1p(x))),
    np.sqrt: _rounding(lambda shop, x: shop.sqrt(x)),
    np.maximum: _pair(np.maximum),
    np.minimum: _pair(np.minimum),
    **{f: _comparison(f) for f in (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal)},
    **{f: _comparison(f) for f in (np.logical_and, np.logical_or, np.bitwise_and, np.bitwise_or)},
    **{f: _comparison(f) for f in (np.invert, np.logical_not, np.isnan, np.isfinite, np.isinf)},
}


# --- NumPy's functions


def _join(function: Function) -> Function:
    def joined(shop: Workshop, members: Any, axis: int = 0) -> Lanes:
        parts = [shop.lift(x) for x in members]
        lanes = max(x.data.shape[0] for x in parts)
        arrays = [np.broadcast_to(x.data, (lanes, *x.shape)) for x in parts]
        return Lanes(shop, function(arrays, axis=axis if axis < 0 else axis + 1), exact=all(x.exact for x in parts))

    return joined


def _where(shop: Workshop, condition: Any, a: Any, b: Any) -> Lanes:
    return Lanes(shop, np.where(*aligned(*(shop.lift(x) for x in (condition, a, b)))))


def _extreme(function: Function) -> Function:
    def extreme(shop: Workshop, x: Lanes, axis: Any = None, keepdims: bool = False, **options: Any) -> Lanes:
        axes = range(x.ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
        where = tuple(1 + a % x.ndim for a in axes)
        return Lanes(shop, function(x.data, axis=where, keepdims=keepdims, **options))

    return extreme


def _broadcast_to(shop: Workshop, x: Lanes, shape: Any) -> Lanes:
    shape = tuple(shape)
    wide = x.reshape(*(1,) * (len(shape) - x.ndim), *x.shape)
    return wide.each(lambda a: np.broadcast_to(a, (a.shape[0], *shape)))


def _each_lane(function: Function) -> Function:
    """A function that only moves elements, lane by lane."""

    def moved(shop: Workshop, x: Lanes, *args: Any, **options: Any) -> Lanes:
        return Lanes(shop, np.stack([function(a, *args, **options) for a in x.data]), exact=x.exact)

    return moved


# --- primitives: ways to compute them that differ from the plain body


def _softmax(shop: Workshop, s: Lanes, axis: int = -1) -> Any:
    """In every second lane block by block with a running maximum, as online kernels do; of the others, in a backward
    pass, half as exp(s - L) from L = log sum exp(s)."""
    at, n = axis % s.ndim, s.shape[axis]
    if shop.plain or n < 3:
        return NotImplemented
    plain = primitives.softmax.__wrapped__(s, axis)  # type: ignore[attr-defined]
    if shop.recomputes:
        top = np.max(s, axis=at, keepdims=True)
        top = np.where(np.equal(top, -np.inf), 0, top)
        total = np.sum(np.exp(s - top), axis=at, keepdims=True)
        L = top + np.log(np.where(np.equal(total, 0), 1, total))
        plain = _chosen(shop, shop.apart, np.exp(s - L), plain)
    blocks = [s[(slice(None),) * at + (slice(a, a + 2),)] for a in range(0, n, 2)]
    top = np.max(blocks[0], axis=at, keepdims=True)
    tops = [top]
    for block in blocks[1:]:
        top = np.maximum(top, np.max(block, axis=at, keepdims=True))
        tops.append(top)
    mass: Any = None
    terms: list[Any] = []
    for block, top, before in zip(blocks, tops, [tops[0], *tops], strict=False):
        none = np.equal(before, -np.inf)  # nothing seen so far that would have to be rescaled
        t = np.where(np.equal(top, -np.inf), 0, top)
        e, r = np.exp(block - t), np.exp(np.where(none, 0, np.where(none, 0, before) - t))
        terms = [*(x * r for x in terms), e]
        sums = np.sum(e, axis=at, keepdims=True)
        mass = sums if mass is None else mass * r + sums
    online = np.concatenate(terms, axis=at) / np.where(np.equal(mass, 0), 1, mass)
    return _chosen(shop, shop.other, online, plain)


def _chosen(shop: Workshop, lanes: np.ndarray, x: Any, y: Any) -> Lanes:
    """x in the chosen lanes, y in the others."""
    a, b = aligned(shop.lift(x), shop.lift(y))
    a, b = np.broadcast_arrays(a, b)
    return Lanes(shop, np.where(shop.mask(lanes, a.ndim), a, b))


def _decay(shop: Workshop, gamma: Lanes, n: Any) -> Lanes:
    """pow, or exp(n log |gamma|), or products."""
    n = np.asarray(n)
    g, k = aligned(gamma, Lanes(shop, n[None].astype(float)))
    power = shop.rounded(np.where(k == 0, 1.0, np.power(np.abs(g), k)))
    size = np.abs(g)
    logs = shop.exp(shop.rounded(k * shop.log(np.where(size == 0, 1, size))))
    logs = np.where(k == 0, 1.0, np.where(size == 0, 0.0, logs))
    table = [np.ones_like(size)]
    for _ in range(int(n.max(initial=0))):
        table.append(shop.rounded(table[-1] * size))
    products = sum((np.where(k == j, row, 0.0) for j, row in enumerate(table)), np.zeros(()))
    sign = np.where((g < 0) & (k % 2 == 1), -1.0, 1.0)
    out = np.where(shop.mask(shop.other, k.ndim), logs, np.where(shop.mask(shop.apart, k.ndim), products, power))
    return Lanes(shop, sign * (power if shop.plain else out))


def _segment_decays(shop: Workshop, g: Lanes, start: int, stop: int) -> Any:
    """Where sums of logarithms are declared, exp of their differences in every second lane."""
    part = g[start:stop]
    plain = primitives.segment_products(np.exp(part))
    if shop.plain or shop.arithmetic.span < stop - start or not np.all(np.isfinite(part.data)) or not len(part):
        return plain
    none = np.zeros((1, *part.shape[1:]))
    c = np.concatenate([none, np.cumsum(part, axis=0)], axis=0)
    n = np.arange(len(c))
    keep = (n[:, None] >= n).reshape(len(c), len(c), *(1,) * (part.ndim - 1))
    return _chosen(shop, shop.other, np.where(keep, np.exp(np.where(keep, c[:, None] - c[None], 0)), 0), plain)


def _stored(shop: Workshop, x: Any) -> Any:
    x = shop.lift(x)
    return _chosen(shop, shop.stores, Lanes(shop, shop.rounded(x.data, shop.arithmetic.output)), x)


def _shifted(shop: Workshop, s: Any, by: Any) -> Any:
    a, b = aligned(shop.lift(s), shop.lift(by))
    moved = shop.rounded(a + b) - b  # exactly: what is subtracted later has been shifted as well
    return _chosen(shop, shop.shifts, Lanes(shop, np.where(np.isfinite(moved), moved, a)), s)


def _cancelled(shop: Workshop, x: Any, by: Any) -> Any:
    moved = _add(shop, _add(shop, x, by), by, -1.0)
    return _chosen(shop, shop.shifts, moved, x)


def _turned(shop: Workshop, x: Any, n: np.ndarray, theta: np.ndarray) -> Any:
    """Angles in float32 in every second lane; the turn itself as it is written."""
    x = shop.lift(x)
    fine = np.asarray(n)[:, None] * np.asarray(theta)[None, :]
    coarse = round_to(np.asarray(n)[:, None] * round_to(np.asarray(theta), "float32"), "float32")
    single = shop.other & (shop.intermediate == "float32")
    c, s = (_chosen(shop, single, f(coarse), f(fine)) for f in (np.cos, np.sin))
    a, b = x[:, 0::2], x[:, 1::2]
    return np.stack([a * c - b * s, a * s + b * c], axis=-1).reshape(x.shape)


FUNCTIONS: dict[Any, Function] = {
    np.sum: lambda shop, x, axis=None, keepdims=False: total(x, axis, keepdims),
    np.mean: lambda shop, x, axis=None, keepdims=False: (y := total(x, axis, keepdims)) / (x.size // max(y.size, 1)),
    np.cumsum: lambda shop, x, axis: _accumulate(shop, np.add, x, axis),
    np.concatenate: _join(np.concatenate),
    np.stack: _join(np.stack),
    np.where: _where,
    np.max: _extreme(np.max),
    np.min: _extreme(np.min),
    np.any: _extreme(np.any),
    np.all: _extreme(np.all),
    np.broadcast_to: _broadcast_to,
    np.transpose: lambda shop, x, axes=None: x.T if axes is None else x.transpose(*axes),
    np.expand_dims: lambda shop, x, axis: x.each(lambda a: np.expand_dims(a, axis if axis < 0 else axis + 1)),
    np.zeros_like: lambda shop, x, **_: Lanes(shop, np.zeros((1, *x.shape))),
    np.ones_like: lambda shop, x, **_: Lanes(shop, np.ones((1, *x.shape))),
    np.isneginf: _comparison(np.isneginf),
    np.outer: lambda shop, x, y: shop.lift(x).reshape(-1, 1) * shop.lift(y).reshape(1, -1),
    np.shape: lambda shop, x: x.shape,
    np.ndim: lambda shop, x: x.ndim,
    np.size: lambda shop, x: x.size,
    **{f: _each_lane(f) for f in (np.repeat, np.tile, np.diagonal, np.flip, np.moveaxis, np.swapaxes, np.reshape)},
    **{f: _each_lane(f) for f in (np.tril, np.triu, np.argsort, np.roll)},
    primitives.softmax: _softmax,
    primitives.decay: _decay,
    primitives.segment_decays: _segment_decays,
    primitives.stored: _stored,
    primitives.shifted: _shifted,
    primitives.cancelled: _cancelled,
    primitives.either: lambda shop, x, y: _chosen(shop, shop.other, y, x),
    primitives.turned: _turned,
}
