"""What this run was made with, for headers and reports. Reads metadata: imports neither torch nor triton."""

from __future__ import annotations

import os
from importlib import metadata


def versions() -> dict[str, str]:
    """Versions by package, installed ones only, ours first."""
    found = {}
    for name in ("mixproof", "numpy", "torch", "triton", "fla-core", "python-flint"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if "triton" in found and os.environ.get("TRITON_INTERPRET") == "1":
        found["triton"] += " (interpreted)"
    return found
