"""Attention over a cache against PyTorch's own attention and a transcription in Python floats; groups, parts, claims of
the survey; the layer that decodes.

Two evaluations of one quantity may differ by twice what the gate allows one of them.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from mixproof.reference import cached_attention, operator, softmax_attention
from mixproof.verify.arithmetic import natural
from mixproof.verify.cells import laws_for
from mixproof.verify.judge import PROFILES, judge
from mixproof.verify.numbers.ball import Reading, tolerance
from mixproof.verify.subjects.mutants import Mutant
from mixproof.verify.subjects.mutants import cached_attention as mutants

torch = pytest.importorskip("torch")
from mixproof.verify.subjects.torch import cached_attention as eager  # noqa: E402
from mixproof.verify.subjects.torch import softmax_attention as one_head  # noqa: E402
from mixproof.verify.subjects.torch.cached_attention import GroupedQueryAttention  # noqa: E402

OPERATOR = operator("softmax_attention.cached")
SIZES = [(1, 0, 1, 1, 1, 1), (5, 3, 2, 3, 4, 2), (4, 0, 3, 1, 2, 3), (6, 1, 1, 4, 3, 5)]  # T, P, G, M, K, V


def draw(T, P, G, M, K, V, scale=None, seed=0):
    g = np.random.default_rng([seed, T, P, G, M, K, V])
    I = {"q": g.standard_normal((T, G, M, K)), "k": g.standard_normal((T, G, K)), "v": g.standard_normal((T, G, V))}
    I |= {"scale": scale, "K0": g.standard_normal((P, G, K)), "V0": g.standard_normal((P, G, V))}
    upstream = {"O": g.standard_normal((T, G, M, V)), "Kc": g.standard_normal((P + T, G, K))}
    return I, upstream | {"Vc": g.standard_normal((P + T, G, V))}


def lifted(I):
    reading = Reading(natural("float64"))
    return reading, {n: reading.ball(x) if isinstance(x, np.ndarray) else x for n, x in I.items()}


def allowed(I, function=cached_attention.parallel):
    """What the gate allows the first output to be off by."""
    reading, balls = lifted(I)
    bound = tolerance(function(**balls)[0], "float64")
    assert not reading.vacuous
    return bound


def without_cache(I):
    return {n: x for n, x in I.items() if n not in ("K0", "V0")}


# --- independent transcriptions --------------------------------------------------------------------------------------


def by_pytorch(q, k, v, scale, K0, V0):
    """F.scaled_dot_product_attention, which repeats keys for the heads of a group itself."""
    Kc, Vc = torch.cat([K0, k]), torch.cat([V0, v])
    T, G, M, K = q.shape
    seen = torch.ones(T, len(Kc), dtype=torch.bool).tril(len(K0))
    heads = [x.transpose(0, 1)[None] for x in (q.reshape(T, G * M, K), Kc, Vc)]
    O = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=seen, scale=scale, enable_gqa=True)
    return O[0].transpose(0, 1).reshape(T, G, M, -1), Kc, Vc


def by_hand(q, k, v, scale, K0, V0):
    """One number at a time, sums rounded once."""
    T, G, M, K = q.shape
    keys, values = np.concatenate([K0, k]), np.concatenate([V0, v])
    O = np.empty((T, G, M, v.shape[2]))
    for t, g, m in np.ndindex(T, G, M):
        n = len(K0) + t + 1
        s = [math.fsum(q[t, g, m] * keys[j, g]) * (1 / math.sqrt(K) if scale is None else scale) for j in range(n)]
        w = [math.exp(x - max(s)) for x in s]
        for c in range(v.shape[2]):
            O[t, g, m, c] = math.fsum(w[j] * values[j, g, c] for j in range(n)) / math.fsum(w)
    return O


@pytest.mark.parametrize("scale", [None, 0.375])
@pytest.mark.parametrize("sizes", SIZES)
def test_it_is_attention(sizes, scale):
    I, _ = draw(*sizes, scale)
    bound = allowed(I)
    x = {n: torch.tensor(a) if isinstance(a, np.ndarray) else a for n, a in I.items()}
    O, Kc, Vc = (y.numpy() for y in by_pytorch(**x))
    found = [form.function(**I) for form in OPERATOR.forms]
    found += [cached_attention.blockwise(**I, chunk=c) for c in (1, 2, 3, 5)]
    for got in found:
        for want in (O, by_hand(**I)):
            assert np.all(np.abs(got[0] - want) <= 2 * bound)
        assert np.array_equal(got[1], Kc)
        assert np.array_equal(got[2], Vc)


@pytest.mark.parametrize("sizes", SIZES)
def test_vjp_is_that_of_autograd(sizes):
    I, G = draw(*sizes, seed=1)
    x = {n: torch.tensor(a, requires_grad=True) if isinstance(a, np.ndarray) else a for n, a in I.items()}
    outputs = by_pytorch(**x)
    torch.autograd.backward(outputs, [torch.tensor(G[y.name]) for y in OPERATOR.outputs])
    reading, balls = lifted(I)
    bounds = cached_attention.vjp({n: reading.ball(c) for n, c in G.items()}, **balls)
    assert not reading.vacuous
    for n, d in cached_attention.vjp(G, **I).items():
        assert np.all(np.abs(d - x[n].grad.numpy()) <= 2 * tolerance(bounds[n], "float64")), n


# --- special cases ---------------------------------------------------------------------------------------------------


def test_one_head_a_group_is_multi_head_attention():
    I, _ = draw(7, 0, 3, 1, 4, 2)
    O = cached_attention.parallel(**without_cache(I))[0]
    for h in range(3):
        want = softmax_attention.parallel(I["q"][:, h, 0], I["k"][:, h], I["v"][:, h], causal=True)
        assert np.all(np.abs(O[:, h, 0] - want) <= 2 * allowed(I)[:, h, 0])


def test_groups_are_heads_that_share_their_keys():
    """Keys and values repeated head by head, h // M; tiled, h mod G, they belong to other queries."""
    I, _ = draw(5, 3, 2, 3, 4, 2)
    want, bound = cached_attention.parallel(**I)[0].reshape(5, 6, 2), allowed(I).reshape(5, 6, 2)
    heads = I | {"q": I["q"].reshape(5, 6, 1, 4)}
    shared = {n: np.repeat(I[n], 3, axis=1) for n in ("k", "v", "K0", "V0")}
    tiled = {n: np.tile(I[n], (1, 3, 1)) for n in ("k", "v", "K0", "V0")}
    assert np.all(np.abs(cached_attention.parallel(**heads | shared)[0][:, :, 0] - want) <= 2 * bound)
    assert np.max(np.abs(cached_attention.parallel(**heads | tiled)[0][:, :, 0] - want)) > 0.1


def test_gradients_of_shared_keys_add_up():
    I, G = draw(5, 3, 2, 3, 4, 2)
    grads = cached_attention.vjp(G, **I)
    heads = I | {"q": I["q"].reshape(5, 6, 1, 4)} | {n: np.repeat(I[n], 3, axis=1) for n in ("k", "v", "K0", "V0")}
    silent = {n: 0 * np.repeat(G[n], 3, axis=1) for n in ("Kc", "Vc")}
    apart = cached_attention.vjp({"O": G["O"].reshape(5, 6, 1, 2)} | silent, **heads)
    reading, balls = lifted(I)
    bounds = cached_attention.vjp({n: reading.ball(c) for n, c in G.items()}, **balls)
    summed = apart["k"].reshape(5, 2, 3, 4).sum(axis=2) + G["Kc"][3:]
    assert np.all(np.abs(grads["k"] - summed) <= 2 * tolerance(bounds["k"], "float64"))


def test_parts_merge_in_any_number_and_order():
    """Five parts of nine keys, last first; shares by powers of two are wrong."""
    g = np.random.default_rng(2)
    Q, K, V = g.standard_normal((4, 3)), 3 * g.standard_normal((9, 3)), g.standard_normal((9, 2))
    everything = np.ones((4, 9), dtype=bool)
    reading = Reading(natural("float64"))
    whole = cached_attention.weights(reading.ball(Q), reading.ball(K), everything) @ reading.ball(V)
    cuts = [slice(7, 9), slice(0, 1), slice(4, 7), slice(1, 2), slice(2, 4)]
    O, lse = zip(*(cached_attention.part(Q, K[c], V[c], everything[:, c]) for c in cuts), strict=True)
    assert np.all(np.abs(cached_attention.merge(O, lse) - whole.v) <= 2 * tolerance(whole, "float64"))
    two = [x * math.log(2) for x in lse]
    assert np.max(np.abs(cached_attention.merge(O, two) - whole.v)) > 0.1


def test_a_vector_added_to_all_keys_changes_nothing():
    I, _ = draw(5, 3, 2, 3, 4, 2)
    moved = I | {n: I[n] + np.array([1.0, -2.0, 4.0, 0.5]) for n in ("k", "K0")}
    for form in OPERATOR.forms:
        difference = form.function(**moved)[0] - form.function(**I)[0]
        assert np.all(np.abs(difference) <= allowed(I) + 8 * allowed(moved))


# --- what the survey claims ------------------------------------------------------------------------------------------


def test_the_scale_is_the_square_root():
    """Logits of normal queries and keys have variance one; divided by the width, as the survey also prints, 1 / K."""
    for K in (4, 64):
        q, k = np.random.default_rng(K).standard_normal((2, 20000, K))
        logits = np.sum(q * k, axis=1)
        assert abs(np.var(logits / math.sqrt(K)) - 1) < 0.05
        assert abs(np.var(logits / K) - 1 / K) < 0.05 / K


def test_outputs_lie_in_the_hull_of_the_values_seen():
    """The token's own value included: the first token without a cache returns its value, bit for bit."""
    I, _ = draw(6, 3, 2, 2, 3, 4)
    seen = np.concatenate([I["V0"], I["v"]])
    low, high = np.minimum.accumulate(seen)[3:], np.maximum.accumulate(seen)[3:]
    for form in OPERATOR.forms:
        O, bound = form.function(**I)[0], allowed(I)
        assert np.all(O >= low[:, :, None] - bound)
        assert np.all(O <= high[:, :, None] + bound)
        first = form.function(**without_cache(I))[0][0]
        assert np.array_equal(first, np.broadcast_to(I["v"][0, :, None], first.shape))


@pytest.mark.parametrize("q", [-60.0, -4.0, -0.5, 0.0, 0.5, 4.0, 60.0])
def test_recall_is_not_perfect(q):
    """Keys 0, 1/2 and 1: whatever the query, the one in the middle gets 1 / (1 + 2 cosh(q / 2)), a third at most."""
    k = np.array([[0.0], [0.5], [1.0]])
    A = softmax_attention.weights(np.array([[q]]), k, scale=1.0)
    assert abs(A[0, 1] - 1 / (1 + 2 * math.cosh(q / 2))) <= 2.0**-50 * A[0, 1] * max(1, abs(q))
    assert A[0, 1] <= 1 / 3 + 2.0**-52


def test_logits_may_be_as_large_as_they_like():
    I, _ = draw(6, 3, 2, 2, 3, 4)
    I |= {n: 2.0**20 * I[n] for n in ("q", "k", "K0")}
    want = by_hand(**I)
    for form in OPERATOR.forms:
        assert np.all(np.abs(form.function(**I)[0] - want) <= 2 * allowed(I))


# --- arguments -------------------------------------------------------------------------------------------------------


def test_arguments_that_make_no_sense():
    I, G = draw(5, 3, 2, 3, 4, 2)
    for form in OPERATOR.forms:
        with pytest.raises(ValueError, match="K0 is given without V0; a cache has both"):
            form.function(**I | {"V0": None})
        with pytest.raises(ValueError, match="V0 is given without K0; a cache has both"):
            form.function(**I | {"K0": None})
    with pytest.raises(ValueError, match=r"v has shape \(4, 2, 2\): axis T is 4, but another argument has T=5"):
        cached_attention.parallel(**I | {"v": I["v"][:4]})
    with pytest.raises(ValueError, match=r"V0 has shape \(2, 2, 2\): axis P is 2, but another argument has P=3"):
        cached_attention.parallel(**I | {"V0": I["V0"][:2]})
    with pytest.raises(ValueError, match=r"the cotangent of Kc has shape \(5, 2, 4\); Kc has shape \(8, 2, 4\)"):
        cached_attention.vjp(G | {"Kc": G["Kc"][:5]}, **I)
    with pytest.raises(ValueError, match="chunk is 0; it must be at least 1"):
        cached_attention.blockwise(**I, chunk=0)


def tensors(I):
    return {n: torch.tensor(a)[None] if isinstance(a, np.ndarray) else a for n, a in I.items()}


@pytest.mark.parametrize("function", [eager.dense, eager.blockwise])
def test_arguments_that_make_no_sense_in_pytorch(function):
    x = tensors(draw(5, 3, 2, 3, 4, 2)[0])
    for changed, message in (
        ({"V0": None}, "K0 is given without V0; a cache has both"),
        ({"scale": math.inf}, "scale is inf; it must be finite"),
        ({"k": x["k"][:, :4]}, r"k has shape \(1, 4, 2, 4\): axis T is 4, but q has T=5"),
        ({"K0": x["K0"][..., :3]}, r"K0 has shape \(1, 3, 2, 3\): axis K is 3, but q has K=4"),
    ):
        with pytest.raises(ValueError, match=message):
            function(**x | changed)
    with pytest.raises(ValueError, match="chunk is 0; it must be at least 1"):
        eager.blockwise(**x, chunk=0)


def test_no_keys_give_nothing():
    q, k, v = torch.ones(1, 3, 1, 2), torch.ones(1, 0, 1, 2), torch.ones(1, 0, 1, 4)
    for function in (one_head.dense, one_head.blockwise):
        assert torch.equal(function(q, k, v), torch.zeros(1, 3, 1, 4))


def test_autocast_rounds_nothing():
    x = {n: a.float() if isinstance(a, torch.Tensor) else a for n, a in tensors(draw(5, 3, 2, 3, 4, 2)[0]).items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        O, Kc, _ = eager.blockwise(**x)
    assert Kc.dtype == torch.float32
    assert torch.equal(O, eager.blockwise(**x)[0])


# --- the layer -------------------------------------------------------------------------------------------------------


def made(**options):
    torch.manual_seed(0)
    return GroupedQueryAttention(**{"d_model": 12, "heads": 6, "groups": 2, "chunk": 4} | options).double()


def tokens(T=9):
    return torch.randn(2, T, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_layer_is_the_function():
    layer, x = made(), tokens()
    q = (x @ layer.W_Q.weight.T).reshape(2, 9, 2, 3, 2)
    k, v = ((x @ W.weight.T).reshape(2, 9, 2, 2) for W in (layer.W_K, layer.W_V))
    O, Kc, Vc = eager.blockwise(q, k, v, chunk=4)
    Y, cache = layer(x)
    assert torch.equal(Y, O.reshape(2, 9, 12) @ layer.W_O.weight.T)
    assert torch.equal(cache.K, Kc)
    assert torch.equal(cache.V, Vc)


def test_layer_with_as_many_groups_as_heads_is_pytorchs():
    """nn.MultiheadAttention with the same weights and a causal mask."""
    layer, x = made(groups=None), tokens()
    other = torch.nn.MultiheadAttention(12, 6, bias=False, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        other.in_proj_weight.copy_(torch.cat([W.weight for W in (layer.W_Q, layer.W_K, layer.W_V)]))
        other.out_proj.weight.copy_(layer.W_O.weight)
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    want, _ = other(x, x, x, attn_mask=hidden, need_weights=False)
    assert torch.max(torch.abs(layer(x)[0] - want)) <= 64 * 2.0**-53


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
    assert torch.max(torch.abs(torch.cat(rows, dim=1) - full)) <= 64 * 2.0**-53
    assert torch.max(torch.abs(state.K - cache.K)) <= 8 * 2.0**-53
    if prefill < 9:
        forgot, _ = layer(x[:, 8:])
        assert torch.max(torch.abs(forgot[:, 0] - full[:, 8])) > 0.01


def test_parameters_survive_saving_and_all_learn():
    layer, x = made(), tokens()
    copy = made(chunk=64)
    torch.manual_seed(5)
    for W in copy.children():
        W.reset_parameters()
    assert not torch.equal(copy(x)[0], layer(x)[0])
    copy.load_state_dict(layer.state_dict())
    assert torch.max(torch.abs(copy(x)[0] - layer(x)[0])) <= 64 * 2.0**-53
    layer(x)[0].square().sum().backward()
    assert all(torch.count_nonzero(p.grad) == p.numel() for p in layer.parameters())
    assert [tuple(p.shape) for p in layer.parameters()] == [(12, 12), (12, 12), (4, 12), (4, 12)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 5}, "d_model is 12, which 5 heads do not divide"),
        ({"groups": 4}, "heads is 6, which 4 groups do not divide"),
        ({"groups": 0}, "groups is 0; it must be at least 1"),
        ({"chunk": 0}, "chunk is 0; it must be at least 1"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        made(**options)


# --- mutants ---------------------------------------------------------------------------------------------------------


def test_builders_with_nothing_changed_raise_no_alarm():
    mutant = Mutant("unchanged", "softmax_attention.cached", "", (), mutants.attend(), mutants.vjp())
    subject = mutant.subject()
    found = {law: judge(subject, law, PROFILES["short"]).status for law in laws_for(subject.operator)}
    assert set(found.values()) <= {"pass", "not applicable"}, found
    assert {found[law] for law in ("forward", "vjp", "split")} == {"pass"}
