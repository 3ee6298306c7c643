"""The MixFormer block against an independent one in PyTorch, its gradients against autograd, what it may not see."""

from __future__ import annotations

import numpy as np
import pytest

from mixproof.reference import mixformer, operator
from mixproof.reference.primitives import rectified
from mixproof.verify.arithmetic import natural
from mixproof.verify.numbers.ball import Reading, tolerance
from mixproof.verify.numbers.certified import certified_error, enclose

OPERATOR = operator("mixformer")
SIZES = [(3, 2, 1, 2), (5, 4, 3, 2), (7, 6, 5, 3), (11, 4, 6, 1)]  # T, D, F, heads


def draw(T, D, F, heads, seed=0):
    g = np.random.default_rng([seed, T, D, F])
    sizes = {"T": T, "D": D, "F": F}
    I = {x.name: g.standard_normal(tuple(sizes[a] for a in x.axes)) for x in OPERATOR.inputs if x.axes}
    I |= {n: x / np.sqrt(len(x)) for n, x in I.items() if n.startswith("W_")}
    I |= {n: 1 + 0.2 * x for n, x in I.items() if n.startswith("gain")}
    return I | {"heads": heads, "eps": 1e-5, "norm_eps": 1e-12}, {"Y": g.standard_normal((T, D))}


def lifted(I):
    reading = Reading(natural("float64"))
    return reading, {n: reading.ball(x) if np.ndim(x) else x for n, x in I.items()}


def torch_block(torch, x, heads, eps, norm_eps):
    """(19), (20) and (13) with PyTorch's own norms, and (15) token by token."""
    F = torch.nn.functional
    T, D = x["X"].shape

    def norm(X, i):
        return F.group_norm(X, 1, x[f"gain{i}"], x[f"bias{i}"], eps)

    def phi(X):  # rows, heads, channels
        return F.normalize(X.reshape(T, heads, D // heads), dim=-1, eps=norm_eps).exp()

    N = norm(x["X"], 1)
    q, k, v = phi(N @ x["W_Q"]), phi(N @ x["W_K"]), (N @ x["W_V"]).reshape(T, heads, D // heads)
    omega = 1 - torch.exp(-torch.arange(1.0, heads + 1, dtype=torch.float64))
    S, rows = 0, []
    for t in range(T):
        S = omega[:, None, None] * S + k[t][:, :, None] * v[t][:, None, :]
        rows.append((q[t][:, None, :] @ S).reshape(D))
    A = F.group_norm(torch.stack(rows), heads, eps=eps)
    Y = A @ x["W_O"] + x["X"]
    return torch.relu(norm(Y, 2) @ x["W_1"]) @ x["W_2"] + Y


@pytest.mark.parametrize("sizes", SIZES)
def test_block_and_its_vjp_are_autograd(sizes):
    torch = pytest.importorskip("torch")
    I, G = draw(*sizes)
    scalars = {n: x for n, x in I.items() if not np.ndim(x)}
    x = {n: torch.tensor(a, requires_grad=True) for n, a in I.items() if n not in scalars}
    Y = torch_block(torch, x, **scalars)
    Y.backward(torch.tensor(G["Y"]))
    reading, balls = lifted(I)
    bound, bounds = mixformer.chunkwise(**balls), mixformer.vjp({"Y": reading.ball(G["Y"])}, **balls)
    assert not reading.vacuous
    for form in OPERATOR.forms:
        assert np.all(np.abs(form.function(**I) - Y.detach().numpy()) <= 2 * tolerance(bound, "float64")), form.name
    for chunk in (2, 64):
        got = mixformer.vjp(G, **I, chunk=chunk)
        assert got.keys() == x.keys()
        for n, d in got.items():
            assert np.all(np.abs(d - x[n].grad.numpy()) <= 2 * tolerance(bounds[n], "float64")), n


def test_tolerances_tell_a_missing_term():
    """Enough is left of float64: each of these changes some output or gradient by more than a thousand tolerances."""
    I, G = draw(5, 4, 3, 2)
    reading, balls = lifted(I)
    bound = tolerance(mixformer.chunkwise(**balls), "float64")
    for change in ({"eps": 2e-5}, {"heads": 1}, {"bias2": 0 * I["bias2"]}, {"W_O": 0 * I["W_O"]}):
        assert np.max(np.abs(mixformer.chunkwise(**(I | change)) - mixformer.chunkwise(**I)) / bound) > 1e3
    bounds = mixformer.vjp({"Y": reading.ball(G["Y"])}, **balls)
    for n, d in mixformer.vjp(G, **I).items():
        assert np.max(np.abs(d) / tolerance(bounds[n], "float64")) > 1e3, n


@pytest.mark.parametrize("sizes", SIZES[:2])
def test_block_is_enclosed(sizes):
    I, G = draw(*sizes)
    reading, balls = lifted(I)
    error = certified_error(mixformer.chunkwise(**I), enclose(mixformer.chunkwise, I))
    assert np.all(error <= tolerance(mixformer.chunkwise(**balls), "float64"))
    bounds = mixformer.vjp({"Y": reading.ball(G["Y"])}, **balls)
    truth = enclose(mixformer.vjp, {"cotangents": G, **I})
    for n, d in mixformer.vjp(G, **I).items():
        assert np.all(certified_error(d, truth[n]) <= tolerance(bounds[n], "float64")), n


@pytest.mark.parametrize("at", range(5))
def test_no_token_sees_a_later_one(at):
    """Bitwise, in every form: norms and feature maps are per token."""
    I, _ = draw(5, 4, 3, 2)
    changed = I | {"X": np.where(np.arange(5)[:, None] < at, I["X"], 3 * I["X"] + 1)}
    for form in OPERATOR.forms:
        one, two = form.function(**I), form.function(**changed)
        assert np.array_equal(one[:at], two[:at])
        assert np.all(one[at] != two[at])


@pytest.mark.parametrize("at", range(1, 5))
def test_no_gradient_comes_from_an_earlier_token(at):
    I, G = draw(5, 4, 3, 2)
    early = {"Y": np.where(np.arange(5)[:, None] < at, G["Y"], 0)}
    d = mixformer.vjp(early, **I)["X"]
    assert not np.any(d[at:])
    assert np.all(np.any(d[:at], axis=1))


def test_without_weights_only_the_residuals_are_left():
    I, G = draw(5, 4, 3, 2)
    silent = I | {"W_O": 0 * I["W_O"], "W_2": 0 * I["W_2"]}
    assert np.array_equal(mixformer.chunkwise(**silent), I["X"])
    assert np.array_equal(mixformer.vjp(G, **silent)["X"], G["Y"])


def test_the_norms_come_before_the_layers():
    """Pre-norm, without eps: a multiple of X moves only the residual. And heads differ, by their decays."""
    I, _ = draw(5, 4, 3, 2)
    alone = I | {"eps": 0.0, "W_2": 0 * I["W_2"]}
    added = mixformer.chunkwise(**alone) - I["X"]
    assert np.max(np.abs(mixformer.chunkwise(**(alone | {"X": 8 * I["X"]})) - 8 * I["X"] - added)) <= 2.0**-45
    swapped = {n: np.roll(I[n], 2, axis=1) for n in ("W_Q", "W_K", "W_V")} | {"W_O": np.roll(I["W_O"], 2, axis=0)}
    assert np.max(np.abs(mixformer.chunkwise(**(I | swapped)) - mixformer.chunkwise(**I))) > 0.01


def test_the_side_of_zero_may_be_open():
    """A rectifier passes all or nothing back; where what it took may be of either sign, both are allowed."""
    reading = Reading(natural("float32"))
    x = reading.ball(np.array([1.0, -1.0, 2.0**-20])) - reading.ball(np.array([0.5, 0.5, 2.0**-20]))
    back = rectified(reading.ball(np.array([3.0, 3.0, 3.0])), x)
    assert back.v.tolist() == [3.0, 0.0, 0.0]
    assert (back.radius < 1e-6).tolist() == [True, True, False]
    assert back.radius[2] >= 3
