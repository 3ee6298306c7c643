"""A subject: an implementation under test, bound to its declaration. Arrays go in and come out in canonical layout."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from mixproof.reference import operator as find_operator
from mixproof.reference.spec import Operator
from mixproof.verify.case import Case, Domain
from mixproof.verify.declare import Declaration
from mixproof.verify.errors import AdapterError, SubjectError

Arrays = Mapping[str, Any]
Native = dict[str, Any]


class Subject:
    """`prepare` -> `invoke` -> `restore`, or `run` for all three; laws use the steps to look in between.

    Raises AdapterError if the function's arguments do not fit its operator."""

    def __init__(self, declaration: Declaration, function: Callable[..., Any], origin: str = "") -> None:
        self.declaration, self.function, self.origin = declaration, function, origin
        self.operator: Operator = find_operator(declaration.operator)
        self.name = declaration.name
        self.layout = tuple(declaration.layout.split())
        parameters = inspect.signature(function).parameters
        known = {x.name for x in self.operator.inputs}
        catches_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.takes = tuple(x.name for x in self.operator.inputs if catches_all or x.name in parameters)
        self.takes_chunk = "chunk" in parameters or catches_all
        strange = [
            n
            for n, p in parameters.items()
            if n not in known
            and n != "chunk"
            and p.default is p.empty
            and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        ]
        if strange:
            raise AdapterError(
                f"{self.name} takes an argument {strange[0]!r}; {self.operator.name} has the inputs "
                f"{', '.join(sorted(known))}"
            )
        for x in self.operator.inputs:
            if not x.optional and x.name not in self.takes and x.name not in declaration.fixed:
                raise AdapterError(
                    f"{self.name} does not take {x.name!r}, an input of {self.operator.name}; add the argument, or "
                    f'declare the constant it uses: fixed={{"{x.name}": ...}}'
                )

    def __str__(self) -> str:
        return f"{self.operator.name}/{self.name}"

    @property
    def place(self) -> str:
        """Where it is written: gate.py:12."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        return f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code else self.name

    @cached_property
    def framework(self) -> Any:
        return import_module(f"mixproof.verify.subjects.boundary_{self.declaration.framework}")

    @property
    def stateful(self) -> bool:
        return bool(self.operator.state) and all(x.name in self.takes for x in self.operator.state)

    @property
    def slow(self) -> bool:
        """Fewer cases: declared so, or a Triton kernel that runs through the interpreter."""
        return self.declaration.slow or self.framework.interpreted(self.declaration)

    @property
    def differentiable(self) -> bool:
        return self.declaration.gradients

    def unavailable(self) -> str:
        """Why it cannot run on this machine, or nothing."""
        needed = list(self.declaration.requires)
        if self.declaration.framework == "torch":
            needed.append("torch")
        for module in needed:
            if importlib.util.find_spec(module) is None:
                return f"{module} is not installed"
        return self.framework.unavailable(self.declaration)

    def withheld(self) -> str:
        """Which declared dtypes are not judged on this machine, and why; or nothing."""
        trusted = self.framework.trusted_dtypes(self.declaration)
        left_out = ", ".join(d for d in self.declaration.dtypes if d not in trusted)
        return self.framework.WITHHELD.format(left_out) if left_out else ""

    def domain(self) -> Domain:
        """The cases that it supports."""
        d = self.declaration
        allowed = self.framework.trusted_dtypes(d)
        kinds = tuple(t for t in d.dtypes if t in allowed)
        flags = [x for x in self.operator.inputs if x.domain == "flag"]
        causal_only = None
        if flags and flags[0].name not in self.takes:
            causal_only = bool(d.fixed.get(flags[0].name, flags[0].default))
        return Domain(
            op=self.operator.name,
            dtypes=tuple((t, d.parameter_dtype(t)) for t in kinds),
            chunk=d.chunk or 16,
            single=tuple(a for a in ("B", "H") if a not in self.layout),
            multiple_of=tuple(d.multiple_of.items()),
            at_least=tuple(d.at_least.items()),
            stateful=self.stateful,
            causal_only=causal_only,
        )

    def inputs(self, case: Case) -> dict[str, Any]:
        """The case's arrays, with inputs that the function does not take replaced by what it uses instead."""
        values = case.arrays()
        sizes = dict(case.sizes)
        for name, constant in self.declaration.fixed.items():
            values[name] = constant(sizes) if callable(constant) else constant
        for x in self.operator.inputs:
            if x.role == "scalar" and x.name not in self.takes and x.name not in self.declaration.fixed:
                values[x.name] = False if x.domain == "flag" else x.default
        return values

    def prepare(self, inputs: Arrays, dtype: str) -> Native:
        """Native tensors in the declared layout, for the inputs that the function takes."""
        native: Native = {}
        for x in self.operator.inputs:
            if x.name not in self.takes or x.name not in inputs:
                continue
            value = inputs[x.name]
            if x.role == "scalar":
                native[x.name] = value
            else:
                kind = dtype if x.role == "token" else self.declaration.parameter_dtype(dtype)
                native[x.name] = self.framework.tensor(self.arrange(np.asarray(value), x.role), kind, self.declaration)
        return native

    def invoke(self, native: Mapping[str, Any], chunk: int = 0) -> Native:
        """Call it. Raises SubjectError if it raises, or returns what is not the operator's output."""
        options = {"chunk": chunk} if chunk and self.takes_chunk else {}
        try:
            with quiet():
                result = self.function(**native, **options)
        except (Exception, SystemExit) as error:
            sizes = ", ".join(f"{a}={n}" for a, n in self.sizes(native).items())
            raise SubjectError(f"{self.name} raised at {sizes}: {first_line(error)}. {_advice(error)}") from error
        result = result if isinstance(result, (tuple, list)) else (result,)
        outputs = self.operator.outputs
        if not 1 <= len(result) <= len(outputs):
            names = ", ".join(y.name for y in outputs)
            raise SubjectError(f"{self.name} returned {len(result)} results; {self.operator.name} has {names}")
        named = {y.name: value for y, value in zip(outputs, result, strict=False) if value is not None}
        sizes = self.sizes(native)
        given = next(native[x.name] for x in self.operator.inputs if x.role == "token" and x.name in native)
        for y in outputs:
            if y.name not in named:
                if y.role == "token":
                    raise SubjectError(f"{self.name} returned None for {y.name}; expected a tensor")
                continue
            value = named[y.name]
            if not self.framework.is_floating(value):
                what = self.framework.describe(value)
                raise SubjectError(f"{self.name} returned {y.name} as {what}; expected a floating-point tensor")
            if y.role == "token" and self.declaration.framework == "torch" and value.dtype != given.dtype:
                raise SubjectError(
                    f"{self.name} returned {y.name} in {value.dtype}; expected {given.dtype}, as its inputs"
                )
            lead = ("B", "H") if y.role == "state" else ()
            axes = (*lead, *y.axes) if y.role == "state" else self.token_axes(y.axes)
            size = {a: self.operator.size(a, sizes, native) for a in axes if a in y.axes or a in sizes}
            want = tuple(size[a] for a in axes if a in size)
            if tuple(named[y.name].shape) != want:
                where = f'layout "{" ".join(self.layout)}" with {", ".join(f"{a}={size[a]}" for a in y.axes)}'
                raise SubjectError(
                    f"{self.name} returned {y.name} with shape {tuple(named[y.name].shape)}; {where} expects {want}"
                )
        return named

    def restore(self, native: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Outputs or gradients as float64 arrays in canonical layout."""
        roles = {x.name: x.role for x in (*self.operator.inputs, *self.operator.outputs)}
        return {n: self.canonical(self.framework.array(t), roles[n]) for n, t in native.items()}

    def run(self, inputs: Arrays, dtype: str, chunk: int = 0) -> dict[str, np.ndarray]:
        return self.restore(self.invoke(self.prepare(inputs, dtype), chunk))

    def gradients(self, inputs: Arrays, cotangents: Arrays, dtype: str, change: Any = None) -> dict[str, np.ndarray]:
        """Gradients of sum <output, cotangent> for the differentiable inputs it takes; `change` may rearrange the
        native cotangents first."""
        native = self.prepare(inputs, dtype)
        roles = {y.name: y.role for y in self.operator.outputs}
        upstream = {}
        for n, c in cotangents.items():
            kind = dtype if roles[n] == "token" else self.declaration.parameter_dtype(dtype)
            upstream[n] = self.framework.tensor(self.arrange(np.asarray(c), roles[n]), kind, self.declaration)
        names = [x.name for x in self.operator.inputs if x.differentiable and x.name in native]
        return self.restore(self.framework.gradients(self, native, names, change(upstream) if change else upstream))

    def sizes(self, native: Mapping[str, Any]) -> dict[str, int]:
        """The named sizes of native tensors, as the function sees them."""
        sizes: dict[str, int] = {}
        for x in self.operator.inputs:
            if x.role == "scalar" or x.name not in native:
                continue
            lead = tuple(a for a in ("B", "H") if a in self.layout)
            if x.role == "parameter":
                lead = tuple(a for a in lead if a == "H")
            axes = self.token_axes(x.axes) if x.role == "token" else (*lead, *x.axes)
            sizes |= dict(zip(axes, native[x.name].shape, strict=True))
        return {a: n for a, n in sizes.items() if a not in self.operator.followers}

    def token_axes(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """The names of a token tensor's dimensions in the declared layout; D stands for its features, however many."""
        return tuple(b for a in self.layout for b in ((axes[0],) if a == "T" else axes[1:] if a == "D" else (a,)))

    def arrange(self, x: np.ndarray, role: str) -> np.ndarray:
        """Canonical -> declared layout."""
        if role == "token":
            order = self._order(x.ndim)
            missing = [i for i in range(2) if i not in order]
            x = x.transpose(order + missing)
            return x.reshape(x.shape[: len(order)])
        lead = ("B", "H") if role == "state" else ("H",)
        return x.reshape(
            [n for n, a in zip(x.shape, lead, strict=False) if a in self.layout] + list(x.shape[len(lead) :])
        )

    def canonical(self, x: np.ndarray, role: str) -> np.ndarray:
        """Declared -> canonical layout."""
        if role == "token":
            order = self._order(x.ndim + sum(a not in self.layout for a in ("B", "H")))
            order += [i for i in range(2) if i not in order]
            x = x.reshape(x.shape + (1,) * (len(order) - x.ndim))
            return x.transpose(np.argsort(order))
        lead = ("B", "H") if role == "state" else ("H",)
        for i, a in enumerate(lead):
            if a not in self.layout:
                x = np.expand_dims(x, i)
        return x

    def _order(self, ndim: int) -> list[int]:
        """Canonical positions of the declared axes of a token tensor with `ndim` canonical dimensions."""
        place = {"B": [0], "H": [1], "T": [2], "D": list(range(3, ndim))}
        return [i for a in self.layout for i in place[a]]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Implementations under test may warn as they like: that is no verdict, not even where warnings are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def first_line(error: BaseException) -> str:
    """An exception in one line, without a full stop."""
    text = next(iter(str(error).strip().splitlines()), "").rstrip(". ")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _advice(error: BaseException) -> str:
    if "cannot be accessed from Triton" in str(error):
        return 'A kernel in Triton declares requires=("triton",), and devices=("cpu", "cuda") if it runs on a GPU too'
    return 'If that is its contract, declare multiple_of={"T": 16} or at_least={"T": 1}'
