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

CHUNK = 8  # small, so that short sequences have several chunks


def subject(operator_name: str, name: str) -> Subject:
    """The form `reference.FORM` of an operator, run in plain NumPy float64 and float32."""
    operator = find_operator(operator_name)
    form = operator.form(name.removeprefix("reference."))
    function = batched(operator, form.function, operator.vjp if form is operator.forms[0] else None, CHUNK)
    declaration = Declaration(
        operator_name,
        name,
        layout="B H T D",
        dtypes=("float64", "float32"),
        chunk=CHUNK,  # of other forms too: they meet the same cases, and share their oracles
        gradients=form is operator.forms[0],
        at_least={"T": 0},
        framework="numpy",
    )
    return Subject(declaration, function)


def batched(
    operator: Operator, function: Callable[..., Any], vjp: Callable[..., Any] | None = None, chunk: int | None = None
) -> Callable[..., Any]:
    """A single-head function over batch and heads; the result has the attribute `vjp` if there is one. Functions that
    take a chunk size get `chunk`, if it is given, instead of their default."""
    default = chunk

    def sized(f: Callable[..., Any], size: int | None) -> Callable[..., Any]:
        return functools.partial(f, chunk=size) if size and "chunk" in inspect.signature(f).parameters else f

    @functools.wraps(function)
    def run(chunk: int | None = None, **inputs: Any) -> Any:
        return oracle.plain_forward(operator, inputs, sized(function, chunk or default))

    def run_vjp(cotangents: Mapping[str, Any], **inputs: Any) -> dict[str, Any]:
        full = dict(cotangents)
        if missing := [i for i, y in enumerate(operator.outputs) if y.name not in full]:
            results = oracle.plain_forward(operator, inputs, function)
            full |= {operator.outputs[i].name: 0 * results[i] for i in missing}
        return oracle.plain_backward(operator, inputs, full, sized(vjp or operator.vjp, default))

    run.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    if vjp is not None:
        run.vjp = run_vjp  # type: ignore[attr-defined]
    return run
