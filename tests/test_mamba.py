"""Mamba's selective state space: the published systems, what holding a token for a step means, and what does not hold.

Two evaluations of one quantity may differ by twice what the gate allows one of them.
"""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest

from mixproof.reference import mamba, mamba_lti, operator
from mixproof.reference.primitives import phi1, phi1_slope, softplus
from mixproof.verify.arithmetic import UNIT, natural
from mixproof.verify.judge import PROFILES, judge
from mixproof.verify.laws.law import as_tuple
from mixproof.verify.numbers.ball import Reading, tolerance
from mixproof.verify.numbers.certified import certified_error, enclose
from mixproof.verify.numbers.exact import RATIONALS
from mixproof.verify.subjects.mutants import Mutant
from mixproof.verify.subjects.mutants import mamba as wrong

torch = pytest.importorskip("torch")
from mixproof.verify.subjects.torch import mamba as in_torch  # noqa: E402

SIZES = [(1, 1, 1), (2, 3, 2), (7, 2, 4), (13, 3, 1)]  # T, D, N
SYSTEMS = ("mamba.zoh", "mamba.euler")


def draw(name, T, D, N, seed=0):
    g = np.random.default_rng([seed, T, D, N])
    of_all = name == "mamba.lti"
    I = {"u": g.standard_normal((T, D)), "delta": np.abs(g.standard_normal((D,) if of_all else (T, D))) + 2.0**-6}
    I |= {"A": -np.exp(g.standard_normal((D, N))), "B": g.standard_normal((N,) if of_all else (T, N))}
    I |= {"C": g.standard_normal(I["B"].shape), "skip": g.standard_normal(D), "h0": g.standard_normal((D, N))}
    return I, {"y": g.standard_normal((T, D)), "h": g.standard_normal((D, N))}


def bounds(function, I, upstream=None):
    """What each result may be off by in float64."""
    reading = Reading(natural("float64"))
    balls = {n: reading.ball(x) for n, x in I.items()}
    first = () if upstream is None else ({n: reading.ball(c) for n, c in upstream.items()},)
    result = function(*first, **balls)
    assert not reading.vacuous
    if isinstance(result, dict):
        return {n: tolerance(b, "float64") for n, b in result.items()}
    return [tolerance(b, "float64") for b in result]


def agree(got, want, bound):
    return all(np.all(np.abs(g - w) <= 2 * b) for g, w, b in zip(got, want, bound, strict=True))


# --- independent transcriptions --------------------------------------------------------------------------------------


def released(u, delta, A, B, C, skip, h0):
    """selective_scan_ref of the released code, with an initial state: (D, L) arrays, exp(delta A) and delta B u."""
    u, delta, B, C = u.T, delta.T, B.T, C.T
    deltaA = torch.exp(torch.einsum("dl,dn->dln", delta, A))
    deltaB_u = torch.einsum("dl,nl,dl->dln", delta, B, u)
    x, ys = h0, []
    for i in range(u.shape[1]):
        x = deltaA[:, i] * x + deltaB_u[:, i]
        ys.append(torch.einsum("dn,n->d", x, C[:, i]))
    return (torch.stack(ys, dim=1) + u * skip[:, None]).T, x


def printed(u, delta, A, B, C, skip, h0):
    """Gu and Dao (4) channel by channel with matrices: B bar = (delta A)^-1 (exp(delta A) - I) delta B."""
    ys, h = [], list(h0)
    for t in range(len(u)):
        row = []
        for d in range(u.shape[1]):
            X = torch.diag(delta[t, d] * A[d])
            decay = torch.diag(torch.exp(torch.diagonal(X)))
            inverse = torch.diag(1 / torch.diagonal(X))
            Bbar = inverse @ torch.diag(torch.expm1(torch.diagonal(X))) @ (delta[t, d] * B[t])
            h[d] = decay @ h[d] + Bbar * u[t, d]
            row.append(C[t] @ h[d] + skip[d] * u[t, d])
        ys.append(torch.stack(row))
    return torch.stack(ys), torch.stack(h)


WITNESSES = {"mamba.euler": released, "mamba.zoh": printed}


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("sizes", SIZES)
def test_it_is_the_published_system(name, sizes):
    I, G = draw(name, *sizes)
    x = {n: torch.tensor(a, requires_grad=True) for n, a in I.items()}
    results = WITNESSES[name](**x)
    sum((r * torch.tensor(G[n])).sum() for r, n in zip(results, "yh", strict=True)).backward()
    want, op = [r.detach().numpy() for r in results], operator(name)
    allowed = bounds(op.forms[0].function, I)
    for form in op.forms:
        assert agree(form.function(**I), want, allowed), form.name
    assert agree(op.forms[0].function(**I, chunk=3), want, allowed)
    by = bounds(op.vjp, I, G)
    for chunk in (2, 5, 64):
        grads = op.vjp(G, **I, chunk=chunk)
        for n, d in grads.items():
            assert np.all(np.abs(d - x[n].grad.numpy()) <= 2 * by[n]), n
    assert set(grads) == set(I)


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_two_are_told_apart(name):
    """The figure of both is 1 if they agree to the last digit."""
    I, _ = draw("mamba.zoh", 7, 2, 4)
    other = SYSTEMS[1 - SYSTEMS.index(name)]
    allowed = bounds(operator(name).forms[0].function, I)[0]
    one, two = (operator(n).evaluate(I)["y"] for n in (name, other))
    assert np.max(np.abs(one - two) / allowed) > 1e12


@pytest.mark.parametrize("name", [*SYSTEMS, "mamba.lti"])
def test_forms_are_enclosed(name):
    I, _ = draw(name, 7, 2, 3)
    op = operator(name)
    allowed, truth = bounds(op.forms[0].function, I), enclose(op.form("recurrent").function, I)
    found = [as_tuple(form.function(**I)) for form in op.forms]
    if op.forms[0].chunked:
        found += [op.forms[0].function(**I, chunk=c) for c in (1, 2, 3, 7)]
    for results in found:
        for value, t, bound in zip(results, truth, allowed, strict=True):
            assert np.all(certified_error(value, t) <= bound)


@pytest.mark.parametrize("name", [*SYSTEMS, "mamba.lti"])
def test_no_tokens_leave_the_state(name):
    I, G = draw(name, 0, 2, 3)
    op = operator(name)
    for form in op.forms:
        y, h = form.function(**I)
        assert y.shape == (0, 2)
        assert np.array_equal(h, I["h0"])
        absent = form.function(**{n: x for n, x in I.items() if n != "h0"})
        assert not np.any(absent[1])
    assert np.array_equal(op.vjp(G, **I)["h0"], G["h"])


# --- holding a token -------------------------------------------------------------------------------------------------


def one_token(delta, A=-1.0, B=1.0, u=1.0, h=0.0):
    row = {n: np.array([[x]], dtype=float) for n, x in {"u": u, "delta": delta, "A": A, "B": B, "h0": h}.items()}
    return row | {"C": np.ones((1, 1)), "skip": np.ones(1)}


def one_step(name, *args, **options):
    """The state after one token."""
    return operator(name).evaluate(one_token(*args, **options))["h"].item()


def allowed_step(*args, **options):
    """What a held token's state may be off by in float64."""
    return bounds(mamba.ZOH.form("chunkwise").function, one_token(*args, **options))[1].item()


@pytest.mark.parametrize("delta", [2.0**-30, 0.01, 0.7, 5.0])
@pytest.mark.parametrize("A", [-4.0, -1.0, -(2.0**-20)])
def test_zoh_solves_the_equation_with_a_held_input(delta, A):
    """h' = A h + B u: exp(delta A) h0 + the integral of exp(A (delta - s)) B u over the step. Claim M1."""
    token = (delta, A, -1.5, 0.75, 0.5)
    with mpmath.workdps(25):
        integral = mpmath.quad(lambda s: mpmath.exp(A * (delta - s)), [0, delta / 2, delta])
        exact = float(mpmath.exp(mpmath.mpf(delta) * A) / 2 - integral * 9 / 8)
    assert abs(one_step("mamba.zoh", *token) - exact) <= allowed_step(*token)
    by_euler = abs(one_step("mamba.euler", *token) - exact)  # off by delta^2 A / 2 of what comes in
    assert (by_euler > allowed_step(*token)) == (delta > 0.001)


def test_two_half_steps():
    """With one input held, they are the whole step; by Euler's rule they are not: 0.5 (1 + e^-1/2) = 0.803, not 1."""
    for A in (-0.3, -2.0):
        for delta in (0.1, 3.0):
            half = enclose(_twice, {"delta": np.array(delta / 2), "A": np.array(A)})
            whole = enclose(_once, {"delta": np.array(delta), "A": np.array(A)})
            for two, one in zip(half, whole, strict=True):
                assert certified_error(two.midpoint, one) <= two.radius + one.radius + UNIT["float64"] * one.midpoint
    first = one_step("mamba.euler", 0.5)
    assert f"{one_step('mamba.euler', 0.5, h=first):.3f}" == "0.803"
    assert one_step("mamba.euler", 1.0) == 1.0


def _once(delta, A):
    """Of a state and of an input of one: what is left, what has come in."""
    return np.exp(delta * A), delta * phi1(delta * A)


def _twice(delta, A):
    left, into = _once(delta, A)
    return left * left, left * into + into


@pytest.mark.parametrize("delta", [2.0**-8, 2.0**-14, 2.0**-20])
def test_short_steps_change_nothing(delta):
    """a = 1 + delta A + .. and B bar = delta B (1 + delta A / 2 + ..), off by the next term at most. Claim M2."""
    A, B = -3.0, 2.0
    keeps, takes = {"A": A, "B": B, "u": 0.0, "h": 1.0}, {"A": A, "B": B}
    left, into = (one_step("mamba.zoh", delta, **x) for x in (keeps, takes))
    assert abs(left - (1 + delta * A)) <= (delta * A) ** 2 / 2 + allowed_step(delta, **keeps)
    assert abs(into - delta * B * (1 + delta * A / 2)) <= delta * B * (delta * A) ** 2 / 6 + allowed_step(
        delta, **takes
    )


def test_nothing_is_preserved_perfectly():
    """A step is never zero: softplus(-20) = 2.06e-9 leaves an eighth after 1e9 tokens. In float32 a rounds to one, and
    all is left. Claim M3 is false in the reals."""
    delta = softplus(np.float64(-20.0))
    left = one_step("mamba.zoh", delta, u=0.0, h=1.0)
    assert f"{1 - left:.3g}" == "2.06e-09"
    assert f"{math.exp(-1e9 * delta):.3f}" == "0.127"
    assert np.exp(-softplus(np.float32(-20.0))) == 1


def test_long_steps_refresh_the_state_only_if_the_token_is_held():
    """ZOH forgets all and takes in u itself; Euler takes in delta u, and of a constant input it becomes delta /
    (1 - e^-delta) times that. Claim M4 is false of the released code."""
    assert one_step("mamba.zoh", 100.0, h=7.0) == 1.0
    assert one_step("mamba.euler", 100.0, h=7.0) == 100.0
    for delta, gain in ((0.1, 1.051), (1.0, 1.582), (10.0, 10.0)):
        T = 400
        I = {"u": np.ones((T, 1)), "delta": np.full((T, 1), delta), "A": -np.ones((1, 1)), "skip": np.zeros(1)}
        I |= {"B": np.ones((T, 1)), "C": np.ones((T, 1))}
        assert f"{operator('mamba.euler').evaluate(I)['y'][-1, 0]:.3f}" == f"{gain:.3f}"
        allowed = bounds(mamba.ZOH.form("chunkwise").function, I)[0]
        assert np.all(np.abs(operator("mamba.zoh").evaluate(I)["y"] - 1)[-1] <= allowed[-1])


@pytest.mark.parametrize("s", [-30.0, -1.0, 0.0, 2.5, 30.0])
def test_a_step_of_softplus_is_a_gate(s):
    """Gu and Dao, theorem 1: with A = -1 and B = 1, h = (1 - g) h + g u, g the sigmoid of s. Not so by Euler's rule,
    where log 2 stands for g = 1/2."""
    delta, g = softplus(np.float64(s)), 1 / (1 + math.exp(-s))
    got = one_step("mamba.zoh", delta, u=0.75, h=-0.5)
    given = 8 * UNIT["float64"]  # what delta and g are off by
    assert abs(got - ((1 - g) * -0.5 + g * 0.75)) <= allowed_step(delta, u=0.75, h=-0.5) + given
    if s == 0:
        assert abs(one_step("mamba.euler", delta) - math.log(2)) <= UNIT["float64"]


def test_a_held_input_bounds_the_state():
    """|h| <= max(|h0|, max |B u / A|): each step is a mean of h and -B u / A. Euler's is not."""
    for seed in range(20):
        I, _ = draw("mamba.zoh", 9, 2, 3, seed)
        target = np.max(np.abs(I["u"][:, :, None] * I["B"][:, None, :] / I["A"]), axis=0)
        most = np.maximum(np.abs(I["h0"]), target)
        allowed = bounds(mamba.ZOH.form("chunkwise").function, I)[1]
        assert np.all(np.abs(operator("mamba.zoh").evaluate(I)["h"]) <= most + allowed)
    assert one_step("mamba.euler", 3.0) == 3.0


# --- the scan --------------------------------------------------------------------------------------------------------


def test_pairs_of_tokens_are_associative():
    """(b, v) after (a, w) is (b a, b w + v), over the rationals; (1, 0) changes nothing."""
    g = np.random.default_rng(0)
    x, y, z = (tuple(RATIONALS(g.integers(-9, 9, 2)) / RATIONALS(7)) for _ in range(3))

    def after(second, first):
        return second[0] * first[0], second[0] * first[1] + second[1]

    one = (RATIONALS(1), RATIONALS(0))
    left, right = after(z, after(y, x)), after(after(z, y), x)
    assert all(bool(a == b) for a, b in zip(left, right, strict=True))
    assert all(bool(a == b) for a, b in zip(after(one, x), x, strict=True))
    assert all(bool(a == b) for a, b in zip(after(x, one), x, strict=True))


def test_numbers_worked_by_hand():
    """a = 1/2, F = 1, ones: the state is 2 - 2^-t, and twice u is skipped over."""

    def ones(*shape):
        return RATIONALS(np.ones(shape, dtype=int))

    I = {"u": ones(3, 1), "a": ones(3, 1, 1) / RATIONALS(2), "F": ones(3, 1, 1), "B": ones(3, 1), "C": ones(3, 1)}
    I |= {"skip": 2 * ones(1), "h0": None}
    for form in mamba.ZOH.exact:
        y, h = form.function(**I)
        assert bool(np.all(y[:, 0] == RATIONALS([3, Fraction(7, 2), Fraction(15, 4)]))), form.name
        assert bool(np.all(h == RATIONALS([[Fraction(7, 4)]]))), form.name


# --- where nothing is selected ---------------------------------------------------------------------------------------


def test_constant_steps_and_weights_are_a_convolution():
    I, G = draw("mamba.lti", 9, 2, 3)
    tokens = {n: np.broadcast_to(I[n], (9, *I[n].shape)) for n in ("delta", "B", "C")}
    want, allowed = mamba.ZOH.evaluate(I | tokens), bounds(mamba_lti.recurrent, I)
    for form in operator("mamba.lti").forms:
        assert agree(form.function(**I), want.values(), allowed), form.name
    x = {n: torch.tensor(a, requires_grad=True) for n, a in I.items()}
    results = printed(**x | {n: x[n].expand(9, *x[n].shape) for n in tokens})
    sum((r * torch.tensor(G[n])).sum() for r, n in zip(results, "yh", strict=True)).backward()
    by = bounds(mamba_lti.vjp, I, G)
    for n, d in mamba_lti.vjp(G, **I).items():
        assert np.all(np.abs(d - x[n].grad.numpy()) <= 2 * by[n]), n


def test_selection_is_no_convolution():
    """A token that comes later gives the same, later, if nothing is selected, and something else if it is. Claim M8."""
    T, D, N = 8, 2, 3
    for name, shifts in (("mamba.lti", True), ("mamba.zoh", False)):
        I, _ = draw(name, T, D, N)
        rest = {n: x for n, x in I.items() if n != "h0"}
        early, late = (np.zeros((T, D)) for _ in range(2))
        early[1], late[3] = 1.0, 1.0
        y, shifted = (operator(name).evaluate(rest | {"u": x})["y"] for x in (early, late))
        assert np.array_equal(y[1:-2], shifted[3:]) == shifts


@pytest.mark.parametrize("T", [1, 2, 7, 32])
def test_fourier_transforms_of_twice_the_length(T):
    """Each of three transforms of n numbers is off by 8 u log2 n, relative to its norm (Higham 2002, theorem 24.2)."""
    I, _ = draw("mamba.lti", T, 2, 3)
    rest = {n: x for n, x in I.items() if n != "h0"}
    want, _ = mamba_lti.convolution(**rest)
    z = I["delta"][:, None] * I["A"]
    powers = np.exp(np.arange(T)[:, None, None] * z)
    k = mamba_lti.kernel(powers, I["delta"][:, None] * phi1(z), I["B"], I["C"])
    n = 2 * T
    norms = np.linalg.norm(k, axis=0) * np.linalg.norm(I["u"], axis=0) * math.sqrt(n)
    bound = 8 * UNIT["float64"] * (3 * math.log2(n) + 1) * norms + np.max(
        bounds(mamba_lti.convolution, rest)[0], axis=0
    )
    assert np.all(np.abs(mamba_lti.by_fft(**rest) - want) <= bound)
    if T > 2:
        assert np.max(np.abs(mamba_lti.by_fft(**rest, length=T) - want) / bound) > 1e6  # wraps around


# --- in PyTorch ------------------------------------------------------------------------------------------------------


def test_phi1_in_low_precision():
    """(exp(z) - 1) / z has no digit left at z = -1e-7 in float32; phi1 has all. So have gradients near zero, where the
    quotient rule has none."""
    z = np.float32(-1e-7)
    assert f"{(np.exp(z) - np.float32(1)) / z:.3f}" == "0.596"
    assert abs(phi1(z) - 1) <= 2 * UNIT["float32"]
    for dtype in (torch.float64, torch.float32):
        z = torch.tensor([-30.0, -1.0, -0.25, -0.2, -1e-4, -1e-12, 0.0, 0.3, 2.0], dtype=dtype, requires_grad=True)
        y = in_torch._Phi1.apply(z)
        y.sum().backward()
        exact = z.detach().double().numpy()
        unit = UNIT[str(dtype).removeprefix("torch.")]
        assert np.all(np.abs(y.detach().numpy() - phi1(exact)) <= 8 * unit * phi1(exact))
        assert np.all(np.abs(z.grad.numpy() - phi1_slope(exact)) <= 32 * unit * phi1_slope(exact))


def test_what_is_computed_in_half_precision_is_wide():
    I, _ = draw("mamba.zoh", 9, 2, 3)
    x = {n: torch.tensor(a, dtype=torch.float32) for n, a in I.items()}
    x = {n: a[None] if n not in ("A", "skip") else a for n, a in x.items()}
    half = {n: a.bfloat16() if n in ("u", "delta", "B", "C") else a for n, a in x.items()}
    for form in (in_torch.chunkwise_zoh, in_torch.scan_zoh, in_torch.scan_euler):
        y, h = form(**half)
        assert (y.dtype, h.dtype) == (torch.bfloat16, torch.float32)
        want, state = form(**{n: a.float() for n, a in half.items()})
        assert torch.equal(y, want.bfloat16())
        assert torch.equal(h, state)


# --- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SYSTEMS)
def test_arguments_that_make_no_sense(name):
    I, G = draw(name, 5, 2, 3)
    op = operator(name)
    for change, message in (
        ({"A": I["A"].T}, r"A has shape \(3, 2\): axis D is 3, but another argument has D=2"),
        ({"B": I["B"][:4]}, r"B has shape \(4, 3\): axis T is 4, but another argument has T=5"),
        ({"h0": I["skip"]}, rf"h0 has shape \(2,\); {name} expects \(D, N\)"),
    ):
        for form in op.forms:
            with pytest.raises(ValueError, match=message):
                form.function(**I | change)
        with pytest.raises(ValueError, match=message):
            op.vjp(G, **I | change)
    with pytest.raises(ValueError, match="chunk is 0; it must be at least 1"):
        op.forms[0].function(**I, chunk=0)
    with pytest.raises(ValueError, match="cotangents are those of y; expected y, h"):
        op.vjp({"y": G["y"]}, **I)


def test_arguments_that_make_no_sense_in_pytorch():
    I, _ = draw("mamba.zoh", 5, 2, 3)
    x = {n: torch.tensor(a if n in ("A", "skip") else a[None]) for n, a in I.items()}
    for change, error, message in (
        ({"A": x["A"].T}, ValueError, r"A has shape \(3, 2\): axis D is 3, but u has D=2"),
        ({"A": x["A"] * math.nan}, ValueError, "A contains NaN"),
        ({"u": x["u"].int()}, TypeError, "u is torch.int32; expected a floating-point tensor"),
        ({"chunk": 0}, ValueError, "chunk is 0; it must be at least 1"),
    ):
        with pytest.raises(error, match=message):
            in_torch.chunkwise_zoh(**x | change)


# --- mutants ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "builder",
    [
        Mutant(
            "zoh", "mamba.zoh", "", (), forward=wrong.selective(mamba.HELD.gain), vjp=wrong.selective_vjp("mamba.zoh"),
        ),
        Mutant(
            "euler", "mamba.euler", "", (), forward=wrong.selective(mamba.AT_ONCE.gain),
            vjp=wrong.selective_vjp("mamba.euler"),
        ),
        Mutant("lti", "mamba.lti", "", (), forward=wrong.convolved(), vjp=wrong.convolved_vjp(lambda grads, T: grads)),
    ],
    ids=lambda m: m.name,
)  # fmt: skip
def test_builders_with_nothing_changed_raise_no_alarm(builder):
    for law in ("forward", "vjp", "split"):
        verdict = judge(builder.subject(), law, PROFILES["short"])
        assert verdict.status == "pass", verdict
