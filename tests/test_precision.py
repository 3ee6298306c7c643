"""Which arithmetic an implementation used: found again in every arithmetic that can be emulated, and nowhere else.

The implementations under test are the reference in lanes of other seeds, orders, forms and chunk sizes than those that
the detection looks at, machines of our own that know nothing of lanes, PyTorch, and wrong ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from machines import MACHINES, Machine, Retention, f32, honest
from mixproof.reference import operator as find_operator
from mixproof.verify import oracle
from mixproof.verify.__main__ import main
from mixproof.verify.arithmetic import Arithmetic, holds, natural, round_to
from mixproof.verify.cells import entries
from mixproof.verify.declare import Declaration
from mixproof.verify.judge import PROFILES, judge
from mixproof.verify.numbers.lanes import Workshop
from mixproof.verify.precision import Finding, detect, detect_all
from mixproof.verify.report.precision import exit_code, table
from mixproof.verify.simulated import candidates, name_of
from mixproof.verify.subject import Subject
from mixproof.verify.subjects.mutants import mutants

OPERATORS = ("softmax_attention", "retention", "gma.causal", "mamba.zoh", "titans.linear", "mla")
BRIEF = ("float64", "float32", "TF32 operands", "bfloat16 operands", "bfloat16 intermediates")
OPERANDS = {"float32", "TF32 operands", "float16 operands", "bfloat16 operands"}  # alike without dot products


def emulated(operator: str, arithmetic: Arithmetic, dtype: str, form: int, chunk: int, seed: int) -> Subject:
    """A form of the reference in one lane of a workshop, in which exp, sums and quotients are done in ways of its own;
    inputs that are wider than what it computes in are rounded first."""
    spec = find_operator(operator)
    name, roles = spec.forms[form % len(spec.forms)].name, {x.name: x.role for x in (*spec.inputs, *spec.outputs)}
    wide = dtype if dtype == "float64" else "float32"
    dtypes = {n: dtype if role == "token" else wide for n, role in roles.items()}

    def run(chunk: int | None = None, **inputs: Any) -> tuple[np.ndarray, ...]:
        shop = Workshop(arithmetic, 2, seed)

        def lifted(n: str, x: Any) -> Any:
            if roles[n] == "scalar":
                return x
            x = np.asarray(x, dtype=float)
            narrows = not holds(arithmetic.intermediate, dtypes[n])
            return shop.input(round_to(x, arithmetic.intermediate) if narrows else x, dtypes[n])

        results = {}
        for bh, head in oracle.heads(spec, inputs):
            found = spec.evaluate({n: lifted(n, x) for n, x in head.items()}, name, size)
            results[bh] = {n: shop.spread(x.data)[seed % 2] for n, x in found.items()}
        whole = oracle.gather(spec, inputs, results)
        return tuple(round_to(whole[y.name], dtypes[y.name]) for y in spec.outputs)

    size = chunk if spec.form(name).chunked else None
    run.__signature__ = signature(spec.forms[0].function)  # type: ignore[attr-defined]
    declared = Declaration(
        operator, "emulated", "B H T D", (dtype,), chunk=16, gradients=False, framework="numpy", at_least={"T": 0}
    )
    return Subject(declared, run)


def found_again(operator: str, dtype: str, names: tuple[str, ...] = ()) -> dict[str, list[Finding]]:
    """What is found for each arithmetic, by its name."""
    findings: dict[str, list[Finding]] = {}
    turn = 0
    for name, variants in candidates(dtype, natural(dtype)).items():
        for arithmetic in variants[: 1 if names else None]:
            turn += 1
            if not names or name in names:
                subject = emulated(operator, arithmetic, dtype, turn, (5, 16, 3)[turn % 3], 10 + turn)
                findings.setdefault(name, []).append(detect(subject, dtype))
    return findings


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_arithmetic_is_found_again(operator: str) -> None:
    """The true one is always among those found; so it is the one if only one is, and all the more if that is sure."""
    names = () if operator == "softmax_attention" else BRIEF[: 4 if operator == "mla" else None]
    findings = found_again(operator, "float32", names)
    wrong = {name: [str(f) for f in found if name not in f.found] for name, found in findings.items()}
    assert not any(wrong.values()), wrong
    outcomes = {name: {f.outcome for f in found} for name, found in findings.items()}
    assert outcomes.pop("float32") == {"as declared"}
    assert outcomes.pop("float64") <= {"wider", "as declared"}
    if operator == "mamba.zoh":  # no dot products: their operands make no difference
        assert all(OPERANDS <= set(f.found) for name in OPERANDS & set(findings) for f in findings[name])
        outcomes = {name: of for name, of in outcomes.items() if name not in OPERANDS}
    else:
        for name in ("TF32 operands", "bfloat16 operands"):
            alike = {"TF32 operands", "float16 operands"} if name == "TF32 operands" else {name}
            assert all(f.sure and set(f.found) <= alike for f in findings[name]), findings[name]
    assert all(of == {"narrower"} for of in outcomes.values()), outcomes


@pytest.mark.parametrize(("operator", "dtype"), [("softmax_attention", "bfloat16"), ("softmax_attention", "float64")])
def test_no_sure_answer_is_wrong(operator: str, dtype: str) -> None:
    findings = found_again(operator, dtype, BRIEF if dtype == "float64" else ())
    wrong = [(name, str(f)) for name, found in findings.items() for f in found if f.sure and name not in f.found]
    assert not wrong
    widest = findings["float64"][0]
    assert widest.sure or dtype == "float64"  # roundings of float64 itself are drawn anew in every order
    assert widest.outcome == ("wider" if dtype == "bfloat16" else "as declared")
    if dtype == "float64":
        assert [f.outcome for f in findings["float32"]] == ["narrower"]


@pytest.mark.parametrize("dot", ["float32", "tf32", "bfloat16", "float16"])
@pytest.mark.parametrize("order", ["reversed", "blocks", "fma"])
def test_other_machines(order: str, dot: str) -> None:
    """Retention written anew, operands cut off instead of rounded; its gradients too."""
    way = Retention(dataclasses.replace(MACHINES[order], dot=dot), powers="exp", form="chunks")
    mine = honest("retention", way.forward, way.vjp, 8)
    name = name_of(natural("float32", dot=dot))
    for part in ("outputs", "gradients"):
        finding = detect(mine, "float32", part, brief=part == "gradients")
        assert name in finding.found, finding
        assert finding.outcome == ("as declared" if dot == "float32" else "narrower")
        assert finding.sure or dot == "float32"


def flash(m: Machine) -> Callable[..., Any]:
    """Weights are divided by their sum after the values have been read: another operand than the reference rounds."""

    def run(q: Any, k: Any, v: Any, scale: float | None = None, causal: bool = False) -> np.ndarray:
        s = m.mm(q, k.T) * f32(q.shape[1] ** -0.5 if scale is None else scale)
        s = np.where(np.tril(np.ones(s.shape, bool)) if causal else True, s, f32(-np.inf))
        e = m.exp(s - s.max(axis=1, keepdims=True))
        return m.divide(m.mm(e, v), m.sum(e)[:, None])

    return run


@pytest.mark.parametrize("dot", ["float32", "tf32", "bfloat16"])
def test_an_operand_that_the_reference_does_not_have(dot: str) -> None:
    finding = detect(honest("softmax_attention", flash(Machine("lanes", dot=dot)), no_vjp, 8), "float32")
    assert name_of(natural("float32", dot=dot)) == finding.found[0], finding
    assert finding.sure or dot == "float32"


def no_vjp(*arguments: Any, **named: Any) -> Mapping[str, Any]:
    raise NotImplementedError


# --- what is no rounding -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", ["softmax_attention", "retention"])
def test_a_wrong_formula_is_no_precision(operator: str) -> None:
    """Mutants whose outputs are wrong here, but those that do round too early: what their names say."""
    known, seen = ("bfloat16", "float16", "tf32"), 0
    for mutant in mutants(operator):
        if mutant.part != "outputs" or mutant.framework != "numpy":
            continue
        finding = detect(mutant.subject(), "float32")
        if mutant.name.startswith(known):
            assert finding.outcome in ("narrower", "as declared"), (mutant.name, finding)
        else:
            assert finding.outcome in ("unknown", "as declared"), (mutant.name, finding)
            seen += finding.outcome == "unknown"
    assert seen >= 10


@pytest.mark.parametrize("size", [2.0**-3, 2.0**-6, 2.0**-9, 2.0**-12, 2.0**-15, 2.0**-18])
def test_a_small_mistake_is_no_precision(size: float) -> None:
    """Whatever its size, it stays when the inputs move by a few units; errors of rounding do not."""
    way = Retention(Machine())

    def off(*arguments: Any, **named: Any) -> Any:
        O, S = way.forward(*arguments, **named)
        return O + f32(size) * np.sin(O), S

    assert detect(honest("retention", off, no_vjp, 8), "float32").outcome == "unknown"


def test_what_is_not_finite() -> None:
    def infinite(*arguments: Any, **named: Any) -> Any:
        O, S = Retention(Machine()).forward(*arguments, **named)
        return O / f32(0), S

    with np.errstate(all="ignore"):
        finding = detect(honest("retention", infinite, no_vjp, 8), "float32")
    assert (finding.outcome, finding.found) == ("unknown", ())
    assert "not finite" in str(finding)


# --- the tree, PyTorch ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", ["softmax_attention", "retention", "tala.n2", "mamba.lti"])
def test_ours_are_as_declared(operator: str) -> None:
    """mamba.lti has a Fourier transform, whose errors the equations do not have."""
    others = {"triton", "thirdparty"}
    loaded = [e.load() for e in entries() if e.operator == operator and not others & {*e.module.split(".")}]
    for subject in loaded:
        if subject.unavailable():
            continue
        for finding in (detect(subject, d) for d in subject.declaration.dtypes if d in ("float64", "float32")):
            assert finding.outcome == "as declared", finding


def test_pytorch() -> None:
    torch = pytest.importorskip("torch")

    def attention(q: Any, k: Any, v: Any, scale: float, causal: bool) -> Any:
        s = torch.einsum("bthd,bshd->bhts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf) if causal else s
        return torch.einsum("bhts,bshd->bthd", s.softmax(-1), v)

    def cast(kind: Any) -> Callable[..., Any]:
        def mine(q: Any, k: Any, v: Any, scale: Any = None, causal: bool = False) -> Any:
            return attention(q.to(kind), k.to(kind), v.to(kind), scale, causal).to(q.dtype)

        return mine

    def found(kind: Any, dtype: str, **declared: Any) -> Finding:
        declaration = Declaration("softmax_attention", "mine", dtypes=(dtype,), **declared)
        return detect(Subject(declaration, cast(kind)), dtype)

    assert found(torch.float32, "float32").outcome == "as declared"
    assert found(torch.float32, "bfloat16").outcome == "wider"
    assert found(torch.float32, "bfloat16", dot="float32").outcome == "as declared"
    assert found(torch.float64, "float32").found == ("float64",)
    assert found(torch.float32, "float64").found == ("float32",)
    assert found(torch.float32, "float64").outcome == "narrower"
    half = found(torch.bfloat16, "float32")
    assert half.outcome == "narrower"
    assert "bfloat16 intermediates" in half.found


# --- where it is said ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", ["forward", "vjp"])
@pytest.mark.parametrize(("dot", "what"), [("tf32", "TF32 operands"), ("bfloat16", "bfloat16 operands")])
def test_a_broken_law_names_it(law: str, dot: str, what: str) -> None:
    way = Retention(Machine("pairwise", dot=dot))
    verdict = judge(honest("retention", way.forward, way.vjp, 8), law, PROFILES["short"])
    half = f"whatever its order of summation; its error is that of {what} (correlation "
    assert half in verdict.why
    assert float(verdict.why.split(half)[1].removesuffix(")")) >= 0.97


def test_a_mistake_beside_it_is_not_put_down_to_it() -> None:
    """TF32 operands and, in sequences of one token, a wrong result: the detection sees the first alone."""
    way = Retention(Machine("pairwise", dot="tf32"))

    def mine(q: Any, *arguments: Any, **named: Any) -> Any:
        O, S = way.forward(q, *arguments, **named)
        return (O * f32(2) if len(q) == 1 else O), S

    verdict = judge(honest("retention", mine, way.vjp, 8), "forward", PROFILES["short"])
    assert verdict.status == "fail"
    assert "its error" not in verdict.why


GATE = """
import numpy as np
from mixproof.verify import implements


def bits(x):
    return (x.astype("float32").view("uint32") & np.uint32(0xFFFFE000)).view("float32") if CUT else x


@implements("retention", layout="B H T D", framework="numpy", gradients=False)
def mine(q, k, v, gamma, scale=1.0, S0=None):
    S = np.zeros((*q.shape[:2], q.shape[3], v.shape[3]), q.dtype) if S0 is None else S0
    rows = []
    for t in range(q.shape[2]):
        S = gamma[:, None, None] * S + bits(k)[:, :, t, :, None] * bits(v)[:, :, t, None, :]
        rows.append(q.dtype.type(scale) * np.sum(bits(q)[:, :, t, :, None] * bits(S), axis=2))
    return np.stack(rows, axis=2), S
"""


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        (("CUT", "False"), 0, "declared float32  as declared"),
        (("CUT", "True"), 1, "size 1)\n  is torch.backends.cuda.matmul.allow_tf32 on"),
        (("    rows = []", "    raise ValueError"), 5, "nothing to say: mine raised at"),
    ],
)
def test_command(
    change: tuple[str, str], code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "gate.py"
    file.write_text(GATE.replace(*change))
    assert main(["precision", str(file)]) == code
    assert says in capsys.readouterr().out


def test_command_on_a_function_that_is_not_declared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "gate.py"
    file.write_text(
        "def mine(q, k, v, scale=None, causal=False):\n"
        "    scale = q.shape[-1] ** -0.5 if scale is None else scale\n"
        "    s = scale * (q.float() @ k.float().mT)\n"
        "    s = s.masked_fill(s.new_ones(s.shape[-2:]).triu(1) > 0, -float('inf')) if causal else s\n"
        "    return (s.softmax(-1) @ v.float()).to(q.dtype)\n"
    )
    options = ["--as", "softmax_attention", "--layout", "B H T D", "--device", "cpu"]
    assert main(["precision", f"{file}:mine", *options, "--dtype", "float32", "--dtype", "float64"]) == 1
    first, second, _ = capsys.readouterr().out.splitlines()
    assert "float32  declared float32  as declared: float32" in first
    assert "float64  declared float64  narrower than declared: errors as large as those of float32 (" in second


def test_report() -> None:
    rows = [
        dataclasses.asdict(f) | {"sentence": str(f)}
        for f in (
            Finding("a/b", "float32", "float32", "as declared", ("float32",), 0.5, 1.0, sure=True),
            Finding("a/long", "bfloat16", "bfloat16 operands", "nothing", why="torch is not installed"),
            Finding("a/c", "float32", "float32", "narrower", ("TF32 operands", "float16 operands"), 0.99, 1, sure=True),
        )
    ]
    assert table(rows).splitlines() == [
        "a/b     float32   declared float32            as declared: float32 (correlation 0.50, size 1)",
        "a/long  bfloat16  declared bfloat16 operands  nothing to say: torch is not installed",
        "a/c     float32   declared float32            narrower than declared: TF32 or float16 operands "
        "(correlation 0.99, size 1)",
        '  is torch.backends.cuda.matmul.allow_tf32 on, or tl.dot without input_precision="ieee"?',
    ]
    assert [exit_code(rows), exit_code(rows[:2]), exit_code(rows[1:2]), exit_code([])] == [1, 0, 5, 5]


def test_what_cannot_run_says_so() -> None:
    declared = Declaration("retention", "mine", dtypes=("float32",), requires=("no_such_package",))
    (finding,) = detect_all(Subject(declared, Retention(Machine()).forward))
    assert str(finding) == "nothing to say: no_such_package is not installed"
