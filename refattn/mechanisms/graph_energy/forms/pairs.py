"""The definition: every difference of two scores at once.

Reads the graph w (b, h, i, j), the scores x (b, h, j, c), and where a node exists in some channels only, visible
(b, h, j, c), 1 or 0. With `after` c and its derivatives are means on the way from x to `after`, another state.
"""

from __future__ import annotations

from refattn.mechanisms.graph_energy.couplings import Coupling
from refattn.mechanisms.graph_energy.means import mean_force, mean_slope
from refattn.xp import Array, namespace


def couple_forward(
    coupling: Coupling, graph: Array, visible: Array | None, x: Array, after: Array | None = None
) -> Array:
    """Return c_ic = m_ic sum_j w_ij m_jc g(x_jc - x_ic) as (b, h, i, c)."""
    return rows_forward(coupling, graph, visible, x, after, slice(None))


def couple_backward(
    coupling: Coupling, graph: Array, visible: Array | None, x: Array, after: Array | None, d_coupled: Array
) -> tuple[Array, Array]:
    """Return the gradients of x (and of `after` together) and of the graph, for a given gradient of c."""
    toward, own, d_graph = rows_backward(coupling, graph, visible, x, after, d_coupled, slice(None))
    return toward - own, d_graph


def gathered(edges: Array | None, more: Array) -> Array:
    """Return the sum over stages of the gradients of the graph."""
    return more if edges is None else edges + more


def graph_gradient(edges: Array | None, graph: Array) -> Array:
    """Return the gradient of the graph."""
    return namespace(graph).zeros_like(graph) if edges is None else edges


def rows_forward(
    coupling: Coupling, graph: Array, visible: Array | None, x: Array, after: Array | None, rows: slice
) -> Array:
    """Return c_ic for some i; `graph` has these rows alone."""
    xp = namespace(graph, x)
    pulls = graph[..., None] * mean_force(coupling, _between(x, rows), _ends(after, rows))
    if visible is not None:
        pulls = pulls * _both(visible, rows)
    return xp.sum(pulls, axis=3)


def rows_backward(
    coupling: Coupling,
    graph: Array,
    visible: Array | None,
    x: Array,
    after: Array | None,
    d_coupled: Array,
    rows: slice,
) -> tuple[Array, Array, Array]:
    """Return what the gradient of x_j gains (b, h, j, c), what that of x_i loses (b, h, i, c), and that of the graph.

    dx_jc gains g'(x_jc - x_ic) w_ij dc_ic from every i, and dx_ic loses the same; dw_ij = sum_c dc_ic g(x_jc - x_ic).
    """
    xp = namespace(graph, x)
    between, ends = _between(x, rows), _ends(after, rows)
    received = d_coupled[:, :, :, None, :]
    if visible is not None:
        received = received * _both(visible, rows)
    # forward: coupled = sum_j graph * force(x_j - x_i)
    d_between = received * graph[..., None] * mean_slope(coupling, between, ends)
    d_graph = xp.sum(received * mean_force(coupling, between, ends), axis=4)
    return xp.sum(d_between, axis=2), xp.sum(d_between, axis=3), d_graph


def _between(x: Array, rows: slice) -> Array:
    """Return x_j - x_i as (b, h, i, j, c)."""
    return x[:, :, None, :, :] - x[:, :, rows, None, :]


def _ends(after: Array | None, rows: slice) -> Array | None:
    return None if after is None else _between(after, rows)


def _both(visible: Array, rows: slice) -> Array:
    return visible[:, :, None, :, :] * visible[:, :, rows, None, :]
