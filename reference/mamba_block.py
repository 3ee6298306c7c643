"""The Mamba block: projections, a short causal convolution, the selective state space of `mamba.euler`, and a gate.

Source: survey, section "Mamba"; Gu and Dao 2023, section 3.4, algorithm 2, as in the released code: steps, B and C are
linear in what comes out of the convolution, not in the block's input, and B bar is delta B. One block, whole.

    letter       paper      shape            meaning
    x Y                     (T, E)           tokens before and after the block
    U Z          x z        (T, D)           what the state space is fed, and its gate
    u0 u                    (W - 1, D)       the last rows of U before the first and after the last token
    w_conv                  (D, W)           taps of each channel, that of the token itself last
    V S                     (T, D)           the convolution, with b_conv; S = silu(V)
    r            s_Delta    (T, Q)           steps before they are spread over the channels
    delta        Delta      (T, D)           softplus(r W_dt + b_dt)
    B C          B C        (T, N)           S W_B and S W_C
    A_log                   (D, N)           A = -exp(A_log)
    h0 h         h          (D, N)           state before the first and after the last token
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from .mamba import CHUNK, EULER, in_steps
from .primitives import Array, sigmoid, silu, softplus, stored
from .spec import Form, Input, Operator, Output, check_cotangents, check_shapes

Mix = Callable[..., tuple[Array, Array]]


def chunkwise(
    x: Array, W_in: Array, W_z: Array, w_conv: Array, b_conv: Array, W_down: Array, W_dt: Array, b_dt: Array,
    W_B: Array, W_C: Array, A_log: Array, skip: Array, W_out: Array, u0: Array = None, h0: Array = None,
    chunk: int = CHUNK,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Y = (y * silu(Z)) W_out, y the selective state space of S, chunk by chunk.  -> (T, E), (W - 1, D), (D, N)."""
    weights = (W_in, W_z, w_conv, b_conv, W_down, W_dt, b_dt, W_B, W_C, A_log, skip, W_out)
    _check(x, weights, u0, h0)
    return _block(partial(EULER.form("chunkwise").function, chunk=chunk), x, weights, u0, h0)


def recurrent(
    x: Array, W_in: Array, W_z: Array, w_conv: Array, b_conv: Array, W_down: Array, W_dt: Array, b_dt: Array,
    W_B: Array, W_C: Array, A_log: Array, skip: Array, W_out: Array, u0: Array = None, h0: Array = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """The same by decoding: one token at a time, from the states that the one before left."""
    weights = (W_in, W_z, w_conv, b_conv, W_down, W_dt, b_dt, W_B, W_C, A_log, skip, W_out)
    _check(x, weights, u0, h0)
    Y, u, h = _block(_step, x[:0], weights, u0, h0)
    rows = [Y]
    for t in range(len(x)):
        Y, u, h = _block(_step, x[t : t + 1], weights, u, h)
        rows.append(Y)
    return np.concatenate(rows), u, h


def vjp(
    cotangents: dict[str, Array],
    x: Array, W_in: Array, W_z: Array, w_conv: Array, b_conv: Array, W_down: Array, W_dt: Array, b_dt: Array,
    W_B: Array, W_C: Array, A_log: Array, skip: Array, W_out: Array, u0: Array = None, h0: Array = None,
    chunk: int = CHUNK,
) -> dict[str, Array]:  # fmt: skip
    """Gradients of <Y, dY> + <u, du> + <h, dh> for tokens, parameters and states, layer by layer backwards."""
    weights = (W_in, W_z, w_conv, b_conv, W_down, W_dt, b_dt, W_B, W_C, A_log, skip, W_out)
    _check(x, weights, u0, h0)
    check_cotangents(OPERATOR, cotangents, {"x": x, "w_conv": w_conv, "A_log": A_log})
    s = _states(x, weights, u0)
    y, _ = EULER.form("chunkwise").function(*s.system, skip, h0, chunk=chunk)
    y, dY = stored(y), cotangents["Y"]
    dN = dY @ W_out.T
    dZ = stored(dN * y * _silu_slope(s.Z))
    S, delta, A, B, C = s.system
    inner = EULER.vjp({"y": stored(dN * silu(s.Z)), "h": cotangents["h"]}, S, delta, A, B, C, skip, h0, chunk=chunk)
    dB, dC, ds = stored(inner["B"]), stored(inner["C"]), stored(inner["delta"] * sigmoid(s.s))
    dr = stored(ds @ W_dt.T)
    dV = stored(stored(inner["u"] + dr @ W_down.T + dB @ W_B.T + dC @ W_C.T) * _silu_slope(s.V))
    dw, dtaps = _convolve_vjp(dV, s.taps, w_conv)
    dtaps = dtaps + np.concatenate([0 * s.taps[: len(x)], cotangents["u"]])  # the rows that are handed on
    before = w_conv.shape[1] - 1
    dU = stored(dtaps[before:])
    return {
        "x": dU @ W_in.T + dZ @ W_z.T,
        "W_in": x.T @ dU,
        "W_z": x.T @ dZ,
        "w_conv": dw,
        "b_conv": np.sum(dV, axis=0),
        "W_down": S.T @ dr,
        "W_dt": s.r.T @ ds,
        "b_dt": np.sum(ds, axis=0),
        "W_B": S.T @ dB,
        "W_C": S.T @ dC,
        "A_log": inner["A"] * A,
        "skip": inner["skip"],
        "W_out": stored(y * silu(s.Z)).T @ dY,
        "u0": dtaps[:before],
        "h0": inner["h0"],
    }


# --- the layers ------------------------------------------------------------------------------------------------------


def _check(x: Array, weights: tuple[Array, ...], u0: Array, h0: Array) -> None:
    names = [i.name for i in OPERATOR.inputs]
    check_shapes(OPERATOR, dict(zip(names, (x, *weights, u0, h0), strict=True)))


class _States(NamedTuple):
    """What a forward pass holds before the state space; `taps` is U after the rows u0, `s` the steps before softplus,
    `system` the first five arguments of `mamba.euler`."""

    Z: Array
    taps: Array
    V: Array
    r: Array
    s: Array
    system: tuple[Array, ...]


def _states(x: Array, weights: tuple[Array, ...], u0: Array) -> _States:
    W_in, W_z, w_conv, b_conv, W_down, W_dt, b_dt, W_B, W_C, A_log, _, _ = weights
    taps = np.concatenate([0 * w_conv.T[1:] if u0 is None else u0, stored(x @ W_in)])
    V = _convolve(taps, w_conv, b_conv)
    S = stored(silu(V))
    r = stored(S @ W_down)
    s = stored(r @ W_dt) + b_dt
    system = (S, softplus(s), -np.exp(A_log), stored(S @ W_B), stored(S @ W_C))
    return _States(stored(x @ W_z), taps, V, r, s, system)


def _step(S: Array, delta: Array, A: Array, B: Array, C: Array, skip: Array, h0: Array) -> tuple[Array, Array]:
    """`mamba.euler`, token by token."""
    return in_steps(S, np.exp(delta[:, :, None] * A), delta[:, :, None], B, C, skip, h0)


def _block(form: Mix, x: Array, weights: tuple[Array, ...], u0: Array, h0: Array) -> tuple[Array, Array, Array]:
    s, (*_, skip, W_out) = _states(x, weights, u0), weights
    y, h = form(*s.system, skip, h0)
    return stored(stored(y) * silu(s.Z)) @ W_out, s.taps[len(x) :], h


def _convolve(taps: Array, w: Array, b: Array) -> Array:
    """V_t = b + sum_j w_j taps_{t+j}.  (W - 1 + T, D), (D, W), (D,) -> (T, D)."""
    W = w.shape[1]
    T = len(taps) - W + 1
    return sum((w[:, j] * taps[j : j + T] for j in range(1, W)), start=w[:, 0] * taps[:T]) + b


def _convolve_vjp(dV: Array, taps: Array, w: Array) -> tuple[Array, Array]:
    """dw_j = sum_t dV_t taps_{t+j};  each dV_t goes back to the rows t .. t + W - 1."""
    T, W = len(dV), w.shape[1]
    dw = np.stack([np.sum(dV * taps[j : j + T], axis=0) for j in range(W)], axis=1)
    back = [np.concatenate([0 * taps[:j], dV * w[:, j], 0 * taps[j + T :]]) for j in range(W)]
    return dw, sum(back[1:], start=back[0])


def _silu_slope(w: Array) -> Array:
    return sigmoid(w) + silu(w) * sigmoid(-w)


OPERATOR = Operator(
    name="mamba.block",
    summary="Y = (SSM(S) * silu(x W_z)) W_out, S = silu(conv(x W_in)); steps, B and C are linear in S",
    source="survey, Mamba; Gu and Dao 2023, section 3.4; the released code",
    inputs=(
        Input("x", ("T", "E"), "token", "feature"),
        Input("W_in", ("E", "D"), "parameter", "weight"),
        Input("W_z", ("E", "D"), "parameter", "weight"),
        Input("w_conv", ("D", "W"), "parameter", "weight"),
        Input("b_conv", ("D",), "parameter", "norm_bias"),
        Input("W_down", ("D", "Q"), "parameter", "weight"),
        Input("W_dt", ("Q", "D"), "parameter", "weight"),
        Input("b_dt", ("D",), "parameter", "logit_bias"),
        Input("W_B", ("D", "N"), "parameter", "weight"),
        Input("W_C", ("D", "N"), "parameter", "weight"),
        Input("A_log", ("D", "N"), "parameter", "log_rate"),
        Input("skip", ("D",), "parameter", "gain"),
        Input("W_out", ("D", "E"), "parameter", "weight"),
        Input("u0", ("W-1", "D"), "state", "state", carries="u"),
        Input("h0", ("D", "N"), "state", "state", carries="h"),
    ),
    outputs=(Output("Y", ("T", "E")), Output("u", ("W-1", "D"), "state"), Output("h", ("D", "N"), "state")),
    forms=(Form("chunkwise", chunkwise, chunked=True), Form("recurrent", recurrent)),
    vjp=vjp,
    causal=True,
    laws=(),
)
