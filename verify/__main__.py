"""The command `mixproof`: check, replay, new, list. Exit codes are pytest's own: 0 holds, 1 broken, 3 our bug, 4 usage
or adapter, 5 nothing was checked."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mixproof.verify.errors import UsageError

if TYPE_CHECKING:
    from mixproof.verify.subject import Subject
    from mixproof.verify.verdict import Verdict

USAGE = 4


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code; messages for people go to stderr."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except UsageError as error:
        print(f"mixproof: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return 2


def check(arguments: argparse.Namespace) -> int:
    """Judge the implementations of one file."""
    from mixproof.verify.cells import laws_for, load_file
    from mixproof.verify.judge import PROFILES, judge
    from mixproof.verify.report import terminal

    start = time.time()
    options = {"layout": arguments.layout, "dtypes": tuple(arguments.dtype or ["float32"])}
    if arguments.chunk:
        options["chunk"] = arguments.chunk
    subjects = load_file(arguments.file, arguments.operator, **options)
    jobs = [(s, name) for s in subjects for name in laws_for(s.operator) if arguments.k in f"{s}/{name}"]
    if not jobs:
        raise UsageError(f"-k {arguments.k} matches no cell of {arguments.file}")
    print(_header(arguments.profile, arguments.seed))
    for s in subjects:
        print(f"{arguments.file}  {s.name}: {s.operator.name}, {' '.join(s.declaration.dtypes)}")
    verdicts = []
    for job in _progress(jobs):
        verdicts.append(judge(*job, PROFILES[arguments.profile], arguments.seed))
    return _report(verdicts, start, arguments.strict, arguments.json, terminal)


def replay(arguments: argparse.Namespace) -> int:
    """Run one law on one case: `mixproof replay [FILE] 'CELL CASE'`."""
    import dataclasses

    from mixproof.verify.cells import entries, load_file
    from mixproof.verify.judge import replay as judge_case
    from mixproof.verify.report.terminal import exit_code

    *file, token = arguments.words
    cell, _, text = token.strip().partition(" ")
    if cell.count("/") != 2:
        raise UsageError(f"replay: {cell!r} is not OPERATOR/IMPLEMENTATION/LAW; quote the token as it was printed")
    name, _, law = cell.rpartition("/")
    if file:
        # a function that was checked with --as is not declared in its file
        operator = name.split("/")[0] if ":" in file[0] else None
        subjects = {str(s): s for s in _declared(file[0], operator, text, load_file)}
    else:
        subjects = {str(e): e for e in entries()}
    if name not in subjects:
        raise UsageError(f"replay: no implementation {name}; there are {', '.join(subjects)}")
    found = subjects[name]
    subject = found if file else found.load()  # type: ignore[union-attr]
    verdict = dataclasses.replace(judge_case(subject, law, text), replay=f"mixproof replay {' '.join(file)} '{token}'")
    print(_one(verdict))
    return exit_code([verdict])


def _declared(spec: str, operator: str | None, text: str, load_file) -> list[Subject]:
    from mixproof.verify.errors import AdapterError

    try:
        return load_file(spec)
    except AdapterError:
        if operator is None:
            raise
    dtype = next((w.split("=")[1] for w in text.split() if w.startswith("dtype=")), "float32")
    return load_file(spec, operator, dtypes=(dtype,))


def new(arguments: argparse.Namespace) -> int:
    """Write an adapter with the operator's inputs filled in."""
    from mixproof.verify.adapter import adapter

    print(adapter(arguments.operator), end="")
    return 0


def list_all(arguments: argparse.Namespace) -> int:
    """Operators with their forms, laws and implementations."""
    from mixproof.reference import OPERATORS
    from mixproof.reference import operator as find_operator
    from mixproof.verify.cells import entries, laws_for

    for name in OPERATORS:
        op = find_operator(name)
        print(f"{name}\n  {op.summary}   [{op.source}]")
        shapes = [f"{x.name} ({' '.join(x.axes)})" if x.axes else x.name for x in op.inputs]
        print(f"  inputs           {', '.join(shapes)}")
        print(f"  forms            {', '.join(f.name for f in op.forms)}")
        print(f"  laws             {', '.join(laws_for(op))}")
        for e in entries():
            if e.operator == name:
                missing = e.missing()
                reason = f"   not run here: {missing} is not installed" if missing else ""
                print(f"  implementation   {e.name}{reason}")
    return 0


def _report(verdicts: list[Verdict], start: float, strict: bool, json: str | None, terminal) -> int:
    print(terminal.matrix(verdicts, color=sys.stdout.isatty()))
    for v in verdicts:
        if v.status in ("fail", "error"):
            print(terminal.failure(v) + "\n")
    print(terminal.LEGEND)
    if reasons := terminal.not_run(verdicts):
        print("not run:\n" + reasons)
    print(terminal.closing(verdicts, time.time() - start))
    if json:
        from mixproof.verify.report.json_file import write_json

        write_json(json, verdicts)
    return terminal.exit_code(verdicts, strict)


def _one(verdict: Verdict) -> str:
    from mixproof.verify.report.terminal import failure

    if verdict.status in ("fail", "error"):
        return failure(verdict)
    if verdict.status == "pass":
        return f"holds   {verdict.cell}   {verdict.ratio:.3g} x bound   {verdict.case}"
    return f"{verdict.status}   {verdict.cell}   {verdict.why}"


def _progress(jobs: list):
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=len(jobs))
        for subject, law in jobs:
            bar.update(task, description=f"{subject}/{law}")
            yield subject, law
            bar.advance(task)


def _header(profile: str, seed: int) -> str:
    from mixproof.verify.versions import versions

    return "  ".join(f"{n} {v}" for n, v in versions().items()) + f"  profile {profile}  seed {seed}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("mixproof", description="The correctness gate for sequence mixers.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    c = commands.add_parser("check", help="judge the implementations in a file", description=check.__doc__)
    c.add_argument("file", metavar="FILE[:FUNCTION]")
    c.add_argument("--as", dest="operator", metavar="OPERATOR", help="what FUNCTION computes (mixproof list)")
    c.add_argument("--layout", default="B T H D", help='axes of token inputs with --as (default "B T H D")')
    c.add_argument("--dtype", action="append", help="input dtype with --as (default float32); may be repeated")
    c.add_argument("--chunk", type=int, help="its chunk size, with --as, so that lengths around it are tried")
    c.add_argument("--profile", choices=("smoke", "ci", "nightly"), default="smoke")
    c.add_argument("--seed", type=int, default=0)
    c.add_argument("--strict", action="store_true", help="fail on undecided and not-run cells too")
    c.add_argument("--json", metavar="FILE", help="write the verdicts as JSON")
    c.add_argument("-k", default="", metavar="TEXT", help="only cells whose name contains TEXT")
    c.set_defaults(run=check)
    r = commands.add_parser("replay", help="run one law on one case again", description=replay.__doc__)
    r.add_argument("words", nargs="+", metavar="[FILE] TOKEN")
    r.set_defaults(run=replay)
    n = commands.add_parser("new", help="write an adapter for your implementation", description=new.__doc__)
    n.add_argument("operator")
    n.set_defaults(run=new)
    li = commands.add_parser("list", help="operators, laws, implementations", description=list_all.__doc__)
    li.set_defaults(run=list_all)
    return parser


if __name__ == "__main__":
    sys.exit(main())
