"""What autograd keeps for backward grows linearly with the number of tokens: counted bytes, not a clock.

For lengths n, 2n, 4n of whole chunks the second growth is twice the first; a quadratic implementation gives more."""

from collections.abc import Iterator

import numpy as np

from mixproof.verify.case import Case, Domain
from mixproof.verify.errors import SubjectError
from mixproof.verify.laws.law import Law, needs_gradients
from mixproof.verify.subject import Subject
from mixproof.verify.verdict import Evidence


def check(subject: Subject, case: Case) -> list[Evidence]:
    n = 2 * subject.domain().chunk
    counts = []
    for T in (n, 2 * n, 4 * n):
        inputs = subject.inputs(case.resized(T=T, S=T))
        native = subject.prepare(inputs, case.dtype)
        names = [x.name for x in subject.operator.inputs if x.differentiable and x.name in native]
        try:
            counts.append(subject.framework.saved_bytes(subject, native, names))
        except SubjectError as error:
            if "saved tensor hooks" not in str(error):
                raise
            return []  # inside torch.func.grad they are not allowed: nothing can be counted
    excess = np.maximum((counts[2] - counts[1]) - 2 * (counts[1] - counts[0]), 0)
    label = f"bytes saved at {n}, {2 * n}, {4 * n} tokens: {counts[0]}, {counts[1]}, {counts[2]}; beyond linear"
    return [Evidence(label, np.asarray(float(excess)), np.zeros(()), 0.0)]


def applies(subject: Subject) -> str:
    if subject.declaration.framework != "torch":
        return "not a torch implementation"
    cost = subject.declaration.cost or subject.operator.cost
    return needs_gradients(subject) or ("" if cost == "linear" else f"{cost} by declaration")


def plan(domain: Domain, small: bool) -> Iterator[Case]:
    dtype, parameters = domain.dtypes[0]
    sizes = {"B": 1, "H": 2, "T": 1, "S": 1, "K": 5, "R": 3, "V": 4, "D": 3}
    yield domain.case(sizes, dtype=dtype, parameters=parameters)


LAW = Law(
    "saved_memory", "memory kept for backward is linear in tokens", "inequality", check, applies, plan, of="gradients"
)
