"""Narrow formats, and functions written down as they are printed: what overflows, underflows or cannot be held."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mixproof.reference.latent_attention import rotated
from mixproof.reference.mome_routers import R3
from mixproof.reference.primitives import Array
from mixproof.verify.arithmetic import round_to
from mixproof.verify.subjects.mutants import Mutant, ccgqa, mla, titans
from mixproof.verify.subjects.mutants.gma import ALL, causal, cross, mixture
from mixproof.verify.subjects.mutants.mome import routed

LARGEST = 80.0  # exp of it is finite in float32


def log_one_plus_exp(w: Array) -> Array:
    """softplus without its linear branch."""
    return np.log(1 + np.exp(w))


def unguarded(s: Array) -> Array:
    """exp(s) / sum exp(s), kept from overflow but not from 0 / 0."""
    e = np.exp(np.minimum(s, s.dtype.type(LARGEST)))
    return e / np.sum(e, axis=1, keepdims=True)


def float16_momentum(S: Array, eta: Array, write: Array) -> Array:
    return round_to(eta * S + write, "float16").astype(S.dtype)


def at_bfloat16(x: Array, n: np.ndarray, base: float) -> Array:
    """Turned at positions that are held in bfloat16: above 256 not every number is one."""
    return rotated(x, round_to(np.asarray(n, dtype=np.float64), "bfloat16"), base)


def _of(operator: str) -> Callable[..., Array]:
    gamma = mixture(variance=log_one_plus_exp)
    return gamma if operator == ALL[0] else (causal if operator == "gma.causal" else cross)(gamma)


POSITIONS = {
    "mla": mla.single(query=at_bfloat16, key=at_bfloat16),
    "gqla": mla.grouped(query=at_bfloat16, key=at_bfloat16),
    "ccgqa": ccgqa.attention(turn=at_bfloat16),
}

MUTANTS: tuple[Mutant, ...] = (
    *(
        Mutant(
            "log_one_plus_exp", operator, "log(1 + exp(omega)) for softplus", ("extremes",), forward=_of(operator),
            source="scan-sp-overflow",
        )
        for operator in ALL
    ),
    Mutant(
        "unguarded", "mome", "0 / 0 where the exponentials of all logits vanish", ("extremes",),
        forward=routed(lambda q, k, v, W: unguarded(R3(k, v, W))), source="route-no-eps",
    ),
    *(
        Mutant(
            "float16_momentum", operator, "the momentum kept in float16", ("forward", "extremes"),
            forward=titans.learner(operator, moved=float16_momentum), source="delta-state-fp16",
        )
        for operator in (titans.LINEAR, titans.CHUNKED)
    ),
    *(
        Mutant(
            "bfloat16_positions", operator, "positions held in bfloat16", ("extremes",), forward=forward,
            source="rope-pos-bf16",
        )
        for operator, forward in POSITIONS.items()
    ),
)  # fmt: skip
