"""Multi-head GMA layer: projections, one GMA per head, concatenation, output projection; and its gradients.

Source: GMA paper, equation (4), sections 3 and 5 ("multi-head normalized formulation"), appendix E. Equation (4) has no
biases, the parameter counts of Tables 2 and 3 do: they are optional here.

    letter      paper      shape          meaning
    X           X          (T, M)         tokens that ask; M = d_model
    Y           Y          (S, M)         context that answers; None: Y = X
    W_Q W_K     W_Q W_K    (H, M, R)      projections to routing vectors, one per head
    W_V         W_V        (H, M, V)      projections to values
    W_O         -          (H V, M)       output projection of the concatenated heads
    b_Q b_K     -          (H, R)         biases, b_V (H, V), b_O (M,); None: none
    mu omega    mu omega   (H, K, R)      mixture of each head; (K, R) if `mixture` is "shared"
    alpha       alpha      (H, K)         prior of each head; (K,) if shared
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from . import gma
from .primitives import Array

MIXTURES = ("per_head", "shared")
GROUPS = ("mu", "omega", "alpha")


def multi_head(
    X: Array, W_Q: Array, W_K: Array, W_V: Array, W_O: Array, mu: Array, omega: Array, alpha: Array,
    eps: float = 1e-6, v_min: float = 0.0, Y: Array = None, causal: bool = False, mixture: str = "per_head",
    b_Q: Array = None, b_K: Array = None, b_V: Array = None, b_O: Array = None,
) -> Array:  # fmt: skip
    """[O^1 ... O^H] W_O with O^h = GMA(X W_Q^h, Y W_K^h, Y W_V^h).  (T, M), (S, M) -> (T, M).

    Section 2 speaks of one shared mixture; the parameter counts of Tables 1 to 3 need one per head, the default."""
    _check(X, Y, W_Q, W_K, W_V, W_O, mu, omega, alpha, causal, mixture, b_Q, b_K, b_V, b_O)
    C = X if Y is None else Y
    heads = []
    for h in range(len(W_Q)):
        q, k, v = _project(h, X, W_Q, b_Q), _project(h, C, W_K, b_K), _project(h, C, W_V, b_V)
        inputs = (q, k, v, *_of_head(h, mixture, mu, omega, alpha), eps, v_min)
        heads.append(gma.chunkwise(*inputs)[0] if causal else gma.cross(*inputs))
    O = np.concatenate(heads, axis=1) @ W_O
    return O if b_O is None else O + b_O


def multi_head_vjp(
    cotangents: Mapping[str, Array],
    X: Array, W_Q: Array, W_K: Array, W_V: Array, W_O: Array, mu: Array, omega: Array, alpha: Array,
    eps: float = 1e-6, v_min: float = 0.0, Y: Array = None, causal: bool = False, mixture: str = "per_head",
    b_Q: Array = None, b_K: Array = None, b_V: Array = None, b_O: Array = None,
) -> dict[str, Array]:  # fmt: skip
    """Gradients of <O, dO> for X, every weight and the mixtures, and for Y and the biases if there are any."""
    _check(X, Y, W_Q, W_K, W_V, W_O, mu, omega, alpha, causal, mixture, b_Q, b_K, b_V, b_O)
    C = X if Y is None else Y
    G = cotangents["O"]
    V = W_V.shape[2]
    dX, dC = 0 * X, 0 * C
    rows: dict[str, list[Array]] = {name: [] for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", *GROUPS)}
    for h in range(len(W_Q)):
        q, k, v = _project(h, X, W_Q, b_Q), _project(h, C, W_K, b_K), _project(h, C, W_V, b_V)
        inputs = (q, k, v, *_of_head(h, mixture, mu, omega, alpha), eps, v_min)
        O = gma.chunkwise(*inputs)[0] if causal else gma.cross(*inputs)
        dO = {"O": G @ W_O[h * V : (h + 1) * V].T}
        d = gma.chunkwise_vjp(dO, *inputs) if causal else gma.cross_vjp(dO, *inputs)
        for name, Z, x in (("Q", X, d["q"]), ("K", C, d["k"]), ("V", C, d["v"])):
            rows["W_" + name].append(Z.T @ x)
            rows["b_" + name].append(np.sum(x, axis=0))
        rows["W_O"].append(O.T @ G)
        for name in GROUPS:
            rows[name].append(d[name])
        dX = dX + d["q"] @ W_Q[h].T
        dC = dC + d["k"] @ W_K[h].T + d["v"] @ W_V[h].T
    grads = {name: np.concatenate(r) if name == "W_O" else np.stack(r) for name, r in rows.items()}
    grads["b_O"] = np.sum(G, axis=0)
    if mixture == "shared":
        grads |= {name: np.sum(grads[name], axis=0) for name in GROUPS}
    absent = {name for name, b in (("b_Q", b_Q), ("b_K", b_K), ("b_V", b_V), ("b_O", b_O)) if b is None}
    grads |= {"X": dX + dC} if Y is None else {"X": dX, "Y": dC}
    return {name: d for name, d in grads.items() if name not in absent}


def head_responsibilities(
    X: Array, W: Array, mu: Array, omega: Array, alpha: Array, v_min: float = 0.0, mixture: str = "per_head",
    b: Array = None,
) -> Array:  # fmt: skip
    """Responsibilities of X W^h + b^h in every head, for the diagnostics.  (T, M), (H, M, R) -> (H, T, K)."""
    heads = [_of_head(h, mixture, mu, omega, alpha) for h in range(len(W))]
    return np.stack([gma.responsibilities(_project(h, X, W, b), *head, v_min) for h, head in enumerate(heads)])


def _project(h: int, X: Array, W: Array, b: Array) -> Array:
    """X W^h + b^h  (4)"""
    return X @ W[h] if b is None else X @ W[h] + b[h]


def _of_head(h: int, mixture: str, mu: Array, omega: Array, alpha: Array) -> tuple[Array, Array, Array]:
    return (mu[h], omega[h], alpha[h]) if mixture == "per_head" else (mu, omega, alpha)


def _check(
    X: Any, Y: Any, W_Q: Any, W_K: Any, W_V: Any, W_O: Any, mu: Any, omega: Any, alpha: Any, causal: bool, mixture: str,
    b_Q: Any, b_K: Any, b_V: Any, b_O: Any,
) -> None:  # fmt: skip
    """Raises ValueError naming the argument whose shape contradicts the others."""
    if mixture not in MIXTURES:
        raise ValueError(f"mixture is {mixture!r}; it must be one of {', '.join(MIXTURES)}")
    if causal and Y is not None:
        raise ValueError("causal with a context Y: only one sequence has an order to respect")
    if len(W_Q.shape) != 3 or not len(W_Q):
        raise ValueError(f"W_Q has shape {W_Q.shape}; expected (H, M, R)")
    H, M, R = W_Q.shape
    per_head = mixture == "per_head"
    shapes = {
        "X": (X, (None, M)),
        "Y": (Y, (None, M)),
        "W_K": (W_K, (H, M, R)),
        "W_V": (W_V, (H, M, None)),
        "W_O": (W_O, (H * W_V.shape[-1], None)),
        "b_Q": (b_Q, (H, R)),
        "b_K": (b_K, (H, R)),
        "b_V": (b_V, (H, W_V.shape[-1])),
        "b_O": (b_O, (W_O.shape[-1],)),
        "mu": (mu, (H, None, R) if per_head else (None, R)),
        "omega": (omega, mu.shape),
        "alpha": (alpha, mu.shape[:-1]),
    }
    for name, (x, expected) in shapes.items():
        if x is None:
            continue
        if len(x.shape) != len(expected) or any(n not in (None, m) for n, m in zip(expected, x.shape, strict=True)):
            want = ", ".join("any" if n is None else str(n) for n in expected)
            raise ValueError(f"{name} has shape {x.shape}; W_Q {W_Q.shape} and mixture={mixture!r} expect ({want})")
