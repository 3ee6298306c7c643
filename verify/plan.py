"""The budget plan: which laws, on which cases, kill most mutants a second; and which laws kill each mutant.

Both are measured, committed as `plan.json` and judged by the profile smoke. A planned case is told for chunks of 8
tokens and float32; `fitted` gives the one that stands for it in an implementation's own domain."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import floor, log10
from pathlib import Path
from typing import Any

from mixproof.verify.case import Case, Domain, parse
from mixproof.verify.laws import LAWS
from mixproof.verify.laws import law as find_law

PATH = Path(__file__).with_name("plan.json")
CHUNK = 8  # of the mutants, by which the plan was measured
ENOUGH = 0.98  # of an operator's mutants: the plan goes no further
NEARLY = 0.7  # as many kills a second
SHARERS = 4  # implementations that share an oracle, as many as most operators have

Data = dict[str, Any]
Pair = tuple[str, str]  # a law, a case


@lru_cache
def load() -> Data:
    """The committed plan: `operators`, name -> rows of law, case, kills, seconds; `mutants`, name -> laws."""
    return json.loads(PATH.read_text())


@lru_cache
def planned(operator: str) -> list[tuple[str, Case]]:
    """Laws and cases of an operator, told for chunks of 8; none for an operator without mutants."""
    return [(row["law"], parse(operator, row["case"])) for row in load()["operators"].get(operator, [])]


def laws_for(operator: str) -> list[str]:
    """The laws that the profile smoke judges: the planned ones; of an operator without a plan, the core laws."""
    return list(dict.fromkeys(name for name, _ in planned(operator))) or [n for n in LAWS if find_law(n).core]


def fitted(case: Case, domain: Domain, turn: int = 0) -> Case:
    """The case that stands for a planned one in a domain: lengths keep their place relative to the chunk, dtypes take
    turns. A dtype other than float32 is the law's own choice, and stays."""
    dtype, parameters = (case.dtype, case.parameters)
    if dtype == "float32":
        dtype, parameters = domain.dtypes[turn % len(domain.dtypes)]
    sizes = {"V": 1} | _lengths(case, CHUNK, domain.chunk)
    fields = {f.name: getattr(case, f.name) for f in dataclasses.fields(case) if f.name not in ("op", "sizes")}
    return domain.case(sizes, **fields | {"dtype": dtype, "parameters": parameters})


def told(case: Case, domain: Domain) -> str:
    """A case of a domain as a plan tells it: the way back from `fitted`."""
    sizes = _lengths(case, domain.chunk, CHUNK)
    if (case.dtype, case.parameters) in domain.dtypes:
        case = dataclasses.replace(case, dtype="float32", parameters="float32")
    return str(case.resized(**sizes)).replace(" dtype=float32", "")


def _lengths(case: Case, chunk: int, other: int) -> dict[str, int]:
    """Sizes with lengths around one or two chunks moved to where they are with another chunk size."""
    sizes = dict(case.sizes)
    if "T" not in sizes:
        return sizes
    T, moved = sizes["T"], sizes["T"]
    for count in (1, 2):
        if T > 1 and abs(T - count * chunk) <= 1:
            moved = (count if other <= 128 else 1) * other + T - count * chunk
    sizes["T"] = moved
    if "S" in sizes:
        sizes["S"] = max(1, sizes["S"] + moved - T)
    return sizes


# --- making it -------------------------------------------------------------------------------------------------------


def make(rows: Iterable[Data]) -> Data:
    """The plan of a kill matrix whose entries list `each` case: [told case, killed, seconds].

    Greedy, operator by operator: of all pairs of law and case, the one that kills most of the mutants still alive a
    second, until 98 % are dead or no pair kills another. Of pairs nearly as good as the best the first is taken, as
    laws and their plans list them: clocks are not exact, and laws that apply to more implementations come first."""
    by_operator: dict[str, list[Data]] = {}
    for row in rows:
        by_operator.setdefault(row["mutant"].split("/")[0], []).append(row)
    return {
        "operators": {name: _cover(rows) for name, rows in by_operator.items()},
        "mutants": {row["mutant"]: killers(row) for rows in by_operator.values() for row in rows},
    }


def killers(row: Data) -> list[str]:
    """The laws that kill the mutant of a row."""
    return [name for name, entry in row["laws"].items() if entry["killed"]]


def _cover(rows: list[Data]) -> list[Data]:
    kills: dict[Pair, set[str]] = {}
    times: dict[Pair, list[float]] = {}
    for row in rows:
        for law, entry in row["laws"].items():
            for case, killed, seconds in entry["each"]:
                times.setdefault((law, case), []).append(seconds)
                if killed:
                    kills.setdefault((law, case), set()).add(row["mutant"])
    cost = {pair: _cost(taken) for pair, taken in times.items()}
    alive, chosen = {row["mutant"] for row in rows}, []
    spared = (1 - ENOUGH) * len(alive)
    while len(alive) > spared:
        worth = {pair: len(kills[pair] & alive) / cost[pair] for pair in times if pair in kills}
        most = max(worth.values(), default=0)
        if not most:
            break
        best = next(pair for pair, value in worth.items() if value >= NEARLY * most)
        died = kills[best] & alive
        alive -= died
        chosen.append({"law": best[0], "case": best[1], "kills": len(died), "seconds": _rounded(cost[best])})
    return chosen


def _cost(taken: list[float]) -> float:
    """Seconds of one implementation: its own, and its share of the oracle, which the slowest of those measured paid."""
    own = sorted(taken)[len(taken) // 2]
    return own + (max(taken) - own) / SHARERS


def _rounded(x: float) -> float:
    """To two digits: more of them are noise."""
    return round(x, 1 - floor(log10(x))) if x > 0 else 0.0


def merged(old: Data, new: Data, known: Iterable[str]) -> Data:
    """The old plan with what the new one says of its operators; of the others only those that are known."""
    plans = {name: new if name in new["operators"] else old for name in known}
    return {
        "operators": {name: p["operators"][name] for name, p in plans.items() if name in p["operators"]},
        "mutants": {
            mutant: laws
            for name, p in plans.items()
            for mutant, laws in p["mutants"].items()
            if mutant.split("/")[0] == name
        },
    }


def write(plan: Data, path: Path = PATH) -> None:
    """One planned pair and one mutant a line."""
    lines = []
    for name, part in plan.items():
        entries = []
        for key, values in part.items():
            text = json.dumps(values)
            if name == "operators":
                text = "[" + ",".join(f"\n   {json.dumps(v)}" for v in values) + "\n  ]"
            entries.append(f"\n  {json.dumps(key)}: {text}")
        lines.append(f" {json.dumps(name)}: {{{','.join(entries)}\n }}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


# --- holding it against what is found --------------------------------------------------------------------------------


def drift(plan: Data, rows: Iterable[Data]) -> list[str]:
    """What a kill matrix says otherwise than the plan's record: mutants and killers on one side only. Laws that were
    not judged, and mutants that could not run, say nothing."""
    found = {row["mutant"]: row for row in rows}
    record: Mapping[str, list[str]] = plan["mutants"]
    said = [f"{name}: in the plan, and no mutant any more" for name in record if name not in found]
    for name, row in found.items():
        if name not in record:
            said.append(f"{name}: a mutant, and not in the plan")
            continue
        now, before = set(killers(row)), set(record[name]) & set(row["laws"])
        said += [f"{name}: killed by {law} no more" for law in row["laws"] if law in before - now]
        said += [f"{name}: {law} kills it, and the plan does not say so" for law in row["laws"] if law in now - before]
    return said


def survivors(plan: Data, laws: Iterable[str]) -> list[str]:
    """The mutants that the record says no law of these kills."""
    known = set(laws)
    return [name for name, killed_by in plan["mutants"].items() if not known & set(killed_by)]


def power(plan: Data) -> float:
    """The share of all mutants that the planned pairs kill, by the record."""
    dead = sum(row["kills"] for rows in plan["operators"].values() for row in rows)
    return dead / max(1, len(plan["mutants"]))
