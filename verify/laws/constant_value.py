"""Constant values: every channel of the output is the same row weight times that channel's constant.

Bits may differ: matrix kernels sum the channels at the edge of a tile in another order."""

from collections.abc import Iterator

import numpy as np

from mixproof.verify.case import Case, Domain, atlas
from mixproof.verify.laws.law import Law, axes_of, expect, few, stateless
from mixproof.verify.subject import Subject
from mixproof.verify.verdict import Evidence


def check(subject: Subject, case: Case) -> list[Evidence]:
    v = subject.operator.linear_in or "v"
    inputs = stateless(subject, case)
    constants = 2.0 ** (np.arange(inputs[v].shape[-1]) % 3)
    inputs |= {v: np.broadcast_to(constants, inputs[v].shape)}
    got, want = subject.run(inputs, case.dtype), expect(subject, case, inputs, key="constant")
    evidence = []
    for y in subject.operator.outputs:
        if y.role == "token" and y.name in got:
            weights, bound = got[y.name] / constants, want.bound[y.name] / constants
            evidence.append(
                Evidence(
                    f"{y.name} / constant",
                    weights,
                    weights[..., :1] + 0 * weights,
                    bound + bound[..., :1],
                    axes_of(subject, y.name),
                    0.0,
                    want.vacuous,
                )
            )
    return evidence


def plan(domain: Domain, small: bool) -> Iterator[Case]:
    return few(atlas(domain, small), 2 if small else 4)


LAW = Law("constant_value", "constant v: all channels get one weight", "rounding", check, plan=plan, optional=True)
