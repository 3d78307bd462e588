"""Designed inputs: arrays that any language reproduces bit for bit from a case's numbers and `refattn.counter`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn import counter
from refattn.golden.storage import stored
from refattn.mechanisms.record import Case, Input


def _normal(shape: tuple[int, ...], numbers: Mapping[str, float], seed: int, purpose: str) -> NDArray[Any]:
    """`scale` (1 if absent) times a number of unit variance between -3 and 3."""
    return counter.normal(shape, seed=seed, purpose=purpose) * numbers.get("scale", 1.0)


def _mask(shape: tuple[int, ...], numbers: Mapping[str, float], seed: int, purpose: str) -> NDArray[Any]:
    """True with probability `keep`."""
    return np.asarray(counter.uniform(shape, seed=seed, purpose=purpose) < numbers["keep"])


DESIGNS: dict[str, Callable[[tuple[int, ...], Mapping[str, float], int, str], NDArray[Any]]] = {
    "normal": _normal,
    "mask": _mask,
}
"""Design of an `Input` -> array in float64 or bool, from its shape, its numbers, a seed and a purpose."""


def make(mechanism: str, case: Case, dtype: str, *, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Return the arrays of a case by argument name, rounded to `dtype` (bfloat16 held in float32)."""
    return {
        name: _make_one(f"{mechanism}.{case.name}.{name}", given, dtype, seed) for name, given in case.inputs.items()
    }


def make_upstream(mechanism: str, case: Case, name: str, shape: tuple[int, ...], dtype: str, *, seed: int = 0) -> Any:
    """Return an upstream gradient of unit variance for the output `name` of a case."""
    return _make_one(f"{mechanism}.{case.name}.d_{name}", Input(shape), dtype, seed)


def _make_one(purpose: str, given: Input, dtype: str, seed: int) -> NDArray[Any]:
    values = DESIGNS[given.design](given.shape, given.numbers, seed, purpose)
    return values if values.dtype == np.bool_ else stored(values, dtype)
