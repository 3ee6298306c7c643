"""The kill matrix of one operator: each of its mutants under each law that applies, case by case.

A kill is a law broken by what a mutant computed, not by an exception. Cases are those of the short plans; nothing is
shrunk or diagnosed. Times are CPU seconds."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

from mixproof.reference import operator as find_operator
from mixproof.verify.case import Case, Domain
from mixproof.verify.cells import laws_for
from mixproof.verify.judge import evaluate
from mixproof.verify.laws import law as find_law
from mixproof.verify.laws.law import MEMORY, Law
from mixproof.verify.plan import fitted, load, make, merged, planned, told, write
from mixproof.verify.subject import Subject
from mixproof.verify.subjects.mutants import Mutant, mutants, untouched

# laws about calling, not about what is computed: in profile ci they judge mutants of calling alone
CALLING = ("independence", "layout", "unchanged", "written", "deterministic")
HONEST = "honest"  # the part that is wrong of an implementation with nothing wrong
Row = dict[str, Any]


@dataclasses.dataclass
class Judged:
    """A mutant on trial: its row, its implementation, the laws that judge it, the seconds that it has taken."""

    mutant: Mutant
    subject: Subject
    laws: frozenset[str]
    row: Row
    seconds: float = 0.0

    @property
    def domain(self) -> Domain:
        return self.subject.domain()


def kill_matrix(operator: str, everything: bool = False, seed: int = 0, twin: bool = False) -> list[Row]:
    """One row a mutant, plain data. `everything`: every law that applies, on every case of its plan, and each law's
    entry lists them as `each`: [case as plans tell it, killed, seconds]. Otherwise a mutant with one part wrong is
    judged by the laws about that part, and a law stops at its first kill.

    Mutants that meet one case share its oracle, and in `seconds` the time that it took; those of `each` are their
    own, so that of one case the first mutant's are the most. A mutant that cannot run here has no laws.

    With a `twin` the last row is that of the reference itself, run as its mutants are, under every law: none may kill
    it."""
    trials = [*(_trial(mutant, everything) for mutant in mutants(operator)), *([_twin(operator)] if twin else [])]
    for name in laws_for(find_operator(operator)):
        law = find_law(name)
        on_trial = [t for t in trials if name in t.laws]
        if everything:
            MEMORY.clear()  # what a law costs includes its oracle, whichever law came before
        for domain in dict.fromkeys(t.domain for t in on_trial):
            _try(law, [t for t in on_trial if t.domain == domain], law.plan(domain, True), everything, seed)
    return [t.row for t in trials]


def smoke(operator: str) -> list[Row]:
    """Rows of the operator's mutants under its planned pairs of law and case, each mutant until its first kill."""
    trials = [_trial(mutant, True) for mutant in mutants(operator)]
    for turn, (name, case) in enumerate(planned(operator)):
        law = find_law(name)
        living = [t for t in trials if name in t.laws and t.row["first"] is None]
        entries = [t.row["laws"].setdefault(name, _entry()) for t in living]
        taken = [
            _meet(law, t, fitted(case, t.domain, turn), entry, False) for t, entry in zip(living, entries, strict=True)
        ]
        for t, entry in zip(living, entries, strict=True):
            _spend(t, name, entry, sum(taken) / len(taken))
    return [t.row for t in trials]


def replan(operators: Iterable[str] = (), workers: int | None = None) -> None:
    """Measure the kill matrices of some operators, or all, and write what they say into the committed plan."""
    known = list(dict.fromkeys(m.operator for m in mutants()))
    with ProcessPoolExecutor(workers) as pool:
        found = pool.map(partial(kill_matrix, everything=True), operators or known)
        new = make(row for rows in found for row in rows)
    write(new if not operators else merged(load(), new, known))


def judges(mutant: Mutant, law: Law, everything: bool) -> bool:
    """Whether the law is about what is wrong with the mutant, or everything is asked."""
    if everything or mutant.part == "calling" or law.name in mutant.killed_by:
        return True
    return law.of in ("both", mutant.part) and law.name not in CALLING


def _twin(operator: str) -> Judged:
    twin = _trial(untouched(operator), True)
    twin.row["part"] = HONEST
    return twin


def _trial(mutant: Mutant, everything: bool) -> Judged:
    subject = mutant.subject()
    missing = subject.unavailable()
    laws = [] if missing else [find_law(name) for name in laws_for(subject.operator)]
    laws = [law for law in laws if judges(mutant, law, everything) and not law.reason_not(subject)]
    row = {
        "mutant": f"{mutant.operator}/{mutant.name}",
        "what": mutant.what,
        "source": mutant.source,
        "part": mutant.part,
        "named": list(mutant.killed_by),
        "laws": {},
        "first": None,
    } | ({"not_run": missing} if missing else {})
    return Judged(mutant, subject, frozenset(law.name for law in laws), row)


def _try(law: Law, trials: list[Judged], plan: Iterable[Case], everything: bool, seed: int) -> None:
    """One law on mutants that share its cases. What remembers earlier calls begins anew: which laws came before, and on
    how many cases, does not matter."""
    for t in trials:
        if hasattr(t.mutant.batched, "anew"):
            t.subject = t.mutant.subject()
    entries = {id(t): _entry() for t in trials}
    for case in dict.fromkeys(plan):
        moved = dataclasses.replace(case, seed=case.seed + seed)
        living = [t for t in trials if everything or not entries[id(t)]["killed"]]
        if not living:
            break
        searching = [t for t in living if not entries[id(t)]["killed"]]
        taken = [_meet(law, t, moved, entries[id(t)], everything) for t in living]
        share = sum(taken) / len(taken)  # the first of them computed the oracle for all
        for t in searching:
            _spend(t, law.name, entries[id(t)], share)
    for t in trials:
        entry = entries[id(t)]
        if entry["regimes"]:
            ratio = entry["ratio"]
            t.row["laws"][law.name] = entry | {"ratio": ratio if ratio < float("inf") else "inf"}


def _entry() -> Row:
    return {"killed": False, "ratio": 0.0, "regimes": {}, "case": "", "seconds": 0.0, "cases": 0}


def _meet(law: Law, trial: Judged, case: Case, entry: Row, everything: bool) -> float:
    """One mutant on one case, entered; the seconds it took."""
    start = time.process_time()
    with trial.subject.framework.one_thread():
        outcome = evaluate(trial.subject, law, case)
    seconds = time.process_time() - start
    killed = outcome.broken and not outcome.message
    entry["cases"] += 1
    if outcome.worst is not None:
        entry["ratio"] = max(entry["ratio"], outcome.ratio)
        tried = entry["regimes"].setdefault(case.regime, [0, 0])
        tried[0] += 1
        tried[1] += killed
    if killed and not entry["killed"]:
        entry["killed"], entry["case"] = True, str(case)
    if everything:
        entry.setdefault("each", []).append([told(case, trial.domain), killed, seconds])
    return seconds


def _spend(trial: Judged, law: str, entry: Row, seconds: float) -> None:
    """Time that went into the search for a kill."""
    entry["seconds"] += seconds
    trial.seconds += seconds
    if entry["killed"] and trial.row["first"] is None:
        trial.row["first"] = {"law": law, "seconds": trial.seconds}
