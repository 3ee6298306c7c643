"""Claims of MixFormer about other architectures: section 4.7 and Table 2, with what 5.3 says of memory."""

from __future__ import annotations

import cmath
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.polynomial import Polynomial

from mixproof.reference import cost_mixformer, mamba, mamba_lti, mome_mixing, tala_masks, tala_normalised
from mixproof.verify.claims import Finding, claim, conditional, holds
from mixproof.verify.claims.evidence import draw, same
from mixproof.verify.claims.mixformer_counting import effort, products
from mixproof.verify.numbers.exact import GF, RATIONALS

# --- 4.7: training and inference of the others -----------------------------------------------------------------------


@claim(
    "mixformer.C32",
    "RWKV cannot be trained in parallel over the tokens",
    source="4.7, Table 2",
    verdict="refuted",
    evidence="exact arithmetic",
    why="its sums are those of an affine recurrence, of which two steps make one: over GF(2^31 - 1) a scan gives the"
    " same outputs, and for 64 tokens its operations are 17 deep where those of the recurrence are 131. MixFormer's"
    " (12), element by element, is this recurrence with the bonus 1 / (omega G) for the current token",
)
def rwkv_in_a_scan() -> Finding:
    generator, T = np.random.default_rng(0), 8
    q, k, v, bonus, a = (GF.draw(generator, shape) for shape in ((T, 2), (T, 2), (T, 2), (1, 2), ()))
    in_steps, in_a_scan = (_rwkv(k, v, a, bonus, form) for form in (mamba.in_steps, mamba.in_a_scan))
    agree = all(bool(np.all(np.asarray(x == _rwkv_as_defined(k, v, a, bonus)))) for x in (in_steps, in_a_scan))
    tala = tala_normalised.n1_recurrent(q, k, v, a)[0]
    same_map = bool(np.all(np.asarray(tala == q * _rwkv(k, v, a, 1 / a, mamba.in_a_scan))))
    depth = {form.__name__: effort(_sums(form), (64, 1), ())[1] for form in (mamba.in_steps, mamba.in_a_scan)}
    return holds(
        not (agree and same_map) or depth["in_a_scan"] >= depth["in_steps"],
        f"{T} tokens: a scan and the recurrence agree: {agree}; 64 tokens: {depth['in_a_scan']} and {depth['in_steps']}"
        f" operations deep; with the bonus 1 / a it is (12): {same_map}",
    )


def _sums(form: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """x_t = a x_{t-1} + u_t for all t, by a form of a linear state space.  (T, D), () -> (T, D)"""

    def sums(u: Any, a: Any) -> Any:
        one = np.ones((len(u), 1), dtype=int)
        decays = np.broadcast_to(np.ones((), dtype=int), (len(u), u.shape[1], 1)) * a
        return form(u, decays, one[:, :, None], one, one, np.zeros(u.shape[1], dtype=int), 0 * u[0][:, None])[0]

    return sums


def _rwkv(k: Any, v: Any, a: Any, bonus: Any, form: Callable[..., Any]) -> Any:
    """(x_{t-1} + bonus k_t v_t) / (z_{t-1} + bonus k_t), k already exponentials, sums of earlier tokens by `form`."""
    x, z = (_sums(form)(u, a) for u in (k * v, k))
    earlier = [np.concatenate([0 * u[:1], u[:-1]]) for u in (x, z)]
    return (earlier[0] + bonus * k * v) / (earlier[1] + bonus * k)


def _rwkv_as_defined(k: Any, v: Any, a: Any, bonus: Any) -> Any:
    """RWKV-4: wkv_t = [sum_{i<t} a^{t-1-i} k_i v_i + bonus k_t v_t] / [the same without v]."""
    rows = []
    for t in range(len(k)):
        weights = [a ** (t - 1 - i) for i in range(t)]
        over, under = bonus[0] * k[t] * v[t], bonus[0] * k[t]
        for i, w in enumerate(weights):
            over, under = over + w * k[i] * v[i], under + w * k[i]
        rows.append((over / under)[None])
    return np.concatenate(rows)


@claim(
    "mixformer.C33",
    "S4 needs O(N log N) memory on long sequences",
    source="Table 2",
    verdict="holds only if",
    evidence="evaluation",
    why="as an upper bound, loose by log N: its convolution by Fourier transforms in place holds two arrays of 2 N"
    " complex numbers. N log N is its number of operations",
)
def s4_memory() -> Finding:
    x = draw(mamba_lti.OPERATOR, T=16, D=1, N=2)
    x["delta"], x["A"], skip = abs(x["delta"]), -abs(x["A"]), 0 * x["skip"]
    want = mamba_lti.convolution(**x | {"skip": skip})[0][:, 0]
    impulse = mamba_lti.convolution(**x | {"skip": skip, "u": np.eye(16)[:, :1]})[0][:, 0]
    y, held = _convolved(impulse.tolist(), x["u"][:, 0].tolist())
    sizes = [_convolved([1.0] * n, [1.0] * n)[1] for n in (256, 512)]
    return conditional(
        same(y, want) and sizes[1] <= 512 * 9,
        sizes[1] > 2 * sizes[0],
        f"16 tokens as by the sum: {same(y, want)}, {held} real numbers held; 256 and 512 tokens: {sizes[0]} and"
        f" {sizes[1]}, N log N = {256 * 8} and {512 * 9}",
    )


def _convolved(x: list[float], y: list[float]) -> tuple[list[float], int]:
    """The causal convolution of two sequences of 2^m numbers, and how many real numbers it held."""
    N = len(x)
    a, b = ([*map(complex, z), *[0j] * N] for z in (x, y))
    for z in (a, b):
        size = 2 * N
        while size > 1:  # leaves the spectrum in bit-reversed order, which products do not mind
            _butterflies(z, size, before=False)
            size //= 2
    for i, factor in enumerate(b):
        a[i] *= factor
    size = 2
    while size <= 2 * N:
        _butterflies(a, size, before=True)
        size *= 2
    return [z.real / (2 * N) for z in a[:N]], 2 * (len(a) + len(b))


def _butterflies(z: list[complex], size: int, before: bool) -> None:
    half = size // 2
    for j in range(half):
        turn = cmath.exp(2j * cmath.pi * j / size * (1 if before else -1))
        for i in range(j, len(z), size):
            low, high = z[i], z[i + half] * (turn if before else 1)
            z[i], z[i + half] = low + high, (low - high) * (1 if before else turn)


@claim(
    "mixformer.C34",
    "A token of inference takes O(1) time, however many came before it",
    source="4.7, Table 2",
    verdict="holds only if",
    evidence="exact arithmetic",
    why="decays multiply from step to step; the free T x T matrix G of (12) and (14) needs T / 2 states. With"
    " k_e experts a token takes about 2 (k_e + 1) / 3 times as many products as with one state",
)
def constant_time() -> Finding:
    X, d = 3, 2
    tokens = [products(_memories, (T, d), (T, d), (T, d), (T, X), (X,)) for T in (1, 2, 7, 8)]
    generator, half = np.random.default_rng(0), RATIONALS(1) / 2
    decayed = {T: tala_masks.semiseparable_rank(tala_masks.geometric(half, T)) for T in (4, 8)}
    free = {T: _rank_of_free_gain(GF.draw(generator, (T, T))) for T in (4, 8)}
    return conditional(
        tokens[1] - tokens[0] == tokens[3] - tokens[2] and set(decayed.values()) == {1},
        free[4] == free[8],
        f"{X} experts of {d} x {d}: {tokens[1] - tokens[0]} products for the second token,"
        f" {tokens[3] - tokens[2]} for the eighth; states needed at T = 4 and 8: {decayed[4]} and {decayed[8]}, under a"
        f" free G {free[4]} and {free[8]}",
    )


def _memories(q: Any, k: Any, v: Any, E: Any, a: Any) -> Any:
    """Memory experts token by token, read with the weights E."""
    ones = np.ones(E.shape, np.int8)
    return mome_mixing.recurrent(q, k, v, E, ones, ones, a)


def _rank_of_free_gain(G: Any) -> int:
    return tala_masks.semiseparable_rank(tala_masks.free_gain(GF(1) / 2, G))


@claim(
    "mixformer.C35",
    "Memory grows as O(N) with the length of the sequence",
    source="4.7, Table 2",
    verdict="holds only if",
    evidence="recomputation",
    why="it is computed in chunks, without a free G: the parallel form (14), which the paper trains with, holds N x N"
    " scores and a mask in every head, and G has N^2 entries",
)
def linear_memory() -> Finding:
    heads, chunk, N = 8, 64, 4096
    chunks = [cost_mixformer.chunkwise_storage(n, heads, chunk) for n in (N, 2 * N)]
    parallel = [cost_mixformer.parallel_storage(n, heads) for n in (N, 2 * N)]
    ratios = chunks[1] / chunks[0], parallel[1] / parallel[0]
    return conditional(
        ratios[0] == 2,
        ratios[1] == 2,
        f"{heads} heads, {N} and {2 * N} tokens: {chunks[0]} and {chunks[1]} scores in chunks of {chunk},"
        f" {parallel[0]} and {parallel[1]} by (14)",
    )


@claim(
    "mixformer.C36",
    "Generating images pixel by pixel takes much less memory than with the cache of a Transformer",
    source="5.3",
    verdict="holds only if",
    evidence="recomputation",
    why="there are more than k_e d_head / 2 pixels, 4096 with the 64 experts and heads of 128 of Table 4. MNIST has"
    " 784: the states are then 5.2 times the cache",
)
def image_memory() -> Finding:
    states, one = (cost_mixformer.state(1024, 8, experts) for experts in (64, 1))
    cache = {n: cost_mixformer.key_value_cache(n, 1024) for n in (28**2, 3 * 32**2, 8192)}
    return conditional(
        states < cache[8192] and one < min(cache.values()),
        states < min(cache.values()),
        f"states {states} numbers a layer, of one expert {one}; cache of 784 pixels {cache[784]},"
        f" {states / cache[784]:.1f} times smaller, of 3072 {cache[3072]}; level at"
        f" {cost_mixformer.cache_crossover(1024, 8, 64)} tokens",
    )


@claim(
    "mixformer.C37",
    "A recurrent network has to take its steps one after another in training",
    source="4.7, Table 2",
    verdict="holds only if",
    evidence="exact arithmetic",
    why="a step is not affine in the state, and scans are what it is held against: 5 steps of h^2 + x make a polynomial"
    " of 33 coefficients, so that nothing of fixed size stands for them; 5 affine ones make an affine one",
)
def nonlinear_steps() -> Finding:
    T = 5
    affine, squared = (_composed([Polynomial(step(x)) for x in range(1, T + 1)])
                       for step in (lambda x: [x, 2], lambda x: [x, 0, 1]))  # fmt: skip
    return conditional(
        len(squared) == 2**T + 1,
        len(affine) > 2,
        f"{T} steps of h^2 + x: {len(squared)} coefficients; of 2 h + x: {len(affine)}",
    )


def _composed(steps: list[Polynomial]) -> list[float]:
    whole = Polynomial([0, 1])
    for step in steps:
        whole = step(whole)
    return list(whole.coef)


@claim(
    "mixformer.C39",
    "MixFormer has several memory states where linear attention, RWKV, S4 and RetNet have one",
    source="4.7, Table 2",
    verdict="holds only if",
    evidence="exact arithmetic",
    why="states are counted in one head, and the experts decay differently: router weights sum to 1, so that those of"
    " equal decays read one state. RetNet's H heads are H states of H decays, too",
)
def several_states() -> Finding:
    generator, T, X = np.random.default_rng(0), 8, 3
    E = GF.draw(generator, (T, X - 1))
    E = np.concatenate([E, (1 - np.sum(E, axis=1))[:, None]], axis=1)
    decays = {"3, 5, 7": GF([3, 5, 7]), "3, 3, 7": GF([3, 3, 7]), "3, 3, 3": GF([3, 3, 3])}
    states = {name: tala_masks.semiseparable_rank(tala_masks.read_mix(E, a)) for name, a in decays.items()}
    return conditional(
        states["3, 5, 7"] == X,
        states["3, 3, 3"] == X,
        f"{X} experts, states needed for decays " + ", ".join(f"({name}): {n}" for name, n in states.items()),
    )
