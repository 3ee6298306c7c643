"""What the MixFormer paper prints about TALA, where that is not TALA.

Nothing here is used elsewhere: these functions stand beside `tala`, which is what the equations mean if they are to be
one function, so that what is wrong with them can be shown. (12), (14), (15) and (16) as printed are four functions;
(11) as printed lets a token see later ones, and so does a group norm that pools over time.

    letter  paper   shape     meaning
    q k v   Q K V   (T, K)    tokens' queries and keys, through the feature map of (11); v (T, V)
    omega   omega   ()        decay of the head                                                             (13)
    G       G       (T,)      gain of each source token in (12), (T, T) of each pair in (14), () in (15) and (16)
    a       omega G ()        decay and gain together
    R       R       (K, V)    state after a chunk
"""

from __future__ import annotations

import numpy as np

from .primitives import Array, causal_mask, decay, masked
from .tala_masks import constant_gain, free_gain, geometric, mix, per_source

READINGS = ("N1", "N2", "N3")


# --- (11): the feature map normalised over the columns of K, that is over time ----------------------------------------


def column_phi_a(K: Array) -> Array:
    """exp(K) / ||exp(K)||, the norm of each feature over all tokens, later ones included.  (11), (T, K) -> (T, K)"""
    E = np.exp(K)
    return E / _column_norm(E)


def column_phi_b(K: Array) -> Array:
    """exp(K / ||K||), the norm of each feature over all tokens, later ones included.  (11), (T, K) -> (T, K)"""
    return np.exp(K / _column_norm(K))


def _column_norm(K: Array) -> Array:
    return np.sqrt(np.sum(K * K, axis=0, keepdims=True))


# --- (12): every source token decays at its own rate ------------------------------------------------------------------


def eq12_per_source(q: Array, k: Array, v: Array, omega: Array, G: Array, reading: str = "N1") -> Array:
    """y_t = q_t [sum_i k_i (omega G_i)^(t-i) v_i] / [sum_i k_i (omega G_i)^(t-i)].  (12)

    The products are elementwise (N1, K = V), those of linear attention (N2), or the numerator is a matrix and the
    denominator a vector (N3).  (T, K), (T, K), (T, V), (), (T,) -> (T, V)"""
    D = per_source(omega, G)
    if reading == "N1":
        return q * (D @ (k * v)) / (D @ k)
    if reading == "N2":
        return mix(q, k, v, D) / np.sum((q @ k.T) * D, axis=1, keepdims=True)
    if reading == "N3":
        return mix(q / (D @ k), k, v, D)
    raise ValueError(f"reading is {reading!r}; it must be one of {', '.join(READINGS)}")


# --- (14): the parallel form ------------------------------------------------------------------------------------------


def eq14_free_G(q: Array, k: Array, v: Array, omega: Array, G: Array) -> Array:
    """O = ((Q K^T) * D) V with D_nm = omega^(n-m) G_nm, G a free (T, T) matrix.  (14)"""
    return mix(q, k, v, free_gain(omega, G))


def eq14_free_G_vjp(dO: Array, q: Array, k: Array, v: Array, omega: Array, G: Array) -> dict[str, Array]:
    """Gradients of <O, dO>. With W = (dO V^T) o L and C = (Q K^T) o L below the diagonal and on it, dD = W * C:
    dG_nm = omega^(n-m) dD_nm, and domega = sum (n-m) omega^(n-m-1) G_nm dD_nm."""
    D, keep = free_gain(omega, G), causal_mask(len(G))
    n = np.arange(len(G), dtype=np.int16)
    distance = np.maximum(n[:, None] - n[None, :], 0)
    W, C = masked(dO @ v.T, keep, 0), masked(q @ k.T, keep, 0)
    return {
        "q": (W * D) @ k,
        "k": (W * D).T @ q,
        "v": (C * D).T @ dO,
        "G": decay(omega, distance) * W * C,
        "omega": np.sum(distance * decay(omega, np.maximum(distance - 1, 0)) * G * W * C),
    }


def eq14_const_g(q: Array, k: Array, v: Array, omega: Array, g: Array) -> Array:
    """O = ((Q K^T) * D) V with D_nm = omega^(n-m) g: the gain outside the power, once for every pair.  (14)"""
    return mix(q, k, v, constant_gain(omega, g, len(q)))


def eq14_elementwise(q: Array, k: Array, v: Array, D: Array) -> Array:
    """O = Q * (D (K * V)): (14) with all its products elementwise, for K = V."""
    return q * (D @ (k * v))


def eq14_literal(q: Array, k: Array, v: Array, D: Array) -> Array:
    """O = Q * ((K^T * D) V): (14) to the letter. Raises ValueError unless q, k, v and D are all (T, T)."""
    T = len(D)
    for name, x in (("q", q), ("k", k), ("v", v), ("D", D)):
        if x.shape != (T, T):  # NumPy would broadcast a single feature, or a single token
            raise ValueError(f"{name} has shape {x.shape}; K^T * D, elementwise, needs as many features as tokens, {T}")
    return q * ((k.T * D) @ v)


# --- (16): the chunkwise form -----------------------------------------------------------------------------------------


def eq16_printed(q: Array, k: Array, v: Array, a: Array, chunk: int = 64) -> tuple[Array, Array]:
    """R_i = a^B R_{i-1} + K^T V;  O = ((Q K^T) * D) V + Q R_{i-1}: neither product decays inside the chunk.  (16)

    (T, K), (T, K), (T, V), () -> (T, V), (K, V)"""
    return _chunkwise(q, k, v, a, chunk, xi=False, zeta=False, whole=True)


def eq16_only_zeta(q: Array, k: Array, v: Array, a: Array, chunk: int = 64) -> tuple[Array, Array]:
    """(16) with K^T diag(a^(b-r)) V in the state, right after all; the reading Q R_{i-1} lacks diag(a^r)."""
    return _chunkwise(q, k, v, a, chunk, xi=False, zeta=True, whole=False)


def eq16_only_xi(q: Array, k: Array, v: Array, a: Array, chunk: int = 64) -> tuple[Array, Array]:
    """(16) with diag(a^r) Q R_{i-1} in the output; the state lacks diag(a^(b-r))."""
    return _chunkwise(q, k, v, a, chunk, xi=True, zeta=False, whole=True)


def eq16_aB_ragged(q: Array, k: Array, v: Array, a: Array, chunk: int = 64) -> tuple[Array, Array]:
    """(16) with both, but a^B also where the last chunk is shorter than B: O is right, the last state is not."""
    return _chunkwise(q, k, v, a, chunk, xi=True, zeta=True, whole=True)


def _chunkwise(
    q: Array, k: Array, v: Array, a: Array, chunk: int, xi: bool, zeta: bool, whole: bool
) -> tuple[Array, Array]:
    """xi: the state decays before token r reads it; zeta: what token r writes decays; whole: every chunk decays by a^B
    and not by its own length."""
    R = k[:0].T @ v[:0]
    rows = [q[:0] @ R]
    for s in range(0, len(q), chunk):
        Q, K, V = q[s : s + chunk], k[s : s + chunk], v[s : s + chunk]
        b = len(Q)
        r = np.arange(1, b + 1)
        cross = decay(a, r)[:, None] * (Q @ R) if xi else Q @ R
        rows.append(mix(Q, K, V, geometric(a, b)) + cross)
        write = K * decay(a, b - r)[:, None] if zeta else K
        R = decay(a, np.asarray(chunk if whole else b)) * R + write.T @ V
    return np.concatenate(rows), R


# --- (13): the group norm of each head --------------------------------------------------------------------------------


def group_norm_over_time(x: Array, eps: float) -> Array:
    """(x - mean) / sqrt(var + eps), mean and variance over all tokens and channels of the head: what a library's group
    norm does to (batch, channels, time), whereas it keeps tokens apart in (tokens, channels).  (13), (T, V) -> (T, V)
    """
    E = x - np.sum(x) / x.size
    return E / np.sqrt(np.sum(E * E) / x.size + eps)
