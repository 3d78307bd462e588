"""How products are computed: the little of CuPy's own modules that refattn reads."""

from __future__ import annotations

import os
from typing import Any

import numpy as np


class _routines_linalg:  # noqa: N801 (a module of CuPy)
    COMPUTE_TYPE_TBD, COMPUTE_TYPE_DEFAULT, COMPUTE_TYPE_TF32 = 0, 1, 7
    chosen = 0

    @classmethod
    def get_compute_type(cls, dtype: Any) -> int:
        if np.dtype(dtype).char not in "fF":
            return cls.COMPUTE_TYPE_DEFAULT
        if cls.chosen == cls.COMPUTE_TYPE_TBD:
            lowered = int(os.getenv("CUPY_TF32", "0")) > 0
            cls.chosen = cls.COMPUTE_TYPE_TF32 if lowered else cls.COMPUTE_TYPE_DEFAULT
        return cls.chosen

    @classmethod
    def set_compute_type(cls, dtype: Any, compute_type: int) -> None:
        if np.dtype(dtype).char in "fF":
            cls.chosen = compute_type
