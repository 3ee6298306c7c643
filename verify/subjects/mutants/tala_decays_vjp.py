"""Wrong gradients of TALA with decays that vary, and of gated linear attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mixproof.reference import operator
from mixproof.reference.primitives import Array
from mixproof.verify.subjects.mutants import Mutant, Row, tabulated
from mixproof.verify.subjects.mutants.tala_decays import CHUNK, GATED, Table, rounded

# --- builders --------------------------------------------------------------------------------------------------------


def vjp(
    name: str,
    change: Callable[..., dict[str, Array]] = lambda grads, *rest: grads, state: float = 1.0,
    carried: Callable[[Array], Array] = lambda R: R,
    before: Callable[[Array, int], Array] = lambda S, start: S,
) -> Callable[..., Any]:  # fmt: skip
    """Chunk by chunk backwards with the cotangent R of the state; `before` is the state at the start of a chunk as the
    decays' gradient sees it; `change` gets the gradients, the cotangents, the inputs and the final state."""
    of, a = operator(name), "g" if name in GATED else "a"
    tokens = ("q", "k", "v") if name == "tala.elementwise" else ("q", "k", "v", a)

    def gradients(cotangents, **inputs):
        S = inputs.get("S0")
        S = inputs["k"][:0].T @ inputs["v"][:0] if S is None else S
        R, chunks = state * cotangents["S"], []
        for start in range(0, len(inputs["q"]), CHUNK):
            part = inputs | {n: inputs[n][start : start + CHUNK] for n in tokens} | {"S0": S}
            chunks.append((start, part))
            S = of.evaluate(part)["S"]
        found = {n: [0 * (inputs[n][:0] if n in tokens else inputs[n])] for n in (*tokens, a)}
        for start, part in reversed(chunks):
            upstream = {"O": cotangents["O"][start : start + CHUNK], "S": R}
            grads = of.vjp(upstream, **part)
            grads[a] = of.vjp(upstream, **part | {"S0": before(part["S0"], start)})[a]
            for n, rows in found.items():
                rows.append(grads[n])
            R = carried(grads["S0"])
        joined = {n: np.concatenate(rows[::-1]) if n in tokens else sum(rows) for n, rows in found.items()}
        return change(joined | {"S0": R}, cotangents, inputs, S)

    return gradients


# --- changes --------------------------------------------------------------------------------------------------------


def without_scale(grads, cotangents, inputs, S):
    return grads | {"v": grads["v"] / inputs.get("scale", 1.0)}


def with_state_after(grads, cotangents, inputs, S):
    """R_n * S_n in place of R_n * S_{n-1}: a da, and what token n wrote."""
    n = "g" if "g" in inputs else "a"
    a, da = inputs[n], grads[n]
    wrote = inputs["v"] * grads["v"] if a.shape == inputs["v"].shape else inputs["k"] * grads["k"]
    return grads | {n: (da if n == "g" else a * da) + (np.sum(wrote, axis=1) if a.ndim == 1 else wrote)}


def of_decays(change: Callable[..., Array]) -> Callable[..., dict[str, Array]]:
    """The decays' gradient changed, given it, the decays, the final state against its cotangent, and q dq - k dk."""

    def changed(grads, cotangents, inputs, S):
        n = "g" if "g" in inputs else "a"
        flow, left = inputs["q"] * grads["q"] - inputs["k"] * grads["k"], np.sum(S * cotangents["S"], axis=1)
        if inputs[n].ndim == 1:
            flow, left = np.sum(flow, axis=1), np.sum(left)
        return grads | {n: change(grads[n], inputs[n], left, flow)}

    return changed


# --- tables ----------------------------------------------------------------------------------------------------------


def backward(name: str) -> list[Row]:
    """Whatever the decays are."""
    return [
        (
            "no_state_cotangent", "the cotangent of the final state dropped", vjp(name, state=0), "tala-no-dht",
            ("vjp",),
        ),
        ("value_scale", "no scale on the gradient of the values", vjp(name, without_scale), "tala-dv-scale", ("vjp",)),
        (
            "own_chunk", "the decays' gradient without the state of earlier chunks",
            vjp(name, before=lambda S, start: 0 * S), "", ("vjp",),
        ),
        (
            "no_initial_state", "the decays' gradient without the initial state",
            vjp(name, before=lambda S, start: S if start else 0 * S), "", ("vjp",),
        ),
        (
            "bfloat16_cotangent", "the state's cotangent rounded to bfloat16 between chunks",
            vjp(name, carried=rounded), "tala-dS-bf16", ("vjp",),
        ),
    ]  # fmt: skip


def by_token(name: str) -> list[Row]:
    return [
        (
            "state_after", "the state after each token in the decays' gradient", vjp(name, with_state_after), "",
            ("vjp",),
        ),
        (
            "one_token_early", "the decays' gradient one token early",
            vjp(name, of_decays(lambda da, *rest: np.concatenate([da[1:], 0 * da[:1]]))), "", ("vjp",),
        ),
    ]  # fmt: skip


def signed(name: str) -> list[Row]:
    return [
        (
            "unsigned", "the decays' gradient that of their size",
            vjp(name, of_decays(lambda da, a, *rest: np.sign(a) * da)), "", ("vjp",),
        ),
        (
            "through_logarithm", "the decays' gradient divided by the decays",
            vjp(name, of_decays(lambda da, a, *rest: a * da / a)), "", ("extremes",),
        ),
    ]  # fmt: skip


def logarithmic(name: str) -> list[Row]:
    def later(x: Array) -> Array:
        return np.cumsum(x[::-1], axis=0)[::-1]

    return [
        (
            "no_final_state", "<S, dS> missing from the log-decays' gradient",
            vjp(name, of_decays(lambda dg, g, left, flow: dg - left)), "tala-dg-nofinal", ("vjp",),
        ),
        (
            "exclusive_sum", "later tokens alone in the log-decays' gradient",
            vjp(name, of_decays(lambda dg, g, left, flow: dg - flow)), "", ("vjp",),
        ),
        (
            "sum_of_earlier", "earlier tokens, not later ones, in the log-decays' gradient",
            vjp(name, of_decays(lambda dg, g, left, flow: dg - later(flow) + np.cumsum(flow, axis=0))), "",
            ("vjp", "gradient_causality"),
        ),
        (
            "of_decay", "the gradient of the decays for that of their logarithms",
            vjp(name, of_decays(lambda dg, g, *rest: dg * np.exp(-g))), "", ("vjp",),
        ),
    ]  # fmt: skip


TABLES: dict[str, tuple[Table, ...]] = {
    "tala.time_varying": (backward, by_token, signed),
    "tala.key_channel": (backward, by_token, signed),
    "tala.value_channel": (backward, by_token, signed),
    "tala.elementwise": (backward, signed),
    "gated_linear_attention.simple": (backward, by_token, logarithmic),
    "gated_linear_attention": (backward, by_token, logarithmic),
}
MUTANTS: tuple[Mutant, ...] = tuple(
    mutant
    for name, tables in TABLES.items()
    for mutant in tabulated(name, (), [row for table in tables for row in table(name)])
)
