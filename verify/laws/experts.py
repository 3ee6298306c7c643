"""What a router cannot change: a constant added to all logits of a token does nothing; and experts that decay alike are
one memory, whatever their weights.

The second only where a weight enters once, in reading or in writing, for it is their sum that is one: selected experts
both write and read with it."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from mixproof.verify.arithmetic import round_to
from mixproof.verify.case import Case, Domain, atlas
from mixproof.verify.laws.law import Law, axes_of, expect, few, stateless
from mixproof.verify.subject import Subject
from mixproof.verify.verdict import Evidence


def check(subject: Subject, case: Case) -> list[Evidence]:
    operator, inputs = subject.operator, stateless(subject, case)
    router = next(x for x in operator.inputs if x.domain in ("router", "logit_token"))
    logits, dtype = inputs[router.name], case.dtype if router.role == "token" else case.parameters
    constants = np.round(4 * case.generator("constants").normal(size=(*logits.shape[:-1], 1)))
    moved = round_to(logits + constants, dtype)
    # one from the other by an exact addition, so that ties of the logits stay ties
    pair = [inputs | {router.name: x} for x in (round_to(moved - constants, dtype), moved)]
    evidence = _same(subject, case, pair, "when all logits of a token moved")
    if not any(x.domain == "count" for x in operator.inputs):
        decays = next(x.name for x in operator.inputs if x.domain == "decay")
        alike = inputs | {decays: np.broadcast_to(inputs[decays][..., :1], inputs[decays].shape)}
        others = round_to(2 * case.generator("router").normal(size=logits.shape), dtype)
        pair = [alike, alike | {router.name: others}]
        evidence += _same(subject, case, pair, "of another router, where all experts decay alike")
    return evidence


def _same(subject: Subject, case: Case, pair: list[dict[str, Any]], label: str) -> list[Evidence]:
    """Each within its own tolerance of one value."""
    one, two = (subject.run(x, case.dtype) for x in pair)
    wants = [expect(subject, case, x, key=f"{label} {i}") for i, x in enumerate(pair)]
    return [
        Evidence(
            f"{y.name} {label}",
            two[y.name],
            one[y.name],
            wants[0].bound[y.name] + wants[1].bound[y.name],
            axes_of(subject, y.name),
            0.0,
            wants[0].vacuous or wants[1].vacuous,
        )
        for y in subject.operator.outputs
        if y.role == "token"
    ]


def plan(domain: Domain, small: bool) -> Iterator[Case]:
    return few(atlas(domain, small), 3 if small else 5)


LAW = Law("experts", "logits shift; experts alike are one", "rounding", check, plan=plan, optional=True)
