"""Multi-head latent attention against a transcription of DeepSeek's code; absorption, where it holds and where not.

Two evaluations of one quantity may differ by twice what the gate allows one of them.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from mixproof.reference import latent_attention as latent
from mixproof.reference import mla, operator, softmax_attention
from mixproof.verify import oracle
from mixproof.verify.arithmetic import natural
from mixproof.verify.numbers.ball import Reading, tolerance
from mixproof.verify.subjects.mutants import mla as mutants

torch = pytest.importorskip("torch")
from mixproof.verify.subjects.torch import mla as ours  # noqa: E402

SIZES = [(1, 1, 1, 2, 1, 1, 0), (5, 3, 2, 4, 3, 4, 0), (4, 2, 3, 6, 5, 2, 3), (1, 2, 4, 2, 2, 3, 6)]  # T N K R L V P


def draw(T, N, K, R, L, V, P, scale=None):
    g = np.random.default_rng([T, N, K, R, L, V, P])
    shapes = {"qc": (T, N, K), "qr": (T, N, R), "c": (T, L), "kr": (T, R), "Uk": (N, K, L), "Uv": (N, V, L)}
    caches = {"C0": (P, L), "Kr0": (P, R)} if P else {}
    I = {n: g.standard_normal(shape) for n, shape in (shapes | caches).items()} | {"scale": scale}
    G = {"O": g.standard_normal((T, N, V)), "Cc": g.standard_normal((P + T, L))}
    return I, G | {"Krc": g.standard_normal((P + T, R))}


def late(I):
    """The same of `mla.decompressed`, whose queries are turned as a whole."""
    return {"q": I["qr"], "Uk": np.repeat(I["Uk"], 6, axis=1)[:, : I["qr"].shape[2]]} | {
        n: I[n] for n in ("c", "Uv", "C0", "scale") if n in I
    }


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


def rotary(x, n, base=10000.0):
    """apply_rotary_pos_emb with interleaved pairs: x cos + (-x_odd, x_even) sin.  (T, ..., R)"""
    R = x.shape[-1]
    frequency = 1.0 / (base ** (torch.arange(0, R, 2, dtype=torch.float64) / R))
    angle = torch.outer(n.to(torch.float64), frequency).repeat_interleave(2, dim=1)
    angle = angle.reshape(len(n), *(1,) * (x.ndim - 2), R)
    half = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    return x * angle.cos() + half * angle.sin()


def deepseek(qc, qr, c, kr, Uk, Uv, scale=None, C0=None, Kr0=None):
    """DeepseekV3Attention, from the compressed rows on: keys and values from kv_b_proj, k_pe expanded to all heads."""
    P, (T, N, K) = 0 if C0 is None else len(C0), qc.shape
    n = torch.arange(P, P + T)
    q_pe, k_pe = rotary(qr, n), rotary(kr, n)
    if P:
        c, k_pe = torch.cat([C0, c]), torch.cat([Kr0, k_pe])
    kv = torch.stack([c @ torch.cat([Uk[h], Uv[h]]).T for h in range(N)])
    k_nope, v = kv.split([K, Uv.shape[1]], dim=-1)
    k = torch.cat([k_nope, k_pe.expand(N, *k_pe.shape)], dim=-1)
    q = torch.cat([qc, q_pe], dim=-1).transpose(0, 1)
    S = P + T
    mask = torch.full((T, S), -math.inf, dtype=torch.float64).triu(P + 1)
    A = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale) + mask
    return (A.softmax(-1) @ v).transpose(0, 1), c, k_pe


def mehta(q, c, Uk, Uv, scale=None, C0=None):
    """Survey 8.1, row by row: keys and queries turned after decompression."""
    P, (T, N, K) = 0 if C0 is None else len(C0), q.shape
    c = c if C0 is None else torch.cat([C0, c])
    turned = [rotary(c @ Uk[h].T, torch.arange(P + T)) for h in range(N)]
    asked = rotary(q, torch.arange(P, P + T))
    rows = []
    for t in range(T):
        for h in range(N):
            A = turned[h][: P + t + 1] @ asked[t, h] * (K**-0.5 if scale is None else scale)
            rows.append((A.softmax(0)[:, None] * (c[: P + t + 1] @ Uv[h].T)).sum(0))
    return torch.stack(rows).reshape(T, N, -1), c


WAYS = {"mla": (deepseek, lambda I: I, mla.vjp), "mla.decompressed": (mehta, late, mla.decompressed_vjp)}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", WAYS)
def test_forms_and_gradients_are_those_of_the_transcription(name, sizes):
    witness, of, vjp = WAYS[name]
    I, G = draw(*sizes)
    I, o = of(I), operator(name)
    G = {y.name: G[y.name] for y in o.outputs}
    x = {n: torch.tensor(a, requires_grad=True) for n, a in I.items() if a is not None}
    want = witness(**x)
    torch.autograd.backward(want, [torch.tensor(G[y.name]) for y in o.outputs])
    bounds, want = allowed(o.forms[0].function, I), [y.detach().numpy() for y in want]
    for form in o.forms:
        assert differ(form.function(**I), want, bounds) <= 1, form.name
    reading, balls = lifted(I)
    limits = vjp({n: reading.ball(g) for n, g in G.items()}, **balls)
    for n, d in vjp(G, **I).items():
        if n in x:
            assert differ([d], [x[n].grad.numpy()], [tolerance(limits[n], "float64")]) <= 1, n
    assert not reading.vacuous


# --- what the forms have to do with each other -----------------------------------------------------------------------


def test_an_absorbed_query_has_the_scale_of_the_head():
    """(K + R)^-1/2, not (L + R)^-1/2: absorption changes the width of a query, not its logits."""
    I, _ = draw(5, 3, 2, 4, 7, 4, 0)
    bounds, want = allowed(mla.expanded, I), mla.expanded(**I)
    assert differ(mla.absorbed(**I, **{}), want, bounds) <= 1
    assert differ(mla.absorbed(**I | {"scale": (7 + 4) ** -0.5}), want, bounds) > 1e9


def test_without_a_rotary_part_a_head_is_softmax_attention():
    I, _ = draw(5, 1, 3, 2, 3, 4, 0, scale=0.5)
    I |= {"qr": np.zeros((5, 1, 2)), "Uk": np.eye(3)[None]}
    O = softmax_attention.parallel(I["qc"][:, 0], I["c"], I["c"] @ I["Uv"][0].T, 0.5, causal=True)
    bounds = allowed(mla.expanded, I)
    for form in operator("mla").forms:
        assert differ([form.function(**I)[0][:, 0]], [O], [bounds[0][:, 0]]) <= 1


def test_latents_have_no_preferred_basis():
    """c -> A c and U -> U A^-1 change nothing; A is triangular with a whole inverse, so that both are exact."""
    I, _ = draw(5, 2, 3, 4, 3, 2, 2)
    A = np.array([[1.0, 2.0, -1.0], [0.0, 1.0, 3.0], [0.0, 0.0, 1.0]])
    inverse = np.array([[1.0, -2.0, 7.0], [0.0, 1.0, -3.0], [0.0, 0.0, 1.0]])
    assert np.array_equal(A @ inverse, np.eye(3))
    rounded = {n: np.round(8 * I[n]) / 8 for n in ("c", "C0", "Uk", "Uv")}
    I |= rounded
    other = I | {n: I[n] @ A.T for n in ("c", "C0")} | {n: I[n] @ inverse for n in ("Uk", "Uv")}
    bounds = [a + b for a, b in zip(allowed(mla.expanded, I), allowed(mla.expanded, other), strict=True)]
    for f in operator("mla").forms:
        assert differ(f.function(**I)[:1], f.function(**other)[:1], bounds[:1]) <= 1


def test_only_the_distance_of_positions_matters():
    I, _ = draw(6, 1, 1, 4, 1, 1, 0)
    _, balls = lifted(I)

    def logits(x, queries, keys):
        n = np.arange(6)
        return latent.rotated(x["qr"][:, 0], n + queries, 1e4) @ latent.rotated(x["kr"], n + keys, 1e4).T

    bounds = [tolerance(logits(balls, 0, 0), "float64") + tolerance(logits(balls, 7, 7), "float64")]
    assert differ([logits(I, 7, 7)], [logits(I, 0, 0)], bounds) <= 1
    assert differ([logits(I, 7, 6)], [logits(I, 0, 0)], bounds) > 1e6


def test_angles_are_those_of_rope():
    assert latent.angles(8).tolist() == [1.0, 10000.0**-0.25, 10000.0**-0.5, 10000.0**-0.75]


@pytest.mark.parametrize("form", [f.name for f in operator("mla").forms])
def test_prefill_and_decode(form):
    """Caches handed on at every split, also between forms; they hold L + R numbers a token."""
    I, _ = draw(4, 2, 3, 6, 5, 2, 3)
    whole, tokens = mla.expanded(**I), ("qc", "qr", "c", "kr")
    bounds = allowed(mla.expanded, I)
    assert whole[1].size + whole[2].size == 7 * (5 + 6)
    for at in range(5):
        first = operator("mla").form(form).function(**I | {n: I[n][:at] for n in tokens})
        rest = I | {n: I[n][at:] for n in tokens} | {"C0": first[1], "Kr0": first[2]}
        O, C, Kr = mla.decode(**rest)
        assert differ((np.concatenate([first[0], O]), C, Kr), whole, bounds) <= 1


@pytest.mark.parametrize("seed", range(3))
def test_neither_path_is_the_right_one_in_half_precision(seed):
    """Operands of products in bfloat16, all else in float32: the two paths round different things, and outputs differ.
    Both are honest; the scale of the latent's width is not."""
    T, N, K, R, L, V = 6, 2, 2, 2, 32, 8
    g = np.random.default_rng(seed)
    shapes = {"qc": (T, N, K), "qr": (T, N, R), "c": (T, L), "kr": (T, R), "Uk": (N, K, L), "Uv": (N, V, L)}
    x = {n: torch.tensor(g.standard_normal(s)).bfloat16().float() for n, s in shapes.items()}
    x |= {n: x[n] / 8 for n in ("Uk", "Uv")}
    inputs = {
        n: a.double().numpy()[None] if n in ("Uk", "Uv") else a.double().numpy()[None, None] for n, a in x.items()
    }
    want = oracle.forward(operator("mla"), inputs | {"scale": None, "base": 10000.0}, natural("bfloat16"))
    assert not want.vacuous

    def r(a):
        return a.bfloat16().float()

    turned = [r(rotary(x[n], torch.arange(T)).float()) for n in ("qr", "kr")]
    q, c = x["qc"].transpose(0, 1), x["c"]
    position = turned[0].transpose(0, 1) @ turned[1].T
    mask = torch.full((T, T), -math.inf).triu(1)

    def read(content, scale=(K + R) ** -0.5):
        return r(((content + position) * scale + mask).softmax(-1))

    keys, values = r(c @ x["Uk"].mT), r(c @ x["Uv"].mT)
    absorbed = r(q @ x["Uk"])
    results = (
        read(q @ keys.mT) @ values,
        r(read(absorbed @ c.T) @ c) @ x["Uv"].mT,
        r(read(absorbed @ c.T, (L + R) ** -0.5) @ c) @ x["Uv"].mT,
    )
    O, bound = want.value["O"][0, 0], want.bound["O"][0, 0]
    ratios = [np.max(np.abs(r(y).transpose(0, 1).double().numpy() - O) / bound) for y in results]
    assert max(ratios[:2]) <= 1 < ratios[2]
    assert not torch.equal(r(results[0]), r(results[1]))


# --- no absorption where keys are turned as a whole ------------------------------------------------------------------


def test_keys_turned_after_decompression_cannot_be_absorbed():
    """Two tokens with the same latent have the same logit under any absorbed query, a . c. Here they have 1 and cos 1,
    and the second token reads the first with weight 1 / (1 + e^(1 - cos 1)) = 0.387, not 1/2."""
    q, n = np.array([[1.0, 0.0]] * 2), np.arange(2)
    A = (latent.rotated(q, n, 1e4) @ latent.rotated(q, n, 1e4).T)[None, None]  # keys Uk c are (1, 0) as well
    assert np.max(np.abs(A[0, 0, 1] - [math.cos(1), 1.0])) < 4 * 2.0**-53
    assert abs(latent.weights(A)[0, 0, 1, 0] - 1 / (1 + math.exp(1 - math.cos(1)))) < 4 * 2.0**-53
    # with a latent twice as long for the second token, and itself for value, one sees what is read
    I = {"q": q[:, None], "c": np.array([[1.0], [2.0]]), "Uk": np.array([[[1.0], [0.0]]]), "Uv": np.ones((1, 1, 1))}
    right, bounds = mla.decompressed(**I, scale=1.0), allowed(mla.decompressed, I | {"scale": 1.0})
    read = 1 + 1 / (1 + math.exp(math.cos(1) - 2))
    assert differ(right[:1], [np.array([[[1.0]], [[read]]])], bounds[:1]) <= 1
    assert differ(mla.offset(**I, scale=1.0), right, bounds) <= 1
    absorbed = mutants.turned_late(mutants.turned_and_absorbed)
    latents = mutants.turned_late(mutants.absorbed_and_turned, keys=mutants.turned_latents)
    assert round(read, 3) == 1.811
    assert round(absorbed(**I, scale=1.0)[0][1, 0, 0], 3) == 1.632
    assert round(latents(**I, scale=1.0)[0][1, 0, 0], 3) == 1.731


def test_builders_with_nothing_changed_are_the_reference():
    I, G = draw(4, 2, 3, 6, 5, 2, 3)
    assert differ(mutants.single()(**I), mla.expanded(**I), allowed(mla.expanded, I)) == 0
    late_keys = mutants.turned_late(mutants.turned_query, keys=mutants.turned_keys(lambda S, P: np.arange(S)))
    assert differ(late_keys(**late(I)), mla.decompressed(**late(I)), allowed(mla.decompressed, late(I))) <= 1
    reading, balls = lifted(I)
    limits = mla.vjp({n: reading.ball(g) for n, g in G.items()}, **balls)
    right = mla.vjp(G, **I)
    for n, d in mutants.single_vjp()(G, **I).items():
        assert differ([d], [right[n]], [tolerance(limits[n], "float64")]) <= 1, n


# --- what makes no sense ---------------------------------------------------------------------------------------------


def test_arguments_that_make_no_sense():
    I, G = draw(4, 2, 3, 6, 5, 2, 3)
    one = {n: x for n, x in I.items() if n != "Kr0"}
    odd = I | {n: I[n][..., :3] for n in ("qr", "kr", "Kr0")}
    short = I | {"Kr0": I["Kr0"][:2]}
    for change, message in (
        (one, "C0 and Kr0 hold the same tokens: give both, or neither"),
        (odd, "there are 3 channels to turn; they are turned in pairs"),
        (short, r"Kr0 has shape \(2, 6\): axis P is 2, but another argument has P=3"),
        (I | {"Uk": I["Uk"][0]}, r"Uk has shape \(3, 5\); mla expects \(N, K, L\)"),
    ):
        for form in operator("mla").forms:
            with pytest.raises(ValueError, match=message):
                form.function(**change)
        grads = {n: g[..., :3] if n == "Krc" and change is odd else g for n, g in G.items()}
        with pytest.raises(ValueError, match=message):
            mla.vjp(grads, **change)
    with pytest.raises(ValueError, match=r"the cotangent of Cc has shape \(4, 5\); Cc has shape \(7, 5\)"):
        mla.vjp(G | {"Cc": G["Cc"][:4]}, **I)
    tensors = {n: torch.tensor(x)[None] for n, x in one.items() if n not in ("Uk", "Uv", "scale")}
    weights = {n: torch.tensor(I[n]) for n in ("Uk", "Uv")}
    for change, message in (
        ({}, "C0 and Kr0 hold the same tokens: give both, or neither"),
        ({"C0": None, "base": 0.0}, "base is 0.0; it must be positive"),
        ({"C0": None, "scale": math.nan}, "scale is nan; it must be finite"),
        ({"C0": None, "qr": tensors["qr"][..., :3], "kr": tensors["kr"][..., :3]}, "there are 3 channels to turn"),
        ({"C0": None, "kr": tensors["kr"][:, :2]}, r"kr has shape \(1, 2, 6\): axis T is 2, but qc has T=4"),
    ):
        for function in (ours.expanded, ours.absorbed):
            with pytest.raises(ValueError, match=message):
                function(**tensors | weights | change)
    with pytest.raises(ValueError, match="chunk is 0; it must be at least 1"):
        ours.absorbed(**tensors | weights | {"C0": None}, chunk=0)


# --- the layer -------------------------------------------------------------------------------------------------------


def made(**options):
    torch.manual_seed(0)
    sizes = {"d_model": 6, "heads": 3, "latent": 4, "key": 2, "rotary": 2, "value": 5}
    return ours.MultiHeadLatentAttention(**sizes | options).double()


def test_the_layer_is_the_function_between_projections():
    layer, x = made(base=100.0), torch.randn(2, 7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y, cache = layer(x)
    q = layer.W_Q(x).unflatten(-1, (3, 4))
    down = layer.W_DKV(x)
    O, C, Kr = ours.absorbed(q[..., :2], q[..., 2:], down[..., :4], down[..., 4:], layer.Uk, layer.Uv, base=100.0)
    assert torch.equal(y, O.flatten(2) @ layer.W_O.weight.T)
    assert torch.equal(cache.C, C)
    assert torch.equal(cache.Kr, Kr)
    assert [tuple(p.shape) for p in layer.parameters()] == [(3, 2, 4), (3, 5, 4), (12, 6), (6, 6), (6, 15)]
    assert layer.extra_repr().startswith("6, heads=3, groups=3, latent=4, key=2, rotary=2, value=5, base=100.0")


def test_the_layer_step_by_step():
    layer, x = made(), torch.randn(2, 7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole, after = layer(x)
    y, cache = layer(x[:, :3])
    rows = [y]
    for t in range(3, 7):
        y, cache = layer.step(x[:, t], cache)
        rows.append(y[:, None])
    assert torch.max(torch.abs(torch.cat(rows, dim=1) - whole)) < 1e-14
    assert torch.equal(cache.C, after.C)
    other = made()
    other.reset_parameters()
    assert not torch.equal(other(x)[0], whole)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x)[0], whole)
    whole.square().sum().backward()
    assert all(torch.count_nonzero(p.grad) == p.numel() for p in layer.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rotary": 3}, "rotary is 3; channels are turned in pairs"),
        ({"latent": 0}, "latent is 0; it must be at least 1"),
        ({"path": "both"}, "path is 'both'; it must be one of grouped, absorbed"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        made(**options)
