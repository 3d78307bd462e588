"""Matrix products of NumPy on the workers: rows in pieces, each by BLAS on one thread.

The pieces depend on the shapes alone, so that any number of workers gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn.backends import pool

SMALL = 2**18
"""Multiplications below which a product stays with the caller: OpenBLAS takes one thread for those, too."""

WORTH = 2**24
"""Multiplications from which a product is cut: a fraction of a millisecond, of which handing it out takes some."""

Piece = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]
"""Two arrays, and where their product is written."""

ROWS = 512
"""Rows of a piece. With fewer BLAS gets slower, but by less than a second worker gains: there are two pieces at least.
"""


def together(pairs: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> list[NDArray[Any]]:
    """Return a @ b of each pair; the pieces of all of them are handed out at once, which costs as much as one."""
    if pool.inside():
        return [_at_once(a, b) for a, b in pairs]
    results: list[NDArray[Any]] = []
    pieces: list[Piece] = []
    for a, b in pairs:
        small = math.prod(a.shape) * b.shape[-1] < SMALL
        results.append(a @ b if small else _cut(a, b, pieces))
    if pieces:
        pool.run(lambda piece: np.matmul(piece[0], piece[1], out=piece[2]), pieces)
    return results


def _at_once(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """Return a @ b, one product where a's leading axes can be rows: NumPy would take one for each of their elements.

    Small ones are left alone: there the last bits of a row depend on how many rows there are, and nothing is gained.
    """
    large = math.prod(a.shape) * b.shape[-1] >= SMALL
    if large and a.ndim > 2 and b.ndim == 2 and a.flags.c_contiguous:
        rows = a.reshape((math.prod(a.shape[:-1]), a.shape[-1]))
        return (rows @ b).reshape((*a.shape[:-1], b.shape[-1]))
    return a @ b


def _cut(a: NDArray[Any], b: NDArray[Any], pieces: list[Piece]) -> NDArray[Any]:
    """Return an array for a @ b, and add the pieces that fill it."""
    if b.ndim == 2 and a.flags.c_contiguous:
        first, second = a.reshape((1, -1, a.shape[-1])), b[None, ...]
    elif a.shape[:-2] == b.shape[:-2]:
        first, second = a.reshape((-1, *a.shape[-2:])), b.reshape((-1, *b.shape[-2:]))
    else:
        shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
        whole = np.empty(shape, dtype=np.result_type(a, b))
        pieces.append((a, b, whole))
        return whole
    (count, rows, inner), columns = first.shape, second.shape[-1]
    out = np.empty((count, rows, columns), dtype=np.result_type(a, b))
    each = rows * inner * columns
    deep, high = 1, rows
    if each >= WORTH:
        high = -(-rows // max(2, rows // ROWS))
    else:
        deep = max(1, WORTH // (2 * each))
    for p in (slice(n, n + deep) for n in range(0, count, deep)):
        for at in ((p, slice(n, n + high)) for n in range(0, rows, high)):
            pieces.append((first[at], second[p], out[at]))
    return out.reshape((*a.shape[:-1], columns))
