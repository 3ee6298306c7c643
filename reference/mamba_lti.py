"""The state space before it was selective: `mamba.zoh` with one step, input and output weight for all tokens.

Source: survey, section "Mamba"; Gu and Dao 2023, (2) to (4). Only here is the map from u to y a convolution, by the
kernel k_j = C a^j F B; with h0 there is what is left of it besides.

    letter   paper    shape     meaning
    u y      x y      (T, D)    tokens before and after
    delta    Delta    (D,)      step of each channel, positive
    A        A        (D, N)    rates, negative
    B C      B C      (N,)      weights of what the state takes in and gives out
    skip     D        (D,)      weight of u in y
    h0 h     h        (D, N)    state before the first and after the last token
    a F      A bar    (D, N)    exp(delta A); delta phi1(delta A)
"""

from __future__ import annotations

import numpy as np

from . import mamba
from .primitives import Array, causal_mask, decay, masked, phi1
from .spec import Form, Input, Operator, Output, check_cotangents, check_shapes


def recurrent(
    u: Array, delta: Array, A: Array, B: Array, C: Array, skip: Array, h0: Array = None
) -> tuple[Array, Array]:
    """h_t = a * h_{t-1} + F * u_t^T B;  y_t = h_t C + skip * u_t.  -> (T, D), (D, N).  (2)"""
    z = _checked(u, delta, A, B, C, skip, h0)
    return _recurrent(u, np.exp(z), delta[:, None] * phi1(z), B, C, skip, h0)


def convolution(
    u: Array, delta: Array, A: Array, B: Array, C: Array, skip: Array, h0: Array = None
) -> tuple[Array, Array]:
    """y_t = sum_{s <= t} k_{t-s} u_s + C a^{t+1} h0 + skip * u_t.  (3)"""
    z = _checked(u, delta, A, B, C, skip, h0)
    return _convolution(u, _powers(z, len(u)), delta[:, None] * phi1(z), B, C, skip, h0)


def kernel(powers: Array, F: Array, B: Array, C: Array) -> Array:
    """k_j = C a^j F B for j = 0 .. T - 1, from a^j.  (T, D, N), (D, N), (N,), (N,) -> (T, D).  (3)"""
    return np.sum(powers * (F * B * C), axis=2)


def by_fft(u: Array, delta: Array, A: Array, B: Array, C: Array, skip: Array, length: int | None = None) -> Array:
    """The convolution by Fourier transforms of at least 2 T numbers, without a state; shorter ones wrap around."""
    z, T = _checked(u, delta, A, B, C, skip, None), len(u)
    k, n = kernel(_powers(z, T)[:-1], delta[:, None] * phi1(z), B, C), max(1, 2 * T) if length is None else length
    return np.fft.irfft(np.fft.rfft(k, n, axis=0) * np.fft.rfft(u, n, axis=0), n, axis=0)[:T] + skip * u


def vjp(
    cotangents: dict[str, Array],
    u: Array, delta: Array, A: Array, B: Array, C: Array, skip: Array, h0: Array = None, chunk: int = mamba.CHUNK,
) -> dict[str, Array]:  # fmt: skip
    """Those of `mamba.zoh`, summed over the tokens that share a step or a weight."""
    check_shapes(OPERATOR, {"u": u, "delta": delta, "A": A, "B": B, "C": C, "skip": skip, "h0": h0})
    check_cotangents(OPERATOR, cotangents, {"u": u, "A": A})
    T, shared = len(u), {"delta": delta, "B": B, "C": C}
    tokens = {name: np.broadcast_to(x, (T, *x.shape)) for name, x in shared.items()}
    grads = mamba.ZOH.vjp(cotangents, u=u, A=A, skip=skip, h0=h0, **tokens, chunk=chunk)
    return grads | {name: np.sum(grads[name], axis=0) for name in shared}


def _checked(u: Array, delta: Array, A: Array, B: Array, C: Array, skip: Array, h0: Array) -> Array:
    """delta A."""
    check_shapes(OPERATOR, {"u": u, "delta": delta, "A": A, "B": B, "C": C, "skip": skip, "h0": h0})
    return delta[:, None] * A


def _powers(z: Array, T: int) -> Array:
    """a^0 .. a^T of a = exp(z).  -> (T + 1, D, N)"""
    n = np.arange(T + 1)[:, None, None]
    return np.exp((n.astype(z.dtype) if isinstance(z, np.ndarray) else n) * z)


def _recurrent(u: Array, a: Array, F: Array, B: Array, C: Array, skip: Array, h0: Array) -> tuple[Array, Array]:
    h, K = _initial(a, h0), F * B
    rows = [u[:0]]
    for t in range(len(u)):
        h = a * h + K * u[t][:, None]
        rows.append(np.sum(h * C, axis=1)[None])
    return np.concatenate(rows) + skip * u, h


def _convolution(u: Array, powers: Array, F: Array, B: Array, C: Array, skip: Array, h0: Array) -> tuple[Array, Array]:
    T, h0 = len(u), _initial(F, h0)
    n = np.arange(T)
    distance, keep = np.maximum(n[:, None] - n[None, :], 0), causal_mask(T)[:, :, None]
    M = masked(kernel(powers, F, B, C)[distance], keep, 0)
    y = np.sum(M * u, axis=1) + np.sum(powers[1:] * h0 * C, axis=2) + skip * u
    return y, powers[T] * h0 + np.sum(powers[T - 1 - n] * (F * B) * u[:, :, None], axis=0)


def _exact_convolution(u: Array, a: Array, F: Array, B: Array, C: Array, skip: Array, h0: Array) -> tuple[Array, Array]:
    return _convolution(u, decay(a, np.arange(len(u) + 1)[:, None, None]), F, B, C, skip, h0)


def _initial(a: Array, h0: Array) -> Array:
    return 0 * a if h0 is None else h0


OPERATOR = Operator(
    name="mamba.lti",
    summary="h_t = exp(delta A) h_{t-1} + delta phi1(delta A) B u_t;  y_t = C h_t + skip u_t: a convolution",
    source="survey, Mamba; Gu and Dao 2023 (2)-(4)",
    inputs=(
        Input("u", ("T", "D"), "token", "value"),
        Input("delta", ("D",), "parameter", "step"),
        Input("A", ("D", "N"), "parameter", "rate"),
        Input("B", ("N",), "parameter", "weight"),
        Input("C", ("N",), "parameter", "weight"),
        Input("skip", ("D",), "parameter", "gain"),
        Input("h0", ("D", "N"), "state", "state", carries="h"),
    ),
    outputs=(Output("y", ("T", "D")), Output("h", ("D", "N"), "state")),
    forms=(Form("recurrent", recurrent), Form("convolution", convolution)),
    vjp=vjp,
    causal=True,
    laws=("linearity", "homogeneity", "euler"),
    linear_in="u",
    exact=(Form("recurrent", _recurrent), Form("convolution", _exact_convolution)),
    exact_inputs=(
        Input("u", ("T", "D"), "token", "field"),
        Input("a", ("D", "N"), "parameter", "field"),
        Input("F", ("D", "N"), "parameter", "field"),
        Input("B", ("N",), "parameter", "field"),
        Input("C", ("N",), "parameter", "field"),
        Input("skip", ("D",), "parameter", "field"),
        Input("h0", ("D", "N"), "state", "field"),
    ),
    degrees={"u": 1},
)
