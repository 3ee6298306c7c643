"""The MixFormer block: TALA and a feed-forward network, each behind a group norm and inside a residual.

Source: MixFormer paper (10), (11), (13), (14), (19), (20). Pre-norm, as (19) prints, though 4.1 has a norm after each
layer. (13) stops at the concatenated heads: the output projection is the one that (21) pays for. Every norm is per
token: those of (19) over all channels, that of (13) over the channels of each head. One block, all of its heads.

    letter     paper        shape     meaning
    X Y        X^l X^l+1    (T, D)    tokens before and after the block
    gain bias               (D,)      of the two norms of (19); that of (13) has none
    W_Q ..     W_Q ..       (D, D)    projections; heads are contiguous groups of D / heads channels
    W_1 W_2    W_1 W_2      (D, F)    feed-forward network; W_2 (F, D)
    N A M                   (T, D)    normalised tokens; concatenated heads (13); tokens between the two layers
    H                       (T, F)    hidden layer before its rectifier
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from . import tala
from .cost import check_sizes
from .feature_maps import phi_b, phi_b_vjp
from .multi_scale_retention import group_norm_vjp
from .primitives import Array, group_norm, rectified, stored
from .spec import Form, Input, Operator, Output, check_cotangents, check_shapes

Attention = Callable[..., tuple[Array, Array]]


def chunkwise(
    X: Array, gain1: Array, bias1: Array, gain2: Array, bias2: Array, W_Q: Array, W_K: Array, W_V: Array, W_O: Array,
    W_1: Array, W_2: Array, heads: int = 2, eps: float = 1e-5, norm_eps: float = 1e-12, chunk: int = 64,
) -> Array:  # fmt: skip
    """M = TALA(GN(X)) W_O + X;  Y = FFN(GN(M)) + M, TALA chunk by chunk.  (T, D) -> (T, D).  (19)"""
    first, second = (gain1, bias1, W_Q, W_K, W_V, W_O), (gain2, bias2, W_1, W_2)
    return _block(partial(tala.chunkwise, chunk=chunk), X, first, second, heads, eps, norm_eps)


def parallel(
    X: Array, gain1: Array, bias1: Array, gain2: Array, bias2: Array, W_Q: Array, W_K: Array, W_V: Array, W_O: Array,
    W_1: Array, W_2: Array, heads: int = 2, eps: float = 1e-5, norm_eps: float = 1e-12,
) -> Array:  # fmt: skip
    """The same by the parallel form of TALA.  (14)"""
    first, second = (gain1, bias1, W_Q, W_K, W_V, W_O), (gain2, bias2, W_1, W_2)
    return _block(tala.parallel, X, first, second, heads, eps, norm_eps)


def recurrent(
    X: Array, gain1: Array, bias1: Array, gain2: Array, bias2: Array, W_Q: Array, W_K: Array, W_V: Array, W_O: Array,
    W_1: Array, W_2: Array, heads: int = 2, eps: float = 1e-5, norm_eps: float = 1e-12,
) -> Array:  # fmt: skip
    """The same by the recurrent form of TALA.  (15)"""
    first, second = (gain1, bias1, W_Q, W_K, W_V, W_O), (gain2, bias2, W_1, W_2)
    return _block(tala.recurrent, X, first, second, heads, eps, norm_eps)


def vjp(
    cotangents: dict[str, Array],
    X: Array, gain1: Array, bias1: Array, gain2: Array, bias2: Array, W_Q: Array, W_K: Array, W_V: Array, W_O: Array,
    W_1: Array, W_2: Array, heads: int = 2, eps: float = 1e-5, norm_eps: float = 1e-12, chunk: int = 64,
) -> dict[str, Array]:  # fmt: skip
    """Gradients of <Y, dY> for the tokens and every parameter, layer by layer backwards."""
    check_cotangents(OPERATOR, cotangents, {"X": X})
    _check(X, (gain1, bias1, W_Q, W_K, W_V, W_O), (gain2, bias2, W_1, W_2))
    N1 = affine_norm(X, gain1, bias1, eps)
    Q, K, V = (stored(N1 @ W) for W in (W_Q, W_K, W_V))
    form = partial(tala.chunkwise, chunk=chunk)
    A, O = _attention(form, Q, K, V, heads, eps, norm_eps)
    M = stored(A @ W_O + X)
    N2 = affine_norm(M, gain2, bias2, eps)
    H = N2 @ W_1

    dY = cotangents["Y"]
    dH = rectified(dY @ W_2.T, H)
    dM, of2 = affine_norm_vjp(dH @ W_1.T, M, gain2, eps)
    dM = stored(dM + dY)  # the residual
    dA = dM @ W_O.T
    dQ, dK, dV = _attention_vjp(dA, O, Q, K, V, heads, eps, norm_eps, chunk)
    dX, of1 = affine_norm_vjp(dQ @ W_Q.T + dK @ W_K.T + dV @ W_V.T, X, gain1, eps)
    return {
        "X": dX + dM,
        "gain1": of1[0],
        "bias1": of1[1],
        "W_Q": N1.T @ dQ,
        "W_K": N1.T @ dK,
        "W_V": N1.T @ dV,
        "W_O": A.T @ dM,
        "gain2": of2[0],
        "bias2": of2[1],
        "W_1": N2.T @ dH,
        "W_2": np.maximum(H, 0).T @ dY,
    }


# --- the layers ------------------------------------------------------------------------------------------------------


def _block(
    form: Attention, X: Array, first: tuple[Array, ...], second: tuple[Array, ...], heads: int, eps: float,
    norm_eps: float,
) -> Array:  # fmt: skip
    _check(X, first, second)
    gain1, bias1, W_Q, W_K, W_V, W_O = first
    gain2, bias2, W_1, W_2 = second
    N = affine_norm(X, gain1, bias1, eps)
    Q, K, V = (stored(N @ W) for W in (W_Q, W_K, W_V))  # (10)
    A, _ = _attention(form, Q, K, V, heads, eps, norm_eps)
    M = stored(A @ W_O + X)  # (19)
    N = affine_norm(M, gain2, bias2, eps)
    return np.maximum(N @ W_1, 0) @ W_2 + M  # (20) (19)


def _attention(
    form: Attention, Q: Array, K: Array, V: Array, heads: int, eps: float, norm_eps: float
) -> tuple[Array, list[Array]]:
    """A = GroupNorm(Concat(head_1, ..)), and the heads before the norm.  (T, D) -> (T, D).  (13)"""
    O = []
    for h, c in _heads(Q, heads):
        q, k = phi_b(Q[:, c], norm_eps), phi_b(K[:, c], norm_eps)
        O.append(stored(form(q, k, V[:, c], h, 1.0)[0]))
    return np.concatenate([group_norm(o, eps) for o in O], axis=1), O


def _attention_vjp(
    dA: Array, O: list[Array], Q: Array, K: Array, V: Array, heads: int, eps: float, norm_eps: float, chunk: int
) -> tuple[Array, Array, Array]:
    """From the cotangent of A to those of Q, K and V."""
    dQ, dK, dV = [], [], []
    for (h, c), o in zip(_heads(Q, heads), O, strict=True):
        q, k, v = phi_b(Q[:, c], norm_eps), phi_b(K[:, c], norm_eps), V[:, c]
        dO = group_norm_vjp(dA[:, c], o, eps)
        grads = tala.vjp({"O": dO, "S": k[:0].T @ v[:0]}, q, k, v, h, 1.0, chunk=chunk)
        dQ.append(phi_b_vjp({"Y": grads["q"]}, Q[:, c], norm_eps)["x"])
        dK.append(phi_b_vjp({"Y": grads["k"]}, K[:, c], norm_eps)["x"])
        dV.append(grads["v"])
    return np.concatenate(dQ, axis=1), np.concatenate(dK, axis=1), np.concatenate(dV, axis=1)


def _heads(Q: Array, heads: int) -> list[tuple[Array, slice]]:
    """The index h = 1, .. of each head, as the kind of number that Q has, and its channels."""
    check_sizes(heads=heads)
    if Q.shape[1] % heads:
        raise ValueError(f"X has {Q.shape[1]} channels, which {heads} heads do not divide")
    zero, d = np.sum(0 * Q[:0]), Q.shape[1] // heads
    return [(zero + h + 1, slice(h * d, (h + 1) * d)) for h in range(heads)]


def _check(X: Array, first: tuple[Array, ...], second: tuple[Array, ...]) -> None:
    names = ("X", "gain1", "bias1", "W_Q", "W_K", "W_V", "W_O", "gain2", "bias2", "W_1", "W_2")
    check_shapes(OPERATOR, dict(zip(names, (X, *first, *second), strict=True)))


def affine_norm(X: Array, gain: Array, bias: Array, eps: float) -> Array:
    return stored(group_norm(X, eps) * gain + bias)


def affine_norm_vjp(G: Array, X: Array, gain: Array, eps: float) -> tuple[Array, tuple[Array, Array]]:
    """From the cotangent of gain * GN(X) + bias to those of X and of (gain, bias)."""
    return group_norm_vjp(G * gain, X, eps), (np.sum(G * group_norm(X, eps), axis=0), np.sum(G, axis=0))


def _weight(name: str, rows: str, columns: str) -> Input:
    return Input(name, (rows, columns), "parameter", "weight")


OPERATOR = Operator(
    name="mixformer",
    summary="M = TALA(GN(X)) W_O + X; Y = max(0, GN(M) W_1) W_2 + M, heads with decays 1 - e^-h, h = 1, 2, ..",
    source="MixFormer (10), (11), (13), (14), (19), (20)",
    inputs=(
        Input("X", ("T", "D"), "token", "feature"),
        Input("gain1", ("D",), "parameter", "norm_gain"),
        Input("bias1", ("D",), "parameter", "norm_bias"),
        Input("gain2", ("D",), "parameter", "norm_gain"),
        Input("bias2", ("D",), "parameter", "norm_bias"),
        *(_weight(name, "D", "D") for name in ("W_Q", "W_K", "W_V", "W_O")),
        _weight("W_1", "D", "F"),
        _weight("W_2", "F", "D"),
        Input("heads", (), "scalar", "count", default=2, differentiable=False),
        Input("eps", (), "scalar", "epsilon", default=1e-5, differentiable=False),
        Input("norm_eps", (), "scalar", "norm_eps", default=1e-12, differentiable=False),
    ),
    outputs=(Output("Y", ("T", "D")),),
    forms=(Form("chunkwise", chunkwise, chunked=True), Form("parallel", parallel), Form("recurrent", recurrent)),
    vjp=vjp,
    causal=True,
    laws=(),
    multiple_of={"D": 4},  # two heads of at least two channels: the norm of a single one is rounding error
)
