"""Claims of the GMA paper that its equations agree: (2), (3) and (16), the counts of section 3.4, appendix E."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from mixproof.reference import cost, gma
from mixproof.reference import gma_mixing as mixing
from mixproof.verify.claims import Finding, claim, conditional, proved
from mixproof.verify.claims.evidence import apart, draw, one_function


def _symbolic(K: int, R: int) -> tuple[dict[str, Any], Any]:
    """A token and K components as symbols, and the variances, which softplus of omega gives."""
    from mixproof.verify.numbers.symbolic import symbols

    var = symbols("var", (K, R), positive=True)
    free = {"x": symbols("x", (1, R)), "mu": symbols("mu", (K, R)), "alpha": symbols("alpha", (K,))}
    return free | {"omega": np.log(np.exp(var) - 1)}, var


@claim(
    "gma.E1",
    "The posterior (3) of a component under Gaussian densities (2) is the softmax of the logits (16)",
    source="3.2, 4.1, 4.3; (2), (3), (16)",
    verdict="proved",
    evidence="symbolic proof",
)
def posterior() -> Finding:
    import sympy

    K, R, half = 2, 2, sympy.Rational(1, 2)
    inputs, variances = _symbolic(K, R)
    x, mu, var = inputs["x"].data[0], inputs["mu"].data, variances.data
    pi = sympy.symbols(f"pi:{K}", positive=True)
    right = []
    for k in range(K):
        Sigma, e = sympy.diag(*var[k]), sympy.Matrix(x - mu[k])
        square = (e.T * Sigma.inv() * e)[0]
        density = sympy.exp(-square / 2) / ((2 * sympy.pi) ** (half * R) * sympy.sqrt(Sigma.det()))  # (2)
        s = sympy.log(pi[k]) - half * R * sympy.log(2 * sympy.pi) - half * sympy.log(Sigma.det()) - square / 2  # (16)
        right.append(sympy.simplify(sympy.exp(s) / (pi[k] * density)) == 1)
        own = inputs["alpha"].data[k] - half * sum(sympy.log(v) for v in var[k]) - square / 2
        right.append(sympy.simplify(gma.logits(**inputs).data[0, k] - own) == 0)
    gamma = gma.responsibilities(**inputs).data[0]
    gap = sympy.log(gamma[0] / gamma[1]) - (gma.logits(**inputs).data[0] @ np.array([1, -1]))
    right.append(sympy.simplify(sympy.expand_log(gap, force=True)) == 0)
    return proved(
        all(right),
        f"K = {K}, d_r = {R}: exp(s_k) = pi_k N(x | mu_k, Sigma_k), and the reference's logits are s_k without what all"
        " components share",
    )


@claim(
    "gma.E2",
    "Responsibilities depend on where a vector lies among the means: moving both by one vector changes nothing",
    source="4.1; (16)",
    verdict="proved",
    evidence="symbolic proof",
)
def translation() -> Finding:
    from mixproof.verify.numbers.symbolic import proves, symbols

    inputs, _ = _symbolic(3, 2)
    t = symbols("t", (2,))
    moved = inputs | {"x": inputs["x"] + t, "mu": inputs["mu"] + t}
    x = draw(gma.RESPONSIBILITIES, T=5, K=3, R=2)
    scaled = gma.responsibilities(**x | {"x": 2 * x["x"], "mu": 2 * x["mu"]})
    return proved(
        proves(gma.logits(**moved), gma.logits(**inputs)),
        "the logits, K = 3, d_r = 2; distances count: after scaling both by 2 responsibilities are"
        f" {apart(scaled, gma.responsibilities(**x)):.2f} apart",
    )


@claim(
    "gma.E3",
    "Responsibilities of all queries and keys cost 2 N K d_r + 2 N K",
    source="3.4",
    verdict="holds only if",
    evidence="recomputation",
    why="terms are counted, not operations: each coordinate of a distance takes 4 (difference, square, product, sum),"
    " so that the distances alone are 8 N K d_r",
)
def responsibility_cost() -> Finding:
    sizes = [(1000, 128, 64), (50, 7, 3), (4000, 512, 64)]
    slopes = []  # what one more routing dimension costs
    for N, K, d in sizes:
        terms = [cost.responsibility_terms_as_printed(N, K, d + more) for more in (0, 1)]
        operations = [cost.gma_flops(N, K, d + more, d) for more in (0, 1)]
        slopes.append(Fraction(operations[1] - operations[0], terms[1] - terms[0]))
    return conditional(
        len(set(slopes)) == 1,
        set(slopes) == {Fraction(1)},
        f"one more dimension costs {', '.join(map(str, slopes))} times what is printed, for (N, K, d_r) = {sizes}",
    )


@claim(
    "gma.E4",
    "Storage is 2 N K + K d_v + K + N d_v = O(N K + K d_v + N d_v)",
    source="3.4; (12)",
    verdict="holds only if",
    evidence="recomputation",
    why="a forward pass is meant. Gradients need q, k, v and the normaliser besides, N (2 d_r + d_v + 1) numbers: for"
    " K = d_r = d_v = 64 they double it",
)
def storage() -> Finding:
    N, K, R, V = 6, 3, 2, 4
    x = draw(gma.BIDIRECTIONAL, T=N, K=K, R=R, V=V)
    GQ, GK = (gma.responsibilities(x[name], x["mu"], x["omega"], x["alpha"]) for name in "qk")
    arrays = [GQ, GK, *mixing.aggregate(GK, x["v"]), mixing.latent(GQ, GK, x["v"], 1e-6)]
    held = sum(a.size for a in arrays)
    tokens = 10**6
    kept, printed = cost.gma_storage(tokens, 64, 64, 64), cost.gma_storage_as_printed(tokens, 64, 64)
    return conditional(
        held == cost.gma_storage_as_printed(N, K, V),
        kept == printed,
        f"N = {N}, K = {K}, d_v = {V}: GQ, GK, V~, Z and O are {held} numbers; with gradients, K = d = 64:"
        f" {kept / printed:.2f} times the printed count",
    )


@claim(
    "gma.E5",
    "Cross-attention follows: the context alone writes the memory, queries of another sequence read it",
    source="3, appendix E.4",
    verdict="proved",
    evidence="exact arithmetic",
)
def cross_attention() -> Finding:
    from mixproof.verify.numbers.exact import GF

    equal, points = one_function(gma.CROSS, T=3, S=5, K=2, D=2)
    generator = np.random.default_rng(0)
    GQ, GK, V, eps = (GF.draw(generator, shape) for shape in ((3, 2), (5, 2), (5, 2), ()))
    memory = mixing.aggregate(GK, V)
    parts = [
        mixing.broadcast(GQ[i : i + 1], *memory, eps) == mixing.latent(GQ, GK, V, eps)[i : i + 1] for i in range(3)
    ]
    return proved(
        equal and all(np.asarray(part).all() for part in parts),
        f"3 queries, 5 keys: {points}; a memory written once serves each query alone",
    )
