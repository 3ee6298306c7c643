"""Gaussian mixture attention in Triton: responsibilities, aggregation, broadcasting; no (N, K) array.

Source: GMA (arXiv 2606.18283) (3), (5), (7), (14), (16) and the causal form. Each head has its own mixture:

    s_nk = alpha_k - 1/2 sum_r log var_kr - 1/2 sum_r (x_nr - mu_kr)^2 / var_kr                   (16)
    gamma_nk = exp(s_nk - max_l s_nl) / sum_l exp(s_nl - max_l s_nl)                              (3)
    S_k = sum_j gamma_k(k_j) v_j,  Z_k = sum_j gamma_k(k_j)                                       (5)
    O_i = sum_k gamma_k(q_i) S_k / (sum_k gamma_k(q_i) Z_k + eps)                                 (7)

Two passes over the components: the first keeps only two numbers of each token, the second makes
responsibilities one tile of components at a time where they are used. So nothing depends on K, R or V fitting in a
block. Token sums are partial sums of fixed stretches of tokens, added in order: no atomics, the same bits every run.
A row of the output depends on tile shapes, which depend on K, V and chunk alone, not on T, B or H.
The backward is in gma_backward.py.

The kernels compute in float32 (dot products in full precision, "ieee"); inputs are converted on load, results on store.
On a machine without CUDA the kernels run in Triton's interpreter, which truncates float32 to bfloat16 on store instead
of rounding; the gate repairs that first (interpreter.activate), or withholds bfloat16 verdicts.

    letter     shape                                  meaning
    top total  (B, H, N)                              max_k s_nk and sum_k exp(s_nk - top_n) of each token
    part       (B, H, parts, K, V), (B, H, parts, K)  sums over stretches of tokens, then the states before them
    t i j      tile                                   tokens, queries, keys
    kk vv rr   tile                                   components, channels of values, dimensions of tokens
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from mixproof.verify import implements
from mixproof.verify.subjects.triton import gma_backward as backward
from mixproof.verify.subjects.triton import gma_kernels as kernels
from mixproof.verify.subjects.triton.arguments import checked, launching
from mixproof.verify.subjects.triton.gma_kernels import triton
from mixproof.verify.subjects.triton.gma_launches import (
    ROWS,
    Routed,
    Tensor,
    read,
    routed,
    start,
    states,
    stretch,
    tables,
    tiles,
)

DECLARED = {
    "name": "triton.fused",
    "layout": "B T H D",
    "dtypes": ("float32", "float16", "bfloat16"),
    "dot": "float32",
    "exp_ulps": 3,  # ex2.approx is good to 2 ulp, _exp adds a rounding
    "devices": ("cpu", "cuda"),
    "requires": ("triton",),
    "slow": True,
    "chunk": 64,
}


@implements("gma.responsibilities", **DECLARED)
def responsibilities(x: Tensor, mu: Tensor, omega: Tensor, alpha: Tensor, v_min: float = 0.0) -> Tensor:
    """gamma_k(x_n): x (B, T, H, R), mu and omega (H, K, R), alpha (H, K) -> (B, T, H, K)."""
    _check({"x": (x, "BTHR")} | _mixture(mu, omega, alpha), v_min=v_min)
    return _Responsibilities.apply(x, mu, omega, alpha, v_min)


@implements("gma.bidirectional", **DECLARED)
def bidirectional(
    q: Tensor, k: Tensor, v: Tensor, mu: Tensor, omega: Tensor, alpha: Tensor, eps: float = 1e-6, v_min: float = 0.0
) -> Tensor:
    """Every token reads every token: q, k (B, T, H, R), v (B, T, H, V) -> O (B, T, H, V)."""
    arguments = {"q": (q, "BTHR"), "k": (k, "BTHR"), "v": (v, "BTHV")}
    _check(arguments | _mixture(mu, omega, alpha), eps=eps, v_min=v_min)
    return _Cross.apply(q, k, v, mu, omega, alpha, eps, v_min)


@implements("gma.cross", **DECLARED)
def cross(
    q: Tensor, k: Tensor, v: Tensor, mu: Tensor, omega: Tensor, alpha: Tensor, eps: float = 1e-6, v_min: float = 0.0
) -> Tensor:
    """T queries read a context of S tokens: q (B, T, H, R), k (B, S, H, R), v (B, S, H, V) -> O (B, T, H, V)."""
    arguments = {"q": (q, "BTHR"), "k": (k, "BSHR"), "v": (v, "BSHV")}
    _check(arguments | _mixture(mu, omega, alpha), eps=eps, v_min=v_min)
    return _Cross.apply(q, k, v, mu, omega, alpha, eps, v_min)


@implements("gma.causal", **DECLARED)
def causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mu: Tensor,
    omega: Tensor,
    alpha: Tensor,
    eps: float = 1e-6,
    v_min: float = 0.0,
    S0: Tensor | None = None,
    Z0: Tensor | None = None,
    chunk: int = 64,
) -> tuple[Tensor, Tensor, Tensor]:
    """Token i reads tokens j <= i and the state S0 (B, H, K, V), Z0 (B, H, K) before them; -> O (B, T, H, V) and the
    float32 state S, Z after them. States are kept every `chunk` tokens; inside a chunk the affinity is masked."""
    arguments = {"q": (q, "BTHR"), "k": (k, "BTHR"), "v": (v, "BTHV")} | _mixture(mu, omega, alpha)
    _check(arguments | {"S0": (S0, "BHKV"), "Z0": (Z0, "BHK")}, eps=eps, v_min=v_min)
    if not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"chunk is {chunk!r}; expected a whole number of tokens, at least 1")
    return _Causal.apply(q, k, v, mu, omega, alpha, S0, Z0, eps, v_min, min(chunk, max(q.shape[1], 1)))


# ---- forward, and what it keeps for the backward: inputs, two or three numbers of each token, O if it is exact -------


class _Responsibilities(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mu: Tensor, omega: Tensor, alpha: Tensor, v_min: float) -> Tensor:
        (B, T, H, R), K = x.shape, mu.shape[1]
        gamma = torch.empty(B, T, H, K, dtype=x.dtype, device=x.device)
        shape = tiles(K, 1)
        with launching(x):
            table = tables(mu, omega, alpha, v_min, shape)
            tokens = routed(x, table, shape)
            counts = triton.cdiv(T, ROWS), triton.cdiv(K, shape.BK)
            sizes = (H, T, K, table.bias.shape[1], R, *counts, ROWS, shape.BK)
            arguments = (*tokens, *table, gamma, *x.stride(), *gamma.stride(), *sizes)
            start(kernels.gamma_kernel, B * H * counts[0] * counts[1], *arguments)
        ctx.save_for_backward(*tokens, mu, omega, alpha)
        ctx.v_min = v_min
        return gamma

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dgamma: Tensor) -> tuple[Tensor | None, ...]:
        x, top, total, *mixture = ctx.saved_tensors
        return *backward.responsibilities(dgamma, Routed(x, top, total), tuple(mixture), ctx.v_min), None


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mu: Tensor, omega: Tensor, alpha: Tensor, eps: float, v_min: float
    ) -> Tensor:
        K, shape = mu.shape[1], tiles(mu.shape[1], v.shape[-1])
        with launching(q):
            table = tables(mu, omega, alpha, v_min, shape)
            queries, keys = routed(q, table, shape), routed(k, table, shape)
            found = states(keys, v, K, table, shape, stretch(k.shape[1], shape))
            S, Z = found.last_S[:, :, None], found.last_Z[:, :, None]
            O, D = read(queries, keys, v, (S, Z), table, eps, shape, None, q.dtype)
        ctx.save_for_backward(*queries, *keys, v, mu, omega, alpha, S, Z, D, O if O.dtype == torch.float32 else None)
        ctx.scalars = eps, v_min, None
        return O

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, G: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        q, k, v, mixture, (S, Z, D, O) = Routed(*saved[:3]), Routed(*saved[3:6]), saved[6], saved[7:10], saved[10:]
        found = backward.attention((G, None, None), q, k, v, mixture, (S, Z), O, D, *ctx.scalars)
        return *found[:6], None, None


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mu: Tensor, omega: Tensor, alpha: Tensor,
        S0: Tensor | None, Z0: Tensor | None, eps: float, v_min: float, chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        K, shape = mu.shape[1], tiles(mu.shape[1], v.shape[-1], chunk)
        with launching(q):
            table = tables(mu, omega, alpha, v_min, shape)
            queries, keys = routed(q, table, shape), routed(k, table, shape)
            found = states(keys, v, K, table, shape, chunk, (S0, Z0))
            O, D = read(queries, keys, v, (found.S, found.Z), table, eps, shape, chunk, q.dtype)
        ctx.save_for_backward(*queries, *keys, v, mu, omega, alpha, S0, Z0, D, O if O.dtype == torch.float32 else None)
        ctx.scalars = eps, v_min, chunk
        return O, found.last_S, found.last_Z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, G: Tensor, dS: Tensor, dZ: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        q, k, v, mixture, (S0, Z0, D, O) = Routed(*saved[:3]), Routed(*saved[3:6]), saved[6], saved[7:10], saved[10:]
        *found, dS0, dZ0 = backward.attention((G, dS, dZ), q, k, v, mixture, None, O, D, *ctx.scalars, initial=(S0, Z0))
        dS0, dZ0 = (None if x is None else d.to(x.dtype) for x, d in ((S0, dS0), (Z0, dZ0)))
        return *found, dS0, dZ0, None, None, None


# ---- arguments -----------------------------------------------------------------------------------------------------


def _mixture(mu: Tensor, omega: Tensor, alpha: Tensor) -> dict[str, tuple[Tensor, str]]:
    return {"mu": (mu, "HKR"), "omega": (omega, "HKR"), "alpha": (alpha, "HK")}


def _check(arguments: Mapping[str, tuple[Tensor | None, str]], **scalars: float) -> None:
    sizes = checked(arguments, ("S0", "Z0"), parameters=("mu", "omega", "alpha"))
    if sizes["K"] == 0:
        raise ValueError("mu has no components; expected K >= 1")
    for name, value in scalars.items():
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name} is {value}; it must be finite and not negative")
