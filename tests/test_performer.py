"""The Performer: its features as random numbers, whose means are known; its attention against a plain transcription.

Two evaluations of one quantity may differ by twice what the gate allows one of them. Means over draws with a fixed
seed are held to five of their standard errors.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from mixproof.reference import operator, performer
from mixproof.reference.primitives import softmax
from mixproof.verify.arithmetic import natural
from mixproof.verify.judge import PROFILES, judge
from mixproof.verify.numbers.ball import Reading, tolerance
from mixproof.verify.numbers.certified import certified_error, enclose
from mixproof.verify.subjects.mutants import Mutant
from mixproof.verify.subjects.mutants import performer as mutants

torch = pytest.importorskip("torch")
performer_torch = pytest.importorskip("mixproof.verify.subjects.torch.performer")
OPERATOR = operator("performer")
U32 = np.float32
SIZES = [(1, 2, 1, 1), (2, 4, 3, 5), (7, 3, 4, 6), (13, 2, 5, 3)]  # T, K, V, F


def draw(T, K, V, F, eps=0.0, state=True):
    g = np.random.default_rng([T, K, V, F])
    I = {"q": g.standard_normal((T, K)), "k": g.standard_normal((T, K)), "v": g.standard_normal((T, V))}
    I |= {"omega": g.standard_normal((F, K)), "eps": eps}
    if state:
        I |= {"S0": g.standard_normal((F, V)), "z0": g.random(F)}
    return I, {"O": g.standard_normal((T, V)), "S": g.standard_normal((F, V)), "z": g.standard_normal(F)}


def lifted(I):
    reading = Reading(natural("float64"))
    return reading, {n: reading.ball(x) if np.ndim(x) else x for n, x in I.items()}


def allowed(I):
    reading, balls = lifted(I)
    bounds = [tolerance(y, "float64") for y in performer.chunkwise(**balls)]
    assert not reading.vacuous
    return bounds


def plain(q, k, v, omega, eps, S0, z0):
    """Features as defined, nothing taken out of them; every query by itself."""
    F, K = omega.shape

    def phi(x):
        y = x / K**0.25
        return torch.exp(omega @ y - y @ y / 2) / math.sqrt(F)

    keys, rows = torch.stack([phi(x) for x in k]), []
    for i, x in enumerate(q):
        a = keys[: i + 1] @ phi(x)
        rows.append((a @ v[: i + 1] + phi(x) @ S0) / (a.sum() + phi(x) @ z0 + eps))
    return torch.stack(rows), S0 + keys.T @ v, z0 + keys.sum(0)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("eps", [0.0, 0.3])
def test_it_is_the_plain_transcription(sizes, eps):
    I, G = draw(*sizes, eps)
    x = {n: torch.tensor(a, requires_grad=True) for n, a in I.items() if n != "eps"}
    outputs = plain(**x, eps=eps)
    sum((y * torch.tensor(G[n])).sum() for n, y in zip(G, outputs, strict=True)).backward()
    bound = allowed(I)
    found = [form.function(**I) for form in OPERATOR.forms] + [performer.chunkwise(**I, chunk=3)]
    for ys in found:
        for y, want, most in zip(ys, outputs, bound, strict=True):
            assert np.all(np.abs(y - want.detach().numpy()) <= 2 * most)
    reading, balls = lifted(I)
    bounds = performer.vjp({n: reading.ball(a) for n, a in G.items()}, **balls)
    assert not reading.vacuous
    for chunk in (2, 64):
        for n, d in performer.vjp(G, **I, chunk=chunk).items():
            assert np.all(np.abs(d - x[n].grad.numpy()) <= 2 * tolerance(bounds[n], "float64")), n


@pytest.mark.parametrize("eps", [0.0, 0.3])
@pytest.mark.parametrize("sizes", SIZES)
def test_forms_and_chunks_are_enclosed(sizes, eps):
    I, _ = draw(*sizes, eps)
    bound, truth = allowed(I), enclose(performer.recurrent, I)
    found = [form.function(**I) for form in OPERATOR.forms]
    for ys in (*found, *(performer.chunkwise(**I, chunk=c) for c in (1, 2, 5))):
        assert all(np.all(certified_error(y, t) <= b) for y, t, b in zip(ys, truth, bound, strict=True))


# --- random features -------------------------------------------------------------------------------------------------


def kernels(x, y, omegas):
    """phi(x) . phi(y) for each of many draws (n, F, K), x and y not scaled."""
    r = len(x) ** 0.25
    a, b = (performer.features((z * r)[None], omegas.reshape(-1, len(x))) for z in (x, y))
    n, F = omegas.shape[:2]
    return (a * b).reshape(n, F).sum(1) * n  # `features` took n F features for one draw


def off(samples, mean):
    """By how many standard errors the mean of the samples is off."""
    return abs(samples.mean() - mean) / (samples.std(ddof=1) / math.sqrt(len(samples)))


X, Y = np.array([0.4, -0.3, 0.2, 0.1]), np.array([0.1, 0.5, -0.2, 0.3])


def test_the_mean_of_the_kernel_is_that_of_softmax():
    """E phi(x) . phi(y) = exp(x . y), with independent directions and with orthogonal ones; exactly, not for many."""
    g = np.random.default_rng(0)
    independent = kernels(X, Y, g.standard_normal((40000, 3, 4)))
    orthogonal = kernels(X, Y, np.stack([performer.directions(3, 4, g) for _ in range(2500)]))
    assert off(independent, math.exp(X @ Y)) < 5
    assert off(orthogonal, math.exp(X @ Y)) < 5
    assert off(independent, math.exp(X @ Y) * 1.02) > 5


def test_the_variance_of_the_kernel():
    """F^-1 exp(-|x|^2 - |y|^2) (exp(2 |x + y|^2) - exp(|x + y|^2)) for independent directions: the mean square is the
    mean of samples too."""
    F, s = 3, (X + Y) @ (X + Y)
    variance = math.exp(-X @ X - Y @ Y) * (math.exp(2 * s) - math.exp(s)) / F
    samples = kernels(X, Y, np.random.default_rng(1).standard_normal((40000, F, 4)))
    assert off((samples - math.exp(X @ Y)) ** 2, variance) < 5
    assert off((samples - math.exp(X @ Y)) ** 2, variance * 1.5) > 5


def test_orthogonal_directions_have_less_variance():
    g = np.random.default_rng(2)
    F = K = 4
    independent = kernels(X, Y, g.standard_normal((1500, F, K)))
    orthogonal = kernels(X, Y, np.stack([performer.directions(F, K, g) for _ in range(1500)]))
    assert orthogonal.var() < 0.9 * independent.var()


def test_directions_are_blocks_of_orthogonal_rows():
    """Of the lengths of normal vectors: their squares have the mean K and the variance 2 K."""
    K = 5
    W = np.stack([performer.directions(12, K, np.random.default_rng(i)) for i in range(400)])
    squares = np.sum(W**2, axis=2)
    for block in (slice(0, 5), slice(5, 10), slice(10, 12)):
        rows = W[:, block] / np.sqrt(squares[:, block, None])
        cosines = rows @ rows.transpose(0, 2, 1) - np.eye(rows.shape[1])
        assert np.max(np.abs(cosines)) <= 32 * K * 2.0**-53
    assert off(squares.ravel(), K) < 5
    assert off((squares.ravel() - K) ** 2, 2 * K) < 5
    assert np.max(np.abs(np.sum(W[:, 0] * W[:, 5], axis=1))) > 1  # rows of different blocks are independent
    assert performer.directions(0, K, np.random.default_rng(0)).shape == (0, K)


def test_the_factor_of_a_qr_is_not_uniform():
    """LAPACK's R has a diagonal of either sign and its Q_00 is never positive, so the kernel's mean is off; with the
    signs of the diagonal moved into Q it is not."""
    g, K, draws = np.random.default_rng(3), 4, 20000
    x = np.full(K, -0.3)
    Q, R = np.linalg.qr(g.standard_normal((draws, K, K)))
    assert np.all(Q[:, 0, 0] < 0)
    lengths = np.sqrt(np.sum(g.standard_normal((draws, K, K)) ** 2, axis=2, keepdims=True))
    fixed = Q * np.where(np.diagonal(R, axis1=1, axis2=2) < 0, -1, 1)[:, None, :]
    raw, uniform = (kernels(x, x, M.transpose(0, 2, 1) * lengths) for M in (Q, fixed))
    assert off(raw, math.exp(x @ x)) > 20
    assert off(uniform, math.exp(x @ x)) < 5


def test_only_angles_to_the_directions_matter():
    """Queries, keys and directions turned together give the same features, so the law of omega is all there is."""
    g = np.random.default_rng(4)
    x, W = g.standard_normal((6, 3)), g.standard_normal((5, 3))
    Q, _ = np.linalg.qr(g.standard_normal((3, 3)))
    reading = Reading(natural("float64"))
    bound = tolerance(performer.features(reading.ball(x), reading.ball(W)), "float64")
    moved = Reading(natural("float64"))
    rounding = 16 * 2.0**-53  # of the products with Q, and of Q itself
    turned = (moved.ball(y @ Q).widened(rounding * (np.abs(y) @ np.abs(Q))) for y in (x, W))
    bound = bound + tolerance(performer.features(*turned), "float64")
    assert np.all(np.abs(performer.features(x @ Q, W @ Q) - performer.features(x, W)) <= bound)
    assert np.max(np.abs(performer.features(x @ Q, W) - performer.features(x, W)) / bound) > 1e6


# --- attention of them -----------------------------------------------------------------------------------------------


def test_with_many_features_it_is_softmax():
    """The error of F features falls as F^-1/2: 16 times as many, a quarter of it, give or take."""
    I, _ = draw(8, 4, 3, 1, state=False)
    I |= {n: I[n] / 2 for n in "qk"}
    s = I["q"] @ I["k"].T / 2
    want = softmax(np.where(np.tril(np.ones((8, 8), dtype=bool)), s, -np.inf)) @ I["v"]
    errors = []
    for F in (32, 512):
        some = [performer.directions(F, 4, np.random.default_rng([F, i])) for i in range(16)]
        errors.append(math.sqrt(np.mean([(performer.parallel(**I | {"omega": W})[0] - want) ** 2 for W in some])))
    assert 2.5 < errors[0] / errors[1] < 6


def test_ratios_are_biased():
    """With one feature the query drops out of numerator and normaliser: whatever omega, no query has a say. So the mean
    output is the same for all queries, and softmax's is not."""
    I, _ = draw(6, 3, 2, 1, state=False)
    last = [performer.recurrent(**I | {"q": q})[0][-1] for q in (I["q"], -3 * I["q"])]
    assert np.all(np.abs(last[1] - last[0]) <= 2 * allowed(I)[0][-1])
    weights = [softmax(q @ I["k"].T / math.sqrt(3))[-1] @ I["v"] for q in (I["q"], -3 * I["q"])]
    assert np.max(np.abs(weights[1] - weights[0])) > 0.1


def test_queries_whose_features_all_underflow():
    """At |x|^2 = 435 no feature of a query is left in float32; O is an average of values as for any other query."""
    g = np.random.default_rng(5)
    K, F = 4, 6
    I, _ = draw(5, K, 3, F, state=False)
    q = g.standard_normal((5, K))
    I["q"] = q / np.linalg.norm(q, axis=1, keepdims=True) * math.sqrt(435) * K**0.25
    x = {n: a.astype(U32) if np.ndim(a) else a for n, a in I.items()}
    assert not np.any(performer.features(x["q"], x["omega"]))
    want = performer.recurrent(**I)[0]
    reading = Reading(natural("float32"))
    ball = performer.recurrent(**{n: reading.ball(a) if np.ndim(a) else a for n, a in x.items()})[0]
    assert not reading.vacuous
    for form in OPERATOR.forms:
        O = form.function(**x)[0]
        assert O.dtype == U32
        assert np.all(np.abs(O - ball.v) <= tolerance(ball, "float32"))
    assert np.max(np.abs(want - ball.v)) < 2.0**-10  # inputs in float32 are not those in float64


def test_a_number_for_each_key_is_no_common_factor():
    I, _ = draw(8, 3, 2, 5, state=False)
    O = performer.recurrent(**I)[0]
    for key, common in ((mutants.greatest_feature, False), (mutants.greatest_key, True)):
        other = mutants.head(key=key)(**I)[0]
        assert (np.max(np.abs(other - O) / allowed(I)[0]) < 2) == common


def test_one_number_for_all_keys_lets_the_future_in():
    """The largest logit of all keys, taken out of all: a later key decides what underflows, here all of the first
    three keys' features, and their outputs are 0 / 0."""
    I, _ = draw(4, 2, 2, 3, state=False)
    I["omega"][0] *= 16 / np.linalg.norm(I["omega"][0])
    I["k"][3] = I["omega"][0] * 2**0.25  # the logit |omega|^2 / 2 = 128
    x = {n: a.astype(U32) if np.ndim(a) else a for n, a in I.items()}
    with np.errstate(invalid="ignore", divide="ignore"):
        assert np.all(np.isnan(mutants.head(key=mutants.greatest_key)(**x)[0][:3]))
    assert np.all(np.isfinite(performer.recurrent(**{n: a[:3] if n in "qkv" else a for n, a in x.items()})[0]))


# --- the layer -------------------------------------------------------------------------------------------------------


def layer_and_tokens(T=9):
    torch.manual_seed(0)
    layer = performer_torch.Performer(heads=2, channels=4, features=6, chunk=4).double()
    return layer, tuple(torch.randn(2, T, 2, n, dtype=torch.float64) for n in (4, 4, 3))


def test_the_layer_is_the_function():
    layer, (q, k, v) = layer_and_tokens()
    O, state = layer(q, k, v)
    for b in range(2):
        for h in range(2):
            I = {"q": q[b, :, h].numpy(), "k": k[b, :, h].numpy(), "v": v[b, :, h].numpy()}
            I["omega"] = layer.omega[h].numpy()
            got = O[b, :, h], state.S[b, h], state.z[b, h]
            for y, want, most in zip(got, performer.recurrent(**I), allowed(I), strict=True):
                assert np.all(np.abs(y.numpy() - want) <= 2 * most)


@pytest.mark.parametrize("prefix", [0, 1, 5, 8])
def test_a_prefix_and_then_token_by_token(prefix):
    layer, (q, k, v) = layer_and_tokens()
    O, state = layer(q[:, :prefix], k[:, :prefix], v[:, :prefix])
    rows = [O]
    for t in range(prefix, 9):
        O, state = layer(q[:, t : t + 1], k[:, t : t + 1], v[:, t : t + 1], state)
        rows.append(O)
    want, after = layer(q, k, v)
    I = {n: x[0, :, 0].numpy() for n, x in {"q": q, "k": k, "v": v}.items()} | {"omega": layer.omega[0].numpy()}
    for y, w, most in zip((torch.cat(rows, 1)[0, :, 0], state.S[0, 0], state.z[0, 0]),
                          (want[0, :, 0], after.S[0, 0], after.z[0, 0]), allowed(I), strict=True):  # fmt: skip
        assert np.all(np.abs((y - w).numpy()) <= 2 * most)


def test_directions_are_kept_and_redrawn():
    layer, (q, k, v) = layer_and_tokens()
    other = performer_torch.Performer(heads=2, channels=4, features=6, chunk=4).double()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(q, k, v)[0], layer(q, k, v)[0])
    assert not list(layer.parameters())
    generator = torch.Generator()
    drawn = []
    for seed in (1, 1, 2):
        other.redraw(generator.manual_seed(seed))
        drawn.append(other.omega.clone())
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    rows = drawn[0][:, :4].float()
    cosines = (rows @ rows.mT) / (rows.norm(dim=2, keepdim=True) * rows.norm(dim=2)[:, None]) - torch.eye(4)
    assert cosines.abs().max() <= 128 * 2.0**-24


def test_directions_of_the_layer_are_uniform():
    W = performer_torch.directions(4000, 4, 4, torch.Generator().manual_seed(0)).double().numpy()
    x = np.full(4, -0.3)
    assert off(kernels(x, x, W), math.exp(x @ x)) < 5


def test_what_makes_no_sense():
    layer, (q, k, v) = layer_and_tokens()
    made = performer_torch.Performer
    for call, message in (
        (lambda: made(0, 4, 6), "heads is 0; it must be at least 1"),
        (lambda: made(2, 4, 0), "features is 0; it must be at least 1"),
        (lambda: made(2, 4, 6, eps=-1.0), "eps is -1.0; it must be finite and not negative"),
        (lambda: layer(q[..., :3], k[..., :3], v), r"omega has shape \(2, 6, 4\): axis K is 4, but q has K=3"),
        (lambda: performer_torch.prefix_sums(q, k, v, layer.omega * math.nan), "omega contains NaN"),
        (lambda: performer_torch.chunkwise(q, k, v, layer.omega, eps=math.inf), "eps is inf"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_the_builder_with_nothing_changed_raises_no_alarm():
    same = Mutant("same", OPERATOR.name, "nothing changed", (), forward=mutants.head(), vjp=mutants.head_vjp())
    for law in ("forward", "vjp", "causality", "split", "forms"):
        assert judge(same.subject(), law, PROFILES["short"]).status == "pass", law
