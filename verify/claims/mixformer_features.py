"""Claims of MixFormer, sections 1 and 4: the feature map (11), what its weights can tell apart, and the group norms."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np

from mixproof.reference import feature_maps, mixformer, retention, tala, tala_normalised
from mixproof.reference import tala_masks as masks
from mixproof.reference import tala_printed as printed
from mixproof.reference.primitives import group_norm
from mixproof.verify.claims import Finding, claim, conditional, holds
from mixproof.verify.claims.evidence import HALF_OF_THE_DIGITS, apart, same
from mixproof.verify.numbers.exact import RATIONALS

# --- the feature map -------------------------------------------------------------------------------------------------


def as_a_factor(x: np.ndarray) -> np.ndarray:
    """e x / ||x||: (11) to the letter."""
    return np.e * x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True))


@claim(
    "mixformer.C6",
    "The map phi of (11) makes queries and keys non-negative",
    source="4.3, (11)",
    verdict="holds only if",
    evidence="property test",
    why="the print has lost an exponent: e^(x / ||x||) and e^x / ||e^x|| are positive, e x / ||x|| is -e for x = -1",
)
def non_negative() -> Finding:
    generator, least = np.random.default_rng(0), {"A": np.inf, "B": np.inf, "to the letter": np.inf}
    most = 0.0
    for size in np.geomspace(1e-3, 300, 200):
        x = generator.standard_normal((4, 8)) * size
        B = feature_maps.phi_b(x)
        for name, y in zip(least, (feature_maps.phi_a(x), B, as_a_factor(x)), strict=True):
            least[name] = min(least[name], float(np.min(y)))
        most = max(most, float(np.max(B)))
    return conditional(
        min(least["A"], least["B"]) >= 0,
        min(least["to the letter"], as_a_factor(np.array([[-1.0]]))[0, 0]) >= 0,
        "least of 6400 features: " + ", ".join(f"{name} {x:.2g}" for name, x in least.items())
        + f"; those of B are at most {most:.3f}",
    )  # fmt: skip


@claim(
    "mixformer.C7",
    "With keys normalised over the columns of K, (11), the layer generates token by token",
    source="4.3, (11) and (15)",
    verdict="refuted",
    evidence="evaluation",
    why="a column of K holds a feature of all tokens, later ones too. d = 1, K = (1, x), q_1 = v_1 = 1: o_1 = 2.718 for"
    " x = 0, but 2.028 for x = 1. Only the reading e^K / ||e^K|| within N1 or N3 of (12) divides the norm out again",
)
def column_norms() -> Finding:
    one = np.ones((2, 1))

    def first(phi: Any, mixer: Any) -> list[float]:
        return [float(mixer(one, phi(np.array([[1.0], [x]])), one)[0, 0]) for x in (0.0, 1.0)]

    def moved(phi: Any, mixer: Any) -> float:
        """The first three outputs, when the last of 4 keys is another."""
        q, v = np.exp(normal((4, 3))), normal((4, 3))
        K = normal((4, 3))
        other = np.concatenate([K[:3], normal((1, 3))])
        return apart(mixer(q, phi(K), v)[:-1], mixer(q, phi(other), v)[:-1])

    normal = np.random.default_rng(0).standard_normal
    mixers = {
        "(14)": lambda q, k, v: tala.parallel(q, k, v, 1.0, 1.0)[0],
        **{n: lambda q, k, v, n=n: getattr(tala_normalised, n)(q, k, v, 0.75)[0] for n in ("n1", "n2", "n3")},
    }
    maps = {"A": printed.column_phi_a, "B": printed.column_phi_b}
    leaks = {(m, n): moved(maps[m], mixers[n]) for m in maps for n in mixers}
    rows = moved(feature_maps.phi_b, mixers["(14)"])
    a, b = first(maps["B"], mixers["(14)"])
    return holds(
        rows == 0 and not any(leaks[m, "(14)"] > HALF_OF_THE_DIGITS for m in maps),
        f"o_1 = {a:.5f} and {b:.5f}; with another fourth key o_1, o_2, o_3 move by "
        + ", ".join(f"{x:.0e} ({m}, {n})" for (m, n), x in leaks.items())
        + f", {rows:g} with norms over rows",
    )


def kernel_bound(d: Any) -> Any:
    """No two values of phi_B(q) . phi_B(k) = sum_i e^(u_i + w_i), |u| = |w| = 1, are in a larger ratio.

    At least d e^((sum u + sum w) / d) >= d e^(-2 / sqrt d), by the means; at most sum_i e^(2 u_i), by Cauchy and
    Schwarz, where e^(2u) <= 1 + 2u + (e^2 - 3) u^2 on [-1, 1]: the series of (e^(2u) - 1 - 2u) / u^2 has positive
    coefficients, so it is largest at one. The sum of u is at most sqrt d, that of u^2 is one."""
    root = np.sqrt(d)
    return (d + 2 * root + np.exp(0 * d + 2) - 3) / (d * np.exp(-2 / root))


@claim(
    "mixformer.C16",
    "By its content an important token of the past can outweigh a more recent one",
    source="abstract; 1",
    verdict="holds only if",
    evidence="certified interval",
    why="(11) is read as e^x / ||e^x||. Read as e^(x / ||x||), with 128 channels, phi(q) . phi(k) of no two tokens are"
    " in a larger ratio than 1.4453, and in the first head one step of decay with G = 1 takes more, 1 / omega = 1.582",
)
def content_against_decay() -> Finding:
    from mixproof.verify.numbers.certified import enclose

    d, t = 128, 20.0
    enclosed = enclose(kernel_bound, {"d": np.array(float(d))})
    bound = float(np.nextafter(enclosed.midpoint + enclosed.radius, np.inf))
    decay = enclose(tala.omega, {"h": np.array(1.0)})
    omega = float(np.nextafter(decay.midpoint + decay.radius, np.inf))

    flat, generator = np.ones((1, d)), np.random.default_rng(0)
    x = np.concatenate([flat, -flat, *(generator.standard_normal((40, d)) * s for s in (0.1, 1, 10)), np.eye(d)[:8]])
    kernel = feature_maps.phi_b(x) @ feature_maps.phi_b(x).T
    found = float(np.max(kernel) / np.min(kernel))
    q, old, new = (feature_maps.phi_a(t * np.eye(d)[i : i + 1]) for i in (0, 0, 1))
    ratio = float((q @ old.T)[0, 0] / (q @ new.T)[0, 0])
    horizon = [math.log(bound) / -float(tala.log_omega(h)) for h in (1.0, 2.0, 8.0)]
    return conditional(
        ratio * omega > 1,
        max(bound, found) * omega >= 1,
        f"B, d = {d}: ratio at most {bound:.5f}, found {found:.5f}, against 1 / omega = {1 / omega:.3f} of head 1;"
        f" worth {horizon[0]:.1f}, {horizon[1]:.1f} and {horizon[2]:.0f} steps in heads 1, 2 and 8; A, logits of {t:g}:"
        f" {ratio:.1e}",
    )


# --- the gain, and the normaliser ------------------------------------------------------------------------------------


@claim(
    "mixformer.C17",
    "With decay and learnt gain the weights of (12) remain non-negative",
    source="4.3, before (12)",
    verdict="holds only if",
    evidence="exact arithmetic",
    why="no gain is negative, which nothing ensures of a learnable matrix. phi = 1, omega = 1/2, G_1 = -2: the weights"
    " of the second token are -1 and 1, and (12) is divided by zero",
)
def signs_of_the_gain() -> Finding:
    omega, generator = RATIONALS(Fraction(1, 2)), np.random.default_rng(0)

    def least(G: Any) -> Fraction:
        return min(masks.per_source(omega, G).data.flat)

    drawn = min(least(RATIONALS(generator.integers(0, 5, 5))) for _ in range(20))
    G = RATIONALS(np.array([-2, 1]))
    weights = masks.per_source(omega, G)[1]
    total = np.sum(weights).data[()]
    return conditional(
        drawn >= 0,
        least(G) >= 0,
        f"20 draws of G >= 0: least weight {drawn}; G_1 = -2: {', '.join(map(str, weights.data))}, their sum {total}",
    )


@claim(
    "mixformer.C18",
    "The group norm of each head makes the normaliser of (12), which (14) lacks, immaterial",
    source="4.3, (12) to (14)",
    verdict="holds only if",
    evidence="property test",
    why="the norm is per token, has no eps, and (12) divides by one number per token (N2). N1 and N3 divide each key"
    " channel by its own; and heads of small outputs feel an eps of 1e-5",
)
def normaliser() -> Finding:
    a, off = 0.75, {name: [] for name in ("n2", "n1", "n3", "n2 of outputs of 0.01 with eps = 1e-5")}
    for seed in range(10):
        normal = np.random.default_rng(seed).standard_normal
        q, k = (feature_maps.phi_a(normal((6, 4))) for _ in range(2))
        v = normal((6, 4))
        O = retention.parallel(q, k, v, a)[0]
        for name in ("n1", "n2", "n3"):
            off[name].append(apart(group_norm(getattr(tala_normalised, name)(q, k, v, a)[0], 0.0), group_norm(O, 0.0)))
        Y = tala_normalised.n2(q, k, v, a)[0]
        off["n2 of outputs of 0.01 with eps = 1e-5"].append(apart(group_norm(Y / 100, 1e-5), group_norm(O / 100, 1e-5)))
    changed = [min(off[name]) for name in off if name != "n2"]
    return conditional(
        max(off["n2"]) < HALF_OF_THE_DIGITS,
        min(changed) < HALF_OF_THE_DIGITS,
        f"10 draws: n2 at most {max(off['n2']):.0e} off, at least "
        + ", ".join(f"{x:.2f} ({name})" for name, x in zip(list(off)[1:], changed, strict=True)),
    )


@claim(
    "mixformer.C20",
    "Each of the two layers of a block is followed by a group norm",
    source="4.1; (19)",
    verdict="refuted",
    evidence="evaluation",
    why="4.1 also says pre-norm, and (19) has the norms before the layers: with all weights zero the token (1, 3)"
    " leaves the block as (1, 3), and not as its norm (-1, 1)",
)
def followed_by_a_norm() -> Finding:
    X, one, zero, square = np.array([[1.0, 3.0]]), np.ones(2), np.zeros(2), np.zeros((2, 2))
    Y = mixformer.chunkwise(X, one, zero, one, zero, square, square, square, square, square, square, heads=1)
    N = group_norm(Y, 0.0)
    return holds(same(Y, N), f"Y = ({Y[0, 0]:g}, {Y[0, 1]:g}), its norm ({N[0, 0]:g}, {N[0, 1]:g})")
