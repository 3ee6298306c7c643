"""Wrong multi-head low-rank attentions: forward, then gradients.

The letters are those of reference/mlra.py. Each builder is the reference with its steps as arguments; a mutant changes
one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mixproof.reference import latent_attention as latent
from mixproof.reference import mlra
from mixproof.reference.caches import appended
from mixproof.reference.latent_attention import heads_first, rotated, tokens_first
from mixproof.reference.primitives import Array, group_norm, rms_norm
from mixproof.verify.subjects.mutants import tabulated

Norm = Callable[[Array, float], Array]
Scale = Callable[[int, int, int], float]

# --- builders --------------------------------------------------------------------------------------------------------


def summed(
    norm: Norm = rms_norm, gains: Callable[[Array], Array] = lambda gain: gain, both: Norm = lambda c, eps: c,
    scaled: Scale = lambda K, R, L: (K + R) ** -0.5, start: Callable[[int], int] = lambda P: P,
    ups: Callable[[Array], Array] = lambda U: U, blocks: Callable[[Array], Array] = lambda C: C,
    total: Callable[[Array], Array] = lambda O: np.sum(O, axis=0) * len(O) ** -0.5, weigh: Any = latent.weights,
) -> Callable[..., Any]:  # fmt: skip
    """`both` is done to latents when they are read from the cache, `total` to what the heads of each block return."""

    def forward(qc, qr, c, kr, gain, Uk, Uv, scale=None, base=10000.0, eps=1e-6, C0=None, Kr0=None):
        n = start(0 if C0 is None else len(C0)) + np.arange(len(c))
        C, Kr = appended(C0, norm(c, eps) * gains(gain)), appended(Kr0, rotated(kr, n, base))
        Q, Qr = (heads_first(x[:, :, None]) for x in (qc, rotated(qr, n, base)))
        s = scaled(qc.shape[-1], qr.shape[-1], c.shape[-1]) if scale is None else scale
        read = blocks(both(C, eps))
        A = [latent.logits(Q, latent.up(read[None, :, x], ups(Uk[x])), Qr, Kr, s) for x in range(len(Uk))]
        P = weigh(np.stack(A))
        values = [latent.up(read[None, :, x], Uv[x]) for x in range(len(Uk))]
        O = np.stack([tokens_first(latent.mixed(P[x], v))[:, :, 0] for x, v in enumerate(values)])
        return total(O), C, Kr

    return forward


def summed_vjp(change: Callable[..., dict[str, Array]], factor: float | None = None) -> Callable[..., Any]:
    """The right gradients of O times `factor`, changed."""

    def gradients(cotangents, c, gain, eps=1e-6, **inputs):
        upstream = cotangents | ({} if factor is None else {"O": cotangents["O"] * len(gain) ** factor})
        grads = mlra.vjp(upstream, c=c, gain=gain, eps=eps, **inputs)
        return grads | change(grads, c, eps)

    return gradients


def printed(
    blocks: Callable[[Array], Array] = lambda C: C, ups: Callable[[Array], Array] = lambda U: U,
    start: Callable[[int], int] = lambda P: P, path: Callable[..., Array] = latent.expanded,
    scaled: Scale = lambda K, R, L: (K + R) ** -0.5, everywhere: bool = False,
) -> Callable[..., Any]:  # fmt: skip
    """`everywhere`: heads read all blocks, by the up-projections of their own."""

    def forward(qc, qr, c, kr, Uk, Uv, scale=None, base=10000.0, C0=None, Kr0=None):
        n = start(0 if C0 is None else len(C0)) + np.arange(len(c))
        C, Kr, turned = appended(C0, c), appended(Kr0, rotated(kr, n, base)), rotated(qr, n, base)
        s = scaled(qc.shape[-1], qr.shape[-1], c.shape[-1]) if scale is None else scale
        read = np.broadcast_to(np.sum(C, axis=1, keepdims=True), C.shape) if everywhere else blocks(C)
        heads = [
            path(*(heads_first(q[:, x][:, :, None]) for q in (qc, turned)), read[None, :, x], Kr, ups(Uk[x]), Uv[x], s)
            for x in range(len(Uk))
        ]
        return np.stack([tokens_first(O)[:, :, 0] for O in heads], axis=1), C, Kr

    return forward


# --- pieces that are wrong by themselves -----------------------------------------------------------------------------


def over_all(c: Array, eps: float) -> Array:
    """One root mean square for all blocks."""
    return rms_norm(c.reshape(len(c), c.shape[1] * c.shape[2]), eps).reshape(c.shape)


def eps_outside(c: Array, eps: float) -> Array:
    return c / (np.sqrt(np.mean(c * c, axis=-1, keepdims=True)) + eps)


def by_length(c: Array, eps: float) -> Array:
    """The root of the sum, not of the mean."""
    return c / np.sqrt(np.sum(c * c, axis=-1, keepdims=True) + eps)


def first_block(C: Array) -> Array:
    return np.broadcast_to(C[:, :1], C.shape)


def next_block(C: Array) -> Array:
    return np.roll(C, 1, axis=1)


def first_head(U: Array) -> Array:
    return np.broadcast_to(U[:1], U.shape)


def of_summed_logits(A: Array) -> Array:
    """One softmax for all blocks."""
    return np.broadcast_to(latent.weights(np.sum(A, axis=0)), A.shape)


def mean_taken_off(c: Array, eps: float) -> Array:
    return group_norm(c, eps)


# --- tables ----------------------------------------------------------------------------------------------------------

FORWARD = (
    ("one_softmax", "one softmax of logits summed over blocks", summed(weigh=of_summed_logits), "", ("forward",)),
    ("no_factor", "the factor X^-1/2 missing", summed(total=lambda O: np.sum(O, axis=0)), "", ("forward",)),
    ("mean_of_blocks", "1 / X for X^-1/2", summed(total=lambda O: np.mean(O, axis=0)), "", ("forward",)),
    ("no_norm", "latents that are not normalised", summed(norm=lambda c, eps: c), "", ("forward",)),
    ("norm_over_all", "one norm for all blocks", summed(norm=over_all), "", ("forward",)),
    ("layer_norm", "a norm that takes off the mean", summed(norm=mean_taken_off), "", ("forward",)),
    ("root_of_sum", "the root of the sum of squares, not of their mean", summed(norm=by_length), "", ("forward",)),
    ("eps_outside", "eps added to the root", summed(norm=eps_outside), "", ("forward",)),
    ("no_gain", "no gain", summed(gains=lambda gain: gain**0), "", ("forward",)),
    ("normalised_twice", "cached latents normalised again", summed(both=rms_norm), "", ("forward", "split")),
    ("block_zero", "the first block read for all", summed(blocks=first_block), "", ("forward",)),
    ("head_zero", "the first head's Uk for all heads", summed(ups=first_head), "mla-uk-head0", ("forward",)),
    ("from_zero", "positions that start anew in every call", summed(start=lambda P: 0), "", ("forward", "split")),
    (
        "latent_scale", "the scale of the latent's width", summed(scaled=lambda K, R, L: (L + R) ** -0.5),
        "mla-scale-latent", ("forward",),
    ),
)  # fmt: skip

BACKWARD = (
    ("no_factor", "the factor X^-1/2 missing", summed_vjp(lambda *_: {}, 0.5), "", ("vjp",)),
    (
        "not_divided", "the norm's gradient not divided by the root mean square",
        summed_vjp(lambda grads, c, eps: {"c": grads["c"] * np.sqrt(np.mean(c * c, axis=-1, keepdims=True) + eps)}),
        "", ("vjp",),
    ),
    ("no_gain", "no gradient for the gain", summed_vjp(lambda grads, *_: {"gain": 0 * grads["gain"]}), "", ("vjp",)),
)  # fmt: skip

PRINTED = (
    ("next_block", "the heads of a block reading the next one", printed(blocks=next_block), "", ("forward",)),
    ("every_block", "heads that read the sum of all blocks", printed(everywhere=True), "", ("forward",)),
    ("head_zero", "the first head's Uk for all heads of a block", printed(ups=first_head), "mla-uk-head0",
     ("forward",)),
    ("from_zero", "positions that start anew in every call", printed(start=lambda P: 0), "", ("forward", "split")),
    (
        "latent_scale", "the scale of the latent's width, for queries that absorbed Uk",
        printed(path=latent.absorbed, scaled=lambda K, R, L: (L + R) ** -0.5), "mla-scale-latent", ("forward",),
    ),
)  # fmt: skip

MUTANTS = (*tabulated("mlra", FORWARD, BACKWARD), *tabulated("mlra.concatenated", PRINTED, ()))
