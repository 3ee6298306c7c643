"""The Performer's attention in PyTorch: chunkwise, by sums of all prefixes at once, and as a layer with its directions.

Source: survey, Performer FAVOR+; Choromanski et al. 2021, lemma 1, causal, as in the reference: the largest logit of a
query drops out and is taken out, nothing is taken out of keys.

    letter  paper    shape               meaning
    q k v   Q K V    (B, T, H, K or V)   queries and keys as projected; values
    omega   omega    (H, F, K)           random directions of each head
    s       -        (B, H, T, F)        logits omega x - |x|^2 / 2 of x / K^(1/4); features are F^-1/2 exp(s)
    S z     -        (B, H, F, V or -)   sums of phi(k)^T v and of phi(k); S0 and z0 come before the first token
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mixproof.verify import implements
from mixproof.verify.subjects.torch import _arguments as arguments
from mixproof.verify.subjects.torch import _linear as linear
from mixproof.verify.subjects.torch.linear_transformer import summed

_AXES = {"q": "BTHK", "k": "BTHK", "v": "BTHV", "omega": "HFK", "S0": "BHFV", "z0": "BHF"}
_declared = functools.partial(
    implements,
    dtypes=("float64", "float32", "bfloat16"),
    dot="float32",  # half-precision operands are widened before any product
    devices=("cpu", "cuda"),
    chunk=16,
)


@_declared("performer", name="torch.chunkwise")
def chunkwise(
    q: Tensor, k: Tensor, v: Tensor, omega: Tensor, eps: float = 0.0,
    S0: Tensor | None = None, z0: Tensor | None = None, chunk: int = 16,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """o_i = phi(q_i) S_i / (phi(q_i) . z_i + eps): matrix products inside chunks, S and z across them.

    (B, T, H, K), (B, T, H, K), (B, T, H, V), (H, F, K) -> O (B, T, H, V), S (B, H, F, V), z (B, H, F)"""
    arguments.not_negative(eps=eps)
    dtype = q.dtype
    q, k, v, omega, S0, z0 = linear.arranged(_AXES, q, k, v, omega, S0, z0)
    wide = arguments.widest(q, k, v, omega, S0, z0)
    with arguments.no_autocast(q):
        s, none = logits(q.to(wide), omega.to(wide)), omega.new_ones(len(omega), dtype=wide)  # a decay of one
        # the features of a query over their sum; eps is over the same sum
        least = eps * omega.shape[1] ** 0.5 * (-s.logsumexp(-1, keepdim=True)).exp() if eps else 0.0
        K = features(k.to(wide), omega.to(wide))
        O, S, z = linear.normalised(s.softmax(-1), K, v, none, S0, z0, least, chunk)
    return O.to(dtype).transpose(1, 2), S, z


@_declared("performer", name="torch.prefix_sums")
def prefix_sums(
    q: Tensor, k: Tensor, v: Tensor, omega: Tensor, eps: float = 0.0,
    S0: Tensor | None = None, z0: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The same from every S_i and z_i, which it holds: B H T F V numbers. Queries have their largest feature one."""
    arguments.not_negative(eps=eps)
    q, k, v, omega, S0, z0 = linear.arranged(_AXES, q, k, v, omega, S0, z0)
    wide = arguments.widest(q, k, v, omega, S0, z0)
    with arguments.no_autocast(q):
        s = logits(q.to(wide), omega.to(wide))
        top = s.detach().amax(-1, keepdim=True)
        K = features(k.to(wide), omega.to(wide))
        U, M = summed((s - top).exp(), K, linear.with_mass(v.to(wide)), linear.memory(K, v, S0, z0, wide))
        D = U[..., -1:] + (eps * omega.shape[1] ** 0.5 * (-top).exp() if eps else 0.0)
    return (U[..., :-1] / D).to(q.dtype).transpose(1, 2), M[..., :-1], M[..., -1]


def features(x: Tensor, omega: Tensor) -> Tensor:
    """F^-1/2 exp(omega x' - |x'|^2 / 2) of x' = x / K^(1/4).  (B, H, T, K), (H, F, K) -> (B, H, T, F)"""
    return omega.shape[1] ** -0.5 * logits(x, omega).exp()


def logits(x: Tensor, omega: Tensor) -> Tensor:
    """omega x' - |x'|^2 / 2 of x' = x / K^(1/4).  (B, H, T, K), (H, F, K) -> (B, H, T, F)"""
    x = x * x.shape[-1] ** -0.25
    return x @ omega.mT - (x * x).sum(-1, keepdim=True) / 2


def directions(heads: int, features: int, channels: int, generator: torch.Generator | None = None) -> Tensor:
    """Rows N(0, I) in blocks of K orthogonal ones, as in the reference.  -> (H, F, K)"""
    blocks = []
    for rows in range(features, 0, -channels):
        Q, R = torch.linalg.qr(torch.randn(heads, channels, channels, generator=generator))
        sign = torch.where(R.diagonal(dim1=1, dim2=2) < 0, -1.0, 1.0)  # without it Q is not uniform
        blocks.append((Q * sign[:, None]).mT[:, :rows])
    lengths = torch.randn(heads, features, channels, generator=generator).norm(dim=2, keepdim=True)
    return torch.cat(blocks, dim=1) * lengths


class State(NamedTuple):
    """What a layer remembers of the tokens so far: S (B, H, F, V) and z (B, H, F)."""

    S: Tensor
    z: Tensor


class Performer(nn.Module):
    """`chunkwise` with random directions of its own, which are drawn and not learned.

    heads, channels   H, K: heads, and channels of a query or a key
    features          F, random features a head
    eps               added to the normaliser
    chunk             tokens a chunk

    Raises ValueError for a value outside these.
    """

    omega: Tensor

    def __init__(self, heads: int, channels: int, features: int, eps: float = 0.0, chunk: int = 16) -> None:
        super().__init__()
        sizes = {"heads": heads, "channels": channels, "features": features, "chunk": chunk}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        arguments.not_negative(eps=eps)
        self.eps, self.chunk = eps, chunk
        self.register_buffer("omega", torch.empty(heads, features, channels))
        self.redraw()

    def redraw(self, generator: torch.Generator | None = None) -> None:
        """New directions; what a state remembers was computed with the old ones."""
        H, F, K = self.omega.shape
        self.omega.copy_(directions(H, F, K, generator))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Tokens, one or many, after those that `state` remembers: O (B, T, H, V) and the state after them."""
        O, S, z = chunkwise(q, k, v, self.omega, self.eps, *(state or (None, None)), chunk=self.chunk)
        return O, State(S, z)

    def extra_repr(self) -> str:
        H, F, K = self.omega.shape
        return f"{H}, channels={K}, features={F}, eps={self.eps}, chunk={self.chunk}"
