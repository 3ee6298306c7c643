"""The constants of the formats are right, rounding is bit for bit what hardware does, and an arithmetic says which
roundings it allows."""

from __future__ import annotations

import numpy as np
import pytest

from mixproof.verify.arithmetic import BITS, DTYPES, LARGEST, UNDERFLOW, UNIT, holds, natural, round_to


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_constants_of_the_formats(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    info = torch.finfo(getattr(torch, dtype))
    assert UNIT[dtype] == info.eps / 2
    assert LARGEST[dtype] == info.max
    # float16 subnormals are never flushed; the rest of what is below the normal numbers may be
    assert UNDERFLOW[dtype] == (2.0**-25 if dtype == "float16" else info.tiny)
    bits, exponent = BITS[dtype]
    assert info.eps == 2.0 ** (1 - bits)
    assert info.bits == bits + exponent
    assert LARGEST[dtype] == 2.0 ** (2 ** (exponent - 1) - 1) * (2 - info.eps)


EDGES = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, 65504.0, 65519.9, 65520.0, -65520.0, 3.3895e38, 3.3961e38, 1e39,
         2.0**-24, 2.0**-25, 1.5 * 2.0**-25, 2.0**-14, 2.0**-126, 2.0**-127, 2.0**-133, 2.0**-134, 2.0**-149,
         1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-9, 257.0, 2049.0]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rounding_is_torchs_bit_for_bit(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(0)
    # every float32 exponent, subnormals included, and ties: 0, 8, 12, 13 or 16 low bits are cleared, the next set
    bits = random.integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32)
    drop = random.choice([0, 8, 12, 13, 16], bits.size).astype(np.uint32)
    next_one = np.uint32(1) << (np.maximum(drop, 1) - np.uint32(1))
    bits = (bits >> drop << drop) | np.where(drop > 0, next_one, np.uint32(0))
    with np.errstate(over="ignore", invalid="ignore"):
        x = np.concatenate([bits.view(np.float32), np.float32(EDGES)]).astype(np.float64)
        ours = round_to(x, dtype)
    theirs = torch.from_numpy(x).to(torch.float32).to(getattr(torch, dtype)).double().numpy()
    assert np.array_equal(ours, theirs, equal_nan=True)
    assert np.array_equal(np.signbit(ours[~np.isnan(x)]), np.signbit(x[~np.isnan(x)]))
    finite = np.isfinite(theirs)
    error = np.abs(x[finite] - ours[finite])
    assert np.all(error <= UNIT[dtype] * np.abs(x[finite]) + UNDERFLOW[dtype])
    assert np.array_equal(round_to(ours, dtype), ours, equal_nan=True)


def test_rounding_to_tf32_keeps_eleven_bits() -> None:
    random = np.random.default_rng(0)
    x = np.float64(np.float32(random.normal(size=10_000) * 2.0 ** random.integers(-120, 120, 10_000)))
    y = round_to(x, "tf32")
    _, exponent = np.frexp(x)
    ulp = 2.0 ** (exponent - 11)
    assert np.array_equal(y, np.round(x / ulp) * ulp)  # ties to even
    assert np.all(np.abs(y - x) <= UNIT["tf32"] / 2 * np.abs(x))  # truncation would need all of it
    assert round_to(1 + 2.0**-11, "tf32") == 1
    assert round_to(1 + 3 * 2.0**-11, "tf32") == 1 + 2.0**-9
    assert np.isinf(round_to(3.4028e38, "tf32"))
    assert round_to(2.0**127 * (2 - 2.0**-10), "tf32") == 2.0**127 * (2 - 2.0**-10)


def test_shapes_survive_rounding() -> None:
    for dtype in UNIT:
        for shape in ((), (0, 3), (2, 1)):
            assert round_to(np.zeros(shape), dtype).shape == shape


def test_which_format_holds_which() -> None:
    every = np.arange(2**16, dtype=np.uint16)
    halves = every.view(np.float16).astype(np.float64)
    with np.errstate(invalid="ignore"):  # signalling NaN
        brains = (every.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    for narrow, values in (("float16", halves), ("bfloat16", brains)):
        values = values[np.isfinite(values)]
        for wide in UNIT:
            assert holds(wide, narrow) == np.array_equal(round_to(values, wide), values), (wide, narrow)
    assert holds("float64", "float32")
    assert not holds("tf32", "float32")
    assert natural("float32", dot="tf32").casts_operand(exact=False)
    assert not natural("bfloat16").casts_operand(exact=True)
    assert natural("bfloat16", dot="float16").casts_operand(exact=False)
    assert not natural("bfloat16", intermediate="bfloat16").casts_operand(exact=False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_natural_arithmetic_of_a_dtype(dtype: str) -> None:
    wide = "float64" if dtype == "float64" else "float32"
    arithmetic = natural(dtype)
    assert (arithmetic.inputs, arithmetic.dot, arithmetic.output) == (dtype,) * 3
    assert arithmetic.unit == UNIT[wide]
    # tensor cores truncate what they add; only they are fed with short operands
    assert arithmetic.sum_unit == UNIT[wide] * (2 if dtype in ("bfloat16", "float16") else 1)
    assert natural(dtype, accumulate=dtype).sum_unit == UNIT[dtype]
    assert natural(dtype, intermediate=dtype).unit == UNIT[dtype]
    with pytest.raises(TypeError):
        natural(dtype, no_such_field=1)


def test_tf32_sums_are_those_of_tensor_cores() -> None:
    assert natural("float32", dot="tf32").sum_unit == 2 * natural("float32").sum_unit
    assert natural("float32", dot="tf32").unit == natural("float32").unit
