"""Verdicts as text: the matrix, the six lines of a failure, the closing line. Pure functions."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from mixproof.verify.verdict import Verdict

MARKS = {"fail": "BROKEN", "undecided": "?", "error": "ERROR", "not run": "-"}
LEGEND = "worst error / bound; <= 1 holds; = is bit-equal; ? undecided; - not run"


def figure(verdict: Verdict) -> str:
    """One square of the matrix."""
    if verdict.status == "pass":
        return "=" if verdict.bitwise and verdict.ratio == 0 else f"{verdict.ratio:.2g}"
    if verdict.status == "fail":
        return "BROKEN" if verdict.ratio == float("inf") else f"{verdict.ratio:.3g}!"
    return MARKS[verdict.status]


def matrix(verdicts: Sequence[Verdict], width: int = 120, color: bool = False) -> str:
    """Operator and implementation by law, with the worst error / bound, one table an operator."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=color, no_color=not color, highlight=False)
    for operator in dict.fromkeys(v.operator for v in verdicts):
        own = [v for v in verdicts if v.operator == operator]
        cells = {(v.subject, v.law): v for v in own}
        subjects = list(dict.fromkeys(v.subject for v in own))
        laws = list(dict.fromkeys(v.law for v in own if v.status != "not run"))
        # laws run downwards: there are more of them than implementations, and names stay readable at 80 columns
        table = Table(box=box.SIMPLE_HEAD, title=operator, title_justify="left", title_style="bold", pad_edge=False)
        table.add_column("")
        for subject in subjects:
            table.add_column(subject, justify="right", overflow="fold")
        for law in laws:
            row = [cells.get((subject, law)) for subject in subjects]
            table.add_row(law, *("" if v is None else _styled(v) for v in row))
        if laws:
            console.print(table)
    return out.getvalue().rstrip() + "\n"


def _styled(verdict: Verdict) -> str:
    style = {"fail": "bold red", "error": "bold red", "undecided": "yellow", "not run": "dim"}.get(verdict.status)
    return f"[{style}]{figure(verdict)}[/]" if style else figure(verdict)


def failure(verdict: Verdict) -> str:
    """Six lines, always in this order: law and ratio; smallest case and what does not matter; where, got, want, bound;
    what the output equals, if it is a known mutant of the reference; replay."""
    if verdict.status == "error":
        return f"ERROR   {verdict.cell}: a bug of ours, please report it\n{verdict.why}"
    ratio = "" if verdict.ratio == float("inf") else f"   {verdict.ratio:.3g} x bound"
    context = f"   ({verdict.context})" if verdict.context else ""
    lines = [f"BROKEN  {verdict.cell}{ratio}   {verdict.statement}", f"  smallest   {verdict.case}{context}"]
    lines.append(f"  at         {verdict.where}" if verdict.where else f"  because    {verdict.why}")
    if verdict.equals:
        lines.append(f"  equals     {verdict.equals}")
    elif verdict.where:
        lines.append("  equals     no known mutant of the reference")
    lines.append(f"  replay     {verdict.replay}")
    return "\n".join(lines)


def not_run(verdicts: Iterable[Verdict]) -> str:
    """Why cells were not run, each reason once with its count."""
    reasons: dict[str, int] = {}
    for v in verdicts:
        if v.status == "not run":
            reasons[v.why] = reasons.get(v.why, 0) + 1
    return "\n".join(f"  {n:4d}  {why}" for why, n in sorted(reasons.items(), key=lambda item: -item[1]))


def closing(verdicts: Sequence[Verdict], seconds: float) -> str:
    """The last line: what held, what broke, what was not looked at."""
    count = {s: sum(v.status == s for v in verdicts) for s in ("pass", "fail", "undecided", "not run", "error")}
    cases = sum(v.cases for v in verdicts)
    text = f"{count['pass']} cells hold, {count['fail']} broken, {cases:,} cases, {seconds:.0f} s"
    more = [f"{count[s]} {s}" for s in ("undecided", "not run", "error") if count[s]]
    return text + (f"   ({', '.join(more)})" if more else "")


def exit_code(verdicts: Sequence[Verdict], strict: bool = False) -> int:
    """pytest's own: 0 holds, 1 broken, 3 our bug, 5 nothing was checked."""
    statuses = {v.status for v in verdicts}
    if "error" in statuses:
        return 3
    if "fail" in statuses or (strict and statuses & {"undecided", "not run"}):
        return 1
    return 0 if "pass" in statuses else 5
