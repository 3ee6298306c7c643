"""The ledger as text, JSON, Markdown and a page, from claims as plain dicts. Pure functions."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence

from mixproof.verify.report.page import rendered

Record = Mapping[str, str]
SCHEMA = 1
LABELS = {"holds only if": "only if", "refuted": "counterexample", "not checkable": "because"}
ORDER = ("proved", "holds", "holds only if", "refuted", "not checkable")
NARROWEST, WIDEST = 80, 120


def table(claims: Sequence[Record], width: int = NARROWEST) -> str:
    """Id, verdict, claim and source; below it the condition, the counterexample or what is missing."""
    if not claims:
        return "no such claim"
    width = min(max(width, NARROWEST), WIDEST)
    ids, verdicts = (max(len(c[key]) for c in claims) + 2 for key in ("id", "verdict"))
    margin = " " * (ids + verdicts)
    lines = []
    for c in claims:
        head = c["id"].ljust(ids) + c["verdict"].ljust(verdicts)
        lines += _wrapped(f"{c['text']}   [{c['source']}]", width, head, margin)
        if c["why"]:
            lines += _labelled(LABELS[c["verdict"]], c["why"], width, margin)
    return "\n".join([*lines, "", counts(claims)])


def markdown(claims: Sequence[Record]) -> str:
    """A table that GitHub shows."""

    def cell(text: str) -> str:
        return text.replace("|", "\\|")

    rows = [
        f"| {c['id']} | {c['source']} | {cell(c['text'])} | {c['verdict']} | {cell(c['why'])} | {c['evidence']} |"
        for c in claims
    ]
    head = ["| id | source | claim | verdict | condition, counterexample or gap | evidence |", "|" + "---|" * 6]
    return "\n".join([*head, *rows, "", counts(claims)])


def as_json(claims: Sequence[Record]) -> str:
    """{"schema": 1, "claims": [...]}; fields are added freely, removed or renamed only with a new number."""
    return json.dumps({"schema": SCHEMA, "claims": [dict(c) for c in claims]}, indent=1)


def html(claims: Sequence[Record]) -> str:
    """One self-contained page. Raises ModuleNotFoundError without jinja2, the extra `report`."""
    papers = {p: [c for c in claims if c["id"].split(".")[0] == p] for p in (c["id"].split(".")[0] for c in claims)}
    return rendered("claims.html.jinja", papers=papers, labels=LABELS, counts=counts, total=counts(claims)) + "\n"


def explained(claim: Record, found: Record, width: int = NARROWEST) -> str:
    """One claim with the numbers of its check, just run."""
    width = min(max(width, NARROWEST), WIDEST)
    lines = _wrapped(f"{claim['id']}   {claim['text']}", width, "", "  ")
    lines += _labelled("source", claim["source"], width)
    lines += _labelled("verdict", claim["verdict"], width)
    if claim["why"]:
        lines += _labelled(LABELS[claim["verdict"]], claim["why"], width)
    lines += _labelled("evidence", claim["evidence"], width)
    lines += _labelled("found", f"{found['verdict']}: {found['numbers']}", width)
    return "\n".join([*lines, *_labelled("check", claim["check"], width)])


def objection(claim: Record, found: Record) -> str:
    """Why a run must fail: the check found another verdict. Nothing if it found the same."""
    if found["verdict"] == claim["verdict"]:
        return ""
    return "\n".join(
        (
            f"CHANGED  {claim['id']}   declared {claim['verdict']!r}, found {found['verdict']!r}",
            f"  claim      {claim['text']}   [{claim['source']}]",
            f"  found      {found['numbers']}",
            f"  evidence   {claim['evidence']}: {claim['check']}",
            f"  recheck    mixproof claims show {claim['id']}",
        )
    )


def counts(claims: Sequence[Record]) -> str:
    """The closing line."""
    of = Counter(c["verdict"] for c in claims)
    return f"{len(claims)} claim{'s' * (len(claims) != 1)}: " + ", ".join(
        f"{of[verdict]} {verdict}" for verdict in ORDER if of[verdict]
    )


def _labelled(label: str, text: str, width: int, margin: str = "") -> list[str]:
    """Below an entry of the table, or as a line of its own with its label in a column."""
    head = f"{margin}{label}: " if margin else f"  {label}".ljust(18)
    return _wrapped(text, width, head, margin + "  " if margin else " " * 18)


def _wrapped(text: str, width: int, first: str, later: str) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=later, break_on_hyphens=False)
