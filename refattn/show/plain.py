"""What definitions use of `refattn.xp` and `refattn.ops.tiles`, on NumPy alone; a test compares each with its original.

`namespace` is missing, because it is always NumPy: a printed file has no line that asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = Any

Namespace: TypeAlias = Any


class backend:  # noqa: N801 (in the library it is a function)
    """What is known of NumPy: it computes one thing after the other."""

    pools = False

    def __init__(self, x: Array) -> None:
        """Stand for the backend of `x`."""


def zeros(shape: tuple[int, ...], like: Array) -> Array:
    """Return zeros with the dtype of `like`."""
    return np.zeros(shape, dtype=like.dtype)


def eye_like(size: int, like: Array) -> Array:
    """Return the identity with the dtype of `like`."""
    return np.eye(size, dtype=like.dtype)


def arange(start: int, stop: int, like: Array) -> Array:
    """Return ``start, ..., stop - 1``."""
    return np.arange(start, stop)


def max_last(x: Array) -> Array:
    """Return the maximum over the last axis, kept as size 1; -inf where the axis has no element."""
    return np.max(x, axis=-1, keepdims=True, initial=-math.inf)


def sum_last(x: Array) -> Array:
    """Return the sum over the last axis, kept as size 1; an inner product is quicker than NumPy's own sum."""
    return np.vecdot(x, np.ones(x.shape[-1:], dtype=x.dtype))[..., None]


def sum_wide(x: Array) -> Array:
    """Return the sum of all elements, accumulated in float64."""
    return np.sum(x, dtype=np.float64).astype(x.dtype)


def sum_wide_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Return the sum of x over those of its axes that are 1 in `shape`, accumulated in float64."""
    axes = tuple(axis for axis, n in enumerate(shape) if n == 1 and x.shape[axis] != 1)
    return np.sum(x, axis=axes, keepdims=True, dtype=np.float64).astype(x.dtype) if axes else x


def run(like: Array, task: Callable[[Any], Any], tiles: Sequence[Any]) -> list[Any]:
    """Return the results of `task` for all tiles."""
    return [task(tile) for tile in tiles]


def by_rows(function: Callable[..., Sequence[Array]], *arrays: Array) -> Sequence[Array]:
    """Return the arrays that a function of each row gives; the library cuts the rows into blocks."""
    return function(*arrays)


def product(a: Array, b: Array) -> Array:
    """Return a @ b."""
    return a @ b


def transpose(x: Array) -> Array:
    """Return the transposed matrices."""
    return x.mT


def concrete(condition: Array | bool) -> bool:
    """Return the truth of a condition on values."""
    return bool(condition)


def all_finite(x: Array) -> bool:
    """Tell whether every element of `x` is finite."""
    return bool(np.all(np.isfinite(x)))


def is_array(value: object) -> bool:
    """Tell whether `value` is an array."""
    return isinstance(value, np.ndarray | np.generic)
