"""The implicit midpoint rule: x' = x + h v(y), with y = (x + x') / 2; of order 2.

In the equations of the flow it has one stage, at y, and so dv = h (dx' + dy / 2): M^T dv / h = dx' for the matrix M of
`refattn.mechanisms.graph_energy.solvers.newton`.
"""

from __future__ import annotations

from refattn.mechanisms.graph_energy.implementations.pairs import between
from refattn.mechanisms.graph_energy.solvers.newton import jacobian_of
from refattn.mechanisms.graph_energy.system import System
from refattn.xp import Array


def forces(system: System) -> System:
    """Return the system whose rate and slopes a stage takes."""
    return system


def stage(x: Array, after: Array) -> tuple[Array, ...]:
    """Return where the stage is evaluated."""
    return (0.5 * (x + after),)


def jacobian(system: System, x: Array, after: Array) -> Array:
    """Return dv / dx'."""
    middle = 0.5 * (x + after)
    slopes = 0.5 * system.coupling.slope(between(middle))
    return jacobian_of(system, slopes, system.seen(0.5 * system.intrinsic.d_x(middle, system.start, system.mu)))
