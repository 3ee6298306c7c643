"""Gaussian Mixture Attention (GMA): tokens meet in the responsibilities of K learned Gaussian components.

Source: GMA paper (arXiv 2606.18283), equations (2) to (18). This file holds the feature map (exp, log: per token),
the forms, their gradients and the operators; gma_mixing.py the algebra that mixes tokens; gma_inputs.py the inputs.

    letter    paper        shape     meaning
    q k v     Q K_X V_X    (T, R)    routing vectors; values v (T, V); across sequences k and v have S rows
    mu        mu           (K, R)    means
    omega     omega        (K, R)    variances before softplus: var = softplus(omega) + v_min      (14)
    alpha     alpha        (K,)      logits of the prior: pi = softmax(alpha)                     (15)
    gamma     gamma        (T, K)    responsibilities; GQ, GK those of queries and keys           (3)
    s         s            (T, K)    logits of the responsibilities                               (16)
    eps v_min epsilon, -   ()        added to the normaliser; floor of the variances
    S0 S      V~           (K, V)    latent memory before the first and after the last token
    Z0 Z      Z            (K,)      mass in it

Not in the source, hence arguments: the values of eps and v_min. Softplus gives the variance sigma^2 ("set Sigma_k"),
not sigma. A mixture belongs to one head: section 2 says otherwise, but the paper's parameter counts need it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from . import gma_mixing as mixing
from .gma_inputs import CONTEXT, EPS, FIELD, FIELD_MEMORY, MEMORY, MIXTURE, SELF, V_MIN, check, check_cotangents, tokens
from .primitives import Array, either, mahalanobis, masked, shifted, sigmoid, softmax, softplus
from .spec import Form, Operator, Output

BLOCK = 64  # tokens whose differences to all means, (T, K, R), are held at once
Cotangents = Mapping[str, Array]
Gradients = dict[str, Array]

# --- feature map -----------------------------------------------------------------------------------------------------


def logits(x: Array, mu: Array, omega: Array, alpha: Array, v_min: float = 0.0) -> Array:
    """s_ik = alpha_k - 1/2 sum_d log var_kd - 1/2 sum_d (x_id - mu_kd)^2 / var_kd.  (T, R), parameters -> (T, K).

    Differs from (16) by a constant that no softmax sees: -R/2 log 2 pi and the prior's normaliser."""
    check(RESPONSIBILITIES, x=x, mu=mu, omega=omega, alpha=alpha, v_min=v_min)
    return _logits(x, mu, omega, alpha, v_min)


def logits_as_printed(x: Array, mu: Array, omega: Array, alpha: Array, v_min: float = 0.0) -> Array:
    """s_ik = log pi_k + log N(x_i | mu_k, Sigma_k), with every constant.  (T, R), parameters -> (T, K).  (16)"""
    log_pi = alpha - _log_sum_exp(alpha, axis=0)
    return logits(x, mu, omega, log_pi, v_min) - mu.shape[1] / 2 * math.log(2 * math.pi)


def responsibilities(x: Array, mu: Array, omega: Array, alpha: Array, v_min: float = 0.0) -> Array:
    """gamma_ik = pi_k N(x_i | mu_k, Sigma_k) / sum_l pi_l N(x_i | mu_l, Sigma_l) = softmax_k(s_ik).  -> (T, K).  (3)

    The densities are never formed: they under- and overflow where gamma is an ordinary number."""
    check(RESPONSIBILITIES, x=x, mu=mu, omega=omega, alpha=alpha, v_min=v_min)
    return _responsibilities(x, mu, omega, alpha, v_min)


def log_responsibilities(x: Array, mu: Array, omega: Array, alpha: Array, v_min: float = 0.0) -> Array:
    """log gamma_ik = s_ik - log sum_l exp(s_il), finite where gamma underflows.  -> (T, K)."""
    s = logits(x, mu, omega, alpha, v_min)
    t = s - np.max(s, axis=1, keepdims=True)
    return t - np.log(np.sum(np.exp(t), axis=1, keepdims=True))


def jacobian(gamma: Array) -> Array:
    """J_ijk = d gamma_ij / d s_ik = gamma_ij (1{j = k} - gamma_ik).  (T, K) -> (T, K, K).  (17a)

    The diagonal gamma_k (1 - gamma_k) (17b) is summed as gamma_k sum_{l != k} gamma_l: 1 - gamma_k rounds to zero
    for a saturated component."""
    eye = np.eye(gamma.shape[1], dtype=bool)
    pairs = masked(gamma[:, :, None] * gamma[:, None, :], ~eye, 0)
    return np.where(eye, np.sum(pairs, axis=2)[:, :, None], -pairs)


def responsibilities_vjp(
    cotangents: Cotangents, x: Array, mu: Array, omega: Array, alpha: Array, v_min: float = 0.0
) -> Gradients:
    """Gradients of <gamma, dgamma> for x, mu, omega and alpha."""
    gamma = responsibilities(x, mu, omega, alpha, v_min)
    check_cotangents(cotangents, gamma=gamma.shape)
    return _pull_back(gamma, cotangents["gamma"], x, mu, omega, alpha, v_min)


def _logits(x: Array, mu: Array, omega: Array, alpha: Array, v_min: float) -> Array:
    var = softplus(omega) + v_min  # (14)
    s = alpha - np.sum(np.log(var), axis=1) / 2 - mahalanobis(x, mu, var) / 2
    return shifted(s, np.abs(_log_sum_exp(alpha, axis=0)) + mu.shape[1])  # (16) has R/2 log 2 pi < R more


def _responsibilities(x: Array, mu: Array, omega: Array, alpha: Array, v_min: float) -> Array:
    return np.concatenate([softmax(_logits(x[b], mu, omega, alpha, v_min)) for b in _blocks(len(x))])


def _pull_back(gamma: Array, dgamma: Array, x: Array, mu: Array, omega: Array, alpha: Array, v_min: float) -> Gradients:
    """From the cotangent of gamma to those of x, mu, omega and alpha."""
    var = softplus(omega) + v_min
    dS = gamma * (dgamma - np.sum(gamma * dgamma, axis=1, keepdims=True))  # (18)
    dx = [x[:0]]
    moment, square = 0 * mu, 0 * mu  # sums over tokens of dS (x - mu) and dS (x - mu)^2
    for b in _blocks(len(x)):
        E = x[b][:, None, :] - mu[None, :, :]
        W = dS[b][:, :, None] * E
        dx.append(-np.sum(W / var[None, :, :], axis=1))
        moment = moment + np.sum(W, axis=0)
        square = square + np.sum(W * E, axis=0)
    dalpha = np.sum(dS, axis=0)
    dvar = (square / var - dalpha[:, None]) / var / 2
    # through log pi = alpha - log sum exp(alpha) there is a second term, zero because rows of dS sum to zero
    dprior = either(dalpha, dalpha - softmax(alpha) * np.sum(dalpha))
    return {"x": np.concatenate(dx), "mu": moment / var, "omega": dvar * sigmoid(omega), "alpha": dprior}


def _blocks(T: int) -> list[slice]:
    return [slice(a, a + BLOCK) for a in range(0, max(T, 1), BLOCK)]


def _log_sum_exp(s: Array, axis: int) -> Array:
    top = np.max(s, axis=axis, keepdims=True)
    return np.sum(top, axis=axis) + np.log(np.sum(np.exp(s - top), axis=axis))


# --- bidirectional and cross -----------------------------------------------------------------------------------------


def bidirectional(
    q: Array, k: Array, v: Array, mu: Array, omega: Array, alpha: Array, eps: float = 1e-6, v_min: float = 0.0
) -> Array:
    """O = GQ (GK^T V) / (GQ (GK^T 1) + eps): all tokens of one sequence see each other.  -> (T, V).  (5) to (7)"""
    GQ, GK = _route(BIDIRECTIONAL, q, k, v, mu, omega, alpha, eps, v_min)
    return mixing.latent(GQ, GK, v, eps)


def bidirectional_dense(
    q: Array, k: Array, v: Array, mu: Array, omega: Array, alpha: Array, eps: float = 1e-6, v_min: float = 0.0
) -> Array:
    """O = A V with the attention matrix A of section 4.2 written out.  -> (T, V)."""
    GQ, GK = _route(BIDIRECTIONAL, q, k, v, mu, omega, alpha, eps, v_min)
    return mixing.dense(GQ, GK, v, eps)


def cross(
    q: Array, k: Array, v: Array, mu: Array, omega: Array, alpha: Array, eps: float = 1e-6, v_min: float = 0.0
) -> Array:
    """The same, T queries to S keys and values of a context.  (T, R), (S, R), (S, V) -> (T, V).  Appendix E.4"""
    GQ, GK = _route(CROSS, q, k, v, mu, omega, alpha, eps, v_min)
    return mixing.latent(GQ, GK, v, eps)


def cross_dense(
    q: Array, k: Array, v: Array, mu: Array, omega: Array, alpha: Array, eps: float = 1e-6, v_min: float = 0.0
) -> Array:
    """O = A V with a (T, S) matrix A.  -> (T, V)."""
    GQ, GK = _route(CROSS, q, k, v, mu, omega, alpha, eps, v_min)
    return mixing.dense(GQ, GK, v, eps)


def cross_log_space(
    q: Array, k: Array, v: Array, mu: Array, omega: Array, alpha: Array, eps: float = 1e-6, v_min: float = 0.0
) -> Array:
    """The same as an average of slot means m_k = V~_k / Z_k, in logarithms, so that no mass underflows:
    O_i = W_i sum_k p_ik m_k with p_i = softmax_k(log GQ_ik + log Z_k) and W_i = D_i / (D_i + eps).  Needs S > 0."""
    check(CROSS, q=q, k=k, v=v, mu=mu, omega=omega, alpha=alpha, eps=eps, v_min=v_min)
    LQ, LK = (log_responsibilities(x, mu, omega, alpha, v_min) for x in (q, k))
    m = softmax(LK, axis=0).T @ v
    t = LQ + _log_sum_exp(LK, axis=0)
    W = sigmoid(_log_sum_exp(t, axis=1) - np.log(eps))
    return W[:, None] * (softmax(t) @ m)


def attention(
    q: Array, k: Array, mu: Array, omega: Array, alpha: Array, eps: float = 1e-6, v_min: float = 0.0,
    causal: bool = False,
) -> Array:  # fmt: skip
    """The matrix A (T, S) with O = A V, rows summing to D_i / (D_i + eps); lower triangular if causal.  Section 4.2"""
    GQ, GK = _route(CROSS, q, k, None, mu, omega, alpha, eps, v_min)
    return mixing.attention(GQ, GK, eps, causal)


def bidirectional_vjp(
    cotangents: Cotangents,
    q: Array, k: Array, v: Array, mu: Array, omega: Array, alpha: Array, eps: float = 1e-6, v_min: float = 0.0,
) -> Gradients:  # fmt: skip
    """Gradients of <O, dO> for q, k, v, mu, omega and alpha."""
    GQ, GK = _route(BIDIRECTIONAL, q, k, v, mu, omega, alpha, eps, v_min)
    check_cotangents(cotangents, O=(len(q), v.shape[1]))
    return _route_vjp(mixing.latent_vjp(cotangents, GQ, GK, v, eps), GQ, GK, q, k, mu, omega, alpha, v_min)


def cross_vjp(
    cotangents: Cotangents,
    q: Array, k: Array, v: Array, mu: Array, omega: Array, alpha: Array, eps: float = 1e-6, v_min: float = 0.0,
) -> Gradients:  # fmt: skip
    """Gradients of <O, dO> for q, k, v, mu, omega and alpha."""
    GQ, GK = _route(CROSS, q, k, v, mu, omega, alpha, eps, v_min)
    check_cotangents(cotangents, O=(len(q), v.shape[1]))
    return _route_vjp(mixing.latent_vjp(cotangents, GQ, GK, v, eps), GQ, GK, q, k, mu, omega, alpha, v_min)


# --- causal ----------------------------------------------------------------------------------------------------------


def chunkwise(
    q: Array, k: Array, v: Array, mu: Array, omega: Array, alpha: Array, eps: float = 1e-6, v_min: float = 0.0,
    S0: Array = None, Z0: Array = None, chunk: int = 64,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """The masked affinity inside chunks, the latent memory across them; O(T) memory.  -> O (T, V), S, Z.

    A NaN in a value reaches earlier rows of its own chunk (0 * nan is nan); the recurrent form never looks ahead."""
    GQ, GK = _route(CAUSAL, q, k, v, mu, omega, alpha, eps, v_min, S0, Z0)
    return mixing.chunkwise(GQ, GK, v, eps, S0, Z0, chunk)


def recurrent(
    q: Array, k: Array, v: Array, mu: Array, omega: Array, alpha: Array, eps: float = 1e-6, v_min: float = 0.0,
    S0: Array = None, Z0: Array = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Prefix sums token by token: write key i, then read query i.  -> O (T, V), S, Z.  Section 3.5"""
    GQ, GK = _route(CAUSAL, q, k, v, mu, omega, alpha, eps, v_min, S0, Z0)
    return mixing.recurrent(GQ, GK, v, eps, S0, Z0)


def parallel(
    q: Array, k: Array, v: Array, mu: Array, omega: Array, alpha: Array, eps: float = 1e-6, v_min: float = 0.0,
    S0: Array = None, Z0: Array = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """The masked affinity matrix written out.  -> O (T, V), S, Z.  Section 3.5"""
    GQ, GK = _route(CAUSAL, q, k, v, mu, omega, alpha, eps, v_min, S0, Z0)
    return mixing.parallel(GQ, GK, v, eps, S0, Z0)


def step(
    state: mixing.Memory | None,
    q: Array, k: Array, v: Array, mu: Array, omega: Array, alpha: Array, eps: float = 1e-6, v_min: float = 0.0,
) -> tuple[Array, mixing.Memory]:  # fmt: skip
    """Decode one token: (S, Z) or None, q (R,), k (R,), v (V,) -> O (V,) and the new (S, Z)."""
    S0, Z0 = state or (None, None)
    O, S, Z = recurrent(q[None, :], k[None, :], v[None, :], mu, omega, alpha, eps, v_min, S0, Z0)
    return O[0], (S, Z)


def chunkwise_vjp(
    cotangents: Cotangents,
    q: Array, k: Array, v: Array, mu: Array, omega: Array, alpha: Array, eps: float = 1e-6, v_min: float = 0.0,
    S0: Array = None, Z0: Array = None, chunk: int = 64,
) -> Gradients:  # fmt: skip
    """Gradients of <O, dO> + <S, dS> + <Z, dZ> for every input but the scalars, in two passes and O(T) memory."""
    GQ, GK = _route(CAUSAL, q, k, v, mu, omega, alpha, eps, v_min, S0, Z0)
    check_cotangents(cotangents, O=(len(q), v.shape[1]), S=(len(mu), v.shape[1]), Z=(len(mu),))
    d = mixing.chunkwise_vjp(cotangents, GQ, GK, v, eps, S0, Z0, chunk)
    return _route_vjp(d, GQ, GK, q, k, mu, omega, alpha, v_min)


def recurrent_vjp(
    cotangents: Cotangents,
    q: Array, k: Array, v: Array, mu: Array, omega: Array, alpha: Array, eps: float = 1e-6, v_min: float = 0.0,
    S0: Array = None, Z0: Array = None,
) -> Gradients:  # fmt: skip
    """The same gradients by the reverse recurrence over all T stored memories."""
    GQ, GK = _route(CAUSAL, q, k, v, mu, omega, alpha, eps, v_min, S0, Z0)
    check_cotangents(cotangents, O=(len(q), v.shape[1]), S=(len(mu), v.shape[1]), Z=(len(mu),))
    return _route_vjp(mixing.recurrent_vjp(cotangents, GQ, GK, v, eps, S0, Z0), GQ, GK, q, k, mu, omega, alpha, v_min)


# --- shared by the forms ---------------------------------------------------------------------------------------------


def _route(
    operator: Operator,
    q: Array, k: Array, v: Array, mu: Array, omega: Array, alpha: Array, eps: float, v_min: float,
    S0: Array = None, Z0: Array = None,
) -> tuple[Array, Array]:  # fmt: skip
    """GQ and GK of checked inputs."""
    check(operator, q=q, k=k, v=v, mu=mu, omega=omega, alpha=alpha, eps=eps, v_min=v_min, S0=S0, Z0=Z0)
    return _responsibilities(q, mu, omega, alpha, v_min), _responsibilities(k, mu, omega, alpha, v_min)


def _route_vjp(
    d: Gradients,
    GQ: Array,
    GK: Array,
    q: Array,
    k: Array,
    mu: Array,
    omega: Array,
    alpha: Array,
    v_min: float,
) -> Gradients:
    """From gradients for GQ and GK to those for the inputs; queries and keys share the mixture."""
    Q = _pull_back(GQ, d["GQ"], q, mu, omega, alpha, v_min)
    K = _pull_back(GK, d["GK"], k, mu, omega, alpha, v_min)
    shared = {name: Q[name] + K[name] for name in ("mu", "omega", "alpha")}
    return {"q": Q["x"], "k": K["x"], "v": d["V"]} | shared | {name: d[name] for name in ("S0", "Z0") if name in d}


MIXING_LAWS = ("linearity", "constant_value", "hull", "row_sums", "relabelling", "translation", "gradient_identities")

RESPONSIBILITIES = Operator(
    name="gma.responsibilities",
    summary="gamma_ik = softmax_k(alpha_k - 1/2 sum log var_k - 1/2 sum (x_i - mu_k)^2 / var_k)",
    source="GMA (3), (14) to (16)",
    inputs=(tokens("x", "T", "R", "routing"), *MIXTURE, V_MIN),
    outputs=(Output("gamma", ("T", "K")),),
    forms=(Form("log_domain", responsibilities),),
    vjp=responsibilities_vjp,
    causal=False,
    laws=("relabelling", "translation", "gradient_identities", "lipschitz", "row_sums", "hull"),
)

BIDIRECTIONAL = Operator(
    name="gma.bidirectional",
    summary="O = GQ (GK^T V) / (GQ (GK^T 1) + eps), GQ and GK the responsibilities of q and k",
    source="GMA (5) to (7)",
    inputs=(*SELF, *MIXTURE, EPS, V_MIN),
    outputs=(Output("O", ("T", "V")),),
    forms=(Form("latent", bidirectional), Form("dense", bidirectional_dense)),
    vjp=bidirectional_vjp,
    causal=False,
    laws=(*MIXING_LAWS, "low_rank", "permutation"),
    linear_in="v",
    exact=(Form("latent", mixing.latent), Form("dense", mixing.dense)),
    exact_inputs=FIELD,
)

CROSS = Operator(
    name="gma.cross",
    summary="O = GQ (GK^T V) / (GQ (GK^T 1) + eps), queries of one sequence, keys and values of another",
    source="GMA section 3 and appendix E.4, (5) to (7)",
    inputs=(*CONTEXT, *MIXTURE, EPS, V_MIN),
    outputs=(Output("O", ("T", "V")),),
    forms=(Form("latent", cross), Form("dense", cross_dense)),
    vjp=cross_vjp,
    causal=False,
    laws=(*MIXING_LAWS, "low_rank", "permutation"),
    linear_in="v",
    exact=(Form("latent", mixing.latent), Form("dense", mixing.dense)),
    exact_inputs=(FIELD[0], tokens("GK", "S", "K", "field"), tokens("V", "S", "D", "field"), FIELD[3]),
)

CAUSAL = Operator(
    name="gma.causal",
    summary="S_i = S_{i-1} + GK_i^T V_i; Z_i = Z_{i-1} + GK_i; O_i = GQ_i S_i / (GQ_i Z_i + eps)",
    source="GMA section 3.5",
    inputs=(*SELF, *MIXTURE, EPS, V_MIN, *MEMORY),
    outputs=(Output("O", ("T", "V")), Output("S", ("K", "V"), "state"), Output("Z", ("K",), "state")),
    forms=(Form("chunkwise", chunkwise, chunked=True), Form("recurrent", recurrent), Form("parallel", parallel)),
    vjp=chunkwise_vjp,
    causal=True,
    laws=MIXING_LAWS,
    linear_in="v",
    exact=(
        Form("chunkwise", mixing.chunkwise, chunked=True),
        Form("recurrent", mixing.recurrent),
        Form("parallel", mixing.parallel),
    ),
    exact_inputs=(*FIELD, *FIELD_MEMORY),
)
