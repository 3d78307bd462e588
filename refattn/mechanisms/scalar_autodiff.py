"""Scalars that remember what they were made from, for second derivations: their adjoints are nobody's formulas.

Loops write a forward in these numbers, one after the other. `sweep` then gives every number on the way the derivative
of the loss with respect to it, by the chain rule alone. What is taken for a constant is made as a new scalar.

Arrays of them are NumPy arrays of objects: what is broadcast, repeated or shared by heads is the same scalar, whose
derivative is a sum by itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

_COUNT = itertools.count()


class Scalar:
    """A number, with the numbers that it was made from and its derivative with respect to each of them."""

    __slots__ = ("number", "parts", "slope", "value")
    __array_ufunc__ = None  # a number of NumPy leaves the operation to the methods below

    def __init__(self, value: float, parts: tuple[tuple[Scalar, float], ...] = ()) -> None:
        self.value, self.parts, self.number, self.slope = float(value), parts, next(_COUNT), 0.0

    def __add__(self, other: Any) -> Scalar:
        return total((self, other))

    def __mul__(self, other: Any) -> Scalar:
        return dot((self,), (other,))

    def __neg__(self) -> Scalar:
        return Scalar(-self.value, ((self, -1.0),))

    def __sub__(self, other: Any) -> Scalar:
        return total((self, -other))

    def __rsub__(self, other: Any) -> Scalar:
        return total((-self, other))

    def __truediv__(self, other: Scalar) -> Scalar:
        found = self.value / other.value
        return Scalar(found, ((self, 1.0 / other.value), (other, -found / other.value)))

    __radd__, __rmul__ = __add__, __mul__


def scalar(x: Any) -> Scalar:
    """Return a number as a scalar."""
    return x if isinstance(x, Scalar) else Scalar(x)


def copy(x: Scalar) -> Scalar:
    """Return the same number as another one, whose derivative counts what is made from it alone."""
    return Scalar(x.value, ((x, 1.0),))


def exp(x: Scalar) -> Scalar:
    """Return the exponential of a number."""
    found = math.exp(x.value)
    return Scalar(found, ((x, found),))


def total(terms: Iterable[Any]) -> Scalar:
    """Return the sum of some numbers, rounded once."""
    every = [scalar(x) for x in terms]
    return Scalar(math.fsum(x.value for x in every), tuple((x, 1.0) for x in every))


def dot(left: Iterable[Any], right: Iterable[Any]) -> Scalar:
    """Return the sum of products; those with a constant 0 are left out."""
    pairs = [(scalar(x), scalar(y)) for x, y in zip(left, right, strict=True)]
    parts = [part for x, y in pairs for part in ((x, y.value), (y, x.value))]
    return Scalar(math.fsum(x.value * y.value for x, y in pairs), tuple(parts))


def softmax(scores: Sequence[Scalar]) -> list[Scalar]:
    """Return exp(s_j) / sum_l exp(s_l); scores of -inf get a constant 0."""
    top = max((s.value for s in scores), default=-math.inf)
    powers = {j: exp(s - top) for j, s in enumerate(scores) if s.value > -math.inf}
    whole = total(powers.values())
    return [powers[j] / whole if j in powers else Scalar(0.0) for j in range(len(scores))]


def scalars(x: Any) -> Any:
    """Return numbers as an array of scalars."""
    return _each(Scalar, x)


def copies(x: Any) -> Any:
    """Return an array of copies."""
    return _each(copy, x)


def values(x: Any) -> Any:
    """Return the numbers of an array of scalars."""
    return _each(lambda s: s.value, x).astype(float)


def slopes(x: Any) -> Any:
    """Return the derivatives with respect to an array of scalars, after `sweep`."""
    return _each(lambda s: s.slope, x).astype(float)


def _each(function: Callable[[Any], Any], x: Any) -> Any:
    return np.asarray(np.frompyfunc(function, 1, 1)(np.asarray(x, dtype=object)), dtype=object)


def sweep(outputs: Any, d_outputs: Any) -> None:
    """Give every number that outputs were made from its derivative of a loss, for those of the outputs."""
    found, left = dict[int, Scalar](), list(np.ravel(outputs))
    while left:
        x = left.pop()
        if x.number not in found:
            found[x.number], x.slope = x, 0.0
            left.extend(part for part, _ in x.parts)
    for x, d in zip(np.ravel(outputs), np.ravel(d_outputs), strict=True):
        x.slope += float(d)
    for number in sorted(found, reverse=True):
        for part, by in found[number].parts:
            part.slope += by * found[number].slope
