"""Every difference of two scores at once, as in the definition: the sums over pairs that other ways of stepping take.

They read the links w (b, h, i, j), where a node exists in some channels only, visible (b, h, j, c), 1 or 0, and a state
x (b, h, j, c).
"""

from __future__ import annotations

from refattn.mechanisms.graph_energy.forces import Coupling
from refattn.xp import Array, namespace


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
