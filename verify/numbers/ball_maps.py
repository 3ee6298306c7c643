"""What balls make of feature maps and norms that have a bound of their own; see ball_primitives.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mixproof.reference import primitives

if TYPE_CHECKING:
    from mixproof.verify.numbers.ball import Ball, Reading

MOST = 700.0  # exp of it is finite
SLACK = 1 + 2.0**-20  # bounds are themselves evaluated in float64


def _rms_norm(r: Reading, x: Any, eps: float) -> Ball:
    """As `_group_norm`, about zero instead of the mean."""
    x = r.lift(x)
    n, radius = x.shape[-1], x.radius

    def mean(a: np.ndarray) -> np.ndarray:
        return np.sum(a, axis=-1, keepdims=True) / n

    wide = (np.abs(x.v) + radius) ** 2
    square = mean(x.v * x.v)
    moved = mean((2 * np.abs(x.v) + radius) * radius) + ((n + 1) * r.sum_unit + 6 * r.unit) * mean(wide) + 2 * r.eta
    r.check(n * wide)
    low, root = np.sqrt(np.maximum(square - moved, 0) + eps), np.sqrt(square + eps)
    if np.any(low <= r.least):
        r.leave("a norm may be zero")
        low = np.where(low > r.least, low, 1)
    v = x.v / np.where(root > 0, root, 1)
    e = radius / low + np.abs(v) * moved / (root + low) / low
    return r.around(v, (e + (np.abs(v) + e) * 12 * r.unit) * SLACK + r.eta / np.minimum(low, 1))


def _phi1(r: Reading, z: Any) -> Ball:
    """The mean of exp(s z) over 0 < s < 1: an error d of z is a factor within exp(|d|). Then expm1, as accurate as
    exp, and a quotient."""
    z = r.lift(z)
    return _mean_of_exp(r, z, primitives.phi1(z.v), r.exp_error + 6)


def _phi1_slope(r: Reading, z: Any) -> Ball:
    """The mean of s exp(s z): as `_phi1`. Its series, or exp(z) - phi1(z) where they differ by a third or more, or the
    series of a difference of two such means; each within some tens of units."""
    z = r.lift(z)
    return _mean_of_exp(r, z, primitives.phi1_slope(z.v), 8 * (r.exp_error + 6))


def _mean_of_exp(r: Reading, z: Ball, v: np.ndarray, units: float) -> Ball:
    d = z.radius + r.unit * (units + 2 * np.abs(z.v))
    if not np.all(d <= MOST):
        r.leave("nothing is known of an exponential")
        d = np.minimum(d, MOST)
    r.check(np.exp(z.v) * np.exp(d))  # before the quotient
    return r.around(v, v * np.expm1(d) + r.eta)


def _elu_plus_one(r: Reading, x: Any) -> Ball:
    """Its slope is exp(x) below zero and one above: at most the exponential's error, and the error of x."""
    x = r.lift(x)
    v = primitives.elu_plus_one(x.v)
    d = x.radius + r.unit * np.where(x.v - x.radius > 0, 0, r.exp_error + 2 * np.abs(x.v))
    if not np.all(d <= MOST):
        r.leave("nothing is known of an exponential")
        d = np.minimum(d, MOST)
    e = np.where(x.v > 0, d, np.minimum(v, 1) * np.expm1(d))
    return r.around(v, (e + max(r.unit, r.sum_unit) * np.where(x.v + x.radius > 0, v + e, 0)) * SLACK + r.eta)


MAPS: Mapping[Any, Callable[..., Any]] = {
    primitives.rms_norm: _rms_norm,
    primitives.phi1: _phi1,
    primitives.phi1_slope: _phi1_slope,
    primitives.elu_plus_one: _elu_plus_one,
}
