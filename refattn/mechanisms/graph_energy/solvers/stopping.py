"""Which channels still flow: each stops by itself, and then stays as it is."""

from __future__ import annotations

from collections.abc import Sequence

from refattn.mechanisms.graph_energy.law import Law
from refattn.mechanisms.graph_energy.tableaus import rate_at
from refattn.mechanisms.graph_energy.total_energy import energy_of
from refattn.xp import Array, namespace

PATIENCE = 3
"""Steps in a row over which the energy has to stay."""


def still_flowing(
    law: Law,
    graph: Array,
    start: Array,
    visible: Array | None,
    x: Array,
    energies: list[Array],
    before: Array | None,
) -> Array:
    """Tell which channels take another step, as 1 or 0 (b, h, 1, c); put their energy at the end of `energies`.

    `before` says the same of the step before; a channel that has stopped never starts again.
    """
    xp, stop = namespace(x), law.stop
    assert stop is not None
    flows = xp.ones_like(x[:, :, :1, :], dtype=xp.bool)
    if stop.force is not None and x.shape[2]:
        rate = rate_at(law, graph, start, visible, x)
        flows = flows & (xp.max(xp.abs(rate), axis=2, keepdims=True) > stop.force)
    if stop.balance is not None:
        energies.append(energy_of(law, graph, start, visible, stop.balance, x))
        if stop.level is not None:
            flows = flows & (energies[-1] > stop.level)
        if stop.plateau is not None and len(energies) > PATIENCE:
            flows = flows & ~_rests(energies[-PATIENCE - 1 :], stop.plateau)
    if before is not None:
        flows = flows & (before > 0.0)
    return xp.astype(flows, x.dtype)


def _rests(energies: Sequence[Array], plateau: float) -> Array:
    xp = namespace(energies[0])
    rests = xp.ones_like(energies[0], dtype=xp.bool)
    for earlier, later in zip(energies[:-1], energies[1:], strict=True):
        rests = rests & (xp.abs(later - earlier) <= plateau * (1.0 + xp.abs(later)))
    return rests
