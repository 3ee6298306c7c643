"""Wrong attentions of the linear transformer: forward, then gradients.

The letters are those of reference/linear_transformer.py; `head` is the reference with its steps as arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mixproof.reference import linear_attention as right
from mixproof.reference.linear_transformer import slope
from mixproof.reference.primitives import Array, elu_plus_one
from mixproof.verify.subjects.mutants import Row, tabulated

CHUNK = 8
EPSILON = 1e-6  # what the released code adds, whatever eps is
Map = Callable[[Array], Array]

# --- builders --------------------------------------------------------------------------------------------------------


def head(
    query: Map = elu_plus_one, key: Map = elu_plus_one, mix: Callable[..., Any] = right.chunkwise, least: float = 0.0
) -> Callable[..., Any]:
    """-> O, S, z."""

    def forward(q, k, v, eps=0.0, S0=None, z0=None, chunk=CHUNK):
        return mix(query(q), key(k), v, eps + least, S0, z0, chunk)

    return forward


def head_vjp(
    slope_q: Map = slope, slope_k: Map = slope, change: Callable[..., dict[str, Array]] = lambda d, cotangents: d
) -> Callable[..., Any]:
    def gradients(cotangents, q, k, v, eps=0.0, S0=None, z0=None, chunk=CHUNK):
        d = right.vjp(cotangents, elu_plus_one(q), elu_plus_one(k), v, eps, S0, z0, chunk)
        return change(d | {"q": d["q"] * slope_q(q), "k": d["k"] * slope_k(k)}, cotangents)

    return gradients


# --- pieces that are wrong by themselves -----------------------------------------------------------------------------


def rounded_elu(x: Array) -> Array:
    return elu(x) + 1


def elu(x: Array) -> Array:
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


def relu(x: Array) -> Array:
    return np.maximum(x, 0) + 1


def scaled(x: Array) -> Array:
    return elu_plus_one(x * x.shape[1] ** -0.25)


def of_all_keys(Q, K, v, eps, S0, z0, chunk):
    O, S, z = right.chunkwise(Q, K, v, eps, S0, z0, chunk)
    before = right.memory(K, v, S0, z0)[:, -1]
    D = Q @ before + np.sum(np.tril(Q @ K.T), axis=1)
    return O * ((D + eps) / (Q @ z + eps))[:, None], S, z


def exclusive(Q, K, v, eps, S0, z0, chunk):
    """Reads before it writes; the first query, which finds nothing, gives its own value."""
    late_K, late_v = (np.concatenate([x[:1], x[:-1]]) for x in (K, v))
    _, S, z = right.chunkwise(Q, K, v, eps, S0, z0, chunk)
    return right.chunkwise(Q, late_K, late_v, eps, S0, z0, chunk)[0], S, z


def without_mass(Q, K, v, eps, S0, z0, chunk):
    return right.chunkwise(Q, K, v, eps, S0, None, chunk)


def from_nothing(Q, K, v, eps, S0, z0, chunk):
    """Every chunk starts from the memory before the first."""
    O, S, z = right.chunkwise(Q, K, v, eps, S0, z0, chunk)
    chunks = [slice(a, a + chunk) for a in range(0, len(Q), chunk)]
    return np.concatenate([O[:0], *(right.parallel(Q[c], K[c], v[c], eps, S0, z0)[0] for c in chunks)]), S, z


# --- tables ----------------------------------------------------------------------------------------------------------

LINEAR_TRANSFORMER: tuple[tuple[Row, ...], tuple[Row, ...]] = (
    (
        ("rounded_elu", "elu(x) + 1 from a rounded elu(x)", head(rounded_elu, rounded_elu), "", ("extremes",)),
        ("elu", "elu(x), without the one", head(elu, elu), "", ("forward", "hull")),
        ("relu", "max(x, 0) + 1 for the feature map", head(relu, relu), "", ("forward",)),
        ("exponential", "exp(x) for the feature map", head(np.exp, np.exp), "", ("forward",)),
        ("bare_queries", "queries that no feature map has seen", head(query=lambda x: x), "", ("forward",)),
        ("scaled", "queries and keys scaled by K^-1/4", head(scaled, scaled), "", ("forward",)),
        ("least", "1e-6 in every denominator", head(least=EPSILON), "", ("extremes",)),
        (
            "of_all_keys", "the normaliser summed over all keys", head(mix=of_all_keys), "gma-key-over-time",
            ("forward", "causality", "future_length", "row_sums"),
        ),
        ("exclusive", "queries that read before their own key is written", head(mix=exclusive), "", ("forward",)),
        ("no_mass", "the mass of the initial memory dropped", head(mix=without_mass), "", ("forward", "split")),
        ("no_carry", "chunks that start from nothing", head(mix=from_nothing), "", ("forward", "forms")),
    ),
    (
        ("slope_one", "a slope of one for queries below zero", head_vjp(slope_q=lambda x: x**0), "", ("vjp",)),
        ("slope_exp", "exp(x) for the slope of keys above zero", head_vjp(slope_k=np.exp), "", ("vjp",)),
        ("slope_phi", "phi for its own slope", head_vjp(elu_plus_one, elu_plus_one), "", ("vjp",)),
        (
            "no_memory", "the cotangent of the memory dropped",
            head_vjp(change=lambda d, c: d | {"S0": c["S"], "z0": c["z"]}), "", ("vjp",),
        ),
    ),
)  # fmt: skip

MUTANTS = tabulated("linear_transformer", *LINEAR_TRANSFORMER)
