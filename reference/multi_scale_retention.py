"""Multi-scale retention: a head of RetNet with rotated queries and keys, a group norm and a swish gate.

Source: survey, section "RetNet"; Sun et al. 2023 (5) to (8), without xPos and without the row normaliser of their
section 2.1. Complex: retention of q e^(i n theta) and k e^(-i n theta), the conjugate, of which only the difference of
positions is left; real: pairs of channels (2 i, 2 i + 1) turned by n theta_i. The angles are torchscale's, whose last
one is 1 / base (RoPE's is not). Row n has position n, from zero.

    letter  paper    shape     meaning
    q k v   Q K V    (T, K)    tokens' queries and keys, K even; v (T, V)
    u                (T, V)    gate, before its activation
    gamma   gamma    ()        decay of this head, in the paper 1 - 2^(-5 - h)
    theta   theta    (K/2,)    angles a token turns by
    O N              (T, V)    what retention returns; normalised per token over the channels of the head
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from . import retention
from .primitives import Array, cancelled, deviation, group_norm, sigmoid, silu, stored, turned
from .spec import Form, Input, Operator, Output, check_cotangents, check_shapes

Retention = Callable[..., tuple[Array, Array]]


def chunkwise(
    q: Array, k: Array, v: Array, u: Array, gamma: Array, scale: float = 1.0, eps: float = 1e-6,
    base: float = 10000.0, chunk: int = 64,
) -> Array:  # fmt: skip
    """Y = silu(u) * GroupNorm(Retention(Q, K, v)), Q and K rotated, chunk by chunk.  -> (T, V).  (7) (8)"""
    return _gated(partial(retention.chunkwise, chunk=chunk), q, k, v, u, gamma, scale, eps, base)


def parallel(
    q: Array, k: Array, v: Array, u: Array, gamma: Array, scale: float = 1.0, eps: float = 1e-6,
    base: float = 10000.0,
) -> Array:  # fmt: skip
    """The same with the matrix of decays written out.  (5)"""
    return _gated(retention.parallel, q, k, v, u, gamma, scale, eps, base)


def recurrent(
    q: Array, k: Array, v: Array, u: Array, gamma: Array, scale: float = 1.0, eps: float = 1e-6,
    base: float = 10000.0,
) -> Array:  # fmt: skip
    """The same token by token.  (6)"""
    return _gated(retention.recurrent, q, k, v, u, gamma, scale, eps, base)


def vjp(
    cotangents: dict[str, Array],
    q: Array, k: Array, v: Array, u: Array, gamma: Array, scale: float = 1.0, eps: float = 1e-6,
    base: float = 10000.0, chunk: int = 64,
) -> dict[str, Array]:  # fmt: skip
    """Gradients of <Y, dY>: through the gate, the norm and retention, then turned back."""
    check_cotangents(OPERATOR, cotangents, {"q": q, "k": k, "v": v, "u": u})
    n, theta = np.arange(len(q)), angles(q.shape[1], base)
    Q, K = turned(q, n, theta), turned(k, n, theta)
    O, S = retention.chunkwise(Q, K, v, gamma, scale, chunk=chunk)
    O, G = stored(O), cotangents["Y"]
    du = G * group_norm(O, eps) * (sigmoid(u) + silu(u) * sigmoid(-u))
    dO = group_norm_vjp(G * silu(u), O, eps)
    grads = retention.vjp({"O": dO, "S": 0 * S}, Q, K, v, gamma, scale, chunk=chunk)
    back = {"q": turned(grads["q"], -n, theta), "k": turned(grads["k"], -n, theta)}
    return back | {"v": grads["v"], "u": du, "gamma": grads["gamma"]}


def angles(K: int, base: float = 10000.0) -> Array:
    """theta_i = base^(-i / (K/2 - 1)) for i = 0 .. K/2 - 1: from one to 1 / base, both included.

    Raises ValueError for an odd K: channels are turned in pairs."""
    if K % 2:
        raise ValueError(f"q and k have {K} channels; they are turned in pairs")
    return base ** -np.linspace(0, 1, K // 2)


def group_norm_vjp(G: Array, x: Array, eps: float) -> Array:
    """dx = (G - mean G - N mean(G * N)) / sqrt(var + eps) with N = group_norm(x).  (T, V) -> (T, V).

    PyTorch's own group norm multiplies N out; what is then added and taken off again is large far from zero."""
    N, s = group_norm(x, eps), deviation(x, eps)
    c = _mean(G * N)
    both = np.abs(c) * (np.abs(x) + np.abs(_mean(x))) + np.abs(N) * (_mean(np.abs(G * x)) + np.abs(_mean(G) * _mean(x)))
    return cancelled(G - _mean(G) - N * c, both / s) / s


def _mean(x: Array) -> Array:
    return np.sum(x, axis=-1, keepdims=True) / x.shape[-1]


def _gated(
    form: Retention, q: Array, k: Array, v: Array, u: Array, gamma: Array, scale: float, eps: float, base: float
) -> Array:
    check_shapes(OPERATOR, {"q": q, "k": k, "v": v, "u": u})
    n, theta = np.arange(len(q)), angles(q.shape[1], base)
    O, _ = form(turned(q, n, theta), turned(k, n, theta), v, gamma, scale)
    return silu(u) * group_norm(stored(O), eps)


OPERATOR = Operator(
    name="multi_scale_retention",
    summary="Y = silu(u) * GroupNorm(O), O the retention of q and k with pairs of channels turned by n theta",
    source="survey, RetNet; Sun et al. 2023 (5)-(8)",
    inputs=(
        Input("q", ("T", "K"), "token", "query"),
        Input("k", ("T", "K"), "token", "key"),
        Input("v", ("T", "V"), "token", "value"),
        Input("u", ("T", "V"), "token", "gate"),
        Input("gamma", (), "parameter", "decay"),
        Input("scale", (), "scalar", "scale", default=1.0, differentiable=False),
        Input("eps", (), "scalar", "epsilon", default=1e-6, differentiable=False),
        Input("base", (), "scalar", "base", default=10000.0, differentiable=False),
    ),
    outputs=(Output("Y", ("T", "V")),),
    forms=(Form("chunkwise", chunkwise, chunked=True), Form("parallel", parallel), Form("recurrent", recurrent)),
    vjp=vjp,
    causal=True,
    laws=(),
    multiple_of={"K": 2},
)
