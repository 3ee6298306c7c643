"""The ledger: what its entries must say, and that a check which finds another verdict is heard."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mixproof.reference import cost_survey, mamba, mla, mtla, retention, runge_kutta, softmax_attention, titans
from mixproof.verify import claims
from mixproof.verify.__main__ import main
from mixproof.verify.claims import Finding, claim, conditional, holds, ledger, proved, survey
from mixproof.verify.claims.evidence import apart, draw, one_function, same
from mixproof.verify.errors import UsageError
from mixproof.verify.report import claims as report
from mixproof.verify.report import page as page_of

SURVEY = {
    "A": 5, "S": 7, "R": 7, "M": 9, "O": 5, "T": 7, "L": 6, "G": 5, "P": 5, "K": 5, "I": 5, "V": 4, "B": 6, "C": 6,
    "Q": 5, "N": 5,
}  # fmt: skip
WRONG_READINGS = ("A1", "S2", "S3", "L2", "M5", "O2", "P2", "P3", "T3", "B1", "B2", "Q2", "V3")
CONDITIONAL = ("L3", "G1", "B3", "T5", "M4", "O1", "V1", "K5", "C2", "P1")

ALL = ledger()


def words(text: str) -> str:
    return " ".join(text.split())


# --- the entries -----------------------------------------------------------------------------------------------------


def test_the_survey_is_covered() -> None:
    assert set(ledger("survey")) == {f"survey.{letter}{i + 1}" for letter, n in SURVEY.items() for i in range(n)}


def test_wrong_readings_are_refuted_or_conditional() -> None:
    assert {ALL[f"survey.{i}"].verdict for i in WRONG_READINGS} == {"refuted"}
    assert {ALL[f"survey.{i}"].verdict for i in CONDITIONAL} == {"holds only if"}


@pytest.mark.parametrize("id", ALL)
def test_an_entry_says_what_a_reader_needs(id: str) -> None:
    c = ALL[id]
    assert re.fullmatch(r"[a-z]+\.[A-Z]\d+", id)
    assert c.paper in claims.PAPERS
    assert all((c.text, c.source))
    assert (len(c.why) > 10) == (c.verdict in ("holds only if", "refuted", "not checkable"))
    assert not re.search(r"todo|tbd|xxx", " ".join(c.as_dict().values()), re.IGNORECASE)


def test_counterexamples_conditions_and_gaps_are_printed() -> None:
    records = [c.as_dict() for c in ALL.values()]
    table, markdown = words(report.table(records)), report.markdown(records)
    labels = {"refuted": "counterexample", "holds only if": "only if", "not checkable": "because"}
    for c in ALL.values():
        assert words(c.text) in table
        if c.why:
            assert words(f"{labels[c.verdict]}: {c.why}") in table
            assert c.why.replace("|", "\\|") in markdown
            found = {"verdict": c.verdict, "numbers": "n = 1"}
            assert words(f"{labels[c.verdict]} {c.why}") in words(report.explained(c.as_dict(), found))


def test_a_claim_cannot_be_vague() -> None:
    with pytest.raises(ValueError, match="x: no verdict 'true'; there are proved, holds, holds only if, refuted, not"):
        claim("x", "1 = 1", source="-", verdict="true", evidence="evaluation")
    with pytest.raises(ValueError, match="x: no kind of evidence 'guess'"):
        claim("x", "1 = 1", source="-", verdict="holds", evidence="guess")
    with pytest.raises(ValueError, match="x: 'refuted' needs a `why`"):
        claim("x", "1 = 2", source="-", verdict="refuted", evidence="evaluation")
    with pytest.raises(ValueError, match="x: 'holds' has no `why`"):
        claim("x", "1 = 1", source="-", verdict="holds", evidence="evaluation", why="of this")


def test_names_that_do_not_exist() -> None:
    with pytest.raises(UsageError, match="no claims of 'gsm'; there are those of gma, mixformer, survey"):
        ledger("gsm")
    with pytest.raises(UsageError, match=re.escape("no claim 'survey.A11'; did you mean survey.A1")):
        claims.find("survey.A11")


def test_one_id_names_one_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "again", survey.scaling, raising=False)
    with pytest.raises(ValueError, match=re.escape("two claims are called survey.A1")):
        ledger()


def test_listing_loads_neither_torch_nor_sympy() -> None:
    code = (
        "from mixproof.verify.claims import ledger; ledger(); import sys; print({'torch', 'sympy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"


# --- findings --------------------------------------------------------------------------------------------------------


def test_verdicts_follow_from_what_was_found() -> None:
    assert [proved(x, "").verdict for x in (True, False)] == ["proved", "refuted"]
    assert [holds(x, "").verdict for x in (True, False)] == ["holds", "refuted"]
    cases = [(True, False), (True, True), (False, True), (False, False)]
    assert [conditional(*x, "").verdict for x in cases] == ["holds only if", "holds", "refuted", "refuted"]


def test_same_is_equal_up_to_rounding() -> None:
    x = np.array([1.0, 3.0, 1e-30])
    assert same(x, x * (1 + 1e-13))
    assert not same(x, x * [1, 1 + 1e-7, 1])
    assert apart([1, 2], [1, 4]) == 0.5
    assert apart([], []) == apart([0], [0]) == 0


def test_forms_that_differ_are_not_one_function() -> None:
    right = retention.OPERATOR.exact[0]
    wrong = dataclasses.replace(right, function=lambda q, k, **rest: right.function(q=k, k=q, **rest))
    forms = (right, wrong)
    assert not one_function(dataclasses.replace(retention.OPERATOR, exact=forms), T=3, K=2, V=2)[0]


@pytest.mark.parametrize(
    ("id", "place", "name", "wrong"),
    [
        ("A2", softmax_attention, "weights", lambda q, k, causal: np.full((len(q), len(k)), 1 / len(k))),
        ("A1", softmax_attention, "weights", lambda q, k, scale: np.full((1, 2), 0.5)),
        ("L3", mla, "decompressed", lambda *x: (np.full((2, 1, 1), 0.5), None)),
        ("B3", mtla, "incremental", lambda **x: [y + 1e-3 for y in mtla.parallel(**x)]),
        ("M4", mamba, "EULER", mamba.ZOH),
        ("O3", runge_kutta, "KUTTA", runge_kutta.HEUN),
        ("O1", runge_kutta, "rk4", runge_kutta.rk1),
        ("T5", titans, "chunked_recurrent", lambda *tokens, **size: titans.recurrent(*tokens[:6])),
        ("G2", cost_survey, "latent_cache", lambda rank, rotary: rank),
        ("P1", cost_survey, "block_cache", lambda rank, blocks, rotary: (rank + rotary) // blocks),
        ("V1", cost_survey, "core_products", lambda n, scores, values: n * n * scores),
    ],
)
def test_a_check_hears_what_it_checks(monkeypatch: pytest.MonkeyPatch, id: str, place, name: str, wrong) -> None:
    """With something else in place of what the paper describes, the finding is another."""
    c = ALL[f"survey.{id}"]
    assert c.check().verdict == c.verdict
    monkeypatch.setattr(place, name, wrong)
    assert c.check().verdict != c.verdict


def test_draws_are_reproducible_and_shaped_by_the_operator() -> None:
    x, again, other = (draw(mla.OPERATOR, seed, T=3, N=2, K=4, R=2, L=5, V=1) for seed in (0, 0, 1))
    assert {n: a.shape for n, a in x.items()} == {
        "qc": (3, 2, 4), "qr": (3, 2, 2), "c": (3, 5), "kr": (3, 2), "Uk": (2, 4, 5), "Uv": (2, 1, 5),
    }  # fmt: skip
    assert np.array_equal(x["c"], again["c"])
    assert not np.array_equal(x["c"], other["c"])


# --- a verdict that changed ------------------------------------------------------------------------------------------


def test_a_changed_verdict_is_one_clear_message() -> None:
    planted = dataclasses.replace(survey.scaling, verdict="holds", why="")
    found = vars(planted.check())
    lines = report.objection(planted.as_dict(), found).splitlines()
    assert lines[0] == "CHANGED  survey.A1   declared 'holds', found 'refuted'"
    assert [line[:13] for line in lines[1:]] == ["  claim      ", "  found      ", "  evidence   ", "  recheck    "]
    assert "0.881 and 0.731" in lines[2]
    assert lines[-1] == "  recheck    mixproof claims show survey.A1"
    assert report.objection(survey.scaling.as_dict(), found) == ""


def gate(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The gate run in a folder of its own, from which it imports."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "pytest", "--pyargs", "mixproof.verify.test_gate::test_claim", *options]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


PLANTED = """\
import dataclasses
from mixproof.verify.claims import survey
survey.scaling = dataclasses.replace(survey.scaling, verdict="holds", why="")
"""
KERNEL = """\
from mixproof.verify import implements

@implements("retention", framework="numpy", gradients=False)
def mine(q, k, v, gamma):
    return q
"""


def test_the_gate_fails_on_a_planted_verdict(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(PLANTED)
    done = gate(tmp_path, "-k", "survey.A1 or survey.S2", "-p", "planted", "--junitxml", "junit.xml")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "CHANGED  survey.A1   declared 'holds', found 'refuted'" in done.stdout
    assert "1 claim: 1 refuted, as declared" in done.stdout
    assert "Traceback" not in done.stdout
    junit = (tmp_path / "junit.xml").read_text()
    assert junit.count('<property name="verdict" value="refuted"') == 2


def test_claims_are_not_for_the_implementations_of_a_user(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(KERNEL)
    done = gate(tmp_path, "--mixproof-subjects", "kernel.py", "--collect-only", "-q")
    assert done.returncode == 5, done.stdout + done.stderr
    assert "survey" not in done.stdout


# --- the command -----------------------------------------------------------------------------------------------------


def test_claims_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["claims", "--paper", "survey", "--verdict", "refuted", "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema"] == 1
    assert {c["id"] for c in data["claims"]} == {i for i, c in ledger("survey").items() if c.verdict == "refuted"}
    assert set(data["claims"][0]) == {"id", "text", "source", "verdict", "evidence", "why", "check"}


def test_claims_as_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["claims", "--format", "markdown"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert {row.replace("\\|", "").count("|") for row in rows} == {7}
    assert len(rows) == len(ALL) + 2


def test_claims_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["claims"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= report.WIDEST
    assert lines[0].startswith(f"{next(iter(ALL))} ")
    assert any(re.match(r"survey\.A1 +refuted ", line) for line in lines)
    assert re.fullmatch(rf"{len(ALL)} claims: \d+ proved, \d+ holds, \d+ holds only if, \d+ refuted, .*", lines[-1])


def test_claims_as_a_page(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jinja2")
    assert main(["claims", "--format", "html"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("<!doctype html>")
    assert page.count("<tr id=") == len(ALL)
    assert not re.search(r"<script|src=|https?://", page)
    assert all(f'id="{id}"' in page for id in ALL)
    record = {
        "id": "a.A1",
        "text": "x < y",
        "source": "1",
        "verdict": "refuted",
        "evidence": "e",
        "why": "<b>",
        "check": "",
    }
    assert "x &lt; y" in report.html([record])
    assert "&lt;b&gt;" in report.html([record])
    monkeypatch.setattr(page_of, "find_spec", lambda name: None)
    assert main(["claims", "--format", "html"]) == 4
    assert "pip install 'mixproof[report]'" in capsys.readouterr().err


def test_showing_one_claim(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["claims", "show", "survey.Q2"]) == 0
    out = words(capsys.readouterr().out)
    assert "counterexample 4 query heads and 2 key heads of 4: B has 16 rows and 8 columns" in out
    assert "found refuted: B (16, 8) on q (16,)" in out
    changed = dataclasses.replace(survey.scaling, check=lambda: Finding("holds", "weights 1 and 1"))
    monkeypatch.setattr(survey, "scaling", changed)
    assert main(["claims", "show", "survey.A1"]) == 1
    assert "found holds: weights 1 and 1" in words(capsys.readouterr().out)


def test_asking_for_what_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["claims", "show", "survey.Z1"]) == 4
    assert capsys.readouterr().err.startswith("mixproof: no claim 'survey.Z1'")
    assert main(["claims", "--paper", "gsm"]) == 4
