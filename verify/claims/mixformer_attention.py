"""Claims of MixFormer, sections 1, 2 and 4.7: softmax attention, linear attention and their costs."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np

from mixproof.reference import cost, linear_attention, retention, softmax_attention, tala
from mixproof.reference import tala_masks as masks
from mixproof.verify.claims import Finding, claim, conditional, holds
from mixproof.verify.claims.evidence import HALF_OF_THE_DIGITS, apart, one_function, same
from mixproof.verify.numbers.exact import GF, RATIONALS

# --- softmax attention -----------------------------------------------------------------------------------------------


def in_sums(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """sum_j [e^(q_i . k_j) / sum_l e^(q_i . k_l)] v_j, without a scale.  (2)"""
    E = np.exp(q @ k.T)
    return E @ v / np.sum(E, axis=1, keepdims=True)


@claim(
    "mixformer.C1",
    "Softmax attention (1) is the sum over tokens (2)",
    source="2.2, (1) and (2)",
    verdict="holds only if",
    evidence="property test",
    why="q . k is divided by sqrt(d_k) first, which (2) leaves out, and each v_j has a weight of its own: the print has"
    " one sum over another. d = 4, q = k_1 = (1, 1, 1, 1), k_2 = 0: k_1 weighs 0.881 in (1), 0.982 in (2)",
)
def sum_form() -> Finding:
    d = 4
    scaled, unscaled, typed = [], [], []
    for seed in range(20):
        q, k, v = np.random.default_rng(seed).standard_normal((3, 6, d))
        want, E = softmax_attention.parallel(q, k, v), np.exp(q @ k.T)
        scaled.append(apart(in_sums(q / math.sqrt(d), k, v), want))
        unscaled.append(apart(in_sums(q, k, v), want))
        typed.append(apart(np.sum(E, axis=1, keepdims=True) / (E @ v), want))
    q, k, v = np.ones((1, d)), np.stack([np.ones(d), np.zeros(d)]), np.array([[1.0], [0.0]])
    first, second = softmax_attention.parallel(q, k, v)[0, 0], in_sums(q, k, v)[0, 0]
    return conditional(
        max(scaled) < HALF_OF_THE_DIGITS,
        min(unscaled + typed) < HALF_OF_THE_DIGITS or same(first, second),
        f"weights {first:.3f} and {second:.3f}; 20 draws: at most {max(scaled):.0e} off with q / sqrt(d), at least"
        f" {min(unscaled):.2f} without, {min(typed):.2f} for one sum over another",
    )


@claim(
    "mixformer.C31",
    "At inference a Transformer needs O(N^2) operations per token",
    source="4.7; Table 2 has O(N)",
    verdict="holds only if",
    evidence="recomputation",
    why="nothing is kept, and all of the past is computed anew for every token; with keys and values cached it is the"
    " O(N) of Table 2",
)
def transformer_token() -> Finding:
    N = (1000, 2000)
    anew = [cost.attention_flops(n, 64, 64) for n in N]
    cached = [cost.attention_flops(n, 64, 64) // n for n in N]
    return conditional(
        anew[1] == 4 * anew[0],
        cached[1] == 4 * cached[0],
        f"N = 1000 and 2000, d = 64: {anew[0]} and {anew[1]} operations anew, {cached[0]} and {cached[1]} with a cache",
    )


# --- linear attention ------------------------------------------------------------------------------------------------


def multiplications(*shapes: tuple[int, int]) -> int:
    """Those of a product of matrices from left to right."""
    rows = shapes[0][0]
    return sum(rows * inner * columns for inner, columns in shapes[1:])


@claim(
    "mixformer.C2",
    "In another order, Q (K^T V), linear attention has the same values at O(d^2 L) operations",
    source="2.3, (5) and (6)",
    verdict="holds",
    evidence="exact arithmetic",
)
def reordered() -> Finding:
    causal, points = one_function(linear_attention.OPERATOR, T=5, K=2, V=3)
    generator = np.random.default_rng(0)
    q, k, v = (GF.draw(generator, shape) for shape in ((6, 2), (6, 2), (6, 3)))
    left = (q @ k.T) @ v / np.sum(q @ k.T, axis=1, keepdims=True)
    right = q @ (k.T @ v) / (q @ np.sum(k, axis=0))[:, None]
    d = 64

    def counts(L: int) -> tuple[int, int]:
        inner = multiplications((d, L), (L, d))  # K^T V
        return multiplications((L, d), (d, L), (L, d)), inner + multiplications((L, d), (d, d))

    direct, other = zip(*map(counts, (1000, 2000)), strict=True)
    return holds(
        causal and bool(np.all(left == right)) and direct[1] == 4 * direct[0] and other[1] == 2 * other[0],
        f"causal: {points}; (6) at one more; d = {d}, L = 1000 and 2000: {other[0]} and {other[1]} multiplications,"
        f" {direct[0]} and {direct[1]} by (Q K^T) V",
    )


def typed_product(k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """phi(k_j) v_j of two columns, as typed in (6) and (8)."""
    return k @ v


def defined(k: np.ndarray, v: np.ndarray) -> bool:
    try:
        typed_product(k, v)
    except ValueError:
        return False
    return True


@claim(
    "mixformer.C3",
    "With column vectors q, k, v as in 2.2, phi(k_j) v_j of (6) and (8) is the state of linear attention",
    source="2.2 to 2.4, (6) and (8)",
    verdict="refuted",
    evidence="exact arithmetic",
    why="d = 2: two columns of 2 have no product. v_j needs a transpose, and the j of the recurrences, which nothing"
    " binds, must be i: with keys and values 1, 2, 3, S_3 = 14, but 3 for j = 1",
)
def typed_state() -> Finding:
    products = {d: defined(np.ones((d, 1)), np.ones((d, 1))) for d in (1, 2)}
    x = RATIONALS(np.array([[1], [2], [3]]))
    _, S, z = linear_attention.recurrent(x, x, x)
    bound, unbound = np.sum(x * x), 3 * x[0, 0] * x[0, 0]
    right = bool(np.all(S == bound)) and bool(np.all(z == np.sum(x, axis=0)))
    return holds(
        all(products.values()) and right,
        "phi(k) v of two columns: "
        + ", ".join(f"d = {d} {'defined' if yes else 'undefined'}" for d, yes in products.items())
        + f"; S_3 = {S.data[0, 0]} with j = i, {unbound.data} with j = 1",
    )


@claim(
    "mixformer.C4",
    "Inference takes constant memory: a state of fixed size replaces the past",
    source="2.4, 4.3 (15)",
    verdict="holds only if",
    evidence="exact arithmetic",
    why="the mask of (14) has few states, one where omega^(n-m) G_nm = g_n ... g_{m+1}. A free T x T gain, or one for"
    " each source as in (12), needs T / 2 states: the block of later rows and earlier columns has that rank",
)
def constant_memory() -> Finding:
    generator = np.random.default_rng(0)
    lengths, rank = (4, 8, 16), masks.semiseparable_rank
    omega = GF.draw(generator)
    ranks = {
        "decays": [rank(masks.cocycle(GF.draw(generator, (T,)))) for T in lengths],
        "T x T": [rank(masks.free_gain(omega, GF.draw(generator, (T, T)))) for T in lengths],
        "by source": [rank(masks.per_source(omega, GF.draw(generator, (T,)))) for T in lengths],
    }
    ones = [np.ones((T, 2)) for T in lengths]
    size = {tala.recurrent(x, x, x, 1.0, 1.0)[1].size for x in ones}
    return conditional(
        set(ranks["decays"]) == {1} and len(size) == 1,
        ranks["T x T"][0] == ranks["T x T"][-1] or ranks["by source"][0] == ranks["by source"][-1],
        f"states for {', '.join(map(str, lengths))} tokens: " + ", ".join(f"{name} {r}" for name, r in ranks.items()),
    )


@claim(
    "mixformer.C5",
    "The state of a linear recurrence discards at which step a token came",
    source="1",
    verdict="holds only if",
    evidence="exact arithmetic",
    why="nothing decays. q = k = 1 and a = 1/2: v = (1, 0, 0) gives o_3 = 1/4, v = (0, 1, 0) gives 1/2. And even"
    " without decay a step can be read back, if its key is orthogonal to the others",
)
def temporal_indices() -> Finding:
    generator = np.random.default_rng(0)
    q, k, v = (GF.draw(generator, (5, 2)) for _ in range(3))
    order = np.array([2, 0, 3, 1, 4])  # of the past of the last token

    def unmoved(a: Any) -> bool:
        then, now = (retention.recurrent(q, k[p], v[p], a)[0][-1] for p in (np.arange(5), order))
        return bool(np.all(then == now))

    one, half = RATIONALS(np.ones((3, 1), dtype=int)), RATIONALS(Fraction(1, 2))
    last = [
        retention.recurrent(one, one, RATIONALS(np.array(v)[:, None]), half)[0].data[-1, 0]
        for v in ([1, 0, 0], [0, 1, 0])
    ]
    e, values = np.eye(3), np.array([[7.0], [8.0], [9.0]])
    read = retention.recurrent(np.stack([e[0], e[0], e[1]]), e, values, 1.0)[0][-1, 0]  # asks for the second step
    return conditional(
        unmoved(GF(1)),
        unmoved(GF.draw(generator)) or last[0] == last[1],
        f"the past of 5 tokens permuted over GF(2^31 - 1): o_5 the same with a = 1, another with a drawn;"
        f" o_3 = {last[0]} and {last[1]}; of 7, 8, 9 at orthogonal keys {read:g} is read back for the second",
    )
