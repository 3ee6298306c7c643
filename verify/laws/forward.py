"""Every output, final states included, is within its tolerance of the oracle."""

from mixproof.verify.case import Case
from mixproof.verify.laws.law import Law, against, expected
from mixproof.verify.subject import Subject
from mixproof.verify.verdict import Evidence


def check(subject: Subject, case: Case) -> list[Evidence]:
    return against(subject, subject.run(subject.inputs(case), case.dtype), expected(subject, case))


LAW = Law("forward", "outputs = reference, up to rounding", "rounding", check, search=1.0, core=True)
