"""The discrete gradient: x' = x + h times the mean of v(y), where y runs from x to x' on a straight line.

The mean of v(y) is a discrete gradient: its inner product with x' - x is E(x) - E(x'), for E is a sum of functions of
one number each, and so the energy falls with every step, of any length. In the equations of the flow it has one stage;
wherever y stands the mean over the way from x to x' is meant, and dv = h (dx' + (dv/dx')^T dv).

Intrinsic forces are polynomials of degree 3 at most, for which Simpson's rule is exact. The mean of g between two
differences u and u' is (G(u') - G(u)) / (u' - u); where they are close that loses digits, and Gauss's rule with 8 nodes
is exact to rounding: its error falls as rho^-16 with rho > 12 for a function that is analytic within pi/2 of the real
line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from refattn.mechanisms.graph_energy.forces import Coupling, Function, Intrinsics, Number
from refattn.mechanisms.graph_energy.implementations.pairs import between
from refattn.mechanisms.graph_energy.solvers.newton import jacobian_of
from refattn.mechanisms.graph_energy.system import System
from refattn.xp import Array, namespace

CLOSE = 0.5
"""Differences that are closer than this have their mean by Gauss's rule."""

NODES = (0.1834346424956498, 0.525532409916329, 0.7966664774136267, 0.9602898564975362)
WEIGHTS = (0.362683783378362, 0.3137066458778873, 0.22238103445337448, 0.10122853629037626)
"""The positive nodes of Gauss's rule on [-1, 1], and their weights."""


@dataclass(frozen=True)
class Means:
    """A coupling of two states: means of another one over the way of a difference from u to u'."""

    coupling: Coupling

    def force(self, u: Array, after: Array) -> Array:
        """Return the mean of g."""
        return _quotient(self.coupling.force, self.coupling.potential, u, after)

    def slope(self, u: Array, after: Array) -> Array:
        """Return the mean of g'."""
        return _quotient(self.coupling.slope, self.coupling.force, u, after)

    def slope_toward(self, u: Array, after: Array) -> Array:
        """Return the mean of t g' with t from 0 to 1: the derivative of the mean of g with respect to u'."""
        close, gap = _gap(u, after)
        far = (self.coupling.force(after) - self.force(u, after)) / gap
        return namespace(u).where(close, _gauss(lambda t: t * self.coupling.slope(u + t * (after - u))), far)

    @property
    def powers(self) -> tuple[Means, ...]:
        """The same of what the coefficients of a polynomial multiply."""
        return tuple(Means(power) for power in self.coupling.powers)


def along(function: Intrinsics, x: Array, after: Array, b: Array, mu: Number) -> Array:
    """Return the mean of a function of an intrinsic force from x to `after`."""
    return (function(x, b, mu) + 4.0 * function(0.5 * (x + after), b, mu) + function(after, b, mu)) / 6.0


def toward(function: Intrinsics, x: Array, after: Array, b: Array, mu: Number) -> Array:
    """Return the mean of t times a function from x to `after`, with t from 0 to 1."""
    return (2.0 * function(0.5 * (x + after), b, mu) + function(after, b, mu)) / 6.0


def forces(system: System) -> System:
    """Return the system whose rate and slopes are the means: those of two states."""
    f = system.intrinsic
    means: Any = SimpleNamespace(
        name=f.name, **{name: partial(along, getattr(f, name)) for name in ("force", "d_x", "d_b", "d_mu")}
    )
    coupling: Any = Means(system.coupling)
    return replace(system, coupling=coupling, intrinsic=means)


def stage(x: Array, after: Array) -> tuple[Array, ...]:
    """Return between which states the means are."""
    return x, after


def jacobian(system: System, x: Array, after: Array) -> Array:
    """Return dv / dx'."""
    slopes = Means(system.coupling).slope_toward(between(x), between(after))
    return jacobian_of(system, slopes, system.seen(toward(system.intrinsic.d_x, x, after, system.start, system.mu)))


def _quotient(function: Function, integral: Function, u: Array, after: Array) -> Array:
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
