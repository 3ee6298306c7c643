"""Claims of the GMA paper, section 5.1: what Table 1 measures of memory and speed, and what follows from it."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

from mixproof.reference import cost
from mixproof.verify.claims import Finding, claim, conditional, holds
from mixproof.verify.claims import gma_tables as tables
from mixproof.verify.claims.gma_tables import SIZES, fits, quotient, value

RIVALS = ("SDPA", "Linear Transformer", "Mamba", "Performer")  # those that the paper names
NUMBER = 4  # bytes of a float32


def _steps(K: int) -> list[tuple[Fraction, Fraction]]:
    """By how much the memory of GMA grows for each doubling of N."""
    memory = tables.GMA_PROFILES[K].memory
    return [quotient(y, x) for x, y in itertools.pairwise(memory)]


def _slopes() -> list[Fraction]:
    """GB that a further component takes at the longest N, between neighbouring K."""
    last = [(K, value(p.memory[-1])) for K, p in tables.GMA_PROFILES.items()]
    return [(y - x) / (L - K) for (K, x), (L, y) in itertools.pairwise(last)]


def _of_eager(slope: Fraction) -> Fraction:
    """N x K tensors that a further component adds to, if eager attention holds as many N x N tensors as it should:
    batch, heads and bytes cancel."""
    squares = [a for a, _ in fits([(N * N, N) for N in SIZES], tables.PROFILES["eager"].memory)]
    square = sum(squares, Fraction(0)) / len(squares)
    return cost.EAGER_ATTENTION_TENSORS * slope / (SIZES[-1] * square)


@claim(
    "gma.C37",
    "Eager multi-head attention takes memory that grows as N^2",
    source="5.1, Table 1",
    verdict="holds",
    evidence="recomputation",
)
def eager_memory() -> Finding:
    memory = tables.PROFILES["eager"].memory
    corners = fits([(N * N, N) for N in SIZES], memory)
    linear = fits([(N, 1) for N in SIZES], memory)
    if not corners:
        return holds(False, f"no a N^2 + b N rounds to {memory}")
    squares = [a * tables.GIGABYTE for a, _ in corners]
    share = min(a * SIZES[0] ** 2 for a, _ in corners) / value(memory[0])
    low, high = (float(a / (NUMBER * 96)) for a in (min(squares), max(squares)))
    return holds(
        share > Fraction(1, 2) and not linear,
        f"a N^2 + b N with a from {float(min(squares)):.0f} to {float(max(squares)):.0f} bytes rounds to all three, no"
        f" a N + b does; {low:.2f} to {high:.2f} float32 matrices if batch times heads is 96, as 8 x 12",
    )


@claim(
    "gma.C38",
    "With K fixed, the memory of GMA grows about linearly with N",
    source="5.1, Table 1; 6",
    verdict="holds",
    evidence="recomputation",
)
def linear_memory() -> Finding:
    steps = {K: _steps(K) for K in tables.GMA_PROFILES}
    ends = [float(end) for K in steps for step in steps[K] for end in step]
    eager = [float(end) for x, y in itertools.pairwise(tables.PROFILES["eager"].memory) for end in quotient(y, x)]
    exact = [K for K, p in tables.GMA_PROFILES.items() if fits([(N, 1) for N in SIZES], p.memory)]
    return holds(
        all(abs(math.log2(x) - 1) < 0.1 for x in ends) and not any(abs(math.log2(x) - 1) < 0.1 for x in eager),
        f"twice the tokens take {min(ends):.2f} to {max(ends):.2f} times the memory, roundings included, in eager"
        f" attention {min(eager):.2f} to {max(eager):.2f}; an affine function of N rounds to the three numbers only for"
        f" K in {exact}",
    )


@claim(
    "gma.C39",
    "With N fixed, memory and arithmetic grow linearly with K",
    source="5.1",
    verdict="holds only if",
    evidence="recomputation",
    why="linearly means above a constant: at N = 4000, 8 times the components take 4.6 times the memory and 2.65 times"
    " the time; and the memory of a further component itself grows, by an eighth from 64 to 512",
)
def linear_in_components() -> Finding:
    sizes = list(tables.GMA_PROFILES)
    flops = [cost.gma_flops(SIZES[-1], K, 64, 64) for K in sizes]
    counted = {Fraction(y - x, L - K) for (K, x), (L, y) in itertools.pairwise(zip(sizes, flops, strict=True))}
    slopes = _slopes()
    first, last = (tables.GMA_PROFILES[K] for K in (sizes[0], sizes[-1]))
    memory, time = quotient(last.memory[-1], first.memory[-1]), quotient(first.speed[-1], last.speed[-1])
    times = sizes[-1] // sizes[0]
    return conditional(
        len(counted) == 1 and max(slopes) < Fraction(5, 4) * min(slopes),
        memory[1] >= times and time[1] >= times,
        f"{times} K: memory times {float(memory[0]):.2f} to {float(memory[1]):.2f}, time times {float(time[0]):.2f} to"
        f" {float(time[1]):.2f}; a component takes {', '.join(f'{1000 * float(s):.1f}' for s in slopes)} MB; counted"
        f" operations grow by {[int(c) for c in counted]} a component",
    )


@claim(
    "gma.C40",
    "Activation memory grows with K through the two responsibility tensors of B H N K numbers",
    source="5.1",
    verdict="holds only if",
    evidence="recomputation",
    why="all tensors of that shape are meant, 7 to 8 at the peak: the two responsibilities alone would be about a"
    " quarter of the growth",
)
def through_responsibilities() -> Finding:
    tensors = [_of_eager(slope) for slope in _slopes()]
    share = 2 / (sum(tensors, Fraction(0)) / len(tensors))
    return conditional(
        cost.EAGER_GMA_TENSORS - 1 <= min(tensors) and max(tensors) < cost.EAGER_GMA_TENSORS + Fraction(1, 10),
        share >= Fraction(1, 2),
        f"from K to 2 K, {', '.join(f'{float(t):.2f}' for t in tensors)} tensors if eager attention holds"
        f" {cost.EAGER_ATTENTION_TENSORS} of N x N; two of them are {float(share):.2f} of the growth",
    )


@claim(
    "gma.C41",
    "Summed over heads whose dimensions sum to D, the arithmetic is O(B N K D)",
    source="5.1",
    verdict="holds only if",
    evidence="exact arithmetic",
    why="the projections are left out: they take 8 N D^2 operations, 7.8 times the rest at D = 768, K = 64, and no"
    " multiple of N K D bounds them",
)
def arithmetic() -> Finding:
    def mixing(N: int, K: int, D: int, H: int) -> int:
        return H * cost.gma_flops(N, K, D // H, D // H)

    grid = list(itertools.product((16, 1000), (1, 64), (64, 768, 4096), (1, 8)))
    exact = all(mixing(N, K, D, H) == 12 * N * K * D + 15 * N * K * H + N * (D + H) for N, K, D, H in grid)
    most = max(Fraction(mixing(N, K, D, H), N * K * D) for N, K, D, H in grid)
    N, K, H = 1000, 64, 12
    ratios = [Fraction(2 * N * cost.projections(D), mixing(N, K, D, H)) for D in (768, 1536, 3072)]
    return conditional(
        exact and most <= 12 + 15 + 2,
        ratios[-1] < 2 * ratios[0],
        f"12 N K D + 15 N K H + N (D + H) at {len(grid)} sizes, {float(most):.1f} N K D at most; projections over the"
        f" rest, K = {K}: " + ", ".join(f"{float(r):.1f}" for r in ratios) + " at D = 768, 1536, 3072",
    )


@claim(
    "gma.C42",
    "GMA has larger constant factors than SDPA, Linear Transformer, Mamba and Performer",
    source="5.1; 6",
    verdict="holds only if",
    evidence="recomputation",
    why="factors of time are meant: at N = 4000 Performer takes 2.30 GB, GMA 1.37 with 64 components and 2.02 with 128",
)
def constant_factors() -> Finding:
    mine, others = tables.GMA_PROFILES, {name: tables.PROFILES[name] for name in RIVALS}
    slower = all(
        value(g.speed[i]) < value(o.speed[i]) for g in mine.values() for o in others.values() for i in range(3)
    )
    leaner = [
        f"{name} with K = {K}"
        for K, g in mine.items()
        for name, o in others.items()
        if all(value(g.memory[i]) < value(o.memory[i]) for i in range(3))
    ]
    fastest = max(value(g.speed[-1]) for g in mine.values())
    ratios = [float(value(o.speed[-1]) / fastest) for o in others.values()]
    return conditional(
        slower,
        not leaner,
        f"at N = 4000 they are {min(ratios):.1f} to {max(ratios):.1f} times as fast as GMA at its fastest; at all N it"
        f" takes less memory than {', '.join(leaner) or 'none'}",
    )


@claim(
    "gma.C43",
    "With K = 256 throughput stays nearly constant from N = 1000 to 4000",
    source="5.1",
    verdict="holds",
    evidence="recomputation",
)
def constant_throughput() -> Finding:
    speed, eager = tables.GMA_PROFILES[256].speed, tables.PROFILES["eager"].speed
    low, high = quotient(speed[-1], speed[0])
    falls = quotient(eager[-1], eager[0])
    return holds(
        Fraction(9, 10) < low <= high < Fraction(11, 10) and falls[1] < Fraction(1, 2),
        f"{speed[0]} to {speed[-1]}: times {float(low):.3f} to {float(high):.3f}; eager attention times"
        f" {float(falls[1]):.2f}",
    )


@claim(
    "gma.C44",
    "GMA avoids the quadratic memory of attention that writes its matrix out",
    source="abstract; 5.1; 6",
    verdict="holds only if",
    evidence="recomputation",
    why="N is above about 2 K, where 8 tensors of N x K are less than 4 of N x N: with 1000 tokens and 512 components"
    " GMA takes 1.59 GB, eager attention 1.47. It never takes less than SDPA, which is linear too",
)
def less_than_eager() -> Finding:
    eager, fused = tables.PROFILES["eager"].memory, tables.PROFILES["SDPA"].memory
    cases = [(N, K, value(p.memory[i]), value(eager[i]), value(fused[i]))
             for K, p in tables.GMA_PROFILES.items() for i, N in enumerate(SIZES)]  # fmt: skip
    above = [mine < theirs for N, K, mine, theirs, _ in cases if cost.eager_crossover(K) < N]
    below = [(N, K) for N, K, mine, theirs, _ in cases if N <= cost.eager_crossover(K) and mine >= theirs]
    ratios = [float(mine / theirs) for *_, mine, _, theirs in cases]
    return conditional(
        all(above) and all(mine > theirs for *_, mine, _, theirs in cases),
        not below,
        f"less than eager attention in all {len(above)} cases of N > 2 K, not at (N, K) = {below}; {min(ratios):.1f} to"
        f" {max(ratios):.1f} times as much as SDPA",
    )


@claim(
    "gma.C70",
    "GMA takes time linear in N",
    source="abstract; title; Table 1",
    verdict="holds",
    evidence="recomputation",
)
def linear_time() -> Finding:
    times = {K: [1 / value(s) for s in p.speed] for K, p in tables.GMA_PROFILES.items()}
    steps = [float(y / x) for t in times.values() for x, y in itertools.pairwise(t)]
    second = [cost.gma_flops(N, 64, 64, 64) for N in (1000, 2000, 3000)]
    eager = [1 / value(s) for s in tables.PROFILES["eager"].speed]
    return holds(
        all(0.9 < s <= 1 for s in steps) and second[2] - 2 * second[1] + second[0] == 0 and eager[-1] > 2 * eager[0],
        "microseconds a token at N = 1000 and 4000: "
        + ", ".join(f"{1e6 * float(t[0]):.3f} and {1e6 * float(t[-1]):.3f} with K = {K}" for K, t in times.items())
        + f"; eager attention {1e6 * float(eager[0]):.2f} and {1e6 * float(eager[-1]):.2f}",
    )


@claim(
    "gma.C71",
    "Where K << N the advantage in scaling shows at longer sequences",
    source="5.3",
    verdict="not checkable",
    evidence="recomputation",
    why="no length that was measured shows it: with K = 64 GMA counts fewer operations than attention from 192 tokens,"
    " and at 4000 SDPA is 3.2 times as fast; its memory is linear too",
)
def longer_sequences() -> Finding:
    K, fused = 64, tables.PROFILES["SDPA"]
    mine = tables.GMA_PROFILES[K]
    crossing = next(N for N in range(1, 10**4) if cost.gma_flops(N, K, 64, 64) < cost.attention_flops(N, 64, 64))
    faster = [float(value(theirs) / value(own)) for theirs, own in zip(fused.speed, mine.speed, strict=True)]
    more = [float(value(own) / value(theirs)) for theirs, own in zip(fused.memory, mine.memory, strict=True)]
    seen = faster[-1] < 1 or more[-1] < 1
    return Finding(
        "holds" if seen else "not checkable",
        f"K = {K}: fewer operations from N = {crossing}; at N = 1000, 2000, 4000 SDPA is"
        f" {', '.join(f'{x:.1f}' for x in faster)} times as fast and GMA takes {', '.join(f'{x:.1f}' for x in more)}"
        " times its memory",
    )
