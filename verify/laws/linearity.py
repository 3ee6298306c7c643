"""Linear in the values: f(v + w) = f(v) + f(w), and f(8 v) = 8 f(v) bit for bit (a power of two rounds nothing)."""

from collections.abc import Iterator

import numpy as np

from mixproof.verify.arithmetic import round_to
from mixproof.verify.case import Case, Domain, atlas
from mixproof.verify.laws.law import Law, axes_of, expect, few, stateless
from mixproof.verify.subject import Subject
from mixproof.verify.verdict import Evidence


def check(subject: Subject, case: Case) -> list[Evidence]:
    v = subject.operator.linear_in or "v"
    inputs = stateless(subject, case)
    values = inputs[v]
    other = round_to(case.generator("other").normal(size=values.shape), case.dtype)
    both = round_to(values + other, case.dtype)
    runs = [subject.run(inputs | {v: x}, case.dtype) for x in (values, other, both, 8 * values)]
    pairs = {"values": values, "other": other, "both": both}
    wants = [expect(subject, case, inputs | {v: x}, key=f"linear {n}") for n, x in pairs.items()]
    vacuous = next((w.vacuous for w in wants if w.vacuous), "")
    evidence = []
    for y in subject.operator.outputs:
        n = y.name
        if n not in runs[0] or (y.role == "state" and not _linear(subject, n)):
            continue
        slack = np.abs(wants[2].value[n] - wants[0].value[n] - wants[1].value[n])
        bound = wants[0].bound[n] + wants[1].bound[n] + wants[2].bound[n] + slack
        axes = axes_of(subject, n)
        evidence.append(Evidence(f"{n}(v + w)", runs[2][n], runs[0][n] + runs[1][n], bound, axes, 0.0, vacuous))
        if case.regime == "normal" and case.dtype != "float16":  # where nothing underflows
            evidence.append(Evidence(f"{n}(8 v)", runs[3][n], 8 * runs[0][n], 0.0, axes, 0.0, vacuous))
    return evidence


def _linear(subject: Subject, state: str) -> bool:
    """A state that has the value dimension is linear in the values; a mass does not depend on them."""
    value_axis = subject.operator.input(subject.operator.linear_in or "v").axes[-1]
    before = next((x for x in subject.operator.state if x.carries == state), None)
    return before is not None and before.domain != "mass" and value_axis in before.axes


def plan(domain: Domain, small: bool) -> Iterator[Case]:
    return few(atlas(domain, small), 3 if small else 5)


LAW = Law("linearity", "linear in v", "rounding", check, plan=plan, optional=True)
