"""Gaussian mixture attention in Triton, forward: responsibilities, aggregation, broadcasting; no (N, K) array.

Source: GMA (arXiv 2606.18283) (3), (5), (7), (14), (16) and the causal form. Each head has its own mixture:

    s_nk = alpha_k - 1/2 sum_r log var_kr - 1/2 sum_r (x_nr - mu_kr)^2 / var_kr                   (16)
    gamma_nk = exp(s_nk - max_l s_nl) / sum_l exp(s_nl - max_l s_nl)                              (3)
    S_k = sum_j gamma_k(k_j) v_j,  Z_k = sum_j gamma_k(k_j)                                       (5)
    O_i = sum_k gamma_k(q_i) S_k / (sum_k gamma_k(q_i) Z_k + eps)                                 (7)

Two passes over the components: the first keeps only two numbers of each token, the second makes
responsibilities one tile of components at a time where they are used. So nothing depends on K, R or V fitting in a
block. Token sums are partial sums of fixed stretches of tokens, added in order: no atomics, the same bits every run.
A row of the output depends on tile shapes, which depend on K, V and chunk alone, not on T, B or H.

The kernels compute in float32 (dot products in full precision, "ieee"); inputs are converted on load, O on store.
On a machine without CUDA the kernels run in Triton's interpreter, which truncates float32 to bfloat16 on store instead
of rounding: bfloat16 verdicts are withheld there.

    letter     shape                                  meaning
    top total  (B, H, N)                              max_k s_nk and sum_k exp(s_nk - top_n) of each token
    part       (B, H, parts, K, V), (B, H, parts, K)  sums over stretches of tokens, then the states before them
    t i j kk vv                                       indices of a tile: tokens, queries, keys, components, channels
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from mixproof.verify import implements
from mixproof.verify.subjects.triton import interpreter

interpreter.start()  # before the first import of triton

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

Tensor = torch.Tensor
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DECLARED = {
    "name": "triton.fused",
    "layout": "B T H D",
    "dtypes": ("float32", "float16", "bfloat16"),
    "dot": "float32",
    "exp_ulps": 3,  # ex2.approx is good to 2 ulp, _exp adds a rounding
    "gradients": False,
    "devices": ("cpu", "cuda"),
    "requires": ("triton",),
    "slow": True,
    "chunk": 64,
}


@implements("gma.responsibilities", **DECLARED)
def responsibilities(x: Tensor, mu: Tensor, omega: Tensor, alpha: Tensor, v_min: float = 0.0) -> Tensor:
    """gamma_k(x_n): x (B, T, H, R), mu and omega (H, K, R), alpha (H, K) -> (B, T, H, K)."""
    B, T, H, R, K = _sizes("BTHRK", {"x": (x, "BTHR")} | _mixture(mu, omega, alpha), v_min=v_min)
    gamma = torch.empty(B, T, H, K, dtype=x.dtype, device=x.device)
    shape = _tiles(K, 1)
    with _launching(x):
        table = _tables(mu, omega, alpha, v_min)
        top, total = _normalisers(x, table, shape)
        grid = (B * H * triton.cdiv(T, shape.BT) * triton.cdiv(K, shape.BK),)
        _start(_gamma_kernel, grid, x, top, total, *table, gamma, *x.stride(), *gamma.stride(), H, T, K, R, *shape[:2])
    return gamma


@implements("gma.bidirectional", **DECLARED)
def bidirectional(
    q: Tensor, k: Tensor, v: Tensor, mu: Tensor, omega: Tensor, alpha: Tensor, eps: float = 1e-6, v_min: float = 0.0
) -> Tensor:
    """Every token reads every token: q, k (B, T, H, R), v (B, T, H, V) -> O (B, T, H, V)."""
    arguments = {"q": (q, "BTHR"), "k": (k, "BTHR"), "v": (v, "BTHV")}
    _sizes("T", arguments | _mixture(mu, omega, alpha), eps=eps, v_min=v_min)
    return cross(q, k, v, mu, omega, alpha, eps, v_min)


@implements("gma.cross", **DECLARED)
def cross(
    q: Tensor, k: Tensor, v: Tensor, mu: Tensor, omega: Tensor, alpha: Tensor, eps: float = 1e-6, v_min: float = 0.0
) -> Tensor:
    """T queries read a context of S tokens: q (B, T, H, R), k (B, S, H, R), v (B, S, H, V) -> O (B, T, H, V)."""
    arguments = {"q": (q, "BTHR"), "k": (k, "BSHR"), "v": (v, "BSHV")}
    B, T, H, S, V, K = _sizes("BTHSVK", arguments | _mixture(mu, omega, alpha), eps=eps, v_min=v_min)
    O = torch.empty(B, T, H, V, dtype=q.dtype, device=q.device)
    shape = _tiles(K, V)
    # At most about 64 stretches: memory stays bounded in S, and each is long enough to be worth a program.
    stretch = shape.BT * max(1, triton.cdiv(S, 64 * shape.BT))
    with _launching(q):
        table = _tables(mu, omega, alpha, v_min)
        norms = _normalisers(q, table, shape)
        _, _, sums, counts = _states(k, v, table, _normalisers(k, table, shape), shape, stretch, None, None)
        _read(q, k, v, norms, norms, table, sums[:, :, None], counts[:, :, None], O, eps, shape, None)
    return O


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
    arguments |= {"S0": (S0, "BHKV"), "Z0": (Z0, "BHK")}
    B, T, H, V, K = _sizes("BTHVK", arguments, eps=eps, v_min=v_min)
    if not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"chunk is {chunk!r}; expected a whole number of tokens, at least 1")
    O = torch.empty(B, T, H, V, dtype=q.dtype, device=q.device)
    shape = _tiles(K, V, chunk)
    chunk = min(chunk, max(T, 1))
    with _launching(q):
        table = _tables(mu, omega, alpha, v_min)
        norms_q, norms_k = _normalisers(q, table, shape), _normalisers(k, table, shape)
        before_S, before_Z, S, Z = _states(k, v, table, norms_k, shape, chunk, S0, Z0)
        _read(q, k, v, norms_q, norms_k, table, before_S, before_Z, O, eps, shape, chunk)
    return O, S, Z


# ---- kernels -------------------------------------------------------------------------------------------------------
# Programs are numbered along one axis (the others end at 65,535). A token's offset is computed in 64 bits.


@triton.jit
def _exp(t):
    """exp(t) for t <= 0, good to a few units in the last place everywhere: the rounding of t log2(e), which alone costs
    |t| / 2 of them, is put back."""
    t = tl.where(t < -200.0, -200.0, t)  # not tl.maximum, which loses NaN; exp(-200) is 0 in float32
    y = t * 1.44269502162933349609375
    low = tl.fma(t, 1.44269502162933349609375, -y) + t * 1.925963033500996e-8
    e = tl.exp2(y)
    return e + e * (low * 0.6931471805599453)


@triton.jit
def _logits(x, stride, mean, precision, bias, keep_t, kk, K, R, BT: tl.constexpr, BK: tl.constexpr):
    """s (BT, BK) of the tokens at x (pointers) for the components kk; -inf for kk >= K.                        (16)"""
    keep_t, keep_k = keep_t[:, None], (kk < K)[None, :]
    x, mean, precision = x[:, None], mean + kk[None, :], precision + kk[None, :]
    square = tl.zeros([BT, BK], tl.float32)
    for _ in range(R):
        x_r = tl.load(x, mask=keep_t, other=0.0).to(tl.float32)
        e = x_r - tl.load(mean, mask=keep_k, other=0.0)  # the difference first: x^2 - 2 x mu + mu^2 cancels
        square += e * e * tl.load(precision, mask=keep_k, other=0.0)
        x += stride
        mean += K
        precision += K
    s = tl.load(bias + kk[None, :], mask=keep_k, other=0.0) - 0.5 * square
    return tl.where(keep_k, s, float("-inf"))


@triton.jit
def _gamma(x, stride, top, total, mean, precision, bias, t, end, kk, K, R, BT: tl.constexpr, BK: tl.constexpr):
    """gamma (BT, BK) of tokens t for components kk; zero for t >= end, whose maximum is taken as inf.           (3)"""
    keep_t = t < end
    s = _logits(x, stride, mean, precision, bias, keep_t, kk, K, R, BT, BK)
    top_t = tl.load(top + t, mask=keep_t, other=float("inf"))
    total_t = tl.load(total + t, mask=keep_t, other=1.0)
    return tl.div_rn(_exp(s - top_t[:, None]), total_t[:, None])


@triton.jit
def _normaliser_kernel(
    x, top, total, mean, precision, bias, xb, xt, xh, xd, H, T, K, R, BT: tl.constexpr, BK: tl.constexpr
):
    """top and total of BT tokens: the maximum moves while components pass by, the sum moves with it."""
    tiles = tl.cdiv(T, BT)
    bh = (tl.program_id(0) // tiles).to(tl.int64)
    t = ((tl.program_id(0) % tiles) * BT + tl.arange(0, BT)).to(tl.int64)
    b, h = bh // H, bh % H
    x += b * xb + h * xh + t * xt
    highest = tl.full([BT], float("-inf"), tl.float32)
    sum_ = tl.zeros([BT], tl.float32)
    for k0 in range(0, K, BK):
        kk = k0 + tl.arange(0, BK)
        s = _logits(x, xd, mean + h * R * K, precision + h * R * K, bias + h * K, t < T, kk, K, R, BT, BK)
        higher = tl.maximum(highest, tl.max(s, 1))
        sum_ = sum_ * _exp(highest - higher) + tl.sum(_exp(s - higher[:, None]), 1)
        highest = higher
    tl.store(top + bh * T + t, highest, mask=t < T)
    tl.store(total + bh * T + t, sum_, mask=t < T)


@triton.jit
def _gamma_kernel(
    x, top, total, mean, precision, bias, gamma, xb, xt, xh, xd, gb, gt, gh, gd, H, T, K, R,
    BT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile (BT, BK) of responsibilities."""
    tiles_k, tiles_t = tl.cdiv(K, BK), tl.cdiv(T, BT)
    kk = (tl.program_id(0) % tiles_k) * BK + tl.arange(0, BK)
    t = ((tl.program_id(0) // tiles_k % tiles_t) * BT + tl.arange(0, BT)).to(tl.int64)
    bh = (tl.program_id(0) // tiles_k // tiles_t).to(tl.int64)
    b, h = bh // H, bh % H
    x += b * xb + h * xh + t * xt
    mean += h * R * K
    precision += h * R * K
    g = _gamma(x, xd, top + bh * T, total + bh * T, mean, precision, bias + h * K, t, T, kk, K, R, BT, BK)
    gamma += b * gb + h * gh + t[:, None] * gt + kk[None, :].to(tl.int64) * gd
    tl.store(gamma, g.to(gamma.dtype.element_ty), mask=(t < T)[:, None] & (kk < K)[None, :])


@triton.jit
def _aggregate_kernel(
    k, v, top, total, mean, precision, bias, part_S, part_Z,
    kb, kt, kh, kd, vb, vt, vh, vd, H, T, K, R, V, parts, stretch,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """S_k and Z_k over one stretch of tokens, for a tile (BK, BV).                                              (5)"""
    tiles_v, tiles_k = tl.maximum(tl.cdiv(V, BV), 1), tl.cdiv(K, BK)
    tile_v = tl.program_id(0) % tiles_v
    vv = (tile_v * BV + tl.arange(0, BV)).to(tl.int64)
    kk = (tl.program_id(0) // tiles_v % tiles_k) * BK + tl.arange(0, BK)
    part = tl.program_id(0) // tiles_v // tiles_k
    bh, c = (part // parts).to(tl.int64), part % parts
    b, h = bh // H, bh % H
    k += b * kb + h * kh
    v += b * vb + h * vh
    start = c.to(tl.int64) * stretch
    end = tl.minimum(start + stretch, T)
    S = tl.zeros([BK, BV], tl.float32)
    Z = tl.zeros([BK], tl.float32)
    for t0 in range(start, end, BT):
        t = t0 + tl.arange(0, BT).to(tl.int64)
        g = _gamma(
            k + t * kt, kd, top + bh * T, total + bh * T, mean + h * R * K, precision + h * R * K, bias + h * K,
            t, end, kk, K, R, BT, BK,
        )  # fmt: skip
        keep = (t < end)[:, None] & (vv < V)[None, :]
        values = tl.load(v + t[:, None] * vt + vv[None, :] * vd, mask=keep, other=0.0).to(tl.float32)
        S = tl.dot(tl.trans(g), values, acc=S, input_precision="ieee")
        Z += tl.sum(g, 0)
    row = part.to(tl.int64) * K + kk
    tl.store(part_S + row[:, None] * V + vv[None, :], S, mask=(kk < K)[:, None] & (vv < V)[None, :])
    if tile_v == 0:
        tl.store(part_Z + row, Z, mask=kk < K)


@triton.jit
def _prefix_kernel(part, initial, final, ib, ih, ik, iv, H, parts, n, V, BN: tl.constexpr):
    """Replaces the sums (parts, n) by the state before each part, initial + part_0 + ... + part_{c-1}; writes the state
    after the last. n counts (K, V)."""
    tiles = tl.cdiv(n, BN)
    i = ((tl.program_id(0) % tiles) * BN + tl.arange(0, BN)).to(tl.int64)
    bh = (tl.program_id(0) // tiles).to(tl.int64)
    keep = i < n
    state = tl.zeros([BN], tl.float32)
    if initial is not None:
        initial += bh // H * ib + bh % H * ih + i // V * ik + i % V * iv
        state += tl.load(initial, mask=keep, other=0.0).to(tl.float32)
    part += bh * parts * n + i
    for _ in range(parts):
        sum_ = tl.load(part, mask=keep, other=0.0)
        tl.store(part, state, mask=keep)
        state += sum_
        part += n
    tl.store(final + bh * n + i, state, mask=keep)


@triton.jit
def _read_kernel(
    q, k, v, top_q, total_q, top_k, total_k, mean, precision, bias, S, Z, O,
    qb, qt, qh, qd, kb, kt, kh, kd, vb, vt, vh, vd, ob, ot, oh, od, H, T, K, R, V, parts, stretch, eps,
    CAUSAL: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """O_i for a tile (BT, BV): from the state before its chunk and, if causal, from tokens j <= i of its chunk.   (7)

    A chunk may have several tiles; a tile lies in one chunk. Not causal: one state, and all tokens are one chunk."""
    tiles_v, tiles_t = tl.cdiv(V, BV), tl.cdiv(stretch, BT)
    vv = ((tl.program_id(0) % tiles_v) * BV + tl.arange(0, BV)).to(tl.int64)
    tile = tl.program_id(0) // tiles_v % tiles_t
    part = tl.program_id(0) // tiles_v // tiles_t
    bh, c = (part // parts).to(tl.int64), part % parts
    b, h = bh // H, bh % H
    start = c.to(tl.int64) * stretch
    end = tl.minimum(start + stretch, T)
    first = start + tile * BT
    i = first + tl.arange(0, BT).to(tl.int64)
    q += b * qb + h * qh + i * qt
    k += b * kb + h * kh
    v += b * vb + h * vh
    mean += h * R * K
    precision += h * R * K
    bias += h * K
    numerator = tl.zeros([BT, BV], tl.float32)
    D = tl.zeros([BT], tl.float32)
    for k0 in range(0, K, BK):
        kk = k0 + tl.arange(0, BK)
        row = part.to(tl.int64) * K + kk
        keep = (kk < K)[:, None] & (vv < V)[None, :]
        state = tl.load(S + row[:, None] * V + vv[None, :], mask=keep, other=0.0)
        count = tl.load(Z + row, mask=kk < K, other=0.0)
        gq = _gamma(q, qd, top_q + bh * T, total_q + bh * T, mean, precision, bias, i, end, kk, K, R, BT, BK)
        numerator = tl.dot(gq, state, acc=numerator, input_precision="ieee")
        D += tl.sum(gq * count[None, :], 1)
        if CAUSAL:
            for j0 in range(start, tl.minimum(first + BT, end), BT):
                j = j0 + tl.arange(0, BT).to(tl.int64)
                gk = _gamma(
                    k + j * kt, kd, top_k + bh * T, total_k + bh * T, mean, precision, bias, j, end, kk, K, R, BT, BK
                )  # fmt: skip
                affinity = tl.dot(gq, tl.trans(gk), input_precision="ieee")
                affinity = tl.where(i[:, None] >= j[None, :], affinity, 0.0)  # select: 0 * NaN is NaN
                keep_v = (j < end)[:, None] & (vv < V)[None, :]
                values = tl.load(v + j[:, None] * vt + vv[None, :] * vd, mask=keep_v, other=0.0).to(tl.float32)
                numerator = tl.dot(affinity, values, acc=numerator, input_precision="ieee")
                D += tl.sum(affinity, 1)
    out = tl.div_rn(numerator, (D + eps)[:, None])
    O += b * ob + h * oh + i[:, None] * ot + vv[None, :] * od
    tl.store(O, out.to(O.dtype.element_ty), mask=(i < end)[:, None] & (vv < V)[None, :])


# ---- launches ------------------------------------------------------------------------------------------------------


class _Tiles(NamedTuple):
    """Tokens, components and channels of a tile. tl.dot wants at least 16 of each."""

    BT: int
    BK: int
    BV: int


class _Table(NamedTuple):
    """What the kernels need of the mixtures, float32, the component axis last: loads of a tile are contiguous."""

    mean: Tensor  # (H, R, K)
    precision: Tensor  # (H, R, K) 1 / var
    bias: Tensor  # (H, K) alpha - 1/2 sum_r log var


def _tiles(K: int, V: int, chunk: int = 64) -> _Tiles:
    # Chosen so that no kernel spills registers on sm_90, whatever divides the sizes: tests/test_triton_compiled.py.
    sizes = zip((32, 32, 64), (chunk, K, V), strict=True)
    return _Tiles(*(min(most, max(16, triton.next_power_of_2(n))) for most, n in sizes))


@torch.no_grad()
def _tables(mu: Tensor, omega: Tensor, alpha: Tensor, v_min: float) -> _Table:
    # In float64, rounded once: torch's float32 bits depend on strides and on where in the tensor an element stands.
    var = torch.nn.functional.softplus(omega.double(), threshold=40) + v_min  #                               (14)
    bias = alpha.double() - 0.5 * var.log().sum(-1)
    mean, precision = (x.float().mT.contiguous() for x in (mu, var.reciprocal()))
    return _Table(mean, precision, bias.float().contiguous())


def _normalisers(x: Tensor, table: _Table, shape: _Tiles) -> tuple[Tensor, Tensor]:
    B, T, H, R = x.shape
    top, total = (torch.empty(B, H, T, dtype=torch.float32, device=x.device) for _ in range(2))
    grid = (B * H * triton.cdiv(T, shape.BT),)
    _start(_normaliser_kernel, grid, x, top, total, *table, *x.stride(), H, T, table.bias.shape[1], R, *shape[:2])
    return top, total


def _states(
    k: Tensor,
    v: Tensor,
    table: _Table,
    norms: tuple[Tensor, Tensor],
    shape: _Tiles,
    stretch: int,
    S0: Tensor | None,
    Z0: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The states before every stretch of tokens, (B, H, parts, K, V) and (B, H, parts, K), and those after the last."""
    (B, T, H, R), V, K = k.shape, v.shape[-1], table.bias.shape[1]
    parts = triton.cdiv(T, stretch)
    part_S, part_Z, S, Z = (
        torch.empty(B, H, *size, dtype=torch.float32, device=k.device)
        for size in ((parts, K, V), (parts, K), (K, V), (K,))
    )
    grid = (B * H * parts * triton.cdiv(K, shape.BK) * max(triton.cdiv(V, shape.BV), 1),)
    arguments = (k, v, *norms, *table, part_S, part_Z, *k.stride(), *v.stride(), H, T, K, R, V, parts, stretch)
    _start(_aggregate_kernel, grid, *arguments, *shape)
    for part, initial, final, n in ((part_S, S0, S, V), (part_Z, Z0, Z, 1)):
        strides = (0, 0, 0, 0) if initial is None else (*initial.stride(), 0)[:4]
        grid = (B * H * triton.cdiv(K * n, 256),)
        _start(_prefix_kernel, grid, part, initial, final, *strides, H, parts, K * n, n, 256)
    return part_S, part_Z, S, Z


def _read(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    norms_q: tuple[Tensor, Tensor],
    norms_k: tuple[Tensor, Tensor],
    table: _Table,
    S: Tensor,
    Z: Tensor,
    O: Tensor,
    eps: float,
    shape: _Tiles,
    chunk: int | None,
) -> None:
    """Fills O from the states S (B, H, parts, K, V), Z (B, H, parts, K), and inside chunks if there are chunks."""
    (B, T, H, R), V, (parts, K) = q.shape, v.shape[-1], Z.shape[2:]
    stretch = chunk or T
    grid = (B * H * parts * triton.cdiv(stretch, shape.BT) * triton.cdiv(V, shape.BV) if T else 0,)
    arguments = (q, k, v, *norms_q, *norms_k, *table, S, Z, O)
    strides = (*q.stride(), *k.stride(), *v.stride(), *O.stride())
    sizes = (H, T, K, R, V, parts, stretch, float(eps))
    _start(_read_kernel, grid, *arguments, *strides, *sizes, chunk is not None, *shape)


def _start(kernel: Any, grid: tuple[int], *arguments: Any) -> None:
    if grid[0]:
        kernel[grid](*arguments, num_warps=8)


@contextmanager
def _launching(x: Tensor) -> Iterator[None]:
    """On x's device. Interpreted kernels overflow as silently as compiled ones."""
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext(), np.errstate(all="ignore"):
        yield


# ---- arguments -----------------------------------------------------------------------------------------------------


def _mixture(mu: Tensor, omega: Tensor, alpha: Tensor) -> dict[str, tuple[Tensor, str]]:
    return {"mu": (mu, "HKR"), "omega": (omega, "HKR"), "alpha": (alpha, "HK")}


def _sizes(wanted: str, arguments: Mapping[str, tuple[Tensor | None, str]], **scalars: float) -> list[int]:
    """The sizes of the axes `wanted`, of tensors named with their axes; the first sets the device and, for those with
    tokens, the dtype. Raises TypeError or ValueError naming the argument that does not fit."""
    sizes: dict[str, int] = {}
    first = next(iter(arguments))
    for name, (x, axes) in arguments.items():
        if x is None and name in ("S0", "Z0"):
            continue
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; expected a torch tensor")
        like = arguments[first][0]
        assert like is not None
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {x.dtype}; expected float32, float16 or bfloat16")
        if set(axes) & {"T", "S"} and x.dtype != like.dtype:
            raise TypeError(f"{name} has dtype {x.dtype}, but {first} has {like.dtype}")
        if x.device != like.device:
            raise ValueError(f"{name} is on {x.device}, but {first} is on {like.device}")
        if x.dim() != len(axes):
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected ({', '.join(axes)})")
        for axis, n in zip(axes, x.shape, strict=True):
            if sizes.setdefault(axis, n) != n:
                raise ValueError(f"{name} has shape {tuple(x.shape)}: axis {axis} is {n}, but elsewhere {sizes[axis]}")
    if sizes["K"] == 0:
        raise ValueError("mu has no components; expected K >= 1")
    for name, value in scalars.items():
        if not value >= 0:
            raise ValueError(f"{name} is {value}; expected a number that is not negative")
    return [sizes[axis] for axis in wanted]
