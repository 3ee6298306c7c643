"""PyTorch implementations: the one place where NumPy arrays become tensors and back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mixproof.verify.errors import SubjectError
from mixproof.verify.subject import first_line, quiet

KINDS = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


WITHHELD = "triton runs interpreted on CPU: {0} verdicts withheld (the interpreter fails a 2-line {0} canary)"


def device(declaration: Any) -> str:
    """The GPU where there is one and the implementation supports it."""
    return "cuda" if "cuda" in declaration.devices and torch.cuda.is_available() else "cpu"


def interpreted(declaration: Any) -> bool:
    """Whether its Triton kernels run through the interpreter."""
    return "triton" in declaration.requires and device(declaration) == "cpu"


def unavailable(declaration: Any) -> str:
    if "cpu" not in declaration.devices and device(declaration) == "cpu":
        return "needs a GPU"
    if interpreted(declaration):
        from mixproof.verify.subjects.triton import interpreter

        return interpreter.unavailable() or ""
    return ""


def trusted_dtypes(declaration: Any) -> tuple[str, ...]:
    """bfloat16 verdicts are withheld where a canary shows that the interpreter computes it wrongly."""
    if interpreted(declaration) and "bfloat16" in declaration.dtypes:
        from mixproof.verify.subjects.triton import interpreter

        if not interpreter.bf16_is_right():
            return tuple(d for d in declaration.dtypes if d != "bfloat16")
    return declaration.dtypes


def tensor(x: np.ndarray, dtype: str, declaration: Any) -> torch.Tensor:
    t = torch.from_numpy(np.array(x, dtype=np.float64, order="C"))
    return t.to(KINDS[dtype]).to(device(declaration))


def array(t: torch.Tensor) -> np.ndarray:
    return t.detach().to("cpu", torch.float64).numpy().copy()


def is_floating(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def describe(x: Any) -> str:
    return f"a tensor of {x.dtype}" if isinstance(x, torch.Tensor) else type(x).__name__


class _Seed(torch.autograd.Function):
    """A scalar whose gradient with respect to y is the cotangent, strides and all. Handing cotangents to autograd
    itself costs two seconds: it imports SymPy to compare their shapes."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
        ctx.cotangent = cotangent
        return y.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *scalar: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.cotangent, None


def gradients(
    subject: Any, native: Mapping[str, Any], names: list[str], cotangents: Mapping[str, Any]
) -> dict[str, Any]:
    """Autograd; an input that the graph does not reach has gradient zero. Raises SubjectError if backward raises."""
    leaves = {n: x.detach().clone().requires_grad_() if n in names else x for n, x in native.items()}
    outputs = {n: y for n, y in subject.invoke(leaves).items() if n in cotangents}
    reached = {n: y for n, y in outputs.items() if y.requires_grad}
    if not reached:
        raise SubjectError(
            f"{subject.name} returned outputs without a gradient; declare gradients=False if it has none"
        )
    try:
        with quiet():
            seeds: list[Any] = [_Seed.apply(y, cotangents[n].to(y.dtype)) for n, y in reached.items()]
            grads = torch.autograd.grad([torch.stack(seeds).sum()], [leaves[n] for n in names], allow_unused=True)
    except Exception as error:
        raise SubjectError(f"{subject.name} raised in backward: {first_line(error)}") from error
    return {n: torch.zeros_like(leaves[n]) if g is None else g for n, g in zip(names, grads, strict=True)}


def copies(native: Mapping[str, Any]) -> dict[str, Any]:
    return {n: x.detach().clone() if isinstance(x, torch.Tensor) else x for n, x in native.items()}


def strided(t: torch.Tensor, kind: str) -> torch.Tensor:
    """The same values at other strides: "outer" or "transposed" (first or last two axes swapped in memory), "sliced"
    (every second element), "offset"."""
    if kind == "outer" and t.dim() >= 3:
        return t.transpose(0, 1).contiguous().transpose(0, 1)
    if kind == "transposed" and t.dim() >= 2:
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)
    if kind == "sliced" and t.dim() >= 1:
        wide = torch.full((*t.shape[:-1], 2 * t.shape[-1]), float("nan"), dtype=t.dtype, device=t.device)
        wide[..., ::2] = t
        return wide[..., ::2]
    flat = torch.full((t.numel() + 3,), float("nan"), dtype=t.dtype, device=t.device)
    flat[3:] = t.reshape(-1)
    return flat[3:].view(t.shape)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Small tensors cost more to share among threads than to compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


ALLOCATORS = ("empty", "empty_like", "empty_strided")


@contextlib.contextmanager
def poisoned_allocation() -> Iterator[None]:
    """torch.empty, empty_like, empty_strided and Tensor.new_empty give NaN."""

    def poison(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            t = make(*args, **kwargs)
            return t.fill_(float("nan")) if t.is_floating_point() else t

        return made

    saved = {name: getattr(torch, name) for name in ALLOCATORS}
    new_empty = torch.Tensor.new_empty
    for name, make in saved.items():
        setattr(torch, name, poison(make))
    torch.Tensor.new_empty = poison(new_empty)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for name, make in saved.items():
            setattr(torch, name, make)
        torch.Tensor.new_empty = new_empty  # type: ignore[method-assign]


def saved_bytes(subject: Any, native: Mapping[str, Any], names: list[str]) -> int:
    """Bytes that autograd keeps for backward, each storage counted once, inputs left out."""
    leaves = {n: x.detach().clone().requires_grad_() if n in names else x for n, x in native.items()}
    own = {x.untyped_storage().data_ptr() for x in leaves.values() if isinstance(x, torch.Tensor)}
    kept: dict[int, int] = {}
    alive = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(t)  # so that no address is reused
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        outputs = subject.invoke(leaves)
    del outputs
    return sum(kept.values())


# operations -> the positions of the two matrices that they multiply
PRODUCTS = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "addmm": (1, 2),
    "baddbmm": (1, 2),
    "mv": (0, 1),
    "addmv": (1, 2),
    "dot": (0, 1),
}


class _Counter(TorchDispatchMode):
    """Counts the operations of matrix products. torch's own counter imports Triton, for compilation, and Dynamo, which
    takes longer than most verdicts."""

    total = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if places := PRODUCTS.get(func.overloadpacket.__name__):
            A, B = (args[i] for i in places)
            self.total += 2 * A.numel() * (B.shape[-1] if B.dim() > 1 else 1)
        return func(*args, **(kwargs or {}))


def flops(subject: Any, native: Mapping[str, Any]) -> int:
    """Floating-point operations of the matrix products."""
    return counted(lambda: subject.invoke(native))


def counted(call: Callable[[], Any]) -> int:
    """Floating-point operations of the matrix products in a call."""
    with _Counter() as counter:
        call()
    return counter.total
