"""What this run was made with, for headers and reports. Reads metadata: imports neither torch nor triton."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from typing import Any


def versions() -> dict[str, str]:
    """Versions by package, installed ones only, ours first; and the GPU, once torch is imported and sees one."""
    found = {}
    for name in ("mixproof", "numpy", "torch", "triton", "fla-core", "python-flint"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if "torch" in sys.modules:
        cuda: Any = sys.modules["torch"].cuda
        if cuda.is_available():
            found["cuda"] = cuda.get_device_name()
        else:
            interpreted = True
    if "triton" in found and interpreted:
        found["triton"] += " (interpreted)"
    return found


def header(profile: str, seed: int) -> str:
    """The first line of a run."""
    return f"{'  '.join(f'{name} {version}' for name, version in versions().items())}  profile {profile}  seed {seed}"
