"""Cells: which implementations there are, and which laws are applied to them.

Our own are found by reading the decorators in `verify/subjects/` without importing them, so that listing and
collecting need neither torch nor triton. A cell is `operator/implementation/law`.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import shlex
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from mixproof.reference import OPERATORS
from mixproof.reference import operator as find_operator
from mixproof.reference.spec import Operator
from mixproof.verify.declare import ATTRIBUTE, Declaration, implements
from mixproof.verify.errors import AdapterError, UsageError
from mixproof.verify.laws import LAWS
from mixproof.verify.laws import law as find_law
from mixproof.verify.subject import Subject, first_line

SUBJECTS = Path(__file__).parent / "subjects"
FOLDERS = ("torch", "triton", "thirdparty")


@dataclass(frozen=True)
class Entry:
    """An implementation before it is imported: enough to list it and to name its cells."""

    operator: str
    name: str
    module: str
    function: str
    requires: tuple[str, ...] = ()

    def load(self) -> Subject:
        """Raises AdapterError if its file cannot be imported here; the reason of a missing package stays readable."""
        if self.module == "reference":
            from mixproof.verify.subjects.reference import subject

            return subject(self.operator, self.name)
        function = getattr(import_module(self.module), self.function)
        for declaration in getattr(function, ATTRIBUTE):
            if (declaration.operator, declaration.name) == (self.operator, self.name):
                return Subject(declaration, function)
        raise AdapterError(f"{self.module}.{self.function} does not declare {self.operator}/{self.name}")

    def missing(self) -> str:
        """The first package that it needs and that is not installed."""
        return next((m for m in self.requires if importlib.util.find_spec(m) is None), "")

    def __str__(self) -> str:
        return f"{self.operator}/{self.name}"


def laws_for(operator: Operator) -> list[str]:
    """Laws that hold for an operator: all that hold for every one, and those that it names."""
    return [name for name in LAWS if not find_law(name).optional or name in operator.laws]


@lru_cache
def entries() -> tuple[Entry, ...]:
    """Our own implementations: every form of every reference, then those in verify/subjects/."""
    found = [
        Entry(name, f"reference.{form.name}", "reference", "")
        for name in OPERATORS
        for form in find_operator(name).forms
    ]
    for folder in FOLDERS:
        for file in sorted((SUBJECTS / folder).glob("*.py")):
            found += _declared(file, f"mixproof.verify.subjects.{folder}.{file.stem}", "torch")
    order = list(OPERATORS)
    return tuple(sorted(found, key=lambda e: order.index(e.operator)))


def _declared(file: Path, module: str, framework: str) -> Iterator[Entry]:
    """Entries for the `@implements` decorators in a source file; module-level literal dicts, and partials of
    `implements`, may supply keywords."""
    body = ast.parse(file.read_text()).body
    dicts: dict[str, dict[str, ast.expr]] = {}
    partials: dict[str, dict[str, ast.expr]] = {"implements": {}}
    for node in body:
        if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)):
            continue
        name, value = node.targets[0].id, node.value
        if isinstance(value, ast.Dict):
            dicts[name] = {
                ast.literal_eval(k): v for k, v in zip(value.keys, value.values, strict=True) if k is not None
            }
        elif isinstance(value, ast.Call) and value.args and ast.unparse(value.args[0]) == "implements":
            partials[name] = _keywords(value, dicts)
    for node in body:
        if not isinstance(node, ast.FunctionDef):
            continue
        for d in reversed(node.decorator_list):
            if isinstance(d, ast.Call) and isinstance(d.func, ast.Name) and d.func.id in partials:
                given = partials[d.func.id] | _keywords(d, dicts)
                known = {k: ast.literal_eval(given[k]) for k in ("name", "requires") if k in given}
                requires = (framework, *known.get("requires", ()))
                yield Entry(ast.literal_eval(d.args[0]), known.get("name", node.name), module, node.name, requires)


def _keywords(call: ast.Call, dicts: dict[str, dict[str, ast.expr]]) -> dict[str, ast.expr]:
    found: dict[str, ast.expr] = {}
    for k in call.keywords:
        if k.arg is None:
            found |= dicts.get(ast.unparse(k.value), {})
        else:
            found[k.arg] = k.value
    return found


def load_file(spec: str, operator: str | None = None, origin: str | None = None, **options: Any) -> list[Subject]:
    """The implementations in FILE, or FILE:FUNCTION taken as `operator` (no import of ours needed in the file).

    `origin` is what a replay command says instead of `spec`. Raises AdapterError naming the file if it is missing, does
    not import, or declares nothing; UsageError for a FUNCTION that it does not have."""
    path, name = _split(spec)
    origin = shlex.quote(spec) if origin is None else origin
    if operator and not name:
        raise UsageError(f"--as {operator}: say which function: {path}:FUNCTION")
    declare = implements(operator, name=name, **options) if operator else None  # first: it finds wrong options at once
    before = "triton" in sys.modules
    module = _import(Path(path))
    triton = uses_triton(Path(path)) or (not before and "triton" in sys.modules)
    if name and not callable(getattr(module, name, None)):
        near = get_close_matches(name, [n for n, f in vars(module).items() if callable(f)], n=1)
        raise UsageError(f"{path} has no function {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    if declare is not None:
        function = getattr(module, name)
        (declaration,) = getattr(declare(lambda: None), ATTRIBUTE)
        return [_subject(_needing(declaration, triton), function, origin, spec)]
    functions = [f for n, f in vars(module).items() if getattr(f, ATTRIBUTE, ()) and (not name or n == name)]
    declared = [(_needing(d, triton), f) for f in dict.fromkeys(functions) for d in getattr(f, ATTRIBUTE)]
    subjects = [_subject(d, f, origin, spec) for d, f in declared]
    if not subjects:
        hint = f"mixproof check {path}:{name or 'FUNCTION'} --as OPERATOR"
        raise AdapterError(f"{spec} declares no implementation; decorate one with @implements, or run {hint}")
    distinct(subjects)
    return subjects


def distinct(subjects: Iterable[Subject]) -> dict[str, Subject]:
    """Subjects by name. Raises AdapterError if two have the same: their cells could not be told apart."""
    named: dict[str, Subject] = {}
    for s in subjects:
        if str(s) in named:
            places = " and ".join(dict.fromkeys((named[str(s)].place, s.place)))
            raise AdapterError(f"two implementations are called {s} ({places}); give one of them another name=")
        named[str(s)] = s
    return named


def _needing(declaration: Declaration, triton: bool) -> Declaration:
    """Kernels that may run through the interpreter must be known as such: dtypes are trusted only after a canary."""
    if "triton" in declaration.requires or not triton:
        return declaration
    return dataclasses.replace(declaration, requires=(*declaration.requires, "triton"))


def uses_triton(path: Path) -> bool:
    """Whether a file imports Triton anywhere in it; without a GPU its kernels are interpreted."""
    for node in ast.walk(ast.parse(path.read_bytes(), path.name)):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        if any(n.split(".")[0] == "triton" for n in names):
            return True
    return False


def _split(spec: str) -> tuple[str, str]:
    """FILE and FUNCTION of FILE[:FUNCTION]; the colon of a drive is no separator."""
    path, _, name = spec.rpartition(":")
    return (path, name) if path and name.isidentifier() else (spec.removesuffix(":"), "")


def _subject(declaration: Declaration, function: Any, origin: str, spec: str) -> Subject:
    try:
        return Subject(declaration, function, origin)
    except AdapterError as error:
        raise AdapterError(f"{spec}: {error}") from None
    except (TypeError, ValueError):
        raise AdapterError(
            f"{spec}: the arguments of {declaration.name} cannot be read; write a function around it that names them"
        ) from None


def _import(path: Path) -> ModuleType:
    if not path.is_file():
        raise AdapterError(f"no such file: {path}")
    path = path.resolve()
    name = path.stem
    while name in sys.modules and getattr(sys.modules[name], "__file__", None) != str(path):
        name = f"_{name}"  # a kernel.py beside another one, a queue.py: no other module is replaced
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise AdapterError(f"{path.name} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.parent)
    sys.path.insert(0, folder)  # a kernel file may import its neighbours
    sys.modules[name] = module  # Triton finds a kernel's source through its module
    try:
        if importlib.util.find_spec("triton") and importlib.util.find_spec("torch"):
            import_module("mixproof.verify.subjects.triton.interpreter").start()
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        if isinstance(error, UsageError):
            raise AdapterError(f"{path.name}: {error}") from None
        where = _line_of(error, path)
        raise AdapterError(f"{path.name}{where} does not import: {first_line(error)}") from error
    finally:
        sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)  # neighbours that it imports later, without hiding anything
    return module


def _line_of(error: BaseException, path: Path) -> str:
    """Where in the file it went wrong, as ":12"; nothing for a syntax error, whose text says so."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f":{lines[-1]}" if lines else ""
