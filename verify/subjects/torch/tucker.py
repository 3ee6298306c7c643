"""Tucker attention in PyTorch: cores and factors multiplied out, cores absorbed block by block, and a layer.

Source: survey, section "Tucker Attention"; Klein et al. 2026. What is cached are two latents a token, of all heads.

    letter    paper      shape                        meaning
    x Y                  (B, T, E)                    tokens before and after
    Fq Fk Fv  W_factor   (Q, E) (L, E) (X, E)         one for all heads
    Gq Gk Gv  W_core     (N, K, Q) (N, K, L) (N, V, X)         of each of N heads
    W_O                  (N, V, E)                    output projection of each head
    K0 Kc                (B, P or P + T, L)           latents of keys before and after the call; V0 and Vc (.., X)
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

_AXES = {
    "x": "BTE", "Fq": "QE", "Gq": "NKQ", "Fk": "LE", "Gk": "NKL", "Fv": "XE", "Gv": "NVX", "W_O": "NVE",
    "K0": "BPL", "V0": "BPX",
}  # fmt: skip
_declared = functools.partial(
    implements,
    layout="B T D",
    dtypes=("float64", "float32", "bfloat16"),
    dot="float32",  # half-precision operands are widened before any product
    devices=("cpu", "cuda"),
    at_least={"T": 0},
)


@_declared("tucker", name="torch.expanded")
def expanded(
    x: Tensor, Fq: Tensor, Gq: Tensor, Fk: Tensor, Gk: Tensor, Fv: Tensor, Gv: Tensor, W_O: Tensor,
    scale: float | None = None, causal: bool = True, K0: Tensor | None = None, V0: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Multi-head attention with W = core factor; what was cached is expanded by its core.  -> Y (B, T, E), Kc, Vc"""
    return _run(_expanded, x, Fq, Gq, Fk, Gk, Fv, Gv, W_O, scale, causal, K0, V0)


@_declared("tucker", name="torch.absorbed", chunk=16)
def absorbed(
    x: Tensor, Fq: Tensor, Gq: Tensor, Fk: Tensor, Gk: Tensor, Fv: Tensor, Gv: Tensor, W_O: Tensor,
    scale: float | None = None, causal: bool = True, K0: Tensor | None = None, V0: Tensor | None = None,
    chunk: int = 64,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries through Gq^T Gk meet the latents themselves, which all heads read block by block."""
    return _run(functools.partial(_absorbed, chunk=chunk), x, Fq, Gq, Fk, Gk, Fv, Gv, W_O, scale, causal, K0, V0)


class Latents(NamedTuple):
    """What stands for the keys (B, P, L) and the values (B, P, X) of the tokens so far."""

    K: Tensor
    V: Tensor


class TuckerAttention(nn.Module):
    """`absorbed` with parameters of its own.

    d_model     E, channels of the tokens
    width       K = V, channels of a head
    ranks       Q, L and X, of queries, keys and values
    causal      whether tokens see themselves and those before only
    chunk       rows and latents a block

    Raises ValueError for a size below one.
    """

    def __init__(
        self, d_model: int, heads: int, width: int, ranks: tuple[int, int, int], causal: bool = True, chunk: int = 64
    ) -> None:
        super().__init__()
        Q, L, X = ranks
        sizes = {"d_model": d_model, "heads": heads, "width": width, "chunk": chunk}
        for name, value in (sizes | {f"ranks[{i}]": r for i, r in enumerate(ranks)}).items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        self.causal, self.chunk = causal, chunk
        self.Fq, self.Fk, self.Fv = (nn.Parameter(torch.empty(r, d_model)) for r in (Q, L, X))
        self.Gq, self.Gk, self.Gv = (nn.Parameter(torch.empty(heads, width, r)) for r in (Q, L, X))
        self.W_O = nn.Parameter(torch.empty(heads, width, d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start again: weights as those of nn.Linear."""
        for W in (self.Fq, self.Fk, self.Fv, self.Gq, self.Gk, self.Gv):
            nn.init.uniform_(W, -1 / math.sqrt(W.shape[-1]), 1 / math.sqrt(W.shape[-1]))
        inputs = self.W_O.shape[0] * self.W_O.shape[1]
        nn.init.uniform_(self.W_O, -1 / math.sqrt(inputs), 1 / math.sqrt(inputs))

    def forward(self, x: Tensor, cache: Latents | None = None) -> tuple[Tensor, Latents]:
        """(B, T, E) -> (B, T, E) and the latents of all tokens so far; one token at a time decodes."""
        K0, V0 = cache or (None, None)
        parameters = dict(self.named_parameters())
        Y, K, V = absorbed(x, **parameters, causal=self.causal, K0=K0, V0=V0, chunk=self.chunk)
        return Y, Latents(K, V)

    def extra_repr(self) -> str:
        N, width, d_model = self.W_O.shape
        ranks = tuple(len(F) for F in (self.Fq, self.Fk, self.Fv))
        return f"{d_model}, heads={N}, width={width}, ranks={ranks}, causal={self.causal}, chunk={self.chunk}"


def _expanded(x, Fq, Gq, Fk, Gk, Fv, Gv, W_O, Kc, Vc, scale, before):
    P = Kc.shape[1] - x.shape[1]
    k, v = (
        torch.cat([C[:, None, :P] @ G.mT, x[:, None] @ (G @ F).mT], dim=2) for C, G, F in ((Kc, Gk, Fk), (Vc, Gv, Fv))
    )
    return rows(x[:, None] @ (Gq @ Fq).mT, k, v, scale, before).transpose(1, 2).flatten(2) @ W_O.flatten(0, 1)


def _absorbed(x, Fq, Gq, Fk, Gk, Fv, Gv, W_O, Kc, Vc, scale, before, chunk):
    q = (x @ Fq.mT)[:, None] @ (Gq.mT @ Gk)
    z = online_rows(q, Kc[:, None], Vc[:, None], scale, before, chunk=chunk)
    return (z @ (Gv.mT @ W_O)).sum(1)


def _run(form, x, Fq, Gq, Fk, Gk, Fv, Gv, W_O, scale, causal, K0, V0):
    tensors = dict(zip(_AXES, (x, Fq, Gq, Fk, Gk, Fv, Gv, W_O, K0, V0), strict=True))
    sizes = arguments.checked(_AXES, tensors, ("K0", "V0"))
    paired(K0=K0, V0=V0)
    scale, wide = width_scale(scale, sizes["K"]), arguments.widest(*tensors.values())
    with arguments.no_autocast(x):
        weights = [t.to(wide) for t in (x, Fq, Gq, Fk, Gk, Fv, Gv, W_O)]
        Kc, Vc = joined(K0, weights[0] @ weights[3].mT, wide), joined(V0, weights[0] @ weights[5].mT, wide)
        Y = form(*weights, Kc, Vc, scale, Kc.shape[1] - x.shape[1] if causal else Kc.shape[1])
    return Y.to(x.dtype), Kc, Vc
