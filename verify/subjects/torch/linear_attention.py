"""Linear attention in PyTorch, causal, chunkwise.

Source: MixFormer paper (5) to (8), corrected as in the reference; Katharopoulos et al. 2020 (9) to (12).

    letter  paper    shape               meaning
    q k v   phi(Q)   (B, T, H, K or V)   positive features of queries and keys; values
    S z     S Z      (B, H, K, V or -)   sums of k^T v and of k; S0 and z0 come before the first token
"""

from __future__ import annotations

from torch import Tensor

from mixproof.verify import implements
from mixproof.verify.subjects.torch import _arguments as arguments
from mixproof.verify.subjects.torch import _linear as linear

_AXES = {"q": "BTHK", "k": "BTHK", "v": "BTHV", "S0": "BHKV", "z0": "BHK"}


@implements(
    "linear_attention",
    name="torch.chunkwise",
    dtypes=("float64", "float32", "bfloat16", "float16"),
    dot="float32",  # half-precision operands are widened before any product
    devices=("cpu", "cuda"),
    chunk=64,
)
def chunkwise(
    q: Tensor, k: Tensor, v: Tensor, eps: float = 0.0,
    S0: Tensor | None = None, z0: Tensor | None = None, chunk: int = 64,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """o_i = q_i S_i / (q_i . z_i + eps): matrix products inside chunks, S and z across them.  (7)

    (B, T, H, K), (B, T, H, K), (B, T, H, V) -> O (B, T, H, V), S (B, H, K, V), z (B, H, K)"""
    arguments.not_negative(eps=eps)
    q, k, v, S0, z0 = linear.arranged(_AXES, q, k, v, S0, z0)
    wide = arguments.widest(q, k, v, S0, z0)
    with arguments.no_autocast(q):
        none = k.new_ones(k.shape[1], dtype=wide)  # a decay of one
        O, S, z = linear.normalised(q, k, v, none, S0, z0, eps, chunk)
    return O.transpose(1, 2), S, z
