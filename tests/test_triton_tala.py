"""The Triton kernels of TALA, values and gradients, against float64 with a bound on the roundings they make.

The float64 computation is the recurrence, written here; its gradients are PyTorch's. Every output and gradient is a sum
of products of inputs and decays. The same sums over absolute values, times the number of roundings that a product may
meet, bound the error.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if find_spec("triton") is None:  # not imported here: tala says first whether to interpret
    pytest.skip("triton is not installed", allow_module_level=True)

from mixproof.verify.subjects.triton import tala as subject  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = subject.triton.knobs.runtime.interpret
U = 2.0**-24
# half a unit in the last place of the output; the interpreter truncates to bfloat16, which costs a whole one
OUTPUT = {torch.float32: U, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7 if INTERPRETED else 2.0**-8}
SMALLEST = {torch.float32: 2.0**-126, torch.float16: 2.0**-25, torch.bfloat16: 2.0**-126}
FUNCTIONS = {
    "constant": subject.tala,
    "log": subject.simple_gated_linear_attention,
    "signed": subject.time_varying,
}
TOKENS = ("q", "k", "v", "g", "a")  # inputs with a row, or a number, per token


def problem(kind, T, K, V, B=1, H=2, dtype=torch.float32, seed=0) -> dict[str, Any]:
    """Arguments of the function of this kind, whose heads differ; decays of zero and below it where there may be."""
    g = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(B, T, H, K, generator=g).to(dtype) for _ in range(2))
    p: dict[str, Any] = {"q": q, "k": k, "v": torch.randn(B, T, H, V, generator=g).to(dtype)}
    if kind == "constant":
        p |= {"h": torch.tensor([1.0, 8.0, 3.0])[:H], "G": torch.tensor([-0.75, 1.0, 0.0])[:H]}
    elif kind == "log":
        p["g"] = -torch.rand(B, T, H, generator=g).to(dtype)
    else:
        a = 1.5 * torch.rand(B, T, H, generator=g) - 0.5
        p["a"] = torch.where(torch.rand(B, T, H, generator=g) < 0.1, 0.0, a).to(dtype)
    p["S0"] = torch.randn(B, H, K, V, generator=g)
    return {n: x.to(DEVICE) for n, x in p.items()} | {"scale": 0.625}


def recurrence(q, k, v, scale=1.0, S0=None, h=None, G=None, g=None, a=None):
    if h is not None:
        a = ((1 - torch.exp(-h)) * G).expand(q.shape[:3])
    elif g is not None:
        a = torch.exp(g)
    S, rows = S0, [q[:, :0] @ S0[:, :0]]
    for t in range(q.shape[1]):
        S = a[:, t, :, None, None] * S + k[:, t, :, :, None] * v[:, t, :, None, :]
        rows.append(scale * (q[:, t, :, None, :] @ S).mT)
    return torch.cat([r.squeeze(-1)[:, None] for r in rows[1:]], 1) if rows[1:] else v, S


def evaluated(function, p, cotangents=None, **options):
    """O, S and all gradients, by name."""
    leaves = {n: x.detach().clone().requires_grad_() if torch.is_tensor(x) else x for n, x in p.items()}
    O, S = function(**leaves, **options)
    names = [n for n, x in leaves.items() if torch.is_tensor(x)]
    upstream = cotangents or (torch.ones_like(O), torch.ones_like(S))
    grads = torch.autograd.grad((O, S), [leaves[n] for n in names], upstream, allow_unused=True)
    grads = [torch.zeros_like(leaves[n]) if x is None else x for n, x in zip(names, grads, strict=True)]
    return {"O": O.detach(), "S": S.detach()} | {"d" + n: x for n, x in zip(names, grads, strict=True)}


def check(p, **options):
    """Values and gradients, for random cotangents, are within their bounds."""
    kind = "constant" if "h" in p else "log" if "g" in p else "signed"
    (B, T, H, K), V = p["q"].shape, p["v"].shape[-1]
    generator = torch.Generator().manual_seed(1)
    dO, dS = (torch.randn(*size, generator=generator) for size in ((B, T, H, V), (B, H, K, V)))
    dO, dS = dO.to(p["q"]), dS.to(DEVICE)
    wide = {n: x.cpu().double() if torch.is_tensor(x) else x for n, x in p.items()}
    got = evaluated(FUNCTIONS[kind], p, (dO, dS), **options)
    want = evaluated(recurrence, wide, (dO.cpu().double(), dS.cpu().double()))
    # |1 - e^-h| and exp(g) are positive
    sizes = {n: x if n in ("h", "g", "scale") else x.abs() for n, x in wide.items()}
    most = evaluated(recurrence, sizes, (dO.cpu().double().abs(), dS.cpu().double().abs()))
    # Sums over tokens, K and V, two roundings where a state passes a chunk, a product a token for its decay (after exp:
    # 4 for exp itself, and its argument), and a few where factors meet.
    roundings = 3 * T + K + V + 16
    if kind == "log" and T:
        roundings += T * (4 + 3 * float(wide["g"].abs().max()))
    for name, x in got.items():
        unit = OUTPUT[x.dtype]
        bound = most[name].abs() * roundings * U * (1 + unit) + want[name].abs() * unit + SMALLEST[x.dtype]
        assert x.dtype == (p[name[1:]] if name[0] == "d" else p["q" if name == "O" else "S0"]).dtype, name
        assert x.shape == want[name].shape, name
        if x.numel():
            ratio = ((x.cpu().double() - want[name]).abs() / bound).max().item()
            assert ratio <= 1, f"{name}: worst error is {ratio:.3g} x bound"


@pytest.mark.parametrize(
    ("kind", "T", "K", "V", "chunk"),
    [
        ("constant", 0, 3, 5, 32),
        ("log", 0, 1, 1, 16),
        ("signed", 0, 3, 5, 16),
        ("constant", 1, 1, 1, 32),
        ("log", 2, 3, 5, 32),
        ("signed", 3, 16, 1, 32),
        ("constant", 15, 3, 33, 16),
        ("signed", 16, 20, 3, 16),
        ("log", 17, 3, 70, 16),
        ("constant", 33, 40, 17, 32),
        ("signed", 31, 5, 3, 32),
        ("log", 32, 3, 16, 32),
        ("signed", 33, 3, 5, 32),
        ("log", 65, 5, 3, 32),
        ("constant", 130, 3, 5, 32),
        ("signed", 20, 33, 40, 16),
    ],
)
def test_every_size_agrees_with_float64(kind, T, K, V, chunk):
    """Below, at and above tiles of tokens and of channels, zero tokens included."""
    B, H = (2, 3) if T in (1, 3) else (1, 2 if kind == "constant" and T < 40 else 1)
    check(problem(kind, T, K, V, B, H, seed=T), chunk=chunk)


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inputs_are_computed_in_float32(kind, dtype):
    check(problem(kind, 19, 5, 3, dtype=dtype), chunk=16)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_no_initial_state_is_a_state_of_zeros(kind):
    p = problem(kind, 18, 3, 5, H=1)
    p["S0"].zero_()
    zero = evaluated(FUNCTIONS[kind], p, chunk=16)
    zero.pop("dS0")
    del p["S0"]
    absent = evaluated(FUNCTIONS[kind], p, chunk=16)
    assert absent.keys() == zero.keys()
    assert all(torch.equal(absent[n], zero[n]) for n in zero)


# ---- values known by other means -----------------------------------------------------------------------------------


def ones(T, **decays):
    x = torch.ones(1, T, 1, 1, device=DEVICE)
    return {"q": x, "k": x, "v": x} | {n: d.to(DEVICE) for n, d in decays.items()}


@pytest.mark.parametrize("a", [0, 1, -1, 2, -2])
@pytest.mark.parametrize("kind", ["constant", "signed"])
def test_sums_of_powers_and_their_derivatives_are_exact(kind, a):
    """With ones everywhere o_n = 1 + a + .. + a^(n-1): whole numbers, zero and negative decays, across chunks."""
    T = 18
    rows = [sum(a**j for j in range(n)) for n in range(1, T + 1)]
    slope = sum(j * a ** (j - 1) for n in range(1, T + 1) for j in range(1, n))
    decays = torch.full((1, T, 1), float(a))
    # h = 200: 1 - e^-h = 1
    p = ones(T, a=decays) if kind == "signed" else ones(T, h=torch.tensor([200.0]), G=torch.tensor([float(a)]))
    O, S = FUNCTIONS[kind](**p, chunk=16)
    assert O.flatten().tolist() == rows
    assert S.item() == rows[-1]
    name = "a" if kind == "signed" else "G"
    leaf = p[name].clone().requires_grad_()
    O = FUNCTIONS[kind](**(p | {name: leaf}), chunk=16)[0]
    assert torch.autograd.grad(O.sum(), leaf)[0].sum().item() == slope


def test_late_heads_do_not_lose_their_decay():
    """omega of head 20 is one in float32; what it forgets over 32 chunks is not nothing."""
    T, h = 1024, 20.0
    S0 = torch.ones(1, 1, 1, 1, device=DEVICE)
    p = ones(T, h=torch.tensor([h]), G=torch.ones(1)) | {"k": torch.zeros(1, T, 1, 1, device=DEVICE), "S0": S0}
    S = subject.tala(**p)[1].item()
    want = math.exp(T * math.log1p(-math.exp(-h)))
    assert 1 - want > 16 * U
    assert abs(S - want) <= 2 * 16 * U


@pytest.mark.parametrize("kind", ["log", "signed"])
def test_a_product_of_decays_is_formed_of_its_own_factors(kind):
    """Token n reads token n - 1 alone, through one decay. As a difference of sums of logarithms, or a quotient of
    products, the last of them would have lost all but two digits, or be no number."""
    T, log = 64, -50.3
    even = (torch.arange(T, device=DEVICE) % 2 == 0).float()[None, :, None, None]
    g = torch.full((1, T, 1), log)
    p = ones(T, **({"g": g} if kind == "log" else {"a": g.exp()})) | {"q": 1 - even, "k": even}
    rows = FUNCTIONS[kind](**p)[0].flatten()[1::2].double()
    want = math.exp(g[0, 0, 0].item())
    assert ((rows - want).abs() <= (4 + 3 * abs(log)) * U * want).all()


@pytest.mark.parametrize(("kind", "name", "forget"), [("log", "g", -math.inf), ("signed", "a", 0.0)])
@pytest.mark.parametrize("t", [16, 20])
def test_a_decay_of_zero_forgets_every_bit_of_the_past(kind, name, forget, t):
    p = problem(kind, 40, 3, 5, H=1)
    p[name][:, t] = forget
    whole = evaluated(FUNCTIONS[kind], p, chunk=16)
    changed = {n: x.clone() if torch.is_tensor(x) else x for n, x in p.items()}
    for n in ("q", "k", "v"):
        changed[n][:, :t] *= -3
    changed["S0"] += 1
    after = evaluated(FUNCTIONS[kind], changed, chunk=16)
    assert all(bool(torch.isfinite(x).all()) for x in whole.values())
    assert torch.equal(whole["O"][:, t:], after["O"][:, t:])
    assert torch.equal(whole["S"], after["S"])
    assert not torch.equal(whole["O"][:, :t], after["O"][:, :t])
    short = {n: x[:, :t] if n in TOKENS else x for n, x in p.items()}
    alone = evaluated(FUNCTIONS[kind], short, (torch.ones_like(short["v"]), torch.zeros_like(p["S0"])), chunk=16)
    assert torch.equal(whole["dS0"], alone["dS0"])


# ---- bit for bit ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("first", [1, 16, 21])
def test_the_future_changes_no_bit_of_the_past_and_sends_no_gradient(kind, first):
    p = problem(kind, 23, 3, 5, H=1)
    del p["S0"]
    per_token = [n for n in p if n in TOKENS]
    changed = p | {n: torch.cat([p[n][:, :first], -1e4 * p[n][:, first:].abs()], 1) for n in per_token}
    before, after = (FUNCTIONS[kind](**x, chunk=16)[0] for x in (p, changed))
    assert torch.equal(before[:, :first], after[:, :first])
    assert not torch.equal(before[:, first:], after[:, first:])
    short = FUNCTIONS[kind](**(p | {n: p[n][:, :first] for n in per_token}), chunk=16)[0]
    assert torch.equal(before[:, :first], short)
    dO = torch.where(torch.arange(23, device=DEVICE)[:, None, None] < first, torch.ones_like(before), 0.0)
    grads = evaluated(FUNCTIONS[kind], p, (dO, torch.zeros(1, 1, 3, 5, device=DEVICE)), chunk=16)
    for n in per_token:
        assert not grads["d" + n][:, first:].any()
        assert grads["d" + n][:, : max(first, 2)].any() or first == 1


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_resuming_between_chunks_changes_no_bit(kind):
    p = problem(kind, 21, 3, 5, H=1)
    O, S = FUNCTIONS[kind](**p, chunk=16)
    for cut in (0, 16, 21):
        head, tail = (
            {n: x[:, part] if n in TOKENS else x for n, x in p.items()} for part in (slice(cut), slice(cut, None))
        )
        O1, S1 = FUNCTIONS[kind](**head, chunk=16)
        O2, S2 = FUNCTIONS[kind](**(tail | {"S0": S1}), chunk=16)
        assert torch.equal(torch.cat([O1, O2], 1), O)
        assert torch.equal(S2, S)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_sequences_and_heads_do_not_see_each_other(kind):
    p = problem(kind, 5, 3, 4, B=2, H=2)
    together = evaluated(FUNCTIONS[kind], p, chunk=16)
    for b, h in ((0, 1), (1, 0)):  # each sequence and each head
        cut = {n: x[b : b + 1, :, h : h + 1] for n, x in p.items() if n in TOKENS}
        cut |= {n: p[n][h : h + 1] for n in ("h", "G") if n in p}
        alone = evaluated(FUNCTIONS[kind], cut | {"S0": p["S0"][b : b + 1, h : h + 1], "scale": 0.625}, chunk=16)
        for n, x in alone.items():
            if n in ("dh", "dG"):
                continue  # shared by the batch
            y = together[n][b : b + 1]
            assert torch.equal(x, y[:, h : h + 1] if n in ("S", "dS0") else y[:, :, h : h + 1]), n


def strided(x):
    """The same values behind other strides: axes reversed, every second element, an offset."""
    shape = [2 * n for n in reversed(x.shape)]
    y = torch.full(shape, math.nan, dtype=x.dtype, device=x.device).permute(*reversed(range(x.dim())))
    return y[tuple(slice(1, None, 2) for _ in shape)].copy_(x)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_strides_of_inputs_and_cotangents_change_no_bit(kind):
    p = problem(kind, 5, 3, 4, B=2)
    dO, dS = torch.randn(2, 5, 2, 4, device=DEVICE), torch.randn(2, 2, 3, 4, device=DEVICE)
    leaves = {n: x.clone().requires_grad_() if torch.is_tensor(x) else x for n, x in p.items()}
    results = []
    for arrange in (lambda x: x, strided):
        arranged = {n: arrange(x) if torch.is_tensor(x) else x for n, x in leaves.items()}
        O, S = FUNCTIONS[kind](**arranged, chunk=16)
        tensors = [x for x in leaves.values() if torch.is_tensor(x)]
        results.append([O, S, *torch.autograd.grad((O, S), tensors, (arrange(dO), arrange(dS)))])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    p = problem(kind, 5, 3, 4)
    flat = [x[:1, :1, :1, :1].expand(1, *x.shape[1:]) for x in (dO, dS)]
    expanded, full = (evaluated(FUNCTIONS[kind], p, c, chunk=16) for c in (flat, [x.contiguous() for x in flat]))
    assert all(torch.equal(expanded[n], full[n]) for n in full)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_everything_is_written_and_nothing_unwritten_is_read(kind, monkeypatch):
    problems = [problem(kind, T, 3, 5, H=1) for T in (0, 19)]
    clean = [evaluated(FUNCTIONS[kind], p, chunk=16) for p in problems]
    empty, poisoned = torch.empty, []

    def poison(*args, **options):
        poisoned.append(args)
        return empty(*args, **options).fill_(math.nan)

    monkeypatch.setattr(torch, "empty", poison)
    for p, want in zip(problems, clean, strict=True):
        got = evaluated(FUNCTIONS[kind], p, chunk=16)
        assert all(torch.equal(got[n], want[n]) for n in want)
    assert len(poisoned) >= 2 * 9


# ---- experts -------------------------------------------------------------------------------------------------------


def experts(X, T=18, D=3, B=1, H=2, dtype=torch.float32):
    g = torch.Generator().manual_seed(3)
    tokens = {n: torch.randn(B, T, H, D, generator=g).to(DEVICE, dtype) for n in ("q", "k", "v")}
    W, a = torch.randn(H, D, X, generator=g).to(DEVICE), torch.rand(H, X, generator=g).to(DEVICE)
    return tokens | {"W": W, "a": a, "S0": torch.randn(B, H, X, D, D, generator=g).to(DEVICE)}


def single(p, j):
    """TALA with the decay of expert j: h = 200 makes omega one."""
    tokens = {n: p[n] for n in ("q", "k", "v")}
    return subject.tala(**tokens, h=torch.full_like(p["a"][:, j], 200.0), G=p["a"][:, j], S0=p["S0"][:, :, j], chunk=16)


def test_one_expert_is_tala():
    p = experts(1)
    Y, S = subject.mome(**p, chunk=16)
    O, S1 = single(p, 0)
    assert torch.equal(Y, O)
    assert torch.equal(S[:, :, 0], S1)


def test_a_router_that_is_certain_reads_one_expert():
    p = experts(3)
    p["k"], p["v"] = p["k"].abs() + 0.5, p["v"].abs() + 0.5
    p["W"] = torch.tensor([0.0, 1e4, 0.0], device=DEVICE).expand_as(p["W"])
    Y, S = subject.mome(**p, chunk=16)
    assert torch.equal(Y, single(p, 1)[0])
    for j in range(3):
        assert torch.equal(S[:, :, j], single(p, j)[1])


def test_experts_have_no_order():
    p = experts(2)
    swapped = p | {"W": p["W"].flip(-1), "a": p["a"].flip(-1), "S0": p["S0"].flip(2)}
    (Y, S), (Y2, S2) = (subject.mome(**x, chunk=16) for x in (p, swapped))
    assert torch.equal(Y, Y2)
    assert torch.equal(S, S2.flip(2))


def test_half_precision_experts_are_mixed_in_float32():
    p = experts(3, dtype=torch.float16)
    Y, S = subject.mome(**p, chunk=16)
    wide = subject.mome(**(p | {n: p[n].float() for n in ("q", "k", "v")}), chunk=16)
    assert Y.dtype == torch.float16
    assert torch.equal(Y, wide[0].half())
    assert torch.equal(S, wide[1])


# ---- arguments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "how", "error", "words"),
    [
        ("q", lambda x: x.int(), TypeError, "q has dtype torch.int32; expected float32"),
        ("v", lambda x: x.double(), TypeError, "v has dtype torch.float64"),
        ("k", lambda x: x.half(), TypeError, "k has dtype torch.float16, but q has torch.float32"),
        ("q", lambda x: x.tolist(), TypeError, "q is a list; expected a torch tensor"),
        ("k", lambda x: x[:, :3], ValueError, r"k has shape \(1, 3, 2, 3\): axis T is 3, but elsewhere 4"),
        ("v", lambda x: x[0], ValueError, r"v has shape \(4, 2, 5\); expected \(B, T, H, V\)"),
        ("h", lambda x: x[:1], ValueError, r"h has shape \(1,\): axis H is 1, but elsewhere 2"),
        ("G", lambda x: None, TypeError, "G is a NoneType"),
        ("S0", lambda x: x.mT, ValueError, r"S0 has shape \(1, 2, 5, 3\)"),
        ("G", lambda x: x.to("meta"), ValueError, "G is on meta, but q is on"),
        ("chunk", lambda x: 48, ValueError, "chunk is 48; expected one of 16, 32"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(name, how, error, words):
    p = problem("constant", 4, 3, 5) | {"chunk": 16}
    p[name] = how(p[name])
    with pytest.raises(error, match=words):
        subject.tala(**p)
