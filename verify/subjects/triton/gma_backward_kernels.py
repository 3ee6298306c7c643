"""The Triton kernels of the backward of Gaussian mixture attention; gma_backward.py launches them and has the letters.

As in gma_kernels.py: float32, 64-bit offsets, no atomics. Responsibilities are made again, a tile at a time."""

from mixproof.verify.subjects.triton.gma_kernels import _gamma, _rows, tl, triton


@triton.jit
def quotient_kernel(
    G, O, mass, share, weight, centre, gb, gt, gh, gd, ob, ot, oh, od, H, T, V, eps, tiles,
    BT: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """O_i = U_i / (D_i + eps): share_i = 1 / (D_i + eps), weight_i = -<G_i, O_i>, so that dD_i is their product, and
    centre_i = sum_k gamma_ik dgamma_ik, which is -eps dD_i."""
    program = tl.program_id(0).to(tl.int64)
    t = program % tiles * BT + tl.arange(0, BT)
    bh = program // tiles
    b, h = bh // H, bh % H
    G += b * gb + h * gh
    O += b * ob + h * oh
    product = tl.zeros([BT], tl.float32)
    for v0 in range(0, V, BV):
        vv = v0 + tl.arange(0, BV).to(tl.int64)
        product += tl.sum(_rows(G, gt, gd, t, T, vv, V) * _rows(O, ot, od, t, T, vv, V), 1)
    at, keep = bh * T + t, t < T
    D = tl.load(mass + at, mask=keep, other=1.0) + eps
    tl.store(share + at, tl.div_rn(1.0, D), mask=keep)
    tl.store(weight + at, -product, mask=keep)
    tl.store(centre + at, tl.div_rn(product, D) * eps, mask=keep)


@triton.jit
def centre_kernel(
    x, top, total, dgamma, mean, precision, bias, centre, xb, xt, xh, xd, gb, gt, gh, gd, H, T, K, W, R, tiles,
    BT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """centre_n = sum_k gamma_nk dgamma_nk for BT tokens.                                                       (18)"""
    program = tl.program_id(0).to(tl.int64)
    t = program % tiles * BT + tl.arange(0, BT)
    bh = program // tiles
    b, h = bh // H, bh % H
    x += b * xb + h * xh + t * xt
    dgamma += b * gb + h * gh
    table = h * R * W
    mean += table
    precision += table
    bias += h * W
    top += bh * T
    total += bh * T
    sum_ = tl.zeros([BT], tl.float32)
    for k0 in range(0, K, BK):
        kk = k0 + tl.arange(0, BK).to(tl.int64)
        g = _gamma(x, xd, top, total, mean, precision, bias, t, T, kk, W, R, BT, BK)
        sum_ += tl.sum(g * _rows(dgamma, gt, gd, t, T, kk, K), 1)
    tl.store(centre + bh * T + t, sum_, mask=t < T)


@triton.jit
def value_kernel(
    k, top_k, total_k, q, top_q, total_q, v, G, share, weight, mean, precision, bias, S, Z, dv, centre,
    kb, kt, kh, kd, qb, qt, qh, qd, vb, vt, vh, vd, gb, gt, gh, gd, db, dt, dh, dd,
    H, T, K, W, R, V, parts, stretch, tiles_t, tiles_v,
    CAUSAL: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """dv_j for a tile (BT, BV): from the cotangents S, Z of the state after its chunk and, if causal, from queries
    i >= j of its chunk; and what the tile adds to centre_j = sum_k gamma_jk dgamma_jk = <v_j, dv_j> + <gamma_j, dZ_j>.

    The mirror image of read_kernel, tiled like it."""
    program = tl.program_id(0).to(tl.int64)
    tile_v = program % tiles_v
    vv = tile_v * BV + tl.arange(0, BV)
    tile = program // tiles_v % tiles_t
    part = program // tiles_v // tiles_t
    bh, c = part // parts, part % parts
    b, h = bh // H, bh % H
    first = c * stretch + tile * BT
    end = tl.minimum(c * stretch + stretch, T)
    j = first + tl.arange(0, BT)
    k += b * kb + h * kh + j * kt
    v += b * vb + h * vh
    table = h * R * W
    mean += table
    precision += table
    bias += h * W
    top_k += bh * T
    total_k += bh * T
    if CAUSAL:
        q += b * qb + h * qh
        G += b * gb + h * gh
        top_q += bh * T
        total_q += bh * T
        share += bh * T
        weight += bh * T
    sees = tl.arange(0, BT)[None, :] >= tl.arange(0, BT)[:, None]
    out = tl.zeros([BT, BV], tl.float32)
    mass = tl.zeros([BT], tl.float32)
    for k0 in range(0, K, BK):
        kk = k0 + tl.arange(0, BK).to(tl.int64)
        row = part * K + kk
        keep = (kk < K)[:, None] & (vv < V)[None, :]
        state = tl.load(S + row[:, None] * V + vv[None, :], mask=keep, other=0.0)
        count = tl.load(Z + row, mask=kk < K, other=0.0)
        gk = _gamma(k, kd, top_k, total_k, mean, precision, bias, j, end, kk, W, R, BT, BK)
        out = tl.dot(gk, state, acc=out, input_precision="ieee")
        mass += tl.sum(gk * count[None, :], 1)
        if CAUSAL:
            for i0 in range(first, end, BT):
                i = i0 + tl.arange(0, BT)
                gq = _gamma(q + i * qt, qd, top_q, total_q, mean, precision, bias, i, end, kk, W, R, BT, BK)
                affinity = tl.dot(gk, tl.trans(gq), input_precision="ieee")
                affinity = tl.where(sees | (i0 != first), affinity, 0.0)
                affinity *= tl.load(share + i, mask=i < end, other=0.0)[None, :]
                mass += tl.sum(affinity * tl.load(weight + i, mask=i < end, other=0.0)[None, :], 1)
                out = tl.dot(affinity, _rows(G, gt, gd, i, end, vv, V), acc=out, input_precision="ieee")
    sum_ = tl.sum(out * _rows(v, vt, vd, j, end, vv, V), 1)
    if tile_v == 0:
        sum_ += mass
    tl.store(centre + (bh * tiles_v + tile_v) * T + j, sum_, mask=j < end)
    j, vv = j[:, None], vv[None, :]
    dv += b * db + h * dh + j * dt + vv * dd
    tl.store(dv, out.to(dv.dtype.element_ty), mask=(j < end) & (vv < V))


@triton.jit
def _dgamma(
    value, vt, vd, other, ot, od, y, yt, yd, top_y, total_y, share, weight, mean, precision, bias, S, Z,
    t, first, start, end, kk, K, W, R, V,
    KEYS: tl.constexpr, CAUSAL: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """dgamma (BT, BK) of tokens t for components kk.

    Of queries: share_i (<G_i, S_k> + weight_i Z_k + sum_{j<=i} P_ij gamma_k(k_j)), where P_ij = <G_i, v_j> + weight_i;
    of keys: <v_j, dS_k> + dZ_k + sum_{i>=j} share_i P_ij gamma_k(q_i)."""
    keep = kk < K
    d = tl.zeros([BT, BK], tl.float32)
    for v0 in range(0, V, BV):
        vv = v0 + tl.arange(0, BV).to(tl.int64)
        state = tl.load(S + kk[None, :] * V + vv[:, None], mask=keep[None, :] & (vv < V)[:, None], other=0.0)
        d = tl.dot(_rows(value, vt, vd, t, end, vv, V), state, acc=d, input_precision="ieee")
    count = tl.load(Z + kk, mask=keep, other=0.0)[None, :]
    if KEYS:
        d += count
    else:
        d += tl.load(weight + t, mask=t < end, other=0.0)[:, None] * count
    if CAUSAL:
        own, its = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
        sees = its >= own if KEYS else own >= its
        for s0 in range(first if KEYS else start, end if KEYS else tl.minimum(first + BT, end), BT):
            s = s0 + tl.arange(0, BT)
            P = tl.zeros([BT, BT], tl.float32)
            for v0 in range(0, V, BV):
                vv = v0 + tl.arange(0, BV).to(tl.int64)
                A, B = _rows(value, vt, vd, t, end, vv, V), _rows(other, ot, od, s, end, vv, V)
                P = tl.dot(A, tl.trans(B), acc=P, input_precision="ieee")
            query = s if KEYS else t
            weight_q = tl.load(weight + query, mask=query < end, other=0.0)
            P += weight_q[None, :] if KEYS else weight_q[:, None]
            P = tl.where(sees | (s0 != first), P, 0.0)
            g = _gamma(y + s * yt, yd, top_y, total_y, mean, precision, bias, s, end, kk, W, R, BT, BK)
            if KEYS:
                g *= tl.load(share + s, mask=s < end, other=0.0)[:, None]
            d = tl.dot(P, g, acc=d, input_precision="ieee")
    if not KEYS:
        d *= tl.load(share + t, mask=t < end, other=0.0)[:, None]
    return d


@triton.jit
def mixture_kernel(
    x, top_x, total_x, value, y, top_y, total_y, other, S, Z, share, weight, centre, mean, precision, bias,
    dx, moment, square, count,
    xb, xt, xh, xd, vb, vt, vh, vd, yb, yt, yh, yd, ob, ot, oh, od, db, dt, dh, dd,
    H, T, K, W, R, V, k0, parts, chunks, chunk, states, tiles_r, blocks,
    KEYS: tl.constexpr, CAUSAL: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr, NR: tl.constexpr,
):  # fmt: skip
    """From dgamma to the inputs of gamma, for BK components from k0 on and one stretch of tokens:

        ds_nk = gamma_nk (dgamma_nk - centre_n)                                                                 (18)
        dx_nr = -sum_k ds_nk (x_nr - mu_kr) / var_kr                  added to that of the components before k0
        moment_kr = sum_n ds_nk (x_nr - mu_kr),  square_kr = sum_n ds_nk (x_nr - mu_kr)^2,  count_k = sum_n ds_nk

    Tokens x are queries with value dO, or KEYS with value v; y and `other` are the tokens across the affinity. Without
    S, dgamma is given as `value`. A stretch is `chunks` whole chunks; dimensions r go by BR, at most NR times."""
    program = tl.program_id(0).to(tl.int64)
    tile_r = program % tiles_r
    part = program // tiles_r
    bh, p = part // parts, part % parts
    b, h = bh // H, bh % H
    x += b * xb + h * xh
    value += b * vb + h * vh
    dx += b * db + h * dh
    table = h * R * W
    mean += table
    precision += table
    bias += h * W
    top_x += bh * T
    total_x += bh * T
    centre += bh * T
    kk = k0 + tl.arange(0, BK).to(tl.int64)
    n, r = tl.arange(0, NR), tile_r * (NR * BR) + tl.arange(0, BR)
    moments = tl.zeros([BK, NR, BR], tl.float32)
    squares = tl.zeros([BK, NR, BR], tl.float32)
    counts = tl.zeros([BK], tl.float32)
    for c in range(p * chunks, tl.minimum(p * chunks + chunks, tl.cdiv(T, chunk))):
        start = c * chunk
        end = tl.minimum(start + chunk, T)
        for first in range(start, end, BT):
            t = first + tl.arange(0, BT)
            g = _gamma(x + t * xt, xd, top_x, total_x, mean, precision, bias, t, end, kk, W, R, BT, BK)
            if S is None:
                d = _rows(value, vt, vd, t, end, kk, K)
            else:
                row = (bh * states + c if CAUSAL else bh) * K
                d = _dgamma(
                    value, vt, vd, other + b * ob + h * oh, ot, od, y + b * yb + h * yh, yt, yd,
                    top_y + bh * T, total_y + bh * T, share + bh * T, weight + bh * T, mean, precision, bias,
                    S + row * V, Z + row, t, first, start, end, kk, K, W, R, V, KEYS, CAUSAL, BT, BK, BV,
                )  # fmt: skip
            ds = g * (d - tl.load(centre + t, mask=t < end, other=0.0)[:, None])
            counts += tl.sum(ds, 0)
            for m in range(blocks):
                rr = r + m * BR
                at, keep = rr[None, :] * W + kk[:, None], (rr < R)[None, :]
                mu = tl.load(mean + at, mask=keep, other=0.0)
                e = _rows(x, xt, xd, t, end, rr, R)[:, None, :] - mu[None, :, :]
                w = ds[:, :, None] * e
                dx_m = tl.sum(w * -tl.load(precision + at, mask=keep, other=0.0)[None, :, :], 1)
                out = dx + t[:, None] * dt + rr[None, :] * dd
                keep = (t < end)[:, None] & keep
                if k0 > 0:
                    dx_m += tl.load(out, mask=keep, other=0.0)
                tl.store(out, dx_m.to(dx.dtype.element_ty), mask=keep)
                here = (n == m)[None, :, None]
                moments += tl.where(here, tl.expand_dims(tl.sum(w, 0), 1), 0.0)
                squares += tl.where(here, tl.expand_dims(tl.sum(w * e, 0), 1), 0.0)
    row = part * K + kk
    rr = n[None, :, None] * BR + r[None, None, :]
    at, keep = row[:, None, None] * R + rr, (kk < K)[:, None, None] & (rr < R)
    tl.store(moment + at, moments, mask=keep)
    tl.store(square + at, squares, mask=keep)
    if tile_r == 0:
        tl.store(count + row, counts, mask=kk < K)
