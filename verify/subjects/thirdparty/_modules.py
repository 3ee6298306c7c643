"""What adapters put into modules in place of their projections, so that what those would give can be handed in."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Channels(nn.Module):
    """Some of the channels of what comes in."""

    def __init__(self, start: int, stop: int) -> None:
        super().__init__()
        self.channels = slice(start, stop)

    def forward(self, x: Tensor) -> Tensor:
        return x[..., self.channels]


def causal_mask(T: int, S: int, like: Tensor) -> Tensor:
    """(1, 1, T, S): -inf where a query does not see a key; the last one sees all, each one before it one less."""
    seen = torch.ones(T, S, dtype=torch.bool, device=like.device).tril(S - T)
    return torch.zeros(T, S, dtype=like.dtype, device=like.device).masked_fill(~seen, -torch.inf)[None, None]


def turns(R: int, base: float, first: int, T: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles n base^(-2 i / R), those of all pairs twice, one after the other.  (1, T, R)"""
    n = torch.arange(first, first + T, dtype=torch.float64, device=like.device)
    i = torch.arange(0, R, 2, dtype=torch.float64, device=like.device)
    angles = (n[:, None] * base ** (-i / R)).repeat(1, 2)[None]
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def halves(x: Tensor) -> Tensor:
    """Channels (2 i, 2 i + 1) to (i, i + R / 2)."""
    return torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)


def pairs(x: Tensor) -> Tensor:
    """And back."""
    return torch.stack(x.chunk(2, dim=-1), dim=-1).flatten(-2)
