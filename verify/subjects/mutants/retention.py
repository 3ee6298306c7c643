"""Wrong retentions."""

from __future__ import annotations

import numpy as np

from mixproof.reference import retention
from mixproof.verify.subjects.mutants import Mutant


def undecayed_state(q, k, v, gamma, scale=1.0, S0=None, chunk=64):
    S = k[:0].T @ v[:0] if S0 is None else S0
    rows = [q[:0] @ S]
    for a in range(0, len(q), chunk):
        O, S1 = retention.parallel(q[a : a + chunk], k[a : a + chunk], v[a : a + chunk], gamma, scale, S)
        S = S1 + (1 - gamma ** len(q[a : a + chunk])) * S
        rows.append(O)
    return np.concatenate(rows), S


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "undecayed_state", "retention", "the carried state not decayed", ("forward", "forms"), forward=undecayed_state
    ),
)
