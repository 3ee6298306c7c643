"""Gated linear attention in PyTorch: decays per token, or per token and key channel, given by their logarithms.

Source: survey, GLA; S_t = exp(g_t) * S_{t-1} + k_t^T v_t and o_t = scale q_t S_t, as in the reference.

    letter  shape                    meaning
    q k v   (B, T, H, K or V)        queries and keys; values
    g       (B, T, H), and (.., K)   log-decays, not above zero, one a token ("simple") or a token and key channel
    S0 S    (B, H, K, V)             state before the first and after the last token
"""

from __future__ import annotations

import functools

from torch import Tensor

from mixproof.verify import implements
from mixproof.verify.subjects.torch import _linear as linear

_AXES = {"q": "BTHK", "k": "BTHK", "v": "BTHV", "g": "BTH", "S0": "BHKV"}
_declared = functools.partial(
    implements,
    dtypes=("float64", "float32", "bfloat16", "float16"),
    dot="float32",  # half-precision operands are widened before any product
    devices=("cpu", "cuda"),
    chunk=64,
)


@_declared("gated_linear_attention.simple", name="torch.chunkwise")
def chunkwise(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float = 1.0, S0: Tensor | None = None, chunk: int = 64
) -> tuple[Tensor, Tensor]:
    """O = scale ((Q K^T) * D) V with D_nm = exp(g_{m+1} + ... + g_n) for n >= m inside chunks, the state across them.

    (B, T, H, K), (B, T, H, K), (B, T, H, V), (B, T, H) -> O (B, T, H, V), S (B, H, K, V)"""
    return linear.run(_chunkwise, _AXES, (q, k, v, g, S0), scale, chunk)


@_declared("gated_linear_attention.simple", name="torch.recompute")
def recompute(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float = 1.0, S0: Tensor | None = None, chunk: int = 64
) -> tuple[Tensor, Tensor]:
    """`chunkwise`; for the backward it stores its inputs only, and recomputes masks and states."""
    return linear.run(_recompute, _AXES, (q, k, v, g, S0), scale, chunk)


@implements("gated_linear_attention", name="torch.chunkwise", devices=("cpu", "cuda"), chunk=16)
def chunkwise_key_channel(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float = 1.0, S0: Tensor | None = None, chunk: int = 16
) -> tuple[Tensor, Tensor]:
    """One decay a token and key channel; a chunk holds a mask for each channel."""
    return linear.run(_chunkwise_keys, _AXES | {"g": "BTHK"}, (q, k, v, g, S0), scale, chunk)


def _chunkwise(q, k, v, g, S, scale, chunk):
    return linear.chunkwise(q, k, v, linear.segments(g, log=True), S, scale, chunk)


def _recompute(q, k, v, g, S, scale, chunk):
    return linear.recompute(q, k, v, g, S, scale, chunk, log=True)


def _chunkwise_keys(q, k, v, g, S, scale, chunk):
    return linear.chunkwise_keys(q, k, v, linear.segments(g.mT, log=True), S, scale, chunk)
