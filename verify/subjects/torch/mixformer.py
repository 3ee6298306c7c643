"""A MixFormer block in PyTorch: TALA with the feature map of (11), and a feed-forward network, each after a group norm.

Source: MixFormer paper (10), (11), (13) to (16), (19), (20), corrected as in the reference: the feature map per token
and head, group norms per token, heads h = 1, 2, ... with omega = 1 - e^-h.

    letter       paper        shape        meaning
    X Y          X^l X^(l+1)  (B, T, D)    tokens before and after the block
    W_Q .. W_O   W_Q ..       (D, D)       projections; the paper only counts W_O, in (21)
    W_1 W_2      W_1 W_2      (D, F), ..   feed-forward network; W_2 (F, D)
    gain, bias   -            (D,)         affine part of the norms before TALA, 1, and before the network, 2
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from mixproof.verify import implements
from mixproof.verify.subjects.torch import _arguments as arguments
from mixproof.verify.subjects.torch import _linear as linear
from mixproof.verify.subjects.torch.feature_maps import unit
from mixproof.verify.subjects.torch.tala import omega

_AXES = {
    "X": "BTD", "gain1": "D", "bias1": "D", "W_Q": "DD", "W_K": "DD", "W_V": "DD", "W_O": "DD",
    "gain2": "D", "bias2": "D", "W_1": "DF", "W_2": "FD",
}  # fmt: skip


@implements(
    "mixformer",
    name="torch.chunkwise",
    layout="B T D",
    dtypes=("float64", "float32"),
    devices=("cpu", "cuda"),
    chunk=64,
)
def block(
    X: Tensor,
    gain1: Tensor,
    bias1: Tensor,
    W_Q: Tensor,
    W_K: Tensor,
    W_V: Tensor,
    W_O: Tensor,
    gain2: Tensor,
    bias2: Tensor,
    W_1: Tensor,
    W_2: Tensor,
    heads: int = 2,
    eps: float = 1e-5,
    norm_eps: float = 1e-12,
    chunk: int = 64,
) -> Tensor:
    """Y = TALA(GN(X)) + X, then FFN(GN(Y)) + Y with FFN = max(0, . W_1) W_2.  (B, T, D) -> (B, T, D).  (19) (20)"""
    tensors = (X, gain1, bias1, W_Q, W_K, W_V, W_O, gain2, bias2, W_1, W_2)
    linear.arranged(_AXES, *tensors)
    arguments.not_negative(eps=eps, norm_eps=norm_eps)
    _divides(heads, X.shape[2])
    wide = arguments.widest(*tensors)
    with arguments.no_autocast(X):
        x, gain1, bias1, W_Q, W_K, W_V, W_O, gain2, bias2, W_1, W_2 = (t.to(wide) for t in tensors)
        U = linear.group_norm(x, eps) * gain1 + bias1
        q, k, v = ((U @ W).unflatten(2, (heads, -1)).transpose(1, 2) for W in (W_Q, W_K, W_V))  # (10)
        q, k = unit(q, norm_eps).exp(), unit(k, norm_eps).exp()  # (11)
        a = omega(torch.arange(1, heads + 1, dtype=wide, device=X.device))  # (13)
        O, _ = linear.chunkwise(
            q, k, v, linear.constant(a, q.shape[2], chunk), linear.state(None, k, v, wide), chunk=chunk
        )
        y = linear.group_norm(O, eps).transpose(1, 2).flatten(2) @ W_O + x  # (19)
        return (((linear.group_norm(y, eps) * gain2 + bias2) @ W_1).relu() @ W_2 + y).to(X.dtype)  # (20)


class MixFormerBlock(nn.Module):
    """`block` with parameters of its own; norms start as the identity, weights as those of nn.Linear.

    d_model        D, channels of the tokens; a multiple of `heads`
    hidden         F, width of the feed-forward network; 4 d_model if not given
    eps, norm_eps  added to variances; least norm in the feature map
    chunk          tokens a chunk

    Raises ValueError for a value outside these.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        hidden: int | None = None,
        eps: float = 1e-5,
        norm_eps: float = 1e-12,
        chunk: int = 64,
    ) -> None:
        super().__init__()
        hidden = 4 * d_model if hidden is None else hidden
        for name, value in {"d_model": d_model, "heads": heads, "hidden": hidden, "chunk": chunk}.items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        arguments.not_negative(eps=eps, norm_eps=norm_eps)
        _divides(heads, d_model)
        self.heads, self.eps, self.norm_eps, self.chunk = heads, eps, norm_eps, chunk
        self.gain1, self.bias1, self.gain2, self.bias2 = (nn.Parameter(torch.empty(d_model)) for _ in range(4))
        self.W_Q, self.W_K, self.W_V, self.W_O = (nn.Parameter(torch.empty(d_model, d_model)) for _ in range(4))
        self.W_1 = nn.Parameter(torch.empty(d_model, hidden))
        self.W_2 = nn.Parameter(torch.empty(hidden, d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start again: norms without effect, random weights."""
        for gain, bias in ((self.gain1, self.bias1), (self.gain2, self.bias2)):
            nn.init.ones_(gain)
            nn.init.zeros_(bias)
        for W in (self.W_Q, self.W_K, self.W_V, self.W_O, self.W_1, self.W_2):
            nn.init.uniform_(W, -1 / math.sqrt(len(W)), 1 / math.sqrt(len(W)))

    def forward(self, X: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)"""
        options = {"heads": self.heads, "eps": self.eps, "norm_eps": self.norm_eps, "chunk": self.chunk}
        return block(X, **dict(self.named_parameters()), **options)

    def extra_repr(self) -> str:
        D, F = self.W_1.shape
        return f"{D}, heads={self.heads}, hidden={F}, eps={self.eps}, norm_eps={self.norm_eps}, chunk={self.chunk}"


def _divides(heads: int, d_model: int) -> None:
    if heads < 1 or d_model % heads:
        raise ValueError(f"heads is {heads}; it must divide the {d_model} channels")
