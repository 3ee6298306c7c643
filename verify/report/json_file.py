"""Verdicts as JSON, `schema` 1: fields are added freely, removed or renamed only with a new number."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from mixproof.verify.verdict import Verdict
from mixproof.verify.versions import versions


def write_json(path: str, verdicts: Sequence[Verdict]) -> None:
    """Write {"schema", "environment", "verdicts", "not_run"}."""
    data = {
        "schema": 1,
        "environment": versions(),
        "verdicts": [v.as_dict() for v in verdicts if v.status != "not run"],
        "not_run": [{"cell": v.cell, "why": v.why} for v in verdicts if v.status == "not run"],
    }
    Path(path).write_text(json.dumps(data, indent=1) + "\n")
