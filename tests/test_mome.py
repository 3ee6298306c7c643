"""Mixtures of memory experts: masks, collapse, selection, routers, gradients.

What is rational is tested in exact rationals, where equality is equality. Gradients are compared with autograd on an
implementation written here, within the float64 tolerances that balls give to every honest evaluation.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import sympy
import torch

from mixproof.reference import mome, operator, retention
from mixproof.reference import mome_mixing as mixing
from mixproof.reference import mome_routers as routers
from mixproof.reference.primitives import softmax
from mixproof.verify import oracle
from mixproof.verify.arithmetic import natural
from mixproof.verify.numbers.certified import balls
from mixproof.verify.numbers.exact import GF, RATIONALS

U = 2.0**-53
NAMES = ("mome", "mome.write_mix", "mome.top_k", "mome.top_k_hold")
LOGITS = NAMES[1:]
T, K, V, X = 7, 2, 3, 3


def fractions(rng, *shape):
    """Small fractions of either sign, some of them zero."""
    return np.vectorize(lambda a: Fraction(int(a), 6), otypes=[object])(rng.integers(-9, 10, size=shape))


def weights_of(rng, T, X):
    """Rows of positive fractions that sum to one."""
    n = rng.integers(1, 9, size=(T, X))
    return np.vectorize(Fraction, otypes=[object])(n, np.broadcast_to(n.sum(axis=1, keepdims=True), n.shape))


def point(seed, T=T, K=K, V=V, X=X):
    rng = np.random.default_rng(seed)
    a = np.array([Fraction(0), Fraction(-1, 2), *fractions(rng, 8)])[:X]
    inputs = {"q": fractions(rng, T, K), "k": fractions(rng, T, K), "v": fractions(rng, T, V), "a": a}
    return inputs | {"S0": fractions(rng, X, K, V)}, weights_of(rng, T, X), rng.integers(0, 2, size=(T, X))


def exact(function, **inputs):
    """A function of arrays in the rationals; the results are arrays of fractions again."""
    carried = {n: RATIONALS(x) if isinstance(x, np.ndarray) and x.dtype == object else x for n, x in inputs.items()}
    return [y.data for y in function(**carried)]


def draw(name, T, K, V, X, seed=0, zero=True):
    rng = np.random.default_rng([seed, T, K, V, X])
    inputs = {"q": rng.normal(size=(T, K)), "k": rng.normal(size=(T, K))}
    if name == "mome":
        V = K
        inputs |= {"v": rng.normal(size=(T, K)), "W": rng.normal(size=(K, X))}
    else:
        inputs |= {"v": rng.normal(size=(T, V)), "l": rng.normal(size=(T, X))}
    inputs |= {"a": np.array([0.0, 0.9, -0.5, 1.0, 0.75])[:X], "S0": rng.normal(size=(X, K, V))}
    return inputs, {"Y": rng.normal(size=(T, V)), "S": rng.normal(size=(X, K, V))}


# --- the forms and their masks ---------------------------------------------------------------------------------------


def literally(q, k, v, r, w, m, a, S0):
    """S^j_n = a_j^m S^j_{n-1} + w_nj k_n^T v_n and y_n = q_n sum_j r_nj S^j_n, number by number."""
    S, Y = [[list(row) for row in s] for s in S0], []
    for n in range(len(q)):
        for j in range(len(a)):
            for i in range(K):
                for c in range(V):
                    S[j][i][c] = (a[j] if m[n][j] else 1) * S[j][i][c] + w[n][j] * k[n][i] * v[n][c]
        Y.append([sum(r[n][j] * q[n][i] * S[j][i][c] for j in range(len(a)) for i in range(K)) for c in range(V)])
    return np.array(Y, dtype=object).reshape(len(q), V), np.array(S, dtype=object)


def weights_and_decays(name, E, m):
    ones = np.full(E.shape, Fraction(1))
    return {
        "mome": (E, ones, 0 * m + 1),
        "mome.write_mix": (ones, E, 0 * m + 1),
        "mome.top_k": (E, E, 0 * m + 1),
        "mome.top_k_hold": (E * m, E * m, m),
    }[name]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("T", [0, 1, 2, 7])
def test_forms_are_the_recurrence(name, T):
    """In exact rationals, with a zero and a negative decay, for every chunk size."""
    inputs, E, m = point(T, T=T)
    r, w, m = weights_and_decays(name, E, m)
    want = literally(**inputs, r=r, w=w, m=m)
    chunked = [exact(mixing.chunkwise, **inputs, r=r, w=w, m=m, chunk=c) for c in range(1, T + 2)]
    for got in (
        exact(mixing.recurrent, **inputs, r=r, w=w, m=m),
        exact(mixing.parallel, **inputs, r=r, w=w, m=m),
        *chunked,
    ):
        assert all(np.array_equal(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_forms_of_the_operator_are_one_function_over_a_field(name):
    spec, rng = operator(name), np.random.default_rng(1)
    sizes = {"T": 9, "K": 2, "V": 3, "D": 2, "X": 4}
    at = {x.name: GF.draw(rng, tuple(sizes[a] for a in x.axes)) for x in spec.exact_inputs}
    want = [y.data for y in spec.exact[0].function(**at)]
    for form in spec.exact:
        for options in [{"chunk": c} for c in range(1, 11)] if form.chunked else [{}]:
            got = [y.data for y in form.function(**at, **options)]
            assert all(np.array_equal(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_mask(name):
    """Y = ((Q K^T) * D) V: sum_j E_nj a_j^(n-m); sum_j a_j^(n-m) E_mj; both; with counts of selections for n and m."""
    inputs, E, m = point(3)
    a, (r, w, m) = inputs["a"], weights_and_decays(name, E, m)
    c = np.cumsum(m, axis=0) if name == "mome.top_k_hold" else np.tile(np.arange(T)[:, None], X)
    read, write = name != "mome.write_mix", name != "mome"
    D = [
        [
            sum((r[n][j] if read else 1) * a[j] ** int(c[n][j] - c[i][j]) * (w[i][j] if write else 1) for j in range(X))
            if i <= n else Fraction(0)
            for i in range(T)
        ]
        for n in range(T)
    ]  # fmt: skip
    got = mixing.mask(RATIONALS(r), RATIONALS(w), m, RATIONALS(a)).data
    assert np.array_equal(got, np.array(D, dtype=object))
    Y, _ = exact(mixing.recurrent, **(inputs | {"S0": None}), r=r, w=w, m=m)
    assert np.array_equal(((inputs["q"] @ inputs["k"].T) * got) @ inputs["v"], Y)


@pytest.mark.parametrize(("decays", "rank"), [([2, 2, 2], 1), ([2, 3, 2], 2), ([2, 3, 5], 3), ([2, 3, 5, 7, 11], 4)])
def test_rank_of_the_mask_is_the_number_of_distinct_decays(decays, rank):
    """What reaches tokens >= s from tokens <= s passes through the states: at most one dimension for each decay."""
    rng, T = np.random.default_rng(4), 7
    a = np.array([Fraction(1, d) for d in decays])
    E = weights_of(rng, T, len(a))
    ones = np.ones(E.shape, dtype=int)
    D = mixing.mask(RATIONALS(E), ones, ones, RATIONALS(a)).data
    blocks = [sympy.Matrix(D[s:, : s + 1].tolist()).rank() for s in range(T)]
    assert max(blocks) == min(rank, (T + 1) // 2)


# --- collapse, hull, relabelling, one expert -------------------------------------------------------------------------


def single(inputs, a, S0):
    return exact(retention.recurrent, **{n: inputs[n] for n in "qkv"}, gamma=RATIONALS(a), scale=1, S0=S0)


@pytest.mark.parametrize(("name", "collapses"), [("mome", True), ("mome.write_mix", True), ("mome.top_k", False)])
def test_equal_decays_are_one_memory(name, collapses):
    """Whatever the weights, if they enter once and sum to one."""
    inputs, E, m = point(5)
    r, w, m = weights_and_decays(name, E, m)
    alike = inputs | {"a": np.full(X, Fraction(2, 3)), "S0": np.full((X, K, V), Fraction(0))}
    Y, S = exact(mixing.chunkwise, **alike, r=r, w=w, m=m, chunk=3)
    one, state = single(inputs, Fraction(2, 3), None)
    assert np.array_equal(Y, one) == collapses
    if name == "mome":
        assert all(np.array_equal(s, state) for s in S)
    if name == "mome.write_mix":
        assert np.array_equal(np.sum(S, axis=0), state)


def test_different_decays_do_not_collapse():
    inputs, E, m = point(6)
    r, w, m = weights_and_decays("mome", E, m)
    Y, _ = exact(mixing.chunkwise, **inputs, r=r, w=w, m=m)
    assert not any(np.array_equal(Y, single(inputs, a, inputs["S0"][0])[0]) for a in inputs["a"])


def test_read_mix_lies_between_its_experts():
    inputs, E, m = point(7)
    r, w, m = weights_and_decays("mome", E, m)
    Y, S = exact(mixing.parallel, **inputs, r=r, w=w, m=m)
    experts = [single(inputs, a, RATIONALS(S0)) for a, S0 in zip(inputs["a"], inputs["S0"], strict=True)]
    outputs = np.stack([y for y, _ in experts])
    assert np.array_equal(Y, np.sum(E.T[:, :, None] * outputs, axis=0))
    assert np.all(np.min(outputs, axis=0) <= Y)
    assert np.all(np.max(outputs, axis=0) >= Y)
    assert all(np.array_equal(s, state) for s, (_, state) in zip(S, experts, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_one_hot_router_is_that_expert(name):
    """Logits 2000 apart: the softmax is one-hot exactly, and expert j is a retention with decay a_j."""
    j = 1
    inputs, _ = draw(name, 6, 2, 2, 3)
    ahead = np.where(np.arange(3) == j, 2000.0, 0.0)
    if name == "mome":
        inputs |= {"k": np.abs(inputs["k"]) + 1, "v": np.abs(inputs["v"]) + 1, "W": np.tile(ahead, (2, 1))}
    else:
        inputs |= {"l": np.tile(ahead, (6, 1)), "S0": inputs["S0"] * (ahead > 0)[:, None, None]}
    Y, S = operator(name).forms[2].function(**inputs)
    O, state = retention.recurrent(inputs["q"], inputs["k"], inputs["v"], inputs["a"][j], 1.0, inputs["S0"][j])
    assert np.array_equal(Y, O)
    assert np.array_equal(S[j], state)


@pytest.mark.parametrize("name", NAMES)
def test_numbering_of_experts_does_not_matter(name):
    inputs, E, m = point(8)
    r, w, m = weights_and_decays(name, E, m)
    Y, S = exact(mixing.chunkwise, **inputs, r=r, w=w, m=m, chunk=4)
    p = [2, 0, 1]
    changed = inputs | {"a": inputs["a"][p], "S0": inputs["S0"][p]}
    again, states = exact(mixing.chunkwise, **changed, r=r[:, p], w=w[:, p], m=m[:, p], chunk=4)
    assert np.array_equal(again, Y)
    assert np.array_equal(states, S[p])


# --- selection -------------------------------------------------------------------------------------------------------


def test_selection_takes_the_largest_and_of_equals_the_first():
    l = np.array([[1.0, 3.0, 2.0, 3.0], [5.0, 5.0, 5.0, 5.0], [0.0, -1.0, 0.0, 0.0], [-np.inf, 1.0, -np.inf, 2.0]])
    want = {
        1: [[0, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1]],
        2: [[0, 1, 0, 1], [1, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]],
        3: [[0, 1, 1, 1], [1, 1, 1, 0], [1, 0, 1, 1], [1, 1, 0, 1]],
    }
    for top, rows in want.items():
        assert np.array_equal(routers.selected(l, top), np.array(rows, dtype=bool))
        order = np.argsort(-l, axis=1, kind="stable")[:, :top]
        assert np.array_equal(routers.selected(l, top), np.any(order[:, :, None] == np.arange(4), axis=1))


@pytest.mark.parametrize("system", [RATIONALS, balls()], ids=lambda s: s.name)
def test_selection_needs_comparisons_alone(system):
    l = np.round(np.random.default_rng(9).normal(size=(20, 5)), 1)
    assert np.array_equal(routers.selected(system(l), 2), routers.selected(l, 2))


def test_all_experts_selected_is_the_dense_mixture():
    """Bit for bit."""
    l = np.random.default_rng(10).normal(size=(30, X))
    assert np.array_equal(routers.top_weights(l, X), softmax(l))
    inputs, _ = draw("mome.top_k", 30, K, V, X)
    dense = mixing.chunkwise(
        *(inputs[n] for n in "qkv"), *mome.both_mix(softmax(inputs["l"])), inputs["a"], inputs["S0"]
    )
    for name in ("mome.top_k", "mome.top_k_hold"):
        for top in (X, X + 1):
            got = operator(name).forms[0].function(**inputs, top=top)
            assert all(np.array_equal(g, d) for g, d in zip(got, dense, strict=True))


def test_weights_sum_to_one_only_if_normalised_after_the_selection():
    """(18). n quotients and n - 1 additions round a sum of one."""
    l = np.random.default_rng(11).normal(size=(200, 8))
    for E in (softmax(l), routers.top_weights(l, 2)):
        assert np.max(np.abs(np.sum(E, axis=1) - 1)) <= (2 * 8 - 1) * U
    dropped = np.sum(softmax(l) * routers.selected(l, 2), axis=1)
    assert np.max(dropped) < 0.95
    assert np.min(dropped) < 0.5


def test_a_constant_on_all_logits_does_nothing():
    """Bit for bit where the sum is exact: the largest logit is subtracted first."""
    l = np.round(8 * np.random.default_rng(12).normal(size=(50, X))) / 8
    for c in (-1024.0, 0.125, 3.0):
        assert np.array_equal(softmax(l + c), softmax(l))
        assert np.array_equal(routers.top_weights(l + c, 2), routers.top_weights(l, 2))


def test_output_jumps_where_the_selection_changes():
    """One expert that forgets at once and one that never does: a logit passes zero, and y goes from 0 to 2."""
    inputs = {"q": np.ones((2, 1)), "k": np.array([[1.0], [0.0]]), "v": np.ones((2, 1)), "a": np.array([0.0, 1.0])}
    below, above = np.nextafter(0.0, -1.0), np.nextafter(0.0, 1.0)
    inputs["S0"] = np.ones((2, 1, 1))
    y = [mome.top_k_chunkwise(**inputs, l=np.array([[0.0, x], [0.0, x]]), top=1)[0][1, 0] for x in (below, above)]
    assert y == [0.0, 2.0]  # expert 0 has forgotten; expert 1 still has S0, and what was written
    hold = [
        mome.top_k_hold_chunkwise(**inputs, l=np.array([[0.0, 1.0], [0.0, x]]), top=1)[0][1, 0] for x in (below, above)
    ]
    assert hold == [0.0, 2.0]


def test_held_experts_wait():
    """An expert that is never selected keeps its state, one that decays does not."""
    inputs, _ = draw("mome.top_k", 5, K, V, 3)
    inputs["l"][:, 1] = -100.0
    assert np.array_equal(mome.top_k_hold_chunkwise(**inputs)[1][1], inputs["S0"][1])
    faded = 0.9**5 * inputs["S0"][1]
    assert np.max(np.abs(mome.top_k_chunkwise(**inputs)[1][1] - faded)) <= 12 * U * np.max(np.abs(faded))


# --- readings of the router ------------------------------------------------------------------------------------------


def test_printed_shape_selects_two_subsets():
    """R2: logits s w with a number s, so the experts are ranked as by w or in reverse, whatever the token."""
    rng = np.random.default_rng(13)
    k, v, w = rng.normal(size=(10_000, 8)), rng.normal(size=(10_000, 8)), rng.normal(size=5)
    W = rng.normal(size=(8, 5))

    def subsets(l):
        return {tuple(row) for row in routers.selected(l, 2).tolist()}

    assert len(subsets(routers.R2(k, v, w))) == 2
    assert len(subsets(routers.R3(k, v, W))) == 10
    assert len(subsets(routers.R5(k, v, np.concatenate([W, W[::-1]])))) == 10
    per_channel = routers.R4(k, v, w)
    assert len({tuple(row) for row in routers.selected(per_channel, 2).reshape(-1, 5).tolist()}) == 2


def test_outer_product_router_has_rank_one():
    """R6: (k^T v) W = k^T (v W), so with k > 0 every key channel ranks the experts as v W does."""
    rng = np.random.default_rng(14)
    k, v, W = fractions(rng, 4, 3), fractions(rng, 4, 2), fractions(rng, 2, 5)
    got = routers.R6(RATIONALS(k), RATIONALS(v), RATIONALS(W)).data
    want = np.stack([np.outer(k[n], v[n]) @ W for n in range(4)])
    assert np.array_equal(got, want)
    assert all(sympy.Matrix(l.tolist()).rank() <= 1 for l in got)
    k = np.exp(rng.normal(size=(50, 3)))
    v, W = rng.normal(size=(50, 2)), rng.normal(size=(2, 5))
    chosen = routers.selected(routers.R6(k, v, W), 2)
    assert np.array_equal(chosen, np.broadcast_to(routers.selected(v @ W, 2)[:, None], chosen.shape))


def test_readings_contain_each_other():
    """R2 is R3 with equal rows, and the sum of R4 over channels."""
    rng = np.random.default_rng(15)
    k, v, w = (RATIONALS(fractions(rng, *shape)) for shape in ((4, 3), (4, 3), (5,)))
    R2 = routers.R2(k, v, w).data
    assert np.array_equal(routers.R3(k, v, np.stack([w] * 3)).data, R2)
    assert np.array_equal(np.sum(routers.R4(k, v, w), axis=1).data, R2)


READINGS = {
    "R2": ((5,), lambda k, v, W: (k * v).sum(1, keepdim=True) * W),
    "R3": ((3, 5), lambda k, v, W: torch.einsum("nd,nd,dx->nx", k, v, W)),
    "R4": ((5,), lambda k, v, W: torch.einsum("nd,nd,x->ndx", k, v, W)),
    "R5": ((6, 5), lambda k, v, W: torch.cat([k, v], 1) @ W),
    "R6": ((3, 5), lambda k, v, W: torch.einsum("nk,nv,vx->nkx", k, v, W)),
}


@pytest.mark.parametrize("name", READINGS)
def test_router_gradients_are_autograd(name):
    """Whole numbers: both are exact."""
    rng = np.random.default_rng(16)
    shape, forward = READINGS[name]
    k, v, W = (rng.integers(-5, 6, size=s).astype(float) for s in ((4, 3), (4, 3), shape))
    leaves = [torch.tensor(x, requires_grad=True) for x in (k, v, W)]
    l = forward(*leaves)
    assert np.array_equal(getattr(routers, name)(k, v, W), l.detach().numpy())
    dl = rng.integers(-5, 6, size=l.shape).astype(float)
    want = torch.autograd.grad((l * torch.tensor(dl)).sum(), leaves)
    got = getattr(routers, name + "_vjp")(dl, k, v, W)
    assert all(np.array_equal(g, w.numpy()) for g, w in zip(got, want, strict=True))


# --- gradients -------------------------------------------------------------------------------------------------------


def torch_forward(name, I, top):
    l = (I["k"] * I["v"]) @ I["W"] if name == "mome" else I["l"]
    chosen = torch.ones_like(l, dtype=torch.bool)
    if "top" in name:
        chosen = torch.tensor(routers.selected(l.detach().numpy(), top))
    E = torch.softmax(torch.where(chosen, l, -torch.inf), dim=1)
    S, rows = I["S0"], []
    for n in range(len(l)):
        a = torch.where(chosen[n], I["a"], torch.ones_like(I["a"])) if name == "mome.top_k_hold" else I["a"]
        w = torch.ones_like(E[n]) if name == "mome" else E[n]
        r = torch.ones_like(E[n]) if name == "mome.write_mix" else E[n]
        S = torch.einsum("x,xkv->xkv", a, S) + torch.einsum("x,k,v->xkv", w, I["k"][n], I["v"][n])
        rows.append(torch.einsum("k,x,xkv->v", I["q"][n], r, S))
    return {"Y": torch.stack(rows), "S": S}


def bounds(name, inputs, cotangents):
    """What two honest float64 evaluations may differ by."""
    roles = {x.name: x.role for x in operator(name).inputs}
    lead = {"token": np.s_[None, None], "state": np.s_[None, None], "parameter": np.s_[None]}
    batched = {n: x[lead[roles[n]]] if isinstance(x, np.ndarray) else x for n, x in inputs.items()}
    upstream = {n: c[None, None] for n, c in cotangents.items()}
    found = oracle.backward(operator(name), batched, upstream, natural("float64"), "float64")
    assert not found.vacuous
    return {n: 2 * b[0] if roles[n] == "parameter" else 2 * b[0, 0] for n, b in found.bound.items()}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (5, 2, 3, 3), (9, 3, 2, 5), (70, 2, 2, 2)])
@pytest.mark.parametrize("top", [1, 2])
def test_vjp_is_autograd(name, sizes, top):
    """With a zero, a negative and a unit decay, a state and its cotangent; for every chunk size."""
    inputs, cotangents = draw(name, *sizes, seed=top)
    options = {"top": top} if "top" in name else {}
    leaves = {n: torch.tensor(x, requires_grad=True) for n, x in inputs.items()}
    outputs = torch_forward(name, leaves, top)
    loss = sum((outputs[n] * torch.tensor(c)).sum() for n, c in cotangents.items())
    want = dict(zip(leaves, torch.autograd.grad(loss, leaves.values()), strict=True))
    tolerance = bounds(name, inputs | options, cotangents)
    for chunk in {1, 2, 3, sizes[0], sizes[0] + 1, 64}:
        got = operator(name).vjp(cotangents, **inputs, **options, chunk=chunk)
        assert got.keys() == want.keys()
        for n, g in got.items():
            assert g.shape == inputs[n].shape
            assert np.all(np.abs(g - want[n].numpy()) <= tolerance[n]), n


@pytest.mark.parametrize("name", NAMES)
def test_vjp_of_the_mixing_is_the_derivative(name):
    """Exactly: Y and S are linear in each of q, k, v, r, w and S0, so a difference is a derivative."""
    inputs, E, m = point(17, T=5)
    r, w, m = weights_and_decays(name, E, m)
    rng, inputs = np.random.default_rng(18), inputs | {"r": r, "w": w}
    cotangents = {"Y": fractions(rng, 5, V), "S": fractions(rng, X, K, V)}
    d = mixing.vjp(
        RATIONALS.carry({n: RATIONALS(c) for n, c in cotangents.items()}),
        **{n: RATIONALS(x) for n, x in inputs.items()},
        m=m,
        chunk=2,
    )

    def loss(changed):
        Y, S = exact(mixing.recurrent, **changed, m=m)
        return np.sum(Y * cotangents["Y"]) + np.sum(S * cotangents["S"])

    for n in ("q", "k", "v", "r", "w", "S0"):
        h = fractions(rng, *inputs[n].shape)
        assert loss(inputs | {n: inputs[n] + h}) - loss(inputs) == np.sum(d[n].data * h), n
    # of degree at most 5 in the decays: central differences at 1, 2 and 3 steps
    h = fractions(rng, X)
    step = {i: loss(inputs | {"a": inputs["a"] + i * h}) for i in (-3, -2, -1, 1, 2, 3)}
    difference = (
        Fraction(3, 4) * (step[1] - step[-1])
        - Fraction(3, 20) * (step[2] - step[-2])
        + Fraction(1, 60) * (step[3] - step[-3])
    )
    assert difference == np.sum(d["a"].data * h)


@pytest.mark.parametrize("name", LOGITS[1:])
def test_logits_that_are_not_selected_have_no_gradient(name):
    inputs, cotangents = draw(name, 20, 2, 3, 5)
    dl = operator(name).vjp(cotangents, **inputs)["l"]
    assert np.array_equal(dl != 0, routers.selected(inputs["l"], 2))


@pytest.mark.parametrize("name", NAMES)
def test_absent_state_is_zero_state(name):
    inputs, cotangents = draw(name, 9, 2, 3, 3)
    spec, zero = operator(name), 0 * inputs.pop("S0")
    for form in spec.forms:
        assert all(
            np.array_equal(x, y) for x, y in zip(form.function(**inputs), form.function(**inputs, S0=zero), strict=True)
        )
    absent, present = spec.vjp(cotangents, **inputs), spec.vjp(cotangents, **inputs, S0=zero)
    assert all(np.array_equal(absent[n], present[n]) for n in present)


@pytest.mark.parametrize("name", NAMES)
def test_empty_sequence_passes_the_states_through(name):
    inputs, cotangents = draw(name, 0, 2, 3, 3)
    for form in operator(name).forms:
        Y, S = form.function(**inputs)
        assert Y.shape == cotangents["Y"].shape
        assert np.array_equal(S, inputs["S0"])
    d = operator(name).vjp(cotangents, **inputs)
    assert np.array_equal(d["S0"], cotangents["S"])
    assert all(d[n].shape == inputs[n].shape and not np.any(d[n]) for n in inputs if n != "S0")


@pytest.mark.parametrize("name", NAMES)
def test_sequences_can_be_cut_anywhere(name):
    """In exact rationals: the states carry all that later tokens need."""
    inputs, E, m = point(19)
    r, w, m = weights_and_decays(name, E, m)
    tokens = {n: inputs[n] for n in "qkv"} | {"r": r, "w": w, "m": m}
    want = exact(mixing.parallel, **tokens, a=inputs["a"], S0=inputs["S0"])
    S, rows = inputs["S0"], []
    for start, stop in pairwise([0, 0, 1, 4, 4, T]):
        Y, S = exact(mixing.chunkwise, **{n: x[start:stop] for n, x in tokens.items()}, a=inputs["a"], S0=S, chunk=2)
        rows.append(Y)
    assert np.array_equal(np.concatenate(rows), want[0])
    assert np.array_equal(S, want[1])
