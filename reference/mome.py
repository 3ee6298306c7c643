"""MoME, a mixture of memory experts: X retentions of the same tokens with decays of their own, mixed by a router.

Source: MixFormer paper (17), (18), section 4.4. The paper does not say how the memories MS_i move; the readings are the
operators of this file. This file holds the router, the forms, their gradients and the operators; mome_mixing.py the
algebra that mixes tokens; mome_routers.py the readings of the router.

    operator          S^j_n                                   y_n                     E_n
    mome              a_j S^j_{n-1} + k_n^T v_n               q_n sum_j E_nj S^j_n    softmax((k_n * v_n) W)
    mome.write_mix    a_j S^j_{n-1} + E_nj k_n^T v_n          q_n sum_j S^j_n         softmax(l_n)
    mome.top_k        a_j S^j_{n-1} + E_nj k_n^T v_n          q_n sum_j E_nj S^j_n    softmax of the top largest l_n
    mome.top_k_hold   the same if j is selected, else S^j_{n-1}                       the same

    letter  paper     shape       meaning
    q k v   Q K V     (T, K)      queries and keys, through the feature map; values v (T, V). In `mome` K = V = D
    W       w_g       (D, X)      router, reading R3
    l       -         (T, X)      router logits; of equal ones the first is the largest
    E       E_i       (T, X)      weights of the experts                                                        (18)
    a       omega G   (X,)        decays of the experts; zero is a legal one
    top     -         ()          how many experts are selected
    S0 S    MS        (X, K, V)   states before the first and after the last token

If the decays are equal, `mome` and `mome.write_mix` are one retention: the weights sum to one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from . import mome_mixing as mixing
from .mome_routers import R3, R3_vjp, selected, softmax_vjp, top_weights
from .primitives import Array, softmax
from .spec import Form, Input, Operator, Output, check_cotangents, check_shapes

Cotangents = Mapping[str, Array]
Gradients = dict[str, Array]
Weights = tuple[Array, Array, np.ndarray]  # to read with, to write with; who decays

# --- weights ---------------------------------------------------------------------------------------------------------


def read_mix(E: Array) -> Weights:
    """All is written to every expert, E mixes what is read."""
    ones = np.ones(E.shape, np.int8)
    return E, ones, ones


def write_mix(E: Array) -> Weights:
    """E mixes what is written, every expert is read."""
    ones = np.ones(E.shape, np.int8)
    return ones, E, ones


def both_mix(E: Array) -> Weights:
    """E mixes both; every expert decays with every token."""
    return E, E, np.ones(E.shape, np.int8)


def both_mix_hold(E: Array, chosen: np.ndarray) -> Weights:
    """E mixes both; only the chosen experts decay."""
    return E, E, chosen.astype(np.int8)


# --- read-mix --------------------------------------------------------------------------------------------------------


def chunkwise(
    q: Array, k: Array, v: Array, W: Array, a: Array, S0: Array = None, chunk: int = 64
) -> tuple[Array, Array]:
    """y_n = q_n sum_j E_nj S^j_n, one mask for all experts inside chunks, the states across them.  -> Y (T, D), S."""
    return mixing.chunkwise(q, k, v, *read_mix(_routed(q, k, v, W, a, S0)), a, S0, chunk)


def parallel(q: Array, k: Array, v: Array, W: Array, a: Array, S0: Array = None) -> tuple[Array, Array]:
    """Y = ((Q K^T) * D) V with D_nm = sum_j E_nj a_j^(n-m)."""
    return mixing.parallel(q, k, v, *read_mix(_routed(q, k, v, W, a, S0)), a, S0)


def recurrent(q: Array, k: Array, v: Array, W: Array, a: Array, S0: Array = None) -> tuple[Array, Array]:
    """S^j_n = a_j S^j_{n-1} + k_n^T v_n;  y_n = q_n sum_j E_nj S^j_n with E_n = softmax((k_n * v_n) W).  (17) (18)"""
    return mixing.recurrent(q, k, v, *read_mix(_routed(q, k, v, W, a, S0)), a, S0)


def vjp(
    cotangents: Cotangents, q: Array, k: Array, v: Array, W: Array, a: Array, S0: Array = None, chunk: int = 64
) -> Gradients:
    """Gradients of <Y, dY> + <S, dS>. Keys and values have a second way to the loss, through the router."""
    E = _routed(q, k, v, W, a, S0)
    check_cotangents(OPERATOR, cotangents, {"q": q, "W": W})
    d = mixing.vjp(cotangents, q, k, v, *read_mix(E), a, S0, chunk)
    dk, dv, dW = R3_vjp(softmax_vjp(d["r"], E), k, v, W)
    return {"q": d["q"], "k": d["k"] + dk, "v": d["v"] + dv, "W": dW, "a": d["a"], "S0": d["S0"]}


def _routed(q: Array, k: Array, v: Array, W: Array, a: Array, S0: Array) -> Array:
    """E, of inputs whose shapes agree."""
    check_shapes(OPERATOR, {"q": q, "k": k, "v": v, "W": W, "a": a, "S0": S0})
    return softmax(R3(k, v, W))


# --- write-mix -------------------------------------------------------------------------------------------------------


def write_mix_chunkwise(
    q: Array, k: Array, v: Array, l: Array, a: Array, S0: Array = None, chunk: int = 64
) -> tuple[Array, Array]:
    """y_n = q_n sum_j S^j_n, one mask for all experts inside chunks, the states across them.  -> Y (T, V), S."""
    return mixing.chunkwise(q, k, v, *write_mix(softmax(l)), a, S0, chunk)


def write_mix_parallel(q: Array, k: Array, v: Array, l: Array, a: Array, S0: Array = None) -> tuple[Array, Array]:
    """Y = ((Q K^T) * D) V with D_nm = sum_j a_j^(n-m) E_mj."""
    return mixing.parallel(q, k, v, *write_mix(softmax(l)), a, S0)


def write_mix_recurrent(q: Array, k: Array, v: Array, l: Array, a: Array, S0: Array = None) -> tuple[Array, Array]:
    """S^j_n = a_j S^j_{n-1} + E_nj k_n^T v_n;  y_n = q_n sum_j S^j_n."""
    return mixing.recurrent(q, k, v, *write_mix(softmax(l)), a, S0)


def write_mix_vjp(
    cotangents: Cotangents, q: Array, k: Array, v: Array, l: Array, a: Array, S0: Array = None, chunk: int = 64
) -> Gradients:
    """Gradients of <Y, dY> + <S, dS>."""
    check_cotangents(WRITE_MIX, cotangents, {"q": q, "v": v, "l": l})
    E = softmax(l)
    d = mixing.vjp(cotangents, q, k, v, *write_mix(E), a, S0, chunk)
    return {name: d[name] for name in ("q", "k", "v", "a", "S0")} | {"l": softmax_vjp(d["w"], E)}


# --- the top k, and the others decay ---------------------------------------------------------------------------------


def top_k_chunkwise(
    q: Array, k: Array, v: Array, l: Array, a: Array, top: int = 2, S0: Array = None, chunk: int = 64
) -> tuple[Array, Array]:
    """y_n = q_n sum_j E_nj S^j_n, one mask for all experts inside chunks, the states across them.  -> Y (T, V), S."""
    return mixing.chunkwise(q, k, v, *both_mix(top_weights(l, top)), a, S0, chunk)


def top_k_parallel(
    q: Array, k: Array, v: Array, l: Array, a: Array, top: int = 2, S0: Array = None
) -> tuple[Array, Array]:
    """Y = ((Q K^T) * D) V with D_nm = sum_j E_nj a_j^(n-m) E_mj."""
    return mixing.parallel(q, k, v, *both_mix(top_weights(l, top)), a, S0)


def top_k_recurrent(
    q: Array, k: Array, v: Array, l: Array, a: Array, top: int = 2, S0: Array = None
) -> tuple[Array, Array]:
    """S^j_n = a_j S^j_{n-1} + E_nj k_n^T v_n;  y_n = q_n sum_j E_nj S^j_n."""
    return mixing.recurrent(q, k, v, *both_mix(top_weights(l, top)), a, S0)


def top_k_vjp(
    cotangents: Cotangents, q: Array, k: Array, v: Array, l: Array, a: Array, top: int = 2, S0: Array = None,
    chunk: int = 64,
) -> Gradients:  # fmt: skip
    """Gradients of <Y, dY> + <S, dS> while the selection stays as it is: where it changes, Y jumps."""
    check_cotangents(TOP_K, cotangents, {"q": q, "v": v, "l": l})
    E = top_weights(l, top)
    d = mixing.vjp(cotangents, q, k, v, *both_mix(E), a, S0, chunk)
    return {name: d[name] for name in ("q", "k", "v", "a", "S0")} | {"l": softmax_vjp(d["r"] + d["w"], E)}


# --- the top k, and the others are held ------------------------------------------------------------------------------


def top_k_hold_chunkwise(
    q: Array, k: Array, v: Array, l: Array, a: Array, top: int = 2, S0: Array = None, chunk: int = 64
) -> tuple[Array, Array]:
    """y_n = q_n sum_j E_nj S^j_n, one mask for all experts inside chunks, the states across them.  -> Y (T, V), S."""
    return mixing.chunkwise(q, k, v, *both_mix_hold(top_weights(l, top), selected(l, top)), a, S0, chunk)


def top_k_hold_parallel(
    q: Array, k: Array, v: Array, l: Array, a: Array, top: int = 2, S0: Array = None
) -> tuple[Array, Array]:
    """Y = ((Q K^T) * D) V with D_nm = sum_j E_nj a_j^(c_nj - c_mj) E_mj, c_nj how often j was selected until n."""
    return mixing.parallel(q, k, v, *both_mix_hold(top_weights(l, top), selected(l, top)), a, S0)


def top_k_hold_recurrent(
    q: Array, k: Array, v: Array, l: Array, a: Array, top: int = 2, S0: Array = None
) -> tuple[Array, Array]:
    """S^j_n = a_j S^j_{n-1} + E_nj k_n^T v_n if j is selected, else S^j_{n-1};  y_n = q_n sum_j E_nj S^j_n."""
    return mixing.recurrent(q, k, v, *both_mix_hold(top_weights(l, top), selected(l, top)), a, S0)


def top_k_hold_vjp(
    cotangents: Cotangents, q: Array, k: Array, v: Array, l: Array, a: Array, top: int = 2, S0: Array = None,
    chunk: int = 64,
) -> Gradients:  # fmt: skip
    """Gradients of <Y, dY> + <S, dS> while the selection stays as it is: where it changes, Y jumps."""
    check_cotangents(TOP_K_HOLD, cotangents, {"q": q, "v": v, "l": l})
    E = top_weights(l, top)
    d = mixing.vjp(cotangents, q, k, v, *both_mix_hold(E, selected(l, top)), a, S0, chunk)
    return {name: d[name] for name in ("q", "k", "v", "a", "S0")} | {"l": softmax_vjp(d["r"] + d["w"], E)}


# --- operators -------------------------------------------------------------------------------------------------------


def _exact(weights: Callable[[Array], Weights]) -> tuple[Form, ...]:
    """The forms with the weights E of the experts as an input."""

    def chunkwise(q: Array, k: Array, v: Array, E: Array, a: Array, S0: Array, chunk: int = 64) -> tuple[Array, Array]:
        return mixing.chunkwise(q, k, v, *weights(E), a, S0, chunk)

    def parallel(q: Array, k: Array, v: Array, E: Array, a: Array, S0: Array) -> tuple[Array, Array]:
        return mixing.parallel(q, k, v, *weights(E), a, S0)

    def recurrent(q: Array, k: Array, v: Array, E: Array, a: Array, S0: Array) -> tuple[Array, Array]:
        return mixing.recurrent(q, k, v, *weights(E), a, S0)

    return Form("chunkwise", chunkwise, chunked=True), Form("parallel", parallel), Form("recurrent", recurrent)


def _held(E: Array) -> Weights:
    """No field has an order in which logits could be ranked: which experts are chosen follows from the shape."""
    n, j = np.indices(E.shape)
    return both_mix_hold(E, (n * n + j) % 3 < 2)


def _fields(K: str, V: str) -> tuple[Input, ...]:
    return (
        Input("q", ("T", K), "token", "field"),
        Input("k", ("T", K), "token", "field"),
        Input("v", ("T", V), "token", "field"),
        Input("E", ("T", "X"), "token", "field"),
        Input("a", ("X",), "parameter", "field"),
        Input("S0", ("X", K, V), "state", "field"),
    )


TOKENS = (
    Input("q", ("T", "K"), "token", "query"),
    Input("k", ("T", "K"), "token", "key"),
    Input("v", ("T", "V"), "token", "value"),
    Input("l", ("T", "X"), "token", "logit_token"),
)
DECAYS = Input("a", ("X",), "parameter", "decay")
TOP = Input("top", (), "scalar", "count", default=2, differentiable=False)
STATES = Input("S0", ("X", "K", "V"), "state", "state", carries="S")
OUTPUTS = (Output("Y", ("T", "V")), Output("S", ("X", "K", "V"), "state"))
LAWS = ("homogeneity", "left_padding", "relabelling", "experts", "euler")

OPERATOR = Operator(
    name="mome",
    summary="S^j_n = a_j S^j_{n-1} + k_n^T v_n;  y_n = q_n sum_j E_nj S^j_n, E_n = softmax((k_n * v_n) W)",
    source="MixFormer (17), (18), reading R3",
    inputs=(
        Input("q", ("T", "D"), "token", "query"),
        Input("k", ("T", "D"), "token", "key"),
        Input("v", ("T", "D"), "token", "value"),
        Input("W", ("D", "X"), "parameter", "router"),
        DECAYS,
        Input("S0", ("X", "D", "D"), "state", "state", carries="S"),
    ),
    outputs=(Output("Y", ("T", "D")), Output("S", ("X", "D", "D"), "state")),
    forms=(Form("chunkwise", chunkwise, chunked=True), Form("parallel", parallel), Form("recurrent", recurrent)),
    vjp=vjp,
    causal=True,
    laws=LAWS,
    exact=_exact(read_mix),
    exact_inputs=_fields("D", "D"),
    degrees={"q": 1},
)

WRITE_MIX = Operator(
    name="mome.write_mix",
    summary="S^j_n = a_j S^j_{n-1} + E_nj k_n^T v_n;  y_n = q_n sum_j S^j_n, E_n = softmax(l_n)",
    source="MixFormer (17), (18), weights on what is written",
    inputs=(*TOKENS, DECAYS, STATES),
    outputs=OUTPUTS,
    forms=(
        Form("chunkwise", write_mix_chunkwise, chunked=True),
        Form("parallel", write_mix_parallel),
        Form("recurrent", write_mix_recurrent),
    ),
    vjp=write_mix_vjp,
    causal=True,
    laws=("linearity", *LAWS),
    linear_in="v",
    exact=_exact(write_mix),
    exact_inputs=_fields("K", "V"),
    degrees={"q": 1, "k": 1, "v": 1},
)

TOP_K = Operator(
    name="mome.top_k",
    summary="S^j_n = a_j S^j_{n-1} + E_nj k_n^T v_n;  y_n = q_n sum_j E_nj S^j_n, E_n = softmax of the top of l_n",
    source="MixFormer (17), (18) and section 4.4: a subset of the experts",
    inputs=(*TOKENS, DECAYS, TOP, STATES),
    outputs=OUTPUTS,
    forms=(
        Form("chunkwise", top_k_chunkwise, chunked=True),
        Form("parallel", top_k_parallel),
        Form("recurrent", top_k_recurrent),
    ),
    vjp=top_k_vjp,
    causal=True,
    laws=("linearity", *LAWS),
    linear_in="v",
    exact=_exact(both_mix),
    exact_inputs=_fields("K", "V"),
    degrees={"q": 1, "k": 1, "v": 1},
)

TOP_K_HOLD = Operator(
    name="mome.top_k_hold",
    summary="mome.top_k in which only selected experts decay",
    source="MixFormer (17), (18) and section 4.4: a subset of the experts, the others frozen",
    inputs=(*TOKENS, DECAYS, TOP, STATES),
    outputs=OUTPUTS,
    forms=(
        Form("chunkwise", top_k_hold_chunkwise, chunked=True),
        Form("parallel", top_k_hold_parallel),
        Form("recurrent", top_k_hold_recurrent),
    ),
    vjp=top_k_hold_vjp,
    causal=True,
    laws=("linearity", *LAWS),
    linear_in="v",
    exact=_exact(_held),
    exact_inputs=_fields("K", "V"),
    degrees={"q": 1, "k": 1, "v": 1},
)
