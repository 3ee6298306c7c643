"""The checks that people use today, as functions of what came and what was wanted. None of them is the gate's.

    allclose 1e-2, allclose 1e-3   |got - want| <= t + t |want|, each element
    assert_close                   the same with PyTorch's defaults for the format of the output
    RMS 0.005                      root mean square of the error <= 0.005 of that of the wanted, or no error above 1e-6
                                   (Flash Linear Attention)
    twice baseline                 the largest error <= twice that of the equations in the format of the output, + 1e-5
                                   (FlashAttention)
    gradcheck                      gradients against finite differences of the same implementation, in float64

All but the last compare with the reference rounded to the format of the output, as their users do. The comparisons
themselves are done in float64, where their users' run in the format of the tensors: that is kinder to both sides.
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from mixproof.verify.arithmetic import Arithmetic, natural, round_to
from mixproof.verify.case import Case
from mixproof.verify.subject import Subject

FORMATS: dict[str, Arithmetic] = {
    "float32": natural("float32"),
    "tf32": natural("float32", dot="tf32"),
    "bfloat16": natural("bfloat16"),
    "float16": natural("float16"),
}
JUDGES = ("allclose 1e-2", "allclose 1e-3", "assert_close", "RMS 0.005", "twice baseline")
GRADCHECK = "gradcheck"

# what is allowed relative to the wanted value, and in addition to it
DEFAULTS = {"float64": (1e-7, 1e-7), "float32": (1.3e-6, 1e-5), "bfloat16": (1.6e-2, 1e-5), "float16": (1e-3, 1e-5)}
Jacobians = dict[tuple[str, str], np.ndarray]
GRADCHECK_STEP, GRADCHECK_RELATIVE, GRADCHECK_ABSOLUTE = 1e-6, 1e-3, 1e-5


class Rivals:
    """What one wanted tensor lets pass. `baseline` is the same tensor from the equations evaluated in the format
    `dtype` of the output throughout; without it the rule that compares with it is left out."""

    def __init__(self, want: np.ndarray, baseline: np.ndarray | None, dtype: str) -> None:
        self.want = round_to(want, dtype).ravel()
        self.baseline = None if baseline is None else np.asarray(baseline, dtype=float).ravel()
        self.close = {"allclose 1e-2": (1e-2, 1e-2), "allclose 1e-3": (1e-3, 1e-3), "assert_close": DEFAULTS[dtype]}

    @cached_property
    def allowed(self) -> dict[str, np.ndarray]:
        """An infinity that is wanted allows nothing but itself, a NaN nothing."""
        size = np.abs(self.want)
        return {
            name: np.where(np.isfinite(size), absolute + relative * size, 0)
            for name, (relative, absolute) in self.close.items()
        }

    @cached_property
    def most(self) -> dict[str, float]:
        """The largest error that any element may have."""
        return {name: float(allowed.max()) for name, allowed in self.allowed.items()}

    @cached_property
    def scale(self) -> float:
        return float(np.sqrt(np.mean(self.want * self.want))) + 1e-8

    @cached_property
    def limit(self) -> float:
        assert self.baseline is not None
        return 2 * float(np.abs(self.baseline - self.want).max()) + 1e-5

    def rejections(self, got: np.ndarray) -> dict[str, bool]:
        """Which judges reject this tensor, whose values are those of the output's format. Nothing rejects one that is
        empty."""
        # `among` for one tensor, in a few operations where the largest error alone decides
        with np.errstate(all="ignore"):
            error = np.abs(np.asarray(got, dtype=float).ravel() - self.want)
            worst = float(error.max()) if error.size else math.inf
            if not math.isfinite(worst):
                return {name: bool(rejected[0]) for name, rejected in self.among(np.asarray(got)[None]).items()}
            rejected = {
                name: worst > absolute and (worst > self.most[name] or not bool((error <= self.allowed[name]).all()))
                for name, (_, absolute) in self.close.items()
            }
            rejected["RMS 0.005"] = worst > 1e-6 and not self._small(error, worst)
            if self.baseline is not None:
                rejected["twice baseline"] = not worst <= self.limit
        return rejected

    def _small(self, error: np.ndarray, worst: float) -> bool:
        # a root mean square is at most the largest
        return worst < 0.005 * self.scale or math.sqrt(float(error @ error) / error.size) / self.scale < 0.005

    def among(self, got: np.ndarray) -> dict[str, np.ndarray]:
        """The same for several at once: (N, ...) -> (N,) each."""
        n = len(got)
        if self.want.size == 0:
            names = (*JUDGES[:4], *([] if self.baseline is None else JUDGES[4:]))
            return {name: np.zeros(n, dtype=bool) for name in names}
        with np.errstate(all="ignore"):
            got = np.asarray(got, dtype=float).reshape(n, -1)
            error = np.abs(got - self.want)
            worst = error.max(axis=1)  # NaN where one is
            apart = error if np.isfinite(worst).all() else np.where(got == self.want, 0, error)
            rejected: dict[str, np.ndarray] = {}
            for name, allowed in self.allowed.items():
                rejected[name] = ~np.asarray((apart <= allowed).all(axis=1))
            ratio = np.sqrt(np.einsum("ni,ni->n", error, error) / error.shape[1]) / self.scale
            rejected["RMS 0.005"] = ~((worst <= 1e-6) | (ratio < 0.005))
            if self.baseline is not None:
                rejected["twice baseline"] = ~(worst <= self.limit)
        return rejected


def rejections(got: np.ndarray, want: np.ndarray, baseline: np.ndarray | None, dtype: str) -> dict[str, bool]:
    """Which judges reject `got`, a tensor in the format `dtype`, where `want` is the reference's in float64. With the
    same want several times, make `Rivals` once."""
    return Rivals(want, baseline, dtype).rejections(got)


def gradcheck(subject: Subject, case: Case, numerical: Jacobians | None = None) -> bool | None:
    """Whether PyTorch's gradcheck with its defaults rejects the gradients of a NumPy implementation: each Jacobian,
    row by row from gradients and column by column from central differences, gradients that differ when repeated, and
    those that do not vanish with their cotangents. None where there is no gradient. A wrong forward it cannot see.

    The case must be small and in float64. `numerical`: its `jacobians`, if they are known."""
    if not subject.differentiable:
        return None
    with np.errstate(all="ignore"):
        inputs = subject.inputs(case)
        numerical = jacobians(subject, case) if numerical is None else numerical
        zero = {y: np.zeros_like(x) for y, x in subject.run(inputs, case.dtype).items()}
        if any(np.any(g != 0) for g in subject.gradients(inputs, zero, case.dtype).values()):
            return True
        for y in zero:
            for i in range(zero[y].size):
                one = np.zeros_like(zero[y])
                one.flat[i] = 1
                row = subject.gradients(inputs, {**zero, y: one}, case.dtype)
                for x in row:
                    a, n = row[x].ravel(), numerical[y, x][i]
                    allowed = np.where(np.isfinite(n), GRADCHECK_ABSOLUTE + GRADCHECK_RELATIVE * np.abs(n), 0)
                    if not np.all((a == n) | (np.abs(a - n) <= allowed)):
                        return True
                if i == 0:  # of each output; PyTorch repeats every row
                    again = subject.gradients(inputs, {**zero, y: one}, case.dtype)
                    if not all(np.array_equal(again[x], row[x]) for x in row):
                        return True
    return False


def jacobians(subject: Subject, case: Case) -> Jacobians:
    """Jacobians by the names of output and input, (outputs, inputs), from two values for each element of each input."""
    inputs = subject.inputs(case)
    found: Jacobians = {}
    for x in subject.operator.inputs:
        if not x.differentiable or x.name not in inputs or x.name not in subject.takes:
            continue
        columns: dict[str, list[np.ndarray]] = {}
        for i in range(inputs[x.name].size):
            before, after = inputs[x.name].copy(), inputs[x.name].copy()
            before.flat[i] -= GRADCHECK_STEP
            after.flat[i] += GRADCHECK_STEP
            with np.errstate(all="ignore"):
                low = subject.run({**inputs, x.name: before}, case.dtype)
                high = subject.run({**inputs, x.name: after}, case.dtype)
                for y in low:
                    columns.setdefault(y, []).append((high[y] - low[y]).ravel() / (2 * GRADCHECK_STEP))
        found |= {(y, x.name): np.stack(c, axis=1) for y, c in columns.items()}
    return found
