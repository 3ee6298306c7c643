"""One case in many arithmetics: what an implementation returns there, and what the reference does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from mixproof.reference import operator as find_operator
from mixproof.reference.spec import Operator
from mixproof.verify import oracle
from mixproof.verify.arithmetic import Arithmetic, holds, natural, round_to
from mixproof.verify.case import Case
from mixproof.verify.laws.law import completed
from mixproof.verify.numbers.lanes import Lanes, Workshop
from mixproof.verify.subject import Subject

SIZES = {"B": 1, "H": 1, "T": 33, "S": 33, "P": 9} | dict.fromkeys(("K", "R", "V", "D", "E", "F", "L"), 16)
SIZES |= {"N": 2, "X": 4, "G": 2, "M": 2, "J": 2, "W": 4, "Q": 4}
SEEDS = 2
OPERANDS = {"float64": "float64", "float32": "float32", "tf32": "TF32 operands"}
Arrays = Mapping[str, Any]
Vector = np.ndarray


def name_of(arithmetic: Arithmetic) -> str:
    """What sets an arithmetic apart, in the order of how much it costs."""
    if arithmetic.intermediate in ("bfloat16", "float16"):
        return f"{arithmetic.intermediate} intermediates"
    if arithmetic.accumulate in ("bfloat16", "float16"):
        return f"{arithmetic.accumulate} accumulation"
    if holds(arithmetic.dot, arithmetic.intermediate):
        return arithmetic.intermediate
    return OPERANDS.get(arithmetic.dot, f"{arithmetic.dot} operands")


def candidates(dtype: str, declared: Arithmetic) -> dict[str, list[Arithmetic]]:
    """Every arithmetic that comes into question at one input dtype, the widest first, in variants of one name."""
    f32, f64 = dict.fromkeys(("accumulate", "intermediate"), "float32"), "float64"
    variants = [dict(dot=f64, accumulate=f64, intermediate=f64)]
    variants += [f32 | dict(dot=dot) for dot in ("float32", "tf32", "float16", "bfloat16")]
    for short in ("float16", "bfloat16"):
        variants += [dict(dot=dot, accumulate=short, intermediate="float32") for dot in (short, "float32")]
        variants += [dict(dot=short, accumulate=acc, intermediate=short) for acc in ("float32", short)]
    found: dict[str, list[Arithmetic]] = {}
    own = dict(dot=declared.dot, accumulate=declared.accumulate, intermediate=declared.intermediate)
    for formats in [*variants, own] if own not in variants else variants:
        arithmetic = natural(dtype, **formats)
        found.setdefault(name_of(arithmetic), []).append(arithmetic)
    return found


def covers(found: Arithmetic, declared: Arithmetic) -> bool:
    """Whether every format of the second is held by the same of the first."""
    pairs = ((found.dot, declared.dot), (found.accumulate, declared.accumulate))
    return all(holds(a, b) for a, b in (*pairs, (found.intermediate, declared.intermediate)))


def cases(subject: Subject, dtype: str, brief: bool) -> Iterator[Case]:
    """Normal values, lengths and widths at which sums have some terms, and no chunk is whole."""
    fields: dict[str, Any] = {
        "dtype": dtype,
        "parameters": subject.declaration.parameter_dtype(dtype),
        "state": "random",
    }
    sizes = SIZES | ({"T": 17, "S": 17} if brief or subject.slow else {})
    for seed in range(1 if brief else SEEDS):
        yield subject.domain().case(sizes, flag=seed % 2 == 0, seed=1000 + seed, **fields)


class Look:
    """One case: what the implementation returned, what it should have, and what the reference returns elsewhere.

    `scale` multiplies an input to which the outputs are proportional; `moved` shrinks all inputs by up to that much,
    each `draw` differently."""

    def __init__(
        self, subject: Subject, case: Case, part: str, scale: float = 1.0, moved: float = 0.0, draw: int = 0
    ) -> None:
        self.subject, self.case, self.part, self.scale = subject, case, part, scale
        self.operator, self.inputs = subject.operator, subject.inputs(case)
        if scale != 1 and (changed := self.scaled(scale)) is not None:
            self.inputs = changed
        if moved:
            self.inputs = self._moved(moved, draw)
        arithmetic = subject.declaration.arithmetic(case.dtype)
        self.want = oracle.forward(self.operator, self.inputs, arithmetic, case.parameters)
        self.cotangents: dict[str, Any] = {}
        if part == "gradients":
            self.returned = tuple(subject.run(self.inputs, case.dtype))
            upstream = case.cotangents(self.want.value)
            self.cotangents = completed({n: upstream[n] for n in self.returned}, self.want.value)
            self.want = oracle.backward(self.operator, self.inputs, self.cotangents, arithmetic, case.parameters)

    def scaled(self, scale: float) -> dict[str, Any] | None:
        """The inputs, one of them multiplied and states left out; None if there is no such input."""
        name = self.operator.linear_in or next((n for n, d in self.operator.degrees.items() if d == 1), None)
        if name is None or name not in self.inputs:
            return None
        states = {x.name for x in self.operator.state}
        inputs = {n: x for n, x in self.inputs.items() if n not in states}
        return inputs | {name: round_to(inputs[name] * scale, self.case.dtype)}

    def _moved(self, most: float, draw: int) -> dict[str, Any]:
        """Every array, shrunk a little: no number leaves the range in which it has a meaning."""
        roles = {x.name: x.role for x in self.operator.inputs}
        moved = dict(self.inputs)
        for name, x in self.inputs.items():
            if roles[name] != "scalar" and name not in self.subject.declaration.fixed:
                shrink = 1 - most * self.case.generator(f"moved {draw} {name}").random(np.shape(x))
                moved[name] = round_to(x * shrink, self.case.dtype if roles[name] == "token" else self.case.parameters)
        return moved

    def got(self) -> Arrays:
        """What the implementation returns."""
        if self.part == "outputs":
            return self.subject.run(self.inputs, self.case.dtype)
        upstream = {n: self.cotangents[n] for n in self.returned}
        return self.subject.gradients(self.inputs, upstream, self.case.dtype)

    def errors(self, values: Arrays, names: tuple[str, ...]) -> Vector:
        """(values - oracle) / tolerance, all tensors in one row; with a leading axis of lanes, a row a lane."""
        parts = []
        for name in names:
            want, bound = self.want.value[name], self.want.bound[name]
            x = np.asarray(values[name])
            keep = (bound > 0).ravel()
            lead = x.shape[: x.ndim - want.ndim]
            parts.append(((x - want) / np.where(bound > 0, bound, 1)).reshape(*lead, -1)[..., keep])
        return np.concatenate(parts, axis=-1)

    def grid(self, values: Arrays, names: tuple[str, ...]) -> frozenset[str]:
        """The short formats that hold every number of the tokens' tensors."""
        roles = {x.name: x.role for x in (*self.operator.inputs, *self.operator.outputs)}
        tokens = [values[n] for n in names if roles[n] == "token"]
        return frozenset(f for f in ("float16", "bfloat16") if all(np.array_equal(x, round_to(x, f)) for x in tokens))

    def rows(self, names: tuple[str, ...]) -> float:
        return sum(x.size / max(1, x.shape[-1] if x.ndim > 2 else 1) for x in (self.want.value[n] for n in names))

    def simulated(self, arithmetic: Arithmetic, form: str) -> Mapping[str, np.ndarray]:
        """The reference in this arithmetic, (lanes, B, H, ...): several orders of summation, TF32 rounded and cut."""
        chunk = self.subject.declaration.chunk or 16
        if self.part == "outputs" and _same(self.inputs, self.case.arrays()):
            return remembered(self.case, arithmetic, form, chunk)
        return simulate(_workshop(arithmetic), self.operator, self.case, self.inputs, self.cotangents, form, chunk)


@lru_cache(maxsize=256)
def remembered(case: Case, arithmetic: Arithmetic, form: str, chunk: int) -> Mapping[str, np.ndarray]:
    return simulate(_workshop(arithmetic), find_operator(case.op), case, case.arrays(), {}, form, chunk)


def simulate(
    shop: Workshop, operator: Operator, case: Case, inputs: Arrays, cotangents: Arrays, form: str, chunk: int | None
) -> dict[str, np.ndarray]:
    """Every output of a form, or every gradient if there are cotangents, in each lane of a shop, (lanes, B, H, ...);
    those of parameters summed over the batch; rounded to its dtype at the end."""
    roles = {x.name: x.role for x in (*operator.inputs, *operator.outputs)}
    dtype_of = {n: case.dtype if role == "token" else case.parameters for n, role in roles.items()}

    def lifted(arrays: Arrays) -> dict[str, Any]:
        return {
            n: x if roles[n] == "scalar" else shop.input(_narrowed(x, shop.intermediate, dtype_of[n]), dtype_of[n])
            for n, x in arrays.items()
        }

    results: dict[tuple[int, int], dict[str, np.ndarray]] = {}
    for (b, h), head in oracle.heads(operator, inputs):
        if cotangents:
            found = operator.vjp(lifted({n: c[b, h] for n, c in cotangents.items()}), **lifted(head))
            found = {n: g for n, g in found.items() if n in head and operator.input(n).differentiable}
        else:
            found = operator.evaluate(lifted(head), form, chunk)
        results[b, h] = {
            n: shop.spread(x.data if isinstance(x, Lanes) else np.asarray(x)[None]) for n, x in found.items()
        }
    B, H = (1 + max(i) for i in zip(*results, strict=True))
    gathered = {}
    for n in results[0, 0]:
        if roles[n] == "parameter":
            whole = [results[0, h][n] for h in range(H)]
            for b in range(1, B):
                whole = [shop.rounded(x + results[b, h][n]) for h, x in enumerate(whole)]
            x = np.stack(whole, axis=1)
        else:
            x = np.stack([np.stack([results[b, h][n] for h in range(H)], axis=1) for b in range(B)], axis=1)
        gathered[n] = round_to(x, dtype_of[n])
    return gathered


def _narrowed(x: np.ndarray, wanted: str, dtype: str) -> np.ndarray:
    """An input that came in a wider format than the one in which everything is computed."""
    return x if holds(wanted, dtype) else round_to(x, wanted)


def _workshop(arithmetic: Arithmetic) -> Workshop:
    """Sums one after the other, pairwise and in four parts; of TF32 operands some rounded and some cut off."""
    orders = ("in turn", "pairwise", "split")
    shop = Workshop(arithmetic, 2 * len(orders) if arithmetic.dot == "tf32" else len(orders), plain=True)
    shop.orders = [(name, slice(i, None, len(orders))) for i, name in enumerate(orders)]
    shop.cuts = np.arange(shop.lanes) >= len(orders)
    return shop


def _same(inputs: Arrays, others: Arrays) -> bool:
    return inputs.keys() == others.keys() and all(np.array_equal(x, others[n]) for n, x in inputs.items())
