"""Claims of the survey, sections 4 and 5: Mamba and the ODE Transformer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from mixproof.reference import cost_survey, mamba, mamba_lti, runge_kutta
from mixproof.reference.primitives import softplus
from mixproof.reference.spec import Operator
from mixproof.verify.claims import Finding, claim, conditional, holds, proved, unchecked
from mixproof.verify.claims.evidence import apart, draw, same

# --- 4. Mamba --------------------------------------------------------------------------------------------------------


@claim(
    "survey.M1",
    "Zero-order hold gives A bar = exp(Delta A) and B bar = (Delta A)^-1 (exp(Delta A) - I) Delta B",
    source="4.1, third equation",
    verdict="holds only if",
    evidence="symbolic proof",
    why="the input is held over the step and Delta A can be inverted; elsewhere B bar is the limit, Delta B at A = 0",
)
def zero_order_hold() -> Finding:
    import sympy

    A, B, D, h, x, t = sympy.symbols("A B Delta h x t", nonzero=True)
    printed = (sympy.exp(D * A) - 1) / (D * A) * D * B
    state = (sympy.exp(A * t)) * h + (sympy.exp(A * t) - 1) / A * B * x
    solves = sympy.simplify(sympy.diff(state, t) - A * state - B * x) == 0 and state.subs(t, 0) == h
    stepped = sympy.simplify(state.subs(t, D) - sympy.exp(D * A) * h - printed * x) == 0
    return conditional(
        solves and stepped,
        printed.subs(A, 0).is_finite is True,
        f"h' = A h + B x from h, solved and read at Delta, is the printed step; at A = 0 that is {printed.subs(A, 0)},"
        f" its limit {sympy.limit(printed, A, 0)}",
    )


@claim(
    "survey.M2",
    "As Delta goes to 0, A bar goes to I and B bar to 0",
    source="4.1",
    verdict="proved",
    evidence="symbolic proof",
)
def small_steps() -> Finding:
    import sympy

    A, B, D = sympy.symbols("A B Delta", nonzero=True)
    held = (sympy.exp(D * A) - 1) / A * B
    limits = sympy.limit(sympy.exp(D * A), D, 0), sympy.limit(held, D, 0)
    return proved(limits == (1, 0), f"limits {limits}; B bar = {sympy.series(held, D, 0, 3).removeO()} to second order")


@claim(
    "survey.M3",
    "A small enough Delta preserves the state perfectly",
    source="4.1; 17, 15.3",
    verdict="refuted",
    evidence="certified interval",
    why="Delta is a softplus, positive for every input: at s = -20, A = -1 a step loses 2e-9 of the state, and 10^9"
    " steps leave 13% of it. In float32 the factor does round to 1",
)
def preserved() -> Finding:
    from mixproof.verify.numbers.certified import enclose

    step = enclose(softplus, {"w": np.array(-20.0)})
    least, most = float(step.midpoint - step.radius), float(step.midpoint + step.radius)
    return holds(
        least <= 0,
        f"softplus(-20) = {most:.4e}, proved above zero; {math.exp(-least * 1e9):.3f} are left after 10^9 steps;"
        f" exp(-Delta) in float32 is {np.exp(np.float32(-most)):g}",
    )


@claim(
    "survey.M4",
    "A large Delta refreshes the state completely: what remains is the new input",
    source="4.1",
    verdict="holds only if",
    evidence="evaluation",
    why="B bar is that of zero-order hold. With the released code's Delta B, the input enters Delta-fold: 100 at"
    " Delta = 100",
)
def refreshed() -> Finding:
    after = {}
    for name, operator in (("zoh", mamba.ZOH), ("euler", mamba.EULER)):
        one = np.ones((1, 1))
        after[name] = _run(operator, u=one, delta=100 * one, A=-one, B=one, C=one, h0=7 * one)[1].item()
    return conditional(
        same(after["zoh"], 1.0),
        same(after["euler"], 1.0),
        f"Delta = 100, A = -1, B = u = 1, from h = 7: h = {after['zoh']:g} held, {after['euler']:g} as released",
    )


def _run(operator: Operator, **inputs: Any) -> Any:
    """(y, h) by the record form, with no skip."""
    return operator.forms[0].function(skip=np.zeros(inputs["u"].shape[1]), **inputs)


@claim(
    "survey.M5",
    "The printed update is the one of Mamba",
    source="4.1, third equation",
    verdict="refuted",
    evidence="evaluation",
    why="Delta = 1, A = -1, B = u = 1, h = 0: printed 0.632, by the released code's B bar = Delta B it is 1",
)
def printed_update() -> Finding:
    one = np.ones((1, 1))
    h = [_run(m, u=one, delta=one, A=-one, B=one, C=one)[1].item() for m in (mamba.ZOH, mamba.EULER)]
    inputs = draw(mamba.ZOH, T=6, D=2, N=3) | {"A": -np.ones((2, 3))}
    gaps = []
    for step in (1.0, 0.1, 0.01):
        inputs["delta"] = np.full((6, 2), step)
        gaps.append(apart(mamba.ZOH.forms[0].function(**inputs)[1], mamba.EULER.forms[0].function(**inputs)[1]))
    return holds(
        same(*h),
        f"h = {h[0]:.3f} and {h[1]:g}; states apart by "
        + ", ".join(f"{g:.2g}" for g in gaps)
        + " at steps 1, 0.1, 0.01",
    )


@claim(
    "survey.M6",
    "Mamba trains in O(n d) time",
    source="4.2, 4.3",
    verdict="holds only if",
    evidence="recomputation",
    why="the size N of a channel's state counts as a constant: the scan takes 3 n d N multiplications",
)
def scan_operations() -> Finding:
    base, longer, deeper = (cost_survey.selective_scan(n, 1536, N) for n, N in ((1000, 16), (2000, 16), (1000, 32)))
    return conditional(
        longer == 2 * base, deeper == base, f"d = 1536: {base}; twice the tokens {longer}, twice N {deeper}"
    )


@claim(
    "survey.M7",
    "The hybrid of 43% Mamba layers and 7% attention layers is described by these shares",
    source="4.2",
    verdict="refuted",
    evidence="recomputation",
    why="43 + 7 = 50: half of the layers is not named",
)
def hybrid_shares() -> Finding:
    return holds(43 + 7 == 100, f"the printed shares add up to {43 + 7}%")


@claim(
    "survey.M8",
    "Parameters that depend on the input rule out convolutions, and with them Fourier transforms",
    source="4.2",
    verdict="holds",
    evidence="property test",
)
def time_invariance() -> Finding:
    fixed = draw(mamba_lti.OPERATOR, T=8, D=2, N=3)
    fixed |= {"delta": np.abs(fixed["delta"]), "A": -np.abs(fixed["A"])}
    by_steps = mamba_lti.recurrent(**fixed)[0]
    agree = same(by_steps, mamba_lti.convolution(**fixed)[0]) and same(by_steps, mamba_lti.by_fft(**fixed))
    selective = draw(mamba.ZOH, T=8, D=1, N=1) | {"A": -np.ones((1, 1)), "skip": np.zeros(1)}
    selective["delta"] = np.abs(selective["delta"])
    responses = []
    for t in (0, 3):
        y = mamba.ZOH.forms[0].function(**selective | {"u": np.eye(8)[:, t : t + 1]})[0]
        responses.append(y[t : t + 4, 0])
    return holds(
        agree and not same(*responses),
        f"constant parameters: steps, convolution and FFT agree to {apart(by_steps, mamba_lti.by_fft(**fixed)):.0e};"
        f" selective ones answer impulses at 0 and 3 by responses {apart(*responses):.2f} apart",
    )


M9 = unchecked(
    "survey.M9",
    "Mamba fails at induction heads because its state is of fixed size",
    source="17, 15.1",
    why="a statement about trained models; section 4 says the same of models without selection, as what Mamba resolves",
)

# --- 5. ODE Transformer ----------------------------------------------------------------------------------------------


@claim(
    "survey.O1",
    "A Runge-Kutta block of higher order has the smaller truncation error",
    source="5.3, Pros; 17, 15.3",
    verdict="holds only if",
    evidence="exact arithmetic",
    why="F is smooth and varies little over a step of 1: for F(y) = -4 y, Euler is off by 3, orders 2 and 4 by 5",
)
def truncation() -> Finding:
    methods = (runge_kutta.rk1, runge_kutta.rk2, runge_kutta.rk3, runge_kutta.rk4)
    errors = {}
    for rate in (Fraction(-1, 4), Fraction(-4)):
        steps = [method(lambda y, rate=rate: rate * y, Fraction(1)) for method in methods]
        errors[rate] = [abs(float(y) - math.exp(rate)) for y in steps]
    falling = {rate: all(b < a for a, b in itertools.pairwise(e)) for rate, e in errors.items()}
    return conditional(
        falling[Fraction(-1, 4)],
        falling[Fraction(-4)],
        "errors of orders 1 to 4: "
        + "; ".join(f"F = {rate} y: " + ", ".join(f"{x:.2g}" for x in e) for rate, e in errors.items()),
    )


@claim(
    "survey.O2",
    "Learned or gated coefficients keep the order of the method",
    source="5.3, Features (implied)",
    verdict="refuted",
    evidence="exact arithmetic",
    why="weights (g, 1 - g) of a gate have order 1 unless g = 1/2; (1, 1), where learned weights start, not even that",
)
def learned_order() -> Finding:
    heun = runge_kutta.HEUN
    weights = {"1/2": (Fraction(1, 2),) * 2, "1/4": (Fraction(1, 4), Fraction(3, 4)), "(1, 1)": (Fraction(1),) * 2}
    orders = {name: _order(heun.a, b) for name, b in weights.items()}
    return holds(
        len(set(orders.values())) == 1,
        f"orders {orders['1/2']} at g = 1/2, {orders['1/4']} at g = 1/4, {orders['(1, 1)']} with weights (1, 1)",
    )


def _order(a: Sequence[Sequence[Fraction]], b: Sequence[Fraction]) -> int:
    """Of an explicit method, up to 4: how many of the conditions on its coefficients hold (Butcher), order by order."""
    rows = [(*row, *[Fraction(0)] * (len(b) - len(row))) for row in a]

    def through(x: Sequence[Fraction]) -> list[Fraction]:
        return [sum((r * y for r, y in zip(row, x, strict=True)), Fraction(0)) for row in rows]

    def weighed(*factors: Sequence[Fraction]) -> Fraction:
        return sum((w * math.prod(f, start=Fraction(1)) for w, *f in zip(b, *factors, strict=True)), Fraction(0))

    c = [sum(row, Fraction(0)) for row in rows]
    ac, squares = through(c), [x * x for x in c]
    conditions = (
        [(1, weighed())],
        [(2, weighed(c))],
        [(3, weighed(squares)), (6, weighed(ac))],
        [(4, weighed(squares, c)), (8, weighed(c, ac)), (12, weighed(through(squares))), (24, weighed(through(ac)))],
    )
    broken = (order for order, wanted in enumerate(conditions) if any(n * total != 1 for n, total in wanted))
    return next(broken, len(conditions))


@claim(
    "survey.O3",
    "Time grows by a factor equal to the order",
    source="5.2",
    verdict="holds only if",
    evidence="recomputation",
    why="evaluations of an encoder's block are counted, up to order 4. The printed speeds of a whole model are 1.18"
    " apart at order 4",
)
def stages() -> Finding:
    methods = (runge_kutta.EULER, runge_kutta.HEUN, runge_kutta.KUTTA, runge_kutta.CLASSICAL)
    orders, evaluations = [_order(m.a, m.b) for m in methods], [len(m.b) for m in methods]
    slower = 147.1 / 124.8
    return conditional(
        orders == evaluations == [1, 2, 3, 4],
        round(slower) == 4,
        f"orders {orders} with {evaluations} evaluations; 147.1 / 124.8 = {slower:.2f}",
    )


O4 = unchecked(
    "survey.O4",
    "Six layers of RK2 equal 18 layers of a baseline; BLEU of 30.77 and 44.11",
    source="5.2",
    why="results of trained models",
)


@claim(
    "survey.O5",
    "A residual block is an Euler step",
    source="17, 15.3",
    verdict="proved",
    evidence="symbolic proof",
)
def euler_step() -> Finding:
    import sympy

    F, y = sympy.Function("F"), sympy.Symbol("y")
    block, step = runge_kutta.rk1(F, y), runge_kutta.step(runge_kutta.EULER, F, y)
    return proved(block == step == y + F(y), f"the method with weights (1) is {step}, F the residual branch, step 1")
