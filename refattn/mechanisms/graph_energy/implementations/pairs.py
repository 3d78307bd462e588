"""Every difference of two scores, at once or a few rows at a time: sums over pairs, and how other ways look.

They read the links w (b, h, i, j), where a node exists in some channels only, visible (b, h, j, c), 1 or 0, and a state
x (b, h, j, c). In tiles memory is linear in the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from refattn.mechanisms.graph_energy.forces import Coupling
from refattn.xp import Array, namespace


@dataclass(frozen=True)
class OverPairs:
    """How an implementation sums over pairs: c of scores x, its gradients, and c with what these may read again."""

    couple_forward: Callable[..., Array]
    couple_backward: Callable[..., tuple[Array, Any]]
    couple_keeping: Callable[..., tuple[Array, Any]] | None = None


def couple_forward(coupling: Coupling, links: Array, visible: Array | None, x: Array) -> Array:
    """Return c_ic = m_ic sum_j w_ij m_jc g(x_jc - x_ic) as (b, h, i, c)."""
    return rows_forward(coupling, links, visible, slice(None), x)


def couple_backward(
    coupling: Coupling, links: Array, visible: Array | None, d_coupled: Array, x: Array
) -> tuple[Array, Array]:
    """Return the gradients of x and of the links, for a given gradient of c."""
    toward, own, d_links = rows_backward(coupling, links, visible, slice(None), d_coupled, x)
    return toward - own, d_links


def rows_forward(coupling: Coupling, links: Array, visible: Array | None, rows: slice, x: Array) -> Array:
    """Return c_ic for some i; `links` has these rows alone."""
    pulls = links[..., None] * coupling.force(between(x, rows))
    return namespace(links).sum(pulls if visible is None else pulls * _both(visible, rows), axis=3)


def rows_backward(
    coupling: Coupling, links: Array, visible: Array | None, rows: slice, d_coupled: Array, x: Array
) -> tuple[Array, Array, Array]:
    """Return what the gradient of x_j gains (b, h, j, c), what that of x_i loses (b, h, i, c), and that of the links.

    dx_jc gains g'(x_jc - x_ic) w_ij dc_ic from every i, and dx_ic loses the same; dw_ij = sum_c dc_ic g(x_jc - x_ic).
    """
    xp, differences = namespace(links), between(x, rows)
    received = d_coupled[:, :, :, None, :]
    if visible is not None:
        received = received * _both(visible, rows)
    # forward: coupled = sum_j links * force(x_j - x_i)
    d_between = received * links[..., None] * coupling.slope(differences)
    d_links = xp.sum(received * coupling.force(differences), axis=4)
    return xp.sum(d_between, axis=2), xp.sum(d_between, axis=3), d_links


def between(x: Array, rows: slice = slice(None)) -> Array:  # noqa: B008 (a slice does not change)
    """Return x_j - x_i as (b, h, i, j, c)."""
    return x[:, :, None, :, :] - x[:, :, rows, None, :]


def _both(visible: Array, rows: slice) -> Array:
    return visible[:, :, None, :, :] * visible[:, :, rows, None, :]


ELEMENTS = 2**16
"""Differences of one head that a tile has at most, unless a single row has more."""


def tiled_forward(coupling: Coupling, links: Array, visible: Array | None, x: Array) -> Array:
    """Return c_ic = m_ic sum_j w_ij m_jc g(x_jc - x_ic) as (b, h, i, c)."""
    parts = [rows_forward(coupling, links[:, :, rows, :], visible, rows, x) for rows in _tiles(x)]
    return namespace(x).concat(parts, axis=2)


def tiled_backward(
    coupling: Coupling, links: Array, visible: Array | None, d_coupled: Array, x: Array
) -> tuple[Array, Array]:
    """Return the gradients of x and of the links, for a given gradient of c."""
    xp = namespace(x)
    gained, own, edges = None, [], []
    for rows in _tiles(x):
        toward, lost, d_links = rows_backward(
            coupling, links[:, :, rows, :], visible, rows, d_coupled[:, :, rows, :], x
        )
        gained = toward if gained is None else gained + toward
        own.append(lost)
        edges.append(d_links)
    return gained - xp.concat(own, axis=2), xp.concat(edges, axis=2)


def _tiles(x: Array) -> Iterator[slice]:
    n, channels = x.shape[2:]
    rows = max(1, ELEMENTS // max(n * channels, 1))
    return (slice(first, min(first + rows, n)) for first in range(0, max(n, 1), rows))


DENSE = OverPairs(couple_forward, couple_backward)
TILED = OverPairs(tiled_forward, tiled_backward)
