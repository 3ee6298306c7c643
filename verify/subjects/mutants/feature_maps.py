"""Wrong feature maps: forward, then gradients. The letters are those of reference/feature_maps.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mixproof.reference.feature_maps import phi_a, phi_b
from mixproof.reference.primitives import Array
from mixproof.verify.subjects.mutants import Row, tabulated
from mixproof.verify.subjects.mutants.retention import rounded

Step = Callable[..., Array]

# --- builders and pieces ---------------------------------------------------------------------------------------------


def over(norm: Step, features: Step = np.exp) -> Step:
    return lambda x: features(x) / norm(features(x))


def total(x: Array) -> Array:
    return np.sum(np.abs(x), axis=-1, keepdims=True)


def rooted(x: Array, axis: int = -1) -> Array:
    return np.sqrt(np.sum(x * x, axis=axis, keepdims=True))


def shifted_by(top: Step) -> Step:
    def phi(x: Array) -> Array:
        e = np.exp(x - top(x)) if len(x) else x
        return e / rooted(e)

    return phi


def exp_of(norm: Callable[[Array, float], Any]) -> Step:
    def phi(x: Array, norm_eps: float = 1e-12) -> Array:
        return np.exp(x / norm(x, norm_eps))

    return phi


def radial(Y: Array, G: Array) -> Array:
    return np.sum(Y * G, axis=-1, keepdims=True)


def unit_back(inward: float = 1.0, features: float = 1.0, divide: float = 1.0) -> Callable[..., Any]:
    """Factors of the radial part, of the powers of Y and of ||x||."""

    def vjp(cotangents, x, norm_eps=1e-12):
        y = phi_b(x, norm_eps)
        norm = np.maximum(rooted(x), norm_eps)
        u, H = x / norm, y**features * cotangents["Y"]
        return {"x": (H - inward * u * radial(u, H)) / norm**divide}

    return vjp


def sphere_back(change: Callable[[Array, Array], Array]) -> Callable[..., Any]:
    return lambda cotangents, x: {"x": change(phi_a(x), cotangents["Y"])}


# --- tables ----------------------------------------------------------------------------------------------------------

PHI_A: tuple[tuple[Row, ...], tuple[Row, ...]] = (
    (
        ("no_maximum", "no maximum subtracted before exp", over(rooted), "", ("extremes",)),
        ("not_normalised", "exp(x) for exp(x) / ||exp(x)||", lambda x: np.exp(x), "", ("forward",)),
        ("sum_for_norm", "the sum of exp(x) for its norm", over(total), "", ("forward",)),
        ("norm_of_x", "exp(x) / ||x||, the norm first", lambda x: np.exp(x) / rooted(x), "", ("forward",)),
        (
            "column_norm", "a norm over tokens", over(lambda e: rooted(e, axis=0)), "",
            ("forward", "causality", "future_length"),
        ),
        ("maximum_of_all", "the maximum of all tokens subtracted", shifted_by(np.max), "", ("causality", "extremes")),
        (
            "last_maximum", "the maximum of the last token subtracted", shifted_by(lambda x: np.max(x[-1])), "",
            ("causality",),
        ),
        (
            "favoured_channels", "channel c favoured by 2^-6 c",
            lambda x: phi_a(x + 2.0**-6 * np.arange(x.shape[1], dtype=x.dtype)), "", ("forward", "relabelling"),
        ),
        ("bfloat16_features", "features rounded to bfloat16", lambda x: rounded(phi_a(x)), "", ("forward",)),
    ),
    (
        ("no_projection", "only the product with Y", sphere_back(lambda Y, G: Y * G), "", ("vjp",)),
        (
            "softmax_jacobian", "the gradient of a softmax", sphere_back(lambda Y, G: Y * (G - radial(Y, G))), "",
            ("vjp",),
        ),
        ("sphere_alone", "the gradient for exp(x)", sphere_back(lambda Y, G: G - Y * radial(Y, G)), "", ("vjp",)),
        (
            "doubled", "the gradient for 2 x, the argument of the softmax",
            sphere_back(lambda Y, G: 2 * (Y * G - Y * Y * radial(Y, G))), "", ("vjp",),
        ),
    ),
)  # fmt: skip

PHI_B: tuple[tuple[Row, ...], tuple[Row, ...]] = (
    (
        ("naive_norm", "squares that overflow", exp_of(lambda x, eps: np.maximum(rooted(x), eps)), "", ("extremes",)),
        (
            "eps_under_root", "2^-10 added under the root", exp_of(lambda x, eps: np.sqrt(rooted(x) ** 2 + 2.0**-10)),
            "", ("forward", "homogeneity"),
        ),
        ("sum_for_norm", "the sum of |x| for its norm", exp_of(lambda x, eps: total(x)), "", ("forward",)),
        (
            "column_norm", "a norm over tokens", exp_of(lambda x, eps: rooted(x, axis=0)), "",
            ("forward", "causality", "future_length"),
        ),
        ("not_normalised", "exp(x) for exp(x / ||x||)", exp_of(lambda x, eps: 1), "", ("forward", "homogeneity")),
        ("exp_first", "exp(x) / ||exp(x)||, the other reading", lambda x, norm_eps=1e-12: phi_a(x), "", ("forward",)),
        (
            "root_of_channels", "x / ||x|| multiplied by the root of the number of channels",
            exp_of(lambda x, eps: rooted(x) / np.sqrt(x.dtype.type(x.shape[1]))), "", ("forward",),
        ),
        (
            "bfloat16_features", "features rounded to bfloat16", lambda x, norm_eps=1e-12: rounded(phi_b(x)), "",
            ("forward",),
        ),
    ),
    (
        ("no_projection", "the norm taken for a constant", unit_back(inward=0.0), "", ("vjp", "euler")),
        ("not_divided", "no division by the norm", unit_back(divide=0.0), "", ("vjp",)),
        ("divided_twice", "two divisions by the norm", unit_back(divide=2.0), "", ("vjp",)),
        ("unit_alone", "the gradient for x / ||x||", unit_back(features=0.0), "", ("vjp",)),
        ("radial_sign", "the radial part added", unit_back(inward=-1.0), "", ("vjp", "euler")),
    ),
)  # fmt: skip

MUTANTS = (*tabulated("tala.phi_a", *PHI_A), *tabulated("tala.phi_b", *PHI_B))
