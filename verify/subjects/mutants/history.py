"""Mutants that remember: what an earlier call computed comes back where it does not belong. Functions of (B, H, T, D)
arrays. Each is seen by the law that changes just what its memory does not look at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mixproof.reference import operator as find_operator
from mixproof.reference.spec import Operator
from mixproof.verify.subjects.mutants import Mutant
from mixproof.verify.subjects.mutants.calling import Run, anew, honest, of_cotangents

Arrays = Mapping[str, Any]


@anew
def unordered_checksum(operator: Operator) -> Run:
    """The last result again, for inputs of the same checksums. Gradients are right."""
    right, kept = honest(operator), {}
    run = of_cotangents(operator, dict)

    def remembered(**inputs: Any) -> Any:
        now = checksums(inputs)
        if kept.get("key") != now:
            kept.update(key=now, result=right(**inputs))
        result = kept["result"]
        return tuple(x.copy() for x in result) if isinstance(result, tuple) else result.copy()

    remembered.vjp = run.vjp  # type: ignore[attr-defined]
    return remembered


def checksums(inputs: Arrays) -> Any:
    """The sum of the bits of each array: it does not see their order."""
    parts = []
    for name, x in sorted(inputs.items()):
        a = np.asarray(x)
        bits = np.ascontiguousarray(a).view(np.uint32) if a.dtype == np.float32 else a.astype(float)
        parts.append((name, a.shape, float(np.sum(bits, dtype=np.float64))))
    return tuple(parts)


@anew
def stale_means(operator: Operator) -> Run:
    """What is made of the mixture once and for all is looked up by its variances and priors."""
    right, kept = honest(operator), {}
    run = of_cotangents(operator, dict)

    def remembered(**inputs: Any) -> Any:
        now = tuple((inputs[n].shape, inputs[n].tobytes()) for n in ("omega", "alpha"))
        if kept.get("key") != now:
            kept.update(key=now, mu=inputs["mu"].copy())
        return right(**inputs | {"mu": kept["mu"]})

    remembered.vjp = run.vjp  # type: ignore[attr-defined]
    return remembered


MUTANTS: tuple[Mutant, ...] = (
    *(
        Mutant(
            "unordered_checksum", name, "the last result for inputs of equal checksums, whatever their order", (law,),
            batched=unordered_checksum(find_operator(name)), source="attn-stale-scale",
        )
        for name, law in (("gma.bidirectional", "permutation"), ("retention", "relabelling"))
    ),
    *(
        Mutant(
            "stale_means", name, "the means of the last mixture of equal variances and priors", ("translation",),
            batched=stale_means(find_operator(name)), source="attn-stale-scale",
        )
        for name in ("gma.responsibilities", "gma.causal")
    ),
)  # fmt: skip
