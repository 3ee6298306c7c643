"""The Triton kernels of chunkwise TALA, both directions; the functions that launch them, and the letters, are in
tala.py.

A chunk is one tile of tokens first .. first + b - 1. Within it, with a_t the decay of token t,

    D_nm = a_{m+1} .. a_n  (n >= m, else 0)      head_n = a_1 .. a_n      tail_m = a_{m+1} .. a_b

All compute in float32: inputs are converted on load, results on store; offsets are 64-bit. Programs are numbered along
one axis (the others end at 65,535)."""

# pyright: reportArgumentType=false, reportOperatorIssue=false
# (device functions take constants for constexpr, and give tuples)

from mixproof.verify.subjects.triton import interpreter

interpreter.start()  # before the first import of triton

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

# KIND says what is known of the decay:
#   "constant"  decay = a^0, a^1, .., a^BT of the head
#   "log"       decay = log a_t, -inf allowed
#   "signed"    decay = a_t, any real
# Each product of decays is formed of its own factors, never as a quotient or a difference of longer ones: those lose
# digits where decays are strong, and are undefined where one is zero.


@triton.jit
def _product(decay, stride, n, b, keep, KIND: tl.constexpr, REVERSE: tl.constexpr = False):
    """Running product along axis 0 of the decays of those tokens n of 0 .. b - 1 that are to `keep`."""
    x = tl.load(decay + n * stride, mask=(n >= 0) & (n < b), other=0.0).to(tl.float32)
    if KIND == "log":
        p = tl.exp(tl.cumsum(tl.where(keep, x, 0.0), 0, reverse=REVERSE))
    else:
        p = tl.cumprod(tl.where(keep, x, 1.0), 0, reverse=REVERSE)
    return p


@triton.jit
def _mask(decay, stride, n, b, LAG: tl.constexpr, KIND: tl.constexpr):
    """D (BT, BT) for tokens n = 0 .. BT - 1, its rows LAG tokens late: row n holds those of n - LAG."""
    m = n[None, :]
    n = n[:, None] - LAG
    if KIND == "constant":
        D = tl.load(decay + (n - m), mask=(n >= m) & (n < b), other=0.0)
    else:
        D = tl.where(n >= m, _product(decay, stride, n, b, (n > m) & (n < b), KIND), 0.0)
    return D


@triton.jit
def _head(decay, stride, n, b, LAG: tl.constexpr, KIND: tl.constexpr):
    """head (BT), LAG tokens late."""
    n = n - LAG
    if KIND == "constant":
        p = tl.load(decay + (n + 1), mask=n < b, other=0.0)
    else:
        p = _product(decay, stride, n, b, (n >= 0) & (n < b), KIND)
    return p


@triton.jit
def _tail(decay, stride, n, b, KIND: tl.constexpr):
    """tail (BT)."""
    n = n + 1
    if KIND == "constant":
        p = tl.load(decay + (b - n), mask=n <= b, other=0.0)
    else:
        p = _product(decay, stride, n, b, n < b, KIND, True)
    return p


@triton.jit
def _tile(x, stride_t, stride_d, rows, columns, keep):
    """x[rows, columns] in float32, zero where it is not to `keep`."""
    return tl.load(x + rows * stride_t + columns * stride_d, mask=keep, other=0.0).to(tl.float32)


@triton.jit
def states_kernel(
    x, y, decay, initial, states, final,
    xb, xt, xh, xd, yb, yt, yh, yd, db, dt, dh, ib, ih, ik, iv, scale, H, T, K, V, chunks, tiles_k, tiles_v,
    KIND: tl.constexpr, REVERSE: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """A tile (BK, BV) of the states before all chunks, from x, y = k, v:  S <- a_1 .. a_b S + (tail * k)^T v.

    REVERSE: of their cotangents after all chunks, from x, y = q, dO:  R <- a_1 .. a_b R + scale (head * q)^T dO."""
    program = tl.program_id(0).to(tl.int64)
    vv = (program % tiles_v * BV + tl.arange(0, BV))[None, :]
    kk = program // tiles_v % tiles_k * BK + tl.arange(0, BK)
    bh = program // tiles_v // tiles_k
    b, h = bh // H, bh % H
    n = tl.arange(0, BT).to(tl.int64)
    x += b * xb + h * xh
    y += b * yb + h * yh
    decay += b * db + h * dh
    keep = (kk < K)[:, None] & (vv < V)
    at = kk[:, None] * V + vv
    S = tl.zeros([BK, BV], tl.float32)
    if initial is not None:
        S += _tile(initial + b * ib + h * ih, ik, iv, kk[:, None], vv, keep)
    kk = kk[None, :]
    for i in range(chunks):
        c = tl.cast(chunks - 1 - i if REVERSE else i, tl.int64)
        tl.store(states + (bh * chunks + c) * K * V + at, S, mask=keep)
        size = tl.minimum(T - c * BT, BT)
        here = decay + c * BT * dt
        weight = _head(here, dt, n, size, 0, KIND) * scale if REVERSE else _tail(here, dt, n, size, KIND)
        if KIND == "constant":
            total = tl.load(decay + size)
        else:
            total = tl.sum(tl.where(n == size - 1, _head(here, dt, n, size, 0, KIND), 0.0), 0)
        t, keep_t = (c * BT + n)[:, None], (n < size)[:, None]
        rows = _tile(x, xt, xd, t, kk, keep_t & (kk < K)) * weight[:, None]
        columns = _tile(y, yt, yd, t, vv, keep_t & (vv < V))
        S = tl.dot(tl.trans(rows), columns, acc=total * S, input_precision="ieee")
    tl.store(final + bh * K * V + at, S, mask=keep)


@triton.jit
def read_kernel(
    x, y, z, decay, states, out,
    xb, xt, xh, xd, yb, yt, yh, yd, zb, zt, zh, zd, ob, ot, oh, od, db, dt, dh,
    scale, H, T, K, V, chunks, tiles_k, tiles_v,
    KIND: tl.constexpr, REVERSE: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """A tile (BT, BV) of O = scale (((q k^T) * D) v + head * (q S)), one chunk, from x, y, z = q, k, v.

    REVERSE: of dv = scale ((k q^T) * D^T) dO + tail * (k R), from x, y, z = k, q, dO: the same, backwards in time."""
    program = tl.program_id(0).to(tl.int64)
    vv = (program % tiles_v * BV + tl.arange(0, BV))[None, :]
    part = program // tiles_v
    bh, first = part // chunks, part % chunks * BT
    b, h = bh // H, bh % H
    x += b * xb + h * xh
    y += b * yb + h * yh
    z += b * zb + h * zh
    decay += b * db + h * dh + first * dt
    states += part * K * V
    n, size = tl.arange(0, BT).to(tl.int64), tl.minimum(T - first, BT)
    t, keep_t = (first + n)[:, None], (n < size)[:, None]
    keep = keep_t & (vv < V)
    A = tl.zeros([BT, BT], tl.float32)
    across = tl.zeros([BT, BV], tl.float32)
    for k0 in range(0, K, BK):
        kk = (k0 + tl.arange(0, BK)).to(tl.int64)
        keep_k = keep_t & (kk < K)[None, :]
        rows, columns = _tile(x, xt, xd, t, kk[None, :], keep_k), _tile(y, yt, yd, t, kk[None, :], keep_k)
        A = tl.dot(rows, tl.trans(columns), acc=A, input_precision="ieee")
        state = _tile(states, V, 1, kk[:, None], vv, (kk < K)[:, None] & (vv < V))
        across = tl.dot(rows, state, acc=across, input_precision="ieee")
    D = _mask(decay, dt, n, size, 0, KIND) * scale
    if REVERSE:
        D = tl.trans(D)
        across *= _tail(decay, dt, n, size, KIND)[:, None]
    else:
        across *= (_head(decay, dt, n, size, 0, KIND) * scale)[:, None]
    result = tl.dot(A * D, _tile(z, zt, zd, t, vv, keep), acc=across, input_precision="ieee")
    tl.store(out + b * ob + h * oh + t * ot + vv * od, result.to(out.dtype.element_ty), mask=keep)


@triton.jit
def gradient_kernel(
    q, k, v, dO, decay, states, cotangents, dq, dk, da,
    qb, qt, qh, qd, kb, kt, kh, kd, vb, vt, vh, vd, ob, ot, oh, od, gb, gt, gh, gd, db, dt, dh,
    scale, H, T, K, V, chunks, tiles_k, tiles_v,
    KIND: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Tiles (BT, BK) of dq and dk, one chunk, and what these BK channels contribute to da (BT), the gradient for the
    decays. With A = q k^T, W = dO v^T, D and head times scale, S the state before, R the cotangent after the chunk,

        dq = (W * D) k + head * (dO S^T)        dk = (W * D)^T q + tail * (v R^T)
        da_t = sum_{m<t} D_{t-1,m} (sum_{n>=t} D_nt A_nm W_nm + tail_t k_m . (v R^T)_m)
               + head_{t-1} (sum_{n>=t} D_nt q_n . (dO S^T)_n + tail_t <S, R>)

    No decay divides: da is right where decays are zero. KIND "log": da is that for log a_t, a_t times as much."""
    program = tl.program_id(0).to(tl.int64)
    tile, part = program % tiles_k, program // tiles_k
    bh, first = part // chunks, part % chunks * BT
    b, h = bh // H, bh % H
    v += b * vb + h * vh
    dO += b * ob + h * oh
    decay += b * db + h * dh + first * dt
    states += part * K * V
    cotangents += part * K * V
    n, size = tl.arange(0, BT).to(tl.int64), tl.minimum(T - first, BT)
    t, keep_t = (first + n)[:, None], (n < size)[:, None]
    kk = tile * BK + tl.arange(0, BK)
    keep_k, keep_tk = (kk < K)[:, None], keep_t & (kk < K)[None, :]
    W = tl.zeros([BT, BT], tl.float32)
    from_head = tl.zeros([BT, BK], tl.float32)
    from_tail = tl.zeros([BT, BK], tl.float32)
    both = 0.0
    for v0 in range(0, V, BV):
        vv = (v0 + tl.arange(0, BV)).to(tl.int64)[None, :]
        keep = keep_t & (vv < V)
        upstream, values = _tile(dO, ot, od, t, vv, keep), _tile(v, vt, vd, t, vv, keep)
        W = tl.dot(upstream, tl.trans(values), acc=W, input_precision="ieee")
        keep = keep_k & (vv < V)
        S, R = _tile(states, V, 1, kk[:, None], vv, keep), _tile(cotangents, V, 1, kk[:, None], vv, keep)
        from_head = tl.dot(upstream, tl.trans(S), acc=from_head, input_precision="ieee")
        from_tail = tl.dot(values, tl.trans(R), acc=from_tail, input_precision="ieee")
        both += tl.sum(S * R)
    queries = _tile(q + b * qb + h * qh, qt, qd, t, kk[None, :], keep_tk)
    keys = _tile(k + b * kb + h * kh, kt, kd, t, kk[None, :], keep_tk)
    D = _mask(decay, dt, n, size, 0, KIND) * scale
    head = _head(decay, dt, n, size, 0, KIND) * scale
    tail = _tail(decay, dt, n, size, KIND)

    at = b * gb + h * gh + t * gt + kk[None, :] * gd
    tile_dq = tl.dot(W * D, keys, acc=from_head * head[:, None], input_precision="ieee")
    tl.store(dq + at, tile_dq.to(dq.dtype.element_ty), mask=keep_tk)
    tile_dk = tl.dot(tl.trans(W * D), queries, acc=from_tail * tail[:, None], input_precision="ieee")
    tl.store(dk + at, tile_dk.to(dk.dtype.element_ty), mask=keep_tk)

    W *= tl.dot(queries, tl.trans(keys), input_precision="ieee")
    inner = tail[:, None] * tl.sum(keys * from_tail, 1)[None, :]
    inner = tl.dot(tl.trans(D), W, acc=inner, input_precision="ieee")
    outer = tl.sum(D * tl.sum(queries * from_head, 1)[:, None], 0) + tail * both
    tile_da = tl.sum(_mask(decay, dt, n, size, 1, KIND) * inner, 1) + _head(decay, dt, n, size, 1, KIND) * outer
    if KIND == "log":
        tile_da *= tl.exp(tl.load(decay + n * dt, mask=n < size, other=0.0).to(tl.float32))
    tl.store(da + (bh * tiles_k + tile) * T + first + n, tile_da, mask=n < size)
