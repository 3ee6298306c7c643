"""Inputs are not written to, in forward or backward."""

from collections.abc import Iterator

from mixproof.verify.case import Case, Domain, atlas
from mixproof.verify.laws.law import Law, axes_of, few, needs_own_calling
from mixproof.verify.subject import Subject
from mixproof.verify.verdict import Evidence


def check(subject: Subject, case: Case) -> list[Evidence]:
    roles = {x.name: x.role for x in subject.operator.inputs}
    native = subject.prepare(subject.inputs(case), case.dtype)
    tensors = {n: x for n, x in native.items() if roles[n] != "scalar"}
    before = subject.restore(subject.framework.copies(tensors))
    outputs = subject.restore(subject.invoke(native))
    after = subject.restore(tensors)
    evidence = [Evidence(f"{n} after the call", after[n], before[n], 0.0, axes_of(subject, n)) for n in tensors]
    if subject.differentiable:
        kept: dict = {}

        def remember(cotangents: dict) -> dict:
            kept["before"], kept["tensors"] = subject.framework.copies(cotangents), cotangents
            return cotangents

        subject.gradients(subject.inputs(case), case.cotangents(outputs), case.dtype, remember)
        was, now = subject.restore(kept["before"]), subject.restore(kept["tensors"])
        evidence += [
            Evidence(f"cotangent of {n} after the call", now[n], was[n], 0.0, axes_of(subject, n)) for n in now
        ]
    return evidence


def plan(domain: Domain, small: bool) -> Iterator[Case]:
    return few(atlas(domain, small), 2 if small else 3)


LAW = Law("unchanged", "inputs are not written to", "bitwise", check, needs_own_calling, plan, of="both")
