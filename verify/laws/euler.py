"""Euler's identity: sum <x, dx> = degree sum <O, dO> for a token input x in which the token outputs are homogeneous.

Token by token where row n of x enters row n of the outputs alone (queries, and what a feature map takes). Each sum may
be off by the sum of its terms' tolerances."""

from collections.abc import Iterator

import numpy as np

from mixproof.verify.case import Case, Domain
from mixproof.verify.laws.law import (
    Law,
    completed,
    expect,
    expect_gradients,
    few,
    needs_gradients,
    scalable,
    stateless,
    vanishes,
)
from mixproof.verify.subject import Subject
from mixproof.verify.verdict import Evidence

BY_TOKEN = ("q", "x")


def check(subject: Subject, case: Case) -> list[Evidence]:
    inputs = stateless(subject, case)
    outputs = subject.run(inputs, case.dtype)
    cotangents = case.cotangents({y.name: outputs[y.name] for y in subject.operator.outputs if y.role == "token"})
    forward = expect(subject, case, inputs, key="stateless")
    full = completed(cotangents, forward.value)
    got = subject.gradients(inputs, cotangents, case.dtype)
    want = expect_gradients(subject, case, inputs, full, key="stateless")
    evidence = []
    for x, degree in subject.operator.degrees.items():
        axes = ("B", "H", "T") if x in BY_TOKEN else ("B", "H")
        terms = [(got[x] * inputs[x], want.bound[x] * np.abs(inputs[x]))]
        terms += [
            (-degree * outputs[y] * dy, abs(degree) * forward.bound[y] * np.abs(dy)) for y, dy in cotangents.items()
        ]
        summed = [(value, bound, tuple(range(len(axes), value.ndim))) for value, bound in terms]
        label = f"<{x}, d{x}> - {degree} <outputs, upstream>"
        evidence.append(vanishes(label, summed, axes, want.vacuous or forward.vacuous))
    return evidence


def plan(domain: Domain, small: bool) -> Iterator[Case]:
    return few(scalable(domain, small), 3 if small else 5)


LAW = Law("euler", "<x, dx> = degree <O, dO>", "rounding", check, needs_gradients, plan, optional=True, of="both")
