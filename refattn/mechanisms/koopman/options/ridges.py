"""How the ridge is meant: one for all coordinates or one for each, and relative to what.

The operator of a coordinate p is fitted with ridge_p: A and R then have an axis of coordinates in front, and column p
of D = A P and of R D is that of ridge_p's operator. `apart` makes of D its columns, `summed` is its adjoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from refattn.ops.solve import identity
from refattn.xp import Array, namespace


@dataclass(frozen=True)
class OneRidge:
    """One operator, with one ridge: no datum depends on the coordinate."""

    def spread(self, ridge: Array) -> Array:
        """Return the ridge () or, of coordinates, (d, 1, 1, 1, 1, 1)."""
        return ridge

    def apart(self, x: Array) -> Array:
        """Return x (b, h, i, l, d), for each ridge its columns, 0 elsewhere."""
        return x

    def summed(self, x: Array) -> Array:
        """Return x (b, h, i, ...), summed over what `apart` put in front."""
        return x

    def joined(self, x: Array) -> Array:
        """Return of x, which has for each ridge all columns, those of the ridge: (b, h, i, l, d)."""
        return self.summed(self.apart(x))


@dataclass(frozen=True)
class RidgeByCoordinate(OneRidge):
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


def factor_of(scale: str, transitions: int, count: Array) -> Any:
    """Return what the ridge is multiplied by: 1, or for "mean" transitions times keys (b, h, i, 1, 1).

    The error is a sum over transitions and functions; a ridge in units of its mean weighs the same whatever there is.
    """
    return 1.0 if scale == "sum" else float(transitions) * count[..., None]
