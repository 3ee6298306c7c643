"""Claims of the GMA paper, section 4.3: Lipschitz constants of softmax, responsibilities and the whole map, bracketed
from above by certified balls or a bound, from below by search.

    g_k(x) = -(x - mu_k) / var_k    slope of logit k; J = d gamma / d x has the rows gamma_k (g_k - sum_l gamma_l g_l)
    |J| <= diam g / (2 sqrt 2)      diam g = max |g_k - g_l|: the largest of (diag gamma - gamma gamma^T) a is at a
                                    two-valued a, where its squares sum to 2 p^2 (1 - p)^2 <= 1/8 of its range
    diam g <= 2 R / sigma^2         for |x - mu_k| <= R and variances >= sigma^2: R / (sqrt 2 sigma^2), free of K
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from mixproof.reference import gma, primitives, softmax_attention
from mixproof.reference import gma_mixing as mixing
from mixproof.verify.claims import Finding, claim, conditional, holds, proved
from mixproof.verify.claims.evidence import HALF_OF_THE_DIGITS, draw
from mixproof.verify.claims.gma_algebra import mixture
from mixproof.verify.claims.gma_gradients import squared_steepness, steepness

BOXES, POINTS = 400, 2001


# --- brackets --------------------------------------------------------------------------------------------------------


def squared_slopes(centres: Any, half: Any, mu: Any, omega: Any, alpha: Any) -> Any:
    """|d gamma / d x|^2 for every x in the intervals centres +- half of a line; plain numbers if half is 0.  -> (n,)"""
    K, n = len(mu), len(centres)
    x = centres
    if not isinstance(x, np.ndarray):
        third = (0 * x[:1] + 1) / 3
        x = x + half * np.where(third > third, -1, 1)  # an open question: the interval [-1, 1]
    copies = x[np.repeat(np.arange(n), K)][:, None]
    J = gma.responsibilities_vjp({"gamma": np.tile(np.eye(K), (n, 1))}, copies, mu, omega, alpha)["x"].reshape(n, K)
    return np.sum(J * J, axis=1)


def bracket(low: float, high: float, parameters: dict[str, np.ndarray]) -> tuple[float, float]:
    """The Lipschitz constant on [low, high], d_r = 1: what search reaches, and a certified upper bound."""
    from mixproof.verify.numbers.certified import enclose

    reached = squared_slopes(np.linspace(low, high, POINTS), 0.0, **parameters).max()
    half = (high - low) / BOXES / 2
    centres = low + half * (2 * np.arange(BOXES) + 1)
    squares = enclose(squared_slopes, {"centres": centres, "half": half * (1 + 2**-40)} | parameters)
    most = np.nextafter(np.sqrt(np.max(np.nextafter(squares.midpoint + squares.radius, np.inf))), np.inf)
    return float(np.sqrt(reached)), float(most)


def _distance(low: Any, high: Any, parameters: dict[str, np.ndarray]) -> tuple[float, float]:
    """R, the largest distance of two points, and of all between them, to a mean, and the least variance."""
    ends = [np.linalg.norm(end - parameters["mu"], axis=1) for end in (low, high)]
    return float(np.max(ends)), float(primitives.softplus(parameters["omega"]).min())


@claim(
    "gma.C22",
    "Where |x - mu_k| <= R for all k and variances are at least sigma^2, responsibilities are Lipschitz",
    source="4.3",
    verdict="holds",
    evidence="certified interval",
)
def locally_lipschitz() -> Finding:
    """The constant of the lost theorem is taken to be sqrt(K) R / sigma^2, from |grad s| and softmax one by one."""
    import sympy

    generator = np.random.default_rng(0)
    cases = [(-0.01, 0.01, mixture([[-1], [1]], 1))]
    for K in (2, 3, 5):
        mu, var = generator.uniform(-1, 1, (K, 1)), generator.uniform(0.3, 1.5, (K, 1))
        cases.append((-1.0, 1.0, mixture(mu, var)))
    p, half = sympy.Symbol("p"), sympy.Rational(1, 2)
    lemma = half**3 - 2 * p**2 * (1 - p) ** 2 - 2 * (p - half) ** 2 * (p * (1 - p) + half**2)
    lines, within = [], [sympy.expand(lemma) == 0]
    for low, high, parameters in cases:
        reached, proven = bracket(low, high, parameters)
        R, least = _distance(low, high, parameters)
        free, printed = R / np.sqrt(2) / least, np.sqrt(len(parameters["mu"])) * R / least
        within.append(reached <= proven <= free <= printed)
        lines.append(f"K = {len(parameters['mu'])} [{reached:.4f}, {proven:.4f}] <= {free:.4f} <= {printed:.4f}")
    shares = [_share(generator, K) for K in (2, 3, 8, 32) for _ in range(50)]
    return holds(
        all(within) and max(shares) <= 1 + HALF_OF_THE_DIGITS,
        "d_r = 1, constant by search and certified <= R / (sqrt 2 sigma^2) <= sqrt(K) R / sigma^2: "
        + "; ".join(lines)
        + f". d_r = 3: at most {max(shares):.2f} of the first bound at {len(shares)} points",
    )


def _share(generator: np.random.Generator, K: int) -> float:
    """|d gamma / d x| at a drawn point in units of R / (sqrt 2 sigma^2), d_r = 3."""
    parameters = mixture(generator.normal(size=(K, 3)), generator.uniform(0.3, 3, (K, 3)))
    x = generator.dirichlet(np.ones(K)) @ parameters["mu"]
    R, least = _distance(x, x, parameters)
    return float(np.linalg.norm(steepness(x, **parameters), 2) * np.sqrt(2) * least / R)


@claim(
    "gma.C23",
    "Softmax, the last of the maps that are composed, is Lipschitz, with the constant 1/2 in the Euclidean norm",
    source="4.3",
    verdict="proved",
    evidence="symbolic proof",
)
def softmax_constant() -> Finding:
    import sympy

    from mixproof.verify.numbers.exact import RATIONALS
    from mixproof.verify.numbers.symbolic import EXPRESSIONS, vanishes

    a, b = sympy.symbols("a b", positive=True)
    c = 1 - a - b  # positive too
    J = gma.jacobian(EXPRESSIONS(np.array([[a, b, c]]))).data[0]
    half = sympy.Rational(1, 2)
    rows = [2 * J[k, k] - sum(J[k]) for k in range(3)]  # of absolute values: only the diagonal is positive
    excess = [half - row - 2 * (g - half) ** 2 for row, g in zip(rows, (a, b, c), strict=True)]
    even = gma.jacobian(RATIONALS([[Fraction(1, 2)] * 2])).data[0]
    attained = (even @ np.array([1, -1])).tolist() == [Fraction(1, 2), Fraction(-1, 2)]
    return proved(
        all(vanishes(e) for e in excess) and attained,
        "absolute rows of the symmetric Jacobian sum to 1/2 - 2 (g - 1/2)^2 (K = 3); at (1/2, 1/2) it takes (1, -1) to"
        " half of it",
    )


# --- local and global ------------------------------------------------------------------------------------------------


@claim(
    "gma.C24",
    "The guarantee is local: there is no constant for all routing vectors",
    source="4.3",
    verdict="holds only if",
    evidence="symbolic proof",
    why="the precisions of two components differ and neither exceeds the other in all directions: variances (1, 2) and"
    " (2, 1) give t / 4 at (t, t). With one covariance for all, max |(mu_k - mu_l) / var| / (2 sqrt 2) holds"
    " everywhere, whatever R; on a line variances 1 and 2, too, have a steepest point",
)
def no_global_constant() -> Finding:
    import sympy

    t = sympy.Symbol("t", positive=True)
    different = squared_steepness(t)
    generator = np.random.default_rng(0)
    shared = mixture(generator.normal(size=(4, 2)), [[0.5, 2.0]])
    g = shared["mu"] / primitives.softplus(shared["omega"])
    bound = max(np.linalg.norm(p - q) for p in g for q in g) / (2 * np.sqrt(2))
    points = [size * generator.normal(size=2) for size in (1, 1e2, 1e4, 1e6) for _ in range(50)]
    points += [(p + q) / 2 for p in shared["mu"] for q in shared["mu"]]
    steepest = max(np.linalg.norm(steepness(x, **shared), 2) for x in points)
    line = np.sqrt(squared_slopes(np.linspace(-100, 100, 20001), 0.0, **mixture([[0], [0]], [[1], [2]])).max())
    return conditional(
        sympy.limit(different, t, sympy.oo) == sympy.oo,
        bool(steepest > bound),
        f"slope^2 {different} at (t, t); shared covariance, |x| up to 1e6: {steepest:.3f} <= {bound:.3f}; d_r = 1,"
        f" variances 1 and 2: {line:.4f} at most",
    )


@claim(
    "gma.C25",
    "The variances are bounded from below, as the theorem assumes",
    source="4.3, 3.6; (14)",
    verdict="holds only if",
    evidence="evaluation",
    why="a floor is added to softplus, whose infimum is 0: at omega = -20, means 1 and -1, the slope at 0 is 3.4e8",
)
def variance_floor() -> Finding:
    import sympy

    w = sympy.Symbol("w", real=True)
    infimum = sympy.limit(sympy.log(1 + sympy.exp(w)), w, -sympy.oo)
    floor = 1e-3
    mixtures = {omega: {"mu": np.array([[1.0], [-1.0]]), "omega": np.full((2, 1), omega), "alpha": np.zeros(2)}
                for omega in (-5.0, -20.0, -80.0)}  # fmt: skip
    with_floor, without = (
        {omega: float(np.linalg.norm(steepness([0.0], **m, v_min=v), 2)) for omega, m in mixtures.items()}
        for v in (floor, 0.0)
    )
    most = (1 + HALF_OF_THE_DIGITS) / np.sqrt(2) / floor  # the K-free bound with R = 1, which is attained
    return conditional(
        max(with_floor.values()) <= most,
        infimum > 0 or max(without.values()) <= most,
        "slope at 0 for omega = -5, -20, -80: "
        + "; ".join(
            f"v_min = {v:g} " + ", ".join(f"{s:.3g}" for s in found.values())
            for v, found in ((floor, with_floor), (0.0, without))
        ),
    )


# --- the layer -------------------------------------------------------------------------------------------------------


def _diameter(points: np.ndarray) -> float:
    return float(max(np.linalg.norm(p - q) for p in points for q in points))


def layer_fractions(x: dict[str, Any], eps: float) -> list[list[float]]:
    """How much of their bounds, none of which knows N, K or eps, the derivatives of each output row attain: those for
    its query, for all keys (sum of norms) and for all values.  With W = D / (D + eps):

    |dO_i / dq_i| <= diam g(q_i) (W diam V / 4 + W (1 - W) max |V_j|),  sum_j |dO_i / dk_j| <= max_j diam g(k_j)
    max_j |V_j - O_i|,  sum_j |dO_i / dV_j| <= W"""
    O, A = gma.cross(**x, eps=eps), gma.attention(*(x[n] for n in ("q", "k", "mu", "omega", "alpha")), eps=eps)
    W, var, v = np.sum(A, axis=1), primitives.softplus(x["omega"]), x["v"]
    read, written = ([_diameter((p - x["mu"]) / var) for p in x[name]] for name in "qk")
    found = []
    for i in range(len(O)):
        rows = []
        for c in range(O.shape[1]):
            G = np.zeros_like(O)
            G[i, c] = 1
            rows.append(gma.cross_vjp({"O": G}, **x, eps=eps))
        dq = np.linalg.norm([d["q"][i] for d in rows], 2)
        dk, dv = (sum(np.linalg.norm([d[n][j] for d in rows], 2) for j in range(len(v))) for n in "kv")
        largest, spread = (float(np.max(np.linalg.norm(p, axis=1))) for p in (v, v - O[i]))
        by_query = read[i] * (W[i] * _diameter(v) / 4 + W[i] * (1 - W[i]) * largest)
        found.append([float(dq / by_query), float(dk / (max(written) * spread)), float(dv / W[i])])
    return found


@claim(
    "gma.C26",
    "On bounded sets the whole map is Lipschitz, with a constant that may depend on N, K and the bounds",
    source="4.3; (7)",
    verdict="holds",
    evidence="property test",
)
def whole_map() -> Finding:
    """The paper argues by D + eps >= eps, whose constant grows like 1 / eps; the bound here is free of eps as well."""
    fractions = []
    for seed, (N, K) in enumerate([(1, 2), (2, 2), (3, 5), (5, 3), (7, 2), (4, 9)]):
        for eps in (1e-9, 1e-3, 1.0):
            x = draw(gma.CROSS, seed, T=2, S=N, K=K, R=2, V=2)
            fractions += layer_fractions(x, eps)
    two = np.array([[1.0], [-1.0]])  # keys at the means, the query halfway: the bound for it is attained
    fractions += layer_fractions({"q": np.zeros((1, 1)), "k": two, "v": two} | mixture(two, 0.01), 1e-9)
    onto_one = {}
    for N in (4, 64):
        GQ, GK = np.tile([1.0, 0.0], (N, 1)), np.tile([0.0, 1.0], (N, 1))
        GK[0] = [1.0, 0.0]
        onto_one[N] = float(np.linalg.norm(mixing.attention(GQ, GK, 1e-12), 2))
    return holds(
        bool(np.max(fractions) <= 1 + HALF_OF_THE_DIGITS),
        f"{len(fractions)} output rows, eps 1e-9 to 1: by queries, keys and values at most "
        + ", ".join(f"{f:.3f}" for f in np.max(fractions, axis=0))
        + " of bounds without N, K or eps in the largest token norm; in the Frobenius norm one key for all queries has "
        + ", ".join(f"{norm:.2f} for N = {N}" for N, norm in onto_one.items()),
    )


@claim(
    "gma.C27",
    "Large norms of embeddings, to which dot-product attention is sensitive, leave GMA's routing stable",
    source="4.3",
    verdict="refuted",
    evidence="evaluation",
    why="for fixed keys (1, 0) and (0, 1) the weights of dot products have the slope 1/2 at every query (t, t); GMA"
    " with means 0 and variances (1, 2), (2, 1) has t / 4: 25 at t = 100. On bounded sets both are Lipschitz",
)
def norms() -> Finding:
    keys = np.eye(2)
    parameters = mixture([[0, 0], [0, 0]], [[1, 2], [2, 1]])
    sizes = (1.0, 10.0, 100.0)
    dots, routed = [], []
    for t in sizes:
        x = np.array([t, t])
        gradients = [softmax_attention.vjp({"O": np.ones((1, 1))}, x[None], keys, e[:, None], 1.0)["q"] for e in keys]
        dots.append(float(np.linalg.norm(np.concatenate(gradients), 2)))
        routed.append(float(np.linalg.norm(steepness(x, **parameters), 2)))
    return holds(
        max(routed) <= max(dots),
        "slopes at (t, t), t = "
        + ", ".join(f"{t:g}: dot products {d:.3g}, GMA {r:.3g}" for t, d, r in zip(sizes, dots, routed, strict=True)),
    )
