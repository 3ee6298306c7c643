"""The same inputs give the same bits, also after a call with other inputs and other scalars; and that call itself, of
the same shapes, is within its tolerance: nothing compiled or cached for a shape may keep the scalars of the first."""

from collections.abc import Iterator

import numpy as np

from mixproof.verify.case import Case, Domain, atlas
from mixproof.verify.laws.law import Law, against, axes_of, expect, few, needs_own_calling
from mixproof.verify.subject import Subject
from mixproof.verify.verdict import Evidence


def check(subject: Subject, case: Case) -> list[Evidence]:
    inputs = subject.inputs(case)
    first, again = subject.run(inputs, case.dtype), subject.run(inputs, case.dtype)
    other = dict(inputs)
    for x in subject.operator.inputs:
        if x.role == "scalar" and x.domain not in ("flag", "count", "stride", "position") and x.name in subject.takes:
            other[x.name] = float(np.float32((inputs[x.name] or 0.0) + 0.25))  # no scale means that of the width
        elif x.role == "token":
            other[x.name] = inputs[x.name][::-1] * 0.5
    changed = subject.run(other, case.dtype)
    later = subject.run(inputs, case.dtype)
    evidence = against(subject, changed, expect(subject, case, other, key="other"), "with other inputs: ")
    return evidence + [
        Evidence(f"{n} {what}", run[n], first[n], 0.0, axes_of(subject, n))
        for what, run in (("of a second call", again), ("after a call with other inputs", later))
        for n in first
    ]


def plan(domain: Domain, small: bool) -> Iterator[Case]:
    return few(atlas(domain, small), 2 if small else 3)


LAW = Law("deterministic", "same inputs, same bits", "bitwise", check, needs_own_calling, plan)
