"""Claims of the survey, sections 14 to 16: MTLA, which merges tokens, and CCA and CCGQA, which attend in a latent."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np

from mixproof.reference import cca, ccgqa, cost_survey, mla, mtla
from mixproof.verify.claims import Finding, claim, conditional, holds, unchecked
from mixproof.verify.claims.evidence import HALF_OF_THE_DIGITS, apart, draw, same

LATENT = {"N": 2, "K": 2, "R": 2, "L": 3, "V": 2}
CONVOLVED = {"T": 6, "G": 2, "K": 4, "V": 4, "W": 3, "J": 2}

# --- 14. MTLA --------------------------------------------------------------------------------------------------------


@claim(
    "survey.B1",
    "The latents of a window are merged by a gated average",
    source="14.1",
    verdict="refuted",
    evidence="evaluation",
    why="the released code sums sigmoid(w) c without a normaliser: two latents of 1 with weights of 3/4 make 3/2",
)
def gated_average() -> Finding:
    x = draw(mtla.OPERATOR, T=2, **LATENT | {"L": 1}) | {"c": np.ones((2, 1)), "w": np.full(2, math.log(3))}
    slot = mtla.parallel(**x)[1].item()
    return holds(same(slot, 1.0), f"the slot of two latents of 1 holds {slot:g}")


@claim(
    "survey.B2",
    "The windows have a size m, and a stride s of their own",
    source="14.1",
    verdict="refuted",
    evidence="property test",
    why="m = 2, s = 1 would have token 2 in two windows; the slots of the released code part the tokens, so m = s",
)
def window_and_stride() -> Finding:
    cases = [(T, stride) for T in range(1, 20) for stride in range(1, 6)]
    parts = [[t for slot in mtla.slots(T, stride, 0) for t in range(T)[slot]] == list(range(T)) for T, stride in cases]
    return holds(not all(parts), f"{len(cases)} lengths and strides: every token is in one slot: {all(parts)}")


@claim(
    "survey.B3",
    "The stride-aware mask makes training agree with decoding and keeps causality across merges",
    source="14, 14.1",
    verdict="holds only if",
    evidence="property test",
    why="a query sees its own slot as far as it has come, and a slot's rotary key is that of its latest token. Windows"
    " that are merged before they are masked show the first of two tokens the second: its slot holds c_0 / 2 + c_1 / 2",
)
def merged_causality() -> Finding:
    gaps, leak = [], 0.0
    for seed, stride in enumerate((2, 3, 4)):
        x = draw(mtla.OPERATOR, seed, T=7, **LATENT)
        trained, decoded = mtla.parallel(**x, stride=stride), mtla.incremental(**x, stride=stride)
        x["c"] = np.concatenate([x["c"][:4], x["c"][4:] + 100])
        leak = max(leak, apart(trained[0][:4], mtla.parallel(**x, stride=stride)[0][:4]))
        gaps.append(apart(trained[0], decoded[0]))
    two = draw(mtla.OPERATOR, T=2, **LATENT | {"L": 1}) | {"c": np.array([[1.0], [1.0]]), "w": np.zeros(2)}
    merged, own = mtla.parallel(**two)[1].item(), mtla.parallel(**_first(two))[1].item()
    return conditional(
        max(gaps) < HALF_OF_THE_DIGITS and leak == 0,
        same(merged, own),
        f"strides 2, 3, 4: training and decoding {max(gaps):.0e} apart, later latents move {leak:g}; the slot of the"
        f" first token holds {own:g}, merged before the mask {merged:g}",
    )


def _first(inputs: dict[str, Any]) -> dict[str, Any]:
    """The first token by itself."""
    return {name: x[:1] if name in ("qc", "qr", "c", "w", "kr") else x for name, x in inputs.items()}


@claim(
    "survey.B4",
    "Training takes O(n^2 d / m) time",
    source="14.2, 14.3",
    verdict="holds only if",
    evidence="recomputation",
    why="the pairs that the mask lets through are computed alone; the parallel form weighs all n partial sums, of which"
    " one in m is closed, and hides the others",
)
def merged_pairs() -> Finding:
    n, stride = 512, 4
    share = Fraction(cost_survey.slots_seen(n, stride), cost_survey.slots_seen(n, 1))
    dense = Fraction(n * (n // stride + n), n * n)
    return conditional(
        abs(float(share) * stride - 1) < 2 * stride / n,
        float(dense) * stride <= 2,
        f"n = {n}, m = {stride}: {float(share):.4f} of all pairs are seen, {float(dense):.2f} n^2 are weighed",
    )


@claim(
    "survey.B5",
    "Memory on the GPU falls 8.3 times, decoding is 5.3 times as fast",
    source="14, 14.2, 14.3",
    verdict="not checkable",
    evidence="recomputation",
    why="both are measured; the cache of the released sizes would be 7.11 times smaller at a stride of 2, 10.67 at 3",
)
def memory_ratio() -> Finding:
    whole = cost_survey.head_cache(8, 64)
    ratios = {s: Fraction(3 * whole, cost_survey.merged_cache(3, 256, 32, s)) for s in (1, 3)}
    ratios[2] = Fraction(2 * whole, cost_survey.merged_cache(2, 256, 32, 2))
    by_caches = any(abs(float(r) - 8.3) < 0.05 for r in ratios.values())
    return Finding(
        "holds" if by_caches else "not checkable",
        "caches alone, 8 heads of 64, r = 256, d_r = 32: "
        + ", ".join(f"{float(ratios[s]):.2f} at {s}" for s in (1, 2, 3)),
    )


@claim(
    "survey.B6",
    "MTLA extends MLA: with windows of one token it is MLA",
    source="14, 14.1",
    verdict="holds only if",
    evidence="evaluation",
    why="the weights are 1: a window of one token still holds sigmoid(w) c, half the latent at w = 0",
)
def windows_of_one() -> Finding:
    x = draw(mtla.OPERATOR, T=5, **LATENT)
    w = x.pop("w")
    want = mla.expanded(**x)[0]
    gaps = [apart(mtla.parallel(**x, w=0 * w + bias, stride=1)[0], want) for bias in (40.0, 0.0)]
    return conditional(
        gaps[0] < HALF_OF_THE_DIGITS,
        gaps[1] < HALF_OF_THE_DIGITS,
        f"{gaps[0]:.0e} apart at w = 40, {gaps[1]:.2f} at w = 0",
    )


# --- 15. CCA ---------------------------------------------------------------------------------------------------------


@claim(
    "survey.C1",
    "Queries, keys and values are projected down to one shared latent, and never up again",
    source="15, 15.1",
    verdict="holds only if",
    evidence="reading of a text",
    why="shared is only the width: W_Q, W_K, W_V are three projections, as are V_1 and V_2; the output projection is"
    " the one way up",
)
def one_latent() -> Finding:
    inputs = {x.name: x for x in cca.OPERATOR.inputs}
    outputs = {y.name: y for y in cca.OPERATOR.outputs}
    tokens = [x.name for x in cca.OPERATOR.inputs if x.role == "token"]
    stays = inputs["v"].axes == outputs["O"].axes and inputs["k"].axes[1:] == outputs["Kc"].axes[1:]
    return conditional(
        stays,
        len(tokens) == 1,
        f"attention takes {', '.join(tokens)} from outside; keys stay {inputs['k'].axes[1:]}, values"
        f" {outputs['O'].axes[1:]}",
    )


@claim(
    "survey.C2",
    "CCA needs C times fewer operations, every projection and the convolutions included",
    source="15.2",
    verdict="holds only if",
    evidence="recomputation",
    why="the convolutions are left out: with kernels of 4 and heads of 128 they are 12.6% of the projections, E = 2048",
)
def compressed_operations() -> Finding:
    E, C, d = 2048, 4, 128
    projections, whole = cost_survey.compressed_layer(E, C), 4 * E * E
    convolutions = 2 * cost_survey.mixing_weights(E // C, d, 4, 4)
    return conditional(
        projections * C == whole,
        (projections + convolutions) * C == whole,
        f"E = {E}, C = {C}: {whole / projections:g} times fewer in projections,"
        f" {whole / (projections + convolutions):.2f} with convolutions, {convolutions / projections:.1%} of them",
    )


@claim(
    "survey.C3",
    "The cache is O(e n), e the latent width",
    source="15.2, 15.3",
    verdict="holds",
    evidence="evaluation",
)
def compressed_cache() -> Finding:
    sizes = {}
    for T in (4, 8):
        _, q, k, v, Kc, Vc = cca.parallel(**draw(cca.OPERATOR, **CONVOLVED | {"T": T}))
        sizes[T] = Kc.size + Vc.size, q.size + k.size + v.size
    width = CONVOLVED["G"] * CONVOLVED["K"]
    beside = cost_survey.convolution_state(width, width, CONVOLVED["W"] + CONVOLVED["J"])
    return holds(
        all(sizes[T] == (2 * width * T, beside) for T in sizes),
        f"e = {width}: 2 e a token, {sizes[4][0]} numbers after 4 tokens and {sizes[8][0]} after 8, and {beside} that"
        " stay",
    )


@claim(
    "survey.C4",
    "Convolutions, mean of queries and keys and shift of values are causal",
    source="15, 15.1",
    verdict="holds",
    evidence="property test",
)
def convolved_causality() -> Finding:
    leak, moved = 0.0, 1.0
    for seed in range(5):
        x = draw(cca.OPERATOR, seed, **CONVOLVED)
        before = cca.parallel(**x)[0]
        x |= {n: np.concatenate([x[n][:3], x[n][3:] + 100]) for n in ("q", "k", "v")}
        after = cca.parallel(**x)[0]
        leak, moved = max(leak, apart(before[:3], after[:3])), min(moved, apart(before[3:], after[3:]))
    return holds(
        leak == 0 and moved > 0, f"5 draws: tokens 3 to 5 changed, outputs 0 to 2 move by {leak:g}, the others do"
    )


@claim(
    "survey.C5",
    "CCA has less than half the parameters of MLA",
    source="15.3, Pros",
    verdict="holds only if",
    evidence="recomputation",
    why="the compression is large for the rank: at r = E / 4 MLA has 2.75 times as many at C = 4, 1.38 times at C = 2",
)
def compressed_parameters() -> Finding:
    E = 2048
    ratio = {C: Fraction(cost_survey.latent_layer(E, E // 4), cost_survey.compressed_layer(E, C)) for C in (2, 4)}
    return conditional(ratio[4] > 2, ratio[2] > 2, ", ".join(f"C = {C}: {float(r):.3f}" for C, r in ratio.items()))


@claim(
    "survey.C6",
    "Queries and keys are rescaled to sqrt(d_h), keys times exp(beta)",
    source="15.1",
    verdict="holds only if",
    evidence="property test",
    why="the temperature is exp(beta), as printed. ZAYA's code multiplies by the parameter itself: of -1 no beta is the"
    " logarithm",
)
def key_lengths() -> Finding:
    x = draw(cca.OPERATOR, **CONVOLVED)
    lengths = np.sqrt(np.sum(cca.parallel(**x)[4] ** 2, axis=-1))
    want = math.sqrt(CONVOLVED["K"]) * np.exp(x["beta"])
    return conditional(
        same(lengths, np.broadcast_to(want, lengths.shape)),
        bool(np.any(np.exp(np.linspace(-40, 40, 81)) <= 0)),
        f"beta = {x['beta'].round(2).tolist()}: keys of all tokens have length {lengths[0].round(3).tolist()}",
    )


# --- 16. CCGQA -------------------------------------------------------------------------------------------------------


@claim(
    "survey.Q1",
    "The compressions are in the ratio of the heads, C_2 / C_1 = H / H_kv",
    source="16",
    verdict="holds only if",
    evidence="exact arithmetic",
    why="queries and keys have heads of one width: of E = 64, 4 query heads of 4 and 2 key heads of 8 give a ratio of"
    " 1, not 2, and no scores",
)
def compression_ratio() -> Finding:
    E, heads = 64, (4, 2)

    def ratio(d_query: int, d_key: int) -> Fraction:
        C1, C2 = Fraction(E, heads[0] * d_query), Fraction(E, heads[1] * d_key)
        return C2 / C1

    return conditional(
        ratio(4, 4) == Fraction(*heads),
        ratio(4, 8) == Fraction(*heads),
        f"heads 4 and 2: C_2 / C_1 = {ratio(4, 4)} with equal widths, {ratio(4, 8)} with 4 and 8",
    )


@claim(
    "survey.Q2",
    "The mean of queries and keys is (B q + E k) / 2, B repeating keys to queries, E averaging queries to keys",
    source="16.1, second equation",
    verdict="refuted",
    evidence="exact arithmetic",
    why="4 query heads and 2 key heads of 4: B has 16 rows and 8 columns, q has 16 channels. Meant is (q + B k) / 2 for"
    " queries and (E q + k) / 2 for keys",
)
def grouped_mean() -> Finding:
    heads, groups, d = 4, 2, 4
    share = heads // groups
    B = np.repeat(np.eye(groups * d).reshape(groups, d, -1), share, axis=0).reshape(heads * d, -1)
    E = B.T / share
    q, k = np.arange(16.0), np.arange(8.0)
    fits = B.shape[1] == len(q) and E.shape[1] == len(k)
    identity = np.array_equal(E @ B, np.eye(groups * d))
    meant = (q + B @ k).shape, (E @ q + k).shape
    return holds(
        fits,
        f"B {B.shape} on q {q.shape}, E {E.shape} on k {k.shape}; E B = 1: {identity}; q + B k {meant[0]}, E q + k"
        f" {meant[1]}",
    )


@claim(
    "survey.Q3",
    "CCGQA does as much arithmetic on a cached number as GQA",
    source="16.2, 16.3",
    verdict="holds",
    evidence="recomputation",
)
def intensity() -> Finding:
    n, d = 100, 64

    def per_number(heads: int, groups: int) -> Fraction:
        """Multiplications of decoding one token, for each number of the cache."""
        return Fraction(2 * n * heads * d, n * cost_survey.head_cache(groups, d))

    whole, compressed = per_number(32, 8), per_number(32 // 4, 8 // 4)
    x = draw(ccgqa.OPERATOR, **CONVOLVED, M=4)
    read = ccgqa.parallel(**x)[4].shape[1:]
    return holds(
        whole == compressed == 4,
        f"{whole} with 32 heads in 8 groups, {compressed} with 8 in 2: H / H_kv; keys of {read} serve"
        f" {x['q'].shape[1:]}",
    )


@claim(
    "survey.Q4",
    "Training takes O(n^2 d / C_1) time",
    source="16.2, 16.3",
    verdict="holds",
    evidence="recomputation",
)
def compressed_core() -> Finding:
    n, E = 64, 512
    core = {C: cost_survey.core_products(n, E // C, E // C) for C in (1, 2, 8)}
    return holds(
        all(C * count == core[1] for C, count in core.items()),
        f"n = {n}, E = {E}: " + ", ".join(f"{count} at C_1 = {C}" for C, count in core.items()) + ", projections aside",
    )


Q5 = unchecked(
    "survey.Q5",
    "The best loss is at an eighth of the cache",
    source="16, 16.3",
    why="results of trained models",
)
