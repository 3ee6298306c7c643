"""Claims of the survey about itself: its count, its numbering, what its variants have in common."""

from __future__ import annotations

import math
from collections import Counter

from mixproof.reference import cca, iha
from mixproof.verify.claims import Finding, claim, conditional, holds, unchecked
from mixproof.verify.claims.evidence import draw

BASES = ("standard attention", "sigmoid attention", "RetNet", "Mamba", "ODE Transformer", "Titans")
VARIANTS = ("MLA", "GQLA", "MLRA", "Tucker", "IHA", "GTA", "MTLA", "CCA", "CCGQA")
SECTIONS = "1 2 3 4 5 6 8 9 10 11 12 13 14 15 16 17"
SUBSECTIONS = (
    "1.1 1.2 1.3 2.1 2.2 2.3 2.4 3.1 3.2 3.3 4.1 4.2 4.3 5.2 5.3 6.1 6.2 6.3 8.1 8.2 8.3 9.1 9.2 9.3 10.1 10.2 10.3"
    " 11.1 11.2 11.3 12.1 12.2 12.3 13.1 13.2 13.3 14.1 14.2 14.3 15.1 15.2 15.3 16.1 16.2 16.3 15.1 15.2 15.3 15.4"
)


@claim(
    "survey.N1",
    "Fifteen architectures are compared",
    source="introduction",
    verdict="holds",
    evidence="reading of a text",
)
def fifteen() -> Finding:
    return holds(len(BASES) + len(VARIANTS) == 15, f"{len(BASES)} architectures and {len(VARIANTS)} variants")


@claim(
    "survey.N2",
    "Sections are numbered in sequence",
    source="all headings",
    verdict="refuted",
    evidence="reading of a text",
    why="there is no section 7 and no 5.1, and the subsections of 17 are called 15.1 to 15.4, three of which exist"
    " already",
)
def numbering() -> Finding:
    sections = list(map(int, SECTIONS.split()))
    missing = sorted(set(range(1, sections[-1] + 1)) - set(sections))
    twice = [name for name, n in Counter(SUBSECTIONS.split()).items() if n > 1]
    last = {s: int(name.split(".")[1]) for name in SUBSECTIONS.split() for s in [int(name.split(".")[0])]}
    absent = [f"{s}.{i}" for s in last for i in range(1, last[s] + 1) if f"{s}.{i}" not in SUBSECTIONS.split()]
    return holds(not (missing or twice or absent), f"missing sections {missing}, subsections {absent}; twice: {twice}")


@claim(
    "survey.N3",
    "The nine variants compress keys and values, or mix heads, and each generalises grouped-query attention",
    source="introduction",
    verdict="refuted",
    evidence="evaluation",
    why="interleaved heads cache the keys and values of all heads, as many numbers as multi-head attention, and have no"
    " groups; CCA has as many keys as queries",
)
def variants() -> Finding:
    x = draw(iha.OPERATOR, T=3, N=4, J=2, K=2, V=2)
    _, Kc, Vc = iha.interleaved(**x)
    whole = 3 * 2 * 4 * 2
    axes = {name: next(i for i in cca.OPERATOR.inputs if i.name == name).axes for name in ("q", "k")}
    return holds(
        Kc.size + Vc.size < whole and axes["q"] != axes["k"],
        f"3 tokens, 4 heads of 2: interleaved heads cache {Kc.size + Vc.size} numbers, MHA {whole}; queries and keys of"
        f" CCA both {axes['q']}",
    )


N4 = unchecked(
    "survey.N4",
    "The first author of CCA is called Figliola",
    source="15, 16",
    why="another index spells the name Figliolia; the paper itself was not read here",
)


@claim(
    "survey.N5",
    "The impossible triangle is solved: parallel training, constant-time inference, full performance at once",
    source="introduction; 3.3, Pros",
    verdict="holds only if",
    evidence="recomputation",
    why="performance means what was measured: a state of fixed size tells finitely many pasts apart (survey.T6), and to"
    " lose none of n tokens it has to grow with n",
)
def triangle() -> Finding:
    def needed(n: int, token_bits: int = 16) -> int:
        """Bits of a state that tells all pasts of n tokens apart."""
        return math.ceil(math.log2(2 ** (token_bits * n)))

    state = 64 * 64 * 32
    return conditional(
        needed(1000) <= state,
        needed(10000) <= state,
        f"a 64 x 64 state in float32 has {state} bits; 1000 tokens of 16 bits need {needed(1000)}, 10000"
        f" {needed(10000)}",
    )
