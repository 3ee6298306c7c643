"""Which arithmetic implementations used, in words: a line or two each. Findings come as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

HELD, NARROWER, NOTHING = 0, 1, 5
SAID = ("as declared", "wider", "narrower", "unclear")
# where it usually comes from
HINTS = {
    "TF32 operands": 'is torch.backends.cuda.matmul.allow_tf32 on, or tl.dot without input_precision="ieee"?',
    "bfloat16 operands": "is an operand cast to bfloat16 before a dot product, by autocast or by hand?",
    "float16 operands": "is an operand cast to float16 before a dot product, by autocast or by hand?",
    "bfloat16 accumulation": "is an accumulator, or a state, kept in bfloat16?",
    "float16 accumulation": "is an accumulator, or a state, kept in float16?",
    "bfloat16 intermediates": "are the inputs cast, or is autocast on?",
    "float16 intermediates": "are the inputs cast, or is autocast on?",
    "float32": "are the inputs cast, or is a constant or a buffer of float32?",
}


def table(findings: Sequence[Mapping[str, Any]]) -> str:
    """Each finding: the implementation and dtype, what was declared, what was found; and what to do about it."""
    cells = [(f["implementation"], f["dtype"], f"declared {f['declared']}") for f in findings]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)] if cells else []
    lines = []
    for finding, cell in zip(findings, cells, strict=True):
        start = "  ".join(word.ljust(n) for word, n in zip(cell, widths, strict=True))
        lines.append(f"{start}  {finding['sentence']}")
        if finding["outcome"] == "narrower" and (hint := HINTS.get(finding["found"][0])):
            lines.append(f"  {hint}")
    return "\n".join(lines)


def exit_code(findings: Iterable[Mapping[str, Any]]) -> int:
    """1 if one computes more narrowly than it declares, 5 if nothing could be said of any."""
    outcomes = [f["outcome"] for f in findings]
    if "narrower" in outcomes:
        return NARROWER
    return HELD if any(outcome in SAID for outcome in outcomes) else NOTHING
