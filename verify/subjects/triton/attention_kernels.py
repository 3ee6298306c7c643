"""The Triton kernels of blockwise attention, softmax and sigmoid, both directions; the functions that launch them, and
the letters, are in softmax_attention.py.

A program holds a tile of BT queries, and of the channels that it gives out, and walks over blocks of BS keys; or the
other way round. Query i sees key j of S where j <= i + P, or every key. No matrix of T x S is stored: backwards the
weights are computed again, softmax's from the logarithm L of their sum.

All compute in float32: inputs are converted on load, results on store; offsets are 64-bit. Programs are numbered along
one axis (the others end at 65,535)."""

# pyright: reportArgumentType=false, reportOperatorIssue=false
# (device functions take constants for constexpr, and give tuples)

from mixproof.verify.subjects.triton import interpreter

interpreter.start()  # before the first import of triton

import triton  # noqa: E402
import triton.language as tl  # noqa: E402


@triton.jit
def _tile(x, stride_row, stride_column, rows, columns, keep):
    """x[rows, columns] in float32, zero where it is not to `keep`."""
    return tl.load(x + rows * stride_row + columns * stride_column, mask=keep, other=0.0).to(tl.float32)


@triton.jit
def _seen(i, j, T, S, P, CAUSAL: tl.constexpr):
    """Which keys j the queries i see."""
    seen = (i < T) & (j < S)
    if CAUSAL:
        seen = seen & (j <= i + P)
    return seen


@triton.jit
def _logistic(s):
    """1 / (1 + exp(-s)), without overflow."""
    e = tl.exp(-tl.abs(s))
    return tl.where(s >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def _dots(x, y, xt, xd, yt, yd, rows, columns, m, n, D, BW: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """x[rows] . y[columns], those of the first m and n tokens, in BW channels at a time."""
    s = tl.zeros([BR, BC], tl.float32)
    for start in range(0, D, BW):
        d = (start + tl.arange(0, BW)).to(tl.int64)[None, :]
        a = _tile(x, xt, xd, rows, d, (rows < m) & (d < D))
        b = _tile(y, yt, yd, columns, d, (columns < n) & (d < D))
        s = tl.dot(a, tl.trans(b), acc=s, input_precision="ieee")
    return s


@triton.jit
def _weights(s, L, bias, seen, SIGMOID: tl.constexpr):
    """Attention weights from logits without bias, exactly zero where nothing is seen."""
    p = _logistic(s + bias) if SIGMOID else tl.exp(s - L)
    return tl.where(seen, p, 0.0)


@triton.jit
def _slope(s, p, dp, mean, bias, SIGMOID: tl.constexpr):
    """ds. Softmax: p * (dp - mean), mean = rowsum(p * dp) = rowsum(dO * O); sigmoid: p (1 - p) * dp."""
    return p * _logistic(-s - bias) * dp if SIGMOID else p * (dp - mean)


@triton.jit
def _first(key, P, BT: tl.constexpr, CAUSAL: tl.constexpr):
    """Where the first block of queries begins of which one sees this key, or later ones."""
    first = key * 0
    if CAUSAL:
        first = tl.maximum(key - P, 0) // BT * BT
    return first


@triton.jit
def forward_kernel(
    q, k, v, bias, out, L,
    qb, qt, qh, qd, kb, kt, kh, kd, vb, vt, vh, vd, ob, ot, oh, od,
    scale, H, T, S, D, V, P, tiles, parts,
    CAUSAL: tl.constexpr, SIGMOID: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """A tile (BT, BV) of O = p v, and L (BT), the logarithm of the sum of exp(s): the running maximum m, mass l and
    output are rescaled whenever a block of keys moves m."""
    program = tl.program_id(0).to(tl.int64)
    part, tile, bh = program % parts, program // parts % tiles, program // parts // tiles
    b, h = bh // H, bh % H
    row = tile * BT + tl.arange(0, BT)
    i, c = row[:, None], (part * BV + tl.arange(0, BV))[None, :]
    q += b * qb + h * qh
    k += b * kb + h * kh
    v += b * vb + h * vh
    shift = 0.0
    if SIGMOID:
        shift = tl.load(bias + h).to(tl.float32)
    m = tl.full([BT], float("-inf"), tl.float32)
    l = tl.zeros([BT], tl.float32)
    O = tl.zeros([BT, BV], tl.float32)
    stop = S
    if CAUSAL:
        stop = tl.minimum(S, (tile + 1) * BT + P)
    for start in range(0, stop, BS):
        j = (start + tl.arange(0, BS)).to(tl.int64)[:, None]
        s = _dots(q, k, qt, qd, kt, kd, i, j, T, S, D, BD, BT, BS) * scale
        values = _tile(v, vt, vd, j, c, (j < S) & (c < V))
        seen = _seen(i, tl.trans(j), T, S, P, CAUSAL)
        if SIGMOID:
            O = tl.dot(_weights(s, 0.0, shift, seen, True), values, acc=O, input_precision="ieee")
        else:
            s = tl.where(seen, s, float("-inf"))
            top = tl.maximum(m, tl.max(s, 1))
            safe = tl.where(top == float("-inf"), 0.0, top)
            moved = tl.exp(m - safe)
            p = tl.exp(s - safe[:, None])
            l = l * moved + tl.sum(p, 1)
            O = tl.dot(p, values, acc=O * moved[:, None], input_precision="ieee")
            m = top
    if not SIGMOID:
        total = tl.where(l == 0, 1.0, l)
        O = O / total[:, None]
        tl.store(L + bh * T + row, tl.where(l == 0, 0.0, m + tl.log(total)), mask=(row < T) & (part == 0))
    tl.store(out + b * ob + h * oh + i * ot + c * od, O.to(out.dtype.element_ty), mask=(i < T) & (c < V))


@triton.jit
def query_kernel(
    q, k, v, bias, dO, L, delta, dq, dbias,
    qb, qt, qh, qd, kb, kt, kh, kd, vb, vt, vh, vd, gb, gt, gh, gd, xb, xt, xh, xd,
    scale, H, T, S, D, V, P, tiles, parts,
    CAUSAL: tl.constexpr, SIGMOID: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """A tile (BT, BD) of dq = scale ds k; where there is a bias, dbias is the sum of the ds of these queries."""
    program = tl.program_id(0).to(tl.int64)
    part, tile, bh = program % parts, program // parts % tiles, program // parts // tiles
    b, h = bh // H, bh % H
    row = tile * BT + tl.arange(0, BT)
    i, d = row[:, None], (part * BD + tl.arange(0, BD))[None, :]
    q += b * qb + h * qh
    k += b * kb + h * kh
    v += b * vb + h * vh
    dO += b * gb + h * gh
    shift = 0.0
    total = 0.0
    logsum = tl.zeros([BT], tl.float32)
    mean = tl.zeros([BT], tl.float32)
    if SIGMOID:
        shift = tl.load(bias + h).to(tl.float32)
    else:
        logsum = tl.load(L + bh * T + row, mask=row < T, other=0.0)
        mean = tl.load(delta + bh * T + row, mask=row < T, other=0.0)
    X = tl.zeros([BT, BD], tl.float32)
    stop = S
    if CAUSAL:
        stop = tl.minimum(S, (tile + 1) * BT + P)
    for start in range(0, stop, BS):
        j = (start + tl.arange(0, BS)).to(tl.int64)[:, None]
        s = _dots(q, k, qt, qd, kt, kd, i, j, T, S, D, BD, BT, BS) * scale
        dp = _dots(dO, v, gt, gd, vt, vd, i, j, T, S, V, BV, BT, BS)
        p = _weights(s, logsum[:, None], shift, _seen(i, tl.trans(j), T, S, P, CAUSAL), SIGMOID)
        ds = _slope(s, p, dp, mean[:, None], shift, SIGMOID)
        if SIGMOID:
            total += tl.sum(ds)
        X = tl.dot(ds, _tile(k, kt, kd, j, d, (j < S) & (d < D)), acc=X, input_precision="ieee")
    if SIGMOID:
        tl.store(dbias + bh * tiles + tile, total, mask=part == 0)
    tl.store(dq + b * xb + h * xh + i * xt + d * xd, (X * scale).to(dq.dtype.element_ty), mask=(i < T) & (d < D))


@triton.jit
def key_kernel(
    q, k, v, bias, dO, L, delta, dk,
    qb, qt, qh, qd, kb, kt, kh, kd, vb, vt, vh, vd, gb, gt, gh, gd, xb, xt, xh, xd,
    scale, H, T, S, D, V, P, tiles, parts,
    CAUSAL: tl.constexpr, SIGMOID: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """A tile (BS, BD) of dk = scale ds^T q, over blocks of queries."""
    program = tl.program_id(0).to(tl.int64)
    part, tile, bh = program % parts, program // parts % tiles, program // parts // tiles
    b, h = bh // H, bh % H
    j, d = (tile * BS + tl.arange(0, BS))[:, None], (part * BD + tl.arange(0, BD))[None, :]
    q += b * qb + h * qh
    k += b * kb + h * kh
    v += b * vb + h * vh
    dO += b * gb + h * gh
    shift = 0.0
    if SIGMOID:
        shift = tl.load(bias + h).to(tl.float32)
    X = tl.zeros([BS, BD], tl.float32)
    for start in range(_first(tile * BS, P, BT, CAUSAL), T, BT):
        row = (start + tl.arange(0, BT)).to(tl.int64)
        i = row[:, None]
        logsum = tl.zeros([BT], tl.float32)
        mean = tl.zeros([BT], tl.float32)
        if not SIGMOID:
            logsum = tl.load(L + bh * T + row, mask=row < T, other=0.0)
            mean = tl.load(delta + bh * T + row, mask=row < T, other=0.0)
        s = _dots(q, k, qt, qd, kt, kd, i, j, T, S, D, BD, BT, BS) * scale
        dp = _dots(dO, v, gt, gd, vt, vd, i, j, T, S, V, BV, BT, BS)
        p = _weights(s, logsum[:, None], shift, _seen(i, tl.trans(j), T, S, P, CAUSAL), SIGMOID)
        ds = _slope(s, p, dp, mean[:, None], shift, SIGMOID)
        X = tl.dot(tl.trans(ds), _tile(q, qt, qd, i, d, (i < T) & (d < D)), acc=X, input_precision="ieee")
    tl.store(dk + b * xb + h * xh + j * xt + d * xd, (X * scale).to(dk.dtype.element_ty), mask=(j < S) & (d < D))


@triton.jit
def value_kernel(
    q, k, bias, dO, L, dv,
    qb, qt, qh, qd, kb, kt, kh, kd, gb, gt, gh, gd, xb, xt, xh, xd,
    scale, H, T, S, D, V, P, tiles, parts,
    CAUSAL: tl.constexpr, SIGMOID: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """A tile (BS, BV) of dv = p^T dO, over blocks of queries."""
    program = tl.program_id(0).to(tl.int64)
    part, tile, bh = program % parts, program // parts % tiles, program // parts // tiles
    b, h = bh // H, bh % H
    j, c = (tile * BS + tl.arange(0, BS))[:, None], (part * BV + tl.arange(0, BV))[None, :]
    q += b * qb + h * qh
    k += b * kb + h * kh
    dO += b * gb + h * gh
    shift = 0.0
    if SIGMOID:
        shift = tl.load(bias + h).to(tl.float32)
    X = tl.zeros([BS, BV], tl.float32)
    for start in range(_first(tile * BS, P, BT, CAUSAL), T, BT):
        row = (start + tl.arange(0, BT)).to(tl.int64)
        i = row[:, None]
        logsum = tl.zeros([BT], tl.float32)
        if not SIGMOID:
            logsum = tl.load(L + bh * T + row, mask=row < T, other=0.0)
        s = _dots(q, k, qt, qd, kt, kd, i, j, T, S, D, BD, BT, BS) * scale
        p = _weights(s, logsum[:, None], shift, _seen(i, tl.trans(j), T, S, P, CAUSAL), SIGMOID)
        upstream = _tile(dO, gt, gd, i, c, (i < T) & (c < V))
        X = tl.dot(tl.trans(p), upstream, acc=X, input_precision="ieee")
    tl.store(dv + b * xb + h * xh + j * xt + c * xd, X.to(dv.dtype.element_ty), mask=(j < S) & (c < V))
