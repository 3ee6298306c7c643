"""Retention in flash-linear-attention (fla-core): four Triton kernels, run by the interpreter where there is no GPU.

Their decay is not an argument: head h has gamma = 1 - 2^(-5-h), and what enters the kernels is log(gamma) in float32.
fused_recurrent multiplies by exp(log gamma) once a token, so that its error grows like T; the others multiply by
exp2(n log2 gamma). States are float32, K first, as the operator's.

On a GPU, float32 operands of dot products are rounded to TF32, the default of Triton; the interpreter keeps them.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Mapping
from types import ModuleType

import numpy as np
from torch import Tensor

from mixproof.verify import implements
from mixproof.verify.subjects.triton import interpreter


def gamma(sizes: Mapping[str, int]) -> np.ndarray:
    """(H,): the float32 numbers whose logarithms fla takes."""
    h = np.arange(sizes["H"], dtype=np.float32)
    return (1 - np.exp2(-5 - h)).astype(np.float64)


_DOT = None if interpreter.interpreting() else "tf32"
# NumPy documents 2.52 ulp for the float32 exp that the interpreter calls
_COMMON = {"fixed": {"gamma": gamma}, "exp_ulps": 3.0, "slow": True, "devices": ("cpu", "cuda")}
_HALF = ("bfloat16", "float16")


@implements("retention", name="fla.chunk_retention", requires=("triton", "fla"), dot=_DOT, chunk=64, **_COMMON)
@implements(
    "retention",
    name="fla.chunk_retention.half",
    requires=("triton", "fla"),
    dtypes=_HALF,
    chunk=64,
    multiple_of={"K": 2, "V": 2},  # asserted by its backward, for these dtypes only
    **_COMMON,
)
def chunk(q: Tensor, k: Tensor, v: Tensor, scale: float = 1.0, S0: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """2 x (B, T, H, K), (B, T, H, V) -> (B, T, H, V), (B, H, K, V); so do the next two."""
    return ops("retention").chunk_retention(q, k, v, scale=scale, initial_state=S0, output_final_state=True)


@implements("retention", name="fla.fused_chunk_retention", requires=("triton", "fla"), dot=_DOT, chunk=64, **_COMMON)
@implements(
    "retention",
    name="fla.fused_chunk_retention.half",
    requires=("triton", "fla"),
    dtypes=_HALF,
    chunk=64,
    **_COMMON,
)
def fused_chunk(q: Tensor, k: Tensor, v: Tensor, scale: float = 1.0, S0: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Chunks of the smallest power of two >= T, from 16 to 64."""
    return ops("retention").fused_chunk_retention(q, k, v, scale=scale, initial_state=S0, output_final_state=True)


@implements(
    "retention",
    name="fla.fused_recurrent_retention",
    requires=("triton", "fla"),
    dtypes=("float32", *_HALF),
    dot="float32",  # it has none: widened operands, products and sums in float32
    **_COMMON,
)
def fused_recurrent(
    q: Tensor, k: Tensor, v: Tensor, scale: float = 1.0, S0: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The recurrence, token by token."""
    return ops("retention").fused_recurrent_retention(q, k, v, scale=scale, initial_state=S0, output_final_state=True)


@implements("retention", name="fla.parallel_retention", requires=("triton", "fla"), dot=_DOT, chunk=128, **_COMMON)
@implements(
    "retention",
    name="fla.parallel_retention.half",
    requires=("triton", "fla"),
    dtypes=_HALF,
    chunk=128,
    **_COMMON,
)
def parallel(q: Tensor, k: Tensor, v: Tensor, scale: float = 1.0) -> Tensor:
    """Neither takes nor gives a state: what it returns second are attention scores."""
    return ops("retention").parallel_retention(q, k, v, scale=scale)[0]


@functools.cache
def ops(family: str) -> ModuleType:
    """fla.ops.`family`, imported under the interpreter where there is no GPU."""
    interpreter.activate()
    with warnings.catch_warnings():
        # it looks for a GPU and for flash-attn, of which none of ours needs either, and imports torch's compiler
        warnings.filterwarnings("ignore", "Triton is not supported on current platform", UserWarning)
        warnings.filterwarnings("ignore", "Flash Attention is not installed", ImportWarning)
        warnings.filterwarnings("ignore", "`torch.jit.script_method` is deprecated", DeprecationWarning)
        return importlib.import_module(f"fla.ops.{family}")
