"""Outputs lie in the convex hull of the visible values and zero; responsibilities in [0, 1]. Channel by channel."""

from collections.abc import Iterator

import numpy as np

from mixproof.verify.case import Case, Domain, atlas
from mixproof.verify.laws.law import Law, arithmetic, axes_of, expect, few, stateless
from mixproof.verify.subject import Subject
from mixproof.verify.verdict import Evidence


def check(subject: Subject, case: Case) -> list[Evidence]:
    inputs = stateless(subject, case)
    got = subject.run(inputs, case.dtype)
    name = next(y.name for y in subject.operator.outputs if y.role == "token")
    out, v = got[name], subject.operator.linear_in
    axes = axes_of(subject, name)
    if not v:
        bound = 4 * arithmetic(subject, case).unit
        return [Evidence(f"{name} outside [0, 1]", np.clip(out, 0, 1), out, bound, axes)]
    values = inputs[v]
    if subject.operator.is_causal(inputs):
        low, high = np.minimum.accumulate(values, axis=2), np.maximum.accumulate(values, axis=2)
    else:
        low, high = (f(values, axis=2, keepdims=True, initial=0) for f in (np.min, np.max))
    inside = np.clip(out, np.minimum(low, 0), np.maximum(high, 0))
    # the exact output lies inside; the computed one may be off by its tolerance
    want = expect(subject, case, inputs, key="stateless")
    return [Evidence(f"{name} against the hull", out, inside, want.bound[name], axes, 0.0, want.vacuous)]


def plan(domain: Domain, small: bool) -> Iterator[Case]:
    return few(atlas(domain, small), 2 if small else 5)


LAW = Law(
    "hull", "outputs lie in the hull of the visible values and zero", "inequality", check, plan=plan, optional=True
)
