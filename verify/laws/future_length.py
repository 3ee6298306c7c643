"""The first rows of a long sequence equal those of its prefix alone: results do not depend on how much follows."""

from collections.abc import Iterator

from mixproof.verify.case import Case, Domain, atlas
from mixproof.verify.laws.law import Law, axes_of, expect, few, needs_causal, token_inputs, with_causal
from mixproof.verify.subject import Subject
from mixproof.verify.verdict import Evidence


def check(subject: Subject, case: Case) -> list[Evidence]:
    case = with_causal(case)
    T = case.size("T")
    inputs = subject.inputs(case)
    domain = subject.domain()
    evidence = []
    for at in sorted({domain.fit("T", n) for n in (1, T // 2, T - 1) if 0 < n < T}):
        if at >= T:
            continue
        short = dict(inputs) | {n: inputs[n][:, :, :at] for n in token_inputs(subject, inputs)}
        long, part = subject.run(inputs, case.dtype), subject.run(short, case.dtype)
        want = expect(subject, case, short, key=f"first {at}")
        for y in subject.operator.outputs:
            if y.role == "token" and y.name in part:
                label = f"{y.name} of the first {at} of {T} tokens"
                bound = 2 * want.bound[y.name]
                whole = long[y.name][:, :, :at]
                evidence.append(
                    Evidence(label, whole, part[y.name], bound, axes_of(subject, y.name), 0.0, want.vacuous)
                )
    return evidence


def plan(domain: Domain, small: bool) -> Iterator[Case]:
    return few((c for c in atlas(domain, small) if c.size("T") > 1), 2 if small else 4)


LAW = Law("future_length", "a prefix alone gives the same rows", "rounding", check, needs_causal, plan=plan)
