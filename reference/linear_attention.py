"""Linear attention: softmax's exponential kernel replaced by a product of positive features, causal.

Source: MixFormer paper (5) to (8), with the transpose that k^T v needs and the index i where it prints j; Katharopoulos
et al. 2020 (9) to (12). The feature map is applied before. eps in the denominator is nobody's equation but many
libraries' practice. A mass is a value that is one for every token, so the normaliser is one more column of U and M.

    letter  paper    shape        meaning
    q k v   phi(Q)   (T, K)       features of queries and of keys, positive; v (T, V)
    S z     S Z      (K, V)       sum of k^T v so far; z (K,) sum of k; S0 and z0 come before the first token
    V1 M                          v with a column of ones (T, V + 1); S with the column z (K, V + 1)
    U                (T, V + 1)   numerators, and their normaliser in the last column
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .primitives import Array, causal_mask, masked, starts, stored
from .spec import Form, Input, Operator, Output, check_cotangents, check_shapes


def recurrent(
    q: Array, k: Array, v: Array, eps: Array = 0.0, S0: Array = None, z0: Array = None
) -> tuple[Array, Array, Array]:
    """S_i = S_{i-1} + k_i^T v_i, z_i = z_{i-1} + k_i;  o_i = q_i S_i / (q_i . z_i + eps).  -> O, S, z.  (7) (8)"""
    V1, M = _memory(q, k, v, S0, z0)
    rows = [q[:0] @ M]
    for i in range(len(q)):
        M = M + k[i][:, None] * V1[i][None, :]
        rows.append(q[i : i + 1] @ M)
    return quotient(np.concatenate(rows), M, eps)


def parallel(
    q: Array, k: Array, v: Array, eps: Array = 0.0, S0: Array = None, z0: Array = None
) -> tuple[Array, Array, Array]:
    """o_i = sum_{j <= i} (q_i . k_j) v_j / (sum_{j <= i} q_i . k_j + eps).  -> O (T, V), S, z.  (5)"""
    return quotient(*_parallel(q, k, *_memory(q, k, v, S0, z0)), eps)


def chunkwise(
    q: Array, k: Array, v: Array, eps: Array = 0.0, S0: Array = None, z0: Array = None, chunk: int = 64
) -> tuple[Array, Array, Array]:
    """The parallel form inside chunks, the memory across them; the last chunk may be short.  -> O (T, V), S, z."""
    V1, M = _memory(q, k, v, S0, z0)
    rows = [q[:0] @ M]
    for a in starts(len(q), chunk):
        c = slice(a, a + chunk)
        U, M = _parallel(q[c], k[c], V1[c], M)
        rows.append(U)
    return quotient(np.concatenate(rows), M, eps)


def vjp(
    cotangents: dict[str, Array],
    q: Array,
    k: Array,
    v: Array,
    eps: Array = 0.0,
    S0: Array = None,
    z0: Array = None,
    chunk: int = 64,
) -> dict[str, Array]:
    """Gradients of <O, dO> + <S, dS> + <z, dz>: up the chunks for the queries, down with the cotangent R of the memory
    for keys and values."""
    check_cotangents(OPERATOR, cotangents, {"q": q, "v": v})
    V1, M = _memory(q, k, v, S0, z0)
    G, R = cotangents["O"], joined(cotangents["S"], cotangents["z"])
    chunks = [slice(a, a + chunk) for a in starts(len(q), chunk)]
    dU, dq, dk, dV = [], [0 * q[:0]], [0 * k[:0]], [0 * v[:0]]
    for c in chunks:
        before, (U, M) = M, _parallel(q[c], k[c], V1[c], M)
        dU.append(quotient_vjp(G[c], U, eps))
        dq.append(dU[-1] @ before.T + _causal(dU[-1] @ V1[c].T) @ k[c])
    for c, d in zip(reversed(chunks), reversed(dU), strict=True):
        dk.append(V1[c] @ R.T + _causal(d @ V1[c].T).T @ q[c])
        dV.append((k[c] @ R + _causal(q[c] @ k[c].T).T @ d)[:, :-1])
        R = R + q[c].T @ d
    grads = {"q": np.concatenate(dq), "k": np.concatenate(dk[::-1]), "v": np.concatenate(dV[::-1])}
    return grads | {"S0": R[:, :-1], "z0": R[:, -1]}


# --- shared with the normalised forms of TALA ------------------------------------------------------------------------


def with_mass(v: Array) -> Array:
    """v with a column of ones (as booleans: they take on the kind of number that v has).  (T, V) -> (T, V + 1)."""
    return np.concatenate([v, np.ones((len(v), 1), dtype=bool)], axis=1)


def joined(S: Array, z: Array) -> Array:
    """(K, V), (K,) -> (K, V + 1)."""
    return np.concatenate([S, z[:, None]], axis=1)


def memory(k: Array, v: Array, S0: Array, z0: Array) -> Array:
    """M before the first token; what is absent is zero."""
    return joined(k[:0].T @ v[:0] if S0 is None else S0, np.sum(k[:0], axis=0) if z0 is None else z0)


def quotient(U: Array, M: Array, eps: Array) -> tuple[Array, Array, Array]:
    """The numerators over their normaliser, eps added once per row, and the two parts of the memory."""
    return U[:, :-1] / (U[:, -1:] + eps), M[:, :-1], M[:, -1]


def quotient_vjp(G: Array, U: Array, eps: Array) -> Array:
    """O = N / D row by row: dN = G / D and dD = -<dN, O>, where O may be read back from storage.  -> (T, V + 1)."""
    D = U[:, -1:] + eps
    dN = G / D
    return np.concatenate([dN, -np.sum(dN * stored(U[:, :-1] / D), axis=1, keepdims=True)], axis=1)


def _memory(q: Array, k: Array, v: Array, S0: Array, z0: Array) -> tuple[Array, Array]:
    check_shapes(OPERATOR, {"q": q, "k": k, "v": v, "S0": S0, "z0": z0})
    return with_mass(v), memory(k, v, S0, z0)


def _parallel(q: Array, k: Array, V1: Array, M: Array) -> tuple[Array, Array]:
    return q @ M + _causal(q @ k.T) @ V1, M + k.T @ V1


def _causal(A: Array) -> Array:
    return masked(A, causal_mask(*A.shape), 0)


FORMS = (Form("chunkwise", chunkwise, chunked=True), Form("parallel", parallel), Form("recurrent", recurrent))

INPUTS = (
    Input("q", ("T", "K"), "token", "positive"),
    Input("k", ("T", "K"), "token", "positive"),
    Input("v", ("T", "V"), "token", "value"),
    Input("eps", (), "scalar", "epsilon", default=0.0, differentiable=False),
    Input("S0", ("K", "V"), "state", "state", carries="S"),
    Input("z0", ("K",), "state", "mass", carries="z"),
)

OPERATOR = Operator(
    name="linear_attention",
    summary="S_i = S_{i-1} + k_i^T v_i; z_i = z_{i-1} + k_i; o_i = q_i S_i / (q_i . z_i + eps)",
    source="MixFormer (5)-(8), corrected; Katharopoulos et al. 2020 (9)-(12)",
    inputs=INPUTS,
    outputs=(Output("O", ("T", "V")), Output("S", ("K", "V"), "state"), Output("z", ("K",), "state")),
    forms=FORMS,
    vjp=vjp,
    causal=True,
    laws=("linearity", "constant_value", "hull", "row_sums", "relabelling", "left_padding", "homogeneity", "euler"),
    linear_in="v",
    degrees={"v": 1},  # and 0 in q and k where eps is zero
    exact=FORMS,
    exact_inputs=tuple(replace(x, domain="field") for x in INPUTS),
)
