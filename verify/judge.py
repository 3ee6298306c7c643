"""The judge: searches one cell for a case that breaks its law, shrinks it, decides, names what the output equals."""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from mixproof.verify import plan
from mixproof.verify.because import because, precision
from mixproof.verify.case import Case, Domain, cases, smaller
from mixproof.verify.errors import SubjectError, UsageError
from mixproof.verify.laws import law as find_law
from mixproof.verify.laws.law import Law, few
from mixproof.verify.subject import Subject
from mixproof.verify.verdict import Evidence, Verdict, Where

SHRINK_SECONDS = 10.0
UNPLANNED = 2  # cases of a core law in the profile smoke, of an operator without a plan


@dataclass(frozen=True)
class Profile:
    """How long to look. `examples`: random cases for a law of search weight one; `small`: the short atlas only, and
    of a slow implementation only the core laws; `slow_cases`: how many of the atlas's cases a slow one gets for a core
    law, and half as many, no random ones and none longer than a chunk and a token, for another, if it is `brief`;
    `planned`: the laws and cases of the budget plan alone (a slow one: its core laws); for an operator without one,
    core laws on two cases; `all_threads`: as many as the framework likes, where one is several times faster on small
    cases."""

    name: str
    examples: int
    small: bool = False
    slow_cases: int = 3
    planned: bool = False
    derandomise: bool = True
    all_threads: bool = False
    brief: bool = True


PROFILES = {
    "smoke": Profile("smoke", 0, small=True, slow_cases=1, planned=True),
    "short": Profile("short", 0, small=True, slow_cases=2),
    "ci": Profile("ci", 4),
    "nightly": Profile("nightly", 400, slow_cases=1000, derandomise=False, all_threads=True, brief=False),
}


@dataclass(frozen=True)
class Outcome:
    """One law on one case: the worst evidence, or what the implementation did instead of answering."""

    case: Case
    worst: Evidence | None = None
    message: str = ""
    vacuous: int = 0
    decided: bool = True

    @property
    def ratio(self) -> float:
        return float("inf") if self.message else self.worst.ratio if self.worst else 0.0

    @property
    def broken(self) -> bool:
        return bool(self.message) or (self.ratio > 1 and self.decided)


def judge(subject: Subject, law_name: str, profile: Profile, seed: int = 0) -> Verdict:
    """The verdict on one cell. Never raises for what an implementation does; status "error" is a bug of ours."""
    start = time.perf_counter()
    law = find_law(law_name)
    cell = f"{subject}/{law.name}"
    try:
        verdict = _judge(subject, law, profile, seed, cell)
    except UsageError:
        raise
    except Exception:
        verdict = Verdict(cell, "error", why=traceback.format_exc(limit=-6))
    withheld = "" if verdict.status in ("not run", "not applicable", "error") else subject.withheld()
    seconds = time.perf_counter() - start
    return dataclasses.replace(verdict, statement=law.statement, withheld=withheld, seconds=seconds)


def evaluate(subject: Subject, law: Law, case: Case) -> Outcome:
    """One law on one case."""
    try:
        # vacuous readings overflow on purpose; implementations under test may warn as they like
        with np.errstate(all="ignore"):
            evidence = law.check(subject, case)
    except SubjectError as error:
        return Outcome(case, message=str(error))
    live = [e for e in evidence if not e.vacuous]
    worst = max(live, key=lambda e: e.ratio, default=None)
    decided = worst is None or worst.ratio <= 1 or any(e.ratio > 1 and e.decided for e in live)
    if worst is not None and worst.ratio > 1 and not worst.decided:
        worst = max((e for e in live if e.decided), key=lambda e: e.ratio, default=worst)
    return Outcome(case, worst, "", len(evidence) - len(live), decided)


def _judge(subject: Subject, law: Law, profile: Profile, seed: int, cell: str) -> Verdict:
    if verdict := _set_aside(subject, law, cell):
        return verdict
    if profile.small and subject.slow and not law.core:
        return Verdict(cell, "not run", why="a slow implementation: profiles ci and nightly judge this law")
    if profile.planned and law.name not in plan.laws_for(subject.operator.name):
        return Verdict(cell, "not run", why="profiles short, ci and nightly judge this law")
    with nullcontext() if profile.all_threads else subject.framework.one_thread():
        return _searched(subject, law, profile, seed, cell)


def _searched(subject: Subject, law: Law, profile: Profile, seed: int, cell: str) -> Verdict:
    domain = subject.domain()
    outcomes: list[Outcome] = []
    broken = None
    enough = _most(subject, law, profile)
    for case in _cases(subject, law, domain, profile):
        if enough and sum(o.worst is not None for o in outcomes) >= enough:
            break
        outcome = evaluate(subject, law, dataclasses.replace(case, seed=case.seed + seed))
        outcomes.append(outcome)
        if outcome.broken:
            broken = outcome
            break
    if broken is None and law.search and profile.examples and not _briefly(subject, law, profile):
        count = max(1, int(law.search * profile.examples / (4 if subject.slow else 1)))
        found = search(subject, law, domain, count, profile.derandomise, outcomes)
        broken = found
    tried = len(outcomes)
    compared = [o for o in outcomes if o.worst is not None]
    vacuous = sum(o.vacuous for o in outcomes)
    if broken is not None:
        return _failure(subject, law, domain, shrink(subject, law, domain, broken), cell, tried, vacuous)
    if not compared:
        why = "every case lies outside the declared arithmetic's domain" if vacuous else "no case applies"
        return Verdict(cell, "undecided" if vacuous else "not run", why=why, cases=tried, vacuous=vacuous)
    if any(not o.decided for o in outcomes):
        why = "the oracle's own error straddles the bound; judge in a wider dtype, or certify with python-flint"
        return Verdict(cell, "undecided", 1.0, why=why, cases=tried, vacuous=vacuous)
    worst = max(compared, key=lambda o: o.ratio)
    bitwise = all(o.worst.bitwise for o in compared if o.worst is not None)
    return Verdict(cell, "pass", worst.ratio, bitwise, cases=tried, vacuous=vacuous, case=str(worst.case))


def _set_aside(subject: Subject, law: Law, cell: str) -> Verdict | None:
    """The verdict on a cell that is not judged: this machine cannot, or the law does not apply anywhere."""
    if reason := subject.unavailable():
        return Verdict(cell, "not run", why=reason)
    if reason := law.reason_not(subject):
        return Verdict(cell, "not applicable", why=reason)
    return None if subject.domain().dtypes else Verdict(cell, "not run", why=subject.withheld())


def _cases(subject: Subject, law: Law, domain: Domain, profile: Profile) -> Iterator[Case]:
    slow = subject.slow
    cases = law.plan(domain, profile.small or slow)
    seen = set()
    brief = _briefly(subject, law, profile)
    most = _most(subject, law, profile)
    if most:  # spread over the plan; the others stand by for those that compare nothing
        listed = list(cases)
        cases = [*(_planned(subject, law, profile) or few(listed, most)), *listed]
    for case in cases:
        if brief or (slow and profile.small):  # one chunk and a token more
            longest = domain.chunk + 1
            case = case.resized(**{a: domain.fit(a, min(n, longest)) for a, n in case.sizes if a in ("T", "S")})
        if slow and profile.small:
            case = case.resized(B=1, H=min(case.size("H"), 2))
        if case not in seen:
            seen.add(case)
            yield case


def _most(subject: Subject, law: Law, profile: Profile) -> int | None:
    """How many cases of the atlas the implementation gets for this law; None: all."""
    if subject.slow:
        return max(1, profile.slow_cases // (2 if _briefly(subject, law, profile) else 1))
    return (len(_planned(subject, law, profile)) or UNPLANNED) if profile.planned else None


def _planned(subject: Subject, law: Law, profile: Profile) -> list[Case]:
    """The cases of the budget plan for this law, where the profile keeps to it."""
    pairs = enumerate(plan.planned(subject.operator.name) if profile.planned else [])
    return [plan.fitted(case, subject.domain(), turn) for turn, (name, case) in pairs if name == law.name]


def _briefly(subject: Subject, law: Law, profile: Profile) -> bool:
    return subject.slow and profile.brief and not law.core


def search(
    subject: Subject, law: Law, domain: Domain, count: int, derandomise: bool, outcomes: list[Outcome]
) -> Outcome | None:
    """Random cases, drawn by Hypothesis and steered towards a large error / bound. Returns the first broken one."""
    from hypothesis import HealthCheck, Phase, given, settings, target

    found: list[Outcome] = []

    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        derandomize=derandomise,
        phases=(Phase.generate, Phase.target),
        suppress_health_check=list(HealthCheck),  # type: ignore[arg-type]
    )
    @given(cases(domain, subject.slow, law.extreme))
    def run(case: Case) -> None:
        if found:
            return
        outcome = evaluate(subject, law, case)
        outcomes.append(outcome)
        if outcome.broken:
            found.append(outcome)
        elif outcome.worst is not None:
            target(float(np.log10(max(outcome.ratio, 1e-12))))

    run()
    return found[0] if found else None


def shrink(subject: Subject, law: Law, domain: Domain, broken: Outcome) -> Outcome:
    """Walk to simpler cases while the law stays broken, within a time limit."""
    deadline = time.perf_counter() + SHRINK_SECONDS
    moved = True
    while moved and time.perf_counter() < deadline:
        moved = False
        for case in smaller(broken.case, domain):
            if time.perf_counter() > deadline:
                break
            outcome = evaluate(subject, law, case)
            if outcome.broken:
                broken, moved = outcome, True
                break
    return broken


def _failure(
    subject: Subject, law: Law, domain: Domain, broken: Outcome, cell: str, tried: int, vacuous: int
) -> Verdict:
    where = "" if broken.worst is None else str(Where.worst(broken.worst))
    why = broken.message
    if broken.worst is not None and not why:
        why = because(law, broken.worst, subject.declaration.arithmetic(broken.case.dtype))
        why += precision(subject, law, broken.worst, broken.case)
    return Verdict(
        cell,
        "fail",
        broken.ratio,
        broken.worst is not None and broken.worst.bitwise,
        cases=tried,
        vacuous=vacuous,
        case=str(broken.case),
        context=_context(subject, law, domain, broken),
        where=where,
        equals="" if broken.message else diagnose(subject, law, broken.case),
        why=why,
        replay=f"mixproof replay {subject.origin + ' ' if subject.origin else ''}'{cell} {broken.case}'",
    )


def _context(subject: Subject, law: Law, domain: Domain, broken: Outcome) -> str:
    """Which neighbour passes, and which sizes do not matter: about ten more evaluations."""
    case, notes, free = broken.case, [], []

    def still(changed: Case) -> bool:
        return evaluate(subject, law, changed).broken

    deadline = time.perf_counter() + SHRINK_SECONDS
    for axis, n in case.sizes:
        if time.perf_counter() > deadline:
            break
        if axis == case.operator.token_axes[0]:
            below = domain.fit(axis, n - 1) if n else n
            changed = {axis: below} | ({"S": below} if case.flag and "S" in dict(case.sizes) else {})
            if below < n and not still(case.resized(**changed)):
                notes.append(f"{axis}={below} passes")
        elif axis not in case.operator.token_axes:
            others = {domain.fit(axis, m) for m in (n + 1, n + 3)} - {n}
            if others and all(still(case.resized(**{axis: m})) for m in others):
                free.append(axis)
    if free:
        notes.append(f"{', '.join(free)} any value")
    return "; ".join(notes)


def diagnose(subject: Subject, law: Law, case: Case) -> str:
    """The mutant of the reference that the output equals within its bound, if there is one."""
    from mixproof.verify.subjects.mutants import explain

    try:
        with np.errstate(all="ignore"):
            return explain(subject, law.name, case)
    except SubjectError:
        return ""


def check(function: Callable[..., object], profile: str = "ci", seed: int = 0) -> list[Verdict]:
    """Judge a function declared with `@implements`, from Python. Raises UsageError for one that is not."""
    from mixproof.verify.cells import laws_for
    from mixproof.verify.declare import ATTRIBUTE

    declarations = getattr(function, ATTRIBUTE, ())
    if not declarations:
        raise UsageError(f"{getattr(function, '__name__', function)!r} is not declared: decorate it with @implements")
    subjects = [Subject(d, function) for d in declarations]
    return [judge(s, name, PROFILES[profile], seed) for s in subjects for name in laws_for(s.operator)]


def replay(subject: Subject, law_name: str, text: str) -> Verdict:
    """One law on one case, no search, no shrinking. Raises UsageError for a case or law that cannot be read."""
    from mixproof.verify.case import parse

    try:
        law = find_law(law_name)
    except KeyError as error:
        raise UsageError(str(error.args[0])) from None
    cell = f"{subject}/{law.name}"
    if verdict := _set_aside(subject, law, cell):
        return verdict
    outcome = evaluate(subject, law, parse(subject.operator.name, text))
    if outcome.broken:
        verdict = _failure(subject, law, subject.domain(), outcome, cell, 1, outcome.vacuous)
        return dataclasses.replace(verdict, statement=law.statement)
    status = "pass" if outcome.worst is not None and outcome.decided else "undecided"
    why = "" if status == "pass" else "outside the declared arithmetic's domain"
    return Verdict(cell, status, outcome.ratio, case=str(outcome.case), cases=1, why=why, statement=law.statement)
