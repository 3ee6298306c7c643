"""Gated linear attention: decays per token, given by their logarithms g <= 0: S_n = exp(g_n) * S_{n-1} + k_n^T v_n.

Source: Yang et al. 2024 (GLA), section 4; with one number per token Mamba-2 and "simple GLA". It is `tala.key_channel`,
or `tala.time_varying`, of a = exp(g), as the libraries take it. The scale is an argument: where none is given, they
take K^-1/2.

    letter  paper    shape            meaning
    q k v   Q K V    (T, K)           tokens' queries, keys; v (T, V)
    g       log a    (T, K) or (T,)   logarithms of the decays
    S0 S    S        (K, V)           state before the first and after the last token
"""

from __future__ import annotations

import numpy as np

from .primitives import Array, either, segment_decays
from .spec import Form, Input, Operator, Output, check_cotangents, check_shapes
from .tala_decays import (
    KEY_CHANNEL,
    TIME_VARYING,
    Mix,
    Products,
    in_chunks,
    in_one_chunk,
    in_steps,
    mix_key_channels,
    mix_scalar,
    state_gradients,
)


def _spread(x: Array, g: Array) -> Array:
    """x, which has the channels that g has, against the state's (K, V)."""
    return x[(..., *(3 - g.ndim) * (None,))]


def _check(q: Array, k: Array, v: Array, g: Array, S0: Array) -> None:
    check_shapes(SIMPLE if g.ndim == 1 else OPERATOR, {"q": q, "k": k, "v": v, "g": g, "S0": S0})


def _products(g: Array) -> Products:
    return lambda start, stop: _spread(segment_decays(g, start, stop), g)


def vjp(
    cotangents: dict[str, Array],
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    scale: float = 1.0,
    S0: Array = None,
    chunk: int = 64,
) -> dict[str, Array]:
    """dg_n = a_n da_n; or, without da, what later tokens read of earlier ones, all of which decays at token n:

    dg_n = sum_{t >= n} (q_t dq_t - k_t dk_t) + <S, dS>, where the last token is that of the chunk or the sequence."""
    check_cotangents(SIMPLE if g.ndim == 1 else OPERATOR, cotangents, {"q": q, "v": v})
    _check(q, k, v, g, S0)
    grads, S = state_gradients(cotangents, q, k, v, _products(g), scale, S0, chunk)
    da = np.sum(grads.pop("A"), axis=tuple(range(g.ndim, 3)))
    flow, left = q * grads["q"] - k * grads["k"], np.sum(S * cotangents["S"], axis=1)
    if g.ndim == 1:
        flow, left = np.sum(flow, axis=1), np.sum(left)
    later = np.cumsum(flow[::-1], axis=0)[::-1] + left
    return grads | {"g": either(np.exp(g) * da, later)}


def _operator(name: str, summary: str, g: Input, mix: Mix, decayed: Operator) -> Operator:
    """`decayed` is the operator of the decays exp(g)."""

    def chunkwise(
        q: Array, k: Array, v: Array, g: Array, scale: float = 1.0, S0: Array = None, chunk: int = 64
    ) -> tuple[Array, Array]:
        _check(q, k, v, g, S0)
        return in_chunks(q, k, v, _products(g), mix, scale, S0, chunk)

    def parallel(q: Array, k: Array, v: Array, g: Array, scale: float = 1.0, S0: Array = None) -> tuple[Array, Array]:
        _check(q, k, v, g, S0)
        return in_one_chunk(q, k, v, _products(g)(0, len(q)), mix, scale, S0)

    def recurrent(q: Array, k: Array, v: Array, g: Array, scale: float = 1.0, S0: Array = None) -> tuple[Array, Array]:
        _check(q, k, v, g, S0)
        return in_steps(q, k, v, _spread(np.exp(g), g), scale, S0)

    return Operator(
        name=name,
        summary=summary,
        source="Yang et al. 2024, section 4",
        inputs=tuple(g if x.name == "a" else x for x in decayed.inputs),
        outputs=(Output("O", ("T", "V")), Output("S", ("K", "V"), "state")),
        forms=(Form("chunkwise", chunkwise, chunked=True), Form("parallel", parallel), Form("recurrent", recurrent)),
        vjp=vjp,
        causal=True,
        laws=("linearity", "homogeneity", "euler", "left_padding", "cocycle", "relabelling"),
        linear_in="v",
        exact=decayed.exact,
        exact_inputs=decayed.exact_inputs,
        degrees=decayed.degrees,
    )


SIMPLE = _operator(
    "gated_linear_attention.simple",
    "a log-decay per token: S_n = e^g_n S_{n-1} + k_n^T v_n;  o_n = scale q_n S_n",
    Input("g", ("T",), "token", "log_decay"),
    mix_scalar,
    TIME_VARYING,
)
OPERATOR = _operator(
    "gated_linear_attention",
    "log-decays per key channel: S_n = diag(e^g_n) S_{n-1} + k_n^T v_n;  o_n = scale q_n S_n",
    Input("g", ("T", "K"), "token", "log_decay"),
    mix_key_channels,
    KEY_CHANNEL,
)
