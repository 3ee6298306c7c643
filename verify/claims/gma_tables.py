"""What the GMA paper prints in Tables 1 to 8, and which numbers round to it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

Range = tuple[Fraction, Fraction]


class Profile(NamedTuple):
    """A row of Table 1: peak memory in GB and tokens a second, at each of SIZES."""

    memory: tuple[str, str, str]
    speed: tuple[str, str, str]


class Mean(NamedTuple):
    """Mean and standard deviation over seeds."""

    mean: str
    std: str


# --- Table 1 ---------------------------------------------------------------------------------------------------------

SIZES = (1000, 2000, 4000)  # tokens
GIGABYTE = 2**30  # the eager row needs 4.007 N x N tensors of float32 with it, 3.73 with 10^9
PROFILES = {
    "eager": Profile(("1.47", "5.81", "23.07"), ("1.02M", "610K", "186K")),
    "SDPA": Profile(("0.15", "0.25", "0.50"), ("3.33M", "3.34M", "2.38M")),
    "Linear Transformer": Profile(("0.18", "0.36", "0.73"), ("2.88M", "3.76M", "3.96M")),
    "Linformer": Profile(("0.41", "0.82", "1.64"), ("2.17M", "2.56M", "2.68M")),
    "Mamba": Profile(("0.27", "0.55", "1.11"), ("2.06M", "1.99M", "2.07M")),
    "Performer": Profile(("0.58", "1.15", "2.30"), ("1.30M", "1.37M", "1.39M")),
}
GMA_PROFILES = {  # by components
    64: Profile(("0.35", "0.71", "1.37"), ("688K", "722K", "742K")),
    128: Profile(("0.50", "1.04", "2.02"), ("566K", "592K", "607K")),
    256: Profile(("0.85", "1.70", "3.39"), ("416K", "430K", "437K")),
    512: Profile(("1.59", "3.17", "6.32"), ("270K", "277K", "280K")),
}

# --- Tables 2 and 3 --------------------------------------------------------------------------------------------------

SEEDS = 3
GMA = "GMA"
ACCURACIES = {  # ListOps, Text, their average
    "SDPA": (Mean("41.33", "0.49"), Mean("64.03", "0.89"), Mean("52.68", "0.48")),
    "Linformer": (Mean("39.15", "0.13"), Mean("58.82", "1.60"), Mean("48.99", "0.86")),
    "Linear Transformer": (Mean("40.03", "0.70"), Mean("64.88", "0.13"), Mean("52.46", "0.29")),
    "Performer": (Mean("40.65", "0.85"), Mean("63.38", "0.73"), Mean("52.01", "0.79")),
    "Mamba": (Mean("42.28", "1.75"), Mean("82.12", "0.40"), Mean("62.20", "0.68")),
    GMA: (Mean("41.17", "0.23"), Mean("64.97", "0.21"), Mean("53.07", "0.12")),
}
PERPLEXITIES = {
    "SDPA": Mean("35.40", "0.06"),
    "Linear Transformer": Mean("44.81", "0.11"),
    "Performer": Mean("47.49", "0.23"),
    "Mamba": Mean("35.44", "0.21"),
    "GMA 128": Mean("42.62", "0.38"),
    "GMA 256": Mean("41.72", "0.21"),
}
THROUGHPUTS = {
    "SDPA": 110_778, "Linear Transformer": 41_693, "Performer": 14_559, "Mamba": 74_532,
    "GMA 128": 22_912, "GMA 256": 13_056,
}  # fmt: skip

# --- Tables 4, 6, 7, 8 -----------------------------------------------------------------------------------------------

COMPONENTS, ACTIVE, HEADS = 128, 104, 8  # 8 heads: not printed, what the parameters of Tables 2 and 3 need
USAGE_ENTROPY, TOKEN_ENTROPY, MEAN_MAX = "0.933", "0.790", "0.103"
PURITY, INFORMATION, NORMALISED = "0.483", "0.427", "0.244"
CATEGORIES = {  # count, fraction
    "lower_alpha": (18_757, "0.286"), "function_word": (18_359, "0.280"), "punctuation": (10_306, "0.157"),
    "capitalized": (8_714, "0.133"), "subword_alpha": (4_208, "0.064"), "numeric": (2_451, "0.037"),
    "newline_or_space": (1_481, "0.023"), "eos": (738, "0.011"), "all_caps": (334, "0.005"), "other": (188, "0.003"),
}  # fmt: skip
CHANNELS = {  # hard fraction, purity, dominant category
    22: ("0.104", "0.320", "function_word"), 50: ("0.089", "0.788", "lower_alpha"),
    55: ("0.077", "0.414", "function_word"), 5: ("0.035", "0.696", "function_word"),
    17: ("0.014", "0.764", "punctuation"), 73: ("0.032", "0.516", "capitalized"),
    116: ("0.023", "0.621", "function_word"), 2: ("0.024", "0.413", "subword_alpha"),
}  # fmt: skip
SHUFFLED = {
    "purity": Mean("0.293", "0.001"),
    "mutual_information": Mean("0.0067", "0.0003"),
    "normalised_mutual_information": Mean("0.0038", "0.0002"),
}

# --- rounding --------------------------------------------------------------------------------------------------------

MULTIPLES = {"K": 10**3, "M": 10**6}


def value(printed: str) -> Fraction:
    """The number as it stands: "1.02M" is 1,020,000."""
    digits = printed.rstrip("KM")
    return Fraction(digits) * MULTIPLES.get(printed[len(digits) :], 1)


def rounded(printed: str) -> Range:
    """The least and the largest number that round to what is printed."""
    decimals = len(printed.rstrip("KM").partition(".")[2])
    half = Fraction(MULTIPLES.get(printed[-1], 1), 2 * 10**decimals)
    return value(printed) - half, value(printed) + half


def within(x: Fraction | float, printed: str) -> bool:
    """Whether x rounds to it."""
    low, high = rounded(printed)
    return low <= x <= high


def quotient(x: str, y: str) -> Range:
    """The range of x / y, both positive."""
    (a, b), (c, d) = rounded(x), rounded(y)
    return a / d, b / c


def fits(terms: Sequence[tuple[int, int]], printed: Sequence[str]) -> list[tuple[Fraction, Fraction]]:
    """The corners of the set of (a, b) for which a f + b g rounds to what is printed, for each (f, g) of terms:
    none if no such function exists. Terms must not all be proportional."""
    bounds = [rounded(p) for p in printed]
    lines = [(f, g, end) for (f, g), ends in zip(terms, bounds, strict=True) for end in ends]
    corners: list[tuple[Fraction, Fraction]] = []
    for (f, g, x), (h, k, y) in itertools.combinations(lines, 2):
        if det := f * k - g * h:
            a, b = (x * k - g * y) / det, (f * y - x * h) / det
            values = [a * f + b * g for f, g in terms]
            if all(low <= v <= high for v, (low, high) in zip(values, bounds, strict=True)):
                corners.append((a, b))
    return corners
