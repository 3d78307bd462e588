"""What verification lets pass and what it catches.

Each dot is one kernel of softmax attention, judged on all designed cases, forward and backward, and stands at the
largest share of the allowed error that it used. Honest kernels are those of tools/honest_kernels.py, each with several
seeds of the inputs (and without the cases of size 0, where there is nothing to compute); the others are the mutants of
`refattn.verify.diagnose.mutants`, conventions and faults of storing included.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import refattn as ra
from refattn.backends.blas import one_thread
from refattn.mechanisms.record import Case, Mechanism
from refattn.verify.diagnose.mutants import kernel, mutants
from refattn.verify.outcome import Result
from refattn.verify.tolerance.budget import truth
from refattn.verify.tolerance.compare import judge
from tools.census import census
from tools.draw.common import TEXT
from tools.honest_kernels import KERNELS, run

DTYPES = ("float32", "bfloat16")
SEEDS = 8

COLOURS = {
    "honest": "#009e73",
    "caught": "#0072b2",
    "equivalent": "#8c8c8c",
    "below rounding": "#e69f00",
    "missed": "#d00000",
}
NAMES = {
    "honest": "honest kernel",
    "caught": "mutant, caught",
    "equivalent": "mutant that changes no result",
    "below rounding": "mutant that changes less than rounding",
    "missed": "mutant, missed",
}


STRIPS = {"honest": "honest kernels", "wrong": "mutants"}


@dataclass(frozen=True)
class Dot:
    """One kernel: the largest share of the allowed error that it used, and what became of it."""

    share: float
    fate: str


def honest(mechanism: Mechanism, dtype: str) -> list[Dot]:
    """Return a dot for each honest kernel and seed."""
    shares: dict[tuple[str, int], float] = {}
    for seed in range(SEEDS):
        for case in filter(_has_elements, mechanism.cases):
            known = truth(mechanism, case, dtype, grad=True, seed=seed)
            assert known.upstream is not None
            for each in KERNELS:
                tensors = run(each, dtype, known.inputs, known.upstream, **case.options)
                verdicts = judge(Result(tensors, {name: known.stored[name] for name in tensors}), known)
                worst = max(verdict.share for verdict in verdicts)
                shares[each.name, seed] = max(shares.get((each.name, seed), 0.0), worst)
    return [Dot(share, "honest") for share in shares.values()]


def _has_elements(case: Case) -> bool:
    return all(0 not in given.shape for given in case.inputs.values())


def wrong(mechanism: Mechanism, dtype: str) -> list[Dot]:
    """Return a dot for each mutant and convention; a census stops at the first case that catches, this does not."""
    truths = [(case, truth(mechanism, case, dtype, grad=True)) for case in mechanism.cases]
    shares = {
        mutant: max(
            verdict.share
            for case, known in truths
            for verdict in judge(kernel(mechanism, case, known, dtype, mutant), known)
        )
        for mutant in mutants(mechanism)
    }
    survivors = [mutant for mutant, share in shares.items() if share <= 1.0]
    fates = {fate.mutant: fate.status for fate in census(mechanism, dtype, survivors)} if survivors else {}
    return [Dot(share, fates.get(mutant, "caught")) for mutant, share in shares.items()]


# --- the picture

WIDTH, HEIGHT = 1400, 860  # pixels
LEFT, RIGHT, TOP, BOTTOM = 216, 16, 84, 76  # margins
GAP = 18  # between the two panels
SIZE = 9.5  # of a dot
FIRST, LAST = 0.28, 1000.0  # of the logarithmic axis
BEYOND = 290  # pixels to the right of it, for what is larger
BLOCKS = ((16.0, 13, "more \u2192"), (182.0, 8, "NaN or \u221e"))  # left edge, columns, label
ROWS = 17  # the highest that dots are stacked: what a strip has room for


def draw(found: dict[str, dict[str, list[Dot]]]) -> Figure:
    """Return the figure of the dots, by dtype and strip ("honest", "wrong")."""
    figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=100, facecolor="white")
    height = (HEIGHT - TOP - BOTTOM - GAP * (len(found) - 1)) / len(found)
    for n, (dtype, strips) in enumerate(found.items()):
        low = HEIGHT - TOP - height - n * (height + GAP)
        box = (LEFT / WIDTH, low / HEIGHT, (WIDTH - LEFT - RIGHT) / WIDTH, height / HEIGHT)
        axes = figure.add_axes(box)
        # One unit of the panel's own axes is one pixel.
        axes.set(xlim=(0, WIDTH - LEFT - RIGHT), ylim=(0, height), xticks=[], yticks=[])
        axes.spines[:].set_color("#bbbbbb")
        _panel(axes, height, dtype, strips, last=n == len(found) - 1)
    title = "What verification lets pass, and what it catches: softmax attention, every case, forward and backward"
    figure.text(0.5, 1 - 22 / HEIGHT, title, ha="center", va="center", fontsize=15, color=TEXT)
    met = {dot.fate for strips in found.values() for dots in strips.values() for dot in dots}
    fates = [fate for fate in NAMES if fate in met]
    marks = [Line2D([], [], linestyle="", marker="o", markersize=9, color=COLOURS[fate]) for fate in fates]
    figure.legend(
        marks,
        [NAMES[fate] for fate in fates],
        loc="upper center",
        bbox_to_anchor=(0.5, 1 - 36 / HEIGHT),
        ncols=len(fates),
        frameon=False,
        fontsize=13.5,
        handletextpad=0.2,
        columnspacing=1.6,
        labelcolor=TEXT,
    )
    return figure


def _panel(axes: Axes, height: float, dtype: str, strips: dict[str, list[Dot]], *, last: bool) -> None:
    width = WIDTH - LEFT - RIGHT
    scaled = width - BEYOND

    def place(share: float) -> float:
        return scaled * math.log(share / FIRST) / math.log(LAST / FIRST)

    axes.axvspan(0, place(1.0), color="#eef7f2", zorder=0)
    axes.axvline(place(1.0), color=TEXT, linewidth=2, zorder=3)
    axes.axhline(height / 2, color="#dddddd", linewidth=1, zorder=1)
    axes.axvline(scaled, color="#bbbbbb", linewidth=1, linestyle=(0, (4, 4)), zorder=1)
    for power in range(0, round(math.log10(LAST))):
        axes.axvline(place(10.0**power), color="#e6e6e6", linewidth=1, zorder=1)
    axes.text(-204, height / 2, dtype, va="center", fontsize=15, color=TEXT, rotation=90)
    for base, (strip, dots) in zip((height / 2, 0.0), strips.items(), strict=True):
        counts = Counter(dot.fate for dot in dots)
        passed = sum(dot.share <= 1.0 for dot in dots)
        told = {"pass": passed} if strip == "honest" else {fate: counts[fate] for fate in NAMES if counts[fate]}
        lines = [f"{len(dots)} {STRIPS[strip]}", *(f"{count} {fate}" for fate, count in told.items())]
        axes.text(-14, base + height / 4, "\n".join(lines), ha="right", va="center", fontsize=12.5, color=TEXT)
        _stack(axes, [dot for dot in dots if dot.share <= LAST], base + 6, place)
        large = [dot for dot in dots if LAST < dot.share < math.inf]
        infinite = [dot for dot in dots if dot.share == math.inf]
        for part, (left, columns, _) in zip((large, infinite), BLOCKS, strict=True):
            _block(axes, part, scaled + left, base + 6, columns)
    if not last:
        return
    for share, label in ((0.5, "0.5"), (1.0, "1 = limit"), (10.0, "10"), (100.0, "100")):
        axes.text(place(share), -10, label, ha="center", va="top", fontsize=13.5, color=TEXT)
    for left, columns, label in BLOCKS:
        x = scaled + left + columns * SIZE / 2
        axes.text(x, -10, label, ha="center", va="top", fontsize=13.5, color=TEXT)
    label = "used share of the allowed error, in the case that used most"
    axes.text(scaled / 2, -42, label, ha="center", va="top", fontsize=14, color=TEXT)


def _stack(axes: Axes, dots: list[Dot], base: float, place: Any) -> None:
    """Draw dots one above the other where they would cover each other, beside each other where a column is full."""
    limit = place(1.0)
    heights: Counter[tuple[bool, int]] = Counter()
    for dot in sorted(dots, key=_order):
        above = dot.share > 1.0  # columns are counted from the limit, to either side: none stands across it
        wanted = int(abs(place(dot.share) - limit) / SIZE)
        column = min((c for c in range(wanted + 20) if heights[above, c] < ROWS), key=lambda c: (abs(c - wanted), c))
        x = limit + (column + 0.7) * SIZE * (1 if above else -1)
        _dot(axes, x, base + (heights[above, column] + 0.5) * SIZE, dot)
        heights[above, column] += 1


def _order(dot: Dot) -> tuple[int, float]:
    return list(NAMES).index(dot.fate), dot.share


def _block(axes: Axes, dots: list[Dot], left: float, base: float, columns: int) -> None:
    """Draw dots row by row: of these the picture says only how many there are."""
    for n, dot in enumerate(sorted(dots, key=_order)):
        row, column = divmod(n, columns)
        _dot(axes, left + (column + 0.5) * SIZE, base + (row + 0.5) * SIZE, dot)


def _dot(axes: Axes, x: float, y: float, dot: Dot) -> None:
    points = 0.72 * (SIZE - 1.2)  # a point is 1/72 inch, a pixel 1/100
    axes.plot([x], [y], marker="o", markersize=points, color=COLOURS[dot.fate], markeredgewidth=0, zorder=4)


def figures() -> Iterator[tuple[str, Figure]]:
    """Yield the figure with its name; print what is in it."""
    record = ra.mechanism("softmax")
    with one_thread():  # BLAS gives the same bits whatever the number of cores
        found = {dtype: {"honest": honest(record, dtype), "wrong": wrong(record, dtype)} for dtype in DTYPES}
    for dtype, strips in found.items():
        for strip, dots in strips.items():
            shares = [dot.share for dot in dots]
            counts = dict(Counter(dot.fate for dot in dots))
            print(f"{dtype} {strip}: {counts}, shares from {min(shares):.2g} to {max(shares):.2g}")
    yield "budget", draw(found)
