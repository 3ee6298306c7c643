"""Causal attention over a growing cache in PyTorch: dense, block by block, and a layer that decodes.

Source: survey, Standard Attention; Vaswani et al. 2017 (1); Ainslie et al. 2023. The M heads of a group are M rows a
token of one product with the group's keys, which are not repeated.

    letter  paper   shape                    meaning
    q       Q       (B, T, G, M, K)          queries of M heads in each of G groups
    k v     K V     (B, T, G, K or V)        keys and values of the call
    K0 Kc           (B, P or P + T, G, K)    keys before and after the call; V0 and Vc their values
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mixproof.verify import implements
from mixproof.verify.subjects.torch import _arguments as arguments
from mixproof.verify.subjects.torch.softmax_attention import online_rows, rows, width_scale

_AXES = {"q": "BTGMK", "k": "BTGK", "v": "BTGV", "K0": "BPGK", "V0": "BPGV"}
_declared = functools.partial(
    implements,
    layout="B T D",
    dtypes=("float64", "float32"),
    devices=("cpu", "cuda"),
    at_least={"T": 0},
)


@_declared("softmax_attention.cached", name="torch.dense")
def dense(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, K0: Tensor | None = None, V0: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """O = softmax(scale Q Kc^T) Vc over the keys until a token's own.  -> O (B, T, G, M, V), Kc, Vc"""
    return _run(rows, q, k, v, scale, K0, V0)


@_declared(
    "softmax_attention.cached",
    name="torch.blockwise",
    dtypes=("float64", "float32", "bfloat16"),
    dot="float32",  # half-precision operands are widened before any product
    chunk=16,
)
def blockwise(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, K0: Tensor | None = None, V0: Tensor | None = None,
    chunk: int = 64,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The same by an online softmax over blocks of keys."""
    return _run(functools.partial(online_rows, chunk=chunk), q, k, v, scale, K0, V0)


class Cache(NamedTuple):
    """Keys (B, P, G, K) and values (B, P, G, V) of the tokens so far."""

    K: Tensor
    V: Tensor


class GroupedQueryAttention(nn.Module):
    """Causal attention with `heads` queries and `groups` keys and values a token, projections included.

    d_model     E, channels of the tokens; a multiple of `heads`
    groups      a divisor of `heads`; all of them is multi-head attention, one is multi-query attention
    chunk       rows and keys a block

    Raises ValueError for a value outside these.
    """

    def __init__(self, d_model: int, heads: int, groups: int | None = None, chunk: int = 64) -> None:
        super().__init__()
        groups = heads if groups is None else groups
        for name, value in {"d_model": d_model, "heads": heads, "groups": groups, "chunk": chunk}.items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if d_model % heads:
            raise ValueError(f"d_model is {d_model}, which {heads} heads do not divide")
        if heads % groups:
            raise ValueError(f"heads is {heads}, which {groups} groups do not divide")
        self.heads, self.groups, self.chunk = heads, groups, chunk
        width = d_model // heads
        self.W_Q, self.W_O = (nn.Linear(d_model, d_model, bias=False) for _ in range(2))
        self.W_K, self.W_V = (nn.Linear(d_model, groups * width, bias=False) for _ in range(2))

    def forward(self, x: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """(B, T, E) -> (B, T, E) and the cache after these tokens; one token at a time decodes."""
        q = self.W_Q(x).unflatten(2, (self.groups, self.heads // self.groups, -1))
        k, v = (W(x).unflatten(2, (self.groups, -1)) for W in (self.W_K, self.W_V))
        O, K, V = blockwise(q, k, v, None, *(cache or (None, None)), chunk=self.chunk)
        return self.W_O(O.flatten(2)), Cache(K, V)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, groups={self.groups}, chunk={self.chunk}"


def joined(before: Tensor | None, x: Tensor, wide: torch.dtype, dim: int = 1) -> Tensor:
    """What was in the cache, then the tokens of the call."""
    return x.to(wide) if before is None else torch.cat([before.to(wide), x.to(wide)], dim=dim)


def paired(**caches: Tensor | None) -> None:
    """Raises ValueError for one of two caches that are given or absent together."""
    given, absent = ([n for n, x in caches.items() if (x is None) == missing] for missing in (False, True))
    if given and absent:
        raise ValueError(f"{given[0]} is given without {absent[0]}; a cache has both")


def _run(form, q, k, v, scale, K0, V0):
    arguments.checked(_AXES, {"q": q, "k": k, "v": v, "K0": K0, "V0": V0}, ("K0", "V0"))
    paired(K0=K0, V0=V0)
    scale, wide = width_scale(scale, q.shape[4]), arguments.widest(q, k, v, K0, V0)
    T, _, M = q.shape[1:4]
    with arguments.no_autocast(q):
        Kc, Vc = joined(K0, k, wide), joined(V0, v, wide)
        Q = q.to(wide).transpose(1, 2).flatten(2, 3)
        O = form(Q, Kc.transpose(1, 2), Vc.transpose(1, 2), scale, Kc.shape[1] - T, M)
        return O.unflatten(2, (T, M)).transpose(1, 2).to(q.dtype), Kc, Vc
