"""Steps in the recorded history of every benchmark: the commits since which it costs more, or less.

Two detectors stand side by side. asv's own fits a piecewise constant curve and pays for each jump (the Potts model,
`asv.step_detect`); it says nothing of chance. E-divisive (Matteson and James, "A nonparametric approach for multiple
change point analysis of multivariate data", JASA 109, 2014) takes the split with the largest energy distance between
its sides and asks by permutations how often chance would do as well. What is counted, and shares of the allowed error,
have no noise: any change of theirs is a step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from asv_benchmarks.judge import EXACT, LIMITS, WORDS, WORSE
from asv_benchmarks.suite import MACHINE, Benchmark

LEVEL = 0.05
"""E-divisive believes a split that chance makes as large less often than this."""

PERMUTATIONS = 499
LEAST = 2
"""Commits between two of its splits."""

STILL = 1.05
"""Where NumPy alone took another time than usual by less than this, nothing is divided out: that would add noise."""


@dataclass(frozen=True)
class Series:
    """One benchmark over the commits that have a number of it, the oldest first.

    `fails` is the newest commit of all, where it failed there, else "".
    """

    benchmark: Benchmark
    commits: tuple[str, ...]
    values: tuple[float, ...]
    fails: str = ""


@dataclass(frozen=True)
class Change:
    """A step of a series.

    Attributes
    ----------
    benchmark
        What changed.
    before, commit
        The last commit of the old level, and the first of the new one.
    factor
        New level over old level.
    found
        Which detector found it: "exact", "both", "potts" or "e-divisive".
    confidence
        One minus the share of permutations of the two levels' values that differ by as much.
    """

    benchmark: Benchmark
    before: str
    commit: str
    factor: float
    found: str
    confidence: float

    @property
    def word(self) -> str:
        """What it means, as `asv_benchmarks.judge` says it."""
        return WORDS[self.benchmark.kind][self.factor < 1.0]

    @property
    def worse(self) -> bool:
        """Whether it is a regression; of NumPy alone none is, for it is the machine."""
        return self.word in WORSE and not self.benchmark.name.startswith(MACHINE)


def calibrated(series: Sequence[Series]) -> list[Series]:
    """Return the series with what all share divided out: how fast the machine was, by those of NumPy alone.

    CPU times are divided by it and rates multiplied, but for shares of the peak, which know it already.
    """
    pace = {commit: by for commit, by in paces(series).items() if counts(by)}
    return [_by(one, pace) for one in series]


def counts(pace: float) -> bool:
    """Tell whether the machine's pace is beyond the noise of measuring it."""
    return abs(math.log(pace)) > math.log(STILL)


def paces(series: Sequence[Series]) -> dict[str, float]:
    """Return by commit how much longer than usual NumPy alone took."""
    found: dict[str, list[float]] = {}
    for one in series:
        if one.benchmark.name.startswith(MACHINE):
            usual = statistics.median(one.values)
            for commit, value in zip(one.commits, one.values, strict=True):
                if value > 0.0 and usual > 0.0:
                    found.setdefault(commit, []).append(value / usual)
    return {commit: statistics.geometric_mean(many) for commit, many in found.items()}


def _by(one: Series, pace: dict[str, float]) -> Series:
    power = paced(one.benchmark)
    values = tuple(x * pace.get(c, 1.0) ** power for c, x in zip(one.commits, one.values, strict=True))
    return replace(one, values=values)


def paced(benchmark: Benchmark) -> int:
    """Return the power of the machine's pace that takes it out of a number: -1 of a time, 1 of a rate, otherwise 0."""
    if benchmark.name.startswith((MACHINE, "peak.")):
        return 0
    return {"time": -1, "rate": 1}.get(benchmark.kind, 0)


def changes(series: Series, least: float | None = None) -> list[Change]:
    """Return the steps of a series, the oldest first.

    Parameters
    ----------
    series
        Calibrated, where it is of times.
    least
        The factor, up or down, that a step must exceed; None: what `asv_benchmarks.judge` asks, and half of it, in
        logarithms, where both detectors agree. Nothing is asked of what has no noise.
    """
    values, benchmark = series.values, series.benchmark
    if benchmark.kind in EXACT:
        at = {n: "exact" for n in range(1, len(values)) if values[n] != values[n - 1]}
    else:
        by_potts, by_energy = set(potts(values)), set(divisive(values))
        at = {n: "both" for n in by_potts & by_energy}
        at |= {n: "potts" for n in by_potts - by_energy} | {n: "e-divisive" for n in by_energy - by_potts}
    asked = math.log(benchmark.factor or LIMITS[benchmark.kind].factor)

    def spare(n: int) -> float:
        """By how much the step at n exceeds what it must."""
        bound = 0.0 if at[n] == "exact" else math.log(least) if least else 0.5 * asked if at[n] == "both" else asked
        return abs(math.log(_factor(*_levels(values, at, n)))) - bound

    while at and spare(smallest := min(at, key=spare)) < 0.0:
        del at[smallest]  # the levels beside it become one
    found = []
    for n in sorted(at):
        old, new = _levels(values, at, n)
        confidence = 1.0 if at[n] == "exact" else 1.0 - chance(old, new)
        commits = series.commits[n - 1], series.commits[n]
        found.append(Change(benchmark, *commits, _factor(old, new), at[n], confidence))
    return found


def _levels(values: Sequence[float], at: Iterable[int], n: int) -> tuple[Sequence[float], Sequence[float]]:
    """Return the values before the step at n, since the last step, and after it, until the next."""
    low, high = max([0, *(m for m in at if m < n)]), min([len(values), *(m for m in at if m > n)])
    return values[low:n], values[n:high]


def _factor(old: Sequence[float], new: Sequence[float]) -> float:
    return max(statistics.median(new), 1e-12) / max(statistics.median(old), 1e-12)


def potts(values: Sequence[float]) -> list[int]:
    """Return where asv's fit of a piecewise constant curve jumps: indices of the first value of each new level."""
    from asv.step_detect import detect_steps

    return [left for left, *_ in detect_steps(list(values))[1:]]


def divisive(values: Sequence[float]) -> list[int]:
    """Return where E-divisive splits the logarithms of the values, by bisection as long as a split is no chance."""
    logs = np.log(np.maximum(values, 1e-12))
    open_, found = [(0, len(logs))], []
    while open_:
        low, high = open_.pop()
        if high - low < 2 * LEAST or np.ptp(logs[low:high]) == 0.0:
            continue
        part = logs[low:high]
        if _permuted(lambda y, axis=-1: np.max(_energies(y), axis=-1), part) < LEVEL:
            at = low + LEAST + int(np.argmax(_energies(part)))
            found.append(at)
            open_ += [(low, at), (at, high)]
    return sorted(found)


def chance(old: Sequence[float], new: Sequence[float]) -> float:
    """Return how often permutations of all values differ by as much between the two sides, by their energy distance."""
    n = len(old)
    logs = np.log(np.maximum([*old, *new], 1e-12))
    if np.ptp(logs) == 0.0 or len(logs) < 3:
        return 1.0
    return _permuted(lambda y, axis=-1: _energy(_distances(y), n), logs)


def _permuted(statistic: Any, values: np.ndarray) -> float:
    from scipy.stats import permutation_test

    options: dict[str, Any] = {"vectorized": True, "n_resamples": PERMUTATIONS, "permutation_type": "pairings"}
    options["batch"] = 64  # each takes an array of all pairs
    return float(permutation_test((values,), statistic, alternative="greater", rng=0, **options).pvalue)


def _distances(values: np.ndarray) -> np.ndarray:
    """Return the sums of |x_i - x_j| over all i < a and j < b, for every a and b from 1 on."""
    apart = np.abs(values[..., :, None] - values[..., None, :])
    return np.cumsum(np.cumsum(apart, axis=-1), axis=-2)


def _energies(values: np.ndarray) -> np.ndarray:
    """Return the scaled energy distance of both sides for every split that leaves each `LEAST` values."""
    sums, n = _distances(values), values.shape[-1]
    return np.stack([_energy(sums, at) for at in range(LEAST, n - LEAST + 1)], axis=-1)


def _energy(sums: np.ndarray, at: int) -> np.ndarray:
    n = sums.shape[-1]
    rest = n - at
    left = sums[..., at - 1, at - 1]
    between = sums[..., at - 1, -1] - left
    right = sums[..., -1, -1] - left - 2.0 * between
    inner = left / max(1, at * (at - 1)) + right / max(1, rest * (rest - 1))
    return at * rest / n * (2.0 * between / (at * rest) - inner)


def worst_first(found: Iterable[Change]) -> list[Change]:
    """Return changes in the order of a reader: what got worse, the surest and largest first, then what got better."""
    return sorted(found, key=lambda c: (not c.worse, c.found == "potts", -abs(math.log(c.factor))))


BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], marks: Iterable[int] = ()) -> str:
    """Return the values as one line of text; a bar | stands before each marked one."""
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    marked = set(marks)
    return "".join("|" * (n in marked) + BARS[round((x - low) * scale)] for n, x in enumerate(values))
