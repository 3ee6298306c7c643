"""Group-query latent attention: two paths over one set of weights, and what the caches of each can be turned into.

Two evaluations of one quantity may differ by twice what the gate allows one of them.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from mixproof.reference import gqla, mla, operator
from mixproof.reference import latent_attention as latent
from mixproof.verify.arithmetic import natural
from mixproof.verify.numbers.ball import Reading, tolerance
from mixproof.verify.subjects.mutants import mla as mutants

torch = pytest.importorskip("torch")
from mixproof.verify.subjects.torch import gqla as ours  # noqa: E402

TOKENS = ("qc", "qr", "c", "kr")
FORMS = {f.name: f.function for f in operator("gqla").forms}
SIZES = [(1, 1, 1, 1, 2, 1, 1, 0), (5, 2, 3, 2, 4, 3, 4, 0), (4, 3, 2, 3, 6, 5, 2, 3)]  # T G M K R L V P


def draw(T, G, M, K, R, L, V, P, scale=None):
    g = np.random.default_rng([T, G, M, K, R, L, V, P])
    shapes = {"qc": (T, G, M, K), "qr": (T, G, M, R), "c": (T, L), "kr": (T, R), "Uk": (G, K, L), "Uv": (G, V, L)}
    caches = {"C0": (P, L), "Kr0": (P, R)} if P else {}
    I = {n: g.standard_normal(shape) for n, shape in (shapes | caches).items()} | {"scale": scale}
    d = {"O": g.standard_normal((T, G, M, V)), "Cc": g.standard_normal((P + T, L))}
    return I, d | {"Krc": g.standard_normal((P + T, R))}


def lifted(I):
    reading = Reading(natural("float64"))
    return reading, {n: reading.ball(x) if np.ndim(x) else x for n, x in I.items()}


def allowed(I):
    reading, balls = lifted(I)
    bounds = [tolerance(ball, "float64") for ball in gqla.grouped(**balls)]
    assert not reading.vacuous
    return bounds


def differ(one, two, bounds):
    """The largest difference, in units of what the two may differ by."""
    pairs = zip(one, two, bounds, strict=True)
    return max(float(np.max(np.abs(a - b) / (2 * bound), initial=0)) for a, b, bound in pairs)


def head_by_head(qc, qr, c, kr, Uk, Uv, scale, C0=None, Kr0=None):
    """Head h = g M + m of H reads group h // (H / G), one query at a time; positions by complex numbers."""
    (T, G, M, K), R, P = qc.shape, qr.shape[-1], 0 if C0 is None else len(C0)
    theta = 10000.0 ** (-torch.arange(0, R, 2, dtype=torch.float64) / R)

    def turn(x, t):
        z = torch.complex(x[..., 0::2], x[..., 1::2]) * torch.exp(1j * t * theta)
        return torch.stack([z.real, z.imag], dim=-1).flatten(-2)

    latents = [*([] if C0 is None else C0), *c]
    rotary = [*([] if Kr0 is None else Kr0), *(turn(kr[t], P + t) for t in range(T))]
    heads = G * M
    qc, qr = qc.flatten(1, 2), qr.flatten(1, 2)
    rows = []
    for t in range(T):
        for h in range(heads):
            g = h // (heads // G)
            content = [qc[t, h] @ Uk[g] @ latents[j] for j in range(P + t + 1)]
            position = [turn(qr[t, h], P + t) @ rotary[j] for j in range(P + t + 1)]
            s = (K + R) ** -0.5 if scale is None else scale
            p = torch.stack([s * (a + b) for a, b in zip(content, position, strict=True)]).softmax(0)
            rows.append(sum(p[j] * (Uv[g] @ latents[j]) for j in range(P + t + 1)))
    return torch.stack(rows).reshape(T, G, M, -1), torch.stack(latents), torch.stack(rotary)


@pytest.mark.parametrize("sizes", SIZES)
def test_forms_and_gradients_are_those_of_single_heads(sizes):
    I, G = draw(*sizes)
    x = {n: torch.tensor(a, requires_grad=True) for n, a in I.items() if a is not None}
    want = head_by_head(**{"scale": None} | x)
    torch.autograd.backward(want, [torch.tensor(G[y.name]) for y in operator("gqla").outputs])
    bounds, want = allowed(I), [y.detach().numpy() for y in want]
    for name, form in FORMS.items():
        assert differ(form(**I), want, bounds) <= 1, name
    reading, balls = lifted(I)
    limits = gqla.vjp({n: reading.ball(g) for n, g in G.items()}, **balls)
    assert not reading.vacuous
    for n, d in gqla.vjp(G, **I).items():
        if n in x:
            assert differ([d], [x[n].grad.numpy()], [tolerance(limits[n], "float64")]) <= 1, n


def test_groups_are_heads_that_share_up_projections():
    """With those of each group repeated for its heads it is multi-head latent attention; tiled, it is not."""
    I, _ = draw(5, 2, 3, 2, 4, 3, 4, 0)
    flat = I | {n: I[n].reshape(5, 6, I[n].shape[-1]) for n in ("qc", "qr")}
    bounds, want = allowed(I), gqla.grouped(**I)[0].reshape(5, 6, 4)
    limit = [2 * bounds[0].reshape(5, 6, 4)]
    repeated = flat | {n: np.repeat(I[n], 3, axis=0) for n in ("Uk", "Uv")}
    for form in operator("mla").forms:
        assert differ(form.function(**repeated)[:1], [want], limit) <= 1
    tiled = flat | {n: np.tile(I[n], (3, 1, 1)) for n in ("Uk", "Uv")}
    assert differ(mla.expanded(**tiled)[:1], [want], limit) > 1e9


@pytest.mark.parametrize("second", FORMS)
@pytest.mark.parametrize("first", FORMS)
def test_the_path_may_change_in_mid_sequence(first, second):
    I, _ = draw(4, 3, 2, 3, 6, 5, 2, 3)
    whole, bounds = gqla.grouped(**I), allowed(I)
    for at in range(5):
        O, C, Kr = FORMS[first](**I | {n: I[n][:at] for n in TOKENS})
        rest = I | {n: I[n][at:] for n in TOKENS} | {"C0": C, "Kr0": Kr}
        P, C, Kr = FORMS[second](**rest)
        assert differ((np.concatenate([O, P]), C, Kr), whole, bounds) <= 1


@pytest.mark.parametrize(("L", "recovered"), [(5, True), (10, True), (11, False)])
def test_a_cache_of_keys_and_values_gives_latents_back_only_if_none_are_lost(L, recovered):
    """[Uk; Uv] of all groups has G (K + V) = 10 rows: of 11 channels of the latent one is seen by no key or value.

    Two latents that differ in it have the same expanded cache, so the way back to latents is not a function."""
    g = np.random.default_rng(L)
    Uk, Uv, c = g.standard_normal((2, 3, L)), g.standard_normal((2, 2, L)), g.standard_normal((4, L))
    stack = np.concatenate([*Uk, *Uv])
    assert np.linalg.matrix_rank(stack) == min(L, 10)
    seen = c @ stack.T
    back = np.linalg.lstsq(stack, seen.T, rcond=None)[0].T
    error = np.max(np.abs(back - c))
    assert (error < 1e-10) if recovered else (error > 0.1)
    assert np.max(np.abs(back @ stack.T - seen)) < 1e-12


def test_what_is_cached_of_a_token():
    """LLaMA-3-8B has 8 groups of 128 channels, 2048 numbers a token: 576 are 28.125 % of them, the latent alone 25 %.
    Keys and values of the other path, with the rotary key, are more than grouped-query attention has, 103.1 %."""
    I = {"qc": np.ones((1, 8, 4, 128)), "qr": np.ones((1, 8, 4, 64)), "c": np.ones((1, 512)), "kr": np.ones((1, 64))}
    _, C, Kr = gqla.absorbed(**I, Uk=np.ones((8, 128, 512)), Uv=np.ones((8, 128, 512)))
    assert (C.size + Kr.size) / 2048 == 0.28125
    assert C.size / 2048 == 0.25
    keys = latent.up(C[None], np.ones((8, 128, 512)))
    assert (2 * keys.size + Kr.size) / 2048 == 1.03125


def test_builder_with_nothing_changed_is_the_reference():
    I, _ = draw(4, 3, 2, 3, 6, 5, 2, 3)
    for path in (latent.expanded, latent.absorbed):
        assert differ(mutants.grouped(path=path)(**I), gqla.grouped(**I), allowed(I)) <= 1


def test_arguments_that_make_no_sense():
    I, G = draw(4, 3, 2, 3, 6, 5, 2, 3)
    for change, message in (
        ({"C0": None}, "C0 and Kr0 hold the same tokens: give both, or neither"),
        ({"Uv": I["Uv"][:2]}, r"Uv has shape \(2, 2, 5\): axis G is 2, but another argument has G=3"),
        ({"qr": I["qr"][:, :, :1]}, r"qr has shape \(4, 3, 1, 6\): axis M is 1, but another argument has M=2"),
    ):
        for form in FORMS.values():
            with pytest.raises(ValueError, match=message):
                form(**I | change)
        with pytest.raises(ValueError, match=message):
            gqla.vjp(G, **I | change)


# --- the layer -------------------------------------------------------------------------------------------------------


def made(**options):
    torch.manual_seed(0)
    sizes = {"d_model": 6, "heads": 4, "groups": 2, "latent": 4, "key": 2, "rotary": 2, "value": 3}
    return ours.GroupQueryLatentAttention(**sizes | options).double()


def tokens():
    return torch.randn(2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_the_layer_is_the_function_between_projections():
    layer, x = made(path="grouped"), tokens()
    q, down = layer.W_Q(x).unflatten(-1, (2, 2, 4)), layer.W_DKV(x)
    O, C, _ = ours.grouped(q[..., :2], q[..., 2:], down[..., :4], down[..., 4:], layer.Uk, layer.Uv)
    y, cache = layer(x)
    assert torch.equal(y, O.flatten(2) @ layer.W_O.weight.T)
    assert torch.equal(cache.C, C)
    assert not torch.equal(made(base=10.0)(x)[0], y)


def test_the_layer_changes_its_path_at_any_token():
    layer, x = made(), tokens()
    whole, after = layer(x)
    y, cache = layer(x[:, :2], path="grouped")
    rows = [y]
    for t in range(2, 6):
        y, cache = layer.step(x[:, t], cache, path=("absorbed", "grouped")[t % 2])
        rows.append(y[:, None])
    assert torch.max(torch.abs(torch.cat(rows, dim=1) - whole)) < 1e-14
    assert torch.max(torch.abs(cache.Kr - after.Kr)) < 1e-14
    with pytest.raises(ValueError, match="path is 'mqa'; it must be one of grouped, absorbed"):
        layer(x, path="mqa")


def test_the_layer_saved_and_loaded():
    layer, x = made(), tokens()
    other = made()
    other.reset_parameters()
    assert not torch.equal(other(x)[0], layer(x)[0])
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x)[0], layer(x)[0])
    for U in (layer.Uk, layer.Uv):
        assert 0.5 / math.sqrt(4) < U.detach().abs().max() <= 1 / math.sqrt(4)


def test_half_precision_tokens_beside_wide_weights():
    I, _ = draw(4, 3, 2, 3, 6, 5, 2, 3)
    halves = {n: torch.tensor(I[n])[None].bfloat16() for n in TOKENS}
    rest = {n: torch.tensor(I[n]).float() for n in ("Uk", "Uv")}
    rest |= {n: torch.tensor(I[n])[None].float() for n in ("C0", "Kr0")}
    for function in (ours.grouped, ours.absorbed):
        O, C, Kr = function(**halves, **rest)
        wide = function(**{n: x.float() for n, x in halves.items()}, **rest)
        assert [x.dtype for x in (O, C, Kr)] == [torch.bfloat16, torch.float32, torch.float32]
        assert torch.equal(O, wide[0].bfloat16())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(function(**halves, **rest)[0], O)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": 3}, "groups is 3; it must divide the 4 heads"),
        ({"rotary": 1}, "rotary is 1; channels are turned in pairs"),
        ({"value": 0}, "value is 0; it must be at least 1"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        made(**options)
