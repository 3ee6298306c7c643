"""The block F of an ODE Transformer: self-attention and a feed-forward network, each behind a layer norm.

Source: survey, section "ODE Transformer"; Li et al. 2022. A pre-norm layer y + F(y) is one step of Euler's method for
y' = F(y); `runge_kutta` has the methods of higher order, which evaluate the same F several times. Attention is that of
an encoder, without a mask: every token sees every other.

    letter     paper    shape     meaning
    X          y        (T, E)    tokens at which F is taken
    gain bias           (E,)      of the norms before attention, 1, and before the network, 2
    W_Q ..              (E, E)    projections; heads are contiguous groups of E / heads channels
    W_1 b_1             (E, F)    feed-forward network; W_2 (F, E)
    N A        LN       (T, E)    normalised tokens; concatenated heads
    S M        SAN      (T, E)    what attention adds; M = X + S, what the norm before the network sees
    H                   (T, F)    hidden layer before its rectifier
    G                   (T, E)    cotangent of F(X)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import softmax_attention
from .cost import check_sizes
from .mixformer import affine_norm, affine_norm_vjp
from .primitives import Array, rectified, settled, stored
from .spec import Input


def field(X: Array, *parameters: Array, **named: Any) -> Array:
    """F(X) = SAN(LN(X)) + FFN(LN(X + SAN(LN(X)))).  (T, E) -> (T, E); arguments as those of `linearised`."""
    return linearised(X, *parameters, **named)[0]


def linearised(
    X: Array, gain1: Array, bias1: Array, gain2: Array, bias2: Array, W_Q: Array, W_K: Array, W_V: Array, W_O: Array,
    W_1: Array, b_1: Array, W_2: Array, b_2: Array, heads: int = 2, eps: float = 1e-5,
) -> tuple[Array, Callable[[Array], dict[str, Array]]]:  # fmt: skip
    """F(X), and a function from G to the gradients of <F(X), G> for the tokens and every parameter."""
    parts = channels(X.shape[1], heads)
    N1 = affine_norm(X, gain1, bias1, eps)
    Q, K, V = (stored(N1 @ W) for W in (W_Q, W_K, W_V))
    A = stored(np.concatenate([softmax_attention.parallel(Q[:, c], K[:, c], V[:, c]) for c in parts], axis=1))
    S = stored(A @ W_O)
    M = stored(X + S)
    N2 = affine_norm(M, gain2, bias2, eps)
    H = N2 @ W_1 + b_1

    def back(G: Array) -> dict[str, Array]:
        G = settled(G)
        dH = rectified(G @ W_2.T, H)
        dM, of2 = _norm_vjp(dH @ W_1.T, M, gain2, eps)
        dS = stored(dM + G)  # S is added to X before the norm, and to what the network gives
        dA = dS @ W_O.T
        attended = [softmax_attention.vjp({"O": dA[:, c]}, Q[:, c], K[:, c], V[:, c]) for c in parts]
        dQ, dK, dV = (np.concatenate([d[n] for d in attended], axis=1) for n in ("q", "k", "v"))
        dX, of1 = _norm_vjp(dQ @ W_Q.T + dK @ W_K.T + dV @ W_V.T, X, gain1, eps)
        return {
            "X": dX + dM,
            "gain1": of1[0],
            "bias1": of1[1],
            "gain2": of2[0],
            "bias2": of2[1],
            "W_Q": N1.T @ dQ,
            "W_K": N1.T @ dK,
            "W_V": N1.T @ dV,
            "W_O": A.T @ dS,
            "W_1": N2.T @ dH,
            "b_1": np.sum(dH, axis=0),
            "W_2": np.maximum(H, 0).T @ G,
            "b_2": np.sum(G, axis=0),
        }

    return stored(S + (np.maximum(H, 0) @ W_2 + b_2)), back


def channels(E: int, heads: int) -> list[slice]:
    """The channels of each head. Raises ValueError unless the heads divide them."""
    check_sizes(heads=heads)
    if E % heads:
        raise ValueError(f"X has {E} channels, which {heads} heads do not divide")
    return [slice(h * E // heads, (h + 1) * E // heads) for h in range(heads)]


def _norm_vjp(G: Array, X: Array, gain: Array, eps: float) -> tuple[Array, tuple[Array, Array]]:
    """From the cotangent of gain * LN(X) + bias to those of X and of (gain, bias): both read all of it, so that it is
    there before either is."""
    dX, affine = affine_norm_vjp(settled(G), X, gain, eps)
    return settled(dX), affine


# Small weights: with larger ones, what four stages may do to a rounding error covers the result.
TOKENS = Input("X", ("T", "E"), "token", "feature")
PARAMETERS = (
    Input("gain1", ("E",), "parameter", "norm_gain"),
    Input("bias1", ("E",), "parameter", "norm_bias"),
    Input("gain2", ("E",), "parameter", "norm_gain"),
    Input("bias2", ("E",), "parameter", "norm_bias"),
    *(Input(name, ("E", "E"), "parameter", "small_weight") for name in ("W_Q", "W_K", "W_V", "W_O")),
    Input("W_1", ("E", "F"), "parameter", "small_weight"),
    Input("b_1", ("F",), "parameter", "norm_bias"),
    Input("W_2", ("F", "E"), "parameter", "small_weight"),
    Input("b_2", ("E",), "parameter", "norm_bias"),
)
SCALARS = (
    Input("heads", (), "scalar", "count", default=2, differentiable=False),
    Input("eps", (), "scalar", "epsilon", default=1e-5, differentiable=False),
)
