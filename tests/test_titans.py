"""Titans against a transcription that asks PyTorch for the inner gradients; what the survey claims; the layer.

The linear memories are rational: what is claimed of them is decided over the fractions. Two evaluations of one quantity
may differ by twice what the gate allows one of them.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch

from mixproof.reference import operator, titans, titans_mlp
from mixproof.reference.primitives import settled, substituted
from mixproof.verify import oracle
from mixproof.verify.arithmetic import natural, round_to
from mixproof.verify.numbers.ball import Reading, tolerance
from mixproof.verify.numbers.exact import RATIONALS
from mixproof.verify.subjects.torch import titans as in_torch
from mixproof.verify.subjects.torch.titans import NeuralMemory

LINEAR, CHUNKED, MLP = operator("titans.linear"), operator("titans.chunked"), operator("titans.mlp")
SIZES = [(1, 1, 1, 1), (2, 3, 2, 4), (7, 2, 3, 1), (13, 4, 2, 3)]  # T, K, V, F
U32 = np.float32
half, quarter = Fraction(1, 2), Fraction(1, 4)


def draw(op, T, K, V, F=1, states=True, seed=0):
    """Inputs in their domains, gates of zero and one among them; and cotangents."""
    g = np.random.default_rng([seed, T, K, V])
    sizes = {"T": T, "K": K, "V": V, "F": F}
    I = {x.name: g.standard_normal([sizes[a] for a in x.axes]) for x in op.inputs if x.role != "scalar"}
    I["k"] /= np.linalg.norm(I["k"], axis=1, keepdims=True)
    I |= {n: g.choice([0, 0.1, 0.5, 0.9, 1], T) for n in ("alpha", "eta")} | {"theta": g.choice([0, 0.1, 0.25, 0.5], T)}
    I |= {n: x / 2 for n, x in I.items() if n[0] in "IWS" and op is MLP}
    G = {y.name: g.standard_normal([sizes[a] for a in y.axes]) for y in op.outputs}
    return {n: x for n, x in I.items() if states or not n.endswith("0")}, G


def allowed(op, I, G):
    """Bounds in float64 of the outputs and of the gradients."""
    reading = Reading(natural("float64"))
    balls = {n: reading.ball(x) if np.ndim(x) else x for n, x in I.items()}
    outputs = {n: tolerance(b, "float64") for n, b in op.evaluate(balls).items()}
    grads = op.vjp({n: reading.ball(x) for n, x in G.items()}, **balls)
    assert not reading.vacuous
    return outputs, {n: tolerance(d, "float64") for n, d in grads.items()}


# --- an independent transcription ------------------------------------------------------------------------------------


def trained(predict, weights, momenta, q, k, v, alpha, eta, theta, size=1):
    """(9) to (15): one step of gradient descent a token, for any network, PyTorch's gradient of the loss."""
    rows = []
    for t in range(len(q)):
        if t % size == 0:
            old = [W if W.requires_grad else W.requires_grad_() for W in weights]
        loss = torch.sum((predict(old, k[t]) - v[t]) ** 2)
        grads = torch.autograd.grad(loss, old, create_graph=True)
        momenta = [eta[t] * S - theta[t] * g for S, g in zip(momenta, grads, strict=True)]
        weights = [(1 - alpha[t]) * W + S for W, S in zip(weights, momenta, strict=True)]
        rows.append(predict(weights, q[t]))
    return torch.stack(rows), *weights, *momenta


def linear(weights, k):
    return weights[0] @ k


def network(weights, k):
    return weights[1] @ torch.nn.functional.silu(weights[0] @ k)


def witness(op, I):
    x = {n: torch.tensor(a, requires_grad=True) for n, a in I.items() if np.ndim(a)}
    tokens = [x[n] for n in ("q", "k", "v", "alpha", "eta", "theta")]
    if op is MLP:
        weights = [x.get(f"W{i}0", x[f"I{i}"]) for i in "12"]
        momenta = [x.get(f"S{i}0", torch.zeros_like(x[f"I{i}"])) for i in "12"]
        return x, trained(network, weights, momenta, *tokens)
    zero = torch.zeros(I["v"].shape[1], I["k"].shape[1], dtype=torch.float64)
    return x, trained(linear, [x.get("M0", zero)], [x.get("S0", zero)], *tokens, size=I.get("size", 1))


@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("op", "size"), [(LINEAR, 0), (CHUNKED, 1), (CHUNKED, 3), (CHUNKED, 4), (MLP, 0)])
def test_it_is_gradient_descent_on_the_loss(op, size, sizes, states):
    I, G = draw(op, *sizes, states=states)
    I |= {"size": size} if size else {}
    x, want = witness(op, I)
    bounds, gradient_bounds = allowed(op, I, G)
    for form in op.forms:
        got = dict(zip(bounds, form.function(**I), strict=True))
        for (n, bound), w in zip(bounds.items(), want, strict=True):
            assert np.all(np.abs(got[n] - w.detach().numpy()) <= 2 * bound), (form.name, n)
    torch.stack([torch.sum(w * torch.tensor(G[n])) for n, w in zip(bounds, want, strict=True)]).sum().backward()
    grads = op.vjp(G, **I)
    for n, leaf in x.items():
        expected = np.zeros_like(I[n]) if leaf.grad is None else leaf.grad.numpy()
        assert np.all(np.abs(grads[n] - expected) <= 2 * gradient_bounds[n]), n


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_gradients_do_not_depend_on_the_chunk(chunk):
    I, G = draw(LINEAR, 7, 3, 2)
    _, bounds = allowed(LINEAR, I, G)
    whole, parts = titans.vjp(G, **I), titans.vjp(G, **I, chunk=chunk)
    assert all(np.all(np.abs(whole[n] - parts[n]) <= 2 * bounds[n]) for n in bounds)


# --- what is claimed, over the fractions -----------------------------------------------------------------------------


def exact(rows):
    return RATIONALS(
        [[Fraction(x) for x in row] for row in rows] if np.ndim(rows) == 2 else [Fraction(x) for x in rows]
    )


def problem(k, v, alpha=0, eta=0, theta=half, q=None, **states):
    """Over the fractions; gates that all tokens share are given as one number."""
    gates = {"alpha": alpha, "eta": eta, "theta": theta}
    I = {"q": exact(k if q is None else q), "k": exact(k), "v": exact(v)}
    I |= {n: exact([x] * len(k) if np.ndim(x) == 0 else x) for n, x in gates.items()}
    return I | {n: exact(x) for n, x in states.items()}


def random_problem(T=6, K=2, V=2, seed=0, **given):
    g = np.random.default_rng(seed)
    names = {"k": (T, K), "v": (T, V), "q": (T, K), "M0": (V, K), "S0": (V, K)}
    I = {n: g.integers(-3, 4, s).tolist() for n, s in names.items()}
    I |= {n: [Fraction(int(i), 4) for i in g.integers(0, 5, T)] for n in ("alpha", "eta", "theta")}
    return problem(**(I | given))


def run(op, I, form="recurrent", **options):
    return dict(zip(("y", "M", "S"), op.form(form).function(**I, **options), strict=True))


def same(a, b):
    return bool(np.all(np.asarray(a == b, dtype=bool)))


def test_numbers_worked_by_hand():
    """T = 2, everything one, gates one half, steps one quarter: the second token finds 1/2 missing, or, in one chunk
    with the first, 1 as the first did."""
    I = problem([[1], [1]], [[1], [1]], alpha=half, eta=half, theta=quarter)
    for op, forms, y in (
        (LINEAR, ("recurrent", "chunkwise"), [half, 3 * quarter]),
        (CHUNKED, ("recurrent", "parallel", "scans"), [half, 1]),
    ):
        for form in forms:
            assert same(run(op, I, form)["y"], exact([[x] for x in y]))
            assert same(run(op, I, form)["S"], exact([[y[1] - quarter]]))


def test_delta_rule():
    """Without momentum and forgetting a step of one half on a key of norm one writes the value exactly."""
    I = random_problem(k=[[Fraction(3, 5), Fraction(4, 5)], [1, 0]] * 3, alpha=0, eta=0, theta=half, S0=[[0, 0]] * 2)
    assert same(run(LINEAR, I | {"q": I["k"]})["y"], I["v"])
    wrong = I | {"theta": I["theta"] / 2}  # as if the loss had a factor 1/2
    assert not same(run(LINEAR, wrong | {"q": I["k"]})["y"], I["v"])


def test_gates_at_their_ends():
    """alpha = 1 leaves the momentum alone; eta = 0 leaves nothing of it; theta = 0 writes nothing."""
    last = run(LINEAR, random_problem(alpha=1))
    assert same(last["M"], last["S"])
    one, two = random_problem(eta=0), random_problem(eta=0, S0=[[7, -5], [1, 9]])
    assert all(same(x, y) for x, y in zip(run(LINEAR, one).values(), run(LINEAR, two).values(), strict=True))
    I = random_problem(theta=0, M0=[[0, 0]] * 2, S0=[[0, 0]] * 2)
    assert same(run(LINEAR, I, "chunkwise")["y"], 0 * I["v"])


@pytest.mark.parametrize("theta", [0, quarter, half, Fraction(99, 100), 1, Fraction(101, 100), 2])
@pytest.mark.parametrize("k", [[1, 0], [3, 4], [Fraction(3, 5), Fraction(4, 5)]])
def test_the_first_write_does_not_raise_the_loss_up_to_a_step_of_one(theta, k):
    """||M_1 k - v||^2 = (1 - 2 theta ||k||^2)^2 ||M_0 k - v||^2."""
    norm = sum(Fraction(x) ** 2 for x in k)
    I = problem([k], [[2]], theta=theta, M0=[[1, -1]])
    before = Fraction(2) - k[0] + k[1]
    after = I["v"] - run(LINEAR, I)["y"]
    assert same(after * after, exact([[((1 - 2 * theta * norm) * before) ** 2]]))
    assert (((1 - 2 * theta * norm) * before) ** 2 <= before**2) == (theta * norm <= 1)


GRID = list(product([0, 0.25, 0.9, 1], [0, 0.5, 0.9, 1], [0.05, 0.3, 0.49, 0.51, 0.9, 1.4, 1.99, 2.1]))


def growth(alpha, eta, theta):
    """The spectral radius of one step on keys of norm one and values of zero."""
    step = np.array([[1 - alpha - 2 * theta, eta], [-2 * theta, eta]])
    return np.max(np.abs(np.linalg.eigvals(step)))


@pytest.mark.parametrize(("alpha", "eta", "theta"), GRID)
def test_steps_are_stable_up_to_jurys_bound(alpha, eta, theta):
    """theta ||k||^2 < (2 - alpha)(1 + eta) / 2, and, what the survey leaves out, eta (1 - alpha) < 1: momentum that
    nothing is ever lost of swings on for ever."""
    T = 400
    bound = (2 - alpha) * (1 + eta) / 2
    M0, S0 = np.ones((1, 1)), np.zeros((1, 1))
    gates = {n: np.full(T, x) for n, x in (("alpha", alpha), ("eta", eta), ("theta", theta))}
    y, _, _ = titans.recurrent(np.ones((T, 1)), np.ones((T, 1)), np.zeros((T, 1)), **gates, M0=M0, S0=S0)
    start, end = np.max(np.abs(y[:20])), np.max(np.abs(y[-20:]))
    if theta < bound and eta * (1 - alpha) < 1:
        assert growth(alpha, eta, theta) < 1
        assert end < 1e-3
    elif theta < bound:
        assert abs(growth(alpha, eta, theta) - 1) < 2.0**-20
        assert 0.2 < end <= 2 * start
    else:
        assert growth(alpha, eta, theta) > 1
        assert end > 10 * start


def test_a_matrix_holds_no_more_associations_than_it_has_columns():
    """Keys (1, 0), (0, 1), (3/5, 4/5) with values 1, 1, 0: squared errors add up to 0.98 at least, and exact writes
    undo each other: after the third the first is off by 21/25. Two of them are kept."""
    k, v = [[1, 0], [0, 1], [Fraction(3, 5), Fraction(4, 5)]], [[1], [1], [0]]
    best = np.linalg.lstsq(np.array(k, float), np.array(v, float), rcond=None)
    assert abs(best[1][0] - 0.98) < 2.0**-40
    last = run(LINEAR, problem(k, v))
    assert same(last["M"], exact([[Fraction(4, 25), Fraction(-3, 25)]]))
    assert same(last["M"] @ exact(k[0]) - exact(v[0]), exact([Fraction(-21, 25)]))
    fits = run(LINEAR, problem(k[:2] * 2, v[:2] * 2))
    assert same(fits["y"], exact(v[:2] * 2))


@pytest.mark.parametrize("seed", range(3))
def test_chunks_of_one_token_are_the_online_rule(seed):
    I = random_problem(seed=seed)
    for form in ("recurrent", "parallel", "scans"):
        got = run(CHUNKED, I | {"size": 1}, form)
        assert all(same(x, y) for x, y in zip(got.values(), run(LINEAR, I).values(), strict=True))


ORTHOGONAL = [[1, 2], [-2, 1]]
CONDITIONS = {
    "no forgetting, momentum that no key sees": ({"alpha": 0, "S0": [[0, 0], [0, 0]]}, True),
    "nothing before": ({"M0": [[0, 0], [0, 0]], "S0": [[0, 0], [0, 0]]}, True),
    "forgetting": ({"alpha": half, "S0": [[0, 0], [0, 0]]}, False),
    "momentum": ({"alpha": 0, "S0": [[1, 0], [0, 1]]}, False),
    "keys that meet": ({"k": [[1, 2], [1, 1]], "M0": [[0, 0], [0, 0]], "S0": [[0, 0], [0, 0]]}, False),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_when_a_chunk_of_two_is_the_online_rule(name):
    """Only if no key of a chunk sees what changed since it began."""
    given, equal = CONDITIONS[name]
    I = random_problem(T=2, **({"k": ORTHOGONAL, "eta": half, "theta": quarter} | given))
    fresh, stale = run(LINEAR, I), run(CHUNKED, I | {"size": 2})
    assert same(fresh["M"], stale["M"]) == equal


@pytest.mark.parametrize("form", ["recurrent", "parallel", "scans"])
def test_a_chunked_memory_is_handed_on_between_chunks_only(form):
    I = random_problem(T=7) | {"size": 3}
    tokens = ("q", "k", "v", "alpha", "eta", "theta")
    for at in range(8):
        one = run(CHUNKED, I | {n: I[n][:at] for n in tokens}, form)
        two = run(CHUNKED, I | {n: I[n][at:] for n in tokens} | {"M0": one["M"], "S0": one["S"]}, form)
        assert same(two["M"], run(CHUNKED, I, form)["M"]) == (at in (0, 3, 6, 7))


def test_turning_keys_queries_and_memory_together_changes_no_output():
    I = random_problem()
    R = exact([[Fraction(3, 5), Fraction(-4, 5)], [Fraction(4, 5), Fraction(3, 5)]])
    turned = I | {n: I[n] @ R for n in ("q", "k", "M0", "S0")}
    for op in (LINEAR, CHUNKED):
        assert same(run(op, turned)["y"], run(op, I)["y"])
    assert not same(run(LINEAR, I | {"k": I["k"] @ R})["y"], run(LINEAR, I)["y"])


# --- two layers ------------------------------------------------------------------------------------------------------


def test_an_empty_network_stays_empty():
    """Of W1 = W2 = 0 both gradients are zero; a linear memory of zero learns at once."""
    I, _ = draw(MLP, 7, 3, 2, 4, states=False)
    empty = I | {n: 0 * I[n] for n in ("I1", "I2")}
    for form in MLP.forms:
        assert not any(np.any(x) for x in form.function(**empty))
        assert all(np.any(x) for x in form.function(**I))
    tokens = {n: I[n] for n in ("q", "k", "v", "alpha", "eta")} | {"theta": np.full(7, 0.5)}
    assert np.any(titans.chunkwise(**tokens)[0])


def test_a_network_is_not_linear_in_its_values():
    I, _ = draw(MLP, 5, 3, 2, 4)
    once, twice = (titans_mlp.dual(**I | {"v": c * I["v"]})[0] for c in (1, 2))
    assert np.max(np.abs(twice - 2 * once)) > 0.1


def test_derivatives_of_silu():
    a = torch.linspace(-30, 30, 61, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(torch.nn.functional.silu(a).sum(), a, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), a)
    reading = Reading(natural("float64"))
    ball = reading.ball(a.detach().numpy())
    for f, want in ((titans_mlp.slope, first.detach()), (titans_mlp.curvature, second)):
        assert np.all(np.abs(f(a.detach().numpy()) - want.numpy()) <= 2 * f(ball).radius)


# --- balls -----------------------------------------------------------------------------------------------------------


def system(T, seed=0):
    """L and B of a stable memory whose keys see each other."""
    g = np.random.default_rng([seed, T])
    k = g.standard_normal((T, 3)) + 1
    k /= np.linalg.norm(k, axis=1, keepdims=True)
    return np.tril(k @ k.T, -1).astype(U32), g.standard_normal((T, 2)).astype(U32)


@pytest.mark.parametrize("T", [1, 7, 60])
def test_triangular_systems_in_float32_stay_in_their_balls(T):
    """Row by row, by PyTorch, by the inverse; a system with one entry changed does not."""
    L, B = system(T)
    reading = Reading(natural("float32"))
    ball = substituted(reading.ball(L), reading.ball(B))
    one, rows, right = np.eye(T, dtype=U32), torch.tensor(L), torch.tensor(B)
    inverse = torch.linalg.solve_triangular(rows, torch.eye(T), upper=False, unitriangular=True)
    found = [
        substituted(L, B),
        torch.linalg.solve_triangular(rows, right, upper=False, unitriangular=True).numpy(),
        (inverse @ right).numpy(),
        substituted(L, one) @ B,
    ]
    assert all(x.dtype == U32 and np.all(np.abs(x - ball.v) <= ball.radius) for x in found)
    if T > 1:
        changed = L.copy()
        changed[-1, 0] += U32(2.0**-10)
        assert np.any(np.abs(substituted(changed, B) - ball.v) > ball.radius)


def test_the_radius_of_a_stable_recurrence_does_not_explode():
    """60 writes, each of which all later ones read: its radius is that of 7 times a small number. The ball of nested
    sums would double with every token."""
    few, many = (np.max(substituted(*map(Reading(natural("float32")).ball, system(T))).radius) for T in (7, 60))
    assert few < many < 300 * few
    L, B = map(Reading(natural("float32")).ball, system(60))
    nested = substituted.__wrapped__(L, B)
    assert np.max(nested.radius) > 1e6 * many


def test_a_settled_ball_starts_afresh():
    x = Reading(natural("float32")).ball(np.array([3.0])) * 5.0
    assert np.array_equal(settled(x).radius, x.radius)
    assert (settled(x).w, settled(x).n, settled(x).m) == (0, 1, abs(x.v) + x.radius)


# --- PyTorch ---------------------------------------------------------------------------------------------------------

B_, T_, D_, H_ = 2, 9, 6, 3


def made(dtype=torch.float64, **options):
    torch.manual_seed(0)
    layer = NeuralMemory(**{"d_model": D_, "heads": H_, "chunk": 4} | options).to(dtype)
    if layer.hidden is None:
        torch.nn.init.normal_(layer.memory[0])
    return layer


def sequence(T=T_, dtype=torch.float64):
    return torch.randn(B_, T, D_, generator=torch.Generator().manual_seed(1), dtype=dtype)


KINDS = pytest.mark.parametrize("hidden", [None, 4])


def expected(layer, x):
    """What the reference makes of the layer's tokens, and its bounds: outputs with heads before tokens, states."""
    op = LINEAR if layer.hidden is None else MLP
    names = ("q", "k", "v", "alpha", "eta", "theta")
    I = {n: a.detach().numpy().swapaxes(1, 2) for n, a in zip(names, layer.tokens(x), strict=True)}
    learned = [W.detach().numpy() for W in layer.memory]
    I |= {"M0": np.stack(2 * learned)} if op is LINEAR else {"I1": learned[0], "I2": learned[1]}
    return oracle.forward(op, I, natural("float64"), "float64")


@KINDS
def test_the_layer_continues_where_it_was(hidden):
    """A prefill of 0, 1, 4 or 9 tokens, then one at a time, against the reference for all of them at once."""
    layer, x, captured = made(hidden=hidden), sequence(), []
    layer.W_O.register_forward_pre_hook(lambda _, args: captured.append(args[0].detach()))
    want = expected(layer, x)
    for start in (0, 1, 4, 9):
        captured.clear()
        _, state = layer(x[:, :start])
        for t in range(start, T_):
            y, state = layer.step(x[:, t], state)
            assert y.shape == (B_, D_)
        y = torch.cat(captured, dim=1).unflatten(2, (H_, -1)).transpose(1, 2)
        for (n, value), got in zip(want.value.items(), (y, *state), strict=True):
            assert np.all(np.abs(got.detach().numpy() - value) <= 2 * want.bound[n]), (start, n)


@KINDS
def test_saved_and_loaded(hidden):
    layer, x = made(hidden=hidden), sequence()
    torch.manual_seed(7)
    other = NeuralMemory(D_, H_, hidden=hidden, chunk=4).double()
    assert not torch.equal(other(x)[0], layer(x)[0])
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x)[0], layer(x)[0])


@KINDS
def test_every_parameter_learns(hidden):
    layer = made(hidden=hidden)
    layer(sequence())[0].square().sum().backward()
    assert all(torch.count_nonzero(p.grad) == p.numel() for p in layer.parameters())


def test_a_new_layer():
    """An empty linear memory, a random network; gates at one half, steps at one quarter; keys of norm one."""
    torch.manual_seed(0)
    assert not torch.any(NeuralMemory(D_, H_).memory[0])
    assert all(torch.any(W) for W in NeuralMemory(D_, H_, hidden=4).memory)
    layer = NeuralMemory(D_, H_, d_head=5)
    q, k, v, *gates = layer.tokens(sequence(dtype=torch.float32))
    assert v.shape == (B_, T_, H_, 5)
    assert all(torch.all((x.norm(dim=-1) - 1).abs() < 2.0**-20) for x in (q, k))
    for gate, most in zip(gates, (1, 1, 0.5), strict=True):
        assert torch.all((gate > 0) & (gate < most))
    assert sum(p.numel() for p in layer.parameters()) == 4 * D_ * H_ * 5 + 3 * H_ * (D_ + 1) + H_ * 25


def test_a_network_learns_without_recorded_gradients():
    layer, x = made(hidden=4), sequence()
    want = layer(x)[0]
    with torch.no_grad():
        got = layer(x)[0]
    with torch.inference_mode():
        inferred = layer(x)[0]
    assert torch.equal(got, want.detach())
    assert torch.equal(inferred, want.detach())
    assert not got.requires_grad


@pytest.mark.parametrize("form", [in_torch.chunkwise, in_torch.chunked])
def test_half_precision_is_rounded_at_the_end_only(form):
    I, _ = draw(LINEAR, 9, 4, 3)
    x = {n: torch.tensor(a)[None].unsqueeze(1 if n.endswith("0") else 2) for n, a in I.items()}
    x = {n: a.bfloat16() if n in ("q", "k", "v", "alpha", "eta", "theta") else a.float() for n, a in x.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, M, S = form(**x)
    want = form(**{n: a.float() for n, a in x.items()})
    assert y.dtype == torch.bfloat16
    assert M.dtype == S.dtype == torch.float32
    assert torch.equal(y, want[0].bfloat16())
    assert torch.equal(M, want[1])


def test_a_small_share_is_forgotten_in_bfloat16_too():
    """1 - 1/1024 is one in bfloat16, so a gate computed there would forget nothing; after 1024 tokens 1/e is left."""
    assert round_to(np.array(1 - 2.0**-10), "bfloat16") == 1
    T = 1024
    gate, zero = torch.full((1, T, 1), 2.0**-10, dtype=torch.bfloat16), torch.zeros(1, T, 1, dtype=torch.bfloat16)
    x = torch.zeros(1, T, 1, 1, dtype=torch.bfloat16)
    _, M, _ = in_torch.chunkwise(x, x, x, gate, zero, zero, M0=torch.ones(1, 1, 1, 1))
    assert abs(M.item() - np.exp(-1)) < 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 4}, "heads is 4; it must divide the 6 channels"),
        ({"d_model": 0}, "d_model is 0; it must be at least 1"),
        ({"hidden": 0}, "hidden is 0; it must be at least 1"),
        ({"d_head": 0}, "d_head is 0; it must be at least 1"),
        ({"chunk": 0}, "chunk is 0; it must be at least 1"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        made(**options)


def test_arguments_that_make_no_sense():
    layer, x = made(), sequence()
    tokens = layer.tokens(x)
    I, _ = draw(CHUNKED, 3, 2, 2)
    for call, message in (
        (lambda: layer(x[0]), r"x has shape \(9, 6\); expected \(B, T, 6\)"),
        (lambda: layer.step(x), r"x has shape \(2, 9, 6\); step expects \(B, 6\)"),
        (lambda: in_torch.chunkwise(*tokens[:4], tokens[4][:, :3], tokens[5]), r"eta has shape .*: axis T is 3"),
        (lambda: in_torch.chunkwise(*tokens, chunk=0), "chunk is 0; it must be at least 1"),
        (lambda: in_torch.chunked(*tokens, size=0), "size is 0; it must be at least 1"),
        (lambda: in_torch.scanned(*tokens, size=-1), "size is -1; it must be at least 1"),
        (lambda: in_torch.mlp(*tokens, *(layer.memory[0],) * 2, W10=x), r"W10 has shape \(2, 9, 6\); expected axes"),
        *((lambda f=f: f.function(**I, size=0), "size is 0; it must be at least 1") for f in CHUNKED.forms),
    ):
        with pytest.raises(ValueError, match=message):
            call()
