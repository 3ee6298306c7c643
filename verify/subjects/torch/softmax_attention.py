"""Softmax attention in PyTorch: with all weights at once, and block by block with an online softmax.

Source: Vaswani et al. 2017 (1); Milakov and Gimelshein 2018, algorithm 3; Dao et al. 2022, algorithm 1.

    letter  paper   shape                 meaning
    q k v   Q K V   (B, T or S, H, ..)    D channels of queries and keys, V of values
    m l U           (.., R, 1 or V)       of R rows so far: greatest logit, sum of exponentials, unnormalised output

Rows are read in order, `per` of them a token: row r sees the first `before` + r // per + 1 keys, or all there are.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from mixproof.verify import implements
from mixproof.verify.subjects.torch import _arguments as arguments

_AXES = {"q": "BTHD", "k": "BSHD", "v": "BSHV"}
_declared = functools.partial(
    implements,
    dtypes=("float64", "float32", "bfloat16", "float16"),
    dot="float32",  # half-precision operands are widened before any product
    devices=("cpu", "cuda"),
    at_least={"T": 0},
)


@_declared("softmax_attention", name="torch.dense")
def dense(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, causal: bool = False) -> Tensor:
    """O = softmax(scale Q K^T) V.  (B, T, H, D), (B, S, H, D), (B, S, H, V) -> (B, T, H, V)"""
    return _run(rows, q, k, v, scale, causal)


@_declared("softmax_attention", name="torch.blockwise", chunk=16)
def blockwise(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, causal: bool = False, chunk: int = 64
) -> Tensor:
    """The same by blocks of queries and of keys: no matrix of weights, and no block that a causal mask hides."""
    return _run(functools.partial(online_rows, chunk=chunk), q, k, v, scale, causal)


def width_scale(scale: float | None, K: int) -> float:
    """The scale, K^-1/2 unless it is given. Raises ValueError for one that is not finite."""
    if scale is None:
        return K**-0.5
    arguments.finite(scale=scale)
    return scale


def rows(q: Tensor, k: Tensor, v: Tensor, scale: float, before: int, per: int = 1) -> Tensor:
    """(.., R, K), (.., S, K), (.., S, V) -> (.., R, V)"""
    return (q @ k.mT * scale).masked_fill(hidden(q, range(k.shape[-2]), before, per), -math.inf).softmax(-1) @ v


def online_rows(q: Tensor, k: Tensor, v: Tensor, scale: float, before: int, per: int = 1, chunk: int = 64) -> Tensor:
    """`rows`, chunk by chunk of rows, each over the blocks of keys that it sees."""
    chunks = arguments.slices(q.shape[-2], chunk)
    return torch.cat([_online(q[..., c, :], k, v, scale, before, per, chunk, c.start) for c in chunks], dim=-2)


def hidden(q: Tensor, keys: range, before: int, per: int = 1, first: int = 0) -> Tensor:
    """Which of the keys the rows q, of which `first` is the first, do not see.  (R, len(keys))"""
    r = torch.arange(first, first + q.shape[-2], device=q.device)
    return torch.arange(keys.start, keys.stop, device=q.device) > before + r[:, None] // per


def _online(q: Tensor, k: Tensor, v: Tensor, scale: float, before: int, per: int, chunk: int, first: int) -> Tensor:
    stop = min(k.shape[-2], before + (first + q.shape[-2] - 1) // per + 1)
    l, U = q[..., :1] * 0, q[..., :1] * v[..., :1, :].sum(-2, keepdim=True) * 0
    m = torch.full_like(l, -math.inf)
    for a in range(0, stop, chunk):
        b = min(a + chunk, stop)
        s = (q @ k[..., a:b, :].mT * scale).masked_fill(hidden(q, range(a, b), before, per, first), -math.inf)
        top = torch.maximum(m, s.detach().amax(-1, keepdim=True))  # any constant would do: it has no gradient
        e, r = (s - top).exp(), (m - top).exp()
        l, U, m = r * l + e.sum(-1, keepdim=True), r * U + e @ v[..., a:b, :], top
    return U / l.masked_fill(l == 0, 1)


def _run(form, q, k, v, scale, causal):
    arguments.checked(_AXES, {"q": q, "k": k, "v": v})
    scale, wide = width_scale(scale, q.shape[3]), arguments.widest(q, k, v)
    with arguments.no_autocast(q):
        Q, K, V = (x.transpose(1, 2).to(wide) for x in (q, k, v))
        return form(Q, K, V, scale, 0 if causal else k.shape[1]).transpose(1, 2).to(q.dtype)
