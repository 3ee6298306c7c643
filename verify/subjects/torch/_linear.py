"""What linear attentions in PyTorch share: decays between tokens, the chunkwise form and its backward, a scan.

The state follows S_t = A_t * S_{t-1} + k_t^T v_t, and o_t = scale q_t S_t. Heads come before tokens here:

    letter  shape                       meaning
    q k v   (B, H, T, K or V)           queries and keys; values
    a g     (B or 1, H, T)              decays, of either sign or zero; log-decays
    S R     (B, H, K, V)                state before a chunk; cotangent of the state after it
    P       (B or 1, H, C + 1, C + 1)   P[n, m] = a_{m+1} ... a_n for m <= n, the decay from after token m to after
                                        token n of a chunk of C, and 0 above
    U       as O                        cotangent of q S

D = P[1:, 1:] is the mask of a chunk, P[1:, 0] decays the state into it, and P[C, 1:] its tokens out of it. Whatever the
input dtype, arithmetic is float32 or wider: O comes back in the dtype of q, and states stay wide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mixproof.verify.subjects.torch._arguments import checked, finite, no_autocast, slices, widest

Segments = Callable[[slice], Tensor]  # the P of a slice of tokens

_STATES = ("S0", "x0", "z0")


# ------------------------------------------------------------------------------------------------------------ arguments
def arranged(axes: Mapping[str, str], *tensors: Tensor | None) -> list[Any]:
    """Tensors whose axes are named in turn, one letter each, checked, with heads before tokens; a state may be None.

    Raises TypeError or ValueError naming the argument that makes no sense."""
    given = dict(zip(axes, tensors, strict=True))
    checked(axes, given, _STATES, parameters=[name for name in axes if "B" not in axes[name]])
    return [x.transpose(1, 2) if x is not None and axes[name].startswith("BTH") else x for name, x in given.items()]


def run(
    form: Callable[..., tuple[Tensor, Tensor]],
    axes: Mapping[str, str],
    tensors: tuple[Tensor | None, ...],
    scale: float,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    """O and S of a form that takes q, k, v, wide decays, a wide state, the scale, and options."""
    finite(scale=scale)
    q, k, v, *decays, S0 = arranged(axes, *tensors)
    wide = widest(*tensors)
    with no_autocast(q):
        O, S = form(q, k, v, *(x.to(wide) for x in decays), state(S0, k, v, wide), scale, *options)
    return O.transpose(1, 2), S


def state(S0: Tensor | None, k: Tensor, v: Tensor, wide: torch.dtype) -> Tensor:
    """The state given, or zeros."""
    return v.new_zeros((*k.shape[:2], k.shape[3], v.shape[3]), dtype=wide) if S0 is None else S0.to(wide)


def memory(k: Tensor, v: Tensor, S0: Tensor | None, z0: Tensor | None, wide: torch.dtype) -> Tensor:
    """S0 with the mass z0 as one more column, absent ones zero.  (B, H, K, V + 1)"""
    S = state(S0, k, v, wide)
    return torch.cat([S, (torch.zeros_like(S[..., 0]) if z0 is None else z0.to(wide))[..., None]], dim=-1)


def with_mass(v: Tensor) -> Tensor:
    """Values with one more column, one for every token."""
    return pad(v, (0, 1), value=1.0)


def group_norm(x: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) over the last axis; the mean comes off first."""
    E = x - x.mean(-1, keepdim=True)
    return E / ((E * E).mean(-1, keepdim=True) + eps).sqrt()


# --------------------------------------------------------------------------------------------------------------- decays
def constant(a: Tensor, T: int, chunk: int) -> Segments:
    """P of decays a (H,) that T tokens share: powers, computed once."""
    n = torch.arange(min(T, chunk) + 1, device=a.device)
    P = (a[:, None, None] ** (n[:, None] - n).clamp(min=0)).tril()
    return lambda c: P[:, : c.stop - c.start + 1, : c.stop - c.start + 1]


def spread(a: Tensor, T: int) -> Tensor:
    """Decays a (H, ...) that T tokens share, as decays of one token each."""
    return a[None, :, None].expand(1, a.shape[0], T, *a.shape[1:])


def segments(decays: Tensor, log: bool = False) -> Segments:
    """P of decays (..., T), or of finite log-decays, of one token each."""
    return lambda c: _Segments.apply(decays[..., c], log)


def _products(a: Tensor) -> Tensor:
    """Products, not quotients of cumulative ones: a decay may be zero."""
    n = torch.arange(a.shape[-1] + 1, device=a.device)
    steps = torch.where(n[:, None] > n, pad(a, (1, 0), value=1.0)[..., None], 1.0)
    return steps.cumprod(-2).tril()


def _products_vjp(P: Tensor, dP: Tensor) -> Tensor:
    """da_t = sum_{m < t <= n} P[n, t] dP[n, m] P[t-1, m]: nothing is divided by a decay."""
    return ((P[..., 1:].mT @ dP)[..., :-1] * P[..., :-1, :-1]).sum(-1)


def _exponentials(g: Tensor) -> Tensor:
    c = pad(g.cumsum(-1), (1, 0))  # it starts anew in every chunk: of a long sum few digits of one token are left
    E = c[..., :, None] - c[..., None, :]
    above = torch.ones(E.shape[-2:], dtype=torch.bool, device=g.device).triu(1)
    return E.masked_fill(above, -math.inf).exp()  # masked before exp, which overflows above the diagonal


def _exponentials_vjp(P: Tensor, dP: Tensor) -> Tensor:
    """dg_t = sum_{m < t <= n} dP[n, m] P[n, m], added up; rows less columns, which autograd would take, cancel."""
    below = (dP * P).flip(-2).cumsum(-2).flip(-2)
    return below[..., 1:, :-1].tril().sum(-1)


def _form(log: bool) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]:
    """P of a chunk's decays or log-decays, and its gradient."""
    return (_exponentials, _exponentials_vjp) if log else (_products, _products_vjp)


class _Segments(torch.autograd.Function):
    @staticmethod
    def forward(decays, log):
        return _form(log)[0](decays)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)
        ctx.log = inputs[1]

    @staticmethod
    def backward(ctx, *cotangents):
        (P,) = ctx.saved_tensors
        return _form(ctx.log)[1](P, cotangents[0]), None


# ------------------------------------------------------------------------------------------------------------ chunkwise
def chunkwise(
    q: Tensor, k: Tensor, v: Tensor, segment: Segments, S: Tensor, scale: float = 1.0, chunk: int = 64
) -> tuple[Tensor, Tensor]:
    """Matrix products inside chunks, the state carried across them; the last chunk may be short."""
    rows = []
    for c in slices(q.shape[2], chunk):
        Q, K, V = (x[:, :, c].to(S.dtype) for x in (q, k, v))
        P = segment(c)
        O = ((Q @ K.mT) * P[..., 1:, 1:]) @ V + P[..., 1:, :1] * (Q @ S)
        rows.append((scale * O).to(q.dtype))
        S = _after(K, V, P, S)
    return torch.cat(rows, dim=2), S


def normalised(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, S0: Tensor | None, z0: Tensor | None, eps: float, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """o_t = q_t S_t / (q_t . z_t + eps) of wide decays a (H,): O, S and z. The mass is one more column of the state."""
    M = memory(k, v, S0, z0, a.dtype)
    U, M = chunkwise(q.to(a.dtype), k, with_mass(v), constant(a, q.shape[2], chunk), M, chunk=chunk)
    return (U[..., :-1] / (U[..., -1:] + eps)).to(q.dtype), M[..., :-1], M[..., -1]


def chunkwise_keys(
    q: Tensor, k: Tensor, v: Tensor, segment: Segments, S: Tensor, scale: float = 1.0, chunk: int = 16
) -> tuple[Tensor, Tensor]:
    """`chunkwise` where each channel of the keys has decays of its own: P is (B, H, K, C + 1, C + 1)."""
    rows = []
    for c in slices(q.shape[2], chunk):
        Q, K, V = (x[:, :, c].to(S.dtype) for x in (q, k, v))
        P = segment(c)
        A = torch.einsum("bhni, bhinm, bhmi -> bhnm", Q, P[..., 1:, 1:], K)
        O = A @ V + (Q * P[..., 1:, 0].mT) @ S
        rows.append((scale * O).to(q.dtype))
        S = P[..., -1, :1] * S + (K * P[..., -1, 1:].mT).mT @ V
    return torch.cat(rows, dim=2), S


def _after(K: Tensor, V: Tensor, P: Tensor, S: Tensor) -> Tensor:
    """The state after a chunk."""
    return P[..., -1:, :1] * S + (K * P[..., -1, 1:, None]).mT @ V


def recompute(
    q: Tensor, k: Tensor, v: Tensor, decays: Tensor, S: Tensor, scale: float = 1.0, chunk: int = 64, log: bool = False
) -> tuple[Tensor, Tensor]:
    """`chunkwise`; for the backward it stores its inputs only, and recomputes masks and states. `log`: log-decays."""
    return _Recompute.apply(q, k, v, decays, S, scale, chunk, log)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(q, k, v, decays, S, scale, chunk, log):
        return chunkwise(q, k, v, segments(decays, log), S, scale, chunk)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:5])
        ctx.options = inputs[5:]

    @staticmethod
    def backward(ctx, *cotangents):
        """One sweep up rebuilds the states, one sweep down carries their cotangent: neither goes back by division, and
        the decays' gradient, the state before each token times the cotangent of that after it, comes by no difference.
        """
        G, R = cotangents
        q, k, v, decays, S = ctx.saved_tensors
        scale, chunk, log = ctx.options
        form, vjp = _form(log)
        chunks = slices(q.shape[2], chunk)
        with no_autocast(q):
            states = [S]
            for c in chunks[:-1]:
                K, V = (x[:, :, c].to(S.dtype) for x in (k, v))
                states.append(_after(K, V, form(decays[..., c]), states[-1]))
            rows = []
            for c, S in zip(reversed(chunks), reversed(states), strict=True):
                Q, K, V, U = (x[:, :, c].to(S.dtype) for x in (q, k, v, G))
                P, U = form(decays[..., c]), scale * U
                D, into, out = P[..., 1:, 1:], P[..., 1:, :1], P[..., -1, 1:, None]
                A, W, KR = Q @ K.mT, U @ V.mT, K @ R
                dQ = (W * D) @ K + into * (U @ S.mT)
                dK = (W * D).mT @ Q + out * (V @ R.mT)
                dV = (A * D).mT @ U + out * KR
                ddecays = vjp(P, _masks_vjp(A * W, (Q @ S * U).sum(-1), (KR * V).sum(-1), (S * R).sum((-2, -1))))
                rows.append((dQ, dK, dV, ddecays.sum_to_size(decays[..., c].shape)))
                R = P[..., -1:, :1] * R + (into * Q).mT @ U
            dq, dk, dv, ddecays = (torch.cat(x[::-1], dim=2) for x in zip(*rows, strict=True))
        gradients = (x.to(y.dtype) for x, y in zip((dq, dk, dv, ddecays, R), ctx.saved_tensors, strict=True))
        return tuple(g if need else None for need, g in zip_longest(ctx.needs_input_grad, gradients))


def _masks_vjp(inner: Tensor, into: Tensor, out: Tensor, through: Tensor) -> Tensor:
    """dP from the cotangents of the mask (..., C, C), of the decays of the state into a chunk and of tokens out of it
    (..., C), and of the state across it (...)."""
    C = inner.shape[-1]
    dP = pad(torch.cat([into[..., None], inner], dim=-1), (0, 0, 1, 0))
    return dP + pad(torch.cat([through[..., None], out], dim=-1)[..., None, :], (0, 0, C, 0))


# ----------------------------------------------------------------------------------------------------------------- scan
def scanned(q: Tensor, k: Tensor, v: Tensor, A: Tensor, S: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Every state at once, for any decays A of the state's elements, (B or 1, H, T, K or 1, V or 1)."""
    Q, K, V = (x.to(S.dtype) for x in (q, k, v))
    states = scan(A, K[..., None] * V[..., None, :], S)
    O = (Q[..., None, :] @ states[:, :, 1:]).squeeze(-2)
    return (scale * O).to(q.dtype), states[:, :, -1].clone()


def scan(A: Tensor, U: Tensor, S0: Tensor) -> Tensor:
    """S_t = A_t * S_{t-1} + U_t for any decay of the state's elements: all states at once, S0 first.

    (B, H, T, K or 1, V or 1), (B, H, T, K, V), (B, H, K, V) -> (B, H, T + 1, K, V). In log2 T steps: of two tokens
    (A, U), (B, W) make one, (B A, B U + W)."""
    S = S0[:, :, None]
    return torch.cat([S, _pairs(A, torch.cat([U[:, :, :1] + A[:, :, :1] * S, U[:, :, 1:]], dim=2))], dim=2)


def _pairs(A: Tensor, U: Tensor) -> Tensor:
    """The states of `scan`, from zero."""
    T = U.shape[2]
    if T < 2:
        return U
    n = T // 2
    first, second = slice(0, 2 * n, 2), slice(1, None, 2)
    after = _pairs(A[:, :, second] * A[:, :, first], A[:, :, second] * U[:, :, first] + U[:, :, second])
    later = slice(2, None, 2)
    between = torch.cat([U[:, :, :1], A[:, :, later] * after[:, :, : (T - 1) // 2] + U[:, :, later]], dim=2)
    paired = torch.stack([between[:, :, :n], after], dim=3).flatten(2, 3)
    return torch.cat([paired, between[:, :, n:]], dim=2)
