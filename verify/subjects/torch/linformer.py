"""Linformer in PyTorch: projected, with the context absorbed chunk by chunk, by all weights of all keys; as a layer.

Source: survey, Linformer; Wang et al. 2020 (7), as in the reference.

    letter    paper     shape               meaning
    q k v     Q K V     (B, T, H, K or V)   queries; keys and values have S tokens
    E_k E_v   E F       (H, X, S)           weights of the keys, of the values, in each of X mixtures
    KX VX     -         (B, H, X, K or V)   mixtures of keys and of values
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mixproof.verify import implements
from mixproof.verify.subjects.torch import _arguments as arguments

_AXES = {"q": "BTHK", "k": "BSHK", "v": "BSHV", "E_k": "HXS", "E_v": "HXS"}
_declared = functools.partial(
    implements,
    dtypes=("float64", "float32", "bfloat16"),
    dot="float32",  # half-precision operands are widened before any product
    devices=("cpu", "cuda"),
)


@_declared("linformer", name="torch.projected")
def projected(q: Tensor, k: Tensor, v: Tensor, E_k: Tensor, E_v: Tensor, scale: float | None = None) -> Tensor:
    """O = softmax(scale Q (E_k K)^T) E_v V; scale defaults to K^-1/2.  (7)

    (B, T, H, K), (B, S, H, K), (B, S, H, V), (H, X, S), (H, X, S) -> (B, T, H, V)"""
    return _run(_projected, q, k, v, E_k, E_v, scale)


@_declared("linformer", name="torch.streamed", chunk=16)
def streamed(
    q: Tensor, k: Tensor, v: Tensor, E_k: Tensor, E_v: Tensor, scale: float | None = None, chunk: int = 16
) -> Tensor:
    """The same, the context absorbed into its mixtures a chunk at a time."""
    return _run(_streamed, q, k, v, E_k, E_v, scale, chunk)


@_declared("linformer", name="torch.expanded", cost="quadratic")
def expanded(q: Tensor, k: Tensor, v: Tensor, E_k: Tensor, E_v: Tensor, scale: float | None = None) -> Tensor:
    """The same as O = A V with A = softmax(scale (Q K^T) E_k^T) E_v, one weight for each query and key."""
    return _run(_expanded, q, k, v, E_k, E_v, scale)


class Linformer(nn.Module):
    """`streamed` with projections of its own, for contexts of up to `context` tokens; a shorter one uses the first
    columns. They start as in the released code: normal, with variance 1 / projected.

    heads       H
    context     S, tokens that the projections have columns for
    projected   X, mixtures
    chunk       tokens of the context absorbed at once

    Raises ValueError for a value outside these.
    """

    def __init__(self, heads: int, context: int, projected: int, chunk: int = 16) -> None:
        super().__init__()
        for name, value in {"heads": heads, "context": context, "projected": projected, "chunk": chunk}.items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        self.chunk = chunk
        self.E_k, self.E_v = (nn.Parameter(torch.empty(heads, projected, context)) for _ in range(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start again: random projections."""
        for E in (self.E_k, self.E_v):
            nn.init.normal_(E, std=1 / math.sqrt(E.shape[1]))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        """(B, T, H, K), (B, S, H, K), (B, S, H, V) -> (B, T, H, V). Raises ValueError for too long a context."""
        S, most = k.shape[1], self.E_k.shape[2]
        if S > most:
            raise ValueError(f"k has {S} tokens; this layer has columns for {most}")
        return streamed(q, k, v, self.E_k[:, :, :S], self.E_v[:, :, :S], scale, self.chunk)

    def extra_repr(self) -> str:
        H, X, S = self.E_k.shape
        return f"{H}, context={S}, projected={X}, chunk={self.chunk}"


def _projected(q, k, v, E_k, E_v):
    return _read(q, E_k @ k, E_v @ v)


def _streamed(q, k, v, E_k, E_v, chunk):
    KX, VX = E_k[..., :0] @ k[:, :, :0], E_v[..., :0] @ v[:, :, :0]
    for c in arguments.slices(k.shape[2], chunk):
        KX, VX = KX + E_k[..., c] @ k[:, :, c], VX + E_v[..., c] @ v[:, :, c]
    return _read(q, KX, VX)


def _expanded(q, k, v, E_k, E_v):
    return (((q @ k.mT) @ E_k.mT).softmax(-1) @ E_v) @ v


def _read(q: Tensor, KX: Tensor, VX: Tensor) -> Tensor:
    return (q @ KX.mT).softmax(-1) @ VX


def _run(form: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, E_k: Tensor, E_v: Tensor, scale: float | None,
         *options: Any) -> Tensor:  # fmt: skip
    """Check the arguments, widen them, put heads before tokens, scale queries, and put heads back in O."""
    arguments.checked(_AXES, {"q": q, "k": k, "v": v, "E_k": E_k, "E_v": E_v}, parameters=("E_k", "E_v"))
    factor = q.shape[3] ** -0.5 if scale is None else scale
    arguments.finite(scale=factor)
    wide = arguments.widest(q, k, v, E_k, E_v)
    with arguments.no_autocast(q):
        Q, K, V = (x.transpose(1, 2).to(wide) for x in (q, k, v))
        O = form(Q * factor, K, V, E_k.to(wide), E_v.to(wide), *options)
    return O.to(q.dtype).transpose(1, 2)
