"""Triton's interpreter: canaries find what is wrong with it, repairs cure it, and a healthy one is left alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from mixproof.verify.subjects.triton import interpreter

if any(find_spec(package) is None for package in ("torch", "triton")):
    pytest.skip("torch and triton are not installed", allow_module_level=True)

NEEDED_BY_3_9 = {
    "autotuner",
    "loop variable",
    "float argument",
    "comparison",
    "builtin alias",
    "libdevice",
    "floating-point exception",
    "bfloat16 cast",
    "bfloat16 arithmetic",
    "bfloat16 reductions",
    "bfloat16 dot",
}
ACTIVATE = "from mixproof.verify.subjects.triton import interpreter\n"


def fresh(code: str, interpret: str | None = None):
    """What `code` prints as JSON in a new process that sees no GPU."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"CUDA_VISIBLE_DEVICES": ""}
    if interpret is not None:
        environment["TRITON_INTERPRET"] = interpret
    command = [sys.executable, "-W", "error", "-c", "import json\n" + code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def activated() -> dict[str, Any]:
    """What one process says: its canaries, which repairs there are, what a second activation leaves as it is."""
    return fresh(
        ACTIVATE + "outcomes = interpreter.canaries()\n"
        "from mixproof.verify.subjects.triton import canaries, repairs\n"
        "from triton.runtime import interpreter as t\n"
        "repaired = [sorted(repairs.REPAIRS), sorted(c.name for c in canaries.CANARIES if c.repaired)]\n"
        "names = 'binary_op', 'cast_impl', 'create_dot', 'create_fma'\n"
        "first = [getattr(t.InterpreterBuilder, n) for n in names]\n"
        "interpreter.activate()\n"
        "same = [a is getattr(t.InterpreterBuilder, n) for a, n in zip(first, names)]\n"
        "print(json.dumps({'outcomes': outcomes, 'repaired': repaired, 'same': same}))"
    )


@pytest.fixture(scope="module")
def outcomes(activated: dict[str, Any]) -> dict[str, list[bool]]:
    return activated["outcomes"]


def test_repairs_cure_every_defect_they_are_for(outcomes) -> None:
    assert NEEDED_BY_3_9 <= set(outcomes)
    assert {name for name in NEEDED_BY_3_9 if outcomes[name][1]} == set()


@pytest.mark.skipif(not version("triton").startswith("3.9."), reason="which defects are there depends on the release")
def test_triton_3_9_has_every_defect(outcomes) -> None:
    assert {name for name, (before, _) in outcomes.items() if before} == NEEDED_BY_3_9 | {"tf32 dot", "float8 cast"}
    assert {name for name, (_, after) in outcomes.items() if after} == {"tf32 dot", "float8 cast"}


def test_every_repair_has_a_canary(activated) -> None:
    repaired, canaries = activated["repaired"]
    assert repaired == canaries == sorted(NEEDED_BY_3_9)


def test_activation_is_idempotent(activated) -> None:
    assert activated["same"] == [True] * 4


def test_a_healthy_interpreter_is_left_alone() -> None:
    code = ACTIVATE + (
        "interpreter.start()\n"
        "from mixproof.verify.subjects.triton import canaries\n"
        "from triton.runtime import interpreter as t, autotuner\n"
        "patched = lambda: [hasattr(f, '__wrapped__') for f in (t.InterpreterBuilder.binary_op, t._implicit_cvt,\n"
        "    t.GridExecutor.__call__, autotuner.Autotuner._bench)]\n"
        "canaries.CANARIES = tuple(c._replace(sings=lambda: True) for c in canaries.CANARIES)\n"
        "interpreter.activate()\n"
        "print(json.dumps([patched(), 'visit_For' in vars(t.ASTTransformer), interpreter.bf16_is_right()]))"
    )
    assert fresh(code) == [[False] * 4, False, True]


@pytest.mark.parametrize("defect", ["loop variable", "bfloat16 dot"])
def test_a_defect_that_stays_is_refused(defect: str) -> None:
    """One of bfloat16 costs verdicts on bfloat16, any other all."""
    code = ACTIVATE + (
        "interpreter.start()\n"
        "from mixproof.verify.subjects.triton import repairs\n"
        f"repairs.REPAIRS[{defect!r}] = lambda: None\n"
        "print(json.dumps([interpreter.unavailable(), interpreter.bf16_is_right()]))"
    )
    why, right = fresh(code)
    assert right is False
    assert why is None if defect == "bfloat16 dot" else f"could not be repaired: {defect}" in why


@pytest.fixture(scope="module")
def elsewhere() -> dict[str, Any]:
    """What one process says that may not interpret; then, allowed to, that has a GPU; then that compiles for one which
    is gone. None of it activates anything."""
    return fresh(
        ACTIVATE + "import os, sys, torch\n"
        "found = {'forbidden': interpreter.unavailable()}\n"
        "del os.environ['TRITON_INTERPRET']\n"
        "absent, torch.cuda.is_available = torch.cuda.is_available, lambda: True\n"
        "interpreter.activate()\n"
        "found['gpu'] = [interpreter.unavailable(), interpreter.canaries(), interpreter.bf16_is_right(),\n"
        "    'triton' in sys.modules, 'TRITON_INTERPRET' in os.environ]\n"
        "torch.cuda.is_available = absent\n"
        "import triton\n"
        "why = interpreter.unavailable()\n"
        "try: interpreter.activate()\n"
        "except RuntimeError as error: found['too late'] = [why, str(error), interpreter.bf16_is_right()]\n"
        "print(json.dumps(found))",
        interpret="0",
    )


def test_too_late(elsewhere) -> None:
    why, error, right = elsewhere["too late"]
    assert why == error
    assert "triton was imported for compilation" in why
    assert "TRITON_INTERPRET=1" in why
    assert right is False


def test_forbidden(elsewhere) -> None:
    assert "TRITON_INTERPRET" in elsewhere["forbidden"]


def test_with_a_gpu_nothing_happens(elsewhere) -> None:
    assert elsewhere["gpu"] == [None, {}, True, False, False]


# ---- in this process: what the repaired interpreter computes

WHY_NOT = interpreter.unavailable() or (None if interpreter.interpreting() else "kernels are compiled here")
interpreted = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

if WHY_NOT is None:
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def cast_kernel(x, out, n, N: tl.constexpr):
        i = tl.program_id(0) * N + tl.arange(0, N)
        tl.store(out + i, tl.load(x + i, mask=i < n).to(out.dtype.element_ty), mask=i < n)

    @triton.jit
    def arithmetic_kernel(x, y, out, N: tl.constexpr):
        i = tl.arange(0, N)
        a, b = tl.load(x + i), tl.load(y + i)
        tl.store(out + i, a + b)
        tl.store(out + N + i, a - b)
        tl.store(out + 2 * N + i, a * b)
        tl.store(out + 3 * N + i, (a / b).to(tl.bfloat16))

    @triton.jit
    def dot_kernel(x, y, out, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
        m, k, n = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
        a = tl.load(x + m[:, None] * K + k[None, :])
        b = tl.load(y + k[:, None] * N + n[None, :])
        tl.store(out + m[:, None] * N + n[None, :], tl.dot(a, b))

    @triton.jit
    def ranges_kernel(out, n, STATIC: tl.constexpr):
        at = 0
        for i in range(n - 1, -2, -2):
            tl.store(out + at, i.to(tl.int64) * 10)
            at += 1
        for i in tl.range(0, n, 2, num_stages=2):
            tl.store(out + at, i % 3 + 100)
            at += 1
        for i in range(n):
            for j in tl.static_range(STATIC):
                tl.store(out + at, i + tl.arange(0, 1 + j * 0).to(tl.int64).sum() + 1000 * j)
                at += 1
        for i in range(n.to(tl.int64), n + 1):
            tl.store(out + at, i << 40)

    @triton.jit
    def scale_kernel(x, scale, out):
        i = tl.arange(0, 1)
        tl.store(out + i, tl.load(x + i) * scale)


def bits(x) -> np.ndarray:
    return x.view(torch.int16).numpy()


@interpreted
def test_float32_to_bfloat16_rounds_to_nearest_even() -> None:
    """Every bfloat16 and what lies between it and the next, against PyTorch's conversion."""
    between = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    x = (np.arange(1 << 16, dtype=np.uint32)[:, None] << np.uint32(16)) + between
    x = torch.from_numpy(x.reshape(-1).view(np.float32))
    out = torch.empty(len(x), dtype=torch.bfloat16)
    cast_kernel[(triton.cdiv(len(x), 1 << 16),)](x, out, len(x), 1 << 16)
    finite = ~x.isnan()
    assert np.array_equal(bits(out[finite]), bits(x.bfloat16()[finite]))
    assert out[~finite].isnan().all()
    back = torch.empty(len(x))
    cast_kernel[(triton.cdiv(len(x), 1 << 16),)](out, back, len(x), 1 << 16)
    assert torch.equal(back[finite], out.float()[finite])


@interpreted
def test_bfloat16_arithmetic_is_correctly_rounded() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(1024, generator=generator) * 2.0 ** torch.arange(1024).remainder(40) for _ in range(2))
    x, y = x.bfloat16(), y.bfloat16()
    out = torch.empty(4, 1024, dtype=torch.bfloat16)
    arithmetic_kernel[(1,)](x, y, out, 1024)
    a, b = x.double(), y.double()
    for got, want in zip(out, (a + b, a - b, a * b, a / b), strict=True):
        # float64 is exact, or nearly, for these exponents; PyTorch's way down rounds to nearest even
        assert np.array_equal(bits(got), bits(want.bfloat16()))


@interpreted
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dot_accumulates_in_float32(dtype: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(32, 32, generator=generator).to(getattr(torch, dtype)) for _ in range(2))
    out = torch.empty(32, 32)
    dot_kernel[(1,)](x, y, out, 32, 32, 32)
    want, size = x.double() @ y.double(), x.double().abs() @ y.double().abs()
    # 32 products and 32 additions, each good to 2^-24; operands are not rounded
    assert ((out - want).abs() <= 64 * 2.0**-24 * size).all()


@interpreted
def test_ranges_give_scalars() -> None:
    n = 5
    out = torch.full((32,), -1, dtype=torch.int64)
    ranges_kernel[(1,)](out, n, 2)
    down = [10 * i for i in range(n - 1, -2, -2)]
    stepped = [i % 3 + 100 for i in range(0, n, 2)]
    static = [i + 1000 * j for i in range(n) for j in range(2)]
    want = [*down, *stepped, *static, n << 40]
    assert out.tolist() == want + [-1] * (32 - len(want))


@interpreted
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_float_argument_is_a_float32(dtype: str) -> None:
    scale = 0.1
    x = torch.ones(1, dtype=getattr(torch, dtype))
    out = torch.zeros(1, dtype=torch.float64)
    scale_kernel[(1,)](x, scale, out)
    assert out.item() == np.float32(scale)
