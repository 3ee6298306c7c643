"""What judging costs: oracle and tolerance of one case, by pytest-benchmark (`pytest tests/test_speed.py`).

Compare ratios within one run; absolute times depend on the machine. Under xdist the benchmarks run once, as tests."""

import numpy as np
import pytest

from mixproof.reference import OPERATORS
from mixproof.verify import oracle
from mixproof.verify.arithmetic import natural
from mixproof.verify.case import Domain

SIZES = {"B": 1, "H": 1, "T": 257, "S": 257, "K": 16, "R": 8, "V": 16, "D": 16}


@pytest.mark.parametrize("name", OPERATORS)
def test_one_float64_evaluation(benchmark, name):
    case = Domain(name, (("float32", "float32"),)).case(SIZES, state="random")
    (head,) = (h for _, h in oracle.heads(case.operator, case.arrays()))
    result = benchmark(case.operator.evaluate, head)
    assert all(np.isfinite(x).all() for x in result.values())


@pytest.mark.parametrize("name", OPERATORS)
def test_oracle_with_tolerance(benchmark, name):
    case = Domain(name, (("float32", "float32"),)).case(SIZES, state="random")
    expected = benchmark(oracle.forward, case.operator, case.arrays(), natural("float32"))
    assert not expected.vacuous
    assert all((bound > 0).all() for bound in expected.bound.values())


@pytest.mark.parametrize("name", OPERATORS)
def test_gradient_oracle_with_tolerance(benchmark, name):
    case = Domain(name, (("float32", "float32"),)).case(SIZES, state="random")
    arrays = case.arrays()
    cotangents = case.cotangents(oracle.forward(case.operator, arrays, natural("float32")).value)
    expected = benchmark(oracle.backward, case.operator, arrays, cotangents, natural("float32"))
    assert not expected.vacuous
    assert set(expected.bound) <= set(arrays)
