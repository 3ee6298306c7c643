"""Mutants: deliberately wrong variants of the reference. They prove that laws can fail, and they are the dictionary in
which a failure is looked up: an output that equals a mutant within its bound is named after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from mixproof.reference import operator as find_operator
from mixproof.verify import oracle
from mixproof.verify.case import Case
from mixproof.verify.declare import Declaration
from mixproof.verify.laws.law import expect, expect_gradients
from mixproof.verify.subject import Subject

MODULES = ("gma", "gma_vjp", "retention", "softmax_attention", "calling")


@dataclass(frozen=True)
class Mutant:
    """`what` completes "the reference with ...". `forward` and `vjp` are single-head; None keeps the reference's own.

    `killed_by` names laws that must each kill it; `dtype` the input dtype in which it is wrong; `chunk` its chunk."""

    name: str
    operator: str
    what: str
    killed_by: tuple[str, ...]
    forward: Callable[..., Any] | None = None
    vjp: Callable[..., Any] | None = None
    dtype: str = "float32"
    chunk: int = 8
    batched: Callable[..., Any] | None = None
    source: str = ""

    def subject(self) -> Subject:
        """The mutant as an implementation under test."""
        from mixproof.verify.subjects.reference import batched

        operator = find_operator(self.operator)
        function = self.batched or batched(
            operator, self.forward or operator.forms[0].function, self.vjp or operator.vjp, self.chunk
        )
        declaration = Declaration(
            self.operator,
            f"mutant.{self.name}",
            layout="B H T D",
            dtypes=(self.dtype,),
            chunk=self.chunk,
            gradients=hasattr(function, "vjp"),
            framework="numpy",
        )
        return Subject(declaration, function)


def mutants(operator: str | None = None) -> list[Mutant]:
    """All mutants, or those of one operator."""
    found = [m for module in MODULES for m in import_module(f"{__name__}.{module}").MUTANTS]
    return [m for m in found if operator in (None, m.operator)]


def explain(subject: Subject, law: str, case: Case) -> str:
    """The mutant that the implementation's result equals within its bound, as "the reference with ... (0.3 x bound)"."""
    backward = law == "vjp"
    inputs = subject.inputs(case)
    got = subject.run(inputs, case.dtype)
    if backward:
        cotangents = case.cotangents(got)
        shapes = subject.operator.evaluate  # the reference's outputs that the implementation does not return
        del shapes
        want = expect(subject, case, inputs)
        full = {n: cotangents.get(n, np.zeros_like(v)) for n, v in want.value.items()}
        got = subject.gradients(inputs, cotangents, case.dtype)
        want = expect_gradients(subject, case, inputs, full)
    else:
        want = expect(subject, case, inputs)
    if want.vacuous:
        return ""
    best: tuple[float, str] = (1.0, "")
    chunk = subject.domain().chunk
    for mutant in mutants(subject.operator.name):
        function = mutant.vjp if backward else mutant.forward
        if function is None:
            continue
        try:
            if backward:
                values = oracle.plain_backward(subject.operator, inputs, full, function)
            else:
                options = {"chunk": chunk} if "chunk" in _parameters(function) else {}
                results = oracle.plain_forward(subject.operator, inputs, partial(function, **options))
                values = dict(zip((y.name for y in subject.operator.outputs), results, strict=False))
        except (ValueError, IndexError, ZeroDivisionError):
            continue  # a mutant need not be defined everywhere
        ratio = max(
            (float(np.max(np.abs(got[n] - values[n]) / want.bound[n], initial=0)) for n in got if n in values),
            default=np.inf,
        )
        differs = any(np.any(np.abs(values[n] - want.value[n]) > want.bound[n]) for n in got if n in values)
        if ratio <= best[0] and differs:
            best = (ratio, f"the reference with {mutant.what}   ({ratio:.2g} x bound)")
    return best[1]


def _parameters(function: Callable[..., Any]) -> Any:
    import inspect

    return inspect.signature(function).parameters
