"""Mutants: deliberately wrong variants of the reference. They prove that laws can fail, and they are the dictionary in
which a failure is looked up: an output that equals a mutant within its bound is named after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from inspect import signature
from typing import Any

import numpy as np

from mixproof.reference import operator as find_operator
from mixproof.reference.spec import Form, Operator
from mixproof.verify import oracle
from mixproof.verify.case import Case
from mixproof.verify.declare import Declaration
from mixproof.verify.laws.law import completed, expect, expect_gradients
from mixproof.verify.oracle import Expected
from mixproof.verify.subject import Subject

Row = tuple[str, str, Callable[..., Any], str, tuple[str, ...]]
Arrays = Mapping[str, Any]
MODULES = (
    "gma",
    "gma_vjp",
    "retention",
    "mome",
    "tala",
    "feature_maps",
    "tala_normalised",
    "tala_decays",
    "tala_decays_vjp",
    "multi_scale_retention",
    "mixformer",
    "ode_transformer",
    "softmax_attention",
    "cached_attention",
    "sigmoid_attention",
    "mamba",
    "mamba_block",
    "linear_transformer",
    "performer",
    "linformer",
    "gma_hybrid",
    "mla",
    "mlra",
    "tucker",
    "iha",
    "gta",
    "titans",
    "mtla",
    "ccgqa",
    "calling",
    "convolution",
    "packed",
    "numerics",
    "solitary",
    "solitary_vjp",
    "history",
    "forms",
    "costs",
)
# laws whose failures lie in a gradient
OF_GRADIENTS = ("vjp", "gradient_causality", "gradient_identities", "euler")


@dataclass(frozen=True)
class Mutant:
    """`what` completes "the reference with ...". `forward` and `vjp` are single-head; None keeps the reference's own.
    `batched` replaces both for what goes wrong around them: a function of (B, H, T, D) arrays, perhaps with a `vjp`.

    `killed_by` names laws that must each kill it, in the profile "short"; `dtype` is the input dtype in which it is
    wrong; `chunk` its chunk; `source` the public bug of which it is a model, by its name in `sources`, or nothing.

    `form` makes it a wrong form of the reference, of that name, judged as those are: `forward` computes it in plain
    NumPy, `exact` over a field. With `framework` "torch" its `batched` is a function of (B, T, H, D) tensors."""

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
    form: str = ""
    exact: Callable[..., Any] | None = None
    framework: str = "numpy"

    @property
    def part(self) -> str:
        """What is wrong with it: "outputs", "gradients", or what goes on around them, "calling"."""
        if self.batched or (self.forward is not None) == (self.vjp is not None):
            return "calling"
        return "outputs" if self.forward else "gradients"

    def subject(self) -> Subject:
        """The mutant as an implementation under test. Nothing is imported for it before it runs."""
        from mixproof.verify.subjects.reference import batched

        operator, torch = find_operator(self.operator), self.framework == "torch"
        vjp = None if self.form else self.vjp or operator.vjp
        function = self.batched or batched(operator, self.forward or operator.forms[0].function, vjp, self.chunk)
        anew = getattr(function, "anew", None)
        function = anew() if anew else function  # it has a memory, which no other implementation under test shares
        declaration = Declaration(
            self.operator,
            f"reference.{self.form}" if self.form else f"mutant.{self.name}",
            layout="B T H D" if torch else "B H T D",
            dtypes=(self.dtype,),
            chunk=self.chunk,
            gradients=torch or hasattr(function, "vjp"),
            framework=self.framework,
        )
        subject = Subject(declaration, function)
        if self.form:
            subject.operator = self._reformed(operator)
        return subject

    def _reformed(self, operator: Operator) -> Operator:
        """The operator with this form in the place of the right one, or added."""
        wrong = {"forms": self.forward, "exact": self.exact}
        changes = {}
        for field, function in wrong.items():
            if function is not None:
                forms: tuple[Form, ...] = getattr(operator, field)
                others = tuple(f for f in forms if f.name != self.form)
                chunked = any(f.chunked for f in forms if f.name == self.form)
                changes[field] = (*others, Form(self.form, function, chunked))
        return dataclasses.replace(operator, **changes)


def tabulated(operator: str, forward: Iterable[Row], backward: Iterable[Row]) -> tuple[Mutant, ...]:
    """The mutants of one operator from rows of name, what, function, source and the laws that kill it."""
    return (
        *(Mutant(n, operator, what, laws, forward=f, source=source) for n, what, f, source, laws in forward),
        *(Mutant(f"vjp.{n}", operator, what, laws, vjp=f, source=source) for n, what, f, source, laws in backward),
    )


def mutants(operator: str | None = None) -> list[Mutant]:
    """All mutants, or those of one operator."""
    return [m for m in _all() if operator in (None, m.operator)]


@cache
def _all() -> tuple[Mutant, ...]:
    from mixproof.verify.subjects.mutants.sources import same

    found = [m for module in MODULES for m in import_module(f"{__name__}.{module}").MUTANTS]
    return tuple(m if m.source else dataclasses.replace(m, source=same(m.operator, m.name)) for m in found)


def untouched(operator: str) -> Mutant:
    """The reference with nothing changed, to be run as its mutants are."""
    return Mutant("honest", operator, "nothing changed", ())


def explain(subject: Subject, law: str, case: Case) -> str:
    """The mutant whose result the implementation's equals within its bound: "the reference with ... (0.3 x bound)"."""
    named = "" if law in OF_GRADIENTS else _explain_outputs(subject, case)
    if not named and subject.differentiable and law in (*OF_GRADIENTS, "extremes"):
        named = _explain_gradients(subject, case)
    return named


def _explain_outputs(subject: Subject, case: Case) -> str:
    inputs = subject.inputs(case)
    chunk = subject.domain().chunk
    names = [y.name for y in subject.operator.outputs]

    def outputs(mutant: Mutant) -> Arrays | None:
        if mutant.forward is None:
            return None
        options = {"chunk": chunk} if "chunk" in signature(mutant.forward).parameters else {}
        results = oracle.plain_forward(subject.operator, inputs, partial(mutant.forward, **options))
        return dict(zip(names, results, strict=True))

    return _nearest(subject, subject.run(inputs, case.dtype), expect(subject, case, inputs), outputs)


def _explain_gradients(subject: Subject, case: Case) -> str:
    inputs = subject.inputs(case)
    cotangents = case.cotangents(subject.run(inputs, case.dtype))
    full = completed(cotangents, expect(subject, case, inputs).value)

    def gradients(mutant: Mutant) -> Arrays | None:
        if mutant.vjp is None:
            return None
        return oracle.plain_backward(subject.operator, inputs, full, mutant.vjp)

    got = subject.gradients(inputs, cotangents, case.dtype)
    return _nearest(subject, got, expect_gradients(subject, case, inputs, full), gradients)


def _nearest(subject: Subject, got: Arrays, want: Expected, values_of: Callable[[Mutant], Arrays | None]) -> str:
    """The mutant nearest to what came, of those within the bound of it and not within the bound of the reference."""
    if want.vacuous:
        return ""
    best, named = 1.0, ""
    for mutant in mutants(subject.operator.name):
        try:
            values = values_of(mutant)
        except (ValueError, IndexError, ZeroDivisionError):
            continue  # a mutant need not be defined everywhere
        shared = [n for n in got if values is not None and n in values]
        if not shared or values is None:
            continue
        ratio = max(float(np.max(np.abs(got[n] - values[n]) / want.bound[n], initial=0)) for n in shared)
        differs = any(np.any(np.abs(values[n] - want.value[n]) > want.bound[n]) for n in shared)
        if ratio <= best and differs:
            best, named = ratio, f"the reference with {mutant.what}   ({ratio:.2g} x bound)"
    return named
