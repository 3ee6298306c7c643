"""What a number system is, and what NumPy's functions mean in every one of them.

A system is little more than a table from ufunc names to functions of stored arrays; a name that is not in the table
raises `NotDefined`. The others of NumPy's functions either move elements about (`_STRUCTURE`) or are built here from
the ufuncs, once for all systems (`_FUNCTIONS`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fractions import Fraction
from numbers import Integral
from typing import Any

import numpy as np

from mixproof.reference import primitives
from mixproof.verify.numbers.array import Disagreement, NotDefined, Numbers, Stored, boxed


class System:
    """A number system. `functions` maps a ufunc's name to a function of stored arrays, `primitives` a function of
    reference/primitives.py to the system's own version, `reasons` an absent function to why it is absent."""

    name: str
    dtype: Any = object
    infinite = False  # whether -inf is a number here
    functions: Mapping[str, Callable[..., Any]]
    primitives: Mapping[Callable[..., Any], Callable[..., Any]] = {}
    reasons: Mapping[str, str] = {}

    def __call__(self, x: Any) -> Numbers:
        """x (a number, array or nested list) as an array of this system; raises NotDefined for what it cannot hold."""
        with self.working():
            return Numbers(self, self.store(x))

    def carry(self, x: Any) -> Any:
        """A function's arguments in this system: floats and float arrays, also inside dicts, lists and tuples. Flags,
        counts, index arrays and None stay what they are."""
        if isinstance(x, dict):
            return {name: self.carry(value) for name, value in x.items()}
        if isinstance(x, (list, tuple)):
            return type(x)(self.carry(value) for value in x)
        is_float = isinstance(x, float) or (isinstance(x, (np.ndarray, np.generic)) and x.dtype.kind == "f")
        return self(x) if is_float else x

    # --- what a system says about itself

    def at_precision(self) -> AbstractContextManager[Any]:
        """The context that sets the working precision."""
        return nullcontext()

    def store(self, x: Any) -> Stored:
        raise NotImplementedError

    def fold(self, name: str, rows: Stored) -> Any:
        """The reduction `name` along the last axis, which is not empty."""
        raise NotImplementedError

    def scan(self, name: str, x: Stored, axis: int) -> Stored:
        """Running reductions."""
        raise NotImplementedError

    def matmul(self, x: Stored, y: Stored) -> Any:
        raise NotImplementedError

    def choose(self, condition: Stored, x: Stored, y: Stored) -> Any:
        """np.where for a condition that the system could not decide."""
        raise NotDefined(f"comparisons over {self.name} always decide")

    def agree(self, x: Stored, y: Stored) -> Stored | None:
        """Whether two expressions of one quantity agree, elementwise; None where that is no exact question."""
        return None

    def merge(self, x: Stored, y: Stored) -> Stored:
        """What is known from two agreeing expressions together."""
        return x

    # --- what is the same in all of them

    @contextmanager
    def working(self) -> Iterator[None]:
        """The context of every calculation. Elements may raise the processor's flags (nan, underflow) inside their own
        arithmetic; that is no news about NumPy arrays, so NumPy shall not warn."""
        with np.errstate(all="ignore"), self.at_precision():
            yield

    def function(self, name: str) -> Callable[..., Any]:
        if name not in self.functions:
            raise NotDefined(f"{name} is not defined over {self.name}{self.reasons.get(name, '')}")
        return self.functions[name]

    def apply(self, name: str, method: str, *inputs: Any, **options: Any) -> Any:
        """A ufunc, called or as reduction."""
        if method == "reduce":
            return self.reduce(name, inputs[0], options.pop("axis", 0), **options)
        if method == "accumulate" and name in ("add", "multiply"):
            return Numbers(self, self.scan(name, self.store(inputs[0]), options.get("axis", 0)))
        if method != "__call__" or options:
            raise NotDefined(f"np.{name}.{method}({', '.join(options)}) is not carried over {self.name}")
        if name == "matmul":
            return Numbers(self, boxed(self.matmul(self.store(inputs[0]), self.store(inputs[1])), self.dtype))
        f, stored = self.function(name), [self.store(x) for x in inputs[:1]]
        plain_exponent = name == "power" and not isinstance(inputs[1], Numbers)
        stored += [np.asarray(x) if plain_exponent else self.store(x) for x in inputs[1:]]
        result = f(*stored)
        return self._answered(result) if name in _QUESTIONS else Numbers(self, boxed(result, self.dtype))

    def answer(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """One of NumPy's functions, or an overridable primitive; NotImplemented runs the primitive's plain body."""
        if function in self.primitives:
            return self.primitives[function](*args, **kwargs)
        if function is primitives.either:
            return self._either(*args, **kwargs)
        if not function.__module__.startswith("numpy"):
            return NotImplemented
        if function in _STRUCTURE:
            return self._structure(function, args, kwargs)
        if function not in _FUNCTIONS:
            raise NotDefined(f"np.{function.__name__} is not carried over {self.name}")
        return _FUNCTIONS[function](self, *args, **kwargs)

    def reduce(self, name: str, x: Numbers, axis: Any = None, keepdims: bool = False, **options: Any) -> Numbers:
        """The reduction `name` over one axis, several, or all."""
        options = {key: value for key, value in options.items() if value is not None and value is not np._NoValue}
        if options:
            raise NotDefined(f"np.{name}.reduce({', '.join(options)}) is not carried over {self.name}")
        data = x.data
        axes = range(data.ndim) if axis is None else (axis,) if isinstance(axis, Integral) else tuple(axis)
        axes = tuple(range(data.ndim)[int(a)] for a in axes)
        rest = tuple(a for a in range(data.ndim) if a not in axes)
        shape = tuple(data.shape[a] for a in rest)
        n = int(np.prod([data.shape[a] for a in axes], dtype=int))
        with self.working():
            self.function(name)  # "not defined" is the better message, also for an empty axis
            if n:
                result = boxed(self.fold(name, data.transpose(rest + axes).reshape((*shape, n))), self.dtype)
            elif name in ("add", "multiply") or 0 in shape:
                result = self.store(np.full(shape, int(name == "multiply")))
            else:
                raise ValueError(f"zero-size array to reduction operation {name} which has no identity")
        if keepdims:
            result = result.reshape(tuple(1 if a in axes else d for a, d in enumerate(data.shape)))
        return Numbers(self, result)

    def _answered(self, answers: Any) -> Any:
        """Comparisons as plain bools if all are decided, else as an array of open questions for np.where."""
        answers = boxed(answers)
        if all(isinstance(a, (bool, np.bool_)) for a in answers.flat):
            return answers.astype(bool)[()]
        return Numbers(self, answers)

    def _either(self, x: Any, y: Any) -> Numbers:
        """primitives.either: x and y are one quantity, and here that is checked. Raises Disagreement."""
        a, b = np.broadcast_arrays(self.store(x), self.store(y))
        same = self.agree(a, b)
        if same is None:
            return Numbers(self, a)
        if not np.all(same):
            at = tuple(int(i) for i in np.argwhere(~np.asarray(same, dtype=bool))[0])
            raise Disagreement(
                f"two expressions of one quantity differ over {self.name}: at {list(at)} {a[at]} is not {b[at]}"
            )
        return Numbers(self, boxed(self.merge(a, b), self.dtype))

    def _structure(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A NumPy function that moves elements and never looks at them: run on the stored arrays."""

        def stored(x: Any) -> Any:
            if isinstance(x, Numbers):
                return x.data
            if isinstance(x, (list, tuple)) and any(isinstance(y, Numbers) for y in x):
                return [self.store(y) for y in x]  # np.stack([x, np.zeros(3)]): every member must be ours
            return x

        result = function(*map(stored, args), **{name: stored(value) for name, value in kwargs.items()})
        if isinstance(result, (list, tuple)):
            return [Numbers(self, x) for x in result]
        return Numbers(self, boxed(result, self.dtype))


class ObjectSystem(System):
    """A system of Python objects: `element` converts one number, `functions` are functions of elements."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        self.functions = {name: np.frompyfunc(f, getattr(np, name).nin, 1) for name, f in functions.items()}
        self._elements = np.frompyfunc(self.element, 1, 1)

    def element(self, x: Any) -> Any:
        raise NotImplementedError

    def store(self, x: Any) -> Stored:
        return x.data if isinstance(x, Numbers) else boxed(self._elements(np.asarray(x, dtype=object)))

    def fold(self, name: str, rows: Stored) -> Any:
        return self.function(name).reduce(rows, axis=-1)  # type: ignore[attr-defined]

    def scan(self, name: str, x: Stored, axis: int) -> Stored:
        return self.function(name).accumulate(x, axis=axis)  # type: ignore[attr-defined]

    def matmul(self, x: Stored, y: Stored) -> Any:
        if x.shape[-1]:
            return np.matmul(x, y)
        shape = np.matmul(np.zeros(x.shape), np.zeros(y.shape)).shape
        return self.store(np.zeros(shape, dtype=int))  # an empty sum is our zero, not the int 0


def whole(n: Any) -> int:
    """An exponent of an exact system; a float may be one only if it is a whole number."""
    if isinstance(n, Integral) or (isinstance(n, (float, np.floating)) and float(n).is_integer()):
        return int(n)
    raise NotDefined(f"only whole powers are exact, not x ** {n}")


def short_dyadic(x: float) -> Fraction | None:
    """The float x as the fraction that it is, if it is whole or short (24 bits). 0.5 and -3.0 are meant exactly; 0.1,
    1e-6 and 3**-0.5 fill all 53 bits because they are roundings of something else."""
    if not np.isfinite(x):
        return None
    fraction = Fraction(float(x))
    whole = fraction.denominator == 1 and abs(fraction) <= 2**53
    return fraction if whole or max(abs(fraction.numerator), fraction.denominator) <= 2**24 else None


# --- NumPy's functions, built from the ufuncs


def _where(system: System, condition: Any, x: Any, y: Any) -> Numbers:
    x, y = system.store(x), system.store(y)
    if isinstance(condition, Numbers):
        return Numbers(system, boxed(system.choose(condition.data, x, y)))
    return Numbers(system, np.where(condition, x, y))


def _scan(ufunc: np.ufunc) -> Callable[..., Any]:
    return lambda system, x, axis=None: ufunc.accumulate(x.reshape(-1) if axis is None else x, axis=axis or 0)


def _filled(value: int) -> Callable[..., Numbers]:
    return lambda system, x, **_: system(np.full(x.shape, value))


def _dot(system: System, x: Any, y: Any) -> Any:
    x, y = system(x), system(y)
    if max(x.ndim, y.ndim) > 2:
        raise NotDefined("np.dot of more than two dimensions is not carried: use @")
    return x @ y if x.ndim and y.ndim else x * y


def _einsum(system: System, subscripts: str, *operands: Any) -> Numbers:
    left, arrow, out = subscripts.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow or "." in left or any(len(set(t)) < len(t) for t in terms):
        raise NotDefined(f"np.einsum({subscripts!r}): only plain subscripts with -> are carried over {system.name}")
    letters = out + "".join(sorted(set(left) - set(out) - {","}))
    product: Any = 1
    for term, x in zip(terms, operands, strict=True):
        x = np.transpose(system(x), [term.index(a) for a in letters if a in term])
        product = product * x[tuple(slice(None) if a in term else None for a in letters)]
    return system.reduce("add", product, tuple(range(len(out), len(letters))))


def _triangle(lower: bool) -> Callable[..., Numbers]:
    def triangle(system: System, x: Numbers, k: int = 0) -> Numbers:
        keep = np.tri(x.shape[-2], x.shape[-1], k if lower else k - 1, dtype=bool)
        return _where(system, keep if lower else ~keep, x, 0)

    return triangle


def _infinite(sign: int) -> Callable[..., Any]:
    return lambda system, x: x == sign * np.inf if system.infinite else np.zeros(x.shape, dtype=bool)


def _same(system: System, x: Any, y: Any) -> bool:
    return np.shape(x) == np.shape(y) and bool(np.all(system(x) == system(y)))


_QUESTIONS = {
    "equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "isnan", "isinf", "isfinite",
}  # fmt: skip
_STRUCTURE = {
    np.transpose, np.reshape, np.ravel, np.swapaxes, np.moveaxis, np.expand_dims, np.squeeze, np.broadcast_to,
    np.broadcast_arrays, np.flip, np.roll, np.repeat, np.tile, np.take, np.take_along_axis, np.diagonal, np.copy,
    np.atleast_1d, np.atleast_2d, np.stack, np.concatenate, np.vstack, np.hstack, np.split, np.array_split, np.delete,
}  # fmt: skip
_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    np.shape: lambda system, x: x.shape,
    np.ndim: lambda system, x: x.ndim,
    np.size: lambda system, x: x.size,
    np.where: _where,
    np.sum: lambda system, x, axis=None, **options: system.reduce("add", x, axis, **options),
    np.prod: lambda system, x, axis=None, **options: system.reduce("multiply", x, axis, **options),
    np.max: lambda system, x, axis=None, **options: system.reduce("maximum", x, axis, **options),
    np.min: lambda system, x, axis=None, **options: system.reduce("minimum", x, axis, **options),
    np.mean: lambda system, x, axis=None, keepdims=False: x.mean(axis, keepdims),
    np.cumsum: _scan(np.add),
    np.cumprod: _scan(np.multiply),
    np.clip: lambda system, x, low, high: np.minimum(np.maximum(x, low), high),
    np.zeros_like: _filled(0),
    np.ones_like: _filled(1),
    np.full_like: lambda system, x, value: system(np.broadcast_to(system.store(value), x.shape).copy()),
    np.isneginf: _infinite(-1),
    np.isposinf: _infinite(1),
    np.dot: _dot,
    np.outer: lambda system, x, y: system(x).reshape(-1, 1) * system(y).reshape(1, -1),
    np.einsum: _einsum,
    np.tril: _triangle(True),
    np.triu: _triangle(False),
    np.array_equal: _same,
}
ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.truediv,
    "negative": operator.neg,
    "positive": lambda x: x,
    "square": lambda x: x * x,
    "reciprocal": lambda x: 1 / x,
}
ORDER: dict[str, Callable[..., Any]] = {
    "less": operator.lt,
    "less_equal": operator.le,
    "greater": operator.gt,
    "greater_equal": operator.ge,
    "equal": operator.eq,
    "not_equal": operator.ne,
}
