"""The stored results of the experiments: means with their range, and those of growth by its ways."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from docs.experiments.runs import Line


def ranged(values: Sequence[float], digits: int) -> str:
    """Return the mean of some numbers with the least and the largest: ``2.50 [2.41, 2.62]``."""
    mean, least, most = (f"{x:.{digits}f}" for x in (np.mean(values), np.min(values), np.max(values)))
    return f"{mean} [{least}, {most}]"


Results = dict[str, list[dict[str, Any]]]
"""By way: those of the seeds."""


def grouped(lines: Iterable[Line], task: str) -> Results:
    """Return the results of a task by way."""
    found: Results = {}
    for line in lines:
        own = line["run"]["task"]
        name = f"condition {own['condition']:g}" if "condition" in own else "text"
        if name == task:
            found.setdefault(line["run"]["way"], []).append(line["result"])
    return found


def mean(values: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


def scores(results: Results, way: str, reading: str) -> list[float]:
    """Return the scores of the seeds of a way, at equal "steps" or at equal "operations"."""
    return [result[reading]["score"] for result in results[way]]


def ratios(results: Results, way: str, growth: int) -> list[float]:
    """Return the loss right after a growth over that before it, of every seed."""
    found = [result["growths"][growth] for result in results[way]]
    return [growth["after"] / growth["before"] for growth in found]
