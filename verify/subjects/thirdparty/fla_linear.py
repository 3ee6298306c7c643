"""Linear attention, with decays and without, in flash-linear-attention (fla-core): simple GLA, GLA and linear_attn.

Gates are natural logarithms. Where it is given no scale, fla takes K^-1/2, so it is always given one. Chunked kernels
multiply by exp2 of sums of log2(e) g, which start anew with each chunk; the recurrent ones by exp(g), token by token,
and have no dot products. The gradient of a gate is summed over all later tokens, never the decay's times the decay.

fla has more kernels for the same operators; tests/test_thirdparty_linear.py says what holds for them, and what does
not. One sequence and one head here: interpreted kernels are slow, and their programs share nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mixproof.verify import implements
from mixproof.verify.subjects.thirdparty.fla import ops
from mixproof.verify.subjects.triton import interpreter

_DOT = None if interpreter.interpreting() else "tf32"
# NumPy documents 2.52 ulp for the float32 exp that the interpreter calls
_COMMON = {
    "layout": "T D",
    "exp_ulps": 3.0,
    "slow": True,
    "devices": ("cpu", "cuda"),
    "requires": ("triton", "fla"),
}


def no_gain(sizes: Mapping[str, int]) -> np.ndarray:
    """(H,): G = 1."""
    return np.ones(sizes["H"])


@implements(
    "tala",
    name="fla.fused_recurrent_simple_gla",
    dot="float32",
    fixed={"G": no_gain},
    gradients=False,  # it has none for a decay that is the head's
    **_COMMON,
)
def tala(
    q: Tensor, k: Tensor, v: Tensor, h: Tensor, scale: float = 1.0, S0: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """2 x (T, K), (T, V), () -> (T, V), (K, V): simple GLA with the gate log(1 - e^-h) for all tokens."""
    g = torch.log1p(-torch.exp(-h))[None]
    return _head(*ops("simple_gla").fused_recurrent_simple_gla(*_batch(q, k, v), g_gamma=g, **_options(scale, S0)))


@implements("gated_linear_attention.simple", name="fla.chunk_simple_gla", dot=_DOT, chunk=64, **_COMMON)
def simple_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float = 1.0, S0: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """2 x (T, K), (T, V), (T,) -> (T, V), (K, V)."""
    return _head(*ops("simple_gla").chunk_simple_gla(*_batch(q, k, v, g), **_options(scale, S0)))


@implements("gated_linear_attention", name="fla.fused_recurrent_gla", dot="float32", **_COMMON)
def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float = 1.0, S0: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """2 x (T, K), (T, V), (T, K) -> (T, V), (K, V)."""
    return _head(*ops("gla").fused_recurrent_gla(*_batch(q, k, v, g), **_options(scale, S0)))


@implements("linear_attention", name="fla.fused_chunk_linear_attn", dot=_DOT, chunk=64, fixed={"eps": 1e-10}, **_COMMON)
def normalised(
    q: Tensor, k: Tensor, v: Tensor, S0: Tensor | None = None, z0: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """2 x (T, K), (T, V) -> (T, V), (K, V), (K,). Keys are summed, and rows divided, outside the fused kernel."""
    options = _options(1.0, S0)
    if S0 is not None and z0 is not None:
        options["initial_state"] = S0[None, None], z0[None, None, None]
    O, (S, z) = ops("linear_attn").fused_chunk_linear_attn(*_batch(q, k, v), normalize=True, **options)
    return *_head(O, S), z[0, 0, 0]


def _batch(*tokens: Tensor) -> tuple[Tensor, ...]:
    """(T, ...) -> (1, T, 1, ...)."""
    return tuple(x[None, :, None] for x in tokens)


def _options(scale: float, S0: Tensor | None) -> dict[str, Any]:
    return {"scale": scale, "initial_state": None if S0 is None else S0[None, None], "output_final_state": True}


def _head(O: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """(1, T, 1, V), (1, 1, K, V) -> (T, V), (K, V)."""
    return O[0, :, 0], S[0, 0]
