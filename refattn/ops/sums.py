"""Sums: of what there is, of an array and its transpose, and over the axes to which an array was broadcast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from refattn.ops.tiles import run
from refattn.xp import Array, backend, namespace, sum_wide

COLUMNS = 128
"""Columns of a matrix that are transposed at once."""


def sum_of(*parts: Array | None) -> Array:
    """Return the sum of what is not None, in this order."""
    first, *others = (part for part in parts if part is not None)
    for other in others:
        first = first + other
    return first


def plus(a: Array | None, b: Array | None) -> Any:
    """Return a + b, or the one of them that is there."""
    return a if b is None else b if a is None else a + b


def moved_by(x: Array, step: float | Array, weights: Sequence[float], rates: Sequence[Array]) -> Array:
    """Return x + step sum_l weights_l rates_l."""
    total: Any = None
    for weight, rate in zip(weights, rates, strict=True):
        if weight != 0.0:
            total = weight * rate if total is None else total + weight * rate
    return x if total is None else x + step * total


def with_transposed(x: Array) -> Array:
    """Return x plus its transpose; its adjoint is itself."""
    xp, n = namespace(x), x.shape[-1]
    if not backend(x).pools or n <= COLUMNS:
        return x + xp.matrix_transpose(x)

    def rows(at: slice) -> Array:
        # Rows of a transpose lie so far apart that a cache holds few of them; a copy of some columns does not.
        return x[..., at, :] + xp.matrix_transpose(xp.asarray(x[..., :, at], copy=True))

    parts = run(x, rows, [slice(first, min(first + COLUMNS, n)) for first in range(0, n, COLUMNS)])
    return xp.concat(parts, axis=-2)


def summed_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Return the sum of x over the axes to which an array of this shape was broadcast."""
    xp = namespace(x)
    missing = len(x.shape) - len(shape)
    x = xp.sum(x, axis=tuple(range(missing))) if missing else x
    ones = tuple(axis for axis, n in enumerate(shape) if n == 1 and x.shape[axis] != 1)
    return xp.sum(x, axis=ones, keepdims=True) if ones else x


def summed_for(x: Array, number: float | Array) -> Array:
    """Return the sum of x (b, h, j, c) over what a number was broadcast to: 0-d, (h,) or (h, j), with ones."""
    if isinstance(number, float) or len(number.shape) == 0:
        return sum_wide(x)
    return namespace(x).sum(x, axis=(0, 3) if number.shape[-2] > 1 else (0, 2, 3))
