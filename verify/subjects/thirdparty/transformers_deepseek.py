"""DeepSeek-V3's attention in transformers, which is `mla`.

Its projections are replaced by selections of channels, so that what they would give is handed in, the norm of latents
and the output projection by nothing. `eager` takes softmax in float32, whatever the dtype; `sdpa` is PyTorch's. Rotary
channels are read in pairs (2 i, 2 i + 1), as the operator's, but cached, turned, in the order (i, i + R / 2).
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mixproof.verify import implements
from mixproof.verify.subjects.thirdparty._modules import Channels, causal_mask, halves, pairs, turns

_COMMON = {"layout": "B T D", "requires": ("transformers",)}


@implements("mla", name="transformers.DeepseekV3Attention", **_COMMON)
def mla_eager(
    qc: Tensor, qr: Tensor, c: Tensor, kr: Tensor, Uk: Tensor, Uv: Tensor, scale: float | None = None,
    base: float = 10000.0, C0: Tensor | None = None, Kr0: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """2 x (B, T, N, K or R), 2 x (B, T, L or R), (N, K, L), (N, V, L), caches (B, P, .) -> (B, T, N, V), the caches."""
    return _mla("eager", qc, qr, c, kr, Uk, Uv, scale, base, C0, Kr0)


@implements("mla", name="transformers.DeepseekV3Attention.sdpa", dtypes=("float64", "float32"), **_COMMON)
def mla_sdpa(
    qc: Tensor, qr: Tensor, c: Tensor, kr: Tensor, Uk: Tensor, Uv: Tensor, scale: float | None = None,
    base: float = 10000.0, C0: Tensor | None = None, Kr0: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The same by scaled_dot_product_attention."""
    return _mla("sdpa", qc, qr, c, kr, Uk, Uv, scale, base, C0, Kr0)


def _mla(
    how: str, qc: Tensor, qr: Tensor, c: Tensor, kr: Tensor, Uk: Tensor, Uv: Tensor, scale: float | None, base: float,
    C0: Tensor | None, Kr0: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (_, T, N, K), R, V, L = qc.shape, qr.shape[-1], Uv.shape[1], c.shape[-1]
    module, cache, P = deepseek(how, N, K, R, V, L), _cache(), 0
    module.scaling = (K + R) ** -0.5 if scale is None else scale
    if C0 is not None and Kr0 is not None:
        P = C0.shape[1]
        cache.update(C0[:, None], halves(Kr0)[:, None], 0)
    x = torch.cat([torch.cat([qc, qr], dim=-1).flatten(2), c, kr], dim=-1)
    weights = {"kv_b_proj.weight": torch.cat([Uk, Uv], dim=1).flatten(0, 1)}
    O, _ = functional_call(module, weights, (x, turns(R, base, P, T, x), causal_mask(T, P + T, x), cache))
    return O.unflatten(2, (N, V)), cache.layers[0].keys[:, 0], pairs(cache.layers[0].values[:, 0])


@functools.cache
def deepseek(how: str, N: int, K: int, R: int, V: int, L: int) -> Any:
    """It takes queries of N heads, latents and rotary keys side by side. Latents are not normalised."""
    theirs = import_module("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = theirs.DeepseekV3Config(
        hidden_size=1, num_attention_heads=N, num_key_value_heads=N, q_lora_rank=None, qk_nope_head_dim=K,
        qk_rope_head_dim=R, v_head_dim=V, kv_lora_rank=L, rope_interleave=True, attn_implementation=how,
    )  # fmt: skip
    with torch.device("meta"):
        module = theirs.DeepseekV3Attention(config, layer_idx=0).eval()
    width = N * (K + R)
    module.q_proj, module.kv_a_proj_with_mqa = Channels(0, width), Channels(width, width + L + R)
    module.kv_a_layernorm, module.o_proj = nn.Identity(), nn.Identity()
    return module


def _cache() -> Any:
    return import_module("transformers").DynamicCache()
