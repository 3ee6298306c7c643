"""Claims of the survey, section 6 and those of 17 on memory: Titans."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from mixproof.reference import titans, titans_mlp
from mixproof.verify.claims import Finding, claim, conditional, holds
from mixproof.verify.claims.evidence import same
from mixproof.verify.numbers.exact import RATIONALS


def _tokens(k: Any, v: Any, alpha: Any = 0, eta: Any = 0, theta: Any = Fraction(1, 2)) -> tuple[Any, ...]:
    """(q, k, v, alpha, eta, theta) over the rationals, each token asking for its own key; gates shared by all."""
    n = len(k)
    return (*(RATIONALS(x) for x in (k, k, v)), *(RATIONALS([g] * n) for g in (alpha, eta, theta)))


UNIT = [[1, 0], [0, 1]]
HALFWAY = [Fraction(3, 5), Fraction(4, 5)]  # of norm one, too


@claim(
    "survey.T1",
    "eta = 0 forgets the momentum, eta = 1 keeps all of it",
    source="6.1",
    verdict="holds",
    evidence="exact arithmetic",
)
def momentum() -> Finding:
    momenta = {}
    for eta in (0, 1):
        token, M0 = _tokens([[1, 0]], [[3]], eta=eta), RATIONALS([[0, 0]])
        momenta[eta] = [titans.recurrent(*token, M0=M0, S0=RATIONALS([[s, s]]))[2].data for s in (0, 5)]
    moved = {eta: (b - a).tolist() for eta, (a, b) in momenta.items()}
    return holds(
        moved == {0: [[0, 0]], 1: [[5, 5]]},
        f"momentum raised by (5, 5) before a token is higher by {_shown(moved[0])} after it at 0, {_shown(moved[1])} at"
        " 1",
    )


def _shown(rows: Sequence[Sequence[Any]]) -> str:
    return "; ".join("(" + ", ".join(map(str, row)) + ")" for row in rows)


@claim(
    "survey.T2",
    "The update of the memory is stable",
    source="6.1 (implied)",
    verdict="holds only if",
    evidence="property test",
    why="theta ||k||^2 < (2 - alpha)(1 + eta) / 2, and eta (1 - alpha) < 1, for gates that do not change: alpha = eta ="
    " 0, theta = 1.1 and k = 1 diverges",
)
def stability() -> Finding:
    generator, n = np.random.default_rng(0), 4000
    alpha, eta, theta = generator.uniform(size=(3, n)) * [[1], [1], [3]]
    x = 2 * theta  # of ||k|| = 1: (M, S) along a key goes by this matrix
    step = np.moveaxis(np.array([[1 - alpha - x, eta], [-x, eta]]), 2, 0)
    stable = np.max(np.abs(np.linalg.eigvals(step)), axis=1) < 1
    condition = theta < (2 - alpha) * (1 + eta) / 2
    one, zero = np.ones((60, 1)), np.zeros(60)
    last = [titans.recurrent(one, one, 0 * one, zero, zero, zero + t, np.ones((1, 1)))[1].item() for t in (0.9, 1.1)]
    return conditional(
        bool(np.array_equal(stable, condition)) and abs(last[0]) < 1,
        abs(last[1]) < 1,
        f"eigenvalues below 1 just where the condition holds, in {n} draws, {np.sum(stable)} of them stable; memory"
        f" after 60 tokens from 1: {last[0]:.1e} at theta = 0.9, {last[1]:.1e} at 1.1",
    )


@claim(
    "survey.T3",
    "The memory handles any context without loss and resolves the recall limits of linear RNNs",
    source="6.3, Pros",
    verdict="refuted",
    evidence="exact arithmetic",
    why="keys (1, 0), (0, 1), (3/5, 4/5) with values 0, 0, 1: no linear memory holds all three, and once the third is"
    " written the first reads 3/5",
)
def flawless() -> Finding:
    keys = [*UNIT, HALFWAY]
    y, M, _ = titans.recurrent(*_tokens(keys, [[0], [0], [1]]))
    read = [sum(m * k for m, k in zip(M.data[0], key, strict=True)) for key in keys]
    return holds(
        read == [0, 0, 1],
        f"each value is read right when it was written ({_shown([list(y.data[:, 0])])}); at the end"
        f" {_shown([read])} instead of (0, 0, 1)",
    )


@claim(
    "survey.T4",
    "The deep memory takes O(d) space",
    source="6.3, Training complexity",
    verdict="refuted",
    evidence="evaluation",
    why="a linear memory and its momentum are d x d matrices: 8 numbers at d = 2, 32 at d = 4; a deep one has two a"
    " layer",
)
def memory_space() -> Finding:
    def size(d: int) -> tuple[int, int]:
        x, gates = np.ones((1, d)), [np.full(1, 0.1)] * 3
        linear, deep = titans.recurrent(x, x, x, *gates), titans_mlp.dual(x, x, x, *gates, I1=np.eye(d), I2=np.eye(d))
        return sum(s.size for s in linear[1:]), sum(s.size for s in deep[1:])

    linear, deep = zip(*(size(d) for d in (2, 4)), strict=True)
    return holds(linear[1] == 2 * linear[0], f"states of {linear} numbers at d = 2 and 4, of {deep} with two layers")


@claim(
    "survey.T5",
    "Training chunk by chunk computes the online rule",
    source="6.2",
    verdict="holds only if",
    evidence="exact arithmetic",
    why="chunks are of one token, or the keys of a chunk are orthogonal and the memory is empty before it: k = 1, 1"
    " with v = 1, 1 gives a memory of 2 instead of 1",
)
def chunk_training() -> Finding:
    def differ(tokens: tuple[Any, ...], size: int) -> bool:
        online, chunks = titans.recurrent(*tokens), titans.chunked_recurrent(*tokens, size=size)
        return not all(np.all(np.asarray(a == b)) for a, b in zip(online, chunks, strict=True))

    gates = Fraction(1, 3), Fraction(1, 4)
    repeated, orthogonal = _tokens([[1], [1]], [[1], [1]]), _tokens(UNIT, [[1], [2]], *gates)
    memories = [
        form(*repeated)[1].data[0, 0] for form in (titans.recurrent, lambda *t: titans.chunked_recurrent(*t, size=2))
    ]
    later = differ(_tokens([HALFWAY, HALFWAY, *UNIT], [[1]] * 4, *gates), 2)
    return conditional(
        not differ(repeated, 1) and not differ(orthogonal, 2),
        not differ(repeated, 2),
        f"equal keys: memory {memories[0]} online, {memories[1]} in one chunk; orthogonal keys of a first chunk agree,"
        f" of a second one {'differ' if later else 'agree'}",
    )


@claim(
    "survey.T6",
    "Constant memory keeps the recall of standard transformers",
    source="17, 15.1",
    verdict="refuted",
    evidence="recomputation",
    why="a state of p numbers of b bits tells 2^(p b) pasts apart: one number of 32 bits not all of three tokens of 16"
    " bits",
)
def counted_bits() -> Finding:
    d, bits, token = 64, 32, 16
    most = 2 * d * d * bits // token
    states, pasts = 2**bits, 2 ** (token * 3)
    return holds(
        pasts <= states,
        f"2^32 states for 2^48 pasts; a head with d = {d} and its momentum, {bits} bits a number, holds {most} tokens"
        f" of {token} bits at most",
    )


@claim(
    "survey.T7",
    "What is read from the memory is asked for by the output, o_t = y_t (x) M*_t(y_t)",
    source="6.1, second equation",
    verdict="holds only if",
    evidence="evaluation",
    why="y_t is the output of the attention that reads beside the memory, one of three designs; a memory alone is read"
    " by its query, y_t = M_t q_t, without an update",
)
def reading_rule() -> Finding:
    M, q = np.array([[2.0]]), np.array([[3.0]])
    gates = [np.zeros(1)] * 3
    y, after, _ = titans.recurrent(q, 0 * q, 0 * q, *gates, M0=M)
    return conditional(
        same(y, q @ M.T) and same(after, M),
        same(y, y * (y @ M.T)),
        f"M = 2, q = 3: M q = {y.item():g}, and y (x) M y = {2 * y.item() ** 2:g}",
    )
