"""Claims of MixFormer, section 4.3: whether (12), (14), (15) and (16) are one layer, and what (14) costs."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from mixproof.reference import cost_mixformer, retention, tala, tala_decays
from mixproof.reference import tala_masks as masks
from mixproof.reference import tala_printed as printed
from mixproof.reference.primitives import group_norm
from mixproof.verify.claims import Finding, claim, conditional, holds, proved
from mixproof.verify.claims.evidence import apart, same
from mixproof.verify.numbers.exact import GF, RATIONALS

HALF = RATIONALS(Fraction(1, 2))


def ones(T: int, n: int = 1) -> Any:
    return RATIONALS(np.ones((T, n), dtype=int))


def listed(x: Any) -> str:
    """The elements of an exact array."""
    return "(" + ", ".join(map(str, x.data.flat)) + ")"


def equal(x: Any, y: Any) -> bool:
    return bool(np.all(x == y))


def attempted(f: Callable[..., Any], *inputs: Any) -> Any:
    """f(*inputs), or None where the shapes do not fit."""
    try:
        return f(*inputs)
    except ValueError:
        return None


# --- (12), (14) and (15) ---------------------------------------------------------------------------------------------


@claim(
    "mixformer.C8",
    "The definition of TALA (12) and its parallel form (14) are one function",
    source="4.3, (12) and (14)",
    verdict="refuted",
    evidence="exact arithmetic",
    why="one token, q = v = 1: (12) gives 1 for every key, its weights being divided by their sum, and (14) gives"
    " k G_11: G_11 would have to be 1 for k = 1 and 1/2 for k = 2",
)
def definition_and_parallel() -> Finding:
    one, gains = ones(1), {}
    for reading in printed.READINGS:
        needed = []
        for k in (one, 2 * one):
            want = printed.eq12_per_source(one, k, one, HALF, one[0], reading)
            needed.append((want / printed.eq14_free_G(one, k, one, HALF, one)).data[0, 0])
        gains[reading] = needed
    return holds(
        all(a == b for a, b in gains.values()),
        "G_11 for k = 1 and k = 2: " + ", ".join(f"{r} {a} and {b}" for r, (a, b) in gains.items()),
    )


@claim(
    "mixformer.C9",
    "The parallel form (14) and the recurrent form (15) are one function, with the same G",
    source="4.3, (14) and (15)",
    verdict="holds only if",
    evidence="symbolic proof",
    why="omega^(n-m) G_nm is a product of decays: G_nn = 1 and G_nm = G_nl G_lm. One token, G = 2: 2, but 1 by (15)."
    " Three tokens of ones, omega = 1, G_21 = G_32 = 1, G_31 = 2: (1, 2, 4), but (1, 2, 3)",
)
def parallel_and_recurrent() -> Finding:
    from mixproof.verify.numbers.symbolic import EXPRESSIONS, proves, symbols

    T = 3  # the weight of source m in token n, for decays a_2 and a_3, whatever they are
    a, x = symbols("a", (T,)), EXPRESSIONS(np.ones((T, 1), dtype=int))
    weights = tala_decays.in_steps(x, x, EXPRESSIONS(np.eye(T, dtype=int)), a[:, None, None], 1, None)[0]
    only = proves(weights, masks.cocycle(a))
    generator = np.random.default_rng(0)
    q, k, v, g = (GF.draw(generator, shape) for shape in ((5, 2), (5, 2), (5, 3), (5,)))
    only = only and masks.is_cocycle(masks.cocycle(g))
    one = equal(masks.mix(q, k, v, masks.cocycle(g)), tala_decays.in_steps(q, k, v, g[:, None, None], 1, None)[0])
    pairs = []
    for G in ([[2]], [[1, 0, 0], [1, 1, 0], [2, 1, 1]]):
        G, x = RATIONALS(np.array(G)), ones(len(G))
        decays = masks.decays_of(G)[:, None, None]  # the only ones that give the weights of neighbours
        pairs.append((printed.eq14_free_G(x, x, x, RATIONALS(1), G), tala_decays.in_steps(x, x, x, decays, 1, None)[0]))
    return conditional(
        only and one,
        any(equal(*pair) for pair in pairs),
        f"weights of (15) for T = {T}: 1, a_n, a_n a_m and no others; equal for 5 tokens over GF(2^31 - 1) with"
        " products of decays; " + ", ".join(f"{listed(p)} by (14), {listed(r)} by (15)" for p, r in pairs),
    )


@claim(
    "mixformer.C11",
    "Q * (K^T * D) V, as printed in (14) with * element by element, is a form of TALA",
    source="4.3, (14)",
    verdict="refuted",
    evidence="exact arithmetic",
    why="two tokens of one channel: K^T is 1 x 2, D is 2 x 2. With T = d = 2 and omega = 1/2 the shapes fit, but rows"
    " of ones give 1 and 3/2 where (15) has 2 and 3: the channels of a key are taken for tokens",
)
def literal() -> Finding:
    found, right = {}, {}
    for T, d in ((2, 1), (2, 2)):
        x, D = ones(T, d), masks.geometric(HALF, T)
        found[T, d] = attempted(printed.eq14_literal, x, x, x, D)
        right[T, d] = retention.recurrent(x, x, x, HALF)[0]
    return holds(
        all(y is not None and equal(y, right[size]) for size, y in found.items()),
        "; ".join(
            f"T = {T}, d = {d}: {'ill-shaped' if y is None else listed(y)}, right {listed(right[T, d])}"
            for (T, d), y in found.items()
        ),
    )


@claim(
    "mixformer.C12",
    "The T x T gain of (12) and (14) is the G that decays the state of (15) element by element",
    source="4.3, (12), (14), (15): G is the same",
    verdict="refuted",
    evidence="exact arithmetic",
    why="three tokens, d = 2: a 3 x 3 gain does not fit a 2 x 2 state. With T = d = 2, omega = 1 and G = (1, 0; 2, 1)"
    " it does, and tokens of ones give o_2 = (6, 6) by (14), (5, 3) by (15)",
)
def gain_of_the_state() -> Finding:
    def by_steps(x: Any, G: Any) -> Any:
        return tala_decays.in_steps(x, x, x, np.stack([G] * len(x)), 1, None)[0]

    unfit = attempted(by_steps, np.ones((3, 2)), np.ones((3, 3)))
    x, G = ones(2, 2), RATIONALS(np.array([[1, 0], [2, 1]]))
    mask, state = printed.eq14_free_G(x, x, x, RATIONALS(1), G), by_steps(x, G)
    return holds(
        unfit is not None and equal(mask, state),
        f"3 tokens, d = 2: {'ill-shaped' if unfit is None else 'defined'}; T = d = 2: o_2 = {listed(mask[1])} by (14),"
        f" {listed(state[1])} by (15)",
    )


@claim(
    "mixformer.C22",
    "Through the mask D no token depends on a later one",
    source="4.3, (14); 5.5",
    verdict="proved",
    evidence="symbolic proof",
)
def causal_mask() -> Finding:
    from mixproof.verify.numbers.symbolic import jacobian, proves, symbols

    T = 3
    omega, G, q, k, v = symbols("omega"), symbols("G", (T, T)), *(symbols(x, (T, 1)) for x in "qkv")
    O = printed.eq14_free_G(q, k, v, omega, G)
    later = np.triu(np.ones((T, T), dtype=bool), 1)
    slopes = {name: jacobian(O, x)[:, 0, :, 0] for name, x in (("k", k), ("v", v))}
    earlier = all(not proves(slopes["v"][n, m], 0) for n in range(T) for m in range(n + 1))
    return proved(
        all(proves(slope[later], 0) for slope in slopes.values()) and earlier,
        f"T = {T}, any q, k, v, omega and T x T gain: dO_n / dk_m = dO_n / dv_m = 0 for m > n;"
        " dO_n / dv_m is zero for no m <= n",
    )


# --- (16) ------------------------------------------------------------------------------------------------------------


@claim(
    "mixformer.C10",
    "The chunkwise form (16) computes what the recurrent form (15) does",
    source="4.3, (15) and (16)",
    verdict="refuted",
    evidence="exact arithmetic",
    why="two chunks of one token, a = 1/2, ones: (1, 2) and not (1, 3/2). What is read from the state must decay by"
    " a^r, and what is written to it by a^(B-r), too: every error has the factor 1 - a",
)
def chunkwise() -> Finding:
    import sympy

    from mixproof.verify.numbers.symbolic import EXPRESSIONS, proves, symbols

    def last(f: Callable[..., Any], T: int, chunk: int) -> Any:
        return f(ones(T), ones(T), ones(T), HALF, chunk=chunk)[0]

    two = last(printed.eq16_printed, 2, 1), retention.recurrent(ones(2), ones(2), ones(2), HALF)[0]
    three = [last(f, 3, 2).data[-1, 0] for f in (printed.eq16_only_zeta, printed.eq16_only_xi)]
    right = retention.recurrent(ones(3), ones(3), ones(3), HALF)[0].data[-1, 0]
    a, x = EXPRESSIONS(sympy.Symbol("a")), EXPRESSIONS(np.ones((4, 1), dtype=int))
    error = (printed.eq16_printed(x, x, x, a, chunk=2)[0] - retention.parallel(x, x, x, a)[0]).data[-1, 0]
    q, k, v = (symbols(name, (3, 1)) for name in "qkv")
    mended = proves(retention.chunkwise(q, k, v, a, chunk=2)[0], retention.recurrent(q, k, v, a)[0])
    y = np.ones((256, 1))
    long = [f(y, y, y, tala.omega(1.0), chunk=64)[0][-1, 0] for f in (printed.eq16_printed, retention.chunkwise)]
    return holds(
        equal(*two) and sympy.expand(error) == 0,
        f"B = 1: {listed(two[0])}, right {listed(two[1])}; B = 2, third token:"
        f" {last(printed.eq16_printed, 3, 2).data[-1, 0]}, with one correction {' or '.join(map(str, three))}, right"
        f" {right}, with both {'(15) for all q, k, v, a' if mended else 'wrong'}; fourth off by {sympy.factor(error)};"
        f" B = 64, h = 1: {long[0] / long[1]:.1f} times what is right",
    )


@claim(
    "mixformer.C19",
    "Group norm takes out the statistical bias of chunkwise computation",
    source="4.1",
    verdict="refuted",
    evidence="exact arithmetic",
    why="computed right, chunks have no bias. What (16) adds stays: T = 2, B = 1, a = 1/2, q = k = 1, v = (1, 0, 0)"
    " and (0, 1, 0): o_2 = (1, 1, 0) becomes (0.71, 0.71, -1.41), where (1/2, 1, 0) is (0, 1.22, -1.22). Pooled over"
    " a chunk, the norm itself depends on its length",
)
def bias_of_chunks() -> Finding:
    generator = np.random.default_rng(0)
    q, k, v = (GF.draw(generator, (5, 2)) for _ in range(3))
    a = GF.draw(generator)
    unbiased = all(
        equal(retention.chunkwise(q, k, v, a, chunk=B)[0], retention.recurrent(q, k, v, a)[0]) for B in (1, 2, 3)
    )
    one, values = np.ones((2, 1)), np.eye(2, 3)
    biased, right = (
        group_norm(f(one, one, values, 0.5, chunk=1)[0][1:], 0.0) for f in (printed.eq16_printed, retention.chunkwise)
    )
    x = generator.standard_normal((8, 2))
    pooled = [printed.group_norm_over_time(x[:B], 0.0)[0] for B in (2, 4, 8)]
    return holds(
        same(biased, right),
        f"chunks of 1, 2, 3 over GF(2^31 - 1): {'no bias' if unbiased else 'a bias'}; (16) after the norm "
        + ", ".join(f"{b:.2f} for {r:.2f}" for b, r in zip(biased[0], right[0], strict=True))
        + f"; first token after a norm over chunks of 4 or 8: {apart(pooled[0], pooled[1]):.2f} and"
        f" {apart(pooled[0], pooled[2]):.2f} off what it is for chunks of 2",
    )


@claim(
    "mixformer.C21",
    "The parallel form (14) trains at a cost that is linear in the length",
    source="4.3, (14); 4.6",
    verdict="holds only if",
    evidence="evaluation",
    why="it is computed chunk by chunk, the state carried between: in one piece the mask has T x T entries",
)
def parallel_cost() -> Finding:
    def peak(form: Callable[..., Any], T: int) -> int:
        x = np.ones((T, 4))
        tracemalloc.start()
        form(x, x, x, 4.0, 1.0)
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    chunked = partial(tala.chunkwise, chunk=32)
    q, k, v = np.random.default_rng(0).standard_normal((3, 64, 4))
    agree = same(chunked(q, k, v, 4.0, 1.0)[0], tala.parallel(q, k, v, 4.0, 1.0)[0])
    whole, pieces = (peak(form, 512) / peak(form, 256) for form in (tala.parallel, chunked))
    storage = [
        (cost_mixformer.parallel_storage(T, 8), cost_mixformer.chunkwise_storage(T, 8, 64)) for T in (1024, 2048)
    ]
    return conditional(
        agree and pieces < 3 and storage[1][1] == 2 * storage[0][1],
        whole < 3 or storage[1][0] == 2 * storage[0][0],
        f"peak memory from 256 to 512 tokens: x {whole:.1f} in one piece, x {pieces:.1f} in chunks of 32; masked scores"
        f" of 8 heads, 1024 and 2048 tokens: {storage[0][0]} and {storage[1][0]}, or {storage[0][1]} and"
        f" {storage[1][1]}",
    )
