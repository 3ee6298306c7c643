"""Layouts: token tensors with no, one or two feature axes go to the declared order of axes and back."""

from __future__ import annotations

import numpy as np
import pytest

from mixproof.verify import implements
from mixproof.verify.cells import ATTRIBUTE
from mixproof.verify.subject import Subject

SIZES = {"B": 2, "H": 3, "T": 5}


def subject(layout: str) -> Subject:
    @implements("tala.time_varying", layout=layout)
    def mine(q, k, v, a, scale=1.0, S0=None):
        raise NotImplementedError

    (declaration,) = getattr(mine, ATTRIBUTE)
    return Subject(declaration, mine)


@pytest.mark.parametrize("features", [(), (4,), (4, 7)])
@pytest.mark.parametrize("layout", ["B T H D", "B H T D", "T B H D", "T H D", "B T D", "T D", "H D T"])
def test_a_token_tensor_keeps_its_features_together(layout: str, features: tuple[int, ...]) -> None:
    s = subject(layout)
    lead = [n if a in s.layout or a == "T" else 1 for a, n in SIZES.items()]
    x = np.random.default_rng(0).normal(size=(*lead, *features))
    names = dict(zip(("E", "F"), features, strict=False))
    sizes = SIZES | names
    native = s.arrange(x, "token")
    assert native.shape == tuple(sizes[a] for a in s.token_axes(("T", *names)))
    np.testing.assert_array_equal(s.canonical(native, "token"), x)
    index = dict.fromkeys(sizes, 0) | {"T": 4, "E": 1, "F": 6}
    np.testing.assert_array_equal(
        native[tuple(index[a] for a in s.token_axes(("T", *names)))], x[(0, 0, 4, *(index[n] for n in names))]
    )


def test_a_decay_per_token_has_no_axis_of_features() -> None:
    assert subject("B T H D").token_axes(("T",)) == ("B", "T", "H")
    assert subject("H D T").token_axes(("T",)) == ("H", "T")
