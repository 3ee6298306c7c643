"""Wrong normalised TALA and wrong linear attention: forward, then gradients.

The letters are those of reference/tala_normalised.py. Numerators and masses are retentions, wrong ones of retention.py
in this folder; linear attention is n2 with a decay of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mixproof.reference import retention as right
from mixproof.reference.linear_attention import joined, memory, quotient_vjp, with_mass
from mixproof.reference.primitives import Array, causal_mask
from mixproof.reference.tala_normalised import n1_vjp, n2_vjp, n3_vjp
from mixproof.verify.subjects.mutants import Mutant, Row, tabulated
from mixproof.verify.subjects.mutants.retention import chunkwise, decays, rounded, tf32

CHUNK = 8
LEAK, OFFSET = 1e-6, 2.0**-6
Retention = Callable[..., Any]
NAMES: tuple[str, ...] = ("tala.n1", "tala.n2", "tala.n3", "linear_attention")

# --- builders --------------------------------------------------------------------------------------------------------


def forward(
    name: str, numerator: Retention | None = None, mass: Retention | None = None,
    keys: Callable[[Array], Array] = lambda k: k, queries: Callable[[Array], Array] = lambda q: q,
    divisor: Callable[[Array, float], Array] = lambda D, eps: D + eps,
    of_mass: Callable[[Array], Array] = lambda Z: Z, after: Callable[[Array], Array] = lambda O: O,
) -> Callable[..., Any]:  # fmt: skip
    """-> O, S, z. `mass` sums the keys, channel by channel, or what the query meets of them."""
    sums, masses = numerator or chunkwise(), mass or numerator or chunkwise()

    def matrix(q, k, v, a, eps, S0, z0, chunk):
        q, k = queries(q), keys(k)
        N, S = sums(q, k, v, a, 1.0, S0, chunk)
        D, z = masses(q, k, np.ones_like(v[:, :1]), a, 1.0, None if z0 is None else z0[:, None], chunk)
        return after(N / divisor(of_mass(D), eps)), S, z[:, 0]

    def n1(q, k, v, a, x0=None, z0=None, chunk=CHUNK):
        q, k, one = queries(q), keys(k), np.ones_like(k[:, :1])
        X, x = sums(one, one, k * v, a, 1.0, None if x0 is None else x0[None], chunk)
        Z, z = masses(one, one, k, a, 1.0, None if z0 is None else z0[None], chunk)
        return after(q * X / divisor(of_mass(Z), 0.0)), x[0], z[0]

    def n2(q, k, v, a, eps=0.0, S0=None, z0=None, chunk=CHUNK):
        return matrix(q, k, v, a, eps, S0, z0, chunk)

    def n3(q, k, v, a, S0=None, z0=None, chunk=CHUNK):
        q, k, one = queries(q), keys(k), np.ones_like(k[:, :1])
        Z, z = masses(one, one, k, a, 1.0, None if z0 is None else z0[None], chunk)
        O, S = sums(q / divisor(of_mass(Z), 0.0), k, v, a, 1.0, S0, chunk)
        return after(O), S, z[0]

    def undecayed(q, k, v, eps=0.0, S0=None, z0=None, chunk=CHUNK):
        return matrix(q, k, v, np.ones((), q.dtype), eps, S0, z0, chunk)

    return dict(zip(NAMES, (n1, n2, n3, undecayed), strict=True))[name]


def vjp(
    name: str, of_mass: Callable[[Array], Array] = lambda dD: dD, final: float = 1.0, values: float = 1.0,
    change: Callable[..., dict[str, Array]] = lambda grads, *inputs: grads,
) -> Callable[..., Any]:  # fmt: skip
    """`of_mass` changes the cotangent of the masses, `final` is a factor of that of the final mass."""

    def retained(G, R, q, k, v, a, S0, chunk):
        return right.vjp({"O": G, "S": R}, q, k, v, a, 1.0, S0, chunk)

    def n1(cotangents, q, k, v, a, x0=None, z0=None, chunk=CHUNK):
        one, zero = np.ones_like(k[:, :1]), 0 * k[:1].sum(0)
        states = [(zero if s is None else s)[None] for s in (x0, z0)]
        X, Z = (right.chunkwise(one, one, x, a, 1.0, s, chunk)[0] for x, s in zip((k * v, k), states, strict=True))
        dX = cotangents["O"] * q / Z
        d = retained(dX, cotangents["x"][None], one, one, k * v, a, states[0], chunk)
        m = retained(of_mass(-dX * X / Z), final * cotangents["z"][None], one, one, k, a, states[1], chunk)
        grads = {"q": cotangents["O"] * X / Z, "k": d["v"] * v + m["v"], "v": values * d["v"] * k}
        grads |= {"a": d["gamma"] + m["gamma"], "x0": d["S0"][0], "z0": m["S0"][0]}
        return change(grads, cotangents, q, k, v, a)

    def n2(cotangents, q, k, v, a, eps=0.0, S0=None, z0=None, chunk=CHUNK):
        I = (q, k, with_mass(v), a, 1.0, memory(k, v, S0, z0), chunk)
        dU = quotient_vjp(cotangents["O"], right.chunkwise(*I)[0], eps)
        dU = np.concatenate([dU[:, :-1], of_mass(dU[:, -1:])], axis=1)
        d = right.vjp({"O": dU, "S": joined(cotangents["S"], final * cotangents["z"])}, *I)
        grads = {"q": d["q"], "k": d["k"], "v": values * d["v"][:, :-1], "a": d["gamma"]}
        return change(grads | {"S0": d["S0"][:, :-1], "z0": d["S0"][:, -1]}, cotangents, q, k, v, a)

    def n3(cotangents, q, k, v, a, S0=None, z0=None, chunk=CHUNK):
        one, state = np.ones_like(k[:, :1]), 0 * k[:1].sum(0)[None] if z0 is None else z0[None]
        Z = right.chunkwise(one, one, k, a, 1.0, state, chunk)[0]
        d = retained(cotangents["O"], cotangents["S"], q / Z, k, v, a, S0, chunk)
        dq = d["q"] / Z
        m = retained(of_mass(-dq * q / Z), final * cotangents["z"][None], one, one, k, a, state, chunk)
        grads = {"q": dq, "k": d["k"] + m["v"], "v": values * d["v"], "a": d["gamma"] + m["gamma"]}
        return change(grads | {"S0": d["S0"], "z0": m["S0"][0]}, cotangents, q, k, v, a)

    def undecayed(cotangents, q, k, v, eps=0.0, S0=None, z0=None, chunk=CHUNK):
        grads = n2(cotangents, q, k, v, np.ones((), q.dtype), eps, S0, z0, chunk)
        return {n: g for n, g in grads.items() if n != "a"}

    return dict(zip(NAMES, (n1, n2, n3, undecayed), strict=True))[name]


# --- pieces that are wrong by themselves -----------------------------------------------------------------------------


def unmasked(gamma: Array, i: np.ndarray, chunk: int) -> Array:
    return gamma ** np.abs(i[:, None] - i[None, :])


def exclusive(gamma: Array, i: np.ndarray, chunk: int) -> Array:
    return decays(gamma, i) - np.eye(len(i))


def leaking(gamma: Array, i: np.ndarray, chunk: int) -> Array:
    return decays(gamma, i) + LEAK * np.eye(len(i), k=1)


def without_decay() -> Retention:
    return chunkwise(
        mask=lambda g, i, chunk: causal_mask(len(i)) * g**0,
        read=lambda g, i, a: g ** (0 * i),
        write=lambda g, i, chunk: g ** (0 * i),
        carry=lambda g, n, chunk: g**0,
    )


def column_norm(k: Array) -> Array:
    return k / np.sqrt(np.sum(k * k, axis=0, keepdims=True)) if len(k) else k


def pooled(Z: Array) -> Array:
    return Z + 0 * Z if Z.shape[1] == 1 else np.mean(Z, axis=1, keepdims=True) + 0 * Z


def by_length(O: Array) -> Array:
    return O * O.dtype.type(1 + 2.0**-8 * len(O))


def before(grads: dict[str, Array], cotangents: dict[str, Array], q: Array, k: Array, v: Array, a: Array):
    """The gradient of a value also counts what the token before it reads, by 2^-6."""
    early = np.concatenate([0 * grads["v"][:1], cotangents["O"][:-1]])
    return grads | {"v": grads["v"] + OFFSET * early}


# --- tables ----------------------------------------------------------------------------------------------------------

EVERY, MATRIX, DECAYED = NAMES, ("tala.n2", "tala.n3", "linear_attention"), NAMES[:3]
SUMMED, APART = ("tala.n2", "linear_attention"), ("tala.n1", "tala.n3")

# name, what, steps that differ, laws that kill it, and operators
WRONG: tuple[tuple[str, str, dict[str, Any], tuple[str, ...], tuple[str, ...]], ...] = (
    (
        "mass_of_chunk", "a normaliser that counts the rest of its chunk", {"mass": chunkwise(unmasked)},
        ("forward", "causality"), EVERY,
    ),
    (
        "mass_of_others", "a normaliser without the token's own key", {"mass": chunkwise(exclusive)}, ("forward",),
        EVERY,
    ),
    ("undecayed_mass", "masses that do not decay", {"mass": without_decay()}, ("forward",), DECAYED),
    (
        "undecayed_values", "numerators that do not decay", {"numerator": without_decay(), "mass": chunkwise()},
        ("forward",), APART,
    ),
    (
        "undecayed_values", "numerators that do not decay", {"numerator": without_decay(), "mass": chunkwise()},
        ("forward", "hull", "row_sums"), ("tala.n2",),
    ),
    (
        "mass_not_resumed", "the initial mass ignored", {"mass": chunkwise(starts=lambda S, T, chunk: 0 * S)},
        ("forward", "split"), EVERY,
    ),
    (
        "state_not_resumed", "the initial state ignored",
        {"numerator": chunkwise(starts=lambda S, T, chunk: 0 * S), "mass": chunkwise()}, ("forward", "split"), EVERY,
    ),
    (
        "mass_of_last_chunk", "the mass forgotten after every chunk",
        {"mass": chunkwise(kept=lambda S, n, chunk: 0 * S)}, ("forward", "forms"), EVERY,
    ),
    (
        "undecayed_state", "the carried state and mass not decayed",
        {"numerator": chunkwise(carry=lambda g, n, chunk: g**0)}, ("forward", "forms"), DECAYED,
    ),
    (
        "tail_decay", "the short last chunk decayed like a full one",
        {"numerator": chunkwise(
            write=lambda g, i, chunk: g ** (chunk - 1 - i), carry=lambda g, n, chunk: g**chunk
        )}, ("forward", "split"), DECAYED,
    ),
    (
        "eps_per_channel", "epsilon added nine times", {"divisor": lambda D, eps: D + 9 * eps}, ("forward",), SUMMED,
    ),
    ("no_eps", "epsilon dropped", {"divisor": lambda D, eps: D}, ("forward",), SUMMED),
    ("eps_as_floor", "max(D, eps) for D + eps", {"divisor": np.maximum}, ("forward",), SUMMED),
    (
        "constant_eps", "2^-10 added to every normaliser", {"divisor": lambda D, eps: D + 2.0**-10},
        ("forward", "homogeneity"), APART,
    ),
    ("one_mass", "one mass for all key channels", {"of_mass": pooled}, ("forward",), APART),
    (
        "query_normalised", "queries divided by their sum, or by themselves",
        {"queries": lambda q: q / np.sum(q, axis=1, keepdims=True)}, ("forward", "homogeneity"), APART,
    ),
    (
        "column_norm", "keys normalised over the sequence", {"keys": column_norm},
        ("forward", "causality", "future_length"), SUMMED,
    ),
    ("column_norm", "keys normalised over the sequence", {"keys": column_norm}, ("forward",), APART),
    ("leak", "the next key read with weight 1e-6", {"numerator": chunkwise(leaking)}, ("causality",), EVERY),
    (
        "tf32_operands", "operands of dot products rounded to TF32", {"numerator": chunkwise(operand=tf32)},
        ("forward",), EVERY,
    ),
    (
        "bfloat16_mass", "the mass rounded to bfloat16 between chunks",
        {"mass": chunkwise(kept=lambda S, n, chunk: rounded(S))}, ("forward", "forms"), EVERY,
    ),
    (
        "shifted_values", "2^-6 added to the values",
        {"numerator": chunkwise(values=lambda v: v + OFFSET), "mass": chunkwise()}, ("forward", "linearity"), EVERY,
    ),
    (
        "clipped_values", "values clipped to [-2, 2]",
        {"numerator": chunkwise(values=lambda v: np.clip(v, -2, 2)), "mass": chunkwise()},
        ("forward", "linearity", "homogeneity"), EVERY,
    ),
    (
        "by_length", "outputs that grow by 2^-8 for every token", {"after": by_length},
        ("forward", "future_length", "left_padding"), EVERY,
    ),
    (
        "favoured_channels", "key channel c favoured by 2^-6 c",
        {"keys": lambda k: k * (1 + OFFSET * np.arange(k.shape[1], dtype=k.dtype))}, ("forward", "relabelling"), MATRIX,
    ),
)  # fmt: skip

WRONG_GRADIENTS: tuple[tuple[str, str, dict[str, Any], tuple[str, ...], tuple[str, ...]], ...] = (
    ("constant_mass", "the masses taken for constants", {"of_mass": lambda dD: 0 * dD}, ("vjp",), EVERY),
    ("mass_sign", "the sign of the masses' cotangent flipped", {"of_mass": lambda dD: -dD}, ("vjp",), EVERY),
    ("no_final_mass", "the final mass's cotangent dropped", {"final": 0.0}, ("vjp",), EVERY),
    (
        "no_initial_mass", "no gradient for the initial mass",
        {"change": lambda grads, *inputs: grads | {"z0": 0 * grads["z0"]}}, ("vjp",), EVERY,
    ),
    ("half_values", "half the gradient of the values", {"values": 0.5}, ("vjp", "euler"), EVERY),
    (
        "reads_back", "values that get a gradient from the token before", {"change": before},
        ("vjp", "gradient_causality"), MATRIX,
    ),
)  # fmt: skip


def _of_decay_alone(name: str) -> Callable[..., Any]:
    """The gradient of the decay from the numerators, none from the masses."""
    of = {"tala.n1": n1_vjp, "tala.n2": n2_vjp, "tala.n3": n3_vjp}[name]

    def gradients(cotangents, **inputs):
        grads = of(cotangents, **inputs)
        return grads | {"a": vjp(name, of_mass=lambda dD: 0 * dD, final=0.0)(cotangents, **inputs)["a"]}

    return gradients


def _mutants(name: str) -> tuple[Mutant, ...]:
    rows: list[Row] = [(n, w, forward(name, **steps), "", laws) for n, w, steps, laws, to in WRONG if name in to]
    back: list[Row] = [(n, w, vjp(name, **steps), "", laws) for n, w, steps, laws, to in WRONG_GRADIENTS if name in to]
    if name in DECAYED:
        what = "the masses' part of the gradient of the decay dropped"
        back.append(("decay_of_values", what, _of_decay_alone(name), "", ("vjp",)))
    return tabulated(name, rows, back)


MUTANTS = tuple(m for name in NAMES for m in _mutants(name))
