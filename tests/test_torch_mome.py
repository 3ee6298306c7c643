"""PyTorch mixtures of memory experts against the float64 reference, and what they promise besides.

Tolerances are those of balls for the declared arithmetic: float32 throughout for half-precision inputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mixproof.reference import operator
from mixproof.verify.declare import ATTRIBUTE
from mixproof.verify.laws.law import against
from mixproof.verify.oracle import backward, forward
from mixproof.verify.subject import Subject
from mixproof.verify.subjects.torch import mome

EAGER = {
    "mome": mome.eager,
    "mome.write_mix": mome.write_mix,
    "mome.top_k": mome.top_k,
    "mome.top_k_hold": mome.top_k_hold,
}
CHUNKWISE = {
    "mome": mome.chunkwise,
    "mome.write_mix": mome.chunkwise_write_mix,
    "mome.top_k": mome.chunkwise_top_k,
    "mome.top_k_hold": mome.chunkwise_top_k_hold,
}
FORMS = [(name, f) for forms in (EAGER, CHUNKWISE) for name, f in forms.items()]
IDS = [f"{name}/{f.__name__}" for name, f in FORMS]
DTYPES = ("float64", "float32", "bfloat16", "float16")
B, H, K, V, X = 2, 2, 3, 4, 5


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """These tensors are small: threads would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def draw(name, T, dtype="float64", seed=0):
    """Native inputs in the layout B T H D, among the decays zeros, ones and negative numbers, among the logits ties."""
    g = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == "float64" else torch.float32
    D = V if name != "mome" else K
    tokens = {"q": (B, T, H, K), "k": (B, T, H, K), "v": (B, T, H, D)} | ({} if name == "mome" else {"l": (B, T, H, X)})
    inputs = {n: torch.randn(s, generator=g, dtype=torch.float64).to(getattr(torch, dtype)) for n, s in tokens.items()}
    if name == "mome":
        inputs["W"] = torch.randn((H, K, X), generator=g, dtype=wide)
    else:
        inputs["l"] = inputs["l"].round(decimals=0)
    inputs["a"] = torch.tensor([[0.0, 1.0, 0.5, -0.75, 0.9375], [0.25, 0.0, 0.875, 1.0, 0.5]], dtype=wide)
    return inputs | {"S0": torch.randn((B, H, X, K, D), generator=g, dtype=torch.float64).to(wide)}


def subject(name, function):
    return Subject(getattr(function, ATTRIBUTE)[0], function)


def worst(evidence):
    assert not any(e.vacuous for e in evidence)
    return max(e.ratio for e in evidence)


@pytest.mark.parametrize(("name", "function"), FORMS, ids=IDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [1, 7])
def test_outputs_and_gradients_agree_with_the_reference(name, function, dtype, T):
    s, native = subject(name, function), draw(name, T, dtype, seed=T)
    inputs, parameters = s.restore(native), s.declaration.parameter_dtype(dtype)
    inputs |= {x.name: x.default for x in s.operator.inputs if x.role == "scalar"}
    arithmetic = s.declaration.arithmetic(dtype)
    for chunk in range(1, T + 2) if s.takes_chunk else (0,):
        got = s.run(inputs, dtype, chunk)
        assert worst(against(s, got, forward(s.operator, inputs, arithmetic, parameters))) <= 1
    rng = np.random.default_rng(T)
    cotangents = {n: rng.integers(-4, 5, size=y.shape).astype(float) for n, y in got.items()}
    want = backward(s.operator, inputs, cotangents, arithmetic, parameters)
    found = s.gradients(inputs, cotangents, dtype)
    assert found.keys() == {x.name for x in s.operator.inputs if x.role != "scalar"}
    assert worst(against(s, found, want)) <= 1


@pytest.mark.parametrize(("name", "function"), FORMS, ids=IDS)
def test_half_precision_keeps_states_wide(name, function):
    inputs = draw(name, 5, "bfloat16")
    Y, S = function(**inputs)
    assert (Y.dtype, S.dtype) == (torch.bfloat16, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = function(**inputs)
    assert torch.equal(again[0], Y)
    assert torch.equal(again[1], S)


@pytest.mark.parametrize(("name", "function"), FORMS, ids=IDS)
def test_empty_sequence(name, function):
    inputs = draw(name, 0)
    inputs["S0"].requires_grad_()
    Y, S = function(**inputs)
    assert Y.shape == inputs["v"].shape
    assert torch.equal(S, inputs["S0"])
    assert S.data_ptr() != inputs["S0"].data_ptr()
    (gradient,) = torch.autograd.grad(S.sum(), inputs["S0"])
    assert torch.equal(gradient, torch.ones_like(gradient))


@pytest.mark.parametrize("name", EAGER)
def test_inputs_may_have_any_strides(name):
    inputs = draw(name, 9)
    odd = {n: x.transpose(0, 1).contiguous().transpose(0, 1) for n, x in inputs.items() if x.ndim > 2}
    for f in (EAGER[name], CHUNKWISE[name]):
        plain, strided = f(**inputs), f(**(inputs | odd))
        assert all(torch.equal(x, y) for x, y in zip(plain, strided, strict=True))


@pytest.mark.parametrize("forms", [EAGER, CHUNKWISE], ids=["eager", "chunkwise"])
def test_of_equal_logits_the_first_are_selected(forms):
    """All logits equal: the experts beyond the second receive nothing."""
    inputs = draw("mome.top_k", 6)
    inputs["l"] = torch.zeros_like(inputs["l"])
    for name in ("mome.top_k", "mome.top_k_hold"):
        S = forms[name](**(inputs | {"S0": None}))[1]
        assert torch.equal(S[:, :, 2:], torch.zeros_like(S[:, :, 2:]))
        assert torch.all(S[:, :, :2].abs().amax((-1, -2)) > 0)


@pytest.mark.parametrize("name", ["mome.top_k", "mome.top_k_hold"])
def test_more_than_all_experts_are_all(name):
    inputs = draw(name, 5)
    for f in (EAGER[name], CHUNKWISE[name]):
        assert all(torch.equal(x, y) for x, y in zip(f(**inputs, top=X), f(**inputs, top=X + 3), strict=True))


@pytest.mark.parametrize("function", [mome.eager, mome.chunkwise])
def test_gradients_of_two_uses_do_not_meet_in_half_precision(function):
    """Keys act on the states and on the router; their gradient is rounded once, at the end."""
    narrow = draw("mome", 20, "bfloat16")
    wide = {n: x.float() for n, x in narrow.items()}
    gradients = []
    for inputs in (narrow, wide):
        leaves = {n: x.clone().requires_grad_() for n, x in inputs.items()}
        Y, S = function(**leaves)
        ones = torch.ones_like(Y).to(torch.bfloat16).to(Y.dtype)
        gradients.append(torch.autograd.grad((Y.float() * ones.float()).sum() + S.sum(), [leaves["k"], leaves["v"]]))
    for got, want in zip(*gradients, strict=True):
        assert torch.equal(got, want.to(torch.bfloat16))


def changed(name, **changes):
    return draw(name, 4) | changes


BAD = {
    "q is torch.int64; expected a floating-point tensor": ("mome", {"q": torch.zeros(B, 4, H, K, dtype=torch.int64)}),
    "W is NoneType; expected a floating-point tensor": ("mome", {"W": None}),
    r"k has shape \(2, 4, 2\); expected axes \(B, T, H, K\)": ("mome.top_k", {"k": torch.zeros(B, 4, H)}),
    r"v has shape \(2, 3, 2, 4\): axis T is 3, but q has T=4": ("mome.write_mix", {"v": torch.zeros(B, 3, H, V)}),
    r"v has shape \(2, 4, 2, 4\): axis D is 4, but q has D=3": ("mome", {"v": torch.zeros(B, 4, H, V)}),
    r"S0 has shape \(2, 2, 5, 4, 3\): axis K is 4, but q has K=3": ("mome.top_k", {"S0": torch.zeros(B, H, X, V, K)}),
    "a is on meta, but q is on cpu": ("mome", {"a": torch.zeros(H, X, device="meta")}),
    "describes X = 0 experts": ("mome.write_mix", {"a": torch.zeros(H, 0), "l": torch.zeros(B, 4, H, 0), "S0": None}),
    "top is 0; it must be an integer, at least 1": ("mome.top_k", {"top": 0}),
    "top is 1.5; it must be an integer, at least 1": ("mome.top_k_hold", {"top": 1.5}),
}


@pytest.mark.parametrize("message", BAD)
def test_arguments_that_make_no_sense_are_named(message):
    name, changes = BAD[message]
    for f in (EAGER[name], CHUNKWISE[name]):
        with pytest.raises((TypeError, ValueError), match=message):
            f(**changed(name, **changes))


@pytest.mark.parametrize("name", CHUNKWISE)
def test_chunk_is_at_least_one(name):
    with pytest.raises(ValueError, match="chunk is 0; it must be at least 1"):
        CHUNKWISE[name](**draw(name, 4), chunk=0)


def test_every_operator_has_both_forms():
    declared = {(d.operator, d.name) for _, f in FORMS for d in getattr(f, ATTRIBUTE)}
    assert declared == {(name, form) for name in EAGER for form in ("torch.eager", "torch.chunkwise")}
    assert all(operator(name).forms[0].name == "chunkwise" for name in EAGER)
