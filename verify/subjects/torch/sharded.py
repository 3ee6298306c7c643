"""Operators across ranks of torch.distributed: linear attentions by parts of the sequence, latents by blocks, caches by
keys.

Source: survey, section 10 (MLRA); Sun et al. 2025 (LASP-2) for states across ranks; Milakov and Gimelshein 2018,
section 3.1, for merging parts of a softmax.

    letter  shape           meaning
    T       axis            linear attentions: the tokens of this rank, which come after those of the ranks before it
    X       axis            MLRA: the blocks of this rank
    S       axis            attention: the keys of this rank, which come after those of the ranks before it
    A U     (B, H, 1, 1)    decay across this rank's tokens; U (B, H, K, V), the state that they make
    Z       (..)            what this rank adds to a sum over all ranks

Parts may differ in size and be empty. What is not cut is the same on every rank, parameters too. The functions are
collective, forward and backward: every rank calls them, or none. Arguments are checked on all ranks before anything is
sent, and what is wrong on one is raised on all. Gradients are those of the ranks as one function of all arguments, of
the sum over ranks of <output, cotangent>: those of what is the same on every rank are to be added up over ranks, and a
loss that is the same on every rank is to count once.

`mixproof.verify.subjects.torch.ranks` says how the gate judges such functions, and your own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mixproof.verify.subjects.torch import _arguments as arguments
from mixproof.verify.subjects.torch import _latent as latent
from mixproof.verify.subjects.torch import _linear as linear
from mixproof.verify.subjects.torch import mlra as whole_mlra
from mixproof.verify.subjects.torch.softmax_attention import hidden, width_scale

Group = dist.ProcessGroup | None

_LINEAR = {"q": "BTHK", "k": "BTHK", "v": "BTHV"}
_CACHED = {"q": "BTGMK", "k": "BSGK", "v": "BSGV"}


# ----------------------------------------------------------------------------------------------------- linear attention
def retention(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, scale: float = 1.0, S0: Tensor | None = None, chunk: int = 64,
    group: Group = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """O of this rank's tokens (B, T, H, .), and the state after them; gamma (H,), and S0 on the first rank only."""
    axes = _LINEAR | {"gamma": "H", "S0": "BHKV"}
    return _tokens(_powers, axes, (q, k, v, gamma, S0), scale, chunk, group)


def time_varying_tala(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, scale: float = 1.0, S0: Tensor | None = None, chunk: int = 64,
    group: Group = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`retention` with one decay a token, a (B, T, H), of either sign or zero."""
    return _tokens(_products, _LINEAR | {"a": "BTH", "S0": "BHKV"}, (q, k, v, a, S0), scale, chunk, group)


def gated_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float = 1.0, S0: Tensor | None = None, chunk: int = 64,
    group: Group = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`retention` with one log-decay a token, g (B, T, H), not above zero: "simple"."""
    return _tokens(_exponentials, _LINEAR | {"g": "BTH", "S0": "BHKV"}, (q, k, v, g, S0), scale, chunk, group)


# --------------------------------------------------------------------------------------------------- blocks of a latent
def mlra(
    qc: Tensor, qr: Tensor, c: Tensor, kr: Tensor, gain: Tensor, Uk: Tensor, Uv: Tensor, scale: float | None = None,
    base: float = 10000.0, eps: float = 1e-6, C0: Tensor | None = None, Kr0: Tensor | None = None, chunk: int = 64,
    group: Group = None,
) -> latent.Results:  # fmt: skip
    """O = X^-1/2 sum_x softmax(..) Uv_x C_x with X the blocks of all ranks: one sum over ranks.

    c (B, T, X, L), gain, Uk, Uv and C0 hold this rank's blocks; queries and rotary keys are the same on every rank.
    -> O (B, T, N, V), the same on every rank; the caches of this rank's blocks and of the rotary keys"""
    tensors = {"qc": qc, "qr": qr, "c": c, "kr": kr, "gain": gain, "Uk": Uk, "Uv": Uv, "C0": C0, "Kr0": Kr0}
    scalars = {"scale": scale, "base": base, "eps": eps}

    def check() -> None:
        whole_mlra.check(qc, qr, c, kr, gain, Uk, Uv, scale, base, eps, C0, Kr0)
        arguments.slices(0, chunk)

    blocks, differentiable = agreed(group, check, whole_mlra.AXES, tensors, scalars, "X")
    wide = arguments.widest(*tensors.values())
    with arguments.no_autocast(c):
        Q, Qr = (q[:, :, None, :, None].expand(-1, -1, len(Uk), -1, -1, -1) for q in (qc, qr))
        Q, Qr, C, Kr = latent.prepared(Q, Qr, whole_mlra.normalised(c, gain, eps), kr, base, C0, Kr0, wide)
        given = width_scale(scale, Q.shape[-1] + Qr.shape[-1])
        Z = latent.absorbed(Q, Qr, C.transpose(1, 2), Kr, Uk.to(wide), Uv.to(wide), given, chunk)
        O = added(Z.sum(1) * sum(blocks) ** -0.5, differentiable, group)
        return O.movedim(3, 1)[:, :, :, 0].to(qc.dtype), C, Kr


# ------------------------------------------------------------------------------------------------------ keys of a cache
def cached_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, group: Group = None) -> Tensor:
    """Queries of the last T of all tokens, the same on every rank, over the keys of all ranks until a token's own.

    (B, T, G, M, K), (B, S, G, K), (B, S, G, V) -> O (B, T, G, M, V), the same on every rank. Ranks agree on the
    greatest logit of each row, then add up numerators and masses: softmaxes of parts, each counted by its mass."""
    tensors = {"q": q, "k": k, "v": v}

    def check() -> None:
        arguments.checked(_CACHED, tensors)
        width_scale(scale, q.shape[4])

    parts, differentiable = agreed(group, check, _CACHED, tensors, {"scale": scale}, "S")
    first, S, (T, _, M) = sum(parts[: dist.get_rank(group)]), sum(parts), q.shape[1:4]
    if S < T:
        raise ValueError(f"all ranks together have {S} keys, but q has {T} tokens, each with a key of its own")
    wide = arguments.widest(q, k, v)
    with arguments.no_autocast(q):
        Q = q.to(wide).transpose(1, 2).flatten(2, 3)
        K, V = (x.to(wide).transpose(1, 2) for x in (k, v))
        unseen = hidden(Q, range(first, first + k.shape[1]), S - T, M)
        A = (Q @ K.mT * width_scale(scale, q.shape[4])).masked_fill(unseen, -torch.inf)
        m = torch.cat([torch.full_like(Q[..., :1], -torch.inf), A], dim=-1).detach().amax(-1, keepdim=True)
        dist.all_reduce(m, dist.ReduceOp.MAX, group)
        Z = added((A - m).exp() @ linear.with_mass(V), differentiable, group)
        return (Z[..., :-1] / Z[..., -1:]).unflatten(2, (T, M)).transpose(1, 2).to(q.dtype)


# ---------------------------------------------------------------------------------------------------- between the ranks
def agreed(
    group: Group,
    check: Callable[[], Any],
    axes: Mapping[str, str],
    tensors: Mapping[str, Tensor | None],
    scalars: Mapping[str, Any],
    cut: str,
) -> tuple[list[int], bool]:
    """The size of the axis `cut` on each rank, and whether any tensor of any rank requires a gradient; after every rank
    has passed `check`, and all have the same scalars, dtype, and other axes of those tensors whose axes are named.

    Raises on all ranks what it raises on one, naming it; and ValueError naming a rank and what differs there."""
    mine: dict[str, Any] = {}
    size, differentiable, error = 0, False, None
    try:
        check()
        given = {name: x for name, x in tensors.items() if x is not None}
        for name, letters in axes.items():
            sizes = dict(zip(letters, given[name].shape, strict=True)) if name in given else {}
            size = sizes.pop(cut, size)
            mine[name] = ", ".join(f"{axis}={n}" for axis, n in sizes.items()) if name in given else None
        mine |= scalars
        mine |= {"dtype of the arithmetic": arguments.widest(*given.values()), "grad mode": torch.is_grad_enabled()}
        differentiable = any(x.requires_grad for x in given.values())
    except (TypeError, ValueError) as wrong:
        error = wrong
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (error, mine, size, differentiable), group)
    for rank, (wrong, *_) in enumerate(everyone):
        if wrong is not None:
            raise type(wrong)(f"rank {rank}: {wrong}")
    for rank, (_, theirs, *_) in enumerate(everyone):
        for name, value in everyone[0][1].items():
            if theirs[name] != value:
                raise ValueError(f"rank {rank}: {name} is {theirs[name]}, but on rank 0 it is {value}")
    return [n for *_, n, _ in everyone], torch.is_grad_enabled() and any(needed for *_, needed in everyone)


def before(A: Tensor, U: Tensor, differentiable: bool, group: Group) -> Tensor:
    """The state before this rank's tokens: h = A h + U over the ranks before it, from zero."""
    return _Before.apply(A, _required(U, differentiable), group)


def added(Z: Tensor, differentiable: bool, group: Group) -> Tensor:
    """The sum over ranks. Backwards cotangents are added up, as each rank's Z is in the sums of all."""
    return _Added.apply(_required(Z, differentiable), group)


def _required(x: Tensor, differentiable: bool) -> Tensor:
    """Backwards every rank takes part, one whose own tensors require no gradient too."""
    return x.requires_grad_() if differentiable and not x.requires_grad else x


def gathered(x: Tensor, group: Group) -> list[Tensor]:
    """x of each rank."""
    xs = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(xs, x.contiguous(), group)
    return xs


class _Before(torch.autograd.Function):
    @staticmethod
    def forward(ctx, A, U, group):
        decays, states = gathered(A, group), gathered(U, group)
        h = torch.zeros_like(U)
        for s in range(dist.get_rank(group)):
            h = decays[s] * h + states[s]
        ctx.save_for_backward(h, *decays)
        ctx.group = group
        return h

    @staticmethod
    def backward(ctx, *cotangents):
        """From the last rank down with G, the cotangent of the state after rank s:  dU = G;  dA = <G, h>."""
        h, *decays = ctx.saved_tensors
        own, G = gathered(cotangents[0], ctx.group), torch.zeros_like(h)
        for s in range(len(own) - 1, dist.get_rank(ctx.group), -1):
            G = decays[s] * G + own[s]
        return (G * h).sum((-2, -1), keepdim=True), G, None


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx, Z, group):
        ctx.group = group
        return _all_reduced(Z, group)

    @staticmethod
    def backward(ctx, *cotangents):
        return _all_reduced(cotangents[0], ctx.group), None


def _all_reduced(Z: Tensor, group: Group) -> Tensor:
    total = Z.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


# ------------------------------------------------------------------------------------------------------------ the steps
def _tokens(
    segments: Callable[[Tensor, int, int], linear.Segments],
    axes: Mapping[str, str],
    tensors: tuple[Tensor | None, ...],
    scale: float,
    chunk: int,
    group: Group,
) -> tuple[Tensor, Tensor]:
    given = dict(zip(axes, tensors, strict=True))
    everywhere = {name: letters for name, letters in axes.items() if name != "S0"}

    def check() -> None:
        linear.arranged(axes, *tensors)
        arguments.finite(scale=scale)
        arguments.slices(0, chunk)
        if given["S0"] is not None and dist.get_rank(group):
            raise ValueError("S0 is given; it is the state before all tokens, which the first rank has")

    _, differentiable = agreed(group, check, everywhere, given, {"scale": scale}, "T")
    return linear.run(_continued, axes, tensors, scale, segments, chunk, differentiable, group)


def _continued(q, k, v, a, S, scale, segments, chunk, differentiable, group):
    """The state that the tokens make by themselves goes to later ranks; that of earlier ones is where they start."""
    segment = segments(a, q.shape[2], chunk)
    A, U = torch.ones_like(S[..., :1, :1]), S
    for c in arguments.slices(q.shape[2], chunk):
        K, V, P = k[:, :, c].to(S.dtype), v[:, :, c].to(S.dtype), segment(c)
        A, U = P[..., -1:, :1] * A, P[..., -1:, :1] * U + (K * P[..., -1, 1:, None]).mT @ V
    return linear.chunkwise(q, k, v, segment, S + before(A, U, differentiable, group), scale, chunk)


def _powers(gamma: Tensor, T: int, chunk: int) -> linear.Segments:
    return linear.constant(gamma, T, chunk)


def _products(a: Tensor, T: int, chunk: int) -> linear.Segments:
    return linear.segments(a)


def _exponentials(g: Tensor, T: int, chunk: int) -> linear.Segments:
    return linear.segments(g, log=True)
