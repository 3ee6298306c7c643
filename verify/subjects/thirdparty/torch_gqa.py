"""torch.nn.functional.scaled_dot_product_attention with fewer heads of keys than of queries, over a cache.

enable_gqa repeats keys and values for the heads of a group. Its is_causal aligns the mask with the first token and the
first key, and would hide the cache's last keys; so the mask is given.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from mixproof.verify import implements


@implements("softmax_attention.cached", name="torch.sdpa_gqa", layout="B T D", dtypes=("float64", "float32"))
def cached(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, K0: Tensor | None = None, V0: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(B, T, G, M, K), (B, T, G, K), (B, T, G, V), 2 x (B, P, G, K or V) -> (B, T, G, M, V), 2 x (B, P + T, G, .)."""
    K, V = (x if old is None else torch.cat([old, x], dim=1) for old, x in ((K0, k), (V0, v)))
    T, S = q.shape[1], K.shape[1]
    seen = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    heads = (x.transpose(1, 2) for x in (q.flatten(2, 3), K, V))
    with sdpa_kernel(SDPBackend.MATH):
        O = scaled_dot_product_attention(*heads, attn_mask=seen, scale=scale, enable_gqa=True)
    return O.transpose(1, 2).unflatten(2, q.shape[2:4]), K, V
