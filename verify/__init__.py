"""The gate: judges implementations of sequence mixers against the equations in `mixproof.reference`.

`from mixproof.verify import implements` is all that an adapter needs.
"""

from importlib import import_module
from typing import Any

_PUBLIC = {
    "implements": "mixproof.verify.declare",
    "check": "mixproof.verify.judge",
    "Verdict": "mixproof.verify.verdict",
}


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
