"""The energy of scores by channel, and its gradient.

::

    E_c = sum_i pi_i (m_ic F(x_ic; b_ic) + kappa/2 sum_j w_ij m_ic m_jc G(x_jc - x_ic))

    dx_ic = -pi_i v_ic dE_c         v the rate, for pi_i w_ij is symmetric
    db_ic = pi_i m_ic (dF/db) dE_c
    dw_ij = kappa/2 sum_c pi_i m_ic m_jc G(x_jc - x_ic) dE_c
    dpi_i = sum_c of what stands behind pi_i in E_c, times dE_c

and those of mu, kappa and of the coefficients of a polynomial alike. x is where the flow ended.
"""

from __future__ import annotations

from dataclasses import dataclass

from refattn.mechanisms.graph_energy.couplings import Coupling
from refattn.mechanisms.graph_energy.law import Law
from refattn.mechanisms.graph_energy.tableaus import rate_at, seen, summed
from refattn.xp import Array, namespace, sum_wide


@dataclass(frozen=True)
class Gradients:
    """Of an energy: of x and b (b, h, j, c), w (b, h, j, j), pi (b, h, j, 1) and the numbers."""

    x: Array
    start: Array
    graph: Array
    balance: Array
    numbers: dict[str, Array]


def energy_of(law: Law, graph: Array, start: Array, visible: Array | None, balance: Array | float, x: Array) -> Array:
    """Return the energy of each channel as (b, h, 1, c)."""
    xp = namespace(x)
    own = seen(visible, law.intrinsic.potential(x, start, law.mu))
    edges = graph[..., None] * _pairs(law.coupling, visible, x)
    return xp.sum(balance * (own + 0.5 * law.kappa * xp.sum(edges, axis=3)), axis=2, keepdims=True)


def energy_backward(
    law: Law, graph: Array, start: Array, visible: Array | None, balance: Array | float, x: Array, d_energy: Array
) -> Gradients:
    """Return the gradients for a given gradient (b, h) of the sum of the energies of all channels."""
    xp, f = namespace(x), law.intrinsic
    each = d_energy[:, :, None, None]
    weight = balance * each  # (b, h, j, 1) or (b, h, 1, 1)
    potentials = _pairs(law.coupling, visible, x)
    pulls = xp.sum(graph[..., None] * potentials, axis=3)
    own = seen(visible, f.potential(x, start, law.mu))
    numbers = {
        "mu": summed(weight * seen(visible, f.potential_mu(x, start, law.mu)), law.mu),
        "kappa": summed(0.5 * weight * pulls, law.kappa),
    }
    if law.coupling.powers:
        parts = (graph[..., None] * _pairs(power, visible, x) for power in law.coupling.powers)
        numbers["coefficients"] = xp.stack(
            [sum_wide(0.5 * law.kappa * weight * xp.sum(part, axis=3)) for part in parts]
        )
    return Gradients(
        -weight * rate_at(law, graph, start, visible, x),
        weight * seen(visible, f.potential_b(x, start, law.mu)),
        0.5 * law.kappa * weight * xp.sum(potentials, axis=4),
        each * xp.sum(own + 0.5 * law.kappa * pulls, axis=3, keepdims=True),
        numbers,
    )


def _pairs(coupling: Coupling, visible: Array | None, x: Array) -> Array:
    """Return m_ic m_jc G(x_jc - x_ic) as (b, h, i, j, c)."""
    potentials = coupling.potential(x[:, :, None, :, :] - x[:, :, :, None, :])
    return potentials if visible is None else potentials * visible[:, :, None, :, :] * visible[:, :, :, None, :]
