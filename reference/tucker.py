"""Tucker attention: every projection a core times a factor, so that what is cached are two latents a token.

Source: survey, section "Tucker Attention" (Q = W_core W_factor x); Klein et al. 2026. As printed this is a product of
two matrices; the tensor of a real Tucker decomposition, T_h = W_Q^T W_K over the heads h, is what `joint_core` absorbs.
No rotation of positions: it would stand between the two cores.

    letter    paper      shape               meaning
    x Y                  (T, E)              tokens before and after
    Fq Fk Fv  W_factor   (Q, E) (L, E) (X, E)          one for all heads; Q, L and X are the three ranks
    Gq Gk Gv  W_core     (N, K, Q) (N, K, L) (N, V, X) of each of N heads
    W_O                  (N, V, E)           output projection of each head
    K0 V0     -          (P, L) (P, X)       latents of the P tokens before; Kc and Vc have P + T rows
"""

from __future__ import annotations

import numpy as np

from .caches import appended, paired, visible
from .latent_attention import swapped
from .primitives import Array, either, masked, softmax, stored
from .softmax_attention import width_scale
from .spec import Form, Input, Operator, Output, check_cotangents, check_shapes


def factored(
    x: Array, Fq: Array, Gq: Array, Fk: Array, Gk: Array, Fv: Array, Gv: Array, W_O: Array, scale: float | None = None,
    causal: bool = True, K0: Array = None, V0: Array = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """q = Gq Fq x, k = Gk Fk x, v = Gv Fv x;  Y = sum_h softmax(scale q_h k_h^T) v_h W_O_h.  -> Y, Kc, Vc.  (11.1)"""
    _check(x, Fq, Gq, Fk, Gk, Fv, Gv, W_O, K0, V0)
    c, Kc, Vc = x @ Fq.T, appended(K0, x @ Fk.T), appended(V0, x @ Fv.T)
    keep = visible(len(x), len(Kc), causal)
    O = [
        attention(c @ q.T, Kc @ k.T, Vc @ v.T, width_scale(scale, Gq.shape[1]), keep)
        for q, k, v in zip(Gq, Gk, Gv, strict=True)
    ]
    return np.concatenate(O, axis=1) @ flat(W_O), Kc, Vc


def expanded(
    x: Array, Fq: Array, Gq: Array, Fk: Array, Gk: Array, Fv: Array, Gv: Array, W_O: Array, scale: float | None = None,
    causal: bool = True, K0: Array = None, V0: Array = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Multi-head attention with W = core factor multiplied out first; only what was cached is still a latent."""
    _check(x, Fq, Gq, Fk, Gk, Fv, Gv, W_O, K0, V0)
    Kc, Vc = appended(K0, x @ Fk.T), appended(V0, x @ Fv.T)
    keep, P = visible(len(x), len(Kc), causal), len(Kc) - len(x)
    Y = []
    for h in range(len(Gq)):
        W_Q, W_K, W_V = Gq[h] @ Fq, Gk[h] @ Fk, Gv[h] @ Fv
        k, v = appended(Kc[:P] @ Gk[h].T, x @ W_K.T), appended(Vc[:P] @ Gv[h].T, x @ W_V.T)
        Y.append(attention(x @ W_Q.T, k, v, width_scale(scale, Gq.shape[1]), keep) @ W_O[h])
    return np.sum(np.stack(Y), axis=0), Kc, Vc


def absorbed(
    x: Array, Fq: Array, Gq: Array, Fk: Array, Gk: Array, Fv: Array, Gv: Array, W_O: Array, scale: float | None = None,
    causal: bool = True, K0: Array = None, V0: Array = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Queries meet the latents themselves: logits (Fq x)^T (Gq^T Gk) Kc^T, and Gv^T W_O after the sum over tokens."""
    _check(x, Fq, Gq, Fk, Gk, Fv, Gv, W_O, K0, V0)
    c, Kc, Vc = x @ Fq.T, appended(K0, x @ Fk.T), appended(V0, x @ Fv.T)
    keep, J = visible(len(x), len(Kc), causal), joint_core(Gq, Gk)
    Y = [attention(c @ J[h], Kc, Vc, width_scale(scale, Gq.shape[1]), keep) @ (Gv[h].T @ W_O[h]) for h in range(len(J))]
    return np.sum(np.stack(Y), axis=0), Kc, Vc


def decode(
    x: Array, Fq: Array, Gq: Array, Fk: Array, Gk: Array, Fv: Array, Gv: Array, W_O: Array, scale: float | None = None,
    causal: bool = True, K0: Array = None, V0: Array = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """The absorbed form query by query, each over the latents that are there: all of them where not causal."""
    _check(x, Fq, Gq, Fk, Gk, Fv, Gv, W_O, K0, V0)
    Kc, Vc, J = appended(K0, x @ Fk.T), appended(V0, x @ Fv.T), joint_core(Gq, Gk)
    read = [v.T @ W for v, W in zip(Gv, W_O, strict=True)]
    rows = [x[:0]]
    for t in range(len(x)):
        seen = len(Kc) - len(x) + t + 1 if causal else len(Kc)
        c = Fq @ x[t]
        p = [softmax(Kc[:seen] @ (j.T @ c) * width_scale(scale, Gq.shape[1])) for j in J]
        rows.append(np.sum(np.stack([(p @ Vc[:seen]) @ W for p, W in zip(p, read, strict=True)]), axis=0)[None, :])
    return np.concatenate(rows), Kc, Vc


def vjp(
    cotangents: dict[str, Array],
    x: Array, Fq: Array, Gq: Array, Fk: Array, Gk: Array, Fv: Array, Gv: Array, W_O: Array, scale: float | None = None,
    causal: bool = True, K0: Array = None, V0: Array = None,
) -> dict[str, Array]:  # fmt: skip
    """Gradients of <Y, dY> + <Kc, dKc> + <Vc, dVc>: through the heads to the latents, from there to tokens, factors and
    cache. A projection y = W x has dW = dy^T x and dx = dy W."""
    check_cotangents(OPERATOR, cotangents, {"x": x, "Fk": Fk, "Fv": Fv, "K0": K0, "V0": V0})
    _check(x, Fq, Gq, Fk, Gk, Fv, Gv, W_O, K0, V0)
    c, Kc, Vc = x @ Fq.T, appended(K0, x @ Fk.T), appended(V0, x @ Fv.T)
    keep, P, G = visible(len(x), len(Kc), causal), len(Kc) - len(x), cotangents["Y"]
    dq, dk, dv, O = [], [], [], []
    for h in range(len(Gq)):
        head = c @ Gq[h].T, Kc @ Gk[h].T, Vc @ Gv[h].T
        of_head = attention_vjp(G @ W_O[h].T, *head, width_scale(scale, Gq.shape[1]), keep)
        for grads, of in zip((dq, dk, dv, O), of_head, strict=True):
            grads.append(of)
    dc, dK, dV = (np.concatenate(d, axis=1) @ flat(core) for d, core in ((dq, Gq), (dk, Gk), (dv, Gv)))
    dK, dV = dK + cotangents["Kc"], dV + cotangents["Vc"]
    return {
        "x": dc @ Fq + dK[P:] @ Fk + dV[P:] @ Fv,
        "Fq": dc.T @ x,
        "Gq": np.stack([d.T @ c for d in dq]),
        "Fk": dK[P:].T @ x,
        "Gk": np.stack([d.T @ Kc for d in dk]),
        "Fv": dV[P:].T @ x,
        "Gv": np.stack([d.T @ Vc for d in dv]),
        "W_O": np.stack([stored(o).T @ G for o in O]),
        "K0": dK[:P],
        "V0": dV[:P],
    }


def joint_core(Gq: Array, Gk: Array) -> Array:
    """J_h = Gq_h^T Gk_h, of T_h = Fq^T J_h Fk = W_Q_h^T W_K_h.  (N, K, Q), (N, K, L) -> (N, Q, L)."""
    return np.stack([q.T @ k for q, k in zip(Gq, Gk, strict=True)])


# --- shared with the other attentions over a cache of latents or of heads that are mixed -----------------------------


def flat(W: Array) -> Array:
    """The matrices of all heads below each other.  (N, K, R) -> (N K, R)."""
    return W.reshape(W.shape[0] * W.shape[1], W.shape[2])


def attention(q: Array, k: Array, v: Array, scale: float, keep: np.ndarray) -> Array:
    """softmax(scale q k^T) v over the keys to keep, for one head or many.  (.., T, K), (.., S, K), (.., S, V)"""
    return softmax(masked(q @ swapped(k) * scale, keep, -np.inf)) @ v


def attention_vjp(
    G: Array, q: Array, k: Array, v: Array, scale: float, keep: np.ndarray
) -> tuple[Array, Array, Array, Array]:
    """dV = P^T dO;  dS = P * (dO V^T - rowsum(dO * O)).  -> dq (.., T, K), dk (.., S, K), dv (.., S, V), and O"""
    P = softmax(masked(q @ swapped(k) * scale, keep, -np.inf))
    O, dP = P @ v, G @ swapped(v)
    delta = either(np.sum(G * stored(O), axis=-1, keepdims=True), np.sum(P * dP, axis=-1, keepdims=True))
    dS = P * (dP - delta)
    return dS @ k * scale, swapped(dS) @ q * scale, swapped(P) @ G, O


def _check(*arrays: Array) -> None:
    check_shapes(OPERATOR, dict(zip(_NAMES, arrays, strict=True)))
    paired(K0=arrays[-2], V0=arrays[-1])


_NAMES = ("x", "Fq", "Gq", "Fk", "Gk", "Fv", "Gv", "W_O", "K0", "V0")


def _weight(name: str, *axes: str) -> Input:
    return Input(name, axes, "parameter", "weight")


OPERATOR = Operator(
    name="tucker",
    summary="Y = sum_h softmax(scale q_h k_h^T) v_h W_O_h with q_h = Gq_h Fq x, k_h = Gk_h Fk x, v_h = Gv_h Fv x",
    source="survey, Tucker Attention; Klein et al. 2026",
    inputs=(
        Input("x", ("T", "E"), "token", "feature"),
        _weight("Fq", "Q", "E"),
        _weight("Gq", "N", "K", "Q"),
        _weight("Fk", "L", "E"),
        _weight("Gk", "N", "K", "L"),
        _weight("Fv", "X", "E"),
        _weight("Gv", "N", "V", "X"),
        _weight("W_O", "N", "V", "E"),
        Input("scale", (), "scalar", "scale", differentiable=False),
        Input("causal", (), "scalar", "flag", default=True, differentiable=False),
        Input("K0", ("P", "L"), "state", "latent", carries="Kc"),
        Input("V0", ("P", "X"), "state", "latent", carries="Vc"),
    ),
    outputs=(Output("Y", ("T", "E")), Output("Kc", ("P+T", "L"), "state"), Output("Vc", ("P+T", "X"), "state")),
    forms=(
        Form("factored", factored),
        Form("expanded", expanded),
        Form("absorbed", absorbed),
        Form("decode", decode),
    ),
    vjp=vjp,
    causal="causal",
    laws=(),
    cost="quadratic",
)
