"""What is a difference, and what is noise.

Rounds that alternate come in pairs: whatever the machine did hit both, so each pair gives a ratio.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from asv_benchmarks.sides import ratios, spread
from asv_benchmarks.suite import Benchmark


@dataclass(frozen=True)
class Limit:
    """What a difference must exceed: as a ratio, and in the benchmark's unit."""

    factor: float
    least: float


LIMITS = {
    "time": Limit(1.10, 1e-6),
    "memory": Limit(1.10, 2 << 20),
    "share": Limit(1.25, 0.02),
    "rate": Limit(1.10, 0.0),
    "work": Limit(1.0, 0.0),
    "instructions": Limit(1.02, 0.0),
}
"""By kind of benchmark; a benchmark may ask for another factor."""

EXACT = ("share", "work")
"""The kinds that have no noise: the same source gives the same number."""

WORDS = {
    "time": ("slower", "faster"),
    "memory": ("more memory", "less memory"),
    "share": ("less exact", "more exact"),
    "rate": ("higher rate", "lower rate"),
    "work": ("more work", "less work"),
    "instructions": ("more instructions", "fewer instructions"),
}
"""By kind: what a larger number means, and a smaller one."""

WORSE = {"slower", "more memory", "less exact", "lower rate", "more work", "more instructions", "fails"}


@dataclass(frozen=True)
class Verdict:
    """What became of one benchmark.

    Attributes
    ----------
    word
        A word of `WORDS` where there is a difference, "" where there is none, or "fails", "works", "new", "gone",
        "n/a".
    base, head
        The numbers that are compared: medians in seconds, bytes, shares or rates.
    ratio
        Lower quartile, median and upper quartile of head / base, where there are pairs; otherwise thrice the same.
    detail
        Why there is no number.
    """

    benchmark: Benchmark
    word: str
    base: float | None = None
    head: float | None = None
    ratio: tuple[float, float, float] | None = None
    detail: str = ""


def limit(benchmark: Benchmark) -> Limit:
    """Return what a difference of this benchmark must exceed."""
    usual = LIMITS[benchmark.kind]
    return usual if benchmark.factor is None else Limit(benchmark.factor, usual.least)


def paired(benchmark: Benchmark, starts: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Verdict:
    """Judge rounds that alternated: for each start of the two processes, the numbers of base and of head.

    A difference counts where the median of all ratios exceeds the factor, and the median of each start goes at least
    half of that way: a process has its own luck with memory, which lasts as long as it does.
    """
    found = [ratios(head, base) for base, head in starts]
    whole = spread([one for start in found for one in start])
    base, head = (statistics.median([x for start in starts for x in start[side]]) for side in (0, 1))
    each = [statistics.median(start) for start in found]
    bound = limit(benchmark)
    size, sign = math.log(bound.factor), 1.0 if whole[1] > 1.0 else -1.0
    differs = sign * _log(whole[1]) > size and all(sign * _log(one) > 0.5 * size for one in each)
    word = WORDS[benchmark.kind][sign < 0.0] if differs and abs(head - base) > bound.least else ""
    return Verdict(benchmark, word, base, head, whole)


def suspect(verdict: Verdict) -> bool:
    """Tell whether a first look at a time or a rate is worth a second one: half of the factor is exceeded."""
    benchmark = verdict.benchmark
    if benchmark.kind not in ("time", "rate") or verdict.ratio is None:
        return False
    return abs(_log(verdict.ratio[1])) > 0.5 * math.log(limit(benchmark).factor)


def _log(ratio: float) -> float:
    return math.log(ratio) if ratio > 0.0 else -math.inf


def summary(verdicts: Iterable[Verdict]) -> str:
    """Return the counts of all words in one line."""
    counts: dict[str, int] = {}
    for verdict in verdicts:
        counts[verdict.word] = counts.get(verdict.word, 0) + 1
    same = counts.pop("", 0)
    nothing = counts.pop("n/a", 0)
    measured = same + sum(counts.values())
    words = [f"{count} {word}" for word, count in sorted(counts.items())]
    rest = [f"{same} without a difference"] + ([f"{nothing} n/a"] if nothing else [])
    return f"{measured} benchmarks: {', '.join(words + rest)}"


def times(kind: str, ratio: float, digits: int = 2) -> str:
    """Return a ratio with as many decimals; what has no noise with its distance from 1, where these do not show it."""
    if not 1e-9 < ratio < 1e9:
        return "from 0" if ratio > 1.0 else "to 0"
    if kind in EXACT and ratio != 1.0 and abs(ratio - 1.0) < 0.5 * 10.0**-digits:
        return f"1{ratio - 1.0:+.1g}"
    return f"{ratio:.{digits}f}" if 0.05 < ratio < 100.0 else f"{ratio:.{digits + 1}g}"


def number(kind: str, value: float | None) -> str:
    """Return a number with its unit."""
    if value is None:
        return ""
    if kind in ("share", "rate"):
        return f"{value:.3g}"
    if kind in ("work", "instructions"):
        return f"{value:,.0f}"
    units = [("GiB", 2.0**30), ("MiB", 2.0**20)] if kind == "memory" else [("s", 1.0), ("ms", 1e-3), ("us", 1e-6)]
    name, size = next(((name, size) for name, size in units if value >= size), units[-1])
    return f"{value / size:.3g} {name}"
