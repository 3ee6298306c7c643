"""TALA with the normaliser that (12) prints, in the three readings that its products allow.

Source: MixFormer paper (12), with one decay a = omega G for all sources: with a G_i for each there is no recurrence.
Where (14) to (16) print no normaliser, only n2 differs from them by a factor per row, which a group norm without eps
takes out again.

    n1      o_t = q_t * x_t / z_t              x_t = a x_{t-1} + k_t * v_t, products element by element
    n2      o_t = q_t S_t / (q_t . z_t + eps)  linear attention: a convex combination of past values
    n3      o_t = (q_t / z_t) S_t              every key channel averages the values by itself
                                               S_t = a S_{t-1} + k_t^T v_t;  z_t = a z_{t-1} + k_t

    letter  paper    shape    meaning
    q k v   phi(Q)   (T, K)   features of queries and of keys, positive; v (T, V); all (T, D) for n1
    a       omega G  ()       decay
    S z              (K, V)   state and mass, z (K,); S0 and z0 before the first token; n1 has x (D,) and z (D,)

All are retentions: a mass is a value that is one for every token, and n1 is one query and key for all, both one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from . import retention
from .linear_attention import joined, memory, quotient, quotient_vjp, with_mass
from .primitives import Array
from .spec import Form, Input, Operator, Output, check_cotangents, check_shapes

Retention = Callable[..., tuple[Array, Array]]

# --- n1: element by element ------------------------------------------------------------------------------------------


def n1(
    q: Array, k: Array, v: Array, a: Array, x0: Array = None, z0: Array = None, chunk: int = 64
) -> tuple[Array, Array, Array]:
    """o_t = q_t * [sum_i a^(t-i) k_i * v_i] / [sum_i a^(t-i) k_i], chunk by chunk.  -> O (T, D), x, z (D,).  (12)"""
    return _n1(partial(retention.chunkwise, chunk=chunk), q, k, v, a, x0, z0)


def n1_parallel(
    q: Array, k: Array, v: Array, a: Array, x0: Array = None, z0: Array = None
) -> tuple[Array, Array, Array]:
    """The same, the sums over sources written as products with the decay mask."""
    return _n1(retention.parallel, q, k, v, a, x0, z0)


def n1_recurrent(
    q: Array, k: Array, v: Array, a: Array, x0: Array = None, z0: Array = None
) -> tuple[Array, Array, Array]:
    """The same token by token: RWKV-4's recurrence, whose bonus for the current token is -log a here."""
    return _n1(retention.recurrent, q, k, v, a, x0, z0)


def n1_vjp(
    cotangents: dict[str, Array],
    q: Array,
    k: Array,
    v: Array,
    a: Array,
    x0: Array = None,
    z0: Array = None,
    chunk: int = 64,
) -> dict[str, Array]:
    """Gradients of <O, dO> + <x, dx> + <z, dz>. With m = x / z: dx = dO q / z and dz = -m dx, row by row."""
    check_cotangents(N1, cotangents, {"q": q, "k": k, "v": v, "x0": x0, "z0": z0})
    D, G, R = k.shape[1], cotangents["O"], np.concatenate([cotangents["x"], cotangents["z"]])[None, :]
    I = (*_ones(k), np.concatenate([k * v, k], axis=1), a, 1.0, _pair(k, x0, z0), chunk)
    XZ = retention.chunkwise(*I)[0]
    Z = XZ[:, D:]
    m = XZ[:, :D] / Z
    dx = G * q / Z
    grads = retention.vjp({"O": np.concatenate([dx, -dx * m], axis=1), "S": R}, *I)
    dkv, dk, R = grads["v"][:, :D], grads["v"][:, D:], grads["S0"][0]
    return {"q": G * m, "k": dkv * v + dk, "v": dkv * k, "a": grads["gamma"], "x0": R[:D], "z0": R[D:]}


def _n1(form: Retention, q: Array, k: Array, v: Array, a: Array, x0: Array, z0: Array) -> tuple[Array, Array, Array]:
    check_shapes(N1, {"q": q, "k": k, "v": v, "x0": x0, "z0": z0})
    D = k.shape[1]
    XZ, last = form(*_ones(k), np.concatenate([k * v, k], axis=1), a, S0=_pair(k, x0, z0))
    return q * XZ[:, :D] / XZ[:, D:], last[0, :D], last[0, D:]


def _ones(k: Array) -> tuple[np.ndarray, np.ndarray]:
    """A query and a key of one channel that are one for every token: what decays are all the weights."""
    one = np.ones((len(k), 1), dtype=bool)
    return one, one


def _pair(k: Array, x0: Array, z0: Array) -> Array:
    """x0 and z0 side by side, absent ones zero.  -> (1, 2 D)."""
    zero = np.sum(k[:0], axis=0)
    return np.concatenate([zero if x0 is None else x0, zero if z0 is None else z0])[None, :]


# --- n2: one normaliser a row ----------------------------------------------------------------------------------------


def n2(
    q: Array, k: Array, v: Array, a: Array, eps: Array = 0.0, S0: Array = None, z0: Array = None, chunk: int = 64
) -> tuple[Array, Array, Array]:
    """o_t = q_t S_t / (q_t . z_t + eps), chunk by chunk.  -> O (T, V), S (K, V), z (K,).  (12)"""
    return quotient(*retention.chunkwise(*_with_mass(q, k, v, a, S0, z0), chunk), eps)


def n2_parallel(
    q: Array, k: Array, v: Array, a: Array, eps: Array = 0.0, S0: Array = None, z0: Array = None
) -> tuple[Array, Array, Array]:
    """The same as weights a^(t-i) (q_t . k_i) divided by their sum."""
    return quotient(*retention.parallel(*_with_mass(q, k, v, a, S0, z0)), eps)


def n2_recurrent(
    q: Array, k: Array, v: Array, a: Array, eps: Array = 0.0, S0: Array = None, z0: Array = None
) -> tuple[Array, Array, Array]:
    """The same token by token."""
    return quotient(*retention.recurrent(*_with_mass(q, k, v, a, S0, z0)), eps)


def n2_vjp(
    cotangents: dict[str, Array],
    q: Array,
    k: Array,
    v: Array,
    a: Array,
    eps: Array = 0.0,
    S0: Array = None,
    z0: Array = None,
    chunk: int = 64,
) -> dict[str, Array]:
    """Gradients of <O, dO> + <S, dS> + <z, dz>: those of the quotient, then those of a retention."""
    check_cotangents(N2, cotangents, {"q": q, "v": v})
    I = (*_with_mass(q, k, v, a, S0, z0), chunk)
    dU = quotient_vjp(cotangents["O"], retention.chunkwise(*I)[0], eps)
    d = retention.vjp({"O": dU, "S": joined(cotangents["S"], cotangents["z"])}, *I)
    states = {"S0": d["S0"][:, :-1], "z0": d["S0"][:, -1]}
    return {"q": d["q"], "k": d["k"], "v": d["v"][:, :-1], "a": d["gamma"]} | states


def _with_mass(
    q: Array, k: Array, v: Array, a: Array, S0: Array, z0: Array
) -> tuple[Array, Array, Array, Array, float, Array]:
    """What retention takes, the mass a further value: q, k, v, a, scale, S0."""
    check_shapes(N2, {"q": q, "k": k, "v": v, "S0": S0, "z0": z0})
    return q, k, with_mass(v), a, 1.0, memory(k, v, S0, z0)


# --- n3: one normaliser a key channel --------------------------------------------------------------------------------


def n3(
    q: Array, k: Array, v: Array, a: Array, S0: Array = None, z0: Array = None, chunk: int = 64
) -> tuple[Array, Array, Array]:
    """o_t = (q_t / z_t) S_t, chunk by chunk.  -> O (T, V), S (K, V), z (K,).  (12)"""
    return _n3(partial(retention.chunkwise, chunk=chunk), q, k, v, a, S0, z0)


def n3_parallel(
    q: Array, k: Array, v: Array, a: Array, S0: Array = None, z0: Array = None
) -> tuple[Array, Array, Array]:
    """The same, every sum over sources a product with the decay mask."""
    return _n3(retention.parallel, q, k, v, a, S0, z0)


def n3_recurrent(
    q: Array, k: Array, v: Array, a: Array, S0: Array = None, z0: Array = None
) -> tuple[Array, Array, Array]:
    """The same token by token."""
    return _n3(retention.recurrent, q, k, v, a, S0, z0)


def n3_vjp(
    cotangents: dict[str, Array],
    q: Array,
    k: Array,
    v: Array,
    a: Array,
    S0: Array = None,
    z0: Array = None,
    chunk: int = 64,
) -> dict[str, Array]:
    """Gradients of <O, dO> + <S, dS> + <z, dz>: back through the retention of p = q / z, then through that of z."""
    check_cotangents(N3, cotangents, {"q": q, "k": k, "v": v, "S0": S0, "z0": z0})
    ones = (*_ones(k), k, a, 1.0, None if z0 is None else z0[None, :], chunk)
    Z = retention.chunkwise(*ones)[0]
    p = q / Z
    d = retention.vjp({"O": cotangents["O"], "S": cotangents["S"]}, p, k, v, a, 1.0, S0, chunk)
    dq = d["q"] / Z
    m = retention.vjp({"O": -dq * p, "S": cotangents["z"][None, :]}, *ones)
    sums = {"k": d["k"] + m["v"], "a": d["gamma"] + m["gamma"]}
    return {"q": dq, "v": d["v"], "S0": d["S0"], "z0": m["S0"][0]} | sums


def _n3(form: Retention, q: Array, k: Array, v: Array, a: Array, S0: Array, z0: Array) -> tuple[Array, Array, Array]:
    check_shapes(N3, {"q": q, "k": k, "v": v, "S0": S0, "z0": z0})
    Z, z = form(*_ones(k), k, a, S0=None if z0 is None else z0[None, :])
    O, S = form(q / Z, k, v, a, S0=S0)
    return O, S, z[0]


# --- operators -------------------------------------------------------------------------------------------------------


DECAY = Input("a", (), "parameter", "decay")
COMMON_LAWS = ("linearity", "left_padding", "homogeneity", "euler")
MATRIX = (
    Input("q", ("T", "K"), "token", "positive"),
    Input("k", ("T", "K"), "token", "positive"),
    Input("v", ("T", "V"), "token", "value"),
    DECAY,
)
MATRIX_STATE = (
    Input("S0", ("K", "V"), "state", "state", carries="S"),
    Input("z0", ("K",), "state", "mass", carries="z"),
)
MATRIX_OUTPUTS = (Output("O", ("T", "V")), Output("S", ("K", "V"), "state"), Output("z", ("K",), "state"))


def _operator(name: str, summary: str, inputs: tuple[Input, ...], outputs: tuple[Output, ...], **rest: Any) -> Operator:
    """What the three have in common. The algebra is rational, so any field may run it on the features."""
    fields = tuple(replace(x, domain="field") for x in inputs)
    return Operator(
        name=name,
        summary=summary,
        source="MixFormer (12), one decay for all sources",
        inputs=inputs,
        outputs=outputs,
        causal=True,
        linear_in="v",
        exact=rest["forms"],
        exact_inputs=fields,
        **rest,
    )


N1 = _operator(
    "tala.n1",
    "x_t = a x_{t-1} + k_t * v_t; z_t = a z_{t-1} + k_t; o_t = q_t * x_t / z_t, channel by channel",
    inputs=(
        Input("q", ("T", "D"), "token", "positive"),
        Input("k", ("T", "D"), "token", "positive"),
        Input("v", ("T", "D"), "token", "value"),
        DECAY,
        Input("x0", ("D",), "state", "state", carries="x"),
        Input("z0", ("D",), "state", "mass", carries="z"),
    ),
    outputs=(Output("O", ("T", "D")), Output("x", ("D",), "state"), Output("z", ("D",), "state")),
    forms=(Form("chunkwise", n1, chunked=True), Form("parallel", n1_parallel), Form("recurrent", n1_recurrent)),
    vjp=n1_vjp,
    laws=COMMON_LAWS,
    degrees={"q": 1, "k": 0, "v": 1},
)

N2 = _operator(
    "tala.n2",
    "S_t = a S_{t-1} + k_t^T v_t; z_t = a z_{t-1} + k_t; o_t = q_t S_t / (q_t . z_t + eps)",
    inputs=(*MATRIX, Input("eps", (), "scalar", "epsilon", default=0.0, differentiable=False), *MATRIX_STATE),
    outputs=MATRIX_OUTPUTS,
    forms=(Form("chunkwise", n2, chunked=True), Form("parallel", n2_parallel), Form("recurrent", n2_recurrent)),
    vjp=n2_vjp,
    laws=(*COMMON_LAWS, "constant_value", "hull", "row_sums", "relabelling"),
    degrees={"v": 1},  # and 0 in q and k where eps is zero
)

N3 = _operator(
    "tala.n3",
    "S_t = a S_{t-1} + k_t^T v_t; z_t = a z_{t-1} + k_t; o_t = (q_t / z_t) S_t",
    inputs=(*MATRIX, *MATRIX_STATE),
    outputs=MATRIX_OUTPUTS,
    forms=(Form("chunkwise", n3, chunked=True), Form("parallel", n3_parallel), Form("recurrent", n3_recurrent)),
    vjp=n3_vjp,
    laws=(*COMMON_LAWS, "constant_value", "relabelling"),
    degrees={"q": 1, "k": 0, "v": 1},
)
