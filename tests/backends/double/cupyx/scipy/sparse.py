"""Sparse matrices by rows."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
from cupy._double import tally
from scipy import sparse


class csr_matrix:  # noqa: N801 (CuPy's name)
    """(data, indices, indptr); indices are cast to int32, as CuPy does."""

    def __init__(self, arg1: Any, shape: Any = None, dtype: Any = None, copy: bool = False) -> None:
        data, indices, indptr = map(cupy._numpy, arg1)
        if data.dtype.char not in "?fdFD":
            raise ValueError("Only bool, float32, float64, complex64 and complex128 are supported")
        if shape is None or len(shape) != 2 or len(indptr) != shape[0] + 1:
            raise ValueError("index pointer size does not match")
        tally["launches"] += 2
        self.matrix = sparse.csr_matrix((data, indices.astype(np.int32), indptr.astype(np.int32)), shape=shape)

    def __matmul__(self, other: Any) -> Any:
        if other.ndim not in (1, 2):
            raise ValueError("could not interpret dimensions")
        return cupy._array(np.asarray(self.matrix @ cupy._numpy(other)))
