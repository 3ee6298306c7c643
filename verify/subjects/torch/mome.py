"""Mixtures of memory experts in PyTorch: token by token, and chunk by chunk with matrix products.

Source: MixFormer paper (17), (18); the operators are those of reference/mome.py.

    letter  paper     shape              meaning
    q k v   Q K V     (B, T, H, K or V)  queries, keys and values; in `mome` K = V = D
    W       w_g       (H, D, X)          router: logits (k * v) W; the other operators take logits l (B, T, H, X)
    a       omega G   (H, X)             decays of the experts
    S0 S    MS        (B, H, X, K, V)    states before the first and after the last token
    r w     E         (B, H, T, X)       weights with which a token reads and writes the experts
    m       -         as r               whether the token makes an expert decay

Whatever the input dtype, arithmetic is float32 or wider: Y comes back in the dtype of q, and S stays wide. Below the
public functions heads come before tokens. Weights that are the same for all tokens, and m, may lack the first axes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mixproof.verify import implements
from mixproof.verify.subjects.torch._arguments import checked, no_autocast, slices, widest

_declared = functools.partial(
    implements,
    dtypes=("float64", "float32"),  # one code widens the inputs of all four; `mome` is judged in half precision too
    dot="float32",  # half-precision operands are widened before any product
    devices=("cpu", "cuda"),
)


@_declared("mome", name="torch.eager")
def eager(q: Tensor, k: Tensor, v: Tensor, W: Tensor, a: Tensor, S0: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """S^j_n = a_j S^j_{n-1} + k_n^T v_n;  y_n = q_n sum_j E_nj S^j_n.  (B, T, H, D) -> (B, T, H, D) and S.  (17)"""
    return _run_routed(_recurrent, q, k, v, W, a, S0)


@_declared("mome", name="torch.chunkwise", chunk=64, dtypes=("float64", "float32", "bfloat16", "float16"))
def chunkwise(
    q: Tensor, k: Tensor, v: Tensor, W: Tensor, a: Tensor, S0: Tensor | None = None, chunk: int = 64
) -> tuple[Tensor, Tensor]:
    """`eager` with matrix products inside chunks and the states carried across them; the last chunk may be short."""
    return _run_routed(functools.partial(_chunkwise, chunk=chunk), q, k, v, W, a, S0)


@_declared("mome.write_mix", name="torch.eager")
def write_mix(q: Tensor, k: Tensor, v: Tensor, l: Tensor, a: Tensor, S0: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """S^j_n = a_j S^j_{n-1} + E_nj k_n^T v_n;  y_n = q_n sum_j S^j_n.  (B, T, H, K or V) -> (B, T, H, V) and S."""
    return _run(_recurrent, _write_mix, q, k, v, l, a, S0)


@_declared("mome.write_mix", name="torch.chunkwise", chunk=64)
def chunkwise_write_mix(
    q: Tensor, k: Tensor, v: Tensor, l: Tensor, a: Tensor, S0: Tensor | None = None, chunk: int = 64
) -> tuple[Tensor, Tensor]:
    """`write_mix` with matrix products inside chunks and the states carried across them."""
    return _run(functools.partial(_chunkwise, chunk=chunk), _write_mix, q, k, v, l, a, S0)


@_declared("mome.top_k", name="torch.eager")
def top_k(
    q: Tensor, k: Tensor, v: Tensor, l: Tensor, a: Tensor, top: int = 2, S0: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """S^j_n = a_j S^j_{n-1} + E_nj k_n^T v_n;  y_n = q_n sum_j E_nj S^j_n, E_n the softmax of the top of l_n."""
    return _run(_recurrent, _both(top), q, k, v, l, a, S0)


@_declared("mome.top_k", name="torch.chunkwise", chunk=64)
def chunkwise_top_k(
    q: Tensor, k: Tensor, v: Tensor, l: Tensor, a: Tensor, top: int = 2, S0: Tensor | None = None, chunk: int = 64
) -> tuple[Tensor, Tensor]:
    """`top_k` with matrix products inside chunks and the states carried across them."""
    return _run(functools.partial(_chunkwise, chunk=chunk), _both(top), q, k, v, l, a, S0)


@_declared("mome.top_k_hold", name="torch.eager")
def top_k_hold(
    q: Tensor, k: Tensor, v: Tensor, l: Tensor, a: Tensor, top: int = 2, S0: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`top_k` in which only selected experts decay."""
    return _run(_recurrent, _both(top, hold=True), q, k, v, l, a, S0)


@_declared("mome.top_k_hold", name="torch.chunkwise", chunk=64)
def chunkwise_top_k_hold(
    q: Tensor, k: Tensor, v: Tensor, l: Tensor, a: Tensor, top: int = 2, S0: Tensor | None = None, chunk: int = 64
) -> tuple[Tensor, Tensor]:
    """`top_k_hold` with matrix products inside chunks and the states carried across them."""
    return _run(functools.partial(_chunkwise, chunk=chunk), _both(top, hold=True), q, k, v, l, a, S0)


# ------------------------------------------------------------------------------------------------------------- weights
Weights = tuple[Tensor, Tensor, Tensor]  # r, w, m


def _read_mix(l: Tensor) -> Weights:
    E = torch.softmax(l, dim=-1)  # (18)
    ones = torch.ones_like(l[0, 0])
    return E, ones, ones.bool()


def _write_mix(l: Tensor) -> Weights:
    r, w, m = _read_mix(l)
    return w, r, m


def _both(top: int, hold: bool = False) -> Callable[[Tensor], Weights]:
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise ValueError(f"top is {top!r}; it must be an integer, at least 1")

    def weights(l: Tensor) -> Weights:
        first = l.argsort(dim=-1, descending=True, stable=True)[..., :top]  # stable: of equal logits the first
        chosen = torch.zeros_like(l, dtype=torch.bool).scatter(-1, first, True)
        E = torch.softmax(l.masked_fill(~chosen, float("-inf")), dim=-1)
        return E, E, chosen if hold else torch.ones_like(l[0, 0], dtype=torch.bool)

    return weights


# --------------------------------------------------------------------------------------------------------------- forms
def _recurrent(q, k, v, weigh, a, S):
    wide = S.dtype
    Q, K, V = (x.to(wide) for x in (q, k, v))
    r, w, m = weigh(slice(None), K, V)
    rows = []
    for n in range(Q.shape[2]):
        kept = torch.where(m[..., n, :], a, 1)
        written = K[:, :, n, None, :, None] * V[:, :, n, None, None, :]
        S = kept[..., None, None] * S + w[..., n, :, None, None] * written
        rows.append(Q[:, :, n, None, :] @ (r[..., n, :, None, None] * S).sum(2))
    return torch.cat(rows, dim=2) if rows else Q @ S[:, :, 0], S


def _chunkwise(q, k, v, weigh, a, S, chunk):
    wide = S.dtype
    rows = []
    for c in slices(q.shape[2], chunk):
        Q, K, V = (x[:, :, c].to(wide) for x in (q, k, v))
        r, w, m = weigh(c, K, V)
        n, total = m.cumsum(-2), m.sum(-2)  # decays since the chunk began
        read, write = r * a[:, None] ** n, w * a[:, None] ** (total[..., None, :] - n)
        D = (r.mT[..., None] * _decays(a, n.mT) * w.mT[..., None, :]).sum(-3)
        old = read.mT[..., None] * (Q[:, :, None] @ S)
        rows.append((Q @ K.mT * D) @ V + old.sum(2))
        new = (write.mT[..., None] * K[:, :, None]).mT @ V[:, :, None]
        S = (a**total)[..., None, None] * S + new
    return torch.cat(rows, dim=2), S


def _decays(a: Tensor, n: Tensor) -> Tensor:
    """a_j^(n_jt - n_js) for s <= t, else 0.  (H, X), (..., X, T) -> (..., X, T, T)."""
    distance = (n[..., :, None] - n[..., None, :]).clamp(min=0)
    return (a[:, :, None, None] ** distance).tril()


# -------------------------------------------------------------------------------------------------------------- shared
_AXES = {"q": "BTHK", "k": "BTHK", "v": "BTHV", "l": "BTHX", "a": "HX", "S0": "BHXKV"}
_ROUTED = {"q": "BTHD", "k": "BTHD", "v": "BTHD", "W": "HDX", "a": "HX", "S0": "BHXDD"}


def _run(form: Callable[..., Any], weights: Callable[[Tensor], Weights], q, k, v, l, a, S0) -> tuple[Tensor, Tensor]:
    """An operator with logits l: check the arguments, put heads before tokens, and put them back in Y."""
    _check(_AXES, q=q, k=k, v=v, l=l, a=a, S0=S0)
    wide, l = widest(q, k, v, l, a, S0), l.transpose(1, 2)
    return _mixed(form, lambda c, K, V: weights(l[:, :, c].to(wide)), q, k, v, a, S0, wide)


def _run_routed(form: Callable[..., Any], q, k, v, W, a, S0) -> tuple[Tensor, Tensor]:
    """The same with a router W."""
    _check(_ROUTED, q=q, k=k, v=v, W=W, a=a, S0=S0)
    wide = widest(q, k, v, W, a, S0)

    # wide K and V serve the router too: gradients of two uses must not meet in half precision
    return _mixed(form, lambda c, K, V: _read_mix((K * V) @ W.to(wide)), q, k, v, a, S0, wide)


def _mixed(form: Callable[..., Any], weigh: Callable[..., Weights], q, k, v, a, S0, wide) -> tuple[Tensor, Tensor]:
    B, _, H, V = v.shape
    # a copy: without tokens, S is what came in
    S = v.new_zeros((B, H, a.shape[1], k.shape[3], V), dtype=wide) if S0 is None else S0.to(wide, copy=True)
    with no_autocast(q):
        Y, S = form(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), weigh, a.to(wide), S)
    return Y.to(q.dtype).transpose(1, 2), S


def _check(axes: dict[str, str], **tensors: Tensor | None) -> None:
    if checked(axes, tensors, states=("S0",))["X"] == 0:
        raise ValueError("a describes X = 0 experts; at least one is needed")
