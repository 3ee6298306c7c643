"""The backward of Gaussian mixture attention in Triton: responsibilities are made again, nothing of N x K is stored.

Source: derived from GMA (3), (5) to (7) and their causal form, with (18) for the softmax. With G the cotangent of O:

    dU_i = G_i / (D_i + eps),  dD_i = -<dU_i, O_i>
    dS_k = sum_i gamma_k(q_i) dU_i,  dZ_k = sum_i gamma_k(q_i) dD_i            over the queries that read the state
    dv_j = sum_k gamma_k(k_j) dS_k
    dgamma_k(q_i) = <dU_i, S_k> + dD_i Z_k,  dgamma_k(k_j) = <v_j, dS_k> + dZ_k
    ds_nk = gamma_nk (dgamma_nk - centre_n),  centre_n = sum_l gamma_nl dgamma_nl                                  (18)

Causal: states and their cotangents are kept between chunks, and inside a chunk the masked affinity acts; its cotangent
is P_ij / (D_i + eps) with P_ij = <G_i, v_j> - <G_i, O_i>. centre_i = -eps dD_i for queries and centre_j = <v_j, dv_j> +
<gamma_j, dZ> for keys, so that no pass over the components is spent on them.

Components pass in launches of BK, each of which adds to dx; sums for the mixture are partial sums of stretches of
tokens, added in float64. So there are no atomics, and the bits are the same every run.

    letter         shape      meaning
    share weight   (B, H, T)  1 / (D_i + eps) and -<G_i, O_i>, whose product is dD_i
    centre         (B, H, N)  centre_n
"""

from __future__ import annotations

import math

import torch

from mixproof.verify.subjects.triton import gma_backward_kernels as kernels
from mixproof.verify.subjects.triton.arguments import launching
from mixproof.verify.subjects.triton.gma_kernels import triton
from mixproof.verify.subjects.triton.gma_launches import (
    ROWS,
    Pair,
    Routed,
    Table,
    Tensor,
    Tiles,
    per_token,
    read,
    start,
    states,
    stretch,
    tables,
    tiles,
    variances,
    wide,
)

Mixture = tuple[Tensor, Tensor, Tensor]  # mu (H, K, R), omega (H, K, R), alpha (H, K), or their gradients
Sums = tuple[Tensor, Tensor, Tensor]  # moment (H, K, R), square (H, K, R), count (H, K) in float64


def responsibilities(dgamma: Tensor, x: Routed, mixture: Mixture, v_min: float) -> tuple[Tensor, ...]:
    """dx, dmu, domega, dalpha."""
    (B, T, H, R), K = x.x.shape, dgamma.shape[-1]
    shape = tiles(K, 1)
    with launching(dgamma):
        table = tables(*mixture, v_min, shape)
        centre = per_token(x.x)
        count = triton.cdiv(T, ROWS)
        sizes = (H, T, K, table.bias.shape[1], R, count, ROWS, shape.BK)
        start(kernels.centre_kernel, B * H * count, *x, dgamma, *table, centre, *x.x.stride(), *dgamma.stride(), *sizes)
        dx, sums = _mixture(x, dgamma, K, centre, table)
        return dx, *_parameters(mixture, v_min, sums)


def attention(
    cotangents: tuple[Tensor, Tensor | None, Tensor | None],
    q: Routed,
    k: Routed,
    v: Tensor,
    mixture: Mixture,
    before: Pair | None,
    O: Tensor | None,
    D: Tensor,
    eps: float,
    v_min: float,
    chunk: int | None,
    initial: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, ...]:
    """dq, dk, dv, dmu, domega, dalpha, dS0, dZ0 from cotangents of O, S and Z.

    Without `chunk` every query reads every key, and its state is given as `before`; else the states before all chunks
    are made again. So is O in float32 if it was not kept."""
    G, dS, dZ = cotangents
    K, V = mixture[0].shape[1], v.shape[-1]
    shape = tiles(K, V, chunk or 64)
    with launching(v):
        table = tables(*mixture, v_min, shape)
        if before is None:
            again = states(k, v, K, table, shape, chunk or 1, initial)
            before = again.S, again.Z
        if O is None:
            O, _ = read(q, k, v, before, table, eps, shape, chunk, torch.float32)
        shares, centre_q = _quotient(G, O, D, eps, shape)
        length = chunk or stretch(q.x.shape[1], shape)
        found = states(q, G, K, table, shape, length, (dS, dZ), shares, reverse=True)
        behind = (found.S, found.Z) if chunk else (found.last_S[:, :, None], found.last_Z[:, :, None])
        dv, centre_k = _values(k, q, v, G, shares, behind, table, shape, chunk)
        dq, sums_q = _mixture(q, G, K, centre_q, table, before, shares, k, v, chunk)
        dk, sums_k = _mixture(k, v, K, centre_k, table, behind, shares, q, G, chunk, keys=True)
        return dq, dk, dv, *_parameters(mixture, v_min, sums_q, sums_k), found.last_S, found.last_Z


# ---- launches ------------------------------------------------------------------------------------------------------


def _quotient(G: Tensor, O: Tensor, D: Tensor, eps: float, shape: Tiles) -> tuple[Pair, Tensor]:
    """share and weight of every query, and centre."""
    B, T, H, V = G.shape
    share, weight, centre = torch.empty_like(D), torch.empty_like(D), torch.empty_like(D)
    count = triton.cdiv(T, shape.BT)
    arguments = (G, O, D, share, weight, centre, *G.stride(), *O.stride(), H, T, V, float(eps), count)
    start(kernels.quotient_kernel, B * H * count, *arguments, shape.BT, shape.BV)
    return (share, weight), centre


def _values(
    k: Routed, q: Routed, v: Tensor, G: Tensor, shares: Pair, behind: Pair, table: Table, shape: Tiles,
    chunk: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dv, and centre of every key, from the cotangents of the states `behind` it."""
    (B, T, H, R), V, (parts, K) = k.x.shape, v.shape[-1], behind[1].shape[2:]
    length = chunk or T
    counts = triton.cdiv(length, shape.BT), max(triton.cdiv(V, shape.BV), 1)
    dv, centre = torch.empty(v.shape, dtype=v.dtype, device=v.device), wide(v, B, H, counts[1], T)
    arguments = (*k, *q, v, G, *shares, *table, *behind, dv, centre)
    strides = (*k.x.stride(), *q.x.stride(), *v.stride(), *G.stride(), *dv.stride())
    sizes = (H, T, K, table.bias.shape[1], R, V, parts, length, *counts)
    programs = B * H * parts * math.prod(counts) if T else 0
    start(kernels.value_kernel, programs, *arguments, *strides, *sizes, chunk is not None, *shape)
    return dv, centre.sum(2)


def _mixture(
    tokens: Routed,
    value: Tensor,
    K: int,
    centre: Tensor,
    table: Table,
    seen: Pair | tuple[None, None] = (None, None),
    shares: Pair | tuple[None, None] = (None, None),
    across: Routed | tuple[None, None, None] = (None, None, None),
    other: Tensor | None = None,
    chunk: int | None = None,
    keys: bool = False,
) -> tuple[Tensor, Sums]:
    """dx, and the sums for the mixture, of queries with value dO that have `seen` states, or of keys with value v that
    have seen their cotangents; the tokens across the affinity have the `other` value. Of neither: `value` is dgamma."""
    x, y = tokens[0], across[0]
    (B, T, H, R), (W, V) = x.shape, (table.bias.shape[1], value.shape[-1])
    # smaller than elsewhere, so that nothing spills
    BT, BK, BV = tiles(16, min(V, 32 if chunk and x.dtype == torch.float32 else 16), chunk or 64)
    BR = min(4, max(2, triton.next_power_of_2(R)))
    NR = min(16, triton.next_power_of_2(triton.cdiv(R, BR)))
    # At most 64 stretches, and long ones: their sums stay a fraction of x.
    unit = chunk or BT
    chunks = max(1, triton.cdiv(T, 64 * unit), triton.cdiv(4 * K, unit))
    parts = triton.cdiv(T, unit * chunks)
    lengths = (chunks, unit) if chunk else (1, unit * chunks)
    dx = torch.empty(x.shape, dtype=x.dtype if K <= BK else torch.float32, device=x.device)
    moment, square, count = wide(x, B, H, parts, K, R), wide(x, B, H, parts, K, R), wide(x, B, H, parts, K)
    tensors = (*tokens, value, *across, other, *seen, *shares, centre, *table, dx, moment, square, count)
    strides = [n for z in (x, value, y, other, dx) for n in ((0, 0, 0, 0) if z is None else z.stride())]
    states = 0 if seen[1] is None else seen[1].shape[2]
    tiles_r, blocks = triton.cdiv(R, NR * BR), min(NR, triton.cdiv(R, BR))
    sizes = (parts, *lengths, states, tiles_r, blocks, keys, chunk is not None, BT, BK, BV, BR, NR)
    for k0 in range(0, K, BK):
        start(kernels.mixture_kernel, B * H * parts * tiles_r, *tensors, *strides, H, T, K, W, R, V, k0, *sizes)
    total_moment, total_square, total_count = (z.sum((0, 2), dtype=torch.float64) for z in (moment, square, count))
    return dx.to(x.dtype), (total_moment, total_square, total_count)


def _parameters(mixture: Mixture, v_min: float, *sums: Sums) -> Mixture:
    """dmu, domega, dalpha from sums of ds (x - mu), ds (x - mu)^2 and ds over queries and over keys."""
    mu, omega, alpha = mixture
    moment, square, count = (torch.stack(z).sum(0) for z in zip(*sums, strict=True))
    var = variances(omega, v_min)
    dvar = (square / var - count[..., None]) / var / 2
    domega = dvar * torch.sigmoid(omega.double())
    return (moment / var).to(mu.dtype), domega.to(omega.dtype), count.to(alpha.dtype)
