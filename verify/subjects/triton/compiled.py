"""Compile our Triton kernels for GPUs that are absent, and read what the compilers report.

    python -m mixproof.verify.subjects.triton.compiled --target sm_90 [--json]

The public functions of the kernel modules are called on CPU tensors with launches recorded instead of run, so every
kernel is compiled as it would be launched: same tiles, same warps, same specialisation of arguments. Recording needs
compiled kernels, not interpreted ones, hence a process of its own: `resources(target)` starts it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

# target -> (backend, architecture, threads of a warp, bytes of shared memory that one program may have)
TARGETS: dict[str, tuple[str, int | str, int, int]] = {
    "sm_90": ("cuda", 90, 32, 232448),
    "gfx942": ("hip", "gfx942", 64, 65536),
}


@dataclass(frozen=True)
class Resources:
    """What one program of a compiled kernel takes. Spills and stack are bytes of a thread, except `spill_stores` for
    AMD, which counts spilled registers; `matrix` lists the kinds of matrix instructions, empty if there are none."""

    configuration: str
    kernel: str
    target: str
    warps: int
    registers: int
    shared: int
    spill_stores: int
    spill_loads: int
    stack: int
    matrix: tuple[str, ...]


@dataclass(frozen=True)
class Launch:
    """One kernel with the types, constants and alignments of the arguments that it was launched with."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[int, ...]
    options: dict[str, Any]

    @property
    def key(self) -> tuple[Any, ...]:
        constants = tuple((name, repr(value)) for name, value in self.constants.items())
        return (self.kernel.__name__, tuple(self.signature.items()), constants, self.aligned, str(self.options))


def resources(target: str, only: str = "") -> list[Resources]:
    """Compiles all kernels for `target` in a new process; configurations whose name contains `only`. Raises
    RuntimeError with the compiler's words if one does not compile."""
    command = [sys.executable, "-m", __name__, "--target", target, "--json", "--only", only]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "0"})
    if done.returncode:
        raise RuntimeError(f"compiling for {target} failed:\n{done.stderr[-4000:]}")
    return [Resources(**(row | {"matrix": tuple(row["matrix"])})) for row in json.loads(done.stdout)]


def configurations() -> dict[str, Callable[[], Any]]:
    """What is called, forward and backward, by name: the common size in both dtypes, a large one, one whose sizes are
    multiples of nothing, and one where every size is 1, which Triton compiles as constants."""
    import torch

    from mixproof.verify.subjects.triton import gma

    def call(
        K: int, R: int, V: int, dtype: torch.dtype, kinds: str = "alone all causal", H: int = 2, T: int = 128
    ) -> Callable[[], Any]:
        def run() -> None:
            q, k, v = (torch.zeros(1, T, H, n, dtype=dtype, requires_grad=True) for n in (R, R, V))
            mixture = torch.zeros(H, K, R), torch.zeros(H, K, R), torch.zeros(H, K)
            for kind in kinds.split():
                if kind == "alone":
                    outputs: tuple[torch.Tensor, ...] = (gma.responsibilities(q, *mixture),)
                elif kind == "all":
                    outputs = (gma.bidirectional(q, k, v, *mixture),)
                else:
                    outputs = gma.causal(q, k, v, *mixture, S0=torch.zeros(1, H, K, V), Z0=torch.zeros(1, H, K))
                sum((y * y).sum() for y in outputs).backward()  # not y.sum(): its cotangent has strides of 0

        return run

    return (
        {
            "gma K64 R64 V64 float32": call(64, 64, 64, torch.float32),
            "gma K64 R64 V64 bfloat16": call(64, 64, 64, torch.bfloat16, "causal"),
            "gma K512 R64 V256 float16": call(512, 64, 256, torch.float16, "alone all"),
            "gma K20 R3 V33 float32": call(20, 3, 33, torch.float32, H=3, T=65),
            "gma K1 R1 V1 float32": call(1, 1, 1, torch.float32, H=1, T=1),
        }
        | _tala_configurations()
        | _attention_configurations()
        | _scan_configurations()
    )


def _tala_configurations() -> dict[str, Callable[[], Any]]:
    """The same for TALA and its relatives, both directions. K and V are loop bounds: 128 compiles as 64 does."""
    import torch

    from mixproof.verify.subjects.triton import tala

    def call(K: int, V: int, dtype: torch.dtype, kinds: str, H: int = 2, T: int = 128) -> Callable[[], Any]:
        def run() -> None:
            q, k, v = (torch.zeros(1, T, H, n, dtype=dtype, requires_grad=True) for n in (K, K, V))
            head, token = torch.zeros(H, requires_grad=True), torch.zeros(1, T, H, dtype=dtype, requires_grad=True)
            S0 = torch.zeros(1, H, K, V)
            for kind in kinds.split():
                if kind == "constant":
                    O, S = tala.tala(q, k, v, head, head, S0=S0)
                else:
                    function = tala.simple_gated_linear_attention if kind == "log" else tala.time_varying
                    O, S = function(q, k, v, token, S0=S0)
                (O.sum() + S.sum()).backward()

        return run

    return {
        "tala K64 V64 float32": call(64, 64, torch.float32, "constant log signed"),
        "tala K128 V128 bfloat16": call(128, 128, torch.bfloat16, "constant log"),
        "tala K20 V33 float16": call(20, 33, torch.float16, "constant", H=3, T=65),
        "tala K1 V1 float32": call(1, 1, torch.float32, "signed", H=1, T=1),
    }


def _attention_configurations() -> dict[str, Callable[[], Any]]:
    """The same for blockwise softmax and sigmoid attention."""
    import torch

    from mixproof.verify.subjects.triton.sigmoid_attention import sigmoid_attention
    from mixproof.verify.subjects.triton.softmax_attention import softmax_attention

    def call(D: int, V: int, dtype: torch.dtype, kinds: str, H: int = 2, T: int = 128) -> Callable[[], Any]:
        def run() -> None:
            q, k, v = (torch.zeros(1, T, H, n, dtype=dtype, requires_grad=True) for n in (D, D, V))
            for kind in kinds.split():
                if kind == "sigmoid":
                    O, _, _ = sigmoid_attention(q, k, v, torch.zeros(H))
                else:
                    O = softmax_attention(q, k, v, causal=kind == "causal")
                (O * O).sum().backward()

        return run

    return {
        "attention D64 V64 float32": call(64, 64, torch.float32, "causal sigmoid"),
        "attention D20 V33 float16": call(20, 33, torch.float16, "full", H=3, T=65),
        "attention D1 V1 float32": call(1, 1, torch.float32, "sigmoid", H=1, T=1),
    }


def _scan_configurations() -> dict[str, Callable[[], Any]]:
    """The same for Mamba's selective scan."""
    import torch

    from mixproof.verify.subjects.triton import mamba

    def call(D: int, N: int, dtype: torch.dtype, T: int = 128) -> Callable[[], Any]:
        def run() -> None:
            u, delta, B, C = (torch.zeros(1, T, n, dtype=dtype, requires_grad=True) for n in (D, D, N, N))
            A, skip = torch.zeros(D, N), torch.zeros(D)
            for scan in (mamba.zero_order_hold, mamba.euler):
                y, h = scan(u, delta, A, B, C, skip, torch.zeros(1, D, N))
                ((y * y).sum() + h.sum()).backward()

        return run

    return {
        "scan D64 N16 float32": call(64, 16, torch.float32),
        "scan D33 N100 bfloat16": call(33, 100, torch.bfloat16, T=65),
        "scan D1 N1 float32": call(1, 1, torch.float32, T=1),
    }


def recorded(call: Callable[[], Any]) -> list[Launch]:
    """The kernels that `call` launches, without running them."""
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches.append(_launch(self, args, options))

    run = JITFunction.run
    JITFunction.run = record
    try:
        call()
    finally:
        JITFunction.run = run
    return launches


def compiled(launch: Launch, target: str, configuration: str = "") -> Resources:
    """Compiles one launch for `target` and reads the result."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    backend, architecture, threads, _ = TARGETS[target]
    attributes = {(i,): [["tt.divisibility", 16]] for i in launch.aligned}
    source = ASTSource(launch.kernel, launch.signature, launch.constants, attributes)
    log = io.StringIO()
    with contextlib.redirect_stdout(log), knobs.compilation.scope(), knobs.nvidia.scope():
        knobs.compilation.always_compile = True  # what comes from the cache has no log
        knobs.nvidia.dump_ptxas_log = True
        binary = triton.compile(source, target=GPUTarget(backend, architecture, threads), options=launch.options)
    read = _read_cuda if backend == "cuda" else _read_hip
    shared, warps = binary.metadata.shared, binary.metadata.num_warps
    return Resources(
        configuration, launch.kernel.__name__, target, warps, shared=shared, **read(binary.asm, log.getvalue())
    )


def _launch(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Launch:
    """What Triton would specialise on: None and 1 are constants, multiples of 16 are known as such."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    aligned = []
    given = dict(zip(kernel.arg_names, args, strict=False))
    given |= {name: options.pop(name) for name in kernel.arg_names if name in options}
    for i, parameter in enumerate(kernel.params):
        name, value = parameter.name, given[parameter.name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[name], constants[name] = "constexpr", value
            continue
        if isinstance(value, bool):
            signature[name] = "i1"
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            kind = str(value.dtype).removeprefix("torch.")
            signature[name] = "*" + {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[kind]
        if not isinstance(value, float) and (value if isinstance(value, int) else value.data_ptr()) % 16 == 0:
            aligned.append(i)
    return Launch(kernel, signature, constants, tuple(aligned), options)


def _read_cuda(asm: Any, log: str) -> dict[str, Any]:
    """The log of ptxas -v."""
    number = {
        "stack": r"(\d+) bytes stack frame",
        "spill_stores": r"(\d+) bytes spill stores",
        "spill_loads": r"(\d+) bytes spill loads",
        "registers": r"Used (\d+) registers",
    }
    instructions = re.findall(r"(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)[\w.:]*", asm["ptx"])
    return {name: _only(pattern, log) for name, pattern in number.items()} | {"matrix": _kinds(instructions)}


def _read_hip(asm: Any, log: str) -> dict[str, Any]:
    """The metadata at the end of the assembly. Vector registers include the accumulation registers."""
    number = {"stack": "private_segment_fixed_size", "spill_stores": "vgpr_spill_count", "registers": "vgpr_count"}
    read = {name: _only(rf"\.{word}:\s+(\d+)", asm["amdgcn"]) for name, word in number.items()}
    return read | {"spill_loads": 0, "matrix": _kinds(re.findall(r"v_(?:mfma|wmma)\w*", asm["amdgcn"]))}


def _only(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if not found:
        raise RuntimeError(f"the compiler's report has no {pattern!r}: {text[-1000:]}")
    return int(found[1])


def _kinds(instructions: list[str]) -> tuple[str, ...]:
    return tuple(sorted(set(instructions)))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mixproof.verify.subjects.triton.compiled", description=__doc__)
    parser.add_argument("--target", choices=TARGETS, required=True)
    parser.add_argument("--only", default="", help="configurations whose name contains this")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    os.environ["TRITON_INTERPRET"] = "0"  # before triton is imported
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # today's default, which Triton 3.10 changes
    chosen = {name: call for name, call in configurations().items() if options.only in name}
    if not chosen:
        parser.error(f"no configuration contains {options.only!r}; there are {', '.join(configurations())}")
    rows: list[Resources] = []
    seen: set[Any] = set()
    for name, call in chosen.items():
        launches = {launch.key: launch for launch in recorded(call)}
        rows += [compiled(launch, options.target, name) for key, launch in launches.items() if key not in seen]
        seen |= set(launches)
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
        return 0
    for row in rows:
        spills = f"spills {row.spill_stores}/{row.spill_loads}  stack {row.stack}"
        print(
            f"{row.configuration:28s} {row.kernel:20s} warps {row.warps}  registers {row.registers:3d}  "
            f"shared {row.shared:6d}  {spills:30s} {' '.join(row.matrix)}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
