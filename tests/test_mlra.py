"""Multi-head low-rank attention against a transcription of the released code; what its blocks are and are not.

Two evaluations of one quantity may differ by twice what the gate allows one of them.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from mixproof.reference import latent_attention as latent
from mixproof.reference import mla, mlra, operator
from mixproof.reference.primitives import rms_norm
from mixproof.verify.arithmetic import natural
from mixproof.verify.numbers.ball import Reading, tolerance
from mixproof.verify.subjects.mutants import mlra as mutants

torch = pytest.importorskip("torch")
from mixproof.verify.subjects.torch import mlra as ours  # noqa: E402

TOKENS = ("qc", "qr", "c", "kr")
SIZES = [(1, 1, 1, 1, 2, 1, 1, 0), (5, 4, 3, 2, 4, 3, 4, 0), (4, 3, 2, 3, 6, 5, 2, 3)]  # T X N K R L V P


def draw(T, X, N, K, R, L, V, P, scale=None):
    g = np.random.default_rng([T, X, N, K, R, L, V, P])
    shapes = {"qc": (T, N, K), "qr": (T, N, R), "c": (T, X, L), "kr": (T, R), "gain": (X, L)}
    shapes |= {"Uk": (X, N, K, L), "Uv": (X, N, V, L)}
    caches = {"C0": (P, X, L), "Kr0": (P, R)} if P else {}
    I = {n: g.standard_normal(shape) for n, shape in (shapes | caches).items()} | {"scale": scale}
    d = {"O": g.standard_normal((T, N, V)), "Cc": g.standard_normal((P + T, X, L))}
    return I, d | {"Krc": g.standard_normal((P + T, R))}


def printed(I, G):
    """The same sizes for `mlra.concatenated`: N heads for each of the X blocks."""
    T, N, K = I["qc"].shape
    X, g = I["c"].shape[1], np.random.default_rng(1)
    queries = {"qc": g.standard_normal((T, X, N, K)), "qr": g.standard_normal((T, X, N, I["qr"].shape[2]))}
    kept = {n: x for n, x in I.items() if n != "gain"}
    return kept | queries, G | {"O": g.standard_normal((T, X, *G["O"].shape[1:]))}


def lifted(I):
    reading = Reading(natural("float64"))
    return reading, {n: reading.ball(x) if np.ndim(x) else x for n, x in I.items()}


def allowed(function, I):
    reading, balls = lifted(I)
    bounds = [tolerance(ball, "float64") for ball in function(**balls)]
    assert not reading.vacuous
    return bounds


def differ(one, two, bounds):
    """The largest difference, in units of what the two may differ by."""
    pairs = zip(one, two, bounds, strict=True)
    return max(float(np.max(np.abs(a - b) / (2 * bound), initial=0)) for a, b, bound in pairs)


# --- independent transcriptions --------------------------------------------------------------------------------------


def rotary(x, start):
    """The released Rotary and apply_rotary_emb: the two channels of a pair are R/2 apart.  (T, heads, R)"""
    T, _, R = x.shape
    frequency = 1.0 / (10000.0 ** (torch.arange(0, R, 2, dtype=torch.float64) / R))
    angle = torch.outer(torch.arange(start, start + T, dtype=torch.float64), frequency)[:, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1)


def attention(q, k, v, scale):
    """flash_attn_func with causal=True, aligned to the last key.  (T, H, D), (S, H, D), (S, H, V) -> (T, H, V)"""
    T, S = len(q), len(k)
    A = torch.einsum("thd, shd -> hts", q, k) * scale
    A = A.masked_fill(torch.ones(T, S, dtype=torch.bool).triu(S - T + 1), -math.inf)
    return torch.einsum("hts, shv -> thv", A.softmax(-1), v)


def halves(x):
    """Neighbours to channels R/2 apart."""
    return torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)


def neighbours(x):
    return torch.stack(x.chunk(2, dim=-1), dim=-1).flatten(-2)


def released(qc, qr, c, kr, gain, Uk, Uv, scale=None, C0=None, Kr0=None, eps=1e-6):
    """CausalSelfAttention of mlra_4, from the projections on, with as many latent heads as there are."""
    (_, N, K), (_, X, _), R = qc.shape, c.shape, qr.shape[-1]
    P = 0 if C0 is None else len(C0)
    normed = [c[:, x] * torch.rsqrt(c[:, x].pow(2).mean(-1, keepdim=True) + eps) * gain[x] for x in range(X)]
    compressed = torch.stack(normed, dim=1)
    q_pe, k_pe = rotary(halves(qr), P), rotary(halves(kr)[:, None], P)
    if P:
        compressed, k_pe = torch.cat([C0, compressed]), torch.cat([halves(Kr0)[:, None], k_pe])
    q = torch.cat([qc, q_pe], dim=-1)
    y = 0
    for x in range(X):
        kv = torch.einsum("sl, nol -> sno", compressed[:, x], torch.cat([Uk[x], Uv[x]], dim=1))
        k_nope, v = kv.split([K, Uv.shape[2]], dim=-1)
        k = torch.cat([k_nope, k_pe.expand(-1, N, R)], dim=-1)
        y = y + attention(q, k, v, (K + R) ** -0.5 if scale is None else scale) * (1 / X**0.5)
    return y, compressed, neighbours(k_pe[:, 0])


def concatenated(qc, qr, c, kr, Uk, Uv, scale=None, C0=None, Kr0=None):
    """Survey 10.1: what the blocks give, side by side, then one attention of all heads."""
    (_, X, M, K), R, P = qc.shape, qr.shape[-1], 0 if C0 is None else len(C0)
    q_pe, k_pe = rotary(halves(qr.flatten(1, 2)), P), rotary(halves(kr)[:, None], P)
    if P:
        c, k_pe = torch.cat([C0, c]), torch.cat([halves(Kr0)[:, None], k_pe])
    k = torch.cat([c[:, x] @ Uk[x].flatten(0, 1).T for x in range(X)], dim=1).unflatten(1, (X * M, K))
    v = torch.cat([c[:, x] @ Uv[x].flatten(0, 1).T for x in range(X)], dim=1).unflatten(1, (X * M, -1))
    q, k = torch.cat([qc.flatten(1, 2), q_pe], dim=-1), torch.cat([k, k_pe.expand(-1, X * M, R)], dim=-1)
    O = attention(q, k, v, (K + R) ** -0.5 if scale is None else scale)
    return O.unflatten(1, (X, M)), c, neighbours(k_pe[:, 0])


WAYS = {
    "mlra": (released, lambda I, G: (I, G), mlra.vjp),
    "mlra.concatenated": (concatenated, printed, mlra.concatenated_vjp),
}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", WAYS)
def test_forms_and_gradients_are_those_of_the_transcription(name, sizes):
    witness, of, vjp = WAYS[name]
    (I, G), o = of(*draw(*sizes)), operator(name)
    x = {n: torch.tensor(a, requires_grad=True) for n, a in I.items() if a is not None}
    want = witness(**x)
    torch.autograd.backward(want, [torch.tensor(G[y.name]) for y in o.outputs])
    bounds, want = allowed(o.forms[0].function, I), [y.detach().numpy() for y in want]
    for form in o.forms:
        assert differ(form.function(**I), want, bounds) <= 1, form.name
    reading, balls = lifted(I)
    limits = vjp({n: reading.ball(g) for n, g in G.items()}, **balls)
    assert not reading.vacuous
    for n, d in vjp(G, **I).items():
        if n in x:
            assert differ([d], [x[n].grad.numpy()], [tolerance(limits[n], "float64")]) <= 1, n


# --- what blocks are -------------------------------------------------------------------------------------------------


def test_one_block_is_multi_head_latent_attention_of_a_normalised_latent():
    I, _ = draw(5, 1, 3, 2, 4, 3, 4, 0)
    C = rms_norm(I["c"][:, 0], 1e-6) * I["gain"][0]
    O = mla.expanded(I["qc"], I["qr"], C, I["kr"], I["Uk"][0], I["Uv"][0])[0]
    bounds = allowed(mlra.expanded, I)[:1]
    for form in operator("mlra").forms:
        assert differ(form.function(**I)[:1], [O], bounds) <= 1
    other = {**I, "c": I["c"][:, 0]}
    assert differ([mla.expanded(*(other[n] for n in TOKENS), I["Uk"][0], I["Uv"][0])[0]], [O], bounds) > 1e9


def test_devices_project_what_they_hold_and_add_up():
    """With one block a device, outputs are projected before the sum: W_O is on all of them."""
    I, _ = draw(5, 4, 3, 2, 4, 3, 4, 0)
    W_O = np.random.default_rng(0).standard_normal((12, 6))
    one = [
        mlra.expanded(**I | {"c": I["c"][:, [x]]} | {n: I[n][[x]] for n in ("gain", "Uk", "Uv")})[0] for x in range(4)
    ]
    parts = [O.reshape(5, 12) @ W_O / 2 for O in one]
    reading, balls = lifted(I)
    bound = tolerance(mlra.expanded(**balls)[0].reshape(5, 12) @ reading.ball(W_O), "float64")
    for form in operator("mlra").forms:
        assert differ([form.function(**I)[0].reshape(5, 12) @ W_O], [sum(parts)], [bound]) <= 1


def test_two_softmaxes_are_not_one():
    """Two blocks of one channel, with opposite keys: the second token reads the first with weight p in one and 1 - p in
    the other. With opposite values too, both contribute 2 p - 1; the summed logits are zero, and so is what is read."""
    I = {"qc": np.ones((2, 1, 1)), "qr": np.zeros((2, 1, 2)), "kr": np.zeros((2, 2)), "gain": np.ones((2, 1))}
    I |= {"c": np.array([[[1.0], [1.0]], [[-1.0], [-1.0]]]), "scale": 1.0, "eps": 0.0}
    I |= {"Uk": np.array([[[[1.0]]], [[[-1.0]]]]), "Uv": np.array([[[[1.0]]], [[[-1.0]]]])}
    p = 1 / (1 + math.exp(-2))  # logits 1 and -1 in the first block, -1 and 1 in the second
    right = mlra.expanded(**I)[0][1, 0, 0]
    assert abs(right - 2 * (2 * p - 1) / math.sqrt(2)) < 8 * 2.0**-53
    one = mutants.summed(weigh=mutants.of_summed_logits)(**I)[0][1, 0, 0]
    assert one == 0.0
    assert round(right, 3) == 1.077


def test_heads_that_straddle_blocks_need_both():
    """Three heads of four channels, two blocks of six: the second head has two channels of its key from each. Here they
    are 1 from the first block and -1 from the second, and their sum in the logits is zero for both tokens; with either
    block alone the second token reads the first with weight 1 / (1 + e^-2) or with 1 / (1 + e^2)."""
    c = np.array([[1.0, 1.0], [0.0, 0.0]])  # of two tokens, one channel a block
    U = [np.ones((6, 1)), -np.ones((6, 1))]
    keys = np.concatenate([c[:, [x]] @ U[x].T for x in range(2)], axis=1).reshape(2, 3, 4)
    assert np.array_equal(keys[0], [[1, 1, 1, 1], [1, 1, -1, -1], [-1, -1, -1, -1]])
    q = np.ones(4)

    def read(key):
        return latent.weights(np.stack([key @ q] * 2)[None])[0, 1, 0]

    assert read(keys[:, 1]) == 0.5
    alone = [np.where(np.arange(4) // 2 == x, keys[:, 1], 0) for x in range(2)]
    assert [round(read(key), 3) for key in alone] == [0.881, 0.119]


def test_what_a_device_holds_of_a_token():
    """Of four blocks of 128 channels and a rotary key of 64: 192 of 576 numbers, a third, as every device needs the
    rotary key; of the latent alone a quarter."""
    I = {"qc": np.ones((1, 1, 2)), "qr": np.ones((1, 1, 64)), "c": np.ones((1, 4, 128)), "kr": np.ones((1, 64))}
    _, C, Kr = mlra.absorbed(**I, gain=np.ones((4, 128)), Uk=np.ones((4, 1, 2, 128)), Uv=np.ones((4, 1, 2, 128)))
    assert (C[:, 0].size + Kr.size) * 3 == C.size + Kr.size == 576
    assert C[:, 0].size * 4 == C.size


def test_up_projections():
    """Concatenated blocks have 1 / X of the up-projections of latent attention with X M heads of X L channels; blocks
    that all heads read have as many."""
    X, M, K, V, L = 2, 2, 3, 3, 4
    axes = {a: n for a, n in zip("XMKVL", (X, M, K, V, L), strict=True)} | {"N": X * M}

    def count(name, **sizes):
        inputs = [operator(name).input(n) for n in ("Uk", "Uv")]
        return sum(math.prod((axes | sizes)[a] for a in x.axes) for x in inputs)

    assert count("mla", L=X * L) == count("mlra") == 192
    assert count("mlra.concatenated") == 96


@pytest.mark.parametrize("first", [f.name for f in operator("mlra").forms])
def test_prefill_and_decode(first):
    I, _ = draw(4, 3, 2, 3, 6, 5, 2, 3)
    whole, bounds = mlra.expanded(**I), allowed(mlra.expanded, I)
    for at in range(5):
        O, C, Kr = operator("mlra").form(first).function(**I | {n: I[n][:at] for n in TOKENS})
        P, C, Kr = mlra.decode(**I | {n: I[n][at:] for n in TOKENS} | {"C0": C, "Kr0": Kr})
        assert differ((np.concatenate([O, P]), C, Kr), whole, bounds) <= 1


def test_builders_with_nothing_changed_are_the_reference():
    I, G = draw(4, 3, 2, 3, 6, 5, 2, 3)
    assert differ(mutants.summed()(**I), mlra.expanded(**I), allowed(mlra.expanded, I)) <= 1
    right = mlra.vjp(G, **I)
    assert all(np.array_equal(d, right[n]) for n, d in mutants.summed_vjp(lambda *_: {}, 0.0)(G, **I).items())
    I, _ = printed(I, G)
    for path in (latent.expanded, latent.absorbed):
        assert differ(mutants.printed(path=path)(**I), mlra.concatenated(**I), allowed(mlra.concatenated, I)) <= 1


def test_arguments_that_make_no_sense():
    I, G = draw(4, 3, 2, 3, 6, 5, 2, 3)
    for name, vjp, (J, d) in (
        ("mlra", mlra.vjp, (I, G)), ("mlra.concatenated", mlra.concatenated_vjp, printed(I, G)),
    ):  # fmt: skip
        for change, message in (
            ({"C0": None}, "C0 and Kr0 hold the same tokens: give both, or neither"),
            ({"Uv": J["Uv"][:2]}, r"Uv has shape \(2, 2, 2, 5\): axis X is 2, but another argument has X=3"),
        ):
            for form in operator(name).forms:
                with pytest.raises(ValueError, match=message):
                    form.function(**J | change)
            with pytest.raises(ValueError, match=message):
                vjp(d, **J | change)
    tensors = {
        n: torch.tensor(x) if n in ("gain", "Uk", "Uv") else torch.tensor(x)[None] for n, x in I.items() if n != "scale"
    }
    for change, message in (
        ({"eps": -1.0}, "eps is -1.0; it must be finite and not negative"),
        ({"Kr0": None}, "C0 and Kr0 hold the same tokens: give both, or neither"),
        ({"gain": tensors["gain"][:, :4]}, r"gain has shape \(3, 4\): axis L is 4, but c has L=5"),
    ):
        for function in (ours.expanded, ours.sharded):
            with pytest.raises(ValueError, match=message):
                function(**tensors | change)


# --- the layer -------------------------------------------------------------------------------------------------------


def made(**options):
    torch.manual_seed(0)
    sizes = {"d_model": 8, "heads": 3, "blocks": 2, "latent": 2, "key": 2, "rotary": 2, "value": 3}
    return ours.MultiHeadLowRankAttention(**sizes | options).double()


def tokens():
    return torch.randn(2, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_the_layer_is_the_function_between_projections():
    layer, x = made(base=100.0, eps=0.5), tokens()
    q, down = layer.W_Q(x).unflatten(-1, (3, 4)), layer.W_DKV(x)
    c = down[..., :4].unflatten(-1, (2, 2))
    O, C, _ = ours.sharded(q[..., :2], q[..., 2:], c, down[..., 4:], layer.gain, layer.Uk, layer.Uv, None, 100.0, 0.5)
    y, cache = layer(x)
    assert torch.equal(y, O.flatten(2) @ layer.W_O.weight.T)
    assert torch.equal(cache.C, C)
    assert torch.equal(layer.gain, torch.full((2, 2), 2.0))
    y.square().sum().backward()
    assert all(torch.count_nonzero(p.grad) == p.numel() for p in layer.parameters())


def test_the_layer_step_by_step():
    layer, x = made(), tokens()
    whole, after = layer(x)
    y, cache = layer(x[:, :2])
    rows = [y]
    for t in range(2, 6):
        y, cache = layer.step(x[:, t], cache)
        rows.append(y[:, None])
    assert torch.max(torch.abs(torch.cat(rows, dim=1) - whole)) < 1e-14
    assert torch.equal(cache.C, after.C)


def test_the_layer_saved_and_loaded():
    layer, x = made(), tokens()
    other = made()
    other.reset_parameters()
    assert not torch.equal(other(x)[0], layer(x)[0])
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x)[0], layer(x)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rotary": 3}, "rotary is 3; channels are turned in pairs"),
        ({"blocks": 0}, "blocks is 0; it must be at least 1"),
        ({"eps": -1.0}, "eps is -1.0; it must be finite and not negative"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        made(**options)
