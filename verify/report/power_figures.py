"""The counts of a power study that its text and its page share: who died, by what, where, and what rivals saw.

A study is plain data: "matrix", one row a mutant; "duels", one a format and input set; "honest", one an operator and
format; "laws", "plan", "drift", "environment"; "sources", public bug -> its kind, trigger and places. A part that was
not asked for is left out of "parts". Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mixproof.verify.report.terminal import number

Study = Mapping[str, Any]
Row = Mapping[str, Any]
JUDGE = "mixproof, tolerance"  # our own judge, comparing as the rivals do
LAWS = "mixproof, all laws"  # all that it has
PARTS = ("matrix", "duels", "honest")
INPUTS = {
    "users": "users' inputs: aligned shapes, normal values",
    "atlas": "our atlas: short, odd and extreme cases",
}


@dataclass(frozen=True)
class Rate:
    """A judge in one format on one set of inputs; None where it was not asked.

    `apart` counts the mutants that it rejects in a case where it accepts the reference: what rejects everything tells
    nothing apart."""

    killed: int | None = None
    apart: int | None = None
    mutants: int = 0
    alarms: int | None = None
    cases: int = 0


@dataclass(frozen=True)
class Honest:
    """Our own judge on honest arithmetic of one format."""

    format: str
    cases: int
    vacuous: int
    alarms: int
    worst: float
    operator: str
    case: str


def operator(row: Row) -> str:
    """Of a mutant, called operator/name."""
    return row["mutant"].split("/")[0]


def family(operator: str) -> str:
    return operator.split(".")[0]


def judged(study: Study) -> list[Row]:
    """The rows of mutants that this machine could run. One that no law looked at, for no reason given, counts."""
    return [row for row in study.get("matrix", ()) if not row.get("not_run")]


def unjudged(study: Study) -> Counter[str]:
    """Reason -> mutants that were not run here."""
    return Counter(row["not_run"] for row in study.get("matrix", ()) if row.get("not_run"))


def killed(row: Row) -> bool:
    return any(law["killed"] for law in row["laws"].values())


def missed(row: Row) -> list[str]:
    """Laws that the mutant names and that did not kill it, or were not judged on it."""
    return [law for law in row["named"] if not row["laws"].get(law, {}).get("killed")]


def nearness(row: Row) -> str:
    """The laws that were to kill a mutant and did not, each with the worst error / bound that it saw."""
    near = []
    for law in missed(row):
        result = row["laws"].get(law)
        near.append(f"{law} {'did not judge it' if result is None else number(float(result['ratio']))}")
    return ", ".join(near) if row["named"] else "names no law"


def tally(rows: Iterable[Row], group: str = "family") -> dict[str, tuple[int, int]]:
    """Family, operator or source -> (killed, mutants), in order of appearance; rows with an empty key are left out."""
    counts: dict[str, list[int]] = {}
    for row in rows:
        key = row["source"] if group == "source" else _group(row, group)
        if key:
            count = counts.setdefault(key, [0, 0])
            count[0] += killed(row)
            count[1] += 1
    return {key: (died, all_of_them) for key, (died, all_of_them) in counts.items()}


def law_names(study: Study) -> list[str]:
    """Laws in the order of the registry."""
    return [entry["law"] for entry in study.get("laws", ())]


def idle(study: Study) -> list[str]:
    return [entry["law"] for entry in study.get("laws", ()) if not entry["kills"]]


def slowest(study: Study, count: int = 5) -> list[Row]:
    """Rows whose first kill took longest."""
    return sorted((row for row in judged(study) if row["first"]), key=lambda row: -row["first"]["seconds"])[:count]


def heat(rows: Iterable[Row], group: str = "family") -> dict[str, dict[str, tuple[int, int]]]:
    """Family or operator -> law -> (killed, mutants judged by it)."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for row in rows:
        own = found.setdefault(_group(row, group), {})
        for law, result in row["laws"].items():
            died, tried = own.get(law, (0, 0))
            own[law] = (died + bool(result["killed"]), tried + 1)
    return found


def regimes(rows: Iterable[Row]) -> dict[str, dict[str, tuple[int, int]]]:
    """Regime -> law -> (killed, tried), counting pairs of a mutant and a case."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for row in rows:
        for law, result in row["laws"].items():
            for regime, (tried, died) in result["regimes"].items():
                own = found.setdefault(regime, {})
                before = own.get(law, (0, 0))
                own[law] = (before[0] + died, before[1] + tried)
    return found


def total(counts: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    return sum(died for died, _ in counts.values()), sum(tried for _, tried in counts.values())


def formats(study: Study) -> list[str]:
    return list(dict.fromkeys(row["format"] for part in ("duels", "honest") for row in study.get(part, ())))


def asked(study: Study, inputs: str) -> list[str]:
    """The judges that were asked about one set of inputs."""
    known = rates(study)
    heard = {
        judge for (of, judge, _), rate in known.items() if of == inputs and (rate.killed, rate.alarms) != (None, None)
    }
    return [judge for judge in judges(study) if judge in heard]


def judges(study: Study) -> list[str]:
    """The rivals in their order, then our own."""
    named = [judge for row in study.get("duels", ()) for judge in row["judges"]]
    named += [judge for row in study.get("honest", ()) for alarms in row["alarms"].values() for judge in alarms]
    named += [LAWS] if study.get("twins") else []
    ours = (JUDGE, LAWS)
    return [
        *(judge for judge in dict.fromkeys(named) if judge not in ours),
        *(judge for judge in ours if judge in named),
    ]


def rates(study: Study) -> dict[tuple[str, str, str], Rate]:
    """(inputs, judge, format) -> what it killed and what honest cases it rejected, over all operators."""
    duels = {(row["inputs"], row["format"]): row for row in study.get("duels", ())}
    found: dict[tuple[str, str, str], Rate] = {}
    for inputs in INPUTS:
        for format in formats(study):
            duel = duels.get((inputs, format), {"judges": {}})
            honest = [row for row in study.get("honest", ()) if row["format"] == format]
            for judge in judges(study):
                kills = duel["judges"].get(judge, {})
                asked = [row for row in honest if row["alarms"].get(inputs, {}).get(judge) is not None]
                found[inputs, judge, format] = Rate(
                    kills.get("killed"),
                    kills.get("apart"),
                    kills.get("mutants", duel.get("mutants", 0)),
                    sum(row["alarms"][inputs][judge] for row in asked) if asked else None,
                    sum(row["counts"][inputs] for row in asked),
                )
    if study.get("twins"):
        found["atlas", LAWS, "float32"] = _all_laws(study)
    return found


def _all_laws(study: Study) -> Rate:
    """Every law on the cases that it plans; honest are the references, run as their mutants are."""
    rows = judged(study)
    dead = sum(killed(row) for row in rows)
    laws = [entry for twin in study["twins"] for entry in twin["laws"].values()]
    return Rate(dead, dead, len(rows), sum(e["killed"] for e in laws), sum(e["cases"] for e in laws))


def honest(study: Study) -> list[Honest]:
    """Our own judge, format by format; the worst error / bound is that of cases that decide something."""
    found = []
    for format in formats(study):
        rows = [row for row in study.get("honest", ()) if row["format"] == format]
        if rows:
            worst = max(rows, key=lambda row: float(row["worst"]))
            found.append(
                Honest(
                    format,
                    sum(row["cases"] for row in rows),
                    sum(row["vacuous"] for row in rows),
                    sum(alarms(row) for row in rows),
                    float(worst["worst"]),
                    worst["operator"],
                    worst["worst_case"],
                )
            )
    return found


def alarms(row: Row) -> int:
    """Honest cases of a row that our judge rejects."""
    counted = sum(by_judge.get(JUDGE) or 0 for by_judge in row["alarms"].values())
    return max(counted, len(row["failures"]))


def broken(twin: Row) -> list[str]:
    """Laws that the reference itself breaks, run as its mutants are."""
    return [law for law, entry in twin["laws"].items() if entry["killed"]]


def planned(study: Study) -> Sequence[tuple[str, Row]]:
    """The pairs of law and case of the budget plan, each with its operator."""
    operators = study.get("plan", {}).get("operators", {})
    return [(operator, pair) for operator, pairs in operators.items() for pair in pairs]


def planned_kills(study: Study) -> tuple[int, int]:
    """By the plan's record: mutants that its pairs kill, of all."""
    return sum(pair["kills"] for _, pair in planned(study)), len(study.get("plan", {}).get("mutants", {}))


def problems(study: Study) -> list[str]:
    """What keeps a study from passing, counted."""
    rows = judged(study)
    survive = sum(not killed(row) for row in rows)
    spared = sum(killed(row) and bool(missed(row)) for row in rows)
    rejected = sum(alarms(row) for row in study.get("honest", ()))
    unjust = sum(len(broken(twin)) for twin in study.get("twins", ()))
    drifted = len(study.get("drift", ()))
    found = (
        (survive, f"{counted(survive, 'mutant')} that no law kills"),
        (spared, f"{counted(spared, 'mutant')} spared by a law that they name"),
        (rejected, counted(rejected, "honest alarm")),
        (unjust, f"{counted(unjust, 'law')} that the reference breaks"),
        (drifted, counted(drifted, "drift") + " of the plan"),
    )
    return [text for n, text in found if n]


def empty(study: Study) -> list[str]:
    """Parts that were asked for and hold nothing."""
    return [part for part in study.get("parts", PARTS) if not (judged(study) if part == "matrix" else study.get(part))]


def _group(row: Row, group: str) -> str:
    return family(operator(row)) if group == "family" else operator(row)


def counted(n: int, what: str) -> str:
    """1 case, 2 cases, 1,000 cases."""
    return f"{n:,} {what}{'s' * (n != 1)}"


def percent(part: int, whole: int) -> str:
    """With one decimal; 100 % and 0 % are said of all and of none alone."""
    if not whole:
        return "-"
    if part in (0, whole):
        return f"{100 * part // whole} %"
    share = 100 * part / whole
    return "< 0.1 %" if share < 0.1 else "> 99.9 %" if share > 99.9 else f"{share:.1f} %"
