"""Wrong sigmoid attentions, alone and with the hybrid norm: forward, then gradients.

The letters are those of reference/sigmoid_attention.py and sigmoid_hybrid.py. Each builder is the reference with its
steps as arguments; a mutant changes one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mixproof.reference import sigmoid_attention as right
from mixproof.reference import sigmoid_hybrid
from mixproof.reference.cached_attention import caches
from mixproof.reference.caches import visible
from mixproof.reference.multi_scale_retention import group_norm_vjp
from mixproof.reference.primitives import Array, group_norm, sigmoid
from mixproof.verify.arithmetic import round_to
from mixproof.verify.subjects.mutants import tabulated
from mixproof.verify.subjects.mutants.multi_scale_retention import (
    over_time,
    root_mean_square,
    without_mean,
    without_means,
)

LEAK = 1e-6
Weights = Callable[[Array, np.ndarray], Array]

# --- builders --------------------------------------------------------------------------------------------------------


def selected(Z: Array, seen: np.ndarray) -> Array:
    return np.where(seen, sigmoid(Z), 0)


def attend(
    logits: Callable[[Array, Array, float, int], Array] = lambda S, b, scale, P: S * scale + b,
    weights: Weights = selected, last: Callable[[int], int] = lambda P: P,
    order: Callable[[Array, Array], list[Array]] = lambda K0, k: [K0, k],
) -> Callable[..., Any]:  # fmt: skip
    """-> O, Kc, Vc. Token t sees the keys j <= t + last(P)."""

    def forward(q, k, v, b, scale=None, K0=None, V0=None):
        Kc, Vc = caches(k, v, K0, V0)
        if K0 is not None:
            Kc, Vc = (np.concatenate(order(old, new)) for old, new in ((K0, k), (V0, v)))
        T, P = len(q), len(Kc) - len(q)
        seen = np.tril(np.ones((T, len(Kc)), dtype=bool), last(P))
        Z = logits(q @ Kc.T, b, q.dtype.type(q.shape[1] ** -0.5 if scale is None else scale), P)
        return weights(Z, seen) @ Vc, Kc, Vc

    return forward


def attend_vjp(
    slope: Callable[[Array], Array] = lambda A: A * (1 - A), delta: Callable[[Array, Array], Array] = lambda A, dA: 0,
    bias: Callable[[Array, np.ndarray], Array] = lambda dZ, seen: np.sum(np.where(seen, dZ, 0)), states: float = 1.0,
) -> Callable[..., Any]:  # fmt: skip
    def gradients(cotangents, q, k, v, b, scale=None, K0=None, V0=None):
        Kc, Vc = caches(k, v, K0, V0)
        P, G, scale = len(Kc) - len(k), cotangents["O"], q.shape[1] ** -0.5 if scale is None else scale
        seen = visible(len(q), len(Kc))
        A = sigmoid(q @ Kc.T * scale + b)
        every = slope(A) * (G @ Vc.T - delta(np.where(seen, A, 0), G @ Vc.T))
        dZ = np.where(seen, every, 0)
        dK = dZ.T @ q * scale + states * cotangents["Kc"]
        dV = np.where(seen, A, 0).T @ G + states * cotangents["Vc"]
        grads = {"q": dZ @ Kc * scale, "b": bias(every, seen), "k": dK[P:], "v": dV[P:]}
        return grads | {"K0": dK[:P], "V0": dV[:P]}

    return gradients


def hybrid(
    norm: Callable[[Array, float], Array] = group_norm,
    concatenated: Callable[[Array], Array] = lambda O: O.reshape(len(O), O.shape[1] * O.shape[2]),
    joined: Callable[..., Array] = lambda x, U, norm, gain, bias: x + norm(U) * gain + bias,
) -> Callable[..., Any]:  # fmt: skip
    """-> Y, from O (T, N, V)."""

    def forward(x, q, k, v, b, W_O, gain, bias, scale=None, eps=1e-5):
        N = range(len(W_O))
        O = np.stack([right.parallel(q[:, h], k[:, h], v[:, h], b, scale)[0] for h in N], axis=1)
        U = concatenated(O) @ W_O.reshape(len(W_O) * W_O.shape[1], W_O.shape[2])
        return joined(x, U, lambda y: norm(y, eps), gain, bias)

    return forward


def hybrid_vjp(
    norm: Callable[[Array, Array, float], Array] = group_norm_vjp,
    change: Callable[[dict[str, Array], Array], dict[str, Array]] = lambda grads, G: grads,
    gained: Callable[[Array, Array], Array] = lambda G, gain: G * gain,
) -> Callable[..., Any]:  # fmt: skip
    def gradients(cotangents, x, q, k, v, b, W_O, gain, bias, scale=None, eps=1e-5):
        G, flat = cotangents["Y"], W_O.reshape(len(W_O) * W_O.shape[1], W_O.shape[2])
        O = [right.parallel(q[:, h], k[:, h], v[:, h], b, scale)[0] for h in range(len(W_O))]
        U = np.concatenate(O, axis=1) @ flat
        dU = norm(gained(G, gain), U, eps)
        grads = sigmoid_hybrid.vjp(cotangents, x, q, k, v, b, W_O, gain, bias, scale, eps)
        dO = (dU @ flat.T).reshape(v.shape)
        of_heads = [
            right.vjp({"O": dO[:, h], "Kc": 0 * k[:, h], "Vc": 0 * v[:, h]}, q[:, h], k[:, h], v[:, h], b, scale)
            for h in range(len(W_O))
        ]
        grads |= {n: np.stack([d[n] for d in of_heads], axis=1) for n in ("q", "k", "v")}
        grads |= {"b": sum(d["b"] for d in of_heads), "W_O": (np.concatenate(O, axis=1).T @ dU).reshape(W_O.shape)}
        return change(grads, G)

    return gradients


# --- pieces that are wrong by themselves -----------------------------------------------------------------------------


def normalised(Z: Array, seen: np.ndarray) -> Array:
    A = selected(Z, seen)
    return A / np.sum(A, axis=1, keepdims=True)


def by_tanh(Z: Array, seen: np.ndarray) -> Array:
    return np.where(seen, (1 + np.tanh(Z / 2)) / 2, 0)


def exp_over_sum(Z: Array, seen: np.ndarray) -> Array:
    e = np.exp(np.where(seen, Z, -np.inf))
    return e / (1 + e)


def half(Z: Array, seen: np.ndarray) -> Array:
    return round_to(selected(Z, seen), "bfloat16").astype(Z.dtype)


def leaking(Z: Array, seen: np.ndarray) -> Array:
    after = np.roll(seen, 1, axis=1) & ~seen
    return selected(Z, seen) + Z.dtype.type(LEAK) * after


def by_count(S: Array, b: Array, scale: float, P: int) -> Array:
    """-log of the number of keys that a row sees instead of a constant."""
    return S * scale + b - np.log(np.arange(P + 1, P + 1 + len(S), dtype=S.dtype))[:, None]


def padded_heads(O: Array) -> Array:
    """Channel by channel of all heads, not head by head."""
    return O.transpose(0, 2, 1).reshape(len(O), O.shape[1] * O.shape[2])


# --- tables ----------------------------------------------------------------------------------------------------------

ALONE = (
    (
        ("no_bias", "the bias dropped", attend(lambda S, b, scale, P: S * scale), "", ("forward",)),
        ("no_scale", "the scale dropped", attend(lambda S, b, scale, P: S + b), "", ("forward",)),
        (
            "scaled_bias", "the bias scaled with the logits", attend(lambda S, b, scale, P: (S + b) * scale), "",
            ("forward",),
        ),
        ("bias_by_count", "a bias of -log of the keys that a row sees", attend(by_count), "", ("forward", "split")),
        ("normalised", "weights that add up to one", attend(weights=normalised), "", ("forward",)),
        (
            "masked_zero", "masked logits of zero, hence weights of 1/2",
            attend(weights=lambda Z, seen: sigmoid(np.where(seen, Z, 0))), "attn-drop-causal-mask",
            ("forward", "causality"),
        ),
        ("by_tanh", "(1 + tanh(Z / 2)) / 2, which loses small weights", attend(weights=by_tanh), "", ("extremes",)),
        (
            "exp_over_sum", "exp(Z) / (1 + exp(Z)), which overflows", attend(weights=exp_over_sum), "gma-no-max",
            ("extremes",),
        ),
        ("bfloat16_weights", "weights rounded to bfloat16", attend(weights=half), "", ("forward",)),
        ("leak", "the next key read with weight 1e-6", attend(weights=leaking), "", ("causality",)),
        (
            "top_left", "a causal mask that takes the first key for the first token's own", attend(last=lambda P: 0),
            "attn-top-left", ("forward", "split"),
        ),
        ("late_mask", "one key too many in every row", attend(last=lambda P: P + 1), "", ("forward", "causality")),
        (
            "exclusive_mask", "tokens that do not read their own key", attend(last=lambda P: P - 1), "",
            ("forward",),
        ),
        (
            "reversed_cache", "the call before the cache", attend(order=lambda K0, k: [k, K0]), "",
            ("forward", "split"),
        ),
    ),
    (
        ("slope_of_exp", "A for the derivative of the sigmoid", attend_vjp(lambda A: A), "", ("vjp",)),
        ("slope_of_tanh", "1 - A^2 for the derivative of the sigmoid", attend_vjp(lambda A: 1 - A * A), "", ("vjp",)),
        (
            "softmax_delta", "rowsum(dO * O) taken off, as of a softmax",
            attend_vjp(delta=lambda A, dA: np.sum(A * dA, axis=1, keepdims=True)), "attn-no-delta", ("vjp",),
        ),
        ("no_bias", "no gradient for the bias", attend_vjp(bias=lambda dZ, seen: 0 * np.sum(dZ)), "", ("vjp",)),
        ("unmasked_bias", "masked logits counted for the bias", attend_vjp(bias=lambda dZ, seen: np.sum(dZ)), "",
         ("vjp",)),
        ("no_state_cotangent", "the cotangents of the cache dropped", attend_vjp(states=0.0), "", ("vjp",)),
    ),
)  # fmt: skip

HYBRID = (
    (
        ("no_norm", "no norm before the residual", hybrid(lambda U, eps: U), "", ("forward",)),
        (
            "after_residual", "the norm after the residual",
            hybrid(joined=lambda x, U, norm, gain, bias: norm(x + U) * gain + bias), "", ("forward",),
        ),
        (
            "no_residual", "the residual missing", hybrid(joined=lambda x, U, norm, gain, bias: norm(U) * gain + bias),
            "", ("forward",),
        ),
        (
            "bias_in_gain", "the bias multiplied by the gain",
            hybrid(joined=lambda x, U, norm, gain, bias: x + (norm(U) + bias) * gain), "", ("forward",),
        ),
        ("root_mean_square", "a norm that does not take off the mean", hybrid(root_mean_square), "", ("forward",)),
        (
            "norm_over_time", "every channel normalised over time", hybrid(over_time), "",
            ("forward", "causality", "future_length"),
        ),
        ("mixed_heads", "channels of all heads side by side", hybrid(concatenated=padded_heads), "", ("forward",)),
    ),
    (
        ("no_means", "both means dropped from the norm's gradient", hybrid_vjp(without_means), "", ("vjp",)),
        ("no_mean", "the mean dropped from the norm's gradient", hybrid_vjp(without_mean), "", ("vjp",)),
        ("no_gain", "the gain missing behind the norm", hybrid_vjp(gained=lambda G, gain: G), "", ("vjp",)),
        (
            "no_residual", "the residual missing in the backward",
            hybrid_vjp(change=lambda grads, G: grads | {"x": 0 * G}), "", ("vjp",),
        ),
    ),
)  # fmt: skip

MUTANTS = (*tabulated("sigmoid_attention", *ALONE), *tabulated("sigmoid_attention.hybrid", *HYBRID))
