"""Claims of the survey, sections 1 to 3: softmax attention, sigmoid attention, RetNet."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from mixproof.reference import cached_attention, cost, cost_survey, retention, sigmoid_attention, softmax_attention
from mixproof.reference.primitives import group_norm
from mixproof.verify.claims import Finding, claim, conditional, holds, proved, unchecked
from mixproof.verify.claims.evidence import HALF_OF_THE_DIGITS, apart, one_function, same

# --- 1. standard attention -------------------------------------------------------------------------------------------


@claim(
    "survey.A1",
    "Logits are divided by sqrt(d_in) in the first equation and by d_in in the second, for the same attention",
    source="1.1, both equations",
    verdict="refuted",
    evidence="exact arithmetic",
    why="d = 4, q = k_0 = (1, 1, 1, 1), k_1 = 0: logits 2 and 0, or 1 and 0. Only the root keeps the variance of q . k"
    " at one, and d is that of a head, not of the input",
)
def scaling() -> Finding:
    d = 4
    q, k = np.ones((1, d)), np.stack([np.ones(d), np.zeros(d)])
    first, second = (softmax_attention.weights(q, k, scale)[0, 0] for scale in (d**-0.5, 1 / d))
    signs = np.array(list(itertools.product((-1, 1), repeat=d)))
    variance = Fraction(int(np.sum((signs @ signs.T) ** 2)), len(signs) ** 2)
    return holds(
        same(first, second),
        f"weights of k_0 {first:.3f} and {second:.3f}; over all signs q, k in {{-1, 1}}^4 the variance of q . k is"
        f" {variance}, so {variance / d} over the root's square and {variance / d**2} over that of d",
    )


@claim(
    "survey.A2",
    "The output for a token is a convex combination of all preceding values",
    source="1.1, second equation",
    verdict="holds only if",
    evidence="property test",
    why="the token itself counts as preceding, as in the printed sum j = 1 .. i; without it the first token has no"
    " output",
)
def convex_combination() -> Finding:
    generator, own = np.random.default_rng(0), []
    within = True
    for _ in range(50):
        q, k = generator.normal(size=(2, 6, 3)) * 3
        P = softmax_attention.weights(q, k, causal=True)
        within &= bool(np.all(P >= 0)) and same(np.sum(P, axis=1), np.ones(6)) and not np.any(np.triu(P, 1))
        own.append(float(np.min(np.diagonal(P))))
    return conditional(
        within,
        max(own) == 0,
        f"50 draws of 6 tokens: weights >= 0, rows sum to 1, none on later tokens; least weight of a token's own value"
        f" {min(own):.1e}, of the first one always 1",
    )


@claim(
    "survey.A3",
    "Attention recalls any entry of its context perfectly",
    source="1.3, Pros; 17, 15.1",
    verdict="refuted",
    evidence="symbolic proof",
    why="keys 0, 1/2, 1 in one dimension: whatever the query, the middle key gets at most 1/3 of the weight",
)
def recall() -> Finding:
    import sympy

    t = sympy.Symbol("t", positive=True)  # exp(q / 2), so that the weights are 1, t, t^2 over their sum
    gap = sympy.Rational(1, 3) - t / (1 + t + t**2)
    square = (t - 1) ** 2 / (3 * (1 + t + t**2))
    never_more = sympy.cancel(gap - square) == 0
    k = np.array([[0.0], [0.5], [1.0]])
    most = max(softmax_attention.weights(np.array([[q]]), k)[0, 1] for q in np.linspace(-40, 40, 161))
    return proved(
        not never_more, f"1/3 - weight = (t - 1)^2 / (3 (1 + t + t^2)), t = e^(q/2); largest found {most:.6f}"
    )


@claim(
    "survey.A4",
    "Training needs O(n^2) space",
    source="1.2, 1.3, 2.4",
    verdict="holds only if",
    evidence="evaluation",
    why="the weights are written out; block by block, with a running maximum, space is O(n)",
)
def quadratic_space() -> Finding:
    def in_blocks(x: np.ndarray, block: int = 8) -> Any:
        seen = np.ones((len(x), block), dtype=bool)
        O, lse = cached_attention.part(x, x[:block], x[:block], seen)
        for a in range(block, len(x), block):
            P, mass = cached_attention.part(x, x[a : a + block], x[a : a + block], seen)
            O, lse = cached_attention.merge([O, P], [lse, mass]), np.logaddexp(lse, mass)
        return O

    def written_out(x: np.ndarray) -> Any:
        return softmax_attention.parallel(x, x, x)

    def peak(form: Callable[[np.ndarray], Any], n: int) -> int:
        x = np.ones((n, 4))
        tracemalloc.start()
        form(x)
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    x = np.random.default_rng(0).normal(size=(32, 4))
    written, blocks = (peak(form, 256) / peak(form, 128) for form in (written_out, in_blocks))
    return conditional(
        written > 3,
        blocks > 3 or not same(in_blocks(x), written_out(x)),
        f"peak memory from 128 to 256 tokens: x {written:.1f} with weights written out, x {blocks:.1f} in blocks of 8"
        " keys, with the same output",
    )


@claim(
    "survey.A5",
    "With a cache, decoding takes O(n) time a step and O(n d) memory",
    source="1.2",
    verdict="holds",
    evidence="recomputation",
)
def decoding_cost() -> Finding:
    step = [cost.attention_flops(n, 64, 64) // n for n in (1000, 2000)]
    cache = [cost.attention_state(n, 64, 64) for n in (1000, 2000)]
    return holds(
        step[1] == 2 * step[0] and cache[1] == 2 * cache[0],
        f"1000 and 2000 tokens, d = 64: {step[0]} and {step[1]} operations a step, {cache[0]} and {cache[1]} numbers",
    )


# --- 2. sigmoid attention --------------------------------------------------------------------------------------------


@claim(
    "survey.S1",
    "Sigmoid attention needs essentially as many operations as softmax attention",
    source="2.3",
    verdict="holds",
    evidence="recomputation",
)
def sigmoid_operations() -> Finding:
    more = {n: cost_survey.sigmoid_row(n) - cost_survey.softmax_row(n) for n in (1, 64, 4096)}
    share = 2 / cost_survey.softmax_row(4096)
    return holds(
        set(more.values()) == {2}, f"two more for a row of weights, however long: {share:.0e} of it at n = 4096"
    )


@claim(
    "survey.S2",
    "Sigmoid attention has exactly the operation count of standard attention",
    source="17, 15.2",
    verdict="refuted",
    evidence="recomputation",
    why="the operations that section 2.3 lists are 5 n - 2 a row for softmax and 5 n for sigmoid: 3 and 5 at n = 1",
)
def sigmoid_operations_exactly() -> Finding:
    rows = [(n, cost_survey.softmax_row(n), cost_survey.sigmoid_row(n)) for n in (1, 2, 1024)]
    return holds(all(a == b for _, a, b in rows), ", ".join(f"n = {n}: {a} and {b}" for n, a, b in rows))


@claim(
    "survey.S3",
    "Sigmoid attention is more regular: it has the smaller Lipschitz constant",
    source="2.4, Pros",
    verdict="refuted",
    evidence="property test",
    why="b = 0, x = 0: values enter with weights that sum to n / 2, not 1. With b = -log n it is the flatter one at"
    " small x, and the steeper one at random x of size 4",
)
def sigmoid_regularity() -> Finding:
    n, d = 8, 2
    X = np.random.default_rng(0).uniform(-1, 1, (n, d))
    found, smaller = [], []
    for size, b in ((0.0, 0.0), (0.1, -math.log(n)), (4.0, -math.log(n))):
        soft = _norm(softmax_attention.vjp, size * X, ("q", "k", "v"))
        sigmoid = _norm(_sigmoid_vjp, size * X, ("q", "k", "v"), b=np.asarray(b))
        found.append(f"x of size {size:g}, b = {b:.2f}: {soft:.3g} and {sigmoid:.3g}")
        smaller.append(sigmoid <= soft)
    return holds(all(smaller), f"norm of the Jacobian, {n} causal tokens, softmax and sigmoid: " + "; ".join(found))


def _norm(vjp: Callable[..., dict[str, Any]], x: np.ndarray, names: tuple[str, ...], **more: Any) -> float:
    """Spectral norm of the Jacobian of self-attention x -> O(x, x, x), row by row of the identity."""
    rows = []
    for basis in np.eye(x.size).reshape(x.size, *x.shape):
        grads = vjp({"O": basis}, x, x, x, **more, **({} if more else {"causal": True}))
        rows.append(np.sum([grads[name] for name in names], axis=0).reshape(-1))
    return float(np.linalg.norm(np.stack(rows), 2))


def _sigmoid_vjp(cotangents: dict[str, Any], q: Any, k: Any, v: Any, b: Any) -> dict[str, Any]:
    return sigmoid_attention.vjp(cotangents | {"Kc": 0 * k, "Vc": 0 * v}, q, k, v, b)


@claim(
    "survey.S4",
    "Sigmoid attention needs no synchronisation along a row at all",
    source="2.3, 2.4",
    verdict="holds only if",
    evidence="evaluation",
    why="only the weights are meant: the output is still a sum over all keys, and the norm that 2.2 adds runs over"
    " channels",
)
def sigmoid_synchronisation() -> Finding:
    generator = np.random.default_rng(0)
    q, k, v = generator.normal(size=(3, 5, 3))
    other, seen, b = k.copy(), np.ones((5, 5), dtype=bool), np.asarray(0.0)
    other[0] += 1
    alone = np.array_equal(*(sigmoid_attention.weights(q, x, b, seen)[:, 1:] for x in (k, other)))
    shared = np.array_equal(*(softmax_attention.weights(q, x)[:, 1:] for x in (k, other)))
    outputs = [sigmoid_attention.parallel(q, x, v, b)[0][1:] for x in (k, other)]
    return conditional(
        alone and not shared,
        np.array_equal(*outputs),
        f"one key changed: other weights of sigmoid bit-equal, of softmax not; outputs of other tokens move by"
        f" {apart(*outputs):.2f}",
    )


S5 = unchecked(
    "survey.S5",
    "The Voronoi loss converges at rates n^-0.24 and n^-0.07 for softmax, n^-0.51 and n^-0.46 for sigmoid",
    source="2.1",
    why="measured rates of another paper, of which no sizes or seeds are given",
)
S6 = unchecked(
    "survey.S6",
    "FlashSigmoid's inference kernel is 17% faster than FlashAttention-2 on an H100",
    source="2.3, 2.4; 17, 15.2",
    why="a time measured on one device; nothing in the equations bears on it",
)


@claim(
    "survey.S7",
    "The weights of sigmoid attention are not bound to a total of one",
    source="2.1",
    verdict="holds",
    evidence="evaluation",
)
def sigmoid_mass() -> Finding:
    n = 8
    zero, seen = np.zeros((n, 1)), np.ones((n, n), dtype=bool)
    mass = {
        b: float(np.sum(sigmoid_attention.weights(zero, zero, np.asarray(b), seen)[0])) for b in (0.0, -math.log(n))
    }
    return holds(
        mass[0.0] == n / 2,
        f"equal logits, {n} keys: {mass[0.0]:g} = n / 2 at b = 0; {mass[-math.log(n)]:.4f}, n / (n + 1), at b = -log n",
    )


# --- 3. RetNet -------------------------------------------------------------------------------------------------------


@claim(
    "survey.R1",
    "The parallel form of retention can be rewritten exactly as a recurrence",
    source="3.1",
    verdict="holds",
    evidence="exact arithmetic",
)
def retention_forms() -> Finding:
    agree, points = one_function(retention.OPERATOR, T=5, K=2, V=3)
    return holds(agree, f"{points}, with keys rotated against queries by the caller and a state that starts at zero")


@claim(
    "survey.R2",
    "Parallel, recurrent and chunkwise retention stay one function where each scales its rows in its own way and leaves"
    " it to the norm that follows to undo this",
    source="3.1",
    verdict="holds only if",
    evidence="property test",
    why="the norm has eps = 0: with eps = 1e-6, rows of size 1e-3 and the same rows times 10 leave the norm apart",
)
def scaled_rows() -> Finding:
    rows = np.random.default_rng(0).normal(size=(4, 8)) * 1e-3
    distance = {eps: apart(group_norm(rows, eps), group_norm(10 * rows, eps)) for eps in (0.0, 1e-6)}
    return conditional(
        distance[0.0] < HALF_OF_THE_DIGITS,
        distance[1e-6] < HALF_OF_THE_DIGITS,
        ", ".join(f"eps = {eps:g}: {x:.1e} apart" for eps, x in distance.items()),
    )


@claim(
    "survey.R3",
    "Chunkwise retention takes O(n c d) time",
    source="3.2",
    verdict="holds only if",
    evidence="recomputation",
    why="chunks are at least as long as a head is wide: the state adds n d^2 for each head, 4 times as much at c = 64,"
    " d = 256",
)
def chunkwise_operations() -> Finding:
    ratio = {}
    for c, d in ((64, 64), (256, 64), (64, 256)):
        inside, state = cost_survey.retention_chunks(1024, c, d, d)
        ratio[c, d] = Fraction(state, inside)
    return conditional(
        ratio[64, 64] <= 1 and ratio[256, 64] <= 1,
        ratio[64, 256] <= 1,
        "state over chunks, " + ", ".join(f"c = {c}, d = {d}: {r}" for (c, d), r in ratio.items()),
    )


@claim(
    "survey.R4",
    "Decoding with retention takes O(1) time and memory a step",
    source="3.2, 3.3",
    verdict="holds only if",
    evidence="evaluation",
    why="O(1) is in tokens: a head keeps d_k d_v numbers and multiplies twice as many, O(d^2) as the text also says",
)
def retention_state() -> Finding:
    def size(n: int, d: int) -> int:
        x = np.ones((n, d))
        return retention.recurrent(x, x, x, np.asarray(0.5))[1].size

    return conditional(
        size(2, 4) == size(9, 4),
        size(2, 4) == size(2, 8),
        f"state of {size(2, 4)} numbers after 2 tokens, {size(9, 4)} after 9; {size(2, 8)} for heads twice as wide",
    )


@claim(
    "survey.R5",
    "The heads' decays 1 - 2^(-5-h) give each its own memory shorter than for ever",
    source="3.1",
    verdict="holds only if",
    evidence="exact arithmetic",
    why="decays are kept in more digits than bfloat16 has from h = 4 on, float16 from h = 7: there they round to 1",
)
def decays() -> Finding:
    def rounded(h: int, digits: int) -> Fraction:
        """To `digits` binary digits, ties to even, of a number in [1/2, 1]."""
        return Fraction(round((1 - Fraction(1, 2 ** (5 + h))) * 2**digits), 2**digits)

    first = {name: next(h for h in range(30) if rounded(h, digits) == 1) for name, digits in
             (("bfloat16", 8), ("float16", 11), ("float32", 24))}  # fmt: skip
    heads = 8
    return conditional(
        all(rounded(h, 24) < 1 for h in range(heads)),
        all(rounded(h, 8) < 1 for h in range(heads)),
        "first head whose decay rounds to 1: " + ", ".join(f"{name} h = {h}" for name, h in first.items()),
    )


R6 = unchecked(
    "survey.R6",
    "RetNet decodes 8.4 times as fast, 15.6 times in latency, with 3.4 times less memory",
    source="3.2",
    why="times and bytes measured on one device, of a model of which no code or sizes are given",
)


@claim(
    "survey.R7",
    "The transition of the state from token to token costs nothing",
    source="3.3, Features",
    verdict="refuted",
    evidence="recomputation",
    why="d_k = d_v = 1: the state is multiplied by the decay, and k v is added to it",
)
def state_transition() -> Finding:
    _, operations = cost_survey.retention_chunks(1, 1, 1, 1)
    x = np.ones((2, 1))
    S = retention.recurrent(x, x, x, np.asarray(0.5))[1].item()
    return holds(operations == 0, f"{operations} multiplications a step, and S = 0.5 S + 1 = {S:g} after two ones")
