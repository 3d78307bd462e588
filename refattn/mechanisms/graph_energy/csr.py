"""Sparse graphs: what they are, and whether one fits a call."""

from __future__ import annotations

from dataclasses import dataclass

from refattn.args import check, check_arrays
from refattn.xp import Array, arange, backend, concrete, dtype_name, is_array, namespace


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
