"""Wrong softmax attentions: forward, then gradients.

The letters are those of reference/softmax_attention.py. Each builder is the reference with its steps as arguments; a
mutant changes one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mixproof.reference.primitives import Array, causal_mask, softmax
from mixproof.reference.softmax_attention import weights
from mixproof.verify.arithmetic import round_to
from mixproof.verify.subjects.mutants import Mutant, tabulated

CHUNK = 8
LEAK, OFFSET, SENTINEL = 1e-6, 2.0**-6, -30.0
Scale = Callable[[float | None, int], float]

# --- builders --------------------------------------------------------------------------------------------------------


def by_width(scale: float | None, D: int) -> float:
    return D**-0.5 if scale is None else scale


def parallel(
    scaled: Scale = by_width, keep: Callable[[int, int], np.ndarray] = causal_mask, fill: float = -np.inf,
    normalise: Callable[[Array], Array] = softmax, mixed: Callable[[Array, bool], Array] = lambda P, causal: P,
    operand: Callable[[Array], Array] = lambda x: x, values: Callable[[Array], Array] = lambda v: v,
) -> Callable[..., Any]:  # fmt: skip
    """O = softmax(scale Q K^T) V.  -> (T, V)."""

    def forward(q, k, v, scale=None, causal=False):
        S = operand(q) @ operand(k).T * scaled(scale, q.shape[1])
        if causal:
            S = np.where(keep(*S.shape), S, S.dtype.type(fill))
        return operand(mixed(normalise(S), causal)) @ operand(values(v))

    return forward


def blockwise(
    sentinel: float = -np.inf, guarded: bool = True, backwards: bool = False, masks: Callable[[int], bool] = bool,
    rescales: Callable[[bool], bool] = lambda last: True,
) -> Callable[..., Any]:  # fmt: skip
    """Online softmax over blocks of keys, from running maximum `sentinel`; `masks` says which block (1, 2, ...) is."""

    def forward(q, k, v, scale=None, causal=False, chunk=CHUNK):
        T, S = len(q), len(k)
        keep = causal_mask(T, S) if causal else np.ones((T, S), dtype=bool)
        m, l, U = np.full((T, 1), q.dtype.type(sentinel)), 0 * q[:, :0].sum(1, keepdims=True), q @ (k[:0].T @ v[:0])
        starts = list(range(0, S, chunk))
        for b, a in enumerate(reversed(starts) if backwards else starts, 1):
            s = q @ k[a : a + chunk].T * q.dtype.type(by_width(scale, q.shape[1]))
            if masks(b):
                s = np.where(keep[:, a : a + chunk], s, -np.inf)
            top = np.maximum(m, np.max(s, axis=1, keepdims=True))
            shift = np.where(np.isneginf(top), 0, top) if guarded else top
            e, r = np.exp(s - shift), np.exp(m - shift)
            r = r if rescales(b == len(starts)) or b == 1 else 0 * r + 1
            l, U, m = r * l + np.sum(e, axis=1, keepdims=True), r * U + e @ v[a : a + chunk], top
        return U / np.where(l == 0, 1, l)

    return forward


def vjp(
    delta: Callable[[Array], Array] = lambda delta: delta, keep: Callable[[int, int], np.ndarray] = causal_mask,
    query_scale: Scale = by_width, change: Callable[..., dict[str, Array]] = lambda grads, G: grads,
) -> Callable[..., Any]:  # fmt: skip
    """dV = P^T dO;  dS = P * (dO V^T - delta);  dQ = scale dS K;  dK = scale dS^T Q."""

    def gradients(cotangents, q, k, v, scale=None, causal=False):
        G, P, width = cotangents["O"], weights(q, k, scale, causal), q.shape[1]
        if causal and keep is not causal_mask:  # the weights of the backward, from the maximum and mass of the forward
            S = q @ k.T * by_width(scale, width)
            M = np.where(causal_mask(*S.shape), S, -np.inf)
            e = np.exp(S - np.max(M, axis=1, keepdims=True, initial=-1e30))
            P = np.where(keep(*S.shape), e, 0) / np.sum(np.where(causal_mask(*S.shape), e, 0), axis=1, keepdims=True)
        dS = P * (G @ v.T - delta(np.sum(P * (G @ v.T), axis=1, keepdims=True)))
        grads = {"q": dS @ k * query_scale(scale, width), "k": dS.T @ q * by_width(scale, width), "v": P.T @ G}
        return change(grads, G)

    return gradients


# --- pieces that are wrong by themselves -----------------------------------------------------------------------------


def rounded(dtype: str) -> Callable[[Array], Array]:
    return lambda x: round_to(x, dtype).astype(x.dtype)


def earlier(T: int, S: int) -> np.ndarray:
    return np.tril(np.ones((T, S), dtype=bool), -1)


def everything(T: int, S: int) -> np.ndarray:
    return np.ones((T, S), dtype=bool)


def exp_over_sum(S: Array) -> Array:
    e = np.exp(S)
    return e / np.sum(e, axis=1, keepdims=True)


def plus_one(S: Array) -> Array:
    top = np.max(S, axis=1, keepdims=True, initial=0)
    e = np.exp(S - top)
    return e / (np.sum(e, axis=1, keepdims=True) + np.exp(-top))


def leaking(P: Array, causal: bool) -> Array:
    return P + LEAK * np.eye(*P.shape, k=1, dtype=P.dtype) if causal else P


def favouring(S: Array) -> Array:
    return softmax(S + np.arange(S.shape[1], dtype=S.dtype) / 64)


def padded_scores(S: Array) -> Array:
    """Keys beyond the last block's end score zero; those of a causal row stay masked, its own key comes earlier."""
    if np.any(np.isneginf(S)):
        return softmax(S)
    return softmax(np.pad(S, ((0, 0), (0, -S.shape[1] % CHUNK))))[:, : S.shape[1]]


def split_keys(q, k, v, scale=None, causal=False, chunk=CHUNK):
    """Blocks of keys by themselves, merged by their logsumexp as if it were to base two."""
    S = q @ k.T * by_width(scale, q.shape[1])
    S = np.where(causal_mask(*S.shape), S, -np.inf) if causal else S
    parts, lse = [], []
    for a in range(0, S.shape[1], chunk):
        s = S[:, a : a + chunk]
        top = np.maximum(np.max(s, axis=1), -1e30)
        parts.append(softmax(s) @ v[a : a + chunk])
        lse.append(top + np.log(np.maximum(np.sum(np.exp(s - top[:, None]), axis=1), 1e-30)))
    if not parts:
        return q @ (k.T @ v)
    w = np.exp2(np.stack(lse) - np.max(np.stack(lse), axis=0))
    return np.sum((w / np.sum(w, axis=0))[:, :, None] * np.stack(parts), axis=0)


def padded_rows(grads: dict[str, Array], G: Array) -> dict[str, Array]:
    """The rows beyond the last block's end hold the last row's cotangent and weigh every key with one."""
    return grads | {"v": grads["v"] + (-len(G) % CHUNK) * np.sum(G[-1:], axis=0)}


# --- tables ----------------------------------------------------------------------------------------------------------

FORWARD = (
    ("no_scale", "the scale dropped", parallel(scaled=lambda scale, D: 1.0), "", ("forward",)),
    (
        "default_scale", "D^-1/2 whatever the scale", parallel(scaled=lambda scale, D: D**-0.5), "",
        ("forward", "deterministic"),
    ),
    (
        "padded_scale", "the scale of the padded width",
        parallel(scaled=lambda scale, D: (2 ** int(np.ceil(np.log2(D)))) ** -0.5 if scale is None else scale),
        "attn-pad-scale", ("forward",),
    ),
    ("no_mask", "no causal mask", parallel(keep=everything), "attn-drop-causal-mask", ("forward", "causality")),
    ("exclusive_mask", "tokens that do not read their own key", parallel(keep=earlier), "", ("forward",)),
    (
        "late_mask", "one key too many in every causal row",
        parallel(keep=lambda T, S: np.tril(np.ones((T, S), dtype=bool), 1)), "attn-win-plus1",
        ("forward", "causality", "future_length"),
    ),
    (
        "mask_first_block", "the causal mask on the first block of keys alone", blockwise(masks=lambda b: b == 1),
        "attn-mask-first-block", ("forward", "causality"),
    ),
    (
        "finite_mask", "-30 for masked scores", parallel(fill=SENTINEL), "attn-finite-mask", ("extremes",),
    ),
    ("finite_maximum", "a running maximum that starts at -30", blockwise(SENTINEL), "attn-max0", ("extremes",)),
    (
        "masked_block", "an unguarded rescale when a block is all masked", blockwise(guarded=False, backwards=True),
        "attn-nan-block", ("forward",),
    ),
    (
        "no_rescale", "the last block not rescaled", blockwise(rescales=lambda last: not last), "attn-no-rescale",
        ("forward",),
    ),
    (
        "padded_scores", "keys of the padding that score zero", parallel(normalise=padded_scores), "attn-tail-zero",
        ("forward", "row_sums"),
    ),
    ("base_two", "blocks merged to base two", split_keys, "attn-lse-base2", ("forward", "forms")),
    ("leak", "the next key read with weight 1e-6", parallel(mixed=leaking), "", ("causality",)),
    ("no_maximum", "no maximum subtracted before exp", parallel(normalise=exp_over_sum), "gma-no-max", ("extremes",)),
    (
        "plus_one", "one added to the denominator", parallel(normalise=plus_one), "attn-sink-raw",
        ("forward", "row_sums"),
    ),
    (
        "over_queries", "weights normalised over queries", parallel(normalise=lambda S: softmax(S, axis=0)),
        "gma-key-over-time", ("forward", "row_sums"),
    ),
    (
        "bfloat16_weights", "weights rounded to bfloat16",
        parallel(mixed=lambda P, causal: rounded("bfloat16")(P)), "", ("forward", "row_sums"),
    ),
    (
        "tf32_operands", "operands of dot products rounded to TF32", parallel(operand=rounded("tf32")), "attn-tf32",
        ("forward",),
    ),
    (
        "favoured_keys", "key j favoured by j / 64", parallel(normalise=favouring), "", ("forward", "permutation")
    ),
    (
        "negative_weights", "2^-6 subtracted from the weights", parallel(mixed=lambda P, causal: P - OFFSET), "",
        ("forward", "row_sums"),
    ),
    (
        "clipped_values", "values clipped to [-2, 2]", parallel(values=lambda v: np.clip(v, -2, 2)), "",
        ("forward", "linearity"),
    ),
    (
        "shifted_values", "2^-6 added to the values", parallel(values=lambda v: v + v.dtype.type(OFFSET)), "",
        ("forward", "constant_value", "row_sums"),
    ),
)  # fmt: skip

BACKWARD = (
    ("no_delta", "no rowsum(dO * O)", vjp(lambda delta: 0 * delta), "attn-no-delta", ("vjp",)),
    (
        "shifted_delta", "rowsum(dO * O) of the row before", vjp(lambda delta: np.roll(delta, 1, axis=0)),
        "attn-no-delta", ("vjp",),
    ),
    ("no_mask", "no causal mask in the backward", vjp(keep=everything), "", ("vjp", "gradient_causality")),
    ("query_scale", "no scale on the gradient of the queries", vjp(query_scale=lambda *_: 1.0), "", ("vjp",)),
    ("padded_rows", "padded rows counted in the gradient of the values", vjp(change=padded_rows), "attn-bwd-tail",
     ("vjp",)),
)  # fmt: skip

MUTANTS: tuple[Mutant, ...] = tabulated("softmax_attention", FORWARD, BACKWARD)
