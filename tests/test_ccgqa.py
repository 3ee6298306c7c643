"""Compressed convolutional attention, grouped and not, against the code of ZAYA in other words; what the survey says of
it; its layer."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from witness import assert_agrees, close, draw

from mixproof.reference import cca, ccgqa
from mixproof.reference.ccgqa_mixing import convolved, shifted
from mixproof.verify.subjects.mutants import ccgqa as mutants
from mixproof.verify.subjects.torch import cca as torch_cca
from mixproof.verify.subjects.torch import ccgqa as layers
from mixproof.verify.subjects.torch.ccgqa import CompressedConvolutionalAttention

GROUPED, SINGLE = ccgqa.OPERATOR, cca.OPERATOR
SIZES = {"T": 6, "G": 2, "M": 3, "K": 4, "V": 2, "W": 3, "J": 2, "P": 2}
TOKENS, STATES = ("q", "k", "v"), ("q0", "k0", "v0", "K0", "V0")
LAST = ("q_last", "k_last", "v_last", "Kc", "Vc")


def inputs(absent=True, **sizes):
    return draw(GROUPED, absent=absent, **SIZES | ({"P": 0} if absent else {}) | sizes)


def turn(x, n, base):
    """RoPE as a complex product; x (T, .., K), n (T,)."""
    K = x.shape[-1]
    angle = n[:, None] * base ** (-torch.arange(0, K, 2, dtype=torch.float64) / K)
    angle = angle.reshape(len(n), *(1,) * (x.ndim - 2), K // 2)
    z = torch.complex(x[..., 0::2], x[..., 1::2]) * torch.polar(torch.ones_like(angle), angle)
    return torch.stack([z.real, z.imag], dim=-1).flatten(-2)


def zaya(
    q, k, v, w1q, b1q, w2q, b2q, w1k, b1k, w2k, b2k, beta, scale=None, base=10000.0, norm_eps=1e-12, q0=None, k0=None,
    v0=None, K0=None, V0=None, pads=None,
):  # fmt: skip
    """ZayaCCAProjection, ZayaQKNorm and eager attention: heads of queries and keys side by side as channels of two
    Conv1d, zeros once before both (or `pads` before each); the mean of keys from that of queries; e^beta for temp."""
    T, G, M, K = q.shape
    H, (W, J) = G * M + G, (w1q.shape[-1], w2q.shape[-1])
    tokens = torch.cat([q.reshape(T, G * M * K), k.reshape(T, G * K)], dim=1)
    if q0 is None:
        rows = F.pad(tokens.T, (W + J - 2 if pads is None else pads[0], 0))
    else:
        before = torch.cat([q0.reshape(-1, G * M * K), k0.reshape(-1, G * K)], dim=1)
        rows = torch.cat([before, tokens]).T
    w1 = torch.cat([w1q.reshape(-1, 1, W), w1k.reshape(-1, 1, W)])
    w2 = torch.cat([w2q.reshape(-1, K, J), w2k.reshape(-1, K, J)])
    b1, b2 = (torch.cat([a.reshape(-1), b.reshape(-1)]) for a, b in ((b1q, b1k), (b2q, b2k)))
    y = F.conv1d(rows[None], w1, b1, groups=H * K)
    y = F.conv1d(y if pads is None else F.pad(y, (pads[1], 0)), w2, b2, groups=H)[0].T
    mean = (q + k.repeat_interleave(M, dim=1).reshape(q.shape)) * 0.5
    query, key = y[:, : G * M * K].reshape(q.shape) + mean, y[:, G * M * K :].reshape(k.shape) + mean.mean(dim=2)
    query = query * (math.sqrt(K) / query.norm(p=2, dim=-1, keepdim=True).clamp_min(norm_eps))
    key = key * (math.sqrt(K) / key.norm(p=2, dim=-1, keepdim=True).clamp_min(norm_eps)) * beta.exp()[:, None]
    n = torch.arange(T) + (0 if K0 is None else len(K0))
    query, key = turn(query, n, base), turn(key, n, base)
    flat = v.reshape(T, -1)
    now, late = flat.chunk(2, dim=1)
    first = torch.zeros_like(late[:1]) if v0 is None else v0.reshape(1, -1).chunk(2, dim=1)[1]
    value = torch.cat([now, torch.cat([first, late[:-1]])], dim=1).reshape(v.shape)
    Kc, Vc = (x if before is None else torch.cat([before, x]) for before, x in ((K0, key), (V0, value)))
    S = torch.einsum("tgmk,sgk->gmts", query, Kc) * (K**-0.5 if scale is None else scale)
    S = S + torch.full((T, len(Kc)), -math.inf).triu(1 + len(Kc) - T)
    O = torch.einsum("gmts,sgv->tgmv", S.softmax(-1), Vc)
    last = rows.T[len(rows.T) - W - J + 2 :].split([G * M * K, G * K], dim=1)
    return O, last[0].reshape(-1, G, M, K), last[1].reshape(-1, G, K), v[-1] + 0 * (0 if v0 is None else v0), Kc, Vc


@pytest.mark.parametrize("absent", [True, False])
@pytest.mark.parametrize("sizes", [{}, {"W": 1, "J": 3}, {"W": 2, "J": 1, "G": 1}, {"W": 1, "J": 1, "M": 1}, {"T": 1}])
def test_it_is_what_zaya_computes(absent, sizes):
    assert_agrees(GROUPED, zaya, inputs(absent, **sizes))


def test_scale_base_and_norm_are_where_zaya_has_them():
    """Rows of norm about two, and a least norm of two."""
    assert_agrees(GROUPED, zaya, inputs(False) | {"scale": 0.75, "base": 100.0, "norm_eps": 2.0})


def grouped(I):
    """Inputs of cca as those of ccgqa with one query a group."""
    after_groups = {"q": 2, "q0": 2} | {n: 1 for n in ("w1q", "b1q", "w2q", "b2q")}
    return {n: np.expand_dims(x, after_groups[n]) if n in after_groups else x for n, x in I.items()}


@pytest.mark.parametrize("absent", [True, False])
def test_with_one_query_a_group_it_is_cca(absent):
    I = draw(SINGLE, absent=absent, **{n: s for n, s in SIZES.items() if n != "M"} | ({"P": 0} if absent else {}))

    def printed(**given):
        wide = {n: x[:, :, None] if n in ("q", "q0") else x for n, x in given.items()}
        wide |= {n: given[n][:, None] for n in ("w1q", "b1q", "w2q", "b2q")}
        O, q_last, *others = zaya(**wide)
        return O[:, :, 0], q_last[:, :, 0], *others

    assert_agrees(SINGLE, printed, I)
    assert close(SINGLE, cca.parallel(**I)[0], ccgqa.parallel(**grouped(I))[0][:, :, 0], I)


@pytest.mark.parametrize("absent", [True, False])
def test_every_prefix_leaves_what_the_rest_goes_on_from(absent):
    I = inputs(absent)
    O, *end = ccgqa.parallel(**I)
    for at in range(SIZES["T"] + 1):
        one, *states = ccgqa.parallel(**I | {n: I[n][:at] for n in TOKENS})
        rest = {n: I[n][at:] for n in TOKENS} | dict(zip(STATES, states, strict=True))
        two, *after = ccgqa.chunkwise(**I | rest, chunk=1)
        assert close(GROUPED, np.concatenate([one, two]), O, I)
        for x, y in zip(after[:3], end[:3], strict=True):
            assert np.array_equal(x, y)
        assert [x.shape for x in after] == [x.shape for x in end]


# --- what the survey says --------------------------------------------------------------------------------------------


def test_the_printed_mean_has_no_shape():
    """Claim: q_mean = (B q + E k) / 2. B takes keys to queries, E queries to keys; E B = 1, B q and E k are nothing."""
    G, M, K = 2, 4, 2
    B = np.kron(np.kron(np.eye(G), np.ones((M, 1))), np.eye(K))
    E = B.T / M
    q, k = np.ones(G * M * K), np.ones(G * K)
    assert B.shape == (16, 4)
    assert np.array_equal(E @ B, np.eye(G * K))
    assert (B @ k).shape == q.shape
    assert (E @ q).shape == k.shape
    for W, x in ((B, q), (E, k)):
        with pytest.raises(ValueError, match="mismatch"):
            W @ x


def test_padding_each_convolution_differs_where_the_bias_comes_in():
    """In the first J - 1 rows, and nowhere if the first convolution has no bias."""
    I = inputs(W=2, J=3)
    for bias, differs in ((1.0, [True, True, False, False, False, False]), (0.0, [False] * 6)):
        given = I | {n: bias * I[n] for n in ("b1q", "b1k")}
        tensors = {n: torch.tensor(x) for n, x in given.items()}
        joint, apart = zaya(**tensors)[4].numpy(), zaya(**tensors, pads=(1, 2))[4].numpy()
        far = np.abs(joint - apart) > 1e-9
        assert np.any(far, axis=(1, 2)).tolist() == differs
        assert np.max(np.abs(joint - ccgqa.parallel(**given)[4])) < 1e-9


def test_receptive_fields():
    """A key reaches W + J - 1 tokens, a value two."""
    I = inputs(T=9)
    _, _, _, _, Kc, Vc = ccgqa.parallel(**I)
    for at in (0, 2):
        moved = np.arange(9) == at
        k, v = I["k"] + moved[:, None, None], I["v"] + moved[:, None, None]
        changed = ccgqa.parallel(**I | {"k": k, "v": v})
        reach = np.flatnonzero(np.any(changed[4] != Kc, axis=(1, 2)))
        assert reach.tolist() == [at + n for n in range(SIZES["W"] + SIZES["J"] - 1)]
        assert np.flatnonzero(np.any(changed[5] != Vc, axis=(1, 2))).tolist() == [at, at + 1]


def test_half_of_the_heads_is_late():
    """Not half of each head, as a comment in ZAYA has it: that is so for one group only."""
    v = np.arange(12.0).reshape(3, 2, 2)
    assert shifted(v).tolist() == [[[4, 5], [2, 3]], [[8, 9], [6, 7]]]
    assert shifted(v.reshape(3, 1, 4)).tolist() == [[[4, 5, 2, 3]], [[8, 9, 6, 7]]]


def test_logits_and_weights_are_bounded():
    """|logit| <= sqrt(K) e^beta, so each of n weights is at least e^(-2 sqrt(K) e^beta) / n."""
    I = inputs(T=8, K=2, G=1, M=2) | {"beta": np.array([0.3])}
    most = math.sqrt(2) * math.exp(0.3)
    weights = []
    for j in range(8):
        v = np.zeros((8, 1, 2))
        v[j, 0, 0] = 1  # the first of two channels is not late
        weights.append(ccgqa.parallel(**I | {"v": v})[0][:, 0, :, 0])
    A, n = np.stack(weights, axis=-1), 1 + np.arange(8)
    size = np.linalg.norm(ccgqa.parallel(**I)[4], axis=-1)
    assert np.max(np.abs(size - most)) <= 32 * 2.0**-53 * most
    seen = np.tri(8, dtype=bool)[:, None] & np.ones((8, 2, 8), dtype=bool)
    assert np.all(A[~seen] == 0)
    least = (np.exp(-2 * most) / n)[:, None, None]
    assert np.all((A >= least * (1 - 2.0**-40)) | ~seen)
    assert np.min(np.where(seen, A / least, np.inf)[1:]) < 40  # no idle bound


@pytest.mark.parametrize("form", [ccgqa.parallel, ccgqa.chunkwise])
def test_without_biases_size_is_lost(form):
    """Queries and keys four times as large: the same, bit for bit; with biases, not at all."""
    I = inputs()
    flat = I | {n: 0 * I[n] for n in ("b1q", "b2q", "b1k", "b2k")}
    larger = {n: 4 * I[n] for n in ("q", "k")}
    assert np.array_equal(form(**flat | larger)[0], form(**flat)[0])
    assert np.max(np.abs(form(**I | larger)[0] - form(**I)[0])) > 0.01


def test_tiny_rows_keep_their_direction_and_rows_of_zeros_have_none():
    """2^-76 in float32: squares would be zero. Zeros give uniform weights, where a bare quotient is not a number."""
    I = {n: x.astype(np.float32) for n, x in inputs().items()}
    I |= {n: 0 * I[n] for n in ("b1q", "b2q", "b1k", "b2k")}
    tiny = {n: I[n] * np.float32(2.0**-76) for n in ("q", "k")}
    want = ccgqa.parallel(**I, norm_eps=0.0)[0]
    assert want.dtype == np.float32
    assert np.array_equal(ccgqa.parallel(**I | tiny, norm_eps=0.0)[0], want)
    tensors = {n: torch.tensor(x)[None] if n in TOKENS else torch.tensor(x) for n, x in (I | tiny).items()}
    plain = tensors | {n: torch.tensor(I[n])[None] for n in ("q", "k")}
    assert torch.equal(layers.parallel(**tensors, norm_eps=0.0)[0], layers.parallel(**plain, norm_eps=0.0)[0])
    nothing = {n: 0 * I[n] for n in ("q", "k")}
    O, *_, Vc = ccgqa.parallel(**I | nothing)
    means = np.cumsum(Vc, axis=0) / (1 + np.arange(6))[:, None, None]
    assert np.max(np.abs(O - means[:, :, None])) <= 16 * 2.0**-24 * np.max(np.abs(Vc))


def test_what_is_cached_and_what_convolutions_cost():
    """Claims: 2 e~ a token, and C times less of every projection. A state of fixed size comes with the first; two
    convolutions of four taps add 12.6 % to the weights of projections at 128 channels a head and 2048 of the model."""
    sizes = {T: [x.size for x in ccgqa.parallel(**inputs(T=T))[1:]] for T in (6, 7)}
    assert sizes[7][:3] == sizes[6][:3]
    assert sum(sizes[7]) - sum(sizes[6]) == 2 * (4 + 2)  # K and V channels of two groups
    for groups in (2, 8):
        with torch.device("meta"):
            layer = CompressedConvolutionalAttention(2048, groups, width=128, taps=(4, 4))
        count = {n: p.numel() for n, p in layer.named_parameters()}
        filters = sum(n for name, n in count.items() if name[:2] in ("w1", "w2"))
        assert round(filters / sum(n for name, n in count.items() if name[0] == "W"), 3) == 0.126


def test_the_mutants_builder_with_nothing_changed_is_the_operator():
    I = inputs(False)
    for x, y in zip(mutants.attention()(**I), ccgqa.parallel(**I), strict=True):
        assert np.max(np.abs(x - y)) <= 64 * 2.0**-53 * np.max(np.abs(y))


# --- arguments, and the layer ----------------------------------------------------------------------------------------


def test_a_convolution_by_hand():
    """Taps 2 3 then 5 7, biases 1 and 10, rows 0 0 1 1: (1 + 3) 7 + 1 5 + 10, then (1 + 5) 7 + 4 5 + 10."""
    x = np.array([0.0, 0.0, 1.0, 1.0]).reshape(4, 1, 1)
    w1, w2 = np.array([[[2.0, 3.0]]]), np.array([[[[5.0, 7.0]]]])
    assert convolved(x, w1, np.array([[1.0]]), w2, np.array([[10.0]])).ravel().tolist() == [43.0, 72.0]


FORMS = (*(f.function for f in GROUPED.forms), layers.parallel, layers.chunkwise)


def given_to(form, I):
    if form.__module__ not in (layers.__name__, torch_cca.__name__):
        return I
    batched = (*TOKENS, *STATES)
    return {
        n: x if not np.ndim(x) else torch.tensor(x)[None] if n in batched else torch.tensor(x) for n, x in I.items()
    }


@pytest.mark.parametrize("form", FORMS)
def test_arguments_that_make_no_sense(form):
    I = inputs(False)
    values = ("v", "v0", "V0")
    form(**given_to(form, I | {n: I[n][..., :1] for n in values}))  # two groups of one channel: one of them is late
    for change, message in (
        ({"w1q": I["w1q"][:, :2]}, "w1q has shape|has shape .*: axis M"),
        ({"k": I["k"][:5]}, "k has shape"),
        ({"q0": I["q0"][:2], "k0": I["k0"][:2]}, "make it 3|reach back 3"),
        ({"v0": I["v0"][:1]}, "v0 has shape"),
        ({"K0": None}, "cache"),
        ({"V0": None}, "cache"),
    ):
        with pytest.raises(ValueError, match=message):
            form(**given_to(form, I | change))
    odd = {n: x[..., :1] if n in values else x for n, x in inputs(False, G=1).items()}
    with pytest.raises(ValueError, match="channels"):
        form(**given_to(form, odd))
    with pytest.raises(ValueError, match="pairs"):
        form(**given_to(form, inputs(False, K=3)))


@pytest.mark.parametrize("form", [cca.parallel, cca.chunkwise, torch_cca.attention])
def test_arguments_of_cca_that_make_no_sense(form):
    I = draw(SINGLE, **{n: s for n, s in SIZES.items() if n != "M"})
    for change, message in (
        ({"w1k": I["w1k"][:1]}, "has shape"),
        ({"k": I["k"][:5]}, "k has shape"),
        ({"q0": I["q0"][:2], "k0": I["k0"][:2]}, "make it 3|3 rows before"),
        ({"K0": None}, "cache|keys with values"),
        ({n: I[n][:, :1, :1] if n != "v0" else I[n][:1, :1] for n in ("v", "v0", "V0")}, "has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            form(**given_to(form, I | change))


@pytest.mark.parametrize("form", [ccgqa.chunkwise, layers.chunkwise])
def test_chunks_of_no_token(form):
    with pytest.raises(ValueError, match="chunk is 0; it must be at least 1"):
        form(**given_to(form, inputs()), chunk=0)


def layer(**options):
    torch.manual_seed(0)
    made = CompressedConvolutionalAttention(
        **{"d_model": 5, "groups": 2, "queries": 3, "width": 4, "taps": (3, 2)} | options
    )
    for n, p in made.named_parameters():
        if n[0] == "b":
            torch.nn.init.normal_(p)
    return made.double()


def drawn(B=2, T=7):
    return torch.randn(B, T, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def near(one, two, ulps=256):
    """Within some roundings of numbers of size one."""
    return bool(((one - two).abs() <= ulps * 2.0**-53).all())


def by_hand(m, x):
    filters = {n: getattr(m, n) for n in ("w1q", "b1q", "w2q", "b2q", "w1k", "b1k", "w2k", "b2k")}
    rows = []
    for tokens in x:
        q = (tokens @ m.W_Q.flatten(0, 2).T).reshape(-1, 2, 3, 4)
        k, v = ((tokens @ W.flatten(0, 1).T).reshape(-1, 2, 4) for W in (m.W_K, m.W_V))
        O = zaya(q, k, v, **filters, beta=m.beta)[0]
        rows.append(O.flatten(1) @ m.W_O.flatten(1).T)
    return torch.stack(rows)


def test_the_layer_is_the_operator_between_projections():
    m, x = layer(), drawn()
    with torch.no_grad():
        assert near(m(x)[0], by_hand(m, x))
        assert not near(layer(norm_eps=4.0)(x)[0], by_hand(m, x))


def test_the_layer_decodes_what_it_trains():
    m, x = layer(), drawn()
    with torch.no_grad():
        full, end = m(x)
        for edges in ([3, 3], [1, 2, 5], range(1, 7)):
            state, parts = None, []
            for a, b in zip((0, *edges), (*edges, 7), strict=True):
                y, state = m(x[:, a:b], state)
                parts.append(y)
            assert near(torch.cat(parts, dim=1), full)
            assert all(near(a, b) for a, b in zip(state, end, strict=True))


def test_the_layer_keeps_its_parameters_and_learns_all_of_them():
    m, other, x = layer(), layer(), drawn()
    m(x)[0].square().sum().backward()
    assert all(torch.count_nonzero(p.grad) == p.numel() for p in m.parameters())
    other.reset_parameters()
    assert not near(other(x)[0], m(x)[0])
    assert not any(torch.count_nonzero(p) for n, p in other.named_parameters() if n[0] == "b")
    other.load_state_dict(m.state_dict())
    assert torch.equal(other(x)[0], m(x)[0])


def test_half_precision_beside_wide_parameters_and_autocast():
    I = given_to(layers.parallel, inputs())
    half = {n: x.bfloat16() if n in TOKENS else x.float() for n, x in I.items()}
    O, *states = layers.parallel(**half)
    assert O.dtype == torch.bfloat16
    assert {s.dtype for s in states} == {torch.float32}
    wide = {n: x.float() for n, x in half.items()}
    assert torch.equal(O, layers.parallel(**wide)[0].bfloat16())
    want = layers.parallel(**wide)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layers.parallel(**wide)[0], want)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": 0}, "groups is 0; it must be at least 1"),
        ({"taps": (0, 2)}, "taps is 0; it must be at least 1"),
        ({"width": 3}, "width is 3; channels go in pairs"),
        ({"norm_eps": -1.0}, "norm_eps is -1.0; it must be finite and not negative"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        layer(**options)
