"""What people read when something is wrong: each message says what came, what was expected, and what to do."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from mixproof.reference import gma as reference
from mixproof.verify.cells import entries
from mixproof.verify.declare import ATTRIBUTE, implements
from mixproof.verify.errors import AdapterError
from mixproof.verify.judge import PROFILES, judge, replay
from mixproof.verify.report import terminal
from mixproof.verify.subject import Subject
from mixproof.verify.verdict import Verdict

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
needs_triton = pytest.mark.skipif(
    find_spec("torch") is None or find_spec("triton") is None, reason="triton is not installed"
)


def recurrence(q, k, v, gamma, scale=1.0, S0=None):
    """Retention as it should be, on arrays (B, H, T, D)."""
    S = np.zeros((*q.shape[:2], q.shape[3], v.shape[3]), q.dtype) if S0 is None else S0
    rows = []
    for t in range(q.shape[2]):
        S = gamma[:, None, None] * S + k[:, :, t, :, None] * v[:, :, t, None, :]
        rows.append(q.dtype.type(scale) * np.sum(q[:, :, t, :, None] * S, axis=2))
    return np.stack(rows, axis=2), S


def subject(function: Callable[..., Any], operator: str = "retention", **options: Any) -> Subject:
    options = {"name": "mine", "layout": "B H T D", "framework": "numpy", "gradients": False} | options
    return Subject(getattr(implements(operator, **options)(function), ATTRIBUTE)[-1], function)


def judged(function: Callable[..., Any], law: str, **options: Any) -> Verdict:
    return judge(subject(function, **options), law, PROFILES["short"])


def torch_retention(change: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Retention in PyTorch whose results `change` may spoil."""
    import torch

    def mine(q, k, v, gamma, scale=1.0, S0=None):
        S = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3]) if S0 is None else S0
        rows = []
        for t in range(q.shape[2]):
            S = gamma[:, None, None] * S + k[:, :, t, :, None] * v[:, :, t, None, :]
            rows.append(scale * (q[:, :, t, :, None] * S).sum(2))
        return change(torch.stack(rows, 2), S)

    return mine


# --------------------------------------------------------------------------------- an implementation that breaks a law


def test_the_honest_one_is_honest() -> None:
    for law in ("forward", "causality", "deterministic", "written"):
        assert judged(recurrence, law).status == "pass"


def test_wrong_shape() -> None:
    def mine(q, k, v, gamma, scale=1.0, S0=None):
        O, S = recurrence(q, k, v, gamma, scale, S0)
        return O[..., :1], S

    verdict = judged(mine, "forward")
    assert verdict.status == "fail"
    assert verdict.why == 'mine returned O with shape (1, 1, 1, 1); layout "B H T D" with T=1, V=2 expects (1, 1, 1, 2)'


def test_exception() -> None:
    def mine(q, k, v, gamma, scale=1.0, S0=None):
        assert q.shape[2] % 16 == 0, "T must be a multiple of 16."
        return recurrence(q, k, v, gamma, scale, S0)

    verdict = judged(mine, "forward")
    assert verdict.status == "fail"
    assert verdict.why == (
        "mine raised at B=1, H=1, T=1, K=1, V=1: AssertionError: T must be a multiple of 16. "
        'If that is its contract, declare multiple_of={"T": 16} or at_least={"T": 1}'
    )
    assert judged(mine, "forward", multiple_of={"T": 16}, at_least={"T": 16}).status == "pass"


def test_leaving_is_no_way_to_pass() -> None:
    def mine(q, k, v, gamma):
        raise SystemExit(0)

    verdict = judged(mine, "forward")
    assert verdict.status == "fail"
    assert "mine raised at B=1, H=1, T=1, K=1, V=1: SystemExit: 0." in verdict.why


def test_kernel_that_needs_the_interpreter() -> None:
    def mine(q, k, v, gamma):
        raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")

    assert judged(mine, "forward").why.endswith(
        '(cpu tensor?). A kernel in Triton declares requires=("triton",), and devices=("cpu", "cuda") '
        "if it runs on a GPU too"
    )


def test_nan() -> None:
    def mine(q, k, v, gamma, scale=1.0, S0=None):
        O, S = recurrence(q, k, v, gamma, scale, S0)
        O[:, :, 2:] = np.nan
        return O, S

    verdict = judged(mine, "forward")
    assert (verdict.status, verdict.case) == ("fail", "B=1 H=1 T=3 K=1 V=1 dtype=float32")
    assert verdict.why.startswith("O[0, 0, 2, 0] is nan; the reference is ")
    assert "T=2 passes" in verdict.context


def test_causal_leak() -> None:
    def mine(q, k, v, gamma, scale=1.0, S0=None):
        O, S = recurrence(q, k, v, gamma, scale, S0)
        O[:, :, :-1] += np.float32(1e-6) * v[:, :, 1:]
        return O, S

    verdict = judged(mine, "causality")
    assert verdict.status == "fail"
    assert verdict.why.startswith("O before 1 when tokens from 1 on changed: moved by ") or verdict.why.startswith(
        "O before 1 when tokens from 1 on became huge: moved by "
    )
    assert verdict.why.endswith(" (1 of 1 elements); a causal operator must be bit-equal")


def test_flaky() -> None:
    calls = itertools.count()

    def mine(q, k, v, gamma, scale=1.0, S0=None):
        O, S = recurrence(q, k, v, gamma, scale, S0)
        return O * np.float32(1 + 2.0**-23 * (next(calls) % 2)), S

    verdict = judged(mine, "deterministic")
    assert verdict.status == "fail"
    assert verdict.why == "same case, same inputs, two outputs (differ in 1 of 1 elements): not deterministic"


def test_beyond_rounding() -> None:
    verdict = judged(lambda q, k, v, gamma, scale=1.0, S0=None: recurrence(q, k, v, gamma, 2 * scale, S0), "forward")
    bound = verdict.where.split("bound ")[1]
    assert verdict.why == f"an honest evaluation in float32 stays within {bound}, whatever its order of summation"


def test_the_arithmetic_is_named_where_it_is_mixed() -> None:
    def mine(q, k, v, gamma, scale=1.0, S0=None):
        return recurrence(q, k, v, gamma, 2 * scale, S0)

    verdict = judged(mine, "forward", dtypes=("bfloat16",))
    assert "an honest evaluation in bfloat16 (float32 sums, float32 elsewhere) stays within" in verdict.why


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (None, "mine returned None for O; expected a tensor"),
        ((None, None), "mine returned None for O; expected a tensor"),
        ((), "mine returned 0 results; retention has O, S"),
        ({"O": 1}, "mine returned O as dict; expected a floating-point tensor"),
        ((np.zeros(1), np.zeros(1), np.zeros(1)), "mine returned 3 results; retention has O, S"),
        (np.zeros(1, dtype=np.int64), "mine returned O as ndarray int64; expected a floating-point tensor"),
    ],
    ids=["None", "Nones", "nothing", "dict", "three", "integers"],
)
def test_not_the_operators_output(result: Any, why: str) -> None:
    def mine(q, k, v, gamma):
        return result

    verdict = judged(mine, "forward")
    assert (verdict.status, verdict.why) == ("fail", why)


@needs_torch
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda O, S: (O.long(), S),
            "mine returned O as a tensor of torch.int64; expected a floating-point tensor",
        ),
        (lambda O, S: (O.double(), S), "mine returned O in torch.float64; expected torch.float32, as its inputs"),
        (lambda O, S: O.numpy(), "mine returned O as ndarray; expected a floating-point tensor"),
    ],
    ids=["integers", "float64", "numpy"],
)
def test_not_the_operators_tensor(change: Callable[[Any, Any], Any], why: str) -> None:
    verdict = judged(torch_retention(change), "forward", framework="torch")
    assert (verdict.status, verdict.why) == ("fail", why)


@needs_torch
def test_no_gradient() -> None:
    verdict = judged(torch_retention(lambda O, S: (O.detach(), S.detach())), "vjp", framework="torch", gradients=True)
    assert verdict.status == "fail"
    assert verdict.why == "mine returned outputs without a gradient; declare gradients=False if it has none"


@needs_torch
def test_backward_that_raises() -> None:
    import torch

    class Mine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, O):
            return O.clone()

        @staticmethod
        def backward(ctx, G):
            raise NotImplementedError("no backward yet.")

    mine = torch_retention(lambda O, S: (Mine.apply(O), S))
    assert judged(mine, "vjp", framework="torch", gradients=True).why == (
        "mine raised in backward: NotImplementedError: no backward yet"
    )


@needs_torch
def test_warnings_of_an_implementation_are_no_verdict() -> None:
    """Here as in many a user's suite warnings are errors."""
    import torch

    class Mine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, O):
            warnings.warn("forward", stacklevel=1)
            return O.clone()

        @staticmethod
        def backward(ctx, G):
            warnings.warn("backward", stacklevel=1)
            return G

    mine = torch_retention(lambda O, S: (Mine.apply(O), S))
    assert judged(mine, "vjp", framework="torch", gradients=True).status == "pass"
    with pytest.raises(UserWarning, match="still an error"):  # and the filters are as they were
        warnings.warn("still an error", stacklevel=1)


# --------------------------------------------------------------------------------------------- what could not be judged


def test_undecided() -> None:
    verdict = Verdict("retention/mine/forward", "undecided", why="the oracle's own error straddles the bound")
    assert terminal.line(verdict) == "undecided   retention/mine/forward: the oracle's own error straddles the bound"
    assert terminal.objection(verdict) == ""
    assert terminal.objection(verdict, strict=True) == terminal.line(verdict)


def test_undecided_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from mixproof.verify import judge as judging
    from mixproof.verify.verdict import Evidence

    straddles = Evidence("O", np.asarray(1.2), np.asarray(0.0), 1.0, radius=0.5)
    law = judging.find_law("forward")
    monkeypatch.setattr(judging, "find_law", lambda name: dataclasses.replace(law, check=lambda *_: [straddles]))
    verdict = judged(recurrence, "forward")
    assert verdict.status == "undecided"
    assert verdict.why == (
        "the oracle's own error straddles the bound; judge in a wider dtype, or certify with python-flint"
    )


def test_missing_package() -> None:
    verdict = judged(recurrence, "forward", requires=("no_such_package",))
    assert (verdict.status, verdict.why) == ("not run", "no_such_package is not installed")
    assert terminal.closing([verdict], 1) == "0 cells checked: no_such_package is not installed; exit 5"


@needs_torch
def test_needs_a_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    verdict = judged(torch_retention(lambda O, S: (O, S)), "forward", framework="torch", devices=("cuda",))
    assert (verdict.status, verdict.why) == ("not run", "needs a GPU")


def test_a_law_that_does_not_apply_is_not_a_gap() -> None:
    verdict = judged(recurrence, "vjp")
    assert (verdict.status, verdict.why) == ("not applicable", "declares no gradients")
    assert terminal.exit_code([verdict, Verdict("a/b/c", "pass")], strict=True) == 0
    assert replay(subject(recurrence), "vjp", "B=1 H=1 T=1 K=1 V=1").status == "not applicable"


@needs_triton
@pytest.mark.parametrize(("dtypes", "status"), [(("float32", "bfloat16"), "pass"), (("bfloat16",), "not run")])
def test_interpreter(monkeypatch: pytest.MonkeyPatch, dtypes: tuple[str, ...], status: str) -> None:
    from mixproof.verify.subjects import boundary_torch
    from mixproof.verify.subjects.triton import interpreter

    monkeypatch.setattr(interpreter, "bf16_is_right", lambda: False)
    monkeypatch.setattr(boundary_torch, "device", lambda declaration: "cpu")
    mine = torch_retention(lambda O, S: (O, S))
    verdict = judged(mine, "forward", framework="torch", dtypes=dtypes, requires=("triton",))
    why = "triton runs interpreted on CPU: bfloat16 verdicts withheld (the interpreter fails a 2-line bfloat16 canary)"
    assert (verdict.status, verdict.withheld or verdict.why) == (status, why)


# ------------------------------------------------------------------------------------------ a declaration that is wrong


@pytest.mark.parametrize(
    ("operator", "options", "message"),
    [
        ("retnet", {}, "no operator 'retnet'; did you mean \"retention\"? (mixproof list)"),
        (len, {}, 'operator: expected a name, as in @implements("retention"), not <built-in function len>'),
        ("retention", {"layout": "B T X D"}, "layout axes: 'X' is not one of B, T, H, D"),
        ("retention", {"layout": "B H D"}, 'layout "B H D" must name T and D once, and may name B and H'),
        ("retention", {"layout": None}, 'layout: expected a string such as "B T H D", not None'),
        ("retention", {"dtypes": "float31"}, "dtypes: 'float31' is not one of float64, float32, bfloat16, float16"),
        ("retention", {"dot": "fp8"}, "dot: 'fp8' is not one of input, float64, float32, tf32, bfloat16, float16"),
        ("retention", {"devices": ("tpu",)}, "devices: 'tpu' is not one of cpu, cuda"),
        ("retention", {"chunk": 0}, "chunk: expected an integer >= 1, not 0"),
        ("retention", {"multiple_of": {"N": 16}}, "multiple_of names 'N'; retention has the axes B, H, T, K, V"),
        ("retention", {"multiple_of": {"T": 0}}, "multiple_of['T']: expected an integer >= 1, not 0"),
        (
            "retention",
            {"fixed": {"decay": 1}},
            "fixed names 'decay'; retention has the inputs S0, gamma, k, q, scale, v",
        ),
        (
            "retention",
            {"name": "my kernel"},
            "name: 'my kernel' has a space, a slash or a quote, or is empty; it is part of OPERATOR/NAME/LAW",
        ),
    ],
)
def test_wrong_declaration(operator: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(AdapterError) as caught:
        implements(operator, **options)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda q, k, v, decay: None,
            "mine takes an argument 'decay'; retention has the inputs S0, gamma, k, q, scale, v",
        ),
        (
            lambda q, k, v: None,
            "mine does not take 'gamma', an input of retention; add the argument, or declare the constant it uses: "
            'fixed={"gamma": ...}',
        ),
    ],
)
def test_arguments_that_do_not_fit(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(AdapterError) as caught:
        subject(function)
    assert str(caught.value) == message


# ---------------------------------------------------------------------------- bad input to the implementations we ship


def gma_inputs(make: Callable[[np.ndarray], Any], one_head: bool) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    shapes = {
        "q": (1, 4, 2, 2),
        "k": (1, 4, 2, 2),
        "v": (1, 4, 2, 2),
        "mu": (2, 3, 2),
        "omega": (2, 3, 2),
        "alpha": (2, 3),
    }
    arrays = {n: generator.normal(size=s).astype(np.float32) for n, s in shapes.items()}
    if one_head:
        arrays = {n: x[0, :, 0] if n in "qkv" else x[0] for n, x in arrays.items()}
    return {n: make(x) for n, x in arrays.items()}


def spoiled(kind: str, x: dict[str, Any]) -> dict[str, Any]:
    """The inputs with one thing wrong."""
    return {
        "shape of v": lambda: x | {"v": x["v"][..., :3, :] if x["v"].ndim == 2 else x["v"][:, :3]},
        "axes of mu": lambda: x | {"mu": x["mu"][0]},
        "NaN in mu": lambda: x | {"mu": x["mu"] * float("nan")},
        "NaN in omega": lambda: x | {"omega": x["omega"] * float("nan")},
        "NaN in alpha": lambda: x | {"alpha": x["alpha"] * float("nan")},
        "no components": lambda: x | {n: x[n][..., :0, :] for n in ("mu", "omega")} | {"alpha": x["alpha"][..., :0]},
        "negative floor": lambda: x | {"v_min": -1.0},
        "floor not a number": lambda: x | {"v_min": float("nan")},
        "negative eps": lambda: x | {"eps": -1.0},
        "integers in q": lambda: x | {"q": x["q"].astype("int64") if hasattr(x["q"], "astype") else x["q"].long()},
        "integers in mu": lambda: x | {"mu": x["mu"].astype("int64") if hasattr(x["mu"], "astype") else x["mu"].long()},
        "a list": lambda: x | {"q": [1.0]},
        "devices": lambda: x | {"v": x["v"].to("meta")},
        "chunk": lambda: x | {"chunk": 0},
    }[kind]()


BAD = {
    "shape of v": (ValueError, "v has shape"),
    "axes of mu": (ValueError, "mu has shape"),
    "NaN in mu": (ValueError, "mu contains NaN"),
    "NaN in omega": (ValueError, "omega contains NaN"),
    "NaN in alpha": (ValueError, "alpha contains NaN"),
    "no components": (ValueError, "mu"),
    "negative floor": (ValueError, "v_min is -1.0"),
    "floor not a number": (ValueError, "v_min is nan"),
    "negative eps": (ValueError, "eps is -1.0"),
    "integers in q": (TypeError, "q (is|has dtype) (torch.)?int64"),
    "integers in mu": (TypeError, "mu (is|has dtype) (torch.)?int64"),
    "a list": (TypeError, "q is (a )?list"),
    "devices": (ValueError, "v is on meta, but q is on cpu"),
    "chunk": (ValueError, "chunk is 0"),
}


@pytest.mark.parametrize("kind", [kind for kind in BAD if kind != "devices"])
def test_bad_input_to_the_reference(kind: str) -> None:
    error, text = BAD[kind]
    with pytest.raises(error, match=text):
        reference.chunkwise(**spoiled(kind, gma_inputs(np.asarray, one_head=True)))


@needs_torch
@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize(
    "entry", [e for e in entries() if e.operator == "gma.causal" and "reference" not in e.name], ids=str
)
def test_bad_input_to_our_kernels(entry: Any, kind: str) -> None:
    if entry.missing():
        pytest.skip(f"{entry.missing()} is not installed")
    import torch

    function = entry.load().function
    if kind == "chunk" and entry.name == "torch.eager":
        pytest.skip("takes no chunk size")
    error, text = BAD[kind]
    with pytest.raises(error, match=text):
        function(**spoiled(kind, gma_inputs(torch.tensor, one_head=False)))
