"""The gradient at an equilibrium, by the implicit function theorem: no step is remembered but the last state.

Where v(x*; theta) = 0 and the Jacobian J of v with respect to x has an inverse, x* is a function of theta, and::

    J^T u = -dx*
    dtheta = (dv / dtheta)^T u

Each channel of a state is a system of its own. dv/dtheta is that of one stage of the flow (equations GE.6 and GE.7),
with u in place of dv; where scores started, and the step, then have no effect. It is what the adjoint of the steps
tends to as their number grows, and the two differ by what is left of the flow.
"""

from __future__ import annotations

from typing import Any

from refattn import equations
from refattn.mechanisms.graph_energy import dense
from refattn.mechanisms.graph_energy.solvers import steps
from refattn.mechanisms.graph_energy.solvers.newton import between, jacobian_of, told
from refattn.mechanisms.graph_energy.solvers.steps import Flow
from refattn.mechanisms.graph_energy.system import System
from refattn.ops.sums import summed_for
from refattn.xp import Array, concrete, namespace, sum_wide, zeros

REST = 1e-6
"""Largest rate, in units of the largest score or 1, at which scores count as being at rest."""

SMALLEST = 1e-6
"""Smallest singular value of J, relative to the largest or 1, for which a gradient, about its inverse, is told."""


def forward(*arrays: Array, **given: Any) -> tuple[Array, dense.Saved]:
    """Return the output, and what `backward` reads: those of the steps."""
    found: tuple[Array, dense.Saved] = equations.active(steps).forward(*arrays, **given)
    return found


def backward(saved: dense.Saved, d_out: Array, **read: Array | None) -> dict[str, Array]:
    """Return all gradients: those of the steps, with the adjoint of the equilibrium."""
    found: dict[str, Array] = equations.active(steps).backward(saved, d_out, adjoint=flow_backward, **read)
    return found


def flow_backward(saved: Flow, d_x: Array, tau_terms: Array) -> tuple[Array, Array, dict[str, Array]]:
    """Return the gradients of the start (as the anchor b) and of the links, and those of the numbers.

    `tau_terms` are those of the readout, which alone has a threshold.

    Raises
    ------
    ArithmeticError
        Where the scores are not at rest, or J has no inverse that could be told from rounding.
    """
    if 0 in d_x.shape:
        return steps.flow_backward(saved, d_x, tau_terms)
    xp, system, options = namespace(d_x), saved.system, saved.graph.options
    x, f, start, mu, implementation = saved.states[-1], system.intrinsic, system.start, system.mu, system.implementation
    coupled, right = system.coupled(x), -xp.permute_dims(d_x, (0, 1, 3, 2))[..., None]
    transposed, right = told(xp.matrix_transpose(_jacobian(system, x)), right)
    rates = xp.abs(system.rate(x, coupled=coupled))
    # What is NaN, or comes of it, passes these checks.
    fastest, largest = (xp.max(xp.where(xp.isfinite(each), each, 0.0)) for each in (rates, xp.abs(x)))
    if concrete(fastest > REST * (1.0 + largest)):
        raise ArithmeticError('adjoint: the scores are not at rest: take more steps, or adjoint="unroll"')
    values = xp.linalg.svdvals(transposed)
    if concrete(xp.any(values[..., -1] <= SMALLEST * (1.0 + values[..., 0]))):
        raise ArithmeticError(
            'adjoint: the equilibrium is at or near a bifurcation, or not isolated; use adjoint="unroll"'
        )
    u = xp.permute_dims(xp.linalg.solve(transposed, right)[..., 0], (0, 1, 3, 2))
    inside = system.seen(u)
    _, edges = implementation.couple_backward(system.coupling, system.links, system.visible, system.kappa * u, x)
    d_links = implementation.links_gradient(implementation.gathered(None, edges), system.links)
    # A node that does not exist stays where it is.
    d_start = inside * f.d_b(x, start, mu) + (0.0 if system.visible is None else (1.0 - system.visible) * d_x)
    numbers = {
        "mu": summed_for(inside * f.d_mu(x, start, mu), mu),
        "kappa": summed_for(u * coupled, system.kappa),
        "step": summed_for(zeros(x.shape, x), options.step),
    }
    if options.tau is not None:
        numbers["tau"] = summed_for(tau_terms, saved.tau)
    if system.coupling.powers:
        pulls = (
            implementation.couple_forward(power, system.links, system.visible, x) for power in system.coupling.powers
        )
        numbers["coefficients"] = xp.stack([sum_wide(system.kappa * u * pull) for pull in pulls])
    return d_start, d_links, numbers


def _jacobian(system: System, x: Array) -> Array:
    """Return dv_i / dx_j of each channel as (b, h, c, i, j); -1 on the diagonal of a node that does not exist."""
    own = system.seen(system.intrinsic.d_x(x, system.start, system.mu))
    own = own if system.visible is None else own + system.visible - 1.0
    return jacobian_of(system, system.coupling.slope(between(x)), own)
