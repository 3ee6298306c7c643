"""The Triton kernels of Gaussian mixture attention against float64, with a bound derived from the roundings they make.

The float64 computation is written here, dense and without chunks, so that it shares nothing with the kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec

import pytest

torch = pytest.importorskip("torch")
if find_spec("triton") is None:  # not imported here: gma says first whether to interpret
    pytest.skip("triton is not installed", allow_module_level=True)

from mixproof.verify.subjects.triton import gma  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = gma.triton.knobs.runtime.interpret
U = 2.0**-24
TINY = 2.0**-126  # what flushes to zero
# half a unit in the last place of the output; the interpreter truncates to bfloat16, which costs a whole one
OUTPUT = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7 if INTERPRETED else 2.0**-8}

# every T, K, R, V and chunk that matters at least once: below, at and above the tiles (16 to 64 tokens) and chunks
SIZES = [
    # T, K, R, V, chunk
    (0, 3, 3, 5, 64),
    (1, 1, 1, 1, 16),
    (2, 16, 3, 33, 1),
    (15, 20, 1, 5, 16),
    (16, 3, 16, 1, 16),
    (17, 16, 40, 5, 5),
    (63, 1, 3, 33, 64),
    (64, 20, 3, 5, 32),
    (65, 3, 3, 5, 64),
    (75, 2, 1, 3, 70),
    (130, 16, 1, 1, 48),
]


@dataclass
class Problem:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mixture: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    S0: torch.Tensor
    Z0: torch.Tensor


def problem(T, K, R, V, S=None, B=2, H=3, seed=0, dtype=torch.float32) -> Problem:
    """Heads differ in place and width."""
    g = torch.Generator().manual_seed(seed)
    S = T if S is None else S
    offset = torch.tensor([0.0, 3.0, -1.0])[:H]
    q, k = (torch.randn(B, n, H, R, generator=g) + offset[:, None] for n in (T, S))
    v = torch.randn(B, S, H, V, generator=g)
    mu = torch.randn(H, K, R, generator=g) + offset[:, None, None]
    omega = torch.randn(H, K, R, generator=g) - offset.abs().clamp(max=1)[:, None, None]
    alpha = torch.randn(H, K, generator=g)
    S0, Z0 = torch.randn(B, H, K, V, generator=g), 3 * torch.rand(B, H, K, generator=g)
    q, k, v = (x.to(DEVICE, dtype) for x in (q, k, v))
    mu, omega, alpha, S0, Z0 = (x.to(DEVICE) for x in (mu, omega, alpha, S0, Z0))
    return Problem(q, k, v, (mu, omega, alpha), S0, Z0)


def responsibilities64(x, mu, omega, alpha, v_min=0.0):
    """gamma (B, H, T, K) in float64, and the relative error that float32 kernels may make in it, (B, H, T, 1)."""
    x, mu, omega, alpha = (y.cpu().double() for y in (x, mu, omega, alpha))
    R, K = mu.shape[-1], mu.shape[-2]
    var = torch.logaddexp(omega, torch.zeros_like(omega)) + v_min
    square = ((x.transpose(1, 2)[..., None, :] - mu[:, None]) ** 2 / var[:, None]).sum(-1)
    bias = (alpha - var.log().sum(-1) / 2)[:, None]
    s = bias - square / 2
    # Of each square: the difference twice, the square, 1 / var, the product, then R additions. The table of bias is
    # rounded once, and so is s.
    ds = U * ((R + 5) * square / 2 + bias.abs() + s.abs())
    top, at = s.max(-1, keepdim=True)
    gamma = torch.softmax(s, -1)
    dt = ds + ds.gather(-1, at) + U * (top - s)
    # exp twice (3 ulp = 6 U each), K additions, a division; each tile of components may rescale the sum once (8 U)
    eta = dt + (gamma * dt).sum(-1, keepdim=True) + U * (12 + K + 1 + 8 * math.ceil(K / 16))
    assert not gamma.numel() or (eta * gamma).max() < 0.01, "first-order bounds need small errors"
    return gamma, eta


def attention64(p: Problem, causal=False, eps=1e-6, v_min=0.0, state=False):
    """O, S, Z in float64 and their bounds, in the kernels' layout."""
    GQ, eta_q = responsibilities64(p.q, *p.mixture, v_min)
    GK, eta_k = responsibilities64(p.k, *p.mixture, v_min)
    v = p.v.cpu().double().transpose(1, 2)
    S0, Z0 = (x.cpu().double() * state for x in (p.S0, p.Z0))
    N, K = GK.shape[-2:]

    def mix(GQ, GK, v, S0, Z0):
        A = GQ @ GK.mT
        A = A.tril() if causal else A
        return A @ v + GQ @ S0, A.sum(-1, keepdim=True) + GQ @ Z0[..., None]

    numerator, D = mix(GQ, GK, v, S0, Z0)
    O = numerator / (D + eps)
    # The same on absolute values with the errors of each factor; sums over N tokens and K components in any order.
    steps = U * (N + K + 8)
    worst_numerator, worst_D = mix(GQ * (1 + eta_q), GK * (1 + eta_k), v.abs(), S0.abs(), Z0.abs())
    exact_numerator, _ = mix(GQ, GK, v.abs(), S0.abs(), Z0.abs())
    d_numerator = worst_numerator * (1 + steps) - exact_numerator + TINY
    d_D = worst_D * (1 + steps) - D + U * (D + eps) + TINY
    unit = OUTPUT[p.q.dtype]
    d_O = (d_numerator + O.abs() * d_D) / (D + eps - d_D) + U * O.abs()
    d_O = d_O * (1 + unit) + unit * O.abs() + (2.0**-25 if p.q.dtype == torch.float16 else TINY)
    S, Z = GK.mT @ v + S0, GK.sum(-2) + Z0
    d_S = ((GK * (1 + eta_k)).mT @ v.abs() + S0.abs()) * (1 + steps) - (GK.mT @ v.abs() + S0.abs()) + TINY
    d_Z = ((GK * (1 + eta_k)).sum(-2) + Z0) * (1 + steps) - Z + TINY
    return (O.transpose(1, 2), d_O.transpose(1, 2)), (S, d_S), (Z, d_Z)


def check(got, want_and_bound):
    want, bound = want_and_bound
    assert got.shape == want.shape
    assert bool(torch.isfinite(got).all())
    if got.numel():
        ratio = ((got.cpu().double() - want).abs() / bound).max().item()
        assert ratio <= 1, f"worst error is {ratio:.3g} x bound"
    return bound


@pytest.mark.parametrize(("T", "K", "R", "V", "chunk"), SIZES)
def test_every_size_agrees_with_float64(T, K, R, V, chunk):
    B, H = {1: (2, 3), 2: (2, 3), 16: (1, 2)}.get(T, (1, 1))  # the interpreter takes one program after the other
    p = problem(T, K, R, V, B=B, H=H, seed=T)
    G, eta = responsibilities64(p.q, *p.mixture)
    check(gma.responsibilities(p.q, *p.mixture), ((G).transpose(1, 2), (G * eta + TINY).transpose(1, 2)))
    check(gma.bidirectional(p.q, p.k, p.v, *p.mixture), attention64(p)[0])
    results = gma.causal(p.q, p.k, p.v, *p.mixture, 0.3, 0.01, p.S0, p.Z0, chunk=chunk)
    assert [x.dtype for x in results] == [torch.float32] * 3
    for got, want in zip(results, attention64(p, causal=True, eps=0.3, v_min=0.01, state=True), strict=True):
        check(got, want)


@pytest.mark.parametrize(("T", "S"), [(1, 33), (33, 1), (5, 0), (0, 5)])
def test_cross_attention_reads_another_sequence(T, S):
    p = problem(T, 3, 2, 5, S=S, seed=7)
    check(gma.cross(p.q, p.k, p.v, *p.mixture), attention64(p)[0])


def test_more_components_and_channels_than_a_tile():
    p = problem(5, 70, 2, 130, B=1, H=1)
    check(gma.cross(p.q, p.k, p.v, *p.mixture), attention64(p)[0])
    for got, want in zip(gma.causal(p.q, p.k, p.v, *p.mixture), attention64(p, causal=True), strict=True):
        check(got, want)
    G, eta = responsibilities64(p.q, *p.mixture)
    check(gma.responsibilities(p.q, *p.mixture), (G.transpose(1, 2), (G * eta + TINY).transpose(1, 2)))


def test_a_context_of_more_than_64_tiles():
    p = problem(1, 17, 1, 1, S=64 * 32 + 5, B=1, H=1)  # more than 16 components: tiles of 32 tokens
    check(gma.cross(p.q, p.k, p.v, *p.mixture), attention64(p)[0])


@pytest.mark.parametrize("chunk", [3, 16, 18, 19, 100])
def test_chunk_size_and_a_short_last_chunk(chunk):
    p = problem(19, 2, 1, 3, B=1, H=2)
    results = gma.causal(p.q, p.k, p.v, *p.mixture, S0=p.S0, Z0=p.Z0, chunk=chunk)
    for got, want in zip(results, attention64(p, causal=True, state=True), strict=True):
        check(got, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inputs_are_computed_in_float32(dtype):
    p = problem(19, 5, 3, 4, B=1, H=2, dtype=dtype)
    O, S, Z = gma.causal(p.q, p.k, p.v, *p.mixture, S0=p.S0, Z0=p.Z0, chunk=16)
    assert (O.dtype, S.dtype, Z.dtype) == (dtype, torch.float32, torch.float32)
    for got, want in zip((O, S, Z), attention64(p, causal=True, state=True), strict=True):
        check(got, want)
    check(gma.bidirectional(p.q, p.k, p.v, *p.mixture), attention64(p)[0])
    G, eta = responsibilities64(p.q, *p.mixture)
    bound = G * eta + OUTPUT[dtype] * G + (2.0**-25 if dtype == torch.float16 else TINY)
    check(gma.responsibilities(p.q, *p.mixture), (G.transpose(1, 2), bound.transpose(1, 2)))


# ---- bit for bit ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "huge"), [(1, 7.0), (20, 1e18), (33, 1e30), (40, 7.0)])
def test_the_future_changes_no_bit_of_the_past(first, huge):
    """Chunks of 20 tokens: one token, a whole chunk, part of a chunk, all but one."""
    p = problem(41, 3, 1, 3, B=1, H=1)
    before = gma.causal(p.q, p.k, p.v, *p.mixture, chunk=20)[0]
    q, k, v = (x.clone() for x in (p.q, p.k, p.v))
    for x in (q, k, v):
        x[:, first:] *= -huge
    after = gma.causal(q, k, v, *p.mixture, chunk=20)[0]
    assert torch.equal(before[:, :first], after[:, :first])
    assert not torch.equal(before[:, first:], after[:, first:])
    short = gma.causal(p.q[:, :first], p.k[:, :first], p.v[:, :first], *p.mixture, chunk=20)[0]
    assert torch.equal(before[:, :first], short)


def test_nan_keys_in_the_future_change_no_bit_of_the_past():
    p = problem(20, 3, 1, 3, B=1, H=1)
    before = gma.causal(p.q, p.k, p.v, *p.mixture, chunk=20)[0]
    p.k[:, 9:] = math.nan
    after = gma.causal(p.q, p.k, p.v, *p.mixture, chunk=20)[0]
    assert torch.equal(before[:, :9], after[:, :9])
    assert bool(torch.isnan(after[:, 9:]).all())


def test_resuming_between_chunks_changes_no_bit():
    p = problem(41, 3, 1, 3, B=1, H=1)
    O, S, Z = gma.causal(p.q, p.k, p.v, *p.mixture, S0=p.S0, Z0=p.Z0, chunk=16)
    for cut in (0, 32, 41):
        head, tail = ([x[:, part] for x in (p.q, p.k, p.v)] for part in (slice(cut), slice(cut, None)))
        O1, S1, Z1 = gma.causal(*head, *p.mixture, S0=p.S0, Z0=p.Z0, chunk=16)
        O2, S2, Z2 = gma.causal(*tail, *p.mixture, S0=S1, Z0=Z1, chunk=16)
        assert torch.equal(torch.cat([O1, O2], 1), O)
        assert torch.equal(S2, S)
        assert torch.equal(Z2, Z)


def test_sequences_and_heads_do_not_see_each_other():
    p = problem(19, 3, 2, 3)
    O, S, Z = gma.causal(p.q, p.k, p.v, *p.mixture, S0=p.S0, Z0=p.Z0)
    both = gma.cross(p.q, p.k, p.v, *p.mixture)
    for b, h in ((0, 0), (0, 2), (1, 1)):  # each sequence and each head
        tokens = [x[b : b + 1, :, h : h + 1] for x in (p.q, p.k, p.v)]
        mixture = [x[h : h + 1] for x in p.mixture]
        S0, Z0 = (x[b : b + 1, h : h + 1] for x in (p.S0, p.Z0))
        alone = gma.causal(*tokens, *mixture, S0=S0, Z0=Z0)
        assert torch.equal(alone[0][0, :, 0], O[b, :, h])
        assert torch.equal(alone[1][0, 0], S[b, h])
        assert torch.equal(alone[2][0, 0], Z[b, h])
        assert torch.equal(gma.cross(*tokens, *mixture)[0, :, 0], both[b, :, h])


def strided(x):
    """The same values behind other strides: axes reversed, every second element, an offset."""
    shape = [2 * n for n in reversed(x.shape)]
    y = torch.full(shape, math.nan, dtype=x.dtype, device=x.device).permute(*reversed(range(x.dim())))
    y = y[tuple(slice(1, None, 2) for _ in shape)]
    return y.copy_(x)


def test_strides_change_no_bit_and_inputs_are_left_alone():
    p = problem(18, 3, 2, 5, B=2, H=2)
    plain = [p.q, p.k, p.v, *p.mixture, p.S0, p.Z0]
    other = [strided(x) for x in plain]
    kept = [x.clone() for x in other]
    for mine, theirs in zip(
        gma.causal(*plain[:6], S0=plain[6], Z0=plain[7], chunk=16),
        gma.causal(*other[:6], S0=other[6], Z0=other[7], chunk=16),
        strict=True,
    ):
        assert torch.equal(mine, theirs)
    assert torch.equal(gma.bidirectional(*plain[:6]), gma.bidirectional(*other[:6]))
    assert torch.equal(gma.responsibilities(plain[0], *plain[3:6]), gma.responsibilities(other[0], *other[3:6]))
    assert all(torch.equal(x, y) for x, y in zip(kept, other, strict=True))


def test_expanded_inputs():
    p = problem(18, 3, 2, 5, B=2, H=2)
    shared = [p.q[:1, :, :1].expand(2, 18, 2, 2), p.k[:, :1].expand(2, 18, 2, 2), p.v[..., :1].expand(2, 18, 2, 5)]
    mixture = [x[:1].expand(2, *x.shape[1:]) for x in p.mixture]
    S0, Z0 = p.S0[:1, :1].expand(2, 2, 3, 5), p.Z0[:1, :1].expand(2, 2, 3)
    got = gma.causal(*shared, *mixture, S0=S0, Z0=Z0)
    want = gma.causal(*(x.contiguous() for x in (*shared, *mixture)), S0=S0.contiguous(), Z0=Z0.contiguous())
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_every_output_is_written_and_nothing_unwritten_is_read(monkeypatch):
    p = problem(19, 3, 1, 5, B=1, H=2)

    def run():
        return (
            gma.responsibilities(p.q, *p.mixture),
            gma.cross(p.q, p.k[:, :17], p.v[:, :17], *p.mixture),
            gma.cross(p.q, p.k[:, :0], p.v[:, :0], *p.mixture),
            *gma.causal(p.q, p.k, p.v, *p.mixture, chunk=16),
            *gma.causal(p.q[:, :0], p.k[:, :0], p.v[:, :0], *p.mixture, chunk=20),
        )

    clean = run()
    empty, poisoned = torch.empty, []

    def poison(*args, **options):
        poisoned.append(args)
        return empty(*args, **options).fill_(math.nan)

    monkeypatch.setattr(torch, "empty", poison)
    results = run()
    assert len(poisoned) > 20
    assert all(torch.equal(x, y) and not torch.isnan(y).any() for x, y in zip(clean, results, strict=True))


# ---- values known by other means -----------------------------------------------------------------------------------

UNIT_VAR = {"v_min": 1.0}  # with omega = -200, whose softplus is 0 in float32, every variance is exactly 1


def line(x, mu, alpha=None):
    """Tokens x and components mu on the line, one head, unit variances."""
    tokens = torch.tensor(x, device=DEVICE).reshape(1, -1, 1, 1)
    mu = torch.tensor(mu, device=DEVICE).reshape(1, -1, 1)
    omega = torch.full_like(mu, -200.0)
    alpha = torch.zeros_like(mu[..., 0]) if alpha is None else torch.tensor(alpha, device=DEVICE).reshape(1, -1)
    return tokens, (mu, omega, alpha)


@pytest.mark.parametrize("distance", [1.0, 3.0, 7.0, 9.0, 11.0, 12.0, 12.5])
def test_small_responsibilities_keep_their_relative_accuracy(distance):
    """s is exact here, so what is left is exp: 3 ulp, the sum 1, the quotient 1 (in halves: 6 + 6 + 2 + 2)."""
    tokens, mixture = line([0.0], [0.0, distance])
    got = gma.responsibilities(tokens, *mixture, **UNIT_VAR).flatten()[1].item()
    e = math.exp(-(distance**2) / 2)
    assert abs(got - e / (1 + e)) <= 16 * U * e / (1 + e)


def test_far_tokens_and_a_common_offset_do_not_cancel_or_vanish():
    G = gma.responsibilities(*_flat(line([20.0], [0.0, 1.0])), **UNIT_VAR).flatten()
    want = 1 / (1 + math.exp(19.5))
    assert abs(G[0].item() - want) <= 16 * 400 * U * want  # 6 / 2 U of each of two squares of about 400, and of s
    assert G[1].item() == 1
    tokens, (mu, _, alpha) = line([10000.75], [10000.0, 10001.0])
    omega = torch.full_like(mu, math.log(math.expm1(0.25)))
    G = gma.responsibilities(tokens, mu, omega, alpha).flatten()
    want = 1 / (1 + math.exp(1.0))
    assert abs(G[0].item() - want) <= 64 * U


def _flat(pair):
    return (pair[0], *pair[1])


def test_huge_logits_stay_normalised():
    tokens, mixture = line([1e4, -3e4], [0.0, 0.0, 0.0])
    G = gma.responsibilities(tokens, *mixture, **UNIT_VAR)
    assert ((G.sum(-1) - 1).abs() <= 4 * U).all()
    assert torch.equal(G, G[:1, :1, :1, :1].expand_as(G))


def test_eps_is_added_once_to_the_row():
    """Equal components: gamma = 1 / K, every affinity 1 / K, so O_i = (i + 1) / K / ((i + 1) / K + eps) for v = 1."""
    tokens, mixture = line([0.5] * 6, [0.0] * 4)
    v = torch.ones(1, 6, 1, 1, device=DEVICE)
    count = torch.arange(1.0, 7.0, dtype=torch.float64)[None, :, None, None] / 4
    got = gma.causal(tokens, tokens, v, *mixture, 0.5, **UNIT_VAR, chunk=4)[0]
    assert (got.cpu().double() - count / (count + 0.5)).abs().max() <= 32 * U
    got = gma.bidirectional(tokens, tokens, v, *mixture, 0.5, **UNIT_VAR)
    assert (got.cpu().double() - 1.5 / 2).abs().max() <= 32 * U


def test_components_narrower_than_float32_can_square_are_nan_not_wrong():
    tokens, mixture = line([1e30], [0.0, 1.0])
    assert torch.isnan(gma.responsibilities(tokens, *mixture, **UNIT_VAR)).all()


# ---- arguments -----------------------------------------------------------------------------------------------------


def change(name, how):
    p = problem(4, 3, 2, 5)
    arguments = dict(zip(("q", "k", "v", "mu", "omega", "alpha"), (p.q, p.k, p.v, *p.mixture), strict=True))
    arguments |= {"S0": p.S0, "Z0": p.Z0, "chunk": 16, "eps": 1e-6, "v_min": 0.0}
    arguments[name] = how(arguments[name])
    return arguments


@pytest.mark.parametrize(
    ("name", "how", "error", "words"),
    [
        ("q", lambda x: x.int(), TypeError, "q has dtype torch.int32; expected float32"),
        ("v", lambda x: x.double(), TypeError, "v has dtype torch.float64"),
        ("k", lambda x: x.half(), TypeError, "k has dtype torch.float16, but q has torch.float32"),
        ("q", lambda x: x.tolist(), TypeError, "q is a list; expected a torch tensor"),
        ("k", lambda x: x[:, :3], ValueError, r"k has shape \(2, 3, 3, 2\): axis T is 3, but elsewhere 4"),
        ("v", lambda x: x[0], ValueError, r"v has shape \(4, 3, 5\); expected \(B, T, H, V\)"),
        ("mu", lambda x: x[:, :0], ValueError, "K"),
        ("omega", lambda x: x[..., :1], ValueError, r"omega has shape \(3, 3, 1\): axis R is 1, but elsewhere 2"),
        ("alpha", lambda x: x[:1], ValueError, r"alpha has shape \(1, 3\): axis H is 1, but elsewhere 3"),
        ("S0", lambda x: x.mT, ValueError, r"S0 has shape \(2, 3, 5, 3\)"),
        ("Z0", lambda x: x[:1], ValueError, "Z0 has shape"),
        ("mu", lambda x: x.to("meta"), ValueError, "mu is on meta, but q is on"),
        ("chunk", lambda x: 0, ValueError, "chunk is 0"),
        ("chunk", lambda x: 2.0, ValueError, "chunk is 2.0"),
        ("eps", lambda x: -1e-6, ValueError, "eps is -1e-06"),
        ("v_min", lambda x: math.nan, ValueError, "v_min is nan"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(name, how, error, words):
    with pytest.raises(error, match=words):
        gma.causal(**change(name, how))


def test_no_components_and_unequal_lengths_are_refused():
    p = problem(4, 3, 2, 5)
    mu, omega, alpha = p.mixture
    with pytest.raises(ValueError, match="mu has no components"):
        gma.responsibilities(p.q, mu[:, :0], omega[:, :0], alpha[:, :0])
    with pytest.raises(ValueError, match="k has shape"):
        gma.bidirectional(p.q, p.k[:, :2], p.v[:, :2], *p.mixture)


def test_the_declarations_say_what_the_kernels_do():
    from mixproof.verify.declare import ATTRIBUTE

    for name in ("responsibilities", "bidirectional", "cross", "causal"):
        (declared,) = getattr(getattr(gma, name), ATTRIBUTE)
        assert (declared.operator, declared.dot, declared.gradients) == (f"gma.{name}", "float32", True)
        p = problem(2, 3, 2, 5, dtype=torch.float16)
        assert set(declared.dtypes) == {"float32", "float16", "bfloat16"}
        assert p.mixture[0].dtype == torch.float32
