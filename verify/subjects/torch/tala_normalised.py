"""TALA in PyTorch with the normaliser of the paper's (12), in the three readings that its products allow.

Source: MixFormer paper (12) with one decay a = omega G for all sources, as in the reference. A mass is a value that is
one for every token, so the normaliser is one more column of the state.

    letter  paper    shape               meaning
    q k v   phi(Q)   (B, T, H, K or V)   positive features of queries and keys; values; all (B, T, H, D) for n1
    a       omega G  (H,)                decay
    S z     -        (B, H, K, V or -)   values and mass; S0 and z0 before the first token; n1: x and z (B, H, D)
"""

from __future__ import annotations

import torch
from torch import Tensor

from mixproof.verify import implements
from mixproof.verify.subjects.torch import _arguments as arguments
from mixproof.verify.subjects.torch import _linear as linear

_AXES = {"q": "BTHK", "k": "BTHK", "v": "BTHV", "a": "H", "S0": "BHKV", "z0": "BHK"}
_ELEMENTS = {"q": "BTHD", "k": "BTHD", "v": "BTHD", "a": "H", "x0": "BHD", "z0": "BHD"}


@implements("tala.n1", name="torch.scan", devices=("cpu", "cuda"))
def n1(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, x0: Tensor | None = None, z0: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """o_t = q_t * x_t / z_t with x_t = a x_{t-1} + k_t * v_t and z_t = a z_{t-1} + k_t, element by element."""
    q, k, v, a, x0, z0 = linear.arranged(_ELEMENTS, q, k, v, a, x0, z0)
    wide = arguments.widest(q, k, v, a, x0, z0)
    with arguments.no_autocast(q):
        Q, K, V = (x.to(wide) for x in (q, k, v))
        zero = K.new_zeros((K.shape[0], K.shape[1], K.shape[3]))
        first = torch.stack([zero if s is None else s.to(wide) for s in (x0, z0)], dim=-1)
        A = linear.spread(a.to(wide)[:, None, None], K.shape[2])
        x, z = linear.scan(A, torch.stack([K * V, K], dim=-1), first).unbind(-1)
        O = (Q * x[:, :, 1:] / z[:, :, 1:]).to(q.dtype)
    return O.transpose(1, 2), x[:, :, -1].clone(), z[:, :, -1].clone()


@implements("tala.n2", name="torch.chunkwise", devices=("cpu", "cuda"), chunk=64)
def n2(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, eps: float = 0.0,
    S0: Tensor | None = None, z0: Tensor | None = None, chunk: int = 64,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """o_t = q_t S_t / (q_t . z_t + eps) with S_t = a S_{t-1} + k_t^T v_t and z_t = a z_{t-1} + k_t."""
    arguments.not_negative(eps=eps)
    q, k, v, a, S0, z0 = linear.arranged(_AXES, q, k, v, a, S0, z0)
    wide = arguments.widest(q, k, v, a, S0, z0)
    with arguments.no_autocast(q):
        O, S, z = linear.normalised(q, k, v, a.to(wide), S0, z0, eps, chunk)
    return O.transpose(1, 2), S, z


@implements("tala.n3", name="torch.scan", devices=("cpu", "cuda"))
def n3(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, S0: Tensor | None = None, z0: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """o_t = (q_t / z_t) S_t, the states as in `n2`: every key channel averages the values by itself."""
    q, k, v, a, S0, z0 = linear.arranged(_AXES, q, k, v, a, S0, z0)
    wide = arguments.widest(q, k, v, a, S0, z0)
    with arguments.no_autocast(q):
        Q, K, V1 = (x.to(wide) for x in (q, k, linear.with_mass(v)))
        A = linear.spread(a.to(wide)[:, None, None], K.shape[2])
        M = linear.scan(A, K[..., None] * V1[..., None, :], linear.memory(k, v, S0, z0, wide))
        S, z = M[..., :-1], M[..., -1]
        O = ((Q / z[:, :, 1:])[..., None, :] @ S[:, :, 1:]).squeeze(-2).to(q.dtype)
    return O.transpose(1, 2), S[:, :, -1].clone(), z[:, :, -1].clone()
