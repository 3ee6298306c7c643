"""Wrong around the equations: batch, heads, memory, history. The same mistakes for every operator, on (B, H, T, D)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mixproof.reference import operator as find_operator
from mixproof.reference.spec import Operator
from mixproof.verify.subjects.mutants import Mutant
from mixproof.verify.subjects.reference import batched

CHUNK = 8
MIXED = 2.0**-20
EMPTY = np.empty
Arrays = dict[str, Any]
Run = Any  # a function of (B, H, T, D) arrays by name; its attribute `vjp`, if there is one, gives their gradients


def honest(operator: Operator) -> Run:
    return batched(operator, operator.forms[0].function, operator.vjp, CHUNK)


def named(operator: Operator, role: str, inputs: Mapping[str, Any]) -> list[str]:
    return [x.name for x in operator.inputs if x.role == role and x.name in inputs]


def of_inputs(operator: Operator, change: Callable[[Operator, Arrays], Arrays]) -> Run:
    """The reference on changed inputs."""
    right = honest(operator)
    return lambda **inputs: right(**change(operator, inputs))


def as_contiguous(x: np.ndarray) -> np.ndarray:
    """What is read at x's address by who assumes that its rows follow each other."""
    strides = np.cumprod((x.itemsize, *x.shape[:0:-1]))[::-1]
    return np.lib.stride_tricks.as_strided(x, x.shape, tuple(int(s) for s in strides))


def contiguous(operator: Operator, inputs: Arrays) -> Arrays:
    return inputs | {n: as_contiguous(inputs[n]) for n in named(operator, "token", inputs)}


def first_head(operator: Operator, inputs: Arrays) -> Arrays:
    return inputs | {
        n: np.broadcast_to(inputs[n][:1], inputs[n].shape).copy() for n in named(operator, "parameter", inputs)
    }


def other_sequences(operator: Operator, inputs: Arrays) -> Arrays:
    return inputs | {n: x + MIXED * (x[::-1] - x) for n in named(operator, "token", inputs) for x in [inputs[n]]}


def other_heads(operator: Operator, inputs: Arrays) -> Arrays:
    return inputs | {n: x + MIXED * (x[:, ::-1] - x) for n in named(operator, "token", inputs) for x in [inputs[n]]}


def anew(make: Callable[[Operator], Run]) -> Callable[[Operator], Run]:
    """For what has a memory: each implementation under test gets one of its own, see `Mutant.subject`."""

    def made(operator: Operator) -> Run:
        run = make(operator)
        run.anew = lambda: make(operator)
        return run

    return made


@anew
def stale_scalars(operator: Operator) -> Run:
    """What is compiled for a shape keeps the scalars of the first call."""
    right, compiled = honest(operator), {}

    def run(**inputs: Any) -> Any:
        shape = tuple(np.shape(x) for x in inputs.values())
        scalars = {n: inputs[n] for n in named(operator, "scalar", inputs) if not isinstance(inputs[n], bool)}
        return right(**inputs | compiled.setdefault(shape, scalars))

    return run


@anew
def late_scalars(operator: Operator) -> Run:
    """Scalars are copied to the device after the launch that should have read them."""
    right, device = honest(operator), {}

    def run(**inputs: Any) -> Any:
        scalars = {n: inputs[n] for n in named(operator, "scalar", inputs) if not isinstance(inputs[n], bool)}
        result = right(**inputs | (device or scalars))
        device.update(scalars)
        return result

    return run


def overwritten(operator: Operator) -> Run:
    """Its first input serves as scratch."""
    right = honest(operator)

    def run(**inputs: Any) -> Any:
        result = right(**inputs)
        inputs[named(operator, "token", inputs)[0]][...] = 0
        return result

    return run


@anew
def noisy(operator: Operator) -> Run:
    """Sums in whatever order threads arrive: here the last bit is another at every second call."""
    right, calls = honest(operator), [0]

    def run(**inputs: Any) -> Any:
        O, *state = _tuple(right(**inputs))
        calls[0] += 1
        return (np.nextafter(O, np.inf * O) if calls[0] % 2 else O, *state)

    return run


def unwritten_tail(operator: Operator) -> Run:
    """The rows of the last, short chunk are never stored."""
    right = honest(operator)

    def run(**inputs: Any) -> Any:
        O, *state = _tuple(right(**inputs))
        # fresh memory is zero, not what an earlier call happened to leave there, unless a law poisons it
        stored = np.zeros_like(O) if np.empty is EMPTY else np.empty(O.shape, O.dtype)
        whole = O.shape[2] - O.shape[2] % CHUNK
        stored[:, :, :whole] = O[:, :, :whole]
        return (stored, *state)

    return run


def of_cotangents(operator: Operator, change: Callable[[Arrays], Arrays], after: bool = False) -> Run:
    right = honest(operator)

    def run(**inputs: Any) -> Any:
        return right(**inputs)

    def vjp(cotangents: Mapping[str, Any], **inputs: Any) -> Arrays:
        grads = right.vjp(dict(cotangents) if after else change(dict(cotangents)), **inputs)
        if after:
            change(dict(cotangents))
        return grads

    run.vjp = vjp  # type: ignore[attr-defined]
    return run


def contiguous_cotangents(operator: Operator) -> Run:
    return of_cotangents(operator, lambda c: {n: as_contiguous(x) for n, x in c.items()})


def overwritten_cotangents(operator: Operator) -> Run:
    def clear(cotangents: Arrays) -> Arrays:
        for x in cotangents.values():
            x[...] = 0
        return cotangents

    return of_cotangents(operator, clear, after=True)


def one_sequence(operator: Operator) -> Run:
    """The gradient of a parameter comes from the last sequence of the batch: stored, not added."""
    run: Run = of_cotangents(operator, dict)
    full = run.vjp

    def vjp(cotangents: Mapping[str, Any], **inputs: Any) -> Arrays:
        batch = {*named(operator, "token", inputs), *named(operator, "state", inputs)}
        last = {n: x[-1:] if n in batch else x for n, x in inputs.items()}
        grads = full(cotangents, **inputs)
        alone = full({n: c[-1:] for n, c in cotangents.items()}, **last)
        return grads | {n: alone[n] for n in named(operator, "parameter", inputs)}

    run.vjp = vjp
    return run


def _tuple(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


OPERATORS = ("gma.bidirectional", "gma.causal", "retention", "softmax_attention")
PARAMETRIC = OPERATORS[:-1]

# name, what, how, mutants.json, laws that kill it, operators
TABLE: tuple[tuple[str, str, Callable[[Operator], Run], str, tuple[str, ...], tuple[str, ...]], ...] = (
    (
        "contiguous", "inputs read as contiguous", lambda o: of_inputs(o, contiguous), "tala-do-raw-T", ("layout",),
        OPERATORS,
    ),
    (
        "contiguous_cotangents", "cotangents read as contiguous", contiguous_cotangents, "tala-do-raw-T", ("layout",),
        OPERATORS,
    ),
    (
        "first_head", "every head using the parameters of the first", lambda o: of_inputs(o, first_head),
        "mla-uk-head0", ("forward",), PARAMETRIC,
    ),
    (
        "other_sequences", "2^-20 of another sequence mixed in", lambda o: of_inputs(o, other_sequences), "",
        ("independence",), OPERATORS,
    ),
    (
        "other_heads", "2^-20 of another head mixed in", lambda o: of_inputs(o, other_heads), "", ("independence",),
        OPERATORS,
    ),
    (
        "stale_scalars", "the scalars of the first call of that shape", stale_scalars, "attn-stale-scale",
        ("deterministic",), OPERATORS,
    ),
    ("late_scalars", "the scalars of the call before", late_scalars, "attn-stale-scale", ("deterministic",), OPERATORS),
    ("overwritten", "its first input overwritten", overwritten, "", ("unchanged",), OPERATORS),
    ("overwritten_cotangents", "cotangents overwritten", overwritten_cotangents, "", ("unchanged",), OPERATORS),
    ("noisy", "last bits that change from run to run", noisy, "", ("deterministic",), OPERATORS),
    ("unwritten_tail", "the rows of the last, short chunk never stored", unwritten_tail, "", ("written",), OPERATORS),
    (
        "one_sequence", "gradients of parameters from the last sequence alone", one_sequence, "", ("vjp",), PARAMETRIC
    ),
)  # fmt: skip

MUTANTS: tuple[Mutant, ...] = tuple(
    Mutant(name, operator, what, killed_by, batched=make(find_operator(operator)), source=source)
    for name, what, make, source, killed_by, operators in TABLE
    for operator in operators
)
