"""TALA whose decay is no single number: S_n = A_n * S_{n-1} + k_n^T v_n, with * elementwise.

Source: MixFormer paper (14) to (16), in which omega G decays the state elementwise and G has one shape in each of
them. The parallel, recurrent and chunkwise form are one function for every G that factors over tokens:

    operator              a       A_n                               D of (14)
    tala.time_varying     (T,)    a_n                               P_nm = a_{m+1} ... a_n
    tala.key_channel      (T, K)  a_n for every value channel       one for each key channel
    tala.value_channel    (T, V)  a_n for every key channel         one for each value channel
    tala.elementwise      (K, V)  a, the same for all tokens        one for each pair of channels, a_ij^(n-m)

Decays may be zero or negative, so nothing here is divided by one, and no logarithm taken.

    letter  paper    shape                     meaning
    q k v   Q K V    (T, K)                    tokens' queries and keys, through the feature map of (11); v (T, V)
    S0 S    S, R     (K, V)                    state before the first and after the last token
    A       omega G  (T, 1 or K, 1 or V)       decays of the state at each token
    P       D        (b+1, b+1, 1|K, 1|V)      P[n, m] = A_{m+1} * ... * A_n of a chunk of b tokens, counted from 1
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from .primitives import Array, decay, masked, segment_products, starts, weighted_dot
from .spec import Form, Input, Operator, Output, check_cotangents, check_shapes

Products = Callable[[int, int], Array]  # P of the tokens start <= t < stop
Mix = Callable[[Array, Array, Array, Array], Array]  # q, k, v, P[1:, 1:] -> what tokens read of their own chunk


def in_steps(q: Array, k: Array, v: Array, A: Array, scale: float, S0: Array) -> tuple[Array, Array]:
    """S_n = A_n * S_{n-1} + k_n^T v_n;  o_n = scale q_n S_n.  (15)"""
    S = _initial(k, v, S0)
    rows = []
    for n in range(len(q)):
        S = A[n] * S + k[n][:, None] * v[n][None, :]
        rows.append(q[n] @ S * scale)
    return (np.stack(rows) if rows else q @ S), S


def in_one_chunk(q: Array, k: Array, v: Array, P: Array, mix: Mix, scale: float, S0: Array) -> tuple[Array, Array]:
    """(16), corrected: what is read from the state has decayed since the chunk began, what is written to it, and the
    state itself, decay until the chunk ends."""
    S0 = _initial(k, v, S0)
    O = mix(q, k, v, P[1:, 1:]) + (q[:, None, :] @ (P[1:, 0] * S0))[:, 0]
    return O * scale, P[-1, 0] * S0 + sums(P[-1:, 1:], k, v)[0]


def in_chunks(
    q: Array, k: Array, v: Array, products: Products, mix: Mix, scale: float, S0: Array, chunk: int
) -> tuple[Array, Array]:
    """Chunk by chunk with the state across them; the last chunk may be short."""
    S, T = _initial(k, v, S0), len(q)
    rows = [q[:0] @ S]
    for a in starts(T, chunk):
        b = min(a + chunk, T)
        O, S = in_one_chunk(q[a:b], k[a:b], v[a:b], products(a, b), mix, scale, S)
        rows.append(O)
    return np.concatenate(rows), S


def state_gradients(
    cotangents: dict[str, Array], q: Array, k: Array, v: Array, products: Products, scale: float, S0: Array, chunk: int
) -> tuple[dict[str, Array], Array]:
    """Gradients of <O, dO> + <S, dS>, with that of each A_n spread out to (T, K, V); and the final state.

    Chunk by chunk backwards with R_n, the cotangent of S_n:  dA_n = R_n * S_{n-1}, which needs no A_n to divide by."""
    S, T = _initial(k, v, S0), len(q)
    chunks = []
    for a in starts(T, chunk):
        b = min(a + chunk, T)
        P = products(a, b)
        chunks.append((slice(a, b), P, S))
        S = P[-1, 0] * S + sums(P[-1:, 1:], k[a:b], v[a:b])[0]
    final, dS = S, cotangents["S"]
    rows = {"q": [0 * q[:0]], "k": [0 * k[:0]], "v": [0 * v[:0]], "A": [q[:0, :, None] * v[:0, None, :]]}
    for c, P, S in reversed(chunks):
        Q, K, V, G = q[c], k[c], v[c], cotangents["O"][c]
        S = P[:, 0] * S + sums(P[:, 1:], K, V)  # S_0 ... S_b
        R = P[-1] * dS + sums(np.transpose(P[1:], (1, 0, 2, 3)), Q, G) * scale
        rows["q"].append((S[1:] @ G[:, :, None])[:, :, 0] * scale)
        rows["k"].append((R[1:] @ V[:, :, None])[:, :, 0])
        rows["v"].append((K[:, None, :] @ R[1:])[:, 0])
        rows["A"].append(R[1:] * S[:-1])
        dS = R[0]
    return {name: np.concatenate(r[::-1]) for name, r in rows.items()} | {"S0": dS}, final


def sums(P: Array, k: Array, v: Array) -> Array:
    """sum_m P[n, m] * k_m^T v_m.  (N, M, 1|K, 1|V), (M, K), (M, V) -> (N, K, V)"""
    if P.shape[3] == 1:
        return np.transpose(P[:, :, :, 0] * k, (0, 2, 1)) @ v
    return (k.T[:, None, :] @ (np.transpose(P, (0, 2, 1, 3)) * v))[:, :, 0]


def mix_scalar(q: Array, k: Array, v: Array, D: Array) -> Array:
    """((Q K^T) * D) V.  (14)"""
    return ((q @ k.T) * D[:, :, 0, 0]) @ v


def mix_key_channels(q: Array, k: Array, v: Array, D: Array) -> Array:
    """(sum_i q_ni D_nm,i k_mi) V."""
    return weighted_dot(q, D[:, :, :, 0], k) @ v


def mix_value_channels(q: Array, k: Array, v: Array, D: Array) -> Array:
    """sum_m (Q K^T)_nm D_nm,j v_mj."""
    return weighted_dot(q @ k.T, np.transpose(D[:, :, 0], (0, 2, 1)), v.T)


def mix_channels(q: Array, k: Array, v: Array, D: Array) -> Array:
    """sum_i q_ni sum_m D_nm,ij k_mi v_mj."""
    return (q[:, None, :] @ sums(D, k, v))[:, 0]


def _initial(k: Array, v: Array, S0: Array) -> Array:
    return k[:0].T @ v[:0] if S0 is None else S0


def _powers(a: Array, n: int) -> Array:
    """P of n tokens that all decay by a (K, V)."""
    t = np.arange(n + 1)
    distance = (t[:, None] - t[None, :])[:, :, None, None]
    return masked(decay(a, np.maximum(distance, 0)), distance >= 0, 0)


def _operator(
    name: str,
    summary: str,
    decays: Input,
    mix: Mix,
    steps: Callable[[Array, int], Array],
    products: Callable[[Array, int, int], Array],
    spread: tuple[int, ...],
    laws: tuple[str, ...],
    block: int = 64,
) -> Operator:
    """`steps(a, T)` is A, `products(a, start, stop)` is P, `spread` are the axes of (T, K, V) that a does not have."""

    def check(q: Array, k: Array, v: Array, a: Array, S0: Array) -> None:
        check_shapes(operator, {"q": q, "k": k, "v": v, "a": a, "S0": S0})

    def chunkwise(
        q: Array, k: Array, v: Array, a: Array, scale: float = 1.0, S0: Array = None, chunk: int = block
    ) -> tuple[Array, Array]:
        check(q, k, v, a, S0)
        return in_chunks(q, k, v, partial(products, a), mix, scale, S0, chunk)

    def parallel(q: Array, k: Array, v: Array, a: Array, scale: float = 1.0, S0: Array = None) -> tuple[Array, Array]:
        check(q, k, v, a, S0)
        return in_one_chunk(q, k, v, products(a, 0, len(q)), mix, scale, S0)

    def recurrent(q: Array, k: Array, v: Array, a: Array, scale: float = 1.0, S0: Array = None) -> tuple[Array, Array]:
        check(q, k, v, a, S0)
        return in_steps(q, k, v, steps(a, len(q)), scale, S0)

    def vjp(
        cotangents: dict[str, Array],
        q: Array,
        k: Array,
        v: Array,
        a: Array,
        scale: float = 1.0,
        S0: Array = None,
        chunk: int = block,
    ) -> dict[str, Array]:
        check(q, k, v, a, S0)
        check_cotangents(operator, cotangents, {"q": q, "v": v})
        grads, _ = state_gradients(cotangents, q, k, v, partial(products, a), scale, S0, chunk)
        return grads | {"a": np.sum(grads.pop("A"), axis=spread)}

    forms = (Form("chunkwise", chunkwise, chunked=True), Form("parallel", parallel), Form("recurrent", recurrent))
    inputs = (
        Input("q", ("T", "K"), "token", "query"),
        Input("k", ("T", "K"), "token", "key"),
        Input("v", ("T", "V"), "token", "value"),
        decays,
        Input("scale", (), "scalar", "scale", default=1.0, differentiable=False),
        Input("S0", ("K", "V"), "state", "state", carries="S"),
    )
    operator = Operator(
        name=name,
        summary=summary,
        source="MixFormer (14)-(16), corrected",
        inputs=inputs,
        outputs=(Output("O", ("T", "V")), Output("S", ("K", "V"), "state")),
        forms=forms,
        vjp=vjp,
        causal=True,
        laws=("linearity", "homogeneity", "euler", "left_padding", "relabelling", *laws),
        linear_in="v",
        exact=forms,
        exact_inputs=tuple(Input(x.name, x.axes, x.role, "field") for x in inputs),
        degrees={"q": 1, "k": 1, "v": 1},
    )
    return operator


TIME_VARYING = _operator(
    "tala.time_varying",
    "decays by a number per token: S_n = a_n S_{n-1} + k_n^T v_n;  o_n = scale q_n S_n",
    Input("a", ("T",), "token", "signed_decay"),
    mix_scalar,
    steps=lambda a, T: a[:, None, None],
    products=lambda a, start, stop: segment_products(a[start:stop])[:, :, None, None],
    spread=(1, 2),
    laws=("reset", "cocycle"),
)
KEY_CHANNEL = _operator(
    "tala.key_channel",
    "decays per token and key channel: S_n = diag(a_n) S_{n-1} + k_n^T v_n;  o_n = scale q_n S_n",
    Input("a", ("T", "K"), "token", "signed_decay"),
    mix_key_channels,
    steps=lambda a, T: a[:, :, None],
    products=lambda a, start, stop: segment_products(a[start:stop])[:, :, :, None],
    spread=(2,),
    laws=("reset", "cocycle"),
)
VALUE_CHANNEL = _operator(
    "tala.value_channel",
    "decays per token and value channel: S_n = S_{n-1} diag(a_n) + k_n^T v_n;  o_n = scale q_n S_n",
    Input("a", ("T", "V"), "token", "signed_decay"),
    mix_value_channels,
    steps=lambda a, T: a[:, None, :],
    products=lambda a, start, stop: segment_products(a[start:stop])[:, :, None, :],
    spread=(1,),
    laws=("reset",),
)
ELEMENTWISE = _operator(
    "tala.elementwise",
    "each entry of the state decays at its own rate: S_n = a * S_{n-1} + k_n^T v_n;  o_n = scale q_n S_n",
    Input("a", ("K", "V"), "parameter", "signed_decay"),
    mix_channels,
    steps=lambda a, T: np.broadcast_to(a, (T, *a.shape)),
    products=lambda a, start, stop: _powers(a, stop - start),
    spread=(0,),
    laws=(),
    block=16,  # P has K V entries for each pair of tokens
)
