"""Interleaved head attention: pseudo-heads, each a mixture of all heads, become tokens of one longer sequence.

Source: survey, section "Interleaved Head Attention"; Duvvuri et al. 2026. The survey prints mixtures without the index
of the head that they belong to, and an average "per head" that would need it; read here as J mixtures for each of N
heads, pseudo-head p of token t at place t J + p. Two masks are possible: a query sees all pseudo-heads of the tokens up
to its own (`iha`), or the places up to its own (`iha.index_causal`). Rotations by the token's position commute with
mixing, so they are the caller's.

    letter    paper      shape                meaning
    q k v                (T, N, K) ..         of each token and head; v (T, N, V)
    aq ak av  mix        (N, J, N)            weights of the heads in pseudo-head p of head h
    r         1 / P      (N, J)               weights of the pseudo-outputs in the output of head h
    Q K V                (T J, K) ..          interleaved pseudo-heads of one head
    K0 V0     -          (P, N, K) ..         keys and values of the P tokens before, not mixed; Kc and Vc have P + T
"""

from __future__ import annotations

from functools import partial

import numpy as np

from .caches import appended, paired, visible
from .latent_attention import swapped
from .primitives import Array, masked, softmax, stored
from .spec import Form, Input, Operator, Output, check_cotangents, check_shapes
from .tucker import attention, attention_vjp, flat


def interleaved(
    q: Array, k: Array, v: Array, aq: Array, ak: Array, av: Array, r: Array, scale: float | None = None,
    K0: Array = None, V0: Array = None, index: bool = False,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """O_h = sum_p r_hp softmax(scale Q K^T) V at the places of p, Q, K and V mixed for head h.  -> O, Kc, Vc.  (12.1)

    `index`: a place sees the places up to its own."""
    scale, (T, N, V), J = _checked(q, k, v, aq, ak, av, r, scale, K0, V0), v.shape, r.shape[1]
    Kc, Vc = appended(K0, k), appended(V0, v)
    places = attention(mixed(aq, q), mixed(ak, Kc), mixed(av, Vc), scale, _places(T, len(Kc), J, index))
    O = (r[:, None] @ _by_kind(places, J)).reshape(N, T, V)
    return np.transpose(O, (1, 0, 2)), Kc, Vc


def pairwise(
    q: Array, k: Array, v: Array, aq: Array, ak: Array, av: Array, r: Array, scale: float | None = None,
    K0: Array = None, V0: Array = None, index: bool = False,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """A map of tokens for each pair of pseudo-heads, J^2 of them; those of one query share a normaliser."""
    scale, J = _checked(q, k, v, aq, ak, av, r, scale, K0, V0), r.shape[1]
    Kc, Vc = appended(K0, k), appended(V0, v)
    Q, K, V = ([mixed(a[:, p : p + 1], x) for p in range(J)] for a, x in ((aq, q), (ak, Kc), (av, Vc)))
    T, S, O = len(q), len(Kc), []
    until, before = visible(T, S), np.tril(np.ones((T, S), dtype=bool), S - T - 1)
    for p in range(J):
        keep = [before if index and m > p else until for m in range(J)]
        maps = [masked(Q[p] @ swapped(K[m]) * scale, keep[m], -np.inf) for m in range(J)]
        A = softmax(np.concatenate(maps, axis=2))
        O.append(sum(A[:, :, m * S : (m + 1) * S] @ V[m] for m in range(J)) * r[:, p][:, None, None])
    return np.transpose(np.sum(np.stack(O), axis=0), (1, 0, 2)), Kc, Vc


def decode(
    q: Array, k: Array, v: Array, aq: Array, ak: Array, av: Array, r: Array, scale: float | None = None,
    K0: Array = None, V0: Array = None, index: bool = False,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Token by token over keys and values that are never mixed: the maps of all pairs of heads are mixed instead."""
    scale, J = _checked(q, k, v, aq, ak, av, r, scale, K0, V0), r.shape[1]
    Kc, Vc, (T, N, _), rows = appended(K0, k), appended(V0, v), q.shape, [v[:0]]
    keys, values = np.transpose(Kc, (1, 2, 0)), np.transpose(Vc, (1, 0, 2))
    for t in range(T):
        S = len(Kc) - T + t + 1
        maps = aq[:, None] @ (q[t] @ keys[:, :, :S])  # of J queries of a head with the keys of all; (N, N, J, S)
        logits = np.transpose((ak @ maps.reshape(N, N, J * S)).reshape(N, J, J, S), (0, 2, 3, 1)).reshape(N, J, S * J)
        A = softmax(masked(logits * scale, _places(1, S, J, index), -np.inf))
        W = (r[:, None] @ A).reshape(N, S, J) @ av  # what a head has of each token and head; (N, S, N)
        rows.append(np.sum(np.transpose(W, (2, 0, 1)) @ values[:, :S], axis=0)[None])
    return np.concatenate(rows), Kc, Vc


def vjp(
    cotangents: dict[str, Array],
    q: Array, k: Array, v: Array, aq: Array, ak: Array, av: Array, r: Array, scale: float | None = None,
    K0: Array = None, V0: Array = None, index: bool = False,
) -> dict[str, Array]:  # fmt: skip
    """Gradients of <O, dO> + <Kc, dKc> + <Vc, dVc>: those of the pseudo-heads, mixed back by the transposed weights."""
    check_cotangents(OPERATOR, cotangents, {"q": q, "k": k, "v": v, "K0": K0, "V0": V0})
    scale, (T, N, V), J = _checked(q, k, v, aq, ak, av, r, scale, K0, V0), v.shape, r.shape[1]
    Kc, Vc, G = appended(K0, k), appended(V0, v), np.transpose(cotangents["O"], (1, 0, 2))
    dO = (G[:, :, None] * r[:, None, :, None]).reshape(N, T * J, V)
    *grads, O = attention_vjp(dO, mixed(aq, q), mixed(ak, Kc), mixed(av, Vc), scale, _places(T, len(Kc), J, index))
    dr = (_by_kind(stored(O), J) @ G.reshape(N, T * V, 1)).reshape(N, J)
    back, weights, x = [_by_kind(d, J) for d in grads], (aq, ak, av), (q, Kc, Vc)
    daq, dak, dav = (d @ _rows(y).T for d, y in zip(back, x, strict=True))
    dq, dK, dV = (_tokens(flat(a).T @ flat(d), y.shape) for a, d, y in zip(weights, back, x, strict=True))
    dK, dV, P = dK + cotangents["Kc"], dV + cotangents["Vc"], len(Kc) - T
    grads = {"q": dq, "k": dK[P:], "v": dV[P:], "aq": daq, "ak": dak, "av": dav, "r": dr}
    return grads | {"K0": dK[:P], "V0": dV[:P]}


def mixed(a: Array, x: Array) -> Array:
    """sum_n a_pn x_tn at place t J + p, for one head or many.  (.., J, N), (T, N, K) -> (.., T J, K)."""
    (*H, J, _), (T, _, K), h = a.shape, x.shape, a.ndim - 2
    y = (a @ _rows(x)).reshape(*H, J, T, K)
    return np.transpose(y, (*range(h), h + 1, h, h + 2)).reshape(*H, T * J, K)


# --- places and rearrangements ---------------------------------------------------------------------------------------


def _places(T: int, S: int, J: int, index: bool) -> np.ndarray:
    """Which of S J places the last T J see."""
    return visible(T * J, S * J) if index else np.repeat(np.repeat(visible(T, S), J, axis=0), J, axis=1)


def _rows(x: Array) -> Array:
    """(T, N, K) -> (N, T K)."""
    return np.transpose(x, (1, 0, 2)).reshape(x.shape[1], x.shape[0] * x.shape[2])


def _tokens(rows: Array, shape: tuple[int, ...]) -> Array:
    """(N, T K) -> (T, N, K)."""
    T, N, K = shape
    return np.transpose(rows.reshape(N, T, K), (1, 0, 2))


def _by_kind(x: Array, J: int) -> Array:
    """Places to pseudo-heads.  (N, T J, V) -> (N, J, T V)."""
    N, n, V = x.shape
    return np.transpose(x.reshape(N, n // J, J, V), (0, 2, 1, 3)).reshape(N, J, n // J * V)


def _checked(
    q: Array, k: Array, v: Array, aq: Array, ak: Array, av: Array, r: Array, scale: float | None, K0: Array, V0: Array
) -> float:
    arrays = {"q": q, "k": k, "v": v, "aq": aq, "ak": ak, "av": av, "r": r, "K0": K0, "V0": V0}
    check_shapes(OPERATOR, arrays)
    paired(K0=K0, V0=V0)
    return q.shape[2] ** -0.5 if scale is None else scale


def _operator(name: str, index: bool, sees: str) -> Operator:
    forms = {"interleaved": interleaved, "pairwise": pairwise, "decode": decode}
    return Operator(
        name=name,
        summary=f"O_h = sum_p r_hp softmax(scale Q K^T) V, J pseudo-heads at places t J + p; {sees}",
        source="survey, Interleaved Head Attention, read with J pseudo-heads a head; Duvvuri et al. 2026",
        inputs=(
            Input("q", ("T", "N", "K"), "token", "query"),
            Input("k", ("T", "N", "K"), "token", "key"),
            Input("v", ("T", "N", "V"), "token", "value"),
            *(Input(a, ("N", "J", "N"), "parameter", "weight") for a in ("aq", "ak", "av")),
            Input("r", ("N", "J"), "parameter", "weight"),
            Input("scale", (), "scalar", "scale", differentiable=False),
            Input("K0", ("P", "N", "K"), "state", "key", carries="Kc"),
            Input("V0", ("P", "N", "V"), "state", "value", carries="Vc"),
        ),
        outputs=(
            Output("O", ("T", "N", "V")),
            Output("Kc", ("P+T", "N", "K"), "state"),
            Output("Vc", ("P+T", "N", "V"), "state"),
        ),
        forms=tuple(Form(n, partial(f, index=True) if index else f) for n, f in forms.items()),
        vjp=partial(vjp, index=True) if index else vjp,
        causal=True,
        laws=("linearity", "constant_value", "homogeneity", "euler"),
        linear_in="v",
        cost="quadratic",
        degrees={"v": 1},
    )


OPERATOR = _operator("iha", False, "of tokens up to its own")
INDEX_CAUSAL = _operator("iha.index_causal", True, "up to its own")
