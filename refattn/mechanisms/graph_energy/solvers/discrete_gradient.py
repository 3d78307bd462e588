"""Means of functions over the way from one state to the next, which make a step that can only lower the energy.

Where y runs from x to x' on a straight line, the mean of v(y) is a discrete gradient: its inner product with x' - x is
E(x) - E(x'), for E is a sum of functions of one number each. Intrinsic forces are polynomials of degree 3 at most, for
which Simpson's rule is exact. The mean of g between two differences u and u' is (G(u') - G(u)) / (u' - u); where they
are close that loses digits, and Gauss's rule with 8 nodes is exact to rounding: its error falls as rho^-16 with
rho > 12 for a function that is analytic within pi/2 of the real line.
"""

from __future__ import annotations

from collections.abc import Callable

from refattn.mechanisms.graph_energy.couplings import Coupling
from refattn.mechanisms.graph_energy.intrinsic import Function, Number
from refattn.xp import Array, namespace

CLOSE = 0.5
"""Differences that are closer than this have their mean by Gauss's rule."""

NODES = (0.1834346424956498, 0.525532409916329, 0.7966664774136267, 0.9602898564975362)
WEIGHTS = (0.362683783378362, 0.3137066458778873, 0.22238103445337448, 0.10122853629037626)
"""The positive nodes of Gauss's rule on [-1, 1], and their weights."""


def along(function: Function, x: Array, after: Array | None, b: Array, mu: Number) -> Array:
    """Return a function of an intrinsic force at x, or its mean from x to `after`."""
    if after is None:
        return function(x, b, mu)
    return (function(x, b, mu) + 4.0 * function(0.5 * (x + after), b, mu) + function(after, b, mu)) / 6.0


def toward(function: Function, x: Array, after: Array, b: Array, mu: Number) -> Array:
    """Return the mean of t times a function from x to `after`, with t from 0 to 1."""
    return (2.0 * function(0.5 * (x + after), b, mu) + function(after, b, mu)) / 6.0


def mean_force(coupling: Coupling, u: Array, after: Array | None) -> Array:
    """Return g(u), or its mean from u to `after`."""
    if after is None:
        return coupling.force(u)
    return _quotient(coupling.force, coupling.potential, u, after)


def mean_slope(coupling: Coupling, u: Array, after: Array | None) -> Array:
    """Return g'(u), or its mean from u to `after`."""
    if after is None:
        return coupling.slope(u)
    return _quotient(coupling.slope, coupling.force, u, after)


def slope_toward(coupling: Coupling, u: Array, after: Array) -> Array:
    """Return the mean of t g' from u to `after`: the derivative of the mean force with respect to `after`."""
    xp = namespace(u)
    close, gap = _gap(u, after)
    far = (coupling.force(after) - mean_force(coupling, u, after)) / gap
    return xp.where(close, _gauss(lambda t: t * coupling.slope(u + t * (after - u))), far)


def _quotient(function: Callable[[Array], Array], integral: Callable[[Array], Array], u: Array, after: Array) -> Array:
    close, gap = _gap(u, after)
    near = _gauss(lambda t: function(u + t * (after - u)))
    return namespace(u).where(close, near, (integral(after) - integral(u)) / gap)


def _gap(u: Array, after: Array) -> tuple[Array, Array]:
    """Tell whether two differences are close, and return their gap, 1 where they are."""
    xp = namespace(u)
    close = xp.abs(after - u) < CLOSE
    return close, xp.where(close, 1.0, after - u)


def _gauss(function: Callable[[float], Array]) -> Array:
    """Return the integral of a function from 0 to 1."""
    parts = [
        0.5 * weight * (function(0.5 - 0.5 * node) + function(0.5 + 0.5 * node))
        for node, weight in zip(NODES, WEIGHTS, strict=True)
    ]
    return sum(parts[1:], parts[0])
