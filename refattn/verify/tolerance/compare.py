"""The ladder that a result climbs: shape, dtype, pattern of non-finite numbers, exact numbers, errors in units of the
budget.

Four statistics are judged, each against what honest rounding may reach, so that no error hides in a mean and none in a
crowd: the worst element, the worst row (last axis), the whole tensor, and the bias (errors that share a sign with the
truth, or oppose it, throughout, as truncation or a wrong factor makes them).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn.golden.storage_types import TYPES, round_to, spacing
from refattn.verify.outcome import Floats, Result, Truth, Verdict
from refattn.verify.tolerance.budget import SMALLEST, bias_of, finite, has_rows, ratio, rounded, rows

ELEMENT = 8.0
"""Allowed error of one element, in units of its granted root mean square (or its row's, where that is larger)."""

ROW = 4.0
"""Allowed root mean square error of one row, in units of the granted one; a row of one number counts as an element."""

ALONE = 0.99
"""A row counts as one number if one of its numbers is granted this part of the row's variance, or more."""

SINGLE = 6.0
"""Allowed error of a result of one number, in units of what it is granted, which is known from as many numbers as there
were draws: honest errors follow Student's distribution, and one in 55,000 is larger."""

WHOLE = 1.25
"""Allowed root mean square over the rows of a tensor, in units of the granted one, where there are many rows."""

BIAS = 0.25
"""Allowed mean of signed errors over a tensor of many rows; at least 5/sqrt(n) with n rows, and at least 5 times what
constants that are rounded once do."""

FAR = 100
"""Numbers that agree differ in early digits where they are as many units of rounding of their type apart."""


def is_far(verdict: Verdict, truth: Truth) -> bool:
    """Tell whether the worst element of a result is off by early digits, though it may agree."""
    if verdict.error is None or not verdict.largest:
        return False
    return verdict.error > FAR * TYPES[truth.stored[verdict.tensor]].unit * verdict.largest


def compare(tensor: str, got: NDArray[Any], dtype: str, truth: Truth, *, extremes: bool = False) -> Verdict:
    """Judge one tensor; `dtype` is the name of the dtype that the kernel returned it in.

    With `extremes` its rows were chosen for their errors: elements and rows are judged alone.
    """
    found = wrong_at_once(tensor, got, dtype, truth)
    if isinstance(found, Verdict):
        return found
    values, target = found
    stored = truth.stored[tensor]
    if values.size == 0:
        return Verdict(tensor, 0.0, "element", (), "", "")
    if tensor in truth.exact and np.any(values != target):
        index = tuple(int(n) for n in np.argwhere(values != target)[0])
        return Verdict(tensor, math.inf, "exact", index, _number(values[index], stored), _number(target[index], stored))
    finite = np.isfinite(target)
    error = np.where(finite, values, 0.0) - np.where(finite, target, 0.0)
    # A number below the smallest subnormal has no budget of its own: the smallest step of the type is granted.
    floor = max(2.0 ** (TYPES[stored].lowest - TYPES[stored].bits + 1), SMALLEST) ** 2
    variance = np.maximum(truth.variance[tensor], floor)
    exact = np.where(finite, truth.values[tensor], 0.0)
    error = beside_ties(error, np.abs(np.where(finite, values, 0.0) - exact), variance, spacing(exact, stored))
    return _judge(tensor, error, variance, truth, values, target, extremes)


@np.errstate(over="ignore", invalid="ignore")  # where a wrong result is granted what is not finite the error stays
def beside_ties(error: Floats, distance: Floats, variance: Floats, step: Floats) -> Floats:
    """Return the errors, with those that a little noise explains as that noise.

    The variance that is granted is a mean over all places between two numbers of the type. Beside a tie, the middle of
    two, noise that is much smaller than their step carries a value to the other one, and that is rare and large: where
    sigma is below a fiftieth of the step it exceeds what an element may be off by. What is that large counts as the
    least noise that gives what was got, in units of sigma, where that is less.

    Parameters
    ----------
    error, distance
        Of what was got from the rounded truth, and from the exact one, of which the latter has no sign.
    variance
        What is granted, sigma^2 + 0.8 sigma step.
    step
        Between neighbours of the type.
    """
    sigma = 2.0 * variance / (0.8 * step + np.sqrt((0.8 * step) ** 2 + 4.0 * variance))
    units = ratio(np.abs(error), np.sqrt(variance))
    least = ratio(np.maximum(distance - step / 2.0, 0.0), sigma)
    return np.asarray(np.where((units > ELEMENT) & (least < units), np.sign(error) * least * np.sqrt(variance), error))


def wrong_at_once(tensor: str, got: NDArray[Any], dtype: str, truth: Truth) -> Verdict | tuple[Floats, Floats]:
    """Return the verdict on a wrong shape, dtype, or pattern of numbers that are not finite; otherwise what the type
    holds of the tensor and of the truth.
    """
    expected = truth.values[tensor]
    if tuple(got.shape) != expected.shape:
        return Verdict(tensor, math.inf, "shape", (), str(tuple(got.shape)), str(expected.shape))
    stored = truth.stored[tensor]
    # NumPy has no bfloat16: its kernels answer in float32.
    if dtype != stored and not (stored == "bfloat16" and dtype == "float32"):
        return Verdict(tensor, math.inf, "dtype", (), dtype, stored)
    values = round_to(got.astype(np.float64), stored)
    target = rounded(truth, tensor)
    pattern = _pattern(values) != _pattern(target)
    if pattern.any():
        index = tuple(int(n) for n in np.argwhere(pattern)[0])
        return Verdict(
            tensor, math.inf, "non-finite", index, _number(values[index], stored), _number(target[index], stored)
        )
    return values, target


@np.errstate(over="ignore", invalid="ignore")  # squares of a very wrong result
def _judge(tensor: str, error: Any, variance: Any, truth: Truth, values: Any, target: Any, extremes: bool) -> Verdict:
    errors, granted = rows(tensor, error), rows(tensor, variance)
    row_granted = np.mean(granted, axis=-1)
    # An error is allowed what its row is granted on average: single elements may have a small budget by chance.
    elements = ratio(np.abs(errors), np.sqrt(np.maximum(granted, row_granted[:, None])))
    row_errors = ratio(np.sqrt(np.mean(errors**2, axis=-1)), np.sqrt(row_granted))
    count = len(row_errors)
    # The mean of n squares of independent unit normal errors stays below 1 + 8 / sqrt(n).
    whole = math.sqrt(float(np.mean(row_errors**2)))
    bias = abs(bias_of(tensor, error, variance, target))
    shares = {
        "element": float(np.max(elements)) / ELEMENT,
        "row": float(np.max(row_errors / row_limits(tensor, error, granted))),
        "whole": whole / min(ROW, WHOLE * math.sqrt(1.0 + 8.0 / math.sqrt(count))),
        "bias": bias / max(BIAS, 5.0 / math.sqrt(count), 5.0 * truth.bias[tensor]),
    }
    if extremes:
        del shares["whole"], shares["bias"]
    if errors.size == 1:
        shares = {"element": float(elements[0, 0]) / row_limit(tensor, error)}
    shares = {name: math.inf if math.isnan(share) else share for name, share in shares.items()}
    statistic = max(shares, key=lambda name: shares[name])
    index = tuple(int(n) for n in np.unravel_index(int(np.argmax(elements)), error.shape))
    stored = truth.stored[tensor]
    got, expected = (_number(x[index], stored) for x in (values, target))
    off, largest = (float(np.max(np.abs(x))) for x in (values[index] - target[index], finite(target)))
    return Verdict(tensor, shares[statistic], statistic, index, got, expected, off, largest)


def row_limit(tensor: str, x: NDArray[Any]) -> float:
    """Return what a row of a tensor may be off by, in units of what it is granted."""
    if x.size == 1:
        return SINGLE
    # Of many single numbers one in 16,000 honest ones is off by more than 4 times what is granted.
    return ELEMENT if has_rows(tensor, x) and x.shape[-1] == 1 else ROW


def row_limits(tensor: str, x: NDArray[Any], granted: Floats) -> Floats:
    """Return the same for each row: a row in which one number is granted all is a row of one number."""
    limit = row_limit(tensor, x)
    alone = np.max(granted, axis=-1) >= ALONE * np.sum(granted, axis=-1)
    return np.where(alone, max(limit, ELEMENT), limit)


def _pattern(x: Any) -> Any:
    """0 for a finite number, 1 for inf, -1 for -inf, 2 for NaN."""
    return np.where(np.isnan(x), 2, np.where(np.isinf(x), np.sign(x), 0))


def _number(x: Any, stored: str) -> str:
    """Return enough digits to tell neighbouring numbers of the type apart."""
    return f"{float(x):.{17 if stored == 'float64' else 9}g}"


def judge(result: Result, case_truth: Truth) -> tuple[Verdict, ...]:
    """Return the verdicts on the tensors that a kernel returned; unknown names are ignored."""
    return tuple(
        compare(name, tensor, result.dtypes[name], case_truth)
        for name, tensor in result.tensors.items()
        if name in case_truth.values
    )
