"""The same mutants, on the same inputs, under the checks that people use today and under the gate's tolerances.

A mutant whose forward is wrong is compared by its outputs, one whose gradients are wrong by its gradients. It computes
in float32: inputs are rounded to the format, and what comes out is. What laws beyond comparing see is not counted here.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import numpy as np

from mixproof.verify import oracle
from mixproof.verify.arithmetic import round_to
from mixproof.verify.case import Case, Domain, atlas
from mixproof.verify.errors import SubjectError
from mixproof.verify.laws.law import against, completed
from mixproof.verify.oracle import Expected
from mixproof.verify.power import baseline
from mixproof.verify.power.rivals import FORMATS, GRADCHECK, JUDGES, Rivals, gradcheck, jacobians
from mixproof.verify.report.power_figures import INPUTS
from mixproof.verify.report.power_figures import JUDGE as OURS
from mixproof.verify.subject import Subject
from mixproof.verify.subjects.mutants import Mutant, mutants, untouched

SHARED = (("float32", "tf32"), ("bfloat16",), ("float16",))  # formats that meet the same inputs, hence one run of each
# sizes that users test: widths of 16 and a few heads, groups, experts, taps
SIZES = {"B": 1, "H": 2, "T": 64, "S": 64, "P": 64} | dict.fromkeys(("K", "R", "V", "D", "E", "F", "L"), 16)
SIZES |= {"N": 4, "X": 4, "G": 2, "M": 2, "J": 2, "W": 4, "Q": 4}
COUNTS = ("mutants", "cases", "bounds", "vacuous")
NAMED = 20  # survivors named in a row
REFUSED = (SubjectError, ArithmeticError, LookupError, ValueError)  # a mutant need not be defined everywhere
Row = dict[str, Any]
Arrays = dict[str, np.ndarray]


def duel(operator: str, profile: str = "ci") -> list[Row]:
    """A row for each format and input set: {"format", "inputs", "mutants", "cases", "bounds", "vacuous", "judges"},
    and for each judge {"killed", "apart", "survivors"}. `killed`: mutants that it rejects in some case; `apart`: those
    that it rejects where it accepts the reference, run as the mutant is; `survivors`: names of the first that it does
    not kill. Of the `bounds` that we had to form, those `vacuous` decide nothing: the inputs are outside the format's
    domain.

    gradcheck has inputs of its own, in float64: it stands in the rows of float32. A wrong forward has the gradients
    that belong to it, by autograd, and it accepts those."""
    # the short atlas; half precision meets one seed, and every third case of the atlas; gradcheck meets every sixth
    brief = profile == "ci"
    honest = untouched(operator).subject()
    subjects = [(m, m.subject()) for m in mutants(operator)]
    wrong = [(m, s) for m, s in subjects if not s.unavailable()]
    rows = []
    for formats in SHARED:
        domain = dataclasses.replace(honest.domain(), dtypes=((FORMATS[formats[0]].inputs, "float32"),))
        for inputs in INPUTS:
            cases = list(_cases(domain, inputs, brief))
            if brief and formats is not SHARED[0]:
                cases = cases[:: 2 if inputs == "users" else 3]
            rows += _rows(honest, wrong, cases, formats, inputs)
    for row, inputs in zip((r for r in rows if r["format"] == "float32"), INPUTS, strict=True):
        cases = list(_tiny_cases(honest.domain(), inputs))
        row["judges"][GRADCHECK] = _gradchecked(honest, wrong, cases[:: 6 if brief and inputs == "atlas" else 1])
    return rows


def total(rows: Iterable[Row]) -> list[Row]:
    """The rows of several operators, added up by format and input set."""
    sums: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = row["format"], row["inputs"]
        if key not in sums:
            sums[key] = {"format": key[0], "inputs": key[1]} | dict.fromkeys(COUNTS, 0) | {"judges": {}}
        whole = sums[key]
        for count in COUNTS:
            whole[count] += row[count]
        for judge, found in row["judges"].items():
            known = whole["judges"].setdefault(judge, {"killed": 0, "apart": 0, "survivors": []})
            for count in ("killed", "apart"):
                known[count] += found[count]
            known["survivors"] = (known["survivors"] + found["survivors"])[:NAMED]
    return list(sums.values())


# --- cases -----------------------------------------------------------------------------------------------------------


def _cases(domain: Domain, inputs: str, small: bool) -> Iterator[Case]:
    ((dtype, parameters),) = domain.dtypes
    if inputs == "atlas":
        # the longest first: most mutants die there, and are done with
        plan = [*atlas(domain, small), *atlas(domain, small, extreme=True)]
        yield from sorted(plan, key=lambda c: -c.size("T"))
        return
    for flag, seed in itertools.product(_flags(domain), (0, 1)):
        yield domain.case(SIZES, dtype=dtype, parameters=parameters, state="random", flag=flag, seed=seed)


def _tiny_cases(domain: Domain, inputs: str) -> Iterator[Case]:
    """What gradcheck, whose work grows with the square of a size, can be given."""
    regimes = ["normal"] if inputs == "users" else [w for x in (False, True) for w in domain.regimes(extreme=x)]
    sizes = dict.fromkeys(SIZES, 2) | {"B": 1, "H": 1, "T": 16, "S": 16}
    if inputs == "atlas":
        sizes |= {"T": domain.chunk + 1, "S": domain.chunk + 1}
    for i, regime in enumerate(regimes):
        for flag in _flags(domain) if inputs == "users" else [i % 2 == 0]:
            yield domain.case(
                sizes, dtype="float64", parameters="float64", regime=regime, state="random", flag=flag, seed=i
            )


def _flags(domain: Domain) -> list[bool]:
    """False, and True where the operator has a flag."""
    return sorted({domain.case(SIZES, flag=flag).flag for flag in (False, True)})


# --- one operator, some formats --------------------------------------------------------------------------------------


class Bench:
    """Outputs or gradients of one case: the reference's, and who rejects those of another."""

    def __init__(self, honest: Subject, case: Case, part: str) -> None:
        self.honest, self.case, self.part = honest, case, part
        self.operator = honest.operator
        self.inputs = honest.inputs(case)
        self.tokens = {x.name for x in (*self.operator.inputs, *self.operator.outputs) if x.role == "token"}
        self.accepted: dict[str, set[str]] = {}
        self.rejected: dict[str, set[str]] = {}
        self.rivals: dict[tuple[str, bool], dict[str, Rivals]] = {}
        self.bounds: dict[str, Expected] = {}

    @cached_property
    def outputs(self) -> Arrays:
        return self.honest.run(self.inputs, "float64")

    @cached_property
    def cotangents(self) -> Arrays:
        return self.case.cotangents(self.outputs)

    @cached_property
    def want(self) -> Arrays:
        if self.part == "outputs":
            return self.outputs
        return self.honest.gradients(self.inputs, self.cotangents, "float64")

    def run(self, subject: Subject) -> Arrays:
        """What it computes in float32, rounded to the format. Nothing if it raises."""
        try:
            with np.errstate(all="ignore"):
                if self.part == "outputs":
                    got = subject.run(self.inputs, "float32")
                else:
                    got = subject.gradients(self.inputs, self.cotangents, "float32")
        except REFUSED:
            return {}
        return {n: round_to(x, self.case.dtype) if n in self.tokens else x for n, x in got.items()}

    def dtype(self, name: str) -> str:
        return self.case.dtype if name in self.tokens else self.case.parameters

    def rejecting(self, format: str, got: Arrays, judges: set[str]) -> set[str]:
        """Those of the judges that reject a tensor."""
        found: set[str] = set()
        if judges - {OURS}:
            for name, rivals in self._rivals(format, JUDGES[-1] in judges).items():
                if name in got:
                    found |= {judge for judge, rejected in rivals.rejections(got[name]).items() if rejected}
        if OURS in judges:
            evidence = against(self.honest, got, self._expected(format))
            if any(e.decided and e.ratio > 1 for e in evidence):
                found.add(OURS)
        return found & judges

    def unjust(self, format: str, judges: set[str]) -> set[str]:
        """Those of the judges that reject the reference itself."""
        accepted, rejected = self.accepted.setdefault(format, set()), self.rejected.setdefault(format, set())
        if new := judges - accepted - rejected:
            rejected |= self.rejecting(format, self.twin, new)
            accepted |= new - rejected
        return judges & rejected

    @cached_property
    def twin(self) -> Arrays:
        return self.run(self.honest)

    def _rivals(self, format: str, based: bool) -> dict[str, Rivals]:
        if (format, based) not in self.rivals:
            base: Arrays = {}
            if based and self.part == "outputs":
                base = baseline.outputs(self.operator, self.inputs, format)
            elif based:
                full = completed(self.cotangents, self.outputs)
                base = baseline.gradients(self.operator, self.inputs, full, format)
            self.rivals[format, based] = {n: Rivals(x, base.get(n), self.dtype(n)) for n, x in self.want.items()}
        return self.rivals[format, based]

    def _expected(self, format: str) -> Expected:
        if format not in self.bounds:
            declaration = dataclasses.replace(self.honest.declaration, dot=FORMATS[format].dot)
            arithmetic, parameters = declaration.arithmetic(self.case.dtype), self.case.parameters
            with np.errstate(all="ignore"):
                if self.part == "outputs":
                    want = oracle.forward(self.operator, self.inputs, arithmetic, parameters)
                else:
                    full = completed(self.cotangents, self.outputs)
                    want = oracle.backward(self.operator, self.inputs, full, arithmetic, parameters)
            self.bounds[format] = want
        return self.bounds[format]


def _rows(
    honest: Subject, wrong: list[tuple[Mutant, Subject]], cases: list[Case], formats: tuple[str, ...], inputs: str
) -> list[Row]:
    """A mutant is shown case after case to those who have not told it apart so far."""
    pending = {f: {m.name: {*JUDGES, OURS} for m, _ in wrong} for f in formats}
    killed: dict[str, set[tuple[str, str]]] = {f: set() for f in formats}
    reasons: dict[str, list[str]] = {f: [] for f in formats}
    for case, part in itertools.product(cases, ("outputs", "gradients")):
        bench = Bench(honest, case, part)
        for mutant, subject in wrong:
            waiting = {f: pending[f][mutant.name] for f in formats if pending[f][mutant.name]}
            if not waiting or part not in _parts(mutant, subject):
                continue
            if not (got := bench.run(subject)):
                continue
            same = _equal(got, bench.twin)
            for f, judges in waiting.items():
                # where it gives the reference's bits, nobody can tell it apart; we are not asked, which saves a bound
                rejecting = bench.unjust(f, judges - {OURS}) if same else bench.rejecting(f, got, judges)
                killed[f] |= {(judge, mutant.name) for judge in rejecting}
                if rejecting and not same:
                    judges -= rejecting - bench.unjust(f, rejecting)
        for f, bound in bench.bounds.items():
            reasons[f].append(bound.vacuous)
    names = [m.name for m, _ in wrong]
    return [
        {
            "format": f,
            "inputs": inputs,
            "mutants": len(names),
            "cases": len(cases),
            "bounds": len(reasons[f]),
            "vacuous": sum(map(bool, reasons[f])),
            "judges": {
                judge: _count(
                    honest.operator.name,
                    names,
                    {n for j, n in killed[f] if j == judge},
                    {n for n in names if judge not in pending[f][n]},
                )
                for judge in (*JUDGES, OURS)
            },
        }
        for f in formats
    ]


def _parts(mutant: Mutant, subject: Subject) -> list[str]:
    """What of it is wrong, as far as one can see."""
    outputs = mutant.forward is not None or mutant.batched is not None
    gradients = mutant.vjp is not None or (mutant.batched is not None and subject.differentiable)
    return ["outputs"] * outputs + ["gradients"] * gradients


def _count(operator: str, names: list[str], killed: set[str], apart: set[str]) -> Row:
    survivors = [f"{operator}/{n}" for n in names if n not in killed]
    return {"killed": len(killed), "apart": len(apart), "survivors": survivors[:NAMED]}


def _gradchecked(honest: Subject, wrong: list[tuple[Mutant, Subject]], cases: Iterable[Case]) -> Row:
    killed: set[str] = set()
    apart: set[str] = set()
    for case in cases:
        known = unjust = None
        for mutant, subject in wrong:
            if mutant.name in apart or "gradients" not in _parts(mutant, subject):
                continue
            known = jacobians(honest, case) if known is None else known
            try:
                rejected = gradcheck(subject, case, known if _same_values(honest, subject, case) else None)
            except REFUSED:
                continue
            if rejected:
                killed.add(mutant.name)
                unjust = gradcheck(honest, case, known) if unjust is None else unjust
                if not unjust:
                    apart.add(mutant.name)
    return _count(honest.operator.name, [m.name for m, _ in wrong], killed, apart)


def _same_values(honest: Subject, subject: Subject, case: Case) -> bool:
    with np.errstate(all="ignore"):
        one, two = (s.run(s.inputs(case), case.dtype) for s in (honest, subject))
    return _equal(one, two)


def _equal(one: Arrays, two: Arrays) -> bool:
    return one.keys() == two.keys() and all(np.array_equal(one[n], two[n], equal_nan=True) for n in one)
