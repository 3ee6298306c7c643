"""What an operator is: named inputs with shapes and domains, outputs, state, forms, and the laws that hold for it.

Shapes are those of one head of one sequence. The gate adds batch and head axes from each input's role:

    token      (B, H, tokens, ...)          per token: a row of features, a number, or a matrix
    parameter  (H, ...)                     learned, one set per head, shared by the batch
    state      (B, H, ...)                  carried along the sequence; optional, zero when absent
    scalar     a Python number or bool      shared by everything

A cache that grows with the sequence is a state too: P tokens are in it before the call, none when absent, and P + T
after. Axes such as "P+T" follow from the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

Array = Any  # a NumPy array, or an array of another number system
Sizes = Mapping[str, int]
ROLES = ("token", "parameter", "state", "scalar")
# axes that follow from the sizes of others and, where an operator says so, from its scalars
DERIVED: dict[str, Callable[[Sizes, Mapping[str, Any]], int]] = {
    "P+T": lambda n, x: n["P"] + n["T"],
    "W-1": lambda n, x: n["W"] - 1,
}


@dataclass(frozen=True)
class Input:
    """One argument of an operator.

    `axes` names its dimensions for one head of one sequence; `domain` is a word that says which values make sense
    (`mixproof.verify.case` draws by it); a state input names in `carries` the output that continues it.
    """

    name: str
    axes: tuple[str, ...]
    role: str
    domain: str
    default: Any = None
    differentiable: bool = True
    carries: str | None = None

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"input {self.name!r}: role {self.role!r} is not one of {', '.join(ROLES)}")

    @property
    def optional(self) -> bool:
        return self.role in ("state", "scalar")


@dataclass(frozen=True)
class Output:
    """One result of an operator: `role` is "token" (one row per token) or "state"."""

    name: str
    axes: tuple[str, ...]
    role: str = "token"


@dataclass(frozen=True)
class Form:
    """One way of computing the operator; `chunked` forms take a keyword `chunk`."""

    name: str
    function: Callable[..., Any]
    chunked: bool = False


@dataclass(frozen=True)
class Operator:
    """A mathematical function with a name.

    `forms[0]` is the form of record: the oracle is that form in float64. `vjp(cotangents, **inputs)` returns a dict
    from input name to gradient. `causal` is True, False, or the name of the flag that decides. `laws` names the laws
    that hold for this operator beyond those that hold for every operator. `exact` lists the same forms with the
    results of the feature maps as inputs (`exact_inputs`): rational functions, which any field can run. `degrees` says
    of token inputs how the token outputs scale with them, states absent; `multiple_of` which sizes make sense.
    `derived` gives the size of axes that follow from plain ones and from inputs, beside those of DERIVED. `position`
    names a scalar input that counts the tokens before the call, `aligned` one of which every number of tokens after
    which the sequence may be split is a multiple.
    """

    name: str
    summary: str
    source: str
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    forms: tuple[Form, ...]
    vjp: Callable[..., dict[str, Array]]
    causal: bool | str
    laws: tuple[str, ...]
    linear_in: str | None = None
    cost: str = "linear"
    exact: tuple[Form, ...] = ()
    exact_inputs: tuple[Input, ...] = ()
    degrees: Mapping[str, int] = field(default_factory=dict)
    multiple_of: Mapping[str, int] = field(default_factory=dict)
    derived: Mapping[str, Callable[[Sizes, Mapping[str, Any]], int]] = field(default_factory=dict)
    position: str = ""
    aligned: str = ""

    def input(self, name: str) -> Input:
        for x in self.inputs:
            if x.name == name:
                return x
        raise KeyError(f"operator {self.name} has no input {name!r}; it has {', '.join(x.name for x in self.inputs)}")

    def form(self, name: str) -> Form:
        for f in self.forms:
            if f.name == name:
                return f
        raise KeyError(f"operator {self.name} has no form {name!r}; it has {', '.join(f.name for f in self.forms)}")

    @property
    def dimensions(self) -> tuple[str, ...]:
        """The named dimensions in order of first use, e.g. ("T", "R", "V", "K"), without those that follow."""
        return tuple(dict.fromkeys(a for x in self.inputs for a in x.axes if a not in self.followers))

    @cached_property
    def followers(self) -> dict[str, Callable[[Sizes, Mapping[str, Any]], int]]:
        """The axes whose size follows from others."""
        return DERIVED | dict(self.derived)

    def size(self, axis: str, sizes: Sizes, inputs: Mapping[str, Any]) -> int:
        """The size of an axis, from those of the plain ones; a cache that is absent holds no token."""
        if axis in self.followers:
            return self.followers[axis]({"P": 0, **sizes}, inputs)
        return sizes[axis]

    @property
    def state(self) -> tuple[Input, ...]:
        return tuple(x for x in self.inputs if x.role == "state")

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The sequence axes: ("T",), or ("T", "S") for an operator with a separate context of S tokens."""
        return tuple(dict.fromkeys(x.axes[0] for x in self.inputs if x.role == "token"))

    def is_causal(self, inputs: Mapping[str, Any]) -> bool:
        return bool(inputs[self.causal]) if isinstance(self.causal, str) else self.causal

    def evaluate(
        self, inputs: Mapping[str, Array], form: str | None = None, chunk: int | None = None
    ) -> dict[str, Array]:
        """One head of one sequence: outputs by name. Raises KeyError for an unknown form."""
        f = self.form(form) if form else self.forms[0]
        options = {"chunk": chunk} if f.chunked and chunk else {}
        result = f.function(**inputs, **options)
        result = result if isinstance(result, tuple) else (result,)
        return {output.name: value for output, value in zip(self.outputs, result, strict=True)}


def check_shapes(operator: Operator, inputs: Mapping[str, Array]) -> dict[str, int]:
    """The sizes of the named dimensions. Raises ValueError naming the argument whose shape contradicts the others."""
    sizes: dict[str, int] = {}
    follow = []
    for x in operator.inputs:
        value = inputs.get(x.name)
        if x.role == "scalar" or value is None:
            continue
        shape = getattr(value, "shape", ())
        if len(shape) != len(x.axes):
            raise ValueError(f"{x.name} has shape {shape}; {operator.name} expects ({', '.join(x.axes)})")
        for axis, n in zip(x.axes, shape, strict=True):
            if axis in operator.followers:
                follow.append((x.name, shape, axis, n))
            elif sizes.setdefault(axis, n) != n:
                raise ValueError(
                    f"{x.name} has shape {shape}: axis {axis} is {n}, but another argument has {axis}={sizes[axis]}"
                )
    for name, shape, axis, n in follow:
        if n != (want := operator.size(axis, sizes, inputs)):
            raise ValueError(f"{name} has shape {shape}: axis {axis} is {n}, but the other arguments make it {want}")
    return sizes


def check_cotangents(operator: Operator, cotangents: Mapping[str, Array], inputs: Mapping[str, Array]) -> None:
    """Raises ValueError for a cotangent that is missing, or of no output, or of another shape than its output, whose
    sizes are those of `inputs`."""
    sizes, names = check_shapes(operator, inputs), [y.name for y in operator.outputs]
    if set(cotangents) != set(names):
        raise ValueError(f"cotangents are those of {', '.join(sorted(cotangents))}; expected {', '.join(names)}")
    for y in operator.outputs:
        shape = getattr(cotangents[y.name], "shape", ())
        want = tuple(operator.size(a, sizes, inputs) for a in y.axes)
        if shape != want:
            raise ValueError(f"the cotangent of {y.name} has shape {shape}; {y.name} has shape {want}")
