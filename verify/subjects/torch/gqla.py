"""Group-query latent attention in PyTorch: keys and values of every group written out, or latents read as they are.

Source: survey, section 9; decoupled rotary part of DeepSeek-V2 2024 (14) to (18), as in the reference.

    letter   paper    shape                meaning
    qc qr    q^C q^R  (B, T, G, M, K or R) content of the queries of M heads a group, and what is turned by position
    c kr     c k^R    (B, T, L or R)       latents; the rotary key that all heads share, R even
    Uk Uv    W^UK ..  (G, K, L)            up-projections of each group; Uv (G, V, L)
    C0 Kr0            (B, P, L or R)       caches of latents and of turned rotary keys
    O                 (B, T, G, M, V)      what the heads return
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn

from mixproof.verify import implements
from mixproof.verify.subjects.torch import _latent as latent
from mixproof.verify.subjects.torch._latent import Cache, Results

_AXES = {
    "qc": "BTGMK", "qr": "BTGMR", "c": "BTL", "kr": "BTR", "Uk": "GKL", "Uv": "GVL", "C0": "BPL", "Kr0": "BPR",
}  # fmt: skip
_declared = functools.partial(
    implements, layout="B T D", dtypes=("float64", "float32", "bfloat16"), dot="float32", devices=("cpu", "cuda")
)


@_declared("gqla", name="torch.grouped")
def grouped(
    qc: Tensor, qr: Tensor, c: Tensor, kr: Tensor, Uk: Tensor, Uv: Tensor, scale: float | None = None,
    base: float = 10000.0, C0: Tensor | None = None, Kr0: Tensor | None = None,
) -> Results:  # fmt: skip
    """Grouped-query attention to keys Uk c and values Uv c.  -> O, and the caches (B, P + T, L), (B, P + T, R)."""
    return _run(latent.expanded, qc, qr, c, kr, Uk, Uv, scale, base, C0, Kr0)


@_declared("gqla", name="torch.absorbed", chunk=16)
def absorbed(
    qc: Tensor, qr: Tensor, c: Tensor, kr: Tensor, Uk: Tensor, Uv: Tensor, scale: float | None = None,
    base: float = 10000.0, C0: Tensor | None = None, Kr0: Tensor | None = None, chunk: int = 64,
) -> Results:  # fmt: skip
    """Attention of all heads to the latents, `chunk` of them at a time, maximum and mass carried along."""
    return _run(latent.absorbed, qc, qr, c, kr, Uk, Uv, scale, base, C0, Kr0, chunk)


PATHS = {"grouped": grouped, "absorbed": absorbed}


class GroupQueryLatentAttention(nn.Module):
    """`heads` attentions over one latent a token, in `groups` that share up-projections, and an output projection.

    d_model         channels of the tokens
    groups          a divisor of `heads`; as many as heads make it multi-head latent attention
    latent          L, what is cached of a token, beside its rotary key
    key, value      K and V, channels of the content of keys, and of values
    rotary          R, channels of the rotary key, even
    base            of the angles that a token turns by
    path            "absorbed" or "grouped": what `forward` does unless it is told

    Raises ValueError for a value outside these.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        groups: int,
        latent: int,
        key: int,
        rotary: int,
        value: int,
        base: float = 10000.0,
        path: str = "absorbed",
    ) -> None:
        super().__init__()
        sizes = {"d_model": d_model, "heads": heads, "groups": groups, "latent": latent, "key": key, "value": value}
        for name, size in (sizes | {"rotary": rotary}).items():
            if size < 1:
                raise ValueError(f"{name} is {size}; it must be at least 1")
        if heads % groups:
            raise ValueError(f"groups is {groups}; it must divide the {heads} heads")
        if rotary % 2:
            raise ValueError(f"rotary is {rotary}; channels are turned in pairs")
        self.heads, self.groups, self.latent, self.rotary, self.base = heads, groups, latent, rotary, base
        self.path = _path(path)
        self.W_Q = nn.Linear(d_model, heads * (key + rotary), bias=False)
        self.W_DKV = nn.Linear(d_model, latent + rotary, bias=False)
        self.Uk, self.Uv = (nn.Parameter(torch.empty(groups, width, latent)) for width in (key, value))
        self.W_O = nn.Linear(heads * value, d_model, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start again, with weights as those of nn.Linear."""
        for W in (self.W_Q, self.W_DKV, self.W_O):
            W.reset_parameters()
        for U in (self.Uk, self.Uv):
            nn.init.uniform_(U, -1 / math.sqrt(self.latent), 1 / math.sqrt(self.latent))

    def forward(self, x: Tensor, cache: Cache | None = None, path: str | None = None) -> tuple[Tensor, Cache]:
        """Tokens (B, T, d_model), after those of the cache.  -> (B, T, d_model) and the cache after them.

        Either path continues from the cache of the other: it holds latents."""
        queries = self.W_Q(x).unflatten(-1, (self.groups, self.heads // self.groups, -1))
        qc, qr = queries.split([queries.shape[-1] - self.rotary, self.rotary], dim=-1)
        c, kr = self.W_DKV(x).split([self.latent, self.rotary], dim=-1)
        C0, Kr0 = cache or (None, None)
        attention = PATHS[self.path if path is None else _path(path)]
        O, C, Kr = attention(qc, qr, c, kr, self.Uk, self.Uv, None, self.base, C0, Kr0)
        return self.W_O(O.flatten(2)), Cache(C, Kr)

    def step(self, x: Tensor, cache: Cache | None = None, path: str | None = None) -> tuple[Tensor, Cache]:
        """One more token (B, d_model): its output, and the cache after it."""
        y, cache = self.forward(x[:, None], cache, path)
        return y[:, 0], cache

    def extra_repr(self) -> str:
        return (
            f"{self.W_Q.in_features}, heads={self.heads}, groups={self.groups}, latent={self.latent}, "
            f"key={self.Uk.shape[1]}, rotary={self.rotary}, value={self.Uv.shape[1]}, base={self.base}, "
            f"path={self.path!r}"
        )


def _path(path: str) -> str:
    if path not in PATHS:
        raise ValueError(f"path is {path!r}; it must be one of {', '.join(PATHS)}")
    return path


def _run(
    path: latent.Path, qc: Tensor, qr: Tensor, c: Tensor, kr: Tensor, Uk: Tensor, Uv: Tensor, scale: float | None,
    base: float, C0: Tensor | None, Kr0: Tensor | None, *options: Any,
) -> Results:  # fmt: skip
    latent.checked(_AXES, (qc, qr, c, kr, Uk, Uv, C0, Kr0), scale, base)
    queries, latents = (qc[:, :, None], qr[:, :, None]), c[:, :, None]
    C0 = C0 if C0 is None else C0[:, :, None]
    O, C, Kr = latent.attend(path, *queries, latents, kr, Uk[None], Uv[None], scale, base, C0, Kr0, *options)
    return O[:, :, 0], C[:, :, 0], Kr
