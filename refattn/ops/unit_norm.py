"""Normalisation to length 1 over the last axis, with a number added to the squared length.

    y = x r,   r = 1 / sqrt(sum x^2 + eps)

which is short of length 1 where x is not large against sqrt(eps). The gradient loses its part along y, as far as y has
length 1: exact with eps::

    dx = r (dy - y (y . dy))

With eps = 0 a row of zeros stays one, and passes no gradient on.
"""

from __future__ import annotations

from refattn.xp import Array, namespace


def unit(x: Array, eps: float) -> tuple[Array, tuple[Array, Array]]:
    """Return y (..., m) for x (..., m), and what the backward reads: y and r (..., 1)."""
    xp = namespace(x)
    squared = xp.vecdot(x, x)[..., None] + eps
    inverse = xp.where(squared == 0.0, 0.0, 1.0 / xp.sqrt(xp.where(squared == 0.0, 1.0, squared)))
    y = x * inverse
    return y, (y, inverse)


def unit_backward(y: Array, inverse: Array, d_y: Array) -> Array:
    """Return the gradient of x for that of y, and for y and r."""
    along = namespace(y).vecdot(d_y, y)[..., None]
    # forward: y = x * inverse
    return (d_y - y * along) * inverse
