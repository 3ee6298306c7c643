"""Attention over latents: the keys and values of every head are linear in one short vector a token, the latent.

Source: survey, sections 8 to 10; DeepSeek-V2 2024 (9) to (19). Latents and rotary keys are all that is cached. Heads
come before tokens here: the M heads of a group, one of G, share its up-projections. Multi-head latent attention has one
head a group. A latent may be cut into X blocks, each of which serves G / X groups, one after the other.

    letter   paper    shape             meaning
    Q Qr     q^C q^R  (G, M, T, K or R) content of the queries, and their rotary part, turned
    C Kr     c k^R    (X, S, L) (S, R)  cached, then new: latents, and turned rotary keys; S = P + T
    Uk Uv    W^UK ..  (G, K, L)         up-projections; Uv (G, V, L)
    A                 (G, M, T, S)      logits
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .caches import visible
from .primitives import Array, either, masked, softmax, stored, turned
from .spec import Input, Output

Weigh = Callable[[Array], Array]

# --- the paths -------------------------------------------------------------------------------------------------------


def weights(A: Array) -> Array:
    """softmax of the logits (..., T, S), the last query seeing all keys, each one before it one less."""
    return softmax(masked(A, visible(*A.shape[-2:]), -np.inf))


def expanded(
    Q: Array, Qr: Array, C: Array, Kr: Array, Uk: Array, Uv: Array, scale: float, weigh: Weigh = weights
) -> Array:
    """Keys Uk c and values Uv c written out: A = scale (Q . Uk C + Qr . Kr).  -> (G, M, T, V).  (10) (11) (18)"""
    keys, values = up(C, Uk), up(C, Uv)
    return mixed(weigh(logits(Q, keys, Qr, Kr, scale)), values)


def absorbed(
    Q: Array, Qr: Array, C: Array, Kr: Array, Uk: Array, Uv: Array, scale: float, weigh: Weigh = weights
) -> Array:
    """(Uk^T q) . c for q . (Uk c), and Uv applied to the mean latent: what is cached is all that is read."""
    C = _for_groups(C, len(Q))
    return mixed(mixed(weigh(logits(mixed(Q, Uk), C, Qr, Kr, scale)), C), swapped(Uv))


def expanded_decode(
    Q: Array, Qr: Array, C: Array, Kr: Array, Uk: Array, Uv: Array, scale: float, weigh: Weigh = weights
) -> Array:
    """Token by token from a cache of keys and values."""
    return _decode(Q, Qr, up(C, Uk), up(C, Uv), Kr, scale, weigh)


def absorbed_decode(
    Q: Array, Qr: Array, C: Array, Kr: Array, Uk: Array, Uv: Array, scale: float, weigh: Weigh = weights
) -> Array:
    """Token by token from the cache of latents."""
    C = _for_groups(C, len(Q))
    return mixed(_decode(mixed(Q, Uk), Qr, C, C, Kr, scale, weigh), swapped(Uv))


def expanded_vjp(
    dO: Array, Q: Array, Qr: Array, C: Array, Kr: Array, Uk: Array, Uv: Array, scale: float
) -> tuple[Array, ...]:
    """Gradients of <O, dO>, in the order of the arguments Q to Uv; keys and values pass theirs on to latents."""
    keys, values = up(C, Uk), up(C, Uv)
    P, dA = weights_vjp(dO, logits(Q, keys, Qr, Kr, scale), values)
    dA = dA * scale
    dkeys, dvalues = swapped(joined(dA)) @ joined(Q), swapped(joined(P)) @ joined(dO)
    X = len(C)
    absorbed = swapped(_rows(dA, X)) @ _rows(mixed(Q, Uk), X) + swapped(_rows(P, X)) @ _rows(mixed(dO, Uv), X)
    dC = either(to_latents(dkeys, Uk, X) + to_latents(dvalues, Uv, X), absorbed)
    dKr = _rows(dA, 1)[0].T @ _rows(Qr, 1)[0]
    C = _for_groups(C, len(Q))
    return mixed(dA, keys), mixed(dA, Kr), dC, dKr, swapped(dkeys) @ C, swapped(dvalues) @ C


# --- steps -----------------------------------------------------------------------------------------------------------


def logits(Q: Array, keys: Array, Qr: Array, Kr: Array, scale: float) -> Array:
    """A = scale (Q . keys + Qr . Kr), keys (G or 1, S, .) of each group or of all.  -> (G, M, T, S).  (16) to (18)"""
    return (mixed(Q, swapped(keys)) + mixed(Qr, Kr.T)) * scale


def weights_vjp(dO: Array, A: Array, values: Array) -> tuple[Array, Array]:
    """P = weights(A), and dA of <P values, dO>."""
    P, dP = weights(A), mixed(dO, swapped(values))
    delta = either(
        np.sum(dO * stored(mixed(P, values)), axis=-1, keepdims=True), np.sum(P * dP, axis=-1, keepdims=True)
    )
    return P, P * (dP - delta)


def quotients(A: Array) -> Array:
    """`weights` where there is no exp: each row over its sum."""
    A = masked(A, visible(*A.shape[-2:]), 0.0)
    return A / np.sum(A, axis=-1, keepdims=True)


def mixed(X: Array, Y: Array) -> Array:
    """X Y for each head, Y that of its group, or of all.  (G, M, T, A), (G or 1, A, B) -> (G, M, T, B)."""
    return (joined(X) @ Y).reshape(*X.shape[:3], Y.shape[-1])


def joined(X: Array) -> Array:
    """The tokens of all heads of a group in one axis.  (G, M, T, A) -> (G, M T, A)."""
    G, M, T, A = X.shape
    return X.reshape(G, M * T, A)


def up(C: Array, U: Array) -> Array:
    """Keys or values U c of each group.  (X, S, L), (G, K, L) -> (G, S, K)."""
    return _for_groups(C, len(U)) @ swapped(U)


def to_latents(d: Array, U: Array, X: int) -> Array:
    """From gradients of keys or values, U c, to those of c: one sum over groups and channels.  -> (X, S, L)."""
    G, S, K = d.shape
    by_token = np.transpose(d.reshape(X, G // X, S, K), (0, 2, 1, 3)).reshape(X, S, G // X * K)
    return by_token @ U.reshape(X, G // X * K, U.shape[-1])


def swapped(Y: Array) -> Array:
    """The last two axes exchanged."""
    return np.transpose(Y, (*range(Y.ndim - 2), Y.ndim - 1, Y.ndim - 2))


def heads_first(x: Array) -> Array:
    """(T, G, M, K) -> (G, M, T, K)."""
    return np.transpose(x, (1, 2, 0, 3))


def tokens_first(x: Array) -> Array:
    """(G, M, T, K) -> (T, G, M, K)."""
    return np.transpose(x, (2, 0, 1, 3))


def rotated(x: Array, n: np.ndarray, base: float) -> Array:
    """The channels of row t turned in pairs (2 i, 2 i + 1) by n_t base^(-2 i / R).  (T, ..., R) -> (T, ..., R)."""
    heads = int(np.prod(x.shape[1:-1]))
    theta = np.tile(angles(x.shape[-1], base), heads)
    return turned(x.reshape(len(x), heads * x.shape[-1]), n, theta).reshape(x.shape)


def angles(R: int, base: float = 10000.0) -> np.ndarray:
    """theta_i = base^(-2 i / R) for i < R/2. Raises ValueError for an odd R: channels are turned in pairs."""
    if R % 2:
        raise ValueError(f"there are {R} channels to turn; they are turned in pairs")
    return base ** -(np.arange(0, R, 2) / max(R, 1))


def positions(old: Array, T: int) -> np.ndarray:
    """The positions of T tokens that come after those cached."""
    return np.arange(T) + (0 if old is None else len(old))


def scaled(scale: float | None, qc: Array, qr: Array) -> float:
    """The scale given, or that of both parts of a key together, whatever the width of what is absorbed.  (18)"""
    return (qc.shape[-1] + qr.shape[-1]) ** -0.5 if scale is None else scale


def check_caches(C0: Array, Kr0: Array) -> None:
    """Raises ValueError if one cache is given without the other: they hold parts of the same tokens."""
    if (C0 is None) != (Kr0 is None):
        raise ValueError("C0 and Kr0 hold the same tokens: give both, or neither")


def cache_inputs(*latent: str) -> tuple[Input, Input]:
    """The cached latents and rotary keys that a call starts from."""
    return (
        Input("C0", ("P", *latent), "state", "latent", carries="Cc"),
        Input("Kr0", ("P", "R"), "state", "key", carries="Krc"),
    )


def cache_outputs(*latent: str) -> tuple[Output, Output]:
    """The same caches after the call."""
    return Output("Cc", ("P+T", *latent), "state"), Output("Krc", ("P+T", "R"), "state")


def _decode(Q: Array, Qr: Array, keys: Array, values: Array, Kr: Array, scale: float, weigh: Weigh) -> Array:
    """One query at a time, which sees all there is by then: there is nothing to mask."""
    P, rows = len(Kr) - Q.shape[2], [mixed(mixed(Q[:, :, :0], swapped(keys)), values)]
    for t in range(Q.shape[2]):
        one, seen = slice(t, t + 1), slice(P + t + 1)
        A = logits(Q[:, :, one], keys[:, seen], Qr[:, :, one], Kr[seen], scale)
        rows.append(mixed(weigh(A), values[:, seen]))
    return np.concatenate(rows, axis=2)


def _for_groups(C: Array, G: int) -> Array:
    """The latents that each group reads; (1, S, L) if there is only one block."""
    X, S, L = C.shape
    return C if X in (1, G) else np.broadcast_to(C[:, None], (X, G // X, S, L)).reshape(G, S, L)


def _rows(x: Array, X: int) -> Array:
    """The tokens of all heads of a block in one axis.  (G, M, T, A) -> (X, G / X M T, A)."""
    G, M, T, A = x.shape
    return x.reshape(X, G // X * M * T, A)
