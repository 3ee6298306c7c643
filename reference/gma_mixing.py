"""The mixing algebra of Gaussian Mixture Attention: what happens to responsibilities and values, and its gradients.

Sums, products and one quotient, so these functions run over any field: rationals and finite fields show that the
forms agree exactly, whatever the numbers in GQ and GK. Where responsibilities come from is in gma.py.
Source: GMA paper, equations (5) to (7), sections 3.3 and 3.5; gradients and chunks are derived.

    letter  paper      shape     meaning
    GQ GK   Gamma      (T, K)    responsibilities of queries and of keys; across sequences GK is (S, K)
    V       V_X        (T, D)    values; across sequences (S, D)
    S Z     V~ Z       (K, D)    latent memory: values written to component k; Z (K,) the mass written with them
    S0 Z0                        memory before the first token, zero if None
    At A    A~ A       (T, S)    affinity and attention matrix, never formed by the linear-time forms
    D                  (T,)      normaliser: mass that a query reads, plus eps
    G dU dD            (T, D)    cotangent of O, of the numerator U = GQ S, of D (T,)
    R r                (K, D)    cotangents of S and Z; r is (K,)
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .primitives import Array, causal_mask, masked, starts, stored

Memory = tuple[Array, Array]


def aggregate(GK: Array, V: Array, S0: Array = None, Z0: Array = None) -> Memory:
    """V~ = GK^T V and Z = GK^T 1, added to a memory if there is one.  (S, K), (S, D) -> (K, D), (K,)."""
    S, Z = GK.T @ V, np.sum(GK, axis=0)  # (5) (6)
    return (S if S0 is None else S0 + S), (Z if Z0 is None else Z0 + Z)


def broadcast(GQ: Array, S: Array, Z: Array, eps: Array) -> Array:
    """O_i = GQ_i V~ / (GQ_i Z + eps); eps is added once per row, after the sum.  (T, K) -> (T, D)."""
    return GQ @ S / (GQ @ Z + eps)[:, None]  # (7)


def affinity(GQ: Array, GK: Array, causal: bool = False) -> Array:
    """At_ij = <GQ_i, GK_j>, zero for j > i if causal.  (T, K), (S, K) -> (T, S)."""
    At = GQ @ GK.T
    return masked(At, causal_mask(*At.shape), 0) if causal else At


def attention(GQ: Array, GK: Array, eps: Array, causal: bool = False, Z0: Array = None) -> Array:
    """A_ij = At_ij / (sum_l At_il + eps), so O = A V. A row sums to D_i / (D_i + eps) < 1: eps is not a key."""
    At = affinity(GQ, GK, causal)
    D = np.sum(At, axis=1) + eps
    return At / (D if Z0 is None else D + GQ @ Z0)[:, None]


# --- every query reads every key -------------------------------------------------------------------------------------


def latent(GQ: Array, GK: Array, V: Array, eps: Array) -> Array:
    """Write all keys to the memory, then read it: no matrix of T x S entries.  (T, K), (S, K), (S, D) -> (T, D)."""
    return broadcast(GQ, *aggregate(GK, V), eps)


def dense(GQ: Array, GK: Array, V: Array, eps: Array) -> Array:
    """O = A V with the matrix A written out.  (T, K), (S, K), (S, D) -> (T, D)."""
    return attention(GQ, GK, eps) @ V


def slot_means(GQ: Array, GK: Array, V: Array, eps: Array) -> Array:
    """The reading as an average: means m_k = V~_k / Z_k, weights p_ik = GQ_ik Z_k / D_i, shrunk by D_i / (D_i + eps).

    Needs Z_k and D_i nonzero."""
    S, Z = aggregate(GK, V)
    D = GQ @ Z
    m = S / Z[:, None]
    p = GQ * Z[None, :] / D[:, None]
    return (p @ m) * (D / (D + eps))[:, None]


def latent_vjp(cotangents: Mapping[str, Array], GQ: Array, GK: Array, V: Array, eps: Array) -> dict[str, Array]:
    """Gradients of <O, dO> for GQ, GK and V."""
    S, Z = aggregate(GK, V)
    dU, dD = _quotient_vjp(cotangents["O"], broadcast(GQ, S, Z, eps), GQ @ Z + eps)
    R, r = GQ.T @ dU, dD @ GQ
    return {"GQ": dU @ S.T + dD[:, None] * Z[None, :], "GK": V @ R.T + r[None, :], "V": GK @ R}


# --- causal: query i reads keys j <= i -------------------------------------------------------------------------------


def step(GQ: Array, GK: Array, V: Array, eps: Array, S: Array, Z: Array) -> tuple[Array, Array, Array]:
    """Decode one token: write its key, then read.  (K,), (K,), (D,), memory -> O (D,), memory."""
    O, S, Z = recurrent(GQ[None, :], GK[None, :], V[None, :], eps, S, Z)
    return O[0], S, Z


def recurrent(
    GQ: Array, GK: Array, V: Array, eps: Array, S0: Array = None, Z0: Array = None
) -> tuple[Array, Array, Array]:
    """S_i = S_{i-1} + GK_i^T V_i, Z_i = Z_{i-1} + GK_i, O_i = GQ_i S_i / (GQ_i Z_i + eps).  -> O, S_T, Z_T."""
    S, Z = _memory(GK, V, S0, Z0)
    rows = [GQ[:0] @ S]
    for i in range(len(GQ)):
        S = S + GK[i][:, None] * V[i][None, :]
        Z = Z + GK[i]
        rows.append(broadcast(GQ[i : i + 1], S, Z, eps))
    return np.concatenate(rows), S, Z


def parallel(
    GQ: Array, GK: Array, V: Array, eps: Array, S0: Array = None, Z0: Array = None
) -> tuple[Array, Array, Array]:
    """O = (GQ S0 + M V) / (GQ Z0 + M 1 + eps) with the masked affinity M, diagonal included.  -> O, S_T, Z_T."""
    S, Z = _memory(GK, V, S0, Z0)
    M = affinity(GQ, GK, causal=True)
    D = GQ @ Z + np.sum(M, axis=1) + eps
    return (GQ @ S + M @ V) / D[:, None], *aggregate(GK, V, S, Z)


def chunkwise(
    GQ: Array, GK: Array, V: Array, eps: Array, S0: Array = None, Z0: Array = None, chunk: int = 64
) -> tuple[Array, Array, Array]:
    """The parallel form inside chunks, the memory across them; the last chunk may be short.  -> O, S_T, Z_T."""
    S, Z = _memory(GK, V, S0, Z0)
    rows = [GQ[:0] @ S]
    for c in _chunks(len(GQ), chunk):
        O, S, Z = parallel(GQ[c], GK[c], V[c], eps, S, Z)
        rows.append(O)
    return np.concatenate(rows), S, Z


def recurrent_vjp(
    cotangents: Mapping[str, Array], GQ: Array, GK: Array, V: Array, eps: Array, S0: Array = None, Z0: Array = None
) -> dict[str, Array]:
    """Gradients of <O, dO> + <S, dS> + <Z, dZ>: the reverse recurrence R_i = R_{i+1} + GQ_i^T dU_i,
    r_i = r_{i+1} + GQ_i dD_i, over all T stored memories."""
    S, Z = _memory(GK, V, S0, Z0)
    G, R, r = _cotangents(cotangents, S, Z)
    T = len(GQ)
    memories = []
    for i in range(T):
        S, Z = S + GK[i][:, None] * V[i][None, :], Z + GK[i]
        memories.append((S, Z))
    dGQ, dGK, dV = [], [], []
    for i in reversed(range(T)):
        row = slice(i, i + 1)
        S, Z = memories[i]
        dU, dD = _quotient_vjp(G[row], broadcast(GQ[row], S, Z, eps), GQ[row] @ Z + eps)
        R = R + GQ[i][:, None] * dU
        r = r + GQ[i] * dD
        dGQ.append(dU @ S.T + dD[:, None] * Z[None, :])
        dGK.append(V[row] @ R.T + r[None, :])
        dV.append(GK[row] @ R)
    return _joined(dGQ[::-1], dGK[::-1], dV[::-1], GQ, GK, V) | {"S0": R, "Z0": r}


def chunkwise_vjp(
    cotangents: Mapping[str, Array],
    GQ: Array,
    GK: Array,
    V: Array,
    eps: Array,
    S0: Array = None,
    Z0: Array = None,
    chunk: int = 64,
) -> dict[str, Array]:
    """The same gradients in O(T) memory: one pass up the chunks that rebuilds the memories as it goes, for the
    queries; one pass down with the cotangents R, r of the memory, for keys and values.

    The memories are rebuilt from the start, never by subtracting from the last: that cancels."""
    S, Z = _memory(GK, V, S0, Z0)
    G, R, r = _cotangents(cotangents, S, Z)
    chunks = _chunks(len(GQ), chunk)
    dGQ, dGK, dV, reads = [], [], [], []
    for c in chunks:
        M = affinity(GQ[c], GK[c], causal=True)
        D = GQ[c] @ Z + np.sum(M, axis=1) + eps
        dU, dD = _quotient_vjp(G[c], (GQ[c] @ S + M @ V[c]) / D[:, None], D)
        P = _affinity_vjp(dU, dD, V[c])
        dGQ.append(dU @ S.T + dD[:, None] * Z[None, :] + P @ GK[c])
        S, Z = aggregate(GK[c], V[c], S, Z)
        reads.append((dU, dD))
    for c, (dU, dD) in zip(reversed(chunks), reversed(reads), strict=True):
        M = affinity(GQ[c], GK[c], causal=True)
        P = _affinity_vjp(dU, dD, V[c])
        dGK.append(V[c] @ R.T + r[None, :] + P.T @ GQ[c])
        dV.append(GK[c] @ R + M.T @ dU)
        R, r = R + GQ[c].T @ dU, r + dD @ GQ[c]
    return _joined(dGQ, dGK[::-1], dV[::-1], GQ, GK, V) | {"S0": R, "Z0": r}


def _quotient_vjp(G: Array, O: Array, D: Array) -> tuple[Array, Array]:
    """O = U / D, row by row: dU_i = G_i / D_i and dD_i = -<dU_i, O_i>, where O may be read back from storage."""
    dU = G / D[:, None]
    return dU, -np.sum(dU * stored(O), axis=1)


def _affinity_vjp(dU: Array, dD: Array, V: Array) -> Array:
    """P_ij = <dU_i, V_j> + dD_i for j <= i: the cotangent of the masked affinity."""
    P = dU @ V.T + dD[:, None]
    return masked(P, causal_mask(*P.shape), 0)


def _memory(GK: Array, V: Array, S0: Array, Z0: Array) -> Memory:
    """The initial memory; absent parts are zeros of the same kind of number as GK and V."""
    S, Z = aggregate(GK[:0], V[:0])
    return (S if S0 is None else S0), (Z if Z0 is None else Z0)


def _cotangents(cotangents: Mapping[str, Array], S: Array, Z: Array) -> tuple[Array, Array, Array]:
    """dO, dS, dZ; those of the final memory are zero if absent."""
    R, r = cotangents.get("S"), cotangents.get("Z")
    return cotangents["O"], (0 * S if R is None else R), (0 * Z if r is None else r)


def _chunks(T: int, chunk: int) -> list[slice]:
    return [slice(a, a + chunk) for a in starts(T, chunk)]


def _joined(dGQ: list[Array], dGK: list[Array], dV: list[Array], GQ: Array, GK: Array, V: Array) -> dict[str, Array]:
    parts = {"GQ": (dGQ, GQ), "GK": (dGK, GK), "V": (dV, V)}
    return {name: np.concatenate([like[:0], *rows]) for name, (rows, like) in parts.items()}
