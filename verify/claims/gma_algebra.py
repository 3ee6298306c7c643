"""Claims of the GMA paper, sections 1 to 3 and 4.2: associativity, normalisation, causality, rank."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from mixproof.reference import gma
from mixproof.reference import gma_mixing as mixing
from mixproof.verify.arithmetic import round_to
from mixproof.verify.claims import Finding, claim, conditional, holds, proved
from mixproof.verify.claims.evidence import draw, one_function, same

EPS = 1e-6


def mixture(mu: Any, var: Any) -> dict[str, np.ndarray]:
    """Parameters of equally probable components with means and variances (K, R)."""
    mu = np.asarray(mu, dtype=float)
    var = np.broadcast_to(np.asarray(var, dtype=float), mu.shape)
    return {"mu": mu, "omega": np.log(np.expm1(var)), "alpha": np.zeros(len(mu))}


def _rows(generator: np.random.Generator, T: int, K: int) -> list[list[Fraction]]:
    """Rows of positive fractions that sum to 1."""
    counts = generator.integers(1, 10, size=(T, K))
    return [[Fraction(int(n), int(row.sum())) for n in row] for row in counts]


# --- 3.3, 4.2: one product in two orders -----------------------------------------------------------------------------


@claim(
    "gma.C3",
    "Writing values to K slots and reading them is the affinity matrix times the values: (GQ GK^T) V = GQ (GK^T V)",
    source="3.3; 6; (5)",
    verdict="proved",
    evidence="exact arithmetic",
)
def associative() -> Finding:
    from mixproof.verify.numbers.exact import GF

    agree = []
    for seed in range(3):
        generator = np.random.default_rng(seed)
        GQ, GK, V = (GF.draw(generator, (5, columns)) for columns in (3, 3, 2))
        S, Z = mixing.aggregate(GK, V)
        At = mixing.affinity(GQ, GK)
        agree += [np.asarray(At @ V == GQ @ S).all(), np.asarray(np.sum(At, axis=1) == GQ @ Z).all()]
    return proved(all(agree), "numerator and normaliser, N = 5, K = 3, at 3 points of GF(2^31 - 1)")


@claim(
    "gma.C4",
    "GMA is O = A V with A_ij = At_ij / (sum_l At_il + eps), in the causal form with sums over l <= i",
    source="3.5, 4.2; (7)",
    verdict="proved",
    evidence="exact arithmetic",
)
def attention_matrix() -> Finding:
    found = [one_function(operator, T=4, K=3, D=2) for operator in (gma.BIDIRECTIONAL, gma.CAUSAL)]
    return proved(all(equal for equal, _ in found), "; ".join(points for _, points in found))


def _attends(q: float, k: float, **parameters: np.ndarray) -> tuple[float, float]:
    """An interval that holds the weight of the only key."""
    from mixproof.verify.numbers.certified import enclose

    tokens = {"q": np.array([[q]]), "k": np.array([[k]])}
    A = enclose(gma.attention, tokens | parameters | {"eps": EPS})
    return float(A.midpoint[0, 0] - A.radius[0, 0]), float(A.midpoint[0, 0] + A.radius[0, 0])


@claim(
    "gma.C5",
    "The normalisation makes the induced weights stochastic over the sequence",
    source="3.3; (7)",
    verdict="refuted",
    evidence="certified interval",
    why="eps > 0 is no key: a row sums to D / (D + eps). One token, two components with means 3 and -3 and variance 1,"
    " q = 3, k = -3, eps = 1e-6: its only weight is 0.0296, where softmax attention has 1",
)
def stochastic() -> Finding:
    lone = _attends(0.0, 0.0, **mixture([[0]], 1))
    apart = {a: _attends(a, -a, **mixture([[a], [-a]], 1)) for a in (2.0, 3.0, 4.0)}
    return holds(
        all(most >= 1 for _, most in (lone, *apart.values())),
        f"N = 1, eps = {EPS:g}: {lone[1]:.7f} with K = 1; K = 2, q = -k = a at the means: "
        + ", ".join(f"a = {a:g} {most:.3g}" for a, (_, most) in apart.items()),
    )


@claim(
    "gma.C6",
    "An output is an average of values",
    source="3.1, 3.3",
    verdict="holds only if",
    evidence="exact arithmetic",
    why="eps = 0. With eps > 0 it is an average of values and 0: one token with GQ = (1, 0), GK = (1/10, 9/10), V = 1"
    " and eps = 1/10 has the output 1/2",
)
def averages() -> Finding:
    from mixproof.verify.numbers.exact import RATIONALS

    def output(case: tuple[Any, Any, Any], eps: Fraction) -> Any:
        GQ, GK, V = map(RATIONALS, case)
        return mixing.latent(GQ, GK, V, RATIONALS(eps)).data

    def inside(case: tuple[Any, Any, Any], eps: Fraction) -> bool:
        O, V = output(case, eps), case[2]
        return bool(np.all((O >= np.min(V, axis=0)) & (O <= np.max(V, axis=0))))

    def drawn(seed: int) -> tuple[Any, Any, Any]:
        generator = np.random.default_rng(seed)
        GQ, GK = _rows(generator, 4, 3), _rows(generator, 4, 3)
        return GQ, GK, generator.integers(5, 99, size=(4, 2))

    none, tenth = Fraction(0), Fraction(1, 10)
    one = [[1 - none, none]], [[tenth, 1 - tenth]], np.array([[1]])
    cases = [one, *map(drawn, range(20))]
    return conditional(
        all(inside(case, none) for case in cases),
        all(inside(case, tenth) for case in cases),
        f"eps = 0: within the values in {len(cases)} cases; eps = 1/10: {output(one, tenth)[0, 0]} from a value of 1",
    )


# --- 3.5: causality --------------------------------------------------------------------------------------------------


@claim(
    "gma.C7",
    "Prefix memories and normalisers make output i depend on positions j <= i alone",
    source="1, 3.5",
    verdict="proved",
    evidence="symbolic proof",
)
def prefixes() -> Finding:
    from mixproof.verify.numbers.symbolic import symbols

    T = 4
    GQ, GK, V = (symbols(name, (T, n)) for name, n in (("q", 2), ("k", 2), ("v", 1)))
    eps = symbols("eps")

    def latest(O: Any) -> list[int]:
        """The last position whose symbols stand in each row."""
        names = [[str(s) for e in row for s in e.free_symbols] for row in O.data]
        return [max(int(name.split("_")[1]) for name in row if "_" in name) for row in names]

    forms = {name: latest(getattr(mixing, name)(GQ, GK, V, eps)[0]) for name in ("recurrent", "parallel")}
    forms["chunkwise"] = latest(mixing.chunkwise(GQ, GK, V, eps, chunk=3)[0])
    bidirectional = latest(mixing.latent(GQ, GK, V, eps))
    return proved(
        all(rows == list(range(T)) for rows in forms.values()) and bidirectional == [T - 1] * T,
        f"the last symbol in rows 0 to {T - 1}: " + ", ".join(f"{name} {rows}" for name, rows in forms.items()),
    )


def largest_array(form: Callable[..., Any], *tokens: np.ndarray) -> int:
    """How many elements the largest array has that a form makes."""
    sizes = [0]

    class Watched(np.ndarray):
        def __array_finalize__(self, _: Any) -> None:
            sizes.append(self.size)

    form(*(x.view(Watched) for x in tokens))
    return max(sizes)


def field_tokens(T: int, K: int = 4, D: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Arrays of the shapes of GQ, GK and V."""
    return np.full((T, K), 1 / K), np.full((T, K), 1 / K), np.ones((T, D))


@claim(
    "gma.C9",
    "All models passed a test of prefix causality, with an error of exactly zero",
    source="5.3",
    verdict="holds only if",
    evidence="property test",
    why="the future is replaced by finite numbers, at the same length. A NaN there reaches earlier rows of every form"
    " that masks after a product, the parallel and the chunkwise one; a test that cuts the sequence instead compares"
    " products of other shapes, whose sums are rounded in another order",
)
def prefix_test() -> Finding:
    T, cut = 257, 200
    forms = {"recurrent": gma.recurrent, "chunkwise": partial(gma.chunkwise, chunk=16), "parallel": gma.parallel}
    x = draw(gma.CAUSAL, T=T, K=5, R=3, V=4)
    x = {name: array.astype(np.float32) for name, array in x.items()}

    def error(form: Callable[..., Any], future: dict[str, Any], length: int = T) -> float:
        """Largest difference before the cut after a change of what comes later."""
        changed = {n: a.copy() for n, a in x.items()}
        for name, values in future.items():
            changed[name][cut:] = values
        changed |= {n: changed[n][:length] for n in "qkv"}
        with np.errstate(invalid="ignore"):
            return float(np.max(np.abs(form(**x)[0][:cut] - form(**changed)[0][:cut])))

    other: dict[str, Any] = {n: 3 * x[n][: T - cut] for n in "qkv"}
    finite = {name: error(form, other) for name, form in forms.items()}
    poisoned = {name: error(form, {"v": np.nan}) for name, form in forms.items()}
    shorter = {name: error(form, {}, cut) for name, form in forms.items()}
    return conditional(
        set(finite.values()) == {0.0},
        set(poisoned.values()) == {0.0},
        "; ".join(
            f"{what}: " + ", ".join(f"{name} {e:.1g}" for name, e in errors.items())
            for what, errors in (("finite", finite), ("NaN", poisoned), ("cut", shorter))
        ),
    )


# --- 4.2: rank -------------------------------------------------------------------------------------------------------


def _minors(form: Callable[..., Any]) -> list[bool]:
    """Whether the minors of order K + 1 of form(GQ, GK) vanish for symbols, K = 1 and 2."""
    import sympy

    from mixproof.verify.numbers.symbolic import symbols, vanishes

    found = []
    for K in (1, 2):
        GQ, GK = (symbols(name, (K + 1, K), positive=True) for name in "qk")
        minor: Any = sympy.Matrix(form(GQ, GK).data)
        somewhere = {symbol: i * i + 2 for i, symbol in enumerate(sorted(minor.free_symbols, key=str))}
        found.append(minor.subs(somewhere).det() == 0 and vanishes(minor.det()))  # a point refutes, and fast
    return found


@claim(
    "gma.C17",
    "The affinity matrix GQ GK^T is non-negative and its rank is at most K",
    source="4.2",
    verdict="proved",
    evidence="symbolic proof",
)
def low_rank() -> Finding:
    from mixproof.verify.numbers.symbolic import symbols

    GQ, GK = (symbols(name, (3, 2), positive=True) for name in "qk")
    positive = all(e.is_positive for e in mixing.affinity(GQ, GK).data.flat)
    minors = _minors(mixing.affinity)
    x = draw(gma.BIDIRECTIONAL, T=12, K=5, R=3, V=1)
    gammas = [gma.responsibilities(x[name], x["mu"], x["omega"], x["alpha"]) for name in "qk"]
    rank = np.linalg.matrix_rank(mixing.affinity(*gammas))
    return proved(
        positive and all(minors) and rank <= 5,
        f"K = 1, 2: all minors of order K + 1 vanish, whatever the factors; N = 12, K = 5: rank {rank}",
    )


@claim(
    "gma.C18",
    "The effective rank may be smaller than K, if components are unused or columns of responsibilities dependent",
    source="4.2",
    verdict="holds",
    evidence="evaluation",
)
def smaller_rank() -> Finding:
    x = np.random.default_rng(0).normal(size=(12, 2))

    def rank(mu: list[list[float]], alpha: list[float]) -> int:
        gamma = gma.responsibilities(x, np.array(mu), np.zeros((3, 2)), np.array(alpha))
        return int(np.linalg.matrix_rank(mixing.affinity(gamma, gamma)))

    three, zero = [[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], [0.0, 0.0, 0.0]
    found = {
        "three components": rank(three, zero),
        "one of them unused": rank(three, [0.0, 0.0, -1e4]),
        "all alike": rank([three[0]] * 3, [0.0, 1.0, 2.0]),
    }
    return holds(list(found.values()) == [3, 2, 1], ", ".join(f"{name}: rank {n}" for name, n in found.items()))


@claim(
    "gma.C19",
    "The low-rank reading is one of GMA, hence of its causal variant too",
    source="abstract; 1, contribution 3; 4.2",
    verdict="refuted",
    evidence="exact arithmetic",
    why="K = 1, two tokens: the masked affinity ((1, 0), (1, 1)) has rank 2. A causal matrix is triangular with a"
    " positive diagonal, so of rank N; rank K is that of its blocks below the diagonal",
)
def causal_rank() -> Finding:
    import sympy

    from mixproof.verify.numbers.exact import RATIONALS

    ones = RATIONALS([[Fraction(1)]] * 2)
    A = sympy.Matrix(mixing.attention(ones, ones, RATIONALS(Fraction(0)), causal=True).data)
    generator = np.random.default_rng(0)
    GQ, GK = (RATIONALS(_rows(generator, 6, 2)) for _ in range(2))
    At: Any = sympy.Matrix(mixing.affinity(GQ, GK, causal=True).data)
    whole, block = At.rank(), At[3:, :3].rank()
    return holds(
        A.rank() <= 1 and whole <= 2,
        f"K = 1, N = 2: determinant {A.det()} at eps = 0; K = 2, N = 6: rank {whole}, block below the diagonal {block}",
    )


@claim(
    "gma.C20",
    "The normalised matrix A inherits the bound of the rank",
    source="4.2",
    verdict="proved",
    evidence="symbolic proof",
)
def normalised_rank() -> Finding:
    from mixproof.verify.numbers.symbolic import symbols

    eps = symbols("eps", positive=True)
    minors = _minors(lambda GQ, GK: mixing.attention(GQ, GK, eps))
    return proved(all(minors), "K = 1, 2: all minors of order K + 1 of A vanish: rows are scaled by 1 / (D_i + eps)")


@claim(
    "gma.C21",
    "Rows of both factors are probability vectors over the components",
    source="4.2",
    verdict="proved",
    evidence="symbolic proof",
)
def probability_vectors() -> Finding:
    from mixproof.verify.numbers.symbolic import proves, symbols

    shapes = {"x": (1, 1), "mu": (3, 1), "omega": (3, 1), "alpha": (3,)}
    free: dict[str, Any] = {name: symbols(name, shape) for name, shape in shapes.items()}
    gamma = gma.responsibilities(**free)
    x = draw(gma.RESPONSIBILITIES, T=200, K=128, R=4)
    drawn = gma.responsibilities(**x)
    total = np.sum(round_to(drawn, "bfloat16"), axis=1)
    return proved(
        bool(np.all(drawn >= 0)) and same(np.sum(drawn, axis=1), np.ones(200)) and proves(np.sum(gamma, axis=1), 1),
        f"they sum to 1 for symbolic x, mu, omega, alpha, K = 3; stored in bfloat16, K = 128: {total.min():.4f} to"
        f" {total.max():.4f}",
    )
