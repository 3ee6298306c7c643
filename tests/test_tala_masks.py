"""Which masks a recurrence computes: the two theorems, over exact numbers, and the masks of the paper's readings."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import sympy
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mixproof.reference import mome_mixing
from mixproof.reference import tala_masks as masks
from mixproof.verify.numbers.array import Numbers
from mixproof.verify.numbers.exact import GF, RATIONALS
from mixproof.verify.numbers.objects import System
from mixproof.verify.numbers.symbolic import EXPRESSIONS, proves, symbols

NUMBERS = st.sampled_from([Fraction(n, d) for n in (-3, -1, 0, 0, 1, 1, 2) for d in (1, 2)])
NONZERO = NUMBERS.filter(bool)


def rows(n: int, numbers: st.SearchStrategy[Fraction] = NUMBERS) -> st.SearchStrategy[Numbers]:
    return st.lists(numbers, min_size=n, max_size=n).map(RATIONALS)


def matrix(T: int, n: int, seed: int, system: System = RATIONALS) -> Numbers:
    """Distinct primes, in some order: no two products of them are equal by chance."""
    primes = np.array(list(itertools.islice(sympy.primerange(10**4), T * n)))
    return system(np.random.default_rng(seed).permutation(primes).reshape(T, n))


def same(x: Any, y: Any) -> bool:
    return x.shape == y.shape and bool(np.all(x == y))


def probe(f: Callable[[Numbers, Numbers, Numbers], Numbers], T: int, system: System = RATIONALS) -> Numbers:
    """The mask of f: with q_n = k_m = 1 and V = I, output (n, m) is the weight of source m in token n."""
    ones = system(np.ones((T, 1), dtype=int))
    return f(ones, ones, system(np.eye(T, dtype=int)))


@st.composite
def gates(draw: st.DrawFn, decays: st.SearchStrategy[Fraction] = NUMBERS, gate: Any = NUMBERS) -> tuple[Numbers, ...]:
    T = draw(st.integers(1, 6))
    return draw(rows(T, gate)), draw(rows(T, decays)), draw(rows(T, gate))


@st.composite
def nearly_cocycles(draw: st.DrawFn) -> Numbers:
    """Masks of decays, half of them with one entry changed."""
    D = masks.cocycle(draw(st.integers(1, 5).flatmap(rows)))
    n = draw(st.integers(0, len(D) - 1))
    m = draw(st.integers(0, n))
    if draw(st.booleans()):
        D[n, m] = D[n, m] + draw(NONZERO)
    return D


# --- T1: scalar states -----------------------------------------------------------------------------------------------


@given(gates(), st.integers(0, 99))
def test_a_gated_recurrence_is_its_mask(cab: tuple[Numbers, ...], seed: int) -> None:
    T = len(cab[0])
    q, k, v = matrix(T, 2, seed), matrix(T, 2, seed + 1), matrix(T, 3, seed + 2)
    assert same(masks.recurrent(q, k, v, *cab), masks.mix(q, k, v, masks.realised(*cab)))
    assert same(probe(lambda *qkv: masks.recurrent(*qkv, *cab), T), masks.realised(*cab))


@given(nearly_cocycles())
def test_a_mask_is_a_recurrence_if_and_only_if_it_is_a_cocycle(D: Numbers) -> None:
    """`probe` reads the mask off any function of this kind, so a recurrence that agrees with mask D has the mask D: its
    decays can only be `decays_of(D)`, and the two agree for one V = I exactly if they agree for all inputs."""
    T = len(D)
    a, ones = masks.decays_of(D), RATIONALS(np.ones(T, dtype=int))
    assert same(probe(lambda *qkv: masks.mix(*qkv, D), T), D)
    agree = same(probe(lambda *qkv: masks.recurrent(*qkv, ones, a, ones), T), D)
    assert agree == masks.is_cocycle(D) == same(masks.cocycle(a), D)


@given(st.integers(1, 6).flatmap(rows))
def test_decays_are_read_off(a: Numbers) -> None:
    D = masks.cocycle(a)
    assert masks.is_cocycle(D)
    assert same(masks.decays_of(D)[1:], a[1:])


def test_what_is_above_the_diagonal_counts() -> None:
    D = masks.cocycle(RATIONALS([1, 2, 3]))
    D[0, 2] = 1
    assert not masks.is_cocycle(D)


@given(st.integers(2, 6).flatmap(lambda T: rows(T, NONZERO)))
def test_quotients_of_running_products_need_decays_that_are_not_zero(a: Numbers) -> None:
    c = np.multiply.accumulate(a)
    D = masks.cocycle(a)
    assert same(np.tril(c[:, None] / c[None, :]), D)
    a[len(a) // 2] = 0  # a reset: legal, but no quotient is zero
    c = np.multiply.accumulate(a)
    with pytest.raises(ZeroDivisionError):
        c[:, None] / c[None, :]
    assert masks.is_cocycle(masks.cocycle(a))


@given(gates(gate=NONZERO))
def test_an_input_gate_repairs_the_diagonal(cab: tuple[Numbers, ...]) -> None:
    _, a, b = cab
    ones = b / b
    D = masks.realised(ones, a, b)
    got = masks.input_gate(D)
    assert got is not None
    assert same(got[1], b)
    assert same(masks.realised(ones, *got), D)


@given(nearly_cocycles())
def test_there_is_an_input_gate_exactly_if_products_through_the_diagonal_agree(D: Numbers) -> None:
    d, T = np.diagonal(D), len(D)
    assume(bool(np.all(d != 0)))
    agree = all(bool(D[n, m] * d[l] == D[n, l] * D[l, m]) for n in range(T) for l in range(n + 1) for m in range(l + 1))
    assert (masks.input_gate(D) is not None) == agree


def test_no_input_gate_is_read_off_a_zero() -> None:
    with pytest.raises(ValueError, match=r"D\[1\] has a zero on the diagonal"):
        masks.input_gate(RATIONALS([[1, 0], [1, 0]]))


# --- T2: rank is the size of the state -------------------------------------------------------------------------------


@given(gates())
def test_a_gated_recurrence_has_rank_one_and_is_found_again(cab: tuple[Numbers, ...]) -> None:
    D = masks.realised(*cab)
    assert masks.semiseparable_rank(D) <= 1
    got = masks.realisation(D)
    assert got is not None
    assert same(masks.realised(*got), D)


def test_rank_one_is_sufficient() -> None:
    """Every mask of three tokens with entries -1, 0, 1: a scalar state gives it exactly if no block has rank two."""
    found = 0
    for entries in itertools.product((-1, 0, 1), repeat=6):
        D = RATIONALS(np.zeros((3, 3), dtype=int))
        D[np.tril_indices(3)] = np.array(entries)
        got, rank = masks.realisation(D), masks.semiseparable_rank(D)
        assert (got is None) == (rank > 1)
        if got is not None:
            assert same(masks.realised(*got), D)
            found += 1
    # blocks of rank two need rows 2, 3 and columns 1, 2: the matrices of -1, 0, 1 with a nonzero determinant
    regular = sum(a * d != b * c for a, b, c, d in itertools.product((-1, 0, 1), repeat=4))
    assert found == 3**6 - 9 * regular


@pytest.mark.parametrize("system", [RATIONALS, GF], ids=["rationals", "GF"])
@pytest.mark.parametrize("r", [1, 2, 3])
def test_a_state_of_r_matrices_bounds_the_rank(r: int, system: System) -> None:
    T, random = 7, np.random.default_rng(r)
    C, B = system(random.integers(-3, 4, (T, r))), system(random.integers(-3, 4, (T, r)))
    A = system(random.integers(-3, 4, (T, r, r)))
    D = system(np.zeros((T, T), dtype=int))
    for m in range(T):
        x = B[m]
        for n in range(m, T):
            x = A[n] @ x if n > m else x
            D[n, m] = C[n] @ x
    assert masks.semiseparable_rank(D) == r


@pytest.mark.parametrize("system", [RATIONALS, GF], ids=["rationals", "GF"])
@pytest.mark.parametrize(("T", "rank"), [(4, 2), (8, 4), (16, 8)])
def test_a_free_gain_needs_a_state_that_grows(T: int, rank: int, system: System) -> None:
    """No block is larger than T/2 on its shorter side, and with a free G (14), or a gain of each source (12), one of
    that size has full rank; a constant decay needs a single state."""
    omega = system(1) / 2
    assert masks.semiseparable_rank(masks.free_gain(omega, matrix(T, T, 0, system))) == rank
    assert masks.semiseparable_rank(masks.per_source(omega, matrix(T, 1, 0, system)[:, 0])) == rank
    assert masks.semiseparable_rank(masks.geometric(omega, T)) == 1
    assert masks.semiseparable_rank(masks.constant_gain(omega, system(3), T)) == 1
    assert masks.semiseparable_rank(masks.cocycle(matrix(T, 1, 0, system)[:, 0])) == 1


def test_empty_and_single() -> None:
    nothing = RATIONALS(np.zeros((0, 0), dtype=int))
    assert masks.is_cocycle(nothing)
    assert masks.semiseparable_rank(nothing) == 0
    assert masks.decays_of(nothing).shape == (0,)
    assert [x.shape for x in masks.realisation(nothing) or ()] == [(0,)] * 3
    assert masks.is_cocycle(RATIONALS([[1]]))
    assert not masks.is_cocycle(RATIONALS([[2]]))


# --- the readings of G -----------------------------------------------------------------------------------------------


@given(NONZERO, nearly_cocycles())
def test_a_gain_outside_the_power_must_be_a_cocycle(omega: Fraction, G: Numbers) -> None:
    assert masks.is_cocycle(masks.free_gain(RATIONALS(omega), G)) == masks.is_cocycle(G)


@given(NUMBERS, NUMBERS, st.integers(1, 5))
def test_a_constant_gain_must_be_one(omega: Fraction, g: Fraction, T: int) -> None:
    assert masks.is_cocycle(masks.constant_gain(RATIONALS(omega), RATIONALS(g), T)) == (g == 1)
    assert masks.is_cocycle(masks.geometric(RATIONALS(omega) * RATIONALS(g), T))


@pytest.mark.parametrize("T", [1, 2, 3, 4])
def test_a_gain_of_each_source_must_be_zeros_and_then_one_number(T: int) -> None:
    """G_m = 0 or G_m = G_{m+1}, for m <= T - 2: the last gain never acts."""
    for G in itertools.product((0, 1, 2, -1), repeat=T):
        zeros_first = [g for g in G[:-1] if g] == list(G[:-1])[G[:-1].count(0) :]
        expected = zeros_first and len(set(G[:-1]) - {0}) <= 1
        assert masks.is_cocycle(masks.per_source(RATIONALS(1) / 2, RATIONALS(list(G)))) == expected


@given(NONZERO, st.integers(1, 4).flatmap(rows), st.data())
def test_12_is_14_exactly_if_the_gain_of_a_pair_is_the_power_of_the_source_gain(
    omega: Fraction, G: Numbers, data: st.DataObject
) -> None:
    T, w = len(G), RATIONALS(omega)
    powers = masks.per_source(RATIONALS(1), G)
    assert same(masks.free_gain(w, powers), masks.per_source(w, G))
    n = data.draw(st.integers(0, T - 1))
    powers[n, data.draw(st.integers(0, n))] += data.draw(NONZERO)
    assert not same(masks.free_gain(w, powers), masks.per_source(w, G))


def test_counterexamples() -> None:
    half = RATIONALS(1) / 2
    assert masks.is_cocycle(RATIONALS([[1, 0, 0], [1, 1, 0], [1, 1, 1]]))
    assert not masks.is_cocycle(RATIONALS([[1, 0, 0], [1, 1, 0], [2, 1, 1]]))
    D = masks.per_source(half, RATIONALS([2, 1, 7]))
    assert same(D[2, 0] * D[1, 1] - D[2, 1] * D[1, 0], half)


# --- mixtures of memory experts --------------------------------------------------------------------------------------


@st.composite
def mixtures(draw: st.DrawFn) -> dict[str, Any]:
    T, X = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    selected = np.array(draw(st.lists(st.booleans(), min_size=T * X, max_size=T * X))).reshape(T, X)
    return {"a": draw(rows(X)), "E": draw(rows(T * X)).reshape(T, X), "selected": selected}


@given(mixtures(), st.integers(0, 99))
def test_the_masks_of_mixtures_are_their_recurrences(mixture: dict[str, Any], seed: int) -> None:
    E, a, selected = mixture["E"], mixture["a"], mixture["selected"]
    T = len(E)
    q, k, v = matrix(T, 2, seed), matrix(T, 2, seed + 1), matrix(T, 2, seed + 2)
    one, always = 0 * E + 1, np.ones(E.shape, dtype=int)
    sparse = np.where(selected, E, 0)
    for D, read, write, moves in (
        (masks.read_mix(E, a), E, one, always),
        (masks.write_mix(E, a), one, E, always),
        (masks.top_k(sparse, a), sparse, sparse, always),
        (masks.top_k_hold(sparse, a, selected), sparse, sparse, selected.astype(int)),
    ):
        assert same(masks.mix(q, k, v, D), mome_mixing.recurrent(q, k, v, read, write, moves, a)[0])


@given(mixtures())
def test_held_decays_are_powers_of_the_selection_count(mixture: dict[str, Any]) -> None:
    E, a, selected = mixture["E"], mixture["a"], mixture["selected"]
    sparse, c = np.where(selected, E, 0), np.cumsum(selected, axis=0)
    D = masks.top_k_hold(sparse, a, selected)
    for n, m in itertools.product(range(len(E)), repeat=2):
        lag = c[n] - c[m]
        want = np.sum(sparse[n] * sparse[m] * a ** np.maximum(lag, 0)) if n >= m else RATIONALS(0)
        assert same(D[n, m], want)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(2, 8), st.integers(0, 99))
def test_experts_of_equal_decay_are_one_memory(kinds: list[int], T: int, seed: int) -> None:
    """Reading or writing by router weights has at most the rank of distinct decays, and for weights that stand in no
    relation exactly it, as far as T allows."""
    E, a = matrix(T, len(kinds), seed, GF), matrix(4, 1, 1, GF)[np.array(kinds), 0]
    distinct = min(len(set(kinds)), (T + 1) // 2)
    assert masks.semiseparable_rank(masks.read_mix(E, a)) == distinct
    assert masks.semiseparable_rank(masks.write_mix(E, a)) == distinct
    assert masks.semiseparable_rank(masks.top_k(E, a)) == min(len(kinds), (T + 1) // 2)
    assert masks.semiseparable_rank(masks.top_k_hold(E, a, matrix(T, len(kinds), seed).data % 3 > 0)) <= len(kinds)


def test_ranks_of_mixtures() -> None:
    """Three experts at T = 12 need three states; of five at T = 7 no more than four can be told apart."""
    for X, T, rank in ((3, 12, 3), (5, 7, 4)):
        assert masks.semiseparable_rank(masks.read_mix(matrix(T, X, 0, GF), matrix(X, 1, 0, GF)[:, 0])) == rank


@given(mixtures())
def test_router_weights_that_sum_to_one_make_equal_experts_a_single_memory(mixture: dict[str, Any]) -> None:
    E, a = mixture["E"], mixture["a"][:1]
    E = np.concatenate([E, 1 - np.sum(E, axis=1, keepdims=True)], axis=1)
    single, equal = masks.geometric(a[0], len(E)), np.repeat(a, E.shape[1])
    assert same(masks.read_mix(E, equal), single)
    assert same(masks.write_mix(E, equal), single)


def test_weights_on_both_sides_keep_equal_experts_apart() -> None:
    """Two experts of one decay, written and read by the same one-hot weights: each sees its own tokens only."""
    D = masks.top_k(RATIONALS([[1, 0], [0, 1], [1, 0], [0, 1]]), RATIONALS([1, 1]))
    assert same(D, RATIONALS([[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]]))
    assert masks.semiseparable_rank(D) == 2


# --- proofs ----------------------------------------------------------------------------------------------------------


def test_t1_proved_for_three_tokens() -> None:
    """For symbols throughout: the recurrence is its mask; and D differs from a recurrence by a polynomial in Q, K, V
    whose coefficient of q_n k_m v_m is D_nm - c_n a_n ... a_{m+1} b_m, so it vanishes only if all of those do."""
    T = 3
    c, a, b = (symbols(name, (T,)) for name in "cab")
    q, k, v = symbols("q", (T, 2)), symbols("k", (T, 2)), symbols("v", (T, 1))
    d = symbols("d", (T, T))
    D = np.tril(d)
    got = masks.recurrent(q, k, v, c, a, b)
    assert proves(got, masks.mix(q, k, v, masks.realised(c, a, b)))
    difference = masks.mix(q, k, v, D) - got
    want = D - masks.realised(c, a, b)
    for n in range(T):
        terms = sympy.Poly(difference.data[n, 0], *q.data.flat, *k.data.flat, *v.data.flat).as_dict()
        monomials = {
            sympy.Poly(q.data[n, i] * k.data[m, i] * v.data[m, 0], *q.data.flat, *k.data.flat, *v.data.flat).monoms()[
                0
            ]: want.data[n, m]
            for i in range(2)
            for m in range(n + 1)
        }
        assert terms.keys() == monomials.keys()
        assert all(sympy.expand(terms[x] - monomials[x]) == 0 for x in terms)


def test_the_difference_of_a_constant_gain_proved() -> None:
    """D_nn misses g - 1 and D_31 misses g w^2 (1 - g) of what the decays g w would give: both vanish for g = 1, and the
    first for nothing else."""
    w, g = sympy.symbols("w g", real=True)
    D = masks.constant_gain(EXPRESSIONS(w), EXPRESSIONS(g), 3)
    through = D[2, 1] * D[1, 0]
    assert sympy.factor((D[0, 0] - 1).data[()]) == g - 1
    assert sympy.simplify((D[2, 0] - through).data[()] - g * w**2 * (1 - g)) == 0
