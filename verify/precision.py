"""Which arithmetic an implementation really used, told from its errors.

The reference is evaluated in every arithmetic that an implementation may have used (verify/simulated.py), in each of
its forms and in several orders of summation. What the implementation returned, minus the oracle, is compared with what
each of those returned, minus the oracle, both in units of the tolerance of each element:

    size         root mean square. Units of formats differ by 2^3 or more; orders of summation and forms change an error
                 by less. An arithmetic is ruled out where the size is more than 2^(3/2) off those that the reference
                 has in it.
    correlation  Rounding an operand depends on the operand alone, not on the order in which products are added: errors
                 of two implementations with the same operands agree, whatever else they do. One arithmetic is told from
                 another if the implementation's errors agree with the first better than any evaluation of the
                 reference in the other does, by four standard errors. The correlation of n independent
                 pairs has an error of 1 / sqrt(n - 3) on Fisher's scale; n counts rows, because elements of a row have
                 operands in common.
    grid         Outputs that a shorter format holds, all of them, were rounded to it last.
    repetition   Order does matter where sums or every result are kept in a short format: such errors agree with
                 nothing. But they are drawn anew when the inputs change by a few units of that format; the error of a
                 wrong formula stays.

What has the same errors cannot be told apart, and is reported as such: operands of dot products in an operator that has
none; TF32 and float16, but for their range, which a second look at small values tells.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mixproof.verify.arithmetic import UNIT, Arithmetic
from mixproof.verify.errors import SubjectError
from mixproof.verify.simulated import Look, candidates, cases, covers, name_of
from mixproof.verify.subject import Subject

SURE, DRAWS = 4.0, 3  # standard errors; how often inputs are moved before an error counts as one that stays
WIDE = ("float64", "float32")
HALF = 2.0**-0.5  # the correlation of errors of which half, in squares, are common
NEAR = 2.0**1.5  # half of what lies between the units of two formats
TWINS = 1 - 2.0**-10  # the correlation of errors that have all but a thousandth in common
SMALL = 2.0**-18  # float16 has no normal number of that size
OUTCOMES = ("as declared", "wider", "narrower", "unclear", "unknown", "nothing")
Arrays = Mapping[str, Any]
Vector = np.ndarray


@dataclass(frozen=True)
class Finding:
    """`found` names the arithmetics that have errors like these: one if they are told apart, none if there is no such.

    `outcome` is one of OUTCOMES: as declared (or not told from it), wider or narrower than declared, unclear (several
    that are not told apart, on both sides), unknown (the errors are those of no arithmetic), nothing (no evidence).
    `correlation` is that of the errors with those of the first of `found`, `size` the ratio of theirs to its. `sure`:
    they share most of their errors with it, and with nothing that is not in `found`. `formats` are
    those of operands, sums and other results in the first of `found`."""

    implementation: str
    dtype: str
    declared: str
    outcome: str
    found: tuple[str, ...] = ()
    correlation: float = 0.0
    size: float = 0.0
    case: str = ""
    why: str = ""
    sure: bool = False
    formats: tuple[str, str, str] = ("", "", "")

    @property
    def words(self) -> str:
        """What was found: TF32 or float16 operands."""
        operands = [name.removesuffix(" operands") for name in self.found if name.endswith(" operands")]
        others = [name for name in self.found if not name.endswith(" operands")]
        return " or ".join([*others, *([" or ".join(operands) + " operands"] if operands else [])])

    def __str__(self) -> str:
        """One sentence."""
        told = f"{self.words} (correlation {self.correlation:.2f}, size {self.size:.2g})"
        narrower = told if self.sure else f"errors as large as those of {told}"
        return {
            "as declared": f"as declared: {told}"
            if len(self.found) == 1
            else f"as declared, or not told from it: {told}",
            "wider": f"wider than declared: {told}; declare it, and be judged more tightly",
            "narrower": f"narrower than declared: {narrower}",
            "unclear": f"not told apart: {told}",
            "unknown": f"unknown: {self.why}",
            "nothing": f"nothing to say: {self.why}",
        }[self.outcome]


def detect(subject: Subject, dtype: str, part: str = "outputs", brief: bool = False) -> Finding:
    """The arithmetic of an implementation at one input dtype, from its outputs or its "gradients".

    `brief` looks at one case and at the form of record alone, a tenth of a second: enough to recognise rounded
    operands, too little to rule anything out."""
    declared = subject.declaration.arithmetic(dtype)
    given = (str(subject), dtype)
    try:
        with np.errstate(all="ignore"):
            looks = [Look(subject, case, part) for case in cases(subject, dtype, brief)]
            looks = [look for look in looks if not look.want.vacuous]
            if not looks:
                return Finding(
                    *given, name_of(declared), "nothing", why="every case lies outside the declared arithmetic's domain"
                )
            finding = Comparison(looks, declared, brief).finding(*given)
            # inputs in float16 that small have few digits left
            if not brief and dtype != "float16" and {"TF32 operands", "float16 operands"} <= set(finding.found):
                small = [Look(subject, look.case, part, SMALL) for look in looks if look.scaled(SMALL) is not None]
                if small and not any(look.want.vacuous for look in small):
                    second = Comparison(small, declared, brief, only=finding.found).finding(*given)
                    finding = second if second.sure else finding
            return finding
    except SubjectError as error:
        return Finding(*given, name_of(declared), "nothing", why=str(error))


def detect_all(subject: Subject) -> list[Finding]:
    """A finding for each declared input dtype; those that this machine cannot run say so."""
    cannot = subject.unavailable()
    findings = []
    for dtype in subject.declaration.dtypes:
        trusted = not cannot and any(dtype == d for d, _ in subject.domain().dtypes)
        if not trusted:
            declared = name_of(subject.declaration.arithmetic(dtype))
            why = cannot or subject.withheld()
            findings.append(Finding(str(subject), dtype, declared, "nothing", why=why))
            continue
        with subject.framework.one_thread():
            findings.append(detect(subject, dtype))
    return findings


def redeclared(subject: Subject, finding: Finding) -> Subject:
    """The implementation as if it had declared the arithmetic that was found. Needs one that was found."""
    dot, accumulate, intermediate = finding.formats
    changed = copy.copy(subject)
    formats = {"dot": dot, "accumulate": accumulate, "intermediate": intermediate}
    changed.declaration = dataclasses.replace(subject.declaration, **formats)
    return changed


class Comparison:
    """The errors of an implementation in some cases, beside those of each candidate."""

    def __init__(self, looks: list[Look], declared: Arithmetic, brief: bool, only: tuple[str, ...] = ()) -> None:
        self.looks, self.declared, self.brief = looks, declared, brief
        got = [look.got() for look in looks]
        self.names = tuple(n for n in got[0] if n in looks[0].want.value and looks[0].want.value[n].size)
        self.error = np.concatenate([look.errors(x, self.names) for look, x in zip(looks, got, strict=True)])
        self.grid = frozenset.intersection(*(look.grid(x, self.names) for look, x in zip(looks, got, strict=True)))
        self.grids: dict[str, set[frozenset[str]]] = {}
        self.rows = sum(look.rows(self.names) for look in looks)
        self.size = rms(self.error)
        self.members: dict[str, list[Vector]] = {}
        self.orders: dict[str, list[int]] = {}  # of summation, that of each member
        self.variants = candidates(looks[0].case.dtype, declared)
        if only:
            self.variants = {n: v for n, v in self.variants.items() if n in only}
        forms = [f.name for f in looks[0].operator.forms][: 1 if brief or looks[0].part == "gradients" else None]
        if brief:  # what sums do is drawn anew in every order: it could not be recognised
            self.variants = {n: v for n, v in self.variants.items() if not n.endswith("accumulation")}
        for name in self.variants:
            self.grids[name] = set()
            self.orders[name] = []
            self.members[name] = self._members(name, self.variants[name][:1], forms[:1])
        if np.isfinite(self.size):
            for name in self._near(NEAR**3):  # the others are far off, whatever the form
                first, *rest = self.variants[name]
                self.members[name] += self._members(name, [first], forms[1:]) + self._members(name, rest, forms)
        self.members = {n: m for n, m in self.members.items() if m}
        self.directions = {n: np.stack([direction(x) for x in m]) for n, m in self.members.items()}
        self.along = (
            {n: d @ direction(self.error) for n, d in self.directions.items()} if np.isfinite(self.size) else {}
        )
        self.known: dict[tuple[str, str], np.ndarray] = {}

    def finding(self, implementation: str, dtype: str) -> Finding:
        """What the errors say."""
        case, declared = str(self.looks[0].case), name_of(self.declared)
        given = (implementation, dtype, declared)
        if not np.isfinite(self.size):
            why = "it returned what is not finite where the reference is"
            return Finding(*given, outcome="unknown", case=case, why=why)
        near = self._near(NEAR)
        within = bool(np.max(np.abs(self.error), initial=0.0) <= 1)
        if not within:  # no honest evaluation in what is declared, or wider, is off by more than its tolerance
            near = [a for a in near if not covers(self.variants[a][0], self.declared)]
        near = [a for a in near if self.grid in self.grids[a]] or near
        others = {a: [b for b in near if b != a and not self._twins(a, b)] for a in near}
        sharp = [a for a in near if self._correlated(a) and all(self._prefers(a, b) for b in others[a])]
        if sharp:
            best = max(sharp, key=self.correlation)
            found = [
                a for a in sharp if self._z(best) - self._z(a) < 2 * self._error or self._z(a) >= fisher(self._own(a))
            ]
        else:
            found = [a for a in near if self._plausible(a)]
            beaten = {b for a in found for b in found if a != b and self._prefers(a, b) and not self._prefers(b, a)}
            found = [a for a in found if a not in beaten]
            if not self.brief and found and not self._rounds(found):
                found = []
        wide = declared in WIDE and declared in self.members
        if not found and within and wide and not self.brief and self._rounds([declared]):
            found = [declared]  # less accurate than the reference in it, and rightly so: a Fourier transform
        if not found:
            why = f"its error, {self.size:.2g} of the tolerance in root mean square, is that of no arithmetic"
            return Finding(*given, outcome="unknown", case=case, why=why)
        found.sort(key=lambda a: -self.correlation(a))
        first = found[0]
        ratio = self.size / max(rms(self._closest(first)), 1e-300)
        outcome = self._outcome(found, declared)
        sure = bool(sharp) and self.correlation(first) >= HALF
        a = self.variants[first][0]
        formats = (a.dot, a.accumulate, a.intermediate)
        return Finding(*given, outcome, tuple(found), self.correlation(first), ratio, case, "", sure, formats)

    def correlation(self, name: str) -> float:
        """With the evaluation in that arithmetic with which it agrees best."""
        return float(np.max(self.along[name]))

    # --- evidence

    def _members(self, name: str, variants: list[Arithmetic], forms: list[str]) -> list[Vector]:
        """The errors of the reference, a vector for each variant, form and lane; those that overflow are left out."""
        found = []
        for arithmetic in variants:
            for form in forms:
                values = [look.simulated(arithmetic, form) for look in self.looks]
                errors = [look.errors(x, self.names) for look, x in zip(self.looks, values, strict=True)]
                for lane, member in enumerate(np.concatenate(errors, axis=1)):
                    if np.all(np.isfinite(member)):
                        found.append(member)
                        self.orders[name].append(lane)
                grids = (look.grid(x, self.names) for look, x in zip(self.looks, values, strict=True))
                self.grids[name].add(frozenset.intersection(*grids))
        return found

    def _near(self, factor: float) -> list[str]:
        """Candidates of that size; nothing is too accurate for the widest."""
        near, widest = [], next(iter(self.variants))
        for name, members in self.members.items():
            sizes = [rms(m) for m in members]
            if sizes and self.size <= max(sizes) * factor and (name == widest or self.size >= min(sizes) / factor):
                near.append(name)
        return near

    @property
    def _error(self) -> float:
        return 1 / np.sqrt(max(self.rows - 3, 1))

    def _z(self, name: str) -> float:
        return fisher(self.correlation(name))

    def _correlated(self, name: str) -> bool:
        return self._z(name) > SURE * self._error

    def _prefers(self, a: str, b: str) -> bool:
        """Whether the errors agree with arithmetic a better than an evaluation in b would."""
        return self._z(a) > fisher(np.max(self._agreement(a, b))) + SURE * self._error

    def _plausible(self, name: str) -> bool:
        """Whether they agree with it half as well as its own evaluations do with those in another order. Not
        asked of float32, where the rounding of outputs does not hide all else: too many ways lead there."""
        if name in WIDE and not self._twins(*WIDE):
            return True
        return self.correlation(name) >= self._own(name) / 2 - SURE * self._error

    def _own(self, name: str) -> float:
        """How well its evaluations agree with those in another order, at worst."""
        orders = np.array(self.orders[name])
        others = np.where(orders[:, None] != orders, self._agreement(name, name), -1)
        return float(np.min(np.max(others, axis=1))) if len(set(orders)) > 1 else 0.0

    def _twins(self, a: str, b: str) -> bool:
        """Whether there are evaluations in both that cannot be told apart."""
        return a in self.members and b in self.members and bool(np.max(self._agreement(a, b)) > TWINS)

    def _agreement(self, a: str, b: str) -> np.ndarray:
        """The correlations of the evaluations in one with those in another."""
        if (a, b) not in self.known:
            self.known[a, b] = self.directions[a] @ self.directions[b].T
        return self.known[a, b]

    def _closest(self, name: str) -> Vector:
        return self.members[name][int(np.argmax(self.along[name]))]

    def _rounds(self, found: list[str]) -> bool:
        """Whether the errors are drawn anew when the inputs change by a few units, as those of the candidates are."""
        if found[0] in WIDE and self.size <= max(map(rms, self.members[found[0]])):
            return True  # as accurate as an honest evaluation in those
        arithmetic = self.variants[found[0]][0]
        unit = max(UNIT[f] for f in (arithmetic.dot, arithmetic.accumulate, arithmetic.intermediate))
        form = self.looks[0].operator.forms[0].name

        def simulated(looks: list[Look]) -> Vector:
            return np.concatenate([x.errors(x.simulated(arithmetic, form), self.names)[0] for x in looks])

        one = simulated(self.looks)
        for draw in range(DRAWS):
            moved = [Look(x.subject, x.case, x.part, x.scale, 4 * unit, draw) for x in self.looks]
            error = np.concatenate([look.errors(look.got(), self.names) for look in moved])
            if cosine(self.error, error) <= (1 + max(cosine(one, simulated(moved)), 0)) / 2:
                return True
        return False

    def _outcome(self, found: list[str], declared: str) -> str:
        if declared in found:
            return "as declared"
        wider = {covers(self.variants[a][0], self.declared) for a in found}
        return "unclear" if len(wider) > 1 else "wider" if wider == {True} else "narrower"


def rms(x: Vector) -> float:
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0


def direction(x: Vector) -> Vector:
    """x / |x|, and no error at all as a direction of its own. Correlations are about zero: an error that is the same
    everywhere is no accident."""
    size = float(np.sqrt(np.dot(x, x)))
    return np.append(x / size if size else x, 0.0 if size else 1.0)


def cosine(x: Vector, y: Vector) -> float:
    """Their correlation."""
    return float(direction(x) @ direction(y))


def fisher(correlation: float) -> float:
    """Fisher's scale, on which a correlation of n pairs has the standard error 1 / sqrt(n - 3)."""
    return float(np.arctanh(np.clip(correlation, -1 + 1e-6, 1 - 1e-6)))
