"""Which channels still flow: each stops by itself, and then stays as it is."""

from __future__ import annotations

from collections.abc import Sequence

from refattn.mechanisms.graph_energy.options.integrator import Integrator
from refattn.mechanisms.graph_energy.system import System
from refattn.xp import Array, namespace

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
