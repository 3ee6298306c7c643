"""A power study: kill matrix, duels with the checks of today, honest campaign; over all cores, and resumable.

Work is cut into units, one part of one operator each. What a unit found is appended to a store as soon as it is known;
a study that was interrupted goes on from there, as long as not a line of the equations, the laws or the mutants has
changed since."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mixproof.reference
from mixproof.reference import OPERATORS
from mixproof.verify import plan
from mixproof.verify.laws import LAWS
from mixproof.verify.power import duel, honest, matrix
from mixproof.verify.report.power import SCHEMA
from mixproof.verify.report.power_figures import PARTS
from mixproof.verify.subjects.mutants import mutants
from mixproof.verify.subjects.mutants.sources import SOURCES
from mixproof.verify.versions import versions

# Which parts take longest: they start first, so that no core waits at the end.
WEIGHT: dict[str, float] = dict(zip(PARTS, (1.0, 0.7, 0.5), strict=True))
Row = dict[str, Any]


@dataclass(frozen=True)
class Unit:
    """One part of one operator."""

    part: str
    operator: str
    profile: str
    seed: int

    def run(self) -> list[Row]:
        """Its rows, plain data."""
        if self.profile == "smoke":
            return matrix.smoke(self.operator)
        if self.part == "matrix":
            return matrix.kill_matrix(self.operator, self.profile == "nightly", self.seed, twin=True)
        if self.part == "duels":
            return duel.duel(self.operator, self.profile)
        return honest.campaign(self.operator, self.profile, self.seed)

    @property
    def key(self) -> str:
        return f"{self.part} {self.operator}"


def units(operators: Iterable[str], parts: Sequence[str], profile: str, seed: int) -> list[Unit]:
    """The work, longest first."""
    count = Counter(m.operator for m in mutants())
    names = [name for name in OPERATORS if name in set(operators)]
    found = [Unit(part, name, profile, seed) for part in parts for name in names]
    return sorted(found, key=lambda u: -WEIGHT[u.part] * (10 if u.part == "honest" else count[u.operator]))


class Store:
    """Results of units as they come, a line of JSON each, below a first line that says of which tree and study."""

    def __init__(self, path: Path, profile: str, seed: int) -> None:
        self.path = path
        self.head = {"tree": fingerprint(), "profile": profile, "seed": seed}
        self.found: dict[str, list[Row]] = {}

    def open(self, fresh: bool = False) -> None:
        """Read what an interrupted study of the same tree left, or begin anew. Raises OSError where it may not."""
        lines = [] if fresh or not self.path.exists() else self.path.read_text().splitlines()
        try:
            if lines and json.loads(lines[0]) == self.head:
                for line in lines[1:]:
                    key, rows = json.loads(line)
                    self.found[key] = rows
                return
        except ValueError:  # the last line of a process that was killed
            if self.found:
                self._write()
                return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._write()

    def add(self, unit: Unit, rows: list[Row]) -> None:
        self.found[unit.key] = rows
        with self.path.open("a") as file:
            file.write(json.dumps([unit.key, rows]) + "\n")

    def close(self) -> None:
        """The study is complete: the next one measures anew."""
        self.path.unlink(missing_ok=True)

    def _write(self) -> None:
        lines = [self.head, *([key, rows] for key, rows in self.found.items())]
        self.path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def default_store(profile: str, seed: int) -> Path:
    """Where caches live."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root, "mixproof", f"power-{profile}-{seed}.jsonl")


def fingerprint() -> str:
    """Of every line that the results depend on."""
    digest = hashlib.sha256(repr(sorted(versions().items())).encode())
    for root in (Path(mixproof.reference.__file__).parent, Path(plan.__file__).parent):
        for path in sorted(root.rglob("*.py")):
            if "report" not in path.relative_to(root).parts:
                digest.update(path.read_bytes())
    return digest.hexdigest()


def run(work: Sequence[Unit], store: Store, jobs: int) -> Iterator[Unit]:
    """Each unit once it is in the store. With one job in this process; otherwise interrupting ends the workers."""
    waiting = [unit for unit in work if unit.key not in store.found]
    if jobs == 1:
        for unit in waiting:
            store.add(unit, unit.run())
            yield unit
        return
    pool = ProcessPoolExecutor(jobs)
    try:
        running = {pool.submit(unit.run): unit for unit in waiting}
        while running:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                unit = running.pop(future)
                store.add(unit, future.result())
                yield unit
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def collect(store: Store, operators: Iterable[str], parts: Sequence[str], seconds: float, jobs: int) -> dict[str, Any]:
    """The study as plain data; see report/power_figures.py for its fields."""
    names = [name for name in OPERATORS if name in set(operators)]

    def rows(part: str) -> list[Row]:
        return [row for name in names for row in store.found.get(f"{part} {name}", [])]

    judged, record = rows("matrix"), plan.load()
    matrix_rows = [row for row in judged if row["part"] != matrix.HONEST]
    recorded = {
        "operators": {name: pairs for name, pairs in record["operators"].items() if name in names},
        "mutants": {name: laws for name, laws in record["mutants"].items() if name.split("/")[0] in names},
    }
    study = {
        "schema": SCHEMA,
        "profile": store.head["profile"],
        "seed": store.head["seed"],
        "environment": versions(),
        "seconds": seconds,
        "cores": jobs,
        "parts": list(parts),
        "matrix": matrix_rows,
        "twins": [row for row in judged if row["part"] == matrix.HONEST],
        "duels": duel.total(rows("duels")),
        "honest": rows("honest"),
        "plan": recorded,
        "sources": {name: bug._asdict() for name, bug in SOURCES.items()},
        "laws": _laws(matrix_rows, recorded["mutants"]),
        "drift": [],
    }
    if matrix_rows and store.head["profile"] != "smoke":
        study["drift"] = plan.drift(recorded, matrix_rows)
    return study


def _laws(rows: Sequence[Row], record: dict[str, list[str]]) -> list[Row]:
    """What each law killed, its time, and what it alone kills by the plan's record, which has every law of a mutant."""
    kills: Counter[str] = Counter()
    cases: Counter[str] = Counter()
    seconds: dict[str, float] = defaultdict(float)
    only: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        for law, entry in row["laws"].items():
            kills[law] += entry["killed"]
            cases[law] += entry["cases"]
            seconds[law] += entry["seconds"]
        killers = record.get(row["mutant"], plan.killers(row))
        if len(killers) == 1:
            only[killers[0]].append(row["mutant"])
    return [
        {"law": law, "kills": kills[law], "only": only[law], "seconds": seconds[law], "cases": cases[law]}
        for law in LAWS
        if rows
    ]
