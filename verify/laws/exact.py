"""The forms of the reference are one function: equal over GF(2^31 - 1) and over the rationals, for every chunk size.

Mixing algebra is rational, so agreement at random points of a large field proves the identity up to a chance below
degree / 2^31 a draw (Schwartz, Zippel); no tolerance is involved. The feature maps' results are inputs here."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from mixproof.reference.spec import Form
from mixproof.verify.case import Case, Domain
from mixproof.verify.laws.law import Law, as_tuple
from mixproof.verify.subject import Subject
from mixproof.verify.verdict import Evidence


def check(subject: Subject, case: Case) -> list[Evidence]:
    from mixproof.verify.numbers.exact import GF, RATIONALS

    operator, form = subject.operator, _form(subject)
    generator = case.generator("field")
    sizes = dict(case.sizes) | {"D": 2}
    T = case.size("T")
    points: list[tuple[str, dict[str, Any]]] = []
    for system in (GF, RATIONALS):
        point = {}
        for x in operator.exact_inputs:
            shape = tuple(operator.size(a, sizes, point) for a in x.axes)
            small = generator.integers(1, 50, size=shape)
            point[x.name] = GF.draw(generator, shape) if system is GF else RATIONALS(small) / RATIONALS(7)
        points.append((system.name, point))
    evidence = []
    for field, point in points:
        want = as_tuple(operator.exact[0].function(**point))
        chunks = [{"chunk": c} for c in range(1, T + 2)] if form.chunked else [{}]
        for options in chunks:
            got = as_tuple(form.function(**point, **options))
            for y, g, w in zip(operator.outputs, got, want, strict=True):
                label = f"{y.name} over {field}" + (f", chunk {options['chunk']}" if options else "")
                same = np.asarray(g == w, dtype=float)
                evidence.append(Evidence(f"{label}: equal", same, np.ones_like(same), 0.0))
    return evidence


def _form(subject: Subject) -> Form:
    name = subject.name.removeprefix("reference.")
    return next(f for f in subject.operator.exact if f.name == name)


def applies(subject: Subject) -> str:
    if not subject.name.startswith("reference."):
        return "about the reference's own forms"
    names = {f.name for f in subject.operator.exact}
    return "" if subject.name.removeprefix("reference.") in names else "no rational mixing algebra of its own"


def plan(domain: Domain, small: bool) -> Iterator[Case]:
    for i, T in enumerate((1, 2, 5, 8) if small else (1, 2, 3, 5, 8, 11)):
        yield domain.case({"B": 1, "H": 1, "T": T, "S": T + i % 2, "K": 1 + i % 3, "R": 1, "V": 2, "D": 2}, seed=i)


LAW = Law("exact", "all forms are one rational function", "bitwise", check, applies, plan)
