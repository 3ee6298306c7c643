"""NumPy implementations: the reference's own forms, mutants, honest variants. A gradient is `function.vjp`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from mixproof.verify.arithmetic import round_to
from mixproof.verify.errors import SubjectError


def unavailable(declaration: Any) -> str:
    return ""


def interpreted(declaration: Any) -> bool:
    return False


def trusted_dtypes(declaration: Any) -> tuple[str, ...]:
    return declaration.dtypes


def tensor(x: np.ndarray, dtype: str, declaration: Any) -> np.ndarray:
    """bfloat16 has no NumPy type: its values are held in float32."""
    return np.array(round_to(x, dtype), dtype="float32" if dtype == "bfloat16" else dtype, order="C")


def array(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, dtype=np.float64)


def is_floating(x: Any) -> bool:
    return isinstance(x, (np.ndarray, np.floating)) and np.issubdtype(x.dtype, np.floating)


def describe(x: Any) -> str:
    return f"{type(x).__name__} {getattr(x, 'dtype', '')}".strip()


def gradients(
    subject: Any, native: Mapping[str, Any], names: list[str], cotangents: Mapping[str, Any]
) -> dict[str, Any]:
    vjp = getattr(subject.function, "vjp", None)
    if vjp is None:
        raise SubjectError(f"{subject.name} declares gradients but has no attribute vjp")
    grads = vjp(cotangents, **native)
    return {n: grads[n] for n in names}


def copies(native: Mapping[str, Any]) -> dict[str, Any]:
    return {n: x.copy() if isinstance(x, np.ndarray) else x for n, x in native.items()}


def strided(x: np.ndarray, kind: str) -> np.ndarray:
    """The same values at other strides: "outer" or "transposed" (first or last two axes swapped in memory), "sliced"
    (every second element), "offset"."""
    if kind == "outer" and x.ndim >= 3:
        return np.ascontiguousarray(np.swapaxes(x, 0, 1)).swapaxes(0, 1)
    if kind == "transposed" and x.ndim >= 2:
        return np.ascontiguousarray(np.swapaxes(x, -1, -2)).swapaxes(-1, -2)
    if kind == "sliced" and x.ndim >= 1:
        wide = np.full((*x.shape[:-1], 2 * x.shape[-1]), np.nan, dtype=x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]
    flat = np.full(x.size + 3, np.nan, dtype=x.dtype)
    flat[3:] = x.ravel()
    return flat[3:].reshape(x.shape)


def one_thread() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@contextlib.contextmanager
def poisoned_allocation() -> Iterator[None]:
    """np.empty and np.empty_like give NaN."""
    empty, empty_like = np.empty, np.empty_like

    def poison(make: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        def made(*args: Any, **kwargs: Any) -> np.ndarray:
            x = make(*args, **kwargs)
            if np.issubdtype(x.dtype, np.floating):
                x.fill(np.nan)
            return x

        return made

    np.empty, np.empty_like = poison(empty), poison(empty_like)
    try:
        yield
    finally:
        np.empty, np.empty_like = empty, empty_like
