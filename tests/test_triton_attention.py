"""Blockwise attention in Triton on shapes that the gate does not draw: several tiles of channels, blocks of keys and of
queries, caches longer than a block, strides that are not packed. Bounds are the judge's."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

torch = pytest.importorskip("torch")
if find_spec("triton") is None:  # not imported here: the subjects say first whether to interpret
    pytest.skip("triton is not installed", allow_module_level=True)

from mixproof.verify.case import parse  # noqa: E402
from mixproof.verify.cells import entries  # noqa: E402
from mixproof.verify.laws import law  # noqa: E402
from mixproof.verify.subjects.triton import softmax_attention as module  # noqa: E402
from mixproof.verify.subjects.triton.sigmoid_attention import sigmoid_attention  # noqa: E402
from mixproof.verify.subjects.triton.softmax_attention import Blockwise, softmax_attention  # noqa: E402

SUBJECTS = {str(e): e for e in entries()}
FUNCTIONS = {"softmax_attention": softmax_attention, "sigmoid_attention": sigmoid_attention}


@pytest.fixture(scope="module")
def subjects():
    loaded = {name: SUBJECTS[f"{name}/triton.blockwise"].load() for name in FUNCTIONS}
    assert not any(s.unavailable() for s in loaded.values())  # activates the interpreter
    return loaded


def worst(subject, name, text):
    """The greatest error / bound of a law's evidence on one case."""
    evidence = law(name).check(subject, parse(subject.operator.name, text))
    assert not any(e.vacuous for e in evidence)
    return max(e.ratio for e in evidence)


@pytest.mark.parametrize("name", ["forward", "vjp"])
@pytest.mark.parametrize(
    ("operator", "text"),
    [
        ("softmax_attention", "B=1 H=2 T=70 S=41 D=40 V=70 dtype=float32"),
        ("softmax_attention", "B=2 H=1 T=65 S=65 D=33 V=5 dtype=float32 flag=1"),
        ("softmax_attention", "B=1 H=1 T=33 S=70 D=17 V=33 dtype=float16"),
        ("sigmoid_attention", "B=1 H=2 T=66 P=3 K=40 V=70 dtype=float32"),
        ("sigmoid_attention", "B=1 H=1 T=35 P=37 K=5 V=33 dtype=float32 state=random"),
    ],
)
def test_several_tiles(subjects, operator, text, name):
    assert worst(subjects[operator], name, text) <= 1


def test_one_key_too_many_is_noticed(subjects, monkeypatch):
    """The same evidence for a mask that lets every query see the key after it."""

    class Leaky:
        @staticmethod
        def apply(*arguments):
            return Blockwise.apply(*arguments[:-1], arguments[-1] + 1)

    monkeypatch.setattr(module, "Blockwise", Leaky)
    assert worst(subjects["softmax_attention"], "forward", "B=1 H=1 T=40 S=40 D=5 V=3 dtype=float32 flag=1") > 1e3


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k": torch.zeros(1, 4, 2, 3)}, ValueError, r"k has shape \(1, 4, 2, 3\): axis D is 3, but elsewhere 5"),
        ({"v": torch.zeros(1, 4, 3)}, ValueError, r"v has shape \(1, 4, 3\); expected \(B, T, H, V\)"),
        ({"k": torch.zeros(1, 4, 2, 5).half()}, TypeError, "k has dtype torch.float16, but q has torch.float32"),
        ({"q": torch.zeros(1, 4, 2, 5).double()}, TypeError, "q has dtype torch.float64; expected float32, float16"),
        ({"b": torch.tensor([0.0, float("nan")])}, ValueError, "b contains NaN"),
        ({"K0": torch.zeros(1, 2, 3, 5)}, ValueError, "of K0 and V0 one is None; a cache has both or none"),
        (
            {"K0": torch.zeros(1, 2, 3, 5), "V0": torch.zeros(1, 2, 4, 3)},
            ValueError,
            r"V0 has shape \(1, 2, 4, 3\): axis P is 4, but elsewhere 3",
        ),
    ],
)
def test_arguments_that_do_not_fit(change, error, message):
    given = {"q": torch.zeros(1, 4, 2, 5), "k": torch.zeros(1, 4, 2, 5), "v": torch.zeros(1, 4, 2, 3)}
    with pytest.raises(error, match=message):
        sigmoid_attention(**given | {"b": torch.zeros(2)} | change)


def test_a_row_that_sees_no_key_is_zero(subjects):
    q, k, v = torch.ones(1, 3, 1, 2), torch.ones(1, 0, 1, 2), torch.ones(1, 0, 1, 4)
    assert torch.equal(softmax_attention(q, k, v), torch.zeros(1, 3, 1, 4))
