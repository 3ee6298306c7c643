"""Wrong hybrids of local softmax and Gaussian mixture attention: forward, then gradients, of either hybrid.

The letters are those of reference/gma_hybrid.py; `one` and `mixed` are the hybrids with their steps as arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mixproof.reference import gma_hybrid as right
from mixproof.reference.gma import responsibilities
from mixproof.reference.primitives import Array, sigmoid, softmax
from mixproof.verify.subjects.mutants import Row, tabulated
from mixproof.verify.subjects.mutants.softmax_attention import by_width

CHUNK = 8
Mask = Callable[..., np.ndarray]
Scale = Callable[[float | None, int], float]
Gradients = dict[str, Array]

# --- builders --------------------------------------------------------------------------------------------------------


def age(T: int) -> np.ndarray:
    """How many tokens before row i key j is."""
    return np.arange(T)[:, None] - np.arange(T)[None, :]


def in_window(n: np.ndarray, window: int, chunk: int) -> np.ndarray:
    return (n >= 0) & (n < window)


def before(n: np.ndarray, window: int, chunk: int) -> np.ndarray:
    return n >= window


def weights(q: Array, k: Array, near: np.ndarray, scale: float, mass: Callable[[Array], Array] = softmax) -> Array:
    return mass(np.where(near, q @ k.T * q.dtype.type(scale), -np.inf))


def one(
    near: Mask = in_window, far: Mask = before, mass: Callable[[Array], Array] = softmax, scaled: Scale = by_width,
    read: Callable[..., Array] = lambda P, At, v, eps: (P + At) @ v / (np.sum(P + At, axis=1, keepdims=True) + eps),
) -> Callable[..., Array]:  # fmt: skip
    """O = (P v + lam At v) / (P 1 + lam At 1 + eps); `read` gets P, lam At, v and eps.  -> (T, V)."""

    def forward(q, k, v, mu, omega, alpha, lam, scale=None, eps=1e-6, v_min=0.0, window=4, chunk=CHUNK):
        GQ, GK = (responsibilities(x, mu, omega, alpha, v_min) for x in (q, k))
        n = age(len(q))
        P = weights(q, k, near(n, window, chunk), scaled(scale, q.shape[1]), mass)
        return read(P, lam * np.where(far(n, window, chunk), GQ @ GK.T, 0), v, eps)

    return forward


def mixed(
    near: Mask = in_window, far: Mask = lambda n, window, chunk: n >= 0, scaled: Scale = by_width,
    gates: Callable[[Array], tuple[Array, Array]] = lambda u: (sigmoid(u), sigmoid(-u)),
) -> Callable[..., Array]:  # fmt: skip
    """O = g P v + (1 - g) At v / (At 1 + eps).  -> (T, V)."""

    def forward(q, k, v, u, mu, omega, alpha, scale=None, eps=1e-6, v_min=0.0, window=4, chunk=CHUNK):
        GQ, GK = (responsibilities(x, mu, omega, alpha, v_min) for x in (q, k))
        n, (g, rest) = age(len(q)), gates(u[:, None])
        P = weights(q, k, near(n, window, chunk), scaled(scale, q.shape[1]))
        At = np.where(far(n, window, chunk), GQ @ GK.T, 0)
        return g * (P @ v) + rest * (At @ v / (np.sum(At, axis=1, keepdims=True) + eps))

    return forward


def one_vjp(change: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """`change` gets the gradients, and those for another lam or window as a function."""

    def gradients(cotangents, q, k, v, mu, omega, alpha, lam, scale=None, eps=1e-6, v_min=0.0, window=4):
        def exact(**other: Any) -> Gradients:
            given = {"lam": lam, "scale": scale, "eps": eps, "v_min": v_min, "window": window} | other
            return right.vjp(cotangents, q, k, v, mu, omega, alpha, **given)

        return change(exact(), exact)

    return gradients


def mixed_vjp(change: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """`change` gets the gradients, the cotangents, u, and the gradients for other cotangents, as a function."""

    def gradients(cotangents, q, k, v, u, mu, omega, alpha, scale=None, eps=1e-6, v_min=0.0, window=4):
        def exact(G: Array) -> Gradients:
            return right.gated_vjp({"O": G}, q, k, v, u, mu, omega, alpha, scale, eps, v_min, window)

        return change(exact(cotangents["O"]), cotangents["O"], u, exact)

    return gradients


# --- pieces that are wrong by themselves -----------------------------------------------------------------------------


def since_chunk(n: np.ndarray, window: int, chunk: int) -> np.ndarray:
    """A window that does not reach into the chunk before."""
    i = np.arange(len(n))
    return in_window(n, window, chunk) & (i[:, None] // chunk == i[None, :] // chunk)


def unlike_largest(s: Array) -> Array:
    top = np.max(s, axis=1, keepdims=True, initial=-1e30)
    return np.exp(s - top)


def exponentials(s: Array) -> Array:
    return np.exp(s)


def apart(P: Array, At: Array, v: Array, eps: float) -> Array:
    """Both parts by themselves, halved."""
    return (P @ v + At @ v / (np.sum(At, axis=1, keepdims=True) + eps)) / 2


def local_mass(P: Array, At: Array, v: Array, eps: float) -> Array:
    return (P + At) @ v / (np.sum(P, axis=1, keepdims=True) + eps)


def twice(P: Array, At: Array, v: Array, eps: float) -> Array:
    return (P @ v + At @ v) / (np.sum(P, axis=1, keepdims=True) + eps + np.sum(At, axis=1, keepdims=True) + eps)


def unnormalised(P: Array, At: Array, v: Array, eps: float) -> Array:
    return (P + At) @ v


# --- tables ----------------------------------------------------------------------------------------------------------

DEFAULT_SCALE: Scale = lambda scale, R: R**-0.5  # noqa: E731

HYBRID: tuple[tuple[Row, ...], tuple[Row, ...]] = (
    (
        (
            "wide_window", "one token more in the window, which is read twice",
            one(near=lambda n, w, chunk: in_window(n, w + 1, chunk)), "attn-win-plus1", ("forward",),
        ),
        ("overlap", "the window read by both parts", one(far=lambda n, w, chunk: n >= 0), "", ("forward",)),
        ("gap", "the token that leaves the window never read", one(far=lambda n, w, chunk: n > w), "", ("forward",)),
        (
            "future", "the next token in the window", one(near=lambda n, w, chunk: (n >= -1) & (n < w)), "",
            ("forward", "causality", "future_length"),
        ),
        (
            "window_of_chunk", "a window that starts anew in every chunk", one(near=since_chunk), "",
            ("forward", "forms"),
        ),
        ("largest", "a window with the mass of sum exp(s - max s)", one(mass=unlike_largest), "", ("forward",)),
        ("exponentials", "a window with the mass of sum exp(s)", one(mass=exponentials), "gma-no-max", ("forward",)),
        ("apart", "two normalisers", one(read=apart), "", ("forward", "row_sums")),
        ("local_mass", "the mass before the window not counted", one(read=local_mass), "", ("forward", "row_sums")),
        ("unnormalised", "no normaliser", one(read=unnormalised), "", ("forward", "row_sums")),
        ("twice", "eps in the mass of either part", one(read=twice), "", ("forward",)),
        ("default_scale", "R^-1/2 whatever the scale", one(scaled=DEFAULT_SCALE), "", ("forward",)),
    ),
    (
        ("no_lam", "no gradient for lam", one_vjp(lambda d, other: d | {"lam": 0 * d["lam"]}), "", ("vjp",)),
        (
            "lam_once", "lam missing in the gradients of the mixture",
            one_vjp(lambda d, other: d | {n: other(lam=1 + 0 * d["lam"])[n] for n in ("mu", "omega", "alpha")}), "",
            ("vjp",),
        ),
        ("window", "a window of three tokens in the backward", one_vjp(lambda d, other: other(window=3)), "", ("vjp",)),
    ),
)  # fmt: skip

GATED: tuple[tuple[Row, ...], tuple[Row, ...]] = (
    (
        (
            "wide_window", "one token more in the window",
            mixed(near=lambda n, w, chunk: in_window(n, w + 1, chunk)), "attn-win-plus1", ("forward",),
        ),
        ("no_window", "softmax of all tokens", mixed(near=lambda n, w, chunk: n >= 0), "", ("forward",)),
        (
            "window_of_chunk", "a window that starts anew in every chunk", mixed(near=since_chunk), "",
            ("forward", "forms"),
        ),
        ("before_window", "GMA of what is before the window", mixed(far=before), "", ("forward",)),
        (
            "no_mask", "GMA of later tokens too", mixed(far=lambda n, w, chunk: n < len(n)), "",
            ("forward", "causality", "future_length"),
        ),
        ("swapped", "g and 1 - g swapped", mixed(gates=lambda u: (sigmoid(-u), sigmoid(u))), "", ("forward",)),
        ("bare_gate", "u for sigmoid(u)", mixed(gates=lambda u: (u, 1 - u)), "", ("forward", "hull")),
        ("no_rest", "GMA that is not gated", mixed(gates=lambda u: (sigmoid(u), u**0)), "", ("forward", "row_sums")),
        ("default_scale", "R^-1/2 whatever the scale", mixed(scaled=DEFAULT_SCALE), "", ("forward",)),
    ),
    (
        (
            "slope", "g for its slope g (1 - g)",
            mixed_vjp(lambda d, G, u, exact: d | {"u": d["u"] / sigmoid(-u)}), "", ("vjp",),
        ),
        ("no_gate", "no gradient for u", mixed_vjp(lambda d, G, u, exact: d | {"u": 0 * u}), "", ("vjp",)),
        (
            "gated_twice", "the gate on the cotangent too",
            mixed_vjp(lambda d, G, u, exact: exact(sigmoid(u)[:, None] * G)), "", ("vjp",),
        ),
    ),
)  # fmt: skip

MUTANTS = (*tabulated("gma.hybrid", *HYBRID), *tabulated("gma.hybrid_gated", *GATED))
