"""Wrong gradients of Gaussian mixture attention: wrong in mixing, then wrong in responsibilities.

The letters are those of reference/gma_mixing.py. Each builder is the reference's gradient with its steps as arguments;
a mutant changes one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mixproof.reference import gma, gma_mixing
from mixproof.reference.primitives import Array, causal_mask, sigmoid, softplus
from mixproof.verify.subjects.mutants import Mutant
from mixproof.verify.subjects.mutants.gma import rounded

Gradients = dict[str, Array]
Vjp = Callable[..., Gradients]

# --- builders --------------------------------------------------------------------------------------------------------


def mixing(
    mass: float = 1.0, memory: float = 1.0, keep: Callable[[int], np.ndarray] = causal_mask,
    tail: Callable[[int], int] = lambda T: T, carried: Callable[[Array], Array] = lambda R: R,
) -> Vjp:  # fmt: skip
    """Gradients of <O, dO> + <S, dS> + <Z, dZ> for GQ, GK, V, S0, Z0, by the masked affinity M written out; dD is
    multiplied by `mass`, dS and dZ by `memory`."""

    def vjp(cotangents: Gradients, GQ: Array, GK: Array, V: Array, eps: float, S0: Array, Z0: Array) -> Gradients:
        G, R, r = cotangents["O"], memory * cotangents["S"], memory * cotangents["Z"]
        T = len(GQ)
        S, Z = gma_mixing.aggregate(GK[:0], V[:0], S0, Z0)
        M, allowed = gma_mixing.affinity(GQ, GK, causal=True), keep(T)
        D = GQ @ Z + np.sum(M, axis=1) + eps
        dU = G / D[:, None]
        dD = -mass * np.sum(dU * (GQ @ S + M @ V) / D[:, None], axis=1)
        P = np.where(allowed, dU @ V.T + dD[:, None], 0)
        M = np.where(allowed, GQ @ GK.T, 0)
        n = tail(T)
        R, r = carried(R), carried(r)
        return {
            "GQ": dU @ S.T + dD[:, None] * Z[None, :] + P @ GK,
            "GK": V @ R.T + r[None, :] + P[:n].T @ GQ[:n],
            "V": GK @ R + M[:n].T @ dU[:n],
            "S0": R + GQ.T @ dU,
            "Z0": r + dD @ GQ,
        }

    return vjp


def pull_back(
    softmax: Callable[[Array, Array], Array] = lambda g, G: g * (G - np.sum(g * G, axis=1, keepdims=True)),
    log_determinant: float = 1.0, square: float = 1.0, chain: Callable[[Array], Array] = sigmoid, shift: float = 1.0,
) -> Vjp:  # fmt: skip
    """Gradients of <gamma, dgamma> for x, mu, omega, alpha; `softmax` is (18)."""

    def vjp(cotangents: Gradients, x: Array, mu: Array, omega: Array, alpha: Array, v_min: float = 0.0) -> Gradients:
        gamma = gma.responsibilities(x, mu, omega, alpha, v_min)
        var = softplus(omega) + v_min
        dS = softmax(gamma, cotangents["gamma"])
        E = x[:, None, :] - mu[None, :, :]
        W = dS[:, :, None] * E / var
        dalpha = np.sum(dS, axis=0)
        dvar = (square * np.sum(W * E, axis=0) - log_determinant * dalpha[:, None]) / var / 2
        return {"x": -np.sum(W, axis=1), "mu": shift * np.sum(W, axis=0), "omega": dvar * chain(omega), "alpha": dalpha}

    return vjp


def causal(mix: Vjp | None = None, query: Vjp = gma.responsibilities_vjp, key: Vjp | None = None) -> Vjp:
    """Through the mixing, then through the responsibilities of queries and of keys, which share the mixture."""
    mix, key = mix or mixing(), key or query

    def vjp(cotangents, q, k, v, mu, omega, alpha, eps=1e-6, v_min=0.0, S0=None, Z0=None):
        parameters = (mu, omega, alpha, v_min)
        d = mix(cotangents, gma.responsibilities(q, *parameters), gma.responsibilities(k, *parameters), v, eps, S0, Z0)
        Q, K = query({"gamma": d["GQ"]}, q, *parameters), key({"gamma": d["GK"]}, k, *parameters)
        shared = {name: Q[name] + K[name] for name in ("mu", "omega", "alpha")}
        return {"q": Q["x"], "k": K["x"], "v": d["V"], "S0": d["S0"], "Z0": d["Z0"]} | shared

    return vjp


def full(mass: float = 1.0, query: Vjp = gma.responsibilities_vjp, key: Vjp | None = None) -> Vjp:
    """The same for bidirectional and cross attention."""

    def mix(cotangents: Gradients, GQ: Array, GK: Array, V: Array, eps: float, S0: Array, Z0: Array) -> Gradients:
        S, Z = gma_mixing.aggregate(GK, V)
        D = GQ @ Z + eps
        dU = cotangents["O"] / D[:, None]
        dD = -mass * np.sum(dU * (GQ @ S) / D[:, None], axis=1)
        R, r = GQ.T @ dU, dD @ GQ
        return {"GQ": dU @ S.T + dD[:, None] * Z, "GK": V @ R.T + r, "V": GK @ R, "S0": R, "Z0": r}

    return causal(mix, query, key)


def everything(n: int) -> np.ndarray:
    return np.ones((n, n), dtype=bool)


def diagonal_only(gamma: Array, dgamma: Array) -> Array:
    return gamma * (1 - gamma) * dgamma


def no_centring(gamma: Array, dgamma: Array) -> Array:
    return gamma * dgamma


def centred_over_tokens(gamma: Array, dgamma: Array) -> Array:
    return gamma * (dgamma - np.sum(gamma * dgamma, axis=0, keepdims=True))


def nothing(cotangents: Gradients, x: Array, mu: Array, omega: Array, alpha: Array, v_min: float = 0.0) -> Gradients:
    honest = gma.responsibilities_vjp(cotangents, x, mu, omega, alpha, v_min)
    return honest | {name: 0 * honest[name] for name in ("mu", "omega", "alpha")}


# --- tables ----------------------------------------------------------------------------------------------------------

# name -> what, how, mutants.json, laws that kill it for responsibilities beside `vjp`
FEATURES: dict[str, tuple[str, Vjp, str, tuple[str, ...]]] = {
    "diagonal_jacobian": (
        "the softmax Jacobian's diagonal alone", pull_back(diagonal_only), "gma-jac-diag", ("gradient_identities",)
    ),
    "uncentred_jacobian": (
        "gamma dgamma for the gradient of the logits", pull_back(no_centring), "gma-jac-diag", ("gradient_identities",)
    ),
    "jacobian_over_tokens": (
        "the softmax Jacobian taken over tokens", pull_back(centred_over_tokens), "gma-key-over-time", ()
    ),
    "no_log_determinant": (
        "the variance's gradient without its log-determinant term", pull_back(log_determinant=0),
        "gma-dvar-nologdet", (),
    ),
    "no_square": ("the variance's gradient without its distance term", pull_back(square=0), "", ()),
    "no_softplus": ("the gradient of the variance for that of omega", pull_back(chain=np.ones_like), "", ()),
    "mean_sign": (
        "the sign of the means' gradient flipped", pull_back(shift=-1), "", ("gradient_identities",)
    ),
}  # fmt: skip

CAUSAL: tuple[Mutant, ...] = tuple(
    Mutant(f"vjp.{name}", "gma.causal", what, killed_by, vjp=vjp, source=source)
    for name, what, vjp, source, killed_by in (
        (
            "no_memory_cotangent", "the cotangent of the final memory dropped", causal(mixing(memory=0)),
            "tala-no-dht", ("vjp",),
        ),
        (
            "constant_mass", "the denominator constant in the backward", causal(mixing(mass=0)), "gma-den-detach",
            ("vjp",),
        ),
        (
            "no_mask", "no causal mask in the backward", causal(mixing(keep=everything)), "",
            ("vjp", "gradient_causality"),
        ),
        (
            "no_tail", "the last, short chunk of rows missing from the gradients of keys and values",
            causal(mixing(tail=lambda T: T - T % 8)), "attn-bwd-tail", ("vjp",),
        ),
        (
            "bfloat16_cotangent", "the memory's cotangent rounded to bfloat16",
            causal(mixing(carried=rounded("bfloat16"))), "tala-dS-bf16", ("vjp",),
        ),
        (
            "queries_only", "the mixture's gradient from the queries alone", causal(key=nothing), "",
            ("vjp", "gradient_identities"),
        ),
    )
)  # fmt: skip

FULL: tuple[Mutant, ...] = tuple(
    Mutant(f"vjp.{name}", operator, what, killed_by, vjp=vjp, source=source)
    for name, what, vjp, source, killed_by in (
        ("constant_mass", "the denominator constant in the backward", full(mass=0), "gma-den-detach", ("vjp",)),
        (
            "queries_only", "the mixture's gradient from the queries alone", full(key=nothing), "",
            ("vjp", "gradient_identities"),
        ),
    )
    for operator in ("gma.bidirectional", "gma.cross")
)  # fmt: skip


def _of(operator: str, gradient: Vjp) -> Callable[..., Any]:
    if operator == "gma.responsibilities":
        return gradient
    return causal(query=gradient) if operator == "gma.causal" else full(query=gradient)


MUTANTS: tuple[Mutant, ...] = (
    *(
        Mutant(f"vjp.{name}", operator, what, killed_by, vjp=_of(operator, gradient), source=source)
        for operator in ("gma.responsibilities", "gma.bidirectional", "gma.cross", "gma.causal")
        for name, (what, gradient, source, laws) in FEATURES.items()
        for killed_by in [("vjp", *laws) if operator == "gma.responsibilities" else ("vjp",)]
    ),
    *CAUSAL,
    *FULL,
)
