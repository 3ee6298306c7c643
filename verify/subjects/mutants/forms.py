"""Wrong forms of the reference: what floating point cannot see, and what float64 alone shows."""

from __future__ import annotations

from typing import Any

import numpy as np

from mixproof.reference import gma_mixing, retention
from mixproof.reference.primitives import Array
from mixproof.verify.subjects.mutants import Mutant
from mixproof.verify.subjects.mutants.gma import mixture

BELOW = 2**35  # twice: 2^-70 of a number is lost in float64
FAR = np.float64(2.0**22)  # a NumPy number: float32 plus it is float64


def nearly(q: Array, k: Array, v: Array, gamma: Array, scale: Any = 1.0, S0: Array = None) -> tuple[Array, Array]:
    """The recurrent form, its state too large by 2^-70 of it: as a decay is that was once rounded to long double."""
    O, S = retention.recurrent(q, k, v, gamma, scale, S0)
    return O, S + S / BELOW / BELOW


def double_eps(GQ: Array, GK: Array, V: Array, eps: Any, S0: Array = None, Z0: Array = None) -> tuple[Array, ...]:
    return gma_mixing.recurrent(GQ, GK, V, eps + eps, S0, Z0)


def double_keys(GQ: Array, GK: Array, V: Array, eps: Any) -> Array:
    return gma_mixing.dense(GQ, GK + GK, V, eps)


def moved(x: Array, mu: Array, omega: Array, alpha: Array, v_min: float = 0.0) -> Array:
    """Tokens and means moved by 2^22, in float64: the same function. Of 52 digits 22 are lost, which float32 inputs do
    not show."""
    return mixture()(x + FAR, mu + FAR, omega, alpha, v_min)


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "nearly", "retention", "a state too large by 2^-70", ("exact",), forward=nearly, form="recurrent", exact=nearly
    ),
    Mutant(
        "field.double_eps", "gma.causal", "epsilon added twice, over a field", ("exact",), form="recurrent",
        exact=double_eps,
    ),
    Mutant(
        "field.double_keys", "gma.bidirectional", "keys counted twice, over a field", ("exact",), form="dense",
        exact=double_keys,
    ),
    Mutant(
        "moved", "gma.responsibilities", "tokens and means moved by 2^22 and half the digits lost", ("certified",),
        forward=moved, form="moved",
    ),
)  # fmt: skip
