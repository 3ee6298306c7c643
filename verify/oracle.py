"""The oracle: the reference in float64, and the tolerance of each of its elements for a declared arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mixproof.reference.spec import Operator
from mixproof.verify.arithmetic import UNIT, Arithmetic, holds
from mixproof.verify.numbers.ball import Ball, Reading, tolerance

Arrays = Mapping[str, Any]


@dataclass(frozen=True)
class Expected:
    """Values, tolerances and the oracle's own possible error, by tensor name, in canonical batched layout.

    `vacuous` is empty, or says why the inputs lie outside the domain of the declared arithmetic."""

    value: dict[str, np.ndarray]
    bound: dict[str, np.ndarray]
    radius: dict[str, np.ndarray]
    vacuous: str = ""


def forward(
    operator: Operator,
    inputs: Arrays,
    arithmetic: Arithmetic,
    parameters: str = "float32",
    errors: Arrays | None = None,
) -> Expected:
    """Every output, states included. `parameters` is the dtype of parameters and states; `errors` says what an input
    may itself be off by (a state handed over from an earlier call)."""
    reading = Reading(arithmetic)
    lift = _lifter(reading, operator, parameters)
    radii = dict(heads(operator, {**inputs, **errors})) if errors else {}
    results = {}
    for bh, head in heads(operator, inputs):
        balls = lift(head)
        for name in errors or {}:
            balls[name] = reading.ball(head[name], exact=False).widened(radii[bh][name])
        results[bh] = operator.evaluate(balls)
    dtypes = {y.name: arithmetic.output if y.role == "token" else parameters for y in operator.outputs}
    return _collect(operator, inputs, reading, results, dtypes)


def backward(
    operator: Operator, inputs: Arrays, cotangents: Arrays, arithmetic: Arithmetic, parameters: str = "float32"
) -> Expected:
    """The gradient of every differentiable input present; a parameter's sums over the batch."""
    reading = Reading(arithmetic, recomputes=True)
    lift = _lifter(reading, operator, parameters)
    outputs = {y.name: y for y in operator.outputs}
    results: dict[tuple[int, int], dict[str, Any]] = {}
    for (b, h), head in heads(operator, inputs):
        upstream = {
            n: reading.ball(c[b, h], _exact(arithmetic, outputs[n].role, parameters)) for n, c in cotangents.items()
        }
        results[b, h] = operator.vjp(upstream, **lift(head))
    dtypes = {}
    for x in operator.inputs:
        if not x.differentiable or x.name not in inputs:
            for grads in results.values():
                grads.pop(x.name, None)
        else:
            dtypes[x.name] = arithmetic.output if x.role == "token" else parameters
    return _collect(operator, inputs, reading, results, dtypes)


def plain_backward(
    operator: Operator, inputs: Arrays, cotangents: Arrays, vjp: Callable[..., Any] | None = None
) -> dict[str, np.ndarray]:
    """The same gradients in plain NumPy, in whatever dtype the inputs have."""
    results = {}
    for (b, h), head in heads(operator, inputs):
        grads = (vjp or operator.vjp)({n: c[b, h] for n, c in cotangents.items()}, **head)
        results[b, h] = {n: g for n, g in grads.items() if n in inputs and operator.input(n).differentiable}
    return gather(operator, inputs, results)


def plain_forward(operator: Operator, inputs: Arrays, function: Callable[..., Any]) -> tuple[np.ndarray, ...]:
    """A single-head form on batched arrays, in whatever dtype they have."""
    results = {}
    for bh, head in heads(operator, inputs):
        out = function(**head)
        results[bh] = dict(enumerate(out if isinstance(out, tuple) else (out,)))
    return tuple(gather(operator, inputs, results).values())


def heads(operator: Operator, inputs: Arrays) -> Iterator[tuple[tuple[int, int], dict[str, Any]]]:
    """One head of one sequence at a time."""
    roles = {x.name: x.role for x in operator.inputs}
    B, H = next(np.shape(inputs[n])[:2] for n, role in roles.items() if role == "token")
    for b in range(B):
        for h in range(H):
            index = {"token": (b, h), "state": (b, h), "parameter": (h,)}
            yield (b, h), {n: x if roles[n] == "scalar" else np.asarray(x)[index[roles[n]]] for n, x in inputs.items()}


def gather(operator: Operator, inputs: Arrays, results: Mapping[tuple[int, int], Mapping[Any, Any]]) -> dict[Any, Any]:
    """Single-head results, by name, as batched arrays; gradients of parameters are summed over the batch."""
    B, H = (1 + max(i) for i in zip(*results, strict=True))
    parameters = {x.name for x in operator.inputs if x.role == "parameter"}
    gathered = {}
    for name in next(iter(results.values())):
        if name in parameters:
            gathered[name] = np.stack(
                [sum(results[b, h][name] for b in range(1, B)) + results[0, h][name] for h in range(H)]
            )
        else:
            gathered[name] = np.stack([np.stack([results[b, h][name] for h in range(H)]) for b in range(B)])
    return gathered


def _exact(arithmetic: Arithmetic, role: str, parameters: str) -> bool:
    return holds(arithmetic.dot, arithmetic.inputs if role == "token" else parameters)


def _lifter(reading: Reading, operator: Operator, parameters: str) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    roles = {x.name: x.role for x in operator.inputs}

    def lift(head: Mapping[str, Any]) -> dict[str, Any]:
        return {
            n: x if roles[n] == "scalar" else reading.ball(x, _exact(reading.arithmetic, roles[n], parameters))
            for n, x in head.items()
        }

    return lift


def _collect(
    operator: Operator,
    inputs: Arrays,
    reading: Reading,
    results: Mapping[tuple[int, int], Mapping[str, Any]],
    dtypes: Mapping[str, str],
) -> Expected:
    gathered = gather(operator, inputs, results)
    value, bound, radius = {}, {}, {}
    for name, dtype in dtypes.items():
        ball = gathered[name]
        if not isinstance(ball, Ball):  # a result that no rounding touches
            ball = reading.ball(ball)
        value[name] = ball.v
        # The oracle is itself an honest evaluation in float64: its radius is this one's at the unit of float64.
        radius[name] = ball.radius * min(1.0, UNIT["float64"] / reading.unit)
        bound[name] = tolerance(ball, dtype) + radius[name]
    return Expected(value, bound, radius, reading.vacuous)
