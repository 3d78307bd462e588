"""Storage types on the host: rounding to them and their spacing, exactly, in float64.

NumPy has no bfloat16, so a value of any storage type is held here as a float64 that the type represents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Storage:
    """A binary floating-point type: significant bits, and exponent of its smallest normal and its largest number.

    `lost` is how many of the largest numbers are codes of something else. One that saturates has its largest number
    where others have infinity.
    """

    bits: int
    lowest: int
    highest: int
    lost: int = 0
    saturates: bool = False

    @property
    def unit(self) -> float:
        """Unit roundoff: the largest relative error of rounding to nearest."""
        return 2.0**-self.bits


TYPES = {
    "float64": Storage(53, -1022, 1023),
    "float32": Storage(24, -126, 127),
    "float16": Storage(11, -14, 15),
    "bfloat16": Storage(8, -126, 127),
    "float8": Storage(4, -6, 8),  # as coarse as E4M3, without its special codes: only to round worse than bfloat16
    "float8_e4m3fn": Storage(4, -6, 8, lost=1, saturates=True),  # up to 448; 480 is NaN, and nothing is infinite
    "float8_e5m2": Storage(3, -14, 15, saturates=True),  # up to 57344
    "float4_e2m1fn": Storage(2, 0, 2, saturates=True),  # 0, 0.5, 1, 1.5, 2, 3, 4 and 6
    "int8": Storage(7, 6, 6, saturates=True),  # whole numbers up to 127, times a factor: all below 64 are subnormal
    "tf32": Storage(11, -126, 127),  # what matrix units round float32 to
    "bf16x3": Storage(16, -126, 127),  # as exact as three products of bfloat16: high and low parts, but low by low
}

DTYPES = ("float64", "float32", "float16", "bfloat16")
"""The types that kernels are verified in unless they ask for others."""

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True)
class Scaled:
    """A format whose numbers come with factors, by which they are multiplied.

    Attributes
    ----------
    number
        The type of the numbers.
    block
        How many numbers that are summed over in a product have one factor; 0 where a kernel says which do.
    factor
        The type of the factors: "float32", "power of two", or a short type, beside which a tensor has one factor more.
    """

    number: str
    block: int = 0
    factor: str = "float32"


SCALED = {
    **{dtype: Scaled(dtype) for dtype in FLOAT8},
    "mxfp8": Scaled("float8_e4m3fn", 32, "power of two"),
    "nvfp4": Scaled("float4_e2m1fn", 16, "float8_e4m3fn"),
}
"""Formats with factors: kernels are verified in them where they are asked for."""

LOWER = {"float64": "float32", "float32": "bfloat16", "float16": "float8", "bfloat16": "float8"}
"""The type that is one step coarser."""


def has_gradient(x: NDArray[Any]) -> bool:
    """Tell whether an input is of floating numbers, which are rounded to a type and differentiated.

    Booleans (a mask) and integers (lengths, an offset) are neither.
    """
    return x.dtype.kind == "f"


def largest(dtype: str) -> float:
    """Return the largest number of the type."""
    kind = TYPES[dtype]
    return (2.0 - (1 + kind.lost) * 2.0 ** (1 - kind.bits)) * 2.0**kind.highest


def spacing(x: Floats, dtype: str) -> Floats:
    """Return the distance between neighbouring numbers of the type at x; that of the subnormals at 0."""
    kind = TYPES[dtype]
    _, exponent = np.frexp(np.where(np.isfinite(x), x, 0.0))  # |x| in [2^(exponent-1), 2^exponent)
    exponent = np.where(x == 0.0, kind.lowest, np.maximum(exponent - 1, kind.lowest))
    return np.ldexp(1.0, exponent - kind.bits + 1)


def round_to(x: Floats, dtype: str) -> Floats:
    """Round to the nearest number of the type, ties to even; beyond its largest number to infinity, or to that."""
    if dtype == "float64":
        return x
    finite = np.where(np.isfinite(x), x, 0.0)
    step = spacing(finite, dtype)
    rounded = np.rint(finite / step) * step
    beyond = largest(dtype) if TYPES[dtype].saturates else np.inf
    rounded = np.where(np.abs(rounded) > largest(dtype), np.copysign(beyond, finite), rounded)
    return np.where(np.isfinite(x), np.copysign(rounded, x), x)


def chop_to(x: Floats, dtype: str) -> Floats:
    """Cut off the digits that the type does not hold: rounding towards 0, which an honest kernel does not do."""
    step = spacing(x, dtype)
    return np.where(np.isfinite(x), np.trunc(np.where(np.isfinite(x), x, 0.0) / step) * step, x)


def stored(x: Floats, dtype: str) -> NDArray[np.floating]:
    """Return x rounded to the type, as the NumPy array that is given: float32 where NumPy has no such type."""
    if dtype in ("float64", "float32", "float16"):  # NumPy rounds as `round_to` does, and needs no other memory
        with np.errstate(over="ignore"):
            return x.astype(dtype)
    return round_to(x, dtype).astype("float32")
