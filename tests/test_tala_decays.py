"""TALA with decays per token, per channel and per entry of the state.

The mixing is rational, so forms, witnesses and laws are compared over the rationals and a prime field: equality is
equality. Gradients are compared with PyTorch's in float64, within the bound that the gate itself uses.
"""

from fractions import Fraction
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mixproof.reference import operator, retention
from mixproof.verify.arithmetic import natural
from mixproof.verify.numbers.ball import Reading, tolerance
from mixproof.verify.numbers.certified import certified_error, enclose
from mixproof.verify.numbers.exact import GF, RATIONALS

NAMES = ("tala.time_varying", "tala.key_channel", "tala.value_channel", "tala.elementwise")
BY_TOKEN = NAMES[:3]
SIGNED, NONZERO = (-2, -1, 0, 1, 2, 3), (-2, -1, 1, 2, 3)  # halves
EXAMPLES = settings(max_examples=30)
SPREAD = {  # decays as (T, K, V)
    "tala.time_varying": np.s_[:, None, None],
    "tala.key_channel": np.s_[:, :, None],
    "tala.value_channel": np.s_[:, None, :],
    "tala.elementwise": np.s_[None],
}


@st.composite
def problems(draw, name, decays=SIGNED, most=6):
    """Inputs over the rationals, with an initial state."""
    sizes = {"T": draw(st.integers(1, most)), "K": draw(st.integers(1, 3)), "V": draw(st.integers(1, 2))}
    I = {"scale": RATIONALS(Fraction(3, 8))}
    for x in operator(name).exact_inputs:
        if x.role != "scalar":
            elements = st.sampled_from(decays) if x.name == "a" else st.integers(-3, 3)
            whole = draw(arrays(np.int64, tuple(sizes[n] for n in x.axes), elements=elements))
            I[x.name] = RATIONALS(whole) / RATIONALS(2 if x.name == "a" else 1)
    return I


def any_problem(names=NAMES, **options):
    return st.sampled_from(names).flatmap(lambda name: st.tuples(st.just(name), problems(name, **options)))


def run(name, I, form="recurrent", **options):
    return operator(name).form(form).function(**I, **options)


def same(got, want):
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    shapes = [np.shape(x) for x in got] == [np.shape(x) for x in want]
    return shapes and all(bool(np.all(np.asarray(g == w, dtype=bool))) for g, w in zip(got, want, strict=True))


def stateless(I):
    return I | {"S0": 0 * I["S0"]}


def spread(name, I):
    (T, K), V = I["q"].shape, I["v"].shape[1]
    return np.broadcast_to(I["a"][SPREAD[name]], (T, K, V))


def rows(I, name, keep):
    """The tokens `keep`, an index."""
    tokens = ("q", "k", "v") if name == "tala.elementwise" else ("q", "k", "v", "a")
    return I | {n: I[n][keep] for n in tokens}


# --- the forms are one function --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("field", [GF, RATIONALS], ids=lambda f: f.name)
@pytest.mark.parametrize("T", [0, 1, 2, 7])
def test_forms_are_one_function(name, field, T):
    random = np.random.default_rng([T, NAMES.index(name)])
    sizes = {"T": T, "K": 3, "V": 2}
    I = {}
    for x in operator(name).exact_inputs:
        whole = random.integers(-5, 6, tuple(sizes[n] for n in x.axes))
        I[x.name] = field(whole) / field(7)
    if field is GF:
        I = {n: GF.draw(random, x.shape) for n, x in I.items()}
    I["a"] = field(random.integers(0, 2, I["a"].shape)) * I["a"]  # zeros among them
    want = run(name, I)
    assert same(run(name, I, "parallel"), want)
    for chunk in range(1, T + 2):
        assert same(run(name, I, "chunkwise", chunk=chunk), want), chunk
    absent = {n: x for n, x in I.items() if n != "S0"}
    assert same(run(name, absent, "chunkwise", chunk=3), run(name, stateless(I)))


def literal(name, I):
    """o_nj = scale sum_i q_ni (a_1 ... a_n S0_ij + sum_m a_{m+1} ... a_n k_mi v_mj), in plain fractions."""
    q, k, v, A, S0 = (x.data.tolist() for x in (I["q"], I["k"], I["v"], spread(name, I), I["S0"]))
    tokens, keys, values = range(len(q)), range(len(S0)), range(len(S0[0]))

    def state(n, i, j):
        decays = [A[t][i][j] for t in range(n + 1)]
        return prod(decays) * S0[i][j] + sum(prod(decays[m + 1 :]) * k[m][i] * v[m][j] for m in range(n + 1))

    O = [[Fraction(3, 8) * sum(q[n][i] * state(n, i, j) for i in keys) for j in values] for n in tokens]
    return O, [[state(len(q) - 1, i, j) for j in values] for i in keys]


@EXAMPLES
@given(any_problem(most=4))
def test_literal_sum(problem):
    name, I = problem
    O, S = literal(name, I)
    for form in ("recurrent", "parallel", "chunkwise"):
        assert same(run(name, I, form), (RATIONALS(O), RATIONALS(S)))


def test_numbers_worked_by_hand():
    """T = 3, chunks of 2, a = 1/2, ones: the state ends at 7/4; decayed like a full chunk, it would end at 11/8."""
    one = RATIONALS(np.ones((3, 1), dtype=int))
    for name in NAMES:
        shape = {"tala.time_varying": (3,), "tala.elementwise": (1, 1)}.get(name, (3, 1))
        I = {"q": one, "k": one, "v": one, "a": RATIONALS(np.ones(shape, dtype=int)) / RATIONALS(2)}
        O, S = run(name, I, "chunkwise", chunk=2)
        assert same(O, RATIONALS([[1], [Fraction(3, 2)], [Fraction(7, 4)]]))
        assert same(S, RATIONALS([[Fraction(7, 4)]]))


# --- one kind of decay is another ------------------------------------------------------------------------------------


def constant(name, I, a):
    """The problem with the one decay a."""
    (T, K), V = I["q"].shape, I["v"].shape[1]
    shape = {"tala.time_varying": (T,), "tala.key_channel": (T, K), "tala.value_channel": (T, V)}.get(name, (K, V))
    return I | {"a": RATIONALS(np.full(shape, a))}


@EXAMPLES
@given(problems("tala.time_varying"), st.sampled_from([Fraction(-1, 2), Fraction(0), Fraction(1), Fraction(3, 4)]))
def test_constant_decays_are_retention(I, a):
    rest = {n: x for n, x in I.items() if n != "a"}
    want = retention.recurrent(**rest, gamma=RATIONALS(a))
    for name in NAMES:
        for form in ("recurrent", "parallel", "chunkwise"):
            assert same(run(name, constant(name, I, a), form), want)


@EXAMPLES
@given(problems("tala.time_varying"))
def test_channels_that_decay_alike(I):
    K, V = I["S0"].shape
    want = run("tala.time_varying", I, "chunkwise", chunk=2)
    for name, n in (("tala.key_channel", K), ("tala.value_channel", V)):
        wide = I | {"a": np.broadcast_to(I["a"][:, None], (len(I["q"]), n))}
        assert same(run(name, wide, "chunkwise", chunk=2), want)


@EXAMPLES
@given(problems("tala.time_varying"))
def test_value_channels_are_key_channels_of_the_transposed_state(I):
    """With one key channel and one value channel, which of the two decays is the same."""
    narrow = {n: x[:, :1] for n, x in I.items() if n in ("q", "k", "v")} | {"S0": I["S0"][:1, :1], "a": I["a"][:, None]}
    assert same(run("tala.key_channel", narrow, "chunkwise"), run("tala.value_channel", narrow, "chunkwise"))


@EXAMPLES
@given(problems("tala.elementwise", decays=NONZERO))
def test_rank_one_is_key_times_value_channels(I):
    """a = alpha^T beta: key channels decay by alpha, and beta moves into the values and out again, v_n / beta^n."""
    alpha, beta = I["a"][:, 0], I["a"][:1]
    (T, K), V = I["q"].shape, I["v"].shape[1]
    n = np.arange(1, T + 1)[:, None]
    got = run("tala.elementwise", I | {"a": alpha[:, None] * beta}, "chunkwise", chunk=2)
    keys = I | {"a": np.broadcast_to(alpha[None], (T, K)), "v": I["v"] / beta**n}
    O, S = run("tala.key_channel", keys, "chunkwise", chunk=3)
    assert same(got, (O * beta**n, S * beta**T))
    values = I | {"a": np.broadcast_to(beta, (T, V)), "q": I["q"] * alpha**n, "k": I["k"] / alpha**n}
    O, S = run("tala.value_channel", values, "chunkwise", chunk=3)
    assert same(got, (O, S * (alpha**T)[:, None]))


def test_full_rank_has_no_single_mask():
    """a = (1, 0) on two key channels: q.k = 1 for both keys, yet one is remembered and the other is not."""
    a, q, v = RATIONALS([[1], [0]]), RATIONALS([[1, 1], [1, 1]]), RATIONALS([[1], [0]])
    for key, want in (([1, 0], 1), ([0, 1], 0)):
        O, _ = run("tala.elementwise", {"q": q, "k": RATIONALS([key, [0, 0]]), "v": v, "a": a}, "chunkwise")
        assert same(O[1], RATIONALS([want]))


# --- laws ------------------------------------------------------------------------------------------------------------


@EXAMPLES
@given(any_problem())
def test_without_tokens_to_read_the_state_decays(problem):
    """L15: o_n = scale q_n (A_1 * ... * A_n * S0)."""
    name, I = problem
    still = I | {"v": 0 * I["v"]}
    S = np.cumprod(spread(name, I), axis=0) * I["S0"]
    O = (I["q"][:, None, :] @ S)[:, 0] * I["scale"]
    assert same(run(name, still, "chunkwise", chunk=2), (O, S[-1]))


@EXAMPLES
@given(any_problem(BY_TOKEN), st.data())
def test_zero_decay_forgets(problem, data):
    """L16: from a token on whose decay is zero, nothing before it matters, nor does the initial state."""
    name, I = problem
    at = data.draw(st.integers(0, len(I["q"]) - 1))
    kept = (np.arange(len(I["q"])) != at).reshape(-1, *(1,) * (I["a"].ndim - 1))
    I = I | {"a": np.where(kept, I["a"], 0)}
    O, S = run(name, I, "chunkwise", chunk=2)
    short = stateless(rows(I, name, slice(at, None)))
    assert same((O[at:], S), run(name, short, "parallel"))


@EXAMPLES
@given(any_problem(decays=(0,)))
def test_no_memory(problem):
    """L17: all decays zero: each token reads itself alone."""
    name, I = problem
    O, _ = run(name, I, "chunkwise", chunk=2)
    assert same(O, np.sum(I["q"] * I["k"], axis=1, keepdims=True) * I["v"] * I["scale"])


@EXAMPLES
@given(any_problem(decays=(2,)), st.randoms(use_true_random=False))
def test_undecayed_past_has_no_order(problem, random):
    """L18: all decays one: the last token reads the same whatever the order of those before it."""
    name, I = problem
    order = list(range(len(I["q"]) - 1))
    random.shuffle(order)
    moved = I | {n: I[n][[*order, len(order)]] for n in "kv"}
    (O, S), (moved_O, moved_S) = run(name, I, "chunkwise", chunk=2), run(name, moved, "chunkwise", chunk=2)
    assert same((O[-1], S), (moved_O[-1], moved_S))


def test_decayed_past_has_an_order():
    """What the law above would miss if it could not fail: at a = 1/2 the order shows."""
    one = RATIONALS([[1], [1], [1]])
    for name in NAMES:
        I = constant(name, {"q": one, "k": one, "v": RATIONALS([[1], [0], [0]])}, Fraction(1, 2))
        moved = I | {"v": RATIONALS([[0], [1], [0]])}
        assert not same(run(name, I)[0][-1], run(name, moved)[0][-1])


@EXAMPLES
@given(any_problem(), st.integers(1, 4))
def test_empty_tokens_in_front(problem, width):
    """L19: tokens without keys before a sequence that starts from no state change nothing."""
    name, I = problem
    I = stateless(I)
    tokens = ("q", "k", "v") if name == "tala.elementwise" else ("q", "k", "v", "a")
    padded = I | {n: np.concatenate([(n != "k") * I[n][[0] * width], I[n]]) for n in tokens}
    O, S = run(name, padded, "chunkwise", chunk=3)
    assert same((O[width:], S), run(name, I, "chunkwise", chunk=3))


@EXAMPLES
@given(any_problem(BY_TOKEN), st.data())
def test_empty_token_decays_what_was_before(problem, data):
    """L20: a token without a key, put in at some place, is its decay, multiplied into that of the token after it."""
    name, I = problem
    at = data.draw(st.integers(0, len(I["q"]) - 1))
    longer = rows(I, name, [*range(at + 1), *range(at, len(I["q"]))])
    here = np.arange(len(I["q"]) + 1)[:, None] == at
    longer = longer | {"k": np.where(here, 0, longer["k"])}
    O, S = run(name, longer, "chunkwise", chunk=2)
    here = (np.arange(len(I["q"])) == at).reshape(-1, *(1,) * (I["a"].ndim - 1))
    twice = I | {"a": np.where(here, I["a"] * I["a"], I["a"])}
    want_O, want_S = run(name, twice, "chunkwise", chunk=3)
    assert same((O[[*range(at), *range(at + 1, len(O))]], S), (want_O, want_S))


@EXAMPLES
@given(any_problem(BY_TOKEN, decays=NONZERO))
def test_gauge(problem):
    """L21: decays are undone by c_n = a_1 * ... * a_n: multiplied into what reads, divided out of what writes."""
    name, I = problem
    c = np.cumprod(I["a"], axis=0)
    c = c[:, None] if c.ndim == 1 else c
    O, S = run(name, I, "chunkwise", chunk=2)
    one = I | {"a": I["a"] ** 0}
    if name == "tala.value_channel":
        still_O, still_S = run(name, one | {"v": I["v"] / c}, "chunkwise", chunk=2)
        assert same((O, S), (still_O * c, still_S * c[-1]))
    else:
        still_O, still_S = run(name, one | {"q": I["q"] * c, "k": I["k"] / c}, "chunkwise", chunk=2)
        assert same((O, S), (still_O, still_S * c[-1][:, None]))


@EXAMPLES
@given(any_problem(), st.integers(1, 3))
def test_stride(problem, stride):
    """L23: with keys at every s-th token alone, these tokens are a sequence that decays by s tokens at a time."""
    name, I = problem
    T = len(I["q"])
    seen = np.arange(0, T, stride)
    keyed = I | {"k": np.where((np.arange(T) % stride == 0)[:, None], I["k"], 0)}
    O, _ = run(name, keyed, "chunkwise", chunk=2)
    if name == "tala.elementwise":
        sparse, keyed = stateless(rows(I, name, seen)) | {"a": I["a"] ** stride}, stateless(keyed)
        O, _ = run(name, keyed, "chunkwise", chunk=2)
    else:
        between = [np.prod(I["a"][max(t - stride + 1, 0) : t + 1], axis=0) for t in seen]
        sparse = rows(I, name, seen) | {"a": np.stack(between)}
    assert same(O[seen], run(name, sparse, "parallel")[0])


# --- gradients -------------------------------------------------------------------------------------------------------


def draw(name, T=13, K=3, V=2, zeros=True, seed=0):
    random = np.random.default_rng([seed, T, K, V])
    sizes = {"T": T, "K": K, "V": V}
    I = {x.name: random.standard_normal([sizes[n] for n in x.axes]) for x in operator(name).inputs}
    I["a"] = random.choice([0.0, 0.5, 1.0, -0.9] if zeros else [0.5, 1.0, -0.9], I["a"].shape)
    return I | {"scale": 0.375}, {"O": random.standard_normal((T, V)), "S": random.standard_normal((K, V))}


def autograd(name, I, G):
    """Gradients of the recurrence, token by token."""
    leaves = {n: torch.tensor(x, requires_grad=True) for n, x in I.items() if n != "scale"}
    (T, K), V = I["q"].shape, I["v"].shape[1]
    A = leaves["a"][SPREAD[name]].expand(T, K, V)
    S, loss = leaves["S0"], torch.zeros((), dtype=torch.float64)
    for q, k, v, a, g in zip(leaves["q"], leaves["k"], leaves["v"], A, torch.tensor(G["O"]), strict=True):
        S = a * S + torch.outer(k, v)
        loss = loss + I["scale"] * (q @ S) @ g
    (loss + (S * torch.tensor(G["S"])).sum()).backward()
    return {n: np.zeros(x.shape) if x.grad is None else x.grad.numpy() for n, x in leaves.items()}


def bounds(name, I, G):
    reading = Reading(natural("float64"))
    balls = {n: reading.ball(x) if n != "scale" else x for n, x in I.items()}
    found = operator(name).vjp({n: reading.ball(x) for n, x in G.items()}, **balls)
    assert not reading.vacuous
    return {n: tolerance(x, "float64") if hasattr(x, "w") else 0.0 for n, x in found.items()}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("T", [1, 2, 13, 35])
def test_vjp_is_autograd(name, T):
    """At decays of zero too, where a gradient by way of log a does not exist."""
    I, G = draw(name, T)
    assert np.any(I["a"] == 0) or T == 1
    want, error = autograd(name, I, G), bounds(name, I, G)
    for chunk in (1, 2, 5, T + 1):
        got = operator(name).vjp(G, **I, chunk=chunk)
        assert got.keys() == want.keys()
        for n in want:
            assert got[n].shape == want[n].shape
            assert np.all(np.abs(got[n] - want[n]) <= 2 * error[n]), n


@pytest.mark.parametrize("name", NAMES)
def test_vjp_is_enclosed(name):
    I, G = draw(name, 6)
    got, error = operator(name).vjp(G, **I, chunk=4), bounds(name, I, G)
    for n, enclosure in enclose(operator(name).vjp, {"cotangents": G, **I}).items():
        assert np.all(enclosure.radius <= error[n] / 8)
        assert np.all(certified_error(got[n], enclosure) <= error[n]), n


@EXAMPLES
@given(any_problem(most=5), st.data())
def test_vjp_is_the_derivative(problem, data):
    """In each decay alone, and in each entry of q, k, v and S0, the loss is a polynomial of degree one, or in a decay
    that many tokens share, of degree T: its derivative at zero step is a difference quotient of exact numbers."""
    name, I = problem
    T, (K, V) = len(I["q"]), I["S0"].shape
    whole = arrays(np.int64, T * V + K * V, elements=st.integers(-2, 2))
    flat = RATIONALS(data.draw(whole))
    G = {"O": flat[: T * V].reshape(T, V), "S": flat[T * V :].reshape(K, V)}
    grads = operator(name).vjp(G, **I, chunk=2)
    n = data.draw(st.sampled_from(sorted(grads)))
    at = data.draw(st.integers(0, max(I[n].size - 1, 0)))

    def loss(step):
        moved = RATIONALS((np.arange(I[n].size) == at).astype(int)).reshape(*I[n].shape)
        O, S = run(name, I | {n: I[n] + step * moved})
        return (np.sum(O * G["O"]) + np.sum(S * G["S"])).data.item()

    points = range(1, T + 2)  # Lagrange: the derivative at 0 of the polynomial through (0, f(0)) and these points
    slope = sum(
        (loss(Fraction(i)) - loss(Fraction(0))) / i * prod(Fraction(-j, i - j) for j in points if j != i)
        for i in points
    )
    assert grads[n].reshape(-1).data[at] == slope


def test_absent_state_is_zero_state():
    for name in NAMES:
        I, G = draw(name)
        zeros = operator(name).vjp(G, **stateless(I))
        absent = operator(name).vjp(G, **{n: x for n, x in I.items() if n != "S0"})
        assert all(np.array_equal(zeros[n], absent[n]) for n in zeros)


def test_empty_sequence_passes_the_state_through():
    for name in NAMES:
        I, G = draw(name, 0)
        O, S = run(name, I, "chunkwise")
        d = operator(name).vjp(G, **I)
        assert O.shape == (0, 2)
        assert np.array_equal(S, I["S0"])
        assert np.array_equal(d["S0"], G["S"])
        assert all(d[n].shape == I[n].shape and not np.any(d[n]) for n in ("q", "k", "v", "a"))


@pytest.mark.parametrize("name", BY_TOKEN)
def test_gradients_look_only_forward(name):
    I, G = draw(name, zeros=False)
    early = {"O": np.where(np.arange(13)[:, None] < 4, G["O"], 0), "S": 0 * G["S"]}
    d = operator(name).vjp(early, **I, chunk=3)
    assert all(not np.any(d[n][4:]) and np.all(np.any(d[n][:4].reshape(4, -1), axis=1)) for n in ("q", "k", "v", "a"))
