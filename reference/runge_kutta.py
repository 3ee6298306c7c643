"""Runge-Kutta steps of width one through the block F: the ODE Transformer's RK1, RK2, RK3 and RK4.

Source: survey, section "ODE Transformer"; Li et al. 2022. One set of parameters for all evaluations of F.

    Z_i = y + sum_{j < i} a_ij F_j,  F_i = F(Z_i),  Y = y + sum_i b_i F_i

Published coefficients have order 1, 2 (Heun), 3 (Kutta) and 4. Learned ones start at gamma = (1, 1), which has order 0;
gated ones, g and 1 - g, have order 1 unless g = 1/2. The released code's RK3 takes F_3 at y + F_2, which has order 2;
Kutta's is meant here. F is any function of y, so that the same lines integrate a test equation.

    letter     paper      shape     meaning
    X Y        y_t y_t+1  (T, E)    tokens before and after the block; in a step of any slope, y before
    F_i Z_i    F_i        (T, E)    slopes, and where they are taken
    gamma1, 2  gamma      ()        learned weights of F_1 and F_2
    W_g b_g    W b        (2E, 1)   gate, one for all channels of a token
    g          g          (T, 1)    sigmoid([F_1, F_2] W_g + b_g)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from inspect import Parameter, Signature
from typing import Any, NamedTuple

import numpy as np

from .ode_transformer import PARAMETERS, SCALARS, TOKENS, field, linearised
from .primitives import Array, sigmoid, stored
from .spec import Form, Input, Operator, Output, check_cotangents, check_shapes

Slope = Callable[[Any], Any]


class Tableau(NamedTuple):
    """Butcher's coefficients of an explicit method: row i of `a` has those of the slopes before F_i."""

    a: tuple[tuple[Fraction, ...], ...]
    b: tuple[Any, ...]


def _fractions(*values: str) -> tuple[Fraction, ...]:
    return tuple(map(Fraction, values))


EULER = Tableau(((),), _fractions("1"))
HEUN = Tableau(((), _fractions("1")), _fractions("1/2", "1/2"))
KUTTA = Tableau(((), _fractions("1/2"), _fractions("-1", "2")), _fractions("1/6", "2/3", "1/6"))
CLASSICAL = Tableau(
    ((), _fractions("1/2"), _fractions("0", "1/2"), _fractions("0", "0", "1")),
    _fractions("1/6", "1/3", "1/3", "1/6"),
)


# --- steps of any slope -----------------------------------------------------------------------------------------------


def rk1(F: Slope, y: Any) -> Any:
    """Euler: y + F(y), the residual layer."""
    return y + F(y)


def rk2(F: Slope, y: Any) -> Any:
    """Heun: y + (F_1 + F_2) / 2."""
    F1 = F(y)
    F2 = F(y + F1)
    return y + (F1 + F2) / 2


def rk2_learned(F: Slope, y: Any, gamma1: Any, gamma2: Any) -> Any:
    """y + gamma_1 F_1 + gamma_2 F_2."""
    F1 = F(y)
    F2 = F(y + F1)
    return y + gamma1 * F1 + gamma2 * F2


def rk2_gated(F: Slope, y: Array, W_g: Array, b_g: Array) -> Array:
    """y + g F_1 + (1 - g) F_2 with a gate g for each token."""
    F1 = F(y)
    F2 = F(y + F1)
    g = gate(F1, F2, W_g, b_g)
    return y + g * F1 + (1 - g) * F2


def rk3(F: Slope, y: Any) -> Any:
    """Kutta: y + (F_1 + 4 F_2 + F_3) / 6."""
    F1 = F(y)
    F2 = F(y + F1 / 2)
    F3 = F(y - F1 + 2 * F2)
    return y + (F1 + 4 * F2 + F3) / 6


def rk4(F: Slope, y: Any) -> Any:
    """y + (F_1 + 2 F_2 + 2 F_3 + F_4) / 6."""
    F1 = F(y)
    F2 = F(y + F1 / 2)
    F3 = F(y + F2 / 2)
    F4 = F(y + F3)
    return y + (F1 + 2 * F2 + 2 * F3 + F4) / 6


def step(method: Tableau, F: Slope, y: Any) -> Any:
    """One step of any explicit method."""
    return combined(y, method.b, stages(method.a, F, y))


def learned_step(F: Slope, y: Any, gamma1: Any, gamma2: Any) -> Any:
    """`rk2_learned` by the tableau of Heun with the learned weights."""
    return step(Tableau(HEUN.a, (gamma1, gamma2)), F, y)


def gated_step(F: Slope, y: Array, W_g: Array, b_g: Array) -> Array:
    """`rk2_gated` by the tableau of Heun with the gate's weights."""
    F1, F2 = stages(HEUN.a, F, y)
    g = gate(F1, F2, W_g, b_g)
    return combined(y, (g, 1 - g), (F1, F2))


def stages(a: Sequence[Sequence[Any]], F: Slope, y: Any) -> list[Any]:
    """The slopes F_i = F(Z_i)."""
    slopes: list[Any] = []
    for row in a:
        slopes.append(F(combined(y, row, slopes)))
    return slopes


def combined(y: Any, coefficients: Sequence[Any], slopes: Sequence[Any]) -> Any:
    """y + sum_i c_i F_i; a fraction multiplies and divides, so that no coefficient is rounded."""
    for c, F in zip(coefficients, slopes, strict=True):
        if not isinstance(c, Fraction):
            y = y + c * F
        elif c:
            y = y + F * c.numerator / c.denominator
    return y


def gate(F1: Array, F2: Array, W_g: Array, b_g: Array) -> Array:
    """g = sigmoid([F_1, F_2] W_g + b_g).  (T, E), (T, E) -> (T, 1)"""
    return sigmoid(np.concatenate([F1, F2], axis=1) @ W_g + b_g)


def combined_vjp(coefficients: Sequence[Fraction], dY: Array) -> list[Array]:
    """Cotangents of the slopes in `combined`."""
    return [dY * c.numerator / c.denominator for c in coefficients]


def learned_vjp(
    dY: Array, slopes: Sequence[Array], gamma1: Array, gamma2: Array
) -> tuple[list[Array], dict[str, Array]]:
    """Cotangents of the slopes, and of their weights."""
    return [gamma1 * dY, gamma2 * dY], {f"gamma{i + 1}": np.sum(F * dY) for i, F in enumerate(slopes)}


def gated_vjp(dY: Array, slopes: Sequence[Array], W_g: Array, b_g: Array) -> tuple[list[Array], dict[str, Array]]:
    """Cotangents of the slopes, which are weighed and decide on the weights, and of the gate's parameters."""
    F1, F2 = slopes
    g, E = gate(F1, F2, W_g, b_g), dY.shape[1]
    dg = np.sum(F1 * dY, axis=1, keepdims=True) - np.sum(F2 * dY, axis=1, keepdims=True)
    du = dg * g * (1 - g)
    back = du @ W_g.T
    grads = {"W_g": np.concatenate([F1, F2], axis=1).T @ du, "b_g": np.sum(du)}
    return [g * dY + back[:, :E], (1 - g) * dY + back[:, E:]], grads


# --- the operators ----------------------------------------------------------------------------------------------------


def _operator(
    name: str,
    summary: str,
    nested: Callable[..., Array],
    tableau: Callable[..., Array],
    a: Sequence[Sequence[Fraction]],
    weigh: Callable[..., tuple[list[Array], dict[str, Array]]],
    weights: tuple[Input, ...] = (),
) -> Operator:
    """A method as an operator. `nested` and `tableau` take a slope, tokens and what `weights` names; `weigh` takes the
    cotangent of Y, slopes and weights, and gives cotangents of the slopes and of the weights."""
    inputs = (TOKENS, *PARAMETERS, *weights, *SCALARS)
    extra = [x.name for x in weights]

    def parts(given: dict[str, Any]) -> tuple[Array, dict[str, Any], list[Array]]:
        """Tokens, what `linearised` takes beside them, and what the method does."""
        block = {n: x for n, x in given.items() if n not in ("X", *extra)}
        return given["X"], block, [given[n] for n in extra]

    def form(method: Callable[..., Array]) -> Callable[..., Array]:
        def forward(given: dict[str, Any]) -> Array:
            check_shapes(operator, given)
            X, block, own = parts(given)

            def F(Z: Array) -> Array:
                return field(stored(Z), **block)

            return method(F, X, *own)

        return _taking(inputs, forward)

    def vjp(given: dict[str, Any]) -> dict[str, Array]:
        cotangents = given.pop("cotangents")
        check_cotangents(operator, cotangents, given)
        X, block, own = parts(given)
        backs = []

        def F(Z: Array) -> Array:
            slope, back = linearised(stored(Z), **block)
            backs.append(back)
            return slope

        dF, grads = weigh(cotangents["Y"], stages(a, F, X), *own)
        return _stages_vjp(a, backs, cotangents["Y"], dF) | grads

    operator = Operator(
        name=f"ode_transformer.{name}",
        summary=summary,
        source="survey, ODE Transformer; Li et al. 2022",
        inputs=inputs,
        outputs=(Output("Y", ("T", "E")),),
        forms=(Form("nested", form(nested)), Form("tableau", form(tableau))),
        vjp=_taking((Input("cotangents", (), "parameter", ""), *inputs), vjp),
        causal=False,
        laws=(),
        cost="quadratic",
        multiple_of={"E": 4},  # two heads of at least two channels
        derived={"2E": lambda n, x: 2 * n["E"], "1": lambda n, x: 1},
    )
    return operator


def _taking(inputs: tuple[Input, ...], function: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """A function of a dict as one of the arguments `inputs`, scalars with their defaults."""
    signature = Signature(
        [
            Parameter(x.name, Parameter.POSITIONAL_OR_KEYWORD, default=x.default if x.optional else Parameter.empty)
            for x in inputs
        ]
    )

    def public(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return function(dict(bound.arguments))

    public.__signature__ = signature  # type: ignore[attr-defined]
    return public


def _stages_vjp(
    a: Sequence[Sequence[Fraction]], backs: Sequence[Callable[[Array], dict[str, Array]]], dY: Array, dF: list[Array]
) -> dict[str, Array]:
    """Back through the evaluations of F, the last first: what reaches Z_i goes to y and to the slopes before F_i."""
    totals = {"X": dY}
    for i, back in reversed(list(enumerate(backs))):
        grads = back(stored(dF[i]))
        dF[:i] = [combined(d, (c,), (grads["X"],)) for d, c in zip(dF, a[i], strict=False)]
        totals = {n: totals[n] + g if n in totals else g for n, g in grads.items()}
    return totals


def _plain(name: str, summary: str, nested: Callable[..., Array], method: Tableau) -> Operator:
    def weigh(dY: Array, slopes: Sequence[Array]) -> tuple[list[Array], dict[str, Array]]:
        return combined_vjp(method.b, dY), {}

    return _operator(name, summary, nested, partial(step, method), method.a, weigh)


RK1 = _plain("rk1", "Y = X + F(X), F a pre-norm block of attention and a feed-forward network", rk1, EULER)
RK2 = _plain("rk2", "Y = X + (F_1 + F_2) / 2, F_2 = F(X + F_1)", rk2, HEUN)
RK3 = _plain("rk3", "Kutta's third order: Y = X + (F_1 + 4 F_2 + F_3) / 6", rk3, KUTTA)
RK4 = _plain("rk4", "the classical fourth order: Y = X + (F_1 + 2 F_2 + 2 F_3 + F_4) / 6", rk4, CLASSICAL)
RK2_LEARNED = _operator(
    "rk2_learned",
    "Y = X + gamma_1 F_1 + gamma_2 F_2, F_2 = F(X + F_1)",
    rk2_learned,
    learned_step,
    HEUN.a,
    learned_vjp,
    (Input("gamma1", (), "parameter", "gain"), Input("gamma2", (), "parameter", "gain")),
)
RK2_GATED = _operator(
    "rk2_gated",
    "Y = X + g F_1 + (1 - g) F_2, F_2 = F(X + F_1), g = sigmoid([F_1, F_2] W_g + b_g)",
    rk2_gated,
    gated_step,
    HEUN.a,
    gated_vjp,
    (Input("W_g", ("2E", "1"), "parameter", "weight"), Input("b_g", (), "parameter", "logit_bias")),
)
