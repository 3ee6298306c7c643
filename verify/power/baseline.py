"""The form of record with every intermediate result in one format: what users compare a kernel of that format with.

Sums and products of matrices accumulate in float32 or more and are rounded at their end, as PyTorch's are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mixproof.reference.spec import Operator
from mixproof.verify import oracle
from mixproof.verify.arithmetic import round_to

Arrays = Mapping[str, Any]


def outputs(operator: Operator, inputs: Arrays, dtype: str) -> dict[str, np.ndarray]:
    """Every output, by name. `dtype` may be tf32: float32, but operands of products of matrices are cut to TF32."""
    with np.errstate(all="ignore"):
        results = {bh: operator.evaluate(_lifted(head, dtype)) for bh, head in oracle.heads(operator, inputs)}
        return _lowered(oracle.gather(operator, inputs, results))


def gradients(operator: Operator, inputs: Arrays, cotangents: Arrays, dtype: str) -> dict[str, np.ndarray]:
    """The gradient of every differentiable input present; a parameter's sums over the batch."""

    def vjp(upstream: Arrays, **head: Any) -> dict[str, Any]:
        return operator.vjp(_lifted(upstream, dtype), **_lifted(head, dtype))

    with np.errstate(all="ignore"):
        return _lowered(oracle.plain_backward(operator, inputs, cotangents, vjp))


class Rounded(np.ndarray):
    """Values of one format, held in float32; what comes of them is rounded to it again."""

    format = "float32"

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        plain = [x.view(np.ndarray) if isinstance(x, Rounded) else x for x in inputs]
        if ufunc is np.matmul and self.format == "tf32":
            plain = [round_to(x, "tf32").astype(np.float32) for x in plain]
        result = self.rounded(getattr(ufunc, method)(*plain, **options))
        if out is not None:
            out[0][...] = result
            return out[0]
        return result

    def __array_function__(self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        return self.rounded(super().__array_function__(function, types, args, kwargs))

    @classmethod
    def rounded(cls, x: Any) -> Any:
        if isinstance(x, (tuple, list)):
            return type(x)(cls.rounded(y) for y in x)
        if isinstance(x, (np.ndarray, np.floating)) and np.issubdtype(x.dtype, np.floating):
            return cls._nearest(np.asarray(x)).view(cls)
        return x

    @classmethod
    def _nearest(cls, x: np.ndarray) -> np.ndarray:
        if cls.format == "float16":
            return x.astype(np.float16).astype(np.float32)
        return (round_to(x, cls.format) if cls.format == "bfloat16" else x).astype(np.float32)


class TF32(Rounded):
    format = "tf32"


class BFloat16(Rounded):
    format = "bfloat16"


class Float16(Rounded):
    format = "float16"


CLASSES: dict[str, type[Rounded]] = {c.format: c for c in (Rounded, TF32, BFloat16, Float16)}


def _lifted(arrays: Arrays, dtype: str) -> dict[str, Any]:
    return {
        n: CLASSES[dtype].rounded(np.asarray(x)) if isinstance(x, (np.ndarray, np.floating)) else x
        for n, x in arrays.items()
    }


def _lowered(arrays: Arrays) -> dict[str, np.ndarray]:
    return {n: np.asarray(x, dtype=float) for n, x in arrays.items()}
