"""Wrong short convolutions: a stale cache, and gradients of short calls and of the activation.

The letters are those of reference/mamba_block.py; other mutants of the blocks are in mamba_block.py and ccgqa.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mixproof.reference import mamba_block as right
from mixproof.reference import operator as find_operator
from mixproof.reference.mamba import EULER
from mixproof.reference.primitives import Array, sigmoid, silu, softplus
from mixproof.reference.spec import Operator
from mixproof.verify.subjects.mutants import Mutant
from mixproof.verify.subjects.mutants.calling import Run, anew, honest, of_cotangents

CHUNK = 8
WEIGHTS = ("W_in", "W_z", "w_conv", "b_conv", "W_down", "W_dt", "b_dt", "W_B", "W_C", "A_log", "skip", "W_out")
Gradients = dict[str, Array]


@anew
def stale_cache(operator: Operator) -> Run:
    """Where no state is given, the rows that the last call of that shape left are taken for it."""
    right, left = honest(operator), {}
    run = of_cotangents(operator, dict)

    def cached(**inputs: Any) -> Any:
        if inputs.get("q0") is not None:
            return right(**inputs)
        shape = tuple(np.shape(x) for x in inputs.values())
        k, v = inputs["k"], inputs["v"]
        empty = {"K0": k[:, :, :0], "V0": v[:, :, :0]}
        result = right(**inputs | left[shape] | empty) if shape in left else right(**inputs)
        left[shape] = dict(zip(("q0", "k0", "v0"), (x.copy() for x in result[1:4]), strict=True))
        return result

    cached.vjp = run.vjp  # type: ignore[attr-defined]
    return cached


def slope(V: Array) -> Array:
    return sigmoid(V) + silu(V) * sigmoid(-V)


def late_rows(cotangent: Array, T: int) -> Array:
    """The cotangents of the rows that are handed on, as far as they are tokens of the call."""
    return cotangent[max(len(cotangent) - T, 0) :]


def first_rows(cotangent: Array, T: int) -> Array:
    """The index of the first row clamped at zero: a short call gets the cotangents of older rows."""
    return cotangent[: min(len(cotangent), T)]


def through(
    cotangents: Gradients, x: Array, w: Gradients, u0: Array, h0: Array, chunk: int,
    slope: Callable[[Array], Array] = slope, given: Callable[[Array, int], Array] = late_rows,
) -> Gradients:  # fmt: skip
    """What comes back through the convolution: all of its own gradients, a part of those of x and W_in."""
    rows, T = w["w_conv"].shape[1] - 1, len(x)
    taps = np.concatenate([0 * w["w_conv"].T[1:] if u0 is None else u0, x @ w["W_in"]])
    V = w["b_conv"] + sum(w["w_conv"][:, j] * taps[j : j + T] for j in range(rows + 1))
    S = silu(V)
    s = S @ w["W_down"] @ w["W_dt"] + w["b_dt"]
    system = S, softplus(s), -np.exp(w["A_log"]), S @ w["W_B"], S @ w["W_C"], w["skip"], h0
    dy = cotangents["Y"] @ w["W_out"].T * silu(x @ w["W_z"])
    inner = EULER.vjp({"y": dy, "h": cotangents["h"]}, *system, chunk=chunk)
    ds = inner["delta"] * sigmoid(s)
    dS = inner["u"] + ds @ w["W_dt"].T @ w["W_down"].T + inner["B"] @ w["W_B"].T + inner["C"] @ w["W_C"].T
    dV, dtaps = dS * slope(V), 0 * taps
    for j in range(rows + 1):
        dtaps[j : j + T] += dV * w["w_conv"][:, j]
    part = given(cotangents["u"], T)
    dtaps[len(taps) - len(part) :] += part
    dU = dtaps[rows:]
    dw = np.stack([np.sum(dV * taps[j : j + T], axis=0) for j in range(rows + 1)], axis=1)
    own = {"w_conv": dw, "b_conv": np.sum(dV, axis=0), "u0": dtaps[:rows]}
    return own | {"x": dU @ w["W_in"].T, "W_in": x.T @ dU}


def backward(**mistakes: Callable[..., Array]) -> Callable[..., Gradients]:
    """The right gradients, less what rightly comes back through the convolution, and what wrongly does."""

    def gradients(cotangents: Gradients, x: Array, u0: Array = None, h0: Array = None, chunk: int = CHUNK, **w: Array):
        d = right.vjp(cotangents, x, **w, u0=u0, h0=h0, chunk=chunk)
        wrong, part = (through(cotangents, x, w, u0, h0, chunk, **changes) for changes in (mistakes, {}))
        return d | {n: d[n] + (wrong[n] - part[n]) for n in wrong}

    return gradients


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "stale_cache", "ccgqa", "the rows that the last call left, where no state is given", ("causality",),
        batched=stale_cache(find_operator("ccgqa")), source="conv-has-initial",
    ),
    Mutant(
        "vjp.clamped_start", "mamba.block", "the cotangents of older rows given to the tokens of a short call",
        ("vjp",), vjp=backward(given=first_rows), source="conv-dfs-clamp",
    ),
    Mutant(
        "vjp.slope_after", "mamba.block", "the slope of silu taken at silu(V)", ("vjp",),
        vjp=backward(slope=lambda V: slope(silu(V))), source="conv-silu-post",
    ),
)  # fmt: skip
