"""Mamba's selective scan in Triton on shapes that the gate does not draw: several tiles of channels, more states than
tokens, rates of zero and above. Bounds are the judge's. And the interpreter's scan, all rows at once."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if find_spec("triton") is None:  # not imported here: the subjects say first whether to interpret
    pytest.skip("triton is not installed", allow_module_level=True)

from mixproof.verify.case import parse  # noqa: E402
from mixproof.verify.cells import entries  # noqa: E402
from mixproof.verify.laws import law  # noqa: E402
from mixproof.verify.subjects.triton import interpreter, mamba, mamba_kernels  # noqa: E402
from mixproof.verify.subjects.triton.mamba_kernels import tl, triton  # noqa: E402

SUBJECTS = {str(e): e for e in entries()}
FUNCTIONS = {"mamba.zoh": mamba.zero_order_hold, "mamba.euler": mamba.euler}
INTERPRETED = triton.knobs.runtime.interpret


@pytest.fixture(scope="module")
def subjects():
    loaded = {name: SUBJECTS[f"{name}/triton.scan"].load() for name in FUNCTIONS}
    assert not any(s.unavailable() for s in loaded.values())  # activates the interpreter
    return loaded


def worst(subject, name, text):
    """The greatest error / bound of a law's evidence on one case."""
    evidence = law(name).check(subject, parse(subject.operator.name, text))
    assert not any(e.vacuous for e in evidence)
    return max(e.ratio for e in evidence)


@pytest.mark.parametrize("name", ["forward", "vjp"])
@pytest.mark.parametrize("operator", FUNCTIONS)
def test_several_tiles(subjects, operator, name):
    for text in ("B=2 H=1 T=19 D=35 N=16", "B=1 H=1 T=5 D=3 N=70"):
        assert worst(subjects[operator], name, f"{text} dtype=float32 state=random") <= 1


def test_a_decay_missing_between_chunks_is_noticed(subjects, monkeypatch):
    def later(a, w, b, v):
        return b, b * w + v

    monkeypatch.setattr(mamba_kernels._then, "fn", later)
    assert worst(subjects["mamba.euler"], "forward", "B=1 H=1 T=40 D=3 N=2 dtype=float32") > 1e3


@pytest.mark.parametrize("zoh", [True, False])
@pytest.mark.parametrize("rate", [0.0, -1e-6, 0.75, -50.0])
def test_rates_at_which_a_quotient_would_fail(zoh, rate):
    """At a rate of zero a step adds delta B u, and nothing decays; a state that grows is a system too."""
    interpreter.activate()
    T, steps = 21, torch.full((1, 21, 1), 0.25)
    u = torch.linspace(-1, 1, T)[None, :, None].requires_grad_()
    A = torch.full((1, 1), rate, requires_grad=True)
    ones = torch.ones(1, T, 1)
    _, h = FUNCTIONS["mamba.zoh" if zoh else "mamba.euler"](u, steps, A, ones, ones, torch.zeros(1))
    du, dA = torch.autograd.grad(h.sum(), (u, A))
    z = 0.25 * rate
    gain = 0.25 * (np.expm1(z) / z if zoh and z else 1)
    powers = np.exp(z * np.arange(T - 1, -1, -1))
    assert np.allclose(du[0, :, 0], gain * powers, rtol=1e-5, atol=1e-30)
    assert np.allclose(h.item(), np.sum(gain * powers * np.linspace(-1, 1, T)), rtol=1e-4, atol=1e-6)
    slope = 0.25**2 * ((np.exp(z) * (z - 1) + 1) / z**2 if abs(z) > 1e-3 else 0.5) if zoh else 0
    lag = 0.25 * np.arange(T - 1, -1, -1) * powers
    assert np.allclose(dA.item(), np.sum((gain * lag + slope * powers) * np.linspace(-1, 1, T)), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"delta": torch.ones(1, 4, 3)}, ValueError, r"delta has shape \(1, 4, 3\): axis D is 3, but elsewhere 2"),
        ({"B": torch.ones(1, 5, 3)}, ValueError, r"B has shape \(1, 5, 3\): axis T is 5, but elsewhere 4"),
        ({"A": torch.full((2, 3), float("nan"))}, ValueError, "A contains NaN"),
        ({"u": torch.ones(1, 4, 2).double()}, TypeError, "u has dtype torch.float64"),
        ({"h0": torch.ones(1, 3, 2)}, ValueError, r"h0 has shape \(1, 3, 2\)"),
        (
            {"A": torch.ones(2, 200), "B": torch.ones(1, 4, 200), "C": torch.ones(1, 4, 200)},
            ValueError,
            "A has 200 states a channel; expected 1 to 128",
        ),
    ],
)
def test_arguments_that_do_not_fit(change, error, message):
    given = {"u": torch.ones(1, 4, 2), "delta": torch.ones(1, 4, 2), "A": -torch.ones(2, 3)}
    given |= {"B": torch.ones(1, 4, 3), "C": torch.ones(1, 4, 3), "skip": torch.ones(2)}
    with pytest.raises(error, match=message):
        mamba.euler(**given | change)


@triton.jit
def scan_kernel(x, y, AXIS: tl.constexpr, REVERSE: tl.constexpr):
    at = (tl.arange(0, 4) * 16)[:, None, None] + (tl.arange(0, 2) * 8)[None, :, None] + tl.arange(0, 8)[None, None, :]
    a, w = tl.associative_scan((tl.load(x + at), tl.load(y + at)), AXIS, mamba_kernels._then, reverse=REVERSE)
    tl.store(x + at, a)
    tl.store(y + at, w)


@pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_rows_scanned_together_are_those_scanned_one_by_one(axis, monkeypatch):
    from triton.runtime import interpreter as tri

    interpreter.activate()
    start = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    for reverse in (False, True):
        together, one_by_one = start.clone(), start.clone()
        scan_kernel[(1,)](*together, axis, reverse)
        with monkeypatch.context() as patch:
            patch.setattr(tri.ScanOps, "generic_scan", tri.ScanOps.generic_scan.__wrapped__)
            scan_kernel[(1,)](*one_by_one, axis, reverse)
        assert torch.equal(together, one_by_one)
        assert not torch.equal(together, start)
