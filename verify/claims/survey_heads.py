"""Claims of the survey, sections 11 to 13: Tucker attention, interleaved heads, grouped-head latent attention."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from mixproof.reference import cost_survey, gta, iha, softmax_attention, tucker
from mixproof.verify.claims import Finding, claim, conditional, holds, unchecked
from mixproof.verify.claims.evidence import HALF_OF_THE_DIGITS, apart, draw, same

# --- 11. Tucker attention --------------------------------------------------------------------------------------------

TOKENS, HEADS, WIDTH, MODEL = 5, 4, 2, 8


def _layer(groups: int, seed: int = 0) -> dict[str, np.ndarray]:
    """x and the weights of grouped-query attention: W_Q, W_O of all heads, W_K, W_V of groups, and x."""
    draw = np.random.default_rng(seed).normal
    return {
        "x": draw(size=(TOKENS, MODEL)),
        "W_Q": draw(size=(HEADS, WIDTH, MODEL)),
        "W_K": draw(size=(groups, WIDTH, MODEL)),
        "W_V": draw(size=(groups, WIDTH, MODEL)),
        "W_O": draw(size=(HEADS, WIDTH, MODEL)),
    }


def _grouped_query(x: Any, W_Q: Any, W_K: Any, W_V: Any, W_O: Any) -> np.ndarray:
    """Grouped-query attention, head by head."""
    share, total = len(W_Q) // len(W_K), np.zeros_like(x)
    for h in range(len(W_Q)):
        k, v = x @ W_K[h // share].T, x @ W_V[h // share].T
        total = total + softmax_attention.parallel(x @ W_Q[h].T, k, v, causal=True) @ W_O[h]
    return total


def _copied(groups: int) -> np.ndarray:
    """The core of 0 and 1 that hands each head the channels of its group.  (H, d_h, G d_h)"""
    blocks = np.eye(groups * WIDTH).reshape(groups, WIDTH, groups * WIDTH)
    return np.repeat(blocks, HEADS // groups, axis=0)


@claim(
    "survey.K1",
    "Multi-head, grouped-query and multi-head latent attention are special cases of the factored one",
    source="11, 11.1",
    verdict="holds",
    evidence="property test",
)
def special_cases() -> Finding:
    gaps = {}
    for name, groups in (("MHA", HEADS), ("GQA", 2)):
        layer = _layer(groups)
        x, W_Q, W_K, W_V, W_O = layer.values()
        copied, identity = _copied(groups), np.eye(MODEL)
        Y = tucker.factored(x, identity, W_Q, W_K.reshape(-1, MODEL), copied, W_V.reshape(-1, MODEL), copied, W_O)[0]
        gaps[name] = apart(Y, _grouped_query(**layer))
    x, W_Q, up_k, up_v, W_O = _layer(HEADS).values()
    down, rank = np.random.default_rng(1).normal(size=(3, MODEL)), 3
    up_k, up_v = up_k[:, :, :rank], up_v[:, :, :rank]
    Y = tucker.factored(x, np.eye(MODEL), W_Q, down, up_k, down, up_v, W_O)[0]
    gaps["MLA"] = apart(Y, _grouped_query(x, W_Q, up_k @ down, up_v @ down, W_O))
    return holds(
        all(gap < HALF_OF_THE_DIGITS for gap in gaps.values()),
        ", ".join(f"{n} {gap:.0e} apart" for n, gap in gaps.items()),
    )


@claim(
    "survey.K2",
    "Grouped-query attention is a reduced rank k = v that keys and values share",
    source="11",
    verdict="holds only if",
    evidence="exact arithmetic",
    why="keys and values have factors of their own, of rank G d_h each; one that they share needs 2 G d_h",
)
def grouped_rank() -> Finding:
    groups = 2
    W_K, W_V = np.random.default_rng(0).integers(-9, 10, size=(2, groups * WIDTH, MODEL))
    ranks = [int(np.linalg.matrix_rank(W)) for W in (W_K, W_V, np.concatenate([W_K, W_V]))]
    one = groups * WIDTH
    return conditional(
        ranks[:2] == [one, one], ranks[2] <= one, f"G d_h = {one}: keys {ranks[0]}, values {ranks[1]}, both {ranks[2]}"
    )


@claim(
    "survey.K3",
    "The cache is k_rank + v_rank numbers a token",
    source="11.3, Inference complexity",
    verdict="holds only if",
    evidence="property test",
    why="nothing is turned between factor and core, as in survey.L3, and the factors differ: where keys and values"
    " share one, as in MLA, one cache is enough",
)
def latent_caches() -> Finding:
    sizes = {"T": 4, "E": 4, "Q": 3, "L": 2, "X": 3, "N": 2, "K": 2, "V": 2}
    inputs = draw(tucker.OPERATOR, **sizes)
    tokens = inputs.pop("x")
    Y, *_ = tucker.factored(tokens, **inputs)
    _, *caches = tucker.factored(tokens[:3], **inputs)
    last, *_ = tucker.decode(tokens[3:], **inputs, K0=caches[0], V0=caches[1])
    each = sum(cache.shape[1] for cache in caches)
    _, Kc, Vc = tucker.factored(tokens, **inputs | {"Fv": inputs["Fk"], "Gv": inputs["Gk"]})
    return conditional(
        same(last, Y[3:]) and each == sizes["L"] + sizes["X"],
        not np.array_equal(Kc, Vc),
        f"{each} numbers a token are all that decoding reads; with one factor both caches hold the same {Kc.shape[1]}",
    )


@claim(
    "survey.K4",
    "The factored projections have a tenth of the parameters of GQA and MLA",
    source="11, 11.2",
    verdict="holds only if",
    evidence="recomputation",
    why="the output projection is factored too: as printed it is not, and its E^2 alone are a fifth of MLA's parameters"
    " or more, a quarter of GQA's or more, whatever the three ranks",
)
def tenth_of_parameters() -> Finding:
    E, H = 512, 8
    others = {"GQA": cost_survey.grouped_layer(E, H, 2), "MLA": cost_survey.latent_layer(E, E // 4)}
    least, all_four = cost_survey.factored_layer(E, 1, 1, 1), 4 * 2 * E * (E // 64)
    return conditional(
        all(10 * all_four <= n for n in others.values()),
        any(10 * least <= n for n in others.values()),
        f"E = {E}: "
        + ", ".join(f"{name} {n}" for name, n in others.items())
        + f"; ranks of 1 and a full W_O {least}, all"
        f" four factored at rank {E // 64} {all_four}",
    )


@claim(
    "survey.K5",
    "Core times factor for each projection is a Tucker factorisation",
    source="11.1",
    verdict="holds only if",
    evidence="exact arithmetic",
    why="what is factored is the tensor of all heads' W_Q_h^T W_K_h, with factors on both model axes and the core"
    " Gq_h^T Gk_h; a projection by itself is a product of two matrices",
)
def three_way_core() -> Finding:
    integers = np.random.default_rng(0).integers(-5, 6, size=(2, HEADS, WIDTH, 3))
    factors = np.random.default_rng(1).integers(-5, 6, size=(2, 3, MODEL))
    joint = np.stack([(Gq @ factors[0]).T @ (Gk @ factors[1]) for Gq, Gk in zip(*integers, strict=True)])
    rebuilt = np.stack([factors[0].T @ J @ factors[1] for J in tucker.joint_core(*integers)])
    ranks = _multilinear(joint)
    single = _multilinear(integers[0] @ factors[0])
    return conditional(
        np.array_equal(joint, rebuilt) and ranks[1:] == [3, 3],
        sum(rank < size for rank, size in zip(single, (HEADS, WIDTH, MODEL), strict=True)) > 1,
        f"(H, E, E) = {joint.shape} has multilinear ranks {ranks} and is rebuilt exactly; a projection"
        f" {(HEADS, WIDTH, MODEL)} has {single}, reduced along one axis",
    )


def _multilinear(T: np.ndarray) -> list[int]:
    """Ranks of the three unfoldings."""
    return [int(np.linalg.matrix_rank(np.moveaxis(T, axis, 0).reshape(T.shape[axis], -1))) for axis in range(3)]


# --- 12. interleaved heads -------------------------------------------------------------------------------------------


@claim(
    "survey.I1",
    "P pseudo-heads a head give it up to P^2 patterns of attention",
    source="12, 12.2",
    verdict="holds only if",
    evidence="exact arithmetic",
    why="P is at most H: the logits of all pairs are mixtures of H^2, so 3 pseudo-heads of 2 heads have 4 independent"
    " patterns, not 9",
)
def patterns() -> Finding:
    def independent(P: int, H: int) -> int:
        integers = np.random.default_rng(P).integers
        q, k = integers(-9, 10, size=(2, 7, H, 3))
        Q, K = (iha.mixed(integers(-9, 10, size=(P, H)), x).reshape(7, P, 3) for x in (q, k))
        maps = [Q[:, a] @ K[:, b].T for a in range(P) for b in range(P)]
        return int(np.linalg.matrix_rank(np.stack([m.reshape(-1) for m in maps])))

    found = {(P, H): independent(P, H) for P, H in ((1, 2), (2, 2), (2, 3), (3, 2), (4, 2))}
    return conditional(
        all(n == P * P for (P, H), n in found.items() if P <= H),
        all(n == P * P for (P, H), n in found.items() if P > H),
        "independent maps: " + ", ".join(f"P = {P}, H = {H}: {n}" for (P, H), n in found.items()),
    )


@claim(
    "survey.I2",
    "Mixing adds O(H^2 P) parameters",
    source="12, 12.2",
    verdict="holds",
    evidence="recomputation",
)
def mixing_parameters() -> Finding:
    H, P = 8, 4
    mixes = [x for x in iha.OPERATOR.inputs if x.name in ("aq", "ak", "av")]
    read = sum(int(np.prod([{"N": H, "J": P}[a] for a in x.axes])) for x in mixes)
    printed = 3 * P * H
    return holds(
        printed <= read == cost_survey.pseudo_head_mixes(H, P) <= 3 * H * H * P,
        f"H = {H}, P = {P}: {read} with mixes for each head; {printed} as printed, without the head's index",
    )


@claim(
    "survey.I3",
    "Training takes O(P^2 n^2 d / H) time",
    source="12.2, 12.3",
    verdict="holds only if",
    evidence="recomputation",
    why="one head is counted: all of them take P^2 n^2 d, H times as much",
)
def pseudo_head_time() -> Finding:
    n, d, P, H = 64, 32, 4, 8
    total, printed = cost_survey.pseudo_head_products(n, d, P), 2 * P**2 * n**2 * d // H
    one = cost_survey.core_products(n * P, d // H, d // H)
    return conditional(
        one <= printed, total <= printed, f"n = {n}, d = {d}, P = {P}, H = {H}: {one} a head, {total} in all"
    )


@claim(
    "survey.I4",
    "Training takes O(n^2) space",
    source="12.3",
    verdict="holds only if",
    evidence="recomputation",
    why="H and P count as constants: written out the maps have H (n P)^2 entries, P^2 times those of plain attention",
)
def pseudo_head_space() -> Finding:
    H, n = 4, 16
    entries = {P: H * (n * P) ** 2 for P in (1, 4)}
    doubled = H * (2 * n * 4) ** 2
    return conditional(doubled == 4 * entries[4], entries[4] == entries[1], f"H = {H}, n = {n}: {entries} entries by P")


I5 = unchecked(
    "survey.I5",
    "Theta(sqrt(k) n^2) parameters instead of Theta(k n^2) on Polynomial; 10 to 20% on RULER, 5.8% on GSM8K",
    source="12",
    why="the tasks and their bounds are not stated, the gains are results of trained models",
)

# --- 13. grouped-head latent attention -------------------------------------------------------------------------------


@claim(
    "survey.V1",
    "GTA cuts up to 62.5% of the operations of grouped-query attention",
    source="13, 13.2",
    verdict="holds only if",
    evidence="recomputation",
    why="it is the released design, with fewer query heads and values summed before they are decoded. As printed the"
    " sums over values stay as they are, and the cut is (1 - 1 / g) / 2, below 50%",
)
def operations_cut() -> Finding:
    d, H, n = 64, 16, 128
    whole = cost_survey.core_products(n, H * d, H * d)
    released = 1 - Fraction(cost_survey.core_products(n, H // 4 * d, H // 4 * 2 * d), whole)
    printed = {g: 1 - Fraction(cost_survey.core_products(n, H // g * d, H * d), whole) for g in (2, 4, 16)}
    return conditional(
        released == Fraction(5, 8),
        max(printed.values()) >= Fraction(5, 8),
        f"n_q = H / 4, d_l = 2 d: cut of {float(released):.1%}; printed with groups of 2, 4, 16: "
        + ", ".join(f"{float(cut):.1%}" for cut in printed.values()),
    )


@claim(
    "survey.V2",
    "GTA shrinks the cache by up to 70%",
    source="13, 13.2",
    verdict="holds only if",
    evidence="recomputation",
    why="sizes are such as one key head and a latent of 2 d_h against 5 key and 5 value heads; a latent as wide as the"
    " values and as many keys save nothing",
)
def cache_cut() -> Finding:
    d = 64
    whole = cost_survey.head_cache(5, d)
    shares = [Fraction(cost_survey.shared_map_cache(k, d, c, w), whole) for k, c, w in ((1, 1, 2 * d), (5, 5, d))]
    return conditional(
        shares[0] == Fraction(3, 10), shares[1] <= Fraction(3, 10), f"{shares[0]} and {shares[1]} of the cache remain"
    )


@claim(
    "survey.V3",
    "A map from averaged queries and keys can stand for those of all heads of its group",
    source="13.1, 13.3",
    verdict="refuted",
    evidence="evaluation",
    why="two heads with q_2 = -q_1: the averaged query is 0 and its map uniform, while each head prefers another token",
)
def averaged_map() -> Finding:
    q = np.array([1.0, -1.0]).reshape(1, 1, 2, 1).repeat(2, axis=0)
    k = np.array([0.0, 2.0]).reshape(2, 1, 1, 1).repeat(2, axis=2)
    c, U = np.array([[0.0], [1.0]]), np.ones((1, 2, 1, 1))
    token = gta.shared(np.zeros((1, 1, 2, 1)), k[:1], c[1:], U)[0][0, 0, 0, 0]  # what a weight of one gives
    shared = gta.shared(q, k, c, U)[0][1, 0, :, 0] / token
    heads = [softmax_attention.weights(q[1:, 0, h], k[:, 0, h], 1.0)[0, 1] for h in range(2)]
    return holds(
        same(shared, heads),
        f"weights of the second token: {heads[0]:.3f} and {heads[1]:.3f} alone, {shared[0]:g} averaged",
    )


@claim(
    "survey.V4",
    "The shared map trains in O(n^2 d / g) time",
    source="13.2, 13.3",
    verdict="holds only if",
    evidence="recomputation",
    why="the scores alone are meant: the sums over values take n^2 d for every g",
)
def shared_map_time() -> Finding:
    n, d, groups = 64, 128, (1, 4)
    scores = [n * n * d // g for g in groups]
    whole = [cost_survey.core_products(n, d // g, d) for g in groups]
    return conditional(
        scores[0] == 4 * scores[1],
        whole[0] == 4 * whole[1],
        f"n = {n}, d = {d}, g = 1 and 4: scores {scores[0]} and {scores[1]}, with values {whole[0]} and {whole[1]}",
    )
