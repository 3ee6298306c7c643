"""Cells: which implementations there are, and which laws are applied to them.

Our own are found by reading the decorators in `verify/subjects/` without importing them, so that listing and
collecting need neither torch nor triton. A cell is `operator/implementation/law`.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from mixproof.reference import OPERATORS
from mixproof.reference import operator as find_operator
from mixproof.reference.spec import Operator
from mixproof.verify.declare import ATTRIBUTE, implements
from mixproof.verify.errors import AdapterError, UsageError
from mixproof.verify.laws import LAWS
from mixproof.verify.laws import law as find_law
from mixproof.verify.subject import Subject

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
                k.value: v for k, v in zip(value.keys, value.values, strict=True) if isinstance(k, ast.Constant)
            }
        elif isinstance(value, ast.Call) and value.args and ast.unparse(value.args[0]) == "implements":
            partials[name] = _keywords(value, dicts)
    for node in body:
        for d in reversed(node.decorator_list) if isinstance(node, ast.FunctionDef) else ():
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


def load_file(spec: str, operator: str | None = None, **options: Any) -> list[Subject]:
    """The implementations in FILE, or FILE:FUNCTION taken as `operator` (no import of ours needed in the file).

    Raises AdapterError naming the file if it is missing, does not import, or declares nothing."""
    path, _, name = spec.partition(":")
    module = _import(Path(path))
    if name and operator:
        function = getattr(module, name, None)
        if not callable(function):
            raise AdapterError(f"{path} has no function {name!r}")
        setattr(function, ATTRIBUTE, ())
        implements(operator, name=name, **options)(function)
        functions = [function]
    elif operator:
        raise UsageError(f"--as {operator}: say which function: {path}:FUNCTION")
    else:
        functions = [f for n, f in vars(module).items() if getattr(f, ATTRIBUTE, ()) and (not name or n == name)]
        functions = list(dict.fromkeys(functions))
    if not functions:
        hint = f"mixproof check {path}:{name or 'FUNCTION'} --as OPERATOR"
        raise AdapterError(f"{spec} declares no implementation; decorate one with @implements, or run {hint}")
    return [Subject(d, f, origin=spec) for f in functions for d in getattr(f, ATTRIBUTE)]


def _import(path: Path) -> ModuleType:
    if not path.is_file():
        raise AdapterError(f"no such file: {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise AdapterError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)  # a kernel file may import its neighbours
    sys.modules[path.stem] = module  # Triton finds a kernel's source through its module
    try:
        spec.loader.exec_module(module)
    except AdapterError:
        raise
    except Exception as error:
        text = str(error).strip().splitlines()
        raise AdapterError(f"{path} does not import: {type(error).__name__}: {text[0] if text else ''}") from error
    finally:
        sys.path.remove(folder)
    return module
