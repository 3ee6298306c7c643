"""The oracle is certified: float64 values and gradients lie within their float64 tolerance of an enclosure of the true
ones, computed from the same source in ball arithmetic (Arb; mpmath intervals where python-flint is missing)."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mixproof.verify import oracle
from mixproof.verify.arithmetic import natural
from mixproof.verify.case import Case, Domain
from mixproof.verify.laws.law import Law, as_tuple
from mixproof.verify.subject import Subject
from mixproof.verify.verdict import Evidence


def check(subject: Subject, case: Case) -> list[Evidence]:
    from mixproof.verify.numbers.certified import certified_error

    operator = subject.operator
    form = operator.form(subject.name.removeprefix("reference."))
    inputs = case.arrays()
    for x in operator.inputs:  # a default such as D^-1/2 is a float64 of its own: make it an input
        if x.domain == "scale" and inputs[x.name] is None:
            inputs[x.name] = 0.5
    arithmetic = natural("float64")
    evidence = []
    forward = oracle.forward(operator, inputs, arithmetic, "float64")
    for (b, h), head in oracle.heads(operator, inputs):
        result = form.function(**head)
        truth = _enclosed(form.function, head)
        for y, value, t in zip(operator.outputs, as_tuple(result), as_tuple(truth), strict=True):
            error = certified_error(value, t)
            evidence.append(
                Evidence(
                    f"{y.name} certified error",
                    error,
                    0 * error,
                    forward.bound[y.name][b, h],
                    y.axes,
                    vacuous=forward.vacuous,
                )
            )
    if form is operator.forms[0]:
        cotangents = case.cotangents(forward.value)
        backward = oracle.backward(operator, inputs, cotangents, arithmetic, "float64")
        got = oracle.plain_backward(operator, inputs, cotangents)
        totals: dict = {}
        for (b, h), head in oracle.heads(operator, inputs):
            upstream = {n: c[b, h] for n, c in cotangents.items()}
            grads = _enclosed(operator.vjp, {"cotangents": upstream, **head})
            for name in got:
                totals.setdefault(name, {})[b, h] = grads[name]
        for name, boxes in totals.items():
            parameter = operator.input(name).role == "parameter"
            for (b, h), box in boxes.items():
                if parameter and b == 0:
                    error = certified_error(got[name][h], box)
                    bound = backward.bound[name][h]
                elif not parameter:
                    error, bound = certified_error(got[name][b, h], box), backward.bound[name][b, h]
                else:
                    continue
                label, vacuous = f"d{name} certified error", forward.vacuous or backward.vacuous
                evidence.append(Evidence(label, error, np.zeros_like(error), bound, vacuous=vacuous))
    return evidence


def _enclosed(function: Callable[..., Any], inputs: dict[str, Any]) -> Any:
    """With more digits where all were lost: of a logit of 2^140 the usual ones leave no fraction to softmax."""
    from mixproof.verify.numbers.certified import PRECISION, enclose

    truth = enclose(function, inputs)
    parts = truth.values() if isinstance(truth, dict) else as_tuple(truth)
    known = all(np.all(np.isfinite(t.radius)) for t in parts)
    return truth if known else enclose(function, inputs, 4 * PRECISION)


def applies(subject: Subject) -> str:
    return "" if subject.name.startswith("reference.") else "about the reference's own forms"


def plan(domain: Domain, small: bool) -> Iterator[Case]:
    words = ["normal", *domain.regimes(extreme=True)]
    for i, regime in enumerate(words[: 4 if small else None]):
        sizes = {"B": 1, "H": 1, "T": 1 + (4 + i) % 6, "S": 3, "K": 1 + i % 3, "R": 2, "V": 2, "D": 2}
        state = ("absent", "random")[i % 2]
        yield domain.case(
            sizes, dtype="float64", parameters="float64", regime=regime, state=state, flag=i % 2 == 0, seed=i
        )


LAW = Law("certified", "the float64 oracle is certified by enclosures", "rounding", check, applies, plan, of="both")
