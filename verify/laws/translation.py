"""Moving all tokens and all means by one vector changes nothing: only differences matter."""

from collections.abc import Iterator

import numpy as np

from mixproof.verify.arithmetic import round_to
from mixproof.verify.case import Case, Domain, atlas
from mixproof.verify.laws.law import Law, few, related
from mixproof.verify.subject import Subject
from mixproof.verify.verdict import Evidence


def check(subject: Subject, case: Case) -> list[Evidence]:
    inputs = subject.inputs(case)
    shift = np.round(4 * case.generator("shift").normal(size=case.size("R")))
    changed = dict(inputs)
    for x in subject.operator.inputs:
        if x.domain in ("routing", "mean"):
            dtype = case.dtype if x.role == "token" else case.parameters
            changed[x.name] = round_to(inputs[x.name] + shift, dtype)
            # the unshifted run gets the values that the shifted ones round-trip to, so that the shift is exact
            inputs = inputs | {x.name: round_to(changed[x.name] - shift, dtype)}

    def same(name: str, value: np.ndarray) -> np.ndarray:
        return value

    return related(subject, case, inputs, changed, same, "after moving tokens and means")


def plan(domain: Domain, small: bool) -> Iterator[Case]:
    return few(atlas(domain, small), 2 if small else 5)


LAW = Law("translation", "only differences to the means matter", "rounding", check, plan=plan, optional=True)
