"""Temporal latent attention against transcriptions of the authors' code, training and inference; what the survey
says of it; its layer."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from witness import allowed, assert_agrees, close, draw

from mixproof.reference import mla, mtla
from mixproof.reference.latent_attention import rotated
from mixproof.reference.primitives import sigmoid
from mixproof.verify.subjects.mutants import mtla as mutants
from mixproof.verify.subjects.torch import mtla as layers
from mixproof.verify.subjects.torch.mtla import MultiheadTemporalLatentAttention

OPERATOR = mtla.OPERATOR
SIZES = {"T": 7, "N": 2, "K": 3, "R": 4, "L": 3, "V": 2, "P": 0}


def inputs(stride=2, position=0, **options):
    """Random inputs, with the slots that `position` tokens fill."""
    P = -(-position // stride)
    I = draw(OPERATOR, absent=not P, **SIZES | {"P": P} | options)
    return I | {"stride": stride, "position": position}


def turn(x, n, base=10000.0):
    """RoPE as a complex product, as the authors': (.., R) at position n."""
    R = x.shape[-1]
    angle = n * base ** (-torch.arange(0, R, 2, dtype=torch.float64) / R)
    z = torch.complex(x[..., 0::2], x[..., 1::2]) * torch.polar(torch.ones_like(angle), angle)
    return torch.stack([z.real, z.imag], dim=-1).flatten(-2)


def inference(qc, qr, c, w, kr, Uk, Uv, scale=None, base=10000.0, stride=2, position=0, C0=None, Kr0=None):
    """`incremental_state` of the released code: T counts from one, and T % s == 1 opens a slot (s > 1); absorbed."""
    C = [] if C0 is None else list(C0)
    Kr = [] if Kr0 is None else list(Kr0)
    scale, rows = (qc.shape[2] + qr.shape[2]) ** -0.5 if scale is None else scale, []
    for t in range(len(c)):
        n = position + t
        new, k = torch.sigmoid(w[t]) * c[t], turn(kr[t], n, base)
        if (n + 1) % stride == 1 % stride:
            C, Kr = [*C, new], [*Kr, k]
        else:
            C, Kr = [*C[:-1], C[-1] + new], [*Kr[:-1], k + 0 * Kr[-1]]
        cache, keys = torch.stack(C), torch.stack(Kr)
        heads = []
        for h in range(len(Uk)):
            S = cache @ (qc[t, h] @ Uk[h]) + keys @ turn(qr[t, h], n, base)
            heads.append(Uv[h] @ (torch.softmax(S * scale, dim=0) @ cache))
        rows.append(torch.stack(heads))
    return torch.stack(rows), torch.stack(C), torch.stack(Kr)


def training(qc, qr, c, w, kr, Uk, Uv, scale=None, base=10000.0, stride=2, position=0):
    """The other branch: a matrix of weights inside chunks times latents, and the stride-aware causal mask."""
    T = len(c)
    assert position == 0
    rows, cols = torch.arange(T)[:, None], torch.arange(T)[None]
    chunk = (rows // stride == cols // stride) & (rows % stride >= cols % stride)
    C = (torch.sigmoid(w)[None] * chunk) @ c
    visible = ((cols <= rows) & ((cols + 1) % stride == 0)) | (cols == rows)
    K = torch.stack([turn(kr[t], t, base) for t in range(T)])
    Q = torch.stack([turn(qr[t], t, base) for t in range(T)])
    S = torch.einsum("tnk,nkl,sl->tns", qc, Uk, C) + torch.einsum("tnr,sr->tns", Q, K)
    S = S * ((qc.shape[2] + qr.shape[2]) ** -0.5 if scale is None else scale)
    P = torch.softmax(S.masked_fill(~visible[:, None], -math.inf), dim=-1)
    last = [t for t in range(T) if (t + 1) % stride == 0 or t == T - 1]
    return torch.einsum("tns,sl,nvl->tnv", P, C, Uv), C[last], K[last]


# stride, tokens before: closed slots, an open one with one token and with two, none
STARTS = [(2, 0), (2, 4), (2, 3), (3, 2), (3, 4), (1, 3), (4, 0)]


@pytest.mark.parametrize(("stride", "position"), STARTS)
def test_it_is_what_the_authors_decode(stride, position):
    assert_agrees(OPERATOR, inference, inputs(stride, position))


@pytest.mark.parametrize("stride", [1, 2, 3, 8])
def test_it_is_what_the_authors_train(stride):
    assert_agrees(OPERATOR, training, inputs(stride) | {"scale": 0.75, "base": 100.0})


@pytest.mark.parametrize(("stride", "position"), STARTS)
def test_every_prefix_leaves_what_the_rest_goes_on_from(stride, position):
    I = inputs(stride, position)
    O, Cc, Krc = mtla.parallel(**I)
    tokens = [x.name for x in OPERATOR.inputs if x.role == "token"]
    for at in range(len(O) + 1):
        one, *cache = mtla.parallel(**I | {n: I[n][:at] for n in tokens})
        assert len(cache[0]) == math.ceil((position + at) / stride)
        later = {"position": position + at} | (dict(zip(("C0", "Kr0"), cache, strict=True)) if len(cache[0]) else {})
        two, *after = mtla.incremental(**I | {n: I[n][at:] for n in tokens} | later)
        assert close(OPERATOR, np.concatenate([one, two]), O, I)
        closed = (position + at) // stride
        for now, then, end in zip(cache, after, (Cc, Krc), strict=True):
            assert np.array_equal(now[:closed], then[:closed])  # what is closed stays as it is
            assert now.shape[1:] == then.shape[1:]
            assert len(then) == len(end)


def visible(form, **options):
    """(T, T) slots of T one-hot latents that a row reads anything of."""
    T = options.get("T", 9)
    I = inputs(T=T, L=T, V=T, **options)
    one_hot = {"c": np.eye(T), "Uv": np.broadcast_to(np.eye(T), (2, T, T)), "w": np.full(T, 40.0)}
    return np.abs(form(**I | one_hot)[0][:, 0]) > 1e-9


@pytest.mark.parametrize("form", [f.function for f in OPERATOR.forms])
@pytest.mark.parametrize("stride", [1, 2, 3, 4])
def test_a_row_sees_everything_until_itself_and_nothing_later(form, stride):
    """In ceil((t + 1) / s) slots: those of one slot get one weight."""
    assert np.array_equal(visible(form, stride=stride), np.tri(9, dtype=bool))


@pytest.mark.parametrize("stride", [2, 3, 4])
def test_summing_a_window_before_the_mask_leaks(stride):
    """With slots summed as a whole, every row before its slot's last token depends on tokens after it."""
    I = inputs(stride)
    weighted = sigmoid(I["w"])[:, None] * I["c"]
    slot = np.arange(7) // stride

    def whole(change):
        x = weighted.copy()
        x[6] += change
        C = (slot[:, None] == slot).astype(float) @ x
        S = I["qc"][:, 0] @ (C[::stride] @ I["Uk"][0].T).T
        S = np.where(slot[:, None] >= np.arange(len(C[::stride])), S, -np.inf)
        P = np.exp(S - S.max(1, keepdims=True))
        return P / P.sum(1, keepdims=True) @ C[::stride]

    moved = np.any(whole(0.0) != whole(1.0), axis=1)
    assert np.array_equal(moved, slot == 6 // stride)
    before, after = mtla.parallel(**I)[0], mtla.parallel(**I | {"c": I["c"] + (np.arange(7) == 6)[:, None]})[0]
    assert np.array_equal(np.any(before != after, axis=(1, 2)), np.arange(7) == 6)


# --- what the survey says --------------------------------------------------------------------------------------------


def test_running_sums_start_anew_at_every_slot():
    """By hand: weights of one, latents 1 2 3 4 5, stride two, after a token of 10 whose slot is open."""
    I = inputs(position=1, T=5, L=1)
    I |= {"c": np.arange(1.0, 6.0)[:, None], "w": np.full(5, 60.0), "C0": np.array([[10.0]])}
    for form in OPERATOR.forms:
        assert form.function(**I)[1].ravel().tolist() == [11.0, 5.0, 9.0]


def test_slots_are_sums_and_no_averages():
    """Claim: a gated average. Two latents of one with weights near one give two; an average would give one."""
    I = inputs() | {"c": np.ones((7, 3)), "w": np.full(7, 40.0)}
    _, C, _ = mtla.parallel(**I)
    assert C.tolist() == [[2.0] * 3] * 3 + [[1.0] * 3]
    I = inputs(stride=3)
    C, g, size = mtla.parallel(**I)[1], sigmoid(I["w"]), np.linalg.norm(I["c"], axis=1)
    for j, slot in enumerate(mtla.slots(7, 3, 0)):
        assert np.linalg.norm(C[j]) <= np.sum(g[slot] * size[slot]) < 3 * np.max(size[slot])
        assert np.max(np.abs(C[j] - np.average(I["c"][slot], axis=0, weights=g[slot]))) > 0.1


def test_stride_one_is_latent_attention_of_weighted_latents():
    """Claim: stride one gives MLA. Of w_t c_t it does; of c_t only where all weights are one, which no logit gives."""
    I = inputs(stride=1)
    plain = {n: I[n] for n in ("qc", "qr", "c", "kr", "Uk", "Uv")}
    O = mtla.parallel(**I)[0]
    assert close(OPERATOR, O, mla.expanded(**plain | {"c": sigmoid(I["w"])[:, None] * I["c"]})[0], I)
    assert not close(OPERATOR, O, mla.expanded(**plain)[0], I)
    assert close(OPERATOR, mtla.parallel(**I | {"w": np.full(7, 40.0)})[0], mla.expanded(**plain)[0], I)


def test_the_first_token_returns_its_own_value():
    I = inputs(T=1)
    want = np.einsum("nvl,l->nv", I["Uv"], sigmoid(I["w"])[0] * I["c"][0])
    assert np.all(np.abs(mtla.parallel(**I)[0][0] - want) <= 2 * allowed(OPERATOR, I)["O"][0])


def test_only_the_distance_of_positions_matters():
    """Given w: queries and keys turned on by five more tokens, those of the cache too, give the same."""
    I = inputs(position=3)
    on = {n: rotated(I[n], np.full(len(I[n]), 5), 10000.0) for n in ("qr", "kr", "Kr0")}
    assert close(OPERATOR, mtla.parallel(**I | on)[0], mtla.parallel(**I)[0], I)
    assert not close(OPERATOR, mtla.parallel(**I | on | {"Kr0": I["Kr0"]})[0], mtla.parallel(**I)[0], I)


def test_what_is_cached():
    """Claim: 8.3 times less memory. Of keys and values of 8 heads with 64 channels, 256 + 32 channels a slot are 7.11
    times less for stride two and 10.67 times for three."""
    ratio = {}
    for stride in (2, 3):
        I = inputs(stride, T=6, N=8, K=64, R=32, L=256, V=64)
        _, C, Kr = mtla.parallel(**I)
        ratio[stride] = 2 * 6 * 8 * 64 / (C.size + Kr.size)
    assert {s: round(r, 2) for s, r in ratio.items()} == {2: 7.11, 3: 10.67}


# --- the hyper-network -----------------------------------------------------------------------------------------------


def test_gates_are_those_of_the_hyper_network():
    """Token by token, sinusoids by their definition; the weight depends on the slot's number, so no shift is free."""
    g = np.random.default_rng(0)
    T, L, D = 5, 6, 2
    c, W_c, W_p, b_c, b_p = (g.standard_normal(s) for s in ((T, L), (D, L), (D, L), D, D))
    j = np.arange(T) // 2
    got = mtla.gates(c, j, W_c, b_c, W_p, b_p)
    for t in range(T):
        PE = np.array([f(j[t] / 10000 ** (2 * i / L)) for i in range(L // 2) for f in (math.sin, math.cos)])
        want = (W_c @ PE + b_c) @ (W_p @ c[t] + b_p)
        size = (np.abs(W_c) @ np.abs(PE) + np.abs(b_c)) @ (np.abs(W_p) @ np.abs(c[t]) + np.abs(b_p))
        assert abs(got[t] - want) <= 32 * 2.0**-53 * size
        tensors = (torch.tensor(a) for a in (c[None], j, W_c, b_c, W_p, b_p))
        assert abs(layers.gates(*tensors)[0, t].item() - want) <= 32 * 2.0**-53 * size
    assert np.min(np.abs(mtla.gates(c, j + 1, W_c, b_c, W_p, b_p) - got)) > 1e-3


def test_angles_keep_their_digits_far_out():
    """At position 100000 an angle in float32 is off by up to 4e-3; here the rotation is off by roundings only."""
    x, n = np.ones((1, 4), dtype=np.float32), np.array([99_999])
    exact = rotated(x.astype(float), n, 10000.0)
    got = layers.turned(torch.tensor(x)[None], torch.tensor(n), 10000.0)[0].numpy()
    assert np.max(np.abs(got - exact)) <= 4 * 2.0**-24
    phase = np.float32(99_999) * np.float32(10000.0) ** np.float32(-0.5)
    assert abs(np.cos(phase.astype(float)) - np.cos(999.99)) > 1e-6


def test_the_mutants_builder_with_nothing_changed_is_the_operator():
    for stride, position in STARTS:
        I = inputs(stride, position)
        for x, y in zip(mutants.attention()(**I), mtla.parallel(**I), strict=True):
            assert np.max(np.abs(x - y)) <= 64 * 2.0**-53 * np.max(np.abs(y))


# --- arguments, and the layer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [*(f.function for f in OPERATOR.forms), layers.absorbed, layers.masked])
def test_arguments_that_make_no_sense(form):
    I, torched = inputs(position=4), form.__module__ == layers.__name__
    for change, kind, message in (
        ({"stride": 0}, ValueError, "stride is 0"),
        ({"position": 6}, ValueError, "the cache has 2 slots; 6 tokens fill 3 of 2"),
        ({"position": 0}, ValueError, "the cache has 2 slots; 0 tokens fill 0 of 2"),
        ({"C0": None, "Kr0": None}, ValueError, "the cache has 0 slots; 4 tokens fill 2 of 2"),
        ({"position": -1}, ValueError, "position"),
        ({"Kr0": None}, ValueError, "slots"),
        ({"kr": I["kr"][:, :3], "qr": I["qr"][:, :, :3], "Kr0": I["Kr0"][:, :3]}, ValueError, "pairs|even"),
        ({"w": I["w"][:5]}, ValueError, "w has shape"),
    ):
        given = I | change
        if torched:
            given = {n: torch.tensor(x)[None] if n not in ("Uk", "Uv") and np.ndim(x) else x for n, x in given.items()}
            given = {n: torch.tensor(x) if n in ("Uk", "Uv") else x for n, x in given.items()}
        with pytest.raises(kind, match=message):
            form(**given)


def layer(**options):
    torch.manual_seed(0)
    sizes = {"d_model": 6, "heads": 2, "latent": 8, "key": 3, "rotary": 4, "value": 5}
    made = MultiheadTemporalLatentAttention(**sizes | {"stride": 3} | options).double()
    for p in (made.bias, made.b_c, made.b_p):
        torch.nn.init.normal_(p)
    return made


def by_hand(m, x):
    """The layer from its parameters, by the transcription."""
    rows = []
    for tokens in x:
        q = torch.einsum("te,nke->tnk", tokens, m.W_Q)
        c = tokens @ m.W_D[:8].T
        c = (c - c.mean(1, keepdim=True)) / (c.var(1, unbiased=False, keepdim=True) + m.eps).sqrt() * m.gain + m.bias
        slot = np.arange(len(tokens)) // m.stride
        parts = [y.detach().numpy() for y in (c, m.W_c, m.b_c, m.W_p, m.b_p)]
        w = torch.tensor(mtla.gates(parts[0], slot, *parts[1:]))
        O, _, _ = training(q[..., :3], q[..., 3:], c, w, tokens @ m.W_D[8:].T, m.Uk, m.Uv, stride=m.stride)
        rows.append(torch.einsum("tnv,env->te", O, m.W_O))
    return torch.stack(rows)


def drawn(B=2, T=8):
    return torch.randn(B, T, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def near(one, two, ulps=256):
    """Within some roundings of numbers of size one."""
    return bool(((one - two).abs() <= ulps * 2.0**-53).all())


def test_the_layer_is_the_operator_between_projections():
    m, x = layer(), drawn()
    with torch.no_grad():
        assert near(m(x)[0], by_hand(m, x))
        assert not near(layer(stride=2)(x)[0], by_hand(m, x))


def test_the_layer_decodes_what_it_trains():
    m, x = layer(), drawn()
    with torch.no_grad():
        full, end = m(x)
        for edges in ([3, 3], [1, 2, 5], range(1, 8)):
            cache, parts = None, []
            for a, b in zip((0, *edges), (*edges, 8), strict=True):
                y, cache = m(x[:, a:b], cache)
                parts.append(y)
                assert cache.position == b
                assert cache.C.shape[1] == math.ceil(b / 3)
            assert near(torch.cat(parts, dim=1), full)
            assert near(cache.C, end.C)
            assert near(cache.Kr, end.Kr)


def test_the_layer_keeps_its_parameters_and_learns_all_of_them():
    m, other, x = layer(), layer(), drawn()
    m(x)[0].square().sum().backward()
    assert all(torch.count_nonzero(p.grad) == p.numel() for n, p in m.named_parameters())
    other.reset_parameters()
    assert not near(other(x)[0], m(x)[0])
    other.load_state_dict(m.state_dict())
    assert torch.equal(other(x)[0], m(x)[0])


def test_half_precision_beside_wide_parameters_and_autocast():
    m, x = layer().float(), drawn().float()
    with torch.no_grad():
        C, I = m(x)[1].C, inputs()
        assert C.dtype == torch.float32
        given = {n: torch.tensor(a, dtype=torch.float32) for n, a in I.items() if np.ndim(a)}
        given = {n: a if n in ("Uk", "Uv") else a[None] for n, a in given.items()}
        half = {n: a if n in ("Uk", "Uv") else a.bfloat16() for n, a in given.items()}
        O, C, Kr = layers.absorbed(**half)
        assert (O.dtype, C.dtype, Kr.dtype) == (torch.bfloat16, torch.float32, torch.float32)
        assert torch.equal(O, layers.absorbed(**{n: a.float() for n, a in half.items()})[0].bfloat16())
        want = layers.absorbed(**given)[0]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(layers.absorbed(**given)[0], want)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stride": 0}, "stride is 0; it must be at least 1"),
        ({"heads": 0}, "heads is 0; it must be at least 1"),
        ({"latent": 7}, "latent is 7; channels go in pairs"),
        ({"rotary": 3}, "rotary is 3; channels go in pairs"),
        ({"eps": -1.0}, "eps is -1.0; it must be finite and not negative"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        layer(**options)
