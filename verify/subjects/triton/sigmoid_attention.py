"""Blockwise causal sigmoid attention in Triton, both directions, with a cache.

Source: survey, sigmoid attention (2.1), with the scale that it leaves out. There is no normaliser: blocks just add up.
"""

from __future__ import annotations

import torch

from mixproof.verify import implements
from mixproof.verify.subjects.triton.softmax_attention import OPTIONS, Blockwise, check

Tensor = torch.Tensor


@implements("sigmoid_attention", name="triton.blockwise", requires=("triton",), **OPTIONS)
def sigmoid_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    scale: float | None = None,
    K0: Tensor | None = None,
    V0: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """O = sigmoid(scale q k^T + b) v, causal: q, k (B, T, H, D), v (B, T, H, V), b (H,), caches K0 (B, H, P, D) and
    V0 (B, H, P, V) -> O (B, T, H, V) and the caches with the new tokens, in the dtype that they came in."""
    tokens = {"q": (q, "BTHD"), "k": (k, "BTHD"), "v": (v, "BTHV")}
    check(tokens | {"b": (b, "H"), "K0": (K0, "BHPD"), "V0": (V0, "BHPV")}, states=("K0", "V0"))
    if (K0 is None) != (V0 is None):
        raise ValueError("of K0 and V0 one is None; a cache has both or none")
    K, V = _appended(K0, k), _appended(V0, v)
    P = K.shape[2] - k.shape[1]
    O = Blockwise.apply(q, K.transpose(1, 2), V.transpose(1, 2), b, scale, True, P)
    return O, K, V


def _appended(cache: Tensor | None, x: Tensor) -> Tensor:
    """(B, H, P, D), (B, T, H, D) -> (B, H, P + T, D), float32."""
    new = x.transpose(1, 2).float()
    return new if cache is None else torch.cat([cache.float(), new], 2)
