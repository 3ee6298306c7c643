"""Interleaved head attention in PyTorch: a longer sequence block by block, maps of heads that are mixed, and a layer.

Source: survey, section "Interleaved Head Attention"; Duvvuri et al. 2026, read as in the reference.

    letter    paper   shape                  meaning
    q k v             (B, T, N, K or V)      of each token and head
    aq ak av  mix     (N, J, N)              weights of the heads in pseudo-head p of head h
    r         1 / P   (N, J)                 weights of the pseudo-outputs in the output of head h
    Q K V             (B, N, T J, K or V)    pseudo-heads of each head, p of token t at place t J + p
    K0 Kc             (B, P or P + T, N, K)  keys before and after the call, not mixed; V0 and Vc their values
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, nn

from mixproof.verify import implements
from mixproof.verify.subjects.torch import _arguments as arguments
from mixproof.verify.subjects.torch.cached_attention import Cache, joined, paired
from mixproof.verify.subjects.torch.softmax_attention import width_scale

_AXES = {
    "q": "BTNK", "k": "BTNK", "v": "BTNV", "aq": "NJN", "ak": "NJN", "av": "NJN", "r": "NJ",
    "K0": "BPNK", "V0": "BPNV",
}  # fmt: skip
_declared = functools.partial(
    implements,
    layout="B T D",
    dtypes=("float64", "float32", "bfloat16"),
    dot="float32",  # half-precision operands are widened before any product
    devices=("cpu", "cuda"),
    at_least={"T": 0},
)


@_declared("iha", name="torch.interleaved", chunk=16)
def interleaved(
    q: Tensor, k: Tensor, v: Tensor, aq: Tensor, ak: Tensor, av: Tensor, r: Tensor, scale: float | None = None,
    K0: Tensor | None = None, V0: Tensor | None = None, chunk: int = 64,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Attention over T J places, an online softmax over blocks of tokens; a place sees all places of the tokens up to
    its own.  -> O (B, T, N, V), Kc, Vc"""
    return _run(functools.partial(_interleaved, index=False, chunk=chunk), q, k, v, aq, ak, av, r, scale, K0, V0)


@_declared("iha.index_causal", name="torch.interleaved", chunk=16)
def index_causal(
    q: Tensor, k: Tensor, v: Tensor, aq: Tensor, ak: Tensor, av: Tensor, r: Tensor, scale: float | None = None,
    K0: Tensor | None = None, V0: Tensor | None = None, chunk: int = 64,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`interleaved` where a place sees the places up to its own."""
    return _run(functools.partial(_interleaved, index=True, chunk=chunk), q, k, v, aq, ak, av, r, scale, K0, V0)


@_declared("iha", name="torch.mixed_maps", dtypes=("float64", "float32"))
def mixed_maps(
    q: Tensor, k: Tensor, v: Tensor, aq: Tensor, ak: Tensor, av: Tensor, r: Tensor, scale: float | None = None,
    K0: Tensor | None = None, V0: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """No pseudo-head: the N^2 maps of pairs of heads are mixed, and weights of values before these are summed."""
    return _run(functools.partial(_mixed_maps, index=False), q, k, v, aq, ak, av, r, scale, K0, V0)


@_declared("iha.index_causal", name="torch.mixed_maps", dtypes=("float64", "float32"))
def index_causal_maps(
    q: Tensor, k: Tensor, v: Tensor, aq: Tensor, ak: Tensor, av: Tensor, r: Tensor, scale: float | None = None,
    K0: Tensor | None = None, V0: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`mixed_maps` where a place sees the places up to its own."""
    return _run(functools.partial(_mixed_maps, index=True), q, k, v, aq, ak, av, r, scale, K0, V0)


class InterleavedHeadAttention(nn.Module):
    """Interleaved head attention, projections included. A new layer is near multi-head attention: every pseudo-head
    is its head, but for noise that lets each learn a mixture of its own.

    d_model       E, channels of the tokens; a multiple of `heads`
    pseudo_heads  J of each head; as many as there are heads if not given
    index_causal  whether a place sees the places up to its own, not all of its token
    chunk         tokens a block of keys

    Raises ValueError for a value outside these.
    """

    def __init__(
        self, d_model: int, heads: int, pseudo_heads: int | None = None, index_causal: bool = False, chunk: int = 64
    ) -> None:
        super().__init__()
        pseudo_heads = heads if pseudo_heads is None else pseudo_heads
        sizes = {"d_model": d_model, "heads": heads, "pseudo_heads": pseudo_heads, "chunk": chunk}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if d_model % heads:
            raise ValueError(f"d_model is {d_model}, which {heads} heads do not divide")
        self.index_causal, self.chunk = index_causal, chunk
        self.W_Q, self.W_K, self.W_V, self.W_O = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))
        self.aq, self.ak, self.av = (nn.Parameter(torch.empty(heads, pseudo_heads, heads)) for _ in range(3))
        self.r = nn.Parameter(torch.empty(heads, pseudo_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start again: random projections, pseudo-heads near their heads, outputs averaged."""
        for W in (self.W_Q, self.W_K, self.W_V, self.W_O):
            W.reset_parameters()
        for a in (self.aq, self.ak, self.av):
            nn.init.normal_(a, std=0.02)
            with torch.no_grad():
                a += torch.eye(len(a))[:, None]
        nn.init.constant_(self.r, 1 / self.r.shape[1])

    def forward(self, x: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """(B, T, E) -> (B, T, E) and the keys and values of all tokens so far; one token at a time decodes."""
        q, k, v = (W(x).unflatten(2, (len(self.r), -1)) for W in (self.W_Q, self.W_K, self.W_V))
        form = index_causal if self.index_causal else interleaved
        O, K, V = form(q, k, v, self.aq, self.ak, self.av, self.r, None, *(cache or (None, None)), chunk=self.chunk)
        return self.W_O(O.flatten(2)), Cache(K, V)

    def extra_repr(self) -> str:
        N, J = self.r.shape
        return f"heads={N}, pseudo_heads={J}, index_causal={self.index_causal}, chunk={self.chunk}"


def _hidden(q: Tensor, tokens: range, before: int, J: int, index: bool) -> Tensor:
    """Which places of some tokens the places of the queries do not see.  (T J, len(tokens) J)"""
    r = torch.arange(q.shape[1] * J, device=q.device)[:, None] + before * J
    c = torch.arange(tokens.start * J, tokens.stop * J, device=q.device)
    return c > r if index else c // J > r // J


def _interleaved(q, k, v, aq, ak, av, r, scale, before, index, chunk):
    J = r.shape[1]
    Q, K, V = (torch.einsum("hpn,btnk->bhtpk", a, x) for a, x in ((aq, q), (ak, k), (av, v)))
    Q = Q.flatten(2, 3)
    l, U = Q[..., :1] * 0, Q[..., :1] * V[:, :, :1].sum((2, 3))[:, :, None] * 0
    m = torch.full_like(l, -math.inf)
    for c in arguments.slices(k.shape[1], chunk):
        hidden = _hidden(q, range(c.start, c.stop), before, J, index)
        s = (Q @ K[:, :, c].flatten(2, 3).mT * scale).masked_fill(hidden, -math.inf)
        top = torch.cat([m, s.detach()], dim=-1).amax(-1, keepdim=True)  # any constant would do: it has no gradient
        e, shrunk = (s - top).exp(), (m - top).exp()
        l, U, m = shrunk * l + e.sum(-1, keepdim=True), shrunk * U + e @ V[:, :, c].flatten(2, 3), top
    return torch.einsum("hp,bhtpv->bthv", r, (U / l).unflatten(2, (q.shape[1], J)))


def _mixed_maps(q, k, v, aq, ak, av, r, scale, before, index):
    T, S, J = q.shape[1], k.shape[1], r.shape[1]
    maps = torch.einsum("btmk,bsnk->bmnts", q, k)
    logits = torch.einsum("hqn,bhpnts->bhtpsq", ak, torch.einsum("hpm,bmnts->bhpnts", aq, maps)) * scale
    hidden = _hidden(q, range(S), before, J, index).reshape(T, J, S, J)
    A = logits.masked_fill(hidden, -math.inf).flatten(4).softmax(-1).unflatten(4, (S, J))
    W = torch.einsum("bhtsq,hqn->bhtsn", torch.einsum("hp,bhtpsq->bhtsq", r, A), av)
    return torch.einsum("bhtsn,bsnv->bthnv", W, v).sum(3)  # head by head, or the sum is of S N terms


def _run(form, q, k, v, aq, ak, av, r, scale, K0, V0):
    tensors = dict(zip(_AXES, (q, k, v, aq, ak, av, r, K0, V0), strict=True))
    arguments.checked(_AXES, tensors, ("K0", "V0"))
    paired(K0=K0, V0=V0)
    scale, wide = width_scale(scale, q.shape[3]), arguments.widest(*tensors.values())
    with arguments.no_autocast(q):
        Kc, Vc = joined(K0, k, wide), joined(V0, v, wide)
        O = form(q.to(wide), Kc, Vc, *(t.to(wide) for t in (aq, ak, av, r)), scale, Kc.shape[1] - q.shape[1])
    return O.to(q.dtype), Kc, Vc
