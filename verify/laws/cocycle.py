"""The mask D of decays is a cocycle: D_nn = 1 and D_nl D_lm = D_nm for m <= l <= n; and it is the same for all values.

Read off with one-hot queries and keys and the identity for values. These are the masks that a recurrence has."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from mixproof.verify.case import Case, Domain, atlas
from mixproof.verify.laws.law import Law, expect, few, stateless
from mixproof.verify.subject import Subject
from mixproof.verify.verdict import Evidence

TOKENS, CHUNK = 12, 5


def check(subject: Subject, case: Case) -> list[Evidence]:
    inputs, T = stateless(subject, case), case.size("T")
    if "scale" in subject.takes:
        inputs["scale"] = 1.0
    for name in ("q", "k"):
        inputs[name] = np.broadcast_to(np.eye(1, inputs[name].shape[-1]), inputs[name].shape)
    identity = np.eye(T, subject.domain().fit("V", max(T, 1)))
    chunk = 0 if subject.declaration.chunks else CHUNK
    masks, wants = [], []
    for i, v in enumerate((identity, 2 * identity[::-1])):
        probe = inputs | {"v": np.broadcast_to(v, (*inputs["v"].shape[:2], *v.shape))}
        masks.append(subject.run(probe, case.dtype, chunk)["O"][..., :T])
        wants.append(expect(subject, case, probe, key=f"identity {i}"))
    D, again = masks[0], masks[1][..., ::-1] / 2
    bound, other = wants[0].bound["O"][..., :T], wants[1].bound["O"][..., :T][..., ::-1] / 2
    size, vacuous = np.abs(wants[0].value["O"][..., :T]), wants[0].vacuous or wants[1].vacuous
    n, l, m = np.ix_(range(T), range(T), range(T))
    ordered = (m <= l) & (l <= n)
    left, right = np.s_[..., :, :, None], np.s_[..., None, :, :]
    most = (size + bound)[left] * (size + bound)[right] - size[left] * size[right] + bound[..., :, None, :]
    axes, diagonal = ("B", "H", "T"), partial(np.diagonal, axis1=-2, axis2=-1)
    return [
        Evidence("D_nn", diagonal(D), np.ones(D.shape[:-1]), diagonal(bound), axes, 0.0, vacuous),
        Evidence(
            "D_nl D_lm, of D_nm",
            np.where(ordered, D[left] * D[right], 0),
            np.where(ordered, D[..., :, None, :], 0),
            most,
            (*axes, "T", "T"),
            0.0,
            vacuous,
        ),
        Evidence("D from other values", again, D, bound + other, (*axes, "T"), 0.0, vacuous),
    ]


def plan(domain: Domain, small: bool) -> Iterator[Case]:
    for case in few(atlas(domain, small), 3 if small else 5):
        yield case.resized(T=domain.fit("T", TOKENS))


LAW = Law("cocycle", "D_nn = 1, and D_nl D_lm = D_nm", "rounding", check, plan=plan, optional=True)
