"""Wrong multi-head latent attentions, in groups or not: forward, then gradients.

The letters are those of reference/latent_attention.py. Each builder is the reference with its steps as arguments; a
mutant changes one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mixproof.reference import gqla, mla
from mixproof.reference import latent_attention as latent
from mixproof.reference.caches import appended
from mixproof.reference.latent_attention import heads_first, mixed, rotated, swapped, tokens_first
from mixproof.reference.primitives import Array, masked, softmax
from mixproof.verify.arithmetic import round_to
from mixproof.verify.subjects.mutants import tabulated

Scale = Callable[[int, int, int], float]
Turn = Callable[[Array, np.ndarray, float], Array]
Change = Callable[[Array], Array]

# --- builders --------------------------------------------------------------------------------------------------------


def same(x: Array) -> Array:
    return x


def grouped(
    path: Callable[..., Array] = latent.expanded, scaled: Scale = lambda K, R, L: (K + R) ** -0.5,
    query: Turn = rotated, key: Turn = rotated, kept: Turn = lambda Kr, n, base: Kr, cached: Turn | None = None,
    start: Callable[[int], int] = lambda P: P, keys: Change = same, values: Change = same,
    weigh: Callable[[Array], Array] = latent.weights, latents: Change = same,
    result: Callable[[Array, int], Array] = lambda O, K: O,
) -> Callable[..., Any]:  # fmt: skip
    """`kept` is done to cached rotary keys, `cached` instead of turning to those that are returned."""

    def forward(qc, qr, c, kr, Uk, Uv, scale=None, base=10000.0, C0=None, Kr0=None):
        K, R, L, P = qc.shape[-1], qr.shape[-1], c.shape[-1], 0 if C0 is None else len(C0)
        n = start(P) + np.arange(len(c))
        new = key(kr, n, base)
        C, Kr = appended(C0, latents(c)), new if Kr0 is None else appended(kept(Kr0, np.arange(P), base), new)
        scale = scaled(K, R, L) if scale is None else scale
        queries = heads_first(qc), heads_first(query(qr, n, base))
        O = tokens_first(path(*queries, C[None], Kr, keys(Uk), values(Uv), scale, weigh))
        return result(O, K), C, appended(Kr0, new if cached is None else cached(kr, n, base))

    return forward


def single(**changes: Any) -> Callable[..., Any]:
    """`grouped` with one head a group."""
    function = grouped(**changes)

    def forward(qc, qr, c, kr, Uk, Uv, scale=None, base=10000.0, C0=None, Kr0=None):
        O, C, Kr = function(qc[:, :, None], qr[:, :, None], c, kr, Uk, Uv, scale, base, C0, Kr0)
        return O[:, :, 0], C, Kr

    return forward


def changed(
    vjp: Callable[..., dict[str, Array]], change: Callable[[dict[str, Array], dict[str, Any]], dict[str, Array]],
    upstream: Callable[[dict[str, Array]], dict[str, Array]] = lambda cotangents: cotangents,
) -> Callable[..., Any]:  # fmt: skip
    """The right gradients of changed cotangents, changed by what they were of."""

    def gradients(cotangents, **inputs):
        grads = vjp(upstream(cotangents), **inputs)
        return grads | change(grads, inputs)

    return gradients


def single_vjp(
    delta: Callable[[Array, Array], Array] = lambda P, dP: np.sum(P * dP, axis=-1, keepdims=True), by_keys: float = 1.0,
    by_values: float = 1.0,
) -> Callable[..., Any]:  # fmt: skip
    """The right gradients but for content and latents, which get the two parts of theirs times these factors."""

    def gradients(cotangents, qc, qr, c, kr, Uk, Uv, scale=None, base=10000.0, C0=None, Kr0=None):
        grads = mla.vjp(cotangents, qc, qr, c, kr, Uk, Uv, scale, base, C0, Kr0)
        n, P0 = cached({"C0": C0, "c": c}), len(grads["C0"])
        C, Kr, s = appended(C0, c), appended(Kr0, rotated(kr, n, base)), latent.scaled(scale, qc, qr)
        Q, Qr, dO = heads(qc), heads(rotated(qr, n, base)), heads(cotangents["O"])
        keys, values = latent.up(C[None], Uk), latent.up(C[None], Uv)
        P, dP = latent.weights(latent.logits(Q, keys, Qr, Kr, s)), mixed(dO, swapped(values))
        dA = P * (dP - delta(P, dP)) * s
        dkeys, dvalues = (swapped(latent.joined(x)) @ latent.joined(y) for x, y in ((dA, Q), (P, dO)))
        dC = by_keys * latent.to_latents(dkeys, Uk, 1)[0] + by_values * latent.to_latents(dvalues, Uv, 1)[0]
        dC = dC + cotangents["Cc"]
        return grads | {"qc": tokens_first(mixed(dA, keys))[:, :, 0], "c": dC[P0:], "C0": dC[:P0]}

    return gradients


def turned_late(
    query: Callable[[Array, np.ndarray, float, Array], Array], scaled: Scale = lambda K, R, L: K**-0.5,
    keys: Callable[[Array, Array, int, float], Array] = lambda C, Uk, P, base: C,
) -> Callable[..., Any]:  # fmt: skip
    """Decompressed keys in logits query . keys, for queries (N, 1, T, .) and keys (N or 1, S, .)."""

    def forward(q, c, Uk, Uv, scale=None, base=10000.0, C0=None):
        P = 0 if C0 is None else len(C0)
        C, n, K = appended(C0, c), P + np.arange(len(c)), q.shape[-1]
        scale = scaled(K, 0, c.shape[-1]) if scale is None else scale
        A = mixed(query(q, n, base, Uk), swapped(keys(C[None], Uk, P, base))) * scale
        return tokens_first(mixed(latent.weights(A), C @ swapped(Uv)))[:, :, 0], C

    return forward


# --- pieces that are wrong by themselves -----------------------------------------------------------------------------


def halves(x: Array, n: np.ndarray, base: float) -> Array:
    """Pairs R/2 apart."""
    order = np.arange(x.shape[-1]).reshape(2, -1).T.ravel()
    return rotated(x[..., order], n, base)[..., np.argsort(order)]


def unturned(x: Array, n: np.ndarray, base: float) -> Array:
    return x


def late(A: Array) -> Array:
    """One key more than is there yet."""
    T, S = A.shape[-2:]
    return softmax(masked(A, np.tril(np.ones((T, S), dtype=bool), S - T + 1), -np.inf))


def from_the_left(A: Array) -> Array:
    """The mask of a call without a cache."""
    return softmax(masked(A, np.tril(np.ones(A.shape[-2:], dtype=bool)), -np.inf))


def first(U: Array) -> Array:
    return np.broadcast_to(U[:1], U.shape)


def up_to_key_width(O: Array, K: int) -> Array:
    return np.where(np.arange(O.shape[-1]) < K, O, 0)


def tiled(path: Callable[..., Array]) -> Callable[..., Array]:
    """Head h reads group h mod G, not h // M."""

    def of_groups(Q, Qr, C, Kr, Uk, Uv, scale, weigh):
        G, M = Q.shape[:2]

        def dealt(x):
            return np.transpose(x.reshape(M, G, *x.shape[2:]), (1, 0, 2, 3))

        O = path(dealt(Q), dealt(Qr), C, Kr, Uk, Uv, scale, weigh)
        return np.transpose(O, (1, 0, 2, 3)).reshape(G, M, *O.shape[2:])

    return of_groups


def mean_query(Q, Qr, C, Kr, Uk, Uv, scale, weigh):
    """One attention map a group."""
    Q, Qr = (np.broadcast_to(np.mean(x, axis=1, keepdims=True), x.shape) for x in (Q, Qr))
    return latent.expanded(Q, Qr, C, Kr, Uk, Uv, scale, weigh)


def expanded_keys(C: Array, Uk: Array, P: int, base: float) -> Array:
    return np.transpose(latent.up(C, Uk), (1, 0, 2))


def turned_keys(n: Callable[[int, int], np.ndarray]) -> Callable[..., Array]:
    """Keys turned by n(S, P)."""

    def keys(C: Array, Uk: Array, P: int, base: float) -> Array:
        return np.transpose(rotated(expanded_keys(C, Uk, P, base), n(C.shape[1], P), base), (1, 0, 2))

    return keys


def turned_latents(C: Array, Uk: Array, P: int, base: float) -> Array:
    """The latents turned, as far as they have pairs."""
    even = C.shape[2] // 2 * 2
    return np.concatenate([rotated(C[0, :, :even], np.arange(C.shape[1]), base), C[0, :, even:]], axis=1)[None]


def heads(q: Array) -> Array:
    return heads_first(q[:, :, None])


def turned_query(q: Array, n: np.ndarray, base: float, Uk: Array) -> Array:
    return heads(rotated(q, n, base))


def turned_and_absorbed(q: Array, n: np.ndarray, base: float, Uk: Array) -> Array:
    return mixed(turned_query(q, n, base, Uk), Uk)


def absorbed_and_turned(q: Array, n: np.ndarray, base: float, Uk: Array) -> Array:
    a = tokens_first(mixed(heads(q), Uk))
    even = a.shape[-1] // 2 * 2
    return heads_first(np.concatenate([rotated(a[..., :even], n, base), a[..., even:]], axis=-1))


def cached(inputs: dict[str, Any]) -> np.ndarray:
    """The positions of the tokens of a call."""
    C0 = inputs.get("C0")
    return (0 if C0 is None else len(C0)) + np.arange(len(inputs["c"]))


def turned_on(name: str) -> Callable[..., dict[str, Array]]:
    """A gradient turned by twice its angle: on, not back."""

    def change(grads: dict[str, Array], inputs: dict[str, Any]) -> dict[str, Array]:
        return {name: rotated(grads[name], 2 * cached(inputs), inputs.get("base", 10000.0))}

    return change


def no_cache(cotangents: dict[str, Array]) -> dict[str, Array]:
    return {n: G if n == "O" else 0 * G for n, G in cotangents.items()}


# --- tables ----------------------------------------------------------------------------------------------------------

FORWARD = (
    (
        "latent_scale", "the scale of the latent's width, for queries that absorbed Uk",
        single(path=latent.absorbed, scaled=lambda K, R, L: (L + R) ** -0.5), "mla-scale-latent", ("forward",),
    ),
    (
        "content_scale", "a scale that leaves out the rotary channels", single(scaled=lambda K, R, L: K**-0.5), "",
        ("forward",),
    ),
    ("turned_twice", "cached rotary keys turned again", single(kept=rotated), "mla-rope-twice", ("forward", "split")),
    ("cached_unturned", "rotary keys cached before they are turned", single(cached=unturned), "",
     ("forward", "split")),
    ("from_zero", "positions that start anew in every call", single(start=lambda P: 0), "", ("forward", "split")),
    (
        "mixed_pairs", "pairs of neighbours in keys, R/2 apart in queries", single(query=halves), "mla-rope-layout",
        ("forward",),
    ),
    ("unturned_keys", "rotary keys that are not turned", single(key=unturned), "", ("forward",)),
    ("head_zero", "the first head's Uk for all heads", single(keys=first), "mla-uk-head0", ("forward",)),
    ("key_width", "values of the width of keys", single(result=up_to_key_width), "mla-dv-as-dn", ("forward",)),
    ("late_mask", "one key too many for every token", single(weigh=late), "", ("forward", "causality")),
    ("mask_of_call", "a mask that does not count what is cached", single(weigh=from_the_left), "",
     ("forward", "split")),
    (
        "bfloat16_cache", "latents rounded to bfloat16 on their way into the cache",
        single(latents=lambda c: round_to(c, "bfloat16").astype(c.dtype)), "", ("forward",),
    ),
)  # fmt: skip

BACKWARD = (
    ("no_delta", "no rowsum(dO * O)", single_vjp(lambda P, dP: 0), "", ("vjp",)),
    ("keys_constant", "keys taken for constants of the latents", single_vjp(by_keys=0.0), "", ("vjp",)),
    ("values_constant", "values taken for constants of the latents", single_vjp(by_values=0.0), "", ("vjp",)),
    ("caches", "cotangents of the caches dropped", changed(mla.vjp, lambda g, x: {}, no_cache), "", ("vjp",)),
    ("turned_on", "rotary queries' gradients turned on, not back", changed(mla.vjp, turned_on("qr")), "", ("vjp",)),
    ("turned_on_keys", "rotary keys' gradients turned on, not back", changed(mla.vjp, turned_on("kr")), "", ("vjp",)),
    (
        "cache_constant", "cached latents taken for constants",
        changed(mla.vjp, lambda g, x: {"C0": 0 * g["C0"]}), "", ("vjp",),
    ),
)  # fmt: skip

DECOMPRESSED = (
    (
        "absorbed", "turned queries that absorb Uk, as if keys were not turned", turned_late(turned_and_absorbed), "",
        ("forward",),
    ),
    (
        "turned_latents", "queries and latents turned after absorption",
        turned_late(absorbed_and_turned, keys=turned_latents), "", ("forward",),
    ),
    (
        "cache_unturned", "cached latents whose keys are not turned",
        turned_late(turned_query, keys=turned_keys(lambda S, P: np.where(np.arange(S) < P, 0, np.arange(S)))), "",
        ("forward", "split"),
    ),
    (
        "keys_from_zero", "new keys turned as if nothing were cached",
        turned_late(turned_query, keys=turned_keys(lambda S, P: np.arange(S) - P * (np.arange(S) >= P))), "",
        ("forward", "split"),
    ),
    (
        "latent_scale", "the scale of the latent's width",
        turned_late(turned_query, lambda K, R, L: L**-0.5, turned_keys(lambda S, P: np.arange(S))), "", ("forward",),
    ),
)  # fmt: skip

DECOMPRESSED_BACKWARD = (
    ("turned_on", "queries' gradients turned on, not back", changed(mla.decompressed_vjp, turned_on("q")), "",
     ("vjp",)),
    ("caches", "the cotangent of the cache dropped", changed(mla.decompressed_vjp, lambda g, x: {}, no_cache), "",
     ("vjp",)),
)  # fmt: skip

GROUPED = (
    ("tiled", "head h in group h mod G", grouped(path=tiled(latent.expanded)), "", ("forward",)),
    ("group_zero", "the first group's Uv for all groups", grouped(values=first), "", ("forward",)),
    ("mean_query", "one attention map a group", grouped(path=mean_query), "", ("forward",)),
    (
        "latent_scale", "the scale of the latent's width, for queries that absorbed Uk",
        grouped(path=latent.absorbed, scaled=lambda K, R, L: (L + R) ** -0.5), "mla-scale-latent", ("forward",),
    ),
    ("turned_twice", "cached rotary keys turned again", grouped(kept=rotated), "mla-rope-twice", ("forward", "split")),
    ("mask_of_call", "a mask that does not count what is cached", grouped(weigh=from_the_left), "",
     ("forward", "split")),
)  # fmt: skip

GROUPED_BACKWARD = (
    ("turned_on", "rotary keys' gradients turned on, not back", changed(gqla.vjp, turned_on("kr")), "", ("vjp",)),
    ("caches", "cotangents of the caches dropped", changed(gqla.vjp, lambda g, x: {}, no_cache), "", ("vjp",)),
)  # fmt: skip

MUTANTS = (
    *tabulated("mla", FORWARD, BACKWARD),
    *tabulated("mla.decompressed", DECOMPRESSED, DECOMPRESSED_BACKWARD),
    *tabulated("gqla", GROUPED, GROUPED_BACKWARD),
)
