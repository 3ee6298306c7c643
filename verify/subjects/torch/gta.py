"""Grouped-head latent attention in PyTorch, as printed and as released, with a layer of each.

Source: survey, section "Grouped-head laTenT Attention"; Sun et al. 2025 and their released code.

    letter    paper     shape                      meaning
    q k                 (B, T, G, M, K)            of M heads in each of G groups; gated: k (B, T, G, K)
    c         v_latent  (B, T, L)                  latent values; gated: (B, T, G, L)
    U         W_UV      (G, M, V, L)               decoder of each head; gated: (G, M, L, X, L), added to X copies of z
    u                   (B, T, G, M, X, L)         gate before its activation
    z                   (B, T, G, M, L)            a head's sum over the tokens' latents
    Kc0 Kc              (B, P or P + T, G, K)      mean keys before and after the call; gated: K0 and Kc, keys
    C0 Cc               (B, P or P + T, L)         latents before and after the call; gated: (.., G, L)
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mixproof.verify import implements
from mixproof.verify.subjects.torch import _arguments as arguments
from mixproof.verify.subjects.torch.cached_attention import joined, paired
from mixproof.verify.subjects.torch.softmax_attention import online_rows, rows, width_scale

_AXES = {"q": "BTGMK", "k": "BTGMK", "c": "BTL", "U": "GMVL", "Kc0": "BPGK", "C0": "BPL"}
_GATED = {"q": "BTGMK", "k": "BTGK", "c": "BTGL", "U": "GMLXL", "u": "BTGMXL", "K0": "BPGK", "C0": "BPGL"}
_declared = functools.partial(
    implements,
    layout="B T D",
    dtypes=("float64", "float32", "bfloat16"),
    dot="float32",  # half-precision operands are widened before any product
    devices=("cpu", "cuda"),
    at_least={"T": 0},
)


@_declared("gta", name="torch.shared", chunk=16)
def shared(
    q: Tensor, k: Tensor, c: Tensor, U: Tensor, scale: float | None = None, Kc0: Tensor | None = None,
    C0: Tensor | None = None, chunk: int = 64,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """One row of weights for all heads of a group, whose values stand side by side; block by block.

    -> O (B, T, G, M, V), Kc, Cc"""
    return _run(functools.partial(_shared, chunk=chunk), q, k, c, U, scale, Kc0, C0)


@_declared("gta", name="torch.repeated")
def repeated(
    q: Tensor, k: Tensor, c: Tensor, U: Tensor, scale: float | None = None, Kc0: Tensor | None = None,
    C0: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Multi-head attention with the means in place of each head's query and key."""
    return _run(_repeated, q, k, c, U, scale, Kc0, C0)


@_declared("gta.gated", name="torch.after", chunk=16)
def after(
    q: Tensor, k: Tensor, c: Tensor, U: Tensor, u: Tensor, scale: float | None = None, K0: Tensor | None = None,
    C0: Tensor | None = None, chunk: int = 64,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Y = sigmoid(u) * ((z, .., z) + z U), z the sum over tokens; block by block.  -> Y (B, T, G, M, X, L), Kc, Cc"""
    return _run_gated(functools.partial(_after, chunk=chunk), q, k, c, U, u, scale, K0, C0)


@_declared("gta.gated", name="torch.before")
def before(
    q: Tensor, k: Tensor, c: Tensor, U: Tensor, u: Tensor, scale: float | None = None, K0: Tensor | None = None,
    C0: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The same with values decoded before the sum over tokens."""
    return _run_gated(_before, q, k, c, U, u, scale, K0, C0)


class Cache(NamedTuple):
    """Keys (B, P, G, K) and latent values (B, P, G, L) of the tokens so far; as printed mean keys and (B, P, L)."""

    K: Tensor
    C: Tensor


class SharedMapAttention(nn.Module):
    """The printed layer, projections included: one map for M heads, values silu(U c) of one latent a token.

    d_model     E, channels of the tokens
    heads       M in each of `groups`
    width       K = V, channels of a head
    latent      L, channels of the latent
    chunk       rows and tokens a block

    Raises ValueError for a size below one.
    """

    def __init__(self, d_model: int, groups: int, heads: int, width: int, latent: int, chunk: int = 64) -> None:
        super().__init__()
        _positive(d_model=d_model, groups=groups, heads=heads, width=width, latent=latent, chunk=chunk)
        self.chunk = chunk
        self.W_Q, self.W_K = (nn.Linear(d_model, groups * heads * width, bias=False) for _ in range(2))
        self.W_DV = nn.Linear(d_model, latent, bias=False)
        self.W_O = nn.Linear(groups * heads * width, d_model, bias=False)
        self.U = nn.Parameter(torch.empty(groups, heads, width, latent))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start again: weights as those of nn.Linear."""
        _reset(self.U, self.W_Q, self.W_K, self.W_DV, self.W_O)

    def forward(self, x: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """(B, T, E) -> (B, T, E), the mean keys and latents of all tokens so far; one token at a time decodes."""
        q, k = (W(x).unflatten(2, (*self.U.shape[:2], -1)) for W in (self.W_Q, self.W_K))
        O, K, C = shared(q, k, self.W_DV(x), self.U, None, *(cache or (None, None)), chunk=self.chunk)
        return self.W_O(O.flatten(2)), Cache(K, C)

    def extra_repr(self) -> str:
        return f"groups={len(self.U)}, heads={self.U.shape[1]}, chunk={self.chunk}"


class GroupedLatentAttention(nn.Module):
    """The released layer without its rotations: M heads in each of `groups`, whose latents are decoded to E channels.

    d_model     E, channels of the tokens; a multiple of groups * heads * latent
    heads       M of each group
    width       K, channels of queries and keys
    latent      L, channels of a latent value
    scale       of the logits, width^-1/2 if not given; the released layer without flash attention has (E / all heads
                of the model)^-1/2
    chunk       rows and latents a block

    Raises ValueError for a value outside these.
    """

    def __init__(
        self, d_model: int, groups: int, heads: int, width: int, latent: int, scale: float | None = None,
        chunk: int = 64,
    ) -> None:  # fmt: skip
        super().__init__()
        _positive(d_model=d_model, groups=groups, heads=heads, width=width, latent=latent, chunk=chunk)
        if d_model % (groups * heads * latent):
            raise ValueError(f"d_model is {d_model}, which {groups} * {heads} heads of {latent} channels do not divide")
        self.groups, self.heads, self.scale, self.chunk = groups, heads, width_scale(scale, width), chunk
        self.W_q = nn.Linear(d_model, groups * heads * width)
        self.W_k = nn.Linear(d_model, groups * width)
        self.W_c = nn.Linear(d_model, groups * latent)
        self.W_u = nn.Linear(d_model, d_model)
        self.W_O = nn.Linear(d_model, d_model, bias=False)
        self.U = nn.Parameter(torch.empty(groups, heads, latent, d_model // (groups * heads * latent), latent))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start again: weights as those of nn.Linear."""
        _reset(self.U, self.W_q, self.W_k, self.W_c, self.W_u, self.W_O)

    def forward(self, x: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """(B, T, E) -> (B, T, E) and the keys and latents of all tokens so far; one token at a time decodes."""
        q = self.W_q(x).unflatten(2, (self.groups, self.heads, -1))
        k, c = (W(x).unflatten(2, (self.groups, -1)) for W in (self.W_k, self.W_c))
        u = self.W_u(x).unflatten(2, (self.groups, self.heads, *self.U.shape[3:]))
        Y, K, C = after(q, k, c, self.U, u, self.scale, *(cache or (None, None)), chunk=self.chunk)
        return self.W_O(Y.flatten(2)), Cache(K, C)

    def extra_repr(self) -> str:
        return f"groups={self.groups}, heads={self.heads}, scale={self.scale:g}, chunk={self.chunk}"


def _positive(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")


def _reset(U: Tensor, *projections: nn.Linear) -> None:
    for W in projections:
        W.reset_parameters()
    nn.init.uniform_(U, -1 / math.sqrt(U.shape[-1]), 1 / math.sqrt(U.shape[-1]))


def _shared(Q, K, C, U, scale, before, chunk):
    v = torch.nn.functional.silu(C[:, None] @ U.flatten(1, 2).mT)
    O = online_rows(Q.transpose(1, 2), K.transpose(1, 2), v, scale, before, chunk=chunk)
    return O.transpose(1, 2).unflatten(3, U.shape[1:3])


def _repeated(Q, K, C, U, scale, before):
    v = torch.nn.functional.silu(C[:, None, None] @ U.mT)
    q, k = (x.transpose(1, 2)[:, :, None].expand(-1, -1, U.shape[1], -1, -1) for x in (Q, K))
    return rows(q, k, v, scale, before).permute(0, 3, 1, 2, 4)


def _after(q, K, C, U, scale, before, chunk):
    M = q.shape[3]
    rows_of = q.transpose(1, 2).flatten(2, 3)
    z = online_rows(rows_of, K.transpose(1, 2), C.transpose(1, 2), scale, before, M, chunk)
    return _decoded(z.unflatten(2, (q.shape[1], M)).transpose(1, 2), U)


def _before(q, K, C, U, scale, before):
    v = _decoded(C[:, :, :, None].expand(-1, -1, -1, U.shape[1], -1), U).flatten(4).permute(0, 2, 3, 1, 4)
    k = K.transpose(1, 2)[:, :, None]
    return rows(q.permute(0, 2, 3, 1, 4), k, v, scale, before).permute(0, 3, 1, 2, 4).unflatten(4, U.shape[3:])


def _decoded(z, U):
    return z[..., None, :] + torch.einsum("btgml,gmlxd->btgmxd", z, U)


def _run(form, q, k, c, U, scale, Kc0, C0):
    tensors = dict(zip(_AXES, (q, k, c, U, Kc0, C0), strict=True))
    arguments.checked(_AXES, tensors, ("Kc0", "C0"))
    paired(Kc0=Kc0, C0=C0)
    scale, wide = width_scale(scale, q.shape[4]), arguments.widest(*tensors.values())
    with arguments.no_autocast(q):
        Kc, Cc = joined(Kc0, k.to(wide).mean(3), wide), joined(C0, c, wide)
        O = form(q.to(wide).mean(3), Kc, Cc, U.to(wide), scale, Kc.shape[1] - q.shape[1])
    return O.to(q.dtype), Kc, Cc


def _run_gated(form, q, k, c, U, u, scale, K0, C0):
    tensors = dict(zip(_GATED, (q, k, c, U, u, K0, C0), strict=True))
    arguments.checked(_GATED, tensors, ("K0", "C0"))
    paired(K0=K0, C0=C0)
    scale, wide = width_scale(scale, q.shape[4]), arguments.widest(*tensors.values())
    with arguments.no_autocast(q):
        Kc, Cc = joined(K0, k, wide), joined(C0, c, wide)
        o = form(q.to(wide), Kc, Cc, U.to(wide), scale, Kc.shape[1] - q.shape[1])
        Y = u.to(wide).sigmoid() * o
    return Y.to(q.dtype), Kc, Cc
