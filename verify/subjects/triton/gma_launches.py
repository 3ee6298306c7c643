"""How the Triton kernels of Gaussian mixture attention are launched: tiles, tables of the mixtures, and the passes that
forward and backward share. The letters are in gma.py."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad, softplus

from mixproof.verify.subjects.triton import gma_kernels as kernels
from mixproof.verify.subjects.triton.gma_kernels import triton

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]


ROWS = 128  # tokens of a tile where there is nothing but components


class Tiles(NamedTuple):
    """Tokens, components and channels of a tile. tl.dot wants at least 16 of each."""

    BT: int
    BK: int
    BV: int


class Table(NamedTuple):
    """What the kernels need of the mixtures, float32, the component axis last: loads of a tile are contiguous. That
    axis is filled to W, a multiple of BK, with copies of component 0 that have no mass: no load needs a mask."""

    mean: Tensor  # (H, R, W)
    precision: Tensor  # (H, R, W) 1 / var
    bias: Tensor  # (H, W) alpha - 1/2 sum_r log var; -inf for the copies


class Routed(NamedTuple):
    """Queries or keys, and two numbers of each that make responsibilities of its logits."""

    x: Tensor  # (B, T, H, R)
    top: Tensor  # (B, H, T)
    total: Tensor  # (B, H, T)


class States(NamedTuple):
    """What chunks read, and what is left after the last: S (B, H, parts, K, V), Z (B, H, parts, K), and final ones."""

    S: Tensor
    Z: Tensor
    last_S: Tensor  # (B, H, K, V)
    last_Z: Tensor  # (B, H, K)


def tiles(K: int, V: int, chunk: int = 64) -> Tiles:
    # 1,024 responsibilities a tile: chosen so that no kernel spills registers on sm_90, whatever divides the sizes
    # (tests/test_compiled.py).
    BK = min(32, max(16, triton.next_power_of_2(K)))
    BT, BV = (min(most, max(16, triton.next_power_of_2(n))) for most, n in ((1024 // BK, chunk), (64, V)))
    return Tiles(BT, BK, BV)


def stretch(T: int, shape: Tiles) -> int:
    """Tokens whose sum one program makes: at most about 64 stretches, so that memory stays bounded in T, each long
    enough to be worth a program."""
    return shape.BT * max(1, triton.cdiv(T, 64 * shape.BT))


def tables(mu: Tensor, omega: Tensor, alpha: Tensor, v_min: float, shape: Tiles) -> Table:
    # In float64, rounded once: torch's float32 bits depend on strides and on where in the tensor an element stands.
    var = variances(omega, v_min)
    bias = alpha.double() - 0.5 * var.log().sum(-1)
    fill = -alpha.shape[1] % shape.BK
    filled = (torch.cat([x, x[:, :1].expand(-1, fill, -1)], 1) for x in (mu, var.reciprocal()))
    mean, precision = (x.float().mT.contiguous() for x in filled)
    return Table(mean, precision, pad(bias.float(), (0, fill), value=-math.inf))


def variances(omega: Tensor, v_min: float) -> Tensor:
    """softplus(omega) + v_min in float64.                                                                      (14)"""
    return softplus(omega.double(), threshold=40) + v_min


def routed(x: Tensor, table: Table, shape: Tiles) -> Routed:
    """x with top and total of every token."""
    B, T, H, R = x.shape
    found = Routed(x, per_token(x), per_token(x))
    count = triton.cdiv(T, ROWS)
    arguments = (*found, *table, *x.stride(), H, T, table.bias.shape[1], R, count, ROWS, shape.BK)
    start(kernels.normaliser_kernel, B * H * count, *arguments)
    return found


def states(
    tokens: Routed,
    value: Tensor,
    K: int,
    table: Table,
    shape: Tiles,
    stretch: int,
    initial: tuple[Tensor | None, Tensor | None] = (None, None),
    shares: tuple[Tensor | None, Tensor | None] = (None, None),
    reverse: bool = False,
) -> States:
    """The states before every stretch of tokens and after the last, of keys and their values; or, from the end, their
    cotangents, of queries and dO, where a query counts as its `shares` say."""
    (B, T, H, R), V = tokens.x.shape, value.shape[-1]
    parts = triton.cdiv(T, stretch)
    found = States(*(wide(value, B, H, *size) for size in ((parts, K, V), (parts, K), (K, V), (K,))))
    counts = triton.cdiv(K, shape.BK), max(triton.cdiv(V, shape.BV), 1)
    arguments = (*tokens, value, *shares, *table, found.S, found.Z, *tokens.x.stride(), *value.stride())
    sizes = (H, T, K, table.bias.shape[1], R, V, parts, stretch, *counts)
    start(kernels.aggregate_kernel, B * H * parts * math.prod(counts), *arguments, *sizes, *shape)
    for part, first, last, n in zip(found[:2], initial, found[2:], (V, 1), strict=True):
        strides = (0, 0, 0, 0) if first is None else (*first.stride(), 0)[:4]
        count = triton.cdiv(K * n, 256)
        sizes = (H, parts, K * n, n, count, reverse, 256)
        start(kernels.prefix_kernel, B * H * count, part, first, last, *strides, *sizes)
    return found


def read(
    q: Routed,
    k: Routed,
    v: Tensor,
    before: Pair,
    table: Table,
    eps: float,
    shape: Tiles,
    chunk: int | None,
    dtype: torch.dtype,
) -> Pair:
    """O (B, T, H, V) and the mass D (B, H, T), from the states S (B, H, parts, K, V), Z (B, H, parts, K) `before`, and
    inside chunks if there are chunks."""
    (B, T, H, R), V, (parts, K) = q.x.shape, v.shape[-1], before[1].shape[2:]
    O, D = torch.empty(B, T, H, V, dtype=dtype, device=v.device), per_token(q.x)
    length = chunk or T
    counts = triton.cdiv(length, shape.BT), max(triton.cdiv(V, shape.BV), 1)
    strides = (*q.x.stride(), *k.x.stride(), *v.stride(), *O.stride())
    sizes = (H, T, K, table.bias.shape[1], R, V, parts, length, float(eps), *counts, chunk is not None, *shape)
    programs = B * H * parts * math.prod(counts) if T else 0
    start(kernels.read_kernel, programs, *q, *k, v, *table, *before, O, D, *strides, *sizes)
    return O, D


def per_token(x: Tensor) -> Tensor:
    """A float32 number for each token of x (B, T, H, R), unwritten: (B, H, T)."""
    return wide(x, x.shape[0], x.shape[2], x.shape[1])


def wide(like: Tensor, *shape: int) -> Tensor:
    """An unwritten float32 tensor."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def start(kernel: Any, programs: int, *arguments: Any) -> None:
    if programs:
        kernel[(programs,)](*arguments, num_warps=8)
