"""Inputs in float8: q, k and v are numbers of that type times factors, one for each key/value head or each tensor.

A kernel is given the numbers and the factors. The truth is the core in float64 on their products, which are exact
there; what quantising did to the designed numbers is not the kernel's fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn.golden.inputs import make
from refattn.golden.storage import has_gradient, largest
from refattn.mechanisms.record import Case, Mechanism
from refattn.verify.layouts import quantise

LENGTHS = {"q": "q_lengths", "k": "k_lengths", "v": "k_lengths"}
"""What says how many rows of an array exist."""

Arrays = dict[str, NDArray[Any]]


def scaled(mechanism: Mechanism, case: Case, dtype: str, *, whole: bool, seed: int = 0) -> tuple[Arrays, Arrays]:
    """Return the inputs of a case, float32 arrays with q, k and v in numbers of a float8 type, and these' factors.

    The factors are (b, g), those of q for the heads of a group; or (), of a `whole` tensor. Other inputs are float32.
    Rows that do not exist hold NaN, or the largest number, where the case says so.
    """
    inputs = make(mechanism.name, case, "float32", seed=seed)
    b, groups = inputs["k"].shape[:2]
    factors = {}
    for name in "qkv":
        x = inputs[name].astype(np.float64)
        missing = np.zeros((b, 1, x.shape[2], 1), dtype=np.bool_)
        if LENGTHS[name] in inputs:
            missing = (np.arange(x.shape[2]) >= inputs[LENGTHS[name]][:, None])[:, None, :, None]
        grouped = np.where(missing, 0.0, x).reshape(b, groups, x.shape[1] // max(groups, 1), *x.shape[2:])
        small, factors[name] = quantise(grouped, dtype, (0, 1, 2, 3, 4) if whole else (2, 3, 4))
        slack = {"": 0.0, "nan": np.nan, "huge": largest(dtype)}[case.slack]
        inputs[name] = np.where(missing, np.float32(slack), small.reshape(x.shape))
    return inputs, factors


def products(inputs: Mapping[str, NDArray[Any]], factors: Mapping[str, NDArray[Any]]) -> Arrays:
    """Return inputs in float64, those that have factors times these: exactly."""
    found = {name: x.astype(np.float64) if has_gradient(x) else x for name, x in inputs.items()}
    for name, factor in factors.items():
        wide = np.asarray(factor, np.float64)
        if wide.ndim:  # heads of a group share one
            wide = np.repeat(wide, found[name].shape[1] // max(wide.shape[1], 1), axis=1)[:, :, None, None]
        found[name] = found[name] * wide
    return found
