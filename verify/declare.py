"""`@implements`: say that a function computes an operator. It attaches a declaration and changes nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mixproof.reference import operator as find_operator
from mixproof.reference.spec import Operator
from mixproof.verify.arithmetic import DTYPES, UNIT, Arithmetic, natural
from mixproof.verify.errors import AdapterError

F = TypeVar("F", bound=Callable[..., Any])
ATTRIBUTE = "__mixproof__"
SHORT = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16", "fp16": "float16", "fp32": "float32"}
LAYOUT_AXES = ("B", "T", "H", "D")


@dataclass(frozen=True)
class Declaration:
    """What an implementation says of itself. See `implements` for the fields."""

    operator: str
    name: str
    layout: str = "B T H D"
    dtypes: tuple[str, ...] = ("float32",)
    dot: str | None = None
    accumulate: str | None = None
    intermediate: str | None = None
    exp_ulps: float = 2.0
    distance: str = "direct"
    parameters: str | None = None
    chunk: int | None = None
    chunks: tuple[int, ...] = ()
    isolates_nan: bool = False
    strides: str = "any"
    multiple_of: Mapping[str, int] = field(default_factory=dict)
    at_least: Mapping[str, int] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    devices: tuple[str, ...] = ("cpu",)
    gradients: bool = True
    requires: tuple[str, ...] = ()
    slow: bool = False
    cost: str | None = None
    framework: str = "torch"

    def arithmetic(self, dtype: str) -> Arithmetic:
        """The roundings allowed at one input dtype."""
        changes: dict[str, Any] = {"exp_ulps": self.exp_ulps, "distance": self.distance}
        inputs = find_operator(self.operator).inputs
        tokens = {x.domain for x in inputs if x.role == "token"}
        if tokens & {"log_decay", "signed_decay"} or {x.domain for x in inputs} & {"rate", "log_rate"}:
            changes["span"] = self.chunk or 1
        if dtype != "float64":
            named = {"dot": self.dot, "accumulate": self.accumulate, "intermediate": self.intermediate}
            # "input" stands for the input dtype, for code that keeps every intermediate in it
            changes |= {k: dtype if v == "input" else v for k, v in named.items() if v}
        return natural(dtype, **changes)

    def parameter_dtype(self, dtype: str) -> str:
        """Parameters and states are float32 beside half-precision inputs, unless declared otherwise."""
        if self.parameters:
            return dtype if self.parameters == "input" else self.parameters
        return dtype if dtype == "float64" else "float32"


def find(name: str) -> Operator:
    """The operator called `name`. Raises AdapterError for an unknown one, with the nearest known name."""
    if not isinstance(name, str):
        raise AdapterError(f'operator: expected a name, as in @implements("retention"), not {name!r}')
    try:
        return find_operator(name)
    except KeyError as error:
        raise AdapterError(f"{error.args[0]} (mixproof list)") from None


def implements(
    operator: str,
    *,
    name: str | None = None,
    layout: str = "B T H D",
    dtypes: tuple[str, ...] | str = ("float32",),
    dot: str | None = None,
    accumulate: str | None = None,
    intermediate: str | None = None,
    exp_ulps: float = 2.0,
    distance: str = "direct",
    parameters: str | None = None,
    chunk: int | None = None,
    chunks: tuple[int, ...] = (),
    isolates_nan: bool = False,
    strides: str = "any",
    multiple_of: Mapping[str, int] | None = None,
    at_least: Mapping[str, int] | None = None,
    fixed: Mapping[str, Any] | None = None,
    devices: tuple[str, ...] = ("cpu",),
    gradients: bool = True,
    requires: tuple[str, ...] = (),
    slow: bool = False,
    cost: str | None = None,
    framework: str = "torch",
) -> Callable[[F], F]:
    """Declare that the function below computes `operator`.

    The function takes the operator's inputs by name (and `chunk`, if it has that argument) and returns the outputs in
    the order of the operator's spec; `mixproof new OPERATOR` writes a filled-in example.

    layout      axes of its token inputs, a permutation of "B T H D", or a part of it
    dtypes      input dtypes it accepts: float64, float32, bfloat16, float16 (or f64, f32, bf16, f16)
    dot, accumulate, intermediate
                the arithmetic, where it is not the natural one: operands of dot products, sums, other results;
                "input" means the input dtype
    exp_ulps, distance
                error of exp in units of the last place; "direct" or "expanded" squared distances
    parameters  dtype of parameters and states ("input" for the input dtype)
    chunk       its chunk size, so that lengths around it are tried
    chunks      the chunk sizes it accepts in its argument `chunk`, if not every one
    isolates_nan
                promises that a NaN in a later token never reaches an earlier row
    strides     "any", or "last" if the last axis of token inputs must be contiguous
    multiple_of, at_least
                sizes it needs, e.g. {"T": 16}; at_least={"T": 1} unless declared otherwise
    fixed       inputs it does not take: the constant, or a function from sizes to an array
    gradients   whether autograd runs through it
    requires    modules without which it cannot run
    slow        fewer cases (an interpreted kernel)
    cost        "linear" or "quadratic" in tokens, where it differs from the operator's

    Raises AdapterError for an unknown operator or a value outside the lists above.
    """
    spec = find(operator)
    kinds = tuple(SHORT.get(d, d) for d in ((dtypes,) if isinstance(dtypes, str) else tuple(dtypes)))
    _one_of("dtypes", kinds, DTYPES)
    _one_of("dot", (dot,), (None, "input", *UNIT))
    _one_of("accumulate", (accumulate,), (None, "input", *DTYPES))
    _one_of("intermediate", (intermediate,), (None, "input", *DTYPES))
    _one_of("distance", (distance,), ("direct", "expanded"))
    _one_of("devices", devices, ("cpu", "cuda"))
    _one_of("cost", (cost,), (None, "linear", "quadratic"))
    _one_of("strides", (strides,), ("any", "last"))
    _one_of("framework", (framework,), ("torch", "numpy"))
    if not isinstance(layout, str):
        raise AdapterError(f'layout: expected a string such as "B T H D", not {layout!r}')
    _one_of("layout axes", tuple(layout.split()), LAYOUT_AXES)
    if not {"T", "D"} <= set(layout.split()) or len(set(layout.split())) != len(layout.split()):
        raise AdapterError(f'layout "{layout}" must name T and D once, and may name B and H')
    known = {x.name for x in spec.inputs}
    if name is not None and not re.fullmatch(r"[^\s/']+", name):
        raise AdapterError(
            f"name: {name!r} has a space, a slash or a quote, or is empty; it is part of OPERATOR/NAME/LAW"
        )
    axes = ("B", "H", *spec.dimensions)
    for what, rule in (("multiple_of", multiple_of), ("at_least", at_least)):
        for axis, n in (rule or {}).items():
            if axis not in axes:
                raise AdapterError(f"{what} names {axis!r}; {operator} has the axes {', '.join(axes)}")
            _size(f"{what}[{axis!r}]", n, at_least=0 if what == "at_least" else 1)
    for what, n in (("chunk", chunk), *(("chunks", n) for n in chunks)):
        if n is not None:
            _size(what, n)
    for argument in fixed or {}:
        if argument not in known:
            raise AdapterError(f"fixed names {argument!r}; {operator} has the inputs {', '.join(sorted(known))}")

    def mark(function: F) -> F:
        declaration = Declaration(
            operator=operator,
            name=name or getattr(function, "__name__", "implementation"),
            layout=layout,
            dtypes=kinds,
            dot=dot,
            accumulate=accumulate,
            intermediate=intermediate,
            exp_ulps=exp_ulps,
            distance=distance,
            parameters=parameters,
            chunk=chunk,
            chunks=tuple(chunks),
            isolates_nan=isolates_nan,
            strides=strides,
            multiple_of=dict(multiple_of or {}),
            at_least={"T": 1} if at_least is None else dict(at_least),
            fixed=dict(fixed or {}),
            devices=tuple(devices),
            gradients=gradients,
            requires=tuple(requires),
            slow=slow,
            cost=cost,
            framework=framework,
        )
        setattr(function, ATTRIBUTE, (*getattr(function, ATTRIBUTE, ()), declaration))
        return function

    return mark


def _one_of(what: str, values: tuple[Any, ...], allowed: tuple[Any, ...]) -> None:
    for value in values:
        if value not in allowed:
            raise AdapterError(f"{what}: {value!r} is not one of {', '.join(str(a) for a in allowed if a)}")


def _size(what: str, n: Any, at_least: int = 1) -> None:
    if not isinstance(n, int) or isinstance(n, bool) or n < at_least:
        raise AdapterError(f"{what}: expected an integer >= {at_least}, not {n!r}")
