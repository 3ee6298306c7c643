"""The Triton kernels of Gaussian mixture attention that forward and backward share; the functions that launch them are
in gma_launches.py, and the letters in gma.py.

All compute in float32: inputs are converted on load, results on store; offsets are 64-bit."""

from mixproof.verify.subjects.triton import interpreter

interpreter.start()  # before the first import of triton

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

# Programs are numbered along one axis (the others end at 65,535). Numbers of programs, tokens and components are 64-bit
# from the start, and counts of tiles are arguments: that is fewer operations, which the interpreter counts.


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
def _logits(x, stride, mean, precision, bias, keep_t, kk, W, R, BT: tl.constexpr, BK: tl.constexpr):
    """s (BT, BK) of the tokens at x (pointers) for the components kk; -inf where the table is padded.          (16)"""
    x, keep_t, kk = x[:, None], keep_t[:, None], kk[None, :]
    mean += kk
    precision += kk
    square = tl.zeros([BT, BK], tl.float32)
    for _ in range(R):
        # the difference first: x^2 - 2 x mu + mu^2 cancels
        e = tl.load(x, mask=keep_t, other=0.0).to(tl.float32) - tl.load(mean)
        square += e * e * tl.load(precision)
        x += stride
        mean += W
        precision += W
    return tl.load(bias + kk) - 0.5 * square


@triton.jit
def _gamma(x, stride, top, total, mean, precision, bias, t, end, kk, W, R, BT: tl.constexpr, BK: tl.constexpr):
    """gamma (BT, BK) of tokens t for components kk; zero for t >= end, whose maximum is taken as inf.           (3)"""
    keep_t = t < end
    s = _logits(x, stride, mean, precision, bias, keep_t, kk, W, R, BT, BK)
    top_t = tl.load(top + t, mask=keep_t, other=float("inf"))
    total_t = tl.load(total + t, mask=keep_t, other=1.0)
    return tl.div_rn(_exp(s - top_t[:, None]), total_t[:, None])


@triton.jit
def _rows(x, xt, xd, t, end, dd, D):
    """Rows t and columns dd of x (pointer) as float32; zero for t >= end and dd >= D."""
    t, dd = t[:, None], dd[None, :]
    return tl.load(x + t * xt + dd * xd, mask=(t < end) & (dd < D), other=0.0).to(tl.float32)


@triton.jit
def normaliser_kernel(
    x, top, total, mean, precision, bias, xb, xt, xh, xd, H, T, W, R, tiles, BT: tl.constexpr, BK: tl.constexpr
):
    """top and total of BT tokens: the maximum moves while components pass by, the sum moves with it."""
    program = tl.program_id(0).to(tl.int64)
    t = program % tiles * BT + tl.arange(0, BT)
    bh = program // tiles
    b, h = bh // H, bh % H
    x += b * xb + h * xh + t * xt
    table = h * R * W
    mean += table
    precision += table
    bias += h * W
    keep = t < T
    highest = tl.full([BT], float("-inf"), tl.float32)
    sum_ = tl.zeros([BT], tl.float32)
    for k0 in range(0, W, BK):
        kk = k0 + tl.arange(0, BK).to(tl.int64)
        s = _logits(x, xd, mean, precision, bias, keep, kk, W, R, BT, BK)
        higher = tl.maximum(highest, tl.max(s, 1))
        sum_ = sum_ * _exp(highest - higher) + tl.sum(_exp(s - higher[:, None]), 1)
        highest = higher
    at = bh * T + t
    tl.store(top + at, highest, mask=keep)
    tl.store(total + at, sum_, mask=keep)


@triton.jit
def gamma_kernel(
    x, top, total, mean, precision, bias, gamma, xb, xt, xh, xd, gb, gt, gh, gd, H, T, K, W, R, tiles_t, tiles_k,
    BT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile (BT, BK) of responsibilities."""
    program = tl.program_id(0).to(tl.int64)
    kk = program % tiles_k * BK + tl.arange(0, BK)
    t = program // tiles_k % tiles_t * BT + tl.arange(0, BT)
    bh = program // tiles_k // tiles_t
    b, h = bh // H, bh % H
    x += b * xb + h * xh + t * xt
    table = h * R * W
    g = _gamma(
        x, xd, top + bh * T, total + bh * T, mean + table, precision + table, bias + h * W, t, T, kk, W, R, BT, BK
    )
    t, kk = t[:, None], kk[None, :]
    gamma += b * gb + h * gh + t * gt + kk * gd
    tl.store(gamma, g.to(gamma.dtype.element_ty), mask=(t < T) & (kk < K))


@triton.jit
def aggregate_kernel(
    k, top, total, v, share, weight, mean, precision, bias, part_S, part_Z,
    kb, kt, kh, kd, vb, vt, vh, vd, H, T, K, W, R, V, parts, stretch, tiles_k, tiles_v,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """S_k and Z_k over one stretch of tokens, for a tile (BK, BV).                                              (5)

    In the backward, their cotangents: tokens are queries, v is dO, and token t counts share_t times in S, share_t
    weight_t times in Z."""
    program = tl.program_id(0).to(tl.int64)
    tile_v = program % tiles_v
    vv = tile_v * BV + tl.arange(0, BV)
    kk = program // tiles_v % tiles_k * BK + tl.arange(0, BK)
    part = program // tiles_v // tiles_k
    bh, c = part // parts, part % parts
    b, h = bh // H, bh % H
    k += b * kb + h * kh
    v += b * vb + h * vh
    table = h * R * W
    mean += table
    precision += table
    bias += h * W
    top += bh * T
    total += bh * T
    if share is not None:
        share += bh * T
        weight += bh * T
    start = c * stretch
    end = tl.minimum(start + stretch, T)
    S = tl.zeros([BK, BV], tl.float32)
    Z = tl.zeros([BK], tl.float32)
    for t0 in range(start, end, BT):
        t = t0 + tl.arange(0, BT)
        g = _gamma(k + t * kt, kd, top, total, mean, precision, bias, t, end, kk, W, R, BT, BK)
        gS, gZ = g, g
        if share is not None:
            gS = g * tl.load(share + t, mask=t < end, other=0.0)[:, None]
            gZ = gS * tl.load(weight + t, mask=t < end, other=0.0)[:, None]
        S = tl.dot(tl.trans(gS), _rows(v, vt, vd, t, end, vv, V), acc=S, input_precision="ieee")
        Z += tl.sum(gZ, 0)
    row = part * K + kk
    tl.store(part_S + row[:, None] * V + vv[None, :], S, mask=(kk < K)[:, None] & (vv < V)[None, :])
    if tile_v == 0:
        tl.store(part_Z + row, Z, mask=kk < K)


@triton.jit
def prefix_kernel(part, initial, final, ib, ih, ik, iv, H, parts, n, V, tiles, REVERSE: tl.constexpr, BN: tl.constexpr):
    """Replaces the sums (parts, n) by the state before each part, initial + part_0 + ... + part_{c-1}; writes the state
    after the last. REVERSE: from the last part to the first. n counts (K, V)."""
    program = tl.program_id(0).to(tl.int64)
    i = program % tiles * BN + tl.arange(0, BN)
    bh = program // tiles
    keep = i < n
    state = tl.zeros([BN], tl.float32)
    if initial is not None:
        initial += bh // H * ib + bh % H * ih + i // V * ik + i % V * iv
        state += tl.load(initial, mask=keep, other=0.0).to(tl.float32)
    first = bh * parts + parts - 1 if REVERSE else bh * parts
    part += first * n + i
    for _ in range(parts):
        sum_ = tl.load(part, mask=keep, other=0.0)
        tl.store(part, state, mask=keep)
        state += sum_
        part += -n if REVERSE else n
    tl.store(final + bh * n + i, state, mask=keep)


@triton.jit
def read_kernel(
    q, top_q, total_q, k, top_k, total_k, v, mean, precision, bias, S, Z, O, mass,
    qb, qt, qh, qd, kb, kt, kh, kd, vb, vt, vh, vd, ob, ot, oh, od,
    H, T, K, W, R, V, parts, stretch, eps, tiles_t, tiles_v,
    CAUSAL: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """O_i for a tile (BT, BV): from the state before its chunk and, if causal, from tokens j <= i of its chunk; and
    the mass D_i.                                                                                                (7)

    A chunk may have several tiles; a tile lies in one chunk. Not causal: one state, and all tokens are one chunk."""
    program = tl.program_id(0).to(tl.int64)
    tile_v = program % tiles_v
    vv = tile_v * BV + tl.arange(0, BV)
    tile = program // tiles_v % tiles_t
    part = program // tiles_v // tiles_t
    bh, c = part // parts, part % parts
    b, h = bh // H, bh % H
    start = c * stretch
    end = tl.minimum(start + stretch, T)
    first = start + tile * BT
    i = first + tl.arange(0, BT)
    q += b * qb + h * qh + i * qt
    table = h * R * W
    mean += table
    precision += table
    bias += h * W
    top_q += bh * T
    total_q += bh * T
    if CAUSAL:
        k += b * kb + h * kh
        v += b * vb + h * vh
        top_k += bh * T
        total_k += bh * T
    numerator = tl.zeros([BT, BV], tl.float32)
    D = tl.zeros([BT], tl.float32)
    for k0 in range(0, K, BK):
        kk = k0 + tl.arange(0, BK).to(tl.int64)
        row = part * K + kk
        keep = (kk < K)[:, None] & (vv < V)[None, :]
        state = tl.load(S + row[:, None] * V + vv[None, :], mask=keep, other=0.0)
        count = tl.load(Z + row, mask=kk < K, other=0.0)
        gq = _gamma(q, qd, top_q, total_q, mean, precision, bias, i, end, kk, W, R, BT, BK)
        numerator = tl.dot(gq, state, acc=numerator, input_precision="ieee")
        D += tl.sum(gq * count[None, :], 1)
        if CAUSAL:
            for j0 in range(start, tl.minimum(first + BT, end), BT):
                j = j0 + tl.arange(0, BT)
                gk = _gamma(k + j * kt, kd, top_k, total_k, mean, precision, bias, j, end, kk, W, R, BT, BK)
                affinity = tl.dot(gq, tl.trans(gk), input_precision="ieee")
                affinity = tl.where(i[:, None] >= j[None, :], affinity, 0.0)  # select: 0 * NaN is NaN
                numerator = tl.dot(affinity, _rows(v, vt, vd, j, end, vv, V), acc=numerator, input_precision="ieee")
                D += tl.sum(affinity, 1)
    out = tl.div_rn(numerator, (D + eps)[:, None])
    if tile_v == 0:
        tl.store(mass + bh * T + i, D, mask=i < end)
    i, vv = i[:, None], vv[None, :]
    O += b * ob + h * oh + i * ot + vv * od
    tl.store(O, out.to(O.dtype.element_ty), mask=(i < end) & (vv < V))
