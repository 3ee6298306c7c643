"""What this run was made with, for headers and reports. Reads metadata: imports neither torch nor triton."""

from __future__ import annotations

import os
import sys
from importlib import metadata


def versions() -> dict[str, str]:
    """Versions by package, installed ones only, ours first; and the GPU, once torch is imported and sees one."""
    found = {}
    for name in ("mixproof", "numpy", "torch", "triton", "fla-core", "python-flint"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    torch = sys.modules.get("torch")
    gpu = torch is not None and torch.cuda.is_available()
    if gpu:
        found["cuda"] = torch.cuda.get_device_name()
    if "triton" in found and (os.environ.get("TRITON_INTERPRET") == "1" or (torch is not None and not gpu)):
        found["triton"] += " (interpreted)"
    return found


def header(profile: str, seed: int) -> str:
    """The first line of a run."""
    return f"{'  '.join(f'{name} {version}' for name, version in versions().items())}  profile {profile}  seed {seed}"
