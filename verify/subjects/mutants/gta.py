"""Wrong grouped-head latent attention, as printed and as released: forward, then gradients.

The letters are those of reference/gta.py; `printed` and `released` are the reference with its steps as arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mixproof.reference import gta as right
from mixproof.reference.caches import appended, visible
from mixproof.reference.gta import decoded, mean
from mixproof.reference.primitives import Array, masked, sigmoid, silu, softmax
from mixproof.reference.tucker import attention
from mixproof.verify.subjects.mutants import Row, tabulated
from mixproof.verify.subjects.mutants.tucker import call_only, changed, from_zero, newest_first, next_one_too

Decoder = Callable[[Array, Array], Array]
Mask = Callable[[int, int, bool], np.ndarray]

# --- builders --------------------------------------------------------------------------------------------------------


def silu_of_image(c: Array, U: Array) -> Array:
    return silu(c @ U.T)


def one_map(q: Array, k: Array, K: Array, scale: float, keep: np.ndarray) -> Array:
    """The weights of a group from its heads' queries and keys (T, M, K), and the mean keys (S, K) of all tokens."""
    return softmax(masked(np.sum(q, axis=1) / q.shape[1] @ K.T * scale, keep, -np.inf))


def own(U: Array, g: int, m: int) -> Array:
    return U[g, m]


def printed(
    weights: Callable[..., Array] = one_map, decode: Decoder = silu_of_image, decoder: Callable[..., Array] = own,
    pooled: Callable[[Array], Array] = mean, keep: Mask = visible, after: Decoder | None = None,
    default: Callable[[int, int], float] = lambda M, K: K**-0.5,
    joined: Callable[[Array, Array], Array] = appended,
) -> Callable[..., Any]:  # fmt: skip
    """-> O, Kc, Cc. With `after`, values are decoded by it after the sum over tokens."""

    def forward(q, k, c, U, scale=None, Kc0=None, C0=None):
        Kc, Cc, (G, M), O = joined(Kc0, pooled(k)), joined(C0, c), U.shape[:2], []
        scale, seen = default(*q.shape[2:]) if scale is None else scale, keep(len(q), len(Kc), True)
        for g in range(G):
            A, decoders = weights(q[:, g], k[:, g], Kc[:, g], scale, seen), [decoder(U, g, m) for m in range(M)]
            O.append(np.stack([after(A @ Cc, W) if after else A @ decode(Cc, W) for W in decoders], axis=1))
        return np.stack(O, axis=1), Kc, Cc

    return forward


def released(
    decode: Decoder = decoded, gate: Callable[[Array], Array] = sigmoid, keep: Mask = visible,
    group: Callable[[int], int] = lambda g: g, decoder: Callable[..., Array] = own,
    default: Callable[[int, int], float] = lambda M, K: K**-0.5,
    joined: Callable[[Array, Array], Array] = appended,
) -> Callable[..., Any]:  # fmt: skip
    """-> Y, Kc, Cc."""

    def forward(q, k, c, U, u, scale=None, K0=None, C0=None):
        Kc, Cc, (G, M) = joined(K0, k), joined(C0, c), U.shape[:2]
        scale, seen = default(*q.shape[2:]) if scale is None else scale, keep(len(q), len(Kc), True)
        o = [
            [decode(attention(q[:, g, m], Kc[:, g], Cc[:, group(g)], scale, seen), decoder(U, g, m)) for m in range(M)]
            for g in range(G)
        ]
        return gate(u) * np.stack([np.stack(heads, axis=1) for heads in o], axis=1), Kc, Cc

    return forward


# --- pieces that are wrong by themselves -----------------------------------------------------------------------------


def first_query(q: Array, k: Array, K: Array, scale: float, keep: np.ndarray) -> Array:
    return one_map(q[:, :1], k, K, scale, keep)


def mean_of_maps(q: Array, k: Array, K: Array, scale: float, keep: np.ndarray) -> Array:
    maps = [one_map(q[:, m : m + 1], k, K, scale, keep) for m in range(q.shape[1])]
    return np.sum(np.stack(maps), axis=0) / len(maps)


def mean_of_logits(q: Array, k: Array, K: Array, scale: float, keep: np.ndarray) -> Array:
    """Each head's query with its own key, where that is not cached."""
    P = len(K) - len(k)
    maps = [q[:, m] @ np.concatenate([K[:P], k[:, m]]).T for m in range(q.shape[1])]
    return softmax(masked(np.sum(np.stack(maps), axis=0) / len(maps) * scale, keep, -np.inf))


def summed_query(q: Array, k: Array, K: Array, scale: float, keep: np.ndarray) -> Array:
    return one_map(q, k, K, scale * q.shape[1], keep)


def summed(x: Array) -> Array:
    return np.sum(x, axis=2)


def image(c: Array, U: Array) -> Array:
    return c @ U.T


def sigmoid_of_image(c: Array, U: Array) -> Array:
    return sigmoid(c @ U.T)


def image_of_silu(c: Array, U: Array) -> Array:
    return silu(c) @ U.T


def first_of_group(U: Array, g: int, m: int) -> Array:
    return U[g, 0]


def same_in_groups(U: Array, g: int, m: int) -> Array:
    return U[0, m]


def without_copies(z: Array, U: Array) -> Array:
    return decoded(z, U) - z[:, None, :]


def copies_only(z: Array, U: Array) -> Array:
    return z[:, None, :] + np.zeros((U.shape[1], 1), z.dtype)


def copied_channels(z: Array, U: Array) -> Array:
    """Each channel X times, not each latent."""
    return without_copies(z, U) + np.repeat(z, U.shape[1], axis=1).reshape(len(z), *U.shape[1:])


def summed_gradient(d: dict[str, Array], cotangents: dict[str, Array], I: dict[str, Any]) -> None:
    d["q"] = d["q"] * I["q"].shape[2]


def to_first_head(d: dict[str, Array], cotangents: dict[str, Array], I: dict[str, Any]) -> None:
    M = d["k"].shape[2]
    d["k"] = d["k"] * M * (np.arange(M) == 0)[:, None].astype(d["k"].dtype)


def constant_latents(d: dict[str, Array], cotangents: dict[str, Array], I: dict[str, Any]) -> None:
    d["C0"] = cotangents["Cc"][: len(d["C0"])]


def no_cache_cotangent(d: dict[str, Array], cotangents: dict[str, Array], I: dict[str, Any]) -> None:
    d["c"] = d["c"] - cotangents["Cc"][len(d["C0"]) :]


def sigmoid_slope(d: dict[str, Array], cotangents: dict[str, Array], I: dict[str, Any]) -> None:
    d["u"] = d["u"] / sigmoid(-I["u"])


def no_gate(d: dict[str, Array], cotangents: dict[str, Array], I: dict[str, Any]) -> None:
    """The decoder's gradient without the gate."""
    ungated = right.gated_vjp(cotangents, **I | {"u": I["u"] + 40})
    d["U"] = ungated["U"]


# --- tables ----------------------------------------------------------------------------------------------------------

GTA: tuple[tuple[Row, ...], tuple[Row, ...]] = (
    (
        ("first_query", "the first head's query for the mean", printed(first_query), "", ("forward",)),
        ("mean_of_maps", "the mean of the heads' weights", printed(mean_of_maps), "", ("forward",)),
        (
            "mean_of_logits", "the mean of each head's logits with its own key", printed(mean_of_logits), "",
            ("forward",),
        ),
        ("summed_queries", "queries summed, not averaged", printed(summed_query), "", ("forward",)),
        ("summed_keys", "keys summed, not averaged", printed(pooled=summed), "", ("forward",)),
        ("no_silu", "values that are linear in the latent", printed(decode=image), "", ("forward",)),
        ("late_silu", "silu after the sum over tokens", printed(after=silu_of_image), "", ("forward",)),
        ("sigmoid", "sigmoid for silu", printed(decode=sigmoid_of_image), "", ("forward",)),
        ("early_silu", "silu of the latent", printed(decode=image_of_silu), "", ("forward",)),
        (
            "first_decoder", "one decoder for all heads of a group", printed(decoder=first_of_group), "mla-uk-head0",
            ("forward",),
        ),
        (
            "group_scale", "logits scaled by the width of a group", printed(default=lambda M, K: (M * K) ** -0.5), "",
            ("forward",),
        ),
        ("leak", "a mask that shows the next token", printed(keep=next_one_too), "", ("forward", "causality")),
        ("mask_from_zero", "a mask that forgets the cached tokens", printed(keep=from_zero), "", ("forward", "split")),
        (
            "newest_first", "a cache that is extended at its front", printed(joined=newest_first), "",
            ("forward", "split"),
        ),
    ),
    (
        (
            "sum_for_mean", "the queries' gradient not divided by the heads", changed(summed_gradient, right.vjp), "",
            ("vjp",),
        ),
        ("first_head", "the keys' gradient given to the first head", changed(to_first_head, right.vjp), "", ("vjp",)),
        (
            "constant_latents", "no gradient through attention for cached latents",
            changed(constant_latents, right.vjp), "", ("vjp",),
        ),
        (
            "no_cache_cotangent", "the cotangent of the latents dropped", changed(no_cache_cotangent, right.vjp), "",
            ("vjp",),
        ),
    ),
)  # fmt: skip

GATED: tuple[tuple[Row, ...], tuple[Row, ...]] = (
    (
        ("without_copies", "the decoder's image alone", released(without_copies), "", ("forward",)),
        ("copies_only", "no decoder", released(copies_only), "", ("forward",)),
        ("copied_channels", "channels repeated, not latents", released(copied_channels), "", ("split",)),
        ("silu_gate", "silu for sigmoid in the gate", released(gate=silu), "", ("forward",)),
        ("no_gate", "no gate", released(gate=lambda u: u**0), "", ("forward",)),
        ("group_before", "the latents of the group before", released(group=lambda g: g - 1), "", ("forward",)),
        ("first_decoder", "one decoder for all heads of a group", released(decoder=first_of_group), "", ("forward",)),
        ("first_group", "one decoder for all groups", released(decoder=same_in_groups), "", ("forward",)),
        (
            "group_scale", "logits scaled by the width of a group", released(default=lambda M, K: (M * K) ** -0.5), "",
            ("forward",),
        ),
        ("cache_unread", "a cache that is extended and not read", released(keep=call_only), "", ("forward", "split")),
        ("leak", "a mask that shows the next token", released(keep=next_one_too), "", ("forward", "causality")),
    ),
    (
        ("sigmoid_slope", "sigmoid for its own derivative", changed(sigmoid_slope, right.gated_vjp), "", ("vjp",)),
        ("no_gate", "the gate missing from the decoder's gradient", changed(no_gate, right.gated_vjp), "", ("vjp",)),
        (
            "constant_latents", "no gradient through attention for cached latents",
            changed(constant_latents, right.gated_vjp), "", ("vjp",),
        ),
    ),
)  # fmt: skip

MUTANTS = (*tabulated("gta", *GTA), *tabulated("gta.gated", *GATED))
