"""Wrong MixFormer blocks: forward, then gradients.

The letters are those of reference/mixformer.py; `block` and `block_vjp` are the reference with their steps as
arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mixproof.reference import tala
from mixproof.reference.feature_maps import phi_a, phi_b, phi_b_vjp
from mixproof.reference.multi_scale_retention import group_norm_vjp
from mixproof.reference.primitives import Array, group_norm, sigmoid, silu
from mixproof.verify.subjects.mutants import Row, tabulated
from mixproof.verify.subjects.mutants.feature_maps import rooted, unit_back
from mixproof.verify.subjects.mutants.multi_scale_retention import (
    eps_outside,
    over_time,
    pooled,
    root_mean_square,
    sample_norm,
    without_mean,
    without_means,
)
from mixproof.verify.subjects.mutants.retention import chunkwise

CHUNK = 8
Norm = Callable[[Array, float], Array]
NormVJP = Callable[[Array, Array, float], Array]
Step = Callable[..., Array]

# --- builders --------------------------------------------------------------------------------------------------------


def groups(D: int, heads: int) -> list[slice]:
    return [slice(h * D // heads, (h + 1) * D // heads) for h in range(heads)]


def per_head(norm: Norm) -> Callable[[Array, int, float], Array]:
    return lambda O, heads, eps: np.concatenate([norm(O[:, c], eps) for c in groups(O.shape[1], heads)], axis=1)


def rectifier(H: Array) -> Array:
    return np.maximum(H, 0)


head_norms = per_head(group_norm)


def block(
    norm: Norm = group_norm, head_norm: Callable[[Array, int, float], Array] = head_norms,
    query: Step = phi_b, key: Step = phi_b, heads_of: Callable[[int, int], list[Any]] = groups,
    mix: Callable[..., Any] = tala.chunkwise, index: Callable[[int, int], float] = lambda h, heads: h + 1,
    project: Callable[[Array, Array], Array] = lambda A, W_O: A @ W_O, hidden: Step = rectifier,
    first: Callable[[Array, Array], Array] = lambda X, N: X, second: Callable[[Array, Array], Array] = lambda M, N: M,
    post: bool = False, split_features: bool = True, shared_norm: bool = False, affine: float = 1.0,
) -> Callable[..., Array]:  # fmt: skip
    """-> Y. `first` and `second` are the residuals, of what came before the norm and after it."""

    def attend(N, W_Q, W_K, W_V, W_O, heads, eps, norm_eps, chunk):
        Q, K, V = N @ W_Q, N @ W_K, N @ W_V
        if not split_features:
            Q, K = query(Q, norm_eps), key(K, norm_eps)
        O = 0 * V
        for h, c in enumerate(heads_of(V.shape[1], heads)):
            q, k = (query(Q[:, c], norm_eps), key(K[:, c], norm_eps)) if split_features else (Q[:, c], K[:, c])
            O[:, c] = mix(q, k, V[:, c], np.asarray(index(h, heads), V.dtype), np.ones((), V.dtype), chunk=chunk)[0]
        return project(head_norm(O, heads, eps), W_O)

    def forward(
        X, gain1, bias1, gain2, bias2, W_Q, W_K, W_V, W_O, W_1, W_2, heads=2, eps=1e-5, norm_eps=1e-12, chunk=CHUNK
    ):
        projections = (W_Q, W_K, W_V, W_O, heads, eps, norm_eps, chunk)
        if shared_norm:
            gain2, bias2 = gain1, bias1
        if post:
            M = norm(attend(X, *projections) + X, eps) * gain1 + bias1
            return norm(hidden(M @ W_1) @ W_2 + M, eps) * gain2 + bias2
        N = norm(X, eps) * gain1 + bias1
        M = attend(N, *projections) + first(X, N)
        N = norm(M, eps) * gain2 + affine * bias2
        return hidden(N @ W_1) @ W_2 + second(M, N)

    return forward


def block_vjp(
    norm: NormVJP = group_norm_vjp, head_norm: NormVJP = group_norm_vjp, phi: Callable[..., Any] = phi_b_vjp,
    slope: Callable[[Array], Array] = lambda H: H > 0, first: float = 1.0, second: float = 1.0,
    index: Callable[[int], float] = lambda h: h + 1, keys: float = 1.0, values: float = 1.0,
    change: Callable[[dict[str, Array]], dict[str, Array]] = lambda grads: grads, gain: Step = lambda G, N: G * N,
) -> Callable[..., Any]:  # fmt: skip
    """`first` and `second` are factors of what goes back through the residuals, `keys` and `values` of what goes back
    through the projections to the first norm."""

    def gradients(
        cotangents, X, gain1, bias1, gain2, bias2, W_Q, W_K, W_V, W_O, W_1, W_2, heads=2, eps=1e-5, norm_eps=1e-12,
        chunk=CHUNK,
    ):  # fmt: skip
        N1 = group_norm(X, eps) * gain1 + bias1
        Q, K, V = N1 @ W_Q, N1 @ W_K, N1 @ W_V
        parts, O = groups(X.shape[1], heads), 0 * V
        dQ, dK, dV = 0 * V, 0 * V, 0 * V

        def mixed(c, h, run, *first, **options):
            q, k = phi_b(Q[:, c], norm_eps), phi_b(K[:, c], norm_eps)
            return run(*first, q, k, V[:, c], np.asarray(h, V.dtype), np.ones((), V.dtype), chunk=chunk, **options)

        for h, c in enumerate(parts):
            O[:, c] = mixed(c, h + 1, tala.chunkwise)[0]
        A = head_norms(O, heads, eps)
        M = A @ W_O + X
        N2 = group_norm(M, eps) * gain2 + bias2
        H, dY = N2 @ W_1, cotangents["Y"]
        dH = (dY @ W_2.T) * slope(H)
        G2 = dH @ W_1.T
        dM = norm(G2 * gain2, M, eps) + second * dY
        dA = dM @ W_O.T
        for h, c in enumerate(parts):
            upstream = {"O": head_norm(dA[:, c], O[:, c], eps), "S": np.zeros((O[:, c].shape[1],) * 2, O.dtype)}
            d = mixed(c, index(h), tala.vjp, upstream)
            dQ[:, c] = phi({"Y": d["q"]}, Q[:, c], norm_eps)["x"]
            dK[:, c], dV[:, c] = phi({"Y": d["k"]}, K[:, c], norm_eps)["x"], d["v"]
        G1 = dQ @ W_Q.T + keys * dK @ W_K.T + values * dV @ W_V.T
        grads = {"X": norm(G1 * gain1, X, eps) + first * dM, "bias1": np.sum(G1, axis=0), "bias2": np.sum(G2, axis=0)}
        grads |= {"gain1": np.sum(gain(G1, group_norm(X, eps)), axis=0)}
        grads |= {"gain2": np.sum(gain(G2, group_norm(M, eps)), axis=0), "W_1": N2.T @ dH, "W_2": rectifier(H).T @ dY}
        return change(grads | {"W_Q": N1.T @ dQ, "W_K": N1.T @ dK, "W_V": N1.T @ dV, "W_O": A.T @ dM})

    return gradients


# --- pieces that are wrong by themselves -----------------------------------------------------------------------------


def undecayed(q, k, v, h, G, chunk=CHUNK):
    return chunkwise(carry=lambda g, n, chunk: g**0)(q, k, v, tala.omega(h) * G, chunk=chunk)


def column_norm(x: Array, norm_eps: float) -> Array:
    return np.exp(x / np.maximum(rooted(x, axis=0), norm_eps)) if len(x) else x


def reading_a(x: Array, norm_eps: float) -> Array:
    return phi_a(x)


def interleaved(D: int, heads: int) -> list[Any]:
    return [slice(h, None, heads) for h in range(heads)]


def bell(H: Array) -> Array:
    """GELU by its sigmoid approximation."""
    return H * sigmoid(1.702 * H)


# --- tables ----------------------------------------------------------------------------------------------------------

FORWARD: tuple[Row, ...] = (
    ("first_decay", "every head decayed like the first", block(index=lambda h, heads: 1), "", ("forward",)),
    ("heads_from_zero", "heads counted from zero", block(index=lambda h, heads: h), "", ("forward",)),
    ("last_first", "the decays of the heads in reverse", block(index=lambda h, heads: heads - h), "", ("forward",)),
    ("undecayed_state", "the carried state not decayed", block(mix=undecayed), "", ("forward", "forms")),
    ("interleaved", "heads of every second channel", block(heads_of=interleaved), "", ("forward",)),
    ("full_width", "features before the split into heads", block(split_features=False), "", ("forward",)),
    ("other_features", "the other reading of the feature map", block(query=reading_a, key=reading_a), "", ("forward",)),
    ("bare_queries", "queries without a feature map", block(query=lambda x, eps: x), "", ("forward",)),
    (
        "column_norm", "keys normalised over the sequence", block(key=column_norm), "",
        ("forward", "causality", "future_length"),
    ),
    ("no_head_norm", "no norm of the heads", block(head_norm=lambda O, heads, eps: O), "", ("forward",)),
    (
        "pooled_heads", "one norm for all heads", block(head_norm=lambda O, heads, eps: group_norm(O, eps)), "",
        ("forward",),
    ),
    (
        "norm_over_time", "heads normalised over time", block(head_norm=per_head(over_time)), "",
        ("forward", "causality", "future_length"),
    ),
    ("norm_of_all", "one norm for all tokens", block(norm=pooled), "", ("forward", "causality", "future_length")),
    ("sample_variance", "the sample variance", block(norm=sample_norm), "", ("forward",)),
    ("eps_outside", "eps added to the standard deviation", block(norm=eps_outside), "", ("forward",)),
    ("root_mean_square", "norms that do not take off the mean", block(norm=root_mean_square), "", ("forward",)),
    ("shared_norm", "the second norm with gain and bias of the first", block(shared_norm=True), "", ("forward",)),
    ("no_bias", "the bias of the second norm dropped", block(affine=0.0), "", ("forward",)),
    ("no_projection", "no output projection", block(project=lambda A, W_O: A), "", ("forward",)),
    (
        "transposed_projection", "the output projection transposed", block(project=lambda A, W_O: A @ W_O.T), "",
        ("forward",),
    ),
    ("no_first_residual", "the first residual missing", block(first=lambda X, N: 0 * X), "", ("forward",)),
    ("no_second_residual", "the second residual missing", block(second=lambda M, N: 0 * M), "", ("forward",)),
    ("residual_of_norm", "a residual of the normalised tokens", block(first=lambda X, N: N), "", ("forward",)),
    ("post_norm", "norms after the residuals, as section 4.1 has it", block(post=True), "", ("forward",)),
    ("no_rectifier", "no rectifier", block(hidden=lambda H: H), "", ("forward",)),
    ("gelu", "GELU for the rectifier", block(hidden=bell), "", ("forward",)),
    ("silu", "silu for the rectifier", block(hidden=silu), "", ("forward",)),
    ("squared_rectifier", "the rectifier squared", block(hidden=lambda H: rectifier(H) ** 2), "", ("forward",)),
)  # fmt: skip

BACKWARD: tuple[Row, ...] = (
    ("no_first_residual", "nothing back through the first residual", block_vjp(first=0.0), "", ("vjp",)),
    ("no_second_residual", "nothing back through the second residual", block_vjp(second=0.0), "", ("vjp",)),
    ("no_means", "both means dropped from the norms' gradients", block_vjp(norm=without_means), "", ("vjp",)),
    (
        "no_head_mean", "a mean dropped from the gradient of the heads' norm", block_vjp(head_norm=without_mean), "",
        ("vjp",),
    ),
    (
        "no_head_norm", "nothing of the heads' norm in the gradient", block_vjp(head_norm=lambda G, x, eps: G), "",
        ("vjp",),
    ),
    (
        "constant_norm", "the norm of queries and keys taken for a constant", block_vjp(phi=unit_back(inward=0.0)), "",
        ("vjp",),
    ),
    ("no_rectifier", "everything back through the rectifier", block_vjp(slope=lambda H: H**0), "", ("vjp",)),
    ("rectifier_sign", "the other side back through the rectifier", block_vjp(slope=lambda H: H < 0), "", ("vjp",)),
    ("no_keys", "nothing back through the keys", block_vjp(keys=0.0), "", ("vjp",)),
    ("no_values", "nothing back through the values", block_vjp(values=0.0), "", ("vjp",)),
    ("first_decay", "every head's gradient decayed like the first's", block_vjp(index=lambda h: 1), "", ("vjp",)),
    ("bare_gain", "gains with the gradient of biases", block_vjp(gain=lambda G, N: G), "", ("vjp",)),
    (
        "transposed_projection", "the gradient of the output projection transposed",
        block_vjp(change=lambda grads: grads | {"W_O": grads["W_O"].T}), "", ("vjp",),
    ),
)  # fmt: skip

MUTANTS = tabulated("mixformer", FORWARD, BACKWARD)
