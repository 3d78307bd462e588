"""Newton's method for steps that are defined by an equation for where they end, and their adjoint.

The equation is x' = x + h v, with a v of x and x'. Each channel is a system of its own, with the matrix
M = 1 - h dv/dx'. Newton's method starts at x; a channel that has converged is left as it is, so that none depends on
what another one does. Where it does not converge the step is halved, for that channel and this step alone. A channel
with NaN is a solution of NaN.

A method, such as `.implicit_midpoint`, has `forces(system)` and `stage(x, after)`, whose rate is v, and a
`jacobian(system, x, after)`, which is dv/dx'.
"""

from __future__ import annotations

import math
from typing import Any

from refattn.mechanisms.graph_energy.forces import Number
from refattn.mechanisms.graph_energy.system import System
from refattn.ops.masks import own_pairs
from refattn.ops.solve import identity, solve
from refattn.xp import Array, concrete, namespace, zeros

ITERATIONS = 30
HALVINGS = 10
ROUNDINGS = 256.0
"""Largest change, in units of the roundoff of a score or 1, after which a channel has converged: the next change would
be of the size of its square."""


def end_of_step(method: Any, system: System, x: Array, step: Number, factor: Number) -> tuple[Array, Number]:
    """Return x' and the factor of the step, which is less where the step had to be halved.

    Raises
    ------
    ArithmeticError
        Where a step does not converge, however short.
    """
    xp = namespace(x)
    for _ in range(HALVINGS + 1):
        after, converged = _newton(method, system, x, step * factor)
        if concrete(xp.all(converged)) is not False:
            return after, factor
        factor = xp.where(converged, factor, 0.5 * factor)
    raise ArithmeticError(
        f"integrator: Newton's method does not converge for a step of {step}, halved {HALVINGS} times: take a "
        "shorter one"
    )


def pulled_back(method: Any, system: System, x: Array, after: Array, h: Number, d: Array) -> Array:
    """Return the u with M^T u = d."""
    return _solved(namespace(x).matrix_transpose(_matrix(method, system, x, after, h)), d)


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


def _newton(method: Any, system: System, x: Array, h: Number) -> tuple[Array, Array]:
    """Return x', and whether each channel has converged as (b, h, 1, c)."""
    xp = namespace(x)
    small = ROUNDINGS * float(xp.finfo(x.dtype).eps)
    after, converged = x, xp.zeros_like(x[:, :, :1, :], dtype=xp.bool)
    if 0 in x.shape:
        return after, xp.ones_like(converged)
    for _ in range(ITERATIONS):
        residual = after - x - h * method.forces(system).rate(*method.stage(x, after))
        if after is x:
            converged = xp.any(xp.isnan(residual), axis=2, keepdims=True)
            after = xp.where(converged, math.nan, x)
        change = _solved(_matrix(method, system, x, after, h), residual)
        after = xp.where(converged, after, after - change)
        size = 1.0 + xp.max(xp.abs(after), axis=2, keepdims=True)
        converged = converged | (xp.max(xp.abs(change), axis=2, keepdims=True) <= small * size)
        if concrete(xp.all(converged)):
            break
    return after, converged


def _matrix(method: Any, system: System, x: Array, after: Array, h: Number) -> Array:
    """Return M of each channel as (b, h, c, i, j)."""
    xp, change = namespace(x), method.jacobian(system, x, after)
    steps = xp.permute_dims(h + zeros(x.shape, x), (0, 1, 3, 2))[..., :1, None]
    return xp.astype(own_pairs(change.shape[-1], change), change.dtype) - steps * change


def _solved(matrix: Array, right: Array) -> Array:
    """Return the solution (b, h, j, c) of systems (b, h, c, i, j): NaN where a system is not finite."""
    xp = namespace(right)
    if 0 in right.shape:
        return right
    order = (0, 1, 3, 2)
    matrix, right = told(matrix, xp.permute_dims(right, order)[..., None])
    return xp.permute_dims(solve(matrix, right)[..., 0], order)


def told(matrix: Array, right: Array) -> tuple[Array, Array]:
    """Return systems (..., i, j) and their right sides (..., i, k), where one is not finite 1 and NaN.

    Some libraries raise for such matrices.
    """
    xp = namespace(right)
    lost = ~xp.all(xp.isfinite(matrix), axis=(-2, -1), keepdims=True)
    return xp.where(lost, identity(matrix.shape[-1], matrix), matrix), xp.where(lost, math.nan, right)
