"""The gate as a pytest plugin, each time in a process of its own, in a folder of a user's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as xml
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

GATE = """\
import numpy as np
from mixproof.verify import implements

declared = implements("retention", layout="B H T D", framework="numpy", gradients=False)


def recurrence(q, k, v, gamma, scale, S0, decays=True):
    S = np.zeros((*q.shape[:2], q.shape[3], v.shape[3]), q.dtype) if S0 is None else S0
    rows = []
    for t in range(q.shape[2]):
        S = (gamma[:, None, None] if decays else 1) * S + k[:, :, t, :, None] * v[:, :, t, None, :]
        rows.append(q.dtype.type(scale) * np.sum(q[:, :, t, :, None] * S, axis=2))
    return np.stack(rows, axis=2), S
"""
RIGHT = """

@declared
def right(q, k, v, gamma, scale=1.0, S0=None):
    return recurrence(q, k, v, gamma, scale, S0)
"""
WRONG = """

@declared
def wrong(q, k, v, gamma, scale=1.0, S0=None):
    return recurrence(q, k, v, gamma, scale, S0, decays=False)
"""
NEEDY = """

@implements("retention", framework="numpy", requires=("no_such_package",))
def needy(q, k, v, gamma):
    return q
"""
WARNS = """

@declared
def warns(q, k, v, gamma, scale=1.0, S0=None):
    import warnings

    warnings.warn("a flash backend would be faster")
    return recurrence(q, k, v, gamma, scale, S0)
"""
THE_GATE = ("--pyargs", "mixproof.verify", "--mixproof-profile", "short", "--mixproof-subjects", "gate.py")


@dataclass(frozen=True)
class Run:
    """What a run of pytest left behind."""

    code: int
    out: str
    folder: Path

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def summary(self) -> list[str]:
        """Our lines: what comes between our headline and pytest's last line."""
        start = next(i for i, line in enumerate(self.lines) if re.fullmatch("=+ mixproof =+", line))
        return self.lines[start + 1 : -1]


def pytest_in(folder: Path, *options: str, code: int, python: tuple[str, ...] = (), path: str = "") -> Run:
    """Run pytest there, as an installed command would, and check its exit code."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYTHON", "COV_"))}
    environment |= {"COLUMNS": "100"} | ({"PYTHONPATH": path} if path else {})
    command = [sys.executable, *(python or ("-P",)), "-m", "pytest", *options]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == code, done.stdout + done.stderr
    return Run(done.returncode, done.stdout + done.stderr, folder)


def gate(folder: Path, *parts: str) -> Path:
    (folder / "gate.py").write_text(GATE + "".join(parts))
    return folder


# --------------------------------------------------------------------------------------- a run in which a law is broken


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = gate(tmp_path_factory.mktemp("broken"), WRONG, RIGHT)
    reports = ("--junitxml", "junit.xml", "--mixproof-json", "verdicts.json")
    return pytest_in(folder, *THE_GATE, *reports, "-k", "forward or causality or vjp", code=1)


def test_the_header_names_versions(broken: Run) -> None:
    assert any(re.fullmatch(r"mixproof \S+  numpy \S+.*  profile short  seed 0", line) for line in broken.lines)


def test_a_failure_is_our_six_lines_and_nothing_else(broken: Run) -> None:
    start = next(
        i for i, line in enumerate(broken.lines) if "test_law[retention/wrong/forward]" in line and "___" in line
    )
    block = broken.lines[start + 1 : start + 8]
    assert re.fullmatch(
        r"BROKEN  retention/wrong/forward   \d+ x bound   outputs = reference, up to rounding", block[0]
    )
    assert [line[:13] for line in block[1:6]] == [
        "  smallest   ",
        "  at         ",
        "  because    ",
        "  equals     ",
        "  replay     ",
    ]
    assert block[5].startswith("  replay     mixproof replay gate.py 'retention/wrong/forward B=1 ")
    assert block[6].startswith(("---", "===", "___"))
    assert "Traceback" not in broken.out
    assert "plugin.py" not in broken.out


def test_the_matrix_comes_last(broken: Run) -> None:
    assert re.fullmatch(r"=+ 1 failed, \d+ passed, \d+ skipped, \d+ deselected in .*=+", broken.lines[-1])
    assert [line.split() for line in broken.summary[:2]] == [
        ["retention", "right", "wrong"],
        ["forward", broken.summary[1].split()[1], broken.summary[1].split()[2]],
    ]
    assert re.fullmatch(r"  forward +0\.\d+ +\d+!", broken.summary[1])
    assert re.fullmatch(r"  causality += +=", broken.summary[2])
    assert broken.summary[-1].startswith("3 cells hold, 1 broken, ")
    assert broken.out.index("short test summary") < broken.out.index("= mixproof =")


def test_laws_that_do_not_apply_are_counted_apart(broken: Run) -> None:
    assert "does not apply:" in broken.summary
    assert "      4  declares no gradients" in broken.summary
    assert "not run here:" not in broken.summary


def test_junit_has_properties(broken: Run) -> None:
    cases = {case.get("name"): case for case in xml.parse(broken.folder / "junit.xml").iter("testcase")}
    case = cases["test_law[retention/wrong/forward]"]
    properties = {p.get("name"): p.get("value") for p in case.iter("property")}
    assert list(properties) == ["ratio", "cases", "case"]
    assert float(properties["ratio"]) > 1000
    assert properties["case"].startswith("B=1 H=1 T=1 K=1 V=1 dtype=float32")
    assert case.find("failure").get("message").startswith("Failed: BROKEN  retention/wrong/forward")
    assert not list(cases["test_law[retention/right/vjp]"].iter("property"))


def test_json_has_the_verdicts(broken: Run) -> None:
    data = json.loads((broken.folder / "verdicts.json").read_text())
    statuses = {v["cell"]: v["status"] for v in data["verdicts"]}
    assert data["schema"] == 1
    assert statuses["retention/wrong/forward"] == "fail"
    assert statuses["retention/right/forward"] == "pass"
    assert {v["cell"] for v in data["not_applicable"]} >= {"retention/right/vjp", "retention/wrong/vjp"}


def test_last_failed(broken: Run) -> None:
    again = pytest_in(broken.folder, *THE_GATE, "--lf", code=1)
    assert again.summary[-1].startswith("0 cells hold, 1 broken, ")


# -------------------------------------------------------------------------------------------------------- other endings


def test_what_holds(tmp_path: Path) -> None:
    run = pytest_in(gate(tmp_path, RIGHT), *THE_GATE, "-q", code=0)
    assert re.fullmatch(r"\d+ cells hold, 0 broken, \d+ cases, \d+ s", run.summary[-1])


def test_two_workers_report_the_same(broken: Run) -> None:
    pytest.importorskip("xdist")
    run = pytest_in(broken.folder, *THE_GATE, "-q", "-n", "2", "-k", "forward or causality or vjp", code=1)
    assert run.summary[:-1] == broken.summary[:-1]  # all but the time it took


def test_stop_at_the_first(tmp_path: Path) -> None:
    run = pytest_in(gate(tmp_path, WRONG), *THE_GATE, "-x", code=1)
    assert any(line.startswith("0 cells hold, 1 broken, ") for line in run.lines)


@pytest.mark.parametrize(
    ("options", "parts", "code", "text"),
    [
        (["-k", "vjp"], [RIGHT], 5, "0 cells checked: declares no gradients; exit 5"),
        ([], [NEEDY], 5, "0 cells checked: no_such_package is not installed; exit 5"),
        (["--mixproof-strict"], [NEEDY], 5, "0 cells checked: no_such_package is not installed; exit 5"),
        (["-k", "no_such_cell"], [RIGHT], 5, "deselected"),
        (["-k", "forward"], [RIGHT, NEEDY], 0, "      1  no_such_package is not installed"),
        (
            ["-k", "forward", "--mixproof-strict"],
            [RIGHT, NEEDY],
            1,
            "not run   retention/needy/forward: no_such_package is not installed",
        ),
    ],
    ids=["nothing applies", "nothing runs", "nothing runs, strict", "nothing selected", "some run", "some run, strict"],
)
def test_nothing_checked_is_no_pass(tmp_path: Path, options: list[str], parts: list[str], code: int, text: str) -> None:
    assert text in pytest_in(gate(tmp_path, *parts), *THE_GATE, *options, code=code).out


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_without_torch_our_own_say_why(tmp_path: Path) -> None:
    """As on a machine that has none: a finder hides it."""
    (tmp_path / "hides.py").write_text(
        "import importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'torch' else find(name, *rest)\n"
    )
    options = ("--pyargs", "mixproof.verify", "-p", "hides", "-q", "-k", "torch.eager/forward")
    run = pytest_in(tmp_path, *options, code=5, path=str(tmp_path))
    assert run.summary[-1] == "0 cells checked: torch is not installed; exit 5"


def test_a_bug_of_ours(tmp_path: Path) -> None:
    (tmp_path / "breaks.py").write_text(
        "import mixproof.verify.judge as judge\n\n"
        "def evaluate(*_):\n    raise RuntimeError('boom')\n\n"
        "judge.evaluate = evaluate\n"
    )
    options = (*THE_GATE, "-p", "breaks", "-k", "forward")
    run = pytest_in(gate(tmp_path, RIGHT), *options, code=3, path=str(tmp_path))
    assert "ERROR   retention/right/forward: a bug of ours, please report it" in run.lines
    assert "(1 ended in a bug of ours)" in run.out


def test_warnings_of_an_implementation_are_no_failures(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    run = pytest_in(gate(tmp_path, WARNS), *THE_GATE, "-k", "forward", code=0)
    assert "flash backend" not in run.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (THE_GATE, "--mixproof-subjects: no such file: gate.py"),
        ((*THE_GATE[:-1], "bad.py"), "--mixproof-subjects: bad.py:1 does not import: ModuleNotFoundError: No module"),
        ((*THE_GATE[:-1], "mine.py:x"), "--mixproof-subjects: mine.py has no function 'x'"),
        (
            (*THE_GATE[:-1], "mine.py", "--mixproof-subjects", "mine.py:right"),
            "--mixproof-subjects: two implementations are called retention/right (mine.py:16); give one of them",
        ),
        (THE_GATE[-2:], "--mixproof-subjects: add --pyargs mixproof.verify, so that the gate runs"),
        ((*THE_GATE[:2], "--mixproof-json", "no/such/file"), "--mixproof-json no/such/file: No such file or directory"),
    ],
    ids=["no file", "no import", "no function", "twice", "no gate", "no folder"],
)
def test_bad_input(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    (tmp_path / "bad.py").write_text("import no_such_package\n")
    (tmp_path / "mine.py").write_text(GATE + RIGHT)
    (tmp_path / "test_theirs.py").write_text("def test_theirs(): pass\n")
    run = pytest_in(tmp_path, *options, "-q", code=4)
    assert run.out.strip().startswith(f"ERROR: {message}")
    assert len(run.out.strip().splitlines()) == 1


# ------------------------------------------------------------------------------------------- runs that are none of ours


THEIRS = """\
import sys

OURS = {"mixproof", "mixproof.verify", "mixproof.verify.plugin"}


def test_nothing_of_ours_is_loaded(pytestconfig):
    assert pytestconfig.pluginmanager.hasplugin("mixproof")  # or the test says nothing
    assert {name for name in sys.modules if name.split(".")[0] == "mixproof"} <= OURS
    assert not {"numpy", "torch", "triton", "rich", "mpmath", "sympy"} & set(sys.modules)


def test_as_late_as_the_end():
    import atexit

    atexit.register(test_at_the_end)


def test_at_the_end():
    loaded = {name for name in sys.modules if name.split(".")[0] == "mixproof"}
    print("late:", *sorted(loaded - OURS), file=sys.__stderr__)
"""


def test_their_runs_are_left_alone(tmp_path: Path) -> None:
    """Silent, light, and still so when the session has ended; also where a file of theirs is called test_gate.py."""
    (tmp_path / "test_gate.py").write_text(THEIRS)
    run = pytest_in(tmp_path, "-rA", "-s", code=0, python=("-P", "-W", "error"))
    mentions = [line for line in run.lines if "mixproof" in line]
    assert all(line.startswith("plugins: ") for line in mentions), mentions
    assert run.lines[-1].strip() == "late:"


def test_they_get_no_fixtures_of_ours(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text("def test_theirs(): pass\n")
    run = pytest_in(tmp_path, "--fixtures", "-v", code=0)
    assert "tmp_path" in run.out
    assert not [line for line in run.lines if "mixproof" in line and not line.startswith("plugins: ")]


def test_the_only_options_are_prefixed(tmp_path: Path) -> None:
    run = pytest_in(tmp_path, "--help", code=0)
    section = run.out.split("correctness gate for sequence mixers:\n")[1].split("\n\n")[0]
    options = re.findall(r"^  (-\S+)", section, re.MULTILINE)
    assert len(options) == 5
    assert all(option.startswith("--mixproof-") for option in options)


# --------------------------------------------------------------------------------------------------- the profile smoke


def test_smoke_is_the_budget_plan_of_our_own(tmp_path: Path) -> None:
    from mixproof.verify import plan
    from mixproof.verify.cells import entries

    options = ("--pyargs", "mixproof.verify", "--mixproof-profile", "smoke", "--collect-only", "-q")
    run = pytest_in(tmp_path, *options, code=0)
    cells = [line.split("[")[1][:-1].split("/") for line in run.lines if "::test_law[" in line]
    assert {operator for operator, _, _ in cells} == set(plan.load()["operators"])
    assert all(law in plan.laws_for(operator) for operator, _, law in cells)
    ours = {str(entry) for entry in entries() if ".thirdparty." not in entry.module}
    assert {f"{operator}/{name}" for operator, name, _ in cells} == ours


def test_smoke_judges_what_is_planned_of_an_implementation(tmp_path: Path) -> None:
    from mixproof.verify import plan

    options = ("--mixproof-profile", "smoke", "-v")
    run = pytest_in(gate(tmp_path, RIGHT), *THE_GATE, *options, code=0)
    judged = re.findall(r"test_law\[retention/right/(\w+)\]", run.out)
    assert set(judged) == set(plan.laws_for("retention"))
    assert re.match(r"[1-9]\d* cells hold, 0 broken", run.summary[-1])
