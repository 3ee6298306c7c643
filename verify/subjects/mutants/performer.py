"""Wrong attentions of the Performer: forward, then gradients.

The letters are those of reference/performer.py; `head` is the reference with its steps as arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mixproof.reference import linear_attention as right
from mixproof.reference.linear_attention import memory
from mixproof.reference.performer import features, logits
from mixproof.reference.primitives import Array, softmax
from mixproof.verify.subjects.mutants import Row, tabulated
from mixproof.verify.subjects.mutants.linear_transformer import from_nothing, of_all_keys

CHUNK = 8
INSIDE = 1e-4  # what the released code adds to every feature
Map = Callable[[Array, Array], Array]

# --- builders --------------------------------------------------------------------------------------------------------


def stable(x: Array, omega: Array) -> Array:
    """Features of queries, up to a number for each: with eps = 0 it drops out."""
    return softmax(logits(x, omega))


def head(
    query: Map = stable, key: Map = features, mix: Callable[..., Any] = right.chunkwise,
    mass: Map = lambda x, omega: np.sum(features(x, omega), axis=1, keepdims=True),
) -> Callable[..., Any]:  # fmt: skip
    """`mass` is what eps is divided by: the sum of the features that it belongs to.  -> O, S, z."""

    def forward(q, k, v, omega, eps=0.0, S0=None, z0=None, chunk=CHUNK):
        Q, K = query(q, omega), key(k, omega)
        least = eps / mass(q, omega) if eps else 0 * q[:, :1]
        (F, V), M = (K.shape[1], v.shape[1]), memory(K, v, S0, z0)
        one = np.eye(1, V + 1, V, dtype=M.dtype)
        Q, K, M = np.concatenate([Q, least], 1), np.concatenate([K, 0 * k[:, :1]], 1), np.concatenate([M, one])
        O, S, z = mix(Q, K, v, 0.0, M[:, :V], M[:, V], chunk)
        return O, S[:F], z[:F]

    return forward


def head_vjp(query_scale: bool = True, norm: float = 1.0, of_omega: float = 1.0) -> Callable[..., Any]:
    """`norm` multiplies the gradient through |k|^2, `of_omega` that of the directions."""

    def gradients(cotangents, q, k, v, omega, eps=0.0, S0=None, z0=None, chunk=CHUNK):
        Q, K, r = features(q, omega), features(k, omega), k.shape[1] ** -0.25
        d = right.vjp(cotangents, Q, K, v, eps, S0, z0, chunk)
        sq, sk = Q * d["q"], K * d["k"]
        dq, dk = (
            sq @ omega - np.sum(sq, 1, keepdims=True) * q * r,
            sk @ omega - norm * np.sum(sk, 1, keepdims=True) * k * r,
        )
        grads = {"q": dq * (r if query_scale else 1), "k": dk * r, "omega": of_omega * (sq.T @ q + sk.T @ k) * r}
        return d | grads

    return gradients


# --- pieces that are wrong by themselves -----------------------------------------------------------------------------


def without_norm(x: Array, omega: Array) -> Array:
    return len(omega) ** -0.5 * np.exp(x * x.shape[1] ** -0.25 @ omega.T)


def scaled(power: float) -> Map:
    """Features of x K^power, for x K^(-1/4)."""
    return lambda x, omega: features(x * x.shape[1] ** (power + 0.25), omega)


def greatest_key(k: Array, omega: Array) -> Array:
    s = logits(k, omega)
    return len(omega) ** -0.5 * np.exp(s - np.max(s, initial=-1e30))


def greatest_feature(k: Array, omega: Array) -> Array:
    s = logits(k, omega)
    return len(omega) ** -0.5 * np.exp(s - np.max(s, axis=1, keepdims=True))


def inside(x: Array, omega: Array) -> Array:
    return features(x, omega) + len(omega) ** -0.5 * x.dtype.type(INSIDE)


def trigonometric(x: Array, omega: Array) -> Array:
    """exp(|x|^2 / 2) cos(omega x): of the same mean, and of either sign."""
    y = x * x.shape[1] ** -0.25
    return len(omega) ** -0.5 * np.exp(np.sum(y * y, axis=1, keepdims=True) / 2) * np.cos(y @ omega.T)


# --- tables ----------------------------------------------------------------------------------------------------------

PERFORMER: tuple[tuple[Row, ...], tuple[Row, ...]] = (
    (
        ("no_norm", "keys without exp(-|x|^2 / 2)", head(key=without_norm), "", ("forward",)),
        ("no_scale", "keys that are not scaled", head(key=scaled(0.0)), "", ("forward",)),
        ("square_root", "keys scaled by K^-1/2 for K^-1/4", head(key=scaled(-0.5)), "", ("forward",)),
        (
            "greatest_feature", "the largest feature of each key taken out of it", head(key=greatest_feature), "",
            ("forward",),
        ),
        (
            "greatest_key", "the largest logit of all keys taken out of them, for good", head(key=greatest_key), "",
            ("forward", "causality", "split"),
        ),
        ("inside", "1e-4 added to every feature", head(inside, inside), "", ("forward",)),
        ("trigonometric", "features of cosines", head(trigonometric, trigonometric), "", ("forward", "hull")),
        ("no_root", "features without F^-1/2", head(key=lambda x, W: len(W) ** 0.5 * features(x, W)), "", ("forward",)),
        (
            "no_maximum", "queries whose largest logit is not taken out",
            head(features, mass=lambda x, W: x[:, :1] ** 0), "", ("extremes",),
        ),
        ("bare_eps", "eps added to normalised queries", head(mass=lambda x, W: x[:, :1] ** 0), "", ("forward",)),
        (
            "of_all_keys", "the normaliser summed over all keys", head(mix=of_all_keys), "gma-key-over-time",
            ("forward", "causality", "future_length", "row_sums"),
        ),
        ("no_carry", "chunks that start from nothing", head(mix=from_nothing), "", ("forward", "forms")),
    ),
    (
        ("no_norm", "no gradient through |k|^2", head_vjp(norm=0.0), "", ("vjp",)),
        ("query_scale", "no scale on the gradient of the queries", head_vjp(query_scale=False), "", ("vjp",)),
        ("fixed_directions", "no gradient for omega", head_vjp(of_omega=0.0), "", ("vjp",)),
    ),
)  # fmt: skip

MUTANTS = tabulated("performer", *PERFORMER)
