"""Mamba's selective scan in Triton, both directions, with the zero-order hold or Euler's rule for the input.

Source: survey, Mamba (4.1); Gu and Dao 2023 (2), (4). One kernel walks along the chunks, the states of some channels
in its registers, and scans each chunk; the backward scans it again, and once more in reverse for the cotangents.

    h_t = exp(delta_t A) h_{t-1} + Bbar_t u_t        y_t = C_t h_t + skip u_t

    letter        shape           meaning
    u delta       (B, T, D)       inputs, and their step sizes
    A             (D, N)          rates, of any sign
    B C           (B, T, N)       input and output maps of each token, shared by the channels
    h0 h          (B, D, N)       states before the first and after the last token

The kernels compute in float32; there are no atomics: the same bits every run. What a token reads depends neither on T
nor on the batch. Autograd keeps the inputs and the states before the chunks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from mixproof.verify import implements
from mixproof.verify.subjects.triton import mamba_kernels as kernels
from mixproof.verify.subjects.triton.arguments import checked, launching
from mixproof.verify.subjects.triton.mamba_kernels import triton

Tensor = torch.Tensor
DECLARED = {
    "name": "triton.scan",
    "layout": "B T D",
    "dtypes": ("float32", "float16", "bfloat16"),
    "dot": "float32",
    "devices": ("cpu", "cuda"),
    "requires": ("triton",),
    "slow": True,
    "chunk": 16,
    "at_least": {},
}


@implements("mamba.zoh", **DECLARED)
def zero_order_hold(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, skip: Tensor, h0: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Bbar = delta phi1(delta A) B, the input held over a step: u, delta (B, T, D), A (D, N), B, C (B, T, N),
    skip (D,), h0 (B, D, N) -> y (B, T, D) and the float32 state h."""
    _check(u, delta, A, B, C, skip, h0)
    return _Scan.apply(u, delta, A, B, C, skip, h0, True)


@implements("mamba.euler", **DECLARED)
def euler(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, skip: Tensor, h0: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Bbar = delta B, as the released code has it; the rest as in `zero_order_hold`."""
    _check(u, delta, A, B, C, skip, h0)
    return _Scan.apply(u, delta, A, B, C, skip, h0, False)


class _Scan(torch.autograd.Function):
    """y and the last state."""

    @staticmethod
    def forward(
        ctx: Any,
        u: Tensor,
        delta: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        skip: Tensor,
        h0: Tensor | None,
        zoh: bool,
    ) -> tuple[Tensor, Tensor]:
        (batch, T, D), N = u.shape, A.shape[1]
        chunks = triton.cdiv(T, BT)
        y = torch.empty(batch, T, D, dtype=u.dtype, device=u.device)
        states = torch.empty(batch, chunks, D, N, dtype=torch.float32, device=u.device)
        final = torch.empty(batch, D, N, dtype=torch.float32, device=u.device)
        skip = skip.contiguous()
        strides = (n for x in (u, delta, B, C, y) for n in x.stride())
        start = (0, 0, 0) if h0 is None else h0.stride()
        with launching(u):
            _start(
                kernels.forward_kernel, u, A, (u, delta, A, B, C, skip, h0, y, states, final),
                (*strides, *start, *A.stride()), zoh,
            )  # fmt: skip
        ctx.save_for_backward(u, delta, A, B, C, skip, states)
        ctx.zoh, ctx.state = zoh, h0 if h0 is None else h0.dtype
        return y, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dh: Tensor) -> tuple[Tensor | None, ...]:
        u, delta, A, B, C, skip, states = ctx.saved_tensors
        (batch, T, D), N = u.shape, A.shape[1]
        tiles = triton.cdiv(D, _width(D, N))

        def room(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(*shape, dtype=dtype, device=u.device)

        du, ddelta = room(batch, T, D, dtype=u.dtype), room(batch, T, D, dtype=delta.dtype)
        dA, dskip, first = room(batch, D, N), room(batch, D), room(batch, D, N)
        dB, dC = room(batch, tiles, T, N), room(batch, tiles, T, N)
        tensors = u, delta, A, B, C, skip, states, dy, dh, du, ddelta, dA, dB, dC, dskip, first
        strides = (n for x in (u, delta, B, C, dy, du, A, dh) for n in x.stride())
        with launching(u):
            _start(kernels.backward_kernel, u, A, tensors, tuple(strides), ctx.zoh)
        dh0 = None if ctx.state is None else first.to(ctx.state)
        sums = (dA.sum(0).to(A.dtype), dB.sum(1).to(B.dtype), dC.sum(1).to(C.dtype), dskip.sum(0).to(skip.dtype))
        return du, ddelta, *sums, dh0, None


# ---- launches ------------------------------------------------------------------------------------------------------

BT = 16  # tokens of a chunk
TILE = 128  # states of a program, channels times states of a channel; more spill registers
MOST = 128  # states of a channel


def _width(D: int, N: int) -> int:
    """Channels of a program."""
    return min(TILE // triton.next_power_of_2(N), triton.next_power_of_2(D))


def _start(
    kernel: Any, u: Tensor, A: Tensor, tensors: tuple[Tensor | None, ...], strides: tuple[int, ...], zoh: bool
) -> None:
    """One program for each sequence and tile of channels."""
    (batch, T, D), N = u.shape, A.shape[1]
    width = _width(D, N)
    counts = triton.cdiv(T, BT), triton.cdiv(D, width)
    if batch * counts[1]:
        kernel[(batch * counts[1],)](
            *tensors, *strides, T, D, N, *counts, zoh, BT, width, triton.next_power_of_2(N), num_warps=8
        )


def _check(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, skip: Tensor, h0: Tensor | None) -> None:
    """Raises TypeError or ValueError naming the argument that does not fit."""
    tokens = {"u": (u, "BTD"), "delta": (delta, "BTD"), "B": (B, "BTN"), "C": (C, "BTN")}
    parameters = {"A": (A, "DN"), "skip": (skip, "D")}
    sizes = checked(tokens | parameters | {"h0": (h0, "BDN")}, states=("h0",), parameters=("A", "skip"))
    if not 1 <= sizes["N"] <= MOST:
        raise ValueError(f"A has {sizes['N']} states a channel; expected 1 to {MOST}")
