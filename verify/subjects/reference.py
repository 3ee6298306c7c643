"""The reference's own forms as implementations: what is wrong with them is found like anything else."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from mixproof.reference import operator as find_operator
from mixproof.reference.spec import Operator
from mixproof.verify import oracle
from mixproof.verify.declare import Declaration
from mixproof.verify.subject import Subject


def subject(operator_name: str, name: str) -> Subject:
    """The form `reference.FORM` of an operator, run in plain NumPy float64 and float32."""
    operator = find_operator(operator_name)
    form = operator.form(name.removeprefix("reference."))
    function = batched(operator, form.function, operator.vjp if form is operator.forms[0] else None)
    declaration = Declaration(
        operator_name,
        name,
        layout="B H T D",
        dtypes=("float64", "float32"),
        chunk=8 if form.chunked else None,
        gradients=form is operator.forms[0],
        at_least={"T": 0},
        framework="numpy",
    )
    return Subject(declaration, function)


def batched(
    operator: Operator, function: Callable[..., Any], vjp: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """A single-head function over batch and heads; the result has the attribute `vjp` if there is one."""

    @functools.wraps(function)
    def run(chunk: int | None = None, **inputs: Any) -> Any:
        options = {"chunk": chunk} if chunk else {}
        return oracle.plain_forward(operator, inputs, functools.partial(function, **options))

    def run_vjp(cotangents: Mapping[str, Any], **inputs: Any) -> dict[str, Any]:
        shapes = oracle.plain_forward(operator, inputs, function)
        full = {y.name: 0 * x for y, x in zip(operator.outputs, shapes, strict=True)} | dict(cotangents)
        return oracle.plain_backward(operator, inputs, full, vjp)

    run.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    if vjp is not None:
        run.vjp = run_vjp  # type: ignore[attr-defined]
    return run
