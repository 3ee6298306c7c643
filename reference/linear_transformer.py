"""Linear transformer: linear attention of elu(x) + 1, causal, token by token as a recurrent network.

Source: survey, "Linear Transformer"; Katharopoulos et al. 2020 (4) to (12), with phi of (7). Neither scaled by K^-1/2
nor rotated. Their code adds eps = 1e-6 to the denominator; here it is an argument, zero by default.

    letter  paper    shape      meaning
    q k v   Q K V    (T, K)     queries and keys as projected; v (T, V)
    phi     phi      (T, K)     x + 1 for x > 0, else exp(x): positive, and so is its slope
    S z     S Z      (K, V)     sum of phi(k)^T v so far; z (K,) sum of phi(k); S0 and z0 come before the first token
"""

from __future__ import annotations

import numpy as np

from . import linear_attention
from .primitives import Array, elu_plus_one
from .spec import Form, Input, Operator, check_cotangents, check_shapes


def chunkwise(
    q: Array, k: Array, v: Array, eps: Array = 0.0, S0: Array = None, z0: Array = None, chunk: int = 64
) -> tuple[Array, Array, Array]:
    """o_i = phi(q_i) S_i / (phi(q_i) . z_i + eps), chunk by chunk.  -> O (T, V), S, z.  (9)"""
    return linear_attention.chunkwise(*_features(q, k, v, S0, z0), v, eps, S0, z0, chunk)


def parallel(
    q: Array, k: Array, v: Array, eps: Array = 0.0, S0: Array = None, z0: Array = None
) -> tuple[Array, Array, Array]:
    """The same with the masked matrix of phi(q_i) . phi(k_j) written out.  -> O, S, z.  (8)"""
    return linear_attention.parallel(*_features(q, k, v, S0, z0), v, eps, S0, z0)


def recurrent(
    q: Array, k: Array, v: Array, eps: Array = 0.0, S0: Array = None, z0: Array = None
) -> tuple[Array, Array, Array]:
    """S_i = S_{i-1} + phi(k_i)^T v_i, z_i = z_{i-1} + phi(k_i), token by token.  -> O, S, z.  (10) to (12)"""
    return linear_attention.recurrent(*_features(q, k, v, S0, z0), v, eps, S0, z0)


def vjp(
    cotangents: dict[str, Array],
    q: Array, k: Array, v: Array, eps: Array = 0.0, S0: Array = None, z0: Array = None, chunk: int = 64,
) -> dict[str, Array]:  # fmt: skip
    """Gradients of <O, dO> + <S, dS> + <z, dz>: those of linear attention, times the slope of phi."""
    check_cotangents(OPERATOR, cotangents, {"q": q, "v": v})
    Q, K = _features(q, k, v, S0, z0)
    d = linear_attention.vjp(cotangents, Q, K, v, eps, S0, z0, chunk)
    return d | {"q": d["q"] * slope(q), "k": d["k"] * slope(k)}


def slope(x: Array) -> Array:
    """The derivative of elu(x) + 1: one for x > 0, else exp(x); continuous at zero."""
    return np.where(x > 0, 1, np.exp(np.where(x > 0, 0, x)))


def _features(q: Array, k: Array, v: Array, S0: Array, z0: Array) -> tuple[Array, Array]:
    check_shapes(OPERATOR, {"q": q, "k": k, "v": v, "S0": S0, "z0": z0})
    return elu_plus_one(q), elu_plus_one(k)


OPERATOR = Operator(
    name="linear_transformer",
    summary="o_i = phi(q_i) S_i / (phi(q_i) . z_i + eps), S = sum phi(k)^T v, z = sum phi(k), phi = elu + 1",
    source="survey, Linear Transformer; Katharopoulos et al. 2020 (7)-(12)",
    inputs=(
        Input("q", ("T", "K"), "token", "query"),
        Input("k", ("T", "K"), "token", "key"),
        Input("v", ("T", "V"), "token", "value"),
        Input("eps", (), "scalar", "epsilon", default=0.0, differentiable=False),
        Input("S0", ("K", "V"), "state", "state", carries="S"),
        Input("z0", ("K",), "state", "mass", carries="z"),
    ),
    outputs=linear_attention.OPERATOR.outputs,
    forms=(Form("chunkwise", chunkwise, chunked=True), Form("parallel", parallel), Form("recurrent", recurrent)),
    vjp=vjp,
    causal=True,
    laws=("linearity", "constant_value", "hull", "row_sums", "relabelling", "homogeneity", "euler"),
    linear_in="v",
    degrees={"v": 1},
    exact=linear_attention.FORMS,
    exact_inputs=linear_attention.OPERATOR.exact_inputs,
)
