"""Retention in PyTorch: chunkwise, and chunkwise with a backward that stores only its inputs.

Source: survey, RetNet; Sun et al. 2023 (1) to (7), without xPos, gate and group norm, as in the reference.

    letter  paper   shape               meaning
    q k v   Q K V   (B, T, H, K or V)   queries and keys; values
    gamma   gamma   (H,)                decay of the state per token
    S0 S    S       (B, H, K, V)        state before the first and after the last token
"""

from __future__ import annotations

import functools

from torch import Tensor

from mixproof.verify import implements
from mixproof.verify.subjects.torch import _linear as linear

_AXES = {"q": "BTHK", "k": "BTHK", "v": "BTHV", "gamma": "H", "S0": "BHKV"}
_declared = functools.partial(implements, dtypes=("float64", "float32"), devices=("cpu", "cuda"), chunk=64)


@_declared("retention", name="torch.chunkwise")
def chunkwise(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, scale: float = 1.0, S0: Tensor | None = None, chunk: int = 64
) -> tuple[Tensor, Tensor]:
    """O = scale ((Q K^T) * D) V with D_nm = gamma^(n-m) for n >= m inside chunks, the state across them.

    (B, T, H, K), (B, T, H, K), (B, T, H, V), (H,) -> O (B, T, H, V), S (B, H, K, V); the last chunk may be short."""
    return linear.run(_chunkwise, _AXES, (q, k, v, gamma, S0), scale, chunk)


@_declared("retention", name="torch.recompute")
def recompute(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, scale: float = 1.0, S0: Tensor | None = None, chunk: int = 64
) -> tuple[Tensor, Tensor]:
    """`chunkwise`; for the backward it stores its inputs only, and recomputes masks and states."""
    return linear.run(_recompute, _AXES, (q, k, v, gamma, S0), scale, chunk)


def _chunkwise(q, k, v, gamma, S, scale, chunk):
    return linear.chunkwise(q, k, v, linear.constant(gamma, q.shape[2], chunk), S, scale, chunk)


def _recompute(q, k, v, gamma, S, scale, chunk):
    return linear.recompute(q, k, v, linear.spread(gamma, q.shape[2]), S, scale, chunk)
