"""Multi-scale retention in PyTorch, one decay a head: rotated queries and keys, group norm per token, and a gate.

Source: Sun et al. 2023 (5) to (8), as in the reference: channels 2i and 2i + 1 turn by base^(-i / (K/2 - 1)) a token;
the norm has neither gain nor bias.

    letter  paper   shape               meaning
    q k v   Q K V   (B, T, H, K or V)   queries and keys, K even; values
    u       X W_G   (B, T, H, V)        gate, before silu
    gamma   gamma   (H,)                decay of the state per token
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from mixproof.verify import implements
from mixproof.verify.subjects.torch import _arguments as arguments
from mixproof.verify.subjects.torch import _linear as linear

_AXES = {"q": "BTHK", "k": "BTHK", "v": "BTHV", "u": "BTHV", "gamma": "H"}


@implements(
    "multi_scale_retention",
    name="torch.chunkwise",
    dtypes=("float64", "float32", "bfloat16", "float16"),
    dot="float32",  # half-precision operands are widened before any product
    devices=("cpu", "cuda"),
    chunk=64,
)
def chunkwise(
    q: Tensor, k: Tensor, v: Tensor, u: Tensor, gamma: Tensor,
    scale: float = 1.0, eps: float = 1e-6, base: float = 10000.0, chunk: int = 64,
) -> Tensor:  # fmt: skip
    """Y = silu(u) * GN(O), O the chunkwise retention of the rotated q and k.  -> (B, T, H, V)"""
    arguments.finite(scale=scale)
    arguments.not_negative(eps=eps)
    q, k, v, u, gamma = linear.arranged(_AXES, q, k, v, u, gamma)
    if q.shape[3] % 2:
        raise ValueError(f"q has {q.shape[3]} channels; they turn in pairs")
    if not 0 < base < float("inf"):
        raise ValueError(f"base is {base}; it must be finite and positive")
    wide = arguments.widest(q, k, v, u, gamma)
    with arguments.no_autocast(q):
        turns = _turns(q, base, wide)
        segments = linear.constant(gamma.to(wide), q.shape[2], chunk)
        S = linear.state(None, k, v, wide)
        O, _ = linear.chunkwise(_rotated(q, *turns), _rotated(k, *turns), v, segments, S, scale, chunk)
        Y = (silu(u.to(wide)) * linear.group_norm(O, eps)).to(v.dtype)
    return Y.transpose(1, 2)


def _turns(q: Tensor, base: float, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles (T, K / 2); in float64, as float32 holds the angle of a late token to few digits."""
    T, K = q.shape[2:]
    speeds = base ** -torch.linspace(0, 1, K // 2, dtype=torch.float64, device=q.device)
    angles = torch.arange(T, dtype=torch.float64, device=q.device)[:, None] * speeds
    return angles.cos().to(wide), angles.sin().to(wide)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., 0::2].to(cos.dtype), x[..., 1::2].to(cos.dtype)
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)
