"""Floating-point operations of matrix products grow linearly with the number of tokens: counted, not timed.

For lengths n, 2n, 4n of whole chunks the second growth is twice the first; a quadratic implementation gives more."""

from collections.abc import Iterator

import numpy as np

from mixproof.verify.case import Case, Domain
from mixproof.verify.laws.law import Law
from mixproof.verify.subject import Subject
from mixproof.verify.verdict import Evidence


def check(subject: Subject, case: Case) -> list[Evidence]:
    n = 2 * subject.domain().chunk
    counts = []
    for T in (n, n, 2 * n, 4 * n):  # what is set up once is in the first count only
        inputs = subject.inputs(case.resized(T=T, S=T))
        native = subject.prepare(inputs, case.dtype)
        counts.append(subject.framework.flops(subject, native))
    counts = counts[1:]
    excess = np.maximum((counts[2] - counts[1]) - 2 * (counts[1] - counts[0]), 0)
    label = f"operations at {n}, {2 * n}, {4 * n} tokens: {counts[0]}, {counts[1]}, {counts[2]}; beyond linear"
    return [Evidence(label, np.asarray(float(excess)), np.zeros(()), 0.0)]


def applies(subject: Subject) -> str:
    if subject.declaration.framework != "torch":
        return "not a torch implementation"
    cost = subject.declaration.cost or subject.operator.cost
    if "triton" in subject.declaration.requires:
        return "a Triton kernel's operations are not counted by torch"
    return "" if cost == "linear" else f"{cost} by declaration"


def plan(domain: Domain, small: bool) -> Iterator[Case]:
    dtype, parameters = domain.dtypes[0]
    sizes = {"B": 1, "H": 2, "T": 1, "S": 1, "K": 5, "R": 3, "V": 4, "D": 3}
    yield domain.case(sizes, dtype=dtype, parameters=parameters)


LAW = Law("operations", "operations are linear in tokens", "inequality", check, applies, plan)
