"""The energy of scores, and how far they are from rest."""

from __future__ import annotations

from refattn.mechanisms.arguments import check_is
from refattn.mechanisms.graph_energy import attend, flow
from refattn.mechanisms.graph_energy.core import Saved
from refattn.mechanisms.graph_energy.tableaus import rate_at
from refattn.mechanisms.graph_energy.total_energy import energy_of
from refattn.xp import Array, namespace


def energy(saved: Saved) -> Array:
    """Return the energy of each head before the first step and after every step, (b, h, steps + 1).

    E = sum_ic pi_i m_ic F(x_ic; b_ic) + kappa/2 sum_ijc pi_i w_ij m_ic m_jc G(x_jc - x_ic), with pi = 1 where the graph
    is symmetric and for "kernel" the weights of its detailed balance, which add up to 1.

    Raises
    ------
    ValueError
        Where the graph has no detailed balance: then no energy exists.

    Notes
    -----
    An edge of a token to itself would add nothing, for G(0) = 0.
    """
    check_is("saved", saved, Saved)
    balance = weights_of(saved)
    xp = namespace(saved.scores)
    return xp.stack([_energy(saved.inner.flow, balance, x) for x in saved.inner.flow.states], axis=-1)


def residual(saved: Saved) -> Array:
    """Return the largest rate |v| of each head after the last step, (b, h): 0 at an equilibrium."""
    check_is("saved", saved, Saved)
    inner, xp = saved.inner.flow, namespace(saved.scores)
    rate = rate_at(inner.law, inner.graph, inner.start, inner.visible, inner.states[-1])
    return xp.max(xp.abs(rate), axis=(-2, -1))


def steps_taken(saved: Saved) -> Array:
    """Return how many steps each channel has taken, (b, h, c): those of "rk45" that were refused do not count."""
    check_is("saved", saved, Saved)
    xp, inner = namespace(saved.scores), saved.inner.flow
    count = xp.zeros_like(inner.start[:, :, :1, :])
    for step in inner.steps:
        count = count + xp.astype(step.factor + 0.0 * count > 0.0, count.dtype)
    return xp.astype(count[:, :, 0, :], xp.int64)


def weights_of(saved: Saved) -> Array | float:
    """Return pi as (b, h, n, 1), or 1 where the graph is symmetric; raise ValueError where it has no such weights."""
    return attend.weights_of(saved.inner.graph)


def _energy(inner: flow.Saved, balance: Array | float, x: Array) -> Array:
    each = energy_of(inner.law, inner.graph, inner.start, inner.visible, balance, x)
    return namespace(x).sum(each, axis=(-2, -1))
