"""Which module may know which, read from the source: nothing is imported here but the standard library.

    numpy <- reference <- verify.{case, numbers} <- verify.{laws, claims} <- verify.judge <- verify.power
        <- verify.{plugin, __main__}

PyTorch, Triton and third parties are reached below verify/subjects alone; report depends on verdicts alone. Modules
that the line does not name are helpers: they stand as high as the highest thing that they import.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# From the ground up. A module imports from its own layer and from those before it.
LAYERS = (
    ("reference",),
    ("verify.case", "verify.numbers"),
    ("verify.subjects",),
    ("verify.laws", "verify.claims"),
    ("verify.subjects.mutants",),  # the judge's dictionary of mistakes: each says by what a law would see it
    ("verify.judge",),
    ("verify.report",),
    ("verify.power",),
    ("verify.plugin", "verify.__main__", "verify.test_gate"),
)
REPORT_MAY_IMPORT = ("verify.report", "verify.verdict")
REQUIRED = {re.split(r"[^\w-]", line)[0] for line in PROJECT["dependencies"]}  # the import name is the same for all
OPTIONAL = {"verify.numbers": {"flint"}, "verify.report": {"jinja2"}}  # the extras `certify` and `report`

TOLERANCES = re.compile(r"\b(?:allclose|isclose|assert_close|approx|almost_equal)\(|\b[ar]tol\s*=")
MOST_LINES = 400

# A directory of somebody's machine at the start of a word; not a quotient such as (x - mu)/var, not part of an address.
ABSOLUTE_PATH = re.compile(
    r"(?<![\w.~)\]}:/-])/(?:home|root|Users|tmp|opt|usr|var|etc|mnt|srv|work|workspace)\b|[A-Z]:\\Users"
)
REGISTRY = re.compile(
    r"\b(?:pypi\.org|pythonhosted\.org|pytorch\.org/whl|anaconda\.org|npmjs\.(?:org|com)|ghcr\.io|docker\.io)\b"
)


# ----------------------------------------------------------------------------------------------------- reading the tree


def tree() -> dict[str, str]:
    """Path from the root -> source, of every module that ships."""
    files = sorted(path for top in ("reference", "verify") for path in (ROOT / top).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}


def text_files() -> Iterator[tuple[str, str]]:
    """Path and text of every file that is, or would be, committed."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
        paths = [ROOT / line for line in listed.stdout.splitlines()]
    except (OSError, subprocess.SubprocessError):  # a source archive, or no git
        tops = [ROOT / top for top in ("reference", "verify", "tests", "notebooks", ".ci")]
        paths = [*ROOT.glob("*"), *(path for top in tops for path in top.rglob("*") if "__pycache__" not in path.parts)]
    for path in sorted(path for path in paths if path.is_file()):
        data = path.read_bytes()
        if b"\0" not in data:
            yield path.relative_to(ROOT).as_posix(), data.decode("utf-8", errors="replace")


def module_name(path: str) -> str:
    """The name of a module of ours without the leading `mixproof.`"""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(path: str, source: str, known: set[str]) -> Iterator[tuple[int, str, int]]:
    """(line, module, level) of each import, also those inside functions and `import_module("name")`.

    Modules of ours lose the leading `mixproof.`; level counts the dots of a relative import.
    """
    package = module_name(path).split(".")
    if not path.endswith("/__init__.py"):
        package = package[:-1]
    for node in ast.walk(ast.parse(source, path)):
        found: list[tuple[str, list[str], int]] = []
        if isinstance(node, ast.Import):
            found = [(alias.name, [], 0) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            found = [(".".join([*base, *filter(None, [node.module])]), [x.name for x in node.names], node.level)]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            name = node.args[0].value
            by_name = function in ("import_module", "__import__") and isinstance(name, str)
            if by_name and not name.startswith("."):
                found = [(name, [], 0)]
        for name, names, level in found:
            ours = name.removeprefix("mixproof.") if level == 0 else name
            submodules = [f"{ours}.{x}" for x in names if f"{ours}.{x}" in known]
            plain = not names or len(submodules) < len(names)
            for module in submodules + ([ours if ours in known else name] if plain else []):
                yield node.lineno, module, level


def layer(module: str) -> int | None:
    """Where in LAYERS the module stands, by its longest listed prefix; None for a helper."""
    heights = {member: height for height, members in enumerate(LAYERS) for member in members}
    parts = module.split(".")
    prefixes = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next((heights[prefix] for prefix in prefixes if prefix in heights), None)


# ------------------------------------------------------------------------------------------------------------ the rules


def upward_imports(sources: dict[str, str]) -> list[str]:
    """Chains `a -> helper -> b` whose end stands in a higher layer than their start."""
    known = {module_name(path) for path in sources}
    edges = {module_name(path): {m for _, m, _ in imports(path, s, known) if m in known} for path, s in sources.items()}
    wrong = []
    for start in edges:
        height = layer(start)
        if height is None:
            continue
        chains, seen = [(start,)], {start}
        while chains:
            chain = chains.pop()
            for target in sorted(edges[chain[-1]] - seen):
                seen.add(target)
                reached = layer(target)
                if reached is None:
                    chains.append((*chain, target))
                elif reached > height:
                    wrong.append(" -> ".join((*chain, target)))
    return wrong


def foreign_imports(sources: dict[str, str]) -> list[str]:
    """Imports of packages that the module's place does not allow."""
    known = {module_name(path) for path in sources}
    wrong = []
    for path, source in sources.items():
        name = module_name(path)
        if name == "verify.subjects" or name.startswith("verify.subjects."):
            continue  # the one place from where frameworks and third parties are reached
        allowed = {"numpy"} if name.split(".")[0] == "reference" else set(REQUIRED)
        for place, extra in OPTIONAL.items():
            if name == place or name.startswith(place + "."):
                allowed |= extra
        for line, module, level in imports(path, source, known):
            top = module.split(".")[0]
            if level or module in known or top in ("mixproof", *sys.stdlib_module_names) or top in allowed:
                continue
            wrong.append(f"{path}:{line}: imports {module}")
    return wrong


def report_imports(sources: dict[str, str]) -> list[str]:
    """Imports by report of anything of ours but verdicts."""
    known = {module_name(path) for path in sources}
    wrong = []
    for path, source in sources.items():
        if not module_name(path).startswith("verify.report"):
            continue
        for line, module, _ in imports(path, source, known):
            allowed = any(module == m or module.startswith(m + ".") for m in REPORT_MAY_IMPORT)
            if module in known and not allowed:
                wrong.append(f"{path}:{line}: imports {module}")
    return wrong


def twice_named_imports(sources: dict[str, str]) -> list[str]:
    """Imports that would load a module under a second name.

    reference/ imports itself relatively, so that it works under whatever name it is reached. verify/ writes
    `mixproof.` always: pytest imports the folder it is pointed at as plain `verify`, with all it imports relatively.
    """
    known = {module_name(path) for path in sources}
    wrong = []
    for path, source in sources.items():
        inside = path.split("/")[0]
        for node in ast.walk(ast.parse(source, path)):
            relative = isinstance(node, ast.ImportFrom) and node.level > 0
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else names
            plain = not relative and any(name.split(".")[0] in ("reference", "verify") for name in names)
            absolute = not relative and any(name.split(".")[0] == "mixproof" for name in names)
            if plain or (relative if inside == "verify" else absolute):
                wrong.append(f"{path}:{node.lineno}: {'use from .' if inside == 'reference' else 'use from mixproof.'}")
        # The package's lazy names are for users: inside, they would hide which module is meant.
        if inside == "verify" and not path.startswith("verify/subjects/"):
            wrong += [
                f"{path}:{n}: import from the module that defines it"
                for n, m, _ in imports(path, source, known)
                if m == "verify"
            ]
    return wrong


def matches(pattern: re.Pattern[str], files: Iterator[tuple[str, str]]) -> list[str]:
    """`path:line: text` of each line that the pattern matches; the interpreter line of a script is no path of ours."""
    return [
        f"{path}:{number}: {line.strip()}"
        for path, text in files
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line) and not (number == 1 and line.startswith("#!"))
    ]


# -------------------------------------------------------------------------------------------------- the tree obeys them


@pytest.mark.parametrize("rule", [upward_imports, foreign_imports, report_imports, twice_named_imports])
def test_imports_point_down(rule) -> None:
    assert rule(tree()) == []


def test_no_tolerance_is_written_down() -> None:
    assert matches(TOLERANCES, iter(tree().items())) == []


def test_modules_stay_short() -> None:
    assert {path: n for path, source in tree().items() if (n := source.count("\n")) > MOST_LINES} == {}


@pytest.mark.parametrize("pattern", [ABSOLUTE_PATH, REGISTRY], ids=["absolute path", "registry"])
def test_files_name_no_machine(pattern: re.Pattern[str]) -> None:
    assert matches(pattern, text_files()) == []


def test_the_files_are_found() -> None:
    assert {"reference/spec.py", "verify/__init__.py"} <= set(tree())
    assert {"Makefile", "pyproject.toml", ".ci/run", "tests/test_layering.py"} <= {path for path, _ in text_files()}


# --------------------------------------------------------------------------------------------------- the rules can fail

MADE_UP = {
    "reference/__init__.py": "",
    "reference/spec.py": "import numpy as np",
    "reference/gma.py": "from .spec import Operator\nimport math",
    "verify/__init__.py": "from importlib import import_module",
    "verify/case.py": "import hypothesis\nfrom mixproof.reference import spec",
    "verify/verdict.py": "import json",
    "verify/helper.py": "from mixproof.verify.case import Case",
    "verify/laws/__init__.py": "from mixproof.verify import helper",
    "verify/laws/causal.py": "from mixproof.verify.laws import LAWS\nfrom mixproof.verify.numbers.ball import Ball",
    "verify/numbers/ball.py": "def f():\n    import flint",
    "verify/judge.py": "from mixproof.verify.laws.causal import law",
    "verify/report/terminal.py": "from mixproof.verify.verdict import Verdict\nfrom rich.table import Table",
    "verify/subjects/torch/gma.py": "import torch\nfrom mixproof.verify import implements",
    "verify/plugin.py": "import pytest\nfrom mixproof.verify import judge\nfrom mixproof.verify.report import terminal",
}


@pytest.mark.parametrize("rule", [upward_imports, foreign_imports, report_imports, twice_named_imports])
def test_rules_allow_what_the_design_allows(rule) -> None:
    assert rule(MADE_UP) == []


@pytest.mark.parametrize(
    ("rule", "path", "source", "message"),
    [
        (upward_imports, "verify/case.py", "from mixproof.verify.judge import check", "verify.case -> verify.judge"),
        (upward_imports, "verify/case.py", "from mixproof.verify import judge", "verify.case -> verify.judge"),
        (upward_imports, "verify/case.py", "import mixproof.verify.judge", "verify.case -> verify.judge"),
        (upward_imports, "verify/case.py", "import_module('mixproof.verify.judge')", "verify.case -> verify.judge"),
        (upward_imports, "verify/laws/causal.py", "from ..plugin import x", "verify.laws.causal -> verify.plugin"),
        (
            upward_imports,
            "verify/laws/__init__.py",
            "def f():\n    from . import causal\n    from .. import judge",
            "verify.laws -> verify.judge",
        ),
        (
            upward_imports,
            "verify/helper.py",
            "from mixproof.verify import judge",
            "verify.laws -> verify.helper -> verify.judge",
        ),
        (upward_imports, "reference/gma.py", "from mixproof.verify.case import Case", "reference.gma -> verify.case"),
        (
            upward_imports,
            "verify/judge.py",
            "from mixproof.verify.report.terminal import show",
            "verify.judge -> verify.report.terminal",
        ),
        (
            foreign_imports,
            "reference/gma.py",
            "import numpy\nimport scipy.special",
            "reference/gma.py:2: imports scipy.special",
        ),
        (foreign_imports, "reference/gma.py", "import sympy", "reference/gma.py:1: imports sympy"),
        (foreign_imports, "verify/judge.py", "def f():\n    import torch", "verify/judge.py:2: imports torch"),
        (
            foreign_imports,
            "verify/laws/causal.py",
            "from torch.nn import Module",
            "verify/laws/causal.py:1: imports torch.nn",
        ),
        (
            foreign_imports,
            "verify/plugin.py",
            "importlib.import_module('triton')",
            "verify/plugin.py:1: imports triton",
        ),
        (foreign_imports, "verify/judge.py", "import flint", "verify/judge.py:1: imports flint"),
        (
            report_imports,
            "verify/report/terminal.py",
            "from mixproof.verify.case import Case",
            "verify/report/terminal.py:1: imports verify.case",
        ),
        (
            report_imports,
            "verify/report/terminal.py",
            "from mixproof.reference.gma import CAUSAL",
            "verify/report/terminal.py:1: imports reference.gma",
        ),
        (
            twice_named_imports,
            "reference/gma.py",
            "from mixproof.reference.spec import Operator",
            "reference/gma.py:1: use from .",
        ),
        (twice_named_imports, "verify/judge.py", "from .case import Case", "verify/judge.py:1: use from mixproof."),
        (twice_named_imports, "verify/judge.py", "import reference", "verify/judge.py:1: use from mixproof."),
        (
            twice_named_imports,
            "verify/judge.py",
            "from mixproof.verify import implements",
            "verify/judge.py:1: import from the module that defines it",
        ),
    ],
)
def test_rules_find_the_wrong_import(rule, path: str, source: str, message: str) -> None:
    assert rule({**MADE_UP, path: source}) == [message]


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        (TOLERANCES, "np.allclose(a, b)"),
        (TOLERANCES, "assert_close(a, b, rtol=1e-3)"),
        (TOLERANCES, "def same(a, b, atol = 0.1):"),
        (TOLERANCES, "assert x == pytest.approx(1)"),
        (ABSOLUTE_PATH, "path = '" + "/" + "home/someone/x'"),
        (ABSOLUTE_PATH, "cd /" + "tmp"),
        (ABSOLUTE_PATH, "C:" + "\\Users"),
        (REGISTRY, "https://" + "pypi" + ".org/project/x"),
        (REGISTRY, "https://download." + "pytorch" + ".org/whl/cpu"),
    ],
)
def test_patterns_match(pattern: re.Pattern[str], line: str) -> None:
    assert matches(pattern, iter([("file", line)])) == [f"file:1: {line}"]


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        (TOLERANCES, "relative error and tolerance, all close"),
        (ABSOLUTE_PATH, "https://example.org/home/page, ../var, a/tmp, (x - mu)/var, x**2/var, .ci/run, 2>/dev/null"),
        (ABSOLUTE_PATH, "#!/" + "usr/bin/env bash"),
        (REGISTRY, "from the default index"),
    ],
)
def test_patterns_do_not_match(pattern: re.Pattern[str], line: str) -> None:
    assert matches(pattern, iter([("file", line)])) == []
