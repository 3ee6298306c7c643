"""Every Triton kernel of ours compiles for GPUs that are not here, and fits: no spills, no reduced precision."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

from mixproof.verify.subjects.triton import compiled

if find_spec("torch") is None or find_spec("triton") is None:
    pytest.skip("torch and triton are needed", allow_module_level=True)

FORWARD = {"normaliser_kernel", "gamma_kernel", "aggregate_kernel", "prefix_kernel", "read_kernel"}
GMA = FORWARD | {"quotient_kernel", "centre_kernel", "value_kernel", "mixture_kernel"}
ATTENTION = {"forward_kernel", "query_kernel", "key_kernel", "value_kernel"}
SCAN = {"forward_kernel", "backward_kernel"}
TALA = {"states_kernel", "read_kernel", "gradient_kernel"}


@pytest.mark.parametrize(("target", "only"), [("sm_90", ""), ("gfx942", "64")])
def test_every_kernel_compiles_and_fits(target, only):
    """In one test a target: it is compiled once, whichever process runs it. For gfx942 the sizes that need most."""
    rows = compiled.resources(target, only)
    if only:
        kernels = {(row.configuration.split()[0], row.kernel) for row in rows}
        every = (("gma", GMA), ("tala", TALA), ("attention", ATTENTION), ("scan", SCAN))
        assert kernels == {(word, kernel) for word, names in every for kernel in names}
    else:
        every_kernel_is_there(rows)
    for row in rows:
        assert 0 < row.registers <= (512 if row.target.startswith("gfx") else 255), row
        assert row.shared <= compiled.TARGETS[row.target][3], row
        assert (row.spill_stores, row.spill_loads, row.stack) == (0, 0, 0), row
    # dot products are in full float32: on sm_90 by no matrix instruction at all, on gfx942 by one for float32
    kinds = {kind for row in rows for kind in row.matrix}
    assert all("f32_16x16x4_f32" in kind or "f32_32x32x2_f32" in kind for kind in kinds)
    assert bool(kinds) == (target == "gfx942")


def test_both_targets_are_compiled_for():
    assert set(compiled.TARGETS) == {"sm_90", "gfx942"}


def every_kernel_is_there(rows):
    by_name: dict[str, set[str]] = {}
    for row in rows:
        by_name.setdefault(row.configuration, set()).add(row.kernel)
    assert len([name for name in by_name if name.startswith("gma")]) == 5
    assert by_name["gma K64 R64 V64 float32"] == by_name["gma K1 R1 V1 float32"] == GMA
    for word, kernels, count in (("tala", TALA, 4), ("attention", ATTENTION, 3), ("scan", SCAN, 3)):
        assert [k for name, k in by_name.items() if name.startswith(word)] == [kernels] * count
    # without inputs in the dtype a kernel is the same in all of them, and listed once
    assert by_name["gma K64 R64 V64 bfloat16"] == GMA - {"prefix_kernel", "gamma_kernel", "centre_kernel"}


GREEDY = """
import os
os.environ["TRITON_INTERPRET"], os.environ["TRITON_DEFAULT_FP_FUSION"] = "0", "1"
import torch, triton, triton.language as tl
from mixproof.verify.subjects.triton import compiled

@triton.jit
def greedy(x, y, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)[:, None] * n + tl.arange(0, BLOCK)[None, :]
    block = tl.load(x + at)
    tl.store(y + at, tl.dot(block, block, input_precision="tf32") + block)

x = torch.zeros(64, 64)
(launch,) = compiled.recorded(lambda: greedy[(1,)](x, x, 64, 64, num_warps=1, maxnreg=64))
row = compiled.compiled(launch, "sm_90")
print(min(row.spill_stores, row.spill_loads, row.stack), row.shared, *row.matrix)
"""


def test_what_is_measured_shows_when_it_is_wrong(tmp_path):
    """A tile too large for the registers that it may use, and a dot product in TF32."""
    path = tmp_path / "greedy.py"
    path.write_text(GREEDY)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    spilled, shared, *kinds = done.stdout.split()
    assert int(spilled) > 0
    assert int(shared) >= 64 * 64 * 4
    assert any("tf32" in kind for kind in kinds)


def test_a_configuration_that_does_not_exist_is_refused():
    with pytest.raises(RuntimeError, match="no configuration"):
        compiled.resources("sm_90", only="rwkv")
