"""Mamba in transformers: the selective scan and the step of decoding that it falls back to, and the block around them.

They are the released Euler form, B bar = delta B. Whatever dtype comes in, they compute in float32. Nothing but a step
of decoding takes a state: where several tokens follow on a cache, the convolution goes on from it, but the scan starts
again from zero (tests/test_witnesses.py). The argument for it is `cache`; by another name it is ignored.

Where mamba_ssm is installed its kernels, for GPUs, take the place of these functions, so they are called by what lies
below their decorators.
"""

from __future__ import annotations

import functools
import inspect
from contextlib import AbstractContextManager
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import pad

from mixproof.verify import implements

_COMMON = {"layout": "B T D", "requires": ("transformers",)}
_FUNCTIONS = (
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "mamba_inner_fn",
    "mamba_selective_scan",
    "mamba_selective_state_update",
)


@implements("mamba.euler", name="transformers.mamba_selective_scan", **_COMMON)
def scan(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
    """2 x (B, T, D), (D, N), 2 x (B, T, N), (D,) -> (B, T, D), (B, D, N). There is no initial state."""
    u, delta, B, C = (x.transpose(1, 2) for x in (u, delta, B, C))
    y, h = _function("mamba_selective_scan")(u, delta, A, B, C, skip, return_last_state=True)
    return y.transpose(1, 2), h


@implements(
    "mamba.euler",
    name="transformers.mamba_selective_state_update",
    gradients=False,  # the state is overwritten in place
    slow=True,
    **_COMMON,
)
def decode(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, skip: Tensor, h0: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same token by token, from a state."""
    h = u.new_zeros(len(u), *A.shape) if h0 is None else h0.clone()
    step = _function("mamba_selective_state_update")
    rows = [step(h, u[:, t], delta[:, t], A, B[:, t], C[:, t], skip) for t in range(u.shape[1])]
    return torch.stack(rows, dim=1), h


@implements("mamba.block", name="transformers.MambaMixer", **_COMMON)
def block(
    x: Tensor, W_in: Tensor, W_z: Tensor, w_conv: Tensor, b_conv: Tensor, W_down: Tensor, W_dt: Tensor, b_dt: Tensor,
    W_B: Tensor, W_C: Tensor, A_log: Tensor, skip: Tensor, W_out: Tensor,
) -> Tensor:  # fmt: skip
    """(B, T, E) -> (B, T, E), without a cache."""
    weights = (W_in, W_z, w_conv, b_conv, W_down, W_dt, b_dt, W_B, W_C, A_log, skip, W_out)
    with _torch_only():
        return functional_call(_mixer(*_sizes(*weights)), _named(*weights), (x,))


@implements("mamba.block", name="transformers.MambaMixer.decode", gradients=False, slow=True, **_COMMON)
def decode_block(
    x: Tensor, W_in: Tensor, W_z: Tensor, w_conv: Tensor, b_conv: Tensor, W_down: Tensor, W_dt: Tensor, b_dt: Tensor,
    W_B: Tensor, W_C: Tensor, A_log: Tensor, skip: Tensor, W_out: Tensor, u0: Tensor | None = None,
    h0: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The same token by token, from a cache and to it.  -> (B, T, E), (B, W - 1, D), (B, D, N)"""
    weights = (W_in, W_z, w_conv, b_conv, W_down, W_dt, b_dt, W_B, W_C, A_log, skip, W_out)
    mixer = _mixer(*_sizes(*weights))
    (D, W), N, B = w_conv.shape, A_log.shape[1], len(x)
    cache = filled_cache(
        mixer, x.new_zeros(B, W - 1, D) if u0 is None else u0, x.new_zeros(B, D, N) if h0 is None else h0
    )
    with torch.no_grad(), _torch_only():
        rows = [functional_call(mixer, _named(*weights), (x[:, t : t + 1], cache)) for t in range(x.shape[1])]
    return torch.cat(rows, dim=1), cache.get_conv_state(0)[:, :, 1:].transpose(1, 2), cache.get_recurrent_state(0)


def filled_cache(mixer: nn.Module, u: Tensor, h: Tensor) -> Any:
    """A cache for the mixer that holds (B, W - 1, D) and (B, D, N); theirs keeps one row more, which is never read."""
    cache = import_module("transformers").DynamicCache(config=mixer.config)
    cache.update_conv_state(pad(u.transpose(1, 2), (1, 0)), 0)
    cache.update_recurrent_state(h, 0)
    return cache


@functools.cache
def _mixer(E: int, D: int, N: int, W: int, Q: int) -> nn.Module:
    """A mixer without weights."""
    theirs = _modeling()
    config = theirs.MambaConfig(
        hidden_size=E, state_size=N, conv_kernel=W, time_step_rank=Q, num_hidden_layers=1, use_mambapy=False
    )
    config.intermediate_size = D
    with torch.device("meta"):
        return theirs.MambaMixer(config, layer_idx=0).eval()


def _sizes(
    W_in: Tensor, W_z: Tensor, w_conv: Tensor, b_conv: Tensor, W_down: Tensor, *others: Tensor
) -> tuple[int, ...]:
    """E, D, N, W, Q."""
    return (*W_in.shape, others[2].shape[1], w_conv.shape[1], W_down.shape[1])


def _named(
    W_in: Tensor, W_z: Tensor, w_conv: Tensor, b_conv: Tensor, W_down: Tensor, W_dt: Tensor, b_dt: Tensor,
    W_B: Tensor, W_C: Tensor, A_log: Tensor, skip: Tensor, W_out: Tensor,
) -> dict[str, Tensor]:  # fmt: skip
    """The weights by the mixer's names for them; linear layers hold the transposes."""
    return {
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


def _modeling() -> ModuleType:
    return import_module("transformers.models.mamba.modeling_mamba")


def _function(name: str) -> Any:
    return inspect.unwrap(getattr(_modeling(), name))


def _torch_only() -> AbstractContextManager[Any]:
    """Their functions in PyTorch, whatever else is installed."""
    return mock.patch.multiple(_modeling(), **{name: _function(name) for name in _FUNCTIONS})
