"""What is wrong, in one sentence: what came, what was expected. The judge attaches it to a broken law's verdict."""

from __future__ import annotations

import numpy as np

from mixproof.verify.arithmetic import Arithmetic
from mixproof.verify.case import Case
from mixproof.verify.laws.law import Law
from mixproof.verify.precision import detect, redeclared
from mixproof.verify.subject import Subject
from mixproof.verify.verdict import Evidence, Where

PARTS = {"forward": "outputs", "vjp": "gradients"}  # laws that compare with the oracle, and what they look at


def because(law: Law, evidence: Evidence, arithmetic: Arithmetic) -> str:
    """Why this evidence breaks the law. The numbers are those of its worst element."""
    worst = Where.worst(evidence)
    if not np.isfinite(worst.got) or not np.isfinite(worst.want):
        return f"{worst.place} is {worst.got:.3g}; the reference is {worst.want:.3g}"
    if not evidence.bitwise:
        words = _words(arithmetic)
        return f"an honest evaluation in {words} stays within {worst.bound:.2g}, whatever its order of summation"
    got, want = np.asarray(evidence.got, dtype=float), np.asarray(evidence.want, dtype=float)
    moved = got != want
    count = f"{np.count_nonzero(moved)} of {moved.size} elements"
    size = float(np.max(np.abs(got - want)))
    if law.name == "deterministic":
        return f"same case, same inputs, two outputs (differ in {count}): not deterministic"
    if law.name == "causality":
        return f"{evidence.label}: moved by {size:.2g} ({count}); a causal operator must be bit-equal"
    if law.name == "gradient_causality":
        return f"{evidence.label}: up to {size:.2g} ({count}); a causal operator has exactly zero"
    if law.exactness == "bitwise":
        return f"{count} differ, by up to {size:.2g}; they must be bit-equal"
    return f"{worst.got:.6g} where at most {worst.want:.6g} is allowed"


def precision(subject: Subject, law: Law, evidence: Evidence, case: Case) -> str:
    """Where a law is broken by rounding in a narrower arithmetic than the declared one: which, as a second half of the
    sentence. Nothing if that is not sure, or if the law is broken in that arithmetic too."""
    worst = Where.worst(evidence)
    if law.name not in PARTS or evidence.bitwise or not np.isfinite(worst.got) or not np.isfinite(worst.want):
        return ""
    found = detect(subject, case.dtype, PARTS[law.name], brief=True)
    if not found.sure or found.outcome != "narrower":
        return ""
    with np.errstate(all="ignore"):
        again = law.check(redeclared(subject, found), case)
    if any(e.ratio > 1 for e in again):
        return ""
    return f"; its error is that of {found.words} (correlation {found.correlation:.2f})"


def _words(arithmetic: Arithmetic) -> str:
    """float32; or what differs from the dtype of the inputs: bfloat16 (float32 sums, float32 elsewhere)."""
    kinds = {"products": arithmetic.dot, "sums": arithmetic.accumulate, "elsewhere": arithmetic.intermediate}
    other = ", ".join(f"{kind} {what}" for what, kind in kinds.items() if kind != arithmetic.inputs)
    return f"{arithmetic.inputs} ({other})" if other else arithmetic.inputs
