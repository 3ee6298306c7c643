"""Triton kernels on a machine without a GPU: Triton's interpreter, repaired where canaries show that it errs.

`activate()` comes before the first import of Triton, or of a package that imports it. With a CUDA device it does
nothing, unless TRITON_INTERPRET=1 asks for the interpreter. Nothing of Triton's is edited on disk, and each repair is
made only if its canary is silent, so a release without the defect is left alone.

What a repaired interpreter can say: algebra, indexing, masks and dtypes are those of the compiled kernel, in float32
without TF32. What it cannot: the GPU's rounding (TF32 operands, fused multiply-add, approximate exp), races between
programs, what a masked load leaves in the masked lanes (it gives zeros), inline assembly.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import NamedTuple


class Outcome(NamedTuple):
    """Whether a defect is present `before` and `after` the repair."""

    before: bool
    after: bool


_outcomes: dict[str, Outcome] = {}


def activate() -> None:
    """Make Triton kernels run on CPU tensors, rightly. May be called again.

    Raises RuntimeError if Triton was imported for compilation already, or TRITON_INTERPRET=0 leaves nothing to run
    kernels on, or the interpreter errs in a way that could not be repaired; bfloat16 alone does not count."""
    start()
    if not interpreting():
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("there is no GPU, and TRITON_INTERPRET forbids the interpreter")
        return
    from mixproof.verify.subjects.triton.canaries import CANARIES, alive
    from mixproof.verify.subjects.triton.repairs import REPAIRS, vectorised_scan

    if not _outcomes:
        vectorised_scan()
        # all before any: a repair may cure two defects, and a caller wants to know which were there
        before = {canary.name: not alive(canary) for canary in CANARIES}
        for canary in CANARIES:
            if canary.name in REPAIRS and not alive(canary):
                REPAIRS[canary.name]()
        _outcomes.update({c.name: Outcome(before[c.name], not alive(c)) for c in CANARIES})
    broken = [c for c in CANARIES if c.repaired and not c.bfloat16 and _outcomes[c.name].after]
    if broken:
        raise RuntimeError(
            f"the interpreter of triton {sys.modules['triton'].__version__} errs, and could not be repaired: "
            + "; ".join(f"{c.name} ({c.symptom})" for c in broken)
        )


def unavailable() -> str | None:
    """Why Triton kernels cannot run here, or None if they can. Activates."""
    for package in ("torch", "triton"):
        if find_spec(package) is None:
            return f"{package} is not installed"
    try:
        activate()
    except (ImportError, RuntimeError) as error:
        return str(error)
    return None


def canaries() -> dict[str, Outcome]:
    """For each known defect of the interpreter, by name, whether it is present before and after `activate`; empty
    where kernels are compiled. Activates."""
    if unavailable() and not _outcomes:
        raise RuntimeError(unavailable())
    return dict(_outcomes)


def bf16_is_right() -> bool:
    """Whether a verdict on bfloat16 says something of the kernel: it is compiled, or the interpreter's bfloat16 is
    right after the repairs."""
    if unavailable():
        return False
    if not interpreting():
        return True
    from mixproof.verify.subjects.triton.canaries import CANARIES

    return not any(_outcomes[c.name].after for c in CANARIES if c.repaired)


def interpreting() -> bool:
    """Whether kernels are to be interpreted: asked for by TRITON_INTERPRET, else where there is no GPU."""
    asked = os.environ.get("TRITON_INTERPRET", "")
    if asked:
        return asked.lower() in ("1", "true", "yes", "on", "y")
    import torch

    return not torch.cuda.is_available()


def start() -> None:
    """Choose interpretation, before Triton is imported: its decorator asks once, for its own library too."""
    if not interpreting():
        return
    library = sys.modules.get("triton.language.standard")
    if library is not None and type(library.cdiv).__name__ != "InterpretedFunction":
        raise RuntimeError(
            "triton was imported for compilation, and there is no GPU: call interpreter.activate() before anything "
            "imports triton, or set TRITON_INTERPRET=1 before Python starts"
        )
    os.environ["TRITON_INTERPRET"] = "1"
