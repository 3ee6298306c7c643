"""ZAYA's attention in transformers, which is `ccgqa`, and with a key for each query `cca`: their published code.

Its projections are replaced by selections of channels, so that what they would give is handed in, and that of the
output by nothing. Its temperatures are factors of the keys, where the operator has e^beta. Its norms are at least the
unit of the dtype. It turns channels (i, i + K / 2) where the operator turns (2 i, 2 i + 1), and its heads are as wide
for values as for keys, so that channels are put in another order and filled up with zeros, which add nothing.
"""

from __future__ import annotations

import functools
from importlib import import_module
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import pad

from mixproof.verify import implements
from mixproof.verify.subjects.thirdparty._modules import Channels, causal_mask, halves, pairs, turns

_COMMON = {"layout": "B T D", "slow": True, "requires": ("transformers",)}


@implements("ccgqa", name="transformers.ZayaAttention", fixed={"norm_eps": 2.0**-23}, **_COMMON)
def eager(
    q: Tensor, k: Tensor, v: Tensor, w1q: Tensor, b1q: Tensor, w2q: Tensor, b2q: Tensor, w1k: Tensor, b1k: Tensor,
    w2k: Tensor, b2k: Tensor, beta: Tensor, scale: float | None = None, base: float = 10000.0,
    q0: Tensor | None = None, k0: Tensor | None = None, v0: Tensor | None = None, K0: Tensor | None = None,
    V0: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Axes as in the reference, those of sequences first. Softmax in float32."""
    filters = {"q": (w1q, b1q, w2q, b2q), "k": (w1k, b1k, w2k, b2k)}
    return _attention("eager", q, k, v, filters, beta, scale, base, q0, k0, v0, K0, V0)


@implements(
    "ccgqa", name="transformers.ZayaAttention.sdpa", dtypes=("float64",), fixed={"norm_eps": 2.0**-52}, **_COMMON
)
def sdpa(
    q: Tensor, k: Tensor, v: Tensor, w1q: Tensor, b1q: Tensor, w2q: Tensor, b2q: Tensor, w1k: Tensor, b1k: Tensor,
    w2k: Tensor, b2k: Tensor, beta: Tensor, scale: float | None = None, base: float = 10000.0,
    q0: Tensor | None = None, k0: Tensor | None = None, v0: Tensor | None = None, K0: Tensor | None = None,
    V0: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The same by scaled_dot_product_attention."""
    filters = {"q": (w1q, b1q, w2q, b2q), "k": (w1k, b1k, w2k, b2k)}
    return _attention("sdpa", q, k, v, filters, beta, scale, base, q0, k0, v0, K0, V0)


@implements("cca", name="transformers.ZayaAttention.sdpa", dtypes=("float64",), fixed={"norm_eps": 2.0**-52}, **_COMMON)
def a_key_each(
    q: Tensor, k: Tensor, v: Tensor, w1q: Tensor, b1q: Tensor, w2q: Tensor, b2q: Tensor, w1k: Tensor, b1k: Tensor,
    w2k: Tensor, b2k: Tensor, beta: Tensor, scale: float | None = None, base: float = 10000.0,
    q0: Tensor | None = None, k0: Tensor | None = None, v0: Tensor | None = None, K0: Tensor | None = None,
    V0: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """One query a group, by scaled_dot_product_attention."""
    filters = {"q": tuple(w[:, None] for w in (w1q, b1q, w2q, b2q)), "k": (w1k, b1k, w2k, b2k)}
    q, q0 = q[:, :, :, None], None if q0 is None else q0[:, :, :, None]
    O, q_last, *others = _attention("sdpa", q, k, v, filters, beta, scale, base, q0, k0, v0, K0, V0)
    return O[:, :, :, 0], q_last[:, :, :, 0], *others


def _attention(
    how: str, q: Tensor, k: Tensor, v: Tensor, filters: dict[str, tuple[Tensor, ...]], beta: Tensor,
    scale: float | None, base: float, q0: Tensor | None, k0: Tensor | None, v0: Tensor | None, K0: Tensor | None,
    V0: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    (_, T, G, M, K), V, (W, J) = q.shape, v.shape[-1], (filters["q"][i].shape[-1] for i in (0, 2))
    D, P = max(K, V), 0
    module = zaya(how, G, M, D, W, J)
    module.scaling, module.qk_norm.head_dim_scale = K**-0.5 if scale is None else scale, K**0.5
    cache = import_module("transformers").DynamicCache(config=module.config)
    if q0 is not None and k0 is not None and v0 is not None and K0 is not None and V0 is not None:
        P = K0.shape[1]
        cache.update_conv_state(_rows(q0, k0, D).transpose(1, 2), 0)
        cache.update_recurrent_state(_values(v0, D).flatten(1)[:, G * D // 2 :], 0)
        cache.update(_heads(K0, D).transpose(1, 2), _values(V0, D).transpose(1, 2), 0)
    x = torch.cat([_rows(q, k, D), _values(v, D).flatten(2)], dim=-1)
    weights = _named(filters, D) | {"qk_norm.temp": beta.exp()}
    O, _ = functional_call(module, weights, (x, {"causal": causal_mask(T, P + T, x)}, cache, turns(K, base, P, T, x)))
    rows = cache.get_conv_state(0).transpose(1, 2).unflatten(2, (-1, D))
    late = torch.cat([x[:, -1, -G * D : -G * D // 2], cache.get_recurrent_state(0)], dim=-1)
    return (
        _values_back(O.unflatten(2, (G, M, D)), V),
        pairs(rows[:, :, : G * M, :K]).unflatten(2, (G, M)),
        pairs(rows[:, :, G * M :, :K]),
        _values_back(late.unflatten(1, (G, D)), V),
        pairs(cache.layers[0].keys[..., :K]).transpose(1, 2),
        _values_back(cache.layers[0].values, V).transpose(1, 2),
    )


@functools.cache
def zaya(how: str, G: int, M: int, D: int, W: int, J: int) -> Any:
    """It takes queries, keys and values side by side, D channels for each head of any."""
    theirs = import_module("transformers.models.zaya.modeling_zaya")
    config = theirs.ZayaConfig(
        hidden_size=(G * M + 2 * G) * D, num_hidden_layers=1, num_attention_heads=G * M, num_key_value_heads=G,
        head_dim=D, cca_time0=W, cca_time1=J, attn_implementation=how,
    )  # fmt: skip
    with torch.device("meta"):
        module = theirs.ZayaAttention(config, layer_idx=0).eval()
    at, inner = 0, module.qkv_proj
    for name, width in (("q_proj", G * M * D), ("k_proj", G * D), ("v_proj_current", G * D // 2)):
        setattr(inner, name, Channels(at, at + width))
        at += width
    inner.v_proj_delayed, module.o_proj = Channels(at, at + G * D // 2), nn.Identity()
    return module


def _named(filters: dict[str, tuple[Tensor, ...]], D: int) -> dict[str, Tensor]:
    """The convolutions by the module's names for them, queries before keys."""
    names = ("depthwise.weight", "depthwise.bias", "grouped.weight", "grouped.bias")
    parts: dict[str, list[Tensor]] = {n: [] for n in names}
    for w1, b1, w2, b2 in filters.values():
        w2 = _heads(_heads(w2.transpose(-1, -2), D).transpose(-1, -3), D).transpose(-1, -3).transpose(-1, -2)
        shaped = (_heads(w1.transpose(-1, -2), D).transpose(-1, -2), _heads(b1, D), w2, _heads(b2, D))
        for name, x, kept in zip(names, shaped, (1, 0, 2, 0), strict=True):
            parts[name].append(x.reshape(prod(x.shape[: x.ndim - kept]), *x.shape[x.ndim - kept :]))
    joined = {f"qkv_proj.conv_qk_{n}": torch.cat(x) for n, x in parts.items()}
    joined["qkv_proj.conv_qk_depthwise.weight"] = joined["qkv_proj.conv_qk_depthwise.weight"][:, None]
    return joined


def _rows(q: Tensor, k: Tensor, D: int) -> Tensor:
    """Queries and keys side by side.  -> (B, T, (G M + G) D)"""
    return torch.cat([_heads(q, D).flatten(2), _heads(k, D).flatten(2)], dim=-1)


def _heads(x: Tensor, D: int) -> Tensor:
    """The last axis in the module's order, and filled up to D channels."""
    return pad(halves(x), (0, D - x.shape[-1]))


def _values(v: Tensor, D: int) -> Tensor:
    """Each half of a head filled up to D / 2, so that half of all channels stays half of them."""
    return pad(v.unflatten(-1, (2, -1)), (0, (D - v.shape[-1]) // 2)).flatten(-2)


def _values_back(x: Tensor, V: int) -> Tensor:
    return x.unflatten(-1, (2, -1))[..., : V // 2].flatten(-2)
