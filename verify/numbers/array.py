"""`Numbers`: an array over another number system, carried through NumPy's protocols.

The equations in reference/ are plain NumPy; handed `Numbers` they just work, because operators and ufuncs arrive at
`__array_ufunc__`, NumPy's functions and the `overridable` primitives at `__array_function__`. What each of them means
is the system's business (objects.py). Why a wrapper and not a bare object array: on those NumPy calls `x.exp()` where
a system has none, gives an empty sum the int 0, and knows neither three-valued comparisons nor working precision.

Three things no protocol can carry, and what happens instead:
  np.zeros(...)[i] = x    a plain array cannot hold x: NotDefined, says to use np.stack or np.where
  if x < y                a comparison that the system cannot decide has no truth value: NotDefined; np.where(x < y, ..)
                          works all the same (Arb: the union of both branches; SymPy: Piecewise)
  x ** n                  the exponent is not made a member of the system, it stays a plain number
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from mixproof.verify.errors import UsageError

if TYPE_CHECKING:
    from mixproof.verify.numbers.objects import System

Stored = np.ndarray


class NotDefined(UsageError, TypeError):
    """The number system has no such function, or no such number."""


class Disagreement(AssertionError):
    """Two expressions that should be one quantity are not."""


class Numbers(NDArrayOperatorsMixin):
    """An array over a number system. `data` is the stored array; shapes, slices and the rest are NumPy's."""

    __slots__ = ("data", "system")

    def __init__(self, system: System, data: Stored) -> None:
        self.system, self.data = system, data

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def ndim(self) -> int:
        return self.data.ndim

    @property
    def size(self) -> int:
        return self.data.size

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the stored array: np.zeros(n, x.dtype) makes zeros that the system takes exactly."""
        return self.data.dtype

    @property
    def T(self) -> Numbers:
        return Numbers(self.system, self.data.T)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: Any) -> Numbers:
        return Numbers(self.system, boxed(self.data[index], self.data.dtype))

    def __setitem__(self, index: Any, value: Any) -> None:
        value = self.system(value).data
        self.data[index] = value if value.ndim else value[()]

    def __iter__(self) -> Iterator[Numbers]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"<{self.system.name}: {np.array2string(self.data, formatter={'all': str}, separator=', ')}>"

    def __bool__(self) -> bool:
        raise NotDefined(
            f"{self!r} has no truth value: compare it, and where {self.system.name} cannot decide the comparison use "
            "np.where"
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        raise NotDefined(
            f"NumPy asked for a plain array of numbers from {self.system.name}. Writing into np.zeros(...), np.array "
            "and np.asarray do that; use np.stack, np.concatenate or np.where"
        )

    def __float__(self) -> float:
        raise NotDefined(f"a number of {self.system.name} is no float: keep to NumPy's functions")

    def reshape(self, *shape: Any) -> Numbers:
        return Numbers(self.system, self.data.reshape(*shape))

    def transpose(self, *axes: Any) -> Numbers:
        return Numbers(self.system, self.data.transpose(*axes))

    def swapaxes(self, a: int, b: int) -> Numbers:
        return Numbers(self.system, self.data.swapaxes(a, b))

    def copy(self) -> Numbers:
        return Numbers(self.system, self.data.copy())

    def sum(self, axis: Any = None, keepdims: bool = False) -> Numbers:
        return self.system.reduce("add", self, axis, keepdims)

    def mean(self, axis: Any = None, keepdims: bool = False) -> Numbers:
        total = self.sum(axis, keepdims)
        return total / (self.size // max(total.size, 1))

    def max(self, axis: Any = None, keepdims: bool = False) -> Numbers:
        return self.system.reduce("maximum", self, axis, keepdims)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = (), **options: Any) -> Any:
        for x in (*inputs, *out):
            if isinstance(x, Numbers) and x.system is not self.system:
                raise NotDefined(f"{self.system.name} and {x.system.name} do not mix")
        if not all(isinstance(x, Numbers) for x in out):
            self.__array__()  # refuses: S += x with a plain S
        with self.system.working():
            result = self.system.apply(ufunc.__name__, method, *inputs, **options)
        for x in out:
            x[...] = result
        return out[0] if out else result

    def __array_function__(self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        with self.system.working():
            return self.system.answer(function, args, kwargs)


def boxed(x: Any, dtype: Any = object) -> Stored:
    """x as an array: NumPy unwraps 0-dimensional results, and an element is no array."""
    if isinstance(x, np.ndarray):
        return x
    box = np.empty((), dtype=dtype)
    box[()] = x
    return box
