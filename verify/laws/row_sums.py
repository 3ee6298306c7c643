"""Rows of weights sum to what they must: responsibilities to one, attention weights to one or D / (D + epsilon).

Responsibilities are normalised by dividing, so their sum is one within the roundings of that sum alone, however wrong
the logits: exp(s - logsumexp(s)) breaks this. Mixing operators are run on v = 1."""

from collections.abc import Iterator

import numpy as np

from mixproof.verify.arithmetic import UNDERFLOW, UNIT
from mixproof.verify.case import Case, Domain, atlas
from mixproof.verify.laws.law import Law, against, arithmetic, expect, few, stateless
from mixproof.verify.subject import Subject
from mixproof.verify.verdict import Evidence


def check(subject: Subject, case: Case) -> list[Evidence]:
    inputs = stateless(subject, case)
    v = subject.operator.linear_in
    if v:
        ones = inputs | {v: np.ones_like(inputs[v])}
        got, want = subject.run(ones, case.dtype), expect(subject, case, ones, key="ones")
        tokens = {y.name: got[y.name] for y in subject.operator.outputs if y.role == "token"}
        over = [
            Evidence(
                f"max({n}, 1)",
                np.maximum(x, 1),
                np.ones_like(x),
                want.bound[n],
                ("B", "H", "T", "V"),
                0.0,
                want.vacuous,
            )
            for n, x in tokens.items()
        ]
        return against(subject, tokens, want, "v = 1: ") + over
    a = arithmetic(subject, case)
    evidence = []
    for name, gamma in subject.run(inputs, case.dtype).items():
        K = gamma.shape[-1]
        total = np.sum(gamma, axis=-1)
        bound = (
            (K + 2) * UNIT[a.accumulate] + 2 * a.unit + UNIT[a.output] + K * UNDERFLOW[a.output] + K * UNIT["float64"]
        )
        evidence.append(Evidence(f"sum_k {name}", total, np.ones_like(total), 1.01 * bound, ("B", "H", "T")))
    return evidence


def plan(domain: Domain, small: bool) -> Iterator[Case]:
    yield from few(atlas(domain, small), 3 if small else 6)
    for case in atlas(domain, small, extreme=True):
        if case.regime == "far":  # logits large enough for exp(s - logsumexp(s)) to show, and more than one of them
            yield case.resized(**{a: max(n, 3) for a, n in case.sizes if a in ("T", "S", "K")})


LAW = Law(
    "row_sums", "weights sum to one, or D / (D + epsilon)", "rounding", check, plan=plan, optional=True, search=0.1
)
