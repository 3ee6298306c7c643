"""Lanes: every one of them is an honest float machine, they differ, and nothing of them escapes the balls."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from mixproof.reference import operator as find_operator
from mixproof.reference import primitives
from mixproof.verify.arithmetic import Arithmetic, natural, round_to
from mixproof.verify.case import Domain, atlas
from mixproof.verify.numbers import ball
from mixproof.verify.numbers.lanes import ORDERS, Lanes, Workshop
from mixproof.verify.power import honest
from mixproof.verify.power.duel import OURS

f32 = np.float32
U = 2.0**-24
SINGLE = natural("float32")


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(all="ignore"):
        yield


def lanes(x, shop):
    return shop.input(np.asarray(x, dtype=float), "float32")


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(f32).astype(float)


# --- one machine ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "f",
    [lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b, lambda a, b: a / b, lambda a, b: np.sqrt(a * a)],
    ids=["add", "subtract", "multiply", "divide", "sqrt"],
)
def test_a_plain_lane_is_numpys_float32(f):
    a, b, shop = drawn(5, 4), drawn(5, 4, seed=1), Workshop(SINGLE, 1, plain=True)
    got = f(lanes(a, shop), lanes(b, shop))
    np.testing.assert_array_equal(got.data[0], f(a.astype(f32), b.astype(f32)).astype(float))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_plain_lane_of_a_short_format_rounds_every_result_to_it(dtype):
    shop = Workshop(natural(dtype, intermediate=dtype, accumulate=dtype), 1, plain=True)
    a, b = (round_to(drawn(5, 4, seed=i), dtype) for i in (0, 1))
    got = (shop.input(a, dtype) * shop.input(b, dtype) + shop.input(a, dtype)).data[0]
    np.testing.assert_array_equal(got, round_to(round_to(a * b, dtype) + a, dtype))
    total = 0.0
    for x in a[0]:
        total = float(round_to(np.asarray(total + x), dtype))
    assert np.sum(shop.input(a, dtype), axis=1).data[0, 0] == total


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dot", ["float32", "tf32"])
def test_every_lane_sums_and_multiplies_within_its_units(dot, seed):
    """|error| <= n u sum |terms|, and of dots the roundings of operands; lanes are not all alike."""
    shop = Workshop(natural("float32", dot=dot), 12, seed)
    a, b = drawn(3, 17), drawn(17, 4, seed=1)
    total = np.sum(lanes(a, shop), axis=1).data
    assert np.all(np.abs(total - a.sum(axis=1)) <= 17 * U * np.abs(a).sum(axis=1))
    product = (lanes(a, shop) @ lanes(b, shop)).data
    units = 17 * U if dot == "float32" else 2 * 2.0**-10 + 2.0**-20 + 17 * 2 * U
    assert np.all(np.abs(product - a @ b) <= 1.001 * units * (np.abs(a) @ np.abs(b)))
    assert len({x.tobytes() for x in product}) > 1
    if dot == "tf32":
        assert np.any(np.abs(product - a @ b) > 17 * U * (np.abs(a) @ np.abs(b)))


def test_all_orders_of_summation_are_met():
    names = {name for seed in range(25) for name, _ in Workshop(natural("bfloat16"), 8, seed).orders}
    assert names == set(ORDERS)
    assert "tensor core" not in {name for seed in range(25) for name, _ in Workshop(SINGLE, 8, seed).orders}


def test_sums_of_whole_numbers_are_exact_in_every_order():
    x = np.random.default_rng(0).integers(-50, 50, size=(4, 33)).astype(float)
    for seed in range(6):
        shop = Workshop(natural("bfloat16"), 10, seed)
        assert np.all(np.sum(lanes(x, shop), axis=1).data == x.sum(axis=1))
        assert np.all((lanes(x, shop) @ lanes(x.T, shop)).data == x @ x.T)


def test_a_fused_lane_rounds_a_product_and_a_sum_once():
    a = np.array([1 + 2.0**-12])  # of which the square is 1 + 2^-11 + 2^-24
    shop = next(s for seed in range(9) if (s := Workshop(SINGLE, 8, seed)).fused.any() and not s.fused.all())
    got = (lanes(a, shop) * lanes(a, shop) - (1 + 2.0**-11)).data[:, 0]
    np.testing.assert_array_equal(got, np.where(shop.fused, 2.0**-24, 0.0))


def test_exp_is_exact_at_zero_and_two_ulps_elsewhere():
    x = np.linspace(-80, 80, 401)
    shop = Workshop(SINGLE, 16, 1)
    got, want = np.exp(lanes(round_to(x, "float32"), shop)).data, np.exp(round_to(x, "float32"))
    allowed = U * (4 + 2 * np.abs(x))  # two ulps, and the argument in base two
    assert np.all(np.abs(got - want) <= want * np.expm1(allowed))
    assert np.all(got[:, 200] == 1)
    assert len({y.tobytes() for y in got}) > 1
    assert np.all(np.abs(np.sqrt(lanes(want, shop)).data / np.sqrt(want) - 1) <= 2.5 * U)


def test_results_below_the_normal_range_are_flushed_in_some_lanes():
    shop = Workshop(SINGLE, 8, 0)
    got = (lanes([2.0**-100], shop) * lanes([2.0**-30], shop)).data[:, 0]
    np.testing.assert_array_equal(got, np.where(shop.flushes, 0.0, 2.0**-130))


def test_shapes_are_those_of_one_lane():
    shop = Workshop(SINGLE, 3, 0)
    x = lanes(drawn(4, 5), shop)
    assert (x.shape, x.ndim, len(x), x.T.shape, x[1:, None].shape) == ((4, 5), 2, 4, (5, 4), (3, 1, 5))
    assert np.concatenate([x, np.ones((2, 5))]).shape == (6, 5)
    assert np.stack([x, 0 * x], axis=-1).shape == (4, 5, 2)
    assert (x[None] + np.ones(5)).shape == (1, 4, 5)
    assert (x @ x.T)[0].shape == (4,)
    assert (x[0] @ x.T).shape == (4,)
    assert isinstance(x > 0, np.ndarray)  # the same in all lanes
    with pytest.raises(TypeError, match=r"np\.where"):
        bool(np.sum(x) > 0)
    with pytest.raises(TypeError, match=r"np\.stack"):
        np.asarray(x)


@pytest.mark.parametrize(
    ("primitive", "arguments"),
    [
        (primitives.softmax, (drawn(3, 7),)),
        (primitives.softmax, (np.where(np.tri(5, 7) > 0, 9 * drawn(5, 7), -np.inf),)),
        (primitives.decay, (np.asarray(0.75), np.arange(9))),
        (primitives.decay, (np.asarray(-0.9), np.arange(9))),
        (primitives.decay, (np.asarray(0.0), np.arange(3))),
        (primitives.softplus, (20 * drawn(9),)),
        (primitives.turned, (drawn(5, 4), np.arange(5), np.array([1.0, 0.25]))),
    ],
)
def test_other_ways_of_a_primitive_give_the_same_up_to_rounding(primitive, arguments):
    """In wide format they agree with the plain body, so they are ways of one function."""
    want = primitive(*arguments)
    single = [round_to(np.asarray(primitive(*(np.asarray(a) for a in arguments))), "float32")]
    for seed in range(4):
        for recomputes in (False, True):
            shop = Workshop(SINGLE, 8, seed, recomputes=recomputes)
            first, *rest = arguments
            got = primitive(lanes(first, shop), *rest)
            assert np.all(np.abs(got.data - want) <= 60 * U * (np.abs(want) + np.abs(single[0])) + 2.0**-126)


# --- lanes and balls --------------------------------------------------------------------------------------------------


def alarms(operator, arithmetic, judged, count=12):
    """How many of our own alarms lanes of one arithmetic raise that is judged by the balls of another."""
    spec = find_operator(operator)
    domain = Domain(operator, ((arithmetic.inputs, "float32"),), chunk=honest.CHUNK)
    found = 0
    plan = [*atlas(domain, small=True), *atlas(domain, small=True, extreme=True)]
    for i, case in enumerate(plan[:count]):
        trial = honest.Trial(spec, case.resized(B=1, H=1), "float32", judged, i)
        trial.made_in = arithmetic
        alarmed, _ = trial.judged(16)
        found += alarmed[OURS] if alarmed else 0
    return found


@pytest.mark.parametrize("operator", ["retention", "gma.causal", "softmax_attention", "mamba.zoh", "mla"])
def test_silence_is_not_deafness(operator):
    """Operands cut to TF32 where float32 is declared are heard; where TF32 is declared they are not."""
    tf32 = natural("float32", dot="tf32", span=honest.CHUNK)
    single = natural("float32", span=honest.CHUNK)
    assert alarms(operator, tf32, tf32) == 0
    if operator != "mamba.zoh":  # no dots
        assert alarms(operator, tf32, single) > 0
    half = natural("float32", intermediate="bfloat16", accumulate="bfloat16", span=honest.CHUNK)
    assert alarms(operator, half, single) > 0


def _sharp_softmax(r, s, axis=-1):
    return r.around(p := primitives.softmax(s.v, axis), 0 * p)


def _sharp_matmul(r, a, b):
    return ball.Ball(r, a.v @ b.v, a.m @ b.m, 0 * (a.v @ b.v))


def _sharp_turn(r, x, n, theta):
    return r.ball(primitives.turned(x.v, n, theta))


@pytest.mark.parametrize(
    ("rules", "name", "rule", "operator"),
    [
        (ball.UFUNCS, np.matmul, _sharp_matmul, "retention"),
        (ball.FUNCTIONS, primitives.softmax, _sharp_softmax, "softmax_attention"),
        (ball.FUNCTIONS, primitives.turned, _sharp_turn, "mla"),
    ],
    ids=["matmul", "softmax", "turned"],
)
def test_a_ball_that_is_too_small_raises_an_alarm(monkeypatch, rules, name, rule, operator):
    """The campaign can fail: with one rule of the theory broken it does."""
    assert alarms(operator, SINGLE, SINGLE, 30) == 0
    monkeypatch.setitem(rules, name, rule)
    assert alarms(operator, SINGLE, SINGLE, 30) > 0


def test_a_campaign_counts_cases_and_names_its_worst():
    row = honest.of_format(find_operator("tala.phi_b"), "bfloat16", 300, 0)
    assert row["counts"]["atlas"] >= 300
    assert row["cases"] == sum(row["counts"].values())
    assert 0 < row["worst"] <= 1
    assert row["alarms"]["atlas"][OURS] == row["alarms"]["users"][OURS] == 0
    assert not row["failures"]
    assert row["worst_case"].startswith("B=")


def test_every_form_and_chunk_size_takes_its_turn():
    spec = find_operator("retention")
    case = next(iter(atlas(Domain("retention", (("float32", "float32"),)), small=True)))
    trials = [honest.Trial(spec, case, "float32", SINGLE, i) for i in range(18)]
    assert {t.form.name for t in trials} == {f.name for f in spec.forms}
    assert len({t.chunk for t in trials if t.form.chunked}) == len(honest.CHUNKS)


def test_the_declared_arithmetic_of_a_format():
    assert honest.arithmetic_of(find_operator("retention"), "tf32") == natural("float32", dot="tf32")
    spans = honest.arithmetic_of(find_operator("gated_linear_attention"), "bfloat16")
    assert spans == dataclasses.replace(natural("bfloat16"), span=honest.CHUNK)
    assert isinstance(spans, Arithmetic)
    assert isinstance(np.exp(lanes([0.0], Workshop(SINGLE, 2))), Lanes)
