"""TALA in PyTorch with decays of any shape: per token, per channel of keys or values, or per element of the state.

Source: MixFormer paper (15), S_t = A_t * S_{t-1} + k_t^T v_t and o_t = scale q_t S_t, as in the reference.

    letter  paper     shape               meaning
    q k v   Q K V     (B, T, H, K or V)   queries and keys through the feature map; values
    a       omega G   see each function   decays, of either sign or zero
    S0 S    S         (B, H, K, V)        state before the first and after the last token
"""

from __future__ import annotations

from torch import Tensor

from mixproof.verify import implements
from mixproof.verify.subjects.torch import _linear as linear

_AXES = {"q": "BTHK", "k": "BTHK", "v": "BTHV", "a": "BTH", "S0": "BHKV"}


@implements("tala.time_varying", name="torch.chunkwise", devices=("cpu", "cuda"), chunk=64)
def chunkwise(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, scale: float = 1.0, S0: Tensor | None = None, chunk: int = 64
) -> tuple[Tensor, Tensor]:
    """One decay a token, a (B, T, H): products of decays inside chunks, the state across them."""
    return linear.run(_chunkwise, _AXES, (q, k, v, a, S0), scale, chunk)


@implements("tala.time_varying", name="torch.recompute", devices=("cpu", "cuda"), chunk=64)
def recompute(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, scale: float = 1.0, S0: Tensor | None = None, chunk: int = 64
) -> tuple[Tensor, Tensor]:
    """`chunkwise`; for the backward it stores its inputs only, and recomputes masks and states."""
    return linear.run(linear.recompute, _AXES, (q, k, v, a, S0), scale, chunk)


@implements("tala.key_channel", name="torch.chunkwise", devices=("cpu", "cuda"), chunk=16)
def chunkwise_key_channel(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, scale: float = 1.0, S0: Tensor | None = None, chunk: int = 16
) -> tuple[Tensor, Tensor]:
    """One decay a token and key channel, a (B, T, H, K); a chunk holds a mask for each channel."""
    return linear.run(_chunkwise_keys, _AXES | {"a": "BTHK"}, (q, k, v, a, S0), scale, chunk)


@implements("tala.value_channel", name="torch.scan", devices=("cpu", "cuda"))
def scan_value_channel(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, scale: float = 1.0, S0: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One decay a token and value channel, a (B, T, H, V). Holds every state: B T H K V numbers."""
    return linear.run(_scan_values, _AXES | {"a": "BTHV"}, (q, k, v, a, S0), scale)


@implements("tala.elementwise", name="torch.scan", devices=("cpu", "cuda"))
def scan_elementwise(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, scale: float = 1.0, S0: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One decay an element of the state, a (H, K, V), for all tokens. Holds every state: B T H K V numbers."""
    return linear.run(_scan_elements, _AXES | {"a": "HKV"}, (q, k, v, a, S0), scale)


def _chunkwise(q, k, v, a, S, scale, chunk):
    return linear.chunkwise(q, k, v, linear.segments(a), S, scale, chunk)


def _chunkwise_keys(q, k, v, a, S, scale, chunk):
    return linear.chunkwise_keys(q, k, v, linear.segments(a.mT), S, scale, chunk)


def _scan_values(q, k, v, a, S, scale):
    return linear.scanned(q, k, v, a[..., None, :], S, scale)


def _scan_elements(q, k, v, a, S, scale):
    return linear.scanned(q, k, v, linear.spread(a, q.shape[2]), S, scale)
