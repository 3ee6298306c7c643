"""Mamba's selective state space: a diagonal linear system whose steps, inputs and outputs the tokens choose.

Source: survey, section "Mamba"; Gu and Dao 2023, (2) and (4), algorithm 2. A token u that is held for a time delta
takes h' = A h + B u from h to exp(delta A) h + (exp(delta A) - 1) / A B u: this is `mamba.zoh`, written with
phi1(z) = (exp(z) - 1) / z because the inverse that (4) prints has no value where delta or A is zero. The released code
has delta B for B bar beside the same exp(delta A): this is `mamba.euler`.

    letter   paper    shape              meaning
    u y      x y      (T, D)             tokens before and after
    delta    Delta    (T, D)             steps, positive
    A        A        (D, N)             rates, negative: the diagonals of D matrices
    B C      B C      (T, N)             weights of what the state takes in and gives out, shared by all channels
    skip     D        (D,)               weight of u in y
    h0 h     h        (D, N)             state before the first and after the last token
    a        A bar    (T, D, N)          decays exp(delta A)
    F                 (T, D, N)          B bar = F B: F is delta phi1(delta A), or delta
    P                 (b+1, b+1, D, N)   P[n, m] = a_{m+1} ... a_n of a chunk of b tokens, counted from 1
    M        M        (b, b, D)          y = M u inside a chunk, a semiseparable matrix for each channel
    G R                                  cotangents of y, and of the states after each token
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .primitives import Array, causal_mask, either, masked, phi1, phi1_slope, segment_decays, segment_products, starts
from .spec import Form, Input, Operator, Output, check_cotangents, check_shapes

Products = Callable[[int, int], Array]  # P of the tokens start <= t < stop
CHUNK = 16  # P has D N entries for each pair of tokens


def in_steps(u: Array, a: Array, F: Array, B: Array, C: Array, skip: Array, h0: Array) -> tuple[Array, Array]:
    """h_t = a_t * h_{t-1} + F_t * u_t^T B_t;  y_t = h_t C_t + skip * u_t.  -> (T, D), (D, N).  (2)"""
    h = _initial(u, B, h0)
    rows = [u[:0]]
    for t in range(len(u)):
        h = a[t] * h + F[t] * u[t][:, None] * B[t][None, :]
        rows.append(np.sum(h * C[t], axis=1)[None])
    return np.concatenate(rows) + skip * u, h


def in_a_scan(u: Array, a: Array, F: Array, B: Array, C: Array, skip: Array, h0: Array) -> tuple[Array, Array]:
    """All states in log2 T steps: of two tokens (a, w) and (b, v) make one, (b a, b w + v)."""
    h, w, width = _initial(u, B, h0), F * u[:, :, None] * B[:, None, :], 1
    while width < len(u):
        w = np.concatenate([w[:width], a[width:] * w[:-width] + w[width:]])
        a = np.concatenate([a[:width], a[width:] * a[:-width]])
        width *= 2
    states = np.concatenate([h[None], a * h + w])
    return np.sum(states[1:] * C[:, None, :], axis=2) + skip * u, states[-1]


def in_one_chunk(u: Array, P: Array, F: Array, B: Array, C: Array, skip: Array, h0: Array) -> tuple[Array, Array]:
    """y = M u + what is read of h0, M_nm = sum_N C_n P_nm F_m B_m for m <= n.  -> (b, D), (D, N)."""
    h0, K = _initial(u, B, h0), F * B[:, None, :]
    M = masked(np.sum(C[:, None, None, :] * P[1:, 1:] * K, axis=3), causal_mask(len(u))[:, :, None], 0)
    y = np.sum(M * u, axis=1) + np.sum(C[:, None, :] * P[1:, 0] * h0, axis=2) + skip * u
    return y, P[-1, 0] * h0 + np.sum(P[-1, 1:] * K * u[:, :, None], axis=0)


def in_chunks(
    u: Array, products: Products, F: Array, B: Array, C: Array, skip: Array, h0: Array, chunk: int
) -> tuple[Array, Array]:
    """Chunk by chunk with the state across them; the last chunk may be short."""
    h, rows = _initial(u, B, h0), [u[:0]]
    for start in starts(len(u), chunk):
        stop = min(start + chunk, len(u))
        c = slice(start, stop)
        y, h = in_one_chunk(u[c], products(start, stop), F[c], B[c], C[c], skip, h)
        rows.append(y)
    return np.concatenate(rows), h


def state_gradients(
    cotangents: dict[str, Array], u: Array, products: Products, a: Array, F: Array, B: Array, C: Array, skip: Array,
    h0: Array, chunk: int,
) -> dict[str, Array]:  # fmt: skip
    """Gradients of <y, dy> + <h, dh>, those of log a and of F among them: chunk by chunk backwards."""
    h, T, W = _initial(u, B, h0), len(u), F * u[:, :, None] * B[:, None, :]
    chunks = []
    for start in starts(T, chunk):
        c = slice(start, min(start + chunk, T))
        P = products(start, c.stop)
        chunks.append((c, P, h))
        h = P[-1, 0] * h + np.sum(P[-1, 1:] * W[c], axis=0)
    dh = cotangents["h"]
    rows = {"u": [0 * u[:0]], "B": [0 * B[:0]], "C": [0 * C[:0]], "F": [0 * W[:0]], "log a": [0 * W[:0]]}
    for c, P, h in reversed(chunks):
        G = cotangents["y"][c]
        h = P[:, 0] * h + np.sum(P[:, 1:] * W[c], axis=1)  # h_0 ... h_b
        R = P[-1] * dh + np.sum(P[1:] * (G[:, :, None] * C[c][:, None, :])[:, None], axis=0)
        dh, R = R[0], R[1:]
        rows["u"].append(np.sum(R * F[c] * B[c][:, None, :], axis=2) + skip * G)
        rows["B"].append(np.sum(R * F[c] * u[c][:, :, None], axis=1))
        rows["C"].append(np.sum(h[1:] * G[:, :, None], axis=1))
        rows["F"].append(R * u[c][:, :, None] * B[c][:, None, :])
        rows["log a"].append(R * a[c] * h[:-1])
    grads = {name: np.concatenate(r[::-1]) for name, r in rows.items()}
    return grads | {"skip": np.sum(cotangents["y"] * u, axis=0), "h0": dh}


def _initial(u: Array, B: Array, h0: Array) -> Array:
    return u[:0].T @ B[:0] if h0 is None else h0


# --- how a token enters ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Discretisation:
    """F of steps and rates, (T, D), (D, N) -> (T, D, N), and its derivatives by each of them."""

    gain: Callable[[Array, Array], Array]
    slopes: Callable[[Array, Array], tuple[Array, Array]]


def _held(delta: Array, A: Array) -> Array:
    return delta[:, :, None] * phi1(delta[:, :, None] * A)


def _held_slopes(delta: Array, A: Array) -> tuple[Array, Array]:
    """exp(z) and delta^2 phi1'(z) with z = delta A; by rules of differentiation both may come as differences."""
    z = delta[:, :, None] * A
    quotient = np.where(z == 0, 1 / 2, (np.exp(z) - phi1(z)) / np.where(z == 0, 1, z))
    slope = either(phi1_slope(z), quotient)
    return either(np.exp(z), phi1(z) + z * slope), delta[:, :, None] * delta[:, :, None] * slope


def _at_once(delta: Array, A: Array) -> Array:
    return delta[:, :, None] + 0 * A


def _at_once_slopes(delta: Array, A: Array) -> tuple[Array, Array]:
    return 1 + 0 * (delta[:, :, None] * A), 0 * (delta[:, :, None] * A)


HELD, AT_ONCE = Discretisation(_held, _held_slopes), Discretisation(_at_once, _at_once_slopes)


# --- the operators ---------------------------------------------------------------------------------------------------


def _exact_chunkwise(
    u: Array, a: Array, F: Array, B: Array, C: Array, skip: Array, h0: Array, chunk: int = CHUNK
) -> tuple[Array, Array]:
    return in_chunks(u, lambda start, stop: segment_products(a[start:stop]), F, B, C, skip, h0, chunk)


def _exact_parallel(u: Array, a: Array, F: Array, B: Array, C: Array, skip: Array, h0: Array) -> tuple[Array, Array]:
    return in_one_chunk(u, segment_products(a), F, B, C, skip, h0)


def _operator(name: str, summary: str, source: str, rule: Discretisation) -> Operator:
    def checked(u: Array, delta: Array, A: Array, B: Array, C: Array, skip: Array, h0: Array) -> tuple[Array, Array]:
        """Logarithms of the decays, and F."""
        check_shapes(operator, {"u": u, "delta": delta, "A": A, "B": B, "C": C, "skip": skip, "h0": h0})
        return delta[:, :, None] * A, rule.gain(delta, A)

    def chunkwise(
        u: Array, delta: Array, A: Array, B: Array, C: Array, skip: Array, h0: Array = None, chunk: int = CHUNK
    ) -> tuple[Array, Array]:
        z, F = checked(u, delta, A, B, C, skip, h0)
        return in_chunks(u, lambda start, stop: segment_decays(z, start, stop), F, B, C, skip, h0, chunk)

    def recurrent(
        u: Array, delta: Array, A: Array, B: Array, C: Array, skip: Array, h0: Array = None
    ) -> tuple[Array, Array]:
        z, F = checked(u, delta, A, B, C, skip, h0)
        return in_steps(u, np.exp(z), F, B, C, skip, h0)

    def scan(
        u: Array, delta: Array, A: Array, B: Array, C: Array, skip: Array, h0: Array = None
    ) -> tuple[Array, Array]:
        z, F = checked(u, delta, A, B, C, skip, h0)
        return in_a_scan(u, np.exp(z), F, B, C, skip, h0)

    def parallel(
        u: Array, delta: Array, A: Array, B: Array, C: Array, skip: Array, h0: Array = None
    ) -> tuple[Array, Array]:
        z, F = checked(u, delta, A, B, C, skip, h0)
        return in_one_chunk(u, segment_decays(z, 0, len(u)), F, B, C, skip, h0)

    def vjp(
        cotangents: dict[str, Array],
        u: Array, delta: Array, A: Array, B: Array, C: Array, skip: Array, h0: Array = None, chunk: int = CHUNK,
    ) -> dict[str, Array]:  # fmt: skip
        z, F = checked(u, delta, A, B, C, skip, h0)
        check_cotangents(operator, cotangents, {"u": u, "A": A})
        grads = state_gradients(
            cotangents, u, lambda start, stop: segment_decays(z, start, stop), np.exp(z), F, B, C, skip, h0, chunk
        )
        dF, dz, (by_delta, by_A) = grads.pop("F"), grads.pop("log a"), rule.slopes(delta, A)
        ddelta = np.sum(dz * A + dF * by_delta, axis=2)
        return grads | {"delta": ddelta, "A": np.sum(dz * delta[:, :, None] + dF * by_A, axis=0)}

    names = {"chunkwise": chunkwise, "recurrent": recurrent, "scan": scan, "parallel": parallel}
    exact = {"chunkwise": _exact_chunkwise, "recurrent": in_steps, "scan": in_a_scan, "parallel": _exact_parallel}
    operator = Operator(
        name=name,
        summary=summary,
        source=source,
        inputs=(
            Input("u", ("T", "D"), "token", "value"),
            Input("delta", ("T", "D"), "token", "step"),
            Input("A", ("D", "N"), "parameter", "rate"),
            Input("B", ("T", "N"), "token", "key"),
            Input("C", ("T", "N"), "token", "query"),
            Input("skip", ("D",), "parameter", "gain"),
            Input("h0", ("D", "N"), "state", "state", carries="h"),
        ),
        outputs=(Output("y", ("T", "D")), Output("h", ("D", "N"), "state")),
        forms=tuple(Form(n, f, chunked=n == "chunkwise") for n, f in names.items()),
        vjp=vjp,
        causal=True,
        laws=("linearity", "homogeneity", "euler"),
        linear_in="u",
        exact=tuple(Form(n, f, chunked=n == "chunkwise") for n, f in exact.items()),
        exact_inputs=(
            Input("u", ("T", "D"), "token", "field"),
            Input("a", ("T", "D", "N"), "token", "field"),
            Input("F", ("T", "D", "N"), "token", "field"),
            Input("B", ("T", "N"), "token", "field"),
            Input("C", ("T", "N"), "token", "field"),
            Input("skip", ("D",), "parameter", "field"),
            Input("h0", ("D", "N"), "state", "field"),
        ),
        degrees={"u": 1},
    )
    return operator


ZOH = _operator(
    "mamba.zoh",
    "h_t = exp(delta_t A) h_{t-1} + delta_t phi1(delta_t A) B_t u_t;  y_t = C_t h_t + skip u_t",
    "survey, Mamba; Gu and Dao 2023 (2), (4)",
    HELD,
)
EULER = _operator(
    "mamba.euler",
    "h_t = exp(delta_t A) h_{t-1} + delta_t B_t u_t;  y_t = C_t h_t + skip u_t",
    "the released code of Gu and Dao 2023",
    AT_ONCE,
)
