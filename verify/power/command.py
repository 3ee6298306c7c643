"""`mixproof power`: run a study, show it, write it down."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mixproof.verify.errors import UsageError

if TYPE_CHECKING:
    from mixproof.verify.power.study import Unit

SMOKE_KILLS = 0.95  # what the budget plan promises


def power(arguments: argparse.Namespace) -> int:
    """What the gate catches: mutants under every law, and the checks of today on the same work; what it rejects
    wrongly: honest implementations. Exit code 0 if every mutant dies by the laws that it names, no honest case is
    rejected, and the budget plan still says what is measured."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # one process a core, not one of all cores each
    from mixproof.verify.power import study as studies
    from mixproof.verify.report import page
    from mixproof.verify.report import power as report

    operators = _operators(arguments.operators)
    if arguments.replan:
        return _replan(arguments.operators, arguments.jobs)
    parts = ("matrix",) if arguments.profile == "smoke" else tuple(arguments.only or studies.PARTS)
    if arguments.html and page.missing():
        raise UsageError(f"--html: {page.missing()}")
    work = studies.units(operators, parts, arguments.profile, arguments.seed)
    store = studies.Store(
        Path(arguments.store) if arguments.store else studies.default_store(arguments.profile, arguments.seed),
        arguments.profile,
        arguments.seed,
    )
    outputs = {name: path for name in ("json", "html", "markdown") if (path := getattr(arguments, name))}
    for name, path in outputs.items():  # not only after the work that it cannot be written
        _write(f"--{name}", path, "")
    try:
        store.open(arguments.fresh)
    except OSError as error:
        raise UsageError(f"--store {store.path}: {error.strerror}") from None
    start, known = time.time(), sum(unit.key in store.found for unit in work)
    if known:
        print(f"{known} of {len(work)} units are known from an interrupted study (--fresh forgets them)")
    try:
        for _ in _progress(work, known, studies.run(work, store, arguments.jobs)):
            pass
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on from {store.path}", file=sys.stderr)
        raise
    found = studies.collect(store, operators, parts, time.time() - start, arguments.jobs)
    if arguments.profile == "smoke":
        text, share = report.smoke(found, SMOKE_KILLS)
        code = int(share < SMOKE_KILLS)
    else:
        text, code = report.terminal(found), report.exit_code(found)
    print(text)
    writers: dict[str, Callable[[Any], str]] = {
        "json": report.as_json,
        "html": report.html,
        "markdown": report.markdown,
    }
    for name, path in outputs.items():
        _write(f"--{name}", path, writers[name](found))
    store.close()
    return code


def add_parser(commands: Any) -> None:
    """The command's options."""
    p = commands.add_parser("power", help="what the gate catches, and what it rejects", description=power.__doc__)
    p.add_argument("operators", nargs="*", metavar="OPERATOR", help="only these; a family by its first word")
    p.add_argument("--profile", choices=("smoke", "ci", "nightly"), default="ci", help="smoke: the budget plan alone")
    p.add_argument("--only", action="append", choices=("matrix", "duels", "honest"), help="one part; may be repeated")
    p.add_argument("-j", "--jobs", type=_jobs, default=os.cpu_count() or 1, metavar="N", help="processes (all cores)")
    p.add_argument("--seed", type=int, default=0, metavar="N", help="added to the seed of every case")
    p.add_argument("--json", metavar="FILE", help="write the study")
    p.add_argument("--html", metavar="FILE", help="write it as a page")
    p.add_argument("--markdown", metavar="FILE", help="write the table of the rivals")
    p.add_argument("--store", metavar="FILE", help="what an interrupted study goes on from (default: a cache)")
    p.add_argument("--fresh", action="store_true", help="forget an interrupted study")
    p.add_argument("--replan", action="store_true", help="measure the budget plan anew and write verify/plan.json")
    p.set_defaults(run=power)


def _jobs(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes")
    return int(text)


def _operators(words: Sequence[str]) -> list[str]:
    """All operators, or those named: gma.causal, or gma for its family."""
    from mixproof.reference import OPERATORS
    from mixproof.verify.declare import find

    chosen: dict[str, None] = {}
    for word in words:
        family = [name for name in OPERATORS if name == word or name.startswith(f"{word}.")]
        chosen |= dict.fromkeys(family or [find(word).name])
    return list(chosen) or list(OPERATORS)


def _replan(words: Sequence[str], jobs: int) -> int:
    from mixproof.verify import plan
    from mixproof.verify.power import matrix

    matrix.replan(_operators(words) if words else (), jobs)
    plan.load.cache_clear()
    print(f"{plan.PATH.name}: the planned pairs kill {100 * plan.power(plan.load()):.1f} % of the mutants")
    return 0


def _write(option: str, path: str, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror}") from None


def _progress(work: Sequence[Unit], known: int, done: Iterable[Unit]) -> Iterator[Unit]:
    """A bar on a terminal; elsewhere a line now and then."""
    if sys.stderr.isatty():
        from mixproof.verify.progress import bar

        with bar() as shown:
            task = shown.add_task("", total=len(work), completed=known)
            for unit in done:
                shown.update(task, description=unit.key, advance=1)
                yield unit
        return
    start = time.time()
    for count, unit in enumerate(done, start=known + 1):
        if count % 20 == 0 or count == len(work):
            print(f"{count} of {len(work)} units, {time.time() - start:.0f} s", file=sys.stderr, flush=True)
        yield unit
