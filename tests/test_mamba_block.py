"""The Mamba block: the released mixer transcribed, decoding, and what the gate does not ask of the module."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mixproof.reference import mamba_block, operator
from mixproof.verify.arithmetic import natural
from mixproof.verify.judge import PROFILES, judge
from mixproof.verify.numbers.ball import Reading, tolerance
from mixproof.verify.subjects.mutants import Mutant
from mixproof.verify.subjects.mutants import mamba_block as wrong

torch = pytest.importorskip("torch")
from mixproof.verify.subjects.torch.mamba_block import MambaBlock, block  # noqa: E402

OP = operator("mamba.block")
PARAMETERS = [x.name for x in OP.inputs if x.role == "parameter"]
SIZES = [  # T, E, D, W, Q, N
    (1, 1, 1, 1, 1, 1),
    (2, 3, 4, 4, 2, 3),  # fewer tokens than the convolution sees
    (7, 4, 3, 3, 1, 2),
    (11, 2, 4, 2, 3, 1),
]


def draw(T, E, D, W, Q, N, seed=0):
    g = np.random.default_rng([seed, T, E, D, W, Q, N])
    sizes = {"T": T, "E": E, "D": D, "W": W, "Q": Q, "N": N, "W-1": W - 1}
    I = {x.name: g.standard_normal(tuple(sizes[a] for a in x.axes)) for x in OP.inputs}
    return I, {y.name: g.standard_normal(tuple(sizes[a] for a in y.axes)) for y in OP.outputs}


def bounds(I, G=None):
    """What each output, or each gradient, may be off by in float64."""
    reading = Reading(natural("float64"))
    balls = {n: reading.ball(x) for n, x in I.items()}
    result = OP.evaluate(balls) if G is None else OP.vjp({n: reading.ball(x) for n, x in G.items()}, **balls)
    assert not reading.vacuous
    return {n: tolerance(b, "float64") for n, b in result.items()}


# --- an independent transcription ------------------------------------------------------------------------------------


def released(I):
    """The slow path of the released mixer, (channels, length) within, its joint projections put together from ours."""
    in_proj, x_proj = torch.cat([I["W_in"], I["W_z"]], 1).T, torch.cat([I["W_down"], I["W_B"], I["W_C"]], 1).T
    (D, N), T, rank = I["A_log"].shape, len(I["x"]), I["W_down"].shape[1]
    hidden, gate = (in_proj @ I["x"].T).chunk(2, dim=0)
    before = torch.cat([I["u0"].T, hidden], dim=1)
    conv = torch.nn.functional.conv1d(before[None], I["w_conv"][:, None], I["b_conv"], groups=D)[0]
    hidden = torch.nn.functional.silu(conv)
    time_step, B, C = (x_proj @ hidden).T.split([rank, N, N], dim=-1)
    discrete_time_step = torch.nn.functional.softplus(time_step @ I["W_dt"] + I["b_dt"]).T
    A = -torch.exp(I["A_log"])
    discrete_A = torch.exp(A[:, None, :] * discrete_time_step[:, :, None])
    deltaB_u = discrete_time_step[:, :, None] * B[None] * hidden[:, :, None]
    state, outputs = I["h0"], []
    for i in range(T):
        state = discrete_A[:, i] * state + deltaB_u[:, i]
        outputs.append(state @ C[i])
    scan_output = torch.stack(outputs, dim=-1) + hidden * I["skip"][:, None]
    scan_output = scan_output * torch.nn.functional.silu(gate)
    return (I["W_out"].T @ scan_output).T, before[:, T:].T, state


@pytest.mark.parametrize("sizes", SIZES)
def test_it_is_the_released_mixer(sizes):
    I, G = draw(*sizes)
    x = {n: torch.tensor(a, requires_grad=True) for n, a in I.items()}
    results = released(x)
    sum((r * torch.tensor(G[n])).sum() for r, n in zip(results, ("Y", "u", "h"), strict=True)).backward()
    allowed = bounds(I)
    found = [form.function(**I) for form in OP.forms]
    found += [mamba_block.chunkwise(**I, chunk=c) for c in (1, 3)]
    for got in found:
        for n, value, want in zip(("Y", "u", "h"), got, results, strict=True):
            assert np.all(np.abs(value - want.detach().numpy()) <= 2 * allowed[n]), n
    by = bounds(I, G)
    for chunk in (2, 5, 64):
        grads = OP.vjp(G, **I, chunk=chunk)
        for n, d in grads.items():
            assert np.all(np.abs(d - x[n].grad.numpy()) <= 2 * by[n]), n
    assert set(grads) == set(I)


def test_absent_states_are_zero():
    I, G = draw(5, 3, 4, 3, 2, 2)
    zero = I | {"u0": 0 * I["u0"], "h0": 0 * I["h0"]}
    absent = {n: x for n, x in I.items() if n not in ("u0", "h0")}
    for form in OP.forms:
        for got, want in zip(form.function(**absent), form.function(**zero), strict=True):
            assert np.array_equal(got, want)
    for n, d in OP.vjp(G, **absent).items():
        assert np.array_equal(d, OP.vjp(G, **zero)[n])


@pytest.mark.parametrize("T", [0, 1, 2])
def test_rows_of_the_convolution_outlive_a_short_call(T):
    """Of four taps three rows are handed on, among them the latest of the old ones after fewer than three tokens."""
    I, _ = draw(T, 3, 4, 4, 2, 2)
    allowed, new = bounds(I)["u"], I["x"] @ I["W_in"]
    for form in OP.forms:
        u = form.function(**I)[1]
        assert np.array_equal(u[: 3 - T], I["u0"][T:])
        assert np.all(np.abs(u[3 - T :] - new) <= 2 * allowed[3 - T :])


def test_the_state_space_sees_no_other_tokens_than_the_convolution():
    """Steps, B and C are linear in the convolution's result: where its taps lie on the previous token alone, nothing of
    the first one but its gate depends on that token."""
    I, _ = draw(3, 2, 3, 2, 1, 2)
    I |= {"w_conv": I["w_conv"] * [1, 0]}
    other = I | {"x": I["x"] + np.array([[1], [0], [0]])}
    one, two = (mamba_block._states(i["x"], tuple(i[n] for n in PARAMETERS), i["u0"]) for i in (I, other))
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(one.system, two.system, strict=True) if a.ndim == 2)
    assert not np.array_equal(one.Z[0], two.Z[0])


def test_arguments_that_make_no_sense():
    I, G = draw(5, 3, 4, 3, 2, 2)
    for change, message in (
        ({"W_dt": I["W_dt"].T}, r"W_dt has shape \(4, 2\): axis Q is 4, but another argument has Q=2"),
        ({"u0": I["u0"][1:]}, r"u0 has shape \(1, 4\): axis W-1 is 1, but the other arguments make it 2"),
        ({"h0": I["h0"][0]}, r"h0 has shape \(2,\); mamba.block expects \(D, N\)"),
    ):
        for form in OP.forms:
            with pytest.raises(ValueError, match=message):
                form.function(**I | change)
        with pytest.raises(ValueError, match=message):
            OP.vjp(G, **I | change)


def test_builders_with_nothing_changed_raise_no_alarm():
    mutant = Mutant("block", "mamba.block", "", (), forward=wrong.block(), vjp=wrong.block_vjp())
    for law in ("forward", "vjp", "split"):
        verdict = judge(mutant.subject(), law, PROFILES["short"])
        assert verdict.status == "pass", verdict


# --- the module ------------------------------------------------------------------------------------------------------


def made(dtype=torch.float64, **options):
    torch.manual_seed(0)
    return MambaBlock(**{"d_model": 6, "d_state": 3, "d_conv": 4} | options).to(dtype)


def tokens(T=9, dtype=torch.float64):
    return torch.randn(2, T, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def agree(layer, x, got, want):
    """Two evaluations of the block, each within its tolerance."""
    P = {n: p.detach().numpy() for n, p in layer.named_parameters()}
    for b in range(len(x)):
        for n, bound in bounds(P | {"x": x[b].numpy()}).items():
            one, two = (r["Yuh".index(n)][b].detach().numpy() for r in (got, want))
            assert np.all(np.abs(one - two) <= 2 * bound), n


def test_parameters_are_those_of_the_operator():
    layer = made()
    assert [n for n, _ in layer.named_parameters()] == PARAMETERS
    shapes = {n: tuple(p.shape) for n, p in layer.named_parameters()}
    assert shapes["W_in"] == (6, 12)
    assert shapes["W_dt"] == (1, 12)
    assert made(dt_rank=5).W_down.shape == (12, 5)
    assert MambaBlock(33, 2).W_dt.shape == (3, 66)


def test_module_is_the_function_and_the_reference():
    layer, x = made(), tokens()
    got = layer(x)
    want = block(x, **dict(layer.named_parameters()))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    P = {n: p.detach().numpy() for n, p in layer.named_parameters()}
    rows = [OP.evaluate(P | {"x": sequence.numpy()}) for sequence in x]
    agree(layer, x, got, [torch.tensor(np.stack([r[n] for r in rows])) for n in "Yuh"])


@pytest.mark.parametrize("at", [0, 1, 2, 5, 9])
def test_prefill_and_decoding_are_the_whole(at):
    """Token by token from `at` on, however few tokens came before."""
    layer, x = made(), tokens()
    Y, u, h = layer(x[:, :at])
    rows = [Y]
    for t in range(at, 9):
        Y, u, h = layer(x[:, t : t + 1], u, h)
        rows.append(Y)
    agree(layer, x, (torch.cat(rows, dim=1), u, h), layer(x))


def test_parameters_are_saved_and_loaded(tmp_path):
    layer, x = made(), tokens()
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.1 * torch.randn_like(p))
    torch.save(layer.state_dict(), tmp_path / "block.pt")
    other = made()
    assert not torch.equal(other(x)[0], layer(x)[0])
    other.load_state_dict(torch.load(tmp_path / "block.pt"))
    assert all(torch.equal(a, b) for a, b in zip(other(x), layer(x), strict=True))


def test_a_new_block_starts_as_the_released_one():
    layer = made(d_model=256, d_state=5)
    assert torch.equal(layer.A_log, torch.arange(1, 6).log().to(layer.A_log).expand(512, 5))
    assert torch.equal(layer.skip, torch.ones(512, dtype=torch.float64))
    steps = torch.nn.functional.softplus(layer.b_dt)
    assert 0.99e-3 < steps.min() < 2e-3
    assert 0.05 < steps.max() < 0.101
    for n in ("W_in", "W_z", "W_down", "W_dt", "W_B", "W_C", "W_out"):
        W = getattr(layer, n)
        assert 0.8 / math.sqrt(len(W)) < W.detach().abs().max() <= 1 / math.sqrt(len(W)) * (1 + 2**-20)


def test_every_parameter_learns():
    layer = made()
    Y, u, h = layer(tokens())
    (Y.square().sum() + u.square().sum() + h.square().sum()).backward()
    assert all(torch.count_nonzero(p.grad) == p.numel() for p in layer.parameters())


def test_low_precision():
    """Autocast rounds nothing; tokens in half precision are computed with in float32, and so are the states."""
    layer, x = made(torch.float32), tokens(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = layer(x)
    assert all(torch.equal(a, b) for a, b in zip(rounded, layer(x), strict=True))
    half = x.bfloat16()
    Y, u, h = layer(half)
    assert (Y.dtype, u.dtype, h.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert torch.equal(Y, layer(half.float())[0].bfloat16())


@pytest.mark.parametrize("name", ["d_model", "d_state", "d_conv", "expand", "dt_rank"])
def test_options_that_make_no_sense(name):
    with pytest.raises(ValueError, match=f"{name} is 0; it must be at least 1"):
        made(**{name: 0})


def test_arguments_that_make_no_sense_in_pytorch():
    layer, x = made(), tokens()
    _, u, h = layer(x)
    for call, message in (
        (lambda: layer(x[0]), r"x has shape \(9, 6\); expected axes \(B, T, E\)"),
        (lambda: layer(x[..., :4]), r"W_in has shape \(6, 12\): axis E is 6, but x has E=4"),
        (lambda: layer(x, u[:, 1:]), "u0 has 2 rows; a convolution of 4 taps sees 3 earlier ones"),
        (lambda: layer(x, u, h.mT), r"h0 has shape \(2, 3, 12\): axis D is 3, but W_in has D=12"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with torch.no_grad():
        layer.skip[0] = math.nan
    with pytest.raises(ValueError, match="skip contains NaN"):
        layer(x)
