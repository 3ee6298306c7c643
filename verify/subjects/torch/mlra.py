"""Multi-head low-rank attention in PyTorch: the latent in blocks, on one device or as many as there are.

Source: survey, section 10; Liu et al. 2026 and their code, as in the reference.

    letter   paper    shape                meaning
    qc qr             (B, T, N, K or R)    content of the queries of N heads, and what is turned by position, R even
                      (B, T, X, M, K or R) concatenated: of the M heads of each block
    c kr     c_i k^R  (B, T, X, L) (., R)  latents in X blocks; the rotary key that all heads share
    gain              (X, L)               of the norm of each block
    Uk Uv    UK_i     (X, N, K, L)         up-projections of each block and head; Uv (X, N, V, L)
    C0 Kr0            (B, P, X, L) (., R)  caches of normalised latents and of turned rotary keys
    O                 (B, T, N, V)         what the heads return; (B, T, X, M, V)
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn

from mixproof.verify import implements
from mixproof.verify.subjects.torch import _arguments as arguments
from mixproof.verify.subjects.torch import _latent as latent
from mixproof.verify.subjects.torch._latent import Cache, Results
from mixproof.verify.subjects.torch.softmax_attention import width_scale

AXES = {
    "qc": "BTNK", "qr": "BTNR", "c": "BTXL", "kr": "BTR", "gain": "XL", "Uk": "XNKL", "Uv": "XNVL", "C0": "BPXL",
    "Kr0": "BPR",
}  # fmt: skip
_CONCATENATED = {
    "qc": "BTXMK", "qr": "BTXMR", "c": "BTXL", "kr": "BTR", "Uk": "XMKL", "Uv": "XMVL", "C0": "BPXL", "Kr0": "BPR",
}  # fmt: skip
_declared = functools.partial(
    implements, layout="B T D", dtypes=("float64", "float32", "bfloat16"), dot="float32", devices=("cpu", "cuda")
)


@_declared("mlra", name="torch.expanded")
def expanded(
    qc: Tensor, qr: Tensor, c: Tensor, kr: Tensor, gain: Tensor, Uk: Tensor, Uv: Tensor, scale: float | None = None,
    base: float = 10000.0, eps: float = 1e-6, C0: Tensor | None = None, Kr0: Tensor | None = None,
) -> Results:  # fmt: skip
    """A key and a value from every block for every head; X softmaxes, their results times X^-1/2 added up."""
    check(qc, qr, c, kr, gain, Uk, Uv, scale, base, eps, C0, Kr0)
    X = len(Uk)
    c = normalised(c, gain, eps)
    Q, Qr = (q[:, :, None, :, None].expand(-1, -1, X, -1, -1, -1).to(c.dtype) for q in (qc, qr))
    O, C, Kr = latent.attend(latent.expanded, Q, Qr, c, kr, Uk, Uv, scale, base, C0, Kr0)
    return (O[:, :, :, :, 0].sum(2) * X**-0.5).to(qc.dtype), C, Kr


@_declared("mlra", name="torch.sharded", chunk=16)
def sharded(
    qc: Tensor, qr: Tensor, c: Tensor, kr: Tensor, gain: Tensor, Uk: Tensor, Uv: Tensor, scale: float | None = None,
    base: float = 10000.0, eps: float = 1e-6, C0: Tensor | None = None, Kr0: Tensor | None = None, chunk: int = 64,
) -> Results:  # fmt: skip
    """Block by block, as devices do that hold one each: its latents, `chunk` at a time, and the rotary key."""
    check(qc, qr, c, kr, gain, Uk, Uv, scale, base, eps, C0, Kr0)
    wide, X = arguments.widest(qc, qr, c, kr, gain, Uk, Uv, C0, Kr0), len(Uk)
    with arguments.no_autocast(c):
        queries = qc[:, :, None, :, None], qr[:, :, None, :, None]
        Q, Qr, C, Kr = latent.prepared(*queries, normalised(c, gain, eps), kr, base, C0, Kr0, wide)
        scale = width_scale(scale, Q.shape[-1] + Qr.shape[-1])
        parts = zip(C.split(1, dim=2), Uk.to(wide).split(1), Uv.to(wide).split(1), strict=True)
        shards: list[Tensor] = [
            latent.absorbed(Q, Qr, c.transpose(1, 2), Kr, k, v, scale, chunk) * X**-0.5 for c, k, v in parts
        ]
        return sum(shards[1:], start=shards[0]).movedim(4, 1)[:, :, 0, :, 0].to(qc.dtype), C, Kr


@_declared("mlra.concatenated", name="torch.expanded")
def concatenated(
    qc: Tensor, qr: Tensor, c: Tensor, kr: Tensor, Uk: Tensor, Uv: Tensor, scale: float | None = None,
    base: float = 10000.0, C0: Tensor | None = None, Kr0: Tensor | None = None,
) -> Results:  # fmt: skip
    """Keys and values of each block for heads of its own.  -> O, and the caches (B, P + T, X, L), (B, P + T, R)."""
    return _printed(latent.expanded, qc, qr, c, kr, Uk, Uv, scale, base, C0, Kr0)


@_declared("mlra.concatenated", name="torch.absorbed", chunk=16)
def concatenated_absorbed(
    qc: Tensor, qr: Tensor, c: Tensor, kr: Tensor, Uk: Tensor, Uv: Tensor, scale: float | None = None,
    base: float = 10000.0, C0: Tensor | None = None, Kr0: Tensor | None = None, chunk: int = 64,
) -> Results:  # fmt: skip
    """The heads of each block read its latents, `chunk` at a time."""
    return _printed(latent.absorbed, qc, qr, c, kr, Uk, Uv, scale, base, C0, Kr0, chunk)


class MultiHeadLowRankAttention(nn.Module):
    """`heads` sums of attentions over `blocks` normalised latents a token, and an output projection.

    d_model         E, channels of the tokens
    blocks          X, parts of the latent; every head reads all of them
    latent          L, channels of each part; what is cached of a token, beside its rotary key, is X L numbers
    key, value      K and V, channels of the content of keys, and of values
    rotary          R, channels of the rotary key, even
    base, eps       of the angles that a token turns by; added to mean squares

    The gains of the norms start at (E / L)^1/2, the factor of the released code. Raises ValueError for a value outside
    these.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        blocks: int,
        latent: int,
        key: int,
        rotary: int,
        value: int,
        base: float = 10000.0,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        sizes = {"d_model": d_model, "heads": heads, "blocks": blocks, "latent": latent, "key": key, "value": value}
        for name, size in (sizes | {"rotary": rotary}).items():
            if size < 1:
                raise ValueError(f"{name} is {size}; it must be at least 1")
        if rotary % 2:
            raise ValueError(f"rotary is {rotary}; channels are turned in pairs")
        arguments.not_negative(eps=eps)
        self.heads, self.blocks, self.latent, self.rotary, self.base, self.eps = (
            heads,
            blocks,
            latent,
            rotary,
            base,
            eps,
        )
        self.W_Q = nn.Linear(d_model, heads * (key + rotary), bias=False)
        self.W_DKV = nn.Linear(d_model, blocks * latent + rotary, bias=False)
        self.gain = nn.Parameter(torch.empty(blocks, latent))
        self.Uk, self.Uv = (nn.Parameter(torch.empty(blocks, heads, width, latent)) for width in (key, value))
        self.W_O = nn.Linear(heads * value, d_model, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start again, with weights as those of nn.Linear."""
        for W in (self.W_Q, self.W_DKV, self.W_O):
            W.reset_parameters()
        for U in (self.Uk, self.Uv):
            nn.init.uniform_(U, -1 / math.sqrt(self.latent), 1 / math.sqrt(self.latent))
        nn.init.constant_(self.gain, math.sqrt(self.W_DKV.in_features / self.latent))

    def forward(self, x: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """Tokens (B, T, d_model), after those of the cache.  -> (B, T, d_model) and the cache after them."""
        queries = self.W_Q(x).unflatten(-1, (self.heads, -1))
        qc, qr = queries.split([queries.shape[-1] - self.rotary, self.rotary], dim=-1)
        c, kr = self.W_DKV(x).split([self.blocks * self.latent, self.rotary], dim=-1)
        parameters = (self.gain, self.Uk, self.Uv, None, self.base, self.eps)
        c = c.unflatten(-1, (self.blocks, self.latent))
        O, C, Kr = sharded(qc, qr, c, kr, *parameters, *(cache or (None, None)))
        return self.W_O(O.flatten(2)), Cache(C, Kr)

    def step(self, x: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """One more token (B, d_model): its output, and the cache after it."""
        y, cache = self.forward(x[:, None], cache)
        return y[:, 0], cache

    def extra_repr(self) -> str:
        return (
            f"{self.W_Q.in_features}, heads={self.heads}, blocks={self.blocks}, latent={self.latent}, "
            f"key={self.Uk.shape[2]}, rotary={self.rotary}, value={self.Uv.shape[2]}, base={self.base}, eps={self.eps}"
        )


def check(
    qc: Tensor, qr: Tensor, c: Tensor, kr: Tensor, gain: Tensor, Uk: Tensor, Uv: Tensor, scale: float | None,
    base: float, eps: float, C0: Tensor | None, Kr0: Tensor | None,
) -> None:  # fmt: skip
    latent.checked(AXES, (qc, qr, c, kr, gain, Uk, Uv, C0, Kr0), scale, base)
    arguments.not_negative(eps=eps)


def normalised(c: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Each block over its root mean square, times its gain, in the dtype that is computed in."""
    wide = arguments.widest(c, gain)
    with arguments.no_autocast(c):
        c = c.to(wide)
        return c * ((c * c).mean(-1, keepdim=True) + eps).rsqrt() * gain.to(wide)


def _printed(
    path: latent.Path, qc: Tensor, qr: Tensor, c: Tensor, kr: Tensor, Uk: Tensor, Uv: Tensor, scale: float | None,
    base: float, C0: Tensor | None, Kr0: Tensor | None, *options: Any,
) -> Results:  # fmt: skip
    latent.checked(_CONCATENATED, (qc, qr, c, kr, Uk, Uv, C0, Kr0), scale, base)
    queries = qc[:, :, :, :, None], qr[:, :, :, :, None]
    O, C, Kr = latent.attend(path, *queries, c, kr, Uk, Uv, scale, base, C0, Kr0, *options)
    return O[:, :, :, :, 0], C, Kr
