"""Wrong compressed convolutional attention, grouped and not: forward, then gradients.

The letters are those of reference/ccgqa.py; `attention` is the reference with its steps as arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mixproof.reference import cached_attention, cca
from mixproof.reference import ccgqa as right
from mixproof.reference.ccgqa_mixing import convolved, from_last, history, shifted
from mixproof.reference.latent_attention import positions, rotated, swapped
from mixproof.reference.primitives import Array, silu, unit
from mixproof.verify.subjects.mutants import Mutant, Row, tabulated

Step = Callable[..., Any]

# --- steps that are right --------------------------------------------------------------------------------------------


def of_query(q: Array, k: Array) -> Array:
    return (q + k[:, :, None]) / 2


def of_key(q: Array, k: Array) -> Array:
    return (np.sum(q, axis=2) / q.shape[2] + k) / 2


def sized(x: Array, eps: float) -> Array:
    return unit(x, eps) * x.shape[-1] ** 0.5


def causal(x0: Array | None, x: Array, w1: Array, b1: Array, w2: Array, b2: Array) -> Array:
    return convolved(history(x0, x, w1, b1, w2), w1, b1, w2, b2)


# --- the builders ----------------------------------------------------------------------------------------------------


def attention(
    convolve: Step = causal, query: Step = of_query, key: Step = of_key, norm: Step = sized, heat: Step = np.exp,
    query_heat: Step = lambda beta: 1.0, late: Step = lambda v0, v: shifted(from_last(v0, v)),
    attend: Step = cached_attention.parallel, count: Step = positions, turn: Step = rotated, kept: Step = history,
) -> Callable[..., tuple[Array, ...]]:  # fmt: skip
    """`kept` gives rows of which the last are handed on."""

    def forward(
        q, k, v, w1q, b1q, w2q, b2q, w1k, b1k, w2k, b2k, beta, scale=None, base=10000.0, norm_eps=1e-12,
        q0=None, k0=None, v0=None, K0=None, V0=None,
    ):  # fmt: skip
        T, n = len(q), count(K0, len(q))
        Q = norm(convolve(q0, q, w1q, b1q, w2q, b2q) + query(q, k), norm_eps)
        key_ = norm(convolve(k0, k, w1k, b1k, w2k, b2k) + key(q, k), norm_eps)
        Q, key_ = turn(Q, n, base) * query_heat(beta), turn(key_, n, base) * heat(beta)[:, None]
        O, Kc, Vc = attend(Q, key_, late(v0, v), scale, K0, V0)
        tails = kept(q0, q, w1q, b1q, w2q), kept(k0, k, w1k, b1k, w2k)
        return O, *(x[T:] for x in tails), from_last(v0, v)[T], Kc, Vc

    return forward


def changed(change: Callable[..., dict[str, Array]], forgets: tuple[str, ...] = ()) -> Callable[..., dict[str, Array]]:
    """The right gradients, some of which `change` replaces; `forgets` names outputs whose cotangents are lost."""

    def gradients(cotangents, **inputs):
        given = {n: 0 * G if n in forgets else G for n, G in cotangents.items()}
        d = right.vjp(given, **inputs)
        return d | change(d, inputs)

    return gradients


# --- steps that are wrong --------------------------------------------------------------------------------------------


def padded_twice(x0: Array | None, x: Array, w1: Array, b1: Array, w2: Array, b2: Array) -> Array:
    """Zeros before each convolution: the second one does not meet the bias of the first before the sequence."""
    y, J = causal(x0, x, w1, b1, w2, b2), w2.shape[-1]
    if x0 is not None:
        return y
    missing = [
        np.sum(w2[..., : max(J - 1 - t, 0)], axis=-1) @ b1[..., None] if t < J - 1 else 0 * b1[..., None]
        for t in range(len(x))
    ]
    return y - np.stack(missing)[..., 0] if missing else y


def ahead(x0: Array | None, x: Array, w1: Array, b1: Array, w2: Array, b2: Array) -> Array:
    """The last tap meets the token after."""
    rows = np.concatenate([history(x0, x, w1, b1, w2)[1:], 0 * x[:1]])
    return convolved(rows, w1, b1, w2, b2) if len(x) else causal(x0, x, w1, b1, w2, b2)


def activated(x0: Array | None, x: Array, w1: Array, b1: Array, w2: Array, b2: Array) -> Array:
    return silu(causal(x0, x, w1, b1, w2, b2))


def without_history(x0: Array | None, x: Array, w1: Array, b1: Array, w2: Array, b2: Array) -> Array:
    return causal(None, x, w1, b1, w2, b2)


def half_of_each_head(v0: Array | None, v: Array) -> Array:
    rows, half = from_last(v0, v), v.shape[2] // 2
    return np.concatenate([rows[1:, :, :half], rows[:-1, :, half:]], axis=2)


def first_half(v0: Array | None, v: Array) -> Array:
    return from_last(v0, v)[1:] + from_last(v0, v)[:-1] - shifted(from_last(v0, v))


def tiled(q: Array, k: Array, v: Array, *rest: Any) -> tuple[Array, ...]:
    """Query h with key h mod G, as by tile where repeat is meant."""
    T, G, M, K = q.shape
    order = np.arange(G * M).reshape(M, G).T.ravel()
    O, *caches = cached_attention.parallel(q.reshape(T, G * M, K)[:, order].reshape(q.shape), k, v, *rest)
    return O.reshape(T, G * M, O.shape[-1])[:, np.argsort(order)].reshape(O.shape), *caches


def lost_when_short(x0: Array | None, x: Array, w1: Array, b1: Array, w2: Array) -> Array:
    """The old rows forgotten where the call has fewer tokens than are kept."""
    rows = history(x0, x, w1, b1, w2)
    return history(None, x, w1, b1, w2) if 0 < len(x) < len(rows) - len(x) else rows


def from_zero(K0: Array | None, T: int) -> np.ndarray:
    return np.arange(T)


# --- tables ----------------------------------------------------------------------------------------------------------

CCGQA: tuple[tuple[Row, ...], tuple[Row, ...]] = (
    (
        ("padded_twice", "zeros before each convolution", attention(padded_twice), "", ("forward",)),
        ("ahead", "a convolution that meets the token after", attention(ahead), "", ("forward", "causality")),
        (
            "taps_reversed", "taps in the opposite order",
            attention(lambda x0, x, w1, b1, w2, b2: causal(x0, x, w1[..., ::-1], b1, w2[..., ::-1], b2)), "",
            ("forward",),
        ),
        (
            "out_and_in", "outputs and inputs of the second convolution exchanged",
            attention(
                lambda x0, x, w1, b1, w2, b2: causal(
                    x0, x, w1, b1, np.stack([swapped(w2[..., j]) for j in range(w2.shape[-1])], axis=-1), b2
                )
            ), "", ("forward",),
        ),
        ("activated", "an activation after the convolutions", attention(activated), "", ("forward",)),
        ("no_history", "rows before the call taken for zeros", attention(without_history), "", ("forward", "split")),
        (
            "keys_without_mean", "keys that get no mean, as printed", attention(key=lambda q, k: 0 * k), "",
            ("forward",),
        ),
        (
            "mean_of_group", "every query with the mean of its group",
            attention(query=lambda q, k: of_key(q, k)[:, :, None] + 0 * q), "", ("forward",),
        ),
        (
            "sum_of_group", "a key with the sum of its queries",
            attention(key=lambda q, k: (np.sum(q, axis=2) + k) / 2), "", ("forward",),
        ),
        (
            "no_half", "q + k where half of it is meant", attention(query=lambda q, k: q + k[:, :, None]), "",
            ("forward",),
        ),
        ("raw_heat", "beta for e^beta, as ZAYA has it", attention(heat=lambda beta: beta), "", ("forward",)),
        (
            "heat_of_query", "queries scaled by the temperature too",
            attention(query_heat=lambda beta: np.exp(beta)[:, None, None]), "", ("forward",),
        ),
        ("unit_rows", "rows of norm one, not sqrt(K)", attention(norm=unit), "", ("forward",)),
        ("no_norm", "queries and keys that are not normalised", attention(norm=lambda x, eps: x), "", ("forward",)),
        ("not_turned", "queries and keys that are not turned", attention(turn=lambda x, n, base: x), "", ("forward",)),
        ("turns_of_call", "rotations counted from the call", attention(count=from_zero), "", ("forward", "split")),
        ("no_shift", "values of the token itself", attention(late=lambda v0, v: v), "", ("forward",)),
        (
            "all_late", "all values one token late", attention(late=lambda v0, v: from_last(v0, v)[:-1]), "",
            ("forward",),
        ),
        ("first_half", "the first half of the values late", attention(late=first_half), "", ("forward",)),
        ("half_of_head", "half of each head's values late", attention(late=half_of_each_head), "", ("forward",)),
        (
            "no_last_value", "the value before the call taken for zero",
            attention(late=lambda v0, v: shifted(from_last(None, v))), "", ("forward", "split"),
        ),
        ("tiled", "query h with key h mod G", attention(attend=tiled), "", ("forward",)),
        (
            "lost_when_short", "old rows lost after a short call", attention(kept=lost_when_short), "conv-fs-short",
            ("forward", "split"),
        ),
    ),
    (
        (
            "raw_beta", "the gradient of e^beta for that of beta",
            changed(lambda d, x: {"beta": d["beta"] / np.exp(x["beta"])}), "", ("vjp",),
        ),
        (
            "no_rows", "the cotangent of the rows that are kept lost", changed(lambda d, x: {}, ("q_last",)),
            "conv-dst-pass", ("vjp",),
        ),
        ("no_cache", "the cotangent of the cached keys lost", changed(lambda d, x: {}, ("Kc",)), "", ("vjp",)),
        (
            "taps_reversed", "gradients of taps in the opposite order",
            changed(lambda d, x: {"w1q": d["w1q"][..., ::-1]}), "", ("vjp",),
        ),
        (
            "out_and_in", "gradients of the second convolution transposed",
            changed(lambda d, x: {"w2k": np.swapaxes(d["w2k"], 1, 2)}), "", ("vjp",),
        ),
    ),
)  # fmt: skip


def single(function: Callable[..., tuple[Array, ...]]) -> Callable[..., tuple[Array, ...]]:
    """A mutant of ccgqa with one query a group as one of cca."""

    def forward(**inputs):
        scalars = {n: x for n, x in inputs.items() if cca.OPERATOR.input(n).role == "scalar"}
        arrays = {n: x for n, x in inputs.items() if n not in scalars}
        O, q_last, *others = function(**cca.wider(arrays), **scalars)
        return O[:, :, 0], q_last[:, :, 0], *others

    return forward


SHARED = ("padded_twice", "keys_without_mean", "raw_heat", "no_shift", "half_of_head", "lost_when_short")
CCA = [(name, what, single(f), source, laws) for name, what, f, source, laws in CCGQA[0] if name in SHARED]

MUTANTS: tuple[Mutant, ...] = (*tabulated("ccgqa", *CCGQA), *tabulated("cca", CCA, ()))
