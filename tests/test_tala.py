"""TALA: the schedule of the heads, and the printed recurrence against retention at the same decay."""

import dataclasses
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixproof.reference import operator, retention, tala
from mixproof.verify.judge import PROFILES, judge
from mixproof.verify.numbers.exact import RATIONALS
from mixproof.verify.subject import Subject
from mixproof.verify.subjects.mutants import mutants
from mixproof.verify.subjects.reference import batched


def draw(seed: int, T: int, K: int = 3, V: int = 2) -> dict:
    g = np.random.default_rng(seed)
    return {"q": g.normal(size=(T, K)), "k": g.normal(size=(T, K)), "v": g.normal(size=(T, V))}


@pytest.mark.parametrize("h", range(1, 17))
def test_the_mean_lag_of_a_head_is_e_to_the_h_minus_one(h: int) -> None:
    """sum n omega^n / sum omega^n = omega / (1 - omega); both sides from omega, rounded in float64."""
    w = tala.omega(np.float64(h))
    assert abs(w / (1 - w) / np.expm1(h) - 1) <= 4 * 2.0**-53 * np.exp(h)


@given(st.floats(0.5, 30))
def test_log_omega_is_the_logarithm_of_omega(h: float) -> None:
    """omega rounds to u, so its logarithm is off by u / omega; log_omega is not."""
    assert abs(tala.log_omega(h) - np.log(tala.omega(h))) <= 2 * 2.0**-53 / tala.omega(h)


@pytest.mark.parametrize("form", ["recurrent", "parallel", "chunkwise"])
def test_it_is_retention_with_gamma_omega_G(form: str) -> None:
    x = draw(0, 11)
    gamma = tala.omega(np.float64(2)) * -0.75
    for a, b in zip(
        getattr(tala, form)(**x, h=np.float64(2), G=np.float64(-0.75), scale=0.5),
        getattr(retention, form)(**x, gamma=gamma, scale=0.5),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def test_the_recurrence_as_printed_in_exact_arithmetic() -> None:
    """(15) at omega G = 1/2: S = 1, 3/2, 7/4 for ones."""
    one = RATIONALS(np.ones((3, 1), dtype=int))
    O, S = retention.chunkwise(one, one, one, RATIONALS(Fraction(1, 2)), RATIONALS(1), chunk=2)
    assert [Fraction(x) for x in O.data.flat] == [1, Fraction(3, 2), Fraction(7, 4)]
    assert Fraction(S.data.item()) == Fraction(7, 4)


@pytest.mark.parametrize(("h", "G"), [(1.0, 1.0), (4.0, 0.5), (2.0, 0.0), (3.0, -1.0), (8.0, 1.001)])
def test_gradients_are_those_of_autograd(h: float, G: float) -> None:
    torch = pytest.importorskip("torch")
    x = draw(1, 9)
    g = np.random.default_rng(2)
    S0, dO, dS = g.normal(size=(3, 2)), g.normal(size=(9, 2)), g.normal(size=(3, 2))
    got = tala.vjp({"O": dO, "S": dS}, **x, h=np.float64(h), G=np.float64(G), scale=0.7, S0=S0, chunk=4)
    leaves = {n: torch.tensor(a, dtype=torch.float64, requires_grad=True) for n, a in (x | {"S0": S0}).items()}
    leaves |= {n: torch.tensor(a, dtype=torch.float64, requires_grad=True) for n, a in {"h": h, "G": G}.items()}
    S, rows = leaves["S0"], []
    for t in range(9):
        S = (1 - torch.exp(-leaves["h"])) * leaves["G"] * S + torch.outer(leaves["k"][t], leaves["v"][t])
        rows.append(0.7 * leaves["q"][t] @ S)
    loss = (torch.stack(rows) * torch.tensor(dO)).sum() + (S * torch.tensor(dS)).sum()
    want = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    assert set(got) == set(want)
    for n, w in want.items():
        # two float64 evaluations of sums of at most 9 * 3 * 2 products of a few factors each
        size = 2.0**-53 * 400 * max(1, float(w.abs().max())) * 10
        assert np.max(np.abs(got[n] - w.numpy())) <= size, n


@pytest.mark.parametrize("h", [1, 4, 8, 12])
def test_the_printed_chunkwise_equation_is_killed_at_every_head(h: int) -> None:
    """At late heads its error is below customary tolerances: for ones in chunks of 8 the state before a chunk tends to
    8 / (1 - a^8), its last token reads 8 more, and 1 / (1 - a) is due: 7e-5 too much at h = 12."""
    (printed,) = (m for m in mutants("tala") if m.name == "printed_16")
    declaration = printed.subject().declaration
    assert printed.forward is not None

    def at_head(q, k, v, scale=1.0, S0=None, chunk=8):
        given = {"h": np.full(q.shape[1], h, q.dtype), "G": np.ones(q.shape[1], q.dtype)}
        state = {} if S0 is None else {"S0": S0}
        return batched(operator("tala"), printed.forward, chunk=chunk)(q=q, k=k, v=v, scale=scale, **given, **state)

    fixed = {"h": lambda sizes: np.full(sizes["H"], float(h)), "G": lambda sizes: np.ones(sizes["H"])}
    subject = Subject(dataclasses.replace(declaration, name=f"printed.{h}", fixed=fixed, gradients=False), at_head)
    verdict = judge(subject, "forward", PROFILES["short"])
    assert verdict.status == "fail"
    assert "(16)" in verdict.equals
