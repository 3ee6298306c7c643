"""The pytest plugin: options, header, cells as tests, the matrix at the end. Imports nothing heavy: it is loaded in
every pytest run of an environment that has mixproof installed, and stays silent in those that are not ours."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from mixproof.verify.subject import Subject
    from mixproof.verify.verdict import Verdict

PROPERTY = "mixproof"
USAGE = 4


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mixproof", "correctness gate for sequence mixers")
    group.addoption(
        "--mixproof-subjects",
        action="append",
        default=[],
        metavar="FILE[:FUNCTION]",
        help="judge the implementations declared in this file instead of our own; may be repeated",
    )
    group.addoption(
        "--mixproof-profile",
        choices=("smoke", "ci", "nightly"),
        default="ci",
        help="how long to look: smoke (under a minute), ci (default), nightly",
    )
    group.addoption("--mixproof-seed", type=int, default=0, metavar="N", help="added to the seed of every case")
    group.addoption("--mixproof-strict", action="store_true", help="fail on undecided and not-run cells too")
    group.addoption("--mixproof-json", metavar="FILE", help="write the verdicts as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[START] = time.time()
    config.stash[ENTRIES] = None


START = pytest.StashKey[float]()
ENTRIES = pytest.StashKey[Any]()
LOADED = pytest.StashKey[dict]()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "mixproof_cell" not in metafunc.fixturenames:
        return
    from mixproof.verify.laws import LAWS

    cells = sorted(_cells(metafunc.config), key=lambda cell: _order(cell, list(LAWS)))
    # cells of one operator and law share oracle values: xdist's loadgroup keeps them on one worker
    marks = [pytest.mark.xdist_group(cell.split("/")[0] + cell.split("/")[2]) for cell in cells]
    known = metafunc.config.pluginmanager.hasplugin("xdist")
    metafunc.parametrize(
        "mixproof_cell", [pytest.param(c, id=c, marks=m if known else ()) for c, m in zip(cells, marks, strict=True)]
    )


def _order(cell: str, laws: list[str]) -> tuple[Any, ...]:
    from mixproof.reference import OPERATORS

    operator, _, law = cell.split("/")
    return list(OPERATORS).index(operator), laws.index(law)


def _cells(config: pytest.Config) -> list[str]:
    from mixproof.reference import operator as find_operator
    from mixproof.verify.cells import entries, laws_for
    from mixproof.verify.errors import UsageError

    files = config.getoption("--mixproof-subjects")
    try:
        sources = _user_subjects(config) if files else {str(e): e for e in entries()}
    except UsageError as error:
        raise pytest.UsageError(f"--mixproof-subjects: {error}") from None
    config.stash[ENTRIES] = sources
    return [f"{name}/{law}" for name in sources for law in laws_for(find_operator(name.split("/")[0]))]


def _user_subjects(config: pytest.Config) -> dict[str, Subject]:
    from mixproof.verify.cells import load_file

    subjects: dict[str, Subject] = {}
    for file in config.getoption("--mixproof-subjects"):
        for subject in load_file(file):
            if str(subject) in subjects:
                raise pytest.UsageError(f"two implementations are called {subject}; give one another name=")
            subjects[str(subject)] = subject
    return subjects


@pytest.fixture
def mixproof_judge(request: pytest.FixtureRequest) -> Any:
    """Judges a cell, attaches the verdict to the report, and fails the test if the law is broken."""

    def run(cell: str) -> Verdict:
        verdict = _judge(request.config, cell)
        request.node.user_properties.append((PROPERTY, json.dumps(verdict.as_dict())))
        strict = request.config.getoption("--mixproof-strict")
        if verdict.status in ("fail", "error") or (strict and verdict.status in ("undecided", "not run")):
            from mixproof.verify.report.terminal import failure

            text = failure(verdict) if verdict.status in ("fail", "error") else f"{verdict.status}: {verdict.why}"
            pytest.fail(text, pytrace=False)
        return verdict

    return run


def _judge(config: pytest.Config, cell: str) -> Verdict:
    from mixproof.verify.judge import PROFILES, judge
    from mixproof.verify.verdict import Verdict

    name, _, law = cell.rpartition("/")
    source = config.stash[ENTRIES][name]
    loaded = config.stash.setdefault(LOADED, {})
    if name not in loaded and hasattr(source, "load"):
        missing = source.missing()
        loaded[name] = f"{missing} is not installed" if missing else source.load()
    subject = loaded.get(name, source)
    if isinstance(subject, str):
        return Verdict(cell, "not run", why=subject)
    profile = PROFILES[config.getoption("--mixproof-profile")]
    return judge(subject, law, profile, config.getoption("--mixproof-seed"))


def pytest_report_header(config: pytest.Config) -> str | None:
    if not _ours(config):
        return None
    from mixproof.verify.versions import versions

    found = "  ".join(f"{name} {version}" for name, version in versions().items())
    profile, seed = config.getoption("--mixproof-profile"), config.getoption("--mixproof-seed")
    return f"{found}  profile {profile}  seed {seed}"


def _ours(config: pytest.Config) -> bool:
    """Whether this run was pointed at the gate."""
    words = [str(a) for a in config.args]
    return bool(config.getoption("--mixproof-subjects")) or any(
        "mixproof" in w or w.rstrip("/").split("/")[-1].startswith(("verify", "test_gate")) for w in words
    )


def _verdicts(terminalreporter: Any) -> list[Verdict]:
    from mixproof.verify.laws import LAWS
    from mixproof.verify.verdict import Verdict

    found = []
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == PROPERTY and getattr(report, "when", "") == "call":
                    data = json.loads(value)
                    fields = {f.name for f in dataclasses.fields(Verdict)}
                    known = {k: v for k, v in data.items() if k in fields}
                    found.append(Verdict(**known | {"ratio": float(data["ratio"])}))
    return sorted(found, key=lambda v: (*_order(v.cell, list(LAWS)), v.subject))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    verdicts = _verdicts(terminalreporter)
    if not verdicts:
        return
    from mixproof.verify.report import terminal

    write = terminalreporter.write_line
    terminalreporter.section("mixproof", sep="=")
    color = terminalreporter.hasmarkup
    write(terminal.matrix(verdicts, terminalreporter._tw.fullwidth, color))
    write(terminal.LEGEND)
    if reasons := terminal.not_run(verdicts):
        write("not run:")
        write(reasons)
    write(terminal.closing(verdicts, time.time() - config.stash[START]))
    if path := config.getoption("--mixproof-json"):
        from mixproof.verify.report.json_file import write_json

        write_json(path, verdicts)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """pytest exits with 0 when everything was skipped; a gate must not."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(session.config, "workerinput"):
        return
    verdicts = _verdicts(reporter)
    if verdicts and exitstatus in (0, 1):
        from mixproof.verify.report.terminal import exit_code

        code = exit_code(verdicts, session.config.getoption("--mixproof-strict"))
        session.exitstatus = code if exitstatus == 0 or code == 3 else exitstatus
