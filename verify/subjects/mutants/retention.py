"""Wrong retentions: forward, then gradients.

The letters are those of reference/retention.py. `chunkwise` is the reference with its decays as arguments; n counts the
tokens of a chunk that starts at token a, and i is their position in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mixproof.reference import retention
from mixproof.reference.primitives import Array, causal_mask
from mixproof.verify.arithmetic import round_to
from mixproof.verify.subjects.mutants import Mutant, tabulated

CHUNK, TILE, WRAP = 8, 4, 64
LEAK, OFFSET = 1e-6, 2.0**-6
Powers = Callable[..., Array]

# --- builders --------------------------------------------------------------------------------------------------------


def decays(gamma: Array, i: np.ndarray) -> Array:
    """D_ij = gamma^(i-j) for j <= i, else 0."""
    return np.where(causal_mask(len(i)), gamma ** np.maximum(i[:, None] - i[None, :], 0), 0)


def chunkwise(
    mask: Callable[[Array, np.ndarray, int], Array] = lambda gamma, i, chunk: decays(gamma, i),
    read: Callable[[Array, np.ndarray, int], Array] = lambda gamma, i, a: gamma ** (i + 1),
    write: Callable[[Array, np.ndarray, int], Array] = lambda gamma, i, chunk: gamma ** (len(i) - 1 - i),
    carry: Callable[[Array, int, int], Array] = lambda gamma, n, chunk: gamma**n,
    starts: Callable[[Array, int, int], Array] = lambda S, T, chunk: S,
    kept: Callable[[Array, int, int], Array] = lambda S, n, chunk: S,
    keys: Callable[[Array], Array] = lambda k: k, values: Callable[[Array], Array] = lambda v: v,
    operand: Callable[[Array], Array] = lambda x: x,
    state_scale: Callable[[float], float] = lambda scale: scale, read_after: bool = False,
) -> Callable[..., Any]:  # fmt: skip
    """-> O, S."""

    def forward(q, k, v, gamma, scale=1.0, S0=None, chunk=CHUNK):
        k, v = keys(k), values(v)
        S = k[:0].T @ v[:0] if S0 is None else S0
        S = starts(S, len(q), chunk)
        rows = [q[:0] @ S]
        for a in range(0, len(q), chunk):
            Q, K, W = q[a : a + chunk], k[a : a + chunk], v[a : a + chunk]
            i = np.arange(len(Q))
            S1 = operand(K * write(gamma, i, chunk)[:, None]).T @ operand(W) + carry(gamma, len(Q), chunk) * S
            A = operand(Q) @ operand(K).T * mask(gamma, i, chunk)
            O = operand(A) @ operand(W) * scale
            rows.append(O + read(gamma, i, a)[:, None] * (operand(Q) @ (S1 if read_after else S)) * state_scale(scale))
            S = kept(S1, len(Q), chunk)
        return np.concatenate(rows), S

    return forward


def vjp(
    rows: Callable[[Array], Array] = lambda G: G, state: float = 1.0,
    carried: Callable[[Array], Array] = lambda R: R,
    change: Callable[..., dict[str, Array]] = lambda grads, *inputs: grads,
) -> Callable[..., Any]:  # fmt: skip
    """Chunk by chunk backwards with the cotangent R of the state; `rows` changes the cotangent that queries see."""

    def gradients(cotangents, q, k, v, gamma, scale=1.0, S0=None, chunk=CHUNK):
        S = k[:0].T @ v[:0] if S0 is None else S0
        starts = range(0, len(q), chunk)
        before = []
        for a in starts:
            before.append(S)
            S = retention.parallel(q[a : a + chunk], k[a : a + chunk], v[a : a + chunk], gamma, scale, S)[1]
        G, R = cotangents["O"], state * cotangents["S"]
        found: dict[str, list[Array]] = {name: [0 * x[:0]] for name, x in (("q", q), ("k", k), ("v", v))}
        dgamma = 0 * gamma
        for a, S in zip(reversed(starts), reversed(before), strict=True):
            c = slice(a, a + chunk)
            grads = retention.vjp({"O": G[c], "S": R}, q[c], k[c], v[c], gamma, scale, S)
            grads["q"] = retention.vjp({"O": rows(G[c]), "S": R}, q[c], k[c], v[c], gamma, scale, S)["q"]
            for name, parts in found.items():
                parts.append(grads[name])
            dgamma, R = dgamma + grads["gamma"], carried(grads["S0"])
        joined = {name: np.concatenate(parts[::-1]) for name, parts in found.items()}
        return change(joined | {"gamma": dgamma, "S0": R}, cotangents, q, k, v, gamma, scale, S0)

    return gradients


# --- pieces that are wrong by themselves -----------------------------------------------------------------------------


def rounded(x: Array) -> Array:
    return round_to(x, "bfloat16").astype(x.dtype)


def tf32(x: Array) -> Array:
    return round_to(x, "tf32").astype(x.dtype)


def _log(gamma: Array, i: np.ndarray) -> tuple[Array, Array]:
    """log gamma^i and i, in the dtype of gamma."""
    i = i.astype(gamma.dtype)
    return i * np.log(gamma), i


def mask_after_exp(gamma: Array, i: np.ndarray, chunk: int) -> Array:
    distance = (i[:, None] - i[None, :]).astype(gamma.dtype)
    return np.exp(distance * np.log(gamma)) * causal_mask(len(i))


def factored_exp(gamma: Array, i: np.ndarray, chunk: int) -> Array:
    L, _ = _log(gamma, i)
    return np.where(causal_mask(len(i)), np.exp(L)[:, None] * np.exp(-L)[None, :], 0)


def guarded_exp(gamma: Array, i: np.ndarray, chunk: int) -> Array:
    """Arguments that are not negative are taken for those above the diagonal."""
    x = (i[:, None] - i[None, :]) * np.log(gamma)
    return np.where(x < 0, np.exp(x), 0) + np.eye(len(i))


def unmasked_tail(gamma: Array, i: np.ndarray, chunk: int) -> Array:
    D = decays(gamma, i)
    return D if len(i) == chunk else gamma ** np.abs(i[:, None] - i[None, :])


def wrapped_rows(k: Array) -> Array:
    """The offset of token t, t K, kept in six bits."""
    T, K = k.shape
    return k[(np.arange(T) * K % WRAP) // K]


def leaking(gamma: Array, i: np.ndarray, chunk: int) -> Array:
    return decays(gamma, i) + LEAK * np.eye(len(i), k=1)


def without_scale(grads, cotangents, q, k, v, gamma, scale, S0):
    return grads | {"v": grads["v"] / scale}


def without_final(grads, cotangents, q, k, v, gamma, scale, S0):
    return grads | {"gamma": retention.vjp(cotangents | {"S": 0 * cotangents["S"]}, q, k, v, gamma, scale, S0)["gamma"]}


def unmasked(grads, cotangents, q, k, v, gamma, scale, S0):
    """The values' gradient with gamma^|i-j| above the diagonal too."""
    i = np.arange(len(q))
    extra = np.where(causal_mask(len(q)), 0, gamma ** np.abs(i[:, None] - i[None, :]))
    return grads | {"v": grads["v"] + (q @ k.T * extra).T @ cotangents["O"] * scale}


# --- tables ----------------------------------------------------------------------------------------------------------

FORWARD = (
    (
        "undecayed_state", "the carried state not decayed", chunkwise(carry=lambda g, n, chunk: g**0), "",
        ("forward", "forms", "cocycle"),
    ),
    (
        "tail_decay", "the short last chunk decayed like a full one",
        chunkwise(write=lambda g, i, chunk: g ** (chunk - 1 - i), carry=lambda g, n, chunk: g**chunk),
        "tala-tail-decay", ("forward", "split"),
    ),
    (
        "edge_decay", "one decay too few at chunk edges", chunkwise(carry=lambda g, n, chunk: g ** (n - 1)), "",
        ("forward", "forms"),
    ),
    (
        "exclusive_read", "one decay too few on what is read from the state",
        chunkwise(read=lambda g, i, a: g**i), "tala-inter-exclusive", ("forward", "forms"),
    ),
    (
        "global_read", "the decay since the first token on what is read from the state",
        chunkwise(read=lambda g, i, a: g ** (a + i + 1)), "tala-global-cumsum", ("forward", "forms"),
    ),
    (
        "late_write", "one decay too many on what is written to the state",
        chunkwise(write=lambda g, i, chunk: g ** (len(i) - i)), "", ("forward", "forms", "split"),
    ),
    (
        "short_ignores_state", "the initial state ignored when a chunk is not full",
        chunkwise(starts=lambda S, T, chunk: S if T >= chunk else 0 * S), "tala-h0-short", ("forward", "split"),
    ),
    (
        "empty_resets", "the final state of an empty sequence zero",
        chunkwise(starts=lambda S, T, chunk: S if T else 0 * S), "tala-vl-empty", ("forward",),
    ),
    (
        "update_once", "the state not updated by short chunks",
        chunkwise(kept=lambda S, n, chunk: S if n == chunk else 0 * S), "", ("forward", "split", "left_padding"),
    ),
    ("wrapped_rows", "key offsets kept in six bits", chunkwise(keys=wrapped_rows), "tala-idx-wrap", ("forward",)),
    ("mask_after_exp", "decays masked after exp", chunkwise(mask_after_exp), "tala-mask-after-exp", ("extremes",)),
    (
        "factored_exp", "exp(L_i - L_j) as exp(L_i) exp(-L_j)", chunkwise(factored_exp), "tala-factored-exp",
        ("extremes",),
    ),
    (
        "guarded_exp", "decays of one taken for masked", chunkwise(guarded_exp), "tala-safe-exp-zero", ("forward",)
    ),
    (
        "unmasked_tail", "no causal mask in the short last chunk", chunkwise(unmasked_tail), "tala-tail-nomask",
        ("forward", "causality"),
    ),
    (
        "unmasked", "gamma^|i-j| above the diagonal too",
        chunkwise(lambda g, i, chunk: g ** np.abs(i[:, None] - i[None, :])), "", ("forward", "causality", "forms"),
    ),
    (
        "exclusive_mask", "tokens that do not read their own key",
        chunkwise(lambda g, i, chunk: decays(g, i) - np.eye(len(i))), "", ("forward", "cocycle"),
    ),
    (
        "read_after", "the state read at the end of the chunk", chunkwise(read_after=True), "tala-leak-state",
        ("forward", "causality"),
    ),
    ("leak", "the next key read with weight 1e-6", chunkwise(leaking), "", ("causality",)),
    (
        "first_tile", "only the first four value channels written to the state",
        chunkwise(kept=lambda S, n, chunk: S * (np.arange(S.shape[1]) < TILE)), "tala-vsplit-state", ("forward",),
    ),
    (
        "bfloat16_state", "the state rounded to bfloat16 between chunks",
        chunkwise(kept=lambda S, n, chunk: rounded(S)), "tala-bf16-state", ("forward", "forms"),
    ),
    (
        "tf32_operands", "operands of dot products rounded to TF32", chunkwise(operand=tf32), "attn-tf32",
        ("forward",),
    ),
    (
        "no_scale", "the scale dropped", lambda q, k, v, gamma, scale=1.0, S0=None: retention.parallel(
            q, k, v, gamma, 1.0, S0
        ), "", ("forward",),
    ),
    (
        "state_not_scaled", "no scale on what is read from the state", chunkwise(state_scale=lambda scale: 1.0), "",
        ("deterministic",),
    ),
    (
        "clipped_values", "values clipped to [-2, 2]", chunkwise(values=lambda v: np.clip(v, -2, 2)), "",
        ("forward", "linearity", "homogeneity"),
    ),
    (
        "shifted_values", "2^-6 added to the values", chunkwise(values=lambda v: v + OFFSET), "",
        ("forward", "linearity", "homogeneity"),
    ),
    (
        "by_length", "everything divided by the number of tokens", lambda q, k, v, gamma, scale=1.0, S0=None:
        retention.parallel(q, k, v, gamma, scale / max(1, len(q)), S0), "",
        ("forward", "future_length", "left_padding"),
    ),
)  # fmt: skip

BACKWARD = (
    ("no_state_cotangent", "the cotangent of the final state dropped", vjp(state=0), "tala-no-dht", ("vjp",)),
    ("value_scale", "no scale on the gradient of the values", vjp(change=without_scale), "tala-dv-scale", ("vjp",)),
    (
        "last_tile", "the gradient of the queries from all but the first four value channels",
        vjp(rows=lambda G: G * (np.arange(G.shape[1]) >= TILE)), "tala-dq-lastblock", ("vjp", "euler"),
    ),
    (
        "decay_without_final", "the final state's cotangent missing from the gradient of gamma",
        vjp(change=without_final), "tala-dg-nofinal", ("vjp",),
    ),
    (
        "bfloat16_cotangent", "the state's cotangent rounded to bfloat16 between chunks", vjp(carried=rounded),
        "tala-dS-bf16", ("vjp",),
    ),
    (
        "no_mask", "no causal mask in the gradient of the values", vjp(change=unmasked), "",
        ("vjp", "gradient_causality", "euler"),
    ),
)  # fmt: skip

MUTANTS: tuple[Mutant, ...] = tabulated("retention", FORWARD, BACKWARD)
