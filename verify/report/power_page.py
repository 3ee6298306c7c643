"""A power study as one HTML page: no script, nothing fetched, light and dark, on paper too. Needs jinja2.

The template, power.html.jinja beside this file, lays out what is prepared here: tables of `Cell`s, whose `shade` is a
step of a scale of one hue, 0 (tried, nothing killed) to 5."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mixproof.verify.report import power_figures as figures
from mixproof.verify.report.page import rendered
from mixproof.verify.report.power_figures import JUDGE, LAWS, Row, Study, percent
from mixproof.verify.report.terminal import number

TEMPLATE = "power.html.jinja"
STEPS = 5


@dataclass(frozen=True)
class Cell:
    """A square of a heat table: what it says, how dark it is (empty: not judged), what it says when pointed at."""

    text: str = ""
    shade: str = ""
    title: str = ""


@dataclass(frozen=True)
class Heat:
    """Rows of cells below the names of the columns."""

    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell]]]


@dataclass(frozen=True)
class Bar:
    """A share as a number and a mark of that length."""

    text: str
    share: float
    title: str


def page(study: Study) -> str:
    """The whole page. Raises ModuleNotFoundError without jinja2 (the extra `report`)."""
    return rendered(TEMPLATE, **_context(study))


def _context(study: Study) -> dict[str, Any]:
    from mixproof.verify.report import power

    rows = figures.judged(study)
    died = sum(map(figures.killed, rows))
    honest = figures.honest(study)
    plan = figures.planned(study)
    operators: dict[str, list[Row]] = {}
    for row in rows:
        operators.setdefault(figures.operator(row), []).append(row)
    return {
        "profile": study.get("profile", "?"),
        "seed": study.get("seed", 0),
        "seconds": study.get("seconds"),
        "cores": study.get("cores"),
        "environment": study.get("environment", {}),
        "passes": power.exit_code(study) == 0,
        "closing": " ".join(power.closing(study).split()),
        "tiles": [
            ("mutants killed", percent(died, len(rows)), f"{died:,} of {len(rows):,}"),
            ("laws that kill", f"{sum(bool(e['kills']) for e in study.get('laws', ()))}", f"of {len(_laws(study))}"),
            (
                "honest alarms",
                f"{sum(h.alarms for h in honest):,}",
                f"in {figures.counted(sum(h.cases for h in honest), 'case')}",
            ),
            ("worst honest error", number(max((h.worst for h in honest), default=0.0)), "of its bound"),
        ],
        "problems": _problems(study),
        "families": _by_share(figures.heat(rows), _laws(study)),
        "operators": _by_share(figures.heat(rows, "operator"), _laws(study)),
        "details": [_details(operator, own, _laws(study)) for operator, own in operators.items()],
        "laws": [
            e | {"rate": number(e["kills"] / e["seconds"], 2) if e["seconds"] else "-"} for e in study.get("laws", ())
        ],
        "sources": [
            (source, *counts, study.get("sources", {}).get(source, {}))
            for source, counts in figures.tally(rows, "source").items()
        ],
        "regimes": _by_count(figures.regimes(rows), _laws(study)),
        "rivals": [r for r in (_rivals(study, inputs) for inputs in figures.INPUTS) if r],
        "formats": figures.formats(study),
        "ours": (JUDGE, LAWS),
        "spared": [
            (figures.INPUTS.get(row["inputs"], row["inputs"]), row["format"], row["cases"], _survivors(row))
            for row in study.get("duels", ())
        ],
        "honest": [(h, percent(h.vacuous, h.cases), number(h.worst)) for h in honest],
        "plan": plan,
        "plan_seconds": sum(pair["seconds"] for _, pair in plan),
        "planned_kills": figures.planned_kills(study),
        "told_apart": any(rate.apart is not None for rate in figures.rates(study).values()),
        "unjudged": [f"{figures.counted(n, 'mutant')}: {why}" for why, n in figures.unjudged(study).items()],
    }


def _problems(study: Study) -> list[tuple[str, list[tuple[str, str]]]]:
    """What fails: a title and its items, each a name and what there is to say of it."""
    rows = figures.judged(study)
    survive = [row for row in rows if not figures.killed(row)]
    spared = [row for row in rows if figures.killed(row) and figures.missed(row)]
    rejected = [row for row in study.get("honest", ()) if figures.alarms(row)]
    found = (
        ("Mutants that no law kills", [(row["mutant"], _spared(row)) for row in survive]),
        ("Mutants spared by a law that they name", [(row["mutant"], _spared(row)) for row in spared]),
        (
            "Honest evaluations that our judge rejects",
            [
                (f"{row['operator']}, {row['format']}", f"{figures.alarms(row):,}: {'; '.join(row['failures'][:5])}")
                for row in rejected
            ],
        ),
        (
            "Laws that the reference breaks",
            [(twin["mutant"], law) for twin in study.get("twins", ()) for law in figures.broken(twin)],
        ),
        ("Drift of the plan", [("", text) for text in study.get("drift", ())]),
    )
    counts = [len(items) for _, items in found]
    counts[2] = sum(map(figures.alarms, rejected))  # an item there is a row of several cases
    return [(f"{title}: {n:,}", items) for (title, items), n in zip(found, counts, strict=True) if items]


def _spared(row: Row) -> str:
    near = figures.nearness(row)
    return f"the reference with {row['what']}" + (f" ({near})" if near else "")


def _laws(study: Study) -> list[str]:
    return figures.law_names(study)


def _by_share(found: Mapping[str, Mapping[str, tuple[int, int]]], laws: Sequence[str]) -> Heat:
    """Mutants killed, shaded by their share of those judged."""

    def cell(row: str, law: str) -> Cell:
        if law not in found[row]:
            return Cell()
        died, tried = found[row][law]
        return Cell(str(died), str(math.ceil(STEPS * died / tried)), f"{row}, {law}: {died} of {tried}")

    return Heat(laws, [(row, [cell(row, law) for law in laws]) for row in found])


def _by_count(found: Mapping[str, Mapping[str, tuple[int, int]]], laws: Sequence[str]) -> Heat:
    """Kills, shaded by their logarithm; the regimes that kill most come first."""
    most = max((died for by_law in found.values() for died, _ in by_law.values()), default=0)

    def cell(row: str, law: str) -> Cell:
        if law not in found[row]:
            return Cell()
        died, tried = found[row][law]
        shade = math.ceil(STEPS * math.log1p(died) / math.log1p(most)) if died else 0
        return Cell(str(died), str(shade), f"{row}, {law}: {died} of {tried} cases")

    order = sorted(found, key=lambda regime: -figures.total(found[regime])[0])
    return Heat(laws, [(row, [cell(row, law) for law in laws]) for row in order])


def _details(operator: str, rows: Sequence[Row], laws: Sequence[str]) -> dict[str, Any]:
    """Mutants of one operator by the laws that judged any of them: worst |error| / bound."""
    columns = [law for law in laws if any(law in row["laws"] for row in rows)]
    died = sum(map(figures.killed, rows))
    mutants = [
        {
            "name": row["mutant"].partition("/")[2],
            "what": row["what"],
            "source": row["source"],
            "survives": not figures.killed(row),
            "first": row["first"],
            "cells": [_judged(row, law) for law in columns],
        }
        for row in rows
    ]
    return {"operator": operator, "died": died, "columns": columns, "mutants": mutants}


def _judged(row: Row, law: str) -> Cell:
    """Shade k1 to k5: killed, by how much; n: by a law that the mutant names; m: spared by one. None: neither."""
    named = law in row["named"]
    if law not in row["laws"]:
        return Cell("!", "m") if named else Cell()
    result = row["laws"][law]
    text = _short(float(result["ratio"]))
    if result["killed"]:
        return Cell(text, ("n " if named else "") + "k" + _magnitude(float(result["ratio"])))
    return Cell(text + ("!" if named else ""), "m" if named else "")


def _magnitude(x: float) -> str:
    """Step of a scale of powers of ten: 0 for nothing, 1 below 10, 5 from 10,000 on."""
    return str(min(STEPS, 1 + max(0, math.floor(math.log10(x)))) if 0 < x < math.inf else STEPS if x else 0)


def _short(x: float) -> str:
    """A ratio in at most four characters, as far as that goes."""
    if not math.isfinite(x) or x < 1000:
        return number(x, 2 if x >= 0.1 else 1)
    mantissa, exponent = f"{x:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _rivals(study: Study, inputs: str) -> dict[str, Any]:
    """One set of inputs: for each judge the bars of each format; nothing where no judge was asked."""
    formats, rates = figures.formats(study), figures.rates(study)
    if not any(rate.mutants or rate.cases for key, rate in rates.items() if key[0] == inputs):
        return {}
    judges = []
    for judge in figures.asked(study, inputs):
        cells = []
        for format in formats:
            rate = rates[inputs, judge, format]
            kills = rate.killed is not None and _bar(rate.killed, rate.mutants, "mutants")
            wrong = rate.alarms is not None and _bar(rate.alarms, rate.cases, "honest cases")
            told = rate.apart is not None and _bar(rate.apart, rate.mutants, "mutants")
            cells.append((kills, told, wrong))
        judges.append((judge, cells))
    return {"title": figures.INPUTS[inputs], "judges": judges}


def _bar(part: int, whole: int, what: str) -> Bar:
    return Bar(percent(part, whole), part / whole if whole else 0.0, f"{part:,} of {whole:,} {what}")


def _survivors(row: Row) -> list[tuple[str, list[str]]]:
    """Judges of a duel with the mutants that pass them."""
    return [(judge, result["survivors"]) for judge, result in row["judges"].items() if result.get("survivors")]
