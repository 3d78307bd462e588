"""Where the errors of a result are: the used share of the allowed error, row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn.golden.storage import round_to
from refattn.verify.adapter import Result
from refattn.verify.budget import Truth, finite, ratio, rounded, rows
from refattn.verify.compare import row_limit

MOST = 1e9
"""Larger shares tell nothing more."""


def row_shares(truth: Truth, result: Result) -> dict[str, NDArray[Any]]:
    """Return for each tensor of the right shape the used share of what its rows are allowed: (batch and heads, rows).

    It is infinite where one of two numbers is finite and the other is not, otherwise `MOST` at most: where no error at
    all is allowed.
    """
    return {
        name: _shares(name, got, truth)
        for name, got in result.tensors.items()
        if name in truth.values and got.shape == truth.values[name].shape and got.size and got.ndim > 1
    }


@np.errstate(over="ignore", invalid="ignore")  # squares of a very wrong result
def _shares(name: str, got: NDArray[Any], truth: Truth) -> NDArray[Any]:
    target = rounded(truth, name)
    values = round_to(got.astype(np.float64), truth.stored[name])
    error, granted = rows(name, finite(values) - finite(target)), rows(name, truth.variance[name])
    shares = ratio(np.sqrt(np.mean(error**2, axis=-1)), np.sqrt(np.mean(granted, axis=-1)))
    shares = shares / row_limit(name, target)
    odd = np.any(rows(name, np.isfinite(values) != np.isfinite(target)), axis=-1)
    per_row = name == "out" or name.startswith("d_")
    lengths = target.shape[:-1] if per_row else target.shape
    return np.asarray(np.where(odd, np.inf, np.minimum(shares, MOST)), np.float32).reshape(-1, lengths[-1])
