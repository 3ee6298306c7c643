"""Blockwise softmax attention in Triton, both directions; sigmoid attention (sigmoid_attention.py) shares its launches.

Source: Vaswani et al. 2017 (1). Softmax runs online over blocks of keys: running maximum, mass, rescaled output.

    letter  shape               meaning
    q k v   (B, T, H, D or V)   tokens; keys and values S of them, cached ones first
    L       (B, H, T)           logarithm of the sum of exp(s) of a row, kept for the backward
    P       ()                  keys before the first query: query i sees j <= i + P

The kernels compute in float32 (dot products in full precision, "ieee"); there are no atomics: the same bits every run.
Autograd keeps the inputs, O and L, and no matrix of T x S.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from mixproof.verify import implements
from mixproof.verify.subjects.triton import attention_kernels as kernels
from mixproof.verify.subjects.triton.arguments import checked, launching
from mixproof.verify.subjects.triton.attention_kernels import triton

Tensor = torch.Tensor
OPTIONS = {
    "layout": "B T H D",
    "dtypes": ("float32", "float16", "bfloat16"),
    "dot": "float32",
    "devices": ("cpu", "cuda"),
    "slow": True,
    "chunk": 32,
    "at_least": {},
}


@implements("softmax_attention", name="triton.blockwise", requires=("triton",), **OPTIONS)
def softmax_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, causal: bool = False) -> Tensor:
    """O = softmax(scale q k^T) v: q (B, T, H, D), k (B, S, H, D), v (B, S, H, V) -> O (B, T, H, V). scale is D^-1/2
    unless given; `causal` lets row i see keys j <= i. A row that sees no key is zero."""
    check({"q": (q, "BTHD"), "k": (k, "BSHD"), "v": (v, "BSHV")})
    return Blockwise.apply(q, k, v, None, scale, causal, 0)


class Blockwise(torch.autograd.Function):
    """O of softmax, or of sigmoid where there is a bias."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        scale: float | None,
        causal: bool,
        P: int,
    ) -> Tensor:
        (B, T, H, D), (S, V) = q.shape, (v.shape[1], v.shape[3])
        call = _Call(float(D**-0.5 if scale is None else scale), causal, bias is not None, P, (B, H, T, S, D, V))
        out = torch.empty(B, T, H, V, dtype=q.dtype, device=q.device)
        L = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
        with launching(q):
            _start(kernels.forward_kernel, call, (q, k, v), (bias, out, L), (out,), (T, BT), V)
        ctx.save_for_backward(q, k, v, bias, out, L)
        ctx.call = call
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dO: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, out, L = ctx.saved_tensors
        (B, T, H, D), S, V = q.shape, k.shape[1], v.shape[3]
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        dbias = torch.empty(B, H, triton.cdiv(T, BT), dtype=torch.float32, device=q.device)
        delta = (dO.float() * out.float()).sum(3).mT.contiguous()
        with launching(q):
            at = bias, dO, L, delta
            _start(kernels.query_kernel, ctx.call, (q, k, v), (*at, dq, dbias), (dO, dq), (T, BT), D)
            _start(kernels.key_kernel, ctx.call, (q, k, v), (*at, dk), (dO, dk), (S, BS), D)
            _start(kernels.value_kernel, ctx.call, (q, k), (bias, dO, L, dv), (dO, dv), (S, BS), V)
        db = None if bias is None else dbias.sum((0, 2), dtype=torch.float64).to(bias.dtype)
        return dq, dk, dv, db, None, None, None


# ---- launches ------------------------------------------------------------------------------------------------------

BT, BS = 32, 32  # queries and keys of a tile
WIDTH = 32  # channels of a tile; wider ones spill registers on sm_90: tests/test_compiled.py


class _Call(NamedTuple):
    scale: float
    causal: bool
    sigmoid: bool
    P: int
    sizes: tuple[int, ...]  # B, H, T, S, D, V


def _start(
    kernel: Any,
    call: _Call,
    tokens: tuple[Tensor, ...],
    tensors: tuple[Tensor | None, ...],
    strided: tuple[Tensor, ...],
    tiled: tuple[int, int],
    channels: int,
) -> None:
    """One program for each tile of tokens, (how many, how many a tile), and of channels, of each head."""
    B, H, *sizes = call.sizes
    tiles, parts = triton.cdiv(*tiled), triton.cdiv(channels, WIDTH)
    strides = (n for x in (*tokens, *strided) for n in x.stride())
    widths = (WIDTH if n > 16 else 16 for n in sizes[2:])  # tl.dot wants at least 16
    if programs := B * H * tiles * parts:
        kernel[(programs,)](
            *tokens, *tensors, *strides, call.scale, H, *sizes, call.P, tiles, parts, call.causal, call.sigmoid,
            BT, BS, *widths, num_warps=8,
        )  # fmt: skip


def check(arguments: Mapping[str, tuple[Tensor | None, str]], states: tuple[str, ...] = ()) -> None:
    """Raises TypeError or ValueError naming the argument that does not fit: tensors come with their axes."""
    checked(arguments, states, parameters=("b",))
