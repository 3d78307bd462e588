"""Differences of scores a few rows at a time: the definition, in memory linear in the number of tokens."""

from __future__ import annotations

from collections.abc import Iterator

from refattn.mechanisms.graph_energy.couplings import Coupling
from refattn.mechanisms.graph_energy.pairs import gathered, graph_gradient, rows_backward, rows_forward
from refattn.xp import Array, namespace

__all__ = ["couple_backward", "couple_forward", "gathered", "graph_gradient"]

ELEMENTS = 2**16
"""Differences of one head that a tile has at most, unless a single row has more."""


def couple_forward(
    coupling: Coupling, graph: Array, visible: Array | None, x: Array, after: Array | None = None
) -> Array:
    """Return c_ic = m_ic sum_j w_ij m_jc g(y_jc - y_ic) as (b, h, i, c)."""
    parts = [rows_forward(coupling, graph[:, :, rows, :], visible, x, after, rows) for rows in _tiles(x)]
    return namespace(x).concat(parts, axis=2)


def couple_backward(
    coupling: Coupling, graph: Array, visible: Array | None, x: Array, after: Array | None, d_coupled: Array
) -> tuple[Array, Array]:
    """Return the gradients of x (and of `after` together) and of the graph, for a given gradient of c."""
    xp = namespace(x)
    gained, own, edges = None, [], []
    for rows in _tiles(x):
        toward, lost, d_graph = rows_backward(
            coupling, graph[:, :, rows, :], visible, x, after, d_coupled[:, :, rows, :], rows
        )
        gained = toward if gained is None else gained + toward
        own.append(lost)
        edges.append(d_graph)
    return gained - xp.concat(own, axis=2), xp.concat(edges, axis=2)


def _tiles(x: Array) -> Iterator[slice]:
    n, channels = x.shape[2:]
    rows = max(1, ELEMENTS // max(n * channels, 1))
    return (slice(first, min(first + rows, n)) for first in range(0, max(n, 1), rows))
