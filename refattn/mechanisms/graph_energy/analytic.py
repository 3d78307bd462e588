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
from refattn.xp import Array, arange, concrete, dtype_name, namespace

POINTS = 400
NODES = 65
STEP = 1e-5
SLOPES = 1e-6
"""Largest error of a derivative, relative to its largest value: differences err by STEP^2, rounding by 1e-16 / STEP."""

TAIL = 1e-8
"""Largest of the last eight of 65 Chebyshev coefficients, relative to the largest."""

_CHECKED: WeakSet[Coupling | Intrinsic] = WeakSet()


def check_coupling(coupling: Coupling, like: Array) -> None:
    """Raise ValueError if a coupling is not odd and analytic with these derivatives, once for each.

    `like` is an array of the library to compute with; a library that has float64 uses it.
    """
    if coupling in _CHECKED or COUPLINGS.get(coupling.name) is coupling or (x := _points(like)) is None:
        return
    g = coupling.force(x)
    _check(coupling, "force: it is not odd", g + coupling.force(-x), g, 1e-12)
    for function, derivative in (("potential", "force"), ("force", "slope"), ("slope", "curvature")):
        _check_derivative(coupling, function, derivative, (x,), 0)
    _check(coupling, "potential: it is not 0 at 0", coupling.potential(0.0 * x), g, 1e-12)
    for zero in coupling.zeros or ():
        _check(coupling, f"zeros: it is not 0 at {zero:.6g}", coupling.force(0.0 * x + zero), g, 1e-12)
    coefficients = _chebyshev(coupling, like)
    _check(coupling, "force: it is not analytic around [-1.5, 1.5]", coefficients[-8:], coefficients, TAIL)
    _CHECKED.add(coupling)


def check_intrinsic(intrinsic: Intrinsic, like: Array) -> None:
    """Raise ValueError if an intrinsic force has not the derivatives and the potential that it claims, once each."""
    if intrinsic in _CHECKED or INTRINSICS.get(intrinsic.name) is intrinsic or (x := _points(like)) is None:
        return
    at = (x, namespace(x).sin(3.0 * x), 0.7 + 0.0 * x)
    for argument, derivative in enumerate(("d_x", "d_b", "d_mu")):
        _check_derivative(intrinsic, "force", derivative, at, argument)
    for argument, derivative in enumerate(("force", "potential_b", "potential_mu")):
        _check_derivative(intrinsic, "potential", derivative, at, argument, -1.0 if argument == 0 else 1.0)
    _CHECKED.add(intrinsic)


def _points(like: Array) -> Array | None:
    """Return points of [-2, 2] in float64; None if the library was not told to compute in it, and so cannot tell."""
    xp = namespace(like)
    count = xp.astype(arange(0, POINTS, like), xp.float64)
    return -2.0 + 4.0 * (count + 0.5) / POINTS if dtype_name(count) == "float64" else None


def _check_derivative(
    of: Coupling | Intrinsic, function: str, derivative: str, at: tuple[Array, ...], argument: int, sign: float = 1.0
) -> None:
    """Compare what is claimed of a function of some arguments with central differences in one of them."""
    above, below = (
        getattr(of, function)(*(x + step if n == argument else x for n, x in enumerate(at))) for step in (STEP, -STEP)
    )
    found, claimed = sign * (above - below) / (2.0 * STEP), getattr(of, derivative)(*at)
    what = "minus the" if sign < 0.0 else "the"
    _check(of, f"{derivative}: it is not {what} derivative of {function}", found - claimed, claimed, SLOPES)


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
