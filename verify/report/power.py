"""A power study as text, Markdown and JSON, and whether it passes. Pure functions of the study's plain data.

What the gate kills and where, what today's checks kill and reject beside it, and what must not be: a mutant that a law
it names spares, an honest evaluation that our judge rejects, a plan that the measured matrix no longer bears out."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mixproof.verify.report import power_figures as figures
from mixproof.verify.report.power_figures import JUDGE, LAWS, Rate, Study, counted, percent
from mixproof.verify.report.terminal import number

WIDTH = 100
SCHEMA = 1
GAP = "   "


def terminal(study: Study, width: int = WIDTH) -> str:
    """The summary, at most `width` columns wide where names allow it; what fails comes last, next to the closing line.

    Parts that hold nothing are left out."""
    parts = (
        heading(study),
        families(study, width),
        laws(study, width),
        regimes(study, width),
        slowest(study, width),
        sources(study, width),
        *(rivals(study, inputs) for inputs in figures.INPUTS),
        apart(study),
        honest(study, width),
        plan(study),
        survivors(study, width),
        alarms(study, width),
        drift(study, width),
        closing(study, width),
    )
    return "\n\n".join(part for part in parts if part)


def heading(study: Study) -> str:
    seconds, cores = study.get("seconds"), study.get("cores")
    took = "" if seconds is None else f"{seconds:.0f} s" + (f" on {cores} core{'s' * (cores != 1)}" if cores else "")
    facts = (f"profile {study.get('profile', '?')}", f"seed {study.get('seed', 0)}", took)
    return GAP.join(("mixproof power", *(fact for fact in facts if fact)))


def families(study: Study, width: int = WIDTH) -> str:
    """Killed of all mutants, family by family, in as many columns as fit."""
    counts = figures.tally(figures.judged(study))
    if not counts:
        return ""
    died, mutants = figures.total(counts)
    names = max(map(len, counts))
    cells = [f"{family:{names}}  {f'{k}/{n}':>7}{' !' if k < n else '  '}" for family, (k, n) in counts.items()]
    columns = max(1, (width - 2) // (len(cells[0]) + 2))
    height = math.ceil(len(cells) / columns)
    lines = ["  " + "  ".join(cells[i::height]).rstrip() for i in range(height)]
    head = f"mutants killed, by family: {died:,} of {mutants:,}, {percent(died, mutants)}"
    return "\n".join([head, *lines])


def laws(study: Study, width: int = WIDTH) -> str:
    """Kills, kills of its own alone, time and kills a second of each law; then those that kill nothing."""
    entries = study.get("laws", ())
    if not entries:
        return ""
    rows = [
        (
            e["law"],
            f"{e['kills']:,}",
            f"{len(e['only']):,}" if e["only"] else "",
            f"{e['cases']:,}",
            f"{e['seconds']:.1f}",
            number(e["kills"] / e["seconds"], 2) if e["seconds"] else "-",
        )
        for e in entries
    ]
    lines = _table(("law", "kills", "alone", "cases", "seconds", "kills/s"), rows)
    idle = figures.idle(study)
    return "\n".join([*lines, *_item(f"kill nothing: {', '.join(idle)}" if idle else "every law kills", width)])


def regimes(study: Study, width: int = WIDTH) -> str:
    """Of each regime of values the cases that kill, and the laws that kill most in it; then those that kill nothing."""
    found = figures.regimes(figures.judged(study))
    totals = sorted(((regime, *figures.total(by_law)) for regime, by_law in found.items()), key=lambda t: -t[1])
    rows = []
    for regime, died, tried in totals:
        best = sorted(((law, k) for law, (k, _) in found[regime].items() if k), key=lambda item: -item[1])[:3]
        named = ", ".join(f"{law} {k:,}" for law, k in best)
        rows += [(regime, f"{tried:,}", f"{died:,}", percent(died, tried), named)] if died else []
    lines = [line[:width].rstrip() for line in _table(("regime", "cases", "kills", "share", "most by"), rows, (0, 4))]
    idle = [regime for regime, died, _ in totals if not died]
    return "\n".join([*lines, *(_item(f"kill nothing: {', '.join(idle)}", width) if idle else [])]) if totals else ""


def slowest(study: Study, width: int = WIDTH) -> str:
    """The first kills that took longest."""
    rows = figures.slowest(study)
    if not rows:
        return ""
    names = max(len(row["mutant"]) for row in rows)
    lines = (f"  {row['first']['seconds']:6.2f} s  {row['mutant']:{names}}  {row['first']['law']}" for row in rows)
    return "\n".join(["slowest first kills", *(line[:width] for line in lines)])


def sources(study: Study, width: int = WIDTH) -> str:
    """How many public bugs the mutants stand for."""
    counts = figures.tally(figures.judged(study), "source")
    if not counts:
        return ""
    died, mutants = figures.total(counts)
    survive = [source for source, (k, n) in counts.items() if k < n]
    kinds = {bug["kind"] for source, bug in study.get("sources", {}).items() if source in counts}
    of = f" of {counted(len(kinds), 'kind')}" if kinds else ""
    text = f"public bugs: {len(counts)}{of}, modelled by {counted(mutants, 'mutant')}, {died:,} killed"
    return "\n".join(_item(text + (f"; not all of {', '.join(survive)}" if survive else ""), width, ""))


def rivals(study: Study, inputs: str) -> str:
    """Judges by formats on one set of inputs: share of mutants rejected, share of honest cases rejected."""
    formats = figures.formats(study)
    rates = figures.rates(study)
    mutants = max((rate.mutants for key, rate in rates.items() if key[0] == inputs), default=0)
    cases = [_asked(rates, inputs, format) for format in formats]
    if not mutants and not any(cases):
        return ""
    judges = figures.asked(study, inputs)
    names = max(map(len, judges)) + 2
    lines = [
        f"rivals on {figures.INPUTS[inputs]}",
        " " * names + "".join(f"{format:>18}" for format in formats),
        " " * names + f"{'kills':>9}{'alarms':>9}" * len(formats),
    ]
    for judge in judges:
        shown = (_shown(rates[inputs, judge, format]) for format in formats)
        lines.append(f"  {judge}".ljust(names) + "".join(f"{kills:>9}{wrong:>9}" for kills, wrong in shown))
    honest = f"; of {_range(cases)} honest cases a format" if any(cases) else "; no honest case"
    return "\n".join([*lines, f"  of {counted(mutants, 'mutant')}{honest}"])


def apart(study: Study) -> str:
    """Judges by formats and inputs: share of mutants rejected in a case in which the reference is accepted."""
    formats, rates = figures.formats(study), figures.rates(study)
    if all(rate.apart is None for rate in rates.values()):
        return ""
    judges = figures.judges(study)
    names = max(map(len, judges)) + 2
    lines = [
        "told apart: the mutant rejected, the reference accepted in the same case",
        " " * names + "".join(f"{inputs:>{9 * len(formats)}}" for inputs in figures.INPUTS),
        " " * names + "".join(f"{format:>9}" for format in formats) * len(figures.INPUTS),
    ]
    for judge in judges:
        found = (rates[inputs, judge, format] for inputs in figures.INPUTS for format in formats)
        shown = ("-" if rate.apart is None else percent(rate.apart, rate.mutants) for rate in found)
        lines.append(f"  {judge}".ljust(names) + "".join(f"{share:>9}" for share in shown))
    return "\n".join(lines)


def honest(study: Study, width: int = WIDTH) -> str:
    """Our own judge on honest evaluations: how many, how near to the bound, how many decide nothing."""
    found = figures.honest(study)
    if not found:
        return ""
    rows = [
        (h.format, f"{h.cases:,}", f"{h.alarms:,}", percent(h.vacuous, h.cases), number(h.worst), h.operator)
        for h in found
    ]
    lines = _table(("honest cases", "judged", "alarms", "vacuous", "error/bound", "worst in"), rows, (0, 5))
    worst = max(found, key=lambda h: h.worst)
    return "\n".join([*lines, *_item(f"worst: {worst.operator}, {worst.format}: {worst.case}", width)])


def plan(study: Study) -> str:
    """What the profile smoke tries, and what the record says of it."""
    pairs = figures.planned(study)
    if not pairs or not figures.judged(study):
        return ""
    died, mutants = figures.planned_kills(study)
    seconds = sum(pair["seconds"] for _, pair in pairs)
    took = f"{counted(len(pairs), 'case')}, {seconds:.0f} s"
    return f"plan of smoke: {took}, {died:,} of {mutants:,} mutants killed by the record"


def survivors(study: Study, width: int = WIDTH) -> str:
    """Mutants that no law kills, then those that a law which they name does not, each with what it is."""
    rows = figures.judged(study)
    lines = []
    for title, found in (
        ("SURVIVE   no law kills", [row for row in rows if not figures.killed(row)]),
        ("SPARED    by a law that they name", [r for r in rows if figures.killed(r) and figures.missed(r)]),
    ):
        lines += [f"{title}: {len(found)}"] if found else []
        for row in found:
            lines += _item(f"{row['mutant']}   the reference with {row['what']}   [{figures.nearness(row)}]", width)
    return "\n".join(lines)


def alarms(study: Study, width: int = WIDTH) -> str:
    """Honest cases that our judge rejects."""
    rows = [row for row in study.get("honest", ()) if figures.alarms(row)]
    lines = [f"ALARMS    honest evaluations rejected: {sum(map(figures.alarms, rows)):,}"] if rows else []
    for row in rows:
        lines += _item(f"{row['operator']}, {row['format']}: {counted(figures.alarms(row), 'case')}", width)
        for case in row["failures"][:5]:
            lines += _item(case, width, "      ")
    for twin in study.get("twins", ()):
        if laws := figures.broken(twin):
            lines += _item(f"{twin['mutant']}: the reference breaks {', '.join(laws)}", width)
    return "\n".join(lines)


def drift(study: Study, width: int = WIDTH) -> str:
    """Where the committed plan and the measured matrix differ."""
    found = study.get("drift", ())
    lines = [f"DRIFT     the plan and this study differ: {len(found):,}"] if found else []
    for text in found[:20]:
        lines += _item(text, width)
    return "\n".join([*lines, *([f"  and {len(found) - 20:,} more"] if len(found) > 20 else [])])


def closing(study: Study, width: int = WIDTH) -> str:
    """What comes last: what was judged, what fails."""
    rows = figures.judged(study)
    cases = sum(row["cases"] for row in study.get("honest", ()))
    empty = figures.empty(study)
    says = [*figures.problems(study), *([f"nothing in {', '.join(empty)}"] if empty else [])]
    if not says:
        says = ["every mutant is killed by each law that it names"] if rows else []
        says += ["no honest alarm"] if cases else []
        says += ["no drift"] if rows and study.get("plan") else []
    judged = [counted(len(rows), "mutant")] if rows else []
    judged += [counted(cases, "honest case")] if cases else []
    not_run = [f"{counted(n, 'mutant')} not run: {why}" for why, n in figures.unjudged(study).items()]
    text = ": ".join(part for part in (", ".join(judged), ", ".join(says)) if part)
    return "\n".join(_item(text + (f"   ({'; '.join(not_run)})" if not_run else ""), width, ""))


def smoke(study: Study, least: float) -> tuple[str, float]:
    """What the budget plan killed in one line, below `least` also whom it spared; and its share."""
    rows = figures.judged(study)
    spared = [row["mutant"] for row in rows if row["first"] is None]
    dead = len(rows) - len(spared)
    share = dead / max(1, len(rows))
    line = (
        f"smoke: {dead:,} of {len(rows):,} mutants die by the budget plan, {100 * share:.1f} %, "
        f"in {study['seconds']:.0f} s on {study['cores']} cores"
    )
    return "\n".join([line, *(f"  survives  {name}" for name in spared if share < least)]), share


def exit_code(study: Study) -> int:
    """pytest's own: 0 if every mutant died by each law that it names, no honest case was rejected and the plan has not
    drifted; 1 otherwise; 5 if a part that was asked for holds nothing."""
    if figures.problems(study):
        return 1
    return 5 if figures.empty(study) else 0


def markdown(study: Study) -> str:
    """The rivals as tables that GitHub shows, one for each set of inputs: kills / false alarms."""
    formats, rates = figures.formats(study), figures.rates(study)
    tables = []
    for inputs, title in figures.INPUTS.items():
        lines = [f"| {title} | {' | '.join(formats)} |", "|---|" + "---:|" * len(formats)]
        for judge in figures.asked(study, inputs):
            pairs = (_shown(rates[inputs, judge, format]) for format in formats)
            cells = ("-" if pair == ("-", "-") else " / ".join(pair) for pair in pairs)
            mark = "**" if judge in (JUDGE, LAWS) else ""
            lines.append(f"| {mark}{judge}{mark} | " + " | ".join(f"{mark}{cell}{mark}" for cell in cells) + " |")
        tables.append("\n".join(lines))
    mutants = max((rate.mutants for rate in rates.values()), default=0)
    cases = [_range([_asked(rates, inputs, format) for format in formats]) for inputs in figures.INPUTS]
    note = (
        f"Share of {mutants:,} mutants rejected / share of honest evaluations rejected, {' and '.join(cases)} a format"
        f"\n(`mixproof power --profile {study.get('profile', 'ci')}`, seed {study.get('seed', 0)})."
    )
    return "\n\n".join([*tables, note]) + "\n"


def as_json(study: Study) -> str:
    """The study itself, one row a line; fields are added freely, removed or renamed only with a new `schema`.

    Raises ValueError for a number that JSON does not have: infinite ratios are the string "inf"."""

    def dumped(value: Any) -> str:
        return json.dumps(value, allow_nan=False)

    fields = []
    for key, value in ({"schema": SCHEMA} | dict(study)).items():
        text = (
            "[\n  " + ",\n  ".join(map(dumped, value)) + "\n ]" if value and isinstance(value, list) else dumped(value)
        )
        fields.append(f" {dumped(key)}: {text}")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def html(study: Study) -> str:
    """One self-contained page. Raises ModuleNotFoundError without jinja2, the extra `report`."""
    from mixproof.verify.report.power_page import page

    return page(study)


def _shown(rate: Rate) -> tuple[str, str]:
    """Shares of mutants and of honest cases rejected; "-" where the judge was not asked."""
    kills = "-" if rate.killed is None else percent(rate.killed, rate.mutants)
    wrong = "-" if rate.alarms is None else percent(rate.alarms, rate.cases)
    return kills, wrong


def _asked(rates: Mapping[tuple[str, str, str], Rate], inputs: str, format: str) -> int:
    """Honest cases of a format on which a judge was asked."""
    return max((rate.cases for key, rate in rates.items() if key[0] == inputs and key[2] == format), default=0)


def _range(counts: Sequence[int]) -> str:
    least, most = min(counts, default=0), max(counts, default=0)
    return f"{most:,}" if least == most else f"{least:,} to {most:,}"


def _item(text: str, width: int, margin: str = "  ") -> list[str]:
    return textwrap.wrap(text, width, initial_indent=margin, subsequent_indent=margin + "  ", break_on_hyphens=False)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Columns as wide as what they hold; those in `left` are flush left, numbers flush right."""
    rows = [head, *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = []
    for k, row in enumerate(rows):
        cells = (c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        lines.append(("  " if k else "") + "  ".join(cells).rstrip())
    first = widths[0] + 2  # the heading of the first column stands out by two
    lines[0] = head[0].ljust(first) + lines[0][widths[0] :]
    return lines
