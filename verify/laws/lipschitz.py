"""Responsibilities are Lipschitz on the set of points within R of every mean, with variances at least sigma^2:

    |gamma(x) - gamma(y)| <= R / (sqrt 2 sigma^2) |x - y|             K-free, sharp at K = 2
    |gamma(x) - gamma(y)| <= sqrt(K) R / sigma^2 |x - y|              the paper's form (4.3)

Points are not random: gradient ascent on the norm of the exact Jacobian finds where the map is steepest, and the
implementation's difference quotient is taken there, along the steepest direction. The rounding of gamma is added."""

from collections.abc import Iterator

import numpy as np

from mixproof.reference import primitives
from mixproof.verify.arithmetic import round_to
from mixproof.verify.case import Case, Domain
from mixproof.verify.laws.law import Law, expect
from mixproof.verify.subject import Subject
from mixproof.verify.verdict import Evidence

STARTS, STEPS = 8, 25


def check(subject: Subject, case: Case) -> list[Evidence]:
    inputs = dict(subject.inputs(case))
    if case.size("K") == 2:  # two components of equal shape: the K-free bound is attained halfway between them
        inputs["omega"] = np.broadcast_to(inputs["omega"][:, :1, :1], inputs["omega"].shape).copy()
        inputs["alpha"] = np.zeros_like(inputs["alpha"])
    K = case.size("K")
    pairs = [
        steepest(inputs["mu"][h], inputs["omega"][h], inputs["alpha"][h], inputs["v_min"], case)
        for h in range(case.size("H"))
    ]
    x = round_to(np.stack([np.concatenate(p) for p in pairs])[None], case.dtype)
    inputs["x"] = x
    ((name, gamma),) = subject.run(inputs, case.dtype).items()
    want = expect(subject, case, inputs, key="steepest")
    n = x.shape[2] // 2
    noise = np.linalg.norm(want.bound[name], axis=-1)
    moved = np.linalg.norm(gamma[:, :, :n] - gamma[:, :, n:], axis=-1)
    distance = np.linalg.norm(x[:, :, :n] - x[:, :, n:], axis=-1)
    var = primitives.softplus(inputs["omega"]) + inputs["v_min"]
    least = var.min(axis=(1, 2))[None, :, None]
    radius = np.linalg.norm(x[:, :, :, None] - inputs["mu"][None, :, None], axis=-1).max(axis=-1)
    R = np.maximum(radius[:, :, :n], radius[:, :, n:])
    slack = noise[:, :, :n] + noise[:, :, n:]
    free = R / (np.sqrt(2) * least) * distance + slack
    printed = np.sqrt(K) * R / least * distance + slack
    axes = ("B", "H", "pair")
    return [
        Evidence(
            "|gamma(x) - gamma(y)|, bound R / (sqrt 2 sigma^2) |x - y|", moved, 0 * moved, free, axes, 0.0, want.vacuous
        ),
        Evidence(
            "|gamma(x) - gamma(y)|, bound sqrt(K) R / sigma^2 |x - y|",
            moved,
            0 * moved,
            printed,
            axes,
            0.0,
            want.vacuous,
        ),
    ]


def jacobians(x: np.ndarray, mu: np.ndarray, omega: np.ndarray, alpha: np.ndarray, v_min: float) -> np.ndarray:
    """d gamma / d x at each point, (T, K, R): rows gamma_k (g_k - sum_l gamma_l g_l) with g_k = -(x - mu_k) / var_k."""
    var = primitives.softplus(omega) + v_min
    s = alpha - np.sum(np.log(var), axis=1) / 2 - primitives.mahalanobis(x, mu, var) / 2
    gamma = primitives.softmax(s)
    g = -(x[:, None, :] - mu) / var
    return gamma[:, :, None] * (g - np.sum(gamma[:, :, None] * g, axis=1, keepdims=True))


def steepest(
    mu: np.ndarray, omega: np.ndarray, alpha: np.ndarray, v_min: float, case: Case
) -> tuple[np.ndarray, np.ndarray]:
    """Pairs (x, y) of points: ascent on |J|_2 by finite differences from starts between the means, then a short step
    along the steepest direction."""
    generator = case.generator("starts")
    K, R = mu.shape
    i, j = generator.integers(0, K, size=(2, STARTS))
    sigma = np.sqrt((primitives.softplus(omega) + v_min).min())
    x = (mu[i] + mu[j]) / 2 + np.where(np.arange(STARTS) < 2, 0, 0.1 * sigma)[:, None] * generator.normal(
        size=(STARTS, R)
    )

    def norm(points: np.ndarray) -> np.ndarray:
        return np.linalg.norm(jacobians(points, mu, omega, alpha, v_min), ord=2, axis=(1, 2))

    step, best = 0.2 * sigma, norm(x)
    for _ in range(STEPS):
        h = 1e-4 * sigma
        slope = np.stack([norm(x + h * e) - norm(x - h * e) for e in np.eye(R)], axis=1)
        size = np.linalg.norm(slope, axis=1, keepdims=True)
        trial = x + step * slope / np.where(size > 0, size, 1)
        value = norm(trial)
        x = np.where((value > best)[:, None], trial, x)
        step, best = (step if np.any(value > best) else step / 2), np.maximum(best, value)
    direction = np.linalg.svd(jacobians(x, mu, omega, alpha, v_min))[2][:, 0]
    return x - 0.02 * sigma * direction, x + 0.02 * sigma * direction


def plan(domain: Domain, small: bool) -> Iterator[Case]:
    for dtype, parameters in domain.dtypes:
        for i, K in enumerate((2, 5) if small else (1, 2, 2, 3, 5, 16)):
            sizes = {"B": 1, "H": domain.fit("H", 2), "T": 1, "S": 1, "K": K, "R": 1 + i % 3, "V": 1, "D": 1}
            yield domain.case(sizes, dtype=dtype, parameters=parameters, seed=i)


LAW = Law("lipschitz", "responsibilities obey their Lipschitz bounds", "inequality", check, plan=plan, optional=True)
