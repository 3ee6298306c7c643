"""Outputs before a position do not change, bit for bit, when later tokens do; nor when they become huge, as far as
they may: gates stay in [0, 1], and keys of norm one keep it.

A planted NaN is judged only for implementations that declare `isolates_nan`: 0 * NaN under a multiplicative mask is
honest arithmetic."""

from collections.abc import Iterator

import numpy as np

from mixproof.verify.arithmetic import round_to
from mixproof.verify.case import Case, Domain, atlas
from mixproof.verify.laws.law import Law, axes_of, few, needs_causal, token_inputs, with_causal
from mixproof.verify.regimes import BOUNDED, DEFAULTS
from mixproof.verify.subject import Subject
from mixproof.verify.verdict import Evidence


def check(subject: Subject, case: Case) -> list[Evidence]:
    case = with_causal(case)
    T, C = case.size("T"), subject.domain().chunk
    inputs = subject.inputs(case)
    before = subject.run(inputs, case.dtype)
    probes = {1, C + 1, T - 1} if subject.slow else {1, C - 1, C, C + 1, T // 2, T - 1}
    positions = [case.at] if case.at > 0 else sorted(probes & set(range(1, T)))
    tokens = [y.name for y in subject.operator.outputs if y.role == "token" and y.name in before]
    generator = case.generator("future")
    changes = {"changed": 1.0, "became huge": 2.0**12}
    if subject.declaration.isolates_nan:
        changes["became nan"] = np.nan
    evidence = []
    for at in positions:
        for what, size in changes.items():
            changed = dict(inputs)
            for name in token_inputs(subject, inputs):
                x, domain = inputs[name].copy(), subject.operator.input(name).domain
                shape = x[:, :, at:].shape
                bounded = domain in BOUNDED and np.isfinite(size)
                drawn = DEFAULTS[domain](generator, shape) if bounded else size * generator.normal(size=shape)
                x[:, :, at:] = round_to(drawn, case.dtype)
                changed[name] = x
            after = subject.run(changed, case.dtype)
            evidence += [
                Evidence(
                    f"{n} before {at} when tokens from {at} on {what}",
                    after[n][:, :, :at],
                    before[n][:, :, :at],
                    0.0,
                    axes_of(subject, n),
                )
                for n in tokens
            ]
    return evidence


def plan(domain: Domain, small: bool) -> Iterator[Case]:
    return few(atlas(domain, small), 5 if small else 7)


LAW = Law(
    "causality", "outputs at i depend on j <= i only", "bitwise", check, needs_causal, plan=plan, search=0.4, core=True
)
