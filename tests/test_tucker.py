"""Tucker attention against a transcription, the special cases that it is said to have, and its layer."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from witness import assert_agrees, close, draw

from mixproof.reference import operator, tucker
from mixproof.verify.subjects.torch.tucker import Latents, TuckerAttention, absorbed

OP = tucker.OPERATOR
SIZES = {"T": 6, "P": 3, "E": 5, "Q": 3, "L": 4, "X": 2, "N": 3, "K": 2, "V": 3}


def survey(x, Fq, Gq, Fk, Gk, Fv, Gv, W_O, scale=None, causal=True, K0=None, V0=None):
    """11.1, head by head and token by token: Q = W_core W_factor x, and what is cached is W_factor x."""
    E, rows = x.shape[1], []
    Kc = torch.stack([*(K0 if K0 is not None else ()), *(Fk @ row for row in x)])
    Vc = torch.stack([*(V0 if V0 is not None else ()), *(Fv @ row for row in x)])
    P = len(Kc) - len(x)
    for t, row in enumerate(x):
        y = torch.zeros(E, dtype=x.dtype)
        seen = P + t + 1 if causal else len(Kc)
        for h in range(len(Gq)):
            q = Gq[h] @ (Fq @ row)
            logits = torch.stack([q @ (Gk[h] @ Kc[j]) for j in range(seen)])
            p = torch.exp(logits * (len(q) ** -0.5 if scale is None else scale))
            y = y + sum(p[j] * (Gv[h] @ Vc[j]) for j in range(seen)) / p.sum() @ W_O[h]
        rows.append(y)
    return torch.stack(rows), Kc, Vc


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scale", [None, 0.75])
@pytest.mark.parametrize("absent", [True, False])
def test_it_is_what_the_survey_prints(absent, scale, causal):
    I = draw(OP, absent=absent, **SIZES | ({"P": 0} if absent else {}))
    assert_agrees(OP, survey, I | {"scale": scale, "causal": causal})


# --- special cases ---------------------------------------------------------------------------------------------------


def weights(H, G, E, d, seed=0):
    """Of grouped-query attention: W_Q (H, d, E), W_K and W_V (G, d, E), W_O (H, d, E), and tokens."""
    g = np.random.default_rng(seed)
    W = [g.standard_normal((n, d, E)) / math.sqrt(E) for n in (H, G, G)]
    return *W, g.standard_normal((H, d, E)) / math.sqrt(H * d), g.standard_normal((7, E))


def replication(H, G, d):
    """Cores of zeros and ones: head h takes the channels of group h // (H / G) from a latent of G d."""
    return np.stack([np.eye(G * d)[(h // (H // G)) * d : (h // (H // G) + 1) * d] for h in range(H)])


def grouped(x, W_Q, W_K, W_V, W_O):
    """By `softmax_attention.cached`."""
    (H, d, _), G = W_Q.shape, len(W_K)
    q = np.stack([x @ W.T for W in W_Q], axis=1).reshape(len(x), G, H // G, d)
    k, v = (np.stack([x @ W.T for W in Ws], axis=1) for Ws in (W_K, W_V))
    O = operator("softmax_attention.cached").evaluate({"q": q, "k": k, "v": v})["O"].reshape(len(x), H * d)
    return O @ W_O.reshape(H * d, -1)


@pytest.mark.parametrize("G", [4, 2, 1])
def test_grouped_query_attention_has_ranks_of_its_keys(G):
    """K1: the factor is W_K of all groups, of rank G d, and the core copies it to the heads; MHA is G = H."""
    H, E, d = 4, 12, 3
    W_Q, W_K, W_V, W_O, x = weights(H, G, E, d)
    R = replication(H, G, d)
    I = {"x": x, "Fq": np.eye(E), "Gq": W_Q, "Fk": W_K.reshape(G * d, E), "Gk": R, "Fv": W_V.reshape(G * d, E)}
    I |= {"Gv": R, "W_O": W_O}
    for form in OP.forms:
        assert close(OP, OP.evaluate(I, form.name)["Y"], grouped(x, W_Q, W_K, W_V, W_O), I), form.name


def test_latent_attention_shares_the_factor_of_keys_and_values():
    """K1, K3: with Fk = Fv the two caches are one, so r numbers a token and not 2 r; the rotary part is left out."""
    I = draw(OP, absent=True, **SIZES | {"P": 0, "X": 4})
    I["Fv"] = I["Fk"]
    Y, Kc, Vc = tucker.factored(**I)
    assert np.array_equal(Kc, Vc)
    q = np.stack([I["x"] @ I["Fq"].T @ G.T for G in I["Gq"]], axis=1)
    none = {"qr": np.zeros((6, 3, 2)), "kr": np.zeros((6, 2)), "scale": 2**-0.5}
    O = operator("mla").evaluate({"qc": q, "c": Kc, "Uk": I["Gk"], "Uv": I["Gv"], **none})["O"]
    assert close(OP, Y, O.reshape(6, 9) @ I["W_O"].reshape(9, 5), I)


def test_one_factor_for_keys_and_values_needs_the_rank_of_both():
    """K2: [W_K; W_V] of G groups has rank 2 G d. A shared factor of less, even G d each, loses some of it."""
    H, G, E, d = 4, 2, 16, 3
    _, W_K, W_V, _, _ = weights(H, G, E, d)
    K, V = W_K.reshape(G * d, E), W_V.reshape(G * d, E)
    sigma = np.linalg.svd(np.concatenate([K, V]), compute_uv=False)
    assert np.linalg.matrix_rank(np.concatenate([K, V])) == 2 * G * d == len(sigma)
    assert sigma[-1] > 0.1
    assert np.linalg.norm(sigma[G * d :]) > 0.5  # what the best factor of rank G d misses
    assert np.linalg.svd(K, compute_uv=False)[-1] > 0.1  # nor does G d - 1 do for keys alone


def test_ranks_equal_to_the_hidden_size_cost_twice():
    """K1: as multi-head attention a projection has E^2 numbers, as core and factor 2 E^2."""
    E, H = 8, 4
    layer = TuckerAttention(E, H, E // H, (E, E, E))
    assert sum(p.numel() for p in layer.parameters()) == 3 * 2 * E**2 + E**2


def test_tenfold_savings_need_another_output_projection():
    """K4: grouped-query attention with H / 4 groups has 2.5 E^2 numbers, and W_O of either alone has E^2."""
    E, H = 32, 8
    gqa = (1 + 2 / 4 + 1) * E**2
    found = []
    for r in (E, E // 2, E // 8, 1):
        layer = TuckerAttention(E, H, E // H, (r, r, r))
        found.append(gqa / sum(p.numel() for p in layer.parameters()))
    assert [f"{f:.2f}" for f in found] == ["0.36", "0.62", "1.43", "2.11"]
    assert max(found) < 2.5


def unfoldings(T):
    return tuple(int(np.linalg.matrix_rank(np.moveaxis(T, i, 0).reshape(T.shape[i], -1))) for i in range(3))


def test_the_tensor_of_all_heads_has_three_ranks():
    """K5: what is printed is a product of two matrices; the ranks of T_h = W_Q_h^T W_K_h over heads, inputs of queries
    and inputs of keys, which a Tucker decomposition has, tell MHA, GQA and MLA apart. The joint core is T between the
    factors."""
    H, E, d = 4, 16, 4
    for G, r, want in ((4, E, (4, 16, 16)), (2, 8, (4, 16, 8)), (4, 6, (4, 16, 6))):
        W_Q, W_K, *_ = weights(H, G, E, d)
        F = np.random.default_rng(1).standard_normal((r, E))
        of_heads = [W_K[h // (H // G)] if r != 6 else W_K[h, :, :r] @ F for h in range(H)]
        assert unfoldings(np.stack([q.T @ k for q, k in zip(W_Q, of_heads, strict=True)])) == want
    I = draw(OP, absent=True, **SIZES | {"P": 0})
    J = tucker.joint_core(I["Gq"], I["Gk"])
    for h in range(3):
        W_Q, W_K = I["Gq"][h] @ I["Fq"], I["Gk"][h] @ I["Fk"]
        assert np.max(np.abs(W_Q.T @ W_K - I["Fq"].T @ J[h] @ I["Fk"])) < 1e-13


def test_a_basis_of_the_latent_is_free():
    """Core B^-1 and B factor are the same layer; only what is cached is written in another basis."""
    I = draw(OP, **SIZES)
    B = np.random.default_rng(1).standard_normal((4, 4)) + 3 * np.eye(4)
    other = I | {"Fk": B @ I["Fk"], "Gk": I["Gk"] @ np.linalg.inv(B), "K0": I["K0"] @ B.T}
    one, two = tucker.factored(**I), tucker.factored(**other)
    assert np.max(np.abs(one[0] - two[0])) < 1e-12
    assert np.max(np.abs(one[1] @ B.T - two[1])) < 1e-12
    assert np.max(np.abs(one[1] - two[1])) > 1


def test_a_rotation_between_the_cores_is_not_absorbed():
    """Keys turned after their core: what a query would absorb, Gq^T R(i - j) Gk, depends on the distance."""
    I = draw(OP, absent=True, **SIZES | {"P": 0})

    def core(n):
        R = np.array([[math.cos(n), -math.sin(n)], [math.sin(n), math.cos(n)]])
        return I["Gq"][0].T @ R @ I["Gk"][0]

    assert np.max(np.abs(core(0) - tucker.joint_core(I["Gq"], I["Gk"])[0])) == 0
    assert np.max(np.abs(core(1) - core(0))) > 0.5


# --- what makes no sense ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [f.name for f in OP.forms])
def test_half_a_cache_is_refused(form):
    I = draw(OP, **SIZES)
    for given, absent in (("K0", "V0"), ("V0", "K0")):
        with pytest.raises(ValueError, match=f"{given} is given without {absent}; a cache has both"):
            OP.evaluate(I | {absent: None}, form)
    with pytest.raises(ValueError, match=r"V0 has shape \(2, 2\): axis P is 2"):
        OP.evaluate(I | {"V0": I["V0"][:2]}, form)


# --- the layer -------------------------------------------------------------------------------------------------------


def made(**options):
    torch.manual_seed(0)
    return TuckerAttention(**{"d_model": 6, "heads": 2, "width": 4, "ranks": (3, 5, 2), "chunk": 3} | options)


def tokens(dtype=torch.float32, T=8):
    return torch.randn(2, T, 6, generator=torch.Generator().manual_seed(1), dtype=dtype)


def test_layer_is_the_function():
    layer, x = made(causal=False), tokens()
    parameters = dict(layer.named_parameters())
    assert sorted(parameters) == sorted(i.name for i in OP.inputs if i.role == "parameter")
    Y, K, V = absorbed(x, **parameters, causal=False, chunk=3)
    got, cache = layer(x)
    assert torch.equal(got, Y)
    assert torch.equal(cache.K, K)
    assert torch.equal(cache.V, V)
    assert not torch.equal(made()(x)[0], Y)


def test_layer_saves_and_loads():
    layer, other, x = made(), made(), tokens()
    other.reset_parameters()
    assert not torch.equal(layer(x)[0], other(x)[0])
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x)[0], other(x)[0])


@pytest.mark.parametrize("steps", [(8,), (3, 5), (1,) * 8, (5, 1, 1, 1), (0, 8)])
def test_prefill_and_decode_are_the_whole(steps):
    layer, x = made().double(), tokens(torch.float64)
    whole, full = layer(x)
    cache, parts = None, []
    for part in x.split(steps, dim=1):
        y, cache = layer(part, cache)
        parts.append(y)
    assert (torch.cat(parts, dim=1) - whole).abs().max() < 1e-14
    assert isinstance(cache, Latents)
    assert cache.K.shape == (2, 8, 5)
    assert torch.allclose(cache.V, full.V, rtol=0, atol=1e-14)


def test_every_parameter_learns():
    layer = made()
    layer(tokens())[0].square().sum().backward()
    assert all(torch.count_nonzero(p.grad) == p.numel() for p in layer.parameters())


def test_half_precision_and_autocast():
    layer, x = made(), tokens(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        Y, cache = layer(x)
    assert (Y.dtype, cache.K.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(Y, layer(x.float())[0].bfloat16())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 0}, "heads is 0; it must be at least 1"),
        ({"ranks": (3, 0, 2)}, r"ranks\[1\] is 0; it must be at least 1"),
        ({"chunk": 0}, "chunk is 0; it must be at least 1"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        made(**options)


def test_arguments_that_make_no_sense():
    layer, x = made(), tokens()
    with pytest.raises(ValueError, match=r"x has shape \(8, 6\); expected axes \(B, T, E\)"):
        layer(x[0])
    with pytest.raises(ValueError, match="V0 is given without K0; a cache has both"):
        absorbed(x, **dict(layer.named_parameters()), V0=torch.ones(2, 3, 2))
