"""Wrong memories that learn while they read: forward, then gradients.

The letters are those of reference/titans.py and titans_mlp.py. `learner`, `deep` and their gradients go token by token,
with their steps as arguments; for a linear memory `entry` is the memory before the chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mixproof.reference import titans as right
from mixproof.reference.primitives import Array, causal_mask, sigmoid, silu
from mixproof.reference.titans_mlp import curvature, slope
from mixproof.verify.arithmetic import round_to
from mixproof.verify.subjects.mutants import Row, tabulated

CHUNK = 8
LINEAR, CHUNKED = "titans.linear", "titans.chunked"
Step = Callable[..., Array]

# --- builders --------------------------------------------------------------------------------------------------------


def named(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """With the signature of an operator: `run` takes the tokens and states, then the sizes of a chunk in which
    gradients wait and of one that is computed at once."""

    def linear(q, k, v, alpha, eta, theta, M0=None, S0=None, chunk=CHUNK):
        return run(q, k, v, alpha, eta, theta, M0, S0, 1, chunk)

    def chunked(q, k, v, alpha, eta, theta, size=4, M0=None, S0=None):
        return run(q, k, v, alpha, eta, theta, M0, S0, size, size)

    return linear if name == LINEAR else chunked


def momentum(S: Array, eta: Array, write: Array) -> Array:
    return eta * S + write


def learner(
    name: str, factor: Callable[[int, int], float] = lambda V, size: 2.0,
    seen: Step = lambda M, old, entry, keep, ahead: old,
    starts: Callable[[int, int], bool] = lambda t, size: t % size == 0, moved: Step = momentum,
    read: Step = lambda before, after, entry: after, kept: Step = lambda alpha: 1 - alpha,
    fresh: Step = lambda S: S, handed: Step = lambda S: S, keys: Step = lambda k: k, lack: Step = lambda E: E,
) -> Callable[..., Any]:  # fmt: skip
    """-> y, M, S. `old` is the memory at which gradients are taken, `ahead` what momentum alone adds to the memory."""

    def run(q, k, v, alpha, eta, theta, M0, S0, size, chunk):
        zero = v[:0].T @ k[:0]
        M, S = zero if M0 is None else M0, zero if S0 is None else S0
        k, rows, old, entry = keys(k), [q[:0] @ M.T], M, M
        for t in range(len(q)):
            if t % chunk == 0:
                entry, S = M, fresh(S)
            old = M if starts(t, size) else old
            keep = kept(alpha[t])
            E = lack(v[t] - seen(M, old, entry, keep, eta[t] * S) @ k[t])
            S = moved(S, eta[t], factor(v.shape[1], size) * theta[t] * E[:, None] * k[t][None, :])
            before, M = M, keep * M + S
            rows.append((read(before, M, entry) @ q[t])[None])
        return np.concatenate(rows), M, handed(S)

    return named(name, run)


def learner_vjp(
    name: str, through: float = 1.0, last: float = 1.0, theta_factor: float = 2.0, key_read: float = 1.0,
    at: Callable[[Array, Array], Array] = lambda before, after: before,
) -> Callable[..., Any]:  # fmt: skip
    """`through` and `key_read` weigh what goes back through the inner gradient to memory and key, `last` the cotangent
    of the last momentum; `at` chooses the state that the gradient of a gate meets."""

    def run(cotangents, q, k, v, alpha, eta, theta, M0, S0, size, chunk):
        zero = v[:0].T @ k[:0]
        M, S = [zero if M0 is None else M0], [zero if S0 is None else S0]
        E = [v[:0]]
        for t in range(len(q)):
            E.append((v[t] - M[t // size * size] @ k[t])[None])
            S.append(eta[t] * S[t] + 2 * theta[t] * E[-1].T * k[t][None, :])
            M.append((1 - alpha[t]) * M[t] + S[-1])
        E, G, d = np.concatenate(E), cotangents["y"], {n: [] for n in ("q", "k", "v", "alpha", "eta", "theta")}
        R, Q, waiting = cotangents["M"], last * cotangents["S"], 0 * zero
        for t in reversed(range(len(q))):
            d["q"].append(M[t + 1].T @ G[t])
            R = R + G[t][:, None] * q[t][None, :]
            Q = Q + R
            D = 2 * theta[t] * (Q @ k[t])
            old = M[t // size * size]
            d["k"].append(2 * theta[t] * (Q.T @ E[t]) - key_read * (old.T @ D))
            d["v"].append(D)
            d["alpha"].append(-np.sum(R * at(M[t], M[t + 1])))
            d["eta"].append(np.sum(Q * at(S[t], S[t + 1])))
            d["theta"].append(theta_factor * np.sum(E[t] * (Q @ k[t])))
            waiting = waiting + through * D[:, None] * k[t][None, :]
            R, Q = (1 - alpha[t]) * R, eta[t] * Q
            if t % size == 0:
                R, waiting = R - waiting, 0 * waiting
        tokens = {"q": q, "k": k, "v": v, "alpha": alpha, "eta": eta, "theta": theta}
        grads = {n: np.stack(d[n][::-1]) if d[n] else 0 * x for n, x in tokens.items()}
        return grads | {"M0": R, "S0": Q}

    def linear(cotangents, q, k, v, alpha, eta, theta, M0=None, S0=None, chunk=CHUNK):
        return run(cotangents, q, k, v, alpha, eta, theta, M0, S0, 1, chunk)

    def chunked(cotangents, q, k, v, alpha, eta, theta, size=4, M0=None, S0=None):
        return run(cotangents, q, k, v, alpha, eta, theta, M0, S0, size, size)

    return linear if name == LINEAR else chunked


def by_scans(name: str, products: Step) -> Callable[..., Any]:
    """The reference's parallel form with the products of gates as an argument."""

    def run(q, k, v, alpha, eta, theta, M0, S0, size, chunk):
        zero = v[:0].T @ k[:0]
        M, S = zero if M0 is None else M0, zero if S0 is None else S0
        A, H = products(1 - alpha), products(eta)
        G, c = A[:, 1:] @ H[1:], np.arange(len(k)) // size * size
        L = G[c][:, 1:] * (k @ k.T) * (2 * theta)
        E = right.substituted(L, v - A[c][:, :1] * (k @ M.T) - G[c][:, :1] * (k @ S.T))
        W = 2 * theta[:, None] * E
        y = A[1:, :1] * (q @ M.T) + G[1:, :1] * (q @ S.T) + ((q @ k.T) * G[1:, 1:]) @ W
        M1 = A[-1, 0] * M + G[-1, 0] * S + right.outer(G[-1:, 1:], W, k)[0]
        return y, M1, H[-1, 0] * S + right.outer(H[-1:, 1:], W, k)[0]

    return named(name, run)


def deep(
    active: Step = silu, bends: Step = slope, factor: float = 2.0, momentum: float = 1.0, learns: float = 1.0,
    starts: Step = lambda I: I, first: bool = False, old: bool = False, decayed: bool = False, turned: bool = False,
) -> Callable[..., Any]:  # fmt: skip
    """-> y, W1, W2, S1, S2. `first` updates the last layer before the first layer's gradient is taken, `old` reads
    before the update, `decayed` takes gradients at the decayed memory, `turned` swaps the momenta of the last layer."""

    def forward(q, k, v, alpha, eta, theta, I1, I2, W10=None, W20=None, S10=None, S20=None):
        W1, W2 = starts(I1) if W10 is None else W10, starts(I2) if W20 is None else W20
        S1, S2 = 0 * I1 if S10 is None else S10, 0 * I2 if S20 is None else S20
        rows = [v[:0]]
        for t in range(len(q)):
            keep = 1 - alpha[t]
            V1, V2 = (keep * W1, keep * W2) if decayed else (W1, W2)
            a = V1 @ k[t]
            h = active(a)
            e = v[t] - V2 @ h
            S2 = momentum * eta[t] * S2 + factor * theta[t] * e[:, None] * h[None, :]
            new2 = keep * W2 + S2
            d = bends(a) * ((new2 if first else V2).T @ e)
            S1 = momentum * eta[t] * S1 + learns * factor * theta[t] * d[:, None] * k[t][None, :]
            new1 = keep * W1 + S1
            now1, now2 = (W1, W2) if old else (new1, new2)
            rows.append((now2 @ active(now1 @ q[t]))[None])
            W1, W2 = new1, new2
        return np.concatenate(rows), W1, W2, S1, -S2 if turned else S2

    return forward


def deep_vjp(
    bend: Step = curvature, through: float = 1.0, last: float = 1.0, layers: tuple[float, float] = (1.0, 1.0)
) -> Callable[..., Any]:
    """`through` weighs what goes back to the memory through the inner gradients, `last` the cotangents of the last
    momenta, `layers` what each layer adds to the gradients of forgetting."""

    def gradients(cotangents, q, k, v, alpha, eta, theta, I1, I2, W10=None, W20=None, S10=None, S20=None):
        W1, W2 = [I1 if W10 is None else W10], [I2 if W20 is None else W20]
        S1, S2, trace = [0 * I1 if S10 is None else S10], [0 * I2 if S20 is None else S20], []
        for t in range(len(q)):
            a = W1[t] @ k[t]
            h = silu(a)
            e = v[t] - W2[t] @ h
            b = W2[t].T @ e
            trace.append((a, h, e, b))
            S1.append(eta[t] * S1[t] + 2 * theta[t] * (b * slope(a))[:, None] * k[t][None, :])
            S2.append(eta[t] * S2[t] + 2 * theta[t] * e[:, None] * h[None, :])
            W1.append((1 - alpha[t]) * W1[t] + S1[-1])
            W2.append((1 - alpha[t]) * W2[t] + S2[-1])
        R1, R2, Q1, Q2 = cotangents["W1"], cotangents["W2"], last * cotangents["S1"], last * cotangents["S2"]
        d = {n: [] for n in ("q", "k", "v", "alpha", "eta", "theta")}
        for t in reversed(range(len(q))):
            (a, h, e, b), G, c = trace[t], cotangents["y"][t], W1[t + 1] @ q[t]
            dc = (W2[t + 1].T @ G) * slope(c)
            d["q"].append(W1[t + 1].T @ dc)
            R1, R2 = R1 + dc[:, None] * q[t][None, :], R2 + G[:, None] * silu(c)[None, :]
            Q1, Q2 = Q1 + R1, Q2 + R2
            dd = 2 * theta[t] * (Q1 @ k[t])
            db = dd * slope(a)
            de = 2 * theta[t] * (Q2 @ h) + W2[t] @ db
            da = dd * b * bend(a) + (2 * theta[t] * (Q2.T @ e) - W2[t].T @ de) * slope(a)
            d["k"].append(2 * theta[t] * (Q1.T @ (b * slope(a))) + W1[t].T @ da)
            d["v"].append(de)
            d["alpha"].append(-layers[0] * np.sum(R1 * W1[t]) - layers[1] * np.sum(R2 * W2[t]))
            d["eta"].append(np.sum(Q1 * S1[t]) + np.sum(Q2 * S2[t]))
            d["theta"].append(2 * np.sum((Q1 @ k[t]) * b * slope(a)) + 2 * np.sum((Q2 @ h) * e))
            R1 = (1 - alpha[t]) * R1 + through * da[:, None] * k[t][None, :]
            R2 = (1 - alpha[t]) * R2 + through * (e[:, None] * db[None, :] - de[:, None] * h[None, :])
            Q1, Q2 = eta[t] * Q1, eta[t] * Q2
        tokens = {"q": q, "k": k, "v": v, "alpha": alpha, "eta": eta, "theta": theta}
        grads = {n: np.stack(d[n][::-1]) if d[n] else 0 * x for n, x in tokens.items()} | {"S10": Q1, "S20": Q2}
        grads |= {"W10": R1, "I1": 0 * R1} if W10 is not None else {"I1": R1}
        return grads | ({"W20": R2, "I2": 0 * R2} if W20 is not None else {"I2": R2})

    return gradients


# --- pieces that are wrong by themselves -----------------------------------------------------------------------------


def quotients(a: Array) -> Array:
    c = np.concatenate([a[:1] ** 0, np.cumprod(a)]) if len(a) else np.ones(1, a.dtype)
    return np.where(causal_mask(len(c)), c[:, None] / c[None, :], 0)


def rounded(alpha: Array) -> Array:
    return round_to(1 - alpha, "bfloat16").astype(alpha.dtype)


def ones_for_zeros(k: Array) -> Array:
    """Keys of zero become the unit vector with equal entries."""
    none = np.all(k == 0, axis=1, keepdims=True)
    return np.where(none, k.shape[1] ** -0.5, k).astype(k.dtype)


# --- tables ----------------------------------------------------------------------------------------------------------


def both(name: str) -> list[Row]:
    """Mistakes of either linear memory."""
    chunks = ("forward", "forms") if name == LINEAR else ("forward",)
    return [
        ("half_gradient", "the gradient without its factor 2", learner(name, lambda V, size: 1.0), "", ("forward",)),
        ("mean_loss", "the mean over channels for the loss", learner(name, lambda V, size: 2 / V), "", ("forward",)),
        (
            "momentum_reset", "momentum that starts anew in every chunk", learner(name, fresh=lambda S: 0 * S),
            "titans-mom-reset", chunks,
        ),
        (
            "read_start", "the memory before the chunk read",
            learner(name, read=lambda before, after, entry: entry), "titans-read-start", chunks,
        ),
        (
            "read_before", "the memory before the token read", learner(name, read=lambda before, after, entry: before),
            "", ("forward",),
        ),
        (
            "momentum_last", "eta applied to the new gradient too",
            learner(name, moved=lambda S, eta, write: eta * (S + write)), "", ("forward",),
        ),
        (
            "averaged", "the gradient weighed by 1 - eta",
            learner(name, moved=lambda S, eta, write: eta * S + (1 - eta) * write), "", ("forward",),
        ),
        ("no_momentum", "no momentum", learner(name, moved=lambda S, eta, write: write), "", ("forward",)),
        ("keeps_alpha", "alpha kept, not forgotten", learner(name, kept=lambda alpha: alpha), "", ("forward",)),
        ("bfloat16_gate", "1 - alpha rounded to bfloat16", learner(name, kept=rounded), "", ("forward",)),
        ("momentum_lost", "a last momentum of zero", learner(name, handed=lambda S: 0 * S), "", ("forward", "split")),
        (
            "clipped", "what the memory lacks clipped to [-1, 1]", learner(name, lack=lambda E: np.clip(E, -1, 1)), "",
            ("forward", "linearity", "homogeneity", "euler"),
        ),
        ("quotients", "products of gates as quotients of cumulative ones", by_scans(name, quotients), "", ("forward",)),
    ]  # fmt: skip


ONLY_LINEAR: list[Row] = [
    (
        "frozen", "gradients at the memory before the chunk",
        learner(LINEAR, seen=lambda M, old, entry, keep, ahead: entry), "", ("forward", "forms"),
    ),
    (
        "decayed_first", "gradients at the memory that has forgotten",
        learner(LINEAR, seen=lambda M, old, entry, keep, ahead: keep * M), "", ("forward",),
    ),
    (
        "looks_ahead", "gradients where momentum leads",
        learner(LINEAR, seen=lambda M, old, entry, keep, ahead: M + ahead), "", ("forward",),
    ),
    ("ones_for_zeros", "keys of zero taken for equal entries", learner(LINEAR, keys=ones_for_zeros), "",
     ("left_padding",)),
]  # fmt: skip
ONLY_CHUNKED: list[Row] = [
    (
        "fresh", "gradients at the memory before the token",
        learner(CHUNKED, seen=lambda M, old, entry, keep, ahead: M), "", ("forward",),
    ),
    (
        "late_entry", "chunks that begin one token late", learner(CHUNKED, starts=lambda t, size: (t - 1) % size == 0),
        "", ("forward",),
    ),
    ("never_moves", "gradients at the first memory", learner(CHUNKED, starts=lambda t, size: t == 0), "", ("forward",)),
    ("mean_of_chunk", "the mean gradient of a chunk", learner(CHUNKED, lambda V, size: 2 / size), "", ("forward",)),
]  # fmt: skip


def both_vjp(name: str) -> list[Row]:
    return [
        ("first_order", "the inner gradient taken for a constant", learner_vjp(name, through=0.0, key_read=0.0), "",
         ("vjp",)),
        ("not_by_memory", "nothing back to the memory through inner gradients", learner_vjp(name, through=0.0), "",
         ("vjp",)),
        ("no_last_momentum", "the cotangent of the last momentum dropped", learner_vjp(name, last=0.0), "", ("vjp",)),
        ("half_theta", "the gradient of theta without its factor 2", learner_vjp(name, theta_factor=1.0), "",
         ("vjp",)),
        ("gates_after", "gates' gradients by the states after the token",
         learner_vjp(name, at=lambda before, after: after), "", ("vjp",)),
    ]  # fmt: skip


DEEP: tuple[list[Row], list[Row]] = (
    [
        ("half_gradient", "the gradient without its factor 2", deep(factor=1.0), "", ("forward",)),
        (
            "rectified", "max(0, x) for silu",
            deep(lambda a: np.maximum(a, 0), lambda a: np.where(a > 0, a**0, 0 * a)), "", ("forward",),
        ),
        ("sigmoid_slope", "sigmoid for the derivative of silu", deep(bends=sigmoid), "", ("forward",)),
        ("no_momentum", "no momentum", deep(momentum=0.0), "", ("forward",)),
        ("last_layer", "a first layer that does not learn", deep(learns=0.0), "", ("forward",)),
        ("layer_by_layer", "the last layer updated before the first layer's gradient", deep(first=True), "",
         ("forward",)),
        ("read_before", "the memory before the token read", deep(old=True), "", ("forward",)),
        ("decayed_first", "gradients at the memory that has forgotten", deep(decayed=True), "", ("forward",)),
        ("empty", "an empty memory for the one that is learned", deep(starts=lambda I: 0 * I), "", ("forward",)),
        ("turned", "the last layer's momentum handed on with the other sign", deep(turned=True), "",
         ("forward", "split")),
    ],
    [
        ("first_order", "the inner gradients taken for constants", deep_vjp(through=0.0), "", ("vjp",)),
        ("straight", "no second derivative of silu", deep_vjp(bend=lambda a: 0 * a), "", ("vjp",)),
        ("no_last_momentum", "the cotangents of the last momenta dropped", deep_vjp(last=0.0), "", ("vjp",)),
        ("one_layer", "forgetting's gradient by the last layer alone", deep_vjp(layers=(0.0, 1.0)), "", ("vjp",)),
    ],
)  # fmt: skip
MUTANTS = (
    *tabulated(LINEAR, both(LINEAR) + ONLY_LINEAR, both_vjp(LINEAR)),
    *tabulated(CHUNKED, both(CHUNKED) + ONLY_CHUNKED, both_vjp(CHUNKED)),
    *tabulated("titans.mlp", *DEEP),
)
