"""Multi-head latent attention in PyTorch, with a rotary part of its own or with keys turned after they are expanded.

Source: survey, section 8; DeepSeek-V2 2024 (9) to (19), as in the reference.

    letter   paper    shape             meaning
    qc qr    q^C q^R  (B, T, N, K or R) content of the queries of N heads, and what is turned by position, R even
    q        q        (B, T, N, K)      queries where all of them is turned, K even
    c kr     c k^R    (B, T, L or R)    latents; the rotary key that all heads share
    Uk Uv    W^UK ..  (N, K, L)         up-projections of each head; Uv (N, V, L)
    C0 Kr0            (B, P, L or R)    caches of latents and of turned rotary keys
    O                 (B, T, N, V)      what the heads return
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from mixproof.verify import implements
from mixproof.verify.subjects.torch import _arguments as arguments
from mixproof.verify.subjects.torch import _latent as latent
from mixproof.verify.subjects.torch._latent import Results
from mixproof.verify.subjects.torch.gqla import GroupQueryLatentAttention
from mixproof.verify.subjects.torch.softmax_attention import width_scale

_AXES = {
    "qc": "BTNK", "qr": "BTNR", "c": "BTL", "kr": "BTR", "Uk": "NKL", "Uv": "NVL", "C0": "BPL", "Kr0": "BPR",
}  # fmt: skip
_TURNED = {"q": "BTNK", "c": "BTL", "Uk": "NKL", "Uv": "NVL", "C0": "BPL"}
_declared = functools.partial(
    implements, layout="B T D", dtypes=("float64", "float32", "bfloat16"), dot="float32", devices=("cpu", "cuda")
)


@_declared("mla", name="torch.expanded")
def expanded(
    qc: Tensor, qr: Tensor, c: Tensor, kr: Tensor, Uk: Tensor, Uv: Tensor, scale: float | None = None,
    base: float = 10000.0, C0: Tensor | None = None, Kr0: Tensor | None = None,
) -> Results:  # fmt: skip
    """Keys Uk c and values Uv c written out.  -> O, and the caches (B, P + T, L), (B, P + T, R)."""
    return _run(latent.expanded, qc, qr, c, kr, Uk, Uv, scale, base, C0, Kr0)


@_declared("mla", name="torch.absorbed", chunk=16)
def absorbed(
    qc: Tensor, qr: Tensor, c: Tensor, kr: Tensor, Uk: Tensor, Uv: Tensor, scale: float | None = None,
    base: float = 10000.0, C0: Tensor | None = None, Kr0: Tensor | None = None, chunk: int = 64,
) -> Results:  # fmt: skip
    """Queries Uk^T q against the latents, `chunk` of them at a time, maximum and mass carried along."""
    return _run(latent.absorbed, qc, qr, c, kr, Uk, Uv, scale, base, C0, Kr0, chunk)


@_declared("mla.decompressed", name="torch.complex")
def decompressed(
    q: Tensor, c: Tensor, Uk: Tensor, Uv: Tensor, scale: float | None = None, base: float = 10000.0,
    C0: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Logits as real parts of complex products: q e^(i n theta), and keys likewise, conjugate.  -> O, (B, P + T, L)."""
    latent.checked(_TURNED, (q, c, Uk, Uv, C0), scale, base)
    wide, dtype = arguments.widest(q, c, Uk, Uv, C0), q.dtype
    scale = width_scale(scale, q.shape[-1])
    with arguments.no_autocast(q):
        q, c, Uk, Uv = (x.to(wide) for x in (q, c, Uk, Uv))
        n, C = latent.positions(C0, c), latent.appended(C0, c)
        keys, values = (torch.einsum("bsl, nkl -> bsnk", C, U) for U in (Uk, Uv))
        everywhere = torch.arange(C.shape[1], device=c.device)
        Q, K = (latent.paired(latent.rotated(x, at, base)) for x, at in ((q, n), (keys, everywhere)))
        A = torch.einsum("btnk, bsnk -> bnts", Q, K.conj()).real * scale
        P = A.masked_fill(~latent.seen(q.shape[1], C.shape[1], q.device), -math.inf).softmax(-1)
        return torch.einsum("bnts, bsnv -> btnv", P, values).to(dtype), C


class MultiHeadLatentAttention(GroupQueryLatentAttention):
    """`heads` attentions over one latent a token, each with up-projections of its own, and an output projection.

    The arguments are those of `GroupQueryLatentAttention`, where every head is a group.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        latent: int,
        key: int,
        rotary: int,
        value: int,
        base: float = 10000.0,
        path: str = "absorbed",
    ) -> None:
        super().__init__(d_model, heads, heads, latent, key, rotary, value, base, path)


def _run(
    path: latent.Path, qc: Tensor, qr: Tensor, c: Tensor, kr: Tensor, Uk: Tensor, Uv: Tensor, scale: float | None,
    base: float, C0: Tensor | None, Kr0: Tensor | None, *options: Any,
) -> Results:  # fmt: skip
    latent.checked(_AXES, (qc, qr, c, kr, Uk, Uv, C0, Kr0), scale, base)
    queries, latents = (qc[:, :, None, :, None], qr[:, :, None, :, None]), c[:, :, None]
    C0 = C0 if C0 is None else C0[:, :, None]
    O, C, Kr = latent.attend(path, *queries, latents, kr, Uk[None], Uv[None], scale, base, C0, Kr0, *options)
    return O[:, :, 0, :, 0], C[:, :, 0], Kr
