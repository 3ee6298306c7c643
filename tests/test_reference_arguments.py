"""What makes no sense yields a message, and never a number: NumPy would broadcast, or leave the rest of a sequence out.

Every form and the gradients of every operator of the linear family are given each mistake in turn.
"""

from inspect import signature

import numpy as np
import pytest

from mixproof.reference import OPERATORS, mixformer, mome_routers, operator
from mixproof.reference import multi_scale_retention as msr

FEATURE_MAPS = ("tala.phi_a", "tala.phi_b")  # they take one array, of any shape
CHECKED = [n for n in OPERATORS if not n.startswith("gma") and n not in (*FEATURE_MAPS, "softmax_attention")]
CHUNKED = [n for n in CHECKED if any(form.chunked for form in operator(n).forms)]
SIZES = {"T": 6, "S": 6, "K": 4, "V": 2, "D": 4, "F": 5, "X": 3, "P": 2}
SIZES |= {"N": 3, "G": 3, "M": 2, "L": 5, "J": 2, "E": 4, "W": 3, "Q": 2, "R": 2}


def shape(o, axes, I=()):
    return tuple(o.size(a, SIZES, {x.name: x.default for x in o.inputs} | dict(I)) for a in axes)


def draw(name):
    g, o = np.random.default_rng(0), operator(name)
    I = {x.name: np.abs(g.normal(size=shape(o, x.axes))) for x in o.inputs if x.role != "scalar"}
    if o.position:  # what is cached stands for that many tokens
        I[o.position] = SIZES["P"] * o.input("stride").default
    return I


def attempts(name, I, **options):
    """Each form, and the gradients, as functions without arguments."""
    o = operator(name)
    G = {y.name: np.ones(shape(o, y.axes, I)) for y in o.outputs}
    for form in o.forms:
        if form.chunked or "chunk" not in options:
            yield form.name, lambda f=form.function: f(**I, **options)
    if "chunk" not in options or "chunk" in signature(o.vjp).parameters:
        yield "vjp", lambda: o.vjp(G, **I, **options)


def wrong_shapes(name):
    """Each axis of each array one longer, one shorter, and of length one, which would be broadcast."""
    for n, x in draw(name).items():
        for axis in range(np.ndim(x)):
            for index in ([*range(x.shape[axis]), 0], range(x.shape[axis] - 1), [0]):
                yield n, np.take(x, list(index), axis)


def contradicts(name, n, x):
    """An axis that no other array has may have any length."""
    o = operator(name)
    others = {a for y in o.inputs if y.name != n for a in y.axes} | set(o.followers)
    sizes = zip(o.input(n).axes, x.shape, strict=True)
    return any(a in others and size != shape(o, (a,))[0] for a, size in sizes)


@pytest.mark.parametrize("name", CHECKED)
def test_shapes_that_contradict_each_other(name):
    I = draw(name)
    for _, attempt in attempts(name, I):
        attempt()  # the sizes themselves are right
    for n, x in wrong_shapes(name):
        if contradicts(name, n, x):
            for form, attempt in attempts(name, I | {n: x}):
                with pytest.raises(ValueError, match="has shape"):
                    pytest.fail(f"{form} takes {n} of shape {x.shape}: {attempt()}")


@pytest.mark.parametrize("name", [*CHECKED, *FEATURE_MAPS, "softmax_attention"])
def test_cotangents_that_are_not_those_of_the_outputs(name):
    o, I = operator(name), draw(name)
    outputs = {y.name: np.ones(shape(o, y.axes, I)) for y in o.outputs}
    o.vjp(outputs, **I)
    for y, G in outputs.items():
        for wrong in (np.concatenate([G, G]), G[..., :1], G[:1]):
            with pytest.raises(ValueError, match=f"the cotangent of {y} has shape"):
                o.vjp(outputs | {y: wrong}, **I)
    for wrong in ({n: G for n, G in outputs.items() if n != next(iter(outputs))}, outputs | {"dO": G}):
        with pytest.raises(ValueError, match="cotangents are those of"):
            o.vjp(wrong, **I)


@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize("chunk", [0, -1])
def test_chunks_of_no_token(name, chunk):
    for _, attempt in attempts(name, draw(name), chunk=chunk):
        with pytest.raises(ValueError, match=f"chunk is {chunk}; it must be at least 1"):
            attempt()


@pytest.mark.parametrize(
    ("top", "error", "message"),
    [(0, ValueError, "top is 0; it must be at least 1"), (1.5, TypeError, "top is 1.5; expected a whole number")],
)
@pytest.mark.parametrize("name", ["mome.top_k", "mome.top_k_hold"])
def test_no_expert_selected(name, top, error, message):
    for _, attempt in attempts(name, draw(name), top=top):
        with pytest.raises(error, match=message):
            attempt()


def test_heads_that_do_not_divide():
    for heads, error, message in (
        (3, ValueError, "X has 4 channels, which 3 heads do not divide"),
        (0, ValueError, "heads is 0; it must be at least 1"),
        (2.0, TypeError, "heads is 2.0; expected a whole number"),
    ):
        for _, attempt in attempts("mixformer", draw("mixformer"), heads=heads):
            with pytest.raises(error, match=message):
                attempt()
    assert mixformer.chunkwise(**draw("mixformer"), heads=4).shape == (6, 4)


@pytest.mark.parametrize("K", [1, 3, 5])
def test_channels_without_a_partner(K):
    I = draw("multi_scale_retention") | {n: np.ones((6, K)) for n in "qk"}
    for _, attempt in attempts("multi_scale_retention", I):
        with pytest.raises(ValueError, match=f"q and k have {K} channels; they are turned in pairs"):
            attempt()
    with pytest.raises(ValueError, match="in pairs"):
        msr.angles(K)


def test_routers_multiply_keys_and_values_of_one_shape():
    k, v = np.ones((6, 4)), np.ones((6, 1))
    for reading, W in (
        (mome_routers.R2, np.ones(3)),
        (mome_routers.R3, np.ones((4, 3))),
        (mome_routers.R4, np.ones(3)),
    ):
        with pytest.raises(ValueError, match=r"k has shape \(6, 4\) and v \(6, 1\)"):
            reading(k, v, W)
