"""Titans: a linear memory that learns while it reads, by gradient descent with momentum and forgetting.

Source: survey, section "Titans"; Behrouz et al. 2025 (9) to (14). Each token is one step on the loss ||M k - v||^2,
whose gradient has the factor 2, taken at the memory before the token; reading changes nothing. `titans.chunked` takes
it, for the tokens of a chunk of `size`, at the memory before the chunk, as the paper trains: another function, the
same for chunks of one token. Gates are products, never their quotients: a token may forget everything.

The writes W of all tokens solve one triangular system. Once they are known, memory and momentum are two linear scans.

    letter   paper     shape           meaning
    q k v              (T, K)          what is asked for; keys, of norm one in the paper; values (T, V)
    alpha    alpha     (T,)            share of the memory that is forgotten, in [0, 1]
    eta      eta       (T,)            share of the momentum that is kept, in [0, 1]
    theta    theta     (T,)            step sizes
    M S      M S       (V, K)          memory and momentum; M0 and S0 come before the first token
    E W                (T, V)          v - M k, what the memory lacks; 2 theta E, what is written to it, times k
    A H                (b + 1, b + 1)  A[n, m] is what is left of the memory of m at n of a chunk, counted from 1; H of
                                       the momentum
    G        A H       (b + 1, b + 1)  G[n, m] of what was written by m is in the memory at n
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from .primitives import Array, segment_products, starts, substituted
from .spec import Form, Input, Operator, Output, check_cotangents, check_shapes

Result = tuple[Array, Array, Array]
Tokens = tuple[Array, ...]  # q, k, v, alpha, eta, theta


def chunkwise(
    q: Array, k: Array, v: Array, alpha: Array, eta: Array, theta: Array, M0: Array = None, S0: Array = None,
    chunk: int = 64,
) -> Result:  # fmt: skip
    """All writes of a chunk at once, memory and momentum across chunks.  -> y (T, V), M, S (V, K)."""
    tokens = (q, k, v, alpha, eta, theta)
    return _blocks(tokens, *_initial(LINEAR, tokens, M0, S0), 1, chunk)


def recurrent(
    q: Array, k: Array, v: Array, alpha: Array, eta: Array, theta: Array, M0: Array = None, S0: Array = None,
) -> Result:  # fmt: skip
    """S_t = eta_t S_{t-1} - theta_t grad ||M_{t-1} k_t - v_t||^2;  M_t = (1 - alpha_t) M_{t-1} + S_t;  y_t = M_t q_t.

    -> y (T, V), M, S (V, K).  (10) (13) (14)"""
    tokens = (q, k, v, alpha, eta, theta)
    return _steps(tokens, *_initial(LINEAR, tokens, M0, S0), 1)


def vjp(
    cotangents: dict[str, Array],
    q: Array, k: Array, v: Array, alpha: Array, eta: Array, theta: Array, M0: Array = None, S0: Array = None,
    chunk: int = 64,
) -> dict[str, Array]:  # fmt: skip
    """Gradients of <y, dy> + <M, dM> + <S, dS>, through the inner gradients too."""
    check_cotangents(LINEAR, cotangents, {"q": q, "v": v})
    tokens = (q, k, v, alpha, eta, theta)
    return _vjp(cotangents, tokens, *_initial(LINEAR, tokens, M0, S0), 1, chunk)


# --- gradients at the memory before the chunk ------------------------------------------------------------------------


def chunked_parallel(
    q: Array, k: Array, v: Array, alpha: Array, eta: Array, theta: Array, size: int = 4, M0: Array = None,
    S0: Array = None,
) -> Result:  # fmt: skip
    """The writes of all chunks at once.  -> y (T, V), M, S (V, K)."""
    tokens = (q, k, v, alpha, eta, theta)
    return _blocks(tokens, *_initial(CHUNKED, tokens, M0, S0), _sized(size), max(1, len(q)))


def chunked_scans(
    q: Array, k: Array, v: Array, alpha: Array, eta: Array, theta: Array, size: int = 4, M0: Array = None,
    S0: Array = None,
) -> Result:  # fmt: skip
    """Chunk by chunk: gradients that do not wait for each other, two scans, one read.  -> y (T, V), M, S (V, K)."""
    tokens = (q, k, v, alpha, eta, theta)
    return _blocks(tokens, *_initial(CHUNKED, tokens, M0, S0), _sized(size), size)


def chunked_recurrent(
    q: Array, k: Array, v: Array, alpha: Array, eta: Array, theta: Array, size: int = 4, M0: Array = None,
    S0: Array = None,
) -> Result:  # fmt: skip
    """`recurrent` with gradients at M_c, c = t - t mod size counted from 0.  -> y (T, V), M, S (V, K)."""
    tokens = (q, k, v, alpha, eta, theta)
    return _steps(tokens, *_initial(CHUNKED, tokens, M0, S0), _sized(size))


def chunked_vjp(
    cotangents: dict[str, Array],
    q: Array, k: Array, v: Array, alpha: Array, eta: Array, theta: Array, size: int = 4, M0: Array = None,
    S0: Array = None,
) -> dict[str, Array]:  # fmt: skip
    """`vjp` of the chunked operator."""
    check_cotangents(CHUNKED, cotangents, {"q": q, "v": v})
    tokens = (q, k, v, alpha, eta, theta)
    return _vjp(cotangents, tokens, *_initial(CHUNKED, tokens, M0, S0), _sized(size), max(1, len(q)))


# --- both operators --------------------------------------------------------------------------------------------------


def scans(alpha: Array, eta: Array) -> tuple[Array, Array, Array]:
    """A, H, and G[n, m] = sum_r A[n, r] H[r, m] over the r from m, or 1, to n.  (b,), (b,) -> (b + 1, b + 1)"""
    A, H = segment_products(1 - alpha), segment_products(eta)
    return A, H, A[:, 1:] @ H[1:]


def outer(P: Array, w: Array, k: Array) -> Array:
    """sum_m P[n, m] w_m k_m^T.  (N, b), (b, V), (b, K) -> (N, V, K)"""
    return np.transpose(P[:, :, None] * w, (0, 2, 1)) @ k


def _steps(tokens: Tokens, M: Array, S: Array, size: int) -> Result:
    q, k, v, alpha, eta, theta = tokens
    rows, seen = [q[:0] @ M.T], M
    for t in range(len(q)):
        seen = M if t % size == 0 else seen
        E = v[t] - seen @ k[t]
        S = eta[t] * S + 2 * theta[t] * E[:, None] * k[t][None, :]
        M = (1 - alpha[t]) * M + S
        rows.append((M @ q[t])[None])
    return np.concatenate(rows), M, S


def _blocks(tokens: Tokens, M: Array, S: Array, size: int, block: int) -> Result:
    """`block` is a multiple of `size`, or all tokens."""
    rows = [tokens[0][:0] @ M.T]
    for start in starts(len(tokens[0]), block):
        q, k, v, alpha, eta, theta = _part(tokens, start, block)
        A, H, G = scans(alpha, eta)
        W = 2 * theta[:, None] * _lacks(k, v, theta, A, G, M, S, size)[0]
        inside = (q @ k.T) * G[1:, 1:]
        rows.append(A[1:, :1] * (q @ M.T) + G[1:, :1] * (q @ S.T) + inside @ W)
        M = A[-1, 0] * M + G[-1, 0] * S + outer(G[-1:, 1:], W, k)[0]
        S = H[-1, 0] * S + outer(H[-1:, 1:], W, k)[0]
    return np.concatenate(rows), M, S


def _lacks(
    k: Array, v: Array, theta: Array, A: Array, G: Array, M: Array, S: Array, size: int
) -> tuple[Array, Array, np.ndarray]:
    """E of a block, L with (I + L) E = v - what is left of M and S, and c, the tokens of it that the memory has seen at
    which a token's gradient is taken: L_nm = 2 theta_m G[c_n, m] k_n . k_m."""
    c = np.arange(len(k)) // size * size
    L = G[c][:, 1:] * (k @ k.T) * (2 * theta)
    return substituted(L, v - A[c][:, :1] * (k @ M.T) - G[c][:, :1] * (k @ S.T)), L, c


def _vjp(cotangents: dict[str, Array], tokens: Tokens, M: Array, S: Array, size: int, block: int) -> dict[str, Array]:
    """Up the blocks for the states before each, down with their cotangents."""
    before, rows = [], [[0 * x[:0]] for x in tokens]
    for start in starts(len(tokens[0]), block):
        before.append((start, M, S))
        _, M, S = _blocks(_part(tokens, start, block), M, S, size, block)
    dM, dS = cotangents["M"], cotangents["S"]
    for start, M, S in reversed(before):
        grads, dM, dS = _block_vjp(
            cotangents["y"][start : start + block], dM, dS, _part(tokens, start, block), M, S, size
        )
        for row, d in zip(rows, grads, strict=True):
            row.append(d)
    names = ("q", "k", "v", "alpha", "eta", "theta")
    return {n: np.concatenate(row[::-1]) for n, row in zip(names, rows, strict=True)} | {"M0": dM, "S0": dS}


def _block_vjp(
    dy: Array, dM: Array, dS: Array, tokens: Tokens, M0: Array, S0: Array, size: int
) -> tuple[Tokens, Array, Array]:
    """R and Q are the cotangents of memory and momentum after each token, D that of E. The last comes first: what is
    written by m is read by later tokens, and by the inner gradients of later chunks."""
    q, k, v, alpha, eta, theta = tokens
    A, H, G = scans(alpha, eta)
    E, L, c = _lacks(k, v, theta, A, G, M0, S0, size)
    twice = 2 * theta[:, None]
    W = twice * E
    M = A[:, :1, None] * M0 + G[:, :1, None] * S0 + outer(G[:, 1:], W, k)
    S = H[:, :1, None] * S0 + outer(H[:, 1:], W, k)

    read = ((k @ q.T) * G[1:, 1:].T) @ dy + G[-1, 1:, None] * (k @ dM.T) + H[-1, 1:, None] * (k @ dS.T)
    D = substituted(L.T[::-1, ::-1], (twice * read)[::-1])[::-1]
    R = A[-1][:, None, None] * dM + outer(A[1:].T, dy, q) - outer(A[c].T, D, k)
    Q = G[-1][:, None, None] * dM + H[-1][:, None, None] * dS + outer(G[1:].T, dy, q) - outer(G[c].T, D, k)
    dW = (Q[1:] @ k[:, :, None])[:, :, 0]
    grads = (
        (dy[:, None, :] @ M[1:])[:, 0],
        (W[:, None, :] @ Q[1:])[:, 0] - (D[:, None, :] @ M[c])[:, 0],
        D,
        -np.sum(R[1:] * M[:-1], axis=(1, 2)),
        np.sum(Q[1:] * S[:-1], axis=(1, 2)),
        2 * np.sum(E * dW, axis=1),
    )
    return grads, R[0], Q[0]


def _part(tokens: Tokens, start: int, block: int) -> Tokens:
    return tuple(x[start : start + block] for x in tokens)


def _sized(size: int) -> int:
    """Raises ValueError for chunks of no token."""
    if size < 1:
        raise ValueError(f"size is {size}; it must be at least 1")
    return size


def _initial(operator: Operator, tokens: Tokens, M0: Array, S0: Array) -> tuple[Array, Array]:
    names = ("q", "k", "v", "alpha", "eta", "theta", "M0", "S0")
    check_shapes(operator, dict(zip(names, (*tokens, M0, S0), strict=True)))
    zero = tokens[2][:0].T @ tokens[1][:0]
    return zero if M0 is None else M0, zero if S0 is None else S0


def _operator(
    name: str, summary: str, forms: tuple[Form, ...], gradients: Callable[..., dict[str, Array]],
    size: tuple[Input, ...] = (), laws: tuple[str, ...] = (), aligned: str = "",
) -> Operator:  # fmt: skip
    tokens = (
        Input("q", ("T", "K"), "token", "query"),
        Input("k", ("T", "K"), "token", "unit"),
        Input("v", ("T", "V"), "token", "value"),
        Input("alpha", ("T",), "token", "unit_gate"),
        Input("eta", ("T",), "token", "unit_gate"),
        Input("theta", ("T",), "token", "learning_rate"),
    )
    states = (
        Input("M0", ("V", "K"), "state", "state", carries="M"),
        Input("S0", ("V", "K"), "state", "state", carries="S"),
    )
    return Operator(
        name=name,
        summary=summary,
        source="survey, Titans; Behrouz et al. 2025 (9)-(14)",
        inputs=(*tokens, *size, *states),
        outputs=(Output("y", ("T", "V")), Output("M", ("V", "K"), "state"), Output("S", ("V", "K"), "state")),
        forms=forms,
        vjp=gradients,
        causal=True,
        laws=("linearity", "homogeneity", "euler", "relabelling", *laws),
        linear_in="v",
        degrees={"q": 1, "v": 1},
        exact=forms,
        exact_inputs=tuple(replace(x, domain="field") for x in (*tokens, *states)),
        aligned=aligned,
    )


LINEAR = _operator(
    "titans.linear",
    "S_t = eta_t S_{t-1} - 2 theta_t (M_{t-1} k_t - v_t) k_t^T; M_t = (1 - alpha_t) M_{t-1} + S_t; M_t q_t",
    (Form("chunkwise", chunkwise, chunked=True), Form("recurrent", recurrent)),
    vjp,
    laws=("left_padding",),
)
CHUNKED = _operator(
    "titans.chunked",
    "titans.linear with the gradients of each chunk of `size` tokens taken at the memory before the chunk",
    (Form("parallel", chunked_parallel), Form("scans", chunked_scans), Form("recurrent", chunked_recurrent)),
    chunked_vjp,
    size=(Input("size", (), "scalar", "count", default=4, differentiable=False),),
    aligned="size",
)
