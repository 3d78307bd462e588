"""A kernel that a user might bring: k2(x, y) = 1 / (1 + |x - y|^2 / 2), with its gradient -(x - y) k2^2.

It is for the case "own", whose kernel is the text ``refattn.mechanisms.koopman.testing.rational:RATIONAL``.

Source: Rasmussen, Williams 2006 (Gaussian Processes for Machine Learning), equation 4.19, with alpha = l = 1.
"""

from __future__ import annotations

from refattn.mechanisms.koopman.options.kernel import Own
from refattn.xp import Array, namespace


def rational(x: Array, y: Array) -> Array:
    """Return k2 (..., p, q) of points (..., p, d) and (..., q, d)."""
    difference = x[..., :, None, :] - y[..., None, :, :]
    return 1.0 / (1.0 + 0.5 * namespace(x, y).sum(difference * difference, axis=-1))


def rational_gradient(x: Array, y: Array) -> Array:
    """Return its derivative with respect to x, (..., p, q, d)."""
    value = rational(x, y)
    return (value * value)[..., None] * (y[..., None, :, :] - x[..., :, None, :])


RATIONAL = Own(rational, rational_gradient)
