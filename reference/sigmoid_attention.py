"""Sigmoid attention: every key is weighed by itself, and the weights of a row add up to nothing in particular.

Source: survey, section "Sigmoid Attention"; Ramapuram et al. 2024. One head. Of the survey's two equations one lacks
the scale and the other the bias; both belong. The bias is one number, which the paper starts at -log n for sequences
of n tokens, however many of them a row sees. A masked key has weight zero, not the sigmoid of a large negative number.
With no sum to divide by, parts of the keys simply add up: nothing is rescaled.

    letter  paper   shape               meaning
    q k v   Q K V   (T, K or V)         tokens of the call; K0 and V0 (P, K or V) come before them
    b       b       ()                  bias of all logits
    Kc Vc           (P + T, K or V)     the cache after the call
    Z A     L       (T, P + T)          logits and weights; token t sees the keys j <= P + t
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .cached_attention import caches
from .caches import visible
from .primitives import Array, either, masked, sigmoid, starts
from .softmax_attention import width_scale
from .spec import Form, Input, Operator, Output, check_cotangents, check_shapes


def parallel(
    q: Array, k: Array, v: Array, b: Array, scale: float | None = None, K0: Array = None, V0: Array = None
) -> tuple[Array, Array, Array]:
    """O = sigmoid(scale Q Kc^T + b) Vc over the keys until a token's own.  -> O (T, V), Kc, Vc."""

    def mix(Kc: Array, Vc: Array, seen: np.ndarray) -> Array:
        return weights(q, Kc, b, seen, scale) @ Vc

    return _attend(mix, q, k, v, b, K0, V0)


def blockwise(
    q: Array, k: Array, v: Array, b: Array, scale: float | None = None, K0: Array = None, V0: Array = None,
    chunk: int = 64,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """The same, block of keys by block of keys: O is their sum."""

    def mix(Kc: Array, Vc: Array, seen: np.ndarray) -> Array:
        O = q[:, :0] @ Vc[:0]
        for a in starts(len(Kc), chunk):
            c = slice(a, a + chunk)
            O = O + weights(q, Kc[c], b, seen[:, c], scale) @ Vc[c]
        return O

    return _attend(mix, q, k, v, b, K0, V0)


def decode(
    q: Array, k: Array, v: Array, b: Array, scale: float | None = None, K0: Array = None, V0: Array = None
) -> tuple[Array, Array, Array]:
    """Token by token: its key and value join the cache, and its query reads all of it."""

    def mix(Kc: Array, Vc: Array, seen: np.ndarray) -> Array:
        P, rows = len(Kc) - len(q), [q[:0, :0] @ Vc[:0]]
        for t in range(len(q)):
            Z = q[t : t + 1] @ Kc[: P + t + 1].T * width_scale(scale, q.shape[-1]) + b
            rows.append(sigmoid(Z) @ Vc[: P + t + 1])
        return np.concatenate(rows)

    return _attend(mix, q, k, v, b, K0, V0)


def vjp(
    cotangents: dict[str, Array],
    q: Array, k: Array, v: Array, b: Array, scale: float | None = None, K0: Array = None, V0: Array = None,
) -> dict[str, Array]:  # fmt: skip
    """Gradients of <O, dO> + <Kc, dKc> + <Vc, dVc>.

    dVc += A^T dO;  dZ = A (1 - A) * dO Vc^T;  dq = scale dZ Kc;  dKc += scale dZ^T q;  db = sum dZ."""
    check_cotangents(OPERATOR, cotangents, {"q": q, "k": k, "v": v, "b": b, "K0": K0, "V0": V0})
    Kc, Vc = caches(k, v, K0, V0)
    seen, P, G = visible(len(q), len(Kc)), len(Kc) - len(k), cotangents["O"]
    A, dZ = weights(q, Kc, b, seen, scale), logits_vjp(G @ Vc.T, q, Kc, b, seen, scale)
    dKc, dVc = dZ.T @ q * width_scale(scale, q.shape[-1]) + cotangents["Kc"], A.T @ G + cotangents["Vc"]
    grads = {"q": dZ @ Kc * width_scale(scale, q.shape[-1]), "k": dKc[P:], "v": dVc[P:], "b": np.sum(dZ)}
    return grads | {"K0": dKc[:P], "V0": dVc[:P]}


# --- the steps -------------------------------------------------------------------------------------------------------


def weights(q: Array, k: Array, b: Array, seen: np.ndarray, scale: float | None = None) -> Array:
    """A = sigmoid(scale Q K^T + b) for the keys seen, zero for others.  (T, K), (S, K), (), (T, S) -> (T, S)"""
    return masked(sigmoid(q @ k.T * width_scale(scale, q.shape[-1]) + b), seen, 0)


def logits_vjp(dA: Array, q: Array, k: Array, b: Array, seen: np.ndarray, scale: float | None = None) -> Array:
    """dZ = A (1 - A) * dA. Of 1 - A few digits are left where A is close to one, unlike of sigmoid(-Z).  -> (T, S)"""
    Z = q @ k.T * width_scale(scale, q.shape[-1]) + b
    A = sigmoid(Z)
    return masked(either(A * sigmoid(-Z), A * (1 - A)) * dA, seen, 0)


def _attend(
    mix: Callable[[Array, Array, np.ndarray], Array],
    q: Array, k: Array, v: Array, b: Array, K0: Array, V0: Array,
) -> tuple[Array, Array, Array]:  # fmt: skip
    check_shapes(OPERATOR, {"q": q, "k": k, "v": v, "b": b, "K0": K0, "V0": V0})
    Kc, Vc = caches(k, v, K0, V0)
    return mix(Kc, Vc, visible(len(q), len(Kc))), Kc, Vc


OPERATOR = Operator(
    name="sigmoid_attention",
    summary="O = sigmoid(scale Q Kc^T + b) Vc, causal, over a cache that grows by the tokens of the call",
    source="survey, Sigmoid Attention; Ramapuram et al. 2024",
    inputs=(
        Input("q", ("T", "K"), "token", "query"),
        Input("k", ("T", "K"), "token", "key"),
        Input("v", ("T", "V"), "token", "value"),
        Input("b", (), "parameter", "logit_bias"),
        Input("scale", (), "scalar", "scale", differentiable=False),
        Input("K0", ("P", "K"), "state", "key", carries="Kc"),
        Input("V0", ("P", "V"), "state", "value", carries="Vc"),
    ),
    outputs=(
        Output("O", ("T", "V")),
        Output("Kc", ("P+T", "K"), "state"),
        Output("Vc", ("P+T", "V"), "state"),
    ),
    forms=(Form("parallel", parallel), Form("blockwise", blockwise, chunked=True), Form("decode", decode)),
    vjp=vjp,
    causal=True,
    laws=("linearity", "homogeneity", "euler", "constant_value", "relabelling"),
    linear_in="v",
    degrees={"v": 1},
    cost="quadratic",
)
