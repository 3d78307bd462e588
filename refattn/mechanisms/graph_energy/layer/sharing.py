"""Parameters that nodes of one class share: from a table to what each node, or each pair, has, and back.

A map phi gives each node a class; many nodes may have one. With a table of a number for each class, mu_i is
table[phi(i)], and so is start_i; with one for each pair of classes, bias_ij = table[phi(i), phi(j)]. The gradient of a
table is that of what was taken from it, added up by class.

Source: F. Preetham 2023 (Graph Dynamical Systems and Odd Analytic Coupling, Medium), for the map of nodes to
parameters.
"""

from __future__ import annotations

from refattn.args import check_arrays
from refattn.xp import Array, arange, concrete, dtype_name, namespace


def nodes_forward(table: Array, classes: Array) -> Array:
    """Return what each node has, (..., n), from a table (..., p) and the classes (n,) of nodes, from 0 to p - 1."""
    _check("classes", classes, table.shape[-1], table)
    return namespace(table).take(table, classes, axis=-1)


def nodes_backward(d_nodes: Array, classes: Array, count: int) -> Array:
    """Return the gradient of a table of `count` classes."""
    return d_nodes @ _members(classes, count, d_nodes)


def pairs_forward(table: Array, rows: Array, columns: Array) -> Array:
    """Return what each pair has, (..., i, j), from a table (..., p, r), and the classes of queries and keys."""
    _check("rows", rows, table.shape[-2], table)
    _check("columns", columns, table.shape[-1], table)
    xp = namespace(table)
    return xp.take(xp.take(table, rows, axis=-2), columns, axis=-1)


def pairs_backward(d_pairs: Array, rows: Array, columns: Array, counts: tuple[int, int]) -> Array:
    """Return the gradient of a table of `counts` classes of queries and of keys."""
    xp = namespace(d_pairs)
    by_column = d_pairs @ _members(columns, counts[1], d_pairs)
    return xp.matrix_transpose(_members(rows, counts[0], d_pairs)) @ by_column


def _members(classes: Array, count: int, like: Array) -> Array:
    """Return 1 where a node is of a class, else 0, as (n, p)."""
    return namespace(like).astype(classes[:, None] == arange(0, count, like), like.dtype)


def _check(name: str, classes: Array, count: int, table: Array) -> None:
    xp = check_arrays(table=table, **{name: classes})
    if not xp.isdtype(classes.dtype, "integral"):
        raise TypeError(f"{name}: got dtype {dtype_name(classes)}, needs an integer one")
    if len(classes.shape) != 1:
        raise ValueError(f"{name}: got shape {tuple(classes.shape)}, needs one axis")
    if concrete(xp.all((classes >= 0) & (classes < count))) is False:
        raise IndexError(f"{name}: got a class that the table does not have, needs numbers from 0 to {count - 1}")
