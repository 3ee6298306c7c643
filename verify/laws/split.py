"""Computing a prefix, then the rest from its final state, equals computing the whole: at every split, the empty ones
included. The handed-over state may be off by its tolerance, which the oracle propagates."""

from collections.abc import Iterator

import numpy as np

from mixproof.verify.case import Case, Domain, atlas
from mixproof.verify.laws.law import Law, axes_of, expect, few, needs_state, token_inputs, with_causal
from mixproof.verify.subject import Subject
from mixproof.verify.verdict import Evidence

EVERY = 8  # sequences up to this length are split everywhere, longer ones around chunk edges


def check(subject: Subject, case: Case) -> list[Evidence]:
    case = with_causal(case)
    T, C = case.size("T"), subject.domain().chunk
    domain = subject.domain()
    inputs = subject.inputs(case)
    tokens = token_inputs(subject, inputs)
    every = inputs[subject.operator.aligned] if subject.operator.aligned else 1
    allowed = [n for n in range(0, T + 1, every) if domain.fit("T", n) == n and domain.fit("T", T - n) == T - n]
    if case.at >= 0:
        splits = [case.at] if case.at in allowed else []
    elif T <= EVERY and not subject.slow:
        splits = allowed
    else:
        edges = {T // 2, C, T} if subject.slow else {0, 1, C - 1, C, C + 1, T // 2, T - 1, T}
        splits = [n for n in allowed if n in edges]
    evidence = []
    for at in splits:
        first = {n: x[:, :, :at] if n in tokens else x for n, x in inputs.items()}
        one = subject.run(first, case.dtype)
        want_one = expect(subject, case, first, key=f"until {at}")
        states = {x.name: x.carries for x in subject.operator.state if x.carries}
        rest = {n: x[:, :, at:] if n in tokens else x for n, x in inputs.items()}
        if position := subject.operator.position:
            rest[position] = rest[position] + at
        handed = rest | {x: one[y] for x, y in states.items()}
        two = subject.run(handed, case.dtype)
        exact = rest | {x: want_one.value[y] for x, y in states.items()}
        errors = {x: want_one.bound[y] for x, y in states.items()}
        want_two = expect(subject, case, exact, errors, key=f"from {at}")
        for y in subject.operator.outputs:
            got, want, bound = two[y.name], want_two.value[y.name], want_two.bound[y.name]
            if y.role == "token":
                got = np.concatenate([one[y.name], got], axis=2)
                want = np.concatenate([want_one.value[y.name], want], axis=2)
                bound = np.concatenate([want_one.bound[y.name], bound], axis=2)
            vacuous = want_one.vacuous or want_two.vacuous
            evidence.append(
                Evidence(f"{y.name} split at {at}", got, want, bound, axes_of(subject, y.name), 0.0, vacuous)
            )
    return evidence


def plan(domain: Domain, small: bool) -> Iterator[Case]:
    chosen = list(few(atlas(domain, small), 3 if small else 4))
    short = [c.resized(T=domain.fit("T", min(c.size("T"), 7))) for c in chosen[: 1 if small else 2]]
    yield from short + chosen


LAW = Law(
    "split",
    "prefix, then the rest from its state = the whole",
    "rounding",
    check,
    needs_state,
    plan,
    search=0.1,
    core=True,
)
