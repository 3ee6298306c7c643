"""The linear transformer's attention in PyTorch: chunkwise, and by sums of all prefixes at once.

Source: survey, Linear Transformer; Katharopoulos et al. 2020 (7) to (12), as in the reference.

    letter  paper    shape               meaning
    q k v   Q K V    (B, T, H, K or V)   queries and keys as projected; values
    S z     S Z      (B, H, K, V or -)   sums of phi(k)^T v and of phi(k); S0 and z0 come before the first token
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from mixproof.verify import implements
from mixproof.verify.subjects.torch import _arguments as arguments
from mixproof.verify.subjects.torch import _linear as linear

_AXES = {"q": "BTHK", "k": "BTHK", "v": "BTHV", "S0": "BHKV", "z0": "BHK"}
_declared = functools.partial(
    implements,
    dtypes=("float64", "float32", "bfloat16"),
    dot="float32",  # half-precision operands are widened before any product
    devices=("cpu", "cuda"),
    chunk=16,
)


@_declared("linear_transformer", name="torch.chunkwise")
def chunkwise(
    q: Tensor, k: Tensor, v: Tensor, eps: float = 0.0,
    S0: Tensor | None = None, z0: Tensor | None = None, chunk: int = 16,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """o_i = phi(q_i) S_i / (phi(q_i) . z_i + eps): matrix products inside chunks, S and z across them.  (9)

    (B, T, H, K), (B, T, H, K), (B, T, H, V) -> O (B, T, H, V), S (B, H, K, V), z (B, H, K)"""
    arguments.not_negative(eps=eps)
    dtype = q.dtype
    q, k, v, S0, z0 = linear.arranged(_AXES, q, k, v, S0, z0)
    wide = arguments.widest(q, k, v, S0, z0)
    with arguments.no_autocast(q):
        none = k.new_ones(k.shape[1], dtype=wide)  # a decay of one
        O, S, z = linear.normalised(phi(q.to(wide)), phi(k.to(wide)), v, none, S0, z0, eps, chunk)
    return O.to(dtype).transpose(1, 2), S, z


@_declared("linear_transformer", name="torch.prefix_sums")
def prefix_sums(
    q: Tensor, k: Tensor, v: Tensor, eps: float = 0.0, S0: Tensor | None = None, z0: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The same from every S_i and z_i, which it holds: B H T K V numbers.  (10) to (12)"""
    arguments.not_negative(eps=eps)
    q, k, v, S0, z0 = linear.arranged(_AXES, q, k, v, S0, z0)
    wide = arguments.widest(q, k, v, S0, z0)
    with arguments.no_autocast(q):
        Q, K, M = phi(q.to(wide)), phi(k.to(wide)), linear.memory(k, v, S0, z0, wide)
        U, M = summed(Q, K, linear.with_mass(v.to(wide)), M)
        O = U[..., :-1] / (U[..., -1:] + eps)
    return O.to(q.dtype).transpose(1, 2), M[..., :-1], M[..., -1]


def phi(x: Tensor) -> Tensor:
    """elu(x) + 1 as x + 1 or exp(x): elu(x) rounds to -1, and the features of x < -17 to zero.  (7)"""
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def summed(Q: Tensor, K: Tensor, V: Tensor, M: Tensor) -> tuple[Tensor, Tensor]:
    """Q_t (M + sum_{s<=t} K_s^T V_s) and the last sum, from all sums at once.

    (B, H, T, K), (B, H, T, K), (B, H, T, V), (B, H, K, V) -> (B, H, T, V), (B, H, K, V)"""
    sums = torch.cat([M[:, :, None], K[..., None] * V[..., None, :]], dim=2).cumsum(2)
    return (Q[..., None, :] @ sums[:, :, 1:]).squeeze(-2), sums[:, :, -1].clone()
