"""The Triton kernels of Gaussian mixture attention; the functions that launch them, and the letters, are in gma.py.

All compute in float32: inputs are converted on load, results on store; offsets are 64-bit."""

from mixproof.verify.subjects.triton import interpreter

interpreter.start()  # before the first import of triton

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

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
def normaliser_kernel(
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
def gamma_kernel(
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
def aggregate_kernel(
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
def prefix_kernel(part, initial, final, ib, ih, ik, iv, H, parts, n, V, BN: tl.constexpr):
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
def read_kernel(
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
