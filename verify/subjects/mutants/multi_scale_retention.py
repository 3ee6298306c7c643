"""Wrong multi-scale retention: forward, then gradients.

The letters are those of reference/multi_scale_retention.py; `head` is the reference with its steps as arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mixproof.reference import retention as right
from mixproof.reference.multi_scale_retention import angles, group_norm_vjp
from mixproof.reference.primitives import Array, deviation, group_norm, sigmoid, silu, turned
from mixproof.verify.subjects.mutants import Row, tabulated
from mixproof.verify.subjects.mutants.retention import chunkwise

CHUNK = 8
Norm = Callable[[Array, float], Array]
NormVJP = Callable[[Array, Array, float], Array]
Step = Callable[..., Array]

# --- builders --------------------------------------------------------------------------------------------------------


def interleaved(x: Array, n: np.ndarray, base: float) -> Array:
    return turned(x, n, angles(x.shape[1], base))


def gated(u: Array, N: Array) -> Array:
    return silu(u) * N


def head(
    query: Step = interleaved, key: Step = interleaved, mix: Callable[..., Any] | None = None, norm: Norm = group_norm,
    gate: Callable[[Array, Array], Array] = gated, gate_first: bool = False,
    positions: Callable[[int, int], np.ndarray] = lambda T, chunk: np.arange(T),
) -> Callable[..., Array]:  # fmt: skip
    """-> Y."""
    retain = mix or chunkwise()

    def forward(q, k, v, u, gamma, scale=1.0, eps=1e-6, base=10000.0, chunk=CHUNK):
        n = positions(len(q), chunk)
        O, _ = retain(query(q, n, base), key(k, n, base), v, gamma, scale, None, chunk)
        return norm(gate(u, O), eps) if gate_first else gate(u, norm(O, eps))

    return forward


def head_vjp(
    norm: NormVJP = group_norm_vjp, back: float = -1.0,
    slope: Callable[[Array], Array] = lambda u: sigmoid(u) + silu(u) * sigmoid(-u),
    gate: Callable[[Array], Array] = silu, decay: float = 1.0,
) -> Callable[..., Any]:  # fmt: skip
    """`back` is the sign of the angles by which gradients are turned."""

    def gradients(cotangents, q, k, v, u, gamma, scale=1.0, eps=1e-6, base=10000.0, chunk=CHUNK):
        n, G = np.arange(len(q)), cotangents["Y"]
        Q, K = interleaved(q, n, base), interleaved(k, n, base)
        O, S = right.chunkwise(Q, K, v, gamma, scale, None, chunk)
        dO = norm(G * gate(u), O, eps)
        d = right.vjp({"O": dO, "S": 0 * S}, Q, K, v, gamma, scale, None, chunk)
        turn = {name: interleaved(d[name], (back * n).astype(int), base) for name in ("q", "k")}
        return turn | {"v": d["v"], "u": G * group_norm(O, eps) * slope(u), "gamma": decay * d["gamma"]}

    return gradients


# --- pieces that are wrong by themselves -----------------------------------------------------------------------------


def mean(x: Array, axis: int = -1) -> Array:
    return np.sum(x, axis=axis, keepdims=True) / max(1, x.shape[axis])


def halves(x: Array, n: np.ndarray, base: float) -> Array:
    order = np.arange(x.shape[1]).reshape(2, -1).T.ravel()
    return interleaved(x[:, order], n, base)[:, np.argsort(order)]


def rope(x: Array, n: np.ndarray, base: float) -> Array:
    K = x.shape[1]
    return turned(x, n, base ** (-2 * np.arange(K // 2) / K))


def sample_norm(x: Array, eps: float) -> Array:
    E = x - mean(x)
    return E / np.sqrt(np.sum(E * E, axis=-1, keepdims=True) / max(1, x.shape[-1] - 1) + eps)


def eps_outside(x: Array, eps: float) -> Array:
    E = x - mean(x)
    return E / (np.sqrt(mean(E * E)) + eps)


def root_mean_square(x: Array, eps: float) -> Array:
    return x / np.sqrt(mean(x * x) + eps)


def over_time(x: Array, eps: float) -> Array:
    E = x - mean(x, axis=0)
    return E / np.sqrt(mean(E * E, axis=0) + eps)


def pooled(x: Array, eps: float) -> Array:
    return group_norm(x.reshape(1, -1), eps).reshape(x.shape) if x.size else x


def mean_twice(x: Array, eps: float) -> Array:
    """The variance as a mean of squares minus twice the squared mean."""
    m = mean(x)
    return (x - m) / np.sqrt(mean(x * x) - 2 * m * m + eps)


def without_means(G: Array, x: Array, eps: float) -> Array:
    return G / deviation(x, eps)


def without_mean(G: Array, x: Array, eps: float) -> Array:
    N = group_norm(x, eps)
    return (G - N * mean(G * N)) / deviation(x, eps)


def without_variance(G: Array, x: Array, eps: float) -> Array:
    return (G - mean(G)) / deviation(x, eps)


def not_divided(G: Array, x: Array, eps: float) -> Array:
    return group_norm_vjp(G, x, eps) * deviation(x, eps)


# --- tables ----------------------------------------------------------------------------------------------------------

MULTI_SCALE: tuple[tuple[Row, ...], tuple[Row, ...]] = (
    (
        (
            "no_conjugate", "keys that are not conjugated",
            head(key=lambda x, n, base: interleaved(x, n, base) * (-1) ** np.arange(x.shape[1], dtype=x.dtype)), "",
            ("forward",),
        ),
        (
            "turned_apart", "keys turned the other way", head(key=lambda x, n, base: interleaved(x, -n, base)), "",
            ("forward",),
        ),
        ("keys_not_turned", "keys that are not turned", head(key=lambda x, n, base: x), "", ("forward",)),
        (
            "late_keys", "keys turned by the position after their own",
            head(key=lambda x, n, base: interleaved(x, n + 1, base)), "", ("forward",),
        ),
        ("halves", "pairs of channels K/2 apart", head(halves, halves), "", ("forward",)),
        ("mixed_pairs", "pairs of neighbours in queries, K/2 apart in keys", head(key=halves), "", ("forward",)),
        ("rope", "angles base^(-2 i / K), the last of which is not 1 / base", head(rope, rope), "", ("forward",)),
        (
            "positions_of_chunk", "positions that start anew in every chunk",
            head(positions=lambda T, chunk: np.arange(T) % chunk), "", ("forward", "forms"),
        ),
        (
            "undecayed_state", "the carried state not decayed", head(mix=chunkwise(carry=lambda g, n, chunk: g**0)), "",
            ("forward", "forms"),
        ),
        (
            "norm_over_time", "every channel normalised over time", head(norm=over_time), "",
            ("forward", "causality", "future_length"),
        ),
        (
            "norm_of_all", "one norm for all tokens", head(norm=pooled), "", ("forward", "causality", "future_length"),
        ),
        ("sample_variance", "the sample variance", head(norm=sample_norm), "", ("forward",)),
        ("eps_outside", "eps added to the standard deviation", head(norm=eps_outside), "", ("forward",)),
        ("root_mean_square", "a norm that does not take off the mean", head(norm=root_mean_square), "", ("forward",)),
        ("mean_twice", "the squared mean taken off twice", head(norm=mean_twice), "", ("forward",)),
        ("sigmoid_gate", "sigmoid(u) for silu(u)", head(gate=lambda u, N: sigmoid(u) * N), "", ("forward",)),
        ("bare_gate", "u for silu(u)", head(gate=lambda u, N: u * N), "", ("forward",)),
        ("gate_first", "the gate before the norm", head(gate_first=True), "", ("forward",)),
    ),
    (
        ("no_means", "both means dropped from the norm's gradient", head_vjp(without_means), "", ("vjp",)),
        ("no_mean", "the mean dropped from the norm's gradient", head_vjp(without_mean), "", ("vjp",)),
        ("no_variance", "the variance taken for a constant", head_vjp(without_variance), "", ("vjp",)),
        ("not_divided", "the norm's gradient not divided by the deviation", head_vjp(not_divided), "", ("vjp",)),
        ("not_turned_back", "gradients that are not turned back", head_vjp(back=0.0), "", ("vjp",)),
        ("turned_on", "gradients turned on, not back", head_vjp(back=1.0), "", ("vjp",)),
        ("sigmoid_slope", "sigmoid(u) for the derivative of silu", head_vjp(slope=sigmoid), "", ("vjp",)),
        ("no_gate", "the gate missing from the values' gradient", head_vjp(gate=lambda u: u**0), "", ("vjp",)),
        ("no_decay", "no gradient for gamma", head_vjp(decay=0.0), "", ("vjp",)),
    ),
)  # fmt: skip

MUTANTS = tabulated("multi_scale_retention", *MULTI_SCALE)
