"""Local softmax with Gaussian mixture attention before the window, or mixed with it by a gate, in PyTorch.

Source: GMA paper, section 6, as read in the reference: under one normaliser the window has a mass of one and what is
before it lam times its affinity; or O = g O_local + (1 - g) O_GMA with g = sigmoid(u).

    letter           shape               meaning
    q k v            (B, T, H, R or V)   routing vectors; values
    mu omega alpha   (H, K, R)           mixture of GMA; alpha (H, K)
    lam              (H,)                weight of an affinity beside the mass of the window
    u                (B, T, H)           gate before its sigmoid
    GQ GK            (B, H, T, K)        responsibilities
    M                (B, H, K, V + 1)    memory of the tokens that the window has passed, and their mass
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mixproof.verify import implements
from mixproof.verify.subjects.torch import _arguments as arguments
from mixproof.verify.subjects.torch import _linear as linear
from mixproof.verify.subjects.torch import gma

_AXES = {
    "q": "BTHR", "k": "BTHR", "v": "BTHV", "u": "BTH", "mu": "HKR", "omega": "HKR", "alpha": "HK", "lam": "H",
}  # fmt: skip
_declared = functools.partial(
    implements,
    dtypes=("float64", "float32", "bfloat16"),
    dot="float32",  # half-precision operands are widened before any product
    devices=("cpu", "cuda"),
)


@_declared("gma.hybrid", name="torch.chunkwise", chunk=16)
def chunkwise(
    q: Tensor, k: Tensor, v: Tensor, mu: Tensor, omega: Tensor, alpha: Tensor, lam: Tensor, scale: float | None = None,
    eps: float = 1e-6, v_min: float = 0.0, window: int = 4, chunk: int = 16,
) -> Tensor:  # fmt: skip
    """O = (P v + lam At v) / (1 + lam At 1 + eps): softmax P in the window, affinities At before it.

    (B, T, H, R), (B, T, H, R), (B, T, H, V), mixture, (H,) -> (B, T, H, V)"""
    return continued(None, q, k, v, mu, omega, alpha, lam, scale, eps, v_min, window, chunk)[0]


@_declared("gma.hybrid", name="torch.eager", cost="quadratic")
def eager(
    q: Tensor, k: Tensor, v: Tensor, mu: Tensor, omega: Tensor, alpha: Tensor, lam: Tensor, scale: float | None = None,
    eps: float = 1e-6, v_min: float = 0.0, window: int = 4,
) -> Tensor:  # fmt: skip
    """The same with both matrices of weights written out, and the mass of the window taken for one."""
    wide = _check(scale, eps, v_min, window, q=q, k=k, v=v, mu=mu, omega=omega, alpha=alpha, lam=lam)
    with arguments.no_autocast(q):
        Q, K, V = (x.transpose(1, 2).to(wide) for x in (q, k, v))
        GQ, GK = _route(Q, K, mu, omega, alpha, v_min)
        near, far = _bands(q.shape[1], window, q.device)
        At = lam.to(wide)[:, None, None] * (GQ @ GK.mT).masked_fill(~far, 0)
        D = At.sum(-1, keepdim=True) + (eps + (1 if window else 0))
        O = (_weights(Q, K, near, scale) @ V + At @ V) / D
    return O.to(q.dtype).transpose(1, 2)


@_declared("gma.hybrid_gated", name="torch.chunkwise", chunk=16)
def gated_chunkwise(
    q: Tensor, k: Tensor, v: Tensor, u: Tensor, mu: Tensor, omega: Tensor, alpha: Tensor, scale: float | None = None,
    eps: float = 1e-6, v_min: float = 0.0, window: int = 4, chunk: int = 16,
) -> Tensor:  # fmt: skip
    """O = g P v + (1 - g) GMA(q, k, v): softmax P in the window, GMA of all tokens up to one's own, g = sigmoid(u).

    (B, T, H, R), (B, T, H, R), (B, T, H, V), (B, T, H), mixture -> (B, T, H, V)"""
    wide = _check(scale, eps, v_min, window, q=q, k=k, v=v, u=u, mu=mu, omega=omega, alpha=alpha)
    with arguments.no_autocast(q):
        q_, k_, v_, g = q.to(wide), k.to(wide), v.to(wide), u.to(wide).sigmoid()[..., None]
        Q, K, V = (x.transpose(1, 2) for x in (q_, k_, v_))
        rows = []
        for c in arguments.slices(q.shape[1], chunk):
            first = max(0, min(c.start - window + 1, c.stop))
            near, _ = _bands(c.stop, window, q.device, c.start, first)
            rows.append(_weights(Q[:, :, c], K[:, :, first : c.stop], near, scale) @ V[:, :, first : c.stop])
        far = gma.chunkwise_causal(q_, k_, v_, mu, omega, alpha, eps, v_min, chunk=chunk)[0]
        return (g * torch.cat(rows, dim=2).transpose(1, 2) + (1 - g) * far).to(q.dtype)


@_declared("gma.hybrid_gated", name="torch.eager", cost="quadratic")
def gated_eager(
    q: Tensor, k: Tensor, v: Tensor, u: Tensor, mu: Tensor, omega: Tensor, alpha: Tensor, scale: float | None = None,
    eps: float = 1e-6, v_min: float = 0.0, window: int = 4,
) -> Tensor:  # fmt: skip
    """The same as O = A v with A = g P + (1 - g) At / (At 1 + eps) written out."""
    wide = _check(scale, eps, v_min, window, q=q, k=k, v=v, u=u, mu=mu, omega=omega, alpha=alpha)
    with arguments.no_autocast(q):
        Q, K, V = (x.transpose(1, 2).to(wide) for x in (q, k, v))
        GQ, GK = _route(Q, K, mu, omega, alpha, v_min)
        gate = u.transpose(1, 2).to(wide)[..., None]
        At = (GQ @ GK.mT).tril()
        far = (-gate).sigmoid() * (At / (At.sum(-1, keepdim=True) + eps))
        A = gate.sigmoid() * _weights(Q, K, _bands(q.shape[1], window, q.device)[0], scale) + far
        return (A @ V).to(q.dtype).transpose(1, 2)


# --------------------------------------------------------------------------------------------------------------- layer
class State(NamedTuple):
    """What the hybrid of one normaliser remembers: the last tokens of the window, k (B, P, H, R) and v (B, P, H, V)
    with P < window, and the memory M (B, H, K, V + 1) of those before."""

    k: Tensor
    v: Tensor
    M: Tensor


def continued(
    state: State | None,
    q: Tensor, k: Tensor, v: Tensor, mu: Tensor, omega: Tensor, alpha: Tensor, lam: Tensor, scale: float | None = None,
    eps: float = 1e-6, v_min: float = 0.0, window: int = 4, chunk: int = 16,
) -> tuple[Tensor, State]:  # fmt: skip
    """`chunkwise` of tokens that come after those which `state` remembers, and the state after them."""
    wide = _check(scale, eps, v_min, window, q=q, k=k, v=v, mu=mu, omega=omega, alpha=alpha, lam=lam)
    if state is not None:
        k, v = torch.cat([state.k, k], dim=1), torch.cat([state.v, v], dim=1)
    T, P = q.shape[1], k.shape[1] - q.shape[1]
    with arguments.no_autocast(q):
        Q, K, V = (x.transpose(1, 2).to(wide) for x in (q, k, v))
        V1 = linear.with_mass(V)
        GQ, GK = _route(Q, K, mu, omega, alpha, v_min)
        M = GK[:, :, :0].mT @ V1[:, :, :0] if state is None else state.M
        rows, seen, weight = [], 0, lam.to(wide)[:, None, None]
        for c in arguments.slices(T, chunk):
            first = max(0, min(P + c.start - window + 1, P + c.stop))
            M = M + GK[:, :, seen:first].mT @ V1[:, :, seen:first]
            keys, seen = slice(first, P + c.stop), first
            near, far = _bands(P + c.stop, window, q.device, P + c.start, first)
            At = (GQ[:, :, c] @ GK[:, :, keys].mT).masked_fill(~far, 0)
            local = _weights(Q[:, :, c], K[:, :, keys], near, scale) @ V1[:, :, keys]
            U = local + weight * (GQ[:, :, c] @ M + At @ V1[:, :, keys])
            rows.append((U[..., :-1] / (U[..., -1:] + eps)).to(q.dtype))
        kept = max(seen, P + T - max(window - 1, 0))
        M = M + GK[:, :, seen:kept].mT @ V1[:, :, seen:kept]
    return torch.cat(rows, dim=2).transpose(1, 2), State(k[:, kept:], v[:, kept:], M)


class GMAHybrid(nn.Module):
    """`chunkwise` with a mixture and a weight of its own, of heads that are given their queries, keys and values.

    heads, components, channels   H, K, R: mixtures, and the size of each
    window                        tokens that are read by softmax; 0: none
    eps, v_min                    added to the normaliser; added to the variances
    chunk                         tokens a chunk

    Means start standard normal, variances one, the prior uniform, and the weight, stored as a logarithm, one. Raises
    ValueError for a value outside these.
    """

    def __init__(
        self, heads: int, components: int, channels: int, window: int = 4, eps: float = 1e-6, v_min: float = 0.0,
        chunk: int = 16,
    ) -> None:  # fmt: skip
        super().__init__()
        sizes = {"heads": heads, "components": components, "channels": channels, "chunk": chunk}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        arguments.not_negative(eps=eps, v_min=v_min, window=window)
        self.window, self.eps, self.v_min, self.chunk = window, eps, v_min, chunk
        self.mu, self.omega = (nn.Parameter(torch.empty(heads, components, channels)) for _ in range(2))
        self.alpha, self.log_lam = nn.Parameter(torch.empty(heads, components)), nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start again: random means, all else as said above."""
        nn.init.normal_(self.mu)
        nn.init.constant_(self.omega, math.log(math.e - 1))  # softplus(omega) = 1
        nn.init.zeros_(self.alpha)
        nn.init.zeros_(self.log_lam)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Tokens, one or many, after those that `state` remembers: O (B, T, H, V) and the state after them."""
        options = {"eps": self.eps, "v_min": self.v_min, "window": self.window, "chunk": self.chunk}
        return continued(state, q, k, v, self.mu, self.omega, self.alpha, self.log_lam.exp(), **options)

    def extra_repr(self) -> str:
        H, K, R = self.mu.shape
        sizes = f"{H}, components={K}, channels={R}, window={self.window}"
        return f"{sizes}, eps={self.eps}, v_min={self.v_min}, chunk={self.chunk}"


# -------------------------------------------------------------------------------------------------------------- shared
def _weights(Q: Tensor, K: Tensor, near: Tensor, scale: float | None) -> Tensor:
    """Softmax in the window; zeros where a window is empty. Masked before and after: such a row would be NaN."""
    s = (Q * (Q.shape[-1] ** -0.5 if scale is None else scale)) @ K.mT
    if not near.any(-1).all():
        return torch.zeros_like(s)
    return s.masked_fill(~near, -math.inf).softmax(-1)


def _bands(T: int, window: int, device: torch.device, row: int = 0, key: int = 0) -> tuple[Tensor, Tensor]:
    """Which keys from `key` are in the window of which rows from `row`, and which before it; both up to T."""
    age = torch.arange(row, T, device=device)[:, None] - torch.arange(key, T, device=device)
    return (age >= 0) & (age < window), age >= window


def _route(Q, K, mu, omega, alpha, v_min) -> tuple[Tensor, ...]:
    """GQ and GK, heads before tokens.  (B, H, T, R), .. -> (B, H, T, K)"""
    mixture = [x.to(Q.dtype) for x in (mu, omega, alpha)]
    return tuple(gma.responsibilities(x.transpose(1, 2), *mixture, v_min).transpose(1, 2) for x in (Q, K))


def _check(scale: float | None, eps: float, v_min: float, window: int, **tensors: Tensor) -> torch.dtype:
    """The dtype to compute in. Raises TypeError or ValueError naming the argument that makes no sense."""
    arguments.checked(_AXES, tensors, parameters=("mu", "omega", "alpha", "lam"))
    arguments.finite(scale=1.0 if scale is None else scale)
    arguments.not_negative(eps=eps, v_min=v_min, window=window)
    return arguments.widest(*tensors.values())
