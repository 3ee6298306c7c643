"""Grouped-head latent attention: one map of tokens for all heads of a group, values decoded from a latent.

Source: survey, section "Grouped-head laTenT Attention"; Sun et al. 2025 and their released code. `gta` is what the
survey prints: queries and keys averaged over the heads of a group, values silu(U c), each head its own U. `gta.gated`
is what was released: fewer query heads instead of an average, nothing nonlinear before the sum over tokens, a sigmoid
gate after it. So there the decoder may wait until after the sum; silu may not. One of the released paths has the scale
of a width of E / heads, the other that of K, the default here; in the released sizes both are 64. Projections and
rotations are the caller's.

    letter    paper     shape                  meaning
    q k                 (T, G, M, K)           queries and keys of M heads in each of G groups; gated: k (T, G, K)
    c         v_latent  (T, L)                 latent values; gated: (T, G, L)
    U         W_UV      (G, M, V, L)           decoder of each head; gated: (G, M, L, X, L), added to X copies of z
    u                   (T, G, M, X, L)        gate before its activation
    z                   (T, L)                 a head's sum over the tokens' latents
    Kc0 C0    -         (P, G, K) (P, L)       mean keys and latents of the P tokens before; Kc and Cc have P + T rows.
                                               gated: K0 (P, G, K), C0 (P, G, L)
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .caches import appended, paired, visible
from .primitives import Array, either, masked, sigmoid, silu, softmax, stored
from .spec import Form, Input, Operator, Output, check_cotangents, check_shapes
from .tucker import attention, attention_vjp

# --- as printed ------------------------------------------------------------------------------------------------------


def shared(
    q: Array, k: Array, c: Array, U: Array, scale: float | None = None, Kc0: Array = None, C0: Array = None
) -> tuple[Array, Array, Array]:
    """P_g = softmax(scale q_g k_g^T) with q_g = mean_h q_h;  v_h = silu(U_h c);  O_h = P_g v_h.  (13.1)

    -> O (T, G, M, V), Kc, Cc."""
    scale = _checked(OPERATOR, scale, q=q, k=k, c=c, U=U, Kc0=Kc0, C0=C0)
    Kc, Cc, Q = appended(Kc0, mean(k)), appended(C0, c), mean(q)
    keep, (G, M, V, _) = visible(len(q), len(Kc)), U.shape
    O = []
    for g in range(G):
        v = np.concatenate([silu(Cc @ U[g, m].T) for m in range(M)], axis=1)
        O.append(attention(Q[:, g], Kc[:, g], v, scale, keep).reshape(len(q), M, V))
    return np.stack(O, axis=1), Kc, Cc


def repeated(
    q: Array, k: Array, c: Array, U: Array, scale: float | None = None, Kc0: Array = None, C0: Array = None
) -> tuple[Array, Array, Array]:
    """A map for each head, all of a group alike: the mean of its heads' logits with the mean key."""
    scale = _checked(OPERATOR, scale, q=q, k=k, c=c, U=U, Kc0=Kc0, C0=C0)
    Kc, Cc = appended(Kc0, mean(k)), appended(C0, c)
    keep, M = visible(len(q), len(Kc)), q.shape[2]

    def head(g: int, m: int) -> Array:
        logits = np.stack([q[:, g, n] @ Kc[:, g].T * scale for n in range(M)])
        return softmax(masked(np.sum(logits, axis=0) / M, keep, -np.inf)) @ silu(Cc @ U[g, m].T)

    return _by_head(head, U), Kc, Cc


def decode(
    q: Array, k: Array, c: Array, U: Array, scale: float | None = None, Kc0: Array = None, C0: Array = None
) -> tuple[Array, Array, Array]:
    """Token by token: mean keys and latents are all that is kept; values are decoded anew for every query."""
    scale = _checked(OPERATOR, scale, q=q, k=k, c=c, U=U, Kc0=Kc0, C0=C0)
    Kc, Cc, Q = appended(Kc0, mean(k)), appended(C0, c), mean(q)

    def head(g: int, m: int) -> Array:
        rows = [U[g, m, :0].reshape(0, U.shape[2])]
        for t in range(len(q)):
            seen = len(Kc) - len(q) + t + 1
            p = softmax(Kc[:seen, g] @ Q[t, g] * scale)
            rows.append((p @ silu(Cc[:seen] @ U[g, m].T))[None, :])
        return np.concatenate(rows)

    return _by_head(head, U), Kc, Cc


def vjp(
    cotangents: dict[str, Array],
    q: Array, k: Array, c: Array, U: Array, scale: float | None = None, Kc0: Array = None, C0: Array = None,
) -> dict[str, Array]:  # fmt: skip
    """Gradients of <O, dO> + <Kc, dKc> + <Cc, dCc>. The heads of a group share a map, so the gradients of their values
    stand side by side; each head has 1 / M of the gradient of a mean."""
    check_cotangents(OPERATOR, cotangents, {"q": q, "k": k, "c": c, "U": U, "Kc0": Kc0, "C0": C0})
    scale = _checked(OPERATOR, scale, q=q, k=k, c=c, U=U, Kc0=Kc0, C0=C0)
    Kc, Cc, Q = appended(Kc0, mean(k)), appended(C0, c), mean(q)
    keep, P, (G, M, V, L) = visible(len(q), len(Kc)), len(Kc) - len(q), U.shape
    dQ, dK, dA, dU = [], [], [], []
    for g in range(G):
        A = Cc @ U[g].reshape(M * V, L).T
        upstream = cotangents["O"][:, g].reshape(len(q), M * V)
        dq, dk, dv, _ = attention_vjp(upstream, Q[:, g], Kc[:, g], silu(A), scale, keep)
        dQ.append(dq)
        dK.append(dk)
        dA.append(dv * (sigmoid(A) + silu(A) * sigmoid(-A)))
        dU.append((dA[-1].T @ Cc).reshape(M, V, L))
    dC = np.concatenate(dA, axis=1) @ U.reshape(G * M * V, L) + cotangents["Cc"]
    dKc = np.stack(dK, axis=1) + cotangents["Kc"]
    back = {"q": _spread(np.stack(dQ, axis=1), M), "k": _spread(dKc[P:], M)}
    return back | {"c": dC[P:], "U": np.stack(dU), "Kc0": dKc[:P], "C0": dC[:P]}


def mean(x: Array) -> Array:
    """Over the heads of a group.  (T, G, M, K) -> (T, G, K)."""
    return np.sum(x, axis=2) / x.shape[2]


# --- as released -----------------------------------------------------------------------------------------------------


def after(
    q: Array, k: Array, c: Array, U: Array, u: Array, scale: float | None = None, K0: Array = None, C0: Array = None
) -> tuple[Array, Array, Array]:
    """z_h = P_h c;  o_h = (z_h, .., z_h) + z_h U_h;  Y_h = sigmoid(u_h) * o_h: decoded after the sum over tokens.

    -> Y (T, G, M, X, L), Kc, Cc."""
    scale = _checked(GATED, scale, q=q, k=k, c=c, U=U, u=u, K0=K0, C0=C0)
    Kc, Cc = appended(K0, k), appended(C0, c)
    keep = visible(len(q), len(Kc))

    def head(g: int, m: int) -> Array:
        return decoded(attention(q[:, g, m], Kc[:, g], Cc[:, g], scale, keep), U[g, m])

    return sigmoid(u) * _by_head(head, U), Kc, Cc


def before(
    q: Array, k: Array, c: Array, U: Array, u: Array, scale: float | None = None, K0: Array = None, C0: Array = None
) -> tuple[Array, Array, Array]:
    """Grouped-query attention over values that were decoded first: X times as many channels to sum."""
    scale = _checked(GATED, scale, q=q, k=k, c=c, U=U, u=u, K0=K0, C0=C0)
    Kc, Cc = appended(K0, k), appended(C0, c)
    keep, (X, L) = visible(len(q), len(Kc)), U.shape[3:]

    def head(g: int, m: int) -> Array:
        v = decoded(Cc[:, g], U[g, m]).reshape(len(Cc), X * L)
        return attention(q[:, g, m], Kc[:, g], v, scale, keep).reshape(len(q), X, L)

    return sigmoid(u) * _by_head(head, U), Kc, Cc


def step_by_step(
    q: Array, k: Array, c: Array, U: Array, u: Array, scale: float | None = None, K0: Array = None, C0: Array = None
) -> tuple[Array, Array, Array]:
    """Token by token, decoded after the sum: keys and latents are all that is kept."""
    scale = _checked(GATED, scale, q=q, k=k, c=c, U=U, u=u, K0=K0, C0=C0)
    Kc, Cc = appended(K0, k), appended(C0, c)

    def head(g: int, m: int) -> Array:
        z = [c[:0, g]]
        for t in range(len(q)):
            seen = len(Kc) - len(q) + t + 1
            z.append((softmax(Kc[:seen, g] @ q[t, g, m] * scale) @ Cc[:seen, g])[None, :])
        return decoded(np.concatenate(z), U[g, m])

    return sigmoid(u) * _by_head(head, U), Kc, Cc


def gated_vjp(
    cotangents: dict[str, Array],
    q: Array, k: Array, c: Array, U: Array, u: Array, scale: float | None = None, K0: Array = None, C0: Array = None,
) -> dict[str, Array]:  # fmt: skip
    """Gradients of <Y, dY> + <Kc, dKc> + <Cc, dCc>: through the gate, the decoder and the maps."""
    check_cotangents(GATED, cotangents, {"q": q, "k": k, "c": c, "u": u, "K0": K0, "C0": C0})
    scale = _checked(GATED, scale, q=q, k=k, c=c, U=U, u=u, K0=K0, C0=C0)
    Kc, Cc = appended(K0, k), appended(C0, c)
    keep, P, (G, M, L, X, _) = visible(len(q), len(Kc)), len(Kc) - len(q), U.shape
    gate, T = sigmoid(u), len(q)
    dq, dK, dC, dU, o = [], [], [], [], []
    for g in range(G):
        Q = q[:, g].reshape(T * M, q.shape[3])
        dO = cotangents["Y"][:, g] * gate[:, g]
        dz = np.stack([decoded_vjp(dO[:, m], U[g, m]) for m in range(M)], axis=1).reshape(T * M, L)
        dQ, *caches, z = attention_vjp(dz, Q, Kc[:, g], Cc[:, g], scale, np.repeat(keep, M, axis=0))
        z = stored(z).reshape(T, M, L)
        dq.append(dQ.reshape(T, M, q.shape[3]))
        dK.append(caches[0])
        dC.append(caches[1])
        dU.append(np.stack([(z[:, m].T @ dO[:, m].reshape(T, X * L)).reshape(L, X, L) for m in range(M)]))
        o.append(np.stack([decoded(z[:, m], U[g, m]) for m in range(M)], axis=1))
    du = cotangents["Y"] * np.stack(o, axis=1) * either(gate * sigmoid(-u), gate * (1 - gate))
    dKc, dCc = np.stack(dK, axis=1) + cotangents["Kc"], np.stack(dC, axis=1) + cotangents["Cc"]
    grads = {"q": np.stack(dq, axis=1), "k": dKc[P:], "c": dCc[P:], "U": np.stack(dU), "u": du}
    return grads | {"K0": dKc[:P], "C0": dCc[:P]}


def decoded(z: Array, U: Array) -> Array:
    """X copies of z, to which its image is added.  (T, L), (L, X, L) -> (T, X, L)."""
    L, X, _ = U.shape
    return z[:, None, :] + (z @ U.reshape(L, X * L)).reshape(len(z), X, L)


def decoded_vjp(G: Array, U: Array) -> Array:
    """From the cotangent of `decoded` to that of z.  (T, X, L) -> (T, L)."""
    L, X, _ = U.shape
    return np.sum(G, axis=1) + G.reshape(len(G), X * L) @ U.reshape(L, X * L).T


# --- shared ----------------------------------------------------------------------------------------------------------


def _by_head(head: Callable[[int, int], Array], U: Array) -> Array:
    """Heads by group: (T, G, M, ..)."""
    return np.stack([np.stack([head(g, m) for m in range(U.shape[1])], axis=1) for g in range(U.shape[0])], axis=1)


def _spread(d: Array, M: int) -> Array:
    """From a mean's gradient to those of the M heads.  (T, G, K) -> (T, G, M, K)."""
    return np.stack([d / M] * M, axis=2)


def _checked(operator: Operator, scale: float | None, **arrays: Array) -> float:
    check_shapes(operator, arrays)
    paired(**{x.name: arrays[x.name] for x in operator.state})
    return arrays["q"].shape[3] ** -0.5 if scale is None else scale


SCALE = Input("scale", (), "scalar", "scale", differentiable=False)

OPERATOR = Operator(
    name="gta",
    summary="O_h = softmax(scale q_g k_g^T) silu(U_h c), q_g and k_g the means over the heads of a group",
    source="survey, Grouped-head laTenT Attention, as printed; Sun et al. 2025",
    inputs=(
        Input("q", ("T", "G", "M", "K"), "token", "query"),
        Input("k", ("T", "G", "M", "K"), "token", "key"),
        Input("c", ("T", "L"), "token", "latent"),
        Input("U", ("G", "M", "V", "L"), "parameter", "weight"),
        SCALE,
        Input("Kc0", ("P", "G", "K"), "state", "key", carries="Kc"),
        Input("C0", ("P", "L"), "state", "latent", carries="Cc"),
    ),
    outputs=(
        Output("O", ("T", "G", "M", "V")),
        Output("Kc", ("P+T", "G", "K"), "state"),
        Output("Cc", ("P+T", "L"), "state"),
    ),
    forms=(Form("shared", shared), Form("repeated", repeated), Form("decode", decode)),
    vjp=vjp,
    causal=True,
    laws=(),
    cost="quadratic",
)

GATED = Operator(
    name="gta.gated",
    summary="z_h = softmax(scale q_h k_g^T) c_g; Y_h = sigmoid(u_h) * ((z_h, .., z_h) + z_h U_h)",
    source="released code of Sun et al. 2025, without its projections and rotations",
    inputs=(
        Input("q", ("T", "G", "M", "K"), "token", "query"),
        Input("k", ("T", "G", "K"), "token", "key"),
        Input("c", ("T", "G", "L"), "token", "latent"),
        Input("U", ("G", "M", "L", "X", "L"), "parameter", "weight"),
        Input("u", ("T", "G", "M", "X", "L"), "token", "gate"),
        SCALE,
        Input("K0", ("P", "G", "K"), "state", "key", carries="Kc"),
        Input("C0", ("P", "G", "L"), "state", "latent", carries="Cc"),
    ),
    outputs=(
        Output("Y", ("T", "G", "M", "X", "L")),
        Output("Kc", ("P+T", "G", "K"), "state"),
        Output("Cc", ("P+T", "G", "L"), "state"),
    ),
    forms=(Form("after", after), Form("before", before), Form("decode", step_by_step)),
    vjp=gated_vjp,
    causal=True,
    laws=("linearity", "homogeneity", "euler"),
    linear_in="c",
    cost="quadratic",
    degrees={"c": 1},
)
