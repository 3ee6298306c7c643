"""Sigmoid attention with the hybrid norm: what the heads return is normalised before it joins the residual stream.

Source: survey, section "Stabilization and the Hybrid-Norm Requirement"; Ramapuram et al. 2024. All heads of one
sequence. The survey prints x + norm(sigmoid(..) V), without an output projection; here heads are concatenated and
projected first, so that the norm sees what would be added. It is a LayerNorm, token by token, with a gain and a bias.

    letter  paper   shape            meaning
    x Y             (T, E)           tokens of the residual stream before and after
    q k v   Q K V   (T, N, K or V)   queries, keys and values of N heads
    b       b       ()               bias of all logits
    W_O             (N, V, E)        output projection, head by head
    O U             (N V), (T, E)    concatenated heads; what they return, before the norm
"""

from __future__ import annotations

import numpy as np

from . import sigmoid_attention
from .multi_scale_retention import group_norm_vjp
from .primitives import Array, causal_mask, group_norm, starts, stored
from .spec import Form, Input, Operator, Output, check_cotangents, check_shapes


def parallel(
    x: Array, q: Array, k: Array, v: Array, b: Array, W_O: Array, gain: Array, bias: Array,
    scale: float | None = None, eps: float = 1e-5,
) -> Array:  # fmt: skip
    """Y = x + gain * LN(Concat(O_1, .., O_N) W_O) + bias with O_h = sigmoid(scale q_h k_h^T + b) v_h.  -> (T, E)"""
    _check(x, q, k, v, b, W_O, gain, bias)
    return x + group_norm(stored(_heads(q, k, v, b, scale) @ _flat(W_O)), eps) * gain + bias


def blockwise(
    x: Array, q: Array, k: Array, v: Array, b: Array, W_O: Array, gain: Array, bias: Array,
    scale: float | None = None, eps: float = 1e-5, chunk: int = 64,
) -> Array:  # fmt: skip
    """The same with U = sum_h O_h W_O,h summed over heads and blocks of keys."""
    _check(x, q, k, v, b, W_O, gain, bias)
    U, seen = 0 * x, causal_mask(len(x))
    for h in range(len(W_O)):
        for a in starts(len(x), chunk):
            c = slice(a, a + chunk)
            U = U + sigmoid_attention.weights(q[:, h], k[c, h], b, seen[:, c], scale) @ (v[c, h] @ W_O[h])
    return x + group_norm(U, eps) * gain + bias


def vjp(
    cotangents: dict[str, Array],
    x: Array, q: Array, k: Array, v: Array, b: Array, W_O: Array, gain: Array, bias: Array,
    scale: float | None = None, eps: float = 1e-5,
) -> dict[str, Array]:  # fmt: skip
    """Gradients of <Y, dY>: around the norm, through it, and through the projection to each head."""
    check_cotangents(OPERATOR, cotangents, {"x": x})
    _check(x, q, k, v, b, W_O, gain, bias)
    G, O = cotangents["Y"], stored(_heads(q, k, v, b, scale))
    U = stored(O @ _flat(W_O))
    dU = group_norm_vjp(G * gain, U, eps)
    dO = (dU @ _flat(W_O).T).reshape(*v.shape)
    heads = []
    for h in range(len(W_O)):
        upstream = {"O": dO[:, h], "Kc": 0 * k[:, h], "Vc": 0 * v[:, h]}
        heads.append(sigmoid_attention.vjp(upstream, q[:, h], k[:, h], v[:, h], b, scale))
    grads = {name: np.stack([d[name] for d in heads], axis=1) for name in ("q", "k", "v")}
    grads |= {"b": np.sum(np.stack([d["b"] for d in heads])), "W_O": (O.T @ dU).reshape(*W_O.shape)}
    return {"x": G, **grads, "gain": np.sum(G * group_norm(U, eps), axis=0), "bias": np.sum(G, axis=0)}


def _heads(q: Array, k: Array, v: Array, b: Array, scale: float | None) -> Array:
    """Concat(O_1, .., O_N).  -> (T, N V)"""
    O = [sigmoid_attention.parallel(q[:, h], k[:, h], v[:, h], b, scale)[0] for h in range(q.shape[1])]
    return np.concatenate(O, axis=1)


def _flat(W_O: Array) -> Array:
    """(N, V, E) -> (N V, E)"""
    return W_O.reshape(W_O.shape[0] * W_O.shape[1], W_O.shape[2])


def _check(x: Array, q: Array, k: Array, v: Array, b: Array, W_O: Array, gain: Array, bias: Array) -> None:
    check_shapes(OPERATOR, {"x": x, "q": q, "k": k, "v": v, "b": b, "W_O": W_O, "gain": gain, "bias": bias})


OPERATOR = Operator(
    name="sigmoid_attention.hybrid",
    summary="Y = x + gain * LN(Concat(O_1, .., O_N) W_O) + bias, O_h causal sigmoid attention",
    source="survey, Sigmoid Attention; Ramapuram et al. 2024",
    inputs=(
        Input("x", ("T", "E"), "token", "feature"),
        Input("q", ("T", "N", "K"), "token", "query"),
        Input("k", ("T", "N", "K"), "token", "key"),
        Input("v", ("T", "N", "V"), "token", "value"),
        Input("b", (), "parameter", "logit_bias"),
        Input("W_O", ("N", "V", "E"), "parameter", "weight"),
        Input("gain", ("E",), "parameter", "norm_gain"),
        Input("bias", ("E",), "parameter", "norm_bias"),
        Input("scale", (), "scalar", "scale", differentiable=False),
        Input("eps", (), "scalar", "epsilon", default=1e-5, differentiable=False),
    ),
    outputs=(Output("Y", ("T", "E")),),
    forms=(Form("parallel", parallel), Form("blockwise", blockwise, chunked=True)),
    vjp=vjp,
    causal=True,
    laws=("relabelling",),
    multiple_of={"E": 2},  # the norm of a single channel is rounding error
    cost="quadratic",
)
