"""The attention matrix, read off by v = identity, is non-negative and has rank at most K.

Computed entries are within their tolerances of a matrix of rank K, so (Weyl) the singular value K + 1 is at most the
Frobenius norm of the tolerances."""

from collections.abc import Iterator

import numpy as np

from mixproof.verify.case import Case, Domain, atlas
from mixproof.verify.laws.law import Law, expect, few
from mixproof.verify.subject import Subject
from mixproof.verify.verdict import Evidence


def check(subject: Subject, case: Case) -> list[Evidence]:
    inputs = subject.inputs(case)
    B, H, S = inputs["v"].shape[:3]
    identity = inputs | {"v": np.broadcast_to(np.eye(S), (B, H, S, S))}
    A = next(iter(subject.run(identity, case.dtype).values()))
    want = expect(subject, case, identity, key="identity")
    bound = next(iter(want.bound.values()))
    K, axes = case.size("K"), ("B", "H", "T", "S")
    if not np.all(np.isfinite(A)):  # no singular values to speak of
        return [Evidence("A, which is finite,", A, np.where(np.isfinite(A), A, 0), 0.0, axes, 0.0, want.vacuous)]
    negative = Evidence("min(A, 0)", np.minimum(A, 0), 0 * A, 0.0, axes, 0.0, want.vacuous)
    if min(A.shape[-2:]) <= K:
        return [negative]
    sigma = np.linalg.svd(A, compute_uv=False)[..., K]
    allowed = np.linalg.norm(bound, axis=(-2, -1)) + A.shape[-1] * 2.0**-50
    return [
        negative,
        Evidence(f"singular value {K + 1} of A", sigma, 0 * sigma, allowed, ("B", "H"), 0.0, want.vacuous),
    ]


def plan(domain: Domain, small: bool) -> Iterator[Case]:
    for case in few(atlas(domain, small), 4):
        yield case.resized(T=domain.fit("T", 12), S=domain.fit("S", 12), K=min(case.size("K"), 4))


LAW = Law("low_rank", "A is non-negative with rank at most K", "inequality", check, plan=plan, optional=True)
