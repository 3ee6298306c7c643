"""Causal softmax attention over a cache of keys and values: multi-head, grouped-query and multi-query attention.

Source: survey, section "Standard Attention"; Vaswani et al. 2017 (1); Ainslie et al. 2023, section 2.2 (groups);
Milakov and Gimelshein 2018, algorithm 3 (blocks). All heads of one sequence: head h reads the keys of group h // M.
With one head a group it is multi-head attention, with one group multi-query attention. Token t of a call sees the P
keys of the cache and those of the call until its own. The survey prints sqrt(d_in) in one equation and d_in in the
other; it is the square root of the width K of one head.

    letter  paper   shape                 meaning
    q       Q       (T, G, M, K)          queries of M heads in each of G groups
    k v     K V     (T, G, K or V)        keys and values of the call; K0 and V0 (P, G, K or V) come before them
    Kc Vc           (P + T, G, K or V)    the cache after the call
    A       P       (T M, P + T)          attention weights of a group, the M rows of a token one after the other
    lse             (rows, 1)             logarithm of the sum of exponentials of a row
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .caches import appended, paired, visible
from .primitives import Array, either, masked, softmax, starts, stored
from .softmax_attention import width_scale
from .spec import Form, Input, Operator, Output, check_cotangents, check_shapes


def parallel(
    q: Array, k: Array, v: Array, scale: float | None = None, K0: Array = None, V0: Array = None
) -> tuple[Array, Array, Array]:
    """O = softmax(scale Q Kc^T) Vc over the keys until a token's own.  -> O (T, G, M, V), Kc, Vc.  (1)"""

    def mix(Q: Array, K: Array, V: Array, seen: np.ndarray) -> Array:
        return weights(Q, K, seen, scale) @ V

    return _attend(mix, q, k, v, K0, V0)


def blockwise(
    q: Array, k: Array, v: Array, scale: float | None = None, K0: Array = None, V0: Array = None, chunk: int = 64
) -> tuple[Array, Array, Array]:
    """Online softmax over blocks of keys: when the running maximum m moves, mass l and unnormalised U are rescaled.
    Every row sees the first key, so m is finite after the first block."""

    def mix(Q: Array, K: Array, V: Array, seen: np.ndarray) -> Array:
        l, U = np.sum(Q[:, :0], axis=1, keepdims=True), Q[:, :0] @ V[:0]
        m = l - np.inf
        for a in starts(len(K), chunk):
            c = slice(a, a + chunk)
            s = masked(Q @ K[c].T * width_scale(scale, Q.shape[-1]), seen[:, c], -np.inf)
            top = np.maximum(m, np.max(s, axis=1, keepdims=True))
            e, r = np.exp(s - top), np.exp(m - top)
            l, U, m = r * l + np.sum(e, axis=1, keepdims=True), r * U + e @ V[c], top
        return U / l

    return _attend(mix, q, k, v, K0, V0)


def merged(
    q: Array, k: Array, v: Array, scale: float | None = None, K0: Array = None, V0: Array = None
) -> tuple[Array, Array, Array]:
    """The cache and the tokens of the call attended to apart, and merged by the masses of their rows."""
    P = 0 if K0 is None else len(K0)

    def mix(Q: Array, K: Array, V: Array, seen: np.ndarray) -> Array:
        parts = [c for c in (slice(0, P), slice(P, None)) if len(K[c])]
        rows = [part(Q, K[c], V[c], seen[:, c], scale) for c in parts]
        return merge(*zip(*rows, strict=True)) if rows else Q[:, :0] @ V

    return _attend(mix, q, k, v, K0, V0)


def decode(
    q: Array, k: Array, v: Array, scale: float | None = None, K0: Array = None, V0: Array = None
) -> tuple[Array, Array, Array]:
    """Token by token: its key and value join the cache, and its queries attend to all of it."""
    check_shapes(OPERATOR, {"q": q, "k": k, "v": v, "K0": K0, "V0": V0})
    Kc, Vc = caches(k, v, K0, V0)
    P = len(Kc) - len(k)
    rows = [q[:0, :, :, :1] * v[:0, :, None]]
    for n, Q in enumerate(q, P + 1):
        O = [softmax(Q[g] @ Kc[:n, g].T * width_scale(scale, q.shape[-1])) @ Vc[:n, g] for g in range(len(Q))]
        rows.append(np.stack(O)[None])
    return np.concatenate(rows), Kc, Vc


def vjp(
    cotangents: dict[str, Array],
    q: Array, k: Array, v: Array, scale: float | None = None, K0: Array = None, V0: Array = None,
) -> dict[str, Array]:  # fmt: skip
    """Gradients of <O, dO> + <Kc, dKc> + <Vc, dVc>, group by group; keys and values add up their M heads.

    dVc += A^T dO;  dS = A * (dO Vc^T - rowsum(dO * O));  dq = scale dS Kc;  dKc += scale dS^T q."""
    check_cotangents(OPERATOR, cotangents, {"q": q, "k": k, "v": v, "K0": K0, "V0": V0})
    Kc, Vc = caches(k, v, K0, V0)
    seen, P = seen_by_rows(q, Kc), len(Kc) - len(k)
    dq, dK, dV = [], [], []
    for g in range(q.shape[1]):
        Q, K, V, G = _rows(q[:, g]), Kc[:, g], Vc[:, g], _rows(cotangents["O"][:, g])
        A = weights(Q, K, seen, scale)
        dA = G @ V.T
        delta = either(np.sum(G * stored(A @ V), axis=1, keepdims=True), np.sum(A * dA, axis=1, keepdims=True))
        dS = A * (dA - delta)
        dq.append((dS @ K * width_scale(scale, q.shape[-1])).reshape(*q[:, g].shape))
        dK.append(dS.T @ Q * width_scale(scale, q.shape[-1]) + cotangents["Kc"][:, g])
        dV.append(A.T @ G + cotangents["Vc"][:, g])
    dKc, dVc = np.stack(dK, axis=1), np.stack(dV, axis=1)
    return {"q": np.stack(dq, axis=1), "k": dKc[P:], "v": dVc[P:], "K0": dKc[:P], "V0": dVc[:P]}


# --- the steps -------------------------------------------------------------------------------------------------------


def weights(Q: Array, K: Array, seen: np.ndarray, scale: float | None = None) -> Array:
    """A = softmax(scale Q K^T) over the keys seen.  (rows, K), (S, K), (rows, S) -> (rows, S)"""
    return softmax(masked(Q @ K.T * width_scale(scale, Q.shape[-1]), seen, -np.inf))


def part(Q: Array, K: Array, V: Array, seen: np.ndarray, scale: float | None = None) -> tuple[Array, Array]:
    """What rows read from some of their keys, one at least, and lse, which says how much those count."""
    s = masked(Q @ K.T * width_scale(scale, Q.shape[-1]), seen, -np.inf)
    top = np.max(s, axis=1, keepdims=True)
    e = np.exp(s - top)
    l = np.sum(e, axis=1, keepdims=True)
    return e / l @ V, top + np.log(l)


def merge(O: Sequence[Array], lse: Sequence[Array]) -> Array:
    """Rows of disjoint sets of keys as rows of all of them: sum_i softmax(lse)_i O_i."""
    share = softmax(np.concatenate(lse, axis=1))
    return sum((share[:, i : i + 1] * O[i] for i in range(1, len(O))), start=share[:, :1] * O[0])


def caches(k: Array, v: Array, K0: Array = None, V0: Array = None) -> tuple[Array, Array]:
    """Kc and Vc: what was there, then the tokens of the call. Raises ValueError for keys without values, or the
    reverse."""
    paired(K0=K0, V0=V0)
    return appended(K0, k), appended(V0, v)


def seen_by_rows(q: Array, Kc: Array) -> np.ndarray:
    """Which keys the rows of a group see: those of the cache, and those of the call until their own.  (T M, P + T)"""
    return np.repeat(visible(len(q), len(Kc)), q.shape[2], axis=0)


def _attend(
    mix: Callable[[Array, Array, Array, np.ndarray], Array], q: Array, k: Array, v: Array, K0: Array, V0: Array
) -> tuple[Array, Array, Array]:
    """`mix` for each group, from its queries (T M, K), keys (P + T, K), values, and which keys each row sees."""
    check_shapes(OPERATOR, {"q": q, "k": k, "v": v, "K0": K0, "V0": V0})
    Kc, Vc = caches(k, v, K0, V0)
    seen, (T, G, M, _) = seen_by_rows(q, Kc), q.shape
    O = [mix(_rows(q[:, g]), Kc[:, g], Vc[:, g], seen).reshape(T, M, v.shape[2]) for g in range(G)]
    return np.stack(O, axis=1), Kc, Vc


def _rows(x: Array) -> Array:
    """(T, M, K) -> (T M, K)"""
    return x.reshape(x.shape[0] * x.shape[1], x.shape[2])


OPERATOR = Operator(
    name="softmax_attention.cached",
    summary="O = softmax(scale Q Kc^T) Vc, causal, M heads a group, over a growing cache",
    source="survey, Standard Attention; Vaswani et al. 2017 (1); Ainslie et al. 2023",
    inputs=(
        Input("q", ("T", "G", "M", "K"), "token", "query"),
        Input("k", ("T", "G", "K"), "token", "key"),
        Input("v", ("T", "G", "V"), "token", "value"),
        Input("scale", (), "scalar", "scale", differentiable=False),
        Input("K0", ("P", "G", "K"), "state", "key", carries="Kc"),
        Input("V0", ("P", "G", "V"), "state", "value", carries="Vc"),
    ),
    outputs=(
        Output("O", ("T", "G", "M", "V")),
        Output("Kc", ("P+T", "G", "K"), "state"),
        Output("Vc", ("P+T", "G", "V"), "state"),
    ),
    forms=(
        Form("parallel", parallel),
        Form("blockwise", blockwise, chunked=True),
        Form("merged", merged),
        Form("decode", decode),
    ),
    vjp=vjp,
    causal=True,
    laws=("linearity", "homogeneity", "euler", "constant_value", "row_sums", "relabelling"),
    linear_in="v",
    degrees={"v": 1},
    cost="quadratic",
)
