"""The oracle: batched results are those of single heads, parameters' gradients sum over the batch, errors of inputs
reach the outputs, and what is plain stays plain."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mixproof.reference import OPERATORS, operator
from mixproof.verify import oracle
from mixproof.verify.arithmetic import LARGEST, UNDERFLOW, UNIT, natural
from mixproof.verify.case import Case, Domain
from mixproof.verify.numbers.ball import SLACK

NAMES = tuple(OPERATORS)
STATEFUL = tuple(n for n in NAMES if operator(n).state)
CACHED = tuple(n for n in STATEFUL if "P" in operator(n).dimensions)  # P tokens of zeros are tokens
SIZES = {"B": 2, "H": 3, "T": 5, "S": 4, "K": 3, "R": 2, "V": 4, "D": 2, "W": 3}
float32 = natural("float32")


def case_of(name: str, dtype: str = "float32", **fields: Any) -> Case:
    domain = Domain(name, ((dtype, "float64" if dtype == "float64" else "float32"),))
    sizes = SIZES | fields.pop("sizes", {})
    return domain.case(sizes, dtype=dtype, **{"state": "random", "seed": 3} | fields)


def cotangents_of(case: Case) -> dict[str, np.ndarray]:
    return case.cotangents(oracle.forward(case.operator, case.arrays(), float32).value)


def alone(case: Case, values: dict[str, Any], b: int, h: int) -> dict[str, Any]:
    """The inputs of one head of one sequence, as a batch of one."""
    lead = {"token": np.s_[b : b + 1, h : h + 1], "state": np.s_[b : b + 1, h : h + 1], "parameter": np.s_[h : h + 1]}
    roles = {x.name: x.role for x in case.operator.inputs}
    return {n: x if roles[n] == "scalar" else x[lead[roles[n]]] for n, x in values.items()}


HEADS = [(b, h) for b in range(2) for h in range(3)]


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_is_its_heads(name: str) -> None:
    case = case_of(name)
    values = case.arrays()
    whole = oracle.forward(case.operator, values, float32)
    assert set(whole.value) == set(whole.bound) == set(whole.radius) == {y.name for y in case.operator.outputs}
    for b, h in HEADS:
        one = oracle.forward(case.operator, alone(case, values, b, h), float32)
        for part in ("value", "bound", "radius"):
            for n, x in getattr(one, part).items():
                assert np.array_equal(getattr(whole, part)[n][b, h], x[0, 0])
    for y in case.operator.outputs:
        shape = (2, 3, *(case.operator.size(a, dict(case.sizes), values) for a in y.axes))
        assert whole.value[y.name].shape == whole.bound[y.name].shape == whole.radius[y.name].shape == shape


@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_the_form_of_record(name: str) -> None:
    case = case_of(name)
    values = case.arrays()
    whole = oracle.forward(case.operator, values, float32)
    for (b, h), head in oracle.heads(case.operator, values):
        for n, x in case.operator.evaluate(head).items():
            assert np.array_equal(whole.value[n][b, h], x)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_a_batch_are_its_heads_and_parameters_sum(name: str) -> None:
    case = case_of(name)
    values, upstream = case.arrays(), cotangents_of(case)
    whole = oracle.backward(case.operator, values, upstream, float32)
    assert set(whole.value) == {x.name for x in case.operator.inputs if x.differentiable}
    ones = {}
    for b, h in HEADS:
        part = {n: c[b : b + 1, h : h + 1] for n, c in upstream.items()}
        ones[b, h] = oracle.backward(case.operator, alone(case, values, b, h), part, float32)
    for x in case.operator.inputs:
        if not x.differentiable:
            continue
        assert whole.value[x.name].shape == np.shape(values[x.name]) == whole.bound[x.name].shape
        for b, h in HEADS:
            value, bound = ones[b, h].value[x.name], ones[b, h].bound[x.name]
            if x.role == "parameter":
                both = [ones[i, h].value[x.name][0] for i in range(2)]
                assert np.array_equal(whole.value[x.name][h], both[1] + both[0])
                # a sum of two is off by at least what either is, and its own rounding
                assert np.all(whole.bound[x.name][h] > bound[0])
            else:
                assert np.array_equal(whole.value[x.name][b, h], value[0, 0])
                assert np.array_equal(whole.bound[x.name][b, h], bound[0, 0])


@pytest.mark.parametrize("name", NAMES)
def test_plain_evaluations_are_the_oracles_values(name: str) -> None:
    case = case_of(name)
    values, upstream = case.arrays(), cotangents_of(case)
    outputs = oracle.plain_forward(case.operator, values, case.operator.forms[0].function)
    expected = oracle.forward(case.operator, values, float32).value
    assert all(np.array_equal(x, y) for x, y in zip(outputs, expected.values(), strict=True))
    grads = oracle.plain_backward(case.operator, values, upstream)
    expected = oracle.backward(case.operator, values, upstream, float32).value
    assert grads.keys() == expected.keys()
    assert all(np.array_equal(grads[n], expected[n]) for n in grads)
    other = oracle.plain_backward(
        case.operator, values, upstream, lambda d, /, **x: {n: 2 * g for n, g in case.operator.vjp(d, **x).items()}
    )
    assert all(np.array_equal(other[n], 2 * grads[n]) for n in grads)


@pytest.mark.parametrize("name", NAMES)
def test_plain_evaluations_stay_in_the_dtype_of_the_inputs(name: str) -> None:
    case = case_of(name)
    narrow = {n: x.astype(np.float32) if isinstance(x, np.ndarray) else x for n, x in case.arrays().items()}
    outputs = oracle.plain_forward(case.operator, narrow, case.operator.forms[0].function)
    expected = oracle.forward(case.operator, case.arrays(), float32)
    for x, (n, want) in zip(outputs, expected.value.items(), strict=True):
        assert x.dtype == np.float32
        assert not np.array_equal(x, want) or not expected.radius[n].any()
        assert np.all(np.abs(x - want) <= expected.bound[n])
    upstream = cotangents_of(case)
    grads = oracle.plain_backward(case.operator, narrow, {n: c.astype(np.float32) for n, c in upstream.items()})
    expected = oracle.backward(case.operator, case.arrays(), upstream, float32)
    for n, x in grads.items():
        assert x.dtype == np.float32
        assert np.all(np.abs(x - expected.value[n]) <= expected.bound[n])


# where the memory of titans.mlp is absent, the learned one stands in
@pytest.mark.parametrize("name", [n for n in STATEFUL if n not in (*CACHED, "titans.mlp")])
def test_an_absent_state_is_zero_and_has_no_gradient(name: str) -> None:
    absent, zero = case_of(name, state="absent"), case_of(name, state="zero")
    one, two = (oracle.forward(c.operator, c.arrays(), float32) for c in (absent, zero))
    assert all(np.array_equal(one.value[n], two.value[n]) for n in one.value)
    upstream = cotangents_of(zero)
    grads = [oracle.backward(c.operator, c.arrays(), upstream, float32).value for c in (absent, zero)]
    assert set(grads[1]) - set(grads[0]) == {x.name for x in absent.operator.state}
    assert all(np.array_equal(grads[0][n], grads[1][n]) for n in grads[0])


@pytest.mark.parametrize("name", STATEFUL)
def test_the_error_of_a_state_reaches_the_outputs(name: str) -> None:
    """A state that is off by h moves the outputs by no more than the bound grows; by a good part of it, one way."""
    case = case_of(name)
    values = case.arrays()
    states = [x.name for x in case.operator.state]
    h = {n: 2.0**-10 * np.abs(case.generator("h" + n).normal(size=values[n].shape)) for n in states}
    sharp, wide = (oracle.forward(case.operator, values, float32, errors=e) for e in (None, h))
    assert not wide.vacuous
    grown = {n: wide.bound[n] - sharp.bound[n] for n in wide.bound}
    assert all(np.array_equal(wide.value[n], sharp.value[n]) for n in wide.value)
    moved = {n: np.zeros_like(x) for n, x in grown.items()}
    for seed in range(20):
        random = np.random.default_rng(seed)
        shifted = values | {n: values[n] + h[n] * random.choice([-1, 1], size=h[n].shape) for n in states}
        result = oracle.forward(case.operator, shifted, float32).value
        moved = {n: np.maximum(moved[n], np.abs(result[n] - sharp.value[n])) for n in moved}
    for n in moved:
        assert np.all(moved[n] <= grown[n])
        assert not grown[n].any() or np.max(moved[n][grown[n] > 0] / grown[n][grown[n] > 0]) > 0.25
    with_zero = oracle.forward(case.operator, values, float32, errors={n: 0 * x for n, x in h.items()})
    assert all(np.array_equal(with_zero.bound[n], sharp.bound[n]) for n in sharp.bound)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_the_bound_is_radius_store_and_the_oracles_own_error(dtype: str) -> None:
    case = case_of("gma.causal", dtype)
    parameters = "float64" if dtype == "float64" else "float32"
    expected = oracle.forward(case.operator, case.arrays(), natural(dtype), parameters)
    for n, kind in {"O": dtype, "S": parameters, "Z": parameters}.items():
        v, bound, own = (getattr(expected, part)[n] for part in ("value", "bound", "radius"))
        store = UNIT[kind] * np.abs(v) + UNDERFLOW[kind]
        assert np.all(bound >= store + own)
        assert np.all(own > 0)
        if dtype == "float64":  # the oracle is such an evaluation itself: the error of both
            assert np.all(bound >= 2 * own + store)
            assert np.all(bound <= SLACK * (2 * own * (1 + UNIT[kind]) + store) + UNDERFLOW[kind])
        else:
            assert np.all(own <= 2.0**-20 * bound)


def test_lower_precision_has_wider_bounds_for_the_same_values() -> None:
    case = case_of("softmax_attention", "bfloat16", flag=True)
    values = case.arrays()
    bounds = [oracle.forward(case.operator, values, natural(d)).bound["O"] for d in ("float64", "float32", "bfloat16")]
    assert np.all(bounds[0] < bounds[1])
    assert np.all(bounds[1] < bounds[2])


def test_overflow_makes_the_whole_reading_vacuous() -> None:
    case = case_of("retention", "float16")
    values = case.arrays()
    assert not oracle.forward(case.operator, values, natural("float16")).vacuous
    values["v"] = values["v"] * 2.0**14
    with np.errstate(all="ignore"):
        expected = oracle.forward(case.operator, values, natural("float16"))
    assert "float16" in expected.vacuous
    assert np.max(np.abs(expected.value["O"])) > LARGEST["float16"] / 8


@pytest.mark.parametrize("name", NAMES)
def test_no_tokens(name: str) -> None:
    case = case_of(name, sizes={"T": 0})
    values = case.arrays()
    expected = oracle.forward(case.operator, values, float32)
    first = case.operator.outputs[0]
    assert expected.value[first.name].shape[2] == 0
    for x in case.operator.state:
        assert np.array_equal(expected.value[x.carries or ""], values[x.name])
    upstream = case.cotangents(expected.value)
    grads = oracle.backward(case.operator, values, upstream, float32)
    assert all(grads.value[n].shape == np.shape(values[n]) for n in grads.value)
    assert not grads.vacuous


def test_heads_are_taken_in_order() -> None:
    case = case_of("retention")
    values = case.arrays()
    found = list(oracle.heads(case.operator, values))
    assert [bh for bh, _ in found] == HEADS
    for (b, h), head in found:
        assert np.array_equal(head["q"], values["q"][b, h])
        assert head["gamma"] == values["gamma"][h]
        assert np.array_equal(head["S0"], values["S0"][b, h])
        assert head["scale"] == values["scale"]
