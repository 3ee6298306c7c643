"""mamba.py (the package mambapy): its parallel scan with gradients of its own, and the step of its block.

They are the released Euler form, B bar = delta B. The scan works in place on copies filled up to a power of two, in
about 2 log2 T steps, in whatever dtype it is given, and starts from zero: an initial state is a token before the
others. The block rounds A and skip to float32.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mixproof.verify import implements

_COMMON = {"layout": "B T D", "requires": ("mambapy",)}


@implements("mamba.euler", name="mambapy.selective_scan", dtypes=("float64", "float32"), **_COMMON)
def selective_scan(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, skip: Tensor) -> Tensor:
    """2 x (B, T, D), (D, N), 2 x (B, T, N), (D,) -> (B, T, D). There is no initial state, and the last is not told."""
    return import_module("mambapy.mamba").MambaBlock.selective_scan(None, u, delta, A, B, C, skip)


@implements("mamba.euler", name="mambapy.pscan", dtypes=("float64", "float32"), **_COMMON)
def scan(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, skip: Tensor, h0: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same with states: h_t = a_t * h_{t-1} + x_t is theirs, the rest is written here."""
    a, x = torch.exp(delta[..., None] * A), (delta * u)[..., None] * B[:, :, None]
    if h0 is not None:
        a, x = torch.cat([torch.ones_like(h0)[:, None], a], dim=1), torch.cat([h0[:, None], x], dim=1)
    h = import_module("mambapy.pscan").pscan(a, x)
    return (h[:, -u.shape[1] :] * C[:, :, None]).sum(-1) + skip * u, h[:, -1]


@implements(
    "mamba.block",
    name="mambapy.MambaBlock.step",
    at_least={"T": 1, "W": 2},  # with one tap it reads the token before, and its cache grows
    slow=True,
    **_COMMON,
)
def step(
    x: Tensor, W_in: Tensor, W_z: Tensor, w_conv: Tensor, b_conv: Tensor, W_down: Tensor, W_dt: Tensor, b_dt: Tensor,
    W_B: Tensor, W_C: Tensor, A_log: Tensor, skip: Tensor, W_out: Tensor, u0: Tensor | None = None,
    h0: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The block token by token.  -> (B, T, E), (B, W - 1, D), (B, D, N)"""
    (E, D), N, W, Q = W_in.shape, A_log.shape[1], w_conv.shape[1], W_down.shape[1]
    weights = {
        "in_proj.weight": torch.cat([W_in, W_z], dim=1).T,
        "conv1d.weight": w_conv[:, None],
        "conv1d.bias": b_conv,
        "x_proj.weight": torch.cat([W_down, W_B, W_C], dim=1).T,
        "dt_proj.weight": W_dt.T,
        "dt_proj.bias": b_dt,
        "A_log": A_log,
        "D": skip,
        "out_proj.weight": W_out.T,
    }
    block, u = _step(E, D, N, W, Q), x.new_zeros(len(x), D, W - 1) if u0 is None else u0.transpose(1, 2)
    h: Any = h0  # theirs starts from none, too
    rows = []
    for t in range(x.shape[1]):
        y, (h, u) = functional_call(block, {f"block.{n}": w for n, w in weights.items()}, (x[:, t], (h, u)))
        rows.append(y)
    return torch.stack(rows, dim=1), u.transpose(1, 2), h


class _Step(nn.Module):
    """Calls the step of a block, where a module calls `forward`."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block: Any = block

    def forward(self, x: Tensor, cache: tuple[Tensor | None, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return self.block.step(x, cache)


@functools.cache
def _step(E: int, D: int, N: int, W: int, Q: int) -> nn.Module:
    """A block without weights."""
    theirs = import_module("mambapy.mamba")
    config = theirs.MambaConfig(d_model=E, n_layers=1, dt_rank=Q, d_state=N, d_conv=W)
    config.d_inner = D
    with torch.device("meta"):
        return _Step(theirs.MambaBlock(config))
