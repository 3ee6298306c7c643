"""What the gate does not ask of the MixFormer block in PyTorch: its parameters, autocast, what it refuses."""

from __future__ import annotations

import math

import pytest
import torch

from mixproof.reference import operator
from mixproof.verify.subjects.torch.mixformer import MixFormerBlock, block

B, T, D, F = 2, 9, 6, 10


def made(**options):
    torch.manual_seed(0)
    return MixFormerBlock(**{"d_model": D, "heads": 3, "hidden": F, "chunk": 4} | options)


def tokens(dtype=torch.float32):
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(1), dtype=dtype)


def test_parameters_are_those_of_the_operator():
    names = [x.name for x in operator("mixformer").inputs if x.role == "parameter"]
    layer = made()
    assert sorted(n for n, _ in layer.named_parameters()) == sorted(names)
    assert sum(p.numel() for p in layer.parameters()) == 4 * D + 4 * D**2 + 2 * D * F


def test_module_is_the_function():
    layer, X = made(eps=0.25, norm_eps=0.5), tokens()
    want = block(X, **dict(layer.named_parameters()), heads=3, eps=0.25, norm_eps=0.5, chunk=4)
    assert torch.equal(layer(X), want)
    for changed in (made(), made(eps=0.25), made(eps=0.25, norm_eps=0.5, heads=2)):
        assert not torch.equal(changed(X), want)


def test_a_new_block_has_norms_without_effect_and_weights_in_range():
    layer = made()
    for i in ("1", "2"):
        assert torch.equal(getattr(layer, f"gain{i}"), torch.ones(D))
        assert torch.count_nonzero(getattr(layer, f"bias{i}")) == 0
    for n in ("W_Q", "W_K", "W_V", "W_O", "W_1", "W_2"):
        W = getattr(layer, n)
        most = W.detach().abs().max()
        assert 0.8 / math.sqrt(len(W)) < most <= 1 / math.sqrt(len(W))
    assert made(hidden=None).W_1.shape == (D, 4 * D)


def test_every_parameter_learns():
    layer = made()
    layer(tokens()).square().sum().backward()
    assert all(torch.count_nonzero(p.grad) == p.numel() for p in layer.parameters())


def test_autocast_rounds_nothing():
    layer, X = made(), tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        Y = layer(X)
    assert torch.equal(Y, layer(X))


def test_half_precision_tokens_beside_wide_parameters():
    layer, X = made(), tokens(torch.bfloat16)
    Y = layer(X)
    assert Y.dtype == torch.bfloat16
    assert torch.equal(Y, layer(X.float()).bfloat16())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 4}, "heads is 4; it must divide the 6 channels"),
        ({"d_model": 0}, "d_model is 0; it must be at least 1"),
        ({"hidden": 0}, "hidden is 0; it must be at least 1"),
        ({"chunk": 0}, "chunk is 0; it must be at least 1"),
        ({"eps": -1.0}, "eps is -1.0; it must be finite and not negative"),
        ({"norm_eps": math.nan}, "norm_eps is nan; it must be finite and not negative"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        made(**options)


def test_arguments_that_make_no_sense():
    layer, X = made(), tokens()
    parameters = dict(layer.named_parameters())
    for call, message in (
        (lambda: layer(X[0]), r"X has shape \(9, 6\); expected axes \(B, T, D\)"),
        (lambda: layer(X[..., :4]), r"gain1 has shape \(6,\): axis D is 6, but X has D=4"),
        (lambda: block(X, **parameters, heads=4), "heads is 4; it must divide the 6 channels"),
        (
            lambda: block(X, **parameters | {"W_2": layer.W_1}),
            r"W_2 has shape \(6, 10\): axis F is 6, but W_1 has F=10",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
