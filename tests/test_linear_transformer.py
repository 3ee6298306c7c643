"""The linear transformer against the published recurrence; its feature map where floats are unkind; its gradients.

Two evaluations of one quantity may differ by twice what the gate allows one of them.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from mixproof.reference import linear_transformer, operator
from mixproof.reference.primitives import elu_plus_one
from mixproof.verify.arithmetic import natural
from mixproof.verify.judge import PROFILES, judge
from mixproof.verify.numbers.ball import Reading, tolerance
from mixproof.verify.numbers.certified import certified_error, enclose
from mixproof.verify.subjects.mutants import Mutant
from mixproof.verify.subjects.mutants import linear_transformer as mutants

torch = pytest.importorskip("torch")
linear_transformer_torch = pytest.importorskip("mixproof.verify.subjects.torch.linear_transformer")
OPERATOR = operator("linear_transformer")
U32 = np.float32
SIZES = [(1, 2, 1), (2, 4, 3), (7, 3, 4), (13, 2, 5)]  # T, K, V


def draw(T, K, V, eps=0.0, state=True):
    g = np.random.default_rng([T, K, V])
    I = {"q": g.standard_normal((T, K)), "k": g.standard_normal((T, K)), "v": g.standard_normal((T, V)), "eps": eps}
    if state:
        I |= {"S0": g.standard_normal((K, V)), "z0": g.random(K)}
    return I, {"O": g.standard_normal((T, V)), "S": g.standard_normal((K, V)), "z": g.standard_normal(K)}


def lifted(I):
    reading = Reading(natural("float64"))
    return reading, {n: reading.ball(x) if np.ndim(x) else x for n, x in I.items()}


def allowed(I):
    reading, balls = lifted(I)
    bounds = [tolerance(y, "float64") for y in linear_transformer.chunkwise(**balls)]
    assert not reading.vacuous
    return bounds


def published(q, k, v, eps, S0, z0):
    """Katharopoulos et al. (10) to (12), token by token, with the feature map (7) of their code."""

    def phi(x):
        return torch.nn.functional.elu(x) + 1

    S, z, rows = S0, z0, []
    for i in range(len(q)):
        S, z = S + torch.outer(phi(k[i]), v[i]), z + phi(k[i])
        rows.append(phi(q[i]) @ S / (phi(q[i]) @ z + eps))
    return torch.stack(rows), S, z


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("eps", [0.0, 0.3])
def test_it_is_the_published_recurrence(sizes, eps):
    I, G = draw(*sizes, eps)
    x = {n: torch.tensor(a, requires_grad=True) for n, a in I.items() if n != "eps"}
    outputs = published(**x, eps=eps)
    sum((y * torch.tensor(G[n])).sum() for n, y in zip(G, outputs, strict=True)).backward()
    bound = allowed(I)
    found = [form.function(**I) for form in OPERATOR.forms] + [linear_transformer.chunkwise(**I, chunk=3)]
    for ys in found:
        for y, want, most in zip(ys, outputs, bound, strict=True):
            assert np.all(np.abs(y - want.detach().numpy()) <= 2 * most)
    reading, balls = lifted(I)
    bounds = linear_transformer.vjp({n: reading.ball(a) for n, a in G.items()}, **balls)
    assert not reading.vacuous
    for chunk in (2, 64):
        for n, d in linear_transformer.vjp(G, **I, chunk=chunk).items():
            assert np.all(np.abs(d - x[n].grad.numpy()) <= 2 * tolerance(bounds[n], "float64")), n


@pytest.mark.parametrize("sizes", SIZES)
def test_forms_and_chunks_are_enclosed(sizes):
    I, _ = draw(*sizes)
    bound, truth = allowed(I), enclose(linear_transformer.recurrent, I)
    found = [form.function(**I) for form in OPERATOR.forms]
    for ys in (*found, *(linear_transformer.chunkwise(**I, chunk=c) for c in (1, 2, 5, sizes[0]))):
        assert all(np.all(certified_error(y, t) <= b) for y, t, b in zip(ys, truth, bound, strict=True))


# --- the feature map -------------------------------------------------------------------------------------------------


def test_features_by_hand():
    x = np.array([-1.0, 0.0, 1.0, 3.0])
    assert elu_plus_one(x).tolist() == [math.exp(-1), 1.0, 2.0, 4.0]
    assert linear_transformer.slope(x).tolist() == [math.exp(-1), 1.0, 1.0, 1.0]


def test_a_rounded_elu_loses_the_key():
    """elu(-20) + 1 is zero in float32, so a key of -20 has no weight and alone gives 0 / 0; its feature is 2.1e-9."""
    x = np.full((1, 3), -20.0)
    naive = torch.nn.functional.elu(torch.tensor(x, dtype=torch.float32)) + 1
    assert not naive.any()
    assert f"{elu_plus_one(x.astype(U32))[0, 0]:.3g}" == "2.06e-09"
    v = np.array([[1.0, -2.0]])
    for form in OPERATOR.forms:
        O = form.function(x.astype(U32), x.astype(U32), v.astype(U32))[0]
        assert O.dtype == U32
        assert np.all(np.abs(O - v) <= 8 * 2.0**-24 * np.abs(v))
    O = linear_transformer_torch.chunkwise(*(torch.tensor(a, dtype=torch.float32)[None, :, None] for a in (x, x, v)))[0]
    assert np.all(np.abs(O[0, :, 0].numpy() - v) <= 8 * 2.0**-24 * np.abs(v))


def test_nothing_is_scaled():
    """Queries and keys times K^-1/4, as for softmax, would give something else."""
    I, _ = draw(7, 4, 2, state=False)
    O, scaled = (linear_transformer.chunkwise(**x)[0] for x in (I, I | {n: I[n] * 4**-0.25 for n in "qk"}))
    assert np.max(np.abs(scaled - O) / allowed(I)[0]) > 1e12


def test_a_half_precision_mass_would_stall():
    """300 keys of phi(0) = 1: added up in bfloat16 they are 256."""
    x = torch.zeros(1, 300, 1, 2, dtype=torch.bfloat16)
    stalled = torch.zeros(2, dtype=torch.bfloat16)
    for phi in linear_transformer_torch.phi(x[0, :, 0]):
        stalled = stalled + phi
    assert stalled.tolist() == [256.0, 256.0]
    for form in (linear_transformer_torch.chunkwise, linear_transformer_torch.prefix_sums):
        O, _, z = form(x, x, torch.ones_like(x))
        assert z.dtype == torch.float32
        assert O.dtype == torch.bfloat16
        assert z.tolist() == [[[300.0, 300.0]]]
        assert torch.all(O == 1)


# --- what attention it is --------------------------------------------------------------------------------------------


def test_the_matrix_of_weights():
    """v = identity reads it off: nothing negative, rows that sum to one, rank K; nothing of the future."""
    I, _ = draw(9, 2, 3, state=False)
    I["v"] = np.eye(9)
    A, bound = linear_transformer.parallel(**I)[0], allowed(I)[0]
    assert np.all(A >= 0)
    assert not np.any(np.triu(A, 1))
    assert np.all(np.abs(A.sum(1) - 1) <= bound.sum(1) + 9 * 2.0**-53)
    full = elu_plus_one(I["q"]) @ elu_plus_one(I["k"]).T
    assert np.linalg.matrix_rank(full) == 2


def test_the_order_of_the_past_is_forgotten():
    I, _ = draw(7, 3, 2)
    order = [3, 0, 5, 1, 4, 2, 6]
    moved = I | {n: I[n][order] for n in "kv"}
    bound = allowed(I)[0][6] + allowed(moved)[0][6]
    assert np.all(
        np.abs(linear_transformer.recurrent(**moved)[0][6] - linear_transformer.recurrent(**I)[0][6]) <= bound
    )


def test_a_prefix_and_then_token_by_token():
    """Prefill, then decode: the last rows of the whole, and its memory."""
    I, _ = draw(9, 3, 2)
    x = {
        n: torch.tensor(a)[None, :, None] if len(a) == 9 else torch.tensor(a)[None, None]
        for n, a in I.items()
        if n != "eps"
    }
    rows, bound = [], allowed(I)
    O, S, z = linear_transformer_torch.chunkwise(*(x[n][:, :4] for n in "qkv"), S0=x["S0"], z0=x["z0"], chunk=3)
    rows.append(O)
    for t in range(4, 9):
        O, S, z = linear_transformer_torch.chunkwise(*(x[n][:, t : t + 1] for n in "qkv"), S0=S, z0=z)
        rows.append(O)
    got = torch.cat(rows, dim=1)[0, :, 0].numpy(), S[0, 0].numpy(), z[0, 0].numpy()
    for y, want, most in zip(got, linear_transformer.recurrent(**I), bound, strict=True):
        assert np.all(np.abs(y - want) <= 2 * most)


# --- the suite -------------------------------------------------------------------------------------------------------


def test_the_builder_with_nothing_changed_raises_no_alarm():
    same = Mutant("same", OPERATOR.name, "nothing changed", (), forward=mutants.head(), vjp=mutants.head_vjp())
    for law in ("forward", "vjp", "causality", "split", "forms"):
        assert judge(same.subject(), law, PROFILES["short"]).status == "pass", law


@pytest.mark.parametrize("form", ["chunkwise", "prefix_sums"])
def test_what_makes_no_sense(form):
    f = getattr(linear_transformer_torch, form)
    x = torch.zeros(1, 3, 2, 4)
    for arguments, error, message in (
        ({"k": x[:, :2]}, ValueError, "k has shape .*: axis T is 2, but q has T=3"),
        ({"q": x.long()}, TypeError, "q is torch.int64; expected a floating-point tensor"),
        ({"eps": -1.0}, ValueError, "eps is -1.0; it must be finite and not negative"),
        ({"S0": x}, ValueError, "S0 has shape"),
    ):
        with pytest.raises(error, match=message):
            f(**({"q": x, "k": x, "v": x} | arguments))
