"""Performer: linear attention of positive random features, whose products are softmax's kernel in the mean.

Source: survey, "Performer FAVOR+"; Choromanski et al. 2021, lemma 1 and section 2.3, causal as in their appendix B. For
omega ~ N(0, I) the mean of phi(q) . phi(k) is exp(q . k / sqrt K); that of the attention weights, ratios, is not
softmax. A number per query drops out of O, hence the largest logit is taken out of queries, which underflow; eps is
added to the normaliser of the features as they are defined. Nothing is taken out of keys: a number per key is no
common factor, and with one for all keys a later token would decide what underflows earlier.

    letter  paper     shape      meaning
    q k v   Q K V     (T, K)     queries and keys as projected; v (T, V)
    omega   omega     (F, K)     random directions, those of `directions`
    s                 (T, F)     logits of the features, omega x - |x|^2 / 2 of x / K^(1/4)
    phi     phi+      (T, F)     features F^-1/2 exp(s)
    p W               (T, F)     softmax(s); W (T,) = F^-1/2 sum exp(s), so that phi(q) = W p
    S z     G^PS      (F, V)     sum of phi(k)^T v so far; z (F,) sum of phi(k); S0 and z0 come before the first token
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from . import linear_attention
from .linear_attention import memory, with_mass
from .primitives import Array, softmax
from .spec import Form, Input, Operator, Output, check_cotangents, check_shapes

Attention = Callable[..., tuple[Array, Array, Array]]


def chunkwise(
    q: Array, k: Array, v: Array, omega: Array, eps: Array = 0.0, S0: Array = None, z0: Array = None, chunk: int = 64
) -> tuple[Array, Array, Array]:
    """o_i = phi(q_i) S_i / (phi(q_i) . z_i + eps), chunk by chunk.  -> O (T, V), S (F, V), z (F,)."""
    return _attention(partial(linear_attention.chunkwise, chunk=chunk), q, k, v, omega, eps, S0, z0)


def parallel(
    q: Array, k: Array, v: Array, omega: Array, eps: Array = 0.0, S0: Array = None, z0: Array = None
) -> tuple[Array, Array, Array]:
    """The same with the masked matrix of phi(q_i) . phi(k_j) written out.  -> O, S, z."""
    return _attention(linear_attention.parallel, q, k, v, omega, eps, S0, z0)


def recurrent(
    q: Array, k: Array, v: Array, omega: Array, eps: Array = 0.0, S0: Array = None, z0: Array = None
) -> tuple[Array, Array, Array]:
    """S_i = S_{i-1} + phi(k_i)^T v_i, z_i = z_{i-1} + phi(k_i), token by token.  -> O, S, z."""
    return _attention(linear_attention.recurrent, q, k, v, omega, eps, S0, z0)


def vjp(
    cotangents: dict[str, Array],
    q: Array, k: Array, v: Array, omega: Array, eps: Array = 0.0, S0: Array = None, z0: Array = None, chunk: int = 64,
) -> dict[str, Array]:  # fmt: skip
    """Gradients of <O, dO> + <S, dS> + <z, dz>: ds = phi * dphi, then through the logits. As O does not change when p
    and eps / W grow together, ds = p * dp for queries too."""
    check_cotangents(OPERATOR, cotangents, {"q": q, "v": v, "omega": omega})
    P, K, S1, z1 = _extended(q, k, v, omega, eps, S0, z0)
    dS, dz = (np.concatenate([cotangents[n], 0 * x[-1:]]) for n, x in (("S", S1), ("z", z1)))
    d = linear_attention.vjp({"O": cotangents["O"], "S": dS, "z": dz}, P, K, v, 0.0, S1, z1, chunk)
    dq, of_q = _logits_vjp((P * d["q"])[:, :-1], q, omega)
    dk, of_k = _logits_vjp((K * d["k"])[:, :-1], k, omega)
    return {"q": dq, "k": dk, "v": d["v"], "omega": of_q + of_k, "S0": d["S0"][:-1], "z0": d["z0"][:-1]}


# --- features --------------------------------------------------------------------------------------------------------


def features(x: Array, omega: Array) -> Array:
    """phi(x) = F^-1/2 exp(omega x' - |x'|^2 / 2) of x' = x / K^(1/4).  (T, K), (F, K) -> (T, F).  Lemma 1"""
    return len(omega) ** -0.5 * np.exp(logits(x, omega))


def logits(x: Array, omega: Array) -> Array:
    """s = omega x' - |x'|^2 / 2 of x' = x / K^(1/4).  (T, K), (F, K) -> (T, F)."""
    x = x * x.shape[1] ** -0.25
    return x @ omega.T - np.sum(x * x, axis=1, keepdims=True) / 2


def directions(F: int, K: int, generator: np.random.Generator) -> np.ndarray:
    """omega (F, K), each row N(0, I): blocks of K orthogonal rows, whose lengths are those of other normal rows.

    Q of a QR is uniform only if R has a positive diagonal. LAPACK's has not: Q_00 is never positive."""
    blocks = []
    for rows in range(F, 0, -K):
        Q, R = np.linalg.qr(generator.normal(size=(K, K)))
        blocks.append((Q * np.where(np.diag(R) < 0, -1, 1)).T[:rows])
    lengths = np.sqrt(np.sum(generator.normal(size=(F, K)) ** 2, axis=1, keepdims=True))
    return np.concatenate([np.zeros((0, K)), *blocks]) * lengths


def _logits_vjp(ds: Array, x: Array, omega: Array) -> tuple[Array, Array]:
    """From the cotangent of the logits to those of x and omega."""
    r = x.shape[1] ** -0.25
    return (ds @ omega - np.sum(ds, axis=1, keepdims=True) * (x * r)) * r, ds.T @ (x * r)


# --- shared by the forms ---------------------------------------------------------------------------------------------


def _attention(
    form: Attention, q: Array, k: Array, v: Array, omega: Array, eps: Array, S0: Array, z0: Array
) -> tuple[Array, Array, Array]:
    P, K, S, z = _extended(q, k, v, omega, eps, S0, z0)
    O, S, z = form(P, K, v, 0.0, S, z)
    return O, S[:-1], z[:-1]


def _extended(
    q: Array, k: Array, v: Array, omega: Array, eps: Array, S0: Array, z0: Array
) -> tuple[Array, Array, Array, Array]:
    """What linear attention takes: p, phi(k) and the memory, with eps / W as one more feature of queries. No key has
    it, and the memory of it is a mass of one and no value, so that p . z + eps / W is the normaliser."""
    check_shapes(OPERATOR, {"q": q, "k": k, "v": v, "omega": omega, "S0": S0, "z0": z0})
    s, phi = logits(q, omega), features(k, omega)
    P = np.concatenate([softmax(s), _over_mass(s, eps)], axis=1)
    K = np.concatenate([phi, np.zeros((len(k), 1), dtype=bool)], axis=1)
    M = np.concatenate([memory(phi, v, S0, z0), with_mass(np.zeros((1, v.shape[1]), dtype=bool))])
    return P, K, M[:, :-1], M[:, -1]


def _over_mass(s: Array, eps: Array) -> Array:
    """eps / W; where there is no eps it is zero, however small W is.  (T, F) -> (T, 1)."""
    if eps == 0:
        return np.sum(s[:, :0], axis=1, keepdims=True)
    top = np.max(s, axis=1, keepdims=True)
    return eps * s.shape[1] ** 0.5 / np.sum(np.exp(s - top), axis=1, keepdims=True) * np.exp(-top)


OPERATOR = Operator(
    name="performer",
    summary="o_i = phi(q_i) S_i / (phi(q_i) . z_i + eps), phi(x) = F^-1/2 exp(omega x' - |x'|^2 / 2), x' = x / K^(1/4)",
    source="survey, Performer FAVOR+; Choromanski et al. 2021, lemma 1",
    inputs=(
        Input("q", ("T", "K"), "token", "query"),
        Input("k", ("T", "K"), "token", "key"),
        Input("v", ("T", "V"), "token", "value"),
        Input("omega", ("F", "K"), "parameter", "direction"),
        Input("eps", (), "scalar", "epsilon", default=0.0, differentiable=False),
        Input("S0", ("F", "V"), "state", "state", carries="S"),
        Input("z0", ("F",), "state", "mass", carries="z"),
    ),
    outputs=(Output("O", ("T", "V")), Output("S", ("F", "V"), "state"), Output("z", ("F",), "state")),
    forms=(Form("chunkwise", chunkwise, chunked=True), Form("parallel", parallel), Form("recurrent", recurrent)),
    vjp=vjp,
    causal=True,
    laws=("linearity", "constant_value", "hull", "row_sums", "relabelling", "homogeneity", "euler"),
    linear_in="v",
    degrees={"v": 1},
)
