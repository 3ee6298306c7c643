"""Wrong Linformers: forward, then gradients.

The letters are those of reference/linformer.py; `head` is the reference with its steps as arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mixproof.reference import linformer
from mixproof.reference.primitives import Array, causal_mask, softmax
from mixproof.verify.subjects.mutants import Row, tabulated
from mixproof.verify.subjects.mutants.softmax_attention import by_width, exp_over_sum

CHUNK = 8
Project = Callable[[Array, Array], Array]
Gradients = dict[str, Array]

# --- builders --------------------------------------------------------------------------------------------------------


def multiplied(E: Array, x: Array) -> Array:
    return E @ x


def head(
    keys: Project = multiplied, values: Project = multiplied, normalise: Callable[[Array], Array] = softmax,
    scaled: Callable[[float | None, int], float] = by_width, shared: bool = False,
) -> Callable[..., Array]:  # fmt: skip
    """O = softmax(scale Q (E_k K)^T) E_v V; `shared`: E_k for E_v.  -> (T, V)."""

    def forward(q, k, v, E_k, E_v, scale=None):
        P = normalise(q @ keys(E_k, k).T * scaled(scale, q.shape[1]))
        return P @ values(E_k if shared else E_v, v)

    return forward


def head_vjp(
    change: Callable[[Gradients], Gradients] = lambda d: d, delta: float = 1.0, query_scale: bool = True
) -> Callable[..., Any]:
    def gradients(cotangents, q, k, v, E_k, E_v, scale=None):
        KX, VX, G = E_k @ k, E_v @ v, cotangents["O"]
        P, factor = linformer.weights(q, KX, scale), by_width(scale, q.shape[1])
        dP = G @ VX.T
        dS = P * (dP - delta * np.sum(P * dP, axis=1, keepdims=True))
        dKX, dVX = factor * dS.T @ q, P.T @ G
        dq = dS @ KX * (factor if query_scale else 1)
        return change({"q": dq, "k": E_k.T @ dKX, "v": E_v.T @ dVX, "E_k": dKX @ k.T, "E_v": dVX @ v.T})

    return gradients


# --- pieces that are wrong by themselves -----------------------------------------------------------------------------


def whole_chunks(E: Array, x: Array) -> Array:
    most = max(len(x) - len(x) % CHUNK, min(len(x), CHUNK))
    return E[:, :most] @ x[:most]


def averaged(E: Array, x: Array) -> Array:
    """Weights of the tokens that sum to one."""
    return softmax(E) @ x


# --- tables ----------------------------------------------------------------------------------------------------------

LINFORMER: tuple[tuple[Row, ...], tuple[Row, ...]] = (
    (
        ("shared", "the projection of keys for values too", head(shared=True), "", ("forward",)),
        ("averaged", "mixtures whose weights are normalised", head(values=averaged), "", ("forward",)),
        ("reversed", "the columns of E_k in reverse", head(lambda E, x: E[:, ::-1] @ x), "", ("forward",)),
        ("whole_chunks", "the tokens of the last, short chunk left out", head(values=whole_chunks), "", ("forward",)),
        ("no_scale", "the scale dropped", head(scaled=lambda scale, K: 1.0), "", ("forward",)),
        ("default_scale", "K^-1/2 whatever the scale", head(scaled=lambda scale, K: K**-0.5), "", ("forward",)),
        (
            "masked", "mixture x hidden from tokens before x",
            head(normalise=lambda s: softmax(np.where(causal_mask(*s.shape), s, -np.inf))), "", ("forward",),
        ),
        (
            "over_queries", "weights normalised over queries", head(normalise=lambda s: softmax(s, axis=0)),
            "gma-key-over-time", ("forward",),
        ),
        ("no_maximum", "no maximum subtracted before exp", head(normalise=exp_over_sum), "gma-no-max", ("extremes",)),
        (
            "clipped_values", "values clipped to [-2, 2]", head(values=lambda E, v: E @ np.clip(v, -2, 2)), "",
            ("forward", "linearity"),
        ),
        (
            "shifted_values", "2^-6 added to the values", head(values=lambda E, v: E @ (v + v.dtype.type(2.0**-6))), "",
            ("forward", "constant_value"),
        ),
    ),
    (
        ("no_delta", "no rowsum(dO * O)", head_vjp(delta=0.0), "attn-no-delta", ("vjp",)),
        ("query_scale", "no scale on the gradient of the queries", head_vjp(query_scale=False), "", ("vjp",)),
        ("fixed_keys", "no gradient for E_k", head_vjp(lambda d: d | {"E_k": 0 * d["E_k"]}), "", ("vjp",)),
        (
            "tied", "one gradient for both projections",
            head_vjp(lambda d: d | dict.fromkeys(("E_k", "E_v"), d["E_k"] + d["E_v"])), "", ("vjp",),
        ),
    ),
)  # fmt: skip

MUTANTS = tabulated("linformer", *LINFORMER)
