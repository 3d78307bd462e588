"""What a comparison measured, as data: sides at a point, points with a number of threads, and the ratios of times."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from asv_benchmarks import machine
from asv_benchmarks.comparison import Comparison, Point, describe
from asv_benchmarks.sides import Rounds, ratios, spread


@dataclass
class Timed:
    """What became of one side at one point: its rounds, or why there are none."""

    rounds: Rounds | None = None
    peak: int | None = None
    differs: float | None = None
    error: str = ""
    missing: bool = False
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Row:
    """One point with a number of threads."""

    point: Point
    threads: int | None
    load: tuple[float, float]
    others: float | None
    sides: dict[str, Timed]

    @property
    def label(self) -> str:
        """The row in words."""
        threads = "all threads" if self.threads is None else f"{self.threads} thread{'s' * (self.threads > 1)}"
        return f"{describe(self.point)}, {threads}"

    @property
    def disturbed(self) -> bool:
        """Whether others took more than a twentieth of the CPUs while several threads had to wait for each other."""
        return self.threads != 1 and self.others is not None and self.others > 0.05 * machine.cpus()


@dataclass
class Result:
    """A comparison that was run."""

    comparison: Comparison
    command: str
    started: str
    machine: dict[str, str]
    rows: list[Row]

    @property
    def compared(self) -> bool:
        """Whether there is a ratio at all."""
        return any(ratio(row, *pair, "wall") for row in self.rows for pair in self.comparison.pairs)

    @property
    def missing(self) -> list[str]:
        """Why sides could not run here, a line each."""
        found = (f"{label}: {side.error}" for row in self.rows for label, side in row.sides.items() if side.missing)
        return list(dict.fromkeys(found))

    @property
    def failed(self) -> list[str]:
        """What went wrong, a line each; that a side is not available here is nothing wrong."""
        found = []
        for row in self.rows:
            for label, side in row.sides.items():
                if side.error and not side.missing:
                    found.append(f"{row.label}: {label}: {side.error}")
                if side.differs is not None and not side.differs <= (self.comparison.agree or 0.0):
                    found.append(f"{row.label}: {label} does not compute what the first side does: {side.differs:.1e}")
        return found


def ratio(row: Row, ours: str, peer: str, clock: str) -> tuple[float, float, float] | None:
    """Return quartile, median, quartile of ours / peer by one of the clocks, or None where a side has no time."""
    a, b = row.sides[ours].rounds, row.sides[peer].rounds
    found = ratios(getattr(a, clock), getattr(b, clock)) if a and b else []
    return spread(found) if found else None
