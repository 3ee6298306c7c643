"""The study as a whole: units, the store that it resumes from, the command. Of small operators, so that it is quick."""

from __future__ import annotations

import json

import pytest

from mixproof.verify import plan
from mixproof.verify.__main__ import INTERRUPTED, main
from mixproof.verify.power import study
from mixproof.verify.power.study import Store, Unit

SMALL = "mome.write_mix"


@pytest.fixture
def power(tmp_path, capsys, monkeypatch):
    """Runs the command with a store of its own: exit code, text, complaints."""
    monkeypatch.setattr(study.honest, "ENOUGH", {"ci": 50, "nightly": 50})
    monkeypatch.setattr(study.honest, "LANES", 4)
    monkeypatch.chdir(tmp_path)

    def run(*words):
        code = main(["power", "-j", "1", "--store", str(tmp_path / "store.jsonl"), *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_units_cover_every_part_of_every_operator_longest_first():
    work = study.units(["gma.causal", SMALL], study.PARTS, "ci", 0)
    assert {(u.part, u.operator) for u in work} == {(p, o) for p in study.PARTS for o in ("gma.causal", SMALL)}
    assert (work[0].part, work[0].operator) == ("matrix", "gma.causal")


def test_a_study_of_one_operator(power, tmp_path):
    code, out, _ = power(SMALL, "--json", "power.json", "--html", "power.html", "--markdown", "power.md")
    assert code == 0, out
    found = json.loads((tmp_path / "power.json").read_text())
    assert {row["mutant"].split("/")[0] for row in found["matrix"]} == {SMALL}
    assert all(row["first"] for row in found["matrix"])
    assert {(row["format"], row["inputs"]) for row in found["duels"]} == {
        (f, i) for f in ("float32", "tf32", "bfloat16", "float16") for i in ("users", "atlas")
    }
    assert [row["format"] for row in found["honest"]] == ["float32", "tf32", "bfloat16", "float16"]
    assert not any(row["failures"] for row in found["honest"])
    assert found["drift"] == []
    assert "<!doctype html>" in (tmp_path / "power.html").read_text().lower()
    assert (tmp_path / "power.md").read_text().startswith("|")
    assert not (tmp_path / "store.jsonl").exists()  # complete: the next study measures anew
    assert "every mutant is killed by each law that it names, no honest alarm, no drift" in " ".join(out.split())


def test_smoke_keeps_the_promise_of_the_plan(power):
    code, out, _ = power("--profile", "smoke", "mome", "cca")
    assert code == 0
    assert "mutants die by the budget plan" in out


def test_a_plan_that_spares_mutants_fails_smoke(power, monkeypatch):
    monkeypatch.setattr(study.matrix, "planned", lambda operator: plan.planned(operator)[:1])
    code, out, _ = power("--profile", "smoke", SMALL)
    assert code == 1
    assert f"survives  {SMALL}/" in out


def test_a_study_goes_on_where_it_was_interrupted(power, monkeypatch, tmp_path):
    ran = []

    def interrupted(unit):
        ran.append(unit.key)
        if len(ran) == 2:
            raise KeyboardInterrupt
        return real(unit)

    real = Unit.run
    monkeypatch.setattr(Unit, "run", interrupted)
    code, _, err = power(SMALL)
    assert code == INTERRUPTED
    assert "goes on from" in err
    monkeypatch.setattr(Unit, "run", lambda unit: (ran.append(unit.key), real(unit))[1])
    code, out, _ = power(SMALL)
    assert code == 0
    assert "1 of 3 units are known" in out
    assert sorted(ran[2:]) == sorted(u.key for u in study.units([SMALL], study.PARTS, "ci", 0) if u.key != ran[0])


def test_a_store_of_another_tree_study_or_of_a_killed_process_is_not_believed(tmp_path, monkeypatch):
    unit = Unit("matrix", SMALL, "ci", 0)
    path = tmp_path / "deep" / "store.jsonl"
    store = Store(path, "ci", 0)
    store.open()
    store.add(unit, [{"mutant": "a"}])
    with path.open("a") as file:
        file.write('["honest mome", [{"half a li')
    again = Store(path, "ci", 0)
    again.open()
    assert again.found == {unit.key: [{"mutant": "a"}]}
    again.add(Unit("duels", SMALL, "ci", 0), [])
    for other in (Store(path, "nightly", 0), Store(path, "ci", 1)):
        other.open()
        assert not other.found
        store.open(fresh=True)
        store.add(unit, [])
    fresh = Store(path, "ci", 0)
    fresh.open(fresh=True)
    assert not fresh.found
    store.add(unit, [])
    monkeypatch.setattr(study, "fingerprint", lambda: "another tree")
    other = Store(path, "ci", 0)
    other.open()
    assert not other.found


def test_processes_find_what_one_finds(tmp_path):
    work = [Unit("matrix", name, "smoke", 0) for name in (SMALL, "cca")]
    found = []
    for jobs in (1, 2):
        store = Store(tmp_path / f"{jobs}.jsonl", "smoke", 0)
        store.open()
        assert {u.key for u in study.run(work, store, jobs)} == {u.key for u in work}
        found.append(
            {key: [(r["mutant"], r["first"] and r["first"]["law"]) for r in rows] for key, rows in store.found.items()}
        )
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("retnet",), "no operator 'retnet'; did you mean"),
        (("--jobs", "0"), "'0' is not a number of processes"),
        (("--profile", "deep"), "invalid choice: 'deep'"),
        (("--json", "no/such/folder.json", SMALL), "--json no/such/folder.json: No such file or directory"),
        (("--store", "/", SMALL), "--store /: Is a directory"),
    ],
)
def test_usage_errors(power, words, text):
    code, _, err = power(*words)
    assert code == 4
    assert text in err


def test_a_page_needs_jinja(power, monkeypatch):
    monkeypatch.setattr("mixproof.verify.report.page.find_spec", lambda name: None)
    code, _, err = power("--html", "power.html", SMALL)
    assert code == 4
    assert "pip install 'mixproof[report]'" in err


def test_a_mutant_that_survives_fails_the_study(power, monkeypatch):
    from mixproof.verify.subjects.mutants import Mutant

    silent = Mutant("nothing", SMALL, "nothing changed", ("forward",))
    monkeypatch.setattr(study.matrix, "mutants", lambda operator=None: [silent])
    code, out, _ = power(SMALL, "--only", "matrix")
    assert code == 1
    assert f"{SMALL}/nothing" in out
