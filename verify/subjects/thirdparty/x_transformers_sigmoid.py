"""Attend of x-transformers with sigmoid for softmax. It has no bias of its own: b is added as a bias of the logits.

Its causal mask is aligned with the last key, as that of a cache must be.
"""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from mixproof.verify import implements


@implements(
    "sigmoid_attention",
    name="x_transformers.Attend",
    layout="B H T D",
    dtypes=("float64", "float32"),
    requires=("x_transformers",),
)
def sigmoid(
    q: Tensor, k: Tensor, v: Tensor, b: Tensor, scale: float | None = None, K0: Tensor | None = None,
    V0: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """2 x (B, H, T, K), (B, H, T, V), (H,), (B, H, P, K or V) -> (B, H, T, V), the caches (B, H, P + T, .)."""
    K, V = (x if old is None else torch.cat([old, x], dim=2) for old, x in ((K0, k), (V0, v)))
    attend = import_module("x_transformers.attend").Attend(causal=True, sigmoid=True, scale=scale)
    O, _ = attend(q, K, V, attn_bias=b[:, None, None])
    return O, K, V
