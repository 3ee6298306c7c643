"""Wrong ODE Transformer blocks: forward, then gradients.

The letters are those of reference/ode_transformer.py and runge_kutta.py; `branch` is the block F with its steps as
arguments, `through` a method that takes it as a form, `back` the gradients of a method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from mixproof.reference import softmax_attention
from mixproof.reference.ode_transformer import channels, field, linearised
from mixproof.reference.primitives import Array, group_norm, sigmoid
from mixproof.reference.runge_kutta import (
    CLASSICAL,
    EULER,
    HEUN,
    KUTTA,
    Slope,
    combined,
    combined_vjp,
    learned_vjp,
    rk1,
    rk2,
    rk4,
    stages,
)
from mixproof.verify.subjects.mutants import tabulated
from mixproof.verify.subjects.mutants.mixformer import interleaved
from mixproof.verify.subjects.mutants.multi_scale_retention import eps_outside, pooled, root_mean_square

Step = Callable[[Array, Array], Array]

LEARNED = ("gamma1", "gamma2")
GATED = ("W_g", "b_g")
HALF_STEPS = (*CLASSICAL.a[:3], (Fraction(0), Fraction(0), Fraction(1, 2)))

# --- builders --------------------------------------------------------------------------------------------------------


def through(method: Callable[..., Array], *extra: str, F: Callable[..., Array] = field) -> Callable[..., Array]:
    """-> Y. `extra` names the parameters that the method takes itself."""

    def forward(X, heads=2, eps=1e-5, **parameters):
        weights = [parameters.pop(n) for n in extra]
        return method(lambda Z: F(Z, heads=heads, eps=eps, **parameters), X, *weights)

    return forward


def branch(
    norm: Callable[[Array, float], Array] = group_norm,
    scale: Callable[[int, int], float] = lambda E, heads: (E / heads) ** -0.5, causal: bool = False,
    heads_of: Callable[[int, int], list[Any]] = channels, seen: Step = lambda X, S: X + S,
    given: Step = lambda S, U: S + U, hidden: Callable[[Array], Array] = lambda H: np.maximum(H, 0), bias: float = 1.0,
) -> Callable[..., Array]:  # fmt: skip
    """-> F(X). `seen` is what the second norm takes, `given` the result, from U of the network."""

    def F(X, gain1, bias1, gain2, bias2, W_Q, W_K, W_V, W_O, W_1, b_1, W_2, b_2, heads=2, eps=1e-5):
        N, E = norm(X, eps) * gain1 + bias1, X.shape[1]
        Q, K, V = N @ W_Q, N @ W_K, N @ W_V
        A = 0 * V
        for c in heads_of(E, heads):
            A[:, c] = softmax_attention.parallel(Q[:, c], K[:, c], V[:, c], scale(E, heads), causal)
        S = A @ W_O
        N = norm(seen(X, S), eps) * gain2 + bias2
        return given(S, hidden(N @ W_1 + b_1) @ W_2 + bias * b_2)

    return F


def plain(b: Sequence[Fraction]) -> Callable[..., Any]:
    return lambda dY, slopes: (combined_vjp(b, dY), {})


def back(
    a: Sequence[Sequence[Fraction]], weigh: Callable[..., Any], *extra: str, coupled: float = 1.0,
    residual: float = 1.0, first: int = 0, shared: bool = True,
) -> Callable[..., Any]:  # fmt: skip
    """`coupled` is a factor of what reaches earlier slopes through later stages, `residual` of the cotangent that the
    block passes on; stages before `first` are left out; parameters that are not `shared` learn from the last alone."""

    def gradients(cotangents, X, heads=2, eps=1e-5, **parameters):
        weights, backs = [parameters.pop(n) for n in extra], []

        def F(Z):
            slope, pull = linearised(Z, heads=heads, eps=eps, **parameters)
            backs.append(pull)
            return slope

        dY = cotangents["Y"]
        dF, grads = weigh(dY, stages(a, F, X), *weights)
        total = {"X": residual * dY}
        for i in reversed(range(first, len(backs))):
            d = backs[i](dF[i])
            for j, c in enumerate(a[i]):
                dF[j] = dF[j] + coupled * combined(0 * dY, (c,), (d["X"],))
            kept = d if shared or i == len(backs) - 1 else {"X": d["X"]}
            total |= {n: total[n] + g if n in total else g for n, g in kept.items()}
        return total | grads

    return gradients


# --- methods that are wrong by themselves ----------------------------------------------------------------------------


def of_layer(method: Callable[..., Array]) -> Callable[..., Array]:
    return lambda F, y, *weights: method(lambda Z: Z + F(Z), y, *weights)


def layer_twice(F: Slope, y: Array) -> Array:
    return rk1(F, rk1(F, y))


def midpoint(F: Slope, y: Array) -> Array:
    return y + F(y + F(y) / 2)


def released_rk3(F: Slope, y: Array) -> Array:
    F1 = F(y)
    F2 = F(y + F1 / 2)
    return y + (F1 + 4 * F2 + F(y - F2 + 2 * F2)) / 6


def heun_rk3(F: Slope, y: Array) -> Array:
    F1 = F(y)
    F2 = F(y + F1 / 3)
    return y + (F1 + 3 * F(y + 2 * F2 / 3)) / 4


def weighted(a: Sequence[Sequence[Fraction]], *b: float) -> Callable[..., Array]:
    return lambda F, y: combined(y, b, stages(a, F, y))


def three_eighths(F: Slope, y: Array) -> Array:
    F1 = F(y)
    F2 = F(y + F1 / 3)
    F3 = F(y - F1 / 3 + F2)
    F4 = F(y + F1 - F2 + F3)
    return y + (F1 + 3 * F2 + 3 * F3 + F4) / 8


def running(F: Slope, y: Array) -> Array:
    F1 = F(y)
    F2 = F(y + F1 / 2)
    F3 = F(y + F1 / 2 + F2 / 2)
    F4 = F(y + F1 / 2 + F2 / 2 + F3)
    return y + (F1 + 2 * F2 + 2 * F3 + F4) / 6


def learned(
    mixed: Callable[..., Array], at: Callable[[Array, Array], Array] = lambda gamma1, F1: F1
) -> Callable[..., Array]:
    def method(F: Slope, y: Array, gamma1: Array, gamma2: Array) -> Array:
        F1 = F(y)
        return y + mixed(F1, F(y + at(gamma1, F1)), gamma1, gamma2)

    return method


def gated(
    of: Callable[[Array, Array, Array], list[Array]] = lambda y, F1, F2: [F1, F2],
    squash: Callable[[Array], Array] = sigmoid, swap: bool = False, bias: float = 1.0,
) -> Callable[..., Array]:  # fmt: skip
    def method(F: Slope, y: Array, W_g: Array, b_g: Array) -> Array:
        F1 = F(y)
        F2 = F(y + F1)
        g = squash(np.concatenate(of(y, F1, F2), axis=1) @ W_g + bias * b_g)
        return y + ((1 - g) * F1 + g * F2 if swap else g * F1 + (1 - g) * F2)

    return method


def token_mean(u: Array) -> Array:
    return sigmoid(0 * u + np.sum(u, axis=0) / max(1, len(u)))


def gate_vjp(slope: Callable[[Array], Array] = lambda g: g * (1 - g), read: float = 1.0) -> Callable[..., Any]:
    """`read` is a factor of what goes back to the slopes because the gate reads them."""

    def weigh(dY: Array, slopes: Sequence[Array], W_g: Array, b_g: Array) -> tuple[list[Array], dict[str, Array]]:
        F = np.concatenate(slopes, axis=1)
        g = sigmoid(F @ W_g + b_g)
        du = np.sum((slopes[0] - slopes[1]) * dY, axis=1, keepdims=True) * slope(g)
        d1, d2 = np.split(read * du @ W_g.T, 2, axis=1)
        return [g * dY + d1, (1 - g) * dY + d2], {"W_g": F.T @ du, "b_g": np.sum(du)}

    return weigh


# --- tables ----------------------------------------------------------------------------------------------------------

Wrong = tuple[str, str, Callable[..., Any]]

FORWARD: dict[str, tuple[Wrong, ...]] = {
    "rk1": (
        ("parallel", "attention and network side by side", through(rk1, F=branch(seen=lambda X, S: X))),
        ("no_inner_residual", "no residual before the second norm", through(rk1, F=branch(seen=lambda X, S: S))),
        ("network_alone", "a block that gives what its network gives", through(rk1, F=branch(given=lambda S, U: U))),
        ("causal", "a causal mask", through(rk1, F=branch(causal=True))),
        ("scale_of_all", "logits scaled by all channels", through(rk1, F=branch(scale=lambda E, heads: E**-0.5))),
        ("interleaved", "heads of every second channel", through(rk1, F=branch(heads_of=interleaved))),
        ("norm_of_all", "one norm for all tokens", through(rk1, F=branch(norm=pooled))),
        ("eps_outside", "eps added to the standard deviation", through(rk1, F=branch(norm=eps_outside))),
        ("root_mean_square", "norms that keep the mean", through(rk1, F=branch(norm=root_mean_square))),
        ("no_rectifier", "no rectifier", through(rk1, F=branch(hidden=lambda H: H))),
        ("no_bias", "the last bias dropped", through(rk1, F=branch(bias=0.0))),
    ),
    "rk2": (
        ("released", "the whole layer, residual included, for its branch", through(of_layer(rk2))),
        ("midpoint", "the midpoint rule, of the same order", through(midpoint)),
        ("layer_twice", "the layer applied twice", through(layer_twice)),
        ("sum", "the sum of both slopes, not their mean", through(weighted(HEUN.a, 1, 1))),
    ),
    "rk2_learned": (
        ("swapped", "its weights swapped", through(learned(lambda F1, F2, a, b: b * F1 + a * F2), *LEARNED)),
        ("one_weight", "one weight for both slopes", through(learned(lambda F1, F2, a, b: a * (F1 + F2)), *LEARNED)),
        ("halved", "weights of the mean", through(learned(lambda F1, F2, a, b: (a * F1 + b * F2) / 2), *LEARNED)),
        (
            "weighed_stage",
            "the first slope's weight in the second's argument too",
            through(learned(lambda F1, F2, a, b: a * F1 + b * F2, lambda a, F1: a * F1), *LEARNED),
        ),
    ),
    "rk2_gated": (
        ("swapped", "the gate on the other slope", through(gated(swap=True), *GATED)),
        ("reversed", "a gate that reads the slopes in reverse", through(gated(lambda y, A, B: [B, A]), *GATED)),
        ("of_tokens", "a gate that reads the tokens", through(gated(lambda y, A, B: [y, A]), *GATED)),
        ("token_mean", "one gate for all tokens", through(gated(squash=token_mean), *GATED)),
        ("no_bias", "a gate without bias", through(gated(bias=0.0), *GATED)),
    ),
    "rk3": (
        ("released", "its third slope at X + F_2, which is of order 2", through(released_rk3)),
        ("heun", "Heun's method of the same order", through(heun_rk3)),
        ("equal", "equal weights", through(weighted(KUTTA.a, *[1 / 3] * 3))),
    ),
    "rk4": (
        ("released", "the whole layer, residual included, for its branch", through(of_layer(rk4))),
        ("three_eighths", "the 3/8 rule, of the same order", through(three_eighths)),
        ("running", "stages that start where the last one did", through(running)),
        ("equal", "equal weights", through(weighted(CLASSICAL.a, *[1 / 4] * 4))),
        ("half_steps", "its last slope at a half step", through(weighted(HALF_STEPS, 1 / 6, 1 / 3, 1 / 3, 1 / 6))),
    ),
}

BACKWARD: dict[str, tuple[Wrong, ...]] = {
    "rk1": (("no_residual", "nothing back through the residual", back(EULER.a, plain(EULER.b), residual=0.0)),),
    "rk2": (
        ("uncoupled", "the second slope's argument held constant", back(HEUN.a, plain(HEUN.b), coupled=0.0)),
        ("last_stage", "parameters that learn from the last stage", back(HEUN.a, plain(HEUN.b), shared=False)),
    ),
    "rk2_learned": (
        ("uncoupled", "the second slope's argument held constant", back(HEUN.a, learned_vjp, *LEARNED, coupled=0.0)),
    ),
    "rk2_gated": (
        ("constant_gate", "the gate taken for a constant", back(HEUN.a, gate_vjp(read=0.0), *GATED)),
        ("no_slope", "the gate's slope taken for one", back(HEUN.a, gate_vjp(lambda g: g**0), *GATED)),
    ),
    "rk3": (("no_first", "nothing back through the first stage", back(KUTTA.a, plain(KUTTA.b), first=1)),),
    "rk4": (("uncoupled", "every slope's argument held constant", back(CLASSICAL.a, plain(CLASSICAL.b), coupled=0.0)),),
}

MUTANTS = tuple(
    m
    for name, wrong in FORWARD.items()
    for m in tabulated(
        f"ode_transformer.{name}",
        [(n, what, f, "", ("forward",)) for n, what, f in wrong],
        [(n, what, f, "", ("vjp",)) for n, what, f in BACKWARD[name]],
    )
)
