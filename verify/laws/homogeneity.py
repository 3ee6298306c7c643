"""Homogeneous in token inputs: four times an input gives 4^degree times the token outputs, bit for bit.

A power of two rounds nothing; four has a square root that is one too. Only where nothing underflows."""

from collections.abc import Iterator

from mixproof.verify.case import Case, Domain
from mixproof.verify.laws.law import Law, axes_of, few, scalable, stateless
from mixproof.verify.subject import Subject
from mixproof.verify.verdict import Evidence


def check(subject: Subject, case: Case) -> list[Evidence]:
    inputs = stateless(subject, case)
    before = subject.run(inputs, case.dtype)
    tokens = [y.name for y in subject.operator.outputs if y.role == "token"]
    evidence = []
    for x, degree in subject.operator.degrees.items():
        after = subject.run(inputs | {x: 4 * inputs[x]}, case.dtype)
        evidence += [
            Evidence(f"{y}(4 {x})", after[y], 4.0**degree * before[y], 0.0, axes_of(subject, y)) for y in tokens
        ]
    return evidence


def plan(domain: Domain, small: bool) -> Iterator[Case]:
    return few(scalable(domain, small), 3 if small else 5)


LAW = Law("homogeneity", "scales with its inputs as it must", "bitwise", check, plan=plan, optional=True)
