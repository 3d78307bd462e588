"""Graphs with few edges, and sums over them: time and memory grow with the number of edges, not with that of pairs.

A coupling that is a finite sum of products (`refattn.mechanisms.graph_energy.implementations.separable`) is a few
products with the sparse matrix W; any other is evaluated at each edge and summed by row. What multiplies is a function
of each array library (`Backend.sparse_product`). One graph is shared by all heads of a batch. It is a constant: no
gradient goes to its weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from refattn.args import check, check_arrays, check_floating, check_whole
from refattn.mechanisms.graph_energy.forces import Coupling
from refattn.mechanisms.graph_energy.implementations.pairs import OverPairs
from refattn.mechanisms.graph_energy.implementations.separable import seen
from refattn.xp import (
    Array,
    all_finite,
    arange,
    backend,
    concrete,
    device,
    dtype_name,
    is_array,
    namespace,
    raised,
    zeros,
)


@dataclass(frozen=True)
class CSR:
    """A sparse matrix by rows: row i has the columns `indices[indptr[i]:indptr[i + 1]]`, with the values `data` there.

    The arrays are of the library, and `data` of the dtype, of the queries that it is used with; `indptr` and `indices`
    are of an integer dtype.
    """

    indptr: Array
    indices: Array
    data: Array
    shape: tuple[int, int]

    def ends(self) -> tuple[Array, Array]:
        """Return the row and the column of every edge."""
        return backend(self.indptr).sparse_rows(self.indptr, self.indices.shape[0]), self.indices

    def by_row(self, edges: Array) -> Array:
        """Return the sums (n, k) of what edges (e, k) carry, by the row."""
        count = arange(0, edges.shape[0], self.indices)
        return backend(edges).sparse_product(self.indptr, count, namespace(edges).ones_like(self.data), edges)

    def turned(self) -> CSR:
        """Return the transpose; its columns are in order."""
        xp = namespace(self.indices)
        rows, columns = self.ends()
        order = xp.argsort(columns, stable=True)
        after = arange(0, self.shape[1] + 1, self.indptr)
        indptr = xp.searchsorted(xp.take(columns, order), xp.astype(after, columns.dtype))
        return CSR(indptr, xp.take(rows, order), xp.take(self.data, order), self.shape[::-1])

    def check(self, q: Array, n: int, causal: bool) -> None:
        """Raise where this is no graph of n tokens that goes with queries q."""
        arrays = {f"graph.{name}": getattr(self, name) for name in ("indptr", "indices", "data")}
        for name, x in arrays.items():
            if not is_array(x):
                raise TypeError(f"{name}: got {type(x).__name__}, needs an array")
        check_arrays(q=q, **arrays)
        check("graph.shape", self.shape, tuple)
        edges = self.data.shape[0]
        xp = namespace(self.data)
        for name, size in (("indptr", n + 1), ("indices", edges), ("data", edges)):
            x = arrays[f"graph.{name}"]
            if name != "data" and not xp.isdtype(x.dtype, "integral"):
                raise TypeError(f"graph.{name}: got dtype {dtype_name(x)}, needs an integer one")
            if tuple(x.shape) != (size,):
                raise ValueError(f"graph.{name}: got shape {tuple(x.shape)}, needs {(size,)}")
        if self.data.dtype != q.dtype:
            raise TypeError(f"graph.data: got dtype {dtype_name(self.data)}, needs that of q, {dtype_name(q)}")
        if tuple(self.shape) != (n, n):
            raise ValueError(f"graph.shape: got {tuple(self.shape)}, needs {(n, n)}")
        indptr, indices = self.indptr, self.indices
        rises = xp.all(indptr[1:] >= indptr[:-1]) & (indptr[0] == 0) & (indptr[-1] == edges)
        if concrete(rises) is False:
            raise ValueError(f"graph.indptr: needs numbers that rise from 0 to the number of edges, {edges}")
        if edges and concrete(xp.all((indices >= 0) & (indices < n))) is False:
            raise ValueError(f"graph.indices: got one that is no token, needs numbers from 0 to {n - 1}")
        if causal and edges and concrete(xp.all(indices <= self.ends()[0])) is False:
            raise ValueError("graph.indices: got a later token than that of its row, with causal scores")


ELEMENTS = 2**18
"""Distances of points that are there at once, unless a single row has more."""


def sparse_graph(weights: Array) -> CSR:
    """Return a dense matrix (n, n) of weights as a sparse one: what is 0 is no edge."""
    xp = check_arrays(weights=weights)
    if len(weights.shape) != 2 or weights.shape[0] != weights.shape[1]:
        raise ValueError(f"weights: got shape {tuple(weights.shape)}, needs as many rows as columns")
    if not xp.isdtype(weights.dtype, ("bool", "integral", "real floating")):
        raise TypeError(f"weights: got dtype {dtype_name(weights)}, needs one of real numbers")
    if xp.isdtype(weights.dtype, "real floating") and all_finite(weights) is False:
        raise ValueError("weights: got a number that is not finite, needs finite numbers")
    rows, columns = xp.nonzero(weights)
    n = weights.shape[0]
    indptr = xp.searchsorted(rows, arange(0, n + 1, rows))
    flat = xp.reshape(weights, (-1,))
    return CSR(indptr, columns, xp.take(flat, rows * n + columns), (n, n))


def window_graph(n: int, width: int, like: Array) -> CSR:
    """Return the graph in which each of n tokens has links of 1 / (2 width) to the `width` tokens on either side."""
    n, width = check_whole("n", n, 0), check_whole("width", width, 1)
    xp = check_arrays(like=like)
    check_floating(like=like)
    far = min(width, n)
    rows, apart = arange(0, n, like)[:, None], arange(-far, far + 1, like)[None, :]
    columns = rows + apart
    there = (apart != 0) & (columns >= 0) & (columns < n)
    return _graph(xp.broadcast_to(rows, there.shape)[there], columns[there], n, 0.5 / width, like)


def nearest_graph(points: Array, count: int) -> CSR:
    """Return the graph in which two points of (n, d) have a link of 1 / count where one is near to the other.

    `count` is how many nearest ones each has; a point may be near to more, so that its links may add up to more than 1.
    Memory is linear in the number of points; distances of all pairs are computed, a few rows at a time.
    """
    xp = check_arrays(points=points)
    check_floating(points=points)
    if len(points.shape) != 2:
        raise ValueError(f"points: got shape {tuple(points.shape)}, needs 2 axes (points, width)")
    n = points.shape[0]
    if (count := check_whole("count", count, 1)) >= n:
        raise ValueError(f"count: got {count!r}, needs a whole number from 1 to {n - 1}")
    like, points = points, raised(points)
    squares, every = xp.sum(points * points, axis=-1), arange(0, n, points)
    tile, near = max(1, ELEMENTS // n), []
    for first in range(0, n, tile):
        rows = slice(first, min(first + tile, n))
        distances = squares[rows, None] + squares - 2.0 * (points[rows, :] @ xp.matrix_transpose(points))
        if all_finite(distances) is False:
            raise ValueError("points: got some without finite squared distances, needs smaller, finite numbers")
        own = every[rows, None] == every
        ranks = xp.argsort(xp.where(own, float("inf"), distances), axis=-1)
        near.append(xp.asarray(ranks[:, :count], copy=True))
    there = xp.astype(xp.reshape(xp.concat(near), (-1,)), every.dtype)
    here = xp.reshape(xp.broadcast_to(every[:, None], (n, count)), (-1,))
    rows, columns = xp.concat([here, there]), xp.concat([there, here])
    for _ in range(2):  # by column, then, the order of columns kept, by row
        order = xp.argsort(columns, stable=True)
        rows, columns = xp.take(columns, order), xp.take(rows, order)
    twice = (rows[1:] == rows[:-1]) & (columns[1:] == columns[:-1])
    once = xp.concat([xp.ones_like(twice[:1]), ~twice])
    return _graph(rows[once], columns[once], n, 1.0 / count, like)


def _graph(rows: Array, columns: Array, n: int, weight: float, like: Array) -> CSR:
    """Return the graph of n tokens with the edges from rows, in order, to columns, all of one weight."""
    xp = namespace(like)
    data = xp.full(columns.shape, weight, dtype=like.dtype, device=device(like))
    return CSR(xp.searchsorted(rows, arange(0, n + 1, rows)), columns, data, (n, n))


def couple_forward(coupling: Coupling, graph: CSR, visible: Array | None, x: Array) -> Array:
    """Return c_ic = m_ic sum_j w_ij m_jc g(x_jc - x_ic) as (b, h, i, c)."""
    if coupling.terms is not None:
        total = None
        for alpha, beta, _, _ in coupling.terms(x):
            part = alpha * product(graph, seen(visible, beta))
            total = part if total is None else total + part
        return seen(visible, total)
    rows, columns = graph.ends()
    pulls = graph.data[:, None] * coupling.force(_take(x, columns) - _take(x, rows))
    if visible is not None:
        pulls = pulls * _take(namespace(x).broadcast_to(visible, x.shape), columns)
    return seen(visible, _spread(graph.by_row(pulls), x))


def couple_backward(
    coupling: Coupling, graph: CSR, visible: Array | None, d_coupled: Array, x: Array
) -> tuple[Array, Array]:
    """Return the gradient of x, and 0 for the graph, which is a constant."""
    received, turned = seen(visible, d_coupled), graph.turned()
    none = zeros((), x)
    if coupling.terms is not None:
        d_x = None
        # forward: coupled = m sum_t alpha_t * (graph @ (m beta_t))
        for alpha, beta, d_alpha, d_beta in coupling.terms(x):
            pulled = product(turned, received * alpha)
            part = received * d_alpha * product(graph, seen(visible, beta)) + seen(visible, d_beta) * pulled
            d_x = part if d_x is None else d_x + part
        return d_x, none
    rows, columns = graph.ends()
    slopes = coupling.slope(_take(x, columns) - _take(x, rows))
    d_between = graph.data[:, None] * slopes * _take(received, rows)
    if visible is not None:
        d_between = d_between * _take(namespace(x).broadcast_to(visible, x.shape), columns)
    # forward: coupled_i = sum over its edges of w g(x_j - x_i)
    order = namespace(x).argsort(graph.indices, stable=True)
    toward = turned.by_row(namespace(x).take(d_between, order, axis=0))
    return _spread(toward - graph.by_row(d_between), x), none


def product(graph: CSR, x: Array) -> Array:
    """Return W x for x (b, h, n, c)."""
    return _spread(backend(x).sparse_product(graph.indptr, graph.indices, graph.data, _flat(x)), x)


def dense_graph(graph: CSR) -> Array:
    """Return the matrix (n, n)."""
    xp = namespace(graph.data)
    columns = arange(0, graph.shape[1], graph.data)
    one = xp.astype(columns[:, None] == columns, graph.data.dtype)
    return backend(graph.data).sparse_product(graph.indptr, graph.indices, graph.data, one)


def _take(x: Array, nodes: Array) -> Array:
    return namespace(x).take(_flat(x), nodes, axis=0)


def _flat(x: Array) -> Array:
    """Return (b, h, n, c) as (n, b*h*c)."""
    xp = namespace(x)
    return xp.reshape(xp.permute_dims(x, (2, 0, 1, 3)), (x.shape[2], x.shape[0] * x.shape[1] * x.shape[3]))


def _spread(flat: Array, like: Array) -> Array:
    """Return (n, b*h*c) as (b, h, n, c)."""
    xp, (b, h, n, c) = namespace(flat), like.shape
    return xp.permute_dims(xp.reshape(flat, (n, b, h, c)), (1, 2, 0, 3))


SPARSE = OverPairs(couple_forward, couple_backward)
