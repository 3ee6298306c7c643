"""Canaries: two-line kernels whose answer is known, one for each way in which Triton's interpreter is known to err.

A canary compares the interpreter with what the compiler makes of the same kernel: IEEE 754 for values, Triton's own
typing rules for types. It says nothing about the GPU's rounding. Importing this module starts the interpreter.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from mixproof.verify.subjects.triton import interpreter

interpreter.start()

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.language.extra import libdevice  # noqa: E402


class Canary(NamedTuple):
    """`sings()` is True while the interpreter is right. `bfloat16`: only kernels that use that dtype are affected.
    `repaired`: whether interpreter.py has a repair, so that a defect that stays is an error."""

    name: str
    symptom: str
    sings: Callable[[], bool]
    bfloat16: bool = False
    repaired: bool = True


def alive(canary: Canary) -> bool:
    """Whether the interpreter is right about it; an exception or a warning is a wrong answer too."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            return bool(canary.sings())
        except Exception:
            return False


def _run(kernel: Any, *arguments: Any, like: torch.Tensor) -> Any:
    """kernel(*arguments, out) on one program; what it wrote to `out`, shaped and typed `like`, as nested lists."""
    out = torch.full_like(like, -99)
    kernel[(1,)](*arguments, out)
    return out.double().tolist()


# ---- typing and control flow


@triton.autotune([triton.Config({"N": 1}), triton.Config({"N": 2})], key=[])
@triton.jit
def _tuned(out, N: tl.constexpr):
    tl.store(out, N)


def _autotuner() -> bool:
    return _run(_tuned, like=torch.zeros(1))[0] in (1, 2)


@triton.jit
def _loop(n, out):
    for i in range(n):
        tl.store(out + i, ((i - 3) // 2).to(tl.float32))


def _loop_variable() -> bool:
    # C division truncates; Python's gives -2 for -3 // 2, and its integers have no `.to`
    return _run(_loop, 6, like=torch.zeros(6)) == [-1, -1, 0, 0, 0, 1]


@triton.jit
def _times(x, scale, out):
    i = tl.arange(0, 1)
    tl.store(out + i, (tl.load(x + i) * scale).to(tl.float32))


def _float_argument() -> bool:
    # 1 + 2^-11 survives as a float32 scalar; as a Python number it would be rounded to the float16 of its neighbour
    return _run(_times, torch.ones(1, dtype=torch.float16), 1 + 2.0**-11, like=torch.zeros(1)) == [1 + 2.0**-11]


@triton.jit
def _mask(x, n, out):
    i = tl.arange(0, 4)
    tl.store(out + i, tl.load(x + i, mask=(n.to(tl.int64) > 0) & (i < 2), other=7.0))


def _comparison() -> bool:
    return _run(_mask, torch.arange(4.0), 1, like=torch.zeros(4)) == [0, 1, 7, 7]


arange = tl.arange


@triton.jit
def _alias(out):
    i = arange(0, 2)
    tl.store(out + i, tl.zeros((2,), tl.float32))


def _builtin_alias() -> bool:
    return _run(_alias, like=torch.zeros(2)) == [0, 0]


@triton.jit
def _tanh(x, out):
    i = tl.arange(0, 2)
    tl.store(out + i, libdevice.tanh(tl.load(x + i)))


def _libdevice() -> bool:
    x = torch.tensor([0.0, 40.0])
    return _run(_tanh, x, like=x) == [0, 1]


@triton.jit
def _exceptions(x, out):
    i = tl.arange(0, 2)
    y = tl.load(x + i)
    tl.store(out + i, tl.exp(y) - tl.max(y - y, 0))


def _floating_point_exception() -> bool:
    huge, undefined = _run(_exceptions, torch.tensor([1000.0, float("inf")]), like=torch.zeros(2))
    return huge == float("inf") == undefined and _all_nan() != _all_nan()


@triton.jit
def _maximum(x, out):
    i = tl.arange(0, 2)
    tl.store(out, tl.max(tl.load(x + i), 0))


def _all_nan() -> float:
    return _run(_maximum, torch.full((2,), float("nan")), like=torch.zeros(1))[0]


# ---- bfloat16


def _b16(*x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.bfloat16)


@triton.jit
def _arithmetic(x, y, out):
    i = tl.arange(0, 1)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(out + i, a + b)
    tl.store(out + 1 + i, a * b)
    tl.store(out + 2 + i, -a)
    tl.store(out + 3 + i, tl.fma(a, a, b))
    tl.store(out + 4 + i, tl.clamp(b, a, a))
    tl.store(out + 5 + i, tl.maximum(a, b))
    tl.store(out + 6 + i, tl.where(b < a, 1, 0))


def _bfloat16_arithmetic() -> bool:
    return _run(_arithmetic, _b16(1.5), _b16(-2.0), like=torch.zeros(7, dtype=torch.bfloat16)) == [
        *(-0.5, -3.0, -1.5, 0.25, 1.5, 1.5, 1.0),
    ]


@triton.jit
def _reductions(x, out):
    i = tl.arange(0, 4)
    a = tl.load(x + i)
    tl.store(out + i, tl.cumsum(a, 0))
    tl.store(out + 4, tl.sum(a, 0))
    tl.store(out + 5, tl.max(a, 0))
    tl.store(out + 6, tl.argmin(a, 0))


def _bfloat16_reductions() -> bool:
    return _run(_reductions, _b16(1, -2, 3, 4), like=torch.zeros(7, dtype=torch.bfloat16)) == [1, -1, 2, 6, 6, 4, 1]


@triton.jit
def _cast(x, out):
    i = tl.arange(0, 8)
    tl.store(out + i, tl.load(x + i).to(tl.bfloat16))


@triton.jit
def _cast_back(x, out):
    i = tl.arange(0, 2)
    tl.store(out + i, tl.load(x + i).to(tl.int32))


def _bfloat16_cast() -> bool:
    """Round to nearest even, from float and integer types, NaN and infinity kept."""
    x = torch.tensor([1.998, -1.998, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 3.4e38, -float("inf"), 1e-40, 0.1])
    low_payload = torch.full((8,), 0x7F800001, dtype=torch.int32).view(torch.float32)
    out = x.bfloat16()
    return (
        _run(_cast, x, like=out) == out.double().tolist() == _run(_cast, x.double(), like=out)
        and all(y != y for y in _run(_cast, low_payload, like=out))
        and _run(_cast, torch.arange(250, 258), like=out) == [250, 251, 252, 253, 254, 255, 256, 256]
        and _run(_cast_back, _b16(-3.5, 7), like=torch.zeros(2, dtype=torch.int32)) == [-3, 7]
    )


@triton.jit
def _dot(x, out):
    i = tl.arange(0, 16)
    a = tl.load(x + 16 * i[:, None] + i[None, :])
    tl.store(out + 16 * i[:, None] + i[None, :], tl.dot(a, a))


def _bfloat16_dot() -> bool:
    x = torch.full((16, 16), 1.5, dtype=torch.bfloat16)
    return _run(_dot, x, like=torch.zeros(16, 16)) == [[36.0] * 16] * 16


# ---- not repaired: the gate does without


def _tf32() -> bool:
    # the compiled dot rounds or truncates operands to 10 bits, where input_precision is "tf32", the default
    x = torch.eye(16) * (1 + 2.0**-11)
    return _run(_dot, x, like=x)[0][0] in (1, (1 + 2.0**-10) ** 2)


@triton.jit
def _float8(x, out):
    i = tl.arange(0, 2)
    tl.store(out + i, tl.load(x + i).to(tl.float8e5).to(tl.float32))


def _float8_cast() -> bool:
    # 1.9 lies next to 2; the rounding carry is lost and gives 1
    return _run(_float8, torch.tensor([1.9, 1.0]), like=torch.zeros(2)) == [2, 1]


CANARIES = (
    Canary("autotuner", "autotuning asks a GPU driver for a stop watch", _autotuner),
    Canary("loop variable", "loop variables are Python integers, not scalars", _loop_variable),
    Canary("float argument", "float arguments are Python floats, which adopt their neighbour's dtype", _float_argument),
    Canary("comparison", "a comparison keeps the dtype of its operands", _comparison),
    Canary("builtin alias", "a builtin bound to another name is not interpreted", _builtin_alias),
    Canary("libdevice", "functions of libdevice have no body", _libdevice),
    Canary("floating-point exception", "overflow and NaN warn, as no GPU does", _floating_point_exception),
    Canary("bfloat16 cast", "casts to bfloat16 truncate, or copy integers as bit patterns", _bfloat16_cast, True),
    Canary("bfloat16 arithmetic", "arithmetic is done on the bit patterns", _bfloat16_arithmetic, True),
    Canary("bfloat16 reductions", "reductions and scans are done on the bit patterns", _bfloat16_reductions, True),
    Canary("bfloat16 dot", "dot products are formed of the bit patterns", _bfloat16_dot, True),
    Canary("tf32 dot", "operands of a tf32 dot are not rounded", _tf32, repaired=False),
    Canary("float8 cast", "casts to float8 lose the carry of rounding", _float8_cast, repaired=False),
)
