"""Wrong TALA with decays that vary, and wrong gated linear attention; gradients are in tala_decays_vjp.py.

The letters are those of reference/tala_decays.py. `chunkwise` is the reference with its decays as arguments: A are
those of all tokens, P their products over the chunk that begins at token `start`. What may go wrong with any decays
goes wrong with each kind of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mixproof.reference import operator
from mixproof.reference.primitives import Array, causal_mask, segment_products
from mixproof.reference.tala_decays import sums
from mixproof.verify.arithmetic import round_to
from mixproof.verify.subjects.mutants import Mutant, Row, tabulated

CHUNK, SMALLEST = 8, 2.0**-20
GATED = ("gated_linear_attention.simple", "gated_linear_attention")
Table = Callable[[str], list[Row]]

# --- builders --------------------------------------------------------------------------------------------------------


class Pieces(NamedTuple):
    """Decays of a chunk: from token to token, from its start to a token, from a token to its end, of the state."""

    mask: Array
    read: Array
    write: Array
    carry: Array


def pieces(P: Array, A: Array, start: int, chunk: int) -> Pieces:
    return Pieces(P[1:, 1:], P[1:, 0], P[-1, 1:], P[-1, 0])


def spread(name: str, a: Array, T: int) -> Array:
    """Decays, or their logarithms, as (T, 1 or K, 1 or V)."""
    if name == "tala.elementwise":
        return np.broadcast_to(a, (T, *a.shape))
    return a[:, None, :] if name == "tala.value_channel" else a[(..., *(3 - a.ndim) * (None,))]


def chunkwise(
    name: str,
    at: Callable[[Array, Array, int, int], Pieces] = pieces,
    decays: Callable[[Array], Array] = lambda A: A, products: Callable[[Array], Array] = segment_products,
    exp: Callable[[Array], Array] = np.exp,
    place: Callable[[str, Array, int, int, int], Array] = lambda name, a, T, K, V: spread(name, a, T),
    starts: Callable[[Array, int], Array] = lambda S, T: S,
    kept: Callable[[Array], Array] = lambda S: S, values: Callable[[Array], Array] = lambda v: v,
    state_scale: Callable[[float], float] = lambda scale: scale, read_after: bool = False,
) -> Callable[..., Any]:  # fmt: skip
    """-> O, S."""

    def run(q, k, v, a, scale, S0, chunk):
        v = values(v)
        S = starts(k[:0].T @ v[:0] if S0 is None else S0, len(q))
        A = place(name, a, len(q), k.shape[1], v.shape[1])
        A = decays(exp(A) if name in GATED else A)
        rows = [q[:0] @ S]
        for start in range(0, len(q), chunk):
            c = slice(start, start + chunk)
            D = at(products(A[c]), A, start, chunk)
            S1 = D.carry * S + sums(D.write[None], k[c], v[c])[0]
            Q = q[c, None]
            O = Q @ sums(D.mask, k[c], v[c]) * scale
            rows.append((O + Q @ (D.read * (S1 if read_after else S)) * state_scale(scale))[:, 0])
            S = kept(S1)
        return np.concatenate(rows), S

    def decayed(q, k, v, a, scale=1.0, S0=None, chunk=CHUNK):
        return run(q, k, v, a, scale, S0, chunk)

    def gated(q, k, v, g, scale=1.0, S0=None, chunk=CHUNK):
        return run(q, k, v, g, scale, S0, chunk)

    return gated if name in GATED else decayed


# --- pieces that are wrong by themselves -----------------------------------------------------------------------------


def lower(P: Array) -> np.ndarray:
    return causal_mask(len(P))[:, :, None, None]


def undecayed(*names: str) -> Callable[..., Pieces]:
    return lambda *chunk: (D := pieces(*chunk))._replace(**{n: getattr(D, n) ** 0 for n in names})


def undecayed_mask(*chunk: Any) -> Pieces:
    D = pieces(*chunk)
    return D._replace(mask=np.where(lower(D.mask), D.mask**0, 0))


def full(P: Array, A: Array, start: int, chunk: int) -> Pieces:
    """The last token's decay once more for each token that a short chunk lacks."""
    D, more = pieces(P, A, start, chunk), A[start : start + chunk][-1] ** (chunk + 1 - len(P))
    return D._replace(write=more * D.write, carry=more * D.carry)


def printed_16(*chunk: Any) -> Pieces:
    D = full(*chunk)
    return D._replace(read=D.read**0, write=D.write**0)


def padded(P: Array, A: Array, start: int, chunk: int) -> Pieces:
    D = pieces(P, A, start, chunk)
    return D if len(P) > chunk else D._replace(write=0 * D.write, carry=0 * D.carry)


def exclusive_mask(P: Array, *rest: Any) -> Pieces:
    """A_{m+1} * ... * A_{n-1}."""
    D = pieces(P, *rest)
    own = np.eye(len(D.mask), dtype=bool)[:, :, None, None]
    return D._replace(mask=np.where(own, 1, np.where(lower(D.mask), P[:-1, 1:], 0)))


def inclusive_mask(P: Array, *rest: Any) -> Pieces:
    """A_m * ... * A_n."""
    D = pieces(P, *rest)
    return D._replace(mask=np.where(lower(D.mask), P[1:, :-1], 0), write=P[-1, :-1])


def global_read(P: Array, A: Array, start: int, chunk: int) -> Pieces:
    D = pieces(P, A, start, chunk)
    return D._replace(read=D.read * np.prod(A[:start], axis=0))


def unmasked(*chunk: Any) -> Pieces:
    D = pieces(*chunk)
    return D._replace(mask=np.where(lower(D.mask), D.mask, np.swapaxes(D.mask, 0, 1)))


def by_logarithms(A: Array) -> Array:
    """sign(a) exp(log |a|), masked before exp."""
    signs = segment_products(np.where(A < 0, -np.ones_like(A), 1))
    return signs * exponentials(cumulated(np.log(np.abs(A))))


def by_quotients(A: Array) -> Array:
    c = np.concatenate([A[:1] ** 0, np.cumprod(A, axis=0)])
    return np.where(lower(c), c[:, None] / c[None, :], 0)


def never_zero(A: Array) -> Array:
    return np.where(A == 0, SMALLEST, A).astype(A.dtype)


def cumulated(G: Array) -> Array:
    return np.concatenate([0 * G[:1], np.cumsum(G, axis=0)])


def exponentials(c: Array) -> Array:
    return np.where(lower(c), np.exp(np.where(lower(c), c[:, None] - c[None, :], 0)), 0)


def masked_after(c: Array) -> Array:
    return np.exp(c[:, None] - c[None, :]) * lower(c)


def factored(c: Array) -> Array:
    return np.where(lower(c), np.exp(c)[:, None] * np.exp(-c)[None, :], 0)


def guarded(c: Array) -> Array:
    """Arguments that are not negative are taken for those above the diagonal."""
    x = c[:, None] - c[None, :]
    return np.where(x < 0, np.exp(np.minimum(x, 0)), np.eye(len(c))[:, :, None, None])


def rounded(x: Array) -> Array:
    return round_to(x, "bfloat16").astype(x.dtype)


def channel_before(name: str, a: Array, T: int, K: int, V: int) -> Array:
    return spread(name, np.roll(a, 1, axis=-1), T)


def first_channel(name: str, a: Array, T: int, K: int, V: int) -> Array:
    return spread(name, np.broadcast_to(a[..., :1], a.shape), T)


def other_side(name: str, a: Array, T: int, K: int, V: int) -> Array:
    """The decays of key channels on value channels, or the other way round."""
    return a[:, np.arange(K) % V, None] if name == "tala.value_channel" else a[:, None, np.arange(V) % K]


def by_columns(name: str, a: Array, T: int, K: int, V: int) -> Array:
    return np.broadcast_to(a.T.reshape(K, V), (T, K, V))


# --- tables ----------------------------------------------------------------------------------------------------------


def forward(name: str) -> list[Row]:
    """Whatever the decays are."""
    chain = ("cocycle",) if "cocycle" in operator(name).laws else ()
    return [
        (
            "printed_16", "the chunkwise form as printed, (16)", chunkwise(name, printed_16), "",
            ("forward", "forms", "split"),
        ),
        (
            "undecayed_state", "the carried state not decayed", chunkwise(name, undecayed("carry")), "",
            ("forward", "forms"),
        ),
        (
            "undecayed_write", "no decay to the chunk's end of what is written to the state",
            chunkwise(name, undecayed("write")), "", ("forward", "forms", "split"),
        ),
        (
            "undecayed_read", "no decay from the chunk's start of what is read from the state",
            chunkwise(name, undecayed("read")), "", ("forward", "forms"),
        ),
        ("undecayed_mask", "no decay inside chunks", chunkwise(name, undecayed_mask), "", ("forward", "forms")),
        (
            "tail_decay", "the short last chunk decayed like a full one", chunkwise(name, full), "tala-tail-decay",
            ("forward", "split"),
        ),
        (
            "exclusive_read", "one decay too few on what is read from the state",
            chunkwise(name, lambda P, *rest: pieces(P, *rest)._replace(read=P[:-1, 0])), "tala-inter-exclusive",
            ("forward", "forms"),
        ),
        ("exclusive_mask", "one decay too few inside chunks", chunkwise(name, exclusive_mask), "", ("forward",)),
        ("inclusive_mask", "tokens that decay their own key", chunkwise(name, inclusive_mask), "", ("forward", *chain)),
        (
            "global_read", "the decay since the first token on what is read from the state",
            chunkwise(name, global_read), "tala-global-cumsum", ("forward", "forms"),
        ),
        (
            "short_ignores_state", "the initial state ignored when a chunk is not full",
            chunkwise(name, starts=lambda S, T: S if T >= CHUNK else 0 * S), "tala-h0-short", ("forward", "split"),
        ),
        ("unmasked", "decays above the diagonal too", chunkwise(name, unmasked), "", ("forward", "causality")),
        (
            "read_after", "the state read at the end of the chunk", chunkwise(name, read_after=True),
            "tala-leak-state", ("forward", "causality"),
        ),
        (
            "bfloat16_state", "the state rounded to bfloat16 between chunks", chunkwise(name, kept=rounded),
            "tala-bf16-state", ("forward", "forms"),
        ),
        (
            "clipped_values", "values clipped to [-2, 2]", chunkwise(name, values=lambda v: np.clip(v, -2, 2)), "",
            ("forward", "linearity", "homogeneity", "euler"),
        ),
        (
            "state_not_scaled", "no scale on what is read from the state",
            chunkwise(name, state_scale=lambda scale: 1.0), "", ("deterministic",),
        ),
    ]  # fmt: skip


def by_token(name: str) -> list[Row]:
    """Where each token has its own decay."""
    return [
        (
            "next_token", "the decays of the next token",
            chunkwise(name, decays=lambda A: np.concatenate([A[1:], A[:1] ** 0])), "", ("forward", "causality"),
        ),
        (
            "previous_token", "the decays of the previous token",
            chunkwise(name, decays=lambda A: np.concatenate([A[:1] ** 0, A[:-1]])), "", ("forward",),
        ),
        (
            "first_token", "the decay of a chunk's first token for all its tokens",
            chunkwise(name, products=lambda A: segment_products(np.broadcast_to(A[:1], A.shape))), "",
            ("forward", "forms"),
        ),
        (
            "padded_tail", "a short last chunk filled up with decays of zero", chunkwise(name, padded),
            "scan-pad-decay", ("forward", "split", "left_padding"),
        ),
    ]  # fmt: skip


def signed(name: str) -> list[Row]:
    """Where decays may be zero or negative."""
    return [
        ("unsigned", "the sign of decays lost", chunkwise(name, decays=np.abs), "", ("forward",)),
        (
            "clamped", "negative decays taken for zero", chunkwise(name, decays=lambda A: np.maximum(A, 0)), "",
            ("forward",),
        ),
        ("logarithms", "decays through their logarithms", chunkwise(name, products=by_logarithms), "scan-logspace",
         ("extremes",)),
        (
            "quotients", "decays as quotients of cumulative products", chunkwise(name, products=by_quotients), "",
            ("extremes",),
        ),
    ]  # fmt: skip


def forgetting(name: str) -> list[Row]:
    """Where a token's decay may be zero."""
    return [("never_zero", "2^-20 for decays of zero", chunkwise(name, decays=never_zero), "", ("reset",))]


def by_channel(name: str) -> list[Row]:
    return [
        ("channel_before", "the decays of the channel before", chunkwise(name, place=channel_before), "",
         ("forward", "relabelling")),
        (
            "first_channel", "the decays of the first channel for all", chunkwise(name, place=first_channel), "",
            ("forward", "relabelling"),
        ),
    ]  # fmt: skip


def across(name: str) -> list[Row]:
    what = "keys' decays on the values" if name == "tala.key_channel" else "values' decays on the keys"
    return [("other_side", what, chunkwise(name, place=other_side), "", ("forward", "relabelling"))]


def by_matrix(name: str) -> list[Row]:
    return [("by_columns", "the decays read by columns", chunkwise(name, place=by_columns), "", ("forward",))]


def logarithmic(name: str) -> list[Row]:
    """Where decays come as logarithms."""

    def logs(products: Callable[[Array], Array], of: Callable[[Array], Array] = lambda c: c) -> Callable[..., Any]:
        return chunkwise(name, exp=lambda G: G, products=lambda G: products(of(cumulated(G))))

    return [
        ("base_two", "decays 2^g", chunkwise(name, exp=np.exp2), "", ("forward",)),
        (
            "mask_after_exp", "decays masked after exp", logs(masked_after), "tala-mask-after-exp", ("extremes",),
        ),
        (
            "factored_exp", "exp(c_n - c_m) as exp(c_n) exp(-c_m)", logs(factored), "tala-factored-exp", ("extremes",)
        ),
        (
            "guarded_exp", "decays of one taken for masked", logs(guarded), "tala-safe-exp-zero", ("forward",)
        ),
        (
            "bfloat16_sums", "sums of log-decays rounded to bfloat16", logs(exponentials, rounded), "", ("forward",)
        ),
    ]  # fmt: skip


TABLES: dict[str, tuple[Table, ...]] = {
    "tala.time_varying": (forward, by_token, signed, forgetting),
    "tala.key_channel": (forward, by_token, signed, forgetting, by_channel, across),
    "tala.value_channel": (forward, by_token, signed, forgetting, by_channel, across),
    "tala.elementwise": (forward, signed, by_channel, by_matrix),
    "gated_linear_attention.simple": (forward, by_token, logarithmic),
    "gated_linear_attention": (forward, by_token, logarithmic, by_channel),
}
MUTANTS: tuple[Mutant, ...] = tuple(
    mutant
    for name, tables in TABLES.items()
    for mutant in tabulated(name, [row for table in tables for row in table(name)], ())
)
