"""The command `mixproof`: what it prints and with which code it exits."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from mixproof.reference import OPERATORS
from mixproof.verify import judge as judging
from mixproof.verify.__main__ import main

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")

RECURRENCE = """\
def mine(q, k, v, gamma, scale=1.0, S0=None):
    S = np.zeros((*q.shape[:2], q.shape[3], v.shape[3]), q.dtype) if S0 is None else S0
    rows = []
    for t in range(q.shape[2]):
        S = gamma[:, None, None] * S + k[:, :, t, :, None] * v[:, :, t, None, :]
        rows.append(q.dtype.type(scale) * np.sum(q[:, :, t, :, None] * S, axis=2))
    return np.stack(rows, axis=2), S
"""
DECLARED = f"""\
import numpy as np
from mixproof.verify import implements


@implements("retention", layout="B H T D", framework="numpy", gradients=False)
{RECURRENCE}"""
TORCH = '''\
import torch


def retention(q, k, v, gamma, scale=1.0, S0=None):
    """(B, T, H, K), (B, T, H, K), (B, T, H, V), (H,) -> (B, T, H, V), (B, H, K, V)."""
    B, T, H, K = q.shape
    S = q.new_zeros(B, H, K, v.shape[-1]) if S0 is None else S0
    rows = []
    for t in range(T):
        S = gamma[:, None, None] * S + k[:, t, :, :, None] * v[:, t, :, None, :]
        rows.append(scale * (q[:, t, :, :, None] * S).sum(2))
    return torch.stack(rows, 1).to(q.dtype), S


def attention(q, k, v, scale=None, causal=False):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale).transpose(1, 2)
'''
BREAK = ("gamma[:, None, None] * S +", "S +")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to work in; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def mixproof(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command in this process: exit code, what it printed, what it said to people."""

    def run(*words: str) -> tuple[int, str, str]:
        code = main(words)
        return code, *capsys.readouterr()

    return run


# ---------------------------------------------------------------------------------------------------------------- check


def test_what_holds(mixproof, folder: Path) -> None:
    (folder / "gate.py").write_text(DECLARED)
    code, out, err = mixproof("check", "gate.py")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert re.fullmatch(r"mixproof \S+  numpy \S+ .*  profile short  seed 0", lines[0])
    assert lines[1:4] == ["gate.py:5  mine: retention, float32", "", "retention             mine"]
    assert re.fullmatch(r"  forward +0\.\d+", lines[4])
    assert re.fullmatch(r"\d+ cells hold, 0 broken, \d+ cases, \d+ s", lines[-1])


def test_what_does_not(mixproof, folder: Path) -> None:
    (folder / "gate.py").write_text(DECLARED.replace(*BREAK))
    code, out, err = mixproof("check", "gate.py")
    assert (code, err) == (1, "")
    assert "Traceback" not in out
    blocks = [block.splitlines() for block in out.split("\n\n") if block.startswith("BROKEN")]
    assert "BROKEN  retention/mine/forward" in [block[0].split("   ")[0] for block in blocks]
    for block in blocks:
        assert [line[:13].strip() for line in block[1:]] == ["smallest", "at", "because", "equals", "replay"]
    assert out.index("\nretention   ") > out.rindex("BROKEN")  # the matrix comes after the last failure
    assert re.fullmatch(r"\d+ cells hold, \d broken, \d+ cases, \d+ s", out.splitlines()[-1])
    assert f" {len(blocks)} broken," in out.splitlines()[-1]


def test_only_some_cells(mixproof, folder: Path) -> None:
    (folder / "gate.py").write_text(DECLARED.replace(*BREAK))
    code, out, _ = mixproof("check", "gate.py", "-k", "causality or linearity")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if line.startswith("  ")][:2] == ["causality", "linearity"]
    code, out, _ = mixproof("check", "gate.py", "-x")
    assert code == 1
    assert out.count("BROKEN") == 1
    assert out.splitlines()[-1].startswith("0 cells hold, 1 broken, 1 case, ")


def test_json(mixproof, folder: Path) -> None:
    (folder / "gate.py").write_text(DECLARED.replace(*BREAK))
    assert mixproof("check", "gate.py", "-k", "forward", "--json", "verdicts.json")[0] == 1
    data = json.loads((folder / "verdicts.json").read_text())
    assert (data["schema"], [v["cell"] for v in data["verdicts"]]) == (1, ["retention/mine/forward"])
    assert "numpy" in data["environment"]


def test_nothing_checked(mixproof, folder: Path) -> None:
    (folder / "gate.py").write_text(DECLARED.replace("gradients=False", 'requires=("no_such_package",)'))
    code, out, _ = mixproof("check", "gate.py")
    assert code == 5
    assert out.splitlines()[-1] == "0 cells checked: no_such_package is not installed; exit 5"


def test_strict(mixproof, folder: Path) -> None:
    needy = DECLARED.replace("gradients=False", 'name="needy", requires=("no_such_package",)')
    (folder / "gate.py").write_text(DECLARED + needy.replace("def mine", "def needy"))
    code, out, _ = mixproof("check", "gate.py", "-k", "forward")
    assert code == 0
    assert "  forward" in out
    code, out, _ = mixproof("check", "gate.py", "-k", "forward", "--strict")
    assert code == 1
    assert "not run   retention/needy/forward: no_such_package is not installed" in out
    code, out, _ = mixproof("check", "gate.py:mine", "-k", "mine", "--strict")  # laws that do not apply are no gaps
    assert code == 0
    assert "does not apply:" in out


def test_a_bug_of_ours(mixproof, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def boom(*_: object) -> None:
        raise RuntimeError("boom")

    (folder / "gate.py").write_text(DECLARED)
    monkeypatch.setattr(judging, "evaluate", boom)
    code, out, _ = mixproof("check", "gate.py", "-k", "forward")
    assert code == 3
    assert "ERROR   retention/mine/forward: a bug of ours, please report it\n" in out
    assert "RuntimeError: boom" in out
    monkeypatch.setattr(judging, "judge", boom)
    code, _, err = mixproof("check", "gate.py", "-k", "forward")
    assert code == 3
    assert err.endswith("RuntimeError: boom\nmixproof: a bug of ours, please report it\n")


def test_an_interruption_reports_what_was_judged(mixproof, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "gate.py").write_text(DECLARED)
    judge = judging.judge

    def impatient(subject, law, *rest):
        if law == "causality":
            raise KeyboardInterrupt
        return judge(subject, law, *rest)

    monkeypatch.setattr(judging, "judge", impatient)
    code, out, _ = mixproof("check", "gate.py")
    assert code == 2
    assert out.splitlines()[-1].startswith("2 cells hold, 0 broken, ")


def test_neighbours_are_found_when_they_are_needed(mixproof, folder: Path) -> None:
    (folder / "my_kernels.py").write_text("import numpy as np\n\n" + RECURRENCE)
    (folder / "gate.py").write_text(
        "from mixproof.verify import implements\n\n\n"
        '@implements("retention", layout="B H T D", framework="numpy", gradients=False)\n'
        "def mine(q, k, v, gamma, scale=1.0, S0=None):\n"
        "    from my_kernels import mine\n\n"
        "    return mine(q, k, v, gamma, scale, S0)\n"
    )
    assert mixproof("check", "gate.py", "-k", "forward")[0] == 0


@pytest.mark.parametrize("name", ["queue.py", "numpy.py", "my gate.py", "test_cli.py"])
def test_any_file_name(mixproof, folder: Path, name: str) -> None:
    """Also one that hides a module: nothing that is loaded is replaced by the file."""
    before = {n: sys.modules[n] for n in ("queue", "numpy") if n in sys.modules}
    (folder / name).write_text(DECLARED.replace("import numpy as np\n", "import sys\nnp = sys.modules['numpy']\n"))
    assert mixproof("check", name, "-k", "forward")[0] == 0
    assert all(sys.modules[n] is module for n, module in before.items())


@needs_torch
def test_a_verdict_takes_seconds(folder: Path) -> None:
    """Start-up and PyTorch's import included. Processor time: on a loaded machine the clock measures the others."""
    (folder / "gate.py").write_text(
        'from mixproof.verify import implements\n\n\n@implements("retention")\n'
        + TORCH.split("\n\n\n")[1].replace("def retention(", "def mine(")
        + "\n\nimport torch\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mixproof.verify", "check", "gate.py"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (done.returncode, done.stderr) == (0, "")
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < 15, f"{seconds:.1f} s of processor time"


def test_progress_on_a_terminal_breaks_no_line(folder: Path) -> None:
    """The bar makes room for a failure: a replay command in two lines could not be copied."""
    pty = pytest.importorskip("pty", reason="no pseudo-terminals here")
    (folder / "gate.py").write_text(DECLARED.replace(*BREAK))
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "mixproof.verify", "check", "gate.py", "-k", "forward or causality"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "60"}
    process = subprocess.Popen(command, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # how Linux says that the other side is closed
        while data := os.read(ours, 4096):
            seen += data
    os.close(ours)
    assert process.wait(timeout=100) == 1
    lines = seen.decode().replace("\r\n", "\n").split("\n")
    assert any("retention/mine/forward" in line and "0/3" in line for line in lines)  # the bar
    (line,) = [line for line in lines if line.startswith("  replay     ")]
    assert re.fullmatch(
        r"  replay     mixproof replay gate.py 'retention/mine/forward B=1 [^']*dtype=float32[^']*'", line
    )


# --------------------------------------------------------------------------------------------------------------- replay


def replay_command(out: str) -> list[str]:
    """The words of the replay command that was printed first."""
    (line, *_) = [line for line in out.splitlines() if line.startswith("  replay     mixproof ")]
    return shlex.split(line.removeprefix("  replay     mixproof "))


PLAIN = {
    "": [],
    "layout": ["--layout", "B T H D"],
    "dtype": ["--dtype", "float64", "--dtype", "float32"],
    "chunk": ["--chunk", "4"],
    "sizes": ["--multiple-of", "T=4", "--multiple-of", "K=2"],
    "device": ["--no-gradients", "--device", "cpu"],
}


def test_the_replay_command_works(mixproof, folder: Path) -> None:
    (folder / "my gate.py").write_text(DECLARED.replace(*BREAK))
    _, out, _ = mixproof("check", "my gate.py", "-k", "forward")
    words = replay_command(out)
    assert words[:2] == ["replay", "my gate.py"]
    code, again, err = mixproof(*words)
    assert (code, err) == (1, "")
    assert again.strip() in out  # the same six lines
    (folder / "my gate.py").write_text(DECLARED)
    code, out, _ = mixproof(*words)
    assert code == 0
    assert re.fullmatch(r"holds   retention/mine/forward   0\.\d+ x bound   B=1 .* dtype=float32 .*\n", out)


@needs_torch
@pytest.mark.parametrize("options", PLAIN.values(), ids=PLAIN)
def test_the_replay_command_works_without_a_declaration(mixproof, folder: Path, options: list[str]) -> None:
    (folder / "plain.py").write_text(TORCH.replace(*BREAK))
    _, out, _ = mixproof("check", "plain.py:retention", "--as", "retention", *options, "-k", "retention/forward")
    words = replay_command(out)
    assert words[:-2] == ["replay", "--as", "retention", *options]
    code, again, err = mixproof(*words)
    assert (code, err) == (1, "")
    assert again.strip() in out
    (folder / "plain.py").write_text(TORCH)
    assert mixproof(*words)[0] == 0


def test_replay_of_one_of_ours(mixproof) -> None:
    code, out, _ = mixproof("replay", "retention/reference.chunkwise/forward B=1 H=1 T=5 K=1 V=1 dtype=float32")
    assert code == 0
    assert out.startswith("holds   retention/reference.chunkwise/forward   0.")
    code, out, _ = mixproof("replay", "retention/reference.chunkwise/certified B=1 H=1 T=5 K=1 V=1 dtype=float64")
    assert code in (0, 5)  # python-flint or mpmath may be absent


# ----------------------------------------------------------------------------------------------------------- new, list


KERNELS = {
    "gma.responsibilities": "mixproof.verify.subjects.torch.gma import responsibilities",
    "gma.bidirectional": "mixproof.verify.subjects.torch.gma import cross",
    "gma.causal": "mixproof.verify.subjects.torch.gma import causal",
    "gma.cross": "mixproof.verify.subjects.torch.gma import cross",
    "retention": "my_kernels import retention",
    "softmax_attention": "my_kernels import attention",
}


@needs_torch
@pytest.mark.parametrize("operator", KERNELS)
def test_new_then_check(mixproof, folder: Path, operator: str) -> None:
    """One line edited, as it says, and the adapter judges."""
    code, text, _ = mixproof("new", operator)
    assert code == 0
    name = operator.replace(".", "_")
    assert f"from my_kernels import {name} as kernel  # <- your function\n" in text
    (folder / "my_kernels.py").write_text(TORCH)
    (folder / "gate.py").write_text(text.replace(f"my_kernels import {name}", KERNELS[operator]))
    code, out, err = mixproof("check", "gate.py", "-k", "forward or vjp or written")
    assert (code, err) == (0, ""), out
    # the kernels of ours that are imported are declared themselves, and judged too
    assert re.search(rf"^{operator} .*\bmine$", out, re.MULTILINE)
    assert {line.split()[0] for line in out.splitlines() if line.startswith("  ")} == {"forward", "vjp", "written"}


def test_every_operator_has_an_adapter(mixproof) -> None:
    for operator in OPERATORS:
        code, text, _ = mixproof("new", operator)
        assert code == 0
        compile(text, operator, "exec")
        assert max(map(len, text.splitlines())) <= 120


def test_the_adapter_says_what_goes_in_and_out(mixproof) -> None:
    _, text, _ = mixproof("new", "retention")
    for line in (
        "#   q        (B, T, H, K)\n",
        "#   gamma    (H,), one set per head\n",
        "#   scale    number, default 1.0\n",
        "#   S0       (B, H, K, V) or None: the initial state, which the output S continues\n",
        "#   O        (B, T, H, V)\n#   S        (B, H, K, V)\n",
        "def mine(q, k, v, gamma, scale=1.0, S0=None):\n    return kernel(q, k, v, gamma, scale=scale, S0=S0)\n",
    ):
        assert line in text


def test_an_adapter_that_was_not_edited(mixproof, folder: Path) -> None:
    (folder / "gate.py").write_text(mixproof("new", "retention")[1])
    code, out, err = mixproof("check", "gate.py")
    assert (code, out) == (4, "")
    assert err == "mixproof: gate.py:3 does not import: ModuleNotFoundError: No module named 'my_kernels'\n"


def test_list(mixproof) -> None:
    code, out, _ = mixproof("list")
    assert code == 0
    assert [line for line in out.splitlines() if not line.startswith(" ")] == list(OPERATORS)
    code, out, _ = mixproof("list", "retention")
    assert code == 0
    assert "  inputs           q (T K), k (T K), v (T V), gamma, scale, S0 (K V)\n" in out
    assert "  implementation   reference.chunkwise\n" in out
    assert "gma" not in out


# ------------------------------------------------------------------------------------------------------------ bad input


FILES = {
    "gate.py": DECLARED,
    "plain.py": "import numpy as np\n\n" + RECURRENCE + "\nshape = np.shape\nnumber = 1\n",
    "syntax.py": "def mine(q:\n",
    "needs.py": "import os\nimport flash_attention_9\n",
    "leaves.py": "import sys\nsys.exit(0)\n",
    "layout.py": DECLARED.replace("B H T D", "B X T D"),
    "unknown.py": DECLARED.replace('"retention"', '"retnet"'),
    "argument.py": DECLARED.replace("gamma", "decay"),
    "lacks.py": DECLARED.replace("gamma, scale=1.0", "scale=1.0"),
    "twice.py": DECLARED + DECLARED.replace("def mine", "def other").replace("retention", 'retention", name="mine'),
    "text.txt": "not Python",
}
SIZES = "B=1 H=1 T=1 K=1 V=1"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("check missing.py", "no such file: missing.py"),
        ("check .", "no such file: ."),
        ("check syntax.py", "syntax.py does not import: SyntaxError: '(' was never closed (syntax.py, line 1)"),
        ("check needs.py", "needs.py:2 does not import: ModuleNotFoundError: No module named 'flash_attention_9'"),
        ("check leaves.py", "leaves.py:2 does not import: SystemExit: 0"),
        ("check text.txt", "text.txt is not a Python file"),
        (
            "check plain.py",
            "plain.py declares no implementation; decorate one with @implements, or run "
            "mixproof check plain.py:FUNCTION --as OPERATOR",
        ),
        (
            "check plain.py:mine",
            "plain.py:mine declares no implementation; decorate one with @implements, or run "
            "mixproof check plain.py:mine --as OPERATOR",
        ),
        ("check plain.py:mien --as retention", "plain.py has no function 'mien'; did you mean 'mine'?"),
        ("check plain.py:number --as retention", "plain.py has no function 'number'"),
        ("check plain.py --as retention", "--as retention: say which function: plain.py:FUNCTION"),
        ("check plain.py:mine --as retnet", "no operator 'retnet'; did you mean \"retention\"? (mixproof list)"),
        ("check plain.py:mine --as retention --layout 'B X T D'", "layout axes: 'X' is not one of B, T, H, D"),
        (
            "check plain.py:mine --as retention --dtype f31",
            "argument --dtype: invalid choice: 'f31' (choose from 'float64', 'float32', 'bfloat16', 'float16')   "
            "(mixproof check --help)",
        ),
        ("check plain.py:mine --as retention --chunk 0", "argument --chunk: 0 is not a size   (mixproof check --help)"),
        (
            "check plain.py:mine --as retention --multiple-of 16",
            "--multiple-of 16: expected AXIS=N, for example T=16",
        ),
        (
            "check plain.py:mine --as retention --multiple-of N=16",
            "multiple_of names 'N'; retention has the axes B, H, T, K, V",
        ),
        (
            "check plain.py:mine --as softmax_attention",
            "plain.py:mine: mine takes an argument 'gamma'; softmax_attention has the inputs causal, k, q, scale, v",
        ),
        (
            "check gate.py --dtype float32",
            "--dtype describes FILE:FUNCTION --as OPERATOR; elsewhere @implements(...) says it",
        ),
        ("check gate.py -k nothing", "-k nothing: no cell of gate.py has that in its name, OPERATOR/NAME/LAW"),
        ("check gate.py --json missing/v.json", "--json missing/v.json: No such file or directory"),
        (
            "check gate.py --profile deep",
            "argument --profile: invalid choice: 'deep' (choose from 'smoke', 'short', 'ci', 'nightly')   (",
        ),
        ("check", "the following arguments are required: FILE[:FUNCTION]   (mixproof check --help)"),
        ("check layout.py", "layout.py: layout axes: 'X' is not one of B, T, H, D"),
        ("check unknown.py", "unknown.py: no operator 'retnet'; did you mean \"retention\"? (mixproof list)"),
        (
            "check argument.py",
            "argument.py: mine takes an argument 'decay'; retention has the inputs S0, gamma, k, q, scale, v",
        ),
        (
            "check lacks.py",
            "lacks.py: mine does not take 'gamma', an input of retention; add the argument, or declare the constant it "
            'uses: fixed={"gamma": ...}',
        ),
        (
            "check twice.py",
            "two implementations are called retention/mine (twice.py:5 and twice.py:17); give one of them another ",
        ),
        ("new retnet", "no operator 'retnet'; did you mean \"retention\"? (mixproof list)"),
        ("list retnet", "no operator 'retnet'; did you mean \"retention\"? (mixproof list)"),
        (
            "replay gate.py forward",
            "TOKEN: 'forward' is not OPERATOR/IMPLEMENTATION/LAW; quote the token as it was printed",
        ),
        (
            f"replay gate.py 'retention/mien/forward {SIZES}'",
            "TOKEN: no implementation retention/mien in gate.py; there is retention/mine",
        ),
        (
            f"replay 'tala/xyz/forward {SIZES}'",
            "TOKEN: no implementation tala/xyz; of a file of yours: mixproof replay FILE TOKEN",
        ),
        ("replay gate.py 'retention/mine/forward T=1'", "case: no size for B, H, K, V"),
        ("replay gate.py 'retention/mine/forward T=x'", "case: cannot read 'T=x'; expected NAME=VALUE"),
        (f"replay gate.py 'retention/mine/forward {SIZES} T=-1'", "case: T=-1 is not a size"),
        (f"replay gate.py 'retention/mine/forward {SIZES} K=0'", "case: K=0 is not a size"),
        (f"replay gate.py 'retention/mine/forward {SIZES} dtype=f31'", "case: no dtype 'f31'; there are float64,"),
        (f"replay gate.py 'retention/mine/forward {SIZES} regime=odd'", "case: no regime 'odd'; there are normal,"),
        (f"replay gate.py 'retention/mine/forward {SIZES} state=odd'", "case: no state 'odd'; there are absent,"),
        (f"replay gate.py 'retention/mine/foward {SIZES}'", "no law 'foward'; there are forward,"),
        ("judge gate.py", "argument COMMAND: invalid choice: 'judge' (choose from"),
    ],
)
def test_bad_input(mixproof, folder: Path, words: str, message: str) -> None:
    for name, text in FILES.items():
        (folder / name).write_text(text)
    code, out, err = mixproof(*shlex.split(words))
    assert (code, out) == (4, "")  # and no number
    assert err.startswith(f"mixproof: {message}")
    assert err.count("\n") == 1


def test_a_function_whose_arguments_cannot_be_read(mixproof, folder: Path) -> None:
    (folder / "plain.py").write_text("from builtins import dict as mine\n")
    code, _, err = mixproof("check", "plain.py:mine", "--as", "retention")
    assert code == 4
    assert err == (
        "mixproof: plain.py:mine: the arguments of mine cannot be read; write a function around it that names them\n"
    )


def test_bad_input_from_a_shell(folder: Path) -> None:
    """The same through a real process: the code, and not a line more."""
    command = [sys.executable, "-m", "mixproof.verify", "check", "missing.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (4, "", "mixproof: no such file: missing.py\n")
