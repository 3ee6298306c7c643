"""Time-aware linear attention in Triton, chunkwise, both directions; its relatives with other scalar decays.

Source: MixFormer (13) to (16), with the decays that (16) lacks; Eq 17, 18 for the mixture of memory experts.

    S_t = a_t S_{t-1} + k_t^T v_t       o_t = scale q_t S_t

Each direction has two passes over chunks of tokens: one kernel carries the state from chunk to chunk, another reads all
chunks at once, each from the state before it. Time reversed, TALA is TALA again: backwards the same two kernels, with q
and k exchanged, carry the cotangent R of the state and read dv from it. A third forms dq, dk and the gradient da of the
decays from S and R of each chunk: no sum along the sequence that would cancel, no division by a decay, which may be
zero.

The kernels compute in float32 (dot products in full precision, "ieee"); there are no atomics: the same bits every run.
What a token reads does not depend on T, B or H. Autograd keeps the inputs and the states before the chunks.

    letter  shape               meaning
    S R     (B, H, N, K, V)     states before each of N chunks, and their cotangents after each
    kind                        "constant": a (H,); "log": log a (B, T, H); "signed": a (B, T, H)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from mixproof.verify import implements
from mixproof.verify.subjects.triton import tala_kernels as kernels
from mixproof.verify.subjects.triton.arguments import checked, launching
from mixproof.verify.subjects.triton.tala_kernels import triton

Tensor = torch.Tensor
CHUNKS = (16, 32)  # a chunk is a tile; wider ones spill registers
DECLARED = {
    "name": "triton.chunkwise",
    "layout": "B T H D",
    "dtypes": ("float32", "float16", "bfloat16"),
    "dot": "float32",
    "devices": ("cpu", "cuda"),
    "requires": ("triton",),
    "slow": True,
    "chunk": 32,
    "chunks": CHUNKS,
    "at_least": {},
}


@implements("tala", **DECLARED)
def tala(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    h: Tensor,
    G: Tensor,
    scale: float = 1.0,
    S0: Tensor | None = None,
    chunk: int = 32,
) -> tuple[Tensor, Tensor]:
    """a = (1 - e^-h) G for h, G (H,), any real G; q, k (B, T, H, K), v (B, T, H, V), S0 (B, H, K, V) -> O (B, T, H, V)
    and the float32 state S. A chunk is a tile: 16 or 32 tokens."""
    _check(chunk, _tokens(q, k, v) | {"h": (h, "H"), "G": (G, "H"), "S0": (S0, "BHKV")})
    # In float64: late heads have decays that float32 takes for one.
    return _Chunkwise.apply(q, k, v, -torch.expm1(-h.double()) * G.double(), S0, scale, "constant", chunk)


@implements("tala.time_varying", **DECLARED)
def time_varying(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, scale: float = 1.0, S0: Tensor | None = None, chunk: int = 32
) -> tuple[Tensor, Tensor]:
    """A decay a (B, T, H) for every token, any real; the rest as in `tala`."""
    _check(chunk, _tokens(q, k, v) | {"a": (a, "BTH"), "S0": (S0, "BHKV")})
    return _Chunkwise.apply(q, k, v, a, S0, scale, "signed", chunk)


@implements("gated_linear_attention.simple", **DECLARED)
def simple_gated_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float = 1.0, S0: Tensor | None = None, chunk: int = 32
) -> tuple[Tensor, Tensor]:
    """a_t = exp(g_t) for g (B, T, H); the rest as in `tala`. g = -inf is a decay of zero."""
    _check(chunk, _tokens(q, k, v) | {"g": (g, "BTH"), "S0": (S0, "BHKV")})
    return _Chunkwise.apply(q, k, v, g, S0, scale, "log", chunk)


@implements("mome", **DECLARED)
def mome(
    q: Tensor, k: Tensor, v: Tensor, W: Tensor, a: Tensor, S0: Tensor | None = None, chunk: int = 32
) -> tuple[Tensor, Tensor]:
    """y = q sum_j E^j S^j, S^j decaying by a_j: q, k, v (B, T, H, D), W (H, D, X), a (H, X), S0 (B, H, X, D, D) ->
    Y (B, T, H, D) and S. Experts are heads of the kernels; the router E = softmax((k o v) W) is PyTorch's."""
    tokens = {"q": (q, "BTHD"), "k": (k, "BTHD"), "v": (v, "BTHD")}
    _check(chunk, tokens | {"W": (W, "HDX"), "a": (a, "HX"), "S0": (S0, "BHXDD")})
    # widened once: the gradient of a key that goes two ways is rounded once
    wide = [x.float() for x in (q, k, v)]
    E = torch.softmax(torch.einsum("bthd,hdx->bthx", wide[1] * wide[2], W.float()), -1)
    experts = [x.repeat_interleave(a.shape[1], 2) for x in wide]
    states = None if S0 is None else S0.flatten(1, 2)
    O, S = _Chunkwise.apply(*experts, a.flatten().double(), states, 1.0, "constant", chunk)
    Y = (O.unflatten(2, a.shape) * E[..., None]).sum(3)
    return Y.to(q.dtype), S.unflatten(1, a.shape)


class _Chunkwise(torch.autograd.Function):
    """O and S for decays of one `kind`."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        S0: Tensor | None,
        scale: float,
        kind: str,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        with launching(q):
            call = _call(decay, scale, kind, chunk)
            states, S = _states(call, k, v, S0, reverse=False)
            O = _read(call, q, k, v, states, reverse=False)
        ctx.save_for_backward(q, k, v, decay, states)
        ctx.options, ctx.state = (scale, kind, chunk), S0 if S0 is None else S0.dtype
        return O, S

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dO: Tensor, dS: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, decay, states = ctx.saved_tensors
        with launching(q):
            call = _call(decay, *ctx.options)
            cotangents, dS0 = _states(call, q, dO, dS, reverse=True)
            dv = _read(call, k, q, dO, cotangents, reverse=True)
            dq, dk, da = _gradients(call, q, k, v, dO, states, cotangents)
            da = da.sum((0, 2), dtype=torch.float64) if call.kind == "constant" else da.mT
        return dq, dk, dv, da.to(decay.dtype), None if ctx.state is None else dS0.to(ctx.state), None, None, None


# ---- launches ------------------------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """What all launches of a call share; strides of the decay are those of sequences, tokens, heads."""

    decay: Tensor
    strides: tuple[int, ...]
    scale: float
    kind: str
    chunk: int


def _call(decay: Tensor, scale: float, kind: str, chunk: int) -> _Call:
    strides = decay.stride()
    if kind == "constant":
        # One rounding of each power, and no logarithm: a decay may be zero or negative. Tokens are no steps of this.
        decay = (decay[:, None] ** torch.arange(chunk + 1, device=decay.device)).float()
        strides = (0, 0, decay.stride(0))
    return _Call(decay, strides, float(scale), kind, chunk)


def _states(call: _Call, x: Tensor, y: Tensor, initial: Tensor | None, reverse: bool) -> tuple[Tensor, Tensor]:
    """The states (B, H, N, K, V) before the chunks and (B, H, K, V) after the last; or their cotangents, backwards."""
    (B, T, H, K), V = x.shape, y.shape[-1]
    states = torch.empty(B, H, triton.cdiv(T, call.chunk), K, V, dtype=torch.float32, device=x.device)
    final = torch.empty(B, H, K, V, dtype=torch.float32, device=x.device)
    tensors = x, y, call.decay, initial, states, final
    strides = (*call.strides, *((0, 0, 0, 0) if initial is None else initial.stride()))
    programs = B * H * _tiles(K) * _tiles(V)
    _start(kernels.states_kernel, programs, call, tensors, (x, y), strides, (H, T, K, V), reverse)
    return states, final


def _read(call: _Call, x: Tensor, y: Tensor, z: Tensor, states: Tensor, reverse: bool) -> Tensor:
    """What x reads: of y and z inside chunks, of the states across them."""
    (B, T, H, K), V, chunks = x.shape, z.shape[-1], states.shape[2]
    out = torch.empty(B, T, H, V, dtype=x.dtype, device=x.device)
    tensors = x, y, z, call.decay, states, out
    programs = B * H * chunks * _tiles(V)
    _start(kernels.read_kernel, programs, call, tensors, (x, y, z, out), call.strides, (H, T, K, V), reverse)
    return out


def _gradients(
    call: _Call, q: Tensor, k: Tensor, v: Tensor, dO: Tensor, states: Tensor, cotangents: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk (B, T, H, K) and da (B, H, T)."""
    (B, T, H, K), V, chunks = q.shape, v.shape[-1], states.shape[2]
    dq, dk = (torch.empty(B, T, H, K, dtype=q.dtype, device=q.device) for _ in range(2))
    da = torch.empty(B, H, _tiles(K), T, dtype=torch.float32, device=q.device)
    tensors = q, k, v, dO, call.decay, states, cotangents, dq, dk, da
    programs = B * H * chunks * _tiles(K)
    _start(kernels.gradient_kernel, programs, call, tensors, (q, k, v, dO, dq), call.strides, (H, T, K, V))
    return dq, dk, da.sum(2)


WIDTH = 32  # channels of a tile; wider ones spill registers on sm_90: tests/test_compiled.py


def _tiles(n: int) -> int:
    return triton.cdiv(n, WIDTH)


def _width(n: int) -> int:
    """tl.dot wants at least 16."""
    return WIDTH if n > 16 else 16


def _start(
    kernel: Any,
    programs: int,
    call: _Call,
    tensors: tuple[Tensor | None, ...],
    strided: tuple[Tensor, ...],
    strides: tuple[int, ...],
    sizes: tuple[int, int, int, int],
    *flags: bool,
) -> None:
    _, T, K, V = sizes
    steps = (n for x in strided for n in x.stride())
    counts = triton.cdiv(T, call.chunk), _tiles(K), _tiles(V)
    widths = call.chunk, _width(K), _width(V)
    if programs:
        kernel[(programs,)](
            *tensors, *steps, *strides, call.scale, *sizes, *counts, call.kind, *flags, *widths, num_warps=8
        )


# ---- arguments -----------------------------------------------------------------------------------------------------


def _tokens(q: Tensor, k: Tensor, v: Tensor) -> dict[str, tuple[Tensor | None, str]]:
    return {"q": (q, "BTHK"), "k": (k, "BTHK"), "v": (v, "BTHV")}


def _check(chunk: int, arguments: Mapping[str, tuple[Tensor | None, str]]) -> None:
    """Raises TypeError or ValueError naming the argument that does not fit: tensors come with their axes."""
    if chunk not in CHUNKS:
        raise ValueError(f"chunk is {chunk!r}; expected one of {', '.join(str(n) for n in CHUNKS)}")
    checked(arguments, states=("S0",))
