"""Compressed convolutional grouped-query attention in PyTorch: all at once, and chunk by chunk.

Source: survey, CCA and CCGQA; Figliola et al. 2025; read as in reference/ccgqa.py, whose inputs these are. Convolutions
are matrix products of windows: those of cuDNN may round to tf32.

    letter  shape                  meaning
    q k v   (B, T, G, M, K) ..     queries, keys (B, T, G, K) and values (B, T, G, V)
    w1 b1   (.., K, W) (.., K)     taps of each channel; w2 (.., K, K, J), b2 (.., K) among those of a head
    beta    (G,)                   logarithms of the temperatures
    q0 ..   (B, W + J - 2, ..)     rows before the call; v0 (B, G, V); cache K0, V0 (B, P, G, K or V)
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
from mixproof.verify.subjects.torch.feature_maps import unit
from mixproof.verify.subjects.torch.mtla import turned

_FILTERS = {
    "w1q": "GMKW",
    "b1q": "GMK",
    "w2q": "GMKKJ",
    "b2q": "GMK",
    "w1k": "GKW",
    "b1k": "GK",
    "w2k": "GKKJ",
    "b2k": "GK",
}
_AXES = {"q": "BTGMK", "k": "BTGK", "v": "BTGV"} | _FILTERS | {"beta": "G"}
_STATES = {"q0": "BRGMK", "k0": "BRGK", "v0": "BGV", "K0": "BPGK", "V0": "BPGV"}
_declared = functools.partial(
    implements,
    layout="B T D",
    dtypes=("float64", "float32", "bfloat16"),
    dot="float32",  # half-precision operands are widened before any product
    devices=("cpu", "cuda"),
    chunk=16,
)
State = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Convolution = Callable[..., Tensor]


@_declared("ccgqa", name="torch.parallel")
def parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w1q: Tensor,
    b1q: Tensor,
    w2q: Tensor,
    b2q: Tensor,
    w1k: Tensor,
    b1k: Tensor,
    w2k: Tensor,
    b2k: Tensor,
    beta: Tensor,
    scale: float | None = None,
    base: float = 10000.0,
    norm_eps: float = 1e-12,
    q0: Tensor | None = None,
    k0: Tensor | None = None,
    v0: Tensor | None = None,
    K0: Tensor | None = None,
    V0: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """One convolution after the other, one softmax.  -> O (B, T, G, M, V), and what the states are after the call."""
    tensors, states = (q, k, v, w1q, b1q, w2q, b2q, w1k, b1k, w2k, b2k, beta), (q0, k0, v0, K0, V0)
    return _run(_one_by_one, tensors, states, scale, base, norm_eps, max(q.shape[1], 1))


@_declared("ccgqa", name="torch.chunkwise")
def chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w1q: Tensor,
    b1q: Tensor,
    w2q: Tensor,
    b2q: Tensor,
    w1k: Tensor,
    b1k: Tensor,
    w2k: Tensor,
    b2k: Tensor,
    beta: Tensor,
    scale: float | None = None,
    base: float = 10000.0,
    norm_eps: float = 1e-12,
    q0: Tensor | None = None,
    k0: Tensor | None = None,
    v0: Tensor | None = None,
    K0: Tensor | None = None,
    V0: Tensor | None = None,
    chunk: int = 64,
) -> tuple[Tensor, ...]:
    """Chunks of tokens from the states of the one before; both convolutions are one of W + J - 1 taps."""
    tensors, states = (q, k, v, w1q, b1q, w2q, b2q, w1k, b1k, w2k, b2k, beta), (q0, k0, v0, K0, V0)
    return _run(_in_one, tensors, states, scale, base, norm_eps, chunk)


class CompressedConvolutionalAttention(nn.Module):
    """`parallel` with projections into the latent and out of it; with one query a group it is CCA.

    d_model       E, channels of the tokens
    groups        G, heads of keys and values
    queries       M, heads of queries a group
    width         K = V, channels of a head, even
    taps          W and J, widths of the two convolutions
    norm_eps      least norm of a query or key

    Raises ValueError for a value outside these.
    """

    w1q: nn.Parameter
    w2q: nn.Parameter

    def __init__(
        self,
        d_model: int,
        groups: int,
        queries: int = 1,
        width: int = 64,
        taps: tuple[int, int] = (2, 2),
        norm_eps: float = 1e-12,
    ) -> None:
        super().__init__()
        W, J = taps
        for name, n in {
            "d_model": d_model,
            "groups": groups,
            "queries": queries,
            "width": width,
            "taps": min(W, J),
        }.items():
            if n < 1:
                raise ValueError(f"{name} is {n}; it must be at least 1")
        if width % 2:
            raise ValueError(f"width is {width}; channels go in pairs")
        arguments.not_negative(norm_eps=norm_eps)
        self.norm_eps = norm_eps
        for side, heads in {"q": (groups, queries), "k": (groups,)}.items():
            for name, shape in {"w1": (width, W), "b1": (width,), "w2": (width, width, J), "b2": (width,)}.items():
                self.register_parameter(name + side, nn.Parameter(torch.empty(*heads, *shape)))
        self.beta = nn.Parameter(torch.empty(groups))
        self.W_Q = nn.Parameter(torch.empty(groups, queries, width, d_model))
        self.W_K, self.W_V = (nn.Parameter(torch.empty(groups, width, d_model)) for _ in range(2))
        self.W_O = nn.Parameter(torch.empty(d_model, groups, queries, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start again: temperatures of one, biases of zero, random weights."""
        fan_in = {"w1": self.w1q.shape[-1], "w2": self.w2q[0, 0, 0].numel(), "W_O": self.W_O[0].numel()}
        for name, p in self.named_parameters():
            if name[0] == "b":
                nn.init.zeros_(p)
            else:
                most = 1 / math.sqrt(fan_in.get(name[:3].rstrip("qk"), p.shape[-1]))
                nn.init.uniform_(p, -most, most)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """(B, T, E) -> (B, T, E), and the state from which the next call goes on."""
        q = torch.einsum("bte,gmke->btgmk", x, self.W_Q)
        k, v = (torch.einsum("bte,gke->btgk", x, W) for W in (self.W_K, self.W_V))
        filters = {n: getattr(self, n) for n in _FILTERS}
        before = dict(zip(_STATES, state or (None,) * 5, strict=True))
        O, *after = parallel(q, k, v, **filters, beta=self.beta, norm_eps=self.norm_eps, **before)
        return torch.einsum("btgmv,egmv->bte", O, self.W_O), tuple(after)

    def extra_repr(self) -> str:
        (G, M, K, E), W, J = self.W_Q.shape, self.w1q.shape[-1], self.w2q.shape[-1]
        return f"{E}, groups={G}, queries={M}, width={K}, taps=({W}, {J}), norm_eps={self.norm_eps}"


def _run(convolve, tensors, states, scale, base, norm_eps, chunk) -> tuple[Tensor, ...]:
    named = dict(zip(_AXES | _STATES, (*tensors, *states), strict=True))
    sizes = arguments.checked(_AXES | _STATES, named, states=_STATES, parameters=(*_FILTERS, "beta"))
    arguments.not_negative(norm_eps=norm_eps)
    W, J, GV = sizes["W"], sizes["J"], sizes["G"] * sizes["V"]
    if sizes.get("R", W + J - 2) != W + J - 2:
        raise ValueError(f"q0 and k0 have {sizes['R']} rows; {W} and {J} taps reach back {W + J - 2}")
    if sizes["K"] % 2 or GV % 2:
        raise ValueError(f"{sizes['K']} channels turn in pairs, and of {GV} channels of values one half is late")
    if (named["K0"] is None) != (named["V0"] is None):
        raise ValueError("K0 and V0 are one cache; give both, or none")
    wide, q = arguments.widest(*named.values()), named["q"]
    with arguments.no_autocast(q):
        x: dict[str, Any] = {n: None if t is None else t.to(wide) for n, t in named.items()}
        axes = sizes | {"R": W + J - 2, "P": sizes.get("P", 0)}
        zeros = (x["q"].new_zeros([axes[a] for a in names]) for names in _STATES.values())
        parts, state = [], [zero if x[n] is None else x[n] for n, zero in zip(_STATES, zeros, strict=True)]
        for part in arguments.slices(q.shape[1], chunk):
            tokens = tuple(x[n][:, part] for n in ("q", "k", "v"))
            O, *state = _chunk(convolve, tokens, x, state, scale, base, norm_eps)
            parts.append(O)
        O = torch.cat(parts, dim=1).to(q.dtype)
    kept = torch.float64 if q.dtype == torch.float64 else torch.float32
    return O, *(s.to(kept) for s in state)


def _chunk(convolve, tokens, x, state, scale, base, norm_eps) -> tuple[Tensor, ...]:
    (q, k, v), (q0, k0, v0, K0, V0) = tokens, state
    T, K = q.shape[1], q.shape[-1]
    rows_q, rows_k, rows_v = torch.cat([q0, q], dim=1), torch.cat([k0, k], dim=1), torch.cat([v0[:, None], v], dim=1)
    both = (q + k[..., None, :]) / 2
    Q = convolve(rows_q, *(x[n] for n in ("w1q", "b1q", "w2q", "b2q"))) + both
    key = convolve(rows_k, *(x[n] for n in ("w1k", "b1k", "w2k", "b2k"))) + both.mean(3)
    n = K0.shape[1] + torch.arange(T, device=q.device)
    Q = turned(unit(Q, norm_eps) * math.sqrt(K), n, base)
    key = turned(unit(key, norm_eps) * (math.sqrt(K) * x["beta"].exp()[:, None]), n, base)
    flat = rows_v.flatten(2)
    half = flat.shape[2] // 2
    value = torch.cat([flat[:, 1:, :half], flat[:, :T, half:]], dim=2).view_as(v)
    keys, values = torch.cat([K0, key], dim=1), torch.cat([V0, value], dim=1)
    S = torch.einsum("btgmk,bsgk->bgmts", Q, keys) * (K**-0.5 if scale is None else scale)
    seen = torch.ones(S.shape[-2:], dtype=torch.bool, device=q.device).tril(K0.shape[1])
    O = torch.einsum("bgmts,bsgv->btgmv", S.masked_fill(~seen, -torch.inf).softmax(-1), values)
    return O, rows_q[:, T:], rows_k[:, T:], rows_v[:, T], keys, values


def _one_by_one(rows: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """b2 + w2 * (b1 + w1 * rows).  (B, T + W + J - 2, .., K) -> (B, T, .., K)"""
    W, J = w1.shape[-1], w2.shape[-1]
    a = (_windows(rows, W) * w1).sum(-1) + b1
    return torch.einsum("bt...kj,...okj->bt...o", _windows(a, J), w2) + b2


def _in_one(rows: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """The same with w2 w1 for taps."""
    W, J = w1.shape[-1], w2.shape[-1]
    shifted = [nn.functional.pad(w2[..., j, None] * w1[..., None, :, :], (j, J - 1 - j)) for j in range(J)]
    bias = torch.einsum("...okj,...k->...o", w2, b1) + b2
    return torch.einsum("bt...kn,...okn->bt...o", _windows(rows, W + J - 1), sum(shifted)) + bias


def _windows(x: Tensor, n: int) -> Tensor:
    """n rows in a last axis.  (B, T + n - 1, ..) -> (B, T, .., n)"""
    T = x.shape[1] - n + 1
    return torch.stack([x[:, i : i + T] for i in range(n)], dim=-1)
