"""NeuralMemory of titans-pytorch: memories that learn while they read, by torch.func's gradients and two scans.

Chunks hold one token here, so that each token has gates and a gradient of its own; `batch_size` says after how many
tokens gradients are taken at a new memory: with one it is `titans.linear`, with several `titans.chunked`, and without
any, which is their default, all gradients of a call are taken at the memory before it. Any module may be the memory:
theirs of one layer, or one of two layers. Its loss is an argument too: theirs is a mean over channels, whose gradient
is that of the sum divided by their number.

Their projections are replaced by selections of channels, so that what those would give is handed in, and gates come
after their sigmoid. A memory has as many channels for values as for keys: the fewer are filled up with zeros.
"""

from __future__ import annotations

import functools
import warnings
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from mixproof.verify import implements
from mixproof.verify.subjects.thirdparty._modules import Channels

_COMMON = {
    "layout": "B T D",
    "dtypes": ("float64", "float32"),
    "chunk": 4,  # a gradient transform for each token: short sequences
    "slow": True,
    "requires": ("titans_pytorch",),
}


@implements("titans.linear", name="titans_pytorch.NeuralMemory", **_COMMON)
def linear(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, eta: Tensor, theta: Tensor, M0: Tensor | None = None,
    S0: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """2 x (B, T, K), (B, T, V), 3 x (B, T), 2 x (B, V, K) -> (B, T, V), 2 x (B, V, K)."""
    return chunked(q, k, v, alpha, eta, theta, 1, M0, S0)


@implements("titans.chunked", name="titans_pytorch.NeuralMemory.batches", **_COMMON)
def chunked(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, eta: Tensor, theta: Tensor, size: int = 4,
    M0: Tensor | None = None, S0: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The same, with the gradients of `size` tokens at one memory."""
    K, V = k.shape[-1], v.shape[-1]
    D, zero = max(K, V), k.new_zeros(len(k), V, K)
    M, S = ({"weights.0": _filled(zero if x is None else x, D, D).mT} for x in (M0, S0))
    y, M, S = run(memory(D), q, k, v, alpha, eta, theta, size, M, S)
    return y, M["weights.0"].mT[:, :V, :K], S["weights.0"].mT[:, :V, :K]


@implements("titans.mlp", name="titans_pytorch.NeuralMemory", **_COMMON)
def two_layers(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, eta: Tensor, theta: Tensor, I1: Tensor, I2: Tensor,
    W10: Tensor | None = None, W20: Tensor | None = None, S10: Tensor | None = None, S20: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """With W2 silu(W1 k) for memory.  -> (B, T, V), 2 x (B, F, K), (B, V, F)."""
    B, (F, K), V = len(k), I1.shape, len(I2)
    D = max(K, V)
    W1, W2 = (start.expand(B, -1, -1) if W is None else W for start, W in ((I1, W10), (I2, W20)))
    S1, S2 = (torch.zeros_like(W) if S is None else S for W, S in ((W1, S10), (W2, S20)))
    M, S = ({"W1": _filled(W, F, D), "W2": _filled(U, D, F)} for W, U in ((W1, W2), (S1, S2)))
    y, M, S = run(memory(D, F), q, k, v, alpha, eta, theta, 1, M, S)
    return y, M["W1"][:, :, :K], M["W2"][:, :V], S["W1"][:, :, :K], S["W2"][:, :V]


def run(
    memory: Any, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, eta: Tensor, theta: Tensor, size: int | None,
    M: dict[str, Tensor], S: dict[str, Tensor],
) -> tuple[Tensor, Any, Any]:  # fmt: skip
    """What is read, the parameters of the memory and their momenta; size None: all gradients at the first memory."""
    D = memory.channels
    TensorDict = import_module("tensordict").TensorDict
    weights, momenta = TensorDict(M), TensorDict({n: x[None] for n, x in S.items()})
    state = _package().NeuralMemState(0, weights, None, (weights, momenta), None)
    x = torch.cat([_filled(k, D), _filled(v, D), torch.stack([alpha, eta, theta], dim=-1)], dim=-1)
    y, after = memory(_filled(q, D), x, state=state, ttt_batch_size=size)
    M, S = after.states
    return y[..., : v.shape[-1]], M, {n: s[0] for n, s in S.items()}


@functools.cache
def memory(D: int, F: int = 0, **options: Any) -> Any:
    """A memory of D channels, with F hidden ones if there are two layers. Keys, values and gates come side by side."""
    theirs = _package()
    model = _TwoLayers(D, F) if F else theirs.MemoryMLP(D, depth=1)
    options = {"store_memory_loss_fn": _squares} | options
    memory = theirs.NeuralMemory(D, model=model, pre_rmsnorm=False, mem_model_norm_add_residual=False, **options)
    memory.to_queries, memory.to_keys, memory.to_values = nn.Identity(), Channels(0, D), Channels(D, 2 * D)
    memory.to_decay_factor = _Gate(Channels(2 * D, 2 * D + 1))
    memory.to_momentum = _Gate(Channels(2 * D + 1, 2 * D + 2), nn.Unflatten(0, (1, -1)))
    memory.to_adaptive_step = nn.Sequential(Channels(2 * D + 2, 2 * D + 3), nn.Flatten(1))
    memory.adaptive_step_transform, memory.channels = nn.Identity(), D
    return memory


class _Gate(nn.Sequential):
    """A gate that is handed in as it is, where a sigmoid would be taken."""

    def forward(self, input: Tensor) -> Any:
        return _Open(super().forward(input))


class _Open:
    def __init__(self, gate: Tensor) -> None:
        self.gate = gate

    def sigmoid(self) -> Tensor:
        return self.gate


class _TwoLayers(nn.Module):
    def __init__(self, D: int, F: int) -> None:
        super().__init__()
        self.W1, self.W2 = nn.Parameter(torch.zeros(F, D)), nn.Parameter(torch.zeros(D, F))

    def forward(self, x: Tensor) -> Tensor:
        return silu(x @ self.W1.mT) @ self.W2.mT


def _squares(read: Tensor, wanted: Tensor) -> Tensor:
    return (read - wanted).pow(2).sum(-1)


def _filled(x: Tensor, *shape: int) -> Tensor:
    """Zeros up to the last axes' sizes."""
    missing = [n - x.shape[i - len(shape)] for i, n in enumerate(shape)]
    return pad(x, [m for n in reversed(missing) for m in (0, n)])


@functools.cache
def _package() -> ModuleType:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)
        return import_module("titans_pytorch.neural_memory")
