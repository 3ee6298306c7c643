"""Tokens with keys of zero, put before a sequence that starts from nothing, change nothing after them, whatever their
queries, values and decays are. What the padding itself reads is not compared: it may be 0 / 0."""

from collections.abc import Iterator

import numpy as np

from mixproof.verify.arithmetic import round_to
from mixproof.verify.case import Case, Domain, atlas
from mixproof.verify.laws.law import Law, axes_of, expect, few, stateless, token_inputs
from mixproof.verify.regimes import DEFAULTS
from mixproof.verify.subject import Subject
from mixproof.verify.verdict import Evidence


def check(subject: Subject, case: Case) -> list[Evidence]:
    inputs, domain, T = stateless(subject, case), subject.domain(), case.size("T")
    tokens = [y.name for y in subject.operator.outputs if y.role == "token"]
    plain, want = subject.run(inputs, case.dtype), expect(subject, case, inputs, key="stateless")
    evidence = []
    for width in sorted({domain.fit("T", T + n) - T for n in ((3,) if subject.slow else (1, domain.chunk))}):
        padded = dict(inputs)
        for name in token_inputs(subject, inputs):
            x, shape = inputs[name], (*inputs[name].shape[:2], width, *inputs[name].shape[3:])
            drawn = DEFAULTS[subject.operator.input(name).domain](case.generator(f"{name} before"), shape)
            padded[name] = np.concatenate([0 * drawn if name == "k" else round_to(drawn, case.dtype), x], axis=2)
        got, longer = subject.run(padded, case.dtype), expect(subject, case, padded, key=f"padded by {width}")
        # of 0 / 0 the padded oracle knows nothing; but what is added to later sums is zero, and that rounds nothing
        second = want if longer.vacuous else longer
        for y in got:
            rows = slice(width, None) if y in tokens else slice(None)
            bound = want.bound[y] + (second.bound[y] if second is want else second.bound[y][:, :, rows])
            label = f"{y} after {width} tokens with keys of zero"
            evidence.append(
                Evidence(label, got[y][:, :, rows], plain[y], bound, axes_of(subject, y), 0.0, want.vacuous)
            )
    return evidence


def plan(domain: Domain, small: bool) -> Iterator[Case]:
    return few(atlas(domain, small), 3 if small else 5)


LAW = Law("left_padding", "keys of zero before change nothing after", "rounding", check, plan=plan, optional=True)
