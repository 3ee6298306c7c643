"""Several sequences in one: a decay of zero begins a new one; so does the next sequence of a batch. And a window is a
mask. What goes wrong at such boundaries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mixproof.reference import operator as find_operator
from mixproof.reference.gma import responsibilities
from mixproof.reference.primitives import Array
from mixproof.verify.subjects.mutants import Mutant
from mixproof.verify.subjects.mutants.calling import Run, honest, of_cotangents
from mixproof.verify.subjects.mutants.gma_hybrid import age, before, in_window, weights
from mixproof.verify.subjects.mutants.softmax_attention import by_width
from mixproof.verify.subjects.mutants.tala_decays import chunkwise

CHUNK = 8
Change = Callable[[Array], Array]

# --- pieces that are wrong by themselves -----------------------------------------------------------------------------


def never(A: Array) -> Array:
    """Where a sequence begins is not looked at."""
    return np.where(A == 0, 1, A).astype(A.dtype)


def between_chunks(A: Array) -> Array:
    """A sequence that begins inside a chunk goes on with the state of the one before."""
    inside = np.arange(len(A)).reshape(-1, *(1,) * (A.ndim - 1)) % CHUNK != 0
    return np.where(inside & (A == 0), 1, A).astype(A.dtype)


def mask_on_values(
    q: Array, k: Array, v: Array, mu: Array, omega: Array, alpha: Array, lam: Array, scale: float | None = None,
    eps: float = 1e-6, v_min: float = 0.0, window: int = 4,
) -> Array:  # fmt: skip
    """What the mask hides counts in the mass: it makes values zero, not weights."""
    GQ, GK = (responsibilities(x, mu, omega, alpha, v_min) for x in (q, k))
    n = age(len(q))
    P, At = weights(q, k, in_window(n, window, CHUNK), by_width(scale, q.shape[1])), lam * (GQ @ GK.T)
    hidden = np.where(before(n, window, CHUNK), At, 0)
    mass = np.sum(P + np.where(n >= 0, At, 0), axis=1, keepdims=True)
    return (P + hidden) @ v / (mass + eps)


def sequence_before() -> Run:
    """The sequences of a batch lie one after the other: the first taps of each reach into the one before, whatever
    rows it was given. Of sequences shorter than the taps nothing is done so."""
    operator = find_operator("mamba.block")
    right = honest(operator)
    run = of_cotangents(operator, dict)

    def packed(**inputs: Any) -> Any:
        x, u0, rows = inputs["x"], inputs.get("u0"), inputs["w_conv"].shape[-1] - 1
        if u0 is None or x.shape[2] < rows:
            return right(**inputs)
        U = x @ inputs["W_in"]
        last = U[:-1, :, U.shape[2] - rows :]
        return right(**inputs | {"u0": np.concatenate([u0[:1], last])})

    packed.vjp = run.vjp  # type: ignore[attr-defined]
    return packed


# --- tables ----------------------------------------------------------------------------------------------------------

MUTANTS: tuple[Mutant, ...] = (
    *(
        Mutant(name, operator, what, ("reset",), forward=chunkwise(operator, decays=decays), source=source)
        for operator in ("tala.time_varying", "tala.key_channel", "tala.value_channel")
        for name, what, decays, source in (
            ("never_reset", "decays of zero taken for one", never, "scan-seq-ignored"),
            ("aligned_reset", "decays of zero obeyed at chunk starts only", between_chunks, "tala-vl-reset-aligned"),
        )
    ),
    Mutant(
        "mask_on_values", "gma.hybrid", "the window masked in the values, not in the mass of the mixture",
        ("forward", "row_sums"), forward=mask_on_values, source="gma-mask-v-only",
    ),
    Mutant(
        "sequence_before", "mamba.block", "taps that reach into the sequence before, in the batch",
        ("forward", "causality"), batched=sequence_before(), source="conv-cross-seq",
    ),
)  # fmt: skip
