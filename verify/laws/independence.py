"""Sequences of a batch, and heads, do not see each other: changing one leaves the others' outputs bit-equal, and a loss
on one gives the others' tokens gradient exactly zero."""

from collections.abc import Iterator

import numpy as np

from mixproof.verify.arithmetic import round_to
from mixproof.verify.case import Case, Domain, atlas
from mixproof.verify.laws.law import Law, axes_of, few, needs_own_calling
from mixproof.verify.subject import Subject
from mixproof.verify.verdict import Evidence


def check(subject: Subject, case: Case) -> list[Evidence]:
    inputs = subject.inputs(case)
    before = subject.run(inputs, case.dtype)
    roles = {x.name: x.role for x in (*subject.operator.inputs, *subject.operator.outputs)}
    evidence = []
    for axis, position in (("B", 0), ("H", 1)):
        n = case.size(axis)
        if n < 2:
            continue
        others = tuple(slice(None) if a != position else slice(0, n - 1) for a in range(2))
        changed = dict(inputs)
        for name, x in inputs.items():
            if roles[name] in ("token", "state"):
                y = x.copy()
                index = (slice(None),) * position + (n - 1,)
                dtype = case.dtype if roles[name] == "token" else case.parameters
                y[index] = round_to(y[index] * 3 + 1, dtype)
                changed[name] = y
        after = subject.run(changed, case.dtype)
        what = f"when the last {'sequence' if axis == 'B' else 'head'} changed"
        evidence += [
            Evidence(f"{m} {what}", after[m][others], before[m][others], 0.0, axes_of(subject, m)) for m in before
        ]
        if subject.differentiable:
            upstream = case.cotangents(before)
            for c in upstream.values():
                c[others] = 0
            grads = subject.gradients(inputs, upstream, case.dtype)
            evidence += [
                Evidence(
                    f"d{m} of the others, for a loss on the last",
                    g[others],
                    np.zeros_like(g[others]),
                    0.0,
                    axes_of(subject, m),
                )
                for m, g in grads.items()
                if roles[m] in ("token", "state")
            ]
    return evidence


def plan(domain: Domain, small: bool) -> Iterator[Case]:
    for case in few(atlas(domain, small), 2 if small else 3):
        yield case.resized(B=domain.fit("B", 2), H=domain.fit("H", 2))


def applies(subject: Subject) -> str:
    return needs_own_calling(subject) or ("" if {"B", "H"} & set(subject.layout) else "one sequence, one head")


LAW = Law("independence", "sequences and heads do not see each other", "bitwise", check, applies, plan, of="both")
