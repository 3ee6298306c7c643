"""Claims of the GMA paper, sections 2, 3.3 and 6 and appendix G: what its affinity is, and what it is put beside."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from mixproof.reference import gma, gma_mixing, primitives
from mixproof.verify.claims import Finding, claim, conditional, proved
from mixproof.verify.claims.evidence import draw, same

# --- the affinity of GMA ---------------------------------------------------------------------------------------------


def _responsibilities(seed: int, tokens: int, components: int) -> np.ndarray:
    """Rows of fractions that sum to one."""
    n = np.random.default_rng(seed).integers(0, 10, (tokens, components)) + np.eye(tokens, components, dtype=int)
    return np.array([[Fraction(int(x), int(sum(row))) for x in row] for row in n])


@claim(
    "gma.C63",
    "The overlap of responsibilities is a similarity of query and key",
    source="3.3; appendix G",
    verdict="holds only if",
    evidence="exact arithmetic",
    why="queries and keys are routed alike, and symmetry and values from 0 to 1 are all that is asked: a token is not"
    " the most similar to itself, (3/5, 2/5) has 13/25 with itself and 3/5 with (1, 0)",
)
def similarity() -> Finding:
    symmetric = []
    for seed in range(5):
        G = _responsibilities(seed, 4, 3)
        At = gma_mixing.affinity(G, G)
        squares = np.diag(At)
        symmetric.append(bool(np.all(At == At.T) and np.all(At >= 0) and np.all(At <= 1)))
        symmetric.append(bool(np.all(At * At <= np.outer(squares, squares))))  # Cauchy and Schwarz
    pair = np.array([[Fraction(3, 5), Fraction(2, 5)], [Fraction(1), Fraction(0)]])
    own, other = gma_mixing.affinity(pair, pair)[0]
    even = gma_mixing.affinity(np.full((1, 2), Fraction(1, 2)), pair)[0]
    return conditional(
        all(symmetric),
        own >= other,
        f"5 draws of 4 tokens are symmetric, from 0 to 1; itself {own}, another {other}; a query of (1/2, 1/2) has"
        f" {even[0]} and {even[1]} with both",
    )


@claim(
    "gma.C64",
    "The affinity of two tokens is the probability that both belong to one component",
    source="3.3; 6",
    verdict="proved",
    evidence="symbolic proof",
)
def same_component() -> Finding:
    """Of independent draws z from gamma(q) and y from gamma(k), summed over all pairs (z, y)."""
    from mixproof.verify.numbers.symbolic import proves, symbols

    K = 4
    GQ, GK = symbols("GQ", (2, K)), symbols("GK", (2, K))
    At = gma_mixing.affinity(GQ, GK)
    pairs = [(z, y) for z, y in itertools.product(range(K), repeat=2) if z == y]
    drawn = [[sum(GQ[i, z] * GK[j, y] for z, y in pairs) for j in range(2)] for i in range(2)]
    shown = all(proves(At[i, j], drawn[i][j]) for i in range(2) for j in range(2))
    prior = np.array([[Fraction(9, 10), Fraction(1, 10)]])
    return proved(
        shown,
        f"K = {K}, all {K * K} pairs of independent draws; not weighed by the prior: two tokens of which nothing is"
        f" known, pi = (9/10, 1/10), have {gma_mixing.affinity(prior, prior)[0, 0]}",
    )


# --- appendix G ------------------------------------------------------------------------------------------------------


def _breaks_triangle(d: Callable[[float, float], float], points: np.ndarray) -> list[tuple[float, float, float]]:
    """Triples with d(x, z) > d(x, y) + d(y, z), more than rounding explains."""
    triples = itertools.product(points.tolist(), repeat=3)
    return [(x, y, z) for x, y, z in triples if d(x, z) > (d(x, y) + d(y, z)) * (1 + 1e-12)]


@claim(
    "gma.C65",
    "The Mahalanobis form (q - k)^T Sigma^-1 (q - k) is a distance as the appendix defines one",
    source="appendix G",
    verdict="holds only if",
    evidence="evaluation",
    why="its root is meant: for 0, 1, 2 and unit variance the form has 4 > 1 + 1",
)
def mahalanobis() -> Finding:
    def squared(x: float, y: float) -> float:
        return primitives.mahalanobis(np.array([[x]]), np.array([[y]]), np.ones((1, 1))).item()

    def root(x: float, y: float) -> float:
        return math.sqrt(squared(x, y))

    points = np.arange(3.0)
    drawn = np.random.default_rng(0).normal(size=7)
    broken = _breaks_triangle(squared, points)
    return conditional(
        not _breaks_triangle(root, points) and not _breaks_triangle(root, drawn),
        not broken,
        f"the root keeps the triangle inequality for all triples of 0, 1, 2 and of 7 draws; the form breaks it at"
        f" {broken}: {squared(0, 2):g} > {squared(0, 1):g} + {squared(1, 2):g}",
    )


def _polynomial_weights(q: int, k: list[int], c: int, p: int) -> list[Fraction] | None:
    """(q k_j + c)^p over their sum; none if that is zero."""
    scores = [Fraction((q * x + c) ** p) for x in k]
    total = sum(scores, Fraction(0))
    return [s / total for s in scores] if total else None


@claim(
    "gma.C66",
    "The polynomial kernel (q k + c)^p is a compatibility that attention can normalise",
    source="appendix G",
    verdict="holds only if",
    evidence="exact arithmetic",
    why="p is even or no q k + c is negative, and not all are 0: p = 1, c = 0, q = 1, k = (1, -1) sums to 0, and p = 3,"
    " k = (1, -2) gives weights of -1/7 and 8/7",
)
def polynomial() -> Finding:
    cases = itertools.product(range(-3, 4), range(3), (1, 2, 3, 4))
    keys = [1, -2, 3]
    weights = {(q, c, p): _polynomial_weights(q, keys, c, p) for q, c, p in cases}
    good = {case: w is not None and min(w) >= 0 and sum(w) == 1 for case, w in weights.items()}

    def meant(q: int, c: int, p: int) -> bool:
        bases = [q * x + c for x in keys]
        return any(bases) and (p % 2 == 0 or min(bases) >= 0)

    zero, cubed = _polynomial_weights(1, [1, -1], 0, 1), _polynomial_weights(1, [1, -2], 0, 3)
    return conditional(
        all(good[case] for case in good if meant(*case)),
        zero is not None and cubed is not None and min(cubed) >= 0,
        f"{sum(meant(*case) for case in good)} of {len(good)} cases meet the condition, weights >= 0 that sum to 1; p ="
        f" 1: {zero}, p = 3: {', '.join(map(str, cubed or ()))}",
    )


def _divergence(p: np.ndarray, q: np.ndarray) -> float:
    """KL(p | q) in nats, infinite where q is zero and p is not."""
    with np.errstate(divide="ignore"):
        return float(np.sum(p * np.log(p / q), where=p > 0))


def _cosine(x: np.ndarray, y: np.ndarray) -> float:
    with np.errstate(invalid="ignore"):
        return float(x @ y / (np.linalg.norm(x) * np.linalg.norm(y)))


@claim(
    "gma.C67",
    "Cosine and divergence are compatibilities of any query and key",
    source="appendix G",
    verdict="holds only if",
    evidence="evaluation",
    why="vectors are nonzero and distributions overlap: the cosine with 0 is 0/0, KL((1/2, 1/2) | (1, 0)) is infinite."
    " KL is not symmetric either: 0.1438 from (1/2, 1/2) to (1/4, 3/4), 0.1308 back",
)
def cosine_and_divergence() -> Finding:
    half, quarter, corner = np.array([0.5, 0.5]), np.array([0.25, 0.75]), np.array([1.0, 0.0])
    there, back = _divergence(half, quarter), _divergence(quarter, half)
    vectors = np.random.default_rng(0).normal(size=(6, 3))
    drawn = [_cosine(x, y) for x in vectors for y in vectors]
    positive = primitives.softmax(vectors)
    apart = [_divergence(p, q) for p in positive for q in positive]
    worst = _cosine(np.zeros(3), vectors[0]), _divergence(half, corner)
    return conditional(
        bool(np.all(np.isfinite(drawn + apart)) and max(map(abs, drawn)) <= 1 + 1e-12 and min(apart) >= -1e-12),
        bool(np.all(np.isfinite(worst))) and same(there, back),
        f"finite for 36 pairs of draws; the cosine with 0 is {worst[0]}, the divergence without overlap {worst[1]};"
        f" KL {there:.4f} and back {back:.4f}",
    )


# --- section 6 -------------------------------------------------------------------------------------------------------


@claim(
    "gma.C68",
    "Dirichlet and stick-breaking priors lie on the simplex and leave few components large, however many there are",
    source="6, Bayesian and nonparametric GMA",
    verdict="proved",
    evidence="symbolic proof",
)
def adaptive_priors() -> Finding:
    """pi_k = v_k prod_{l < k} (1 - v_l). Induction: what is left after K sticks is R = prod (1 - v_k), and R - v R is
    what is left after one more. The mean of sum pi_k^2, one over an effective number of components, is 1 / (1 + a) for
    sticks, and nears it from above for Dirichlet(a / K), whose entries are Beta(a / K, a - a / K)."""
    import sympy

    a, K, R, v = sympy.symbols("a K R v", positive=True)

    def moment(m: int, x: Any, y: Any) -> Any:
        """Of order m, of Beta(x, y)."""
        return sympy.gammasimp((sympy.beta(x + m, y) / sympy.beta(x, y)).rewrite(sympy.gamma))

    one = sympy.Integer(1)
    step = sympy.simplify(R - v * R - R * (1 - v)) == 0
    left = moment(1, a, one)  # 1 - v is Beta(a, 1)
    sticks = sympy.simplify(moment(2, one, a) / (1 - moment(2, a, one)))  # sum of a geometric series
    dirichlet = sympy.simplify(K * moment(2, a / K, a - a / K))
    limit = sympy.limit(dirichlet, K, sympy.oo)
    x = draw(gma.RESPONSIBILITIES, T=3, R=2, K=4)
    unseen = same(gma.responsibilities(**x), gma.responsibilities(**x | {"alpha": x["alpha"] - math.log(2)}))
    return proved(
        step and unseen and sympy.simplify(sticks - 1 / (1 + a)) == 0 and sympy.simplify(limit - sticks) == 0,
        f"E sum pi^2: sticks {sticks}, Dirichlet {dirichlet}, limit {limit}; of K sticks ({left})^K is left on average,"
        " which responsibilities do not see",
    )


# --- section 2 -------------------------------------------------------------------------------------------------------


@claim(
    "gma.C69",
    "Dense global information stays available through the components",
    source="2, Sparse and structured attention",
    verdict="holds only if",
    evidence="property test",
    why="it is information about K means: every token weighs in every output, but the matrix has rank K at most, and"
    " with N > K no parameters make the outputs the values themselves",
)
def global_information() -> Finding:
    positive, ranks, K, N = [], [], 3, 7
    for seed in range(5):
        x = draw(gma.BIDIRECTIONAL, seed, T=N, R=2, K=K, V=2)
        A = gma.attention(**{name: x[name] for name in ("q", "k", "mu", "omega", "alpha")})
        positive.append(bool(np.all(A > 0)))
        ranks.append(int(np.linalg.matrix_rank(A)))
    return conditional(
        all(positive) and max(ranks) <= K,
        max(ranks) == N,
        f"5 draws of {N} tokens and {K} components: all weights positive: {all(positive)}; ranks {ranks}, the identity"
        f" has {N}",
    )
