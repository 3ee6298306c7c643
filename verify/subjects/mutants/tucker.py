"""Wrong Tucker attention: forward, then gradients.

The letters are those of reference/tucker.py; `heads` is the reference with its steps as arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mixproof.reference import tucker as right
from mixproof.reference.caches import appended, visible
from mixproof.reference.primitives import Array, masked, softmax
from mixproof.reference.tucker import attention
from mixproof.verify.subjects.mutants import Row, tabulated

Core = Callable[[Array, int], Array]
Mask = Callable[[int, int, bool], np.ndarray]

# --- builders --------------------------------------------------------------------------------------------------------


def own(G: Array, h: int) -> Array:
    return G[h]


def width(Gq: Array, Gk: Array) -> float:
    return Gq.shape[1] ** -0.5


def heads(
    key_core: Core = own, value_core: Core = own, read: Core = own,
    default: Callable[[Array, Array], float] = width, keep: Mask = visible,
    attend: Callable[..., Array] = attention, joined: Callable[[Array, Array], Array] = appended,
    total: Callable[[Array], Array] = lambda Y: np.sum(Y, axis=0),
) -> Callable[..., Any]:  # fmt: skip
    """-> Y, Kc, Vc."""

    def forward(x, Fq, Gq, Fk, Gk, Fv, Gv, W_O, scale=None, causal=True, K0=None, V0=None):
        c, Kc, Vc = x @ Fq.T, joined(K0, x @ Fk.T), joined(V0, x @ Fv.T)
        scale, seen = default(Gq, Gk) if scale is None else scale, keep(len(x), len(Kc), causal)
        Y = [
            attend(c @ Gq[h].T, Kc @ key_core(Gk, h).T, Vc @ value_core(Gv, h).T, scale, seen) @ read(W_O, h)
            for h in range(len(Gq))
        ]
        return total(np.stack(Y)), Kc, Vc

    return forward


def changed(change: Callable[..., None], vjp: Callable[..., dict[str, Array]] = right.vjp) -> Callable[..., Any]:
    """The right gradients, then a mistake made in them: `change` sees gradients, cotangents and inputs."""

    def gradients(cotangents, **inputs):
        d = vjp(cotangents, **inputs)
        change(d, cotangents, inputs)
        return d

    return gradients


# --- pieces that are wrong by themselves -----------------------------------------------------------------------------


def first(G: Array, h: int) -> Array:
    return G[0]


def before(G: Array, h: int) -> Array:
    return G[h - 1]


def next_one_too(T: int, S: int, causal: bool) -> np.ndarray:
    return np.tril(np.ones((T, S), dtype=bool), S - T + 1) if causal else visible(T, S, False)


def from_zero(T: int, S: int, causal: bool) -> np.ndarray:
    return np.tril(np.ones((T, S), dtype=bool)) if causal else visible(T, S, False)


def call_only(T: int, S: int, causal: bool) -> np.ndarray:
    return visible(T, S, causal) & (np.arange(S) >= S - T)


def newest_first(before: Array, rows: Array) -> Array:
    return rows if before is None else np.concatenate([rows, before])


def over_queries(q: Array, k: Array, v: Array, scale: float, keep: np.ndarray) -> Array:
    return softmax(masked(q @ k.T * scale, keep, -np.inf), axis=0) @ v


def multiplied_mask(q: Array, k: Array, v: Array, scale: float, keep: np.ndarray) -> Array:
    return softmax(q @ k.T * scale * keep) @ v


def no_cache_cotangent(d: dict[str, Array], cotangents: dict[str, Array], I: dict[str, Any]) -> None:
    dK = cotangents["Kc"][len(cotangents["Kc"]) - len(I["x"]) :]
    d["Fk"], d["x"] = d["Fk"] - dK.T @ I["x"], d["x"] - dK @ I["Fk"]


def cached_latents_constant(d: dict[str, Array], cotangents: dict[str, Array], I: dict[str, Any]) -> None:
    for n, y in (("K0", "Kc"), ("V0", "Vc")):
        d[n] = cotangents[y][: len(d[n])]


def half_factor(d: dict[str, Array], cotangents: dict[str, Array], I: dict[str, Any]) -> None:
    d["Fq"] = d["Fq"] / 2


def unscaled_queries(d: dict[str, Array], cotangents: dict[str, Array], I: dict[str, Any]) -> None:
    scale = I.get("scale")
    d["Gq"] = d["Gq"] / (I["Gq"].shape[1] ** -0.5 if scale is None else scale)


def core_of_call(d: dict[str, Array], cotangents: dict[str, Array], I: dict[str, Any]) -> None:
    if I.get("V0") is not None:
        new = cotangents | {n: cotangents[n][len(I["V0"]) :] for n in ("Kc", "Vc")}
        inputs: dict[str, Any] = I | {"K0": None, "V0": None}
        d["Gv"] = right.vjp(new, **inputs)["Gv"]


# --- tables ----------------------------------------------------------------------------------------------------------

TUCKER: tuple[tuple[Row, ...], tuple[Row, ...]] = (
    (
        (
            "latent_scale", "logits scaled by the rank of the keys", heads(default=lambda q, k: k.shape[2] ** -0.5),
            "mla-scale-latent", ("forward",),
        ),
        (
            "model_scale", "logits scaled by the width of all heads",
            heads(default=lambda q, k: (q.shape[0] * q.shape[1]) ** -0.5), "", ("forward",),
        ),
        ("first_key_core", "the first head's key core for all", heads(first), "mla-uk-head0", ("forward",)),
        ("first_value_core", "the first head's value core for all", heads(value_core=first), "", ("forward",)),
        ("key_core_before", "the key core of the head before", heads(before), "", ("forward",)),
        ("projection_before", "the output projection of the head before", heads(read=before), "", ("forward",)),
        (
            "mean_of_heads", "the mean of the heads, not their sum", heads(total=lambda Y: np.sum(Y, axis=0) / len(Y)),
            "", ("forward",),
        ),
        ("leak", "a mask that shows the next token", heads(keep=next_one_too), "", ("causality",)),
        ("mask_from_zero", "a mask that forgets the cached tokens", heads(keep=from_zero), "", ("split",)),
        ("cache_unread", "a cache that is extended and not read", heads(keep=call_only), "", ("forward", "split")),
        (
            "newest_first", "a cache that is extended at its front", heads(joined=newest_first), "",
            ("forward", "split"),
        ),
        ("over_queries", "weights normalised over queries", heads(attend=over_queries), "", ("forward", "causality")),
        ("multiplied_mask", "a mask that makes logits zero", heads(attend=multiplied_mask), "", ("causality",)),
        (
            "always_causal", "the flag for causality ignored", heads(keep=lambda T, S, causal: visible(T, S)), "",
            ("forward",),
        ),
    ),
    (
        ("no_cache_cotangent", "the cotangent of cached keys dropped", changed(no_cache_cotangent), "", ("vjp",)),
        (
            "constant_cache", "no gradient through attention for the cache", changed(cached_latents_constant), "",
            ("vjp",),
        ),
        ("half_factor", "half the gradient of the query factor", changed(half_factor), "", ("vjp",)),
        (
            "unscaled_queries", "the scale missing from the query core's gradient", changed(unscaled_queries), "",
            ("vjp",),
        ),
        ("core_of_call", "the value core's gradient without the cached tokens", changed(core_of_call), "", ("vjp",)),
    ),
)  # fmt: skip

MUTANTS = tabulated("tucker", *TUCKER)
