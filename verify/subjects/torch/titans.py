"""Titans in PyTorch: a memory that learns while it reads, linear or of two layers, and a layer around it.

Source: survey, Titans; Behrouz et al. 2025 (9) to (15), as in the reference: the loss is ||M(k) - v||^2, its gradient
has the factor 2 and is taken at the memory before the token, or, chunked, before the token's chunk.

    letter            shape                      meaning
    q k v             (B, T, H, K or V)          what is asked for; keys, of norm one in the paper; values
    alpha eta theta   (B, T, H)                  forgetting and momentum, in [0, 1]; step sizes
    M S               (B, H, V, K)               linear memory and its momentum
    W1 W2 S1 S2       (B, H, F, K or V, F)       memory of two layers, W2 silu(W1 k), and its momenta
    I1 I2             (H, F, K or V, F)          what W1 and W2 are before the first token
    A U G             (B, H, C + 1, C + 1)       from after token m to after token n of a chunk: decays of memory and
                                                 of momentum, and what of a write at m is in the memory at n
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mixproof.verify import implements
from mixproof.verify.subjects.torch import _arguments as arguments
from mixproof.verify.subjects.torch import _linear as linear
from mixproof.verify.subjects.torch.feature_maps import unit

_TOKENS = {"q": "BTHK", "k": "BTHK", "v": "BTHV", "alpha": "BTH", "eta": "BTH", "theta": "BTH"}
_AXES = _TOKENS | {"M0": "BHVK", "S0": "BHVK"}
_LAYERS = {"I1": "HFK", "I2": "HVF", "W10": "BHFK", "W20": "BHVF", "S10": "BHFK", "S20": "BHVF"}
_declared = functools.partial(implements, dtypes=("float64", "float32"), devices=("cpu", "cuda"), chunk=16)
_half = functools.partial(
    implements,
    dtypes=("float64", "float32", "bfloat16"),
    dot="float32",  # half-precision operands are widened before any product
    devices=("cpu", "cuda"),
    chunk=16,
)
Memory = tuple[Tensor, Tensor, Tensor]


# --------------------------------------------------------------------------------------------------------------- linear
@_half("titans.linear", name="torch.chunkwise")
def chunkwise(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, eta: Tensor, theta: Tensor, M0: Tensor | None = None,
    S0: Tensor | None = None, chunk: int = 16,
) -> Memory:  # fmt: skip
    """The writes of a chunk by one triangular solve, memory and momentum across chunks.

    (B, T, H, K), (B, T, H, K), (B, T, H, V), 3 x (B, T, H) -> y (B, T, H, V), M, S (B, H, V, K)"""
    return _run(_chunkwise, (q, k, v, alpha, eta, theta, M0, S0), chunk, False)


@_declared("titans.linear", name="torch.recurrent")
def recurrent(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, eta: Tensor, theta: Tensor, M0: Tensor | None = None,
    S0: Tensor | None = None,
) -> Memory:  # fmt: skip
    """Token by token, as the paper defines it."""
    return _run(_recurrent, (q, k, v, alpha, eta, theta, M0, S0))


@_half("titans.chunked", name="torch.chunkwise")
def chunked(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, eta: Tensor, theta: Tensor, size: int = 4,
    M0: Tensor | None = None, S0: Tensor | None = None,
) -> Memory:  # fmt: skip
    """Gradients at the memory before each chunk of `size`; the states inside chunks are never formed."""
    return _run(_chunkwise, (q, k, v, alpha, eta, theta, M0, S0), _sized(size), True)


@_declared("titans.chunked", name="torch.scan")
def scanned(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, eta: Tensor, theta: Tensor, size: int = 4,
    M0: Tensor | None = None, S0: Tensor | None = None,
) -> Memory:  # fmt: skip
    """The same by two associative scans a chunk, of all momenta and then of all memories."""
    return _run(_scanned, (q, k, v, alpha, eta, theta, M0, S0), _sized(size))


def _sized(size: int) -> int:
    if size < 1:
        raise ValueError(f"size is {size}; it must be at least 1")
    return size


def _run(form: Callable[..., Memory], tensors: tuple[Tensor | None, ...], *options: Any) -> Memory:
    given: dict[str, Any] = dict(zip(_AXES, tensors, strict=True))
    tokens, wide = _arranged(_AXES, given)
    q, k, v = tokens[:3]
    M, S = (v.new_zeros(*v.shape[:2], v.shape[3], k.shape[3]) if x is None else x.to(wide) for x in tensors[6:])
    with arguments.no_autocast(q):
        y, M, S = form(*tokens, M, S, *options)
    return y.transpose(1, 2).to(given["q"].dtype), M, S


def _arranged(axes: Mapping[str, str], given: Mapping[str, Any]) -> tuple[list[Tensor], torch.dtype]:
    """Tokens, wide and with heads before them, and the wide dtype. Raises TypeError or ValueError naming an argument
    that makes no sense."""
    arguments.checked(axes, given, [n for n in axes if n.endswith("0")], [n for n in axes if "B" not in axes[n]])
    wide = arguments.widest(*given.values())
    return [given[name].to(wide).transpose(1, 2) for name in _TOKENS], wide


def _chunkwise(q, k, v, alpha, eta, theta, M, S, chunk, stale):
    keep, carry = linear.segments(1 - alpha), linear.segments(eta)
    rows = []
    for c in arguments.slices(q.shape[2], chunk):
        Q, K, V, step = q[:, :, c], k[:, :, c], v[:, :, c], 2 * theta[:, :, c, None]
        A, U = keep(c), carry(c)
        G = A[..., 1:] @ U[..., 1:, :]
        KM, KS = K @ M.mT, K @ S.mT
        if stale:
            E = V - KM
        else:
            L = G[..., :-1, 1:] * (K @ K.mT) * step.mT
            E = V - A[..., :-1, :1] * KM - G[..., :-1, :1] * KS
            E = torch.linalg.solve_triangular(L, E, upper=False, unitriangular=True)
        W = step * E
        rows.append(A[..., 1:, :1] * (Q @ M.mT) + G[..., 1:, :1] * (Q @ S.mT) + (Q @ K.mT * G[..., 1:, 1:]) @ W)
        M = A[..., -1:, :1] * M + G[..., -1:, :1] * S + (G[..., -1, 1:, None] * W).mT @ K
        S = U[..., -1:, :1] * S + (U[..., -1, 1:, None] * W).mT @ K
    return torch.cat(rows, dim=2), M, S


def _recurrent(q, k, v, alpha, eta, theta, M, S):
    keep, eta, step = (x[..., None, None] for x in (1 - alpha, eta, 2 * theta))
    rows = [v[:, :, :0]]
    for t in range(q.shape[2]):
        E = v[:, :, t, :, None] - M @ k[:, :, t, :, None]
        S = eta[:, :, t] * S + step[:, :, t] * E * k[:, :, t, None]
        M = keep[:, :, t] * M + S
        rows.append((M @ q[:, :, t, :, None]).mT)
    return torch.cat(rows, dim=2), M, S


def _scanned(q, k, v, alpha, eta, theta, M, S, size):
    keep, eta = (1 - alpha)[..., None, None], eta[..., None, None]
    rows = []
    for c in arguments.slices(q.shape[2], size):
        K, E = k[:, :, c], v[:, :, c] - k[:, :, c] @ M.mT
        writes = (2 * theta[:, :, c, None] * E)[..., None] * K[..., None, :]
        momenta = linear.scan(eta[:, :, c], writes, S)
        memories = linear.scan(keep[:, :, c], momenta[:, :, 1:], M)
        rows.append((memories[:, :, 1:] @ q[:, :, c, :, None])[..., 0])
        M, S = memories[:, :, -1], momenta[:, :, -1]
    return torch.cat(rows, dim=2), M.clone(), S.clone()


# ----------------------------------------------------------------------------------------------------------- two layers
@_declared("titans.mlp", name="torch.recurrent")
def mlp(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, eta: Tensor, theta: Tensor, I1: Tensor, I2: Tensor,
    W10: Tensor | None = None, W20: Tensor | None = None, S10: Tensor | None = None, S20: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Token by token, with the gradients of the memory written out: they are needed where none are recorded, too.

    (B, T, H, K), (B, T, H, K), (B, T, H, V), 3 x (B, T, H), (H, F, K), (H, V, F) -> y (B, T, H, V), W1, W2, S1, S2"""
    given = {"q": q, "k": k, "v": v, "alpha": alpha, "eta": eta, "theta": theta}
    given |= {"I1": I1, "I2": I2, "W10": W10, "W20": W20, "S10": S10, "S20": S20}
    (Q, K, V, alpha, eta, theta), wide = _arranged(_TOKENS | _LAYERS, given)
    W1, W2 = (x.to(wide).expand(len(q), *x.shape) if y is None else y.to(wide) for x, y in ((I1, W10), (I2, W20)))
    S1, S2 = (torch.zeros_like(x) if y is None else y.to(wide) for x, y in ((W1, S10), (W2, S20)))
    with arguments.no_autocast(q):
        keep, eta, step = (x[..., None, None] for x in (1 - alpha, eta, 2 * theta))
        rows = [V[:, :, :0]]
        for t in range(q.shape[1]):
            key = K[:, :, t, :, None]
            a = W1 @ key
            h = nn.functional.silu(a)
            E = V[:, :, t, :, None] - W2 @ h
            S1 = eta[:, :, t] * S1 + step[:, :, t] * (W2.mT @ E) * _slope(a) * key.mT
            S2 = eta[:, :, t] * S2 + step[:, :, t] * E * h.mT
            W1, W2 = keep[:, :, t] * W1 + S1, keep[:, :, t] * W2 + S2
            rows.append((W2 @ nn.functional.silu(W1 @ Q[:, :, t, :, None])).mT)
    return torch.cat(rows, dim=2).transpose(1, 2).to(q.dtype), W1, W2, S1, S2


def _slope(a: Tensor) -> Tensor:
    """The derivative of silu."""
    s = a.sigmoid()
    return s * (1 + a * (1 - s))


# ----------------------------------------------------------------------------------------------------------- as a layer
class NeuralMemory(nn.Module):
    """A memory a head, with projections of its own: keys and queries silu(x W) of norm one, values silu(x W), gates
    alpha and eta sigmoid(x W + b), step sizes half of that: with gates that stay as they are a linear memory does not
    diverge then. Not printed in the source: the cap of step sizes, and how weights start. The paper's convolutions
    before the memory are left out.

    d_model        D, channels of the tokens
    heads          memories
    d_head         channels of queries, keys and values; d_model / heads if not given
    hidden         width of a memory of two layers; a linear one if not given
    chunk          tokens a chunk of a linear memory

    Raises ValueError for a value outside these.
    """

    def __init__(
        self, d_model: int, heads: int, d_head: int | None = None, hidden: int | None = None, chunk: int = 16
    ) -> None:
        super().__init__()
        sizes = {"d_model": d_model, "heads": heads, "d_head": d_head, "hidden": hidden, "chunk": chunk}
        for name, value in sizes.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if d_head is None and d_model % heads:
            raise ValueError(f"heads is {heads}; it must divide the {d_model} channels, or d_head be given")
        n = d_model // heads if d_head is None else d_head
        self.heads, self.hidden, self.chunk = heads, hidden, chunk
        self.W_Q, self.W_K, self.W_V = (nn.Linear(d_model, heads * n, bias=False) for _ in range(3))
        self.gates = nn.Linear(d_model, 3 * heads)
        self.W_O = nn.Linear(heads * n, d_model, bias=False)
        shapes = ((n, n),) if hidden is None else ((hidden, n), (n, hidden))
        self.memory = nn.ParameterList(nn.Parameter(torch.empty(heads, *shape)) for shape in shapes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start again: random projections; a linear memory empty, one of two layers random, for an empty one cannot
        learn; gates at one half."""
        for W in (self.W_Q, self.W_K, self.W_V, self.W_O, self.gates):
            W.reset_parameters()
        nn.init.zeros_(self.gates.bias)
        for W in self.memory:
            most = 0 if self.hidden is None else 1 / math.sqrt(W.shape[2])
            nn.init.uniform_(W, -most, most)

    def forward(self, x: Tensor, state: tuple[Tensor, ...] | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Tokens (B, T, D), after those that left `state` -> (B, T, D), and what the memories and momenta are now."""
        if x.ndim != 3 or x.shape[2] != self.W_Q.in_features:
            raise ValueError(f"x has shape {tuple(x.shape)}; expected (B, T, {self.W_Q.in_features})")
        if self.hidden is None:
            start = (self.memory[0].expand(len(x), -1, -1, -1), None) if state is None else state
            y, *after = chunkwise(*self.tokens(x), *start, chunk=self.chunk)
        else:
            y, *after = mlp(*self.tokens(x), *self.memory, *(() if state is None else state))
        return self.W_O(y.flatten(2)), tuple(after)

    def tokens(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k, v, alpha, eta and theta of tokens (B, T, D)."""
        q, k, v = (nn.functional.silu(W(x)).unflatten(2, (self.heads, -1)) for W in (self.W_Q, self.W_K, self.W_V))
        alpha, eta, theta = self.gates(x).sigmoid().chunk(3, dim=2)
        return unit(q, 1e-12), unit(k, 1e-12), v, alpha, eta, theta / 2

    def step(self, x: Tensor, state: tuple[Tensor, ...] | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One more token (B, D) -> (B, D), and the state after it."""
        if x.ndim != 2:
            raise ValueError(f"x has shape {tuple(x.shape)}; step expects (B, {self.W_Q.in_features})")
        y, after = self.forward(x[:, None], state)
        return y[:, 0], after

    def extra_repr(self) -> str:
        return f"heads={self.heads}, hidden={self.hidden}, chunk={self.chunk}"
