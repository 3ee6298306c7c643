"""Released implementations: what holds for them, what does not, and that the gate tells which.

The gate judges the adapters themselves. Here: that they name what they need, that a wrong reading of a convention would
be seen, how a package's own ways relate to the operators, and defects, each with its smallest case.
"""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

if find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mixproof.reference import operator as find_operator
from mixproof.verify import implements
from mixproof.verify.case import Case
from mixproof.verify.declare import ATTRIBUTE
from mixproof.verify.judge import PROFILES, judge
from mixproof.verify.laws import law
from mixproof.verify.subject import Subject, quiet
from mixproof.verify.subjects.thirdparty import (
    linformer_attention,
    mamba_py,
    titans_memory,
    torch_gqa,
    transformers_deepseek,
    transformers_mamba,
    transformers_zaya,
    x_transformers_sigmoid,
)
from mixproof.verify.subjects.thirdparty._modules import halves, pairs, turns
from mixproof.verify.subjects.triton import interpreter

ADAPTERS = (
    linformer_attention,
    mamba_py,
    titans_memory,
    torch_gqa,
    transformers_deepseek,
    transformers_mamba,
    transformers_zaya,
    x_transformers_sigmoid,
)

FAR = 10.0  # error / bound of what is another function


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


def declared() -> dict[str, Subject]:
    functions = [f for module in ADAPTERS for f in vars(module).values() if hasattr(f, ATTRIBUTE)]
    subjects = [Subject(d, f) for f in functions for d in getattr(f, ATTRIBUTE)]
    return {str(s): s for s in subjects}


def alike(name: str, function: Callable[..., Any], **changes: Any) -> Subject:
    """Another function, declared as the witness of that name, but for the changes."""
    return Subject(dataclasses.replace(declared()[name].declaration, **changes), function)


def drawn(subject: Subject, sizes: dict[str, int], **fields: str) -> Case:
    """A case in the first dtype that it takes."""
    domain = subject.domain()
    dtype, parameters = domain.dtypes[0]
    return domain.case({"H": 1, "V": 1} | sizes, dtype=dtype, parameters=parameters, **fields)


def ratio(subject: Subject, case: Case) -> float:
    """The worst error / bound of the law `forward`."""
    with quiet():
        evidence = law("forward").check(subject, case)
    assert not any(e.vacuous for e in evidence)
    return max(e.ratio for e in evidence)


# --------------------------------------------------------------------------------------------------------- declarations


def test_declarations() -> None:
    needed = {name: s.declaration.requires for name, s in declared().items()}
    assert needed == {
        "cca/transformers.ZayaAttention.sdpa": ("transformers",),
        "ccgqa/transformers.ZayaAttention": ("transformers",),
        "ccgqa/transformers.ZayaAttention.sdpa": ("transformers",),
        "linformer/linformer.LinformerSelfAttention": ("linformer",),
        "mamba.block/mambapy.MambaBlock.step": ("mambapy",),
        "mamba.block/transformers.MambaMixer": ("transformers",),
        "mamba.block/transformers.MambaMixer.decode": ("transformers",),
        "mamba.euler/mambapy.pscan": ("mambapy",),
        "mamba.euler/mambapy.selective_scan": ("mambapy",),
        "mamba.euler/transformers.mamba_selective_scan": ("transformers",),
        "mamba.euler/transformers.mamba_selective_state_update": ("transformers",),
        "mla/transformers.DeepseekV3Attention": ("transformers",),
        "mla/transformers.DeepseekV3Attention.sdpa": ("transformers",),
        "sigmoid_attention/x_transformers.Attend": ("x_transformers",),
        "softmax_attention.cached/torch.sdpa_gqa": (),
        "titans.chunked/titans_pytorch.NeuralMemory.batches": ("titans_pytorch",),
        "titans.linear/titans_pytorch.NeuralMemory": ("titans_pytorch",),
        "titans.mlp/titans_pytorch.NeuralMemory": ("titans_pytorch",),
    }


def test_adapters_import_nothing_but_torch() -> None:
    """So that listing and loading them needs none of the packages."""
    names = [m.__name__ for m in ADAPTERS]
    packages = ["linformer", "mambapy", "titans_pytorch", "transformers", "x_transformers"]
    code = f"import {', '.join(names)}, sys\nprint(*[p for p in {packages} if p in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == []


@pytest.mark.parametrize("name", [n for n, s in declared().items() if s.declaration.requires])
def test_a_missing_package_is_the_reason(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = declared()[name]
    (package,) = subject.declaration.requires
    monkeypatch.setattr("importlib.util.find_spec", lambda module, *rest: None if module == package else module)
    verdict = judge(subject, "forward", PROFILES["short"])
    assert (verdict.status, verdict.why) == ("not run", f"{package} is not installed")


# ---------------------------------------------------------------------------------------------------------------- Mamba

BLOCK = {"B": 1, "E": 3, "D": 4, "N": 2, "Q": 1}


@needs("transformers")
def test_what_is_released_is_not_the_zero_order_hold() -> None:
    """B bar is delta B in the code, (exp(delta A) - 1) / A B in the paper (4): far apart at steps of one half."""
    sizes = {"B": 1, "T": 5, "D": 3, "N": 2}
    name = "mamba.euler/transformers.mamba_selective_scan"
    scan, held = declared()[name], alike(name, transformers_mamba.scan, operator="mamba.zoh")
    assert ratio(scan, drawn(scan, sizes)) <= 1
    assert ratio(held, drawn(held, sizes)) > FAR


def in_two_calls(first: int, argument: str = "cache") -> Subject:
    """MambaMixer of the first tokens, then of the others on the cache that it left, handed over by that name."""

    def block(x: Tensor, **weights: Tensor) -> Tensor:
        given = tuple(weights.values())
        mixer, named = transformers_mamba._mixer(*transformers_mamba._sizes(*given)), transformers_mamba._named(*given)
        cache = import_module("transformers").DynamicCache(config=mixer.config)
        with torch.no_grad():
            calls = [
                functional_call(mixer, named, y, {argument: cache}) for y in x.split([first, x.shape[1] - first], 1)
            ]
        return torch.cat(calls, dim=1)

    return alike("mamba.block/transformers.MambaMixer", block)


@needs("transformers")
def test_a_second_call_of_several_tokens_forgets_the_state() -> None:
    """One token goes on from the cache. Of two, the convolution goes on from it, and the scan starts from zero."""
    case = drawn(in_two_calls(1), BLOCK | {"T": 3, "W": 2})
    assert ratio(in_two_calls(2), case) <= 1
    assert ratio(in_two_calls(1), case) > FAR

    def restarted(x: Tensor, **weights: Tensor) -> Tensor:
        first, u, h = transformers_mamba.decode_block(x[:, :1], **weights)
        return torch.cat([first, transformers_mamba.decode_block(x[:, 1:], **weights, u0=u, h0=0 * h)[0]], dim=1)

    subject = alike("mamba.block/transformers.MambaMixer", restarted)
    native = subject.prepare(subject.inputs(case), "float32")
    one, two = (s.invoke(native)["Y"] for s in (subject, in_two_calls(1)))
    whole = declared()["mamba.block/transformers.MambaMixer"].invoke(native)["Y"]
    assert (one - two).abs().max() < 2.0**-12 * (whole - two).abs().max()


@needs("transformers")
def test_a_cache_by_another_name_is_ignored() -> None:
    case = drawn(in_two_calls(2), BLOCK | {"T": 3, "W": 2})
    assert ratio(in_two_calls(2), case) <= 1
    assert ratio(in_two_calls(2, "past_key_values"), case) > FAR


@needs("mambapy")
def test_a_step_with_one_tap_reads_the_token_before() -> None:
    """No row of earlier tokens should be kept. One is, and is what the next step convolves: its own token is lost."""
    name = "mamba.block/mambapy.MambaBlock.step"
    step = alike(name, lambda **tensors: mamba_py.step(**tensors)[0], gradients=False)
    first, second, two = (drawn(step, BLOCK | {"T": T, "W": W}) for T, W in ((1, 2), (2, 2), (2, 2)))
    one = two.resized(W=1)
    assert ratio(step, first) <= 1
    assert ratio(step, second) <= 1
    assert ratio(step, one.resized(T=1)) <= 1
    assert ratio(step, one) > FAR


# ------------------------------------------------------------------------------------------------------------ attention


def test_a_mask_aligned_with_the_first_key_hides_the_cache() -> None:
    """What is_causal of scaled_dot_product_attention would do."""

    def aligned(q, k, v, scale=None, K0=None, V0=None):
        K, V = (x if old is None else torch.cat([old, x], dim=1) for old, x in ((K0, k), (V0, v)))
        heads = (x.transpose(1, 2) for x in (q.flatten(2, 3), K, V))
        O = nn.functional.scaled_dot_product_attention(*heads, is_causal=True, scale=scale, enable_gqa=True)
        return O.transpose(1, 2).unflatten(2, q.shape[2:4]), K, V

    name = "softmax_attention.cached/torch.sdpa_gqa"
    sizes = {"B": 1, "T": 3, "G": 2, "M": 2, "K": 3, "V": 2, "P": 2}
    for state, right in (("absent", True), ("random", False)):
        subject = alike(name, aligned)
        case = drawn(subject, sizes, state=state)
        assert ratio(declared()[name], case) <= 1
        assert (ratio(subject, case) <= 1) is right


@needs("x_transformers")
def test_x_transformers_deals_its_heads_out_to_the_groups_in_turn() -> None:
    """Head h reads group h mod G, where others, and the operator, have h // M."""

    def attend(in_turn: bool):
        def function(q, k, v, scale=None):
            heads = q.transpose(2, 3) if in_turn else q  # M, G
            theirs = import_module("x_transformers.attend").Attend(causal=True, scale=scale)
            O, _ = theirs(heads.flatten(2, 3).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
            O = O.transpose(1, 2).unflatten(2, heads.shape[2:4])
            return O.transpose(2, 3) if in_turn else O

        return alike("softmax_attention.cached/torch.sdpa_gqa", function, dtypes=("float32",))

    case = drawn(attend(True), {"B": 2, "T": 4, "G": 2, "M": 3, "K": 3, "V": 2})
    assert ratio(attend(True), case) <= 1
    assert ratio(attend(False), case) > FAR


@needs("transformers")
def test_deepseek_caches_rotary_keys_in_another_order() -> None:
    """Of four channels, 0 2 1 3; of two there is only one order."""

    def as_cached(qc, qr, c, kr, Uk, Uv, scale=None, base=10000.0, C0=None, Kr0=None):
        return transformers_deepseek.mla_sdpa(qc, qr, c, kr, Uk, Uv, scale, base, C0, halves(Kr0))[:1]

    name = "mla/transformers.DeepseekV3Attention.sdpa"
    subject = alike(name, as_cached)
    for R, right in ((2, True), (4, False)):
        sizes = {"B": 1, "T": 2, "N": 2, "K": 3, "R": R, "L": 3, "V": 2, "P": 2}
        assert (ratio(subject, drawn(subject, sizes, state="random")) <= 1) is right


@needs("transformers")
@pytest.mark.parametrize("base", [10000.0, 77.0])
def test_turns_are_those_of_deepseek(base: float) -> None:
    """Theirs are float32: an exponent, a power, its inverse and an angle are rounded, then a cosine and a sine."""
    theirs = import_module("transformers.models.deepseek_v3.modeling_deepseek_v3")
    rope = {"rope_type": "default", "rope_theta": base}
    rotary = theirs.DeepseekV3RotaryEmbedding(theirs.DeepseekV3Config(qk_rope_head_dim=8, rope_parameters=rope))
    x = torch.zeros(1, 40, 8)
    n = torch.arange(2, 42)[None]
    i = np.tile(np.arange(0, 8, 2), 2)
    for got, want in zip(rotary(x, n), turns(8, base, 2, 40, x.double()), strict=True):
        bound = 2.0**-24 * (n[0, :, None].numpy() * base ** (-i / 8) * (math.log(base) + 4) + 2)
        assert np.all(np.abs(got[0].double().numpy() - want[0].numpy()) <= bound)


def test_the_orders_of_channels_are_inverse() -> None:
    x = torch.arange(12.0).reshape(2, 6)
    assert halves(x)[0].tolist() == [0, 2, 4, 1, 3, 5]
    assert torch.equal(pairs(halves(x)), x)


@needs("transformers")
def test_zaya_multiplies_keys_by_its_temperature() -> None:
    """The paper has e^beta, the code a factor of either sign, zero before training: every key counts alike then."""
    name = "ccgqa/transformers.ZayaAttention.sdpa"

    def linear(beta, norm_eps, **rest):
        return transformers_zaya.sdpa(beta=beta.log1p(), **rest)  # e^beta = 1 + beta, the start of the series

    subject = alike(name, linear)
    sizes = {"B": 1, "T": 4, "G": 2, "M": 2, "K": 4, "V": 2, "W": 2, "J": 2}
    case = drawn(subject, sizes)
    assert ratio(declared()[name], case) <= 1
    assert ratio(subject, case) > FAR
    module = transformers_zaya.zaya("sdpa", 2, 2, 4, 2, 2)
    assert type(module.qk_norm)(module.config).temp.tolist() == [0, 0]


@needs("linformer")
def test_a_short_context_gets_the_first_mixing_weights() -> None:
    """Of projections for 9 tokens, 5 see the first 5 columns: a prefix of a sequence is another function of it."""
    name, longest = "linformer/linformer.LinformerSelfAttention", 9

    def for_longer(first: bool):
        def function(q, k, v, E_k, E_v, scale=None):
            E_k, E_v = (nn.functional.pad(E, (0, longest - 5) if first else (longest - 5, 0)) for E in (E_k, E_v))
            module = linformer_attention._module(v.shape[-1], len(E_k), longest)
            return functional_call(module, {"proj_k": E_k.T, "proj_v": E_v.T}, (q, torch.cat([k, v], dim=-1)))

        return alike(name, function, fixed={"scale": None})

    case = drawn(for_longer(True), {"B": 1, "T": 3, "S": 5, "K": 4, "V": 4, "X": 3})
    assert ratio(for_longer(True), case) <= 1
    assert ratio(for_longer(False), case) > FAR


# --------------------------------------------------------------------------------------------------------------- Titans


def titans(
    of: str, size: int | None, steps: Callable[[Tensor, int], Tensor] = lambda x, D: x, **options: Any
) -> Subject:
    """NeuralMemory with gradients at a new memory after `size` tokens, and the step sizes of a memory of D channels."""

    def function(q, k, v, alpha, eta, theta, M0=None, S0=None):
        D = k.shape[-1]
        M, S = ({"weights.0": k.new_zeros(len(k), D, D) if x is None else x.mT} for x in (M0, S0))
        gates = alpha, eta, steps(theta, D)
        y, M, S = titans_memory.run(titans_memory.memory(D, **options), q, k, v, *gates, size, M, S)
        return y, M["weights.0"].mT, S["weights.0"].mT

    name = {"titans.linear": "NeuralMemory", "titans.chunked": "NeuralMemory.batches"}[of]
    fixed = {"size": 16} if of == "titans.chunked" else {}
    return alike(f"{of}/titans_pytorch.{name}", function, fixed=fixed)


TITANS = {"B": 1, "T": 6, "K": 3, "V": 3}


@needs("titans_pytorch")
def test_the_default_takes_all_gradients_at_the_first_memory() -> None:
    """batch_size=None: it is `titans.chunked` with one chunk, not the recurrence of the paper."""
    frozen = titans("titans.chunked", None)
    case = drawn(frozen, TITANS, state="random")
    assert ratio(frozen, case) <= 1
    linear = titans("titans.linear", None)
    case = drawn(linear, TITANS, state="random")
    assert ratio(titans("titans.linear", 1), case) <= 1
    assert ratio(linear, case) > FAR
    assert ratio(linear, case.resized(T=1)) <= 1


@needs("titans_pytorch")
def test_the_default_loss_is_a_mean_over_channels() -> None:
    """Its gradient has the factor 2 / D: step sizes times D make up for it."""
    loss = titans_memory._package().default_loss_fn
    exact = titans("titans.linear", 1, lambda theta, D: D * theta, store_memory_loss_fn=loss)
    short = titans("titans.linear", 1, store_memory_loss_fn=loss)
    case = drawn(exact, TITANS | {"K": 4, "V": 4}, state="random")
    assert ratio(exact, case) <= 1
    assert ratio(short, case) > FAR


@needs("fla")
@pytest.mark.skipif(interpreter.unavailable() is not None, reason=str(interpreter.unavailable()))
def test_both_forms_of_fla_titans_are_off_by_the_same_parenthesis() -> None:
    """Their gradient of sum (LN(k M) w + b - (v - k))^2 has (D g) - (sum g) / (rstd D) where ((D g) - (sum g)) / (rstd
    D) belongs. Chunked and sequential form agree, as both have it: only a derivative taken otherwise tells."""
    from mixproof.verify.subjects.thirdparty.fla import ops

    ops("titans")
    naive = import_module("fla.ops.titans.naive")
    T, D, eps = 4, 5, 1e-6
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, T, 1, D, generator=generator) for _ in range(3))
    k = nn.functional.normalize(k, dim=-1)
    w, b = (torch.randn(1, D, generator=generator) for _ in range(2))
    M0 = torch.randn(1, 1, D, D, generator=generator)
    alpha, eta, theta = (torch.rand(1, T, 1, 1, generator=generator) / 8 + 1 / 16 for _ in range(3))

    def theirs(chunks: bool) -> Tensor:
        gates = theta.clone(), alpha.clone(), eta.clone()
        return naive.chunk_titans_linear_ref(q, k, v, w, b, *gates, eps, T, M0, True, chunks)[1][0, 0]

    def loss(M: Tensor, t: int) -> Tensor:
        read = nn.functional.layer_norm(k[0, t, 0] @ M, (D,), w[0], b[0], eps)
        return (read - (v - k)[0, t, 0]).square().sum()

    def printed(M: Tensor, t: int) -> Tensor:
        """The gradient as they have it, transcribed."""
        x = k[0, t, 0] @ M
        root = (x.var(unbiased=False) + eps).sqrt()
        normed = (x - x.mean()) / root
        g = (w[0] * normed + b[0] - (v - k)[0, t, 0]) * w[0]
        return 2 * torch.outer(k[0, t, 0], D * g - g.sum() / (root * D) - normed * (g * normed).sum() / (root * D))

    def last(gradient: Callable[[Tensor, int], Tensor]) -> Tensor:
        M, S = M0[0, 0], 0 * M0[0, 0]
        for t in range(T):  # all gradients at M0, as in one chunk of T
            S = eta[0, t] * S - theta[0, t] * gradient(M0[0, 0], t)
            M = (1 - alpha[0, t]) * M + S
        return M

    right = last(torch.func.grad(loss))
    apart = (theirs(True) - right).abs().max()
    assert apart > right.abs().max()
    assert (theirs(True) - theirs(False)).abs().max() < 2.0**-12 * apart
    assert (theirs(True) - last(printed)).abs().max() < 2.0**-12 * apart


# ------------------------------------------------------------------------------------------------------------ Performer


def performer_pytorch() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "distutils Version classes are deprecated", DeprecationWarning)
        return import_module("performer_pytorch.performer_pytorch")


@implements(
    "performer",
    name="performer_pytorch.FastAttention",
    layout="B T D",
    dtypes=("float64",),
    gradients=False,
    requires=("performer_pytorch",),
)
def fast_attention(q: Tensor, k: Tensor, v: Tensor, omega: Tensor) -> Tensor:
    """(B, T, K), (B, T, K), (B, T, V), (F, K) -> (B, T, V), causal."""
    module = performer_pytorch().FastAttention(q.shape[-1], nb_features=len(omega), causal=True)
    module.projection_matrix = omega
    return module(q[:, None], k[:, None], v[:, None])[:, 0]


@needs("performer_pytorch")
def test_the_gate_finds_the_leak_of_performer_pytorch() -> None:
    """Their keys are stabilised by the largest logit of the whole sequence, and a constant is added to features after
    that: a later key decides how much of an earlier one is left."""
    (declaration,) = getattr(fast_attention, ATTRIBUTE)
    verdict = judge(Subject(declaration, fast_attention), "causality", PROFILES["short"])
    assert verdict.status == "fail"
    assert "O before 1 when tokens from 1 on" in verdict.where
    assert "T=2" in verdict.case
    assert "T=1 passes" in verdict.context


@needs("performer_pytorch")
def test_a_later_key_makes_an_earlier_row_uniform() -> None:
    """The kernel of two features prefers the second key cosh(4) to 1, and so gives it 0.965. A third key of 40 leaves
    nothing of both but the constant, and each gets one half."""
    omega = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    q, v = 2 * torch.ones(1, 3, 1, dtype=torch.float64), torch.tensor([[[0.0], [1.0], [0.0]]], dtype=torch.float64)

    def second(last: float) -> tuple[float, float]:
        k = torch.tensor([[[-2.0], [2.0], [last]]], dtype=torch.float64)
        arrays = {"q": q[0].numpy(), "k": k[0].numpy(), "v": v[0].numpy(), "omega": omega.numpy()}
        return float(fast_attention(q, k, v, omega)[0, 1]), float(
            find_operator("performer").evaluate(arrays)["O"][1, 0]
        )

    (before, right), (after, still) = second(0.0), second(40.0)
    assert right == still
    assert abs(right - math.cosh(4) / (1 + math.cosh(4))) < 2.0**-40
    assert abs(before - right) < 2.0**-6
    assert abs(after - 1 / 2) < 2.0**-6


@needs("performer_pytorch")
def test_without_their_constants_the_last_row_is_the_performers() -> None:
    """Where there is no later key, a number for all keys drops out."""
    theirs = performer_pytorch()

    def bidirectional(q, k, v, omega):
        Q, K = (
            theirs.softmax_kernel(x[:, None], projection_matrix=omega, is_query=query, eps=0.0)
            for x, query in ((q, True), (k, False))
        )
        return theirs.linear_attention(Q, K, v[:, None])[:, 0]

    (declaration,) = getattr(fast_attention, ATTRIBUTE)
    subject = Subject(declaration, bidirectional)
    case = drawn(subject, {"B": 2, "T": 7, "K": 3, "V": 2, "F": 5})
    (evidence,) = law("forward").check(subject, case)
    ratios = evidence.ratios()
    assert np.max(ratios[:, :, -1]) <= 1
    assert np.min(np.max(ratios[:, :, :-1], axis=-1)) > FAR


@needs("performer_pytorch")
def test_their_orthogonal_directions_point_to_one_side() -> None:
    """Q of a QR without the signs of R: the first entry of the first direction is never positive."""
    draw = performer_pytorch().gaussian_orthogonal_random_matrix
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first = [float(draw(4, 4)[0, 0]) for _ in range(64)]
    assert max(first) <= 0 > min(first)
