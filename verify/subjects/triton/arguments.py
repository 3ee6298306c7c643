"""What every implementation in Triton does around its kernels: checks of its arguments, and the device."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

Tensor = torch.Tensor
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def checked(
    arguments: Mapping[str, tuple[Tensor | None, str]], states: Collection[str], parameters: Collection[str] = ()
) -> dict[str, int]:
    """The sizes of the axes. Tensors come named, with their axes; the first sets the device and, for those with tokens,
    the dtype. A state may be None, and a parameter must not hold NaN.

    Raises TypeError or ValueError naming the argument that does not fit."""
    sizes: dict[str, int] = {}
    first = next(iter(arguments))
    for name, (x, axes) in arguments.items():
        if x is None and name in states:
            continue
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; expected a torch tensor")
        like = arguments[first][0]
        assert like is not None
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {x.dtype}; expected float32, float16 or bfloat16")
        if set(axes) & {"T", "S"} and x.dtype != like.dtype:
            raise TypeError(f"{name} has dtype {x.dtype}, but {first} has {like.dtype}")
        if x.device != like.device:
            raise ValueError(f"{name} is on {x.device}, but {first} is on {like.device}")
        if x.dim() != len(axes):
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected ({', '.join(axes)})")
        for axis, n in zip(axes, x.shape, strict=True):
            if sizes.setdefault(axis, n) != n:
                raise ValueError(f"{name} has shape {tuple(x.shape)}: axis {axis} is {n}, but elsewhere {sizes[axis]}")
        # on a GPU a look at values would hold up the stream
        if name in parameters and x.is_cpu and x.isnan().any():
            raise ValueError(f"{name} contains NaN")
    return sizes


@contextmanager
def launching(x: Tensor) -> Iterator[None]:
    """On x's device. Interpreted kernels meet infinity and NaN as silently as compiled ones."""
    if x.is_cuda:
        with torch.cuda.device(x.device):
            yield
    else:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "All-NaN", RuntimeWarning)
            yield
