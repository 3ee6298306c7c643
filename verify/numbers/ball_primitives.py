"""What balls make of the shared primitives: bounds that hold for every honest way to compute them.

A rule takes the reading and what the primitive takes, and gives a ball; see ball.py. u is the reading's unit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mixproof.reference import primitives
from mixproof.verify.arithmetic import LARGEST, UNDERFLOW, UNIT
from mixproof.verify.numbers.ball_maps import MAPS, MOST, SLACK
from mixproof.verify.numbers.ball_recurrences import RECURRENCES

if TYPE_CHECKING:
    from mixproof.verify.numbers.ball import Ball, Reading


def _softmax(r: Reading, s: Ball, axis: int = -1) -> Ball:
    """p~_j = p_j exp(d_j) / sum_k p_k exp(d_k) with |d_k| <= r_k, hence with t_j = (1 - p_j) r_j + sum_{k!=j} p_k r_k
    1 / (1 - t_j) above and 1 / (1 + c t_j) below, c = expm1(2 max r) / (2 max r): a saturated row is well conditioned.

    d is the error of the logit, of exp, and of its argument s - top in base 2: u 3 |s - top| for a folded scale, the
    product and the difference, u |s| for a product before it. While a running maximum moves, what was summed is
    multiplied by one more exp."""
    p = primitives.softmax(s.v, axis)
    seen = np.isfinite(s.v)
    S = np.where(seen, s.v, 0)
    top = np.max(np.where(seen, s.v, -np.inf), axis=axis, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0)
    rescaled = (r.exp_error + 1) * _moves(s.v, axis)
    d = s.radius + r.unit * (r.exp_error + 3 * np.abs(S - top) + np.abs(S) + rescaled)
    d = np.where(seen, d, 0)
    mean = np.sum(p * d, axis=axis, keepdims=True)
    t = _others(p, axis) * d + _others(p * d, axis)
    up = np.where(t < 1, t / np.where(t < 1, 1 - t, 1), np.inf)
    twice = 2 * np.max(d, axis=axis, keepdims=True, initial=0)
    c = np.where(twice > 0, np.expm1(np.minimum(twice, MOST)) / np.where(twice > 0, twice, 1), 1)
    # an entry that underflows in float64 is below any format's underflow, unless its logit may be far higher
    lost = np.where(seen & (p == 0) & (twice > 1), np.exp(np.minimum(S - top + twice, 0)), 0)
    growth = np.where((twice > MOST) & (t > 0), np.inf, c * t) + np.sum(lost, axis=axis, keepdims=True)
    # down = growth / (1 + growth); whatever the errors, p~ lies in [0, 1]
    down = np.where(growth < 1, growth / (1 + np.minimum(growth, 1)), 1)
    e = np.where(p > 0, p * np.where(p > 0, np.maximum(up, down), 0), lost)
    e = np.minimum(e, np.maximum(p, 1 - p))
    if r.recomputes:
        e = np.maximum(e, _recomputed(r, s, p, S, top, c * mean, axis))
    return r.around(p, e + np.where(seen, r.eta, 0), (s.shape[axis]) * r.sum_unit + 4 * r.unit)


def _others(x: np.ndarray, axis: int) -> np.ndarray:
    """For each entry the sum of the others. Not the whole less the entry: beside a weight of one the others would be
    lost, which count where errors of logits are large."""
    x = np.moveaxis(x, axis, -1)
    before = np.concatenate([np.zeros_like(x[..., :1]), np.cumsum(x[..., :-1], axis=-1)], axis=-1)
    after = np.concatenate([np.cumsum(x[..., :0:-1], axis=-1)[..., ::-1], np.zeros_like(x[..., :1])], axis=-1)
    return np.moveaxis(before + after, -1, axis)


def _recomputed(r: Reading, s: Ball, p: Any, S: Any, top: Any, error: Any, axis: int) -> np.ndarray:
    """exp(s - L) from a stored L = top + log(sum) is not normalised again: the error of s, computed a second time in
    another order, and that of L stay. `error` is that of log(sum) by the d of softmax."""
    log = np.log(np.maximum(np.sum(np.where(np.isfinite(s.v), np.exp(S - top), 0), axis=axis, keepdims=True), 1))
    L = top + log
    d = error + r.unit * (3 * np.abs(L) + (r.exp_error + 2) * log + r.exp_error)
    d = np.where(np.isfinite(s.v), d + s.radius + r.unit * (r.exp_error + 3 * np.abs(S - L) + np.abs(S) + np.abs(L)), 0)
    if not np.all(d <= MOST):
        r.leave("nothing is known of an exponential")
        d = np.minimum(d, MOST)
    return np.where(p > 0, p * np.expm1(d), np.where(d > 1, np.exp(np.minimum(S - L, 0) + d), 0))


def _moves(s: np.ndarray, axis: int) -> np.ndarray:
    """How often the running maximum moves after an entry was met, in index order or against it, block by block or one
    by one; once more where parts are merged. (Parts that each start their own maximum may move it more often.)"""
    s = np.moveaxis(s, axis, -1)
    later = []
    for x in (s, s[..., ::-1]):
        top = np.maximum.accumulate(x, axis=-1)
        moved = np.cumsum(top[..., :0:-1] > top[..., -2::-1], axis=-1)[..., ::-1]
        later.append(np.concatenate([moved, np.zeros_like(s[..., :1])], axis=-1))
    return np.moveaxis(np.maximum(later[0], later[1][..., ::-1]), -1, axis) + 1


def _masked(r: Reading, s: Any, keep: np.ndarray, fill: float) -> Ball:
    kept = r.merged([r.lift(s)], lambda x: np.where(keep, x, 0))
    kept.v = np.where(keep, kept.v, fill)
    return kept


def _softplus(r: Reading, w: Any) -> Ball:
    """log1p(exp(w)), or max(w, 0) + log1p(exp(-|w|)): the derivative is sigmoid(w), and as sigmoid(x) <= e^d sigmoid(w)
    for |x - w| <= d, the error expm1(d) sigmoid(w)."""
    w = r.lift(w)
    v = primitives.softplus(w.v)
    d = w.radius + r.unit * (r.exp_error + 2 * np.abs(w.v))
    if not np.all(d <= MOST):
        r.leave("nothing is known of an exponential")
        d = np.minimum(d, MOST)
    return r.around(v, np.expm1(d) * primitives.sigmoid(w.v) + r.eta, (r.exp_error + 1) * r.unit)


def _mahalanobis(r: Reading, x: Any, mu: Any, var: Any) -> Ball:
    x, mu, var = (r.lift(a) for a in (x, mu, var))
    error = var.radius
    low = var.v - error
    if np.any(low <= r.least):
        r.leave("a variance may be zero")
        low = np.where(low > r.least, low, r.least)
    E = x.v[:, None, :] - mu.v[None, :, :]
    dE = x.radius[:, None, :] + mu.radius[None, :, :] + r.eta
    terms = E * E / var.v
    r.check(np.maximum(E * E, terms))
    v = np.sum(terms, axis=-1)
    e = np.sum(terms * (error / low) + (2 * np.abs(E) + dE) * dE / low + r.eta * (2 + 1 / low), axis=-1)
    if r.arithmetic.distance == "expanded":
        e = e + _expanded(r, x, mu, low)
    # two roundings of the difference, squared; a product and a quotient, or the square of a product with 1 / sqrt(var):
    # 2 (1 + 6 + 1) + 1, root and quotient as accurate as those of a GPU
    R = E.shape[-1]
    return r.around(v, e, R * r.sum_unit + 17 * r.unit, max(R, 1))


def _expanded(r: Reading, x: Ball, mu: Ball, low: np.ndarray) -> np.ndarray:
    """What x^2 / var - 2 x mu / var + mu^2 / var adds: one sum of 3 R terms, each with a quotient and up to three
    products, and two factors that a dot product may round."""
    wide = (x.m[:, None, :] + mu.m[None, :, :]) ** 2
    R = wide.shape[-1]
    factor = np.exp((3 * R + 1) * r.sum_unit + 8 * r.unit)
    lost = 0.0
    if r.arithmetic.casts_operand(False):
        dot = r.arithmetic.dot
        if np.any(wide > LARGEST[dot] / 2) or np.any(low * LARGEST[dot] < 2):
            r.leave(f"an operand of a dot product may exceed the largest {dot}")
        factor = factor * (1 + UNIT[dot]) ** 2
        lost = 4 * UNDERFLOW[dot]
    return np.sum((factor - 1) * wide / low + lost * (1 + wide + 1 / low), axis=-1)


def _decay(r: Reading, gamma: Any, n: np.ndarray) -> Ball:
    """gamma^n: a repeated product, pow, or exp(n log gamma) with the log of ball.py, in one piece or in any split; then
    |x^n - gamma^n| <= (|gamma| + rg)^n - |gamma|^n for a base that is itself off by rg."""
    g = r.lift(gamma)
    n = np.asarray(n)
    if g.ndim == 0 and n.ndim > 1:
        return _decay(r, g, np.arange(np.max(n, initial=0) + 1))[n]  # each power once
    v, size = g.v**n, np.abs(g.v)
    log = np.abs(np.log(np.where(size > 0, size, 1)))
    error = np.where((g.e <= r.eta) & (g.w == 0), 0, g.radius)  # an input, exactly
    most = (size + error) ** n
    exact = (error == 0) & ((size == 1) | (size == 0)) | (n == 0)
    d = r.unit * (n * (1 + 2 * r.exp_error + (r.exp_error + 5) * log) + 2 * r.exp_error)
    spread = np.maximum(most - np.abs(v), 0) * SLACK
    return r.around(v, spread + most * np.expm1(np.minimum(np.where(exact, 0, d), MOST)) + np.where(exact, 0, r.eta))


def _segment_products(r: Reading, a: Any) -> Ball:
    """Repeated products, in any grouping, one rounding a step; or, where a chunk is declared, exp(c_n - c_m) with sums
    of the logarithms of decay."""
    a = r.lift(a)
    size = np.abs(a.v)
    error = np.where((a.e <= r.eta) & (a.w == 0), 0, a.radius)
    log = np.abs(np.log(np.where(size > 0, size, 1)))
    logarithm = 2 * r.exp_error + (r.exp_error + 5) * log if r.arithmetic.span > 1 else 0
    step = np.where((error == 0) & (size == 1), 0, r.unit * (1 + logarithm))
    extra = _summed(r, log, 0, len(log))
    return _segments(r, primitives.segment_products(a.v), size + error, step, extra)


def _segment_decays(r: Reading, g: Any, start: int, stop: int) -> Ball:
    """A product of exp(g_t), or exp(c_n - c_m) with sums c of logarithms."""
    g = r.lift(g)
    size = np.where(np.isfinite(g.v), np.abs(g.v), 0)
    part = g[start:stop]
    step = part.radius + r.unit * (1 + 2 * r.exp_error + 3 * size[start:stop])
    step = np.where(part.v == 0, part.radius, step)
    a = np.exp(part.v)
    return _segments(r, primitives.segment_products(a), a, step, _summed(r, size, start, stop))


def _summed(r: Reading, size: np.ndarray, start: int, stop: int) -> Any:
    """What differences c_n - c_m of sums of logarithms that start anew every `span` tokens add: term by term they are
    n - m additions, in a tree twice log2 of the span, each off by the unit times what was summed until then."""
    span = r.arithmetic.span
    if span == 1:
        return 0
    total = np.concatenate([np.zeros((1, *size.shape[1:])), np.cumsum(size, axis=0)])
    t = np.arange(start, stop + 1)
    summed = total[t] - total[np.maximum(t - span, 0)]
    steps = np.maximum(t[:, None] - t[None, :], 0).reshape(len(t), len(t), *(1,) * (size.ndim - 1))
    additions = np.minimum(steps, span) + 2 * np.ceil(np.log2(span)) + 2
    return np.where(steps > 0, r.sum_unit * additions * np.maximum(summed[:, None], summed[None, :]), 0)


def _segments(r: Reading, v: np.ndarray, most: np.ndarray, step: np.ndarray, extra: Any) -> Ball:
    """Products v of steps whose sizes are at most `most`, each off by a factor within exp(step), all by exp(extra)."""
    sums = np.concatenate([np.zeros((1, *step.shape[1:])), np.cumsum(step, axis=0)])
    d = np.maximum(sums[:, None] - sums[None, :], 0) + extra
    diagonal = np.eye(len(v), dtype=bool).reshape(len(v), len(v), *(1,) * (v.ndim - 2))
    most = primitives.segment_products(most)
    r.check(most)
    spread = np.maximum(most - np.abs(v), 0) * SLACK
    lost = np.where(diagonal | (most == 0), 0, r.eta)
    return r.around(v, spread + most * np.expm1(np.minimum(d, MOST)) * SLACK + lost)


def _weighted_dot(r: Reading, q: Any, P: Any, k: Any) -> Ball:
    """The decay may be multiplied into either operand of a dot product, or part of it into each, before they are
    rounded."""
    q, P, k = r.lift(q), r.lift(P), r.lift(k)
    product = q[:, None, :] * P * k[None, :, :]
    if r.arithmetic.casts_operand(False):
        dot, casts = r.arithmetic.dot, r.arithmetic.casts
        if max(q.m.max(initial=0), k.m.max(initial=0)) > LARGEST[dot] / 2:
            r.leave(f"an operand of a dot product may exceed the largest {dot}")
        factor = (1 + UNIT[dot]) ** (2 * casts)
        lost = casts * UNDERFLOW[dot] * (np.maximum(q.m, 1)[:, None, :] + np.maximum(k.m, 1)[None, :, :])
        product = product.widened((factor - 1) * product.m + factor * lost)
    return np.sum(product, axis=-1)


def _unit(r: Reading, x: Any, eps: float) -> Ball:
    """|x'_i / N' - x_i / N| <= (|x'_i - x_i| + |x_i| / N |N' - N|) / N', |N' - N| <= ||x' - x||. The sum of squares has
    K terms, a root halves its error; scaling by a maximum first costs two quotients more."""
    x = r.lift(x)
    v, radius = primitives.unit(x.v, eps), x.radius
    top = np.max(np.abs(x.v), axis=-1, keepdims=True, initial=0)
    top = np.where(top > 0, top, 1)
    norm = np.sqrt(np.sum((x.v / top) ** 2, axis=-1, keepdims=True)) * top
    moved = np.sqrt(np.sum(radius * radius, axis=-1, keepdims=True))
    low = np.maximum(norm - moved, eps)
    if np.any(low <= r.least):
        r.leave("a norm may be zero")
        low = np.where(low > r.least, low, np.maximum(norm, 1))
    d = r.sum_unit * (x.shape[-1] + 1) + 24 * r.unit
    e = (radius + np.abs(v) * moved) / low
    return r.around(v, (e + (np.abs(v) + e) * d) * SLACK + r.eta)


def _group_norm(r: Reading, x: Any, eps: float) -> Ball:
    E, dE, root, low, moved = _centred(r, r.lift(x), eps)
    v = E / np.where(root > 0, root, 1)
    e = dE / low + np.abs(v) * moved / low
    return r.around(v, (e + (np.abs(v) + e) * 12 * r.unit) * SLACK + r.eta / np.minimum(low, 1))


def _deviation(r: Reading, x: Any, eps: float) -> Ball:
    _, _, root, _, moved = _centred(r, r.lift(x), eps)
    return r.around(root, (moved + (root + moved) * 6 * r.unit) * SLACK + r.eta)


def _centred(r: Reading, x: Ball, eps: float) -> tuple[np.ndarray, ...]:
    """x - mean and its error; sqrt(var + eps), its least value and its error. Of the two-pass formula or of Welford's:
    differences off by their inputs, the mean and one rounding, before or after the quotient; the variance by twice that
    and a sum; the root halves it."""
    n, radius = x.shape[-1], x.radius

    def mean(a: np.ndarray) -> np.ndarray:
        return np.sum(a, axis=-1, keepdims=True) / n

    E = x.v - mean(x.v)
    wide = np.abs(x.v) + radius
    dE = radius + mean(radius) + (n + 4) * r.sum_unit * mean(wide)
    dE = (dE + r.unit * (np.abs(E) + dE)) * SLACK
    var = mean(E * E)
    dvar = mean((2 * np.abs(E) + dE) * dE) + ((n + 2) * r.sum_unit + 6 * r.unit) * mean((np.abs(E) + dE) ** 2)
    r.check(n * (np.abs(E) + dE) ** 2)
    low, root = np.sqrt(np.maximum(var - dvar, 0) + eps), np.sqrt(var + eps)
    if np.any(low <= r.least):
        r.leave("a standard deviation may be zero")
        low = np.where(low > r.least, low, 1)
    return E, dE, root, low, dvar / (root + low)


def _stored(r: Reading, x: Ball) -> Ball:
    output = r.arithmetic.output
    return x.widened(UNIT[output] * (np.abs(x.v) + x.radius) + UNDERFLOW[output])


def _either(r: Reading, x: Any, y: Any) -> Ball:
    x, y = r.lift(x), r.lift(y)
    widest = r.merged([x, y], np.maximum)
    widest.v = x.v
    return widest


def _shifted(r: Reading, s: Ball, by: Any) -> Ball:
    """Two more additions, and a rounded factor log2(e) that multiplies what is added, not the sum."""
    by = np.abs(getattr(by, "v", by))
    return type(s)(r, s.v, s.m + by, s.e, s.w + 4 * r.unit, s.n + 2, z=s.z)


def _cancelled(r: Reading, x: Ball, by: Any) -> Ball:
    """Two more additions; a term has two roundings of its own."""
    by = np.abs(getattr(by, "v", by))
    return type(x)(r, x.v, x.m + by, x.e, x.w + 2 * r.unit + 2 * r.sum_unit, x.n + 2, z=x.z)


def _turned(r: Reading, x: Any, n: np.ndarray, theta: np.ndarray) -> Ball:
    """|a cos| + |b sin| <= |(a, b)|, the majorant of both coordinates: a complex product mixes them. An angle n theta
    comes from theta = base^-l by pow, or exp(-l log(base)), l itself off by 3 units; a state that turns token by token
    is off by four units a token, two for its factor and two for the product."""
    x = r.lift(x)

    def pair(a: np.ndarray) -> np.ndarray:
        return np.repeat(np.hypot(a[:, 0::2], a[:, 1::2]), 2, axis=1)

    size = np.abs(n)[:, None]
    angle = size * theta * (r.exp_error + 4 + 6 * np.abs(np.log(theta)))
    d = np.minimum(np.repeat(r.unit * (angle + 4 * size + 4), 2, axis=1), 2)
    turned, z = primitives.turned(x.v, n, theta), None if x.z is None else pair(x.z)
    m = pair(x.m) * (1 + d) + r.eta
    r.check(m)
    e = pair(x.e) + pair(np.abs(x.v) + x.e) * d + r.eta
    return type(x)(r, turned, m, e, x.w + 2 * r.unit + x.n * r.sum_unit, 2 * x.n, z=z)


def _rectified(r: Reading, dy: Any, x: Any) -> Ball:
    dy, x = r.lift(dy), r.lift(x)
    kept = r.merged([dy], lambda a: np.where(x.v > 0, a, 0))
    return kept.widened(np.where(np.abs(x.v) <= x.radius, np.abs(dy.v) + dy.radius, 0))


PRIMITIVES: Mapping[Any, Callable[..., Any]] = {
    primitives.softmax: _softmax,
    primitives.masked: _masked,
    primitives.softplus: _softplus,
    primitives.mahalanobis: _mahalanobis,
    primitives.decay: _decay,
    primitives.segment_products: _segment_products,
    primitives.segment_decays: _segment_decays,
    primitives.weighted_dot: _weighted_dot,
    primitives.unit: _unit,
    primitives.group_norm: _group_norm,
    primitives.stored: _stored,
    primitives.either: _either,
    primitives.shifted: _shifted,
    primitives.cancelled: _cancelled,
    primitives.turned: _turned,
    primitives.deviation: _deviation,
    primitives.rectified: _rectified,
    **MAPS,
    **RECURRENCES,
}
