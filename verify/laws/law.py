"""What a law is, and the steps that several laws share."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mixproof.verify import oracle
from mixproof.verify.arithmetic import Arithmetic
from mixproof.verify.case import Case, Domain, atlas
from mixproof.verify.oracle import Expected
from mixproof.verify.subject import Subject
from mixproof.verify.verdict import Evidence

Check = Callable[[Subject, Case], list[Evidence]]


def always(subject: Subject) -> str:
    return ""


def default_plan(domain: Domain, small: bool) -> Iterator[Case]:
    return atlas(domain, small)


@dataclass(frozen=True)
class Law:
    """A property that any correct implementation satisfies.

    `statement` is the line shown when it is broken. `exactness` is bitwise, rounding (judged by balls) or inequality.
    `applies` gives the reason why an implementation is not held to it, or nothing. `plan` lists the cases tried first;
    `search` is the share of a profile's random cases that it gets; `optional` laws hold only for operators that name
    them; `core` laws are judged in every profile, however slow the implementation. `of` is what the check looks at:
    outputs, gradients, or both."""

    name: str
    statement: str
    exactness: str
    check: Check
    applies: Callable[[Subject], str] = always
    plan: Callable[[Domain, bool], Iterable[Case]] = default_plan
    search: float = 0.0
    optional: bool = False
    extreme: bool = False
    core: bool = False
    of: str = "outputs"

    def reason_not(self, subject: Subject) -> str:
        """Why the law is not applied to this implementation, or nothing."""
        if self.optional and self.name not in subject.operator.laws:
            return f"not a law of {subject.operator.name}"
        return self.applies(subject)


def needs_gradients(subject: Subject) -> str:
    return "" if subject.differentiable else "declares no gradients"


def needs_causal(subject: Subject) -> str:
    return "" if subject.operator.causal is not False and subject.domain().causal_only is not False else "not causal"


def needs_own_calling(subject: Subject) -> str:
    """The forms of a reference are called through one wrapper: the form of record stands for all."""
    if not subject.name.startswith("reference.") or subject.name == f"reference.{subject.operator.forms[0].name}":
        return ""
    return "called as the form of record is"


def needs_state(subject: Subject) -> str:
    if not subject.operator.state:
        return "the operator has no state"
    return "" if subject.stateful else "takes no initial state"


def axes_of(subject: Subject, name: str) -> tuple[str, ...]:
    """Names of the canonical dimensions of an input, output or gradient."""
    for x in (*subject.operator.inputs, *subject.operator.outputs):
        if x.name == name:
            return (*(("H",) if x.role == "parameter" else ("B", "H")), *x.axes)
    return ()


def arithmetic(subject: Subject, case: Case) -> Arithmetic:
    return subject.declaration.arithmetic(case.dtype)


def expected(subject: Subject, case: Case) -> Expected:
    """Oracle and tolerance of a case, remembered: implementations with the same arithmetic share it."""
    return expect(subject, case, subject.inputs(case), key="inputs")


def expect(
    subject: Subject, case: Case, inputs: Mapping[str, Any], errors: Any = None, key: str | None = None
) -> Expected:
    """Oracle and tolerance of inputs that a law changed. With a `key` the result is remembered: the caller promises
    that case and key determine the inputs."""

    def compute() -> Expected:
        return oracle.forward(subject.operator, inputs, arithmetic(subject, case), case.parameters, errors)

    return _remember(subject, case, key, compute)


def expect_gradients(
    subject: Subject, case: Case, inputs: Mapping[str, Any], cotangents: Any, key: str | None = None
) -> Expected:
    def compute() -> Expected:
        return oracle.backward(subject.operator, inputs, cotangents, arithmetic(subject, case), case.parameters)

    return _remember(subject, case, key and "d" + key, compute)


MEMORY: OrderedDict[Any, Expected] = OrderedDict()
REMEMBERED = 1024


def _remember(subject: Subject, case: Case, key: str | None, compute: Callable[[], Expected]) -> Expected:
    if key is None:
        return compute()
    # which inputs an implementation takes, and what it uses instead, changes them
    full = (case, arithmetic(subject, case), subject.takes, repr(sorted(subject.declaration.fixed.items())), key)
    if full not in MEMORY:
        MEMORY[full] = compute()
        if len(MEMORY) > REMEMBERED:
            MEMORY.popitem(last=False)
    return MEMORY[full]


def against(
    subject: Subject, got: Mapping[str, np.ndarray], want: Expected, prefix: str = "", note: str = ""
) -> list[Evidence]:
    """Each tensor against the oracle."""
    return [
        Evidence(
            prefix + name,
            value,
            want.value[name],
            want.bound[name],
            axes_of(subject, name),
            want.radius[name],
            want.vacuous,
            note,
        )
        for name, value in got.items()
        if name in want.value
    ]


def related(
    subject: Subject,
    case: Case,
    inputs: Mapping[str, Any],
    changed: Mapping[str, Any],
    carry: Callable[[str, np.ndarray], np.ndarray],
    label: str,
) -> list[Evidence]:
    """f(changed) against carry(f(inputs)): each side within its own tolerance of values that the law relates.

    Where the change of inputs had to be rounded, the two exact values differ; the oracle says by how much."""
    first, second = subject.run(inputs, case.dtype), subject.run(changed, case.dtype)
    one, two = expect(subject, case, inputs, key=f"{label}, before"), expect(subject, case, changed, key=label)
    evidence = []
    for name, value in second.items():
        slack = np.abs(two.value[name] - carry(name, one.value[name]))
        bound = two.bound[name] + np.abs(carry(name, one.bound[name])) + slack
        vacuous = one.vacuous or two.vacuous
        evidence.append(
            Evidence(f"{name} {label}", value, carry(name, first[name]), bound, axes_of(subject, name), 0.0, vacuous)
        )
    return evidence


def with_causal(case: Case) -> Case:
    """The case with its causal flag on, where the operator has one."""
    if any(x.domain == "flag" for x in case.operator.inputs):
        case = dataclasses.replace(case, flag=True)
        if "S" in dict(case.sizes):
            case = case.resized(S=case.size("T"))
    return case


def token_inputs(subject: Subject, inputs: Mapping[str, Any]) -> list[str]:
    return [x.name for x in subject.operator.inputs if x.role == "token" and x.name in inputs]


def stateless(subject: Subject, case: Case) -> dict[str, Any]:
    """The inputs of a case, states left out."""
    operator = subject.operator
    inputs = {n: x for n, x in subject.inputs(case).items() if operator.input(n).role != "state"}
    return inputs | ({operator.position: 0} if operator.position else {})


def scalable(domain: Domain, small: bool) -> list[Case]:
    """Cases in which nothing underflows, so that powers of two may be multiplied in."""
    return [c for c in atlas(domain, small) if c.regime == "normal" and c.dtype != "float16"]


def vanishes(
    label: str, terms: list[tuple[np.ndarray, np.ndarray, tuple[int, ...]]], axes: tuple[str, ...], vacuous: str
) -> Evidence:
    """A sum that is zero, from terms (values, their tolerances, the dimensions to sum over)."""
    total, bound = (sum(np.sum(term[i], axis=term[2]) for term in terms) for i in (0, 1))
    return Evidence(label, np.asarray(total), np.zeros_like(total), np.asarray(bound), axes, 0.0, vacuous)


def completed(cotangents: Mapping[str, np.ndarray], values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Cotangents of all outputs: zero for those that the implementation does not return."""
    return {n: cotangents.get(n, np.zeros_like(v)) for n, v in values.items()}


def as_tuple(result: Any) -> tuple[Any, ...]:
    """The results of a form, one or several; an Enclosure, a named tuple, is one."""
    return result if type(result) is tuple else (result,)


def few(plan: Iterable[Case], count: int) -> Iterator[Case]:
    """`count` cases spread evenly over a plan."""
    cases = list(plan)
    step = max(1, len(cases) // max(1, count))
    yield from cases[step // 2 :: step][:count]
