"""Wrong temporal latent attention: forward, then gradients.

The letters are those of reference/mtla.py; `attention` is the reference with its steps as arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mixproof.reference import mtla as right
from mixproof.reference.latent_attention import rotated
from mixproof.reference.primitives import Array, sigmoid, softmax
from mixproof.verify.subjects.mutants import Row, tabulated

Step = Callable[..., Any]

# --- steps that are right --------------------------------------------------------------------------------------------


def running(x: Array, g: Array, opened: Array, slot: np.ndarray) -> Array:
    """Sums of the tokens of a slot until each, from what an open one holds."""
    t = np.arange(len(x))
    same = ((slot[:, None] == slot) & (t <= t[:, None])).astype(x.dtype)
    return same @ x + (slot == slot[:1]).astype(x.dtype)[:, None] * np.sum(opened, axis=0)


def stride_aware(n: np.ndarray, stride: int) -> np.ndarray:
    return (n <= n[:, None]) & ((n + 1) % stride == 0) | (n == n[:, None])


def width(K: int, R: int, L: int) -> float:
    return (K + R) ** -0.5


def kept(x: Array, *_: Any) -> Array:
    return x


# --- the builders ----------------------------------------------------------------------------------------------------


def attention(
    gate: Step = sigmoid, sums: Step = running, sees: Step = stride_aware, key: Step = kept, query: Step = rotated,
    cached: Step = kept, scaling: Step = width, up: Step = kept, start: int = 1, slots_from: int = 1,
    still_open: bool = False,
) -> Callable[..., tuple[Array, Array, Array]]:  # fmt: skip
    """`start` and `slots_from` multiply the position that rotations and slots are counted from."""

    def forward(
        qc, qr, c, w, kr, Uk, Uv, scale=None, base=10000.0, stride=2, position=0, C0=None, Kr0=None
    ) -> tuple[Array, Array, Array]:
        C0, Kr0 = (x[:0] if x0 is None else x0 for x, x0 in ((c, C0), (kr, Kr0)))
        T, g = len(c), gate(w)
        closed = len(C0) - (1 if T and position % stride else 0)
        n, m = start * position + np.arange(T), slots_from * position + np.arange(T)
        slot = m // stride
        own = sums(g[:, None] * c, g, C0[closed:], slot)
        k = key(rotated(kr, n, base), slot)
        before = len(C0) if still_open else closed
        C, Kr = np.concatenate([C0[:before], own]), np.concatenate([cached(Kr0[:before], base), k])
        keep = np.concatenate([np.ones((T, before), dtype=bool), sees(m, stride)], axis=1)
        scale = scaling(qc.shape[2], qr.shape[2], c.shape[1]) if scale is None else scale
        heads = []
        for h in range(len(Uk)):
            S = qc[:, h] @ (C @ up(Uk, h)[h].T).T + query(qr[:, h], n, base) @ Kr.T
            heads.append(softmax(np.where(keep, S * scale, -np.inf)) @ (C @ Uv[h].T))
        last = [t for t in range(T) if (position + t + 1) % stride == 0 or t == T - 1]
        Cc, Krc = (np.concatenate([x0[:closed], x[last]]) for x0, x in ((C0, own), (Kr0, k)))
        return np.stack(heads, axis=1), Cc, Krc

    return forward


def changed(change: Callable[..., dict[str, Array]], forgets: tuple[str, ...] = ()) -> Callable[..., dict[str, Array]]:
    """The right gradients, some of which `change` replaces; `forgets` names outputs whose cotangents are lost."""

    def gradients(cotangents, **inputs):
        given = {n: 0 * G if n in forgets else G for n, G in cotangents.items()}
        d = right.vjp(given, **inputs)
        return d | change(d, inputs)

    return gradients


# --- steps that are wrong --------------------------------------------------------------------------------------------


def averaged(x: Array, g: Array, opened: Array, slot: np.ndarray) -> Array:
    return running(x, g, opened, slot) / running(g[:, None], g, opened[:, :1] ** 0, slot)


def whole(x: Array, g: Array, opened: Array, slot: np.ndarray) -> Array:
    return running(x, g, opened, slot)[[np.flatnonzero(slot == j)[-1] for j in slot]] if len(x) else x


def latest_only(x: Array, g: Array, opened: Array, slot: np.ndarray) -> Array:
    return x


def first_of_slot(x: Array, slot: np.ndarray) -> Array:
    return x[[np.flatnonzero(slot == j)[0] for j in slot]] if len(x) else x


def halves(x: Array, n: np.ndarray, base: float) -> Array:
    order = np.arange(x.shape[1]).reshape(2, -1).T.ravel()
    return rotated(x[:, order], n, base)[:, np.argsort(order)]


def turned_again(x: Array, base: float) -> Array:
    return rotated(x, 1 + np.arange(len(x)), base)


def first_head(U: Array, h: int) -> Array:
    return U[np.zeros(len(U), dtype=int)]


def positions(inputs: dict[str, Any]) -> np.ndarray:
    return inputs.get("position", 0) + np.arange(len(inputs["c"]))


def own_only(d: dict[str, Array], inputs: dict[str, Any]) -> dict[str, Array]:
    """A latent gets what the sum at its own token gets, not later ones of its slot."""
    g, n = sigmoid(inputs["w"])[:, None], positions(inputs)
    dx = d["c"] / g
    later = np.concatenate([dx[1:], 0 * dx[:1]]) * ((n + 1) % inputs.get("stride", 2) != 0)[:, None]
    return {"c": g * (dx - later)[: len(dx)]}


def scaled(inputs: dict[str, Any]) -> float:
    scale = inputs.get("scale")
    return width(inputs["qc"].shape[2], inputs["qr"].shape[2], 0) if scale is None else scale


# --- tables ----------------------------------------------------------------------------------------------------------

MTLA: tuple[tuple[Row, ...], tuple[Row, ...]] = (
    (
        ("averaged", "sums over a slot divided by their weights", attention(sums=averaged), "", ("forward",)),
        (
            "whole", "windows that are summed before the mask", attention(sums=whole), "",
            ("forward", "causality", "future_length"),
        ),
        ("latest_only", "a slot that holds its latest token only", attention(sums=latest_only), "", ("forward",)),
        ("oldest_key", "the rotary key of a slot's first token", attention(key=first_of_slot), "", ("forward",)),
        (
            "every_sum", "all earlier partial sums visible",
            attention(sees=lambda n, s: n <= n[:, None]), "", ("forward",),
        ),
        (
            "first_sums", "slots visible by their first tokens",
            attention(sees=lambda n, s: (n <= n[:, None]) & (n % s == 0) | (n == n[:, None])), "", ("forward",),
        ),
        (
            "own_twice", "tokens before in the same slot visible",
            attention(sees=lambda n, s: stride_aware(n, s) | ((n // s == n[:, None] // s) & (n <= n[:, None]))), "",
            ("forward",),
        ),
        (
            "closed_only", "a token's own slot hidden until it is closed",
            attention(sees=lambda n, s: (n <= n[:, None]) & ((n + 1) % s == 0)), "", ("forward",),
        ),
        ("no_gate", "latents that are not weighted", attention(gate=lambda w: w**0), "", ("forward",)),
        ("bare_gate", "w for sigmoid(w)", attention(gate=lambda w: w), "", ("forward",)),
        ("slots_of_call", "slots that start anew with the call", attention(slots_from=0), "", ("split",)),
        ("turns_of_call", "rotations counted from the call", attention(start=0), "", ("forward", "split")),
        ("still_open", "an open slot visible beside its own continuation", attention(still_open=True), "", ("split",)),
        ("turned_again", "cached keys turned again", attention(cached=turned_again), "mla-rope-twice", ("forward",)),
        ("keys_turned_late", "queries not turned", attention(query=kept), "", ("forward",)),
        ("halves", "queries turned in pairs R/2 apart", attention(query=halves), "mla-rope-layout", ("forward",)),
        (
            "latent_scale", "the scale of the latent's width",
            attention(scaling=lambda K, R, L: (L + R) ** -0.5), "mla-scale-latent", ("forward",),
        ),
        (
            "content_scale", "the scale of the content's width", attention(scaling=lambda K, R, L: K**-0.5), "",
            ("forward",),
        ),
        ("first_head", "all heads with the keys of the first", attention(up=first_head), "mla-uk-head0", ("forward",)),
    ),
    (
        ("own_only", "latents without later sums of their slot", changed(own_only), "", ("vjp",)),
        (
            "no_slope", "the slope of the gate missing",
            changed(lambda d, x: {"w": d["w"] / sigmoid(-x["w"])}), "", ("vjp",),
        ),
        ("no_cache", "the cotangent of the cached sums lost", changed(lambda d, x: {}, ("Cc",)), "", ("vjp",)),
        ("no_keys", "the cotangent of the cached keys lost", changed(lambda d, x: {}, ("Krc",)), "", ("vjp",)),
        (
            "turned_on", "gradients of queries turned on, not back",
            changed(lambda d, x: {"qr": rotated(d["qr"], 2 * positions(x), x.get("base", 10000.0))}), "", ("vjp",),
        ),
        (
            "not_turned_back", "gradients of keys not turned back",
            changed(lambda d, x: {"kr": rotated(d["kr"], positions(x), x.get("base", 10000.0))}), "", ("vjp",),
        ),
        (
            "no_scale", "queries' gradient without the scale",
            changed(lambda d, x: {"qc": d["qc"] / scaled(x)}), "", ("vjp",),
        ),
    ),
)  # fmt: skip

MUTANTS = tabulated("mtla", *MTLA)
