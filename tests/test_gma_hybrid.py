"""Both hybrids of local softmax and Gaussian mixture attention: against plain loops, at their limits, in steps.

Two evaluations of one quantity may differ by twice what the gate allows one of them.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from mixproof.reference import gma, gma_hybrid, operator, softmax_attention
from mixproof.verify.arithmetic import natural
from mixproof.verify.judge import PROFILES, judge
from mixproof.verify.numbers.ball import Reading, tolerance
from mixproof.verify.numbers.certified import certified_error, enclose
from mixproof.verify.subjects.mutants import Mutant
from mixproof.verify.subjects.mutants import gma_hybrid as mutants

torch = pytest.importorskip("torch")
hybrid_torch = pytest.importorskip("mixproof.verify.subjects.torch.gma_hybrid")
NAMES = ("gma.hybrid", "gma.hybrid_gated")
SIZES = [(1, 1, 2, 1), (7, 2, 3, 4), (11, 3, 2, 2)]  # T, K, R, V


def draw(name, T, K, R, V, window=4, eps=1e-3, scale=0.7):
    g = np.random.default_rng([T, K, R, V])
    I = {"q": g.standard_normal((T, R)), "k": g.standard_normal((T, R)), "v": g.standard_normal((T, V))}
    I |= {"mu": g.standard_normal((K, R)), "omega": g.standard_normal((K, R)), "alpha": g.standard_normal(K)}
    I |= {"u": 2 * g.standard_normal(T)} if name == NAMES[1] else {"lam": np.float64(0.6)}
    return I | {"scale": scale, "eps": eps, "v_min": 0.01, "window": window}, {"O": g.standard_normal((T, V))}


def arrays(I):
    return {n: x for n, x in I.items() if isinstance(x, np.ndarray | np.floating)}


def lifted(I):
    reading = Reading(natural("float64"))
    return reading, I | {n: reading.ball(x) for n, x in arrays(I).items()}


def allowed(function, I):
    reading, balls = lifted(I)
    y = function(**balls)
    bound = tolerance(y[0] if isinstance(y, tuple) else y, "float64")
    assert not reading.vacuous
    return bound


def plain(q, k, v, mu, omega, alpha, scale, eps, v_min, window, lam=None, u=None):
    """Row by row: a softmax of the last tokens, responsibilities as posteriors of normal densities, sums over keys."""
    var = torch.log1p(torch.exp(omega)) + v_min
    pi = torch.softmax(alpha, 0)

    def gamma(x):
        joint = pi * torch.exp(-((x - mu) ** 2 / var).sum(1) / 2) / var.prod(1).sqrt()
        return joint / joint.sum()

    GQ, GK, rows = [gamma(x) for x in q], [gamma(x) for x in k], []
    for i in range(len(q)):
        near = range(max(0, i - window + 1), i + 1)
        e = [torch.exp(scale * (q[i] @ k[j])) for j in near]
        local = sum((w * v[j] for w, j in zip(e, near, strict=True)), start=0 * v[i]) / (sum(e) if e else 1)
        far = range(i + 1) if lam is None else range(i - window + 1)
        At = [GQ[i] @ GK[j] for j in far]
        other = sum((a * v[j] for a, j in zip(At, far, strict=True)), start=0 * v[i])
        if lam is None:
            g = torch.sigmoid(u[i])
            rows.append(g * local + (1 - g) * other / (sum(At) + eps))
        else:
            rows.append((local + lam * other) / ((1 if e else 0) + lam * sum(At, start=0 * lam) + eps))
    return torch.stack(rows)


@pytest.mark.parametrize("window", [0, 1, 3, 20])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_plain_transcription(name, sizes, window):
    I, G = draw(name, *sizes, window)
    o = operator(name)
    x = {n: torch.tensor(a, requires_grad=True) for n, a in arrays(I).items()}
    O = plain(**(I | x))
    O.backward(torch.tensor(G["O"]))
    chunkwise = o.forms[0].function
    bound = allowed(chunkwise, I)
    found = [form.function(**I) for form in o.forms] + [chunkwise(**I, chunk=c) for c in (1, 2, 5)]
    for y in found:
        assert np.all(np.abs(y - O.detach().numpy()) <= 2 * bound)
    reading, balls = lifted(I)
    bounds = o.vjp({"O": reading.ball(G["O"])}, **balls)
    assert not reading.vacuous
    for n, d in o.vjp(G, **I).items():
        want = np.zeros_like(d) if x[n].grad is None else x[n].grad.numpy()
        assert np.all(np.abs(d - want) <= 2 * tolerance(bounds[n], "float64")), n


@pytest.mark.parametrize("name", NAMES)
def test_forms_and_chunks_are_enclosed(name):
    I, _ = draw(name, 9, 2, 3, 2, window=3)
    chunkwise, _, recurrent = (form.function for form in operator(name).forms)
    bound, truth = allowed(chunkwise, I), enclose(recurrent, I)
    found = [form.function(**I) for form in operator(name).forms] + [chunkwise(**I, chunk=c) for c in (1, 2, 3, 4, 9)]
    for O in found:
        assert np.all(certified_error(O, truth) <= bound)


# --- one normaliser --------------------------------------------------------------------------------------------------


def test_without_the_far_part_it_is_local_softmax():
    """lam = 0: softmax of the window over 1 + eps; with a window of all tokens, causal softmax attention."""
    I, _ = draw(NAMES[0], 8, 2, 3, 2, window=8)
    I["lam"] = np.float64(0.0)
    full = {n: I[n] for n in ("q", "k", "v", "scale")} | {"causal": True}
    want = softmax_attention.parallel(**full) / (1 + I["eps"])
    bound = allowed(gma_hybrid.chunkwise, I) + 2 * allowed(softmax_attention.parallel, full)
    for form in operator(NAMES[0]).forms:
        assert np.all(np.abs(form.function(**I) - want) <= bound)
    far = I | {"lam": np.float64(0.6)}  # nothing is before the window
    assert np.array_equal(gma_hybrid.parallel(**far), gma_hybrid.parallel(**I))


def test_without_a_window_it_is_gaussian_mixture_attention():
    """window = 0: causal GMA with eps / lam."""
    I, _ = draw(NAMES[0], 8, 2, 3, 2, window=0)
    plainly = {n: I[n] for n in ("q", "k", "v", "mu", "omega", "alpha", "v_min")} | {"eps": I["eps"] / 0.6}
    want, bound = gma.recurrent(**plainly)[0], allowed(gma.chunkwise, plainly)
    for form in operator(NAMES[0]).forms:
        assert np.all(np.abs(form.function(**I) - want) <= bound + 2 * allowed(form.function, I))


@pytest.mark.parametrize("window", [1, 3, 8])
def test_every_past_token_is_read_once(window):
    """v = identity reads the weights off: positive up to one's own token, zero after; and at lam = 0 in the window."""
    I, _ = draw(NAMES[0], 8, 2, 3, 2, window)
    I["v"] = np.eye(8)
    i, j = np.arange(8)[:, None], np.arange(8)
    for form in operator(NAMES[0]).forms:
        A, local = form.function(**I), form.function(**I | {"lam": np.float64(0.0)})
        assert np.array_equal(A > 0, j <= i)
        assert np.array_equal(local > 0, (j <= i) & (j > i - window))


def test_the_window_has_a_mass_of_one():
    """So what is far weighs lam At 1 / (1 + lam At 1 + eps), whatever the local logits are."""
    I, _ = draw(NAMES[0], 9, 2, 3, 1, window=3)
    early = np.arange(9)[:, None] < 6  # far from the last token
    I["v"] = early.astype(float)
    shares = [gma_hybrid.chunkwise(**I | {"scale": scale})[-1, 0] for scale in (0.0, 0.7, 5.0)]
    bound = 2 * max(allowed(gma_hybrid.chunkwise, I | {"scale": scale})[-1, 0] for scale in (0.0, 0.7, 5.0))
    assert max(shares) - min(shares) <= bound
    GQ, GK = (gma.responsibilities(I[n], I["mu"], I["omega"], I["alpha"], I["v_min"]) for n in "qk")
    mass = 0.6 * (GQ[-1] @ GK[:6].T).sum()
    assert abs(shares[0] - mass / (1 + mass + I["eps"])) <= 2 * bound


def test_a_mass_of_the_largest_has_no_gradient_at_ties():
    """sum exp(s - max s) of s = (t, 0) is 1 + exp(-|t|): slopes 1 and -1 on either side of zero; the reading that is
    used, a mass of one, has none."""
    I, _ = draw(NAMES[0], 3, 1, 1, 1, window=2)
    I |= {"q": np.ones((3, 1)), "v": np.array([[1.0], [0.0], [0.0]]), "eps": 1e-3, "scale": 1.0}
    t = 2.0**-20

    def slopes(form):
        O = [float(form(**I | {"k": np.array([[0.5], [step], [0.0]])})[-1, 0]) for step in (-t, 0.0, t)]
        return (O[1] - O[0]) / t, (O[2] - O[1]) / t

    left, right = slopes(mutants.one(mass=mutants.unlike_largest))
    assert left * right < -1e-3
    assert max(np.abs(slopes(gma_hybrid.parallel))) < 2.0**-30


# --- a gate ----------------------------------------------------------------------------------------------------------


def test_open_and_closed_gates():
    """g = 1 is local softmax and g = 0 is GMA, bit for bit."""
    I, _ = draw(NAMES[1], 8, 2, 3, 2, window=8)
    full = {n: I[n] for n in ("q", "k", "v", "scale")} | {"causal": True}
    plainly = {n: I[n] for n in ("q", "k", "v", "mu", "omega", "alpha", "eps", "v_min")}
    ones = np.ones(8)
    assert np.array_equal(gma_hybrid.gated_parallel(**I | {"u": 800 * ones}), softmax_attention.parallel(**full))
    for form, alone in zip(operator(NAMES[1]).forms, (gma.chunkwise, gma.parallel, gma.recurrent), strict=True):
        O, want = form.function(**I | {"u": -800 * ones}), alone(**plainly)[0]
        assert np.all(
            np.abs(O - want) <= allowed(gma.chunkwise, plainly)
        )  # responsibilities of queries and keys at once


def test_a_half_open_gate_is_the_mean():
    I, _ = draw(NAMES[1], 8, 2, 3, 2, window=3)
    closed, half, wide = (gma_hybrid.gated_chunkwise(**I | {"u": np.full(8, u)}) for u in (-800.0, 0.0, 800.0))
    assert np.all(np.abs(half - (closed + wide) / 2) <= 2 * allowed(gma_hybrid.gated_chunkwise, I | {"u": np.zeros(8)}))


# --- the layer -------------------------------------------------------------------------------------------------------


def layer_and_tokens(window=4, T=11):
    torch.manual_seed(0)
    layer = hybrid_torch.GMAHybrid(heads=2, components=3, channels=2, window=window, chunk=4).double()
    torch.nn.init.normal_(layer.log_lam)
    return layer, tuple(torch.randn(2, T, 2, n, dtype=torch.float64) for n in (2, 2, 3))


def head(layer, tokens, b, h):
    mixture = {n: getattr(layer, n)[h].detach().numpy() for n in ("mu", "omega", "alpha")}
    lam = np.float64(layer.log_lam[h].detach().exp())
    I = {n: x[b, :, h].numpy() for n, x in zip("qkv", tokens, strict=True)}
    return I | mixture | {"lam": lam, "eps": layer.eps, "v_min": layer.v_min, "window": layer.window}


@pytest.mark.parametrize("window", [0, 1, 4, 20])
def test_the_layer_is_the_function(window):
    layer, tokens = layer_and_tokens(window)
    O = layer(*tokens)[0].detach().numpy()
    for b in range(2):
        for h in range(2):
            I = head(layer, tokens, b, h)
            assert np.all(np.abs(O[b, :, h] - gma_hybrid.recurrent(**I)) <= 2 * allowed(gma_hybrid.chunkwise, I))


@pytest.mark.parametrize("window", [0, 1, 4, 20])
@pytest.mark.parametrize("prefix", [0, 1, 5, 10])
def test_a_prefix_and_then_token_by_token(window, prefix):
    """Prefill, then decode, from a state that does not grow."""
    layer, tokens = layer_and_tokens(window)
    O, state = layer(*(x[:, :prefix] for x in tokens))
    rows = [O]
    for t in range(prefix, 11):
        O, state = layer(*(x[:, t : t + 1] for x in tokens), state)
        rows.append(O)
        assert state.k.shape[1] == state.v.shape[1] == min(max(window - 1, 0), t + 1)
    got, want = torch.cat(rows, dim=1).detach().numpy(), layer(*tokens)[0].detach().numpy()
    bound = 2 * allowed(gma_hybrid.chunkwise, head(layer, tokens, 0, 0))
    assert np.all(np.abs(got[0, :, 0] - want[0, :, 0]) <= bound)


def test_a_layer_loads_what_another_saved():
    layer, tokens = layer_and_tokens()
    other = hybrid_torch.GMAHybrid(heads=2, components=3, channels=2, chunk=4).double()
    assert not torch.equal(other(*tokens)[0], layer(*tokens)[0])
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(*tokens)[0], layer(*tokens)[0])
    layer(*tokens)[0].sum().backward()
    assert all(torch.all(p.grad.isfinite()) and p.grad.any() for p in layer.parameters())


def test_tokens_in_half_precision_are_read_once():
    """The gradient of keys comes from logits and from responsibilities, and is rounded when both are in."""
    layer, tokens = layer_and_tokens()
    layer = layer.float()
    halves = [x.bfloat16().requires_grad_() for x in tokens]
    wide = [x.detach().float().requires_grad_() for x in halves]
    for given in (halves, wide):
        layer(*given)[0].float().pow(2).sum().backward()
    O = layer(*halves)[0]
    assert O.dtype == torch.bfloat16
    outputs = layer(*wide)[0]
    assert torch.equal(O, outputs.bfloat16())
    gradient = torch.autograd.grad(outputs, wide, 2 * O.float())
    for x, d in zip(halves, gradient, strict=True):
        assert torch.equal(x.grad, d.bfloat16())


# --- what makes no sense ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_arguments_of_the_reference(name):
    I, G = draw(name, 5, 2, 3, 2)
    o = operator(name)
    calls = [form.function for form in o.forms] + [lambda **x: o.vjp(G, **x)]
    for change, error, message in (
        ({"window": -1}, ValueError, "window is -1; it must not be negative"),
        ({"window": 2.0}, TypeError, "window is 2.0; expected a whole number"),
        ({"window": True}, TypeError, "window is True; expected a whole number"),
        ({"eps": -1.0}, ValueError, "eps is -1.0"),
        ({"k": I["k"][:4]}, ValueError, r"k has shape \(4, 3\): axis T is 4"),
        ({"mu": I["mu"][:, :2]}, ValueError, r"mu has shape \(2, 2\): axis R is 2"),
    ):
        for call in calls:
            with pytest.raises(error, match=message):
                call(**I | change)
    with pytest.raises(ValueError, match="chunk is 0; it must be at least 1"):
        o.forms[0].function(**I, chunk=0)
    with pytest.raises(ValueError, match=r"the cotangent of O has shape \(5, 1\)"):
        o.vjp({"O": G["O"][:, :1]}, **I)


def test_arguments_of_the_layer():
    layer, (q, k, v) = layer_and_tokens()
    made = hybrid_torch.GMAHybrid
    for call, message in (
        (lambda: made(2, 0, 2), "components is 0; it must be at least 1"),
        (lambda: made(2, 3, 2, window=-1), "window is -1; it must be finite and not negative"),
        (lambda: made(2, 3, 2, eps=math.nan), "eps is nan; it must be finite and not negative"),
        (lambda: layer(q[..., :1], k[..., :1], v), r"mu has shape \(2, 3, 2\): axis R is 2, but q has R=1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("name", NAMES)
def test_the_builder_with_nothing_changed_raises_no_alarm(name):
    parts = (mutants.one(), mutants.one_vjp(lambda d, other: d))
    if name == NAMES[1]:
        parts = (mutants.mixed(), mutants.mixed_vjp(lambda d, *rest: d))
    same = Mutant("same", name, "nothing changed", (), *parts)
    for law in ("forward", "vjp", "causality", "forms"):
        assert judge(same.subject(), law, PROFILES["short"]).status in ("pass", "not applicable"), law
