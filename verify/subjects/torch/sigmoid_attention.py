"""Sigmoid attention in PyTorch: dense, block by block, and with the hybrid norm, also as a layer that decodes.

Source: survey, Sigmoid Attention; Ramapuram et al. 2024. A masked logit is -inf, the sigmoid of which is zero.

    letter  paper   shape                    meaning
    q k v   Q K V   (B, T, H, K or V)        tokens of the call; N heads where the operator holds them all
    b       b       (H,), or ()              bias of all logits of a head
    K0 Kc           (B, H, P or P + T, K)    keys before and after the call; V0 and Vc their values
    x Y             (B, T, E)                tokens of the residual stream
    W_O             (N, V, E)                output projection, head by head
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, nn

from mixproof.verify import implements
from mixproof.verify.subjects.torch import _arguments as arguments
from mixproof.verify.subjects.torch._linear import group_norm
from mixproof.verify.subjects.torch.cached_attention import Cache, joined, paired
from mixproof.verify.subjects.torch.softmax_attention import hidden, width_scale

_AXES = {"q": "BTHK", "k": "BTHK", "v": "BTHV", "b": "H", "K0": "BHPK", "V0": "BHPV"}
_HYBRID = {"x": "BTE", "q": "BTNK", "k": "BTNK", "v": "BTNV", "b": "", "W_O": "NVE", "gain": "E", "bias": "E"}
_declared = functools.partial(
    implements,
    dtypes=("float64", "float32", "bfloat16"),
    dot="float32",  # half-precision operands are widened before any product
    devices=("cpu", "cuda"),
    at_least={"T": 0},
)


@_declared("sigmoid_attention", name="torch.dense")
def dense(
    q: Tensor, k: Tensor, v: Tensor, b: Tensor,
    scale: float | None = None, K0: Tensor | None = None, V0: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """O = sigmoid(scale Q Kc^T + b) Vc over the keys until a token's own.  -> O (B, T, H, V), Kc, Vc"""
    return _run(_dense, q, k, v, b, scale, K0, V0)


@_declared("sigmoid_attention", name="torch.blockwise", chunk=16)
def blockwise(
    q: Tensor, k: Tensor, v: Tensor, b: Tensor,
    scale: float | None = None, K0: Tensor | None = None, V0: Tensor | None = None, chunk: int = 64,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The same by blocks of queries and of keys, which add up."""
    return _run(functools.partial(_blockwise, chunk=chunk), q, k, v, b, scale, K0, V0)


@_declared("sigmoid_attention.hybrid", name="torch.blockwise", layout="B T D", chunk=16)
def hybrid(
    x: Tensor, q: Tensor, k: Tensor, v: Tensor, b: Tensor, W_O: Tensor, gain: Tensor, bias: Tensor,
    scale: float | None = None, eps: float = 1e-5, chunk: int = 64,
) -> Tensor:  # fmt: skip
    """Y = x + gain * LN(Concat(O_1, .., O_N) W_O) + bias.  -> (B, T, E)"""
    tensors = (x, q, k, v, b, W_O, gain, bias)
    arguments.checked(_HYBRID, dict(zip(_HYBRID, tensors, strict=True)), parameters=("b", "W_O", "gain", "bias"))
    arguments.not_negative(eps=eps)
    wide = arguments.widest(*tensors)
    with arguments.no_autocast(x):
        Q, K, V = (t.to(wide).transpose(1, 2) for t in (q, k, v))
        O = _blockwise(Q, K, V, b.to(wide), width_scale(scale, q.shape[3]), chunk)
        return _normalised(x.to(wide), O, W_O.to(wide), gain.to(wide), bias.to(wide), eps).to(x.dtype)


class SigmoidAttention(nn.Module):
    """Sigmoid attention with the hybrid norm and projections of its own, over a cache of keys and values.

    d_model     E, channels of the tokens; a multiple of `heads`
    tokens      n, the length of a sequence; the bias starts at -log n
    eps         added to variances
    chunk       queries and keys a block

    Raises ValueError for a value outside these.
    """

    def __init__(self, d_model: int, heads: int, tokens: int, eps: float = 1e-5, chunk: int = 64) -> None:
        super().__init__()
        for name, value in {"d_model": d_model, "heads": heads, "tokens": tokens, "chunk": chunk}.items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        arguments.not_negative(eps=eps)
        if d_model % heads:
            raise ValueError(f"d_model is {d_model}, which {heads} heads do not divide")
        self.heads, self.tokens, self.eps, self.chunk = heads, tokens, eps, chunk
        self.W_Q, self.W_K, self.W_V = (nn.Linear(d_model, d_model, bias=False) for _ in range(3))
        self.W_O = nn.Parameter(torch.empty(heads, d_model // heads, d_model))
        self.b = nn.Parameter(torch.empty(()))
        self.gain, self.bias = nn.Parameter(torch.empty(d_model)), nn.Parameter(torch.empty(d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start again: random weights, a norm without effect, weights of attention near 1 / n."""
        for W in (self.W_Q, self.W_K, self.W_V):
            W.reset_parameters()
        nn.init.uniform_(self.W_O, -1 / math.sqrt(len(self.gain)), 1 / math.sqrt(len(self.gain)))
        nn.init.constant_(self.b, -math.log(self.tokens))
        nn.init.ones_(self.gain)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """(B, T, E) -> (B, T, E) and the cache, keys and values (B, N, P + T, ..); one token at a time decodes."""
        q, k, v = (W(x).unflatten(2, (self.heads, -1)) for W in (self.W_Q, self.W_K, self.W_V))
        O, K, V = blockwise(q, k, v, self.b.expand(self.heads), None, *(cache or (None, None)), chunk=self.chunk)
        return _normalised(x, O.transpose(1, 2), self.W_O, self.gain, self.bias, self.eps), Cache(K, V)

    def extra_repr(self) -> str:
        return f"{len(self.gain)}, heads={self.heads}, tokens={self.tokens}, eps={self.eps}, chunk={self.chunk}"


def _dense(q: Tensor, k: Tensor, v: Tensor, b: Tensor, scale: float) -> Tensor:
    """(.., T, K), (.., P + T, K), (.., P + T, V) -> (.., T, V)"""
    T, S = q.shape[-2], k.shape[-2]
    Z = q @ k.mT * scale + b
    return Z.masked_fill(hidden(q, range(S), S - T), -math.inf).sigmoid() @ v


def _blockwise(q: Tensor, k: Tensor, v: Tensor, b: Tensor, scale: float, chunk: int) -> Tensor:
    """`_dense`, chunk by chunk of queries, each over the blocks of keys until its last token."""
    before, rows = k.shape[-2] - q.shape[-2], []
    for c in arguments.slices(q.shape[-2], chunk):
        Q, O = q[..., c, :], 0
        for a in range(0, max(before + c.stop, 1), chunk):
            keys = range(a, min(a + chunk, before + c.stop))
            Z = Q @ k[..., keys.start : keys.stop, :].mT * scale + b
            A = Z.masked_fill(hidden(Q, keys, before, first=c.start), -math.inf).sigmoid()
            O = O + A @ v[..., keys.start : keys.stop, :]
        rows.append(O)
    return torch.cat(rows, dim=-2)


def _run(form, q, k, v, b, scale, K0, V0):
    arguments.checked(_AXES, {"q": q, "k": k, "v": v, "b": b, "K0": K0, "V0": V0}, ("K0", "V0"), ("b",))
    paired(K0=K0, V0=V0)
    wide = arguments.widest(q, k, v, b, K0, V0)
    with arguments.no_autocast(q):
        Kc, Vc = joined(K0, k.transpose(1, 2), wide, dim=2), joined(V0, v.transpose(1, 2), wide, dim=2)
        Q, B = q.to(wide).transpose(1, 2), b.to(wide)[:, None, None]
        O = form(Q, Kc, Vc, B, width_scale(scale, q.shape[3])).transpose(1, 2).to(q.dtype)
        return O, Kc, Vc


def _normalised(x: Tensor, O: Tensor, W_O: Tensor, gain: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x + gain * LN(Concat(O_1, .., O_N) W_O) + bias from O (B, N, T, V)."""
    U = O.transpose(1, 2).flatten(2) @ W_O.flatten(0, 1)
    return x + group_norm(U, eps) * gain + bias
