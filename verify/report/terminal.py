"""Verdicts as text: the six lines of a failure, the matrix, what was not judged, the closing line. Pure functions."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from mixproof.verify.verdict import Verdict

MARKS = {"error": "ERROR", "undecided": "?", "not run": "-"}
COLORS = {"fail": "1;31", "error": "1;31", "undecided": "33", "not run": "2"}
LEGEND = """worst |error| / bound: <= 1 holds, ! is broken, = is bit-equal
? undecided, - not run here, blank: the law does not apply"""
HEAD = 13  # a longer name of an implementation is broken at a dot or underscore, one piece below the other
NARROWEST, WIDEST = 80, 120


def number(x: float, digits: int = 3) -> str:
    """Written out where a reader would: 0.042, 3.14, 41700; else 2.1e9, 4.2e-5. Above 1 it never looks like 1."""
    if not math.isfinite(x):
        return str(x)
    text = f"{x:.{digits}g}"
    if x > 1 and float(text) <= 1:
        return f"{x:.7f}".rstrip("0") if x - 1 >= 1e-7 else repr(x)
    if "e" not in text:
        return text
    if 1 <= x < 1e7:
        return f"{float(text):.0f}"
    mantissa, exponent = text.split("e")
    return f"{mantissa}e{int(exponent)}"


def figure(verdict: Verdict) -> str:
    """One square of the matrix."""
    if verdict.status == "pass":
        return "=" if verdict.bitwise and verdict.ratio == 0 else number(verdict.ratio, 2)
    if verdict.status == "fail":
        return "broken!" if math.isinf(verdict.ratio) else f"{number(verdict.ratio)}!"
    return MARKS[verdict.status]


def failure(verdict: Verdict) -> str:
    """Six lines, always in this order: law and ratio; smallest case, and what does not matter; where, got, want, bound;
    what is wrong with that; what the output equals, if it is a known mutant of the reference; replay."""
    if verdict.status == "error":
        return f"ERROR   {verdict.cell}: a bug of ours, please report it\n{verdict.why}"
    ratio = "" if math.isinf(verdict.ratio) else f"   {number(verdict.ratio)} x bound"
    context = f"   ({verdict.context})" if verdict.context else ""
    return "\n".join(
        (
            f"BROKEN  {verdict.cell}{ratio}   {verdict.statement}",
            f"  smallest   {verdict.case}{context}",
            f"  at         {verdict.where or 'the call itself: there is no output to compare'}",
            f"  because    {verdict.why}",
            f"  equals     {verdict.equals or 'no known mutant of the reference'}",
            f"  replay     {verdict.replay}",
        )
    )


def summary(verdicts: Sequence[Verdict], seconds: float, width: int = NARROWEST, color: bool = False) -> str:
    """What comes last on a screen: the matrix, its legend, what was not judged and why, the closing line."""
    table = matrix(verdicts, width, color)
    parts = [table, table and LEGEND, unjudged(verdicts), closing(verdicts, seconds)]
    return "\n".join(part for part in parts if part)


def matrix(verdicts: Sequence[Verdict], width: int = NARROWEST, color: bool = False) -> str:
    """For each operator a table of laws (rows) by implementations (columns), in several pieces where it is wide.

    A table is 80 columns wide, up to 120 where the screen has them, unless one implementation needs more."""
    tables = []
    for operator in dict.fromkeys(v.operator for v in verdicts):
        shown = [v for v in verdicts if v.operator == operator and v.status != "not applicable"]
        if shown:
            margin = max(len(operator), 2 + max(len(v.law) for v in shown))
            heads = {s: _pieces(s) for s in dict.fromkeys(v.subject for v in shown)}
            widths = {s: 2 + max(9, *map(len, pieces)) for s, pieces in heads.items()}
            room = min(max(width, NARROWEST), WIDEST) - margin
            for subjects in _blocks(widths, room):
                cells = {(v.law, v.subject): v for v in shown if v.subject in subjects}
                laws = [law for law in dict.fromkeys(v.law for v in shown) if any(law == own for own, _ in cells)]
                tables.append(_table(operator, laws, subjects, cells, heads, widths, margin, color))
    return "\n".join(tables)


def _table(
    operator: str,
    laws: list[str],
    subjects: list[str],
    cells: dict[tuple[str, str], Verdict],
    heads: dict[str, list[str]],
    widths: dict[str, int],
    margin: int,
    color: bool,
) -> str:
    height = max(len(heads[s]) for s in subjects)
    lines = []
    for i in range(height):
        pieces = ("".join(heads[s][i - height :][:1]) if i >= height - len(heads[s]) else "" for s in subjects)
        line = (operator if i == 0 else "").ljust(margin) + "".join(
            p.rjust(widths[s]) for p, s in zip(pieces, subjects, strict=True)
        )
        lines.append(_painted(line.rstrip(), "1" if color else ""))
    for law in laws:
        line = f"  {law}".ljust(margin)
        for s in subjects:
            verdict = cells.get((law, s))
            square = "" if verdict is None else figure(verdict)
            paint = COLORS.get(verdict.status, "") if color and verdict is not None else ""
            line += " " * (widths[s] - len(square)) + _painted(square, paint)
        lines.append(line.rstrip())
    return "\n".join(lines) + "\n"


def _painted(text: str, code: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if code and text else text


def _pieces(name: str) -> list[str]:
    """A name as lines of at most HEAD characters where its dots and underscores allow that."""
    lines = [""]
    for piece in re.split(r"(?<=[._-])(?=.)", name):
        if lines[-1] and len(lines[-1] + piece) > HEAD:
            lines.append("")
        lines[-1] += piece
    return lines


def _blocks(widths: dict[str, int], room: int) -> list[list[str]]:
    """The columns of each table: as many as fit, at least one."""
    blocks: list[list[str]] = [[]]
    left = room
    for subject, w in widths.items():
        if blocks[-1] and w > left:
            blocks.append([])
            left = room
        blocks[-1].append(subject)
        left -= w
    return blocks


def unjudged(verdicts: Iterable[Verdict]) -> str:
    """What was not judged, each reason once with its count: first what this machine could not run, then what does not
    apply, which no machine would."""
    verdicts = list(verdicts)
    here = Counter(v.why for v in verdicts if v.status == "not run")
    withheld = Counter(v.withheld for v in verdicts if v.withheld)
    never = Counter(v.why for v in verdicts if v.status == "not applicable")
    lines = []
    for title, reasons in (("not run here", here + withheld), ("does not apply", never)):
        if reasons:
            lines.append(f"{title}:")
            lines += [f"  {n:5d}  {why}" for why, n in sorted(reasons.items(), key=lambda item: (-item[1], item[0]))]
    return "\n".join(lines)


def closing(verdicts: Sequence[Verdict], seconds: float) -> str:
    """The last line: what held, what broke, what was not looked at."""
    count = Counter(v.status for v in verdicts)
    if not count["pass"] + count["fail"] + count["undecided"] + count["error"]:
        reasons = Counter(v.why for v in verdicts if v.status == "not run") or Counter(v.why for v in verdicts)
        why = f": {reasons.most_common(1)[0][0]}" if reasons else ""
        return f"0 cells checked{why}; exit 5"
    cases = sum(v.cases for v in verdicts)
    hold = "1 cell holds" if count["pass"] == 1 else f"{count['pass']} cells hold"
    text = f"{hold}, {count['fail']} broken, {cases:,} case{'s' * (cases != 1)}, {seconds:.0f} s"
    more = [f"{count[s]} {words}" for s, words in OTHERS.items() if count[s]]
    return text + (f"   ({', '.join(more)})" if more else "")


OTHERS = {"undecided": "undecided", "error": "ended in a bug of ours", "not run": "not run here"}


def line(verdict: Verdict) -> str:
    """One verdict by itself, as `mixproof replay` prints it."""
    if verdict.status in ("fail", "error"):
        return failure(verdict)
    if verdict.status == "pass":
        ratio = "bit-equal" if verdict.bitwise and verdict.ratio == 0 else f"{number(verdict.ratio)} x bound"
        return f"holds   {verdict.cell}   {ratio}   {verdict.case}"
    return f"{verdict.status}   {verdict.cell}: {verdict.why}"


def objection(verdict: Verdict, strict: bool = False) -> str:
    """Why this verdict fails a run, or nothing. `strict` objects to whatever was declared and not decided."""
    if verdict.status in ("fail", "error"):
        return failure(verdict)
    if strict and verdict.status in ("undecided", "not run"):
        return f"{verdict.status}   {verdict.cell}: {verdict.why}"
    return f"not run   {verdict.cell}: {verdict.withheld}" if strict and verdict.withheld else ""


def exit_code(verdicts: Sequence[Verdict], strict: bool = False) -> int:
    """pytest's own: 0 holds, 1 broken, 3 our bug, 5 nothing was checked."""
    statuses = {v.status for v in verdicts}
    if "error" in statuses:
        return 3
    if not statuses & {"pass", "fail", "undecided"}:
        return 5
    if any(objection(v, strict) for v in verdicts):
        return 1
    return 0 if "pass" in statuses else 5
