"""Gaussian mixture attention in PyTorch: eager, chunkwise, and chunkwise with a backward that stores only its inputs.

Source: GMA paper (3) to (7), (14), (15) and its causal form; the backward is derived from these, with (18) for softmax.

    letter      paper            shape               meaning
    q k v       Q K V            (B, T, H, R or V)   queries; keys and values may have S tokens instead of T
    mu omega    mu omega         (H, K, R)           means; var = softplus(omega) + v_min
    alpha       alpha            (H, K)              prior logits, pi = softmax(alpha)
    GQ GK       gamma^Q gamma^K  (B, H, T, K)        responsibilities of the components for queries, for keys
    S Z         V~ Z             (B, H, K, V or -)   values and mass received by each component
    D           D                (B, H, T)           mass read by a query: the denominator before eps
    G dX        -                as O, as X          cotangents of O, of X; dU = G / (D + eps)

Bidirectional attention is `cross` of a sequence with itself. Whatever the input dtype, arithmetic is float32 or wider:
O comes back in the dtype of q, and S and Z stay wide. Below the public functions heads come before tokens, and
chunks are widened one at a time, so that no wide copy of the inputs is made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from mixproof.verify import implements
from mixproof.verify.subjects.torch._arguments import checked, no_autocast, not_negative, slices, widest

_declared = functools.partial(
    implements,
    dtypes=("float64", "float32", "bfloat16", "float16"),
    dot="float32",  # half-precision operands are widened before any product
    devices=("cpu", "cuda"),
)


@_declared("gma.responsibilities", name="torch.eager")
def responsibilities(x: Tensor, mu: Tensor, omega: Tensor, alpha: Tensor, v_min: float = 0.0) -> Tensor:
    """gamma_k(x) = pi_k N(x | mu_k, var_k) / sum_l pi_l N(x | mu_l, var_l).  (B, T, H, R) -> (B, T, H, K).  (3)"""
    _check({"v_min": v_min}, x=x, mu=mu, omega=omega, alpha=alpha)
    wide = widest(x, mu, omega, alpha)
    with no_autocast(x):
        gamma = _gamma(x.transpose(1, 2).to(wide), _mixture(mu, omega, alpha, v_min, wide))
    return gamma.to(x.dtype).transpose(1, 2)


@_declared("gma.bidirectional", name="torch.eager")
@_declared("gma.cross", name="torch.eager")
def cross(
    q: Tensor, k: Tensor, v: Tensor, mu: Tensor, omega: Tensor, alpha: Tensor, eps: float = 1e-6, v_min: float = 0.0
) -> Tensor:
    """O = GQ (GK^T V) / (GQ GK^T 1 + eps), row by row.  (B, T, H, R), (B, S, H, R), (B, S, H, V) -> (B, T, H, V)."""
    return _run(_eager, q, k, v, mu, omega, alpha, eps, v_min)


@_declared("gma.causal", name="torch.eager")
def causal(
    q: Tensor, k: Tensor, v: Tensor, mu: Tensor, omega: Tensor, alpha: Tensor, eps: float = 1e-6, v_min: float = 0.0,
    S0: Tensor | None = None, Z0: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """O_i = GQ_i S_i / (GQ_i Z_i + eps) with S_i = S0 + sum_{j<=i} GK_j^T V_j, Z_i = Z0 + sum_{j<=i} GK_j.

    Returns O, S_T, Z_T. Holds every prefix state: B H T K V numbers."""
    return _run(_eager_causal, q, k, v, mu, omega, alpha, S0, Z0, eps, v_min, causal=True)


@_declared("gma.bidirectional", name="torch.chunkwise", chunk=64)
@_declared("gma.cross", name="torch.chunkwise", chunk=64)
def chunkwise_cross(
    q: Tensor, k: Tensor, v: Tensor, mu: Tensor, omega: Tensor, alpha: Tensor, eps: float = 1e-6, v_min: float = 0.0,
    chunk: int = 64,
) -> Tensor:  # fmt: skip
    """`cross`, a chunk of keys and then a chunk of queries at a time."""
    return _run(_chunkwise, q, k, v, mu, omega, alpha, eps, v_min, chunk)


@_declared("gma.causal", name="torch.chunkwise", chunk=64)
def chunkwise_causal(
    q: Tensor, k: Tensor, v: Tensor, mu: Tensor, omega: Tensor, alpha: Tensor, eps: float = 1e-6, v_min: float = 0.0,
    S0: Tensor | None = None, Z0: Tensor | None = None, chunk: int = 64,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`causal`, with matrix products inside chunks and the state carried across them; the last chunk may be short."""
    return _run(_chunkwise_causal, q, k, v, mu, omega, alpha, S0, Z0, eps, v_min, chunk, causal=True)


@_declared("gma.bidirectional", name="torch.recompute", chunk=64)
@_declared("gma.cross", name="torch.recompute", chunk=64)
def recompute_cross(
    q: Tensor, k: Tensor, v: Tensor, mu: Tensor, omega: Tensor, alpha: Tensor, eps: float = 1e-6, v_min: float = 0.0,
    chunk: int = 64,
) -> Tensor:  # fmt: skip
    """`chunkwise_cross`; for the backward it stores its inputs only, and recomputes responsibilities."""
    return _run(_RecomputeCross.apply, q, k, v, mu, omega, alpha, eps, v_min, chunk)


@_declared("gma.causal", name="torch.recompute", chunk=64)
def recompute_causal(
    q: Tensor, k: Tensor, v: Tensor, mu: Tensor, omega: Tensor, alpha: Tensor, eps: float = 1e-6, v_min: float = 0.0,
    S0: Tensor | None = None, Z0: Tensor | None = None, chunk: int = 64,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`chunkwise_causal`; for the backward it stores its inputs only, and recomputes responsibilities and states."""
    return _run(_RecomputeCausal.apply, q, k, v, mu, omega, alpha, S0, Z0, eps, v_min, chunk, causal=True)


# ---------------------------------------------------------------------------------------------------- responsibilities
class _Mixture(NamedTuple):
    mu: Tensor  # (H, 1, K, R), and var likewise: the axis of one is for tokens
    var: Tensor
    bias: Tensor  # (H, 1, K)


def _mixture(mu: Tensor, omega: Tensor, alpha: Tensor, v_min: float, wide: torch.dtype) -> _Mixture:
    # softplus(w) = w beyond 40 even in float64; at torch's own threshold, 20, it is off by 2e-9.
    var = softplus(omega.to(wide), threshold=40) + v_min  # (14)
    bias = alpha.to(wide) - var.log().sum(-1) / 2  # gamma does not see the normaliser of pi, nor 2 pi
    return _Mixture(mu.to(wide)[:, None], var[:, None], bias[:, None])


def _gamma(x: Tensor, mixture: _Mixture) -> Tensor:
    """(B, H, C, R) -> (B, H, C, K). The difference comes first: x^2 - 2 x mu + mu^2 cancels."""
    E = x[..., None, :] - mixture.mu
    return torch.softmax(mixture.bias - (E * E / mixture.var).sum(-1) / 2, dim=-1)  # (3), (15), (16)


def _gamma_vjp(x: Tensor, gamma: Tensor, dgamma: Tensor, mixture: _Mixture) -> tuple[Tensor, list[Tensor]]:
    """dx, and dmu, dvar, dalpha summed over batch and tokens."""
    ds = gamma * (dgamma - (gamma * dgamma).sum(-1, keepdim=True))  # (18)
    W = (x[..., None, :] - mixture.mu) / mixture.var
    F = ds[..., None] * W
    dalpha = ds.sum((0, 2))
    dvar = ((F * W).sum((0, 2)) - dalpha[..., None] / mixture.var[:, 0]) / 2
    return -F.sum(-2), [F.sum((0, 2)), dvar, dalpha]


# ------------------------------------------------------------------------------------------------------------- forward
def _eager(q, k, v, mu, omega, alpha, eps, v_min):
    wide = widest(q, k, v, mu, omega, alpha)
    mixture = _mixture(mu, omega, alpha, v_min, wide)
    GQ, GK = _gamma(q.to(wide), mixture), _gamma(k.to(wide), mixture)
    S, Z = GK.mT @ v.to(wide), GK.sum(2)  # (5), (6)
    return (GQ @ S / (_mass(GQ, Z) + eps)).to(q.dtype)  # (7)


def _eager_causal(q, k, v, mu, omega, alpha, S0, Z0, eps, v_min):
    wide = widest(q, k, v, mu, omega, alpha)
    mixture = _mixture(mu, omega, alpha, v_min, wide)
    GQ, GK = _gamma(q.to(wide), mixture), _gamma(k.to(wide), mixture)
    S, Z = _state(v, alpha, S0, Z0, wide)
    S = torch.cat([S[:, :, None], GK[..., None] * v.to(wide)[..., None, :]], dim=2).cumsum(2)
    Z = torch.cat([Z[:, :, None], GK], dim=2).cumsum(2)
    D = (GQ * Z[:, :, 1:]).sum(-1, keepdim=True)
    O = (GQ[..., None, :] @ S[:, :, 1:]).squeeze(-2) / (D + eps)
    return O.to(q.dtype), S[:, :, -1].clone(), Z[:, :, -1].clone()


def _chunkwise(q, k, v, mu, omega, alpha, eps, v_min, chunk):
    wide = widest(q, k, v, mu, omega, alpha)
    mixture = _mixture(mu, omega, alpha, v_min, wide)
    S, Z = _aggregate(k, v, alpha, mixture, chunk, wide)
    rows = []
    for c in slices(q.shape[2], chunk):
        GQ = _gamma(q[:, :, c].to(wide), mixture)
        rows.append((GQ @ S / (_mass(GQ, Z) + eps)).to(q.dtype))
    return torch.cat(rows, dim=2)


def _aggregate(k, v, alpha, mixture, chunk, wide):
    S, Z = _state(v, alpha, None, None, wide)
    for c in slices(k.shape[2], chunk):
        GK = _gamma(k[:, :, c].to(wide), mixture)
        S, Z = S + GK.mT @ v[:, :, c].to(wide), Z + GK.sum(2)
    return S, Z


def _chunkwise_causal(q, k, v, mu, omega, alpha, S0, Z0, eps, v_min, chunk):
    wide = widest(q, k, v, mu, omega, alpha)
    mixture = _mixture(mu, omega, alpha, v_min, wide)
    S, Z = _state(v, alpha, S0, Z0, wide)
    rows = []
    for c in slices(q.shape[2], chunk):
        GQ, GK, V = _gamma(q[:, :, c].to(wide), mixture), _gamma(k[:, :, c].to(wide), mixture), v[:, :, c].to(wide)
        rows.append(_read(GQ, GK, V, S, Z, eps)[0].to(q.dtype))
        S, Z = S + GK.mT @ V, Z + GK.sum(2)
    return torch.cat(rows, dim=2), S, Z


def _read(GQ, GK, V, S, Z, eps):
    """O and D + eps of one chunk, from the state before it and from what it sees of itself."""
    M = (GQ @ GK.mT).tril()
    D = _mass(GQ, Z) + M.sum(-1, keepdim=True) + eps
    return (GQ @ S + M @ V) / D, D


# ------------------------------------------------------------------------------------------------------------ backward
class _RecomputeCross(torch.autograd.Function):
    @staticmethod
    def forward(q, k, v, mu, omega, alpha, eps, v_min, chunk):
        return _chunkwise(q, k, v, mu, omega, alpha, eps, v_min, chunk)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:6])
        ctx.options = inputs[6:]

    @staticmethod
    def backward(ctx, *cotangents):
        (G,) = cotangents
        q, k, v, mu, omega, alpha = ctx.saved_tensors
        eps, v_min, chunk = ctx.options
        needs = ctx.needs_input_grad
        parameters = any(needs[3:6])
        wide = widest(q, k, v, mu, omega, alpha)
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        with no_autocast(q):
            mixture = _mixture(mu, omega, alpha, v_min, wide)
            S, Z = _aggregate(k, v, alpha, mixture, chunk, wide)
            dS, dZ = torch.zeros_like(S), torch.zeros_like(Z)
            sums = _no_sums(mixture)
            for c in slices(q.shape[2], chunk):
                Q = q[:, :, c].to(wide)
                GQ = _gamma(Q, mixture)
                D = _mass(GQ, Z) + eps
                dU = G[:, :, c].to(wide) / D
                dD = -(dU * (GQ @ S / D)).sum(-1, keepdim=True)
                dS, dZ = dS + GQ.mT @ dU, dZ + (GQ * dD).sum(2)
                if needs[0] or parameters:
                    dq[:, :, c], more = _gamma_vjp(Q, GQ, dU @ S.mT + dD * Z[:, :, None], mixture)
                    sums = _plus(sums, more)
            for c in slices(k.shape[2], chunk) if parameters or needs[1] or needs[2] else ():
                K = k[:, :, c].to(wide)
                GK = _gamma(K, mixture)
                dv[:, :, c] = GK @ dS
                if needs[1] or parameters:
                    dk[:, :, c], more = _gamma_vjp(K, GK, v[:, :, c].to(wide) @ dS.mT + dZ[:, :, None], mixture)
                    sums = _plus(sums, more)
        return _wanted(needs, dq, dk, dv, *_parameter_gradients(sums, mu, omega, alpha))


class _RecomputeCausal(torch.autograd.Function):
    @staticmethod
    def forward(q, k, v, mu, omega, alpha, S0, Z0, eps, v_min, chunk):
        return _chunkwise_causal(q, k, v, mu, omega, alpha, S0, Z0, eps, v_min, chunk)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:8])
        ctx.options = inputs[8:]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *cotangents):
        """One sweep up rebuilds the states and gives dq, one sweep down carries the states' cotangents and gives dk
        and dv. Neither goes back by subtraction, which cancels."""
        G, dS, dZ = cotangents
        q, k, v, mu, omega, alpha, S0, Z0 = ctx.saved_tensors
        eps, v_min, chunk = ctx.options
        needs = ctx.needs_input_grad
        parameters = any(needs[3:6])
        wide = widest(q, k, v, mu, omega, alpha)
        dq, dk, dv = torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)
        dU, dD = torch.zeros_like(v, dtype=wide), torch.zeros_like(v[..., :1], dtype=wide)
        with no_autocast(q):
            mixture = _mixture(mu, omega, alpha, v_min, wide)
            S, Z = _state(v, alpha, S0, Z0, wide)
            sums = _no_sums(mixture)
            if G is not None:
                for c in slices(q.shape[2], chunk):
                    Q, V = q[:, :, c].to(wide), v[:, :, c].to(wide)
                    GQ, GK = _gamma(Q, mixture), _gamma(k[:, :, c].to(wide), mixture)
                    O, D = _read(GQ, GK, V, S, Z, eps)
                    dU[:, :, c] = u = G[:, :, c].to(wide) / D
                    dD[:, :, c] = d = -(u * O).sum(-1, keepdim=True)
                    if needs[0] or parameters:
                        P = (u @ V.mT + d).tril()
                        dq[:, :, c], more = _gamma_vjp(Q, GQ, u @ S.mT + d * Z[:, :, None] + P @ GK, mixture)
                        sums = _plus(sums, more)
                    S, Z = S + GK.mT @ V, Z + GK.sum(2)
            dS, dZ = _state(v, alpha, dS, dZ, wide)
            for c in reversed(slices(k.shape[2], chunk)) if parameters or any(needs[1:3]) or any(needs[6:8]) else ():
                K, V, u, d = k[:, :, c].to(wide), v[:, :, c].to(wide), dU[:, :, c], dD[:, :, c]
                GQ, GK = _gamma(q[:, :, c].to(wide), mixture), _gamma(K, mixture)
                dv[:, :, c] = GK @ dS + (GQ @ GK.mT).tril().mT @ u
                if needs[1] or parameters:
                    P = (u @ V.mT + d).tril()
                    dk[:, :, c], more = _gamma_vjp(K, GK, V @ dS.mT + dZ[:, :, None] + P.mT @ GQ, mixture)
                    sums = _plus(sums, more)
                dS, dZ = dS + GQ.mT @ u, dZ + (GQ * d).sum(2)
        dS0, dZ0 = (None if x is None else g.to(x.dtype) for x, g in ((S0, dS), (Z0, dZ)))
        return _wanted(needs, dq, dk, dv, *_parameter_gradients(sums, mu, omega, alpha), dS0, dZ0)


def _no_sums(mixture: _Mixture) -> list[Tensor]:
    return [torch.zeros_like(x[:, 0]) for x in mixture]


def _plus(xs: list[Tensor], ys: list[Tensor]) -> list[Tensor]:
    return [x + y for x, y in zip(xs, ys, strict=True)]


def _parameter_gradients(sums: list[Tensor], mu: Tensor, omega: Tensor, alpha: Tensor) -> list[Tensor]:
    dmu, dvar, dalpha = sums
    domega = dvar * torch.sigmoid(omega.to(dvar.dtype))
    return [dmu.to(mu.dtype), domega.to(omega.dtype), dalpha.to(alpha.dtype)]


def _wanted(needs: tuple[bool, ...], *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    """One gradient per argument, None where it is not needed and for the options, which come last."""
    return tuple(g if need else None for need, g in zip_longest(needs, gradients))


# -------------------------------------------------------------------------------------------------------------- shared
_AXES = {"x": "BTHR", "q": "BTHR", "k": "BSHR", "v": "BSHV", "mu": "HKR", "omega": "HKR", "alpha": "HK"}
_STATES = {"S0": "BHKV", "Z0": "BHK"}


def _run(form: Callable[..., Any], q, k, v, mu, omega, alpha, *rest, causal: bool = False) -> Any:
    """Check the arguments, put heads before tokens, and put them back in O."""
    states = dict(zip(_STATES, rest, strict=False)) if causal else {}
    eps, v_min = rest[len(states) : len(states) + 2]
    _check({"eps": eps, "v_min": v_min}, causal, q=q, k=k, v=v, mu=mu, omega=omega, alpha=alpha, **states)
    with no_autocast(q):
        result = form(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mu, omega, alpha, *rest)
    return (result[0].transpose(1, 2), *result[1:]) if causal else result.transpose(1, 2)


def _check(scalars: dict[str, float], causal: bool = False, **tensors: Tensor | None) -> None:
    axes = {name: letters.replace("S", "T" if causal else "S") for name, letters in (_AXES | _STATES).items()}
    sizes = checked(axes, tensors, _STATES, parameters=("mu", "omega", "alpha"))
    if sizes["K"] == 0:
        raise ValueError("mu, omega and alpha describe K = 0 components; at least one is needed")
    not_negative(**scalars)


def _state(v: Tensor, alpha: Tensor, S0: Tensor | None, Z0: Tensor | None, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """The state given, or zeros."""
    (B, H), K, V = v.shape[:2], alpha.shape[1], v.shape[3]
    S = v.new_zeros((B, H, K, V), dtype=wide) if S0 is None else S0.to(wide)
    Z = v.new_zeros((B, H, K), dtype=wide) if Z0 is None else Z0.to(wide)
    return S, Z


def _mass(GQ: Tensor, Z: Tensor) -> Tensor:
    return GQ @ Z[..., None]
