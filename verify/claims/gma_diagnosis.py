"""Claims of the GMA paper, section 5.4 and appendix F: what Tables 4 and 6 to 8 say of learned responsibilities."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache

import numpy as np

from mixproof.reference import diagnostics, gma_multi_head
from mixproof.verify.claims import Finding, claim, conditional, holds
from mixproof.verify.claims import gma_tables as tables
from mixproof.verify.claims.evidence import same
from mixproof.verify.claims.gma_tables import ACTIVE, COMPONENTS, HEADS, rounded, value, within

LOG_K = math.log(COMPONENTS)
STATISTICS = ("purity", "mutual_information", "normalised_mutual_information")


def _tokens() -> int:
    return sum(n for n, _ in tables.CATEGORIES.values())


def _categories() -> np.ndarray:
    """The category of each token, in order of Table 6."""
    return np.repeat(np.arange(len(tables.CATEGORIES)), [n for n, _ in tables.CATEGORIES.values()])


def _fractions() -> list[Fraction]:
    """The hard fractions of Table 7 and, last, what they leave."""
    listed = [value(mass) for mass, *_ in tables.CHANNELS.values()]
    return [*listed, 1 - sum(listed, Fraction(0))]


# --- Table 6 ---------------------------------------------------------------------------------------------------------


@claim(
    "gma.C51",
    "The category counts are those of 65,536 tokens, and the printed fractions theirs",
    source="appendix F.1, Table 6",
    verdict="holds",
    evidence="recomputation",
)
def category_counts() -> Finding:
    T = _tokens()
    right = [within(Fraction(n, T), fraction) for n, fraction in tables.CATEGORIES.values()]
    total = sum(value(fraction) for _, fraction in tables.CATEGORIES.values())
    return holds(
        T == 65_536 and all(right),
        f"{T} = {T // 1024} x 1024 tokens; {sum(right)} of {len(right)} fractions, which sum to {float(total):.3f}",
    )


@claim(
    "gma.C52",
    "The majority category, 0.286 of the tokens, is the baseline of the purity",
    source="5.4; appendix F.1",
    verdict="holds",
    evidence="recomputation",
)
def majority() -> Finding:
    c = _categories()
    alone = diagnostics.purity(np.zeros_like(c), c)
    drawn = [np.random.default_rng(seed).integers(0, COMPONENTS, len(c)) for seed in range(3)]
    return holds(
        within(alone, "0.286") and all(diagnostics.purity(z, c) >= alone for z in drawn),
        f"one component for all tokens has {alone:.5f}; no assignment can have less: 3 drawn ones"
        f" {', '.join(f'{diagnostics.purity(z, c):.4f}' for z in drawn)}",
    )


# --- Table 4 and Table 8: agreement with categories ------------------------------------------------------------------


def _least_entropy(cap: Fraction | None = None) -> float:
    """The least H(Z) with the masses of Table 7: what they leave in as few components as the cap allows."""
    *masses, left = _fractions()
    while cap and left > cap:
        masses.append(cap)
        left -= cap
    return -sum(float(m) * math.log(m) for m in (*masses, left))


@claim(
    "gma.C53",
    "Mutual information of 0.427 nats is a normalised one of 0.244",
    source="5.4, Table 4",
    verdict="holds only if",
    evidence="recomputation",
    why="it is divided by H(C), or by the lesser entropy, which the text does not say: a mean or the greater of both"
    " entropies, or that of the pair, would need H(Z) < 1.76, and Table 7 leaves 2.49 or more if none of the channels"
    " that it does not show has more tokens than its first",
)
def normalised() -> Finding:
    H_C = diagnostics.entropy(_categories())
    (low, high), (least, most) = rounded(tables.INFORMATION), rounded(tables.NORMALISED)
    divided = float(low) / H_C, float(high) / H_C
    needed = float(high / least)  # of the divisor, whatever it is
    geometric, arithmetic = needed**2 / H_C, 2 * needed - H_C
    cap = value(next(iter(tables.CHANNELS.values()))[0])
    return conditional(
        divided[0] <= most and least <= divided[1],
        _least_entropy(cap) <= max(geometric, arithmetic, needed),
        f"H(C) = {H_C:.5f}: {divided[0]:.4f} to {divided[1]:.4f}; other divisors need H(Z) up to"
        f" {max(geometric, arithmetic, needed):.3f}; Table 7 leaves {_least_entropy(cap):.2f} or more with at most"
        f" {float(cap)} a channel, {_least_entropy():.2f} without that",
    )


@cache
def _shuffled(ratio: float) -> dict[str, diagnostics.Baseline]:
    """The baseline of an assignment with the masses of Table 7; in the rest each has `ratio` times the one before."""
    *masses, left = map(float, _fractions())
    falling = ratio ** np.arange(ACTIVE - len(masses))
    counts = np.maximum(np.rint(np.append(masses, left * falling / np.sum(falling)) * _tokens()).astype(int), 1)
    counts[0] += _tokens() - np.sum(counts)
    z = np.repeat(np.arange(len(counts)), counts)
    return diagnostics.permutation_baseline(z, _categories(), np.random.default_rng(0), permutations=12)


def _possible(statistics: tuple[str, ...]) -> Finding:
    """Whether the printed baselines lie between those of a flat and a steep tail, and their spreads are like those."""
    flat, steep = _shuffled(1.0), _shuffled(0.83)  # the steepest with none above the first of Table 7
    good, numbers = [], []
    for name in statistics:
        printed = tables.SHUFFLED[name]
        ends = sorted(base[name].mean for base in (flat, steep))
        (low, high), (least, most) = rounded(printed.mean), rounded(printed.std)
        good.append(low <= ends[1] and ends[0] <= high)
        good.append(all(least / 2 < base[name].std < 2 * most for base in (flat, steep)))
        numbers.append(f"{name.replace('_', ' ')} {ends[0]:.4f} to {ends[1]:.4f}, deviation {flat[name].std:.5f}")
    return holds(
        all(good),
        f"{ACTIVE} components, 8 as in Table 7, the rest alike or each 0.83 of the one before: {'; '.join(numbers)}",
    )


@claim(
    "gma.C54",
    "Shuffled categories leave 0.0067 nats, normalised 0.0038",
    source="appendix F.3, Table 8",
    verdict="holds",
    evidence="property test",
)
def shuffled_information() -> Finding:
    return _possible(STATISTICS[1:])


@claim(
    "gma.C55",
    "Shuffled categories leave a purity of 0.293",
    source="5.4; appendix F.3, Table 8",
    verdict="holds",
    evidence="property test",
)
def shuffled_purity() -> Finding:
    return _possible(STATISTICS[:1])


# --- Table 4: usage and softness -------------------------------------------------------------------------------------


@claim(
    "gma.C56",
    "The responsibilities use most components: 104 of 128 win at least one token",
    source="5.4, Table 4; 6",
    verdict="holds",
    evidence="recomputation",
)
def active() -> Finding:
    alike = COMPONENTS ** float(value(tables.USAGE_ENTROPY))
    return holds(
        2 * ACTIVE > COMPONENTS and 2 * alike > COMPONENTS,
        f"{ACTIVE / COMPONENTS:.4f} of them, {COMPONENTS - ACTIVE} never win; a usage entropy of {tables.USAGE_ENTROPY}"
        f" is that of {alike:.1f} components used alike",
    )


def _groups(size: int) -> np.ndarray:
    """Heads that each use `size` components of their own, all alike, for every token.  (HEADS, 2, COMPONENTS)"""
    gammas = np.zeros((HEADS, 2, COMPONENTS))
    for h in range(HEADS):
        gammas[h, :, h * size : (h + 1) * size] = 1 / size
    return gammas


@claim(
    "gma.C57",
    "A usage entropy of 0.933 shows a latent structure that has not collapsed",
    source="5.4; 6; appendix F.4",
    verdict="holds only if",
    evidence="evaluation",
    why="the average of the heads is meant: 8 heads that use 12 components each, of 128, reach 0.941, and heads that"
    " have collapsed to one each 0.429; 0.933 tells that a head uses 11.6 or more on average",
)
def collapse() -> Finding:
    needed = float(value(tables.USAGE_ENTROPY))
    size = next(
        m for m in range(1, COMPONENTS) if diagnostics.usage_entropy(diagnostics.head_average(_groups(m))) >= needed
    )
    gammas = _groups(size)
    average = diagnostics.usage_entropy(diagnostics.head_average(gammas))
    head = max(diagnostics.usage_entropy(g) for g in gammas)
    collapsed = diagnostics.usage_entropy(diagnostics.head_average(_groups(1)))
    least = math.exp(needed * LOG_K - math.log(HEADS))  # H(average) <= mean H(head) + log HEADS
    return conditional(
        collapsed < needed and 1 < least <= size,
        head >= needed,
        f"{HEADS} heads of {size} components each: {average:.4f} on average, {head:.4f} in each; of one each"
        f" {collapsed:.4f}; {needed} needs {least:.1f}",
    )


@claim(
    "gma.C58",
    "Averaging over heads explains that the averaged responsibilities are soft",
    source="5.4",
    verdict="refuted",
    evidence="property test",
    why="the average of 8 one-hot heads has a largest responsibility of 1/8 or more and a token entropy of 0.429 or"
    " less; Table 4 has 0.103 and 0.790, so the heads themselves are soft, 5.8 components or more",
)
def softness() -> Finding:
    largest, entropies = [], []
    for seed in range(20):
        z = np.random.default_rng(seed).integers(0, COMPONENTS, (HEADS, 50))
        average = diagnostics.head_average(np.eye(COMPONENTS)[z])
        largest.append(diagnostics.mean_max(average))
        entropies.append(diagnostics.token_entropy(average))
    softest, most = 1 / HEADS, math.log(HEADS) / LOG_K
    bounds = min(largest) >= softest and max(entropies) <= most + 1e-12
    high, least = rounded(tables.MEAN_MAX)[1], rounded(tables.TOKEN_ENTROPY)[0]
    own = float(value(tables.TOKEN_ENTROPY)) * LOG_K - math.log(HEADS)
    return holds(
        not bounds or (high >= softest and least <= most),
        f"20 draws of one-hot heads: largest {min(largest):.4f} or more, entropy {max(entropies):.4f} or less; printed"
        f" {tables.MEAN_MAX} and {tables.TOKEN_ENTROPY}, which leave {own:.3f} nats to a head; it would take"
        f" {math.ceil(COMPONENTS**least)} one-hot heads or more",
    )


def _two_heads(swapped: bool) -> tuple[np.ndarray, np.ndarray]:
    """A layer that routes tokens -1 and 1 to components of their own in both heads; those of the second may be swapped.
    -> output, responsibilities averaged over the heads."""
    means = np.array([[-1.0], [1.0]])
    X, W, alpha = np.array([[-1.0], [1.0], [-1.0], [1.0]]), np.ones((2, 1, 1)), np.zeros((2, 2))
    mu = np.stack([means, means[::-1] if swapped else means])
    omega = np.full_like(mu, -5.0)
    O = gma_multi_head.multi_head(X, W, W, W, np.array([[1.0], [2.0]]), mu, omega, alpha)
    return O, diagnostics.head_average(gma_multi_head.head_responsibilities(X, W, mu, omega, alpha))


@claim(
    "gma.C59",
    "Head-averaged channels are properties of the layer that can be interpreted",
    source="5.4; 6; appendix F",
    verdict="refuted",
    evidence="evaluation",
    why="nothing ties component k of one head to component k of another: two heads that route two categories to two"
    " components have purity 1 and log 2 nats, or 1/2 and 0 if the components of one head swap names, and the layer"
    " computes the same",
)
def head_average() -> Finding:
    c = np.array([0, 1, 0, 1])
    (O, gamma), (swapped, other) = _two_heads(False), _two_heads(True)
    z, y = diagnostics.assignments(gamma), diagnostics.assignments(other)
    purities = diagnostics.purity(z, c), diagnostics.purity(y, c)
    nats = diagnostics.mutual_information(z, c), diagnostics.mutual_information(y, c)
    return holds(
        not same(O, swapped) or same(*purities),
        f"outputs {np.max(np.abs(O - swapped)):.0e} apart; purity {purities[0]:g} and {purities[1]:g}, information"
        f" {nats[0]:.3f} and {nats[1]:.3f} nats, token entropy {diagnostics.token_entropy(gamma):.3f} and"
        f" {diagnostics.token_entropy(other):.3f}",
    )


# --- Table 4: purity and information; figure 6 -----------------------------------------------------------------------


@claim(
    "gma.C60",
    "The purity of 0.483 is far above that of shuffled categories",
    source="5.4; appendix F, Tables 7 and 8",
    verdict="holds",
    evidence="recomputation",
)
def purity() -> Finding:
    *masses, left = _fractions()
    shares = [m * value(p) for m, (_, p, _) in zip(masses, tables.CHANNELS.values(), strict=True)]
    rest = (value(tables.PURITY) - sum(shares)) / left
    claimed = {name: sum(s for s, (*_, c) in zip(shares, tables.CHANNELS.values(), strict=True) if c == name)
               for name in tables.CATEGORIES}  # fmt: skip
    fitting = all(claimed[name] <= Fraction(n, _tokens()) for name, (n, _) in tables.CATEGORIES.items())
    base = tables.SHUFFLED["purity"]
    distance = (value(tables.PURITY) - value(base.mean)) / value(base.std)
    return holds(
        distance > 10 and fitting and 0 < rest < 1,
        f"{float(distance):.0f} deviations; Table 7 has {float(1 - left):.3f} of the tokens and"
        f" {float(sum(shares)):.4f} of the purity, so the other channels have {float(rest):.3f} on average",
    )


@claim(
    "gma.C61",
    "A purity of 0.483 and 0.427 nats can belong to one assignment",
    source="Table 4",
    verdict="holds",
    evidence="recomputation",
)
def information_and_purity() -> Finding:
    """Fano from above, Feder and Merhav from below: the error of the best guess bounds H(C | Z) = H(C) - I."""
    error, left = 1 - float(value(tables.PURITY)), diagnostics.entropy(_categories()) - float(value(tables.INFORMATION))
    binary = -error * math.log(error) - (1 - error) * math.log(1 - error)
    most = binary + error * math.log(len(tables.CATEGORIES) - 1)
    i = int(1 / (1 - error))  # (i - 1) / i <= error <= i / (i + 1)
    least = i * (i + 1) * math.log((i + 1) / i) * (error - (i - 1) / i) + math.log(i)
    return holds(least <= left <= most, f"H(C | Z): {least:.3f} <= {left:.3f} <= {most:.3f}")


@claim(
    "gma.C62",
    "The first two principal components hold 12.0% and 7.9% of the variance of the responsibilities",
    source="appendix F.4",
    verdict="not checkable",
    evidence="recomputation",
    why="the responsibilities of the trained model are not printed. The first of 127 directions holds 0.8% or more",
)
def principal_components() -> Finding:
    """K columns that sum to one vary in K - 1 directions: the first holds the mean share or more, and so on."""
    shares, left, possible = (Fraction(120, 1000), Fraction(79, 1000)), Fraction(1), []
    for i, share in enumerate(shares):
        possible.append(left / (COMPONENTS - 1 - i) <= share <= left)
        left -= share
    K = 5
    e = np.exp(np.random.default_rng(0).standard_normal((40, K)))
    drawn = diagnostics.explained_variance(e / np.sum(e, axis=1, keepdims=True))
    return Finding(
        "not checkable" if all(possible) and drawn[0] >= 1 / (K - 1) else "refuted",
        f"both are possible, the first being {1 / (COMPONENTS - 1):.4f} or more; of {K} drawn columns the first has"
        f" {drawn[0]:.3f}, the last {drawn[-1]:.0e}",
    )
