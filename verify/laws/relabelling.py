"""Renumbering the components, means, variances, priors and states together, changes no output but their own labels."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from mixproof.verify.case import Case, Domain, atlas
from mixproof.verify.laws.law import Law, few, related
from mixproof.verify.subject import Subject
from mixproof.verify.verdict import Evidence


def check(subject: Subject, case: Case) -> list[Evidence]:
    inputs = subject.inputs(case)
    labels = case.generator("labels").permutation(case.size("K"))
    axes = {x.name: (*(("H",) if x.role == "parameter" else ("B", "H")), *x.axes) for x in subject.operator.inputs}
    axes |= {y.name: ("B", "H", *y.axes) for y in subject.operator.outputs}

    def renumber(name: str, x: Any) -> Any:
        return np.take(x, labels, axis=axes[name].index("K")) if "K" in axes[name] else x

    changed = {n: renumber(n, x) for n, x in inputs.items()}
    return related(subject, case, inputs, changed, renumber, "after renumbering components")


def plan(domain: Domain, small: bool) -> Iterator[Case]:
    return few(atlas(domain, small), 2 if small else 8)


LAW = Law("relabelling", "the numbering of components does not matter", "rounding", check, plan=plan, optional=True)
