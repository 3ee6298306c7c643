"""Identities of the gradients that need no oracle value: sums that vanish, gamma (1 - gamma), centred upstreams.

    sum_k dalpha_k = 0                      rows of the softmax Jacobian sum to zero
    sum dx + sum dmu = 0                    translation, per coordinate and head
    <O, dO> = <v, dv>                       linear in v (no initial state)
    d gamma_k / d alpha_k = gamma_k (1 - gamma_k)        one token, upstream e_k
    upstream + constant over k: the same gradients       responsibilities only

Each sum may be off by the sum of its terms' tolerances."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from mixproof.verify.arithmetic import round_to
from mixproof.verify.case import Case, Domain, atlas
from mixproof.verify.laws.law import (
    Law,
    axes_of,
    completed,
    expect,
    expect_gradients,
    few,
    needs_gradients,
    vanishes,
)
from mixproof.verify.oracle import Expected
from mixproof.verify.subject import Subject
from mixproof.verify.verdict import Evidence


def check(subject: Subject, case: Case) -> list[Evidence]:
    case = dataclasses.replace(case, state="absent")
    operator, inputs = subject.operator, subject.inputs(case)
    outputs = subject.run(inputs, case.dtype)
    cotangents = case.cotangents({y.name: outputs[y.name] for y in operator.outputs if y.role == "token"})
    full = completed(cotangents, outputs)
    got = subject.gradients(inputs, cotangents, case.dtype)
    want = expect_gradients(subject, case, inputs, full, key="identities")
    evidence = [
        vanishes("sum_k dalpha_k", [(got["alpha"], want.bound["alpha"], (-1,))], ("H",), want.vacuous),
        vanishes(
            "sum of dx over tokens + sum of dmu over components",
            [
                (got[x.name], want.bound[x.name], (0, 2) if x.role == "token" else (1,))
                for x in operator.inputs
                if x.domain in ("routing", "mean")
            ],
            ("H", "R"),
            want.vacuous,
        ),
    ]
    if operator.linear_in:
        v, name = inputs[operator.linear_in], next(iter(cotangents))
        forward = expect(subject, case, inputs, key="stateless")
        left = outputs[name] * cotangents[name], forward.bound[name] * np.abs(cotangents[name])
        right = -got["v"] * v, want.bound["v"] * np.abs(v)
        terms = [(*left, (0, 2, 3)), (*right, (0, 2, 3))]
        evidence.append(vanishes("<O, dO> - <v, dv>", terms, ("H",), want.vacuous))
    else:
        evidence += _centred(subject, case, inputs, got, want, cotangents) + _diagonal(subject, case)
    return evidence


def _centred(subject: Subject, case: Case, inputs: dict, got: dict, want: Expected, cotangents: dict) -> list[Evidence]:
    name, G = next(iter(cotangents.items()))
    moved = round_to(G + np.round(G[..., :1]) + 1, case.dtype)
    G = round_to(moved - np.round(G[..., :1]) - 1, case.dtype)  # differs from `moved` by exactly a constant over k
    one, two = (subject.gradients(inputs, {name: g}, case.dtype) for g in (G, moved))
    wants = [expect_gradients(subject, case, inputs, {name: g}, key=f"centred {i}") for i, g in enumerate((G, moved))]
    return [
        Evidence(
            f"d{n} when the upstream gains a constant",
            two[n],
            one[n],
            wants[0].bound[n] + wants[1].bound[n] + np.abs(wants[0].value[n] - wants[1].value[n]),
            axes_of(subject, n),
            0.0,
            want.vacuous,
        )
        for n in two
    ]


def _diagonal(subject: Subject, case: Case) -> list[Evidence]:
    if case.size("T") == 0:
        return []
    case = case.resized(T=subject.domain().fit("T", 1), B=1)
    inputs = subject.inputs(case)
    ((name, gamma),) = subject.run(inputs, case.dtype).items()
    forward = expect(subject, case, inputs, key="one token").bound[name][0, :, 0]
    evidence = []
    for k in range(min(3, case.size("K"))):
        upstream = np.zeros_like(gamma)
        upstream[:, :, 0, k] = 1
        got = subject.gradients(inputs, {name: upstream}, case.dtype)["alpha"]
        want = expect_gradients(subject, case, inputs, {name: upstream}, key=f"e_{k}")
        g = gamma[0, :, 0]
        identity = g[:, k : k + 1] * ((np.arange(g.shape[1]) == k) - g)
        bound = want.bound["alpha"] + 2 * forward + 2 * forward[:, k : k + 1]
        evidence.append(Evidence(f"d gamma_{k} / d alpha", got, identity, bound, ("H", "K"), 0.0, want.vacuous))
    return evidence


def plan(domain: Domain, small: bool) -> Iterator[Case]:
    return few(atlas(domain, small), 3 if small else 5)


LAW = Law(
    "gradient_identities",
    "gradients satisfy their identities",
    "rounding",
    check,
    needs_gradients,
    plan=plan,
    optional=True,
    of="both",
)
