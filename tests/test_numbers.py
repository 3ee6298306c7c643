"""The number systems: the reference runs in each, exact ones compare exactly, enclosures contain the true value."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from mixproof.reference import gma, gma_mixing, operator, primitives, retention, softmax_attention
from mixproof.verify.numbers import exact
from mixproof.verify.numbers.array import Disagreement, NotDefined, Numbers
from mixproof.verify.numbers.certified import (
    Enclosure,
    balls,
    certified,
    certified_error,
    enclose,
    intervals,
    multiprecision,
)
from mixproof.verify.numbers.exact import GF, PRIME, RATIONALS
from mixproof.verify.numbers.objects import System
from mixproof.verify.numbers.symbolic import EXPRESSIONS, jacobian, proves, substitute, symbols

REAL = ": the feature maps (exp, softmax, softplus) need real numbers; give their results (e.g. responsibilities) as inputs instead"  # noqa: E501


def system(name: str) -> System:
    if name == "arb":
        pytest.importorskip("flint")
        return balls(113)
    return {"GF": GF, "rationals": RATIONALS, "iv": intervals(113), "mpf": multiprecision(113), "sympy": EXPRESSIONS}[
        name
    ]


enclosing = pytest.mark.parametrize("name", ["arb", "iv"])
everywhere = pytest.mark.parametrize("name", ["GF", "rationals", "arb", "iv", "mpf", "sympy"])


def draw(numbers: System, random: np.random.Generator, *shape: int) -> Numbers:
    """Random numbers: uniform over the field, small fractions elsewhere."""
    if numbers is GF:
        return GF.draw(random, shape)
    above, below = random.integers(-9, 10, shape), random.integers(1, 10, shape)
    return numbers(above) / numbers(below)


def retention_inputs(numbers: System, T: int = 4, K: int = 2, V: int = 3, seed: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = dict(q=(T, K), k=(T, K), v=(T, V), gamma=(), scale=(), S0=(K, V))
    return {name: draw(numbers, random, *shape) for name, shape in shapes.items()}


def same(x: Any, y: Any) -> bool:
    """Equal in an exact system; overlapping in an enclosing one; nearly so where digits are all there is."""
    pairs = zip(x, y, strict=True) if isinstance(x, tuple) else [(x, y)]
    for a, b in pairs:
        if isinstance(a.system, type(multiprecision())):
            d = np.abs(a - b)
            if not np.all(d <= 1e-25):
                return False
        elif a.shape != b.shape or primitives.either(a, b) is None:
            return False
    return True


# --- every system runs the reference


@everywhere
def test_retention_runs_and_its_forms_agree(name: str) -> None:
    x = retention_inputs(system(name))
    parallel = retention.parallel(**x)
    assert parallel[0].shape == (4, 3)
    assert all(y.system is system(name) for y in parallel)
    assert same(parallel, retention.recurrent(**x))
    for chunk in (1, 3, 5):
        assert same(parallel, retention.chunkwise(**x, chunk=chunk))


@everywhere
def test_retention_gradient_is_the_change_of_a_linear_map(name: str) -> None:
    """O and S are affine in each of q, k, v and S0, so <dx, h> is exactly what adding h to x changes."""
    numbers = system(name)
    x = retention_inputs(numbers)
    random = np.random.default_rng(1)
    G = {"O": draw(numbers, random, 4, 3), "S": draw(numbers, random, 2, 3)}
    gradients = retention.vjp(G, **x)
    O, S = retention.parallel(**x)
    for argument in ("q", "k", "v", "S0"):
        h = draw(numbers, random, *x[argument].shape)
        O1, S1 = retention.parallel(**(x | {argument: x[argument] + h}))
        change = np.sum(G["O"] * (O1 - O)) + np.sum(G["S"] * (S1 - S))
        assert same(np.sum(gradients[argument] * h), change), argument


@everywhere
def test_retention_of_no_tokens(name: str) -> None:
    x = retention_inputs(system(name), T=0)
    for form in (retention.parallel, retention.recurrent, retention.chunkwise):
        O, S = form(**x)
        assert O.shape == (0, 3)
        assert same(S, x["S0"])
    _, S = retention.parallel(x["q"], x["k"], x["v"], x["gamma"])
    assert same(S, system(name)(np.zeros((2, 3))))


@pytest.mark.parametrize("name", ["arb", "iv", "mpf"])
def test_softmax_attention_runs(name: str) -> None:
    numbers = system(name)
    random = np.random.default_rng(0)
    x = {n: draw(numbers, random, 5, d) for n, d in dict(q=3, k=3, v=2).items()}
    for causal in (False, True):
        O = softmax_attention.parallel(**x, causal=causal)
        assert same(O, softmax_attention.blockwise(**x, causal=causal, chunk=2))
    gradients = softmax_attention.vjp({"O": x["v"]}, **x, causal=True)
    assert [gradients[n].shape for n in "qkv"] == [x[n].shape for n in "qkv"]


# --- exact equality


def _forms_agree_for_every_chunk(numbers: System, T: int, K: int, V: int, seed: int) -> None:
    x = retention_inputs(numbers, T, K, V, seed)
    O, S = retention.recurrent(**x)
    forms = [retention.parallel(**x)] + [retention.chunkwise(**x, chunk=c) for c in range(1, T + 2)]
    assert all(np.array_equal(O, O1) and np.array_equal(S, S1) for O1, S1 in forms)


sizes = dict(
    T=st.integers(0, 7), K=st.integers(1, 3), V=st.integers(1, 3), seed=st.integers(0, 2**32 - 1)
)  # a seed, not arrays: any field element is as good as another


@given(**sizes)
@settings(max_examples=25)
def test_retention_forms_are_one_polynomial_over_the_prime_field(T: int, K: int, V: int, seed: int) -> None:
    _forms_agree_for_every_chunk(GF, T, K, V, seed)


@given(**sizes)
@settings(max_examples=10)
def test_retention_forms_are_one_polynomial_over_the_rationals(T: int, K: int, V: int, seed: int) -> None:
    _forms_agree_for_every_chunk(RATIONALS, T, K, V, seed)


def test_the_field_sees_one_wrong_term(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decay of the carried state is off by one power, which floats at gamma = 0.999 would hardly show."""
    x = retention_inputs(GF)
    right = retention.recurrent(**x)[0]
    assert np.array_equal(right, retention.parallel(**x)[0])
    monkeypatch.setattr(retention, "decay", lambda gamma, n: gamma ** np.where(np.ndim(n) == 1, np.asarray(n) - 1, n))
    assert not np.array_equal(right, retention.parallel(**x)[0])


@given(**sizes)
@settings(max_examples=20)
@pytest.mark.parametrize("numbers", [GF, RATIONALS], ids=["GF", "rationals"])
def test_gma_mixing_forms_are_one_rational_function(numbers: System, T: int, K: int, V: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    positive = numbers is RATIONALS  # no denominator vanishes; over the field that has a chance of 1e-8

    def some(*shape: int) -> Numbers:
        return numbers(random.integers(1, 9, shape)) / 8 if positive else draw(numbers, random, *shape)

    x = dict(GQ=some(T, K), GK=some(T, K), V=some(T, V), eps=some(), S0=some(K, V), Z0=some(K))
    want = gma_mixing.recurrent(**x)
    G = dict(O=some(T, V), S=some(K, V), Z=some(K))
    gradients = gma_mixing.recurrent_vjp(G, **x)
    assert all(np.array_equal(a, b) for a, b in zip(want, gma_mixing.parallel(**x), strict=True))
    for chunk in range(1, T + 2):
        assert all(np.array_equal(a, b) for a, b in zip(want, gma_mixing.chunkwise(**x, chunk=chunk), strict=True))
        other = gma_mixing.chunkwise_vjp(G, **x, chunk=chunk)
        assert all(np.array_equal(gradients[n], other[n]) for n in gradients)
    whole = dict(GQ=x["GQ"], GK=x["GK"], V=x["V"], eps=x["eps"])
    assert np.array_equal(gma_mixing.latent(**whole), gma_mixing.dense(**whole))


def test_the_field_sees_a_missing_eps_in_gma(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    x = dict(GQ=GF.draw(random, (5, 2)), GK=GF.draw(random, (5, 2)), V=GF.draw(random, (5, 3)), eps=GF.draw(random))
    want = gma_mixing.recurrent(**x)[0]
    assert np.array_equal(want, gma_mixing.chunkwise(**x, chunk=2)[0])
    monkeypatch.setattr(gma_mixing, "broadcast", lambda GQ, S, Z, eps: GQ @ S / (GQ @ Z)[:, None])
    assert not np.array_equal(gma_mixing.recurrent(**x)[0], want)


# --- the prime field


@given(st.data())
@settings(max_examples=50)
def test_field_arithmetic_is_integer_arithmetic_modulo_the_prime(data: Any) -> None:
    edge = st.sampled_from([0, 1, 2, 2**16 - 1, 2**16, PRIME // 2, PRIME - 2, PRIME - 1])
    numbers = st.one_of(edge, st.integers(0, PRIME - 1))
    a, b = (data.draw(st.lists(numbers, min_size=6, max_size=6)) for _ in range(2))
    x, y = GF(a), GF(b)
    for result, want in (
        (x + y, [i + j for i, j in zip(a, b, strict=True)]),
        (x - y, [i - j for i, j in zip(a, b, strict=True)]),
        (x * y, [i * j for i, j in zip(a, b, strict=True)]),
        (-x, [-i for i in a]),
        (x**5, [i**5 for i in a]),
        (np.cumsum(x), [sum(a[: i + 1]) for i in range(6)]),
        (np.cumprod(x), [int(np.prod(np.array(a[: i + 1], dtype=object))) for i in range(6)]),
        ((x.reshape(2, 3) @ y.reshape(3, 2)).reshape(-1), [
            sum(a[3 * i + k] * b[2 * k + j] for k in range(3)) for i in range(2) for j in range(2)
        ]),
    ):  # fmt: skip
        assert result.data.tolist() == [w % PRIME for w in want]
    assert (x @ y).data == sum(i * j for i, j in zip(a, b, strict=True)) % PRIME
    assert np.array_equal(np.where(y == 0, 0, x / np.where(y == 0, 1, y)) * y, np.where(y == 0, 0, x))


def test_field_products_are_exact_at_their_widest(monkeypatch: pytest.MonkeyPatch) -> None:
    n = exact._WIDEST
    minus_one = GF(np.full(n, -1))
    assert (minus_one @ minus_one).data == n
    middle = GF(np.full(n, 2**31 - 2**16 + 2**16 - 2))  # both halves as large as they get
    assert (middle @ middle).data == int(middle.data[0]) ** 2 * n % PRIME
    x, y = GF.draw(np.random.default_rng(0), (3, 11)), GF.draw(np.random.default_rng(1), (11, 2))
    whole = x @ y
    monkeypatch.setattr(exact, "_WIDEST", 4)
    assert np.array_equal(whole, x @ y)
    assert np.array_equal(whole[:, 0], x @ y[:, 0])


def test_field_powers() -> None:
    x = GF([0, 1, 2, PRIME - 1])
    assert (x**0).data.tolist() == [1, 1, 1, 1]
    assert (x ** np.array([1, 2, 31, 3])).data.tolist() == [0, 1, 1, PRIME - 1]
    assert np.array_equal(x[1:] ** -1 * x[1:], GF([1, 1, 1]))
    assert (GF(0) ** (PRIME - 1)).data == 0


def test_what_is_a_field_element() -> None:
    assert np.array_equal(2 * GF(0.5), GF(1))
    assert np.array_equal(3 * GF(Fraction(1, 3)), GF(1))
    assert GF(np.array([-1.0, 3.0])).data.tolist() == [PRIME - 1, 3]
    assert GF(np.array([2**63], dtype=np.uint64)).data.tolist() == [2]
    assert GF(10**30).data == 10**30 % PRIME
    assert GF(2.0**53).data == 2**53 % PRIME
    assert GF([True, False]).data.tolist() == [1, 0]
    with pytest.raises(NotDefined, match=r"the float 1e-06 is a rounding, not a number of GF\(2147483647\)"):
        GF(1e-6)
    with pytest.raises(ZeroDivisionError, match="denominator that is zero in"):
        GF(Fraction(1, PRIME))


def test_the_rationals_take_floats_as_they_are() -> None:
    assert RATIONALS(0.1).data[()] == Fraction(0.1) != Fraction(1, 10)


# --- what is not defined says so


@pytest.mark.parametrize("numbers", [GF, RATIONALS], ids=["GF", "rationals"])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("exp", np.exp),
        ("log1p", np.log1p),
        ("sqrt", np.sqrt),
        ("softmax", primitives.softmax),
        ("softplus", primitives.softplus),
        ("softmax", lambda x: softmax_attention.parallel(x, x, x, scale=1)),
    ],
)
def test_feature_maps_are_refused_by_name(numbers: System, name: str, call: Any) -> None:
    with pytest.raises(NotDefined) as error:
        call(numbers([[1, 2], [3, 4]]))
    assert str(error.value) == f"{name} is not defined over {numbers.name}{REAL}"


def test_a_finite_field_has_no_order() -> None:
    x = GF([1, 2])
    for name, call in (
        ("maximum", np.max),
        ("absolute", abs),
        ("less", lambda y: y < 0),
        ("maximum", lambda y: np.maximum(y, 0)),
    ):
        with pytest.raises(NotDefined) as error:
            call(x)
        assert str(error.value) == f"{name} is not defined over GF({PRIME}): a finite field has no order"


def test_division_by_zero() -> None:
    with pytest.raises(ZeroDivisionError, match=r"division by zero in GF\(2147483647\)"):
        GF([1, 2]) / GF([1, 0])
    with pytest.raises(ZeroDivisionError):
        RATIONALS(1) / 0


@everywhere
def test_what_no_protocol_can_carry_is_refused(name: str) -> None:
    x = system(name)([1, 2])
    plain = np.zeros(2)
    with pytest.raises(NotDefined, match=r"use np\.stack, np\.concatenate or np\.where"):
        plain += x
    with pytest.raises(NotDefined, match=r"use np\.stack, np\.concatenate or np\.where"):
        np.array([x, x])
    with pytest.raises(ValueError, match="sequence") as error:  # NumPy's words, ours as the cause
        plain[0] = x[0]
    assert isinstance(error.value.__cause__, NotDefined)
    with pytest.raises(NotDefined, match="no truth value"):
        bool(x[0])
    with pytest.raises(NotDefined, match=r"np\.fft is not carried"):
        np.fft.fft(x)
    with pytest.raises(NotDefined, match="only plain subscripts"):
        np.einsum("ii->i", x[:, None] * x)


def test_systems_do_not_mix() -> None:
    with pytest.raises(NotDefined, match="do not mix"):
        GF(1) + RATIONALS(1)


def test_numbers_that_a_system_lacks() -> None:
    for numbers in (GF, RATIONALS):
        with pytest.raises(NotDefined, match="nan is not in"):
            numbers(np.nan)
        with pytest.raises(NotDefined, match="a mask of -inf belongs to softmax"):
            primitives.masked(numbers([1, 2]), np.array([True, False]), -np.inf)
    with pytest.raises(NotDefined, match="is a rounding"):
        EXPRESSIONS(0.1)
    assert EXPRESSIONS(0.5).data[()] == sympy.Rational(1, 2)


# --- NumPy's functions


@everywhere
def test_numpy_functions_do_what_they_do_to_floats(name: str) -> None:
    numbers = system(name)
    plain = np.arange(1.0, 13).reshape(3, 4)
    mask = plain % 3 == 0
    cases: list[Any] = [
        lambda x: np.stack([x, x * 0]),
        lambda x: np.concatenate([x, x[:1]], axis=0),
        lambda x: np.concatenate([x, np.zeros((2, 4))]),
        lambda x: np.sum(x),
        lambda x: np.sum(x, axis=1),
        lambda x: np.sum(x, axis=-1, keepdims=True),
        lambda x: np.sum(x, axis=(0, 1), keepdims=True),
        lambda x: np.sum(x[None], axis=(0, 2)),
        lambda x: np.sum(x[:0], axis=0),
        lambda x: np.sum(x[:, :0], axis=1),
        lambda x: np.prod(x[:, :0], axis=1),
        lambda x: np.prod(x, axis=0),
        lambda x: np.mean(x, axis=0),
        lambda x: x.mean(),
        lambda x: np.cumsum(x, axis=1),
        lambda x: np.cumprod(x),
        lambda x: np.where(mask, x, 0),
        lambda x: np.where(mask, 1, x),
        lambda x: x[None],
        lambda x: x[:, None, 1:],
        lambda x: x[mask],
        lambda x: x[::-1, [0, 2]],
        lambda x: x.T,
        lambda x: x[0] @ x[1],
        lambda x: x @ x[0],
        lambda x: x[0] @ x.T,
        lambda x: x @ x.T,
        lambda x: plain @ x.T,
        lambda x: x.T[:, :0] @ x[:0],
        lambda x: x[None] @ np.swapaxes(x[None], -1, -2),
        lambda x: np.einsum("ij,kj->ik", x, x),
        lambda x: np.einsum("ij,j->", x, x[0]),
        lambda x: np.outer(x[0], x[1]),
        lambda x: np.dot(x, x[0]),
        lambda x: np.tril(x) + np.triu(x, 1),
        lambda x: np.tril(x, -1),
        lambda x: np.zeros_like(x) + np.full_like(x, 3) - np.ones_like(x),
        lambda x: np.reshape(x, (2, 6)),
        lambda x: np.broadcast_to(x[0], (2, 4)),
        lambda x: np.expand_dims(x, 1),
        lambda x: np.take(x, np.array([0, 2]), axis=1),
        lambda x: np.repeat(x, 2, axis=0),
        lambda x: np.split(x, 2, axis=1)[1],
        lambda x: x**2 - x ** np.array(1) + 2 * x - x / 4,
        lambda x: 1 / x * 12 * 11 * 10 * 9 * 8 * 7,
        lambda x: np.square(-x) + +x,
        lambda x: np.stack(list(x)),
        lambda x: np.maximum(x, 5) if name != "GF" else x,
        lambda x: np.max(x, axis=1, keepdims=True) if name != "GF" else x,
        lambda x: np.min(x) if name != "GF" else x,
        lambda x: np.clip(x, 2, 5) if name != "GF" else x,
        lambda x: np.abs(x - 6) if name != "GF" else x,
        lambda x: np.where(x > 5, x, 0) if name != "GF" else x,
    ]
    for i, f in enumerate(cases):
        want, got = f(plain), f(numbers(plain))
        assert isinstance(got, Numbers), i
        assert name == "GF" or all(numbers.element(e) is e for e in got.data.flat), i  # type: ignore[attr-defined]
        assert (np.shape(got), np.ndim(got), np.size(got)) == (np.shape(want), np.ndim(want), np.size(want)), i
        # Every exact result is a multiple of 1/4, so rounding the floats to quarters gives it.
        assert same(got, numbers(np.rint(np.asarray(want) * 4) / 4)), i
    if name != "GF":
        with pytest.raises(ValueError, match="zero-size array to reduction operation maximum which has no identity"):
            np.max(numbers(plain)[:0], axis=0)
        assert np.max(numbers(plain)[:0], axis=1).shape == (0,)


@everywhere
def test_assignment(name: str) -> None:
    numbers = system(name)
    x = numbers([[1, 2], [3, 4]])
    y = x.copy()
    y[0] = numbers([5, 6])
    y[1, 1] = 7
    y += x
    assert same(y, numbers([[6, 8], [6, 11]]))
    assert same(x, numbers([[1, 2], [3, 4]]))


def test_carry_takes_floats_and_leaves_the_rest() -> None:
    given = dict(q=np.ones(2), n=np.arange(2), keep=np.array([True]), eps=0.5, chunk=3, S0=None, g={"O": np.ones(1)})
    x = RATIONALS.carry(given)
    assert [name for name, y in x.items() if isinstance(y, Numbers)] == ["q", "eps"]
    assert isinstance(x["g"]["O"], Numbers)
    assert all(x[name] is given[name] for name in ("n", "keep", "chunk", "S0"))


# --- either


@pytest.mark.parametrize("name", ["GF", "rationals", "arb", "iv", "sympy"])
def test_either_checks_that_both_are_one_quantity(name: str) -> None:
    numbers = system(name)
    x, y = numbers([1, 2]), numbers([3, 4])
    assert same(primitives.either((x + y) * (x - y), x * x - y * y), x * x - y * y)
    with pytest.raises(Disagreement, match=r"two expressions of one quantity differ over .*: at \[1\]"):
        primitives.either(numbers([1, 2]), numbers([1, 3]))


def test_either_of_symbols_needs_a_proof() -> None:
    x = symbols("x")
    assert primitives.either((x + 1) ** 2, x * x + 2 * x + 1).system is EXPRESSIONS
    with pytest.raises(Disagreement):
        primitives.either((x + 1) ** 2, x * x + 2 * x)


@enclosing
def test_either_of_balls_keeps_what_both_know(name: str) -> None:
    numbers = system(name)
    wide = np.where(third(numbers) > third(numbers), 0, 1 + third(numbers) * 0)  # an open question: [0, 1]
    for got in (primitives.either(wide, numbers(0.5)), primitives.either(numbers(0.5), wide)):
        assert certified_error(np.asarray(0.5), enclose(lambda y=got: y, {}, system=numbers)) == 0


def third(numbers: System) -> Numbers:
    """A number that is not known exactly."""
    return numbers(1) / 3


# --- enclosures


def witness_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> list[list[Any]]:
    """Softmax attention as printed, in loops, at 50 digits."""
    rows = []
    for i, row in enumerate(q):
        seen = range(min(i + 1, len(k))) if causal else range(len(k))
        e = [
            mpmath.exp(mpmath.fsum(mpmath.mpf(a) * mpmath.mpf(b) for a, b in zip(row, k[j], strict=True))) for j in seen
        ]
        rows.append([mpmath.fsum(w * mpmath.mpf(v[j, c]) for w, j in zip(e, seen, strict=True)) / mpmath.fsum(e)
                     for c in range(v.shape[1])])  # fmt: skip
    return rows


@enclosing
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", ["parallel", "blockwise"])
def test_enclosures_contain_fifty_digits(name: str, causal: bool, form: str) -> None:
    random = np.random.default_rng(0)
    x = {n: 3 * random.standard_normal((5, d)) for n, d in dict(q=3, k=3, v=2).items()}
    f = operator("softmax_attention").form(form).function
    E = enclose(f, x | dict(scale=1.0, causal=causal), system=system(name))
    with mpmath.workdps(50):
        want = witness_attention(**x, causal=causal)
        for at in np.ndindex(5, 2):
            error = abs(want[at[0]][at[1]] - mpmath.mpf(E.midpoint[at]))
            assert error <= mpmath.mpf(E.radius[at]) <= 2.0**-50 * abs(want[at[0]][at[1]])


@enclosing
@pytest.mark.parametrize("precision", [24, 40, 53, 113])
def test_the_radius_is_an_upper_bound(name: str, precision: int) -> None:
    """Against the same function with far more bits; and not a vacuous one."""
    fine = system(name).__class__(400)  # type: ignore[call-arg]
    random = np.random.default_rng(2)
    x = dict(
        cotangents={"O": random.standard_normal((4, 2))}, q=random.standard_normal((4, 3)),
        k=random.standard_normal((4, 3)), v=random.standard_normal((4, 2)), causal=True,
    )  # fmt: skip
    coarse = system(name).__class__(precision)  # type: ignore[call-arg]
    A = enclose(softmax_attention.vjp, x, system=coarse)
    true = softmax_attention.vjp(**fine.carry(x))
    for argument in "qkv":
        with fine.working():
            excess = np.abs(true[argument] - A[argument].midpoint) - A[argument].radius
            assert np.all(excess <= 0)
        assert np.all(A[argument].radius > 0)
        assert np.all(A[argument].radius <= 2.0 ** (8 - min(precision, 53)))


@enclosing
def test_conversion_to_float64_is_rigorous(name: str) -> None:
    numbers = system(name)
    x = numbers(1) / numbers([3, 7, 10, 1])
    E = enclose(lambda: x, {}, system=numbers)
    for i, n in enumerate((3, 7, 10, 1)):
        assert abs(Fraction(1, n) - Fraction(E.midpoint[i])) <= Fraction(E.radius[i])
    assert E.radius[3] == 0
    assert np.all(E.radius[:3] > 0)
    assert np.all(E.radius <= 2.0**-53 * E.midpoint)
    tiny = enclose(lambda y: y * y, {"y": np.array([1e-200, 3e-162])}, system=numbers)
    assert np.all(tiny.radius > 0)
    assert abs(Fraction(3e-162) ** 2 - Fraction(tiny.midpoint[1])) <= Fraction(tiny.radius[1])


@enclosing
def test_what_is_lost_is_never_an_enclosure(name: str) -> None:
    numbers = system(name)
    E = enclose(
        lambda x: np.stack([np.log(x), 1 / (x - x[0]), x * np.inf, np.exp(x * 1e5)]),
        {"x": np.array([0.0, -1.0, np.nan])},
        system=numbers,
    )
    assert np.array_equal(np.isnan(E.midpoint), E.radius == np.inf)
    assert np.array_equal(E.radius == np.inf, [[True] * 3, [True, False, True], [True] * 3, [False, False, True]])
    error = certified_error(np.zeros((4, 3)), E)
    assert np.array_equal(error == np.inf, E.radius == np.inf)
    assert not np.any(np.isnan(error))
    plain = enclose(lambda: np.array([1.0, np.nan, np.inf]), {}, system=numbers)
    assert plain.radius.tolist() == [0, np.inf, np.inf]


def test_certified_error_bounds_the_error() -> None:
    random = np.random.default_rng(0)
    value, midpoint = random.standard_normal((2, 200))
    radius = np.where(np.arange(200) % 2, 0.0, 2.0**-60 * random.random(200))
    error = certified_error(value, Enclosure(midpoint, radius))
    for v, m, r, e in zip(value, midpoint, radius, error, strict=True):
        bound = abs(Fraction(v) - Fraction(m)) + Fraction(r)
        assert bound <= Fraction(e) <= bound * (1 + Fraction(1, 2**50))
    assert certified_error(midpoint, Enclosure(midpoint, 0 * radius)).tolist() == [0.0] * 200
    nothing_known = Enclosure(np.array([np.nan, 1.0]), np.array([np.inf, 0.0]))
    assert certified_error(np.array([1.0, np.nan]), nothing_known).tolist() == [np.inf, np.inf]
    with pytest.raises(ValueError, match="shape"):
        certified_error(value[:3], Enclosure(midpoint, radius))


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_float64_softmax_weights_are_certified(scale: float) -> None:
    random = np.random.default_rng(0)
    x = dict(q=random.standard_normal((16, 4)), k=random.standard_normal((16, 4)), scale=scale, causal=True)
    P = softmax_attention.weights(**x)
    error = certified_error(P, enclose(softmax_attention.weights, x))
    assert np.all(error <= 64 * scale * 2.0**-53)  # |s| < 32 scale, so exp(s) keeps all but 6 bits
    assert np.all(error[np.triu_indices(16, 1)] == 0)
    wrong = P.copy()
    wrong[3, 2] += 1e-9
    assert certified_error(wrong, enclose(softmax_attention.weights, x))[3, 2] >= 0.9e-9


@enclosing
def test_softmax_of_masked_rows(name: str) -> None:
    numbers = system(name)
    s = numbers([[1.0, -np.inf], [-np.inf, -np.inf], [800.0, -800.0]])
    E = enclose(lambda: primitives.softmax(s), {}, system=numbers)
    assert E.midpoint[:2].tolist() == [[1, 0], [0, 0]]
    assert E.radius[:2].tolist() == [[0, 0], [0, 0]]
    assert np.all(np.isfinite(E.radius[2]))
    assert np.isneginf(s).tolist() == [[False, True], [True, True], [False, False]]


@enclosing
def test_softmax_of_overlapping_balls(name: str) -> None:
    """Which score is the largest is an open question; the weights are not."""
    numbers = system(name)
    s = third(numbers) * numbers([1, 1, 1])
    assert isinstance(s[0] > s[1], Numbers)
    assert np.all(enclose(lambda: primitives.softmax(s), {}, system=numbers).radius <= 2.0**-53)


@enclosing
def test_open_comparisons_take_both_branches(name: str) -> None:
    numbers = system(name)
    zero = third(numbers) * 3 - 1  # zero, but not known to be
    E = enclose(
        lambda: np.stack([np.where(zero >= 0, 1.0, 2.0), np.where(numbers(1) >= 0, 1.0, 2.0)]), {}, system=numbers
    )
    assert E.midpoint[0] - E.radius[0] <= 1 < 2 <= E.midpoint[0] + E.radius[0]
    assert E.midpoint[1] == 1
    assert E.radius[1] == 0
    assert np.all(enclose(lambda: primitives.sigmoid(zero), {}, system=numbers).radius <= 2.0**-53)
    assert (numbers([1, 2]) < numbers([2, 2])).tolist() == [True, False]


@enclosing
def test_questions_about_infinities(name: str) -> None:
    numbers = system(name)
    x = numbers([0.1, -np.inf, np.inf])
    assert np.isfinite(x).tolist() == [True, False, False]
    assert np.isinf(x).tolist() == [False, True, True]
    assert np.isnan(x).tolist() == [False, False, False]
    assert np.isposinf(x).tolist() == [False, False, True]
    for lost in (np.sqrt(numbers(-1)), numbers(-1) ** 0.5, np.log(numbers(-1)), 1 / (third(numbers) * 3 - 1)):
        assert enclose(lambda y=lost: y, {}, system=numbers).radius == np.inf
        kept = enclose(lambda y=lost: np.where(np.isfinite(y), y, 0), {}, system=numbers)
        assert kept.radius == np.inf  # whether it is a number is an open question


def test_long_floats_outside_a_domain_are_nan() -> None:
    x = multiprecision(113)(-1)
    assert all(np.isnan(y) for y in (np.log(x), np.sqrt(x), x**0.5, x / 0))


@pytest.mark.parametrize("name", ["gma.responsibilities", "gma.bidirectional", "gma.cross", "gma.causal"])
def test_gma_float64_is_certified(name: str) -> None:
    random = np.random.default_rng(0)
    K, R = 3, 2
    x = dict(mu=random.standard_normal((K, R)), omega=random.standard_normal((K, R)), alpha=random.standard_normal(K))
    if name == "gma.responsibilities":
        x["x"] = random.standard_normal((6, R))
    else:
        x |= {n: random.standard_normal((6, d)) for n, d in dict(q=R, k=R, v=2).items()}
    for form in operator(name).forms:
        want, E = form.function(**x), enclose(form.function, x)
        pairs = zip(want, E, strict=True) if isinstance(want, tuple) else [(want, E)]
        assert all(np.all(certified_error(y, e) <= 2.0**-45) for y, e in pairs), form.name


def test_gma_gradients_in_balls_match_float64() -> None:
    random = np.random.default_rng(0)
    x = dict(mu=random.standard_normal((3, 2)), omega=random.standard_normal((3, 2)), alpha=random.standard_normal(3))
    x |= {n: random.standard_normal((5, d)) for n, d in dict(q=2, k=2, v=2).items()}
    G = {"O": random.standard_normal((5, 2))}
    E = enclose(gma.bidirectional_vjp, {"cotangents": G} | x)
    for name, y in gma.bidirectional_vjp(G, **x).items():
        assert np.all(certified_error(y, E[name]) <= 2.0**-44), name


def test_long_floats_are_no_enclosure() -> None:
    with pytest.raises(ValueError, match="does not enclose anything"):
        enclose(np.exp, {}, system=multiprecision(113))


@enclosing
def test_a_working_precision_is_put_back(name: str) -> None:
    mpmath.iv.prec = 53
    with pytest.raises(NotDefined):
        np.fft.fft(system(name)([1.0]))
    third(system(name)), third(multiprecision(113))
    assert (mpmath.iv.prec, mpmath.mp.prec) == (53, 53)
    if name == "arb":
        import flint

        assert flint.ctx.prec == 53


def test_without_flint_intervals_take_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flint", None)
    assert certified(77) is intervals(77)
    E = enclose(lambda x: np.exp(x), {"x": np.array([1.0])}, precision=77)
    assert abs(E.midpoint[0] - np.e) <= 2.0**-50


def test_flint_is_imported_only_when_it_is_used() -> None:
    code = (
        "import sys; from mixproof.verify.numbers import array, certified, exact, objects; "
        "assert 'flint' not in sys.modules; certified.{}; print('flint' in sys.modules)"
    )
    pytest.importorskip("flint")
    for call, imported in (("intervals()", "False"), ("balls()", "True")):  # the second shows that the first can fail
        done = subprocess.run([sys.executable, "-c", code.format(call)], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == imported


# --- proofs


def test_sympy_proves_the_jacobian_of_softmax() -> None:
    s = symbols("s", (3,))
    p = primitives.softmax(s)
    assert p.data[0] == sympy.exp(s.data[0]) / sum(sympy.exp(x) for x in s.data)  # no maximum in the way
    J = jacobian(p, s)
    assert proves(J, np.where(np.eye(3, dtype=bool), p * (1 - p), -p[:, None] * p[None, :]))
    assert not proves(J, np.where(np.eye(3, dtype=bool), p, -p[:, None] * p[None, :]))
    assert proves(np.sum(p), 1)


def test_sympy_proves_the_derivative_of_softplus() -> None:
    w = symbols("w", (1,))
    assert proves(np.sum(jacobian(primitives.softplus(w), w)), 1 / (1 + np.exp(-w[0])))


def test_sympy_proves_the_retention_gradient() -> None:
    x = {n: symbols(n, s) for n, s in dict(q=(3, 1), k=(3, 1), v=(3, 1), gamma=(), scale=(), S0=(1, 1)).items()}
    G = {"O": symbols("g", (3, 1)), "S": symbols("h", (1, 1))}
    O, S = retention.parallel(**x)
    value = np.sum(O * G["O"]) + np.sum(S * G["S"])
    for name, gradient in retention.vjp(G, **x).items():
        assert proves(gradient, jacobian(value, x[name])), name


def test_sympy_proves_the_softmax_attention_gradient() -> None:
    x = {n: symbols(n, (2, 1)) for n in "qkv"}
    G = symbols("g", (2, 1))
    value = np.sum(softmax_attention.parallel(**x, scale=1) * G)
    for name, gradient in softmax_attention.vjp({"O": G}, **x, scale=1).items():
        assert proves(gradient, jacobian(value, x[name])), name


def test_symbols_carry_masks_and_open_comparisons() -> None:
    x = symbols("x", (2,))
    assert x.data[1] == sympy.Symbol("x_1", real=True)
    p = primitives.softmax(primitives.masked(x, np.array([True, False]), -np.inf))
    assert proves(p, [1, 0])
    assert proves(primitives.softmax(EXPRESSIONS([-np.inf, -np.inf])), [0, 0])
    relu = np.where(x >= 0, x, 0)
    at = {x.data[0]: 3, x.data[1]: Fraction(-1, 2)}
    assert substitute(relu, at).data.tolist() == [3, 0]
    assert substitute(np.maximum(x, 0), at).data.tolist() == [3, 0]
    distances = primitives.mahalanobis(x.reshape(1, 2), symbols("mu", (3, 2)), symbols("var", (3, 2), positive=True))
    assert distances.shape == (1, 3)
