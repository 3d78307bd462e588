"""Rounding to storage types, against NumPy's own conversions and, for bfloat16, against PyTorch's and ml_dtypes'."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refattn.golden.storage_types import FLOAT8, TYPES, chop_to, largest, round_to, spacing, stored

NATIVE = ("float32", "float16")
ALL = tuple(TYPES)
doubles = (
    st.floats(-1e308, 1e308)
    | st.sampled_from([math.inf, -math.inf, math.nan, -0.0])
    | st.floats(-1e5, 1e5)
    | st.floats(-1e-4, 1e-4)
)


def neighbours(dtype: str) -> Any:
    """Numbers of a type, the middles between them, and what is next to the middles in float64."""
    kind = TYPES[dtype]
    exponents = [
        e for e in (kind.lowest - kind.bits, kind.lowest - 1, kind.lowest, -1, 0, 3, kind.highest) if e > -1070
    ]
    points = []
    for exponent in exponents:
        for significand in range(2 ** (kind.bits - 1), 2 ** (kind.bits - 1) + 5):
            points.append(math.ldexp(significand, exponent - kind.bits + 1))
    largest = (2.0 - 2.0 ** (1 - kind.bits)) * 2.0**kind.highest
    points += [largest, 0.0, math.ldexp(1.0, kind.lowest - kind.bits + 1), math.ldexp(3.0, kind.lowest - kind.bits + 1)]
    numbers = np.asarray(sorted(set(points)))
    half = spacing(numbers, dtype) / 2.0
    found = np.concatenate([numbers, numbers + half, numbers - half, numbers + 2.0 * half])
    found = np.concatenate([found, np.nextafter(found, np.inf), np.nextafter(found, -np.inf)])
    return np.concatenate([found, -found])


def same(a: Any, b: Any) -> bool:
    """Equal numbers, signs of zeros included; a NaN equals a NaN."""
    return np.array_equal(a, b, equal_nan=True) and np.array_equal(
        np.signbit(a[~np.isnan(a)]), np.signbit(b[~np.isnan(b)])
    )


def numpy_cast(x: Any, dtype: str) -> Any:
    with np.errstate(over="ignore"):
        return x.astype(dtype).astype("float64")


@pytest.mark.parametrize("dtype", NATIVE)
@settings(max_examples=300)
@given(x=doubles)
def test_rounding_any_number_is_numpy_s(dtype: str, x: float) -> None:
    values = np.asarray([x])
    assert same(round_to(values, dtype), numpy_cast(values, dtype))


def bfloat16_inputs() -> Any:
    """bfloat16 is had from float32 (a cast from float64 may round twice elsewhere), so all of these are float32."""
    with np.errstate(over="ignore"):
        return np.unique(neighbours("bfloat16").astype("float32").astype("float64"))


def test_rounding_to_bfloat16_is_that_of_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = bfloat16_inputs()
    with np.errstate(over="ignore"):
        assert same(round_to(x, "bfloat16"), x.astype("float32").astype(ml_dtypes.bfloat16).astype("float64"))


@pytest.mark.parametrize("dtype", FLOAT8)
def test_float8_is_that_of_torch_and_ml_dtypes(dtype: str) -> None:
    """All of its codes, the middles between them and their neighbours; what is beyond the largest becomes it."""
    torch, ml_dtypes = pytest.importorskip("torch"), pytest.importorskip("ml_dtypes")
    codes = torch.arange(256, dtype=torch.uint8).view(getattr(torch, dtype)).to(torch.float64).numpy()
    numbers = np.unique(codes[np.isfinite(codes)])
    assert (largest(dtype), len(numbers)) == {"float8_e4m3fn": (448.0, 253), "float8_e5m2": (57344.0, 247)}[dtype]
    assert (round_to(numbers, dtype) == numbers).all() and numbers[-1] == largest(dtype)
    middles = ((numbers[1:] + numbers[:-1]) / 2.0).astype(np.float32)
    x = np.concatenate([middles, *(np.nextafter(middles, np.float32(n)) for n in (-np.inf, np.inf))])
    expected = torch.tensor(x).to(getattr(torch, dtype)).to(torch.float64).numpy()
    assert same(round_to(x.astype("float64"), dtype), expected)
    assert same(expected, x.astype(getattr(ml_dtypes, dtype)).astype("float64"))
    beyond = np.asarray([1.0, -1.0]) * 1.5 * largest(dtype)
    assert (round_to(beyond, dtype) == [largest(dtype), -largest(dtype)]).all()


@pytest.mark.parametrize(
    ("dtype", "x", "expected"),
    [
        ("float16", 2049.0, 2048.0),  # ties go to the even neighbour
        ("float16", 2051.0, 2052.0),
        ("float16", 65519.0, 65504.0),
        ("float16", 65520.0, math.inf),
        ("float16", -65520.0, -math.inf),
        ("float16", 2.0**-25, 0.0),
        ("float16", -(2.0**-25), -0.0),
        ("float16", 1.5 * 2.0**-24, 2.0**-23),
        ("bfloat16", 257.0, 256.0),
        ("bfloat16", 259.0, 260.0),
        ("bfloat16", 1.0 + 2.0**-8 + 2.0**-40, 1.0 + 2.0**-7),  # not a tie; one rounding, not two
        ("float32", 1.0 + 2.0**-24, 1.0),
        ("float32", 3.4028235677973366e38, math.inf),
        ("float32", 2.0**-150, 0.0),
        ("float64", 1.0 / 3.0, 1.0 / 3.0),
    ],
)
def test_known_roundings(dtype: str, x: float, expected: float) -> None:
    assert same(round_to(np.asarray([x]), dtype), np.asarray([expected]))


@pytest.mark.parametrize("dtype", ALL)
@settings(max_examples=100)
@given(x=st.floats(-1e4, 1e4), y=st.floats(-1e4, 1e4))
def test_laws_of_rounding(dtype: str, x: float, y: float) -> None:
    a, b = (round_to(np.asarray([value]), dtype)[0] for value in (x, y))
    if x <= y:
        assert a <= b
    assert round_to(np.asarray([a]), dtype)[0] == a
    assert round_to(np.asarray([-x]), dtype)[0] == -a
    if math.isfinite(a) and abs(x) <= largest(dtype):
        step = spacing(np.asarray([x]), dtype)[0]
        assert abs(a - x) <= step / 2.0
        assert a / spacing(np.asarray([a]), dtype)[0] % 1.0 == 0.0
        if abs(x) >= 2.0 ** TYPES[dtype].lowest:
            assert abs(a - x) <= TYPES[dtype].unit * abs(x)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_spacing_is_numpy_s(dtype: str) -> None:
    wide = [0.0, 5e-324, 1e-310, 2.0**-1022, 1.0, 1.5, 1e300]
    x = np.asarray(wide) if dtype == "float64" else np.abs(neighbours(dtype))
    with np.errstate(over="ignore"):
        x = np.unique(x.astype(dtype))
    x = x[x < np.finfo(dtype).max]  # there the next number is none
    assert same(spacing(x.astype("float64"), dtype), np.spacing(x).astype("float64"))
    assert same(spacing(-x.astype("float64"), dtype), np.spacing(x).astype("float64"))


@pytest.mark.parametrize("dtype", [dtype for dtype in ALL if dtype != "float64"])
def test_chopping_goes_towards_zero(dtype: str) -> None:
    x = neighbours(dtype)
    x = x[np.abs(x) < 2.0 ** TYPES[dtype].highest]
    found = chop_to(x, dtype)
    assert np.all(np.abs(found) <= np.abs(x)) and np.all(np.abs(x) - np.abs(found) < spacing(x, dtype))
    assert np.array_equal(round_to(found, dtype), found)
    assert np.isnan(chop_to(np.asarray([np.nan]), dtype))[0]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_what_is_stored(dtype: str) -> None:
    x = np.asarray([1.0 / 3.0, -1e-3, 0.0])
    found = stored(x, dtype)
    assert found.dtype == ("float32" if dtype == "bfloat16" else dtype)
    assert np.array_equal(found.astype("float64"), round_to(x, dtype))
