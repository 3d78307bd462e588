"""Matrix products of NumPy on the workers: rows in pieces, each by BLAS on one thread.

The pieces depend on the shapes alone, so that any number of workers gives the same bits.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn.backends import pool

SMALL = 2**18
"""Multiplications below which a product stays with the caller: OpenBLAS takes one thread for those, too."""

WORTH = 2**24
"""Multiplications from which a product is cut: a fraction of a millisecond, of which handing it out takes some."""

ROWS = 512
"""Rows of a piece. With fewer BLAS gets slower, but by less than a second worker gains: there are two pieces at least.
"""


def product(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """Return a @ b for arrays of at least two axes."""
    if math.prod(a.shape) * b.shape[-1] < SMALL or pool.inside():
        return a @ b
    if b.ndim == 2 and a.flags.c_contiguous:
        out = _in_pieces(a.reshape((1, -1, a.shape[-1])), b[None, ...])
    elif a.shape[:-2] == b.shape[:-2]:
        out = _in_pieces(a.reshape((-1, *a.shape[-2:])), b.reshape((-1, *b.shape[-2:])))
    else:
        return pool.run(lambda _: a @ b, (None,))[0]
    return out.reshape((*a.shape[:-1], b.shape[-1]))


def _in_pieces(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """Return a @ b for a (p, m, k), b (p, k, n)."""
    (count, rows, inner), columns = a.shape, b.shape[-1]
    out = np.empty((count, rows, columns), dtype=np.result_type(a, b))

    def piece(at: tuple[slice, slice]) -> None:
        np.matmul(a[at], b[at[0]], out=out[at])

    each = rows * inner * columns
    deep, high = 1, rows
    if each >= WORTH:
        high = -(-rows // max(2, rows // ROWS))
    else:
        deep = max(1, WORTH // (2 * each))
    matrices = [slice(n, n + deep) for n in range(0, count, deep)]
    pool.run(piece, [(p, slice(n, n + high)) for p in matrices for n in range(0, rows, high)])
    return out
