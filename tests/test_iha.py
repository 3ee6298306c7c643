"""Interleaved head attention against a transcription, its limits, what it costs, and its layer."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from witness import assert_agrees, close, draw

from mixproof.reference import iha, operator
from mixproof.reference.primitives import turned
from mixproof.verify.subjects.boundary_torch import counted
from mixproof.verify.subjects.torch.iha import InterleavedHeadAttention, index_causal, interleaved

OPERATORS = {"iha": iha.OPERATOR, "iha.index_causal": iha.INDEX_CAUSAL}
NAMES = tuple(OPERATORS)
SIZES = {"T": 5, "P": 2, "N": 3, "K": 2, "V": 3, "J": 2}


def survey(q, k, v, aq, ak, av, r, scale=None, K0=None, V0=None, index=False):
    """12.1 read with J pseudo-heads for each head a: place by place, each of one token t and pseudo-head p."""
    T, N, K = q.shape
    J = r.shape[1]
    Kc, Vc = (x if before is None else torch.cat([before, x]) for before, x in ((K0, k), (V0, v)))
    P = len(Kc) - T
    O = torch.zeros(T, N, v.shape[2], dtype=q.dtype)
    for a, t, p in itertools.product(range(N), range(T), range(J)):
        query = sum(aq[a, p, n] * q[t, n] for n in range(N))
        logits, values = [], []
        for j, m in itertools.product(range(len(Kc)), range(J)):
            if j * J + m <= (P + t) * J + p if index else j <= P + t:
                key = sum(ak[a, m, n] * Kc[j, n] for n in range(N))
                logits.append(query @ key * (K**-0.5 if scale is None else scale))
                values.append(sum(av[a, m, n] * Vc[j, n] for n in range(N)))
        e = torch.exp(torch.stack(logits))
        one = torch.zeros(T, N, 1, dtype=q.dtype)
        one[t, a] = 1
        O = O + one * (r[a, p] * (e / e.sum()) @ torch.stack(values))
    return O, Kc, Vc


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("absent", "scale"), [(True, None), (False, 0.75)])
def test_it_is_the_reading_of_the_survey(name, absent, scale):
    o = OPERATORS[name]
    I = draw(o, absent=absent, **SIZES | ({"P": 0} if absent else {}))

    def witness(**inputs):
        return survey(**inputs, index=name == "iha.index_causal")

    assert_agrees(o, witness, I | {"scale": scale})


# --- limits ----------------------------------------------------------------------------------------------------------


def multi_head(I):
    """`softmax_attention.cached` with a group for each head."""
    cached = {"q": I["q"][:, :, None]} | {n: I[n] for n in ("k", "v", "K0", "V0") if n in I}
    return operator("softmax_attention.cached").evaluate(cached)["O"][:, :, 0]


def replicated(I, J):
    """Every pseudo-head is its head, and outputs are averaged."""
    N = I["q"].shape[1]
    same = np.broadcast_to(np.eye(N)[:, None], (N, J, N)).copy()
    return I | {"aq": same, "ak": same, "av": same, "r": np.full((N, J), 1 / J)}


@pytest.mark.parametrize("name", NAMES)
def test_one_pseudo_head_that_is_its_head_is_multi_head_attention(name):
    o = OPERATORS[name]
    I = replicated(draw(o, **SIZES | {"J": 1}), 1)
    for form in o.forms:
        assert close(o, o.evaluate(I, form.name)["O"], multi_head(I), I), form.name


@pytest.mark.parametrize("J", [2, 3])
def test_copies_of_heads_change_nothing_unless_places_are_masked(J):
    """Equal keys J times over: the same weights. A mask of places counts the query's own token p + 1 times of J."""
    I = replicated(draw(iha.OPERATOR, **SIZES | {"J": J}), J)
    assert close(iha.OPERATOR, iha.OPERATOR.evaluate(I)["O"], multi_head(I), I)
    places = iha.INDEX_CAUSAL.evaluate(I)["O"]
    assert np.max(np.abs(places - multi_head(I))) > 0.05
    x = {n: np.zeros((2, 1, 1)) for n in "qk"} | {"v": np.array([0.0, 1.0])[:, None, None]}
    one = {n: np.ones((1, J, 1)) for n in ("aq", "ak", "av")} | {"r": np.full((1, J), 1 / J)}
    p = (np.arange(J) + 1) / (J + np.arange(J) + 1)  # of the second of two tokens with equal logits
    assert abs(iha.INDEX_CAUSAL.evaluate(x | one)["O"][1, 0, 0] - p.mean()) < 1e-15
    assert abs(iha.OPERATOR.evaluate(x | one)["O"][1, 0, 0] - 1 / 2) < 1e-15


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_pseudo_heads_matters_to_a_mask_of_places_alone(name):
    o = OPERATORS[name]
    I = draw(o, **SIZES | {"J": 3})
    order = [2, 0, 1]
    other = o.evaluate(I | {n: I[n][:, order] for n in ("aq", "ak", "av", "r")})["O"]
    assert close(o, o.evaluate(I)["O"], other, I) == (name == "iha")


@pytest.mark.parametrize("name", NAMES)
def test_logits_scale_with_both_mixtures(name):
    """Powers of two, so bit for bit; and values with av and with r."""
    o = OPERATORS[name]
    I = draw(o, **SIZES)
    O = o.evaluate(I)["O"]
    assert np.array_equal(O, o.evaluate(I | {"aq": 8 * I["aq"], "ak": I["ak"] / 8})["O"])
    assert np.array_equal(8 * O, o.evaluate(I | {"av": 4 * I["av"], "r": 2 * I["r"]})["O"])


def test_mixing_raises_logits_by_the_norms_of_its_weights():
    """|q~ . k~| <= |aq|_1 |ak|_1 max |q . k|, attained where all heads are alike and all weights positive."""
    I = draw(iha.OPERATOR, absent=True, **SIZES | {"P": 0})
    for same in (False, True):
        if same:
            I |= {n: np.abs(I[n]) for n in ("aq", "ak")} | {n: np.broadcast_to(I[n][:, :1], I[n].shape) for n in "qk"}
        most = max(np.max(np.abs(I["q"][:, m] @ I["k"][:, n].T)) for m in range(3) for n in range(3))
        for a in range(3):
            found = np.abs(iha.mixed(I["aq"][a], I["q"]) @ iha.mixed(I["ak"][a], I["k"]).T).max()
            bound = np.abs(I["aq"][a]).sum(1).max() * np.abs(I["ak"][a]).sum(1).max() * most
            assert found <= bound * (1 + 1e-14)
            assert (found > 0.99 * bound) == same


def test_rotations_by_the_token_commute_with_mixing():
    """So base heads may be cached turned or not. By the place t J + p they do not."""
    T, N, J, K = 6, 3, 2, 4
    g = np.random.default_rng(0)
    x, a = g.standard_normal((T, N, K)), g.standard_normal((J, N))
    theta, n = 10000.0 ** -(np.arange(K // 2) / (K // 2)), np.arange(T)
    first = iha.mixed(a, np.stack([turned(x[:, h], n, theta) for h in range(N)], axis=1))
    assert np.max(np.abs(first - turned(iha.mixed(a, x), np.repeat(n, J), theta))) < 1e-14
    assert np.max(np.abs(first - turned(iha.mixed(a, x), np.arange(T * J), theta))) > 0.5


# --- claims ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("N", "J"), [(4, 6), (4, 3), (3, 3)])
def test_a_head_has_as_many_maps_as_pairs_of_heads_at_most(N, J):
    """I1: J^2 maps of logits, of which min(J, N)^2 are linearly independent."""
    I = draw(iha.OPERATOR, absent=True, **SIZES | {"T": 9, "K": 5, "P": 0, "N": N, "J": J})
    Q, K = (iha.mixed(I[a][0], I[x]).reshape(9, J, 5) for a, x in (("aq", "q"), ("ak", "k")))
    maps = np.stack([(Q[:, p] @ K[:, m].T).ravel() for p in range(J) for m in range(J)])
    assert np.linalg.matrix_rank(maps) == min(J, N) ** 2


@pytest.mark.parametrize(("N", "J"), [(4, 4), (4, 2)])
def test_mixing_costs_three_tensors(N, J):
    """I2: 3 N^2 J numbers, and N J of the average, beside the projections."""
    layer = InterleavedHeadAttention(8, N, J)
    assert sum(p.numel() for p in layer.parameters()) == 4 * 8**2 + 3 * N**2 * J + N * J


def operations(N, J, T=32, E=16):
    x = {n: torch.zeros(1, T, N, E // N) for n in "qkv"}
    mix = {n: torch.zeros(N, J, N) for n in ("aq", "ak", "av")} | {"r": torch.zeros(N, J)}
    return counted(lambda: interleaved(**x, **mix, chunk=T))


def test_maps_cost_as_the_square_of_pseudo_heads_whatever_the_heads():
    """I3: J^2 T^2 E multiplications each for logits and values; d / H in what is printed is the width of one head."""
    T, E = 32, 16
    for N, J in ((2, 1), (2, 2), (4, 2), (4, 4)):
        mixing = 2 * 4 * T * N * J * E  # queries, keys, values, and the average
        assert abs(operations(N, J) - 2 * 2 * J**2 * T**2 * E) <= mixing


# --- what makes no sense ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_half_a_cache_is_refused(name):
    o = OPERATORS[name]
    I = draw(o, **SIZES)
    for form in o.forms:
        with pytest.raises(ValueError, match="K0 is given without V0; a cache has both"):
            o.evaluate(I | {"V0": None}, form.name)
        with pytest.raises(ValueError, match=r"ak has shape \(3, 2, 2\): axis N is 2"):
            o.evaluate(I | {"ak": I["ak"][..., :2]}, form.name)


# --- the layer -------------------------------------------------------------------------------------------------------


def made(**options):
    torch.manual_seed(0)
    return InterleavedHeadAttention(**{"d_model": 6, "heads": 3, "pseudo_heads": 2, "chunk": 3} | options)


def tokens(dtype=torch.float32):
    return torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(1), dtype=dtype)


@pytest.mark.parametrize("index", [False, True])
def test_layer_is_the_function(index):
    layer, x = made(index_causal=index), tokens()
    q, k, v = (W(x).unflatten(2, (3, 2)) for W in (layer.W_Q, layer.W_K, layer.W_V))
    O, K, V = (index_causal if index else interleaved)(q, k, v, layer.aq, layer.ak, layer.av, layer.r, chunk=3)
    Y, cache = layer(x)
    assert torch.equal(Y, layer.W_O(O.flatten(2)))
    assert torch.equal(cache.K, K)
    assert torch.equal(cache.V, V)
    assert not torch.equal(Y, made(index_causal=not index)(x)[0])


def test_a_new_layer_is_near_multi_head_attention():
    layer, x = made().double(), tokens(torch.float64)
    q, k, v = (W(x).unflatten(2, (3, 2)).transpose(1, 2) for W in (layer.W_Q, layer.W_K, layer.W_V))
    O = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    near = layer.W_O(O.transpose(1, 2).flatten(2))
    assert 1e-4 < (layer(x)[0] - near).abs().max() < 0.1


def test_layer_saves_and_loads():
    layer, other, x = made(), made(), tokens()
    other.reset_parameters()
    assert not torch.equal(layer(x)[0], other(x)[0])
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x)[0], other(x)[0])


@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize("steps", [(3, 5), (1,) * 8, (5, 1, 1, 1)])
def test_prefill_and_decode_are_the_whole(steps, index):
    layer, x = made(index_causal=index).double(), tokens(torch.float64)
    whole, full = layer(x)
    cache, parts = None, []
    for part in x.split(steps, dim=1):
        y, cache = layer(part, cache)
        parts.append(y)
    assert (torch.cat(parts, dim=1) - whole).abs().max() < 1e-14
    assert torch.allclose(cache.V, full.V, rtol=0, atol=1e-14)


def test_every_parameter_learns():
    layer = made()
    layer(tokens())[0].square().sum().backward()
    assert all(torch.count_nonzero(p.grad) == p.numel() for p in layer.parameters())
    assert made(pseudo_heads=None).r.shape == (3, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 4}, "d_model is 6, which 4 heads do not divide"),
        ({"pseudo_heads": 0}, "pseudo_heads is 0; it must be at least 1"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        made(**options)


def test_arguments_that_make_no_sense():
    x, layer = torch.ones(2, 4, 3, 2), made()
    with pytest.raises(ValueError, match=r"aq has shape \(3, 2, 3\): axis N is 3, but q has N=2"):
        interleaved(x[:, :, :2], x[:, :, :2], x[:, :, :2], layer.aq, layer.ak, layer.av, layer.r)
    with pytest.raises(ValueError, match="K0 is given without V0; a cache has both"):
        interleaved(x, x, x, layer.aq, layer.ak, layer.av, layer.r, K0=x)
