"""The checks that people use today: each formula against the real function, and mutants that some of them miss."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import warnings

import numpy as np
import pytest

from mixproof.reference import OPERATORS
from mixproof.reference import operator as find_operator
from mixproof.verify import oracle
from mixproof.verify.arithmetic import natural, round_to
from mixproof.verify.case import atlas
from mixproof.verify.power import baseline, duel
from mixproof.verify.power.duel import INPUTS, OURS, Bench, total
from mixproof.verify.power.rivals import FORMATS, GRADCHECK, JUDGES, Rivals, gradcheck, jacobians, rejections
from mixproof.verify.subject import Subject
from mixproof.verify.subjects.mutants import Mutant, mutants

torch = pytest.importorskip("torch")
NAN, INF = math.nan, math.inf
DTYPES = ("float64", "float32", "bfloat16", "float16")
ALLCLOSE = {"allclose 1e-2": 1e-2, "allclose 1e-3": 1e-3}


def random_pairs():
    """got and want whose errors lie around every threshold: some elements off, all off, one off."""
    g = np.random.default_rng(5)
    for i in range(300):
        want = g.normal(size=(1 + i % 4, 1 + i % 7)) * 10.0 ** g.integers(-6, 5)
        size = 10.0 ** g.uniform(-8, 0)
        noise = g.normal(size=want.shape) * size
        if i % 3 == 0:
            noise *= np.abs(want)
        if i % 5 == 0:
            noise *= g.random(want.shape) < 0.2
        yield want + noise, want


EDGES = [
    ([0.0], [0.0]),
    ([], []),
    ([1.0, NAN], [1.0, NAN]),
    ([1.0, NAN], [1.0, 2.0]),
    ([1.0, 2.0], [1.0, NAN]),
    ([1.0, INF], [1.0, INF]),
    ([1.0, -INF], [1.0, INF]),
    ([1.0, INF], [1.0, 3.0]),
    ([1.0, 3.0], [1.0, INF]),
    ([1e-7, -1e-7], [0.0, 0.0]),
    ([1e-6, 0.0], [0.0, 0.0]),
    ([1.1e-6, 0.0], [0.0, 0.0]),
    ([1e-5, 0.0], [0.0, 0.0]),
    ([1e-3, 1.0], [0.0, 1.0]),
]
PAIRS = [*random_pairs(), *((np.array(a, dtype=float), np.array(b, dtype=float)) for a, b in EDGES)]


def raises(check, *args, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            check(*args, **options)
        except AssertionError:
            return True
    return False


# --- the formulas ----------------------------------------------------------------------------------------------------


def test_pairs_lie_on_both_sides_of_every_threshold():
    found = [rejections(got, want, want + 1e-4, "float64") for got, want in PAIRS]
    for judge in JUDGES:
        assert 30 < sum(f[judge] for f in found) < len(found) - 30, judge


@pytest.mark.parametrize("judge", ALLCLOSE)
def test_allclose_is_that_of_numpy_and_torch(judge):
    t = ALLCLOSE[judge]
    for got, want in PAIRS:
        rejected = rejections(got, want, None, "float64")[judge]
        assert rejected == (not np.allclose(got, want, rtol=t, atol=t)), (got, want)
        assert rejected == (not torch.allclose(torch.tensor(got), torch.tensor(want), rtol=t, atol=t)), (got, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_assert_close_is_that_of_torch(dtype):
    """In the tensors' own dtype where no element is within a rounding of its threshold, and always in float64 with the
    tolerances of that dtype."""
    kind = getattr(torch, dtype)
    relative, absolute = torch.testing._comparison.default_tolerances(kind)
    unit = 2.0 ** {"float64": -53, "float32": -24, "bfloat16": -8, "float16": -11}[dtype]
    compared = 0
    for got, want in PAIRS:
        got, want = round_to(got, dtype), round_to(want, dtype)
        rejected = rejections(got, want, None, dtype)["assert_close"]
        wide = torch.tensor(got), torch.tensor(want)
        assert rejected == raises(torch.testing.assert_close, *wide, rtol=relative, atol=absolute), (got, want)
        with np.errstate(invalid="ignore"):
            error, allowed = np.abs(got - want), absolute + relative * np.abs(want)
            near = np.abs(error - allowed) <= 4 * unit * (error + allowed)
        if not near.any():
            compared += 1
            assert rejected == raises(torch.testing.assert_close, *(x.to(kind) for x in wide)), (got, want)
    assert compared > 250


def test_ratio_is_that_of_flash_linear_attention():
    testing = pytest.importorskip("fla.utils.testing")
    for got, want in PAIRS:
        if got.size:
            rejected = rejections(got, want, None, "float64")["RMS 0.005"]
            theirs = raises(testing.assert_close, "", torch.tensor(want), torch.tensor(got), 0.005)
            assert rejected == theirs, (got, want)


def test_twice_baseline_is_that_of_flash_attention():
    """As its tests write it: (out - out_ref).abs().max() <= 2 * (out_pt - out_ref).abs().max() + 1e-5."""
    g = np.random.default_rng(6)
    for got, want in PAIRS:
        base = want + 10.0 ** g.uniform(-8, 0) * g.normal(size=want.shape)
        rejected = rejections(got, want, base, "float64")["twice baseline"]
        if got.size:
            out, out_ref, out_pt = (torch.tensor(x) for x in (got, want, base))
            allowed = 2 * (out_pt - out_ref).abs().max().item() + 1e-5
            assert rejected == (not (out - out_ref).abs().max().item() <= allowed), (got, want)
        else:
            assert not rejected
        assert "twice baseline" not in rejections(got, want, None, "float64")


def test_the_wanted_is_rounded_to_the_format():
    """A perfect kernel returns the rounded reference: nobody rejects it, not even where it overflows."""
    want = np.array([1 / 3, 1e-3, 70000.0, -1e6])
    for dtype in DTYPES:
        got = round_to(want, dtype)
        found = rejections(got, want, got, dtype)
        if np.isfinite(got).all():
            assert not any(found.values()), (dtype, found)
        else:  # inf - inf is no number where errors are subtracted, and equal where elements are compared
            assert {j for j, rejected in found.items() if rejected} == {"RMS 0.005", "twice baseline"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_several_at_once_are_judged_as_one_by_one(dtype):
    g = np.random.default_rng(7)
    for i in range(60):
        want = g.normal(size=(2, 3, i % 5))
        got = want + 10.0 ** g.uniform(-7, 0, size=(20, 1, 1, 1)) * g.normal(size=(20, *want.shape))
        got[3:6] = g.choice([NAN, INF, -INF, 0.0], size=(3, *want.shape))
        got = round_to(got, dtype)
        known = Rivals(want, want + 1e-3 if i % 2 else None, dtype)
        together = known.among(got)
        one_by_one = [known.rejections(x) for x in got]
        assert together == {j: pytest.approx(np.array([r[j] for r in one_by_one])) for j in one_by_one[0]}


# --- gradcheck -------------------------------------------------------------------------------------------------------


def torch_gradcheck(subject: Subject, case) -> bool:
    """Whether the real one rejects the same NumPy functions, wrapped for autograd."""
    inputs = subject.inputs(case)
    names = [x.name for x in subject.operator.inputs if x.differentiable and x.name in inputs]

    class Wrapped(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            ctx.now = inputs | {n: t.detach().numpy() for n, t in zip(names, tensors, strict=True)}
            outputs = subject.run(ctx.now, "float64")
            ctx.names = list(outputs)
            return tuple(torch.tensor(x) for x in outputs.values())

        @staticmethod
        def backward(ctx, *upstream):
            cotangents = {n: c.numpy() for n, c in zip(ctx.names, upstream, strict=True)}
            found = subject.gradients(ctx.now, cotangents, "float64")
            return tuple(torch.tensor(found[n]) for n in names)

    tensors = [torch.tensor(inputs[n], requires_grad=True) for n in names]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return not torch.autograd.gradcheck(Wrapped.apply, tensors, raise_exception=False)


def tiny(operator: str, inputs: str = "users"):
    domain = Mutant("honest", operator, "", ()).subject().domain()
    return [
        case.resized(T=5, **({"S": 5} if "S" in dict(case.sizes) else {})) for case in duel._tiny_cases(domain, inputs)
    ]


@pytest.mark.parametrize("operator", ["retention", "softmax_attention"])
def test_gradcheck_is_that_of_torch(operator):
    honest = Mutant("honest", operator, "", ()).subject()
    case = tiny(operator)[0]
    numerical = jacobians(honest, case)
    found = {"honest": (gradcheck(honest, case), torch_gradcheck(honest, case))}
    for mutant in mutants(operator):
        if mutant.vjp is not None and mutant.framework == "numpy":
            subject = mutant.subject()
            found[mutant.name] = (gradcheck(subject, case, numerical), torch_gradcheck(subject, case))
    assert all(ours == theirs for ours, theirs in found.values()), found
    assert len({ours for ours, _ in found.values()}) == 2
    assert found["honest"] == (False, False)


def test_gradcheck_sees_gradients_that_change_or_do_not_vanish():
    honest = Mutant("honest", "retention", "", ()).subject()
    case = tiny("retention")[0]
    calls = itertools.count()

    def drifting(cotangents, **inputs):
        grads = find_operator("retention").vjp(cotangents, **inputs)
        return grads | {"q": grads["q"] * (1 + 1e-9 * next(calls))}

    def offset(cotangents, **inputs):
        grads = find_operator("retention").vjp(cotangents, **inputs)
        return grads | {"q": grads["q"] + 1e-7}

    for wrong in (drifting, offset):
        subject = Mutant("wrong", "retention", "", (), vjp=wrong).subject()
        assert gradcheck(subject, case, jacobians(honest, case))
        assert torch_gradcheck(subject, case)


def test_gradcheck_needs_gradients():
    without = Mutant("m", "retention", "", (), batched=lambda q, k, v, gamma, scale=1.0, S0=None: q).subject()
    assert gradcheck(without, tiny("retention")[0]) is None


# --- baselines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", list(OPERATORS)[::4])
@pytest.mark.parametrize("dtype", FORMATS)
def test_baseline_has_every_element_in_its_format_and_near(operator, dtype):
    spec, arithmetic = find_operator(operator), FORMATS[dtype]
    honest = Mutant("honest", operator, "", ()).subject()
    domain = dataclasses.replace(honest.domain(), dtypes=((arithmetic.inputs, "float32"),))
    case = next(c for c in atlas(domain, small=True) if c.size("T") == 9 and c.state != "large")
    bench = Bench(honest, case, "outputs")
    everywhere = dataclasses.replace(
        natural(arithmetic.inputs, dot=arithmetic.dot), intermediate=arithmetic.inputs, output=arithmetic.inputs
    )
    with np.errstate(all="ignore"):
        bound = oracle.forward(spec, bench.inputs, everywhere, arithmetic.inputs)
    got = baseline.outputs(spec, bench.inputs, dtype)
    grads = baseline.gradients(spec, bench.inputs, bench.cotangents, dtype)
    for name, x in (*got.items(), *grads.items()):
        assert np.array_equal(round_to(x, arithmetic.inputs), x, equal_nan=True), name
    for name, x in got.items():
        assert x.shape == bench.outputs[name].shape
        if not bound.vacuous:
            assert np.all(np.abs(x - bound.value[name]) <= bound.bound[name]), name
    assert {n: x.shape for n, x in grads.items()} == {
        x.name: np.shape(bench.inputs[x.name]) for x in spec.inputs if x.differentiable and x.name in bench.inputs
    }


def test_baseline_rounds_what_is_between():
    """A sum of three in bfloat16 loses what float32 keeps; operands of a product are cut to TF32, sums are not."""
    for dtype, kept in (("float32", 2.0**-9), ("tf32", 2.0**-9), ("float16", 2.0**-9), ("bfloat16", 0.0)):
        one, small = (baseline._lifted({"x": np.array([x])}, dtype)["x"] for x in (1.0, 2.0**-9))
        assert float(np.asarray((one + small) - one)[0]) == kept
    for dtype, seen in (("float32", 1 + 2.0**-20), ("tf32", 1.0)):
        x = baseline._lifted({"x": np.array([[1 + 2.0**-20]])}, dtype)["x"]
        assert float(np.asarray(x @ np.ones((1, 1), np.float32))[0, 0]) == seen
        assert float(np.asarray(x + 0)[0, 0]) == 1 + 2.0**-20
    total = baseline._lifted({"x": np.ones(3)}, "bfloat16")["x"]
    total += 2.0**-9  # in place
    assert isinstance(total, baseline.BFloat16)
    assert np.asarray(total).tolist() == [1.0, 1.0, 1.0]


# --- the duel --------------------------------------------------------------------------------------------------------


SOME = [m for i, m in enumerate(mutants("softmax_attention")) if i % 5 == 0 or m.name == "finite_mask"]


@functools.cache
def rows(operator: str):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duel, "mutants", lambda name: [m for m in SOME if m.operator == name])
        return duel.duel(operator, "ci")


def found(format: str, inputs: str, judge: str):
    (row,) = (r for r in rows("softmax_attention") if (r["format"], r["inputs"]) == (format, inputs))
    return row["judges"][judge]


def test_duel_has_a_row_for_each_format_and_input_set():
    names = {f"softmax_attention/{m.name}" for m in SOME}
    assert {bool(m.forward or m.batched) for m in SOME} == {True, False}
    assert [(r["format"], r["inputs"]) for r in rows("softmax_attention")] == [
        (f, i) for shared in duel.SHARED for i in INPUTS for f in shared
    ]
    assert {f for shared in duel.SHARED for f in shared} == set(FORMATS)
    for row in rows("softmax_attention"):
        judges = (*JUDGES, OURS, *([GRADCHECK] if row["format"] == "float32" else []))
        assert tuple(row["judges"]) == judges
        assert row["mutants"] == len(names)
        assert row["cases"] > (0 if row["inputs"] == "users" else 4)
        assert 0 <= row["vacuous"] < row["bounds"] <= 2 * row["cases"]
        for count in row["judges"].values():
            assert 0 < count["apart"] <= count["killed"] <= row["mutants"]
            assert set(count["survivors"]) <= names
            assert len(count["survivors"]) == min(duel.NAMED, row["mutants"] - count["killed"])


def test_users_inputs_are_aligned_and_normal_and_do_not_reach_the_edges():
    domain = Mutant("honest", "softmax_attention", "", ()).subject().domain()
    cases = list(duel._cases(domain, "users", small=True))
    assert {(c.size("T"), c.size("S"), c.size("D"), c.regime) for c in cases} == {(64, 64, 16, "normal")}
    assert {(c.flag, c.seed) for c in cases} == {(f, s) for f in (False, True) for s in (0, 1)}
    missed = found("float32", "users", OURS)["survivors"]
    assert "softmax_attention/finite_mask" in missed  # a sentinel of -30 needs strongly negative logits
    assert "softmax_attention/finite_mask" not in found("float32", "atlas", OURS)["survivors"]


def test_we_kill_at_least_what_coarse_checks_tell_apart():
    for inputs in INPUTS:
        assert found("float32", inputs, OURS)["killed"] >= found("float32", inputs, "allclose 1e-2")["apart"]
        assert found("float32", inputs, OURS)["killed"] == found("float32", inputs, OURS)["apart"]
    missed = set(found("float32", "atlas", "RMS 0.005")["survivors"]) - set(
        found("float32", "atlas", OURS)["survivors"]
    )
    assert missed


def test_gradcheck_kills_no_wrong_forward():
    assert 0 < found("float32", "atlas", GRADCHECK)["killed"] <= sum(m.forward is None for m in SOME)


def test_the_reference_is_told_apart_by_nobody_and_its_other_form_not_killed_by_us(monkeypatch):
    operator = find_operator("softmax_attention")
    for mutant in (
        Mutant("same", operator.name, "", (), vjp=operator.vjp),
        Mutant("blocks", operator.name, "", (), operator.form("blockwise").function),
    ):
        monkeypatch.setattr(duel, "mutants", lambda name, mutant=mutant: [mutant])
        for row in duel.duel(operator.name):
            assert row["judges"][OURS]["killed"] == 0
            if mutant.name == "same":
                assert all(count["apart"] == 0 for count in row["judges"].values()), row


def test_rows_add_up():
    one = rows("softmax_attention")
    both = total([*one, *one])
    assert [(r["format"], r["inputs"]) for r in both] == [(r["format"], r["inputs"]) for r in one]
    for whole, part in zip(both, one, strict=True):
        assert [whole[n] for n in duel.COUNTS] == [2 * part[n] for n in duel.COUNTS]
        for judge, count in whole["judges"].items():
            assert count["killed"] == 2 * part["judges"][judge]["killed"]
            assert count["apart"] == 2 * part["judges"][judge]["apart"]
            assert len(count["survivors"]) <= duel.NAMED
