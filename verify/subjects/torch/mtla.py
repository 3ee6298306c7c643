"""Multi-head temporal latent attention in PyTorch: absorbed, over closed slots and the token's own; and with one mask
over partial sums, as the authors train.

Source: survey, MTLA; Deng and Woodland 2025. The inputs are those of reference/mtla.py, for all heads of a batch.

    letter  shape                meaning
    qc qr   (B, T, N, K or R)    queries: content, and what is turned by position
    c w kr  (B, T, L) (B, T) ..  latents, logits of their weights, and rotary keys (B, T, R)
    Uk Uv   (N, K, L) (N, V, L)  up-projections to keys and values
    C Kr    (B, slots, L or R)   cache: sums over slots, and the turned keys of their latest tokens
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mixproof.verify import implements
from mixproof.verify.subjects.torch import _arguments as arguments

_AXES = {
    "qc": "BTNK", "qr": "BTNR", "c": "BTL", "w": "BT", "kr": "BTR", "Uk": "NKL", "Uv": "NVL", "C0": "BPL", "Kr0": "BPR",
}  # fmt: skip
_declared = functools.partial(
    implements,
    layout="B T D",
    dtypes=("float64", "float32", "bfloat16"),
    dot="float32",  # half-precision operands are widened before any product
    devices=("cpu", "cuda"),
    chunk=16,
)
Result = tuple[Tensor, Tensor, Tensor]


@_declared("mtla", name="torch.absorbed")
def absorbed(
    qc: Tensor,
    qr: Tensor,
    c: Tensor,
    w: Tensor,
    kr: Tensor,
    Uk: Tensor,
    Uv: Tensor,
    scale: float | None = None,
    base: float = 10000.0,
    stride: int = 2,
    position: int = 0,
    C0: Tensor | None = None,
    Kr0: Tensor | None = None,
) -> Result:
    """Scores of queries qc Uk with closed slots, and with the slot of the token itself as far as it has come.

    (B, T, N, K), (B, T, N, R), (B, T, L), (B, T), (B, T, R) -> O (B, T, N, V), C (B, slots, L), Kr (B, slots, R)"""
    return _run(_absorbed, qc, qr, c, w, kr, Uk, Uv, scale, base, stride, position, C0, Kr0)


@_declared("mtla", name="torch.masked")
def masked(
    qc: Tensor,
    qr: Tensor,
    c: Tensor,
    w: Tensor,
    kr: Tensor,
    Uk: Tensor,
    Uv: Tensor,
    scale: float | None = None,
    base: float = 10000.0,
    stride: int = 2,
    position: int = 0,
    C0: Tensor | None = None,
    Kr0: Tensor | None = None,
) -> Result:
    """Sums by a matrix of weights; keys and values expanded for every token; a mask leaves closed slots and its own."""
    return _run(_masked, qc, qr, c, w, kr, Uk, Uv, scale, base, stride, position, C0, Kr0)


def gates(c: Tensor, slot: Tensor, W_c: Tensor, b_c: Tensor, W_p: Tensor, b_p: Tensor, base: float = 10000.0) -> Tensor:
    """The hyper-network: logits (W_c PE(slot) + b_c) . (W_p c + b_p).  (B, T, L), (T,) -> (B, T); L even."""
    phase = _phases(slot, c.shape[-1], base)
    PE = torch.stack([phase.sin(), phase.cos()], dim=-1).flatten(-2).to(c.dtype)
    return ((PE @ W_c.T + b_c) * (c @ W_p.T + b_p)).sum(-1)


class Cache(NamedTuple):
    """What decoding goes on from: slots, the turned keys of their latest tokens, and how many tokens were seen."""

    C: Tensor
    Kr: Tensor
    position: int


class MultiheadTemporalLatentAttention(nn.Module):
    """`absorbed` with projections, the norm of latents and the hyper-network of their weights.

    d_model              E, channels of the tokens
    heads                N
    latent               L, channels of a latent, even
    key, rotary, value   K, R and V, channels of a head: content, turned (even), and values
    stride               tokens a slot
    eps                  of the norm

    Raises ValueError for a value outside these.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        latent: int,
        key: int,
        rotary: int,
        value: int,
        stride: int = 2,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        sizes = {"d_model": d_model, "heads": heads, "latent": latent, "key": key, "rotary": rotary, "value": value}
        for name, n in (sizes | {"stride": stride}).items():
            if n < 1:
                raise ValueError(f"{name} is {n}; it must be at least 1")
        for name in ("latent", "rotary"):
            if sizes[name] % 2:
                raise ValueError(f"{name} is {sizes[name]}; channels go in pairs")
        arguments.not_negative(eps=eps)
        self.sizes, self.stride, self.eps = sizes, stride, eps
        hidden = max(latent // 4, 1)
        self.W_Q = nn.Parameter(torch.empty(heads, key + rotary, d_model))
        self.W_D = nn.Parameter(torch.empty(latent + rotary, d_model))
        self.gain, self.bias = nn.Parameter(torch.empty(latent)), nn.Parameter(torch.empty(latent))
        self.Uk = nn.Parameter(torch.empty(heads, key, latent))
        self.Uv = nn.Parameter(torch.empty(heads, value, latent))
        self.W_O = nn.Parameter(torch.empty(d_model, heads, value))
        self.W_c, self.W_p = (nn.Parameter(torch.empty(hidden, latent)) for _ in range(2))
        self.b_c, self.b_p = (nn.Parameter(torch.empty(hidden)) for _ in range(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start again: a norm without effect, biases of zero, random weights."""
        nn.init.ones_(self.gain)
        for b in (self.bias, self.b_c, self.b_p):
            nn.init.zeros_(b)
        for W in (self.W_Q, self.W_D, self.Uk, self.Uv, self.W_c, self.W_p):
            nn.init.uniform_(W, -1 / math.sqrt(W.shape[-1]), 1 / math.sqrt(W.shape[-1]))
        most = 1 / math.sqrt(self.W_O[0].numel())
        nn.init.uniform_(self.W_O, -most, most)

    def forward(self, x: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """(B, T, E) -> (B, T, E), and the cache from which the next call goes on."""
        C0, Kr0, position = (None, None, 0) if cache is None else cache
        K, L = self.sizes["key"], self.sizes["latent"]
        qc, qr = torch.einsum("bte,nke->btnk", x, self.W_Q).split([K, self.sizes["rotary"]], dim=-1)
        c, kr = (x @ self.W_D.T).split([L, self.sizes["rotary"]], dim=-1)
        c = nn.functional.layer_norm(c, (L,), self.gain, self.bias, self.eps)
        slot = (position + torch.arange(x.shape[1], device=x.device)) // self.stride
        w = gates(c, slot, self.W_c, self.b_c, self.W_p, self.b_p)
        options = {"stride": self.stride, "position": position, "C0": C0, "Kr0": Kr0}
        O, C, Kr = absorbed(qc, qr, c, w, kr, self.Uk, self.Uv, **options)
        return torch.einsum("btnv,env->bte", O, self.W_O), Cache(C, Kr, position + x.shape[1])

    def extra_repr(self) -> str:
        return ", ".join(f"{n}={x}" for n, x in self.sizes.items()) + f", stride={self.stride}, eps={self.eps}"


def _run(form, qc, qr, c, w, kr, Uk, Uv, scale, base, stride, position, C0, Kr0) -> Result:
    tensors = {"qc": qc, "qr": qr, "c": c, "w": w, "kr": kr, "Uk": Uk, "Uv": Uv, "C0": C0, "Kr0": Kr0}
    sizes = arguments.checked(_AXES, tensors, states=("C0", "Kr0"), parameters=("Uk", "Uv"))
    if stride < 1 or position < 0 or sizes["R"] % 2:
        raise ValueError(f"stride is {stride}, position {position}, R {sizes['R']}; R is even, and a stride positive")
    P = sizes.get("P", 0)
    if (C0 is None) != (Kr0 is None) or P != -(-position // stride):
        raise ValueError(f"the cache has {P} slots; {position} tokens fill {-(-position // stride)} of {stride}")
    wide = arguments.widest(*tensors.values())
    with arguments.no_autocast(qc):
        x: dict[str, Any] = {n: None if t is None else t.to(wide) for n, t in tensors.items()}
        n = position + torch.arange(sizes["T"], device=qc.device)
        x["qr"], x["kr"] = turned(x["qr"], n, base), turned(x["kr"], n, base)
        x["c"] = x["w"].sigmoid()[..., None] * x["c"]
        for name, like in (("C0", x["c"]), ("Kr0", x["kr"])):
            x[name] = like[:, :0] if x[name] is None else x[name]
        scale = (sizes["K"] + sizes["R"]) ** -0.5 if scale is None else scale
        O, C, Kr = form(**x, scale=scale, stride=stride, position=position)
    state = torch.float64 if qc.dtype == torch.float64 else torch.float32
    return O.to(qc.dtype), C.to(state), Kr.to(state)


def _absorbed(qc, qr, c, w, kr, Uk, Uv, C0, Kr0, scale, stride, position):
    """Tokens of the first slot that came in earlier calls stand before c as one token, zeros before and after it fill
    slots up; then sums are sums inside rows of `stride` tokens."""
    B, T, L = c.shape
    inside = position % stride if T else 0
    closed = C0.shape[1] - (inside > 0)
    pad = -(inside + T) % stride
    before = torch.cat([c.new_zeros(B, max(inside - 1, 0), L), C0[:, closed:]], dim=1)[:, :inside]
    own = torch.cat([before, c, c.new_zeros(B, pad, L)], dim=1)
    own = own.unflatten(1, (own.shape[1] // stride, stride)).cumsum(2).flatten(1, 2)[:, inside : inside + T]
    last = torch.arange(min(stride - 1 - inside, T), T, stride, device=c.device)  # tokens that close a slot
    C, Kr = torch.cat([C0[:, :closed], own[:, last]], dim=1), torch.cat([Kr0[:, :closed], kr[:, last]], dim=1)
    t = torch.arange(T, device=c.device)[:, None]
    seen = torch.cat([t.new_full((closed,), -1), last]) < t
    Q = torch.einsum("btnk,nkl->bntl", qc, Uk)
    others = Q @ C.mT[:, None] + qr.transpose(1, 2) @ Kr.mT[:, None]
    itself = (Q * own[:, None]).sum(-1) + torch.einsum("btnr,btr->bnt", qr, kr)
    S = torch.cat([others.masked_fill(~seen, -torch.inf), itself[..., None]], dim=-1) * scale
    A = S.softmax(-1)
    Z = A[..., :-1] @ C[:, None] + A[..., -1:] * own[:, None]
    if T and pad:
        C, Kr = torch.cat([C, own[:, -1:]], dim=1), torch.cat([Kr, kr[:, -1:]], dim=1)
    return torch.einsum("bntl,nvl->btnv", Z, Uv), C, Kr


def _masked(qc, qr, c, w, kr, Uk, Uv, C0, Kr0, scale, stride, position):
    T, P = c.shape[1], C0.shape[1]
    n = position + torch.arange(T, device=c.device)
    now, slot = n[:, None], n // stride
    same = (slot[:, None] == slot) & (n <= now)
    C = same.to(c.dtype) @ c
    opened = slot == position // stride if position % stride else slot < 0
    C = C + opened.to(c.dtype)[:, None] * C0[:, -1:].sum(1, keepdim=True)
    closed = P - 1 if T and position % stride else P
    visible = (n <= now) & ((n + 1) % stride == 0) | (n == now)
    visible = torch.cat([visible.new_ones(T, closed), visible], dim=1)
    C, Kr = torch.cat([C0[:, :closed], C], dim=1), torch.cat([Kr0[:, :closed], kr], dim=1)
    keys, values = torch.einsum("bsl,nkl->bnsk", C, Uk), torch.einsum("bsl,nvl->bnsv", C, Uv)
    S = qc.transpose(1, 2) @ keys.mT + qr.transpose(1, 2) @ Kr.mT[:, None]
    O = (S * scale).masked_fill(~visible, -torch.inf).softmax(-1) @ values
    last = [t for t in range(T) if (position + t + 1) % stride == 0 or t == T - 1]
    kept = torch.tensor([*range(closed), *(closed + t for t in last)], dtype=torch.long, device=c.device)
    return O.transpose(1, 2), C[:, kept], Kr[:, kept]


def _phases(n: Tensor, R: int, base: float) -> Tensor:
    """n base^(-2 i / R) in float64: a float32 angle of position 100000 is off by 4e-3.  (T,) -> (T, R/2)"""
    i = torch.arange(0, R, 2, dtype=torch.float64, device=n.device)
    return n.double()[:, None] * base ** (-i / R)


def turned(x: Tensor, n: Tensor, base: float) -> Tensor:
    """Pairs of channels (2 i, 2 i + 1) of token t turned by n_t base^(-2 i / R).  (B, T, ..., R)"""
    phase = _phases(n, x.shape[-1], base).reshape(len(n), *(1,) * (x.ndim - 3), x.shape[-1] // 2)
    cos, sin = phase.cos().to(x.dtype), phase.sin().to(x.dtype)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
