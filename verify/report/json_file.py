"""Verdicts as JSON, `schema` 1: fields are added freely, removed or renamed only with a new number."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mixproof.verify.verdict import Verdict

SCHEMA = 1


def as_json(verdicts: Sequence[Verdict], environment: Mapping[str, str]) -> dict[str, Any]:
    """{"schema", "environment", "verdicts", "not_run", "not_applicable"}; the last two hold reasons."""

    def reasons(status: str) -> list[dict[str, str]]:
        return [{"cell": v.cell, "why": v.why} for v in verdicts if v.status == status]

    return {
        "schema": SCHEMA,
        "environment": dict(environment),
        "verdicts": [v.as_dict() for v in verdicts if v.status not in ("not run", "not applicable")],
        "not_run": reasons("not run"),
        "not_applicable": reasons("not applicable"),
    }


def write_json(path: str, verdicts: Sequence[Verdict], environment: Mapping[str, str]) -> None:
    """Raises OSError if the file cannot be written."""
    Path(path).write_text(json.dumps(as_json(verdicts, environment), indent=1) + "\n")
