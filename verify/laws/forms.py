"""Every chunk size computes the same function: each is within its tolerance of the oracle."""

import dataclasses
from collections.abc import Iterator

from mixproof.verify.case import Case, Domain, atlas
from mixproof.verify.laws.law import Law, against, expected, few
from mixproof.verify.subject import Subject
from mixproof.verify.verdict import Evidence


def check(subject: Subject, case: Case) -> list[Evidence]:
    T = case.size("T")
    some = {3, 16, T + 3} if subject.slow else {1, 2, 3, 16, max(1, T - 1), max(1, T), T + 3}
    sizes = subject.declaration.chunks or tuple(sorted(some))
    want = expected(subject, dataclasses.replace(case, chunk=0))
    inputs = subject.inputs(case)
    evidence = []
    for chunk in [case.chunk] if case.chunk else sizes:
        evidence += against(subject, subject.run(inputs, case.dtype, chunk), want, f"chunk {chunk}: ")
    return evidence


def applies(subject: Subject) -> str:
    return "" if subject.takes_chunk else "takes no chunk size"


def plan(domain: Domain, small: bool) -> Iterator[Case]:
    """Short sequences: the chunk sizes are ours to choose, so chunk edges lie anywhere."""
    for i, case in enumerate(few(atlas(domain, small), 2 if small else 4)):
        T = domain.fit("T", (19, 33, 7)[i % 3])
        yield case.resized(T=T, S=T)


LAW = Law("forms", "every chunk size gives the same result", "rounding", check, applies, plan, search=0.1)
