"""TALA, time-aware linear attention: retention whose decay per head is omega_h G.

Source: MixFormer paper (11), (13) to (16). What it prints does not agree with itself; this is the reading in which the
parallel, the recurrent and the chunkwise form are one function (`tala_printed` has the others):

    (14)  O = ((Q K^T) * D) V with D_nm = (omega G)^(n-m): G inside the power, and Q (K^T V) a matrix product
    (16)  the state decays by (omega G)^b inside a chunk of b tokens, on both sides of the product K^T V

    letter  paper   shape     meaning
    q k v   Q K V   (T, K)    tokens' queries and keys, through the feature map of (11); v (T, V)
    h       h       ()        index of the head, from 1: omega = 1 - e^-h                                   (13)
    G       G       ()        gain of the decay: one is the paper's, zero forgets, negative alternates
    S0 S    S       (K, V)    state before the first and after the last token
"""

from __future__ import annotations

import numpy as np

from . import retention
from .primitives import Array
from .spec import Form, Input, Operator, Output


def omega(h: Array) -> Array:
    """1 - e^-h. In formats narrower than float64 it rounds to one for quite small h: keep `log_omega`.  (13)"""
    return 1 - np.exp(-h)


def log_omega(h: Array) -> Array:
    """log(1 - e^-h), accurate where omega itself is not.  (13)"""
    return np.log1p(-np.exp(-h))


def recurrent(
    q: Array, k: Array, v: Array, h: Array, G: Array, scale: float = 1.0, S0: Array = None
) -> tuple[Array, Array]:
    """S_n = omega G S_{n-1} + k_n^T v_n;  o_n = scale q_n S_n.  (15)"""
    return retention.recurrent(q, k, v, omega(h) * G, scale, S0)


def parallel(
    q: Array, k: Array, v: Array, h: Array, G: Array, scale: float = 1.0, S0: Array = None
) -> tuple[Array, Array]:
    """O = scale ((Q K^T) * D) V with D_nm = (omega G)^(n-m) for n >= m, else 0.  (14)"""
    return retention.parallel(q, k, v, omega(h) * G, scale, S0)


def chunkwise(
    q: Array, k: Array, v: Array, h: Array, G: Array, scale: float = 1.0, S0: Array = None, chunk: int = 64
) -> tuple[Array, Array]:
    """The parallel form inside chunks, the state across them: (16) with the decays that it lacks."""
    return retention.chunkwise(q, k, v, omega(h) * G, scale, S0, chunk)


def vjp(
    cotangents: dict[str, Array],
    q: Array,
    k: Array,
    v: Array,
    h: Array,
    G: Array,
    scale: float = 1.0,
    S0: Array = None,
    chunk: int = 64,
) -> dict[str, Array]:
    """Gradients of <O, dO> + <S, dS>: those of retention, and d omega / dh = e^-h."""
    grads = retention.vjp(cotangents, q, k, v, omega(h) * G, scale, S0, chunk)
    da = grads.pop("gamma")
    return grads | {"h": da * G * np.exp(-h), "G": da * omega(h)}


FORMS = (Form("chunkwise", chunkwise, chunked=True), Form("parallel", parallel), Form("recurrent", recurrent))

OPERATOR = Operator(
    name="tala",
    summary="time-aware linear attention: S_n = (1 - e^-h) G S_{n-1} + k_n^T v_n;  o_n = scale q_n S_n",
    source="MixFormer (13)-(16), corrected",
    inputs=(
        Input("q", ("T", "K"), "token", "query"),
        Input("k", ("T", "K"), "token", "key"),
        Input("v", ("T", "V"), "token", "value"),
        Input("h", (), "parameter", "head"),
        Input("G", (), "parameter", "gain"),
        Input("scale", (), "scalar", "scale", default=1.0, differentiable=False),
        Input("S0", ("K", "V"), "state", "state", carries="S"),
    ),
    outputs=(Output("O", ("T", "V")), Output("S", ("K", "V"), "state")),
    forms=FORMS,
    vjp=vjp,
    causal=True,
    laws=("linearity", "homogeneity", "left_padding", "cocycle", "euler", "relabelling"),
    linear_in="v",
    degrees={"q": 1, "k": 1, "v": 1},
)
