"""Compressed convolutional attention, as the survey prints it: each head has a key of its own.

Source: survey, section 15; Figliola et al. 2025. Where it gives the mean of queries and keys to the query alone, the
key gets it too, as in ZAYA. It is ccgqa with one query a group, which `chunkwise` and the gradients make use of.

    letter   shape              meaning
    q k v    (T, G, K or V)     projections of tokens to G heads; K even, and the second half of G V one token late
    w1 b1    (G, K, W) (G, K)   convolution over time, channel by channel; w[.., -1] meets the token itself
    w2 b2    (G, K, K, J)       convolution among the K channels, out and in, of a head; b2 (G, K)
    beta     (G,)               logarithm of a head's temperature
    q0 ..                       states, as those of ccgqa: rows of q and k, the last row of v, the cache K0, V0
"""

from __future__ import annotations

import numpy as np

from . import cached_attention as attention
from . import ccgqa
from .ccgqa_mixing import convolved, from_last, history, shifted
from .latent_attention import positions, rotated
from .primitives import Array, unit
from .spec import Form, Operator, check_cotangents, check_shapes

Result = tuple[Array, ...]
WIDER = ("q", "w1q", "b1q", "w2q", "b2q", "q0")  # what has an axis of queries in ccgqa


def parallel(
    q: Array, k: Array, v: Array, w1q: Array, b1q: Array, w2q: Array, b2q: Array, w1k: Array, b1k: Array, w2k: Array,
    b2k: Array, beta: Array, scale: float | None = None, base: float = 10000.0, norm_eps: float = 1e-12,
    q0: Array = None, k0: Array = None, v0: Array = None, K0: Array = None, V0: Array = None,
) -> Result:  # fmt: skip
    """O = softmax(scale Q K^T) V with Q = sqrt(K) q' / ||q'||, q' = conv(q) + (q + k) / 2, K alike times e^beta, and
    V = (V_1 x_t, V_2 x_(t-1)).  -> O (T, G, V); what the states are after the call.  scale defaults to K^-1/2."""
    given = _given(q, k, v, w1q, b1q, w2q, b2q, w1k, b1k, w2k, b2k, beta, q0, k0, v0, K0, V0)
    check_shapes(OPERATOR, given)
    T, _, K = q.shape
    xq, xk, mean = history(q0, q, w1q, b1q, w2q), history(k0, k, w1k, b1k, w2k), (q + k) / 2
    Q, key = convolved(xq, w1q, b1q, w2q, b2q) + mean, convolved(xk, w1k, b1k, w2k, b2k) + mean
    Q, key = unit(Q, norm_eps) * K**0.5, unit(key, norm_eps) * K**0.5 * np.exp(beta)[:, None]
    n, v = positions(K0, T), from_last(v0, v)
    Q, key = rotated(Q, n, base)[:, :, None], rotated(key, n, base)
    O, Kc, Vc = attention.parallel(Q, key, shifted(v), scale, K0, V0)
    return O[:, :, 0], xq[T:], xk[T:], v[T], Kc, Vc


def chunkwise(
    q: Array, k: Array, v: Array, w1q: Array, b1q: Array, w2q: Array, b2q: Array, w1k: Array, b1k: Array, w2k: Array,
    b2k: Array, beta: Array, scale: float | None = None, base: float = 10000.0, norm_eps: float = 1e-12,
    q0: Array = None, k0: Array = None, v0: Array = None, K0: Array = None, V0: Array = None, chunk: int = 64,
) -> Result:  # fmt: skip
    """Chunk by chunk, as ccgqa with one query a group; chunks of one token are decoding."""
    given = _given(q, k, v, w1q, b1q, w2q, b2q, w1k, b1k, w2k, b2k, beta, q0, k0, v0, K0, V0)
    check_shapes(OPERATOR, given)
    O, q_last, *others = ccgqa.chunkwise(**wider(given), scale=scale, base=base, norm_eps=norm_eps, chunk=chunk)
    return O[:, :, 0], q_last[:, :, 0], *others


def vjp(
    cotangents: dict[str, Array],
    q: Array, k: Array, v: Array, w1q: Array, b1q: Array, w2q: Array, b2q: Array, w1k: Array, b1k: Array, w2k: Array,
    b2k: Array, beta: Array, scale: float | None = None, base: float = 10000.0, norm_eps: float = 1e-12,
    q0: Array = None, k0: Array = None, v0: Array = None, K0: Array = None, V0: Array = None,
) -> dict[str, Array]:  # fmt: skip
    """Gradients of <O, dO> and of the cotangents of the states: those of ccgqa with one query a group."""
    given = _given(q, k, v, w1q, b1q, w2q, b2q, w1k, b1k, w2k, b2k, beta, q0, k0, v0, K0, V0)
    check_cotangents(OPERATOR, cotangents, given)
    upstream = {n: c[:, :, None] if n in ("O", "q_last") else c for n, c in cotangents.items()}
    grads = ccgqa.vjp(upstream, **wider(given), scale=scale, base=base, norm_eps=norm_eps)
    return {n: np.sum(g, axis=_axis(n)) if n in WIDER else g for n, g in grads.items()}


def wider(given: dict[str, Array | None]) -> dict[str, Array | None]:
    """What ccgqa takes: an axis of one query after that of groups."""
    return {n: np.expand_dims(x, _axis(n)) if n in WIDER and x is not None else x for n, x in given.items()}


def _given(*arrays: Array | None) -> dict[str, Array | None]:
    return dict(zip((x.name for x in OPERATOR.inputs if x.role != "scalar"), arrays, strict=True))


def _axis(name: str) -> int:
    return OPERATOR.input(name).axes.index("G") + 1


OPERATOR = Operator(
    name="cca",
    summary="attention of queries and keys that are convolved, mixed, normalised and turned; half of the values late",
    source="survey, CCA; Figliola et al. 2025",
    inputs=ccgqa.inputs("G"),
    outputs=ccgqa.outputs("G"),
    forms=(Form("parallel", parallel), Form("chunkwise", chunkwise, chunked=True)),
    vjp=vjp,
    causal=True,
    laws=("linearity", "hull"),
    linear_in="v",
    cost="quadratic",
    multiple_of={"K": 2, "V": 2},
    derived=ccgqa.OPERATOR.derived,
)
