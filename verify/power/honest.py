"""False alarms: honest implementations of every operator, in many arithmetics at once, under every judge.

What is judged is the reference itself, in each of its forms and with several chunk sizes, and its gradients, computed
in lanes (verify/numbers/lanes.py): other orders of summation, split and fused sums, tensor cores that cut off, exp in
base two or an ulp off, online softmax, softmax recomputed from a logsumexp, results read back in the output's format.
One case is one lane on one input. Each must be accepted; an alarm of ours is a mistake in a ball or in a lane.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mixproof.reference import operator as find_operator
from mixproof.reference.spec import Operator
from mixproof.verify import oracle
from mixproof.verify.arithmetic import Arithmetic
from mixproof.verify.case import Case, Domain, atlas
from mixproof.verify.declare import Declaration
from mixproof.verify.numbers.lanes import Workshop
from mixproof.verify.oracle import Expected
from mixproof.verify.power import baseline
from mixproof.verify.power.duel import INPUTS, OURS, SIZES
from mixproof.verify.power.rivals import FORMATS, JUDGES, Rivals
from mixproof.verify.simulated import simulate

CHUNK = 8
CHUNKS = (1, 3, 5, CHUNK, 2, 64)
ENOUGH = {"ci": 1000, "nightly": 10_000}  # decided cases of the atlas, an operator and format
LANES, FEW = 50, 4  # lanes of a case; of one with long sequences or caches
LONG, LENGTHS = 24, ("B", "H", "T", "S", "P")
ROUNDS = 40  # how often the atlas is drawn again where too little is decided, at most
Arrays = Mapping[str, Any]
Row = dict[str, Any]


def campaign(operator: str, profile: str = "ci", seed: int = 0) -> list[Row]:
    """A row for each format: {"operator", "format", "cases", "vacuous", "worst", "worst_case", "counts", "alarms",
    "failures"}; `worst` is the largest error / bound, `failures` the cases of our own alarms. Cases outside the domain
    of the arithmetic (`vacuous`) are nobody's alarm. In profile ci every second case is one of outputs alone, in the
    next format the others are."""
    brief = profile == "ci"
    return [of_format(find_operator(operator), name, ENOUGH[profile], seed, brief) for name in FORMATS]


def of_format(operator: Operator, format: str, enough: int, seed: int, brief: bool = False) -> Row:
    """The row of one format, with at least `enough` decided cases of the atlas."""
    arithmetic = arithmetic_of(operator, format)
    counts: Counter[str] = Counter(dict.fromkeys(INPUTS, 0))
    alarms: dict[str, Counter[str]] = {inputs: Counter(dict.fromkeys((*JUDGES, OURS), 0)) for inputs in INPUTS}
    vacuous, worst, failures, forms = 0, (0.0, ""), [], len(operator.forms)
    for inputs in INPUTS:
        cases, least = _cases(operator, arithmetic, inputs, seed, brief)
        for i, case in enumerate(cases):
            if counts[inputs] >= enough and i >= least:
                break
            # users' kernels have the usual form and its usual chunk
            trial = Trial(operator, case, format, arithmetic, i if inputs == "atlas" else CHUNKS.index(CHUNK) * forms)
            lanes = FEW if max(n for _, n in case.sizes) > LONG else LANES
            outputs_alone = brief and (i + list(FORMATS).index(format)) % 2 == 1
            alarmed, ratio = trial.judged(lanes, gradients=not outputs_alone)
            if alarmed is None:
                vacuous += lanes
                continue
            counts[inputs] += lanes
            alarms[inputs].update(alarmed)
            worst = max(worst, (ratio, str(case)))
            if alarmed[OURS]:
                failures.append(f"{case}   ({trial.form}, {ratio:.3g} x bound)")
    return {
        "operator": operator.name,
        "format": format,
        "cases": sum(counts.values()),
        "vacuous": vacuous,
        "worst": worst[0] if np.isfinite(worst[0]) else "inf",
        "worst_case": worst[1],
        "counts": dict(counts),
        "alarms": {inputs: dict(found) for inputs, found in alarms.items()},
        "failures": failures[:20],
    }


def arithmetic_of(operator: Operator, format: str) -> Arithmetic:
    """What an implementation with chunks of CHUNK tokens declares that computes in this format."""
    wanted = FORMATS[format]
    return Declaration(operator.name, "honest", dot=wanted.dot, chunk=CHUNK).arithmetic(wanted.inputs)


class Trial:
    """One input in many lanes. Which form, which chunk size: in turn. `made_in` is what lanes compute in, if it is not
    the arithmetic that is judged."""

    def __init__(self, operator: Operator, case: Case, format: str, arithmetic: Arithmetic, turn: int) -> None:
        self.operator, self.case, self.format, self.arithmetic = operator, case, format, arithmetic
        self.made_in = arithmetic
        self.inputs = case.arrays()
        self.turn = turn
        self.form = operator.forms[turn % len(operator.forms)]
        self.chunk = CHUNKS[turn // len(operator.forms) % len(CHUNKS)] if self.form.chunked else None

    def judged(self, lanes: int, gradients: bool = True) -> tuple[Counter[str] | None, float]:
        """How many lanes each judge rejects, and the worst error / bound; None outside the arithmetic's domain."""
        with np.errstate(all="ignore"):
            outputs = oracle.forward(self.operator, self.inputs, self.arithmetic, self.case.parameters)
            grads, cotangents = None, self.case.cotangents(outputs.value)
            if gradients:
                grads = oracle.backward(self.operator, self.inputs, cotangents, self.arithmetic, self.case.parameters)
            if outputs.vacuous and (grads is None or grads.vacuous):
                return None, 0.0
            rejected: dict[str, np.ndarray] = {judge: np.zeros(lanes, dtype=bool) for judge in (*JUDGES, OURS)}
            worst = 0.0
            if not outputs.vacuous:
                base = baseline.outputs(self.operator, self.inputs, self.format)
                worst = self._compare(self.outputs(lanes), outputs, base, rejected)
            if grads is not None and not grads.vacuous:
                base = baseline.gradients(self.operator, self.inputs, cotangents, self.format)
                worst = max(worst, self._compare(self.gradients(lanes, cotangents), grads, base, rejected))
        return Counter({judge: int(found.sum()) for judge, found in rejected.items()}), worst

    def outputs(self, lanes: int) -> dict[str, np.ndarray]:
        """Each output of the form in every lane, (lanes, B, H, ...), rounded to its format."""
        shop = Workshop(self.made_in, lanes, self.turn)
        return simulate(shop, self.operator, self.case, self.inputs, {}, self.form.name, self.chunk)

    def gradients(self, lanes: int, cotangents: Arrays) -> dict[str, np.ndarray]:
        """The gradient of every differentiable input present; those of parameters are summed over the batch."""
        shop = Workshop(self.made_in, lanes, self.turn, recomputes=True)
        return simulate(shop, self.operator, self.case, self.inputs, cotangents, self.form.name, self.chunk)

    def _compare(
        self, got: Mapping[str, np.ndarray], want: Expected, base: Arrays, rejected: dict[str, np.ndarray]
    ) -> float:
        """Adds the lanes that each judge rejects; returns the worst error / bound."""
        roles = {x.name: x.role for x in (*self.operator.inputs, *self.operator.outputs)}
        worst = 0.0
        for name, value in want.value.items():
            x = got[name]
            if not x.size:
                continue
            dtype = self.case.dtype if roles[name] == "token" else self.case.parameters
            for judge, found in Rivals(value, base.get(name), dtype).among(x).items():
                rejected[judge] |= found
            error = np.where(x == value, 0, np.abs(x - value) / want.bound[name])
            ratio = np.where(np.isnan(error), np.inf, error).reshape(len(x), -1).max(axis=1)
            rejected[OURS] |= ratio > 1
            worst = max(worst, float(ratio.max()))
        return worst


def _cases(
    operator: Operator, arithmetic: Arithmetic, inputs: str, seed: int, brief: bool
) -> tuple[Iterator[Case], int]:
    """The cases, and how many of them are met whatever they decide. `users`: aligned shape, normal values. `atlas`:
    ours, each regime once, and drawn again with other seeds until enough is decided. Brief ones are no longer than four
    chunks and no wider than one."""
    domain = Domain(operator.name, ((arithmetic.inputs, "float32"),), chunk=CHUNK)
    if inputs == "users":
        sizes = SIZES | {"H": 1} | (dict.fromkeys(("T", "S", "P"), 4 * CHUNK) if brief else {})
        fields = dict(dtype=arithmetic.inputs, state="random")
        return (domain.case(sizes, flag=i == 1, seed=seed + i, **fields) for i in range(2)), 2
    plan = [*atlas(domain, small=True), *atlas(domain, small=True, extreme=True)]
    return _drawn(plan, domain, seed, brief), len(plan)


def _drawn(plan: list[Case], domain: Domain, seed: int, brief: bool) -> Iterator[Case]:
    for again in range(ROUNDS):
        for i, case in enumerate(plan):
            # sequences of a batch meet in the gradients of parameters alone
            sized = case.resized(B=2 if (i + again) % 5 == 4 else 1, H=1)
            if brief:
                sized = sized.resized(**{a: domain.fit(a, min(n, CHUNK)) for a, n in sized.sizes if a not in LENGTHS})
            yield dataclasses.replace(sized, seed=case.seed + seed + 1000 * again)
