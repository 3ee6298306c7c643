"""Strides do not matter: each input, then each cotangent, with its outer or inner axes transposed in memory, sliced,
offset, or expanded."""

from collections.abc import Iterator

import numpy as np

from mixproof.verify.case import Case, Domain, atlas
from mixproof.verify.laws.law import Law, against, completed, expect_gradients, expected, few, needs_own_calling
from mixproof.verify.subject import Subject
from mixproof.verify.verdict import Evidence

KINDS = {"any": ("outer", "transposed", "sliced", "offset"), "last": ("outer", "offset")}


def check(subject: Subject, case: Case) -> list[Evidence]:
    inputs = subject.inputs(case)
    want = expected(subject, case)
    native = subject.prepare(inputs, case.dtype)
    strided, kinds = subject.framework.strided, KINDS[subject.declaration.strides]
    roles = {x.name: x.role for x in subject.operator.inputs}
    evidence: list[Evidence] = []
    for i, name in enumerate(n for n in native if roles[n] != "scalar"):
        for kind in kinds[i % 2 :: 2] if subject.slow else kinds:
            got = subject.restore(subject.invoke(native | {name: strided(native[name], kind)}))
            evidence += against(subject, got, want, f"{name} {kind}: ")
    if subject.differentiable:
        outputs = subject.run(inputs, case.dtype)
        upstream = case.cotangents(outputs)
        full = completed(upstream, want.value)
        gradients = expect_gradients(subject, case, inputs, full, key=f"layout {sorted(upstream)}")
        for kind in kinds:
            got = subject.gradients(
                inputs, upstream, case.dtype, lambda c, kind=kind: {n: strided(x, kind) for n, x in c.items()}
            )
            evidence += against(subject, got, gradients, f"cotangents {kind}: d")
        evidence += _expanded(subject, case, inputs, full)
    return evidence


def _expanded(subject: Subject, case: Case, inputs: dict, full: dict) -> list[Evidence]:
    """A cotangent of ones with stride 0, as the gradient of a sum has."""
    if subject.declaration.framework != "torch":
        return []
    returned = set(subject.run(inputs, case.dtype))
    ones = {n: np.ones_like(c) if n in returned else np.zeros_like(c) for n, c in full.items()}
    want = expect_gradients(subject, case, inputs, ones, key=f"ones {sorted(returned)}")

    def expand(cotangents: dict) -> dict:
        return {n: c.new_ones(()).expand(c.shape) for n, c in cotangents.items()}

    got = subject.gradients(inputs, {n: ones[n] for n in returned}, case.dtype, expand)
    return against(subject, got, want, "expanded cotangents: d")


def plan(domain: Domain, small: bool) -> Iterator[Case]:
    return few(atlas(domain, small), 1 if small else 2)


LAW = Law(
    "layout", "strides of inputs and cotangents do not matter", "rounding", check, needs_own_calling, plan, of="both"
)
