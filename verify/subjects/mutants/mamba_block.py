"""Wrong Mamba blocks: forward, then gradients.

The letters are those of reference/mamba_block.py; `block` is the reference with its steps as arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mixproof.reference import mamba, mamba_block
from mixproof.reference.primitives import Array, sigmoid, silu, softplus
from mixproof.verify.subjects.mutants import Row, tabulated

CHUNK = 8
Change = Callable[[Array], Array]
Convolve = Callable[[Array, Array, Array], Array]

# --- builders --------------------------------------------------------------------------------------------------------


def convolve(taps: Array, w: Array, b: Array) -> Array:
    T = len(taps) - w.shape[1] + 1
    return sum((w[:, j] * taps[j : j + T] for j in range(w.shape[1])), start=b + 0 * taps[:T])


def gated(y: Array, Z: Array, S: Array, skip: Array) -> Array:
    return (y + skip * S) * silu(Z)


def handed_on(taps: Array, U: Array, V: Array, rows: int) -> Array:
    return taps[len(U) :]


def block(
    convolved: Convolve = convolve, activated: Change = silu, step: Change = softplus,
    rates: Change = lambda A_log: -np.exp(A_log), gate: Callable[..., Array] = gated,
    kept: Callable[..., Array] = handed_on, gain: Callable[[Array, Array], Array] = mamba.AT_ONCE.gain,
    selected: Callable[[Array, Array], Array] = lambda S, U: S, bias: float = 1.0, before: Change = lambda u: u,
) -> Callable[..., Any]:  # fmt: skip
    """-> Y, u, h. `selected` is what steps, B and C are linear in, of the convolution's result and its input."""

    def forward(
        x, W_in, W_z, w_conv, b_conv, W_down, W_dt, b_dt, W_B, W_C, A_log, skip, W_out, u0=None, h0=None, chunk=CHUNK
    ):
        U, rows = x @ W_in, w_conv.shape[1] - 1
        taps = np.concatenate([before(0 * w_conv.T[1:] if u0 is None else u0), U])
        V = convolved(taps, w_conv, b_conv)
        S = activated(V)
        P = selected(S, U)
        delta, A = step(P @ W_down @ W_dt + bias * b_dt), rates(A_log)
        a, F = np.exp(delta[:, :, None] * A), gain(delta, A)
        y, h = mamba.in_steps(S, a, F, P @ W_B, P @ W_C, 0 * skip, h0)
        return gate(y, x @ W_z, S, skip) @ W_out, kept(taps, U, V, rows), h

    return forward


def block_vjp(
    change: Callable[[dict[str, Array], dict[str, Array]], dict[str, Array]] = lambda grads, inputs: grads,
    final: tuple[float, float] = (1.0, 1.0),
) -> Callable[..., Any]:
    """`final` are factors of the cotangents of u and h."""

    def gradients(cotangents, x, chunk=CHUNK, **inputs):
        up = cotangents | {n: factor * cotangents[n] for n, factor in zip("uh", final, strict=True)}
        return change(mamba_block.vjp(up, x, **inputs, chunk=chunk), inputs)

    return gradients


# --- pieces that are wrong by themselves -----------------------------------------------------------------------------


def centred(taps: Array, w: Array, b: Array) -> Array:
    """The middle tap is that of the token."""
    return convolve(np.concatenate([taps[w.shape[1] // 2 :], 0 * taps[: w.shape[1] // 2]]), w, b)


def short(taps: Array, U: Array, V: Array, rows: int) -> Array:
    """The rows handed over are lost where fewer tokens than rows came after them."""
    return taps[len(U) :] if len(U) >= rows else np.concatenate([0 * taps[: rows - len(U)], U])


def restarted(taps: Array, w: Array, b: Array) -> Array:
    """What the last partial block of the convolution sees of the tokens before it, missing."""
    rows = w.shape[1] - 1
    T = len(taps) - rows
    n = T % CHUNK
    alone = convolve(np.concatenate([0 * taps[:rows], taps[len(taps) - n :]]), w, b)
    return np.concatenate([convolve(taps, w, b)[: T - n], alone])


def scaled(name: str, factor: Callable[[dict[str, Array]], Array]) -> Callable[..., dict[str, Array]]:
    return lambda grads, inputs: grads | {name: grads[name] * factor(inputs)}


# --- tables ----------------------------------------------------------------------------------------------------------

FORWARD: list[Row] = [
    ("skip_after_gate", "the skip added after the gate",
     block(gate=lambda y, Z, S, skip: y * silu(Z) + skip * S), "scan-D-after", ("forward",)),
    ("sigmoid_gate", "sigmoid(Z) for silu(Z)", block(gate=lambda y, Z, S, skip: (y + skip * S) * sigmoid(Z)), "",
     ("forward",)),
    ("gated_skip", "the gate on the skip alone", block(gate=lambda y, Z, S, skip: y + skip * S * silu(Z)), "",
     ("forward",)),
    ("no_skip", "no skip", block(gate=lambda y, Z, S, skip: y * silu(Z)), "", ("forward",)),
    ("centred_taps", "a convolution about the token", block(centred), "", ("forward", "causality")),
    ("reversed_taps", "taps the wrong way round", block(lambda taps, w, b: convolve(taps, w[:, ::-1], b)), "",
     ("forward",)),
    ("restarted_taps", "a convolution that starts anew in the last partial block", block(restarted), "conv-block-halo",
     ("forward",)),
    ("not_activated", "a convolution without its activation", block(activated=lambda V: V), "", ("forward",)),
    ("no_taps_before", "the handed-over rows of the convolution ignored", block(before=lambda u: 0 * u), "",
     ("forward", "split")),
    ("short_rows", "the convolution's rows lost by a short call", block(kept=short), "conv-fs-short",
     ("forward", "split")),
    ("rows_after", "rows handed on after the convolution, not before",
     block(kept=lambda taps, U, V, rows: np.concatenate([taps[:rows], V])[len(U) :]), "conv-fs-post",
     ("forward", "split")),
    ("selected_before", "steps, B and C from before the convolution", block(selected=lambda S, U: U), "", ("forward",)),
    ("bias_twice", "the bias of the steps added twice", block(bias=2.0), "", ("forward",)),
    ("exponential_step", "exp for softplus", block(step=np.exp), "", ("forward",)),
    ("no_logarithm", "rates -A_log", block(rates=lambda A: -A), "", ("forward",)),
    ("held", "B bar of a token that is held", block(gain=mamba.HELD.gain), "", ("forward",)),
]  # fmt: skip
BACKWARD: list[Row] = [
    ("no_final", "the cotangent of the final state dropped", block_vjp(final=(1.0, 0.0)), "", ("vjp",)),
    ("no_rows", "the cotangent of the convolution's rows dropped", block_vjp(final=(0.0, 1.0)), "conv-dst-pass",
     ("vjp",)),
    ("rate_of_logarithm", "the gradient of A for that of A_log",
     block_vjp(scaled("A_log", lambda inputs: -np.exp(-inputs["A_log"]))), "", ("vjp",)),
    ("taps_reversed", "the taps' gradient the wrong way round",
     block_vjp(lambda grads, inputs: grads | {"w_conv": grads["w_conv"][:, ::-1]}), "", ("vjp",)),
    ("no_initial", "no gradient for the initial rows", block_vjp(lambda grads, inputs: grads | {"u0": 0 * grads["u0"]}),
     "", ("vjp",)),
]  # fmt: skip

MUTANTS = tabulated("mamba.block", FORWARD, BACKWARD)
