"""Local softmax attention with Gaussian mixture attention of what is further away: under one normaliser, or by a gate.

Source: GMA paper, section 6, which proposes hybrids and prints no formula: both are readings. A token reads the last
`window` tokens, itself included, by softmax. In the first hybrid the window enters with a mass of one, and what is
before it with lam times its affinity: no token is read twice, lam = 0 is local softmax and window = 0 is GMA. (With a
mass of sum exp(s - max s) there would be no gradient where two logits tie.) In the second, local softmax and GMA of
all tokens are mixed.

    letter           shape       meaning
    q k v            (T, R)      routing vectors, whose dot products are the local logits too; values v (T, V)
    mu omega alpha   (K, R)      mixture of GMA, see gma.py; alpha (K,)
    lam              ()          weight of an affinity beside the mass of the window
    u g              (T,)        gate, g = sigmoid(u)
    P                (T, T)      weights in the window, whose rows sum to one; zero outside
    GQ GK At         (T, K)      responsibilities; At (T, T) = GQ GK^T before the window, else zero
    V1 U             (T, V + 1)  v with a column of ones; numerators, and their normaliser in the last column
    M                (K, V + 1)  memory of the tokens that the window has passed, sum of GK^T V1
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from . import gma, gma_mixing
from .gma_inputs import EPS, MIXTURE, SELF, V_MIN, check
from .linear_attention import quotient_vjp, with_mass
from .primitives import Array, either, masked, sigmoid, softmax, starts, stored
from .softmax_attention import width_scale
from .spec import Form, Input, Operator, Output, check_cotangents

# --- one normaliser --------------------------------------------------------------------------------------------------


def chunkwise(
    q: Array, k: Array, v: Array, mu: Array, omega: Array, alpha: Array, lam: Array, scale: float | None = None,
    eps: float = 1e-6, v_min: float = 0.0, window: int = 4, chunk: int = 64,
) -> Array:  # fmt: skip
    """O_i = (sum_{i-w<j<=i} P_ij v_j + lam sum_{j<=i-w} At_ij v_j) / (1 + lam sum_{j<=i-w} At_ij + eps).  -> (T, V).

    A chunk sees its own tokens and a window before them; tokens that are far from all of its rows are memory."""
    GQ, GK = _route(HYBRID, q, k, v, mu, omega, alpha, eps, v_min, window, lam=lam)
    V1 = with_mass(v)
    M = GK[:0].T @ V1[:0]
    rows = [GQ[:0] @ M]
    for c in _chunks(len(q), chunk, window):
        M = M + GK[c.passed].T @ V1[c.passed]
        At = masked(GQ[c.rows] @ GK[c.keys].T, c.far, 0)
        far = GQ[c.rows] @ M + At @ V1[c.keys]
        rows.append(_weights(q[c.rows], k[c.keys], c.near, scale) @ V1[c.keys] + lam * far)
    return _quotient(np.concatenate(rows), eps)


def parallel(
    q: Array, k: Array, v: Array, mu: Array, omega: Array, alpha: Array, lam: Array, scale: float | None = None,
    eps: float = 1e-6, v_min: float = 0.0, window: int = 4,
) -> Array:  # fmt: skip
    """The same with both matrices of weights written out.  -> (T, V)."""
    GQ, GK = _route(HYBRID, q, k, v, mu, omega, alpha, eps, v_min, window, lam=lam)
    P, At = _matrices(q, k, GQ, GK, scale, window)
    return _quotient((P + lam * At) @ with_mass(v), eps)


def recurrent(
    q: Array, k: Array, v: Array, mu: Array, omega: Array, alpha: Array, lam: Array, scale: float | None = None,
    eps: float = 1e-6, v_min: float = 0.0, window: int = 4,
) -> Array:  # fmt: skip
    """Token by token: a buffer of the last `window` tokens, and the memory of those that have left it.  -> (T, V).

    The memory lags behind. Sums over all tokens, less those of the buffer, would cancel."""
    GQ, GK = _route(HYBRID, q, k, v, mu, omega, alpha, eps, v_min, window, lam=lam)
    V1 = with_mass(v)
    M = GK[:0].T @ V1[:0]
    rows = [GQ[:0] @ M]
    for i in range(len(q)):
        row, leaves = slice(i, i + 1), i - window
        if leaves >= 0:
            M = M + GK[leaves][:, None] * V1[leaves][None, :]
        rows.append(_newest(q[row], k, V1, i, scale, window) + lam * (GQ[row] @ M))
    return _quotient(np.concatenate(rows), eps)


def vjp(
    cotangents: dict[str, Array],
    q: Array, k: Array, v: Array, mu: Array, omega: Array, alpha: Array, lam: Array, scale: float | None = None,
    eps: float = 1e-6, v_min: float = 0.0, window: int = 4,
) -> dict[str, Array]:  # fmt: skip
    """Gradients of <O, dO>: through the quotient to both matrices of weights, then through softmax and mixture."""
    check_cotangents(HYBRID, cotangents, {"q": q, "v": v})
    GQ, GK = _route(HYBRID, q, k, v, mu, omega, alpha, eps, v_min, window, lam=lam)
    P, At = _matrices(q, k, GQ, GK, scale, window)
    V1 = with_mass(v)
    far = At @ V1
    dU = quotient_vjp(cotangents["O"], P @ V1 + lam * far, eps)
    dA = dU @ V1.T
    dAt = masked(lam * dA, _bands(len(q), window)[1], 0)
    local = _weights_vjp(dA, P, q, k, scale)
    d = _route_vjp(local, dAt @ GK, dAt.T @ GQ, q, k, mu, omega, alpha, v_min)
    return d | {"v": ((P + lam * At).T @ dU)[:, :-1], "lam": np.sum(dU * far)}


# --- a gate ----------------------------------------------------------------------------------------------------------


def gated_chunkwise(
    q: Array, k: Array, v: Array, u: Array, mu: Array, omega: Array, alpha: Array, scale: float | None = None,
    eps: float = 1e-6, v_min: float = 0.0, window: int = 4, chunk: int = 64,
) -> Array:  # fmt: skip
    """O_i = g_i sum_{i-w<j<=i} P_ij v_j + (1 - g_i) GMA_i with g = sigmoid(u).  -> (T, V)."""
    GQ, GK = _route(GATED, q, k, v, mu, omega, alpha, eps, v_min, window, u=u)
    rows = [GQ[:0] @ (GK[:0].T @ v[:0])]
    for c in _chunks(len(q), chunk, window):
        rows.append(_weights(q[c.rows], k[c.keys], c.near, scale) @ v[c.keys])
    return _gated(u, np.concatenate(rows), gma_mixing.chunkwise(GQ, GK, v, eps, chunk=chunk)[0])


def gated_parallel(
    q: Array, k: Array, v: Array, u: Array, mu: Array, omega: Array, alpha: Array, scale: float | None = None,
    eps: float = 1e-6, v_min: float = 0.0, window: int = 4,
) -> Array:  # fmt: skip
    """The same with both matrices of weights written out.  -> (T, V)."""
    GQ, GK = _route(GATED, q, k, v, mu, omega, alpha, eps, v_min, window, u=u)
    P = _matrices(q, k, GQ, GK, scale, window)[0]
    return _gated(u, P @ v, gma_mixing.parallel(GQ, GK, v, eps)[0])


def gated_recurrent(
    q: Array, k: Array, v: Array, u: Array, mu: Array, omega: Array, alpha: Array, scale: float | None = None,
    eps: float = 1e-6, v_min: float = 0.0, window: int = 4,
) -> Array:  # fmt: skip
    """Token by token: a buffer of the last `window` tokens, and the memory of GMA.  -> (T, V)."""
    GQ, GK = _route(GATED, q, k, v, mu, omega, alpha, eps, v_min, window, u=u)
    rows = [GQ[:0] @ (GK[:0].T @ v[:0])]
    for i in range(len(q)):
        rows.append(_newest(q[i : i + 1], k, v, i, scale, window))
    return _gated(u, np.concatenate(rows), gma_mixing.recurrent(GQ, GK, v, eps)[0])


def gated_vjp(
    cotangents: dict[str, Array],
    q: Array, k: Array, v: Array, u: Array, mu: Array, omega: Array, alpha: Array, scale: float | None = None,
    eps: float = 1e-6, v_min: float = 0.0, window: int = 4,
) -> dict[str, Array]:  # fmt: skip
    """Gradients of <O, dO>: du = g (1 - g) <dO, O_local - O_GMA>, and what is left for either is g dO or (1 - g) dO."""
    check_cotangents(GATED, cotangents, {"q": q, "v": v})
    GQ, GK = _route(GATED, q, k, v, mu, omega, alpha, eps, v_min, window, u=u)
    P = _matrices(q, k, GQ, GK, scale, window)[0]
    g, rest = _gates(u)
    G = cotangents["O"]
    L, A = stored(P @ v), stored(gma_mixing.parallel(GQ, GK, v, eps)[0])
    slope = either(g * rest, rest * (1 - rest))  # what autograd makes of sigmoid(u), or of sigmoid(-u)
    du = slope[:, 0] * np.sum(G * (L - A), axis=1)
    local = _weights_vjp((g * G) @ v.T, P, q, k, scale)
    far = gma_mixing.chunkwise_vjp({"O": rest * G}, GQ, GK, v, eps)
    d = _route_vjp(local, far["GQ"], far["GK"], q, k, mu, omega, alpha, v_min)
    return d | {"v": P.T @ (g * G) + far["V"], "u": du}


# --- shared ----------------------------------------------------------------------------------------------------------


class _Chunk(NamedTuple):
    """Rows of a chunk; keys in the window of one of them or more; those that all windows have passed since the chunk
    before; and which of `keys` are in the window of which row, and which before it."""

    rows: slice
    keys: slice
    passed: slice
    near: np.ndarray
    far: np.ndarray


def _chunks(T: int, chunk: int, window: int) -> Iterator[_Chunk]:
    seen = 0
    for a in starts(T, chunk):
        b, first = min(a + chunk, T), max(0, a - window + 1)
        near, far = _bands(b, window, a, first)
        yield _Chunk(slice(a, b), slice(first, b), slice(seen, first), near, far)
        seen = first


def _bands(T: int, window: int, row: int = 0, key: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """i - w < j <= i and j <= i - w, for rows i from `row` and keys j from `key`, both up to T."""
    age = np.arange(row, T)[:, None] - np.arange(key, T)[None, :]
    return (age >= 0) & (age < window), age >= max(window, 0)


def _matrices(q: Array, k: Array, GQ: Array, GK: Array, scale: float | None, window: int) -> tuple[Array, Array]:
    """P and At.  -> (T, T), (T, T)."""
    near, far = _bands(len(q), window)
    return _weights(q, k, near, scale), masked(GQ @ GK.T, far, 0)


def _weights(q: Array, k: Array, near: np.ndarray, scale: float | None) -> Array:
    """softmax(scale Q K^T) of the keys in the window; zeros where there are none."""
    return softmax(masked(q @ k.T * width_scale(scale, q.shape[-1]), near, -np.inf))


def _weights_vjp(dP: Array, P: Array, q: Array, k: Array, scale: float | None) -> tuple[Array, Array]:
    """From the cotangent of the local weights to those of q and k."""
    dS = P * (dP - np.sum(P * dP, axis=1, keepdims=True)) * width_scale(scale, q.shape[-1])
    return dS @ k, dS.T @ q


def _newest(q: Array, k: Array, v: Array, i: int, scale: float | None, window: int) -> Array:
    """What the last `window` tokens up to i give to query i.  (1, R), (T, R), (T, V) -> (1, V)."""
    near = slice(max(0, i - window + 1), i + 1)
    return softmax(q @ k[near].T * width_scale(scale, q.shape[-1])) @ v[near]


def _quotient(U: Array, eps: float) -> Array:
    return U[:, :-1] / (U[:, -1:] + eps)


def _gates(u: Array) -> tuple[Array, Array]:
    """g and 1 - g, each of them a column."""
    g = sigmoid(u)
    return g[:, None], either(sigmoid(-u), 1 - g)[:, None]


def _gated(u: Array, L: Array, A: Array) -> Array:
    g, rest = _gates(u)
    return g * stored(L) + rest * stored(A)


def _route(
    operator: Operator,
    q: Array, k: Array, v: Array, mu: Array, omega: Array, alpha: Array, eps: float, v_min: float, window: int,
    **others: Array,
) -> tuple[Array, Array]:  # fmt: skip
    """GQ and GK of checked inputs."""
    check(operator, q=q, k=k, v=v, mu=mu, omega=omega, alpha=alpha, eps=eps, v_min=v_min, **others)
    if not isinstance(window, int) or isinstance(window, bool):
        raise TypeError(f"window is {window!r}; expected a whole number")
    if window < 0:
        raise ValueError(f"window is {window}; it must not be negative")
    gamma = gma.responsibilities(np.concatenate([q, k]), mu, omega, alpha, v_min)
    return gamma[: len(q)], gamma[len(q) :]


def _route_vjp(
    local: tuple[Array, Array], dGQ: Array, dGK: Array,
    q: Array, k: Array, mu: Array, omega: Array, alpha: Array, v_min: float,
) -> dict[str, Array]:  # fmt: skip
    """Gradients of queries and keys, which logits and responsibilities share, and of the mixture."""
    both = {"gamma": np.concatenate([dGQ, dGK])}
    d = gma.responsibilities_vjp(both, np.concatenate([q, k]), mu, omega, alpha, v_min)
    x = d.pop("x")
    return d | {"q": local[0] + x[: len(q)], "k": local[1] + x[len(q) :]}


SCALE = Input("scale", (), "scalar", "scale", differentiable=False)
WINDOW = Input("window", (), "scalar", "count", default=4, differentiable=False)
LAWS = ("linearity", "constant_value", "hull", "row_sums", "relabelling")

HYBRID = Operator(
    name="gma.hybrid",
    summary="O = (P V + lam At V) / (P 1 + lam At 1 + eps): softmax P in a window, affinities At of GMA before it",
    source="GMA section 6, which prints no formula; one normaliser",
    inputs=(*SELF, *MIXTURE, Input("lam", (), "parameter", "mass"), SCALE, EPS, V_MIN, WINDOW),
    outputs=(Output("O", ("T", "V")),),
    forms=(Form("chunkwise", chunkwise, chunked=True), Form("parallel", parallel), Form("recurrent", recurrent)),
    vjp=vjp,
    causal=True,
    laws=LAWS,
    linear_in="v",
)

GATED = Operator(
    name="gma.hybrid_gated",
    summary="O = g P V + (1 - g) GMA: softmax P in a window, causal GMA of all tokens, gate g = sigmoid(u)",
    source="GMA section 6, which prints no formula; a gate",
    inputs=(*SELF, Input("u", ("T",), "token", "gate"), *MIXTURE, SCALE, EPS, V_MIN, WINDOW),
    outputs=(Output("O", ("T", "V")),),
    forms=(
        Form("chunkwise", gated_chunkwise, chunked=True),
        Form("parallel", gated_parallel),
        Form("recurrent", gated_recurrent),
    ),
    vjp=gated_vjp,
    causal=True,
    laws=LAWS,
    linear_in="v",
)
