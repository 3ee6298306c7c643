"""The words and columns of a report, from made-up verdicts."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import pytest

from mixproof.verify.report import json_file, terminal
from mixproof.verify.verdict import Verdict

BROKEN = Verdict(
    "retention/mine/forward",
    "fail",
    41712.0,
    statement="outputs = reference, up to rounding",
    cases=7,
    case="B=1 H=1 T=65 K=1 V=1 dtype=float32",
    context="T=64 passes; B, H, K, V any value",
    where="O[0, 0, 64, 0]   (B, H, T, V)   got 0.791747   want 0.745673   |error| 0.046   bound 1.1e-06",
    equals="the reference with the carried state not decayed   (0.3 x bound)",
    why="an honest evaluation in float32 stays within 1.1e-06, whatever its order of summation",
    replay="mixproof replay gate.py 'retention/mine/forward B=1 H=1 T=65 K=1 V=1 dtype=float32'",
)
VERDICTS = [
    BROKEN,
    Verdict("retention/torch.chunkwise/forward", "pass", 0.3123, cases=1200),
    Verdict("retention/fla.fused_recurrent_retention/forward", "not run", why="fla is not installed"),
    Verdict("retention/mine/vjp", "not applicable", why="declares no gradients"),
    Verdict(
        "retention/torch.chunkwise/vjp", "undecided", 1.0, why="the oracle's own error straddles the bound", cases=3
    ),
    Verdict("retention/fla.fused_recurrent_retention/vjp", "not run", why="fla is not installed"),
    Verdict("retention/mine/causality", "fail", math.inf, True, cases=1),
    Verdict("retention/torch.chunkwise/causality", "pass", 0.0, True, cases=5),
    Verdict("retention/fla.fused_recurrent_retention/causality", "not run", why="fla is not installed"),
    Verdict("retention/mine/exact", "not applicable", why="about the reference's own forms"),
    Verdict("retention/torch.chunkwise/exact", "not applicable", why="about the reference's own forms"),
    Verdict("gma.causal/mine/forward", "error", why="Traceback: boom"),
]


def test_a_failure_is_six_lines() -> None:
    assert terminal.failure(BROKEN) == (
        "BROKEN  retention/mine/forward   41700 x bound   outputs = reference, up to rounding\n"
        "  smallest   B=1 H=1 T=65 K=1 V=1 dtype=float32   (T=64 passes; B, H, K, V any value)\n"
        "  at         O[0, 0, 64, 0]   (B, H, T, V)   got 0.791747   want 0.745673   |error| 0.046   bound 1.1e-06\n"
        "  because    an honest evaluation in float32 stays within 1.1e-06, whatever its order of summation\n"
        "  equals     the reference with the carried state not decayed   (0.3 x bound)\n"
        "  replay     mixproof replay gate.py 'retention/mine/forward B=1 H=1 T=65 K=1 V=1 dtype=float32'"
    )


def test_a_failure_without_an_output_is_six_lines_too() -> None:
    verdict = Verdict(
        "retention/mine/forward",
        "fail",
        math.inf,
        statement="outputs = reference",
        case="T=1",
        why="it raised",
        replay="r",
    )
    assert terminal.failure(verdict) == (
        "BROKEN  retention/mine/forward   outputs = reference\n"
        "  smallest   T=1\n"
        "  at         the call itself: there is no output to compare\n"
        "  because    it raised\n"
        "  equals     no known mutant of the reference\n"
        "  replay     r"
    )


SUMMARY = """\
retention                          fla.fused_
                           torch.  recurrent_
                  mine  chunkwise   retention
  forward       41700!       0.31           -
  vjp                           ?           -
  causality    broken!          =           -

gma.causal       mine
  forward       ERROR

worst |error| / bound: <= 1 holds, ! is broken, = is bit-equal
? undecided, - not run here, blank: the law does not apply
not run here:
      3  fla is not installed
does not apply:
      2  about the reference's own forms
      1  declares no gradients
2 cells hold, 2 broken, 1,216 cases, 104 s   (1 undecided, 1 ended in a bug of ours, 3 not run here)"""


def test_the_summary() -> None:
    assert terminal.summary(VERDICTS, 104.2) == SUMMARY


def test_colors_change_no_letter() -> None:
    colored = terminal.summary(VERDICTS, 104.2, color=True)
    assert "\x1b[1;31m41700!\x1b[0m" in colored
    assert re.sub(r"\x1b\[[\d;]*m", "", colored) == SUMMARY


EIGHT = [
    *(f"reference.{form}" for form in ("chunkwise", "parallel", "recurrent")),
    *("torch.eager", "torch.chunkwise", "triton.fused", "fla.fused_recurrent_retention", "fla.chunk_retention.half"),
]


@pytest.mark.parametrize(("width", "tables"), [(0, 2), (80, 2), (100, 2), (120, 1), (300, 1)])
def test_eight_implementations_stay_within_the_screen(width: int, tables: int) -> None:
    verdicts = [
        Verdict(f"retention/{s}/{law}", "fail", 41712.0) for law in ("forward", "gradient_causality") for s in EIGHT
    ]
    lines = terminal.matrix(verdicts, width).splitlines()
    assert max(map(len, lines)) <= min(max(width, 80), 120)
    assert sum(line.startswith("retention") for line in lines) == tables
    assert sum(line.count("41700!") for line in lines) == len(verdicts)


def test_rows_and_columns_without_a_figure_are_left_out() -> None:
    never = Verdict("retention/b/vjp", "not applicable", why="declares no gradients")
    verdicts = [
        Verdict("retention/a/forward", "pass", 0.5),
        never,
        dataclasses.replace(never, cell="retention/b/exact"),
    ]
    assert terminal.matrix(verdicts) == "retention          a\n  forward        0.5\n"
    assert terminal.matrix([never]) == ""


def test_one_very_long_name_gets_its_table() -> None:
    name = "n" * 150
    table = terminal.matrix([Verdict(f"retention/{s}/forward", "pass", 0.5) for s in ("a", name, "b")])
    assert [line.split() for line in table.splitlines() if line.startswith("retention")] == [
        ["retention", "a"],
        ["retention", name],
        ["retention", "b"],
    ]


def test_a_dtype_that_was_withheld_is_not_passed_over() -> None:
    why = "triton runs interpreted on CPU: bfloat16 verdicts withheld (the interpreter fails a 2-line bfloat16 canary)"
    text = terminal.summary([Verdict("a/b/c", "pass", 0.5, cases=1, withheld=why)], 1)
    assert f"not run here:\n      1  {why}\n1 cell holds, 0 broken, 1 case, 1 s" in text


def test_nothing_checked_is_said_with_the_reason() -> None:
    verdicts = [
        Verdict("a/b/c", "not run", why="triton needs cuda or TRITON_INTERPRET=1"),
        Verdict("a/b/d", "not applicable", why="declares no gradients"),
    ]
    assert terminal.closing(verdicts, 3) == "0 cells checked: triton needs cuda or TRITON_INTERPRET=1; exit 5"
    assert terminal.closing([], 3) == "0 cells checked; exit 5"


@pytest.mark.parametrize(
    ("verdict", "text"),
    [
        (Verdict("a/b/c", "pass", 0.0412, case="T=1"), "holds   a/b/c   0.0412 x bound   T=1"),
        (Verdict("a/b/c", "pass", 0.0, True, case="T=1"), "holds   a/b/c   bit-equal   T=1"),
        (Verdict("a/b/c", "undecided", 1.0, why="the reason"), "undecided   a/b/c: the reason"),
        (Verdict("a/b/c", "not applicable", why="the reason"), "not applicable   a/b/c: the reason"),
        (Verdict("a/b/c", "error", why="boom"), "ERROR   a/b/c: a bug of ours, please report it\nboom"),
    ],
)
def test_one_verdict_in_one_line(verdict: Verdict, text: str) -> None:
    assert terminal.line(verdict) == text


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (0.0, "0"),
        (0.04213, "0.0421"),
        (0.31234, "0.312"),
        (1.0, "1"),
        (0.99999, "1"),
        (1.0004, "1.0004"),
        (1 + 2**-30, "1.0000000009313226"),
        (54.123, "54.1"),
        (41712.0, "41700"),
        (4171234.0, "4170000"),
        (4.17e9, "4.17e9"),
        (4.17e-5, "4.17e-5"),
        (math.inf, "inf"),
    ],
)
def test_numbers_are_readable(x: float, text: str) -> None:
    assert terminal.number(x) == text


def test_exit_codes() -> None:
    def code(*statuses: str, strict: bool = False, **fields: str) -> int:
        return terminal.exit_code([Verdict("a/b/c", s, **fields) for s in statuses], strict)

    assert code("pass", "not run", "undecided", "not applicable") == 0
    assert code("pass", "fail") == 1
    assert code("pass", "fail", "error") == 3
    assert code("not run", "not applicable") == code() == 5
    assert code("undecided") == 5
    assert code("pass", "not applicable", strict=True) == 0
    assert code("pass", "undecided", strict=True) == 1
    assert code("pass", "not run", strict=True) == 1
    assert code("not run", strict=True) == 5
    assert code("pass", withheld="bfloat16 verdicts withheld") == 0
    assert code("pass", strict=True, withheld="bfloat16 verdicts withheld") == 1


def test_json() -> None:
    data = json_file.as_json(VERDICTS, {"mixproof": "0.1.0"})
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert list(data) == ["schema", "environment", "verdicts", "not_run", "not_applicable"]
    assert data["schema"] == 1
    assert data["environment"] == {"mixproof": "0.1.0"}
    assert data["verdicts"][0] == {
        "cell": "retention/mine/forward",
        "status": "fail",
        "ratio": 41712.0,
        "bitwise": False,
        "cases": 7,
        "vacuous": 0,
        "seconds": 0.0,
        **{n: getattr(BROKEN, n) for n in ("statement", "case", "context", "where", "equals", "why", "replay")},
    }
    assert [v["ratio"] for v in data["verdicts"] if v["cell"] == "retention/mine/causality"] == ["inf"]
    assert {"cell": "retention/fla.fused_recurrent_retention/vjp", "why": "fla is not installed"} in data["not_run"]
    assert {"cell": "retention/mine/vjp", "why": "declares no gradients"} in data["not_applicable"]
    assert len(data["verdicts"]) + len(data["not_run"]) + len(data["not_applicable"]) == len(VERDICTS)


def test_json_file(tmp_path) -> None:
    path = tmp_path / "mixproof.json"
    json_file.write_json(str(path), VERDICTS, {})
    assert json.loads(path.read_text()) == json_file.as_json(VERDICTS, {})
    with pytest.raises(OSError, match="No such file"):
        json_file.write_json(str(tmp_path / "missing" / "mixproof.json"), VERDICTS, {})


def test_verdicts_survive_json() -> None:
    for verdict in VERDICTS:
        assert Verdict.from_dict(json.loads(json.dumps(verdict.as_dict())) | {"of_a_later_version": 1}) == verdict
