"""The arithmetic that an implementation declares: which roundings it is allowed to make.

Sources of the constants: IEEE 754 for the formats; tensor cores accumulate with truncation and few extra bits (Fasi
et al. 2021), hence twice the unit of round-to-nearest; TF32 operands may be truncated, hence 2^-10.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "tf32": 2.0**-10, "bfloat16": 2.0**-8, "float16": 2.0**-11}
LARGEST = {
    "float64": np.finfo(np.float64).max,
    "float32": float(np.finfo(np.float32).max),
    "tf32": float(np.finfo(np.float32).max),
    "bfloat16": 2.0**127 * (2 - 2.0**-7),
    "float16": 65504.0,
}
# What a result too small for the format may lose: all of it where subnormals may be flushed to zero.
UNDERFLOW = {"float64": 2.0**-1022, "float32": 2.0**-126, "tf32": 2.0**-126, "bfloat16": 2.0**-126, "float16": 2.0**-25}
DTYPES = ("float64", "float32", "bfloat16", "float16")
# bits of the significand, the hidden one included, and of the exponent
BITS = {"float64": (53, 11), "float32": (24, 8), "tf32": (11, 8), "bfloat16": (8, 8), "float16": (11, 5)}


def holds(wide: str, narrow: str) -> bool:
    """Whether every number of the format `narrow` is one of the format `wide`."""
    return all(w >= n for w, n in zip(BITS[wide], BITS[narrow], strict=True))


@dataclass(frozen=True)
class Arithmetic:
    """Operands of dot products are rounded to `dot`, sums are kept in `accumulate`, every other intermediate result
    in `intermediate`, the outputs in `output`. `exp_ulps` is the error of exp in units of the last place, `distance`
    says whether squared distances are formed from differences ("direct") or expanded, `casts` how often an operand
    may be rounded on its way (a chunkwise form rounds a decayed query, a state and a decayed key), `span` over how many
    tokens logarithms of decays are summed before their differences are taken."""

    inputs: str = "float32"
    dot: str = "float32"
    accumulate: str = "float32"
    intermediate: str = "float32"
    output: str = "float32"
    exp_ulps: float = 2.0
    distance: str = "direct"
    casts: int = 3
    span: int = 1

    @property
    def unit(self) -> float:
        """Unit roundoff of one elementwise operation."""
        return UNIT[self.intermediate]

    @property
    def sum_unit(self) -> float:
        """Error of one addition inside a sum or dot product, relative to the sum of absolute values."""
        tensor_core = self.dot in ("tf32", "bfloat16", "float16") and self.accumulate == "float32"
        return UNIT[self.accumulate] * (2 if tensor_core else 1)

    def casts_operand(self, exact: bool) -> bool:
        """Whether a dot-product operand is rounded: unless `dot` holds every intermediate result, or the operand is an
        input that it holds exactly."""
        return not (exact or holds(self.dot, self.intermediate))


def natural(dtype: str, **changes: object) -> Arithmetic:
    """The arithmetic of an implementation that takes `dtype` inputs: accumulation and intermediates in float32 (float64
    for float64 inputs), dot operands and outputs in the input dtype."""
    wide = "float64" if dtype == "float64" else "float32"
    fields: dict[str, object] = dict(inputs=dtype, dot=dtype, accumulate=wide, intermediate=wide, output=dtype)
    return Arithmetic(**(fields | changes))  # type: ignore[arg-type]


def round_to(x: np.ndarray, dtype: str) -> np.ndarray:
    """x (float64) rounded to nearest even in `dtype`, as float64 again; overflow gives inf."""
    x = np.asarray(x, dtype=np.float64)
    if dtype == "float64":
        return x
    with np.errstate(over="ignore"):
        if dtype == "float16":
            return x.astype(np.float16).astype(np.float64)
        y = x.astype(np.float32)
    if dtype in ("bfloat16", "tf32"):
        # Rounding twice (float64 to float32 to shorter) differs from rounding once only on exact ties, which inputs
        # drawn by the gate avoid: it is the rounded value that is handed to oracle and implementation alike.
        drop = np.uint32(16 if dtype == "bfloat16" else 13)
        bits = np.atleast_1d(y).view(np.uint32)
        half = (np.uint32(1) << (drop - np.uint32(1))) - np.uint32(1)
        even = bits + half + ((bits >> drop) & np.uint32(1))
        even = (even >> drop) << drop
        y = np.where(np.isfinite(np.atleast_1d(y)), even.view(np.float32), np.atleast_1d(y)).reshape(y.shape)
    return y.astype(np.float64)
