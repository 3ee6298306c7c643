"""A decay of zero forgets: from the token on that has it, outputs and final state do not change, bit for bit, when
earlier tokens and the initial state do. Quotients of cumulative products, or logarithms, cannot do this."""

from collections.abc import Iterator

import numpy as np

from mixproof.verify.arithmetic import round_to
from mixproof.verify.case import Case, Domain, atlas
from mixproof.verify.laws.law import Law, axes_of, few, token_inputs
from mixproof.verify.subject import Subject
from mixproof.verify.verdict import Evidence


def check(subject: Subject, case: Case) -> list[Evidence]:
    T, C = case.size("T"), subject.domain().chunk
    inputs, tokens = subject.inputs(case), [y.name for y in subject.operator.outputs if y.role == "token"]
    decays = [x.name for x in subject.operator.inputs if x.domain == "signed_decay" and x.role == "token"]
    probes = {C, T // 2} if subject.slow else {0, 1, C - 1, C, C + 1, T // 2, T - 1}
    generator = case.generator("past")
    evidence = []
    for at in [case.at] if 0 <= case.at < T else sorted(probes & set(range(T))):
        before = {n: x.copy() if n in decays else x for n, x in inputs.items()}
        for name in decays:
            before[name][:, :, at] = 0
        states = [x.name for x in subject.operator.state if x.name in inputs]
        after = {n: round_to(3 * inputs[n] + 1, case.parameters) for n in states}
        for name in token_inputs(subject, inputs):
            after[name] = before[name].copy()
            after[name][:, :, :at] = round_to(generator.normal(size=after[name][:, :, :at].shape), case.dtype)
        one, two = subject.run(before, case.dtype), subject.run(before | after, case.dtype)
        for y in one:
            seen = slice(at, None) if y in tokens else slice(None)
            label = f"{y} from {at} on, where the decay is zero," if y in tokens else f"{y}, the decay of {at} zero,"
            want = np.where(np.isfinite(one[y]), one[y], 0)[:, :, seen]  # two NaN are no agreement
            evidence.append(
                Evidence(f"{label} when the past changed", two[y][:, :, seen], want, 0.0, axes_of(subject, y))
            )
    return evidence


def plan(domain: Domain, small: bool) -> Iterator[Case]:
    return few(atlas(domain, small), 3 if small else 6)


LAW = Law("reset", "a decay of zero forgets what was before", "bitwise", check, plan=plan, optional=True)
