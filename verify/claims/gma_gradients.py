"""Claims of the GMA paper, sections 3.6 and 4.1: the reparametrisation, and gradients through responsibilities."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from mixproof.reference import gma, gma_multi_head, primitives
from mixproof.verify.claims import Finding, claim, conditional, holds, proved
from mixproof.verify.claims.evidence import HALF_OF_THE_DIGITS, apart, draw, same


def steepness(x: Any, **parameters: Any) -> np.ndarray:
    """d gamma_k / d x, (K, R), at one routing vector: the reference's gradient for each component alone."""
    K = len(parameters["mu"])
    points = np.repeat(np.asarray(x, dtype=float)[None], K, axis=0)
    return gma.responsibilities_vjp({"gamma": np.eye(K)}, points, **parameters)["x"]


# --- 4.1: the softmax Jacobian ---------------------------------------------------------------------------------------


@claim(
    "gma.C10",
    "d gamma_j / d s_k = gamma_j (1{j = k} - gamma_k)",
    source="4.1; (17a)",
    verdict="proved",
    evidence="symbolic proof",
)
def softmax_jacobian() -> Finding:
    import sympy

    from mixproof.verify.numbers.symbolic import jacobian, proves, symbols

    s, t, rest = sympy.Symbol("s", real=True), sympy.Symbol("t", real=True), sympy.Symbol("c", positive=True)
    own, other = (sympy.exp(a) / (sympy.exp(s) + sympy.exp(t) + rest) for a in (s, t))
    any_size = [sympy.diff(own, s) - own * (1 - own), sympy.diff(other, s) + other * own]
    logits = symbols("s", (1, 3))
    gamma = primitives.softmax(logits)
    three = proves(gma.jacobian(gamma)[0], jacobian(gamma, logits).reshape(3, 3))
    return proved(
        three and all(sympy.simplify(e) == 0 for e in any_size),
        "for any K, all but two components being a constant c; the reference's Jacobian for K = 3",
    )


@claim(
    "gma.C11",
    "d gamma_k / d s_k = gamma_k (1 - gamma_k), at most 1/4",
    source="4.1; (17b)",
    verdict="proved",
    evidence="symbolic proof",
)
def self_sensitivity() -> Finding:
    import sympy

    from mixproof.verify.numbers.symbolic import EXPRESSIONS, vanishes

    s, rest = sympy.Symbol("s", real=True), sympy.Symbol("c", positive=True)
    own = sympy.exp(s) / (sympy.exp(s) + rest)
    a, b = sympy.symbols("a b", positive=True)
    diagonal = np.diagonal(gma.jacobian(EXPRESSIONS(np.array([[a, b, 1 - a - b]]))).data[0])
    zero = [
        sympy.diff(own, s) - own * (1 - own),
        sympy.Rational(1, 4) - a * (1 - a) - (a - sympy.Rational(1, 2)) ** 2,
        *(d - g * (1 - g) for d, g in zip(diagonal, (a, b, 1 - a - b), strict=True)),
    ]
    return proved(all(vanishes(e) for e in zero), "1/4 - g (1 - g) = (g - 1/2)^2; the reference's diagonal for K = 3")


@claim(
    "gma.C12",
    "The self-sensitivity gamma_k (1 - gamma_k) is largest when the assignment is uncertain",
    source="4.1",
    verdict="holds only if",
    evidence="exact arithmetic",
    why="uncertain is said of one component, gamma_k = 1/2. The assignment is most uncertain at gamma = 1 / K, where"
    " for K = 3 it is 2/9, less than the 1/4 at (1/2, 1/4, 1/4); for K = 128 it is 127/16384 = 0.0078",
)
def largest_when_uncertain() -> Finding:
    from mixproof.verify.numbers.exact import RATIONALS

    def sensitivity(*gamma: Fraction) -> Fraction:
        return gma.jacobian(RATIONALS([list(gamma)])).data[0, 0, 0]

    half, quarter = Fraction(1, 2), Fraction(1, 4)
    two = [sensitivity(Fraction(n, 64), Fraction(64 - n, 64)) for n in range(65)]
    uniform = {K: sensitivity(*[Fraction(1, K)] * K) for K in (3, 128)}
    sharper = sensitivity(half, quarter, quarter)
    return conditional(
        max(two) == two[32] and sharper == sensitivity(half, half),
        uniform[3] >= sharper,
        f"{max(two)} at gamma_k = 1/2; " + ", ".join(f"{g} at 1/{K}" for K, g in uniform.items()),
    )


@claim(
    "gma.C13",
    "The self-sensitivity vanishes as gamma_k goes to 0 or 1",
    source="4.1",
    verdict="proved",
    evidence="symbolic proof",
)
def saturation() -> Finding:
    import sympy

    from mixproof.verify.numbers.symbolic import EXPRESSIONS

    s = sympy.Symbol("s", real=True)
    gamma = primitives.softmax(EXPRESSIONS(np.array([[s, sympy.Integer(0)]])))
    slope = sympy.simplify(gma.jacobian(gamma).data[0, 0, 0])
    limits = [sympy.limit(slope, s, end) for end in (-sympy.oo, sympy.oo)]
    single = primitives.softmax(np.array([[20, 0]], dtype=np.float32))
    literal = (single * (1 - single))[0, 0]
    return proved(
        limits == [0, 0],
        f"limits {limits} for K = 2; at a gap of 20 float32 has {literal:g} for gamma (1 - gamma) as printed and"
        f" {gma.jacobian(single)[0, 0, 0]:.3g} for gamma_k times the others",
    )


@claim(
    "gma.C14",
    "Normalised responsibilities have bounded gradients",
    source="4.1",
    verdict="holds only if",
    evidence="symbolic proof",
    why="gradients for the logits are meant. Those for the routing vector are not bounded: two components with mean 0"
    " and variances (1, 2) and (2, 1) have |d gamma / d x| = t / 4 at x = (t, t)",
)
def bounded_gradients() -> Finding:
    import sympy

    from mixproof.verify.numbers.symbolic import EXPRESSIONS, vanishes

    a, b = sympy.symbols("a b", positive=True)
    J = gma.jacobian(EXPRESSIONS(np.array([[a, b, 1 - a - b]]))).data[0]
    row = -J[0, 1] - J[0, 2] + J[0, 0]  # of absolute values
    by_logits = vanishes(row - 2 * a * (1 - a))
    t = sympy.Symbol("t", positive=True)
    steep = squared_steepness(t)
    return conditional(
        by_logits,
        bool(sympy.limit(steep, t, sympy.oo) < sympy.oo),
        f"rows of the Jacobian sum to 2 g (1 - g) <= 1/2 in absolute value; |d gamma / d x|^2 = {steep} at (t, t)",
    )


def squared_steepness(t: Any) -> Any:
    """|d gamma / d x|^2 at x = (t, t), a SymPy expression, for means 0 and variances (1, 2) and (2, 1)."""
    import sympy

    from mixproof.verify.numbers.symbolic import EXPRESSIONS

    omega = [[sympy.log(sympy.exp(v) - 1) for v in row] for row in ((1, 2), (2, 1))]
    parameters: dict[str, Any] = {
        "mu": EXPRESSIONS([[0, 0], [0, 0]]),
        "omega": EXPRESSIONS(omega),
        "alpha": EXPRESSIONS([0, 0]),
    }
    x = EXPRESSIONS(np.array([[t, t]] * 2))
    J = gma.responsibilities_vjp({"gamma": EXPRESSIONS([[1, 0], [0, 1]])}, x, **parameters)["x"].data
    return sympy.simplify(sympy.Add(*(e**2 for e in J.flat)))  # rank 1, so that the Frobenius norm is the spectral one


@claim(
    "gma.C15",
    "d L / d s_k = gamma_k (d L / d gamma_k - sum_l gamma_l d L / d gamma_l): upstream gradients are centred",
    source="4.1; (18)",
    verdict="proved",
    evidence="symbolic proof",
)
def centred() -> Finding:
    import sympy

    from mixproof.verify.numbers.symbolic import EXPRESSIONS, jacobian, proves, symbols

    s, G = symbols("s", (1, 3)), symbols("G", (1, 3))
    gamma = primitives.softmax(s)
    direct = jacobian(np.sum(G * gamma), s)
    printed = (gamma * (G - np.sum(gamma * G, axis=1, keepdims=True)))[0]
    zero, one = EXPRESSIONS([[0]]), EXPRESSIONS([[sympy.log(sympy.E - 1)]] * 3)
    parameters: dict[str, Any] = {"mu": EXPRESSIONS([[0]] * 3), "omega": one, "alpha": s[0]}
    code = gma.responsibilities_vjp({"gamma": G}, zero, **parameters)["alpha"]
    return proved(
        proves(direct[0], printed) and proves(code, printed) and proves(np.sum(printed), 0),
        "for K = 3 and any upstream gradient, also as the reference computes it; the sum over k is 0",
    )


@claim(
    "gma.C16",
    "The gradients do not rule out that components are under-used or collapse",
    source="4.1",
    verdict="holds",
    evidence="evaluation",
)
def collapse() -> Finding:
    x = draw(gma.BIDIRECTIONAL, T=6, K=3, R=2, V=2)
    G = {"O": np.random.default_rng(1).normal(size=(6, 2))}

    def gradients(name: str, k: int, value: Any) -> list[np.ndarray]:
        """Those of the mixture for every component, after component k got another value."""
        changed = {n: a.copy() for n, a in x.items()}
        changed[name][k] = value
        if name == "mu" and k == 1:  # a copy of the first component in all
            changed["omega"][1], changed["alpha"][1] = changed["omega"][0], changed["alpha"][0]
        d = gma.bidirectional_vjp(G, **changed)
        return [np.concatenate([d["mu"][j], d["omega"][j], d["alpha"][j : j + 1]]) for j in range(3)]

    dead = {"prior e^-10000": gradients("alpha", 2, -1e4), "mean at 1000": gradients("mu", 2, 1e3)}
    twins = gradients("mu", 1, x["mu"][0])
    lost = {name: float(np.max(np.abs(d[2]))) for name, d in dead.items()}
    return holds(
        set(lost.values()) == {0.0} and same(twins[0], twins[1]) and not same(twins[0], twins[2]),
        ", ".join(f"{name}: its gradients are {value:g}" for name, value in lost.items())
        + "; two equal components get equal gradients, so they stay equal",
    )


# --- 3.6: parameters -------------------------------------------------------------------------------------------------


@claim(
    "gma.C28",
    "The task loss alone, without EM or a clustering loss, gives gradients to W_Q, W_K, W_V, mu, omega and alpha",
    source="3.6; 1",
    verdict="holds",
    evidence="property test",
)
def end_to_end() -> Finding:
    from mixproof.verify.numbers.certified import multiprecision

    numbers, step = multiprecision(240), 2.0**-80
    axes = {"X": (4, 2), "W_Q": (1, 2, 2), "W_K": (1, 2, 2), "W_V": (1, 2, 1), "W_O": (1, 2), "mu": (1, 3, 2),
            "omega": (1, 3, 2), "alpha": (1, 3)}  # fmt: skip
    learned = ("W_Q", "W_K", "W_V", "mu", "omega", "alpha")
    gaps, sizes = [], []
    for seed, causal in ((0, False), (1, True)):
        normal = np.random.default_rng(seed).normal
        x = {name: normal(size=shape) for name, shape in axes.items()}
        G = normal(size=(4, 2))
        gradients = gma_multi_head.multi_head_vjp({"O": G}, **x, causal=causal)

        def loss(point: dict[str, Any], G: np.ndarray = G, causal: bool = causal) -> Any:
            return np.sum(gma_multi_head.multi_head(**point, causal=causal) * G)

        for name in learned:
            towards = normal(size=axes[name])
            point = numbers.carry(x)
            ends = [loss(point | {name: point[name] + h * towards}) for h in (step, -step)]
            slope = float(((ends[0] - ends[1]) / (2 * step)).data[()])
            gaps.append(apart(slope, np.sum(gradients[name] * towards)))
            sizes.append(float(np.max(np.abs(gradients[name]))))
    return holds(
        max(gaps) < HALF_OF_THE_DIGITS and min(sizes) > 0,
        f"a layer, both variants: closed forms against differences in 240 bits {max(gaps):.0e} apart for"
        f" {', '.join(learned)}",
    )


@claim(
    "gma.C29",
    "Softplus keeps every diagonal covariance strictly positive definite",
    source="3.6; (14)",
    verdict="holds only if",
    evidence="certified interval",
    why="arithmetic is exact: in float32 softplus is 0 from omega = -104 on, and log(1 + exp(omega)) as printed is 0"
    " from -17 on and infinite from 89 on",
)
def positive_definite() -> Finding:
    from mixproof.verify.numbers.certified import enclose

    logits = np.array([-1e4, -104.0, -17.0, 0.0, 89.0])
    variances = enclose(primitives.softplus, {"w": logits[1:]}, precision=400)
    least = float(np.min(variances.midpoint - variances.radius))
    single = logits.astype(np.float32)
    stable = primitives.softplus(single)
    with np.errstate(over="ignore"):
        printed = np.log(1 + np.exp(single))
    return conditional(
        least > 0,
        bool(np.all(stable > 0)),
        f"softplus(-104) >= {least:.2e}, certified; in float32 {stable[1]:g}, and log(1 + exp) of -17, 89:"
        f" {printed[2]:g}, {printed[4]:g}",
    )


@claim(
    "gma.C30",
    "A softmax of free logits keeps the priors on the simplex",
    source="3.6; (15)",
    verdict="proved",
    evidence="symbolic proof",
)
def priors() -> Finding:
    from mixproof.verify.numbers.symbolic import proves, symbols

    alpha, c = symbols("alpha", (3,)), symbols("c")
    pi = primitives.softmax(alpha)
    goal = symbols("p", (3,), positive=True)
    reached = proves(primitives.softmax(np.log(goal)), goal / np.sum(goal))
    x = draw(gma.RESPONSIBILITIES, T=5, K=3, R=2)
    moved = gma.responsibilities(**x | {"alpha": x["alpha"] + 7.0})
    return proved(
        proves(np.sum(pi), 1) and all(p.is_positive for p in pi.data) and reached,
        "K = 3: positive, sum 1, every interior point reached; one logit too many:"
        f" alpha + c gives the same pi ({proves(primitives.softmax(alpha + c), pi)}) and the same gamma"
        f" ({same(moved, gma.responsibilities(**x))})",
    )
