"""Grouped-head latent attention, printed and released, against transcriptions; what it saves; its layers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from witness import assert_agrees, close, draw

from mixproof.reference import gta, operator
from mixproof.reference.primitives import sigmoid, silu, turned
from mixproof.verify.subjects.boundary_torch import counted
from mixproof.verify.subjects.torch.gta import (
    Cache,
    GroupedLatentAttention,
    SharedMapAttention,
    after,
    repeated,
    shared,
)

PRINTED, GATED = gta.OPERATOR, gta.GATED
SIZES = {"T": 5, "P": 2, "G": 2, "M": 3, "K": 2, "V": 3, "L": 4, "X": 2}


def rows(logits, visible):
    e = torch.exp(logits[:visible])
    return e / e.sum()


def survey(q, k, c, U, scale=None, Kc0=None, C0=None):
    """13.1, token by token: q_g and k_g means over the group, v = silu(W_UV v_latent)."""
    T, G, M, K = q.shape
    Kc, Cc = (x if before is None else torch.cat([before, x]) for before, x in ((Kc0, k.mean(2)), (C0, c)))
    P, O = len(Kc) - T, []
    for t in range(T):
        for g in range(G):
            query = sum(q[t, g, m] for m in range(M)) / M
            p = rows(Kc[:, g] @ query * (K**-0.5 if scale is None else scale), P + t + 1)
            for m in range(M):
                v = torch.stack([torch.nn.functional.silu(U[g, m] @ Cc[j]) for j in range(P + t + 1)])
                O.append(p @ v)
    return torch.stack(O).reshape(T, G, M, U.shape[2]), Kc, Cc


def released(q, k, c, U, u, scale=None, K0=None, C0=None):
    """The released eager path, heads in one axis: keys and latents repeated for the heads of a group, latents for the
    copies, channels of all heads side by side under the gate."""
    T, G, M, K = q.shape
    L, X = U.shape[2:4]
    Kc, Cc = (x if before is None else torch.cat([before, x]) for before, x in ((K0, k), (C0, c)))
    keys, values = (x.repeat_interleave(M, dim=1).transpose(0, 1) for x in (Kc, Cc))
    logits = q.flatten(1, 2).transpose(0, 1) @ keys.mT * (K**-0.5 if scale is None else scale)
    hidden = torch.ones(T, len(Kc), dtype=torch.bool).triu(1 + len(Kc) - T)
    z = (logits.masked_fill(hidden, -math.inf).softmax(-1) @ values).transpose(0, 1)
    delta = torch.einsum("qhv,hvd->qhd", z, U.reshape(G * M, L, X * L)).reshape(T, -1)
    copies = z.repeat_interleave(X, dim=1).reshape(T, -1)
    return (torch.sigmoid(u.reshape(T, -1)) * (copies + delta)).reshape(u.shape), Kc, Cc


@pytest.mark.parametrize(("o", "witness"), [(PRINTED, survey), (GATED, released)], ids=["gta", "gta.gated"])
@pytest.mark.parametrize(("absent", "scale"), [(True, None), (False, 0.75)])
def test_it_is_what_was_printed_and_what_was_released(o, witness, absent, scale):
    assert_agrees(o, witness, draw(o, absent=absent, **SIZES | ({"P": 0} if absent else {})) | {"scale": scale})


# --- the mean over a group -------------------------------------------------------------------------------------------


def alone(**sizes):
    return draw(PRINTED, absent=True, **SIZES | {"P": 0} | sizes)


def maps(I):
    """Weights of each head, (T, G, M, T): one-hot latents and decoders have values silu(1) and zero."""
    T = len(I["q"])
    one_hot = {"c": np.eye(T), "U": np.broadcast_to(np.eye(T), (*I["U"].shape[:2], T, T))}
    return PRINTED.evaluate(I | one_hot)["O"] / silu(np.float64(1.0))


def test_a_mean_of_heads_is_a_projection_by_the_mean_of_their_weights():
    """And it may be turned before or after; it is not the mean of the heads' own logits."""
    g = np.random.default_rng(0)
    T, E, M, K = 7, 5, 3, 4
    x, W = g.standard_normal((T, E)), g.standard_normal((M, K, E))
    q = np.stack([x @ w.T for w in W], axis=1)[:, None]
    n, theta = np.arange(T), 10000.0 ** -(np.arange(K // 2) / (K // 2))
    averaged = x @ W.mean(0).T
    assert np.max(np.abs(gta.mean(q)[:, 0] - averaged)) < 1e-14
    heads_turned = np.stack([turned(q[:, 0, m], n, theta) for m in range(M)], axis=1)[:, None]
    assert np.max(np.abs(gta.mean(heads_turned)[:, 0] - turned(averaged, n, theta))) < 1e-14
    k = g.standard_normal((T, M, K))
    own = sum(q[:, 0, m] @ k[:, m].T for m in range(M)) / M
    assert np.max(np.abs(own - averaged @ k.mean(1).T)) > 1


def test_opposite_queries_leave_no_map():
    """V3: with q_2 = -q_1 the mean is zero, and every token reads the plain average of those before it."""
    I = alone(M=2)
    I["q"][:, :, 1] = -I["q"][:, :, 0]
    v = silu(np.einsum("tl,gmvl->tgmv", I["c"], I["U"]))
    average = np.cumsum(v, axis=0) / np.arange(1, 6)[:, None, None, None]
    assert close(PRINTED, PRINTED.evaluate(I)["O"], average, I)
    separate = operator("softmax_attention.cached").evaluate({"q": I["q"], "k": I["k"][:, :, 0], "v": v[:, :, 0]})["O"]
    assert np.max(np.abs(separate[:, :, 0] - separate[:, :, 1])) > 0.5  # which the heads by themselves tell apart


def test_heads_of_a_group_have_one_map():
    A = maps(alone())
    assert np.max(np.abs(A.sum(-1) - 1)) < 1e-15
    assert np.array_equal(A[:, :, 0], A[:, :, 1])
    assert np.max(np.abs(A[:, 0] - A[:, 1])) > 0.1  # but not groups


@pytest.mark.parametrize("o", [PRINTED, GATED], ids=lambda o: o.name)
def test_heads_of_a_group_may_be_exchanged(o):
    """With their decoders: the heads of the output are exchanged, and nothing else."""
    I, order = draw(o, **SIZES), [2, 0, 1]
    of_heads = [x.name for x in o.inputs if "M" in x.axes]
    other = I | {n: np.take(I[n], order, axis=o.input(n).axes.index("M")) for n in of_heads}
    name = o.outputs[0].name
    assert close(o, o.evaluate(other)[name], o.evaluate(I)[name][:, :, order], other)


def test_one_head_a_group_with_a_full_decoder_is_multi_head_attention():
    """`gta.gated` with the token for a latent, copies and image together W_V, and the gate open: sigmoid(40) is 1."""
    I = draw(GATED, absent=True, **SIZES | {"M": 1, "X": 1, "P": 0})
    W_V = np.random.default_rng(1).standard_normal((2, 4, 4))
    I |= {"c": np.broadcast_to(I["c"][:, :1], I["c"].shape), "u": np.full_like(I["u"], 40)}
    I["U"] = (W_V - np.eye(4))[:, None, :, None]
    v = np.einsum("tgl,glm->tgm", I["c"], W_V)
    O = operator("softmax_attention.cached").evaluate({"q": I["q"], "k": I["k"], "v": v})["O"]
    assert close(GATED, GATED.evaluate(I)["Y"], O[..., None, :], I)


# --- what is nonlinear, and where ------------------------------------------------------------------------------------


def test_silu_cannot_wait_until_after_the_sum():
    """Two latents of opposite sign, equally weighted: silu(1) + silu(-1) is 0.46, and silu of their mean 0. So printed
    values must be decoded for every token; without silu, or as released, the sum of latents is enough."""
    I = {n: np.zeros((2, 1, 1, 1)) for n in "qk"} | {"c": np.array([[1.0], [-1.0]]), "U": np.ones((1, 1, 1, 1))}
    O = PRINTED.evaluate(I)["O"][1, 0, 0, 0]
    assert abs(O - (sigmoid(np.float64(1.0)) - sigmoid(np.float64(-1.0))) / 2) < 1e-16
    assert abs(O) > 0.23
    J = alone()
    late = silu(np.einsum("tgmj,jl,gmvl->tgmv", maps(J), J["c"], J["U"]))
    assert np.max(np.abs(late - PRINTED.evaluate(J)["O"])) > 0.3


def test_the_gate_is_the_only_place_where_released_values_meet_a_nonlinearity():
    """Linear in the latents, bit for bit for powers of two, whatever the gate."""
    I = draw(GATED, **SIZES)
    twice = I | {"c": 4 * I["c"], "C0": 4 * I["C0"]}
    assert np.array_equal(GATED.evaluate(twice)["Y"], 4 * GATED.evaluate(I)["Y"])
    J = draw(PRINTED, **SIZES)
    O = PRINTED.evaluate(J | {"c": 4 * J["c"], "C0": 4 * J["C0"]})["O"]
    assert np.max(np.abs(O - 4 * PRINTED.evaluate(J)["O"])) > 0.1


# --- what is saved ---------------------------------------------------------------------------------------------------


def operations(form, G, M, T=16, K=4):
    """Multiplications and additions of maps and sums over tokens; decoding is left out by its difference."""
    x = {n: torch.zeros(1, T, G, M, K) for n in "qk"} | {"c": torch.zeros(1, T, 1), "U": torch.zeros(G, M, K, 1)}
    return counted(lambda: form(**x)) - 2 * T * G * M * K


@pytest.mark.parametrize("M", [2, 4, 8])
def test_a_shared_map_saves_less_than_half(M):
    """V1: of two products of T^2 M K each it leaves 1 / M of the first and all of the second, a cut of (1 - 1/M) / 2.
    0.625 takes the released sizes: 5 query heads of K + 2 K channels for 20 of 2 K."""
    cut = 1 - operations(shared, 2, M) / operations(repeated, 2, M)
    assert abs(cut - (1 - 1 / M) / 2) < 1e-12
    assert cut < 0.5 < 0.625 == 1 - 5 * (1 + 2) / (20 * 2)


def test_the_cache_is_one_mean_key_a_group_and_a_latent():
    """V2: 5 groups of keys and values have 10 d numbers a token; one key of d and one latent of 2 d are 0.3 of it."""
    I = draw(GATED, absent=True, **SIZES | {"G": 1, "M": 5, "K": 4, "L": 8, "P": 0})
    _, Kc, Cc = GATED.evaluate(I).values()
    grouped = {"q": np.ones((5, 5, 4, 4)), "k": np.ones((5, 5, 4)), "v": np.ones((5, 5, 4))}
    _, K, V = operator("softmax_attention.cached").evaluate(grouped).values()
    assert (Kc.size + Cc.size) / (K.size + V.size) == 0.3
    _, Kc, Cc = PRINTED.evaluate(alone()).values()
    assert (Kc.shape, Cc.shape) == ((5, 2, 2), (5, 4))  # whatever M


# --- what makes no sense ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("o", "keys"), [(PRINTED, "Kc0"), (GATED, "K0")], ids=["gta", "gta.gated"])
def test_half_a_cache_is_refused(o, keys):
    I = draw(o, **SIZES)
    for form in o.forms:
        with pytest.raises(ValueError, match=f"{keys} is given without C0; a cache has both"):
            o.evaluate(I | {"C0": None}, form.name)
        with pytest.raises(ValueError, match=r"U has shape .*: axis M is 2"):
            o.evaluate(I | {"U": I["U"][:, :2]}, form.name)


# --- the layers ------------------------------------------------------------------------------------------------------


LAYERS = (GroupedLatentAttention, SharedMapAttention)


def made(layer=GroupedLatentAttention, **options):
    torch.manual_seed(0)
    sizes = {"d_model": 24, "groups": 2, "heads": 3, "width": 4, "latent": 2, "chunk": 3}
    return layer(**sizes | options)


def tokens(dtype=torch.float32):
    return torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(1), dtype=dtype)


def test_layer_is_the_released_one():
    """Its projections have biases but the last, and channels of all heads lie side by side."""
    layer, x = made(scale=0.5).double(), tokens(torch.float64)
    assert [n for n, _ in layer.named_parameters() if n.endswith("bias")] == [f"W_{n}.bias" for n in "qkcu"]
    Y, cache = layer(x)
    for b in range(2):
        q, k = layer.W_q(x[b]).reshape(8, 2, 3, 4), layer.W_k(x[b]).reshape(8, 2, 4)
        c, u = layer.W_c(x[b]).reshape(8, 2, 2), layer.W_u(x[b]).reshape(8, 2, 3, 2, 2)
        y, K, C = released(q, k, c, layer.U, u, 0.5)
        assert (layer.W_O(y.reshape(8, 24)) - Y[b]).abs().max() < 1e-14
        assert torch.equal(cache.K[b], K)
        assert torch.equal(cache.C[b], C)
    assert (made().double()(x)[0] - Y).abs().max() < 1e-14  # 4^-1/2 is the default
    assert (made(scale=1.0).double()(x)[0] - Y).abs().max() > 1e-4


def test_layer_is_the_printed_one():
    layer, x = made(SharedMapAttention).double(), tokens(torch.float64)
    Y, cache = layer(x)
    for b in range(2):
        q, k = (W(x[b]).reshape(8, 2, 3, 4) for W in (layer.W_Q, layer.W_K))
        O, K, C = survey(q, k, layer.W_DV(x[b]), layer.U)
        assert (layer.W_O(O.reshape(8, 24)) - Y[b]).abs().max() < 1e-14
        assert (cache.K[b] - K).abs().max() < 1e-15
        assert torch.equal(cache.C[b], C)


@pytest.mark.parametrize("kind", LAYERS)
def test_layer_saves_and_loads(kind):
    layer, other, x = made(kind), made(kind), tokens()
    other.reset_parameters()
    assert not torch.equal(layer(x)[0], other(x)[0])
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x)[0], other(x)[0])


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("steps", [(3, 5), (1,) * 8, (5, 1, 1, 1), (0, 8)])
def test_prefill_and_decode_are_the_whole(steps, kind):
    layer, x = made(kind).double(), tokens(torch.float64)
    whole, full = layer(x)
    cache, parts = None, []
    for part in x.split(steps, dim=1):
        y, cache = layer(part, cache)
        parts.append(y)
    assert (torch.cat(parts, dim=1) - whole).abs().max() < 1e-14
    assert isinstance(cache, Cache)
    assert torch.allclose(cache.C, full.C, rtol=0, atol=1e-14)


def test_every_parameter_learns():
    """But the keys' bias: the same vector on all keys changes no weight."""
    layer = made().double()
    layer(tokens(torch.float64))[0].square().sum().backward()
    grads = {n: p.grad for n, p in layer.named_parameters()}
    assert grads.pop("W_k.bias").abs().max() < 1e-14
    printed = made(SharedMapAttention)
    printed(tokens())[0].square().sum().backward()
    assert all(torch.count_nonzero(d) == d.numel() for d in (*grads.values(), *(p.grad for p in printed.parameters())))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"latent": 3}, r"d_model is 24, which 2 \* 3 heads of 3 channels do not divide"),
        ({"groups": 0}, "groups is 0; it must be at least 1"),
        ({"scale": math.nan}, "scale is nan; it must be finite"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        made(**options)
    with pytest.raises(ValueError, match="width is 0; it must be at least 1"):
        made(SharedMapAttention, width=0)


def test_arguments_that_make_no_sense():
    q, k, c, U = torch.ones(2, 4, 2, 3, 2), torch.ones(2, 4, 2, 2), torch.ones(2, 4, 2, 4), torch.ones(2, 3, 4, 2, 4)
    u = torch.ones(2, 4, 2, 3, 2, 4)
    with pytest.raises(ValueError, match="C0 is given without K0; a cache has both"):
        after(q, k, c, U, u, C0=c)
    with pytest.raises(ValueError, match=r"u has shape \(2, 4, 2, 3, 1, 4\): axis X is 1, but U has X=2"):
        after(q, k, c, U, u[..., :1, :])
    with pytest.raises(ValueError, match=r"U has shape \(2, 3, 4, 2, 4\); expected axes \(G, M, V, L\)"):
        shared(q, q, c[:, :, 0], U)
