"""Steps that are defined by an equation for where they end: Newton's method for them, and the adjoint of it.

The equation is x' = x + h v, with v at the middle of x and x' ("implicit_midpoint"), or the mean of v from x to x'
("discrete_gradient", `refattn.mechanisms.graph_energy.means`). Each channel is a system of its own, with the matrix
M = 1 - h dv/dx'. Newton's method starts at x; a channel that has converged is left as it is, so that none depends on
what another one does. Where it does not converge the step is halved, for that channel and this step alone.
"""

from __future__ import annotations

from refattn.mechanisms.graph_energy.intrinsic import Number
from refattn.mechanisms.graph_energy.law import Law
from refattn.mechanisms.graph_energy.links import own_edges
from refattn.mechanisms.graph_energy.means import slope_toward, toward
from refattn.mechanisms.graph_energy.tableaus import rate_at, seen
from refattn.xp import Array, concrete, namespace, zeros

ITERATIONS = 30
HALVINGS = 10
ROUNDINGS = 256.0
"""Largest change, in units of the roundoff of a score or 1, after which a channel has converged: the next change would
be of the size of its square."""


def end_of_step(
    law: Law, graph: Array, start: Array, visible: Array | None, x: Array, factor: Number
) -> tuple[Array, Number]:
    """Return x' and the factor of the step, which is less where the step had to be halved.

    Raises
    ------
    ArithmeticError
        Where a step does not converge, however short.
    """
    xp = namespace(x)
    for _ in range(HALVINGS + 1):
        after, converged = _newton(law, graph, start, visible, x, law.step * factor)
        if concrete(xp.all(converged)) is not False:
            return after, factor
        factor = xp.where(converged, factor, 0.5 * factor)
    raise ArithmeticError(
        f"integrator: Newton's method does not converge for a step of {law.step}, halved {HALVINGS} times: take a "
        "shorter one"
    )


def pulled_back(
    law: Law, graph: Array, start: Array, visible: Array | None, x: Array, after: Array, h: Number, d: Array
) -> Array:
    """Return the u with M^T u = d."""
    matrix = _matrix(law, graph, start, visible, x, after, h)
    return _solved(namespace(x).matrix_transpose(matrix), d)


def jacobian(law: Law, graph: Array, visible: Array | None, slopes: Array, own: Array) -> Array:
    """Return dv_i / dx_j of each channel as (b, h, c, i, j), for g' (b, h, i, j, c) and m f' (b, h, j, c)."""
    xp = namespace(own)
    slopes = graph[..., None] * slopes
    if visible is not None:
        slopes = slopes * visible[:, :, None, :, :] * visible[:, :, :, None, :]
    kappa = law.kappa
    kappa = kappa if isinstance(kappa, float) or len(kappa.shape) == 0 else kappa[..., None]
    edges = xp.permute_dims(kappa * slopes, (0, 1, 4, 2, 3))
    diagonal = xp.permute_dims(own, (0, 1, 3, 2))[..., None] - xp.sum(edges, axis=-1, keepdims=True)
    return edges + xp.where(own_edges(edges), diagonal, 0.0)


def between(x: Array) -> Array:
    """Return x_j - x_i as (b, h, i, j, c)."""
    return x[:, :, None, :, :] - x[:, :, :, None, :]


def _newton(law: Law, graph: Array, start: Array, visible: Array | None, x: Array, h: Number) -> tuple[Array, Array]:
    """Return x', and whether each channel has converged as (b, h, 1, c)."""
    xp = namespace(x)
    small = ROUNDINGS * float(xp.finfo(x.dtype).eps)
    after, converged = x, xp.zeros_like(x[:, :, :1, :], dtype=xp.bool)
    if 0 in x.shape:
        return after, xp.ones_like(converged)
    for _ in range(ITERATIONS):
        residual = after - x - h * _rate(law, graph, start, visible, x, after)
        change = _solved(_matrix(law, graph, start, visible, x, after, h), residual)
        after = xp.where(converged, after, after - change)
        size = 1.0 + xp.max(xp.abs(after), axis=2, keepdims=True)
        converged = converged | (xp.max(xp.abs(change), axis=2, keepdims=True) <= small * size)
        if concrete(xp.all(converged)):
            break
    return after, converged


def _rate(law: Law, graph: Array, start: Array, visible: Array | None, x: Array, after: Array) -> Array:
    """Return v of a step from x to `after`."""
    if law.integrator == "discrete_gradient":
        return rate_at(law, graph, start, visible, x, after)
    return rate_at(law, graph, start, visible, 0.5 * (x + after))


def _matrix(law: Law, graph: Array, start: Array, visible: Array | None, x: Array, after: Array, h: Number) -> Array:
    """Return M of each channel as (b, h, c, i, j)."""
    xp, coupling, f = namespace(x), law.coupling, law.intrinsic
    if law.integrator == "discrete_gradient":
        slopes, own = slope_toward(coupling, between(x), between(after)), toward(f.d_x, x, after, start, law.mu)
    else:
        middle = 0.5 * (x + after)
        slopes, own = 0.5 * coupling.slope(between(middle)), 0.5 * f.d_x(middle, start, law.mu)
    change = jacobian(law, graph, visible, slopes, seen(visible, own))
    steps = xp.permute_dims(h + zeros(x.shape, x), (0, 1, 3, 2))[..., :1, None]
    return xp.astype(own_edges(change), change.dtype) - steps * change


def _solved(matrix: Array, right: Array) -> Array:
    """Return the solution (b, h, j, c) of systems (b, h, c, i, j)."""
    xp = namespace(right)
    if 0 in right.shape:
        return right
    order = (0, 1, 3, 2)
    return xp.permute_dims(xp.linalg.solve(matrix, xp.permute_dims(right, order)[..., None])[..., 0], order)
