"""Mutants, wrong gradients, that one law alone kills. See solitary.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from mixproof.reference import feature_maps, gma
from mixproof.reference.primitives import Array
from mixproof.verify.subjects.mutants import Mutant
from mixproof.verify.subjects.mutants.retention import vjp

CHUNK = 8
FAINT = 2.0**-33
Gradients = dict[str, Array]


def faint_leak(cotangents: Gradients, x: Array, norm_eps: float = 1e-12) -> Gradients:
    """2^-33 of the gradient of each row given to the row after."""
    dx = feature_maps.phi_b_vjp(cotangents, x, norm_eps)["x"]
    return {"x": dx + dx.dtype.type(FAINT) * np.concatenate([0 * dx[:1], dx[:-1]])}


def no_final_state(grads: Gradients, cotangents: Gradients, q: Array, k: Array, v: Array, *rest: Any) -> Gradients:
    """Where no cotangent of the final state is given, the mask of the backward lacks its diagonal."""
    if np.any(cotangents["S"]):
        return grads
    scale = rest[1]
    return grads | {"k": grads["k"] - np.sum(cotangents["O"] * v, axis=1, keepdims=True) * scale * q}


def no_final_memory(cotangents, q, k, v, mu, omega, alpha, eps=1e-6, v_min=0.0, S0=None, Z0=None, chunk=CHUNK):
    """Where no cotangent of the final memory is given, the queries' part of the means' gradient is not added."""
    d = gma.chunkwise_vjp(cotangents, q, k, v, mu, omega, alpha, eps, v_min, S0, Z0, chunk)
    if np.any(cotangents["S"]) or np.any(cotangents["Z"]):
        return d
    GQ = gma.responsibilities(q, mu, omega, alpha, v_min)
    GK = gma.responsibilities(k, mu, omega, alpha, v_min)
    dGK = gma.mixing.chunkwise_vjp(cotangents, GQ, GK, v, eps, S0, Z0, chunk)["GK"]
    return d | {"mu": gma.responsibilities_vjp({"gamma": dGK}, k, mu, omega, alpha, v_min)["mu"]}


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "vjp.faint_leak", "tala.phi_b", "2^-33 of each row's gradient given to the next row", ("gradient_causality",),
        vjp=faint_leak,
    ),
    Mutant(
        "vjp.no_final_state", "retention", "no gradient of a token's own key unless the final state has a cotangent",
        ("euler",), vjp=vjp(change=no_final_state),
    ),
    Mutant(
        "vjp.no_final_memory", "gma.causal",
        "the queries' part of the means' gradient dropped unless the final memory has a cotangent",
        ("gradient_identities",), vjp=no_final_memory,
    ),
)  # fmt: skip
