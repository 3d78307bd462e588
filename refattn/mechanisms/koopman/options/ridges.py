"""How the ridge is meant: one for all coordinates or one for each, and relative to what.

The operator of a coordinate p is fitted with ridge_p: A and R then have an axis of coordinates in front, and column p
of D = A P and of R D is that of ridge_p's operator. `apart` makes of D its columns, `summed` is its adjoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from refattn.ops.solve import identity
from refattn.xp import Array, namespace


class Ridges(Protocol):
    """What there is of the ridges of an update."""

    def spread(self, ridge: Array) -> Array:
        """Return the ridge () or, of coordinates, (d, 1, 1, 1, 1, 1)."""

    def apart(self, x: Array) -> Array:
        """Return x (b, h, i, l, d), for each ridge its columns, 0 elsewhere."""

    def summed(self, x: Array) -> Array:
        """Return x (b, h, i, ...), summed over what `apart` put in front."""

    def joined(self, x: Array) -> Array:
        """Return of x, which has for each ridge all columns, those of the ridge: (b, h, i, l, d)."""


@dataclass(frozen=True)
class OneRidge:
    """One operator, with one ridge: no datum depends on the coordinate."""

    def spread(self, ridge: Array) -> Array:
        """Return the ridge."""
        return ridge

    def apart(self, x: Array) -> Array:
        """Return x."""
        return x

    def summed(self, x: Array) -> Array:
        """Return x."""
        return x

    def joined(self, x: Array) -> Array:
        """Return x."""
        return x


@dataclass(frozen=True)
class RidgeByCoordinate:
    """An operator for each coordinate, with a ridge of its own: coordinates may be known to different precision."""

    def spread(self, ridge: Array) -> Array:
        """Return the ridges along an axis in front."""
        return ridge[:, None, None, None, None, None]

    def apart(self, x: Array) -> Array:
        """Return the columns of x, each alone."""
        return x * identity(x.shape[-1], x)[:, None, None, None, None, :]

    def summed(self, x: Array) -> Array:
        """Return the sum over the axis in front."""
        return namespace(x).sum(x, axis=0)

    def joined(self, x: Array) -> Array:
        """Return the column of each."""
        return self.summed(self.apart(x))


class Scale(Protocol):
    """What the ridge is a multiple of."""

    def factor(self, transitions: int, count: Array) -> Any:
        """Return it for so many transitions and the number of keys that a query sees, (b, h, i, 1)."""


@dataclass(frozen=True)
class Sum:
    """The ridge as it is given: the error is a sum over transitions and functions."""

    def factor(self, transitions: int, count: Array) -> Any:
        """Return 1."""
        return 1.0


@dataclass(frozen=True)
class Mean:
    """The ridge times what the error is summed over: it weighs the same whatever there is of it."""

    def factor(self, transitions: int, count: Array) -> Any:
        """Return transitions times keys, (b, h, i, 1, 1)."""
        return float(transitions) * count[..., None]


SCALES: dict[str, Scale] = {"sum": Sum(), "mean": Mean()}
