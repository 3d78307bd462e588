"""Whether a user's coupling is what it has to be: odd, with the derivatives that it claims, and analytic.

Of an intrinsic force the derivatives and those of its potential are asked for alone.

Derivatives are compared with central differences at 400 points of [-2, 2]. Whether a function is analytic no finite
number of values can tell; but its Chebyshev coefficients on [-1.5, 1.5] fall geometrically if it is analytic around
that interval, and only as a power of their index if a derivative jumps inside it: see `TAIL`.
"""

from __future__ import annotations

import math
from weakref import WeakSet

from refattn.mechanisms.graph_energy.forces import COUPLINGS, INTRINSICS, Coupling, Intrinsic
from refattn.xp import Array, arange, concrete, namespace

POINTS = 400
NODES = 65
STEP = 1e-5
SLOPES = 1e-6
"""Largest error of a derivative, relative to its largest value: differences err by STEP^2, rounding by 1e-16 / STEP."""

TAIL = 1e-8
"""Largest of the last eight of 65 Chebyshev coefficients, relative to the largest."""

_CHECKED: WeakSet[Coupling | Intrinsic] = WeakSet()


def check_coupling(coupling: Coupling, like: Array) -> None:
    """Raise ValueError where a coupling is not odd and analytic with these derivatives, once for each.

    `like` is an array of the library to compute with; a library that has float64 uses it.
    """
    if coupling in _CHECKED or COUPLINGS.get(coupling.name) is coupling:
        return
    xp = namespace(like)
    count = xp.astype(arange(0, POINTS, like), xp.float64)
    if str(count.dtype).rpartition(".")[2] != "float64":
        return  # a library that was not told to compute in float64 cannot tell
    x = -2.0 + 4.0 * (count + 0.5) / POINTS
    g = coupling.force(x)
    _check(coupling, "force: it is not odd", g + coupling.force(-x), g, 1e-12)
    claims = (("potential", "force"), ("force", "slope"), ("slope", "curvature"))
    for name, derivative in claims:
        function, claimed = getattr(coupling, name), getattr(coupling, derivative)(x)
        found = (function(x + STEP) - function(x - STEP)) / (2.0 * STEP)
        _check(coupling, f"{derivative}: it is not the derivative of {name}", found - claimed, claimed, SLOPES)
    _check(coupling, "potential: it is not 0 at 0", coupling.potential(0.0 * x), g, 1e-12)
    for zero in coupling.zeros or ():
        _check(coupling, f"zeros: it is not 0 at {zero:.6g}", coupling.force(0.0 * x + zero), g, 1e-12)
    coefficients = _chebyshev(coupling, like)
    _check(coupling, "force: it is not analytic around [-1.5, 1.5]", coefficients[-8:], coefficients, TAIL)
    _CHECKED.add(coupling)


def check_intrinsic(intrinsic: Intrinsic, like: Array) -> None:
    """Raise ValueError where an intrinsic force has not the derivatives and the potential that it claims, once each."""
    if intrinsic in _CHECKED or INTRINSICS.get(intrinsic.name) is intrinsic:
        return
    xp = namespace(like)
    count = xp.astype(arange(0, POINTS, like), xp.float64)
    if str(count.dtype).rpartition(".")[2] != "float64":
        return  # as above
    x = -2.0 + 4.0 * (count + 0.5) / POINTS
    at = (x, xp.sin(3.0 * x), 0.7 + 0.0 * x)
    claims = (("d_x", "force", 0, 1.0), ("d_b", "force", 1, 1.0), ("d_mu", "force", 2, 1.0))
    energies = (
        ("force", "potential", 0, -1.0),
        ("potential_b", "potential", 1, 1.0),
        ("potential_mu", "potential", 2, 1.0),
    )
    for name, function, argument, sign in (*claims, *energies):
        sides = []
        for step in (STEP, -STEP):
            moved = [each + step if n == argument else each for n, each in enumerate(at)]
            sides.append(getattr(intrinsic, function)(*moved))
        found, claimed = sign * (sides[0] - sides[1]) / (2.0 * STEP), getattr(intrinsic, name)(*at)
        what = "minus the" if sign < 0.0 else "the"
        _check(intrinsic, f"{name}: it is not {what} derivative of {function}", found - claimed, claimed, SLOPES)
    _CHECKED.add(intrinsic)


def _check(coupling: Coupling | Intrinsic, problem: str, error: Array, size: Array, allowed: float) -> None:
    xp = namespace(error)
    if concrete(xp.max(xp.abs(error)) <= allowed * (xp.max(xp.abs(size)) + 1e-3)) is False:
        raise ValueError(f"{type(coupling).__name__.lower()} {coupling.name}: {problem}")


def _chebyshev(coupling: Coupling, like: Array) -> Array:
    """Return the Chebyshev coefficients of g on [-1.5, 1.5]."""
    xp = namespace(like)
    n = xp.astype(arange(0, NODES, like), xp.float64)
    angles = math.pi * (n + 0.5) / NODES
    values = coupling.force(1.5 * xp.cos(angles))
    return (2.0 / NODES) * (xp.cos(n[:, None] * angles[None, :]) @ values)
