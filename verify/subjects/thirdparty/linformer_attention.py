"""LinformerSelfAttention of the package linformer.

Its projections are left out, those along the sequence excepted, so that queries, keys and values are handed in. A head
is as wide for values as for keys, so the fewer channels are filled up with zeros. It divides by the root of that width:
another scale is multiplied into the queries.
"""

from __future__ import annotations

import functools
from importlib import import_module

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import pad

from mixproof.verify import implements
from mixproof.verify.subjects.thirdparty._modules import Channels


@implements(
    "linformer",
    name="linformer.LinformerSelfAttention",
    layout="B T D",
    dtypes=("float64", "float32"),
    requires=("linformer",),
)
def attention(q: Tensor, k: Tensor, v: Tensor, E_k: Tensor, E_v: Tensor, scale: float | None = None) -> Tensor:
    """(B, T, K), (B, S, K), (B, S, V), 2 x (X, S) -> (B, T, V)."""
    K, V = k.shape[-1], v.shape[-1]
    D = max(K, V)
    factor = (K**-0.5 if scale is None else scale) * D**0.5
    q, k, v = (pad(x, (0, D - x.shape[-1])) for x in (q if factor == 1 else q * factor, k, v))
    weights = {"proj_k": E_k.T, "proj_v": E_v.T}
    return functional_call(_module(D, *E_k.shape), weights, (q, torch.cat([k, v], dim=-1)))[..., :V]


@functools.cache
def _module(D: int, X: int, S: int) -> nn.Module:
    """Of one head; its context holds keys and values side by side."""
    module = import_module("linformer").LinformerSelfAttention(D, S, k=X, heads=1)
    module.to_q, module.to_k, module.to_v, module.to_out = (
        nn.Identity(),
        Channels(0, D),
        Channels(D, 2 * D),
        nn.Identity(),
    )
    return module
