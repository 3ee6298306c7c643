"""Claims of MixFormer about its cost: section 4.6, equation (21). An operation is a product of two numbers, with the
addition that may follow it, as (21) counts its projections; forms of the reference are run and their products counted.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mixproof.reference import cost, cost_mixformer, mome_mixing, retention
from mixproof.verify.claims import Finding, claim, conditional, holds
from mixproof.verify.claims.mixformer_counting import products
from mixproof.verify.claims.mixformer_sizes import MODELS


def _ffn(X: Any, W_1: Any, W_2: Any) -> Any:
    """max(0, X W_1) W_2.  (20)"""
    return np.maximum(X @ W_1, 0) @ W_2


@claim(
    "mixformer.C40",
    "The feed-forward network of a layer costs 2 d d'",
    source="4.6 (21)",
    verdict="refuted",
    evidence="evaluation",
    why="that is one token: N = 2, d = d' = 1 takes 4 products, printed 2. As all other terms it"
    " has a factor N, 2 N d d'",
)
def ffn_cost() -> Finding:
    sizes = [(1, 1, 1), (2, 1, 1), (5, 4, 3)]
    counted = [products(_ffn, (N, d), (d, f), (f, d)) for N, d, f in sizes]
    printed = [cost_mixformer.ffn_as_printed(d, f) for _, d, f in sizes]
    needed = [cost_mixformer.ffn(*size) for size in sizes]
    return holds(
        counted == printed,
        f"(N, d, d') = {', '.join(map(str, sizes))}: counted {counted}, printed {printed}, 2 N d d' = {needed}",
    )


def _with_state(form: Any) -> Any:
    def run(q: Any, k: Any, v: Any, gamma: Any, S0: Any, **rest: int) -> Any:
        return form(q, k, v, gamma, S0=S0, **rest)

    return run


def _tala(tokens: int, d_model: int, heads: int) -> int:
    """Products of the recurrent form, all heads."""
    d = d_model // heads
    return heads * products(_with_state(retention.recurrent), (tokens, d), (tokens, d), (tokens, d), (), (d, d))


@claim(
    "mixformer.C41",
    "TALA costs N d^2",
    source="4.6 (21)",
    verdict="holds only if",
    evidence="evaluation",
    why="as an upper bound, for 3 heads or more: decay, update and reading of H states take 3 N d^2 / H, which is 3 d^2"
    " a token with one head, and 1.61e9 for a printed 4.29e9 with the 8 heads of Table 4 at N = 4096",
)
def tala_cost() -> Finding:
    N, d, heads = 2, 12, (1, 2, 3, 4, 6)
    counted = {H: _tala(N, d, H) for H in heads}
    printed = cost_mixformer.tala_as_printed(N, d)
    agree = all(n == cost_mixformer.tala(N, d, H) for H, n in counted.items())
    large = cost_mixformer.tala(4096, 1024, 8), cost_mixformer.tala_as_printed(4096, 1024)
    return conditional(
        agree and all(counted[H] <= printed for H in heads if H >= 3),
        all(n <= printed for n in counted.values()),
        f"N = {N}, d = {d}, printed {printed}, counted for H = "
        + ", ".join(f"{H}: {n}" for H, n in counted.items())
        + f"; in Table 4 {large[0]:.2e} for {large[1]:.2e}",
    )


def _mome(tokens: int, experts: int, d: int) -> int:
    """Products of one head of memory experts whose weights are given: what is written is formed once, what is read
    mixed before the query meets it."""

    def form(q: Any, k: Any, v: Any, E: Any, a: Any, S0: Any) -> Any:
        ones = np.ones(E.shape, np.int8)
        return mome_mixing.recurrent(q, k, v, E, ones, ones, a, S0)

    return products(form, (tokens, d), (tokens, d), (tokens, d), (tokens, experts), (experts,), (experts, d, d))


@claim(
    "mixformer.C42",
    "The memory experts cost N k",
    source="4.6 (21)",
    verdict="refuted",
    evidence="evaluation",
    why="N = k = d = 1 takes 4 products beside the router, printed 1. It is the size of the router's output; k states"
    " of a head decay and are mixed with every token, 2 (k + 1) N d d_head products, 2.7e5 times N k with the sizes of"
    " Table 4. A single active expert has more than N k, too",
)
def mome_cost() -> Finding:
    sizes = [(1, 1, 1), (2, 3, 2), (1, 4, 3)]
    counted = [_mome(*size) for size in sizes]
    large = _memories(1, 1024, 128, 64)
    printed = cost_mixformer.mome_as_printed(1, 64)
    return holds(
        all(n <= cost_mixformer.mome_as_printed(N, k) for n, (N, k, _) in zip(counted, sizes, strict=True)),
        f"(N, k, d) = {', '.join(map(str, sizes))}: counted {counted}, printed"
        f" {[cost_mixformer.mome_as_printed(N, k) for N, k, _ in sizes]}; in Table 4, a token {large} for {printed},"
        f" {large // printed} times, with one active expert {_memories(1, 1024, 128, 1)}; expert by expert"
        f" {cost_mixformer.mome(1, 1024, 8, 64)}",
    )


def _memories(tokens: int, d_model: int, d_head: int, experts: int) -> int:
    """2 (k + 1) N d d_head: k decays and k weights for each entry of a state, and one update and one reading."""
    return 2 * (experts + 1) * tokens * d_model * d_head


@claim(
    "mixformer.C43",
    "For long sequences a layer costs O(N)",
    source="4.6",
    verdict="holds only if",
    evidence="evaluation",
    why="TALA is computed token by token or in chunks; (14), the form for training, has products of each pair of"
    " tokens",
)
def linear_cost() -> Finding:
    lengths, d = (8, 16, 32), 2
    shapes = {T: [(T, d), (T, d), (T, d), (), (d, d)] for T in lengths}

    def ratio(form: Any, **rest: int) -> float:
        """How far the cost of 16 more tokens is above twice that of 8 more: 1 if each token costs the same."""
        a, b, c = (products(_with_state(form), *shapes[T], **rest) for T in lengths)
        return (c - b) / (2 * (b - a))

    found = {"recurrent": ratio(retention.recurrent), "chunkwise": ratio(retention.chunkwise, chunk=4),
             "parallel": ratio(retention.parallel)}  # fmt: skip
    layer = [cost_mixformer.total(N, 1024, 8, 64, 896) for N in (1, 4096)]
    return conditional(
        found["recurrent"] == found["chunkwise"] == 1 and layer[1] == 4096 * layer[0],
        found["parallel"] == 1,
        "cost of a token from the 17th on, over that from the 9th on: "
        + ", ".join(f"{name} {x:.3g}" for name, x in found.items())
        + f"; a layer of Table 4 takes {layer[0]} for each token, {cost.projections(1024)} of them in projections",
    )


@claim(
    "mixformer.C44",
    "The feed-forward network expands, d' > d",
    source="4.6; Table 4",
    verdict="refuted",
    evidence="recomputation",
    why="Table 4 has d' = 896 for d = 1024, and 1024 for 2048",
)
def expansion() -> Finding:
    widths = {name: (model["d_ff"], model["d_model"]) for name, model in MODELS.items()}
    return holds(
        all(f > d for f, d in widths.values()),
        ", ".join(f"{name}: d' = {f}, d = {d}" for name, (f, d) in widths.items()),
    )
