"""What ships, and how it behaves where it is merely installed: in a folder of a user, beside names of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "triton", "sympy", "scipy")

# ----------------------------------------------------------------------------------------------------- what is packaged


def packages_in(root: Path) -> list[str]:
    """The packages that the tree holds: every folder below reference/ and verify/ with a Python file in it."""
    folders = {path.parent for top in ("reference", "verify") for path in (root / top).rglob("*.py")}
    return sorted("mixproof." + folder.relative_to(root).as_posix().replace("/", ".") for folder in folders)


def test_packages_listed_are_those_in_the_tree() -> None:
    """Only listed packages ship, so a forgotten line would be missed by users alone."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(listed) == packages_in(ROOT)


def test_an_unlisted_folder_is_noticed(tmp_path: Path) -> None:
    for path in ("reference/spec.py", "verify/laws/causal.py", "verify/empty/readme.txt"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    assert packages_in(tmp_path) == ["mixproof.reference", "mixproof.verify.laws"]


# ---------------------------------------------------------------------------------------------------- what is imported


def loaded_by(code: str) -> list[str]:
    """Which heavy packages a fresh interpreter has loaded after `code`."""
    ask = f"{code}\nimport sys\nprint(*[name for name in {HEAVY} if name in sys.modules])"
    return run([sys.executable, "-c", ask], cwd=ROOT.parent).split()


@pytest.mark.parametrize(
    "code",
    [
        "import mixproof.verify.plugin",  # loaded in every pytest run of everybody who has mixproof installed
        "from mixproof.verify import implements",  # loaded by every adapter
        "import mixproof.verify.__main__",
        "import mixproof.reference as r\nfor name in r.OPERATORS: r.operator(name)",
    ],
)
def test_importing_is_light(code: str) -> None:
    assert loaded_by(code) == []


def test_a_heavy_import_is_noticed() -> None:
    assert loaded_by("import mixproof.verify.plugin, sympy") == ["sympy"]


def test_the_checkout_loads_nothing_twice() -> None:
    """pytest imports the folder it is pointed at as plain `verify`. Its modules must not come along a second time."""
    code = (
        "import pytest, sys\n"
        "assert pytest.main(['verify', '--collect-only', '-q', '-p', 'no:cacheprovider']) == 0\n"
        "print(*[name for name in sys.modules if name.split('.')[0] in ('verify', 'reference')])"
    )
    assert set(run([sys.executable, "-c", code], cwd=ROOT).splitlines()[-1].split()) <= {"verify", "verify.test_gate"}


# ---------------------------------------------------------------------------------------------- installed, elsewhere


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of an empty environment into which a wheel of the tree was installed.

    So that nothing is downloaded the wheel is built with the setuptools at hand and installed without its
    dependencies, and a path file adds the folder where this interpreter has them. That adds a folder to the search
    path and no more: the path files inside it, an editable install of this checkout among them, are not read.
    """
    place = tmp_path_factory.mktemp("installed")
    source, env = place / "source", place / "env"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    for name in ("reference", "verify"):
        copytree(ROOT / name, source / name, ignore=ignore_patterns("__pycache__"))  # no stale build/ beside it

    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(
        [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(place), str(source)],
        cwd=place,
    )
    (wheel,) = place.glob("mixproof-*.whl")
    run([sys.executable, "-m", "venv", "--without-pip", str(env)], cwd=place)
    python = str(env / "bin" / "python")
    run([*pip, "--python", python, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], cwd=place)

    packages = run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], cwd=place).strip()
    borrowed = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (Path(packages) / "borrowed.pth").write_text("\n".join(borrowed))
    where = run(
        [python, "-c", "import mixproof.verify as v, mixproof.reference as r; print(v.__file__, r.__file__)"], place
    )
    assert all(Path(path).is_relative_to(env) for path in where.split()), f"not the installed copy: {where}"
    return python


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of a user's, with a `reference.py` and a `verify.py` of their own and a test of both."""
    (tmp_path / "reference.py").write_text("SCALE = 0.25\n")
    (tmp_path / "verify.py").write_text("def verify(x):\n    return x == 0.25\n")
    (tmp_path / "test_theirs.py").write_text(
        "from reference import SCALE\nfrom verify import verify\n\n\ndef test_theirs():\n    assert verify(SCALE)\n"
    )
    (tmp_path / "gate.py").write_text(
        "from mixproof.verify import implements\n"
        "from reference import SCALE\n\n\n"
        "@implements('softmax_attention', name='theirs', dtypes=('float32',))\n"
        "def attention(q, k, v, causal=False, scale=SCALE):\n"
        "    from torch.nn.functional import scaled_dot_product_attention as sdpa\n\n"
        "    q, k, v = (x.transpose(1, 2) for x in (q, k, v))\n"
        "    return sdpa(q, k, v, is_causal=causal, scale=scale).transpose(1, 2)\n"
    )
    return tmp_path


@pytest.mark.parametrize("safe_path", [[], ["-P"]], ids=["python -m pytest", "pytest"])
def test_their_own_suite_is_left_alone(python: str, folder: Path, safe_path: list[str]) -> None:
    """-P keeps the current folder off the search path, as the command `pytest` does."""
    output = run([python, *safe_path, "-W", "error", "-m", "pytest", "-q", "-p", "no:cacheprovider"], cwd=folder)
    assert "1 passed" in output
    assert "mixproof" not in output


def test_the_gate_is_found_there(python: str, folder: Path) -> None:
    output = run([python, "-P", "-m", "pytest", "--pyargs", "mixproof.verify", "--collect-only", "-q"], cwd=folder)
    assert "test_gate.py::test_law[" in output


@pytest.mark.parametrize(("mistake", "code", "verdict"), [("", 0, "1 passed"), (" * 1.001", 1, "1 failed")])
def test_the_gate_judges_their_kernel(python: str, folder: Path, mistake: str, code: int, verdict: str) -> None:
    pytest.importorskip("torch")
    gate = folder / "gate.py"
    gate.write_text(gate.read_text().replace("scale=scale", f"scale=scale{mistake}"))
    options = ["--pyargs", "mixproof.verify", "--mixproof-subjects", "gate.py", "--mixproof-profile=short"]
    command = [python, "-P", "-m", "pytest", *options, "-q", "-k", "softmax_attention/theirs/forward"]
    assert verdict in run(command, cwd=folder, code=code)


def test_the_command_works_there(python: str, folder: Path) -> None:
    command = str(Path(python).with_name("mixproof"))
    assert "gma.causal" in run([command, "list"], cwd=folder)
    assert "@implements(" in run([command, "new", "retention"], cwd=folder)


def run(command: list[str], cwd: Path, code: int = 0, limit: int = 120) -> str:
    """What the command printed. Fails with all of it on another exit code, or after `limit` seconds."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYTHON", "COV_"))}
    done = subprocess.run(
        command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit
    )
    assert done.returncode == code, f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
