"""Every element of the output is written: with allocations poisoned by NaN, results stay within tolerance."""

from collections.abc import Iterator

from mixproof.verify.case import Case, Domain, atlas
from mixproof.verify.laws.law import Law, against, expected, few, needs_own_calling
from mixproof.verify.subject import Subject
from mixproof.verify.verdict import Evidence


def check(subject: Subject, case: Case) -> list[Evidence]:
    native = subject.prepare(subject.inputs(case), case.dtype)
    with subject.framework.poisoned_allocation():
        result = subject.invoke(native)
    return against(subject, subject.restore(result), expected(subject, case), "poisoned allocation: ")


def plan(domain: Domain, small: bool) -> Iterator[Case]:
    """Every length: it is the ragged ones that stay unwritten."""
    return few(atlas(domain, small), 4 if small else 5)


LAW = Law("written", "every output element is written", "rounding", check, needs_own_calling, plan, core=True)
