"""Claims of the survey, sections 8 to 10: attention over latents, MLA, GQLA and MLRA."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from mixproof.reference import cost_survey, gqla, mla, mlra
from mixproof.verify.claims import Finding, claim, conditional, holds, unchecked
from mixproof.verify.claims.evidence import apart, draw, one_function, same

SIZES = {"T": 4, "K": 2, "R": 2, "L": 3, "V": 2}

# --- 8. MLA ----------------------------------------------------------------------------------------------------------


@claim(
    "survey.L1",
    "The paper of section 8 is arXiv 2506.09392",
    source="8; 8.3",
    verdict="refuted",
    evidence="reading of a text",
    why="the table of 8.3 has 2506.09342 for the same title, which is its address",
)
def identifier() -> Finding:
    text, table = "2506.09392", "2506.09342"
    return holds(text == table, f"{text} in the text, {table} in the table")


@claim(
    "survey.L2",
    "A latent of half the width, r = d / 2, halves the cache",
    source="8, 8.2, 8.3",
    verdict="refuted",
    evidence="recomputation",
    why="d = 2, r = 1: one number where keys and values are four. A quarter remains; the text also prints a cut of 45%",
)
def half_rank() -> Finding:
    remains = {d: Fraction(cost_survey.latent_cache(d // 2), cost_survey.head_cache(1, d)) for d in (2, 512)}
    return holds(
        set(remains.values()) == {Fraction(1, 2)},
        ", ".join(f"d = {d}: {share} remains" for d, share in remains.items()) + "; printed 1/2, and 55/100",
    )


@claim(
    "survey.L3",
    "With RoPE on the decompressed keys, decoding needs the cached latents only",
    source="8.1, 8.2",
    verdict="holds only if",
    evidence="exact arithmetic",
    why="all keys are expanded anew for every token, or a rotary part of its own is cached beside the latent. Equal"
    " latents at two positions, q = k = (1, 0): the weights are 0.42 and 0.58, and whatever is absorbed gives 1/2 each",
)
def absorption_under_rope() -> Finding:
    decoupled, points = one_function(mla.OPERATOR, N=2, **SIZES)
    q, c = np.array([[[1.0, 0.0]]] * 2), np.ones((2, 1))
    up, marks = np.array([[[1.0], [0.0]]]), np.array([[[1.0]]])
    weight = []
    for latents in (c * [[1], [0]], c * [[0], [1]]):  # values tell the tokens apart, keys stay alike
        both = np.concatenate([c, latents], axis=1)
        to_keys, to_values = np.concatenate([up, 0 * up], axis=2), np.concatenate([0 * marks, marks], axis=2)
        weight.append(mla.decompressed(q, both, to_keys, to_values)[0][1, 0, 0])
    return conditional(
        decoupled,
        same(*weight),
        f"decoupled: {points}; turned after decompression, equal latents weigh {weight[0]:.3f} and {weight[1]:.3f}",
    )


@claim(
    "survey.L4",
    "Decoding with MLA takes O(r) space",
    source="8.3, Inference complexity",
    verdict="holds only if",
    evidence="evaluation",
    why="space is that of a token: the cache has n latents",
)
def latent_space() -> Finding:
    def latents(T: int) -> int:
        inputs = draw(mla.OPERATOR, N=1, **SIZES | {"T": T})
        return mla.absorbed(**inputs)[1].size

    return conditional(
        latents(2) // 2 == latents(8) // 8 == SIZES["L"],
        latents(2) == latents(8),
        f"r = {SIZES['L']}: {latents(2)} numbers after 2 tokens, {latents(8)} after 8",
    )


L5 = unchecked(
    "survey.L5",
    "MLA costs 0.3% of validation loss, and surpasses vanilla attention by 2%",
    source="8, 8.3",
    why="results of trained models; the two can be true together only of different baselines, which are not named",
)
L6 = unchecked(
    "survey.L6",
    "MLA with r = d / 2 decodes 1.4 times as fast as with full rank on an A100",
    source="8.2",
    why="a time measured on one device",
)

# --- 9. GQLA ---------------------------------------------------------------------------------------------------------


@claim(
    "survey.G1",
    "GQLA's absorbed and grouped decoding paths are algebraically equal",
    source="9, 9.1",
    verdict="holds only if",
    evidence="exact arithmetic",
    why="what RoPE turns is decoupled from the latent, not the decompressed key as in section 8, from which the text"
    " takes its compression; the equation printed for it has the absorbed path on both sides",
)
def two_paths() -> Finding:
    equal, points = one_function(gqla.OPERATOR, G=2, M=2, **SIZES)
    x = draw(mla.DECOMPRESSED, N=1, T=3, K=2, L=1, V=1)
    none = np.zeros((3, 0))
    turned = mla.decompressed(**x)[0]
    absorbed = mla.absorbed(x["q"], none[:, None], x["c"], none, x["Uk"], x["Uv"])[0]
    return conditional(
        equal,
        same(turned, absorbed),
        f"{points}; absorbed under turned keys the output is {apart(turned, absorbed):.2f} off",
    )


LLAMA = {"groups": 8, "d_head": 128}
RANK, ROTARY = 512, 64


@claim(
    "survey.G2",
    "On LLaMA-3-8B the absorbed path caches 28.125% of what GQA does, an O(r) cache",
    source="9, 9.2",
    verdict="holds only if",
    evidence="recomputation",
    why="r = 512 and a rotary key of 64 is cached beside the latent; the latent alone would be 25%",
)
def absorbed_cache() -> Finding:
    whole = cost_survey.head_cache(**LLAMA)
    share = [Fraction(100 * cost_survey.latent_cache(RANK, rotary), whole) for rotary in (ROTARY, 0)]
    return conditional(
        float(share[0]) == 28.125,
        float(share[1]) == 28.125,
        f"({RANK} + {ROTARY}) / (2 x 8 x 128) = {float(share[0])}%, {RANK} / 2048 = {float(share[1])}%",
    )


@claim(
    "survey.G3",
    "The grouped path caches O(G d_h n) and keeps the traffic of GQA",
    source="9, 9.2",
    verdict="holds only if",
    evidence="recomputation",
    why="the rotary key is left out: with it a token has 2112 numbers, 103.1% of GQA's 2048",
)
def grouped_cache() -> Finding:
    whole = cost_survey.head_cache(**LLAMA)
    path = [cost_survey.expanded_cache(**LLAMA, rotary=rotary) for rotary in (0, ROTARY)]
    return conditional(path[0] == whole, path[1] == whole, f"{path[0]} and {path[1]} of {whole}: {path[1] / whole:.1%}")


@claim(
    "survey.G4",
    "GQLA has somewhat more parameters than MLA",
    source="9.3, Cons",
    verdict="refuted",
    evidence="recomputation",
    why="up-projections of G groups instead of H heads: fewer, 8 for 32 with the sizes of LLaMA-3-8B",
)
def group_parameters() -> Finding:
    grouped, by_head = (cost_survey.up_projections(groups, 128, RANK) for groups in (8, 32))
    return holds(grouped > by_head, f"{grouped} for 8 groups, {by_head} for 32 heads of 128, r = {RANK}")


@claim(
    "survey.G5",
    "On the grouped path tensor parallelism over 8 devices duplicates nothing",
    source="9, 9.3",
    verdict="holds only if",
    evidence="recomputation",
    why="no rotary key is shared by the groups: with one of 64 on each device, 1.21 times the cache is held",
)
def tensor_parallel() -> Finding:
    def held(rotary: int) -> Fraction:
        each = cost_survey.expanded_cache(1, LLAMA["d_head"], rotary)
        return Fraction(8 * each, cost_survey.expanded_cache(**LLAMA, rotary=rotary))

    return conditional(held(0) == 1, held(ROTARY) == 1, f"8 x (256 + 64) / 2112 = {float(held(ROTARY)):.3f}")


# --- 10. MLRA --------------------------------------------------------------------------------------------------------


@claim(
    "survey.P1",
    "Each of L devices loads 1 / L of the cache",
    source="10, 10.2, 10.3",
    verdict="holds only if",
    evidence="recomputation",
    why="the rotary key is left out: with r = 512, d_r = 64, L = 4 a device loads 192 of 576 numbers, a third",
)
def device_share() -> Finding:
    def share(rotary: int) -> Fraction:
        return Fraction(cost_survey.block_cache(RANK, 4, rotary), cost_survey.latent_cache(RANK, rotary))

    return conditional(share(0) == Fraction(1, 4), share(ROTARY) == Fraction(1, 4), f"{share(0)}, and {share(ROTARY)}")


@claim(
    "survey.P2",
    "MLRA joins what the blocks decompress to and takes one softmax",
    source="10.1",
    verdict="refuted",
    evidence="evaluation",
    why="the released code sums L softmaxes, each head reading all blocks: a change in the latents of block 2 moves the"
    " head that as printed reads block 1 alone",
)
def one_softmax() -> Finding:
    sizes = SIZES | {"X": 2}
    printed, official = draw(mlra.CONCATENATED, M=1, **sizes), draw(mlra.OPERATOR, N=2, **sizes)
    moved = np.zeros_like(printed["c"])
    moved[:, 1] = 1
    by_printed, by_official = (
        [form(**inputs | {"c": inputs["c"] + x})[0] for x in (0, moved)]
        for form, inputs in ((mlra.concatenated, printed), (mlra.expanded, official))
    )
    first = apart(*(O[:, 0] for O in by_printed)), apart(*(O[:, 0] for O in by_official))
    return holds(
        (first[0] == 0) == (first[1] == 0),
        f"the first head moves by {first[0]:g} as printed, {first[1]:.2f} as released",
    )


@claim(
    "survey.P3",
    "MLRA needs L to divide the latent rank and H d_h, nothing else",
    source="10.3, Cons",
    verdict="refuted",
    evidence="exact arithmetic",
    why="H = 3, d_h = 4, L = 2: each block gives 6 of 12 columns, so that the second head needs both; L must divide H",
)
def divisibility() -> Finding:
    def local(H: int, d: int, L: int) -> bool:
        """Whether the columns of each head come from one block."""
        width = H * d // L
        return all(h * d // width == ((h + 1) * d - 1) // width for h in range(H))

    cases = [(H, d, L) for H in range(1, 9) for d in range(1, 9) for L in range(1, 9) if H * d % L == 0]
    split = [(H, d, L) for H, d, L in cases if not local(H, d, L)]
    divides = all(local(H, d, L) == (H % L == 0) for H, d, L in cases)
    return holds(
        not split,
        f"{len(cases)} sizes with L dividing H d_h: {len(split)} split a head, (3, 4, 2) among them:"
        f" {(3, 4, 2) in split}; just those where L does not divide H: {divides}",
    )


@claim(
    "survey.P4",
    "Up-projections of their own for each block add parameters",
    source="10.3, Cons",
    verdict="refuted",
    evidence="recomputation",
    why="H = 2, d_h = r = 4, L = 2: 32 as printed where MLA has 64; the released code, whose heads read every block,"
    " has 64",
)
def block_parameters() -> Finding:
    whole, printed = (cost_survey.up_projections(2, 4, 4, blocks) for blocks in (1, 2))
    released = 2 * cost_survey.up_projections(2, 4, 2)
    return holds(printed > whole, f"MLA {whole}, as printed {printed}, as released {released}")


P5 = unchecked(
    "survey.P5",
    "MLRA decodes 2.8 times as fast as MLA, at state-of-the-art perplexity",
    source="10, 10.2",
    why="times on devices, and results of trained models",
)
