"""torch.nn.functional.scaled_dot_product_attention with two of its backends.

Measured on a CPU, torch 2.13. math: half-precision inputs are widened, results rounded once at the end; scale^1/2
goes to q and to k, two roundings a factor where scale (Q K^T) has one. flash: scores and sums in float32, the weights
before normalisation are rounded to the input dtype for their product with V; q, k and v must share one head
dimension, of stride 1. Both give zeros where there is no key; their exp is good to 2 ulp beside the rounding of its
argument (flash is written with one that promises 20). On a GPU, flash takes half precision only.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from mixproof.verify import implements

_ALL = ("float64", "float32", "bfloat16", "float16")


@implements("softmax_attention", name="torch.sdpa_math", layout="B H T D", dtypes=_ALL, dot="float32")
def math(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, causal: bool = False) -> Tensor:
    """(B, H, T, D), (B, H, S, D), (B, H, S, V) -> (B, H, T, V). Causal needs T = S, where alignment is no question."""
    _check(q, k, causal)
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)


@implements("softmax_attention", name="torch.sdpa_flash", layout="B H T D", dtypes=_ALL, chunk=512)
def flash(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, causal: bool = False) -> Tensor:
    """The same, in blocks of keys. The narrower of (q, k) and v is padded with zeros, which changes no score, and what
    the backend refuses for its strides is copied."""
    _check(q, k, causal)
    D, V = q.shape[-1], v.shape[-1]
    q, k, v = (pad(x, (0, max(D, V) - x.shape[-1])) for x in (q, k, v))
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        O = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=D**-0.5 if scale is None else scale)
    return O[..., :V]


def _check(q: Tensor, k: Tensor, causal: bool) -> None:
    """is_causal aligns the mask with the first token and key; for T != S others align it with the last."""
    if causal and q.shape[-2] != k.shape[-2]:
        raise ValueError(f"causal attention needs as many queries as keys, not {q.shape[-2]} and {k.shape[-2]}")
