"""Checks of the numbers that the trainer is given. Every message names the argument, what it got and what it needs."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any


def check_whole(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Return a whole number of at least `low`, and at most `high`; raise where it is none."""
    needs = f"a whole number of at least {low}"
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r} of type {type(value).__name__}, needs {needs}")
    if number < low:
        raise ValueError(f"{name}: got {number}, needs {needs}")
    if high is not None and number > high:
        raise ValueError(f"{name}: got {number if number < 2**63 else 'more'}, needs at most {high}")
    return number


def check_real(name: str, value: Any, low: float, high: float = math.inf, *, above: bool = False) -> float:
    """Return a finite number from `low` (or above it) to `high` as a float; raise where it is none."""
    needs = f"a finite number {'above' if above else 'from'} {low:g}" + (f" to {high:g}" if high < math.inf else "")
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: got {value!r} of type {type(value).__name__}, needs {needs}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high or (above and number == low):
        raise ValueError(f"{name}: got {number!r}, needs {needs}")
    return number
