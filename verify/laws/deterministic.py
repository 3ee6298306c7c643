"""The same inputs give the same bits, also after a call with other inputs and other scalars."""

from collections.abc import Iterator

from mixproof.verify.case import Case, Domain, atlas
from mixproof.verify.laws.law import Law, axes_of, few
from mixproof.verify.subject import Subject
from mixproof.verify.verdict import Evidence


def check(subject: Subject, case: Case) -> list[Evidence]:
    inputs = subject.inputs(case)
    first, again = subject.run(inputs, case.dtype), subject.run(inputs, case.dtype)
    other = dict(inputs)
    for x in subject.operator.inputs:
        if x.name in subject.takes and isinstance(inputs.get(x.name), float):
            other[x.name] = 2.0 * inputs[x.name]
        elif x.role == "token":
            other[x.name] = inputs[x.name][::-1] * 0.5
    subject.run(other, case.dtype)
    later = subject.run(inputs, case.dtype)
    return [
        Evidence(f"{n} {what}", run[n], first[n], 0.0, axes_of(subject, n))
        for what, run in (("of a second call", again), ("after a call with other inputs", later))
        for n in first
    ]


def plan(domain: Domain, small: bool) -> Iterator[Case]:
    return few(atlas(domain, small), 2 if small else 4)


LAW = Law("deterministic", "same inputs, same bits", "bitwise", check, plan=plan)
