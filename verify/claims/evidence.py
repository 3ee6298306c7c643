"""What the checks share: inputs drawn for an operator, and when two results are the same."""

from __future__ import annotations

from typing import Any

import numpy as np

from mixproof.reference.spec import Operator

HALF_OF_THE_DIGITS = 2.0**-26  # of float64: rounding leaves more in common, another equation on normal inputs fewer


def draw(operator: Operator, seed: int = 0, **sizes: int) -> dict[str, Any]:
    """Standard normal tokens and parameters; states and scalars are left out."""
    generator = np.random.default_rng(seed)
    inputs = [x for x in operator.inputs if x.role in ("token", "parameter")]
    return {x.name: np.asarray(generator.standard_normal([sizes[a] for a in x.axes])) for x in inputs}


def apart(x: Any, y: Any) -> float:
    """The largest difference, relative to the largest element."""
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    largest = max(np.max(np.abs(x), initial=0.0), np.max(np.abs(y), initial=0.0))
    return float(np.max(np.abs(x - y), initial=0.0) / largest) if largest else 0.0


def same(x: Any, y: Any) -> bool:
    """Equal up to rounding."""
    return apart(x, y) < HALF_OF_THE_DIGITS


def one_function(operator: Operator, seeds: int = 3, **sizes: int) -> tuple[bool, str]:
    """Whether all forms of the operator's mixing algebra agree at random points of GF(2^31 - 1), and how many points.

    They are rational, so that forms which differ agree at one by a chance below degree / 2^31."""
    from mixproof.verify.numbers.exact import GF

    agree = []
    for seed in range(seeds):
        generator = np.random.default_rng(seed)
        states = [x for x in operator.exact_inputs if x.role == "state"]
        point = {x.name: GF.draw(generator, tuple(sizes[a] for a in x.axes))
                 for x in operator.exact_inputs if x not in states}  # fmt: skip
        results = [form.function(**point) for form in operator.exact]
        results = [r if isinstance(r, tuple) else (r,) for r in results]
        agree += [bool(np.all(np.asarray(y == want))) for r in results for y, want in zip(r, results[0], strict=True)]
    forms = ", ".join(form.name for form in operator.exact)
    return all(agree), f"{forms} at {seeds} points of GF(2^31 - 1)"
