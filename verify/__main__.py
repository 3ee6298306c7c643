"""The command `mixproof`: check, replay, precision, new, list, claims, power. Exit codes are pytest's own: 0 holds,
1 broken, 2 interrupted, 3 our bug, 4 usage or adapter, 5 nothing was checked."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from mixproof.verify.errors import UsageError

if TYPE_CHECKING:
    from mixproof.verify.subject import Subject
    from mixproof.verify.verdict import Verdict

INTERRUPTED, BUG, USAGE = 2, 3, 4
DTYPES = ("float64", "float32", "bfloat16", "float16")
DEVICES = {"auto": ("cpu", "cuda"), "cpu": ("cpu",), "cuda": ("cuda",)}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code; messages for people go to stderr."""
    try:
        arguments = _parser().parse_args(argv)
        return arguments.run(arguments)
    except UsageError as error:
        print(f"mixproof: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # mixproof list | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception:
        import traceback

        traceback.print_exc()
        print("mixproof: a bug of ours, please report it", file=sys.stderr)
        return BUG


def check(arguments: argparse.Namespace) -> int:
    """Judge the implementations of one file: those it declares with @implements, or FUNCTION taken as OPERATOR."""
    from mixproof.verify.cells import laws_for
    from mixproof.verify.judge import PROFILES, judge
    from mixproof.verify.report import terminal

    start = time.time()
    if arguments.json:
        _write_json(arguments.json, [])  # not only after the work that it cannot be written
    subjects = _load(arguments, arguments.file)
    texts = arguments.k.split(" or ")
    jobs = [(s, n) for s in subjects for n in laws_for(s.operator) if any(text in f"{s}/{n}" for text in texts)]
    if not jobs:
        raise UsageError(f"-k {arguments.k}: no cell of {arguments.file} has that in its name, OPERATOR/NAME/LAW")
    print(_header(arguments.profile, arguments.seed))
    for s in subjects:
        chunk = f", chunk {s.declaration.chunk}" if s.declaration.chunk else ""
        print(f"{s.place}  {s.name}: {s.operator.name}, {' '.join(s.declaration.dtypes)}{chunk}")
    print(flush=True)
    verdicts: list[Verdict] = []
    interrupted = False
    try:
        progress = _Progress(jobs)
        for job in progress:
            verdicts.append(judge(*job, PROFILES[arguments.profile], arguments.seed))
            if objection := terminal.objection(verdicts[-1], arguments.strict):
                progress.say(objection + "\n")
                if arguments.exitfirst:
                    break
    except KeyboardInterrupt:
        interrupted = True
    print(terminal.summary(verdicts, time.time() - start, _width(), sys.stdout.isatty()))
    if arguments.json:
        _write_json(arguments.json, verdicts)
    return INTERRUPTED if interrupted else terminal.exit_code(verdicts, arguments.strict)


def replay(arguments: argparse.Namespace) -> int:
    """Run one law on one case again: a token of ours, or of the implementations of FILE. The options are those of
    `check`."""
    import dataclasses

    from mixproof.verify.cells import entries
    from mixproof.verify.judge import replay as judge_case
    from mixproof.verify.report.terminal import exit_code, line

    cell, _, text = arguments.token.strip().partition(" ")
    name, _, law = cell.rpartition("/")
    if cell.count("/") != 2:
        raise UsageError(f"TOKEN: {cell!r} is not OPERATOR/IMPLEMENTATION/LAW; quote the token as it was printed")
    if arguments.file:
        subjects = {str(s): s for s in _load(arguments, arguments.file)}
    else:
        _only_with_as(arguments)
        subjects = {str(e): e for e in entries()}
    if name not in subjects:
        raise UsageError(f"TOKEN: no implementation {name}{_elsewhere(name, list(subjects), arguments.file)}")
    found: Any = subjects[name]
    if not arguments.file and (missing := found.missing()):
        raise UsageError(f"TOKEN: {name} needs {missing}, which is not installed")
    subject: Subject = found if arguments.file else found.load()
    verdict = judge_case(subject, law, text)
    print(line(dataclasses.replace(verdict, replay=f"{_command(subject)} {shlex.quote(arguments.token)}")))
    return exit_code([verdict])


def _elsewhere(name: str, known: list[str], file: str | None) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, known, n=3)
    hint = f"; there {'is' if len(near) == 1 else 'are'} {', '.join(near)}" if near else ""
    return f" in {file}{hint}" if file else f"{hint}; of a file of yours: mixproof replay FILE TOKEN"


def _command(subject: Subject) -> str:
    return f"mixproof replay {subject.origin}".rstrip()


def precision(arguments: argparse.Namespace) -> int:
    """Which arithmetic the implementations of a file really use, told from their errors, beside the one they declare.
    Exit code 1 if one is narrower than declared, 5 if nothing can be said. The options are those of `check`."""
    from mixproof.verify.precision import detect_all
    from mixproof.verify.report.precision import exit_code, table

    findings = []
    for subject in _load(arguments, arguments.file):
        findings += [vars(found) | {"sentence": str(found)} for found in detect_all(subject)]
    print(table(findings))
    return exit_code(findings)


def new(arguments: argparse.Namespace) -> int:
    """Write an adapter with the operator's inputs filled in: one line to edit, then `mixproof check` it."""
    from mixproof.verify.adapter import adapter

    print(adapter(arguments.operator), end="")
    return 0


def list_all(arguments: argparse.Namespace) -> int:
    """Operators with their inputs, forms, laws, implementations, and witnesses: other people's."""
    from mixproof.reference import OPERATORS
    from mixproof.verify.cells import entries, laws_for
    from mixproof.verify.declare import find

    for name in [arguments.operator] if arguments.operator else OPERATORS:
        op = find(name)
        print(f"{name}\n  {op.summary}   [{op.source}]")
        shapes = [f"{x.name} ({' '.join(x.axes)})" if x.axes else x.name for x in op.inputs]
        print(f"  inputs           {', '.join(shapes)}")
        print(f"  forms            {', '.join(f.name for f in op.forms)}")
        print(f"  laws             {', '.join(laws_for(op))}")
        for e in entries():
            if e.operator == name:
                missing = e.missing()
                reason = f"   not run here: {missing} is not installed" if missing else ""
                kind = "witness" if ".thirdparty." in e.module else "implementation"
                print(f"  {kind:16s} {e.name}{reason}")
    return 0


def claims(arguments: argparse.Namespace) -> int:
    """The ledger: what the papers claim, each claim with its verdict, and its condition or counterexample."""
    from mixproof.verify.claims import ledger
    from mixproof.verify.report import page
    from mixproof.verify.report.claims import as_json, html, markdown, table

    if arguments.format == "html" and page.missing():
        raise UsageError(f"--format html: {page.missing()}")
    chosen = [c.as_dict() for c in ledger(arguments.paper).values() if arguments.verdict in ("", c.verdict)]
    forms = {"json": as_json, "markdown": markdown, "html": html, "table": lambda found: table(found, _width())}
    print(forms[arguments.format](chosen))
    return 0


def show_claim(arguments: argparse.Namespace) -> int:
    """One claim, checked again now: the verdict that is found, and its numbers. Exit code 1 if the verdict changed."""
    from mixproof.verify.claims import find
    from mixproof.verify.report.claims import explained

    claim = find(arguments.id)
    found = claim.check()
    print(explained(claim.as_dict(), vars(found), _width()))
    return int(found.verdict != claim.verdict)


def _load(arguments: argparse.Namespace, file: str) -> list[Subject]:
    """The implementations of a file; their replay commands repeat the options with which they were declared."""
    from mixproof.verify.cells import load_file

    if not arguments.operator:
        _only_with_as(arguments)
        return load_file(file)
    given = _given(arguments)
    words = [f"--as {arguments.operator}"] + [f"{flag} {shlex.quote(v)}" if v else flag for flag, v in given]
    options: dict[str, Any] = {
        "layout": arguments.layout or "B T H D",
        "dtypes": tuple(arguments.dtype or ["float32"]),
        "chunk": arguments.chunk,
        "multiple_of": dict(_axis(word) for word in arguments.multiple_of or ()),
        "gradients": not arguments.no_gradients,
        "devices": DEVICES[arguments.device or "auto"],
    }
    return load_file(file, arguments.operator, " ".join([*words, shlex.quote(file)]), **options)


def _given(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """The options that describe a function, as given: (flag, value), the value empty for a switch."""
    given = [("--layout", arguments.layout)] if arguments.layout else []
    given += [("--dtype", d) for d in arguments.dtype or ()]
    given += [("--chunk", str(arguments.chunk))] if arguments.chunk else []
    given += [("--multiple-of", word) for word in arguments.multiple_of or ()]
    given += [("--no-gradients", "")] if arguments.no_gradients else []
    return given + ([("--device", arguments.device)] if arguments.device else [])


def _only_with_as(arguments: argparse.Namespace) -> None:
    if given := ([("--as", "")] if arguments.operator else []) + _given(arguments):
        raise UsageError(f"{given[0][0]} describes FILE:FUNCTION --as OPERATOR; elsewhere @implements(...) says it")


def _axis(word: str) -> tuple[str, int]:
    axis, _, n = word.partition("=")
    if not axis or not n.isdecimal() or int(n) < 1:
        raise UsageError(f"--multiple-of {word}: expected AXIS=N, for example T=16")
    return axis, int(n)


class _Progress:
    """The jobs one after the other, with a bar on a terminal that makes room for what is said meanwhile."""

    def __init__(self, jobs: list[tuple[Subject, str]]) -> None:
        self.jobs, self.bar = jobs, None
        if sys.stderr.isatty() and sys.stdout.isatty():
            from mixproof.verify.progress import bar

            self.bar = bar()

    def __iter__(self) -> Iterator[tuple[Subject, str]]:
        if self.bar is None:
            yield from self.jobs
            return
        task = self.bar.add_task("", total=len(self.jobs))
        with self.bar:
            for subject, law in self.jobs:
                self.bar.update(task, description=f"{subject}/{law}")
                yield subject, law
                self.bar.advance(task)

    def say(self, text: str) -> None:
        """Print it as it is: a replay command that is wrapped could not be copied."""
        if self.bar is not None:
            self.bar.stop()
        print(text, flush=True)
        if self.bar is not None:
            self.bar.start()


def _write_json(path: str, verdicts: list[Verdict]) -> None:
    from mixproof.verify.report.json_file import write_json
    from mixproof.verify.versions import versions

    try:
        write_json(path, verdicts, versions())
    except OSError as error:
        raise UsageError(f"--json {path}: {error.strerror}") from None


def _width() -> int:
    import shutil

    return shutil.get_terminal_size().columns


def _header(profile: str, seed: int) -> str:
    from mixproof.verify.versions import header

    return header(profile, seed)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """argparse would exit with 2, which is pytest's code for an interruption."""
        raise UsageError(f"{message}   ({self.prog} --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("mixproof", description="The correctness gate for sequence mixers.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    c = commands.add_parser("check", help="judge the implementations in a file", description=check.__doc__)
    c.add_argument("file", metavar="FILE[:FUNCTION]")
    _describing(c)
    c.add_argument("--profile", choices=("smoke", "short", "ci", "nightly"), default="short", help="how long to look")
    c.add_argument("--seed", type=int, default=0, metavar="N", help="added to the seed of every case")
    c.add_argument("--strict", action="store_true", help="fail on undecided and not-run cells too")
    c.add_argument("--json", metavar="FILE", help="write the verdicts as JSON")
    c.add_argument("-k", default="", metavar="TEXT", help="only cells whose name contains TEXT ('A or B': either)")
    c.add_argument("-x", "--exitfirst", action="store_true", help="stop at the first cell that fails")
    c.set_defaults(run=check)
    r = commands.add_parser("replay", help="run one law on one case again", description=replay.__doc__)
    r.add_argument("file", nargs="?", metavar="FILE[:FUNCTION]")
    r.add_argument("token", metavar="TOKEN", help="as it was printed: 'OPERATOR/NAME/LAW CASE'")
    _describing(r)
    r.set_defaults(run=replay)
    n = commands.add_parser("new", help="write an adapter for your implementation", description=new.__doc__)
    n.add_argument("operator", metavar="OPERATOR")
    n.set_defaults(run=new)
    li = commands.add_parser("list", help="operators, laws, implementations", description=list_all.__doc__)
    li.add_argument("operator", nargs="?", metavar="OPERATOR", help="only this one")
    li.set_defaults(run=list_all)
    _add_claims(commands)
    _add_power(commands)
    _add_precision(commands)
    return parser


def _add_claims(commands: Any) -> None:
    from mixproof.verify.claims import PAPERS, VERDICTS

    c = commands.add_parser("claims", help="the papers' claims, with verdicts", description=claims.__doc__)
    c.add_argument("--paper", choices=tuple(PAPERS), default="", help="only those of this paper")
    c.add_argument("--verdict", choices=VERDICTS, default="", help="only those with this verdict")
    c.add_argument("--format", choices=("table", "json", "markdown", "html"), default="table")
    c.set_defaults(run=claims)
    s = c.add_subparsers(metavar="show").add_parser("show", help="check one again", description=show_claim.__doc__)
    s.add_argument("id", metavar="ID", help="as `mixproof claims` prints it, for example survey.A1")
    s.set_defaults(run=show_claim)


def _add_power(commands: Any) -> None:
    from mixproof.verify.power.command import add_parser

    add_parser(commands)


def _add_precision(commands: Any) -> None:
    p = commands.add_parser("precision", help="which arithmetic a file really uses", description=precision.__doc__)
    p.add_argument("file", metavar="FILE[:FUNCTION]")
    _describing(p)
    p.set_defaults(run=precision)


def _describing(parser: argparse.ArgumentParser) -> None:
    """Options that say of a function what @implements would."""
    group = parser.add_argument_group("for a function that is not declared with @implements")
    group.add_argument("--as", dest="operator", metavar="OPERATOR", help="what FUNCTION computes (mixproof list)")
    group.add_argument("--layout", help='axes of token inputs (default "B T H D")')
    group.add_argument("--dtype", action="append", choices=DTYPES, help="input dtype (default float32); repeatable")
    group.add_argument("--chunk", type=_size, metavar="N", help="its chunk size, so that lengths around it are tried")
    group.add_argument("--multiple-of", action="append", metavar="AXIS=N", help="sizes it needs; may be repeated")
    group.add_argument("--no-gradients", action="store_true", help="autograd does not run through it")
    group.add_argument("--device", choices=DEVICES, help="where it runs (default auto: the GPU if there is one)")


def _size(text: str) -> int:
    n = int(text)
    if n < 1:
        raise argparse.ArgumentTypeError(f"{n} is not a size")
    return n


if __name__ == "__main__":
    sys.exit(main())
