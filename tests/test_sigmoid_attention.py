"""Sigmoid attention, alone and with the hybrid norm, against PyTorch and a transcription in Python floats; what sets it
apart from softmax attention; claims of the survey; the layer that decodes.

Two evaluations of one quantity may differ by twice what the gate allows one of them.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from mixproof.reference import operator, sigmoid_attention, sigmoid_hybrid, softmax_attention
from mixproof.reference.primitives import sigmoid
from mixproof.verify.arithmetic import natural
from mixproof.verify.cells import laws_for
from mixproof.verify.judge import PROFILES, judge
from mixproof.verify.numbers.ball import Reading, tolerance
from mixproof.verify.subjects.mutants import Mutant
from mixproof.verify.subjects.mutants import sigmoid_attention as mutants

torch = pytest.importorskip("torch")
from mixproof.verify.subjects.torch import sigmoid_attention as eager  # noqa: E402
from mixproof.verify.subjects.torch.sigmoid_attention import SigmoidAttention  # noqa: E402

ALONE, HYBRID = operator("sigmoid_attention"), operator("sigmoid_attention.hybrid")
SIZES = [(1, 0, 1, 1), (5, 3, 4, 2), (4, 0, 2, 3), (7, 1, 3, 5)]  # T, P, K, V
HYBRID_SIZES = [(1, 1, 1, 1, 2), (5, 2, 4, 3, 6), (7, 3, 2, 1, 4)]  # T, N, K, V, E


def draw(T, P, K, V, b=-0.75, scale=None, seed=0):
    g = np.random.default_rng([seed, T, P, K, V])
    I = {"q": g.standard_normal((T, K)), "k": g.standard_normal((T, K)), "v": g.standard_normal((T, V))}
    I |= {"b": np.float64(b), "scale": scale, "K0": g.standard_normal((P, K)), "V0": g.standard_normal((P, V))}
    upstream = {"O": g.standard_normal((T, V)), "Kc": g.standard_normal((P + T, K))}
    return I, upstream | {"Vc": g.standard_normal((P + T, V))}


def draw_hybrid(T, N, K, V, E, b=-0.75, eps=1e-5, seed=0):
    g = np.random.default_rng([seed, T, N, K, V, E])
    shapes = {"x": (T, E), "q": (T, N, K), "k": (T, N, K), "v": (T, N, V), "W_O": (N, V, E), "gain": (E,), "bias": (E,)}
    I = {n: g.standard_normal(shape) for n, shape in shapes.items()} | {"b": np.float64(b), "eps": eps}
    return {x.name: I[x.name] for x in HYBRID.inputs if x.name in I}, {"Y": g.standard_normal((T, E))}


def is_array(x):
    return isinstance(x, np.ndarray | np.floating)


def lifted(I):
    reading = Reading(natural("float64"))
    return reading, {n: reading.ball(x) if is_array(x) else x for n, x in I.items()}


def allowed(I, op=ALONE):
    """What the gate allows the token output to be off by."""
    reading, balls = lifted(I)
    bound = tolerance(next(iter(op.evaluate(balls).values())), "float64")
    assert not reading.vacuous
    return bound


def allowed_vjp(I, G, op):
    reading, balls = lifted(I)
    bounds = op.vjp({n: reading.ball(c) for n, c in G.items()}, **balls)
    assert not reading.vacuous
    return {n: tolerance(bound, "float64") for n, bound in bounds.items()}


def leaves(I):
    return {n: torch.tensor(x, requires_grad=True) if is_array(x) else x for n, x in I.items()}


# --- independent transcriptions --------------------------------------------------------------------------------------


def by_pytorch(q, k, v, b, scale, K0, V0):
    """As released code has it: logits with the bias, those of later keys -inf, then the sigmoid."""
    Kc, Vc = torch.cat([K0, k]), torch.cat([V0, v])
    later = torch.ones(len(q), len(Kc), dtype=torch.bool).triu(1 + len(K0))
    logits = torch.einsum("ik,jk->ij", q, Kc) * (q.shape[1] ** -0.5 if scale is None else scale) + b
    return logits.masked_fill(later, -math.inf).sigmoid() @ Vc, Kc, Vc


def by_hand(q, k, v, b, scale, K0, V0):
    """One number at a time, sums rounded once."""
    keys, values = np.concatenate([K0, k]), np.concatenate([V0, v])
    scale = 1 / math.sqrt(q.shape[1]) if scale is None else scale
    O = np.empty_like(v)
    for t, c in np.ndindex(*v.shape):
        logits = [math.fsum(q[t] * keys[j]) * scale + b for j in range(len(K0) + t + 1)]
        O[t, c] = math.fsum(values[j, c] / (1 + math.exp(-z)) for j, z in enumerate(logits))
    return O


@pytest.mark.parametrize("scale", [None, 0.375])
@pytest.mark.parametrize("sizes", SIZES)
def test_it_is_sigmoid_attention(sizes, scale):
    I, _ = draw(*sizes, scale=scale)
    bound = allowed(I)
    O, Kc, Vc = (y.detach().numpy() for y in by_pytorch(**leaves(I)))
    found = [form.function(**I) for form in ALONE.forms]
    found += [sigmoid_attention.blockwise(**I, chunk=c) for c in (1, 2, 3, 5)]
    for got in found:
        for want in (O, by_hand(**I)):
            assert np.all(np.abs(got[0] - want) <= 2 * bound)
        assert np.array_equal(got[1], Kc)
        assert np.array_equal(got[2], Vc)


@pytest.mark.parametrize("b", [-20.0, -0.75, 20.0])
@pytest.mark.parametrize("sizes", SIZES)
def test_vjp_is_that_of_autograd(sizes, b):
    """Of 1 - A autograd has few digits left where b is large."""
    I, G = draw(*sizes, b, seed=1)
    x = leaves(I)
    torch.autograd.backward(by_pytorch(**x), [torch.tensor(G[y.name]) for y in ALONE.outputs])
    bounds = allowed_vjp(I, G, ALONE)
    for n, d in sigmoid_attention.vjp(G, **I).items():
        assert np.all(np.abs(d - x[n].grad.numpy()) <= 2 * bounds[n]), n


def test_vjp_where_weights_are_close_to_one():
    """At a logit of z = 40 the slope is e^-40, to sixteen digits; A (1 - A) is zero there."""
    one, z = np.ones((1, 1)), 40.0
    I = {"q": one, "k": one, "v": one, "b": np.float64(z - 1), "scale": 1.0}
    db = sigmoid_attention.vjp({"O": one, "Kc": 0 * one, "Vc": 0 * one}, **I)["b"]
    assert abs(db - math.exp(-z)) <= 2.0**-48 * math.exp(-z)
    assert sigmoid(np.float64(z)) * (1 - sigmoid(np.float64(z))) == 0


def hybrid_by_pytorch(x, q, k, v, b, W_O, gain, bias, eps):
    """Heads one after the other, and F.layer_norm."""
    N, V = v.shape[1:]
    heads = [by_pytorch(q[:, h], k[:, h], v[:, h], b, None, k[:0, h], v[:0, h])[0] for h in range(N)]
    U = torch.cat(heads, dim=1) @ W_O.reshape(N * V, -1)
    return x + torch.nn.functional.layer_norm(U, U.shape[1:], gain, bias, eps)


@pytest.mark.parametrize("sizes", HYBRID_SIZES)
def test_hybrid_is_the_published_block(sizes):
    I, G = draw_hybrid(*sizes)
    x = leaves(I)
    Y = hybrid_by_pytorch(**x)
    Y.backward(torch.tensor(G["Y"]))
    found = [form.function(**I) for form in HYBRID.forms] + [sigmoid_hybrid.blockwise(**I, chunk=c) for c in (1, 3)]
    for got in found:
        assert np.all(np.abs(got - Y.detach().numpy()) <= 2 * allowed(I, HYBRID))
    bounds = allowed_vjp(I, G, HYBRID)
    for n, d in sigmoid_hybrid.vjp(G, **I).items():
        assert np.all(np.abs(d - x[n].grad.numpy()) <= 2 * bounds[n]), n


# --- what sets it apart from softmax attention -----------------------------------------------------------------------


def test_parts_of_the_keys_add_up():
    """Nothing is rescaled: the sum over an arbitrary partition is the whole, up to the rounding of the sum."""
    I, _ = draw(1, 8, 3, 2)
    parts = [[8, 0, 3], [1], [7, 2], [4, 5, 6]]
    keys, values = np.concatenate([I["K0"], I["k"]]), np.concatenate([I["V0"], I["v"]])
    rows = [
        sigmoid_attention.weights(I["q"], keys[p], I["b"], np.ones((1, len(p)), dtype=bool)) @ values[p] for p in parts
    ]
    assert np.all(np.abs(sum(rows) - sigmoid_attention.parallel(**I)[0]) <= 2 * allowed(I))


def test_mass_is_what_it_is():
    """Queries of zero: row i has mass (i + 1) / 2 without a bias, (i + 1) / (n + 1) with -log n; less with less b."""
    n = 32
    zero, one = np.zeros((n, 2)), np.ones((n, 1))
    rows = np.arange(1, n + 1)[:, None]

    def mass(b):
        return sigmoid_attention.parallel(zero, zero, one, np.float64(b))[0]

    assert np.array_equal(mass(0.0), rows / 2)
    assert np.max(np.abs(mass(-math.log(n)) * (n + 1) - rows)) <= 2.0**-44
    assert not np.any(mass(-math.inf))
    assert np.array_equal(mass(math.inf), rows)


def test_opposite_logits_share_the_mass_of_a_key():
    """sigmoid(z) + sigmoid(-z) = 1: queries, scale and bias with the other sign give the rest of each value."""
    I, _ = draw(5, 3, 4, 2)
    opposite = I | {"q": -I["q"], "b": -I["b"]}
    total = np.cumsum(np.concatenate([I["V0"], I["v"]]), axis=0)[3:]
    for form in ALONE.forms:
        both = form.function(**I)[0] + form.function(**opposite)[0]
        assert np.all(np.abs(both - total) <= 2 * (allowed(I) + allowed(opposite)))


def test_a_vector_added_to_all_keys_is_felt():
    I, _ = draw(5, 3, 4, 2)
    moved = I | {n: I[n] + 1.0 for n in ("k", "K0")}
    assert np.max(np.abs(sigmoid_attention.parallel(**moved)[0] - sigmoid_attention.parallel(**I)[0])) > 0.1


def test_bias_of_the_keys_seen_is_another_system():
    """-log(i + 1) for row i instead of -log n: the first row of four weighs its key with 1/2, not 1/5."""
    zero, one = np.zeros((4, 1)), np.ones((4, 1))
    O = sigmoid_attention.parallel(zero, zero, one, np.float64(-math.log(4)))[0]
    assert abs(O[0, 0] - 1 / 5) <= 2.0**-52
    by_row = [sigmoid(np.float64(-math.log(i + 1))) * (i + 1) for i in range(4)]
    assert abs(by_row[0] - 1 / 2) <= 2.0**-52
    assert abs(by_row[3] - O[3, 0]) <= 2.0**-52


# --- what the survey claims ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("logit", "b", "mass"), [(0.0, 0.0, 16.0), (10.0, -math.log(32), 31.95)])
def test_it_is_not_the_smoother_map(logit, b, mass):
    """All 32 values moved by d move the last output by d under softmax; here by 16 d without a bias, and by 31.95 d
    with -log n where the logits are ten: its Lipschitz constant is the mass of the row."""
    n = 32
    q = k = np.full((n, 1), math.sqrt(logit))
    v = np.random.default_rng(0).standard_normal((n, 1))

    def moved(function):
        return (function(v + 1.0) - function(v))[-1, 0]

    ours = moved(lambda v: sigmoid_attention.parallel(q, k, v, np.float64(b), scale=1.0)[0])
    theirs = moved(lambda v: softmax_attention.parallel(q, k, v, scale=1.0, causal=True))
    assert abs(theirs - 1) <= 2.0**-45
    assert abs(ours - mass) <= 0.005


def test_slope_is_at_most_a_quarter():
    """|dO_i / dq_i| <= scale / 4 sum |k_j| |v_j|, attained at a logit of zero."""
    I, _ = draw(6, 2, 3, 1)
    keys, values = np.concatenate([I["K0"], I["k"]]), np.concatenate([I["V0"], I["v"]])
    for t in range(6):
        G = {"O": np.eye(6)[t][:, None], "Kc": 0 * keys, "Vc": 0 * values}
        slope = np.linalg.norm(sigmoid_attention.vjp(G, **I)["q"][t])
        seen = slice(0, t + 3)
        assert slope <= 3**-0.5 / 4 * np.sum(np.linalg.norm(keys[seen], axis=1) * np.abs(values[seen, 0]))
    one = np.ones((1, 1))
    I = {"q": 0 * one, "k": 2 * one, "v": 3 * one, "b": np.float64(0), "scale": 0.5}
    assert sigmoid_attention.vjp({"O": one, "Kc": 0 * one, "Vc": 0 * one}, **I)["q"].tolist() == [[0.5 * 2 * 3 / 4]]


def test_norm_hides_the_bias_where_logits_vanish():
    """Weights of 1/2 and of 1 / (n + 1) differ by a factor, which a norm with eps = 0 takes off: the step that the
    residual stream gets no longer grows with the length."""
    I, _ = draw_hybrid(6, 2, 3, 2, 4, eps=0.0)
    I |= {"q": 0 * I["q"]}
    biases = [I | {"b": np.float64(b)} for b in (0.0, -math.log(64))]
    raw = [sigmoid_attention.parallel(J["q"][:, 0], J["k"][:, 0], J["v"][:, 0], J["b"])[0] for J in biases]
    assert np.all(np.abs(raw[0]) > 30 * np.abs(raw[1]))
    bounds = sum(allowed(J, HYBRID) for J in biases)
    assert np.all(np.abs(sigmoid_hybrid.parallel(**biases[0]) - sigmoid_hybrid.parallel(**biases[1])) <= bounds)


# --- hazards ---------------------------------------------------------------------------------------------------------


def test_many_small_weights_do_not_stall():
    """4096 weights of about 1 / 4097. With weights and their running sum in bfloat16 it stops at 1 / 8."""
    zero, one, b = torch.zeros(1, 1, 4095, 1), torch.ones(1, 1, 4095, 1), torch.tensor([-math.log(4096)])
    q, k, v = (x[:, :, :1].bfloat16() for x in (zero, zero, one))
    for function in (eager.dense, eager.blockwise):
        O, _, _ = function(q, k, v, b, K0=zero, V0=one)
        assert O.dtype == torch.bfloat16
        assert abs(O.item() - 4096 / 4097) <= 2.0**-8
    total, weight = torch.zeros((), dtype=torch.bfloat16), b.bfloat16().sigmoid()[0]
    for _ in range(4096):
        total = total + weight
    assert (weight.item(), total.item()) == (4096**-1 * (1 + 2.0**-7), 0.125)


def test_small_weights_keep_their_digits():
    """At a logit of -60; 1/2 + 1/2 tanh(Z / 2) has none left."""
    one = np.ones((1, 1), dtype=np.float32)
    O, _, _ = sigmoid_attention.parallel(60 * one, -one, one, np.float32(0))
    assert abs(O[0, 0] / math.exp(-60) - 1) <= 64 * 2.0**-24
    assert np.float32(0.5) + np.float32(0.5) * np.tanh(np.float32(-30)) == 0


# --- arguments -------------------------------------------------------------------------------------------------------


def test_arguments_that_make_no_sense():
    I, G = draw(5, 3, 4, 2)
    for form in ALONE.forms:
        with pytest.raises(ValueError, match="K0 is given without V0; a cache has both"):
            form.function(**I | {"V0": None})
    for call, message in (
        (lambda: sigmoid_attention.parallel(**I | {"b": np.ones(5)}), r"b has shape \(5,\); sigmoid_attention expects"),
        (lambda: sigmoid_attention.blockwise(**I, chunk=0), "chunk is 0; it must be at least 1"),
        (
            lambda: sigmoid_attention.vjp(G | {"Vc": G["O"]}, **I),
            r"the cotangent of Vc has shape \(5, 2\); Vc has shape \(8, 2\)",
        ),
        (lambda: sigmoid_attention.vjp({"O": G["O"]}, **I), "cotangents are those of O; expected O, Kc, Vc"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    I, G = draw_hybrid(5, 2, 4, 3, 6)
    for form in HYBRID.forms:
        with pytest.raises(ValueError, match=r"W_O has shape \(2, 3, 5\): axis E is 5, but another argument has E=6"):
            form.function(**I | {"W_O": I["W_O"][..., :5]})
    with pytest.raises(ValueError, match=r"gain has shape \(5,\): axis E is 5, but another argument has E=6"):
        sigmoid_hybrid.vjp(G, **I | {"gain": I["gain"][:5]})


def test_arguments_that_make_no_sense_in_pytorch():
    x, b = torch.ones(1, 3, 2, 4), torch.zeros(2)
    for function in (eager.dense, eager.blockwise):
        for arguments, message in (
            ((x, x, x, b, math.nan), "scale is nan; it must be finite"),
            ((x, x, x, b[:1]), r"b has shape \(1,\): axis H is 1, but q has H=2"),
            ((x, x, x, b, None, x.transpose(1, 2)), "K0 is given without V0; a cache has both"),
            ((x, x, x, b * math.nan), "b contains NaN"),
        ):
            with pytest.raises(ValueError, match=message):
                function(*arguments)
    with pytest.raises(ValueError, match="chunk is 0; it must be at least 1"):
        eager.blockwise(x, x, x, b, chunk=0)
    I = {n: torch.tensor(a) if is_array(a) else a for n, a in draw_hybrid(3, 2, 4, 3, 6)[0].items()}
    I |= {n: I[n][None] for n in ("x", "q", "k", "v")}
    with pytest.raises(ValueError, match=r"eps is -1\.0; it must be finite and not negative"):
        eager.hybrid(**I | {"eps": -1.0})
    with pytest.raises(ValueError, match="scale is inf; it must be finite"):
        eager.hybrid(**I | {"scale": math.inf})


# --- the layer -------------------------------------------------------------------------------------------------------


def made(**options):
    torch.manual_seed(0)
    return SigmoidAttention(**{"d_model": 12, "heads": 3, "tokens": 16, "chunk": 4} | options).double()


def tokens(T=9):
    return torch.randn(2, T, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_layer_is_the_function():
    layer, x = made(eps=0.25), tokens()
    q, k, v = ((x @ W.weight.T).reshape(2, 9, 3, 4) for W in (layer.W_Q, layer.W_K, layer.W_V))
    want = eager.hybrid(x, q, k, v, layer.b, layer.W_O, layer.gain, layer.bias, eps=0.25, chunk=4)
    assert torch.equal(layer(x)[0], want)
    for changed in (made(), made(eps=0.25, heads=2), made(eps=0.25, tokens=17)):
        assert not torch.equal(changed(x)[0], want)


def test_a_new_layer_weighs_keys_by_the_length():
    layer = made()
    assert abs(layer.b.item() + math.log(16)) <= 2.0**-20
    assert torch.equal(layer.gain, torch.ones(12, dtype=torch.float64))
    assert torch.count_nonzero(layer.bias) == 0
    assert 0.8 / math.sqrt(12) < layer.W_O.detach().abs().max() <= 1 / math.sqrt(12)


@pytest.mark.parametrize("prefill", [0, 1, 4, 9])
def test_decoding_is_the_full_pass(prefill):
    """Prefill, then token by token."""
    layer, x = made(), tokens()
    full, cache = layer(x)
    rows, state = [], None
    if prefill:
        Y, state = layer(x[:, :prefill])
        rows.append(Y)
    for t in range(prefill, 9):
        Y, state = layer(x[:, t : t + 1], state)
        rows.append(Y)
    assert torch.max(torch.abs(torch.cat(rows, dim=1) - full)) <= 2.0**-44  # the norm amplifies roundings
    assert torch.max(torch.abs(state.K - cache.K)) <= 8 * 2.0**-53
    if prefill < 9:
        forgot, _ = layer(x[:, 8:])
        assert torch.max(torch.abs(forgot[:, 0] - full[:, 8])) > 0.01


def test_parameters_survive_saving_and_all_learn():
    layer, x = made(), tokens()
    copy = made(chunk=64, tokens=99)
    copy.reset_parameters()
    assert not torch.equal(copy(x)[0], layer(x)[0])
    copy.load_state_dict(layer.state_dict())
    assert torch.max(torch.abs(copy(x)[0] - layer(x)[0])) <= 2.0**-44
    layer(x)[0].square().sum().backward()
    assert all(torch.count_nonzero(p.grad) == p.numel() for p in layer.parameters())
    assert sum(p.numel() for p in layer.parameters()) == 4 * 12**2 + 1 + 2 * 12


def test_autocast_rounds_nothing():
    I = {n: torch.tensor(a).float() if is_array(a) else a for n, a in draw_hybrid(5, 2, 4, 3, 6)[0].items()}
    I |= {n: I[n][None] for n in ("x", "q", "k", "v")}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        Y = eager.hybrid(**I)
    assert torch.equal(Y, eager.hybrid(**I))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 5}, "d_model is 12, which 5 heads do not divide"),
        ({"tokens": 0}, "tokens is 0; it must be at least 1"),
        ({"chunk": 0}, "chunk is 0; it must be at least 1"),
        ({"eps": -1.0}, "eps is -1.0; it must be finite and not negative"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        made(**options)


# --- mutants ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mutant",
    [
        Mutant("unchanged", "sigmoid_attention", "", (), mutants.attend(), mutants.attend_vjp()),
        Mutant("unchanged", "sigmoid_attention.hybrid", "", (), mutants.hybrid(), mutants.hybrid_vjp()),
    ],
    ids=lambda m: m.operator,
)
def test_builders_with_nothing_changed_raise_no_alarm(mutant):
    subject = mutant.subject()
    found = {law: judge(subject, law, PROFILES["short"]).status for law in laws_for(subject.operator)}
    assert set(found.values()) <= {"pass", "not applicable"}, found
    assert {found[law] for law in ("forward", "vjp")} == {"pass"}
