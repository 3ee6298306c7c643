"""TALA, time-aware linear attention, in PyTorch: parallel, chunkwise, and chunkwise with a backward that stores only
its inputs.

Source: MixFormer paper (13) to (16), corrected as in the reference; the feature map of (11) comes before.

    letter  paper   shape               meaning
    q k v   Q K V   (B, T, H, K or V)   queries and keys through the feature map; values
    h G     h G     (H,)                the state decays by omega G, of either sign or zero; omega = 1 - e^-h
    S0 S    S       (B, H, K, V)        state before the first and after the last token
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from mixproof.verify import implements
from mixproof.verify.subjects.torch import _linear as linear

_AXES = {"q": "BTHK", "k": "BTHK", "v": "BTHV", "h": "H", "G": "H", "S0": "BHKV"}
_declared = functools.partial(
    implements,
    dtypes=("float64", "float32", "bfloat16", "float16"),
    dot="float32",  # half-precision operands are widened before any product
    devices=("cpu", "cuda"),
    chunk=64,
)


@implements("tala", name="torch.parallel", devices=("cpu", "cuda"), cost="quadratic")
def parallel(
    q: Tensor, k: Tensor, v: Tensor, h: Tensor, G: Tensor, scale: float = 1.0, S0: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """O = scale ((Q K^T) * D) V with D_nm = (omega G)^(n-m) for n >= m, else 0.  (14)"""
    return linear.run(_parallel, _AXES, (q, k, v, h, G, S0), scale)


@_declared("tala", name="torch.chunkwise")
def chunkwise(
    q: Tensor, k: Tensor, v: Tensor, h: Tensor, G: Tensor, scale: float = 1.0, S0: Tensor | None = None, chunk: int = 64
) -> tuple[Tensor, Tensor]:
    """`parallel` inside chunks, the state across them; the last chunk may be short.  (16)

    (B, T, H, K), (B, T, H, K), (B, T, H, V), (H,), (H,) -> O (B, T, H, V), S (B, H, K, V)"""
    return linear.run(_chunkwise, _AXES, (q, k, v, h, G, S0), scale, chunk)


@_declared("tala", name="torch.recompute")
def recompute(
    q: Tensor, k: Tensor, v: Tensor, h: Tensor, G: Tensor, scale: float = 1.0, S0: Tensor | None = None, chunk: int = 64
) -> tuple[Tensor, Tensor]:
    """`chunkwise`; for the backward it stores its inputs only, and recomputes masks and states."""
    return linear.run(_recompute, _AXES, (q, k, v, h, G, S0), scale, chunk)


def omega(h: Tensor) -> Tensor:
    """1 - e^-h, accurate for small h too.  (13)"""
    return _Omega.apply(h)


class _Omega(torch.autograd.Function):
    @staticmethod
    def forward(h):
        return -torch.expm1(-h)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, *cotangents):
        """e^-h. The derivative of expm1 in PyTorch is expm1 + 1, which has few digits left for a late head."""
        (h,) = ctx.saved_tensors
        return cotangents[0] * torch.exp(-h)


def _parallel(q, k, v, h, G, S, scale):
    return _chunkwise(q, k, v, h, G, S, scale, chunk=max(q.shape[2], 1))


def _chunkwise(q, k, v, h, G, S, scale, chunk):
    return linear.chunkwise(q, k, v, linear.constant(omega(h) * G, q.shape[2], chunk), S, scale, chunk)


def _recompute(q, k, v, h, G, S, scale, chunk):
    return linear.recompute(q, k, v, linear.spread(omega(h) * G, q.shape[2]), S, scale, chunk)
