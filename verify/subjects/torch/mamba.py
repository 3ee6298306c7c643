"""Mamba's selective state space in PyTorch: chunkwise, by a scan, and as a convolution where nothing is selected.

Source: survey, Mamba; Gu and Dao 2023 (2) to (4), as in the reference: B bar is delta phi1(delta A) B for a held token
(`zoh`), delta B in the released code (`euler`).

    letter    paper   shape             meaning
    u y       x y     (B, T, D)         tokens before and after
    delta     Delta   (B, T, D)         steps, positive
    A         A       (D, N)            rates, negative
    B C       B C     (B, T, N)         weights of what the state takes in and gives out
    skip      D       (D,)              weight of u in y
    h0 h      h       (B, D, N)         state before the first and after the last token
    F                 as delta A        B bar = F B
    P                 (.., C+1, C+1)    decay from after token m to after token n of a chunk of C
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from mixproof.verify import implements
from mixproof.verify.subjects.torch import _arguments as arguments
from mixproof.verify.subjects.torch import _linear as linear

_AXES = {"u": "BTD", "delta": "BTD", "A": "DN", "B": "BTN", "C": "BTN", "skip": "D", "h0": "BDN"}
_OF_ALL_TOKENS = _AXES | {"delta": "D", "B": "N", "C": "N"}
_declared = functools.partial(implements, layout="B T D", dtypes=("float64", "float32"), devices=("cpu", "cuda"))


@_declared("mamba.zoh", name="torch.chunkwise", dtypes=("float64", "float32", "bfloat16"), chunk=16)
def chunkwise_zoh(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, skip: Tensor, h0: Tensor | None = None, chunk: int = 16
) -> tuple[Tensor, Tensor]:
    """y = M u inside chunks, M the semiseparable matrix of each channel; the state across them."""
    return _run(_chunkwise, _AXES, (u, delta, A, B, C, skip, h0), held, chunk)


@_declared("mamba.zoh", name="torch.scan")
def scan_zoh(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, skip: Tensor, h0: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Every state at once, in log2 T steps. Holds B T D N numbers."""
    return _run(scan, _AXES, (u, delta, A, B, C, skip, h0), held)


@_declared("mamba.euler", name="torch.scan", dtypes=("float64", "float32", "bfloat16"))
def scan_euler(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, skip: Tensor, h0: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`scan_zoh` with B bar = delta B."""
    return _run(scan, _AXES, (u, delta, A, B, C, skip, h0), at_once)


@_declared("mamba.lti", name="torch.convolution", chunk=16)
def convolution(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, skip: Tensor, h0: Tensor | None = None, chunk: int = 16
) -> tuple[Tensor, Tensor]:
    """By the kernel C a^j F B inside chunks, the state across them; delta is (D,), B and C are (N,)."""
    return _run(_convolution, _OF_ALL_TOKENS, (u, delta, A, B, C, skip, h0), held, chunk)


# ---------------------------------------------------------------------------------------------------- how tokens enter
class _Phi1(torch.autograd.Function):
    """(exp(z) - 1) / z, and its derivative with all digits, which the quotient rule loses near zero."""

    @staticmethod
    def forward(z):
        return torch.where(z == 0, 1.0, z.expm1() / torch.where(z == 0, 1.0, z))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx, *cotangents):
        z, y = ctx.saved_tensors
        near = z.abs() < 1 / 4
        x, series = torch.where(near, z, 0.0), torch.zeros_like(z)
        for n in range(13, -1, -1):
            series = 1 / (n + 2) + x / (n + 1) * series
        return cotangents[0] * torch.where(near, series, (z.exp() - y) / torch.where(near, 1.0, z))


def held(delta: Tensor, A: Tensor) -> Tensor:
    """F of a token that is held for the step: delta phi1(delta A).  (..., D), (D, N) -> (..., D, N)"""
    return delta[..., None] * _Phi1.apply(delta[..., None] * A)


def at_once(delta: Tensor, A: Tensor) -> Tensor:
    """F of a token that comes in at once, as in the released code: delta."""
    return delta[..., None].expand(*delta.shape, A.shape[1])


# --------------------------------------------------------------------------------------------------------------- forms
Gain = Callable[[Tensor, Tensor], Tensor]


def scan(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, skip: Tensor, h0: Tensor, gain: Gain
) -> tuple[Tensor, Tensor]:
    """y and h of wide tensors, each of them given."""
    W = gain(delta, A) * u[..., None] * B[:, :, None]
    states = linear.scan((delta[..., None] * A).exp()[:, None], W[:, None], h0[:, None])[:, 0]
    return (states[:, 1:] * C[:, :, None]).sum(-1) + skip * u, states[:, -1].clone()


def _chunkwise(u, delta, A, B, C, skip, h, gain, chunk):
    z, K = delta[..., None] * A, gain(delta, A) * B[:, :, None]
    segment = linear.segments(z.permute(0, 2, 3, 1), log=True)
    rows = []
    for c in arguments.slices(u.shape[1], chunk):
        P = segment(c)
        M = torch.einsum("btn, bdnts, bsdn -> btsd", C[:, c], P[..., 1:, 1:], K[:, c])
        M = M.masked_fill(M.new_ones(M.shape[1:3], dtype=torch.bool).triu(1)[..., None], 0)
        read = torch.einsum("btn, bdnt, bdn -> btd", C[:, c], P[..., 1:, 0], h)
        rows.append((M * u[:, None, c]).sum(2) + read + skip * u[:, c])
        written = P[..., -1, 1:] * (K[:, c] * u[:, c, :, None]).permute(0, 2, 3, 1)
        h = P[..., -1, 0] * h + written.sum(-1)
    return torch.cat(rows, dim=1), h


def _convolution(u, delta, A, B, C, skip, h, gain, chunk):
    n = torch.arange(min(u.shape[1], chunk) + 1, device=u.device)
    a = (n[:, None, None] * (delta[:, None] * A)).exp()  # a^0, a^1, ...
    K = a[:-1] * gain(delta, A) * B
    M = (K * C).sum(-1)[(n[1:, None] - n[1:]).clamp(min=0)]
    M = M.masked_fill((n[:, None] < n)[1:, 1:, None], 0)
    rows = []
    for c in arguments.slices(u.shape[1], chunk):
        b = c.stop - c.start
        inside = torch.einsum("tsd, bsd -> btd", M[:b, :b], u[:, c])
        rows.append(inside + torch.einsum("tdn, bdn, n -> btd", a[1 : b + 1], h, C) + skip * u[:, c])
        h = a[b] * h + torch.einsum("tdn, btd -> bdn", K[:b].flip(0), u[:, c])
    return torch.cat(rows, dim=1), h


def _run(form, axes, tensors, *options):
    """y in the dtype of u and a wide h, of tensors that are checked; an absent state is zero."""
    sizes = arguments.checked(
        axes, dict(zip(axes, tensors, strict=True)), ("h0",), [n for n in axes if "B" not in axes[n]]
    )
    wide, (u, *rest, h0) = arguments.widest(*tensors), tensors
    with arguments.no_autocast(u):
        h = u.new_zeros(sizes["B"], sizes["D"], sizes["N"], dtype=wide) if h0 is None else h0.to(wide)
        y, h = form(u.to(wide), *(x.to(wide) for x in rest), h, *options)
    return y.to(u.dtype), h
