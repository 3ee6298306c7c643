"""Every gradient equals the closed-form one, for random cotangents of all outputs, the final state's included; and for
the cotangent of the final state alone, which many backward passes drop."""

from mixproof.verify.case import Case
from mixproof.verify.laws.law import Law, against, completed, expect_gradients, expected, needs_gradients
from mixproof.verify.subject import Subject
from mixproof.verify.verdict import Evidence


def check(subject: Subject, case: Case) -> list[Evidence]:
    inputs = subject.inputs(case)
    outputs = subject.run(inputs, case.dtype)
    cotangents = case.cotangents(outputs)
    states = {y.name for y in subject.operator.outputs if y.role == "state"} & set(outputs)
    upstreams = {"d": cotangents}
    if states and case.seed % 3 == 0:
        upstreams["state-only d"] = {n: c if n in states else 0 * c for n, c in cotangents.items()}
    shapes = expected(subject, case).value
    evidence = []
    for prefix, upstream in upstreams.items():
        full = completed(upstream, shapes)
        want = expect_gradients(subject, case, inputs, full, key=f"{prefix} {sorted(upstream)}")
        got = subject.gradients(inputs, upstream, case.dtype)
        evidence += against(subject, got, want, prefix)
    return evidence


LAW = Law(
    "vjp",
    "gradients = closed form, up to rounding",
    "rounding",
    check,
    needs_gradients,
    search=0.5,
    core=True,
    of="gradients",
)
