"""Masks of linear attention: which of them a recurrence computes, and with how large a state.

A lower-triangular mask D stands for O = ((Q K^T) * D) V. Two theorems say when a recurrence gives the same O for all
Q, K, V; both follow from comparing the coefficients of q_n k_m v_m.

    T1  S_n = a_n S_{n-1} + b_n k_n^T v_n, o_n = c_n q_n S_n does if and only if D_nm = c_n a_n ... a_{m+1} b_m.
        Without gates, b = c = 1, that is the cocycle condition D_nn = 1 and D_nm = D_nl D_lm for m <= l <= n.
    T2  A state of r matrices, D_nm = c_n A_n ... A_{m+1} b_m with A_t of r x r, does only if every block of rows >= s
        and columns <= s has rank at most r: the block factors through the state. Rank one is sufficient, too.

The questions are decided by exact equality, so ask them over the rationals or a finite field.
Source: MixFormer paper (12), (14), (15), (17), (18); the theorems are derived.

    letter  paper   shape     meaning
    D       D       (T, T)    mask
    a b c   -       (T,)      decays, input gate, output gate; what a_1 is makes no difference without S_0
    G       G       (T, T)    gain of each pair of tokens (14), or (T,) of each source (12)
    E       E       (T, X)    router weights of the experts, zero where an expert is not selected
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from .primitives import Array, causal_mask, decay, masked, segment_products

# --- T1 and T2 -------------------------------------------------------------------------------------------------------


def mix(q: Array, k: Array, v: Array, D: Array) -> Array:
    """O = ((Q K^T) * D) V.  (T, K), (T, K), (T, V), (T, T) -> (T, V)."""
    return ((q @ k.T) * D) @ v


def recurrent(q: Array, k: Array, v: Array, c: Array, a: Array, b: Array) -> Array:
    """S_n = a_n S_{n-1} + b_n k_n^T v_n;  o_n = c_n q_n S_n.  (T, K), (T, K), (T, V), three (T,) -> (T, V)."""
    S = k[:0].T @ v[:0]
    rows = [q[:0] @ S]
    for n in range(len(q)):
        S = a[n] * S + b[n] * k[n][:, None] * v[n][None, :]
        rows.append(c[n] * q[n : n + 1] @ S)
    return np.concatenate(rows)


def is_cocycle(D: Array) -> bool:
    """D_nn = 1, D_nm = D_nl D_lm for all m <= l <= n, and zero above the diagonal: D is the mask of decays alone."""
    n = np.arange(len(D))
    lower = bool(np.all(D[n[:, None] < n] == 0))
    between = (n[:, None, None] >= n[:, None]) & (n[:, None] >= n)
    through = D[:, :, None] * D[None, :, :] == D[:, None, :]
    return lower and bool(np.all(np.diagonal(D) == 1)) and bool(np.all(through | ~between))


def decays_of(D: Array) -> Array:
    """The only decays that D can come from, g_t = D_{t,t-1}, with g_1 = 1.  (T, T) -> (T,)."""
    return np.concatenate([np.ones(len(D[:1]), D.dtype), np.diagonal(D[1:])])


def input_gate(D: Array) -> tuple[Array, Array] | None:
    """(a, b) with D_nm = a_n ... a_{m+1} b_m, or None. It is b_m = D_mm, and exists exactly if D_nm D_ll = D_nl D_lm.

    Raises ValueError for a zero on the diagonal; see `realisation`."""
    b = np.diagonal(D)
    if np.any(b == 0):
        raise ValueError(f"D[{np.flatnonzero(b == 0)[0]}] has a zero on the diagonal; an input gate is read off it")
    N = D / b[None, :]
    return (decays_of(N), b) if is_cocycle(N) else None


def realisation(D: Array) -> tuple[Array, Array, Array] | None:
    """(c, a, b) with D_nm = c_n a_n ... a_{m+1} b_m, or None if a block has rank two.  (T, T) -> three (T,).

    After token s the state holds a combination w_s of the tokens so far: a row of the block of rows >= s and columns
    <= s that is not zero, if there is one. All its rows are multiples of it, those below are of w_{s+1}, too."""
    if semiseparable_rank(D) > 1:
        return None
    w = [_any_row(D[s:, : s + 1]) for s in range(len(D))]
    a = [np.ones(len(D[:1]), D.dtype), *[_ratio(later[:-1], earlier) for earlier, later in pairwise(w)]]
    c = [_ratio(D[s, : s + 1], row) for s, row in enumerate(w)]
    none = np.diagonal(D)[:0]
    return np.concatenate([none, *c]), np.concatenate(a), np.concatenate([none, *[row[-1:] for row in w]])


def semiseparable_rank(D: Array) -> int:
    """The largest rank of a block of rows >= s and columns <= s: no recurrence has a smaller state.  (T2)"""
    return max((_rank(D[s:, : s + 1]) for s in range(len(D))), default=0)


def _rank(A: Array) -> int:
    """A - (A e_j)(e_i A) / A_ij has one rank less than A, whichever A_ij is not zero (Wedderburn 1934)."""
    rank = 0
    while np.any(A != 0):
        i, j = np.argwhere(A != 0)[0]
        A = A - A[:, j : j + 1] * A[i : i + 1, :] / A[i, j]
        rank += 1
    return rank


def _any_row(A: Array) -> Array:
    nonzero = np.flatnonzero(np.any(A != 0, axis=1))
    return A[nonzero[0] if len(nonzero) else 0]


def _ratio(x: Array, w: Array) -> Array:
    """The number r with x = r w, zero if w is: an array of length one."""
    nonzero = np.flatnonzero(w != 0)[:1]
    return x[nonzero] / w[nonzero] if len(nonzero) else 0 * w[:1]


# --- the masks of the readings ---------------------------------------------------------------------------------------


def cocycle(a: Array) -> Array:
    """D_nm = a_n ... a_{m+1}: decays that depend on the token.  (T,) -> (T, T)."""
    return segment_products(a)[1:, 1:]


def realised(c: Array, a: Array, b: Array) -> Array:
    """D_nm = c_n a_n ... a_{m+1} b_m.  (T1)"""
    return c[:, None] * cocycle(a) * b[None, :]


def geometric(a: Array, T: int) -> Array:
    """D_nm = a^(n-m)."""
    return masked(decay(a, _lag(T)), causal_mask(T), 0)


def free_gain(omega: Array, G: Array) -> Array:
    """D_nm = omega^(n-m) G_nm, G any (T, T) matrix.  (14)"""
    return geometric(omega, len(G)) * G


def constant_gain(omega: Array, g: Array, T: int) -> Array:
    """D_nm = omega^(n-m) g: the gain outside the power.  (14) with G_nm = g"""
    return geometric(omega, T) * g


def per_source(omega: Array, G: Array) -> Array:
    """D_nm = (omega G_m)^(n-m): every source token decays at its own rate.  (12), (T,) -> (T, T)"""
    T = len(G)
    return masked(decay((omega * G)[None, :], _lag(T)), causal_mask(T), 0)


def read_mix(E: Array, a: Array) -> Array:
    """D_nm = sum_j E^j_n a_j^(n-m): the reader weights the experts.  (T, X), (X,) -> (T, T)"""
    return np.sum(_experts(E, a) * E.T[:, :, None], axis=0)


def write_mix(E: Array, a: Array) -> Array:
    """D_nm = sum_j a_j^(n-m) E^j_m: the writer weights the experts.  (T, X), (X,) -> (T, T)"""
    return np.sum(_experts(E, a) * E.T[:, None, :], axis=0)


def top_k(E: Array, a: Array) -> Array:
    """D_nm = sum_j E^j_n a_j^(n-m) E^j_m: selected experts are written and read, all decay.  (T, X), (X,) -> (T, T)"""
    return np.sum(_experts(E, a) * E.T[:, :, None] * E.T[:, None, :], axis=0)


def top_k_hold(E: Array, a: Array, selected: np.ndarray) -> Array:
    """D_nm = sum_j E^j_n a_j^(c^j_n - c^j_m) E^j_m, c^j_n the number of tokens up to n that select expert j: an expert
    decays only when it is selected.  (T, X), (X,), bool (T, X) -> (T, T)"""
    g = np.where(selected, a[None, :], 1)
    return sum((realised(E[:, j], g[:, j], E[:, j]) for j in range(len(a))), start=0 * E @ E.T)


def _experts(E: Array, a: Array) -> Array:
    """a_j^(n-m) of every expert: (X, T, T)."""
    T = len(E)
    return masked(decay(a[:, None, None], _lag(T)[None]), causal_mask(T)[None], 0)


def _lag(T: int) -> np.ndarray:
    """n - m, zero above the diagonal."""
    n = np.arange(T)
    return np.maximum(n[:, None] - n[None, :], 0)
