"""Steps in the recorded history of every benchmark: the commits since which it costs more, or less.

asv's own detector finds them (`asv.step_detect`): it fits a piecewise constant curve and pays for each jump. It says
nothing of chance, so a step has to exceed what `asv_benchmarks.judge` asks. What is counted, and shares of the allowed
error, have no noise: any change of theirs is a step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from asv_benchmarks.judge import EXACT, LIMITS, WORDS, WORSE
from asv_benchmarks.suite import MACHINE, Benchmark

LEAST = 2
"""Commits of a level: one alone is an outlier."""

PRICE = 3.0
"""What asv's fit pays for a jump, in parameters; with its own 4 it finds a third as many in a dozen commits."""

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
    """

    benchmark: Benchmark
    before: str
    commit: str
    factor: float

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
        The factor, up or down, that a step must exceed; None: what `asv_benchmarks.judge` asks. Nothing is asked of
        what has no noise.
    """
    values, benchmark = series.values, series.benchmark
    exact = benchmark.kind in EXACT
    at = [n for n in range(1, len(values)) if values[n] != values[n - 1]] if exact else jumps(values)
    bound = 0.0 if exact else math.log(least or benchmark.factor or LIMITS[benchmark.kind].factor)

    def size(n: int) -> float:
        return abs(math.log(_factor(values, at, n)))

    while at and size(smallest := min(at, key=size)) < bound:
        at.remove(smallest)  # the levels beside it become one
    return [Change(benchmark, series.commits[n - 1], series.commits[n], _factor(values, at, n)) for n in at]


def _factor(values: Sequence[float], at: Sequence[int], n: int) -> float:
    """Return the median from the step at n to the next one, over that from the last step to it."""
    low, high = max([0, *(m for m in at if m < n)]), min([len(values), *(m for m in at if m > n)])
    return max(statistics.median(values[n:high]), 1e-12) / max(statistics.median(values[low:n]), 1e-12)


def jumps(values: Sequence[float]) -> list[int]:
    """Return where asv's fit of a piecewise constant curve jumps: indices of the first value of each new level."""
    from asv.step_detect import solve_potts_autogamma

    n = len(values)
    if n < 2 * LEAST:
        return []
    ends, *_ = solve_potts_autogamma(list(values), [1.0] * n, beta=PRICE * math.log(n) / n, min_size=LEAST)
    return list(ends[:-1])


def worst_first(found: Iterable[Change]) -> list[Change]:
    """Return changes in the order of a reader: what got worse, the largest first, then what got better."""
    return sorted(found, key=lambda c: (not c.worse, -abs(math.log(c.factor))))


BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], marks: Iterable[int] = ()) -> str:
    """Return the values as one line of text; a bar | stands before each marked one."""
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    marked = set(marks)
    return "".join("|" * (n in marked) + BARS[round((x - low) * scale)] for n, x in enumerate(values))
