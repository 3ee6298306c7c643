"""The mixing algebra of memory experts: X states that decay at their own rates, read and written with weights.

Sums and products, so these functions run over any field. Where the weights come from is in mome.py.
Source: MixFormer paper (17); masks and gradients are derived.

    letter  paper   shape       meaning
    q k v   Q K V   (T, K)      queries and keys of T tokens; values v (T, V)
    r w     E       (T, X)      weights with which each token reads and writes the experts
    m       -       (T, X)      whether the token makes the expert decay, integers 0 or 1; c their running sums
    a       omega G (X,)        decays
    S0 S    MS      (X, K, V)   states before the first and after the last token; zero if None
    G R             (T, V)      cotangents of Y and of S, as S
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from . import retention
from .primitives import Array, causal_mask, decay, either, masked, starts


def recurrent(
    q: Array, k: Array, v: Array, r: Array, w: Array, m: np.ndarray, a: Array, S0: Array = None
) -> tuple[Array, Array]:
    """S^j_n = a_j^m_nj S^j_{n-1} + w_nj k_n^T v_n;  y_n = q_n sum_j r_nj S^j_n.  -> Y (T, V), S.  (17)"""
    S = _initial(q, k, v, r, w, a, S0)
    rows = [q[:0] @ S[0]]
    for n in range(len(q)):
        S = decay(a, m[n])[:, None, None] * S + w[n][:, None, None] * (k[n][:, None] * v[n][None, :])
        rows.append(q[n : n + 1] @ np.sum(r[n][:, None, None] * S, axis=0))
    return np.concatenate(rows), S


def parallel(
    q: Array, k: Array, v: Array, r: Array, w: Array, m: np.ndarray, a: Array, S0: Array = None
) -> tuple[Array, Array]:
    """Y = ((Q K^T) * D) V with one mask for all experts, and what is left of S0.  -> Y (T, V), S."""
    S0 = _initial(q, k, v, r, w, a, S0)
    c, total = _counts(m)
    old = _over_tokens(r * decay(a, c)) * (q @ S0)
    S = _written(k, v, w * decay(a, total - c)) + decay(a, total)[:, None, None] * S0
    return (q @ k.T * mask(r, w, m, a)) @ v + np.sum(old, axis=0), S


def chunkwise(
    q: Array, k: Array, v: Array, r: Array, w: Array, m: np.ndarray, a: Array, S0: Array = None, chunk: int = 64
) -> tuple[Array, Array]:
    """The parallel form inside chunks, the states across them; the last chunk may be short.  -> Y (T, V), S."""
    S = _initial(q, k, v, r, w, a, S0)
    rows = [q[:0] @ S[0]]
    for b in starts(len(q), chunk):
        Y, S = parallel(*(x[b : b + chunk] for x in (q, k, v, r, w, m)), a=a, S0=S)
        rows.append(Y)
    return np.concatenate(rows), S


def by_channel(
    q: Array, k: Array, v: Array, E: Array, a: Array, S0: Array = None, chunk: int = 64
) -> tuple[Array, Array]:
    """Read-mix with weights of their own for each key channel, E (T, K, X), as the router readings R4 and R6 give them:
    y_n = q_n sum_j diag(E_n^j) S^j_n, so that expert j is a retention read with the queries q * E^j.  -> Y, S."""
    experts = [
        retention.chunkwise(q * E[:, :, j], k, v, a[j], S0=None if S0 is None else S0[j], chunk=chunk)
        for j in range(E.shape[2])
    ]
    return np.sum(np.stack([Y for Y, _ in experts]), axis=0), np.stack([S for _, S in experts])


def by_channel_vjp(
    cotangents: Mapping[str, Array], q: Array, k: Array, v: Array, E: Array, a: Array, S0: Array = None, chunk: int = 64
) -> dict[str, Array]:
    """Gradients of <Y, dY> + <S, dS>: with dq^j that of the queries of expert j, dE^j = q * dq^j."""
    parts = []
    for j in range(E.shape[2]):
        G, state = {"O": cotangents["Y"], "S": cotangents["S"][j]}, None if S0 is None else S0[j]
        parts.append(retention.vjp(G, q * E[:, :, j], k, v, a[j], S0=state, chunk=chunk))
    d = {name: np.stack([part[name] for part in parts]) for name in ("q", "k", "v", "gamma", "S0")}
    dE = np.transpose(q * d["q"], (1, 2, 0))
    dq = np.sum(np.transpose(E, (2, 0, 1)) * d["q"], axis=0)
    return {"q": dq, "k": np.sum(d["k"], axis=0), "v": np.sum(d["v"], axis=0), "E": dE, "a": d["gamma"], "S0": d["S0"]}


def mask(r: Array, w: Array, m: np.ndarray, a: Array) -> Array:
    """D_ni = sum_j r_nj a_j^(c_nj - c_ij) w_ij for i <= n, else 0.  (T, X), (X,) -> (T, T)."""
    A, _ = _decays(a, _counts(m)[0])
    return np.sum(_over_tokens(r) * A * w.T[:, None, :], axis=0)


def vjp(
    cotangents: Mapping[str, Array],
    q: Array, k: Array, v: Array, r: Array, w: Array, m: np.ndarray, a: Array, S0: Array = None, chunk: int = 64,
) -> dict[str, Array]:  # fmt: skip
    """Gradients of <Y, dY> + <S, dS> for all but m, chunk by chunk backwards with the cotangent R of the states."""
    S, tokens = _initial(q, k, v, r, w, a, S0), (q, k, v, r, w, m)
    slices = [slice(b, b + chunk) for b in starts(len(q), chunk)]
    states = []
    for c in slices:
        states.append(S)
        S = parallel(*(x[c] for x in tokens), a=a, S0=S)[1]
    G, R = cotangents["Y"], cotangents["S"]
    rows: dict[str, list[Array]] = {name: [0 * x[:0]] for name, x in zip("qkvrw", tokens, strict=False)}
    da = np.sum(np.sum(0 * R, axis=2), axis=1)
    for c, S in zip(reversed(slices), reversed(states), strict=True):
        d = _vjp_parallel(G[c], R, *(x[c] for x in tokens), a=a, S0=S)
        for name, parts in rows.items():
            parts.append(d[name])
        da, R = da + d["a"], d["S0"]
    return {name: np.concatenate(parts[::-1]) for name, parts in rows.items()} | {"a": da, "S0": R}


def _vjp_parallel(
    G: Array, R: Array, q: Array, k: Array, v: Array, r: Array, w: Array, m: np.ndarray, a: Array, S0: Array
) -> dict[str, Array]:
    """A and dA are the decays from token to token of each expert and their derivatives, f and u those of S0 until it
    is read and of what is written until the end. Products that meet v or G are formed expert by expert."""
    c, total = _counts(m)
    A, dA = _decays(a, c)
    f, u = decay(a, c), decay(a, total - c)
    df, du = c * decay(a, np.maximum(c - 1, 0)), (total - c) * decay(a, np.maximum(total - c - 1, 0))
    reads, writes = _over_tokens(r * f), _over_tokens(w * u)
    r_, w_ = _over_tokens(r), w.T[:, None, :]
    D, B, dB = np.sum(r_ * A * w_, axis=0), q @ k.T, G @ v.T
    old, new = np.sum(q @ S0 * G, axis=2).T, np.sum(k @ R * v, axis=2).T  # what meets S0 and R, (T, X)
    last = total * decay(a, np.maximum(total - 1, 0))
    return {
        "q": (dB * D) @ k + np.sum(reads * (G @ _turned(S0)), axis=0),
        "k": (dB * D).T @ q + np.sum(writes * (v @ _turned(R)), axis=0),
        "v": (B * D).T @ G + np.sum(writes * (k @ R), axis=0),
        "r": np.sum((B * A * w_) @ v * G, axis=2).T + f * old,
        "w": np.sum(_turned(B * A * r_) @ G * v, axis=2).T + u * new,
        "a": np.sum(np.sum((B * dA * r_ * w_) @ v * G, axis=2), axis=1)
        + np.sum(r * df * old + w * du * new, axis=0)
        + last * np.sum(np.sum(S0 * R, axis=2), axis=1),
        "S0": _written(q, G, r * f) + decay(a, total)[:, None, None] * R,
    }


def _counts(m: np.ndarray) -> tuple[np.ndarray, Array]:
    """Running sums and totals, in small integers: float32 times these stays float32."""
    return np.cumsum(m, axis=0, dtype=np.int16), np.sum(m, axis=0, dtype=np.int16)


def _decays(a: Array, c: np.ndarray) -> tuple[Array, Array]:
    """a_j^(c_nj - c_ij) for i <= n, else 0, and its derivative.  (X,), (T, X) -> (X, T, T) twice."""
    n, keep = np.maximum(c.T[:, :, None] - c.T[:, None, :], 0), causal_mask(len(c))
    a = a[:, None, None]
    return masked(decay(a, n), keep, 0), masked(n * decay(a, np.maximum(n - 1, 0)), keep, 0)


def _written(k: Array, v: Array, w: Array) -> Array:
    """sum_n w_nj k_n^T v_n, the weight on either factor: on a small one, float16 loses less that the other multiplies.
    (T, K), (T, V), (T, X) -> (X, K, V)."""
    return either(_turned(_over_tokens(w) * k) @ v, k.T @ (_over_tokens(w) * v))


def _over_tokens(x: Array) -> Array:
    """(T, X) -> (X, T, 1)."""
    return x.T[:, :, None]


def _turned(x: Array) -> Array:
    return np.transpose(x, (0, 2, 1))


def _initial(q: Array, k: Array, v: Array, r: Array, w: Array, a: Array, S0: Array) -> Array:
    """S0, or zeros. Raises ValueError where a shape contradicts those of the weights and of k."""
    zero, (T, X), K = _written(k[:0], v[:0], w[:0]), r.shape, k.shape[1]
    S = zero if S0 is None else S0
    shapes = {"q": (T, K), "k": (T, K), "v": (T, v.shape[1]), "a": (X,), "S0": zero.shape}
    for name, x in {"q": q, "k": k, "v": v, "a": a, "S0": S}.items():
        if x.shape != shapes[name]:
            raise ValueError(f"{name} has shape {x.shape}; for {T} tokens and {X} experts it must be {shapes[name]}")
    return S
