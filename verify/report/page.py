"""Pages from the templates beside this file: self-contained, what they show escaped. Needs jinja2, the extra
`report`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

MISSING = "the page needs jinja2: pip install 'mixproof[report]'"


def missing() -> str:
    """Why there can be no page here, or nothing."""
    return "" if find_spec("jinja2") else MISSING


def rendered(template: str, **context: Any) -> str:
    """Raises ModuleNotFoundError without jinja2."""
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ModuleNotFoundError:
        raise ModuleNotFoundError(MISSING, name="jinja2") from None

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    return environment.get_template(template).render(**context)
