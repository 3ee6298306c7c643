"""A loss on rows before a position has gradient exactly zero for the tokens from that position on."""

from collections.abc import Iterator

import numpy as np

from mixproof.verify.case import Case, Domain, atlas
from mixproof.verify.laws.law import Law, axes_of, few, needs_causal, needs_gradients, token_inputs, with_causal
from mixproof.verify.subject import Subject
from mixproof.verify.verdict import Evidence


def check(subject: Subject, case: Case) -> list[Evidence]:
    case = with_causal(case)
    T, C = case.size("T"), subject.domain().chunk
    inputs = subject.inputs(case)
    cotangents = case.cotangents(subject.run(inputs, case.dtype))
    roles = {y.name: y.role for y in subject.operator.outputs}
    positions = [case.at] if case.at > 0 else sorted({C - 1, C + 1, T // 2} & set(range(1, T)))
    evidence = []
    for at in positions:
        upstream = {}
        for name, c in cotangents.items():
            upstream[name] = c.copy() if roles[name] == "token" else np.zeros_like(c)
            if roles[name] == "token":
                upstream[name][:, :, at:] = 0
        grads = subject.gradients(inputs, upstream, case.dtype)
        evidence += [
            Evidence(
                f"d{n} from {at} on, for a loss on rows before {at}",
                grads[n][:, :, at:],
                0 * grads[n][:, :, at:],
                0.0,
                axes_of(subject, n),
            )
            for n in token_inputs(subject, inputs)
            if n in grads
        ]
    return evidence


def applies(subject: Subject) -> str:
    return needs_gradients(subject) or needs_causal(subject)


def plan(domain: Domain, small: bool) -> Iterator[Case]:
    return few((c for c in atlas(domain, small) if c.size("T") > 1), 3 if small else 6)


LAW = Law(
    "gradient_causality",
    "no gradient from row i to j > i",
    "bitwise",
    check,
    applies,
    plan=plan,
    search=0.1,
    of="gradients",
)
