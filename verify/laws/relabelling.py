"""Renumbering components, experts, or channels, in all inputs and states together, changes no output but its labels."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from mixproof.verify.case import Case, Domain, atlas
from mixproof.verify.laws.law import Law, axes_of, few, related
from mixproof.verify.subject import Subject
from mixproof.verify.verdict import Evidence

WHAT = {"K": "key channels", "X": "experts", "V": "value channels"}


def check(subject: Subject, case: Case) -> list[Evidence]:
    inputs, sizes = _untied(subject, case), dict(case.sizes)
    mixture = any(x.domain == "mean" for x in subject.operator.inputs)
    what = {"K": "components"} if mixture else WHAT
    fixed = {a for x in subject.operator.inputs if x.name in inputs and x.name not in subject.takes for a in x.axes}
    evidence = []
    for axis in (a for a in what if a in sizes and a not in fixed):
        labels = case.generator(f"labels {axis}").permutation(sizes[axis])

        def renumber(name: str, x: Any, axis: str = axis, labels: np.ndarray = labels) -> Any:
            axes = axes_of(subject, name)
            return np.take(x, labels, axis=axes.index(axis)) if axis in axes else x

        changed = {n: renumber(n, x) for n, x in inputs.items()}
        evidence += related(subject, case, inputs, changed, renumber, f"after renumbering {what[axis]}")
    return evidence


def _untied(subject: Subject, case: Case) -> dict[str, Any]:
    """The inputs, without equal logits of one token: which of them are selected depends on their labels."""
    inputs = subject.inputs(case)
    for x in subject.operator.inputs:
        if x.domain == "logit_token":
            logits = np.sort(inputs[x.name])
            tied = np.any(logits[..., 1:] == logits[..., :-1], axis=-1, keepdims=True)
            inputs[x.name] = np.where(tied, np.arange(logits.shape[-1]), inputs[x.name])
    return inputs


def plan(domain: Domain, small: bool) -> Iterator[Case]:
    return few(atlas(domain, small), 2 if small else 4)


LAW = Law("relabelling", "numbering does not matter", "rounding", check, plan=plan, optional=True)
