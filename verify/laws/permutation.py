"""Not causal: shuffling the keys with their values changes nothing; shuffling the queries shuffles the rows."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from mixproof.verify.case import Case, Domain, atlas
from mixproof.verify.laws.law import Law, few, related
from mixproof.verify.subject import Subject
from mixproof.verify.verdict import Evidence


def check(subject: Subject, case: Case) -> list[Evidence]:
    case = dataclasses.replace(case, flag=False)
    inputs = subject.inputs(case)
    if subject.operator.is_causal(inputs):
        return []
    order = case.generator("order")
    keys, queries = order.permutation(inputs["k"].shape[2]), order.permutation(inputs["q"].shape[2])
    shuffled_keys = inputs | {n: inputs[n][:, :, keys] for n in ("k", "v")}
    shuffled_queries = inputs | {"q": inputs["q"][:, :, queries]}

    def same(name: str, x: np.ndarray) -> np.ndarray:
        return x

    def rows(name: str, x: np.ndarray) -> np.ndarray:
        return x[:, :, queries]

    return related(subject, case, inputs, shuffled_keys, same, "after shuffling keys and values") + related(
        subject, case, inputs, shuffled_queries, rows, "after shuffling queries"
    )


def applies(subject: Subject) -> str:
    return "causal" if subject.domain().causal_only else ""


def plan(domain: Domain, small: bool) -> Iterator[Case]:
    return few(atlas(domain, small), 2 if small else 5)


LAW = Law("permutation", "order of keys does not matter", "rounding", check, applies, plan=plan, optional=True)
