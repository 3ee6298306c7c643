"""Compressed convolutional attention in PyTorch, tap by tap, with rotations as complex numbers.

Source: survey, CCA; Figliola et al. 2025; read as in reference/cca.py, whose inputs these are.

    letter  shape                  meaning
    q k v   (B, T, G, K) ..        queries, keys and values (B, T, G, V) of G heads
    w1 b1   (G, K, W) (G, K)       taps of each channel; w2 (G, K, K, J), b2 (G, K) among those of a head
    beta    (G,)                   logarithms of the temperatures
    q0 ..   (B, W + J - 2, G, K)   rows before the call; v0 (B, G, V); cache K0, V0 (B, P, G, K or V)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mixproof.verify import implements
from mixproof.verify.subjects.torch import _arguments as arguments
from mixproof.verify.subjects.torch.feature_maps import unit

_AXES = {
    "q": "BTGK", "k": "BTGK", "v": "BTGV", "w1q": "GKW", "b1q": "GK", "w2q": "GKKJ", "b2q": "GK", "w1k": "GKW",
    "b1k": "GK", "w2k": "GKKJ", "b2k": "GK", "beta": "G", "q0": "BRGK", "k0": "BRGK", "v0": "BGV", "K0": "BPGK",
    "V0": "BPGV",
}  # fmt: skip


@implements(
    "cca",
    name="torch.eager",
    layout="B T D",
    dtypes=("float64", "float32", "bfloat16"),
    dot="float32",
    devices=("cpu", "cuda"),
    chunk=16,
)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w1q: Tensor,
    b1q: Tensor,
    w2q: Tensor,
    b2q: Tensor,
    w1k: Tensor,
    b1k: Tensor,
    w2k: Tensor,
    b2k: Tensor,
    beta: Tensor,
    scale: float | None = None,
    base: float = 10000.0,
    norm_eps: float = 1e-12,
    q0: Tensor | None = None,
    k0: Tensor | None = None,
    v0: Tensor | None = None,
    K0: Tensor | None = None,
    V0: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """O = softmax(scale Q K^T) V, Q and K sums of convolution and mean, normalised and turned.

    -> O (B, T, G, V), and what q0, k0, v0, K0 and V0 are after the call"""
    given = dict(zip(_AXES, (q, k, v, w1q, b1q, w2q, b2q, w1k, b1k, w2k, b2k, beta, q0, k0, v0, K0, V0), strict=True))
    states = ("q0", "k0", "v0", "K0", "V0")
    sizes = arguments.checked(_AXES, given, states=states, parameters=tuple(_AXES)[3:12])
    arguments.not_negative(norm_eps=norm_eps)
    (B, T, G, K), V, past = q.shape, sizes["V"], sizes["W"] + sizes["J"] - 2
    if K % 2 or G * V % 2 or past < 0 or sizes.get("R", past) != past or (K0 is None) != (V0 is None):
        raise ValueError(f"expected pairs of channels, {past} rows before, and keys with values; not K = {K}, {sizes}")
    kept = torch.float64 if q.dtype == torch.float64 else torch.float32
    wide = arguments.widest(*given.values())
    with arguments.no_autocast(q):
        x: dict[str, Any] = {n: None if t is None else t.to(wide) for n, t in given.items()}
        zeros = {"q0": (B, past, G, K), "k0": (B, past, G, K), "v0": (B, G, V), "K0": (B, 0, G, K), "V0": (B, 0, G, V)}
        for n, shape in zeros.items():
            x[n] = x["q"].new_zeros(shape) if x[n] is None else x[n]
        rows = {n: torch.cat([x[n + "0"], x[n]], dim=1) for n in ("q", "k")}
        mean = (x["q"] + x["k"]) / 2
        Q, keys = (_convolved(rows[n], *(x[f + n] for f in ("w1", "b1", "w2", "b2"))) + mean for n in ("q", "k"))
        P, size = x["K0"].shape[1], math.sqrt(K)
        Q = _turned(unit(Q, norm_eps) * size, P, base)
        keys = torch.cat([x["K0"], _turned(unit(keys, norm_eps) * size * x["beta"].exp()[:, None], P, base)], dim=1)
        late = torch.cat([x["v0"][:, None], x["v"]], dim=1)
        second = torch.arange(G * V, device=q.device).view(G, V) >= G * V // 2
        values = torch.cat([x["V0"], torch.where(second, late[:, :T], x["v"])], dim=1)
        S = (Q.transpose(1, 2) @ keys.permute(0, 2, 3, 1)) * (1 / size if scale is None else scale)
        unseen = torch.ones(T, P + T, dtype=torch.bool, device=q.device).triu(P + 1)
        O = S.masked_fill(unseen, -torch.inf).softmax(-1) @ values.transpose(1, 2)
    after = (rows["q"][:, T:], rows["k"][:, T:], late[:, T], keys, values)
    return O.transpose(1, 2).to(q.dtype), *(s.to(kept) for s in after)


def _convolved(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """b2 + sum_j w2_j a_j with a = b1 + sum_i w1_i x_i, tap by tap.  (B, T + W + J - 2, G, K) -> (B, T, G, K)"""
    W, J = w1.shape[-1], w2.shape[-1]
    n = x.shape[1] - W + 1
    a = b1 + sum(w1[..., i] * x[:, i : i + n] for i in range(W))
    return b2 + sum((w2[..., j] @ a[:, j : j + n - J + 1, :, :, None]).squeeze(-1) for j in range(J))


def _turned(x: Tensor, position: int, base: float) -> Tensor:
    """Channels 2 i and 2 i + 1 as a complex number times e^(i n theta_i), n counted from `position`."""
    n = position + torch.arange(x.shape[1], dtype=torch.float64, device=x.device)
    theta = base ** (-torch.arange(0, x.shape[-1], 2, dtype=torch.float64, device=x.device) / x.shape[-1])
    turn = torch.polar(torch.ones((), dtype=torch.float64, device=x.device), n[:, None] * theta)
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(z * turn.to(z.dtype)[:, None]).flatten(-2)
