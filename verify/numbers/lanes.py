"""Lanes: the equations in many honest float arithmetics at once, one a lane.

An implementation may add in any order, fuse a product into a sum, multiply by a reciprocal, take exp in base two or be
an ulp off, flush subnormals, cut operands of dots to TF32, read a result back in its output dtype: a `Workshop` holds
lanes that each do so in their own way, within one declared arithmetic. Handed `Lanes`, a form of the reference runs in
all of them in one pass. What comes out is what honest implementations return: the ball of the same inputs has to
hold every lane of it, and a lane outside is a mistake in the ball.

Numbers are float64 arrays (lanes, ...) whose entries the format of intermediate results holds; arrays that all lanes
share have one lane. `raw` is a product before it was rounded, for lanes that fuse it into a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from mixproof.verify.arithmetic import Arithmetic, holds, round_to

ORDERS = ("in turn", "pairwise", "split", "fused", "tensor core")
TINY, LOG2E, LN2 = 2.0**-126, float(np.float32(1 / np.log(2))), float(np.float32(np.log(2)))
MOST = 2_000_000  # elements of products held at once


class Workshop:
    """`lanes` honest machines of one arithmetic. `orders`: how their sums associate; a tensor core cuts off where it
    accumulates, and is there for dots of low precision only. `plain` lanes all compute alike, rounding to nearest. A
    backward pass that `recomputes` may take softmax from a stored logsumexp."""

    def __init__(
        self, arithmetic: Arithmetic, lanes: int, seed: int = 0, plain: bool = False, recomputes: bool = False
    ) -> None:
        self.arithmetic, self.lanes, self.plain, self.recomputes = arithmetic, lanes, plain, recomputes
        self.intermediate, self.accumulate = arithmetic.intermediate, arithmetic.accumulate
        self.low = arithmetic.sum_unit > 2.0**-24 and arithmetic.accumulate == "float32"
        self.generator = np.random.default_rng(seed)
        orders = ORDERS if self.low else ORDERS[:-1]
        orders = orders[:1] if plain else [orders[seed % len(orders)], orders[(seed + 1 + seed // 5) % len(orders)]]
        edges = np.linspace(0, lanes, len(orders) + 1).round().astype(int)
        self.orders = [(name, slice(a, b)) for name, a, b in zip(orders, edges, edges[1:], strict=False) if b > a]
        self.fused = np.zeros(lanes, dtype=bool)
        for name, lane in self.orders:
            self.fused[lane] = name == "fused"
        half = [np.zeros(lanes, dtype=bool) if plain else self._half() for _ in range(10)]
        self.flushes, self.reciprocal, self.base_two, self.off, self.cuts, self.faithful = half[:6]
        self.stores, self.other, self.shifts, self.apart = half[6:]
        self.off &= ~self.base_two
        self.flushing = bool(self.flushes.any()) and seed % 2 == 0

    def _half(self) -> np.ndarray:
        return self.generator.permutation(np.arange(self.lanes) % 2 == 0)

    def mask(self, chosen: np.ndarray, ndim: int) -> np.ndarray:
        """A choice of lanes, ready to meet an array of that many dimensions, the lanes' among them."""
        return chosen.reshape(-1, *(1,) * (ndim - 1))

    def rounded(self, x: np.ndarray, dtype: str | None = None) -> np.ndarray:
        """x in the intermediate format, or another; results below the normal range are zero where they are flushed."""
        dtype = dtype or self.intermediate
        if dtype == "float32":
            x = x.astype(np.float32).astype(np.float64)
            if self.flushing and (small := (np.abs(x) < TINY) & (x != 0)).any():
                x = np.where(small & self.mask(self.flushes, x.ndim), 0.0, x)
            return x
        return round_to(x, dtype)

    def lift(self, x: Any) -> Lanes:
        """x if it is one of ours, else a constant, which is rounded."""
        if isinstance(x, Lanes):
            return x
        x = np.asarray(x)
        return Lanes(self, (x if x.dtype == bool else round_to(x, self.intermediate))[None])

    def input(self, x: Any, dtype: str) -> Lanes:
        """An argument that came in `dtype`, which holds it."""
        exact = holds(self.arithmetic.dot, dtype)
        return Lanes(self, np.asarray(x, dtype=np.float64)[None], exact=exact)

    def spread(self, x: np.ndarray) -> np.ndarray:
        return np.broadcast_to(x, (self.lanes, *x.shape[1:]))

    # --- sums

    def fold(self, x: np.ndarray, raw: np.ndarray | None = None, dot: bool = False) -> np.ndarray:
        """The sum along the last axis, in each lane's order. `raw` are the terms before rounding."""
        n = x.shape[-1]
        if n < 2:
            return x[..., 0] if n else np.zeros(x.shape[:-1])
        x, raw = self.spread(x), None if raw is None else self.spread(raw)
        order: Any = slice(None)
        if not self.plain and n > 2:
            order = (slice(None), slice(None, None, -1), self.generator.permutation(n))[self.generator.integers(3)]
        total = np.empty(x.shape[:-1])
        for name, lane in self.orders:
            terms = x[lane][..., order]
            if name == "fused":
                total[lane] = self._in_turn(terms if raw is None else raw[lane][..., order], exact=raw is not None)
            elif name == "tensor core" and dot:
                total[lane] = tensor_core(terms if raw is None else raw[lane][..., order])
            elif name == "pairwise":
                total[lane] = self._pairwise(terms)
            elif name == "split" and n > 4:
                parts = [self._in_turn(terms[..., a::4]) for a in range(4)]
                total[lane] = self._in_turn(np.stack(parts[::-1], axis=-1))
            else:
                total[lane] = self._in_turn(terms)
        return self.rounded(total)

    def _in_turn(self, x: np.ndarray, exact: bool = False) -> np.ndarray:
        if self.accumulate == "float32" and not exact:
            return np.add.accumulate(x.astype(np.float32), axis=-1)[..., -1].astype(np.float64)
        total = round_to(x[..., 0], self.accumulate)
        for j in range(1, x.shape[-1]):
            total = round_to(total + x[..., j], self.accumulate)
        return total

    def _pairwise(self, x: np.ndarray) -> np.ndarray:
        n = x.shape[-1]
        whole = np.zeros((*x.shape[:-1], 1 << (n - 1).bit_length()))
        whole[..., :n] = x
        while whole.shape[-1] > 1:
            whole = round_to(whole[..., 0::2] + whole[..., 1::2], self.accumulate)
        return whole[..., 0]

    def operand(self, x: Lanes) -> np.ndarray:
        """x as a dot reads it; TF32 operands may be cut off."""
        dot = self.arithmetic.dot
        if not self.arithmetic.casts_operand(x.exact):
            return x.data
        near = round_to(x.data, dot)
        if dot != "tf32":
            return near
        bits = np.ascontiguousarray(x.data.astype(np.float32)).view(np.uint32) & np.uint32(0xFFFFE000)
        return np.where(self.mask(self.cuts, near.ndim), bits.view(np.float32).astype(np.float64), near)

    def matmul(self, a: Lanes, b: Lanes) -> Lanes:
        vector = (a.ndim == 1, b.ndim == 1)
        x, y = self.operand(a), self.operand(b)
        x, y = x[:, None, :] if vector[0] else x, y[:, :, None] if vector[1] else y
        x, y = aligned(Lanes(self, x), Lanes(self, np.swapaxes(y, -1, -2)))
        columns = max(1, MOST // max(1, self.lanes * x.shape[-2] * x.shape[-1]))
        blocks = []
        for j in range(0, max(y.shape[-2], 1), columns):
            exact = x[..., :, None, :] * y[..., None, j : j + columns, :]
            blocks.append(self.fold(self.rounded(exact), exact, dot=True))
        out = np.concatenate(blocks, axis=-1)
        out = out[..., 0, :] if vector[0] else out
        return Lanes(self, out[..., 0] if vector[1] else out)

    # --- elementary functions

    def exp(self, x: np.ndarray) -> np.ndarray:
        y = self.rounded(np.exp(x))
        if self.plain or self.intermediate != "float32":
            return y
        two = self.rounded(np.exp2(self.rounded(x * LOG2E)))
        size = y.astype(np.float32)
        k = (np.ascontiguousarray(x.astype(np.float32)).view(np.uint32) * np.uint32(2654435761) >> np.uint32(9)) % 3
        moved = y + (k.astype(np.float64) - 1) * np.spacing(size).astype(np.float64)
        keeps = (x == 0) | (y < 2 * TINY) | ~np.isfinite(y)
        y = np.where(self.mask(self.off, y.ndim) & ~keeps, moved, y)
        return np.where(self.mask(self.base_two, y.ndim), two, y)

    def log(self, x: np.ndarray) -> np.ndarray:
        y = self.rounded(np.log(x))
        return np.where(self.mask(self.base_two, y.ndim), self.rounded(self.rounded(np.log2(x)) * LN2), y)

    def sqrt(self, x: np.ndarray) -> np.ndarray:
        exact = np.sqrt(x)
        y = self.rounded(exact)
        if self.plain or self.intermediate != "float32":
            return y
        near = y.astype(np.float32)
        beside = np.nextafter(near, np.where(y > exact, 0, np.inf).astype(np.float32)).astype(np.float64)
        return np.where(self.mask(self.faithful, y.ndim) & (y != exact), beside, y)

    def divide(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        y = self.rounded(a / b)
        if not self.reciprocal.any():
            return y
        return np.where(self.mask(self.reciprocal, y.ndim), self.rounded(a * self.rounded(1 / b)), y)


class Lanes(NDArrayOperatorsMixin):
    """An array in every lane of a workshop. Shapes, indices and axes are those of one lane."""

    __slots__ = ("data", "exact", "raw", "shop")

    def __init__(self, shop: Workshop, data: np.ndarray, raw: np.ndarray | None = None, exact: bool = False) -> None:
        self.shop, self.data, self.raw, self.exact = shop, data, raw, exact

    shape = property(lambda self: self.data.shape[1:])
    ndim = property(lambda self: self.data.ndim - 1)
    size = property(lambda self: int(np.prod(self.data.shape[1:], dtype=int)))
    dtype = property(lambda self: self.data.dtype)
    T = property(lambda self: self.each(lambda a: np.transpose(a, (0, *range(a.ndim - 1, 0, -1)))))

    def each(self, f: Callable[[np.ndarray], np.ndarray]) -> Lanes:
        """A rearrangement: no rounding."""
        return Lanes(self.shop, f(self.data), None if self.raw is None else f(self.raw), self.exact)

    def astype(self, dtype: Any) -> Lanes:
        """Answers of comparisons as numbers; numbers stay what they are."""
        return self.each(lambda a: a.astype(np.float64))

    def reshape(self, *shape: Any) -> Lanes:
        shape = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return self.each(lambda a: a.reshape(a.shape[0], *shape))

    def transpose(self, *axes: int) -> Lanes:
        return self.each(lambda a: np.transpose(a, (0, *(1 + i % (a.ndim - 1) for i in axes))))

    def sum(self, axis: Any = None, keepdims: bool = False) -> Lanes:
        from mixproof.verify.numbers.lanes_functions import total

        return total(self, axis, keepdims)

    def __len__(self) -> int:
        return self.data.shape[1]

    def __iter__(self) -> Iterator[Lanes]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: Any) -> Lanes:
        key = key if isinstance(key, tuple) else (key,)
        return self.each(lambda a: a[(slice(None), *key)])

    def __bool__(self) -> bool:
        raise TypeError("lanes may differ: use np.where")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        raise TypeError("lanes are no plain array: use np.stack, np.concatenate or np.where")

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        from mixproof.verify.numbers import lanes_functions

        return lanes_functions.apply(self.shop, ufunc, method, *inputs, **options)

    def __array_function__(self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        from mixproof.verify.numbers import lanes_functions

        return lanes_functions.answer(self.shop, function, args, kwargs)


def aligned(*members: Lanes) -> Sequence[np.ndarray]:
    """Their arrays with as many dimensions as the one that has most, the lanes' first."""
    most = max(x.data.ndim for x in members)
    if all(x.data.ndim == most for x in members):
        return [x.data for x in members]
    return [x.data.reshape(x.data.shape[0], *(1,) * (most - x.data.ndim), *x.shape) for x in members]


def tensor_core(products: np.ndarray) -> np.ndarray:
    """Groups of eight exact products and the total so far, aligned to the largest and cut off at 24 bits, with no
    extra bit; the new total is cut off as well (Fasi et al. 2021)."""
    total = np.zeros((*products.shape[:-1], 1))
    for a in range(0, products.shape[-1], 8):
        terms = np.concatenate([total, products[..., a : a + 8]], axis=-1)
        total = _cut(np.sum(_cut(terms, np.max(np.abs(terms), axis=-1, keepdims=True)), axis=-1, keepdims=True))
    return total[..., 0]


def _cut(x: np.ndarray, largest: np.ndarray | None = None) -> np.ndarray:
    largest = np.abs(x) if largest is None else largest
    unit = np.ldexp(1.0, np.frexp(np.where((largest == 0) | ~np.isfinite(largest), 1, largest))[1] - 24)
    return np.trunc(x / unit) * unit
