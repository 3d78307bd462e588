"""The gradient at an equilibrium, by the implicit function theorem: no step is remembered but the last state.

Where v(x*; theta) = 0 and the Jacobian J of v with respect to x has an inverse, x* is a function of theta, and::

    J^T u = -dx*
    dtheta = (dv / dtheta)^T u

Each channel of a state is a system of its own. dv/dtheta is that of one stage of the flow (equations GE.9 and GE.10),
with u in place of dv; where scores started, and the step, then have no effect. It is what the adjoint of the steps
tends to as their number grows, and the two differ by what is left of the flow.
"""

from __future__ import annotations

from refattn.mechanisms.graph_energy.flow import Saved
from refattn.mechanisms.graph_energy.implicit import between, jacobian
from refattn.mechanisms.graph_energy.tableaus import seen, summed
from refattn.xp import Array, concrete, namespace, sum_wide, zeros

REST = 1e-6
"""Largest rate, in units of the largest score or 1, at which scores count as being at rest."""

SMALLEST = 1e-6
"""Smallest singular value of J, relative to the largest or 1, for which a gradient, about its inverse, is told."""


def backward(saved: Saved, d_x: Array, tau_terms: Array) -> tuple[Array, Array, dict[str, Array]]:
    """Return the gradients of the start (as the anchor b) and of the graph, and those of the numbers.

    `tau_terms` are those of the readout, which alone has a threshold.

    Raises
    ------
    ArithmeticError
        Where the scores are not at rest, or J has no inverse that could be told from rounding.
    """
    xp, law, visible = namespace(d_x), saved.law, saved.visible
    x, f = saved.states[-1], law.intrinsic
    coupled = law.form.couple_forward(law.coupling, saved.graph, visible, x)
    rate = seen(visible, f.force(x, saved.start, law.mu)) + law.kappa * coupled
    if concrete(xp.max(xp.abs(rate)) > REST * (1.0 + xp.max(xp.abs(x)))):
        raise ArithmeticError('adjoint: the scores are not at rest: take more steps, or adjoint="unroll"')
    transposed = xp.matrix_transpose(_jacobian(saved, x))
    values = xp.linalg.svdvals(transposed)
    if concrete(xp.any(values[..., -1] <= SMALLEST * (1.0 + values[..., 0]))):
        raise ArithmeticError(
            'adjoint: the equilibrium is at or near a bifurcation, or not isolated; use adjoint="unroll"'
        )
    right = -xp.permute_dims(d_x, (0, 1, 3, 2))[..., None]
    u = xp.permute_dims(xp.linalg.solve(transposed, right)[..., 0], (0, 1, 3, 2))
    inside = seen(visible, u)
    _, edges = law.form.couple_backward(law.coupling, saved.graph, visible, x, None, law.kappa * u)
    d_graph = law.form.graph_gradient(law.form.gathered(None, edges), saved.graph)
    # A node that does not exist stays where it is.
    d_start = inside * f.d_b(x, saved.start, law.mu) + (0.0 if visible is None else (1.0 - visible) * d_x)
    numbers = {
        "mu": summed(inside * f.d_mu(x, saved.start, law.mu), law.mu),
        "kappa": summed(u * coupled, law.kappa),
        "step": summed(zeros(x.shape, x), law.step),
    }
    if law.threshold is not None and law.threshold.given:
        numbers["tau"] = summed(tau_terms, law.threshold.tau)
    if law.coupling.powers:
        pulls = (law.form.couple_forward(power, saved.graph, visible, x) for power in law.coupling.powers)
        numbers["coefficients"] = xp.stack([sum_wide(law.kappa * u * pull) for pull in pulls])
    return d_start, d_graph, numbers


def _jacobian(saved: Saved, x: Array) -> Array:
    """Return dv_i / dx_j of each channel as (b, h, c, i, j); -1 on the diagonal of a node that does not exist."""
    law, visible = saved.law, saved.visible
    own = seen(visible, law.intrinsic.d_x(x, saved.start, law.mu))
    own = own if visible is None else own + visible - 1.0
    return jacobian(law, saved.graph, visible, law.coupling.slope(between(x)), own)
