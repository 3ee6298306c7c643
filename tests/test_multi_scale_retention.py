"""Multi-scale retention against two independent transcriptions, complex and torchscale's; rotations and their balls.

Two evaluations of one quantity may differ by twice what the gate allows one of them.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from mixproof.reference import multi_scale_retention as msr
from mixproof.reference import operator, retention
from mixproof.reference.primitives import deviation, group_norm, turned
from mixproof.verify.arithmetic import natural
from mixproof.verify.numbers.ball import Reading, tolerance
from mixproof.verify.numbers.certified import certified_error, enclose

torch = pytest.importorskip("torch")
U32 = np.float32
SIZES = [(1, 2, 1), (2, 4, 3), (7, 6, 4), (13, 2, 5)]  # T, K, V


def draw(T, K, V, seed=0, eps=1e-6):
    g = np.random.default_rng([seed, T, K, V])
    I = {"q": g.standard_normal((T, K)), "k": g.standard_normal((T, K)), "v": g.standard_normal((T, V))}
    I |= {"u": g.standard_normal((T, V)), "gamma": np.float64(0.9), "scale": K**-0.5, "eps": eps, "base": 10000.0}
    return I, {"Y": g.standard_normal((T, V))}


def lifted(I, dtype="float64"):
    reading = Reading(natural(dtype))
    return reading, {n: reading.ball(x) if np.ndim(x) or n == "gamma" else x for n, x in I.items()}


def allowed(I):
    reading, balls = lifted(I)
    result = tolerance(msr.chunkwise(**balls), "float64")
    assert not reading.vacuous
    return result


# --- independent transcriptions --------------------------------------------------------------------------------------


def complex_head(q, k, v, u, gamma, scale, eps, base, conjugate=True):
    """Sun et al. (3), (5), (7), (8) with complex numbers: Q = q e^(i n theta), K = k e^(-i n theta)."""
    T, K = q.shape
    theta = base ** -(torch.arange(K // 2, dtype=torch.float64) / max(K // 2 - 1, 1))
    n = torch.arange(T, dtype=torch.float64)
    turn = torch.exp(1j * n[:, None] * theta)
    Q = torch.complex(q[:, 0::2], q[:, 1::2]) * turn
    other = torch.complex(k[:, 0::2], k[:, 1::2]) * turn
    scores = (Q @ (other.conj() if conjugate else other).T).real
    D = torch.where(n[:, None] >= n, gamma ** (n[:, None] - n).clamp(min=0), torch.zeros(()))
    O = (scores * D) @ v * scale
    N = (O - O.mean(1, keepdim=True)) / (O.var(1, unbiased=False, keepdim=True) + eps).sqrt()
    return torch.nn.functional.silu(u) * N


def torchscale_head(q, k, v, u, gamma, scale, eps, base):
    """RetNetRelPos and theta_shift of torchscale, its decay, and LayerNorm for the norm of a head; token by token."""
    T, K = q.shape
    angle = 1.0 / (base ** torch.linspace(0, 1, K // 2, dtype=torch.float64))
    angle = angle.unsqueeze(-1).repeat(1, 2).flatten()
    index = torch.arange(T, dtype=torch.float64)
    sin, cos = torch.sin(index[:, None] * angle[None, :]), torch.cos(index[:, None] * angle[None, :])

    def theta_shift(x):
        rotated = torch.stack((-x[:, 1::2], x[:, ::2]), dim=-1).flatten(-2)
        return x * cos + rotated * sin

    Q, K_, S, rows = theta_shift(q), theta_shift(k * scale), torch.zeros(K, v.shape[1], dtype=torch.float64), []
    for t in range(T):
        S = gamma * S + torch.outer(K_[t], v[t])
        rows.append(Q[t] @ S)
    O = torch.stack(rows)
    return u * torch.sigmoid(u) * torch.nn.functional.layer_norm(O, O.shape[1:], eps=eps)


@pytest.mark.parametrize("witness", [complex_head, torchscale_head])
@pytest.mark.parametrize("sizes", SIZES)
def test_it_is_the_published_head(witness, sizes):
    I, G = draw(*sizes)
    x = {n: torch.tensor(a, requires_grad=True) for n, a in I.items() if isinstance(a, np.ndarray | np.floating)}
    Y = witness(**(I | x))
    Y.backward(torch.tensor(G["Y"]))
    bound = allowed(I)
    for form in operator("multi_scale_retention").forms:
        assert np.all(np.abs(form.function(**I) - Y.detach().numpy()) <= 2 * bound), form.name
    reading, balls = lifted(I)
    bounds = msr.vjp({"Y": reading.ball(G["Y"])}, **balls)
    assert not reading.vacuous
    for chunk in (2, 5, 64):
        for n, d in msr.vjp(G, **I, chunk=chunk).items():
            assert np.all(np.abs(d - x[n].grad.numpy()) <= 2 * tolerance(bounds[n], "float64")), n


def test_keys_are_conjugated():
    """Without it scores depend on the sum of positions."""
    I, _ = draw(7, 6, 4)
    tensors = {n: torch.tensor(a) for n, a in I.items() if isinstance(a, np.ndarray)}
    wrong = complex_head(**(I | tensors), conjugate=False)
    assert np.max(np.abs(wrong.numpy() - msr.chunkwise(**I)) / allowed(I)) > 1e6


@pytest.mark.parametrize("sizes", SIZES)
def test_forms_and_chunks_are_enclosed(sizes):
    I, _ = draw(*sizes)
    bound, truth = allowed(I), enclose(msr.recurrent, I)
    found = [form.function(**I) for form in operator("multi_scale_retention").forms]
    for Y in (*found, *(msr.chunkwise(**I, chunk=c) for c in (1, 2, 3, 5, sizes[0]))):
        assert np.all(certified_error(Y, truth) <= bound)


# --- rotations -------------------------------------------------------------------------------------------------------


def test_angles_are_those_of_torchscale():
    """The last of 8 channels turns by 1e-4; by RoPE's rule it would by 1e-3."""
    assert [f"{theta:.3g}" for theta in msr.angles(8)] == ["1", "0.0464", "0.00215", "0.0001"]
    assert msr.angles(2).tolist() == [1.0]


def test_a_quarter_turn():
    x = np.array([[3.0, 4.0]])
    got = turned(x, np.array([1]), np.array([math.pi / 2]))
    assert np.max(np.abs(got - [[-4.0, 3.0]])) <= 8 * 2.0**-53
    assert np.max(np.abs(turned(got, np.array([-1]), np.array([math.pi / 2])) - x)) <= 32 * 2.0**-53


def test_only_the_distance_of_positions_matters():
    """Queries and keys at positions 7 later, with nothing before them, give the same."""
    I, _ = draw(6, 4, 3)
    n, theta = np.arange(6), msr.angles(4)
    reading, balls = lifted(I)

    def scores(x, start):
        return turned(x["q"], n + start, theta) @ turned(x["k"], n + start, theta).T

    bound = tolerance(scores(balls, 0), "float64") + tolerance(scores(balls, 7), "float64")
    assert np.all(np.abs(scores(I, 7) - scores(I, 0)) <= bound)
    assert not reading.vacuous


def by_pow(n, T, K, base):
    return n * (U32(1) / U32(base) ** np.linspace(0, 1, K // 2, dtype=U32))


def by_exp(n, T, K, base):
    return n * np.exp(-np.linspace(0, 1, K // 2, dtype=U32) * np.log(U32(base)))


@pytest.mark.parametrize("angle", [by_pow, by_exp])
@pytest.mark.parametrize("T", [5, 300])
def test_rotations_in_float32_stay_in_their_balls(angle, T):
    """Angles by pow or by exp; and the complex number turned token by token, whose error grows with its position."""
    K, g = 8, np.random.default_rng(T)
    x = g.standard_normal((T, K)).astype(U32)
    n, theta = np.arange(T), msr.angles(K)
    reading = Reading(natural("float32"))
    ball = turned(reading.ball(x), n, theta)
    phase = angle(n[:, None].astype(U32), T, K, 10000.0)
    assert phase.dtype == U32
    z = x[:, 0::2] + 1j * x[:, 1::2]
    factor, step = [np.ones(K // 2, np.complex64)], (np.cos(phase[1:2]) + 1j * np.sin(phase[1:2]))[0]
    for _ in range(T - 1):
        factor.append(factor[-1] * step)
    for turn in (np.cos(phase) + 1j * np.sin(phase), np.stack(factor)):
        assert turn.dtype == np.complex64
        w = z * turn
        got = np.stack([w.real, w.imag], axis=-1).reshape(T, K)
        assert np.all(np.abs(got - ball.v) <= ball.radius)
    rope = turned(x.astype(float), n, 10000.0 ** (-np.arange(K // 2) / (K // 2)))
    assert np.any(np.abs(rope - ball.v) > 100 * ball.radius)


# --- group norm ------------------------------------------------------------------------------------------------------


def test_the_norm_is_per_token():
    """y_1 = (-1, 1) stays, whatever comes later; over time and channels it would be (-0.816, 0) or so."""
    early = np.array([[-1.0, 1.0]])
    for later in ([0.0, 1.0], [0.0, 3.0]):
        N = group_norm(np.concatenate([early, [later]]), 0.0)
        assert np.array_equal(N[0], [-1.0, 1.0])
    pooled = [np.concatenate([early[0], later]) for later in ([0.0, 1.0], [0.0, 3.0])]
    firsts = [((p - p.mean()) / p.std())[:2] for p in pooled]
    assert np.max(np.abs(firsts[0] - firsts[1])) > 0.2


def test_scale_is_lost_in_the_norm_but_for_eps():
    """So a decay that multiplies all of a row does nothing: with eps = 0, O and 2 O have the same norm, bit for bit."""
    I, _ = draw(7, 4, 3, eps=0.0)
    doubled = I | {"scale": 2 * I["scale"]}
    assert np.array_equal(msr.chunkwise(**I), msr.chunkwise(**doubled))


def test_deviation_stays_in_its_ball():
    """In float32, two passes over rows far from zero, where mean x^2 - (mean x)^2 has no digit left."""
    x = (np.random.default_rng(0).standard_normal((40, 6)) + 1e3).astype(U32)

    def mean(a):
        return a.mean(axis=1, keepdims=True, dtype=U32)

    ball = deviation(Reading(natural("float32")).ball(x), 1e-6)
    E = x - mean(x)
    assert np.all(np.abs(np.sqrt(mean(E * E) + U32(1e-6)) - ball.v) <= ball.radius)
    moments = np.abs(mean(x * x) - mean(x) ** 2)
    assert np.max(np.abs(np.sqrt(moments) - ball.v) / ball.radius) > 100


@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_gradients_of_pytorchs_norms_stay_in_their_balls(offset):
    """In float32. layer_norm goes by the normalised x, group_norm multiplies it out: digits are lost far from zero."""
    g = np.random.default_rng(1)
    x, G = (g.standard_normal((40, 6)) + offset).astype(U32), g.standard_normal((40, 6)).astype(U32)
    reading = Reading(natural("float32"))
    ball = msr.group_norm_vjp(reading.ball(G), reading.ball(x), 1e-6)
    assert not reading.vacuous
    F = torch.nn.functional
    for norm in (lambda x: F.layer_norm(x, (6,), eps=1e-6), lambda x: F.group_norm(x, 1, eps=1e-6)):
        leaf = torch.tensor(x, requires_grad=True)
        norm(leaf).backward(torch.tensor(G))
        assert np.all(np.abs(leaf.grad.numpy() - ball.v) <= ball.radius)


def test_a_head_of_one_channel_is_silent():
    """x - mean = 0, so there is nothing to amplify, and no gradient either."""
    I, G = draw(7, 4, 1)
    assert not np.any(msr.chunkwise(**I))
    assert not any(np.any(d) for d in msr.vjp(G, **I).values())
    assert np.any(retention.chunkwise(I["q"], I["k"], I["v"], I["gamma"])[0])
