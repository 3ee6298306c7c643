"""The pytest plugin: options, header, cells and claims as tests, the matrix at the end. Imports nothing heavy: it is
loaded in every pytest run of an environment that has mixproof installed, and stays silent in those not ours."""

from __future__ import annotations

import json
import time
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from mixproof.verify.subject import Subject
    from mixproof.verify.verdict import Verdict

SOURCES = pytest.StashKey[dict[str, Any]]()  # implementations by name, loaded or not
LOADED = pytest.StashKey[dict[str, Any]]()  # loaded ones, or why they could not be
VERDICT = pytest.StashKey[str]()  # of a test, as JSON
CLAIM = pytest.StashKey[str]()  # the verdict that the check of a claim found


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
        choices=("smoke", "short", "ci", "nightly"),
        default="ci",
        help="how long to look: smoke (the budget plan, our own implementations), short, ci (default), nightly",
    )
    group.addoption("--mixproof-seed", type=int, default=0, metavar="N", help="added to the seed of every case")
    group.addoption("--mixproof-strict", action="store_true", help="fail on undecided and not-run cells too")
    group.addoption("--mixproof-json", metavar="FILE", help="write the verdicts as JSON")


def _option(config: pytest.Config, name: str) -> Any:
    return config.getoption(f"--mixproof-{name}")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LOADED] = {}
    config.pluginmanager.register(Verdicts(config), "mixproof-verdicts")
    # here, where an error still ends the run with pytest's code for usage
    if _option(config, "subjects") and not config.option.help:
        if not _ours(config):
            raise pytest.UsageError("--mixproof-subjects: add --pyargs mixproof.verify, so that the gate runs")
        config.stash[SOURCES] = _user_subjects(config)
    path = _option(config, "json")
    if path and not hasattr(config, "workerinput"):
        _write_json(path, [])  # not only after the work that it cannot be written


def _user_subjects(config: pytest.Config) -> dict[str, Subject]:
    from mixproof.verify.cells import distinct, load_file
    from mixproof.verify.errors import UsageError

    try:
        return distinct(s for file in _option(config, "subjects") for s in load_file(file))
    except UsageError as error:
        raise pytest.UsageError(f"--mixproof-subjects: {error}") from None


def _ours(config: pytest.Config) -> bool:
    """Whether this run was pointed at the gate: --pyargs mixproof.verify, or its folder in a checkout."""
    for word in (str(word).split("::")[0] for word in config.args):
        if word.split(".")[:2] == ["mixproof", "verify"]:
            return True
        place = Path(config.invocation_params.dir, word)
        folder = place.parent if place.name == "test_gate.py" else place
        if all((folder / name).is_file() for name in ("test_gate.py", "plugin.py", "laws/__init__.py")):
            return True
    return False


def pytest_report_header(config: pytest.Config) -> str | None:
    if not _ours(config):
        return None
    from mixproof.verify.versions import header

    return header(_option(config, "profile"), _option(config, "seed"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "mixproof_claim" in metafunc.fixturenames:
        from mixproof.verify.claims import ledger

        metafunc.parametrize("mixproof_claim", list(ledger()))
    if "mixproof_cell" not in metafunc.fixturenames:
        return
    cells = _cells(metafunc.config)
    # cells of one operator and law share oracle values: xdist's loadgroup keeps them on one worker
    marked = metafunc.config.pluginmanager.hasplugin("xdist")
    groups = [pytest.mark.xdist_group(f"{c.split('/')[0]}/{c.split('/')[2]}") if marked else () for c in cells]
    metafunc.parametrize("mixproof_cell", [pytest.param(c, id=c, marks=g) for c, g in zip(cells, groups, strict=True)])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Claims are about papers, not about the implementations of a user."""
    if _option(config, "subjects"):
        items[:] = [item for item in items if "mixproof_claim" not in getattr(item, "fixturenames", ())]


def _cells(config: pytest.Config) -> list[str]:
    from mixproof.reference import operator as find_operator
    from mixproof.verify import plan
    from mixproof.verify.cells import entries, laws_for

    smoke = _option(config, "profile") == "smoke"  # planned laws alone, and of our implementations alone
    if SOURCES not in config.stash:
        found = (e for e in entries() if not (smoke and ".thirdparty." in e.module))
        config.stash[SOURCES] = {str(e): e for e in found}
    sources = config.stash[SOURCES]
    laws = {name: laws_for(find_operator(name)) for name in {s.split("/")[0] for s in sources}}
    if smoke:
        laws = {name: [law for law in laws[name] if law in plan.laws_for(name)] for name in laws}
    return sorted((f"{s}/{law}" for s in sources for law in laws[s.split("/")[0]]), key=_order)


def _order(cell: str) -> tuple[int, int]:
    """Operators, then laws, as their tables list them; implementations stay as they came."""
    from mixproof.reference import OPERATORS
    from mixproof.verify.laws import LAWS

    operator, _, law = cell.split("/")
    return list(OPERATORS).index(operator), list(LAWS).index(law)


def judge_cell(request: pytest.FixtureRequest, cell: str) -> tuple[Verdict, str]:
    """The verdict on a cell, which is attached to its test, and why it fails the run, or nothing."""
    from mixproof.verify.report.terminal import objection

    config, verdict = request.config, _judge(request.config, cell)
    data = verdict.as_dict()
    request.node.stash[VERDICT] = json.dumps(data)
    if verdict.cases:
        request.node.user_properties += [(name, data[name]) for name in ("ratio", "cases", "case") if name in data]
    return verdict, objection(verdict, _option(config, "strict"))


def _judge(config: pytest.Config, cell: str) -> Verdict:
    from mixproof.verify.judge import PROFILES, judge
    from mixproof.verify.verdict import Verdict

    name, _, law = cell.rpartition("/")
    loaded = config.stash[LOADED]
    if name not in loaded:
        source = config.stash[SOURCES][name]
        loaded[name] = _load(source) if hasattr(source, "load") else source
    if isinstance(loaded[name], str):
        return Verdict(cell, "not run", why=loaded[name])
    profile = PROFILES[_option(config, "profile")]
    return judge(loaded[name], law, profile, _option(config, "seed"))


def _load(entry: Any) -> Subject | str:
    """An implementation of ours; or why it cannot be imported here."""
    if missing := entry.missing():
        return f"{missing} is not installed"
    try:
        return entry.load()
    except (ImportError, RuntimeError) as error:
        return f"{entry.module.removeprefix('mixproof.')} does not import: {error}"


def recheck_claim(request: pytest.FixtureRequest, id: str) -> str:
    """Why what is found of a claim now fails the run, or nothing; what is found is attached to its test."""
    from mixproof.verify.claims import find
    from mixproof.verify.report.claims import objection

    claim = find(id)
    found = vars(claim.check())
    request.node.stash[CLAIM] = found["verdict"]
    request.node.user_properties += found.items()
    return objection(claim.as_dict(), found)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """The verdict travels on the report, which is all that xdist brings home."""
    report = yield
    if report.when == "call" and VERDICT in item.stash:
        report.mixproof = item.stash[VERDICT]
    if report.when == "call" and CLAIM in item.stash:
        report.mixproof_claim = item.stash[CLAIM]
    return report


class Verdicts:
    """Collects the verdicts of a run and reports them when all else was said."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.start = time.time()
        self.received: dict[str, str] = {}  # by test, as JSON
        self.claims: list[dict[str, str]] = []  # verdicts that were found as they are declared

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if data := getattr(report, "mixproof", None):
            self.received[report.nodeid] = data
        if report.passed and (verdict := getattr(report, "mixproof_claim", "")):
            self.claims.append({"verdict": verdict})

    def verdicts(self) -> list[Verdict]:
        """In the order of the tables, whatever order xdist's workers finished in."""
        from mixproof.verify.verdict import Verdict

        found = [Verdict.from_dict(json.loads(data)) for data in self.received.values()]
        return sorted(found, key=lambda v: (*_order(v.cell), v.subject))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> Generator[None]:
        yield  # failures, pytest's short summary
        if self.received or self.claims:
            terminalreporter.section("mixproof")
        if self.claims:
            from mixproof.verify.report.claims import counts

            terminalreporter.write_line(f"{counts(self.claims)}, as declared")
        if self.received:
            from mixproof.verify.report.terminal import summary

            width, color = terminalreporter._tw.fullwidth, terminalreporter.hasmarkup
            terminalreporter.write_line(summary(self.verdicts(), time.time() - self.start, width, color))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """pytest exits with 0 when everything was skipped, and with 1 for a bug of ours; a gate must not."""
        if not self.received or hasattr(self.config, "workerinput"):
            return
        from mixproof.verify.report.terminal import exit_code

        code = exit_code(self.verdicts(), _option(self.config, "strict"))
        if exitstatus == pytest.ExitCode.OK or (exitstatus == pytest.ExitCode.TESTS_FAILED and code in (3, 5)):
            session.exitstatus = code
        if path := _option(self.config, "json"):
            _write_json(path, self.verdicts())


def _write_json(path: str, verdicts: list[Verdict]) -> None:
    from mixproof.verify.report.json_file import write_json
    from mixproof.verify.versions import versions

    try:
        write_json(path, verdicts, versions())
    except OSError as error:
        raise pytest.UsageError(f"--mixproof-json {path}: {error.strerror}") from None
