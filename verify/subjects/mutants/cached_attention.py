"""Wrong attentions over a cache: forward, then gradients.

The letters are those of reference/cached_attention.py. `attend` is the reference, head by head, with its steps as
arguments; a mutant changes one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mixproof.reference import cached_attention as right
from mixproof.reference.primitives import Array, softmax
from mixproof.verify.arithmetic import round_to
from mixproof.verify.subjects.mutants import tabulated

Pair = tuple[Array, Array]

# --- builders --------------------------------------------------------------------------------------------------------


def by_width(scale: float | None, q: Array) -> float:
    return q.shape[3] ** -0.5 if scale is None else scale


def attend(
    scaled: Callable[[float | None, Array], float] = by_width,
    group: Callable[[int, int, int], int] = lambda h, G, M: h // M,
    read: Callable[[Array, Array, Array], Array] = lambda Kc, k, K0: Kc,
    kept: Callable[[Array, Array, Array], Array] = lambda Kc, k, K0: Kc,
    last: Callable[[int], int] = lambda P: P,
    mix: Callable[[Array, Array, int], Array] = lambda S, V, P: softmax(S) @ V,
) -> Callable[..., Any]:  # fmt: skip
    """-> O, Kc, Vc. `read` is the cache that queries see, `kept` the one that is returned; token t sees the keys
    j <= t + last(P)."""

    def forward(q, k, v, scale=None, K0=None, V0=None):
        T, G, M, _ = q.shape
        Kc, Vc = right.caches(k, v, K0, V0)
        K, V = (Kc, Vc) if K0 is None else (read(Kc, k, K0), read(Vc, v, V0))
        P = len(K) - T
        seen = np.tril(np.ones((T, len(K)), dtype=bool), last(P))
        O = []
        for h in range(G * M):
            g = group(h, G, M)
            S = np.where(seen, q[:, h // M, h % M] @ K[:, g].T * q.dtype.type(scaled(scale, q)), -np.inf)
            O.append(mix(S, V[:, g], P))
        O = np.stack(O, axis=1).reshape(T, G, M, v.shape[2])
        return (O, Kc, Vc) if K0 is None else (O, kept(Kc, k, K0), kept(Vc, v, V0))

    return forward


def vjp(
    rows: Callable[[Array], Array] = lambda G: G, states: float = 1.0, cache: float = 1.0,
    change: Callable[..., dict[str, Array]] = lambda grads, *inputs: grads,
) -> Callable[..., Any]:  # fmt: skip
    """`rows` changes the cotangent of O that keys and values see; `states` and `cache` weigh the cotangents of Kc and
    Vc, and the gradients of K0 and V0."""

    def gradients(cotangents, q, k, v, scale=None, K0=None, V0=None):
        upstream = cotangents | {name: states * cotangents[name] for name in ("Kc", "Vc")}
        grads = right.vjp(upstream | {"O": rows(upstream["O"])}, q, k, v, scale, K0, V0)
        grads["q"] = right.vjp(upstream, q, k, v, scale, K0, V0)["q"]
        grads = grads | {name: cache * grads[name] for name in ("K0", "V0")}
        return change(grads, upstream, q, k, v, scale, K0, V0)

    return gradients


# --- pieces that are wrong by themselves -----------------------------------------------------------------------------


def reversed_order(Kc: Array, k: Array, K0: Array) -> Array:
    return np.concatenate([k, K0])


def one_late(Kc: Array, k: Array, K0: Array) -> Array:
    """The tokens of the call written one slot too early: the last of the cache is lost."""
    return np.concatenate([Kc[: len(K0) - 1], k, 0 * Kc[:1]]) if len(K0) and len(k) else Kc


def half(Kc: Array, k: Array, K0: Array) -> Array:
    return round_to(Kc, "bfloat16").astype(Kc.dtype)


def apart(S: Array, V: Array, P: int, base: Callable[[Array], Array]) -> Array:
    """The cache and the call apart, their shares by `base` of the logarithms of their masses."""
    parts = [c for c in (slice(0, P), slice(P, None)) if S[:, c].size]
    if len(parts) < 2:
        return softmax(S) @ V
    top = [np.max(S[:, c], axis=1, keepdims=True) for c in parts]
    lse = [m + np.log(np.sum(np.exp(S[:, c] - m), axis=1, keepdims=True)) for m, c in zip(top, parts, strict=True)]
    share = base(np.concatenate(lse, axis=1) - np.maximum(*lse))
    share = share / np.sum(share, axis=1, keepdims=True)
    return sum(share[:, i : i + 1] * (softmax(S[:, c]) @ V[c]) for i, c in enumerate(parts))


def last_head(G: Array) -> Array:
    return np.where(np.arange(G.shape[2])[:, None] == G.shape[2] - 1, G, 0)


def mean_of_heads(G: Array) -> Array:
    return G / G.dtype.type(G.shape[2])


def without_delta(grads, cotangents, q, k, v, scale, K0, V0):
    """dS = A * (dO Vc^T)"""
    Kc, Vc = right.caches(k, v, K0, V0)
    seen, (T, G, M, K) = right.seen_by_rows(q, Kc), q.shape
    dq = []
    for g in range(G):
        A = right.weights(q[:, g].reshape(T * M, K), Kc[:, g], seen, scale)
        dS = A * (cotangents["O"][:, g].reshape(T * M, Vc.shape[2]) @ Vc[:, g].T)
        dq.append((dS @ Kc[:, g] * by_width(scale, q)).reshape(T, M, K))
    return grads | {"q": np.stack(dq, axis=1)}


# --- tables ----------------------------------------------------------------------------------------------------------

FORWARD = (
    (
        "top_left", "a causal mask that takes the first key for the first token's own", attend(last=lambda P: 0),
        "attn-top-left", ("forward", "split"),
    ),
    ("late_mask", "one key too many in every row", attend(last=lambda P: P + 1), "", ("forward", "causality")),
    (
        "exclusive_mask", "tokens that do not read their own key", attend(last=lambda P: P - 1), "",
        ("forward", "row_sums"),
    ),
    (
        "tiled_heads", "head h reading the keys of group h mod G", attend(group=lambda h, G, M: h % G), "",
        ("forward",),
    ),
    ("one_group", "all heads reading the keys of the first group", attend(group=lambda h, G, M: 0), "", ("forward",)),
    ("model_width", "the scale of the width of all heads",
     attend(lambda scale, q: (q[0].size if len(q) else 1) ** -0.5 if scale is None else scale), "", ("forward",)),
    ("no_root", "logits divided by the width of a head",
     attend(lambda scale, q: 1 / q.shape[3] if scale is None else scale), "", ("forward",)),
    ("default_scale", "K^-1/2 whatever the scale", attend(lambda scale, q: q.shape[3] ** -0.5), "", ("forward",)),
    ("no_cache", "a cache that nobody reads", attend(read=lambda Kc, k, K0: k), "",
     ("forward", "split")),
    ("reversed_cache", "the call before the cache", attend(read=reversed_order, kept=reversed_order), "",
     ("forward", "split")),
    ("overwritten", "the last token of the cache overwritten", attend(read=one_late, kept=one_late), "",
     ("forward", "split")),
    ("bfloat16_cache", "a cache kept in bfloat16", attend(read=half, kept=half), "", ("forward", "split")),
    ("base_two", "cache and call merged to base two", attend(mix=lambda S, V, P: apart(S, V, P, np.exp2)),
     "attn-lse-base2", ("forward", "split")),
    ("mean_of_parts", "the mean of cache and call", attend(mix=lambda S, V, P: apart(S, V, P, np.ones_like)), "",
     ("forward", "split")),
)  # fmt: skip

BACKWARD = (
    ("last_head", "keys that get the gradient of the last head of their group", vjp(last_head), "", ("vjp",)),
    ("mean_of_heads", "keys that get the mean over heads of their group", vjp(mean_of_heads), "", ("vjp",)),
    ("no_state_cotangent", "the cotangents of the cache dropped", vjp(states=0.0), "", ("vjp",)),
    ("no_cache", "no gradient for the cache before the call", vjp(cache=0.0), "", ("vjp",)),
    ("no_delta", "no rowsum(dO * O)", vjp(change=without_delta), "attn-no-delta", ("vjp",)),
)  # fmt: skip

MUTANTS = tabulated("softmax_attention.cached", FORWARD, BACKWARD)
