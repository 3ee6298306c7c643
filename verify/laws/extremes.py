"""Extreme values: logits out of the exponential's range, tiny denominators, decays of zero and one, outliers, offsets.
Outputs and gradients stay within their tolerances, hence finite."""

from collections.abc import Iterator

from mixproof.verify.case import Case, Domain, atlas
from mixproof.verify.laws import forward, vjp
from mixproof.verify.laws.law import Law
from mixproof.verify.subject import Subject
from mixproof.verify.verdict import Evidence


def check(subject: Subject, case: Case) -> list[Evidence]:
    evidence = forward.check(subject, case)
    return evidence + vjp.check(subject, case) if subject.differentiable else evidence


def plan(domain: Domain, small: bool) -> Iterator[Case]:
    return atlas(domain, small, extreme=True)


LAW = Law(
    "extremes",
    "extreme inputs: still within tolerance",
    "rounding",
    check,
    plan=plan,
    search=0.5,
    extreme=True,
    of="both",
)
