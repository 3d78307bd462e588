"""Inputs of few digits: q, k and v are numbers of a short type times factors.

A kernel is given the numbers and the factors. The truth is the core in float64 on their products, which are exact
there; what quantising did to the designed numbers is not the kernel's fault.

In float8 a factor belongs to a key/value head, to a whole tensor, or to so many tokens of a head. Two formats have
factors for blocks of numbers that are summed over in a product, of q and k along the width and of v along the tokens:
mxfp8 (OCP Microscaling Formats 1.0: E4M3, a power of two for 32 numbers) and nvfp4 (E2M1, a number of E4M3 for 16, and
one factor of the whole tensor).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn.golden.inputs import make
from refattn.golden.storage_types import SCALED, TYPES, Scaled, has_gradient, largest, round_to
from refattn.mechanisms.record import Case, Mechanism
from refattn.verify.layouts import quantise

LENGTHS = {"q": "q_lengths", "k": "k_lengths", "v": "k_lengths"}
"""What says how many rows of an array exist."""

SUMMED = {"q": 3, "k": 3, "v": 2}
"""The axis that products sum over."""

Arrays = dict[str, NDArray[Any]]


def scaled(
    mechanism: Mechanism, case: Case, dtype: str, *, per: int | None = None, seed: int = 0
) -> tuple[Arrays, dict[str, tuple[NDArray[Any], ...]], Arrays]:
    """Return the inputs of a case, float32 arrays with q, k and v in numbers of a format, these' factors by the
    arguments that they are, and the same factors as what each number is multiplied by.

    In float8 the factors are (b, g), those of q for the heads of a group; () where `per` is 0, of a whole tensor; or
    (b, h, blocks), one for each `per` tokens of a head. In a format of blocks they have the shape of the array with as
    many numbers as there are blocks along one axis; of nvfp4 there is "descale_whole", too, those of the tensors.

    Other inputs are float32. Rows that do not exist hold NaN, or the largest number, where the case says so.
    """
    inputs = make(mechanism.name, case, "float32", seed=seed)
    groups = inputs["k"].shape[1]
    kind, factors, times, whole = SCALED[dtype], {}, {}, []
    for name in "qkv":
        x = inputs[name].astype(np.float64)
        b, heads, rows, width = x.shape
        missing = _missing(inputs, name)
        x = np.where(missing, 0.0, x)
        if kind.block:
            small, factors[name], times[name], tensor = _in_blocks(x, kind, SUMMED[name])
            whole += [] if tensor is None else [np.asarray(tensor, np.float32)]
        elif per:
            small, factors[name] = quantise(_cut(x, 2, per), kind.number, (3, 4))
            small = small.reshape(b, heads, -1, width)[:, :, :rows]
            times[name] = np.repeat(factors[name], per, axis=2)[:, :, :rows, None]
        else:
            grouped = x.reshape(b, groups, heads // max(groups, 1), rows, width)
            small, factors[name] = quantise(grouped, kind.number, (2, 3, 4) if per is None else (0, 1, 2, 3, 4))
            times[name] = factors[name]
            if per is None:  # heads of a group share one
                times[name] = np.repeat(factors[name], heads // max(groups, 1), axis=1)[:, :, None, None]
        slack = {"": 0.0, "nan": np.nan, "huge": largest(kind.number)}[case.slack]
        inputs[name] = np.where(missing, np.float32(slack), small.reshape(x.shape))
    given = {"descale": tuple(factors.values()), **({"descale_whole": tuple(whole)} if whole else {})}
    return inputs, given, {name: x.astype(np.float64) for name, x in times.items()}


def factors_of_int8(inputs: Mapping[str, NDArray[Any]], roundings: Mapping[str, str]) -> Arrays:
    """Return the factors, (b, h, 1, 1), of inputs that are rounded to int8: the largest number of a head becomes 127.

    Those of blocks of a head are no larger.
    """
    found = {}
    for name in (name for name, type_ in roundings.items() if type_ == "int8" and name in inputs):
        x = np.where(_missing(inputs, name) | ~np.isfinite(inputs[name]), 0.0, np.abs(inputs[name]))
        found[name] = np.max(x, axis=(2, 3), keepdims=True, initial=0.0) / largest("int8")
    return found


def _missing(inputs: Mapping[str, NDArray[Any]], name: str) -> NDArray[np.bool_]:
    """Tell which rows of an array do not exist, (b, 1, n, 1)."""
    b, _, rows, _ = inputs[name].shape
    lengths = inputs.get(LENGTHS[name], np.full(b, rows))
    return np.asarray((np.arange(rows) >= lengths[:, None])[:, None, :, None])


def _cut(x: NDArray[Any], axis: int, size: int) -> NDArray[Any]:
    """Return x with one more axis after this one, for the numbers of a block; the last block is filled up with 0."""
    blocks = -(-x.shape[axis] // size)
    more = [(0, blocks * size - x.shape[axis] if n == axis else 0) for n in range(x.ndim)]
    return np.pad(x, more).reshape(*x.shape[:axis], blocks, size, *x.shape[axis + 1 :])


def _in_blocks(
    x: NDArray[Any], kind: Scaled, axis: int
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], float | None]:
    """Return numbers, the factors of blocks, what each number is multiplied by, and the factor of the tensor."""
    cut, most_of_type, whole = _cut(x, axis, kind.block), largest(kind.number), None
    most = np.max(np.abs(cut), axis=axis + 1, initial=0.0)
    if kind.factor == "power of two":
        # The largest power of two in the block becomes that of the type, 2^8; what lies above 448 saturates.
        factor = np.ldexp(1.0, np.maximum(np.frexp(most)[1] - 1, -119) - TYPES[kind.number].highest)
    else:
        whole = float(np.float32(np.max(most, initial=0.0) / most_of_type / largest(kind.factor))) or 1.0
        factor = round_to(most / most_of_type / whole, kind.factor)
    factor = np.where((most == 0.0) | (factor == 0.0), 1.0, factor)
    times = factor if whole is None else factor * whole
    each = np.take(np.repeat(times, kind.block, axis=axis), np.arange(x.shape[axis]), axis=axis)
    return round_to(x / each, kind.number).astype(np.float32), factor.astype(np.float32), each, whole


def products(inputs: Mapping[str, NDArray[Any]], times: Mapping[str, NDArray[Any]]) -> Arrays:
    """Return inputs in float64, each times what it is multiplied by: exactly."""
    found = {name: x.astype(np.float64) if has_gradient(x) else x for name, x in inputs.items()}
    return {name: x * times[name] if name in times else x for name, x in found.items()}
