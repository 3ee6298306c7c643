"""What every implementation in PyTorch does before it computes: checks, the dtype, autocast off, chunks of tokens."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor


def checked(
    axes: Mapping[str, str],
    tensors: Mapping[str, Tensor | None],
    states: Collection[str] = (),
    parameters: Collection[str] = (),
) -> dict[str, int]:
    """The sizes of the axes, one letter each; a state may be None, and a parameter must not hold NaN.

    Raises TypeError or ValueError naming the argument that makes no sense."""
    given = {name: x for name, x in tensors.items() if x is not None or name not in states}
    first, like = next(iter(given.items()))
    sizes: dict[str, tuple[int, str]] = {}
    for name, x in given.items():
        if not isinstance(x, Tensor) or not x.is_floating_point():
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name} is {kind}; expected a floating-point tensor")
        if x.device != like.device:  # type: ignore[union-attr]
            raise ValueError(f"{name} is on {x.device}, but {first} is on {like.device}")  # type: ignore[union-attr]
        if x.ndim != len(axes[name]):
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected axes ({', '.join(axes[name])})")
        for axis, n in zip(axes[name], x.shape, strict=True):
            size, other = sizes.setdefault(axis, (n, name))
            if size != n:
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}: axis {axis} is {n}, but {other} has {axis}={size}"
                )
        # on a GPU a look at values would hold up the stream
        if name in parameters and x.is_cpu and not torch.compiler.is_compiling() and x.isnan().any():
            raise ValueError(f"{name} contains NaN")
    return {axis: n for axis, (n, _) in sizes.items()}


def finite(**scalars: float) -> None:
    """Raises ValueError naming the scalar that is infinite or not a number."""
    for name, value in scalars.items():
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}; it must be finite")


def not_negative(**scalars: float) -> None:
    """Raises ValueError naming the scalar that is negative, infinite, or not a number."""
    for name, value in scalars.items():
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"{name} is {value}; it must be finite and not negative")


def widest(*tensors: Tensor | None) -> torch.dtype:
    """The dtype to compute in: float32, or wider where an argument is."""
    kinds = (x.dtype for x in tensors if x is not None)
    return functools.reduce(torch.promote_types, kinds, torch.float32)


def no_autocast(x: Tensor) -> torch.autocast:
    """Autocast would round operands and states to half precision on their way into the products."""
    return torch.autocast(x.device.type, enabled=False)


def slices(T: int, chunk: int) -> list[slice]:
    """Chunks of T tokens; no tokens make one empty chunk, so that results keep their place in the graph."""
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be at least 1")
    return [slice(start, min(start + chunk, T)) for start in range(0, max(T, 1), chunk)]
