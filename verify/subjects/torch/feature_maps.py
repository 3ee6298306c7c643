"""The two readings of TALA's feature map in PyTorch.

Source: MixFormer paper (11), per token and head. In x (B, T, H, K) rows are tokens; the largest entry of a row is taken
out first, so that neither exp nor the squares of a norm overflow. Both maps are unchanged by what is taken out, hence
it has no gradient.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from mixproof.verify import implements
from mixproof.verify.subjects.torch._arguments import no_autocast, not_negative, widest
from mixproof.verify.subjects.torch._linear import arranged

_declared = functools.partial(implements, name="torch.eager", dtypes=("float64", "float32"), devices=("cpu", "cuda"))


@_declared("tala.phi_a")
def phi_a(x: Tensor) -> Tensor:
    """exp(x) / ||exp(x)||, row by row.  (B, T, H, K) -> (B, T, H, K).  (11)"""
    arranged({"x": "BTHK"}, x)
    with no_autocast(x):
        x_ = x.to(widest(x))
        e = (x_ - x_.detach().amax(-1, keepdim=True)).exp()
        return (e / torch.linalg.vector_norm(e, dim=-1, keepdim=True)).to(x.dtype)


@_declared("tala.phi_b")
def phi_b(x: Tensor, norm_eps: float = 1e-12) -> Tensor:
    """exp(x / max(||x||, norm_eps)), row by row.  (B, T, H, K) -> (B, T, H, K).  (11)"""
    arranged({"x": "BTHK"}, x)
    not_negative(norm_eps=norm_eps)
    with no_autocast(x):
        return unit(x.to(widest(x)), norm_eps).exp().to(x.dtype)


def unit(x: Tensor, eps: float) -> Tensor:
    """x / max(||x||, eps) over the last axis."""
    top = x.detach().abs().amax(-1, keepdim=True)
    top = torch.where(top == 0, 1.0, top)
    y = x / top
    return y / torch.maximum(torch.linalg.vector_norm(y, dim=-1, keepdim=True), eps / top)
