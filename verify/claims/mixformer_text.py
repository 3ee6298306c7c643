"""Claims of MixFormer in its text: names, what others measured, images, lengths, positions."""

from __future__ import annotations

import numpy as np

from mixproof.reference import retention, tala, tala_printed
from mixproof.verify.claims import Finding, claim, conditional, holds, unchecked
from mixproof.verify.claims.evidence import HALF_OF_THE_DIGITS, apart, draw, same

# What the text calls its own things: (name, section); and those that it introduces.
NAMES = (
    ("MixFormer", "4.1"), ("TALA", "4.3"), ("MoME", "4.4"), ("GN", "4.5"), ("FFN", "4.5"),
    ("MoFormer", "4.3"), ("reflection attention", "5.5"),
)  # fmt: skip
INTRODUCED = ("MixFormer", "TALA", "MoME", "GN", "FFN")
# Who or what the text names at a reference, and who or what the reference is.
REFERENCES = (
    ("12", "Han", "Han"), ("25", "Peng", "Peng"), ("30", "Shen", "Shen"), ("32", "Han", "Sun"), ("41", "Zhai", "Zhai"),
    ("3", "MNIST", "EMNIST"), ("16", "CIFAR-10", "CIFAR-10"),
)  # fmt: skip


@claim(
    "mixformer.C57",
    "Names are those that the paper introduces, and references are what they are named",
    source="3.2, 4.3, 5.3, 5.5; references",
    verdict="refuted",
    evidence="reading of a text",
    why="'MoFormer' (4.3) and 'reflection attention' (5.5, Figure 7) are introduced nowhere; RetNet [32] is by Sun et"
    " al., in the text by Han et al.; the reference for MNIST [3] is EMNIST",
)
def names() -> Finding:
    unknown = [f"{name!r} in {section}" for name, section in NAMES if name not in INTRODUCED]
    wrong = [f"[{number}] is {actual}, called {called}" for number, called, actual in REFERENCES if called != actual]
    return holds(not unknown and not wrong, "not introduced: " + ", ".join(unknown) + "; " + ", ".join(wrong))


C58 = unchecked(
    "mixformer.C58",
    "Linear attention predicts autoregressively up to 4000 times as fast on very long sequences",
    source="3.1",
    why="a measurement cited from another paper, of its implementation on its device",
)
C59 = unchecked(
    "mixformer.C59",
    "Generated and completed images are sharp, with little noise, and better than those of the baselines",
    source="5.3, 5.4; Figures 5 and 6",
    why="no metric is printed, and no baseline is shown or named",
)


@claim(
    "mixformer.C60",
    "Inference goes on to any length in constant memory",
    source="4.3, Recurrent representation",
    verdict="holds only if",
    evidence="evaluation",
    why="omega G is what one step multiplies by: a learned T x T matrix G has no entry for token T + 1, and (14) no"
    " value",
)
def any_length() -> Finding:
    T, more = 3, 5
    h = np.float64(1)
    q, k, v = np.random.default_rng(0).normal(size=(3, T + more, 2))
    whole, first = tala.recurrent(q, k, v, h, 1.0), tala.recurrent(q[:T], k[:T], v[:T], h, 1.0)
    second = tala.recurrent(q[T:], k[T:], v[T:], h, 1.0, S0=first[1])
    goes_on = same(np.concatenate([first[0], second[0]]), whole[0]) and first[1].shape == second[1].shape
    trained = np.ones((T, T))
    within = tala_printed.eq14_free_G(q[:T], k[:T], v[:T], tala.omega(h), trained)
    try:
        tala_printed.eq14_free_G(q, k, v, tala.omega(h), trained)
    except ValueError as error:
        beyond, said = False, str(error).strip()
    else:
        beyond, said = True, "a value"
    return conditional(
        goes_on and same(within, first[0]),
        beyond,
        f"{T} tokens and {more} more with a state of {first[1].size} numbers, as at once: {goes_on}; G of {T} x {T} for"
        f" {T + more} tokens: {said}",
    )


@claim(
    "mixformer.C61",
    "TALA's decay is what makes the model aware of time",
    source="1, 4.3; 4.5",
    verdict="holds only if",
    evidence="property test",
    why="no positions are added to the tokens, as 4.5 adds them: with them an undecayed state tells two orders of the"
    " past apart as well, so that a comparison without the decay would not show what it is for",
)
def time_aware() -> Finding:
    T, K = 6, 4
    x = draw(retention.OPERATOR, T=T, K=K, V=K)
    order, positions = np.array([2, 0, 4, 1, 3, 5]), np.random.default_rng(1).normal(size=(T, K))  # the last stays

    def moved(gamma: float, P: np.ndarray) -> float:
        """How far the last output moves when the earlier tokens change places."""
        outputs = [
            retention.recurrent(q + P, k + P, v + P, np.float64(gamma))[0][-1]
            for q, k, v in ((x["q"], x["k"], x["v"]), (x["q"][order], x["k"][order], x["v"][order]))
        ]
        return apart(*outputs)

    none = np.zeros((T, K))
    decayed, plain, added = moved(0.8, none), moved(1.0, none), moved(1.0, positions)
    return conditional(
        plain < HALF_OF_THE_DIGITS < decayed,
        added < HALF_OF_THE_DIGITS,
        f"the past in another order moves the last output by {decayed:.2f} with a decay of 0.8, by {plain:.0e} with"
        f" none, by {added:.2f} with none and positions added",
    )
