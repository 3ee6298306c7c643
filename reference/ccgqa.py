"""Compressed convolutional grouped-query attention: causal attention inside a latent, grouped heads, mixed queries.

Source: survey, sections 15 and 16; Figliola et al. 2025; the code of ZAYA, whose padding is read here: zeros stand once
before both convolutions, so that the second one meets the bias of the first. The survey prints B q + E k for the mean,
which no shapes allow: B repeats a key for the M queries of its group, E averages these, and it takes q + B k for
queries, E q + k for keys. ZAYA multiplies keys by a number that may be of either sign; here it is e^beta, as printed.

    letter   shape              meaning
    q k      (T, G, M, K)       projections of tokens to M queries and, (T, G, K), one key a group; K even
    v        (T, G, V)          V_1 x and V_2 x side by side: of the G V channels, the second half is one token late
    w1 b1    (.., K, W) (.., K) convolution over time, channel by channel; w[.., -1] meets the token itself
    w2 b2    (.., K, K, J)      convolution among the K channels, out and in, of one head
    beta     (G,)               logarithm of a group's temperature
    q0 k0    (W + J - 2, ..)    rows of q and k before the call; v0 (G, V), the last row of v
    K0 V0    (P, G, K or V)     cache: keys that are normalised and turned, and values
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from . import cached_attention as attention
from .ccgqa_mixing import (
    Filter,
    convolved,
    convolved_vjp,
    from_last,
    history,
    shifted,
    shifted_vjp,
    unit_vjp,
)
from .latent_attention import positions, rotated
from .primitives import Array, starts, unit
from .spec import Form, Input, Operator, Output, check_cotangents, check_shapes

Result = tuple[Array, ...]


def parallel(
    q: Array, k: Array, v: Array, w1q: Array, b1q: Array, w2q: Array, b2q: Array, w1k: Array, b1k: Array, w2k: Array,
    b2k: Array, beta: Array, scale: float | None = None, base: float = 10000.0, norm_eps: float = 1e-12,
    q0: Array = None, k0: Array = None, v0: Array = None, K0: Array = None, V0: Array = None,
) -> Result:  # fmt: skip
    """O = softmax(scale Q^ K^^T) V with Q^ = sqrt(K) Q / ||Q||, Q = conv(q) + (q + B k) / 2, and keys alike, times
    e^beta.  -> O (T, G, M, V); what q0, k0, v0, K0, V0 are after the call.  scale defaults to K^-1/2."""
    filters, states = ((w1q, b1q, w2q, b2q), (w1k, b1k, w2k, b2k)), (q0, k0, v0, K0, V0)
    return _run((q, k, v), filters, beta, scale, base, norm_eps, states, max(len(q), 1))


def chunkwise(
    q: Array, k: Array, v: Array, w1q: Array, b1q: Array, w2q: Array, b2q: Array, w1k: Array, b1k: Array, w2k: Array,
    b2k: Array, beta: Array, scale: float | None = None, base: float = 10000.0, norm_eps: float = 1e-12,
    q0: Array = None, k0: Array = None, v0: Array = None, K0: Array = None, V0: Array = None, chunk: int = 64,
) -> Result:  # fmt: skip
    """Chunk by chunk, each from the states of the one before; chunks of one token are decoding."""
    filters, states = ((w1q, b1q, w2q, b2q), (w1k, b1k, w2k, b2k)), (q0, k0, v0, K0, V0)
    return _run((q, k, v), filters, beta, scale, base, norm_eps, states, chunk)


def vjp(
    cotangents: dict[str, Array],
    q: Array, k: Array, v: Array, w1q: Array, b1q: Array, w2q: Array, b2q: Array, w1k: Array, b1k: Array, w2k: Array,
    b2k: Array, beta: Array, scale: float | None = None, base: float = 10000.0, norm_eps: float = 1e-12,
    q0: Array = None, k0: Array = None, v0: Array = None, K0: Array = None, V0: Array = None,
) -> dict[str, Array]:  # fmt: skip
    """Gradients of <O, dO> and of the cotangents of the states: through attention, turned back, through the norms; a
    query then gets half of its gradient besides the convolution's, and a key that of each query of its group."""
    filters, states = ((w1q, b1q, w2q, b2q), (w1k, b1k, w2k, b2k)), (q0, k0, v0, K0, V0)
    check_cotangents(OPERATOR, cotangents, _named((q, k, v), filters, beta, states))
    (T, _, M, K), n = q.shape, positions(K0, len(q))
    xq, xk = history(q0, q, *filters[0][:3]), history(k0, k, *filters[1][:3])
    Q, key = _mixed(xq, xk, filters, T)
    heat = np.exp(beta)[:, None] * K**0.5
    U = heat * unit(key, norm_eps)
    grads = attention.vjp(
        {name: cotangents[name] for name in ("O", "Kc", "Vc")},
        rotated(K**0.5 * unit(Q, norm_eps), n, base), rotated(U, n, base), shifted(from_last(v0, v)), scale, K0, V0,
    )  # fmt: skip
    dU = rotated(grads["k"], -n, base)
    dQ = unit_vjp(K**0.5 * rotated(grads["q"], -n, base), Q, norm_eps)
    dkey = unit_vjp(heat * dU, key, norm_eps)
    dxq, *of_q = convolved_vjp(dQ, xq, *filters[0])
    dxk, *of_k = convolved_vjp(dkey, xk, *filters[1])
    past = len(xq) - T
    dq, dk = dxq[past:] + (dQ + dkey[:, :, None] / M) / 2, dxk[past:] + (np.sum(dQ, axis=2) + dkey) / 2
    dxq = _late(np.concatenate([dxq[:past], dq]), cotangents["q_last"])
    dxk = _late(np.concatenate([dxk[:past], dk]), cotangents["k_last"])
    dv = _late(shifted_vjp(grads["v"]), cotangents["v_last"][None])
    of_filters = dict(zip(("w1q", "b1q", "w2q", "b2q", "w1k", "b1k", "w2k", "b2k"), (*of_q, *of_k), strict=True))
    of_tokens = {"q": dxq[past:], "k": dxk[past:], "v": dv[1:], "beta": np.sum(dU * U, axis=(0, 2))}
    of_states = {"q0": dxq[:past], "k0": dxk[:past], "v0": dv[0], "K0": grads["K0"], "V0": grads["V0"]}
    return of_tokens | of_filters | of_states


# --- the steps -------------------------------------------------------------------------------------------------------


def _run(
    tokens: Sequence[Array], filters: tuple[Filter, Filter], beta: Array, scale: float | None, base: float,
    norm_eps: float, states: Sequence[Array | None], chunk: int,
) -> Result:  # fmt: skip
    """Tokens mixed, normalised and turned, then attention over the cache; `chunk` tokens at a time."""
    check_shapes(OPERATOR, _named(tokens, filters, beta, states))
    rows, heat = [], np.exp(beta)[:, None]
    for a in starts(max(len(tokens[0]), 1), chunk):
        (q, k, v), (q0, k0, v0, K0, V0) = (x[a : a + chunk] for x in tokens), states
        T, _, _, K = q.shape
        xq, xk, v = history(q0, q, *filters[0][:3]), history(k0, k, *filters[1][:3]), from_last(v0, v)
        Q, key = (K**0.5 * unit(x, norm_eps) for x in _mixed(xq, xk, filters, T))
        n = positions(K0, T)
        O, Kc, Vc = attention.parallel(rotated(Q, n, base), rotated(heat * key, n, base), shifted(v), scale, K0, V0)
        rows.append(O)
        states = xq[T:], xk[T:], v[T], Kc, Vc
    return np.concatenate(rows), *states


def _mixed(xq: Array, xk: Array, filters: tuple[Filter, Filter], T: int) -> tuple[Array, Array]:
    """conv(q) + (q + B k) / 2 and conv(k) + (E q + k) / 2 of the last T rows.  -> (T, G, M, K), (T, G, K)"""
    q, k = xq[len(xq) - T :], xk[len(xk) - T :]
    mean = (np.sum(q, axis=2) / q.shape[2] + k) / 2
    return convolved(xq, *filters[0]) + (q + k[:, :, None]) / 2, convolved(xk, *filters[1]) + mean


def _late(d: Array, last: Array) -> Array:
    """Gradients of rows, with those of the last ones, which are kept, added."""
    n = len(d) - len(last)
    return np.concatenate([d[:n], d[n:] + last])


def _named(
    tokens: Sequence[Array], filters: tuple[Filter, Filter], beta: Array, states: Sequence[Array | None]
) -> Mapping[str, Array | None]:
    names = (x.name for x in OPERATOR.inputs if x.role != "scalar")
    return dict(zip(names, (*tokens, *filters[0], *filters[1], beta, *states), strict=True))


def inputs(*heads: str) -> tuple[Input, ...]:
    """Those of the operator, with the axes of the heads of queries."""
    sides = {"q": heads, "k": ("G",)}
    filters = [
        (
            Input(f"w1{side}", (*axes, "K", "W"), "parameter", "weight"),
            Input(f"b1{side}", (*axes, "K"), "parameter", "norm_bias"),
            Input(f"w2{side}", (*axes, "K", "K", "J"), "parameter", "weight"),
            Input(f"b2{side}", (*axes, "K"), "parameter", "norm_bias"),
        )
        for side, axes in sides.items()
    ]
    return (
        Input("q", ("T", *heads, "K"), "token", "query"),
        Input("k", ("T", "G", "K"), "token", "key"),
        Input("v", ("T", "G", "V"), "token", "value"),
        *filters[0],
        *filters[1],
        Input("beta", ("G",), "parameter", "gain"),
        Input("scale", (), "scalar", "scale", differentiable=False),
        Input("base", (), "scalar", "base", default=10000.0, differentiable=False),
        Input("norm_eps", (), "scalar", "norm_eps", default=1e-12, differentiable=False),
        Input("q0", ("W+J-2", *heads, "K"), "state", "query", carries="q_last"),
        Input("k0", ("W+J-2", "G", "K"), "state", "key", carries="k_last"),
        Input("v0", ("G", "V"), "state", "value", carries="v_last"),
        Input("K0", ("P", "G", "K"), "state", "key", carries="Kc"),
        Input("V0", ("P", "G", "V"), "state", "value", carries="Vc"),
    )


def outputs(*heads: str) -> tuple[Output, ...]:
    """Those of the operator: one output for tokens, and the states after the call."""
    return (
        Output("O", ("T", *heads, "V")),
        Output("q_last", ("W+J-2", *heads, "K"), "state"),
        Output("k_last", ("W+J-2", "G", "K"), "state"),
        Output("v_last", ("G", "V"), "state"),
        Output("Kc", ("P+T", "G", "K"), "state"),
        Output("Vc", ("P+T", "G", "V"), "state"),
    )


OPERATOR = Operator(
    name="ccgqa",
    summary="grouped-query attention of queries and keys that are convolved, mixed, normalised and turned; late values",
    source="survey, CCA and CCGQA; Figliola et al. 2025",
    inputs=inputs("G", "M"),
    outputs=outputs("G", "M"),
    forms=(Form("parallel", parallel), Form("chunkwise", chunkwise, chunked=True)),
    vjp=vjp,
    causal=True,
    laws=("linearity",),
    linear_in="v",
    cost="quadratic",
    multiple_of={"K": 2, "V": 2},
    derived={"W+J-2": lambda n, _: n["W"] + n["J"] - 2},
)
