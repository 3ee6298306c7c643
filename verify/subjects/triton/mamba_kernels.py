"""The Triton kernels of the selective scan, both directions; the functions that launch them, and the letters, are in
mamba.py.

A program holds the states of BD channels, BD x BN numbers, and walks along the chunks of BT tokens: an associative scan
gives the states of a chunk, BT x BD x BN numbers. Backwards it walks from the end: from the state stored before a chunk
one scan gives the chunk's states again, another, reversed, their cotangents. Nothing is divided by a decay, which may
be zero; tokens that are not there have steps of zero, which change no state.

All compute in float32: inputs are converted on load, results on store; offsets are 64-bit. Programs are numbered along
one axis (the others end at 65,535)."""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# (device functions take constants for constexpr, and give tuples; static_range has no iterator in Python)

from mixproof.verify.subjects.triton import interpreter

interpreter.start()  # before the first import of triton

import triton  # noqa: E402
import triton.language as tl  # noqa: E402


@triton.jit
def _mean_exp(z):
    """(exp(z) - 1) / z: a series near zero, where the difference loses digits."""
    near = tl.abs(z) < 1.0
    x, y = tl.where(near, z, 0.0), tl.where(near, 1.0, z)
    series = 1.0 + x / 12.0
    for n in tl.static_range(10):
        series = 1.0 + x / (11.0 - n) * series
    return tl.where(near, series, (tl.exp(y) - 1.0) / y)


@triton.jit
def _mean_exp_slope(z):
    """The derivative of `_mean_exp`."""
    near = tl.abs(z) < 1.0
    x, y = tl.where(near, z, 0.0), tl.where(near, 1.0, z)
    series = tl.zeros_like(x)
    factorial = 6227020800.0  # 13!
    for i in tl.static_range(13):
        series = series * x + 1.0 / (factorial * (15.0 - i))
        factorial = factorial / (13.0 - i)
    series = series * x + 0.5
    return tl.where(near, series, (tl.exp(y) - (tl.exp(y) - 1.0) / y) / y)


@triton.jit
def _then(a, w, b, v):
    """h -> a h + w, then h -> b h + v."""
    return b * a, b * w + v


@triton.jit
def _rows(x, stride_t, stride, t, columns, keep):
    """x[t, columns] in float32, zero where it is not to `keep`."""
    return tl.load(x + t[:, None] * stride_t + columns[None, :] * stride, mask=keep, other=0.0).to(tl.float32)


@triton.jit
def _steps(E, X, keys, rates, ZOH: tl.constexpr):
    """a and w of h -> a h + w for each token: E, X (BT, BD), keys (BT, BN)."""
    z = E[:, :, None] * rates[None, :, :]
    w = (E * X)[:, :, None] * keys[:, None, :]
    if ZOH:
        w *= _mean_exp(z)
    return tl.exp(z), w


@triton.jit
def forward_kernel(
    u, delta, A, B, C, skip, initial, y, states, final,
    ub, ut, ud, eb, et, ed, bb, bt, bn, cb, ct, cn, yb, yt, yd, ib, i_d, i_n, ad, an,
    T, D, N, chunks, tiles,
    ZOH: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """y (T, BD), the states before all chunks and the last one."""
    program = tl.program_id(0).to(tl.int64)
    b = program // tiles
    d, n = program % tiles * BD + tl.arange(0, BD), tl.arange(0, BN)
    keep = (d < D)[:, None] & (n < N)[None, :]
    rates = tl.load(A + d[:, None] * ad + n[None, :] * an, mask=keep, other=0.0).to(tl.float32)
    gain = tl.load(skip + d, mask=d < D, other=0.0).to(tl.float32)
    at = d[:, None] * N + n[None, :]
    i = tl.arange(0, BT)
    S = tl.zeros([BD, BN], tl.float32)
    if initial is not None:
        S += tl.load(initial + b * ib + d[:, None] * i_d + n[None, :] * i_n, mask=keep, other=0.0).to(tl.float32)
    for c in range(chunks):
        tl.store(states + (b * chunks + c) * D * N + at, S, mask=keep)
        t = tl.cast(c, tl.int64) * BT + i
        keep_d, keep_n = (t < T)[:, None] & (d < D)[None, :], (t < T)[:, None] & (n < N)[None, :]
        X = _rows(u + b * ub, ut, ud, t, d, keep_d)
        E = _rows(delta + b * eb, et, ed, t, d, keep_d)
        a, w = _steps(E, X, _rows(B + b * bb, bt, bn, t, n, keep_n), rates, ZOH)
        P, W = tl.associative_scan((a, w), 0, _then)
        h = P * S[None, :, :] + W
        out = tl.sum(h * _rows(C + b * cb, ct, cn, t, n, keep_n)[:, None, :], 2) + gain[None, :] * X
        tl.store(y + b * yb + t[:, None] * yt + d[None, :] * yd, out.to(y.dtype.element_ty), mask=keep_d)
        S = tl.sum(tl.where((i == BT - 1)[:, None, None], h, 0.0), 0)
    tl.store(final + b * D * N + at, S, mask=keep)


@triton.jit
def backward_kernel(
    u, delta, A, B, C, skip, states, dy, last, du, ddelta, dA, dB, dC, dskip, first,
    ub, ut, ud, eb, et, ed, bb, bt, bn, cb, ct, cn, gb, gt, gd, xb, xt, xd, ad, an, lb, ld, ln,
    T, D, N, chunks, tiles,
    ZOH: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """du and ddelta (T, BD), and what these channels of one sequence contribute to dA (BD, BN), dskip (BD), dB and dC
    (T, BN). With R_t the cotangent of the state after token t, `last` after the last one,

        R_t = C_t dy_t + a_{t+1} R_{t+1}     dC_t = h_t^T dy_t     dBbar_t = R_t u_t     da_t = R_t h_{t-1}

    where a = exp(delta A), and Bbar = delta B, times phi1(delta A) for the zero-order hold."""
    program = tl.program_id(0).to(tl.int64)
    b, tile = program // tiles, program % tiles
    d, n = tile * BD + tl.arange(0, BD), tl.arange(0, BN)
    keep = (d < D)[:, None] & (n < N)[None, :]
    rates = tl.load(A + d[:, None] * ad + n[None, :] * an, mask=keep, other=0.0).to(tl.float32)
    gain = tl.load(skip + d, mask=d < D, other=0.0).to(tl.float32)
    at = d[:, None] * N + n[None, :]
    i = tl.arange(0, BT)
    carry = tl.load(last + b * lb + d[:, None] * ld + n[None, :] * ln, mask=keep, other=0.0).to(tl.float32)
    rate_sum = tl.zeros([BD, BN], tl.float32)
    gain_sum = tl.zeros([BD], tl.float32)
    u += b * ub
    delta += b * eb
    B += b * bb
    for s in range(chunks):
        c = tl.cast(chunks - 1 - s, tl.int64)
        S = tl.load(states + (b * chunks + c) * D * N + at, mask=keep, other=0.0)
        t = c * BT + i
        seen_d, seen_n = (d < D)[None, :], (n < N)[None, :]
        # the token before, inside the chunk: states before each token
        lag = (t - 1 < T)[:, None] & (i > 0)[:, None]
        a, w = _steps(
            _rows(delta, et, ed, t - 1, d, lag & seen_d), _rows(u, ut, ud, t - 1, d, lag & seen_d),
            _rows(B, bt, bn, t - 1, n, lag & seen_n), rates, ZOH,
        )  # fmt: skip
        P, W = tl.associative_scan((a, w), 0, _then)
        before = P * S[None, :, :] + W
        here = (t < T)[:, None]
        X, E = _rows(u, ut, ud, t, d, here & seen_d), _rows(delta, et, ed, t, d, here & seen_d)
        keys = _rows(B, bt, bn, t, n, here & seen_n)
        G = _rows(dy + b * gb, gt, gd, t, d, here & seen_d)
        # the decay of the token after, inside the chunk
        lead = (t + 1 < T)[:, None] & (i < BT - 1)[:, None]
        after = tl.exp(_rows(delta, et, ed, t + 1, d, lead & seen_d)[:, :, None] * rates[None, :, :])
        read = G[:, :, None] * _rows(C + b * cb, ct, cn, t, n, here & seen_n)[:, None, :]
        P, W = tl.associative_scan((after, read), 0, _then, reverse=True)
        R = P * carry[None, :, :] + W

        z = E[:, :, None] * rates[None, :, :]
        a = tl.exp(z)
        slope = X[:, :, None] * keys[:, None, :]
        gained = R * E[:, :, None]
        rate = gained * a * before
        if ZOH:
            mean = _mean_exp(z)
            rate += gained * E[:, :, None] * _mean_exp_slope(z) * slope
            step = R * a * (rates[None, :, :] * before + slope)
            gained *= mean
            h = a * before + E[:, :, None] * mean * slope
        else:
            step = R * (rates[None, :, :] * a * before + slope)
            h = a * before + E[:, :, None] * slope
        part = (b * tiles + tile) * T * N + t[:, None] * N + n[None, :]
        tl.store(dC + part, tl.sum(h * G[:, :, None], 1), mask=here & seen_n)
        tl.store(dB + part, tl.sum(gained * X[:, :, None], 1), mask=here & seen_n)
        to = b * xb + t[:, None] * xt + d[None, :] * xd
        value = tl.sum(gained * keys[:, None, :], 2) + gain[None, :] * G
        tl.store(du + to, value.to(du.dtype.element_ty), mask=here & seen_d)
        tl.store(ddelta + to, tl.sum(step, 2).to(ddelta.dtype.element_ty), mask=here & seen_d)
        rate_sum += tl.sum(rate, 0)
        gain_sum += tl.sum(X * G, 0)
        carry = tl.sum(tl.where((i == 0)[:, None, None], a * R, 0.0), 0)
    tl.store(dA + b * D * N + at, rate_sum, mask=keep)
    tl.store(dskip + b * D + d, gain_sum, mask=d < D)
    tl.store(first + b * D * N + at, carry, mask=keep)
