"""What attentions over latents in PyTorch share: rotary parts, the caches, and the two paths.

Heads come before tokens here. A latent has X blocks, each read by N groups of M heads; all heads share one rotary key:

    letter  shape                   meaning
    Q Qr    (B, X, N, M, T, K or R) content of the queries, and their rotary part, turned
    C Kr    (B, X, S, L) (B, S, R)  cached, then new: latents, and turned rotary keys; S = P + T
    Uk Uv   (X, N, K, L)            up-projections; Uv (X, N, V, L)

Whatever the input dtype, arithmetic is float32 or wider: outputs come back in the dtype of the queries, and caches stay
wide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mixproof.verify.subjects.torch import _arguments as arguments

Path = Callable[..., Tensor]
Results = tuple[Tensor, Tensor, Tensor]

_CACHES = ("C0", "Kr0")


class Cache(NamedTuple):
    """What a layer remembers of the tokens so far: latents C (B, P, ..., L) and turned rotary keys Kr (B, P, R)."""

    C: Tensor
    Kr: Tensor


def checked(axes: Mapping[str, str], tensors: tuple[Tensor | None, ...], scale: float | None, base: float) -> None:
    """Raises TypeError or ValueError naming the argument that makes no sense."""
    given = dict(zip(axes, tensors, strict=True))
    sizes = arguments.checked(axes, given, _CACHES, [n for n, a in axes.items() if "B" not in a])
    arguments.finite(base=base, scale=0.0 if scale is None else scale)
    if base <= 0:
        raise ValueError(f"base is {base}; it must be positive")
    if "Kr0" in given and (given["C0"] is None) != (given["Kr0"] is None):
        raise ValueError("C0 and Kr0 hold the same tokens: give both, or neither")
    R = sizes.get("R", sizes["K"])
    if R % 2:
        raise ValueError(f"there are {R} channels to turn; they are turned in pairs")


def attend(
    path: Path, qc: Tensor, qr: Tensor, c: Tensor, kr: Tensor, Uk: Tensor, Uv: Tensor, scale: float | None, base: float,
    C0: Tensor | None, Kr0: Tensor | None, *options: Any,
) -> Results:  # fmt: skip
    """O (B, T, X, N, M, V) and the caches, from queries (B, T, X, N, M, .), latents (B, T, X, L), up-projections."""
    wide = arguments.widest(qc, qr, c, kr, Uk, Uv, C0, Kr0)
    with arguments.no_autocast(qc):
        Q, Qr, C, Kr = prepared(qc, qr, c, kr, base, C0, Kr0, wide)
        scale = (Q.shape[-1] + Qr.shape[-1]) ** -0.5 if scale is None else scale
        O = path(Q, Qr, C.transpose(1, 2), Kr, Uk.to(wide), Uv.to(wide), scale, *options)
        return O.movedim(4, 1).to(qc.dtype), C, Kr


def prepared(
    qc: Tensor, qr: Tensor, c: Tensor, kr: Tensor, base: float, C0: Tensor | None, Kr0: Tensor | None, wide: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Q and Qr, heads first, and the caches with what is new: everything wide, rotary parts turned."""
    qc, qr, c, kr = (x.to(wide) for x in (qc, qr, c, kr))
    n = positions(C0, c)
    C, Kr = appended(C0, c), appended(Kr0, rotated(kr, n, base))
    return qc.movedim(1, 4), rotated(qr, n, base).movedim(1, 4), C, Kr


def expanded(Q: Tensor, Qr: Tensor, C: Tensor, Kr: Tensor, Uk: Tensor, Uv: Tensor, scale: float) -> Tensor:
    """Keys and values written out, the rotary key beside the content of each: one product gives the logits."""
    keys = torch.einsum("bxsl, xnkl -> bxnsk", C, Uk)
    values = torch.einsum("bxsl, xnvl -> bxnsv", C, Uv)
    keys = torch.cat([keys, Kr[:, None, None].expand(*keys.shape[:4], -1)], dim=-1)
    A = torch.cat([Q, Qr], dim=-1) @ keys.mT[:, :, :, None] * scale
    return A.masked_fill(~seen(Q.shape[-2], C.shape[2], C.device), -math.inf).softmax(-1) @ values[:, :, :, None]


def absorbed(
    Q: Tensor, Qr: Tensor, C: Tensor, Kr: Tensor, Uk: Tensor, Uv: Tensor, scale: float, chunk: int
) -> Tensor:  # fmt: skip
    """All heads of a block read its latents, `chunk` at a time: maximum m, mass l and numerators are rescaled."""
    q = torch.cat([torch.einsum("bxnmtk, xnkl -> bxnmtl", Q, Uk), Qr], dim=-1) * scale
    keys = torch.cat([C, Kr[:, None].expand(*C.shape[:3], -1)], dim=-1)[:, :, None, None]
    latents, visible = C[:, :, None, None], seen(Q.shape[-2], C.shape[2], C.device)
    m = q.new_full((*q.shape[:-1], 1), -math.inf)
    l, Z = torch.zeros_like(m), q[..., : C.shape[-1]] * 0
    for s in arguments.slices(C.shape[2], chunk):
        A = (q @ keys[..., s, :].mT).masked_fill(~visible[:, s], -math.inf)
        top = torch.maximum(m, A.detach().amax(-1, keepdim=True)) if A.numel() else m  # whatever it is, it drops out
        e, r = (A - top).exp(), (m - top).exp()
        l, Z, m = r * l + e.sum(-1, keepdim=True), r * Z + e @ latents[..., s, :], top
    return torch.einsum("bxnmtl, xnvl -> bxnmtv", Z / l, Uv)


def seen(T: int, S: int, device: torch.device) -> Tensor:
    """Which of S keys each of the last T tokens sees."""
    return torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)


def rotated(x: Tensor, n: Tensor, base: float) -> Tensor:
    """Pairs of channels turned: times exp(i n_t base^(-2 i / R)).  (B, T, ..., R) -> (B, T, ..., R)."""
    R = x.shape[-1]
    theta = base ** -(torch.arange(0, R, 2, dtype=torch.float64, device=x.device) / max(R, 1))
    angle = (n[:, None] * theta).unflatten(0, (-1, *(1,) * (x.ndim - 3)))
    turn = torch.polar(torch.ones_like(angle), angle).to(x.dtype.to_complex())
    z = paired(x) * turn
    return torch.stack([z.real, z.imag], dim=-1).flatten(-2)  # view_as_real needs gradients at even offsets


def paired(x: Tensor) -> Tensor:
    """Pairs of channels as complex numbers.  (..., R) -> (..., R / 2)."""
    return torch.complex(x[..., 0::2], x[..., 1::2])


def positions(cache: Tensor | None, new: Tensor) -> Tensor:
    """The positions of new tokens, which come after those cached."""
    P = 0 if cache is None else cache.shape[1]
    return torch.arange(P, P + new.shape[1], device=new.device)


def appended(cache: Tensor | None, new: Tensor) -> Tensor:
    """The cache, if there is one, and what is new; a tensor of its own."""
    return new.clone() if cache is None else torch.cat([cache.to(new.dtype), new], dim=1)
