"""Claims of MixFormer, sections 1, 4.3, 4.4 and 5.5: decays of the heads, and the mixture of memory experts."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np

from mixproof.reference import feature_maps, mome_routers, retention, tala
from mixproof.reference import tala_masks as masks
from mixproof.reference.primitives import softmax
from mixproof.verify.claims import Finding, claim, conditional, holds, unchecked
from mixproof.verify.claims.evidence import apart, same
from mixproof.verify.numbers.exact import GF, RATIONALS

# --- decays ----------------------------------------------------------------------------------------------------------


def weights_of_memory(form: Any, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """What (14) multiplies q_n . k_m with, read off the outputs for v_m = e_m; q . k must not be zero."""
    return form(q, k, np.eye(len(k)), 1.0, 1.0)[0] / (q @ k.T)


@claim(
    "mixformer.C13",
    "TALA adapts its decays to the current input",
    source="abstract; 1; 6",
    verdict="refuted",
    evidence="evaluation",
    why="omega and G are parameters, so the mask D is the same for every input; GLA and Mamba compute theirs from it."
    " Only the routers of memory experts depend on the token: E_n changes which decays it reads",
)
def input_adaptive() -> Finding:
    generator = np.random.default_rng(0)
    inputs = np.exp(generator.standard_normal((2, 2, 5, 3)))  # two inputs, q and k
    D = [weights_of_memory(tala.parallel, *x) for x in inputs]
    W = generator.standard_normal((3, 2))
    experts = [
        masks.read_mix(softmax(mome_routers.R3(k, generator.standard_normal(k.shape), W)), np.array([0.5, 0.9]))
        for _, k in inputs
    ]
    return holds(
        not same(*D),
        f"two inputs of 5 tokens: masks {apart(*D):.0e} apart for TALA, {apart(*experts):.2f} for two memory experts",
    )


OMEGA = "1 - exp(-h)"  # (13), with h in [1, .., d / d_head]


@claim(
    "mixformer.C14",
    "The exponential decay omega is learnable",
    source="abstract; 1; (13)",
    verdict="refuted",
    evidence="reading of a text",
    why="(13) prints omega = 1 - e^-h with the number h of the head: 0.632, 0.865, 0.950, .. are constants. What Table"
    " 1 calls learnable is G alone",
)
def learnable() -> Finding:
    import sympy

    omega, h = sympy.sympify(OMEGA), sympy.Symbol("h")
    free = sorted(map(str, omega.free_symbols - {h}))
    value = sympy.lambdify(h, omega, "math")
    values = "open" if free else ", ".join(f"{value(n):.4f}" for n in range(1, 9))
    return holds(bool(free), f"symbols in (13) besides the number of the head: {len(free)}; 8 heads: {values}")


@claim(
    "mixformer.C15",
    "Heads with decays of their own capture several time scales",
    source="4.3, (13)",
    verdict="holds",
    evidence="certified interval",
)
def time_scales() -> Finding:
    from mixproof.verify.numbers.certified import enclose

    def half_life(h: Any) -> Any:
        return np.log(0 * h + 2) / -tala.log_omega(h)

    x = enclose(half_life, {"h": np.arange(1.0, 17.0)})
    apart_from_the_next = x.midpoint[1:] - x.radius[1:] > 2 * (x.midpoint[:-1] + x.radius[:-1])
    halves = {h: float(x.midpoint[h - 1]) for h in (1, 2, 8, 16)}
    rounded = next(h for h in range(1, 17) if math.exp(-h) < 2.0**-9)  # 1 - 2^-8 is the last bfloat16 below one
    return holds(
        bool(np.all(apart_from_the_next)),
        f"half-life {halves[1]:.2f}, {halves[2]:.2f} .. {halves[8]:.0f} tokens for 8 heads, {halves[16]:.3g} for the"
        f" last of 16, each more than twice that before; in bfloat16 omega is 1 from head {rounded} on",
    )


@claim(
    "mixformer.C23",
    "Behind the causal mask information flows from all of the past",
    source="5.5",
    verdict="holds only if",
    evidence="evaluation",
    why="the head is slow enough for the length, or G_nm grows as omega^-(n-m). In the first head the weight is below"
    " 2^-24 after 36.3 tokens: in float32, with tokens of ones, another first value changes no bit after token 35",
)
def global_flow() -> Finding:
    T = 256

    def reach(h: float) -> int:
        """The last token that a change of the first value changes."""
        one, v = np.ones((T, 1), np.float32), np.ones((T, 1), np.float32)
        v[0] = 2
        then, now = (retention.recurrent(one, one, x, np.float32(tala.omega(h)))[0] for x in (one, v))
        return int(np.flatnonzero(then != now)[-1]) + 1

    far = {h: reach(h) for h in (1.0, 2.0, 8.0)}
    lags = [24 * math.log(2) / -float(tala.log_omega(h)) for h in far]
    return conditional(
        far[8.0] == T,
        far[1.0] == T,
        f"{T} tokens of ones in float32: the first reaches token {', '.join(map(str, far.values()))} in heads 1, 2, 8;"
        f" omega^n = 2^-24 at n = {', '.join(f'{x:.1f}' for x in lags)}",
    )


# --- memory experts --------------------------------------------------------------------------------------------------


@claim(
    "mixformer.C24",
    "Several memory experts hold more than one memory state",
    source="1, 4.4, Table 2",
    verdict="holds only if",
    evidence="exact arithmetic",
    why="their decays differ: the rank of the mixture is the number of distinct decays, at most (T + 1) / 2. With the"
    " keys and values of (17) and one decay, the weights, which sum to one, make all experts a single TALA",
)
def more_memory() -> Finding:
    generator, T, X = np.random.default_rng(0), 12, 4
    E = GF.draw(generator, (T, X - 1))
    E = np.concatenate([E, 1 - np.sum(E, axis=1, keepdims=True)], axis=1)  # rows sum to one
    a = GF.draw(generator, (X,))
    shared, paired = np.stack([a[0]] * X), np.stack([a[0], a[0], a[1], a[1]])
    ranks = [masks.semiseparable_rank(masks.read_mix(E, x)) for x in (a, paired, shared)]
    single = bool(np.all(masks.read_mix(E, shared) == masks.geometric(a[0], T)))
    return conditional(
        ranks[0] == X and ranks[1] == 2,
        ranks[2] > 1 or not single,
        f"{X} experts, {T} tokens over GF(2^31 - 1): rank {ranks[0]}, {ranks[1]} and {ranks[2]} for 4, 2 and 1 decays;"
        f" with one, the mask is {'that of TALA' if single else 'another than that of TALA'}",
    )


@claim(
    "mixformer.C25",
    "The router's weights sum to one",
    source="4.4, (18)",
    verdict="holds only if",
    evidence="property test",
    why="softmax is over the experts that are selected, or all are. Equal logits, 2 of 3 experts: 2/3, if the others'"
    " weights are dropped",
)
def weights_sum() -> Finding:
    l = np.random.default_rng(0).standard_normal((100, 6)) * 3
    dense, top = softmax(l), mome_routers.top_weights(l, 2)
    dropped = np.sum(dense * mome_routers.selected(l, 2), axis=1)
    x = np.zeros((1, 3))
    third = float(np.sum(softmax(x) * mome_routers.selected(x, 2)))
    one = np.ones(100)
    return conditional(
        same(np.sum(dense, axis=1), one) and same(np.sum(top, axis=1), one),
        same(dropped, one) or same(third, 1),
        f"100 draws of 6 logits: sums of 1 for all and for the top 2 renormalised, {np.min(dropped):.2f} to"
        f" {np.max(dropped):.2f} for the top 2 without; equal logits, 2 of 3: {third:.4f}",
    )


@claim(
    "mixformer.C26",
    "Which experts are active adapts to the content",
    source="1, 4.4, (18)",
    verdict="holds only if",
    evidence="property test",
    why="the router has a row for each channel. With the printed shape 1 x k_e the logits are a number times w_g, so"
    " every token ranks the experts as w_g does or in reverse: two subsets, whatever the input",
)
def content_adaptive() -> Finding:
    generator, T, d, X, top = np.random.default_rng(0), 2000, 4, 5, 2
    k, v = feature_maps.phi_b(generator.standard_normal((T, d))), generator.standard_normal((T, d))
    w, W, U = (generator.standard_normal(shape) for shape in ((X,), (d, X), (2 * d, X)))

    def subsets(l: np.ndarray) -> int:
        return len(np.unique(mome_routers.selected(l, top), axis=0))

    R2, R3, R5 = (subsets(l) for l in (mome_routers.R2(k, v, w), mome_routers.R3(k, v, W), mome_routers.R5(k, v, U)))
    return conditional(
        min(R3, R5) > 2,
        R2 > 2,
        f"{T} tokens, {top} of {X} experts, {math.comb(X, top)} subsets: {R2} occur with w_g of 1 x k_e, {R3} with"
        f" (K * V) W, {R5} with [K, V] W",
    )


@claim(
    "mixformer.C27",
    "The mixture (17) sums over n experts, n being the length and the current step",
    source="4.1, 4.4, (17) and (18)",
    verdict="refuted",
    evidence="evaluation",
    why="it must be k_e. Two experts of weight 1/2: at the first token a sum to n has half of the weights, at the third"
    " it asks for an expert that does not exist",
)
def upper_limit() -> Finding:
    E = softmax(np.zeros((1, 2)))[0]
    sums = [float(np.sum(E[:n])) for n in (1, 2, 3)]
    return holds(
        all(same(total, 1) for total in sums) and len(E) >= 3,
        f"{len(E)} experts: weights up to n = 1, 2 sum to {sums[0]:g}, {sums[1]:g}; n = 3 asks for one more",
    )


C28 = unchecked(
    "mixformer.C28",
    "Memory experts specialise in short and in long ranges, in texture and in structure",
    source="5.4 to 5.6",
    why="pictures of trained models, which are not published. The equations allow it if decays differ, see C24",
)


@claim(
    "mixformer.C29",
    "MixFormer is the first to bring several memory experts into state space models",
    source="1",
    verdict="refuted",
    evidence="reading of a text",
    why="MoM, arXiv 2502.13685 of February 2025, has a router send tokens to several memory states of linear attention"
    " and other linear recurrences and reads their weighted sum; this paper is arXiv 2608.09468",
)
def first() -> Finding:
    this, other = "2608.09468", "2502.13685"  # year, month, number
    return holds(this[:4] < other[:4], f"20{other[:2]}-{other[2:4]} comes before 20{this[:2]}-{this[2:4]}")


@claim(
    "mixformer.C30",
    "Memory experts overcome that early information decays in a single state",
    source="1, 4.4",
    verdict="holds only if",
    evidence="exact arithmetic",
    why="an expert does not decay, omega G = 1, and then it alone would do. Else token 1 weighs at most max_j a_j^(n-1)"
    " at token n, as the weights sum to one: what a single state with the slowest of the decays keeps",
)
def early_information() -> Finding:
    T, generator = 12, np.random.default_rng(0)
    decays = RATIONALS(np.array([Fraction(1, 2), Fraction(3, 4)]))
    single = masks.geometric(decays[1], T)[:, 0]
    exceeded = []
    for _ in range(20):
        E = RATIONALS(generator.integers(1, 10, (T, 2)))
        E = E / np.sum(E, axis=1, keepdims=True)
        exceeded.append(bool(np.any(masks.read_mix(E, decays)[:, 0] > single)))
    even = RATIONALS(np.full((T, 2), 0.5))
    kept, lost = (
        masks.read_mix(even, RATIONALS(np.array([Fraction(1, 2), x]))).data[-1, 0] for x in (1, Fraction(3, 4))
    )
    return conditional(
        kept > Fraction(1, 2),
        any(exceeded),
        f"token 1 at token {T}: {float(lost):.4f} for decays 1/2 and 3/4 mixed evenly, {float(single.data[-1]):.4f} for"
        f" 3/4 alone, which no weights of 20 draws exceed; {float(kept):.4f} for decays 1/2 and 1",
    )
