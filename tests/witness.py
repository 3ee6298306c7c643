"""An independent transcription in torch as a witness: it agrees with all forms of an operator, its autograd with the
closed-form gradients, each within twice what the gate allows one float64 evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mixproof.reference.spec import Operator
from mixproof.verify.arithmetic import natural
from mixproof.verify.numbers.ball import Reading, tolerance


def draw(operator: Operator, seed: int = 0, absent: bool = False, **sizes: int) -> dict[str, Any]:
    """Standard normal inputs; states left out where `absent`."""
    g = np.random.default_rng([seed, *sizes.values()])
    arrays = [x for x in operator.inputs if x.role != "scalar" and not (absent and x.role == "state")]
    return {x.name: g.standard_normal(tuple(operator.size(a, sizes, {}) for a in x.axes)) for x in arrays}


def allowed(operator: Operator, inputs: dict[str, Any]) -> dict[str, np.ndarray]:
    """What one float64 evaluation of each output may be off by."""
    reading = Reading(natural("float64"))
    balls = operator.evaluate({n: reading.ball(x) if np.ndim(x) else x for n, x in inputs.items()})
    bounds = {n: tolerance(y if hasattr(y, "radius") else reading.ball(y), "float64") for n, y in balls.items()}
    assert not reading.vacuous
    return bounds


def assert_agrees(operator: Operator, witness: Callable[..., Any], inputs: dict[str, Any]) -> None:
    """`witness` takes the operator's inputs as tensors and returns its outputs in order."""
    tensors = {n: torch.tensor(x, requires_grad=True) if np.ndim(x) else x for n, x in inputs.items()}
    results = dict(zip((y.name for y in operator.outputs), witness(**tensors), strict=True))
    bounds = allowed(operator, inputs)
    for form in operator.forms:
        for n, y in operator.evaluate(inputs, form.name).items():
            assert y.shape == results[n].shape, (form.name, n)
            assert np.all(np.abs(y - results[n].detach().numpy()) <= 2 * bounds[n]), (form.name, n)
    g = np.random.default_rng(0)
    upstream = {n: g.standard_normal(tuple(y.shape)) for n, y in results.items()}
    sum((y * torch.tensor(upstream[n])).sum() for n, y in results.items()).backward()
    reading = Reading(natural("float64"), recomputes=True)
    balls = {n: reading.ball(x) if np.ndim(x) else x for n, x in inputs.items()}
    limits = operator.vjp({n: reading.ball(d) for n, d in upstream.items()}, **balls)
    assert not reading.vacuous
    grads = operator.vjp(upstream, **inputs)
    for n, x in tensors.items():
        if isinstance(x, torch.Tensor):
            assert np.all(np.abs(grads[n] - x.grad.numpy()) <= 2 * tolerance(limits[n], "float64")), f"d{n}"


def close(operator: Operator, one: Any, two: Any, inputs: dict[str, Any]) -> bool:
    """Whether two arrays for the first output differ by no more than two evaluations of it may."""
    bound = allowed(operator, inputs)[operator.outputs[0].name]
    assert one.shape == two.shape == bound.shape
    return bool(np.all(np.abs(one - two) <= 2 * bound))
