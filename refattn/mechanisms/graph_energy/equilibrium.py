"""The gradient at an equilibrium, by the implicit function theorem: no step is remembered but the last state.

Where v(x*; theta) = 0 and the Jacobian J of v with respect to x has an inverse, x* is a function of theta, and::

    J^T u = -dx*
    dtheta = (dv / dtheta)^T u

Each channel of a state is a system of its own. dv/dtheta is that of one stage of the flow (equations GE.6 and GE.7),
with u in place of dv, and so the dense implementation adds it up. Where scores started, and the step, then have no
effect. It is what the adjoint of the steps tends to as their number grows, and the two differ by what is left of the
flow.

A channel that is at rest may also stop, each by itself, and then stays as it is: `still_flowing`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from refattn.mechanisms.graph_energy.implementations.pairs import between
from refattn.mechanisms.graph_energy.options.integrator import Integrator
from refattn.mechanisms.graph_energy.system import System
from refattn.mechanisms.precision import bound_of, report
from refattn.ops.masks import own_pairs
from refattn.ops.solve import identity
from refattn.xp import Array, concrete, namespace

REST = 1e-6
"""Largest rate, in units of the largest score or 1, at which scores count as being at rest."""

SMALLEST = 1e-6
"""Smallest singular value of J, relative to the largest or 1, for which a gradient, about its inverse, is told."""


def rate_at_rest(system: System, x: Array, d_x: Array) -> Array:
    """Return u (b, h, j, c), for the gradient of scores x at rest.

    Warns
    -----
    PrecisionWarning
        If the inverse of J may move a gradient by more than 1e-2 of its size, as it can in float32.

    Raises
    ------
    ArithmeticError
        If the scores are not at rest, or J has no inverse that could be told from rounding.
    """
    xp, right = namespace(d_x), -namespace(d_x).permute_dims(d_x, (0, 1, 3, 2))[..., None]
    own = system.seen(system.intrinsic.d_x(x, system.start, system.mu))
    own = own if system.visible is None else own + system.visible - 1.0  # -1 for a node that does not exist
    jacobian = jacobian_of(system, system.coupling.slope(between(x)), own)
    transposed, right = _finite_systems(xp.matrix_transpose(jacobian), right)
    # What is NaN, or comes of it, passes these checks.
    fastest, largest = (xp.max(xp.where(xp.isfinite(each), abs(each), 0.0)) for each in (system.rate(x), x))
    if concrete(fastest > REST * (1.0 + largest)):
        raise ArithmeticError('adjoint: the scores are not at rest: take more steps, or adjoint="unroll"')
    values = xp.linalg.svdvals(transposed)
    if concrete(xp.any(values[..., -1] <= SMALLEST * (1.0 + values[..., 0]))):
        raise ArithmeticError(
            'adjoint: the equilibrium is at or near a bifurcation, or not isolated; use adjoint="unroll"'
        )
    # What J itself errs by comes back as many times as large.
    error = float(xp.finfo(x.dtype).eps) * values[..., 0] / values[..., -1]  # (b, h, c)
    report("adjoint", error, bound_of(x), 'float64, or adjoint="unroll"', stacklevel=7)
    return xp.permute_dims(xp.linalg.solve(transposed, right)[..., 0], (0, 1, 3, 2))


def jacobian_of(system: System, slopes: Array, own: Array) -> Array:
    """Return dv_i / dx_j of each channel as (b, h, c, i, j), for g' (b, h, i, j, c) and m f' (b, h, j, c)."""
    xp, visible, kappa = namespace(own), system.visible, system.kappa
    slopes = system.links[..., None] * slopes
    if visible is not None:
        slopes = slopes * visible[:, :, None, :, :] * visible[:, :, :, None, :]
    kappa = kappa if isinstance(kappa, float) or len(kappa.shape) == 0 else kappa[..., None]
    edges = xp.permute_dims(kappa * slopes, (0, 1, 4, 2, 3))
    diagonal = xp.permute_dims(own, (0, 1, 3, 2))[..., None] - xp.sum(edges, axis=-1, keepdims=True)
    return edges + xp.where(own_pairs(edges.shape[-1], edges), diagonal, 0.0)


def _finite_systems(matrix: Array, right: Array) -> tuple[Array, Array]:
    """Return systems (..., i, j) and their right sides (..., i, k), where one is not finite 1 and NaN.

    Some libraries raise for such matrices.
    """
    xp = namespace(right)
    lost = ~xp.all(xp.isfinite(matrix), axis=(-2, -1), keepdims=True)
    return xp.where(lost, identity(matrix.shape[-1], matrix), matrix), xp.where(lost, math.nan, right)


PATIENCE = 3
"""Steps in a row over which the energy has to stay."""


def still_flowing(
    integrator: Integrator,
    system: System,
    balance: Array | float,
    x: Array,
    energies: list[Array],
    before: Array | None,
) -> Array:
    """Tell which channels take another step, as 1 or 0 (b, h, 1, c); put their energy at the end of `energies`.

    `before` says the same of the step before; a channel that has stopped never starts again. One with NaN flows on.
    """
    xp, plateau, level = namespace(x), integrator.stop_plateau, integrator.stop_level
    flows = xp.ones_like(x[:, :, :1, :], dtype=xp.bool)
    if integrator.stop_force is not None and x.shape[2]:
        flows = flows & ~(xp.max(xp.abs(system.rate(x)), axis=2, keepdims=True) <= integrator.stop_force)
    if plateau is not None or level is not None:
        energies.append(system.energy(balance, x))
        if level is not None:
            flows = flows & ~(energies[-1] <= level)
        if plateau is not None and len(energies) > PATIENCE:
            flows = flows & ~_rests(energies[-PATIENCE - 1 :], plateau)
    if before is not None:
        flows = flows & (before > 0.0)
    return xp.astype(flows, x.dtype)


def _rests(energies: Sequence[Array], plateau: float) -> Array:
    xp = namespace(energies[0])
    rests = xp.ones_like(energies[0], dtype=xp.bool)
    for earlier, later in zip(energies[:-1], energies[1:], strict=True):
        rests = rests & (xp.abs(later - earlier) <= plateau * (1.0 + xp.abs(later)))
    return rests
