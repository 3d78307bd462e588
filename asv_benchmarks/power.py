"""How small a slow-down the clock shows: some are planted that are known exactly, and two judges are asked many times.

    python -m asv_benchmarks.power --rounds 20

Each round asks `make bench-compare` and `python -m asv_benchmarks changes` about every target and every size; a size of
nothing tells how often they cry wolf. Rounds are stored as they end, in docs/benchmarks/power.json: a run that was
stopped goes on, and --rounds says how many there shall be in all. The table and the figure of docs/performance.md are
written anew.
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from asv_benchmarks import machine
from asv_benchmarks.archive import ArchiveError, read
from asv_benchmarks.changes import Series, changes
from asv_benchmarks.compare import STARTS, WORKING_TREE, check_out, measure
from asv_benchmarks.culprit import chosen
from asv_benchmarks.judge import WORSE, suspect
from asv_benchmarks.sides import ROOT, STEADY, Worker, closing, held_to
from asv_benchmarks.suite import Benchmark

SIZES = (0.0, 0.02, 0.05, 0.1, 0.2)

TARGETS = {
    r"core\.Core\.time_both\('softmax\.tiled', 1024, 64": ("refattn/mechanisms/softmax/core.py", "forward", "backward"),
    r"core\.Core\.time_both\('higher_order\.tiled', 1024, 64": (
        "refattn/mechanisms/higher_order/core.py",
        "forward",
        "backward",
    ),
    r"language\.Train\.track_tokens\('softmax'": ("refattn/train/loop.py", "step"),
}
"""Expression of a benchmark -> the file and its functions that are slowed down."""

PLANTED = """

def _planted(call):
    import functools
    import time

    @functools.wraps(call)
    def longer(*arguments, **options):
        begun = time.process_time()
        result = call(*arguments, **options)
        stop = begun + {longer!r} * (time.process_time() - begun)
        while time.process_time() < stop:
            pass
        return result

    return longer


"""

BEFORE, AFTER = 8, 4
"""Commits of a planted history before the slow-down, and from it on."""

JUDGES = {"compare": "make bench-compare", "changes": "changes"}
FILE = ROOT / "docs" / "benchmarks" / "power.json"
PAGE = ROOT / "docs" / "performance.md"
FIGURE = ROOT / "docs" / "benchmarks" / "power.svg"
MARKS = "<!-- power: begin -->", "<!-- power: end -->"

Row = dict[str, Any]


def plant(home: Path, size: float) -> None:
    """Let the functions of all targets in a version take longer by this share."""
    for file, *functions in TARGETS.values():
        lines = "\n".join(f"{name} = _planted({name})" for name in functions)
        with (home / file).open("a", encoding="utf-8") as target:
            target.write(PLANTED.format(longer=1.0 + size) + lines + "\n")


def value(benchmark: Benchmark, home: Path) -> float:
    """Return one number of a history: that of a fresh process, as asv would store it."""
    params: dict[str, Any] = {"name": benchmark.name, "params": benchmark.params}
    worker = Worker({**held_to(1), **STEADY}, home=home)
    with closing({"one": worker}):
        worker.ask("make", target="asv_benchmarks.suite:prepare", params=params)
        if benchmark.kind == "rate":
            return float(worker.ask("value")["value"])
        warmed = worker.ask("warm", seconds=0.05)["wall"]
        calls = max(1, round(0.01 / warmed))
        return statistics.median(worker.ask("round", calls=calls)["cpu"] for _ in range(7))


def compared(benchmark: Benchmark, base: Path, head: Path) -> str:
    """Return what `make bench-compare` says."""
    verdict = measure(benchmark, (base, head), 1)
    return (measure(benchmark, (base, head), STARTS) if suspect(verdict) else verdict).word


def ask(expression: str, homes: Mapping[float, Path], number: int) -> list[Row]:
    """Return what both judges say of every size, for one target in one round."""
    benchmark = chosen(homes[0.0], expression)
    before = [value(benchmark, homes[0.0]) for _ in range(BEFORE)]
    after: dict[float, list[float]] = {size: [] for size in homes}
    for _ in range(AFTER):
        for size, home in homes.items():
            after[size].append(value(benchmark, home))
    rows = []
    for size, home in homes.items():
        values = [*before, *after[size]]
        series = Series(benchmark, tuple(str(n) for n in range(len(values))), tuple(values))
        steps = changes(series)
        there = any(step.worse and abs(int(step.commit) - BEFORE) <= 1 for step in steps)
        row: Row = {"round": number, "target": str(benchmark), "size": size, "values": values}
        row["compare"] = compared(benchmark, homes[0.0], home)
        row["changes"] = there if size else bool(steps)
        rows.append(row)
    return rows


KEYS = {"round", "target", "size", "compare", "changes"}
"""What each row of a file of rounds has."""


def found(row: Row, judge: str) -> bool:
    """Tell whether the judge said that something got worse; of nothing, that anything changed."""
    if judge == "compare":
        return row["compare"] in WORSE if row["size"] else bool(row["compare"])
    return bool(row["changes"])


def rate(rows: Sequence[Row], target: str, size: float, judge: str) -> tuple[int, int]:
    """Return how often, of how many times."""
    asked = [row for row in rows if row["target"] == target and row["size"] == size]
    return sum(found(row, judge) for row in asked), len(asked)


def table(rows: Sequence[Row]) -> list[str]:
    """Return the table of docs/performance.md."""
    heads = ["nothing (false alarms)", *(f"{size:.0%}" for size in SIZES[1:])]
    lines = [f"| planted | tool | {' | '.join(heads)} |", "| --- | --- |" + " --- |" * len(heads)]
    for target in dict.fromkeys(row["target"] for row in rows):
        for judge, name in JUDGES.items():
            cells = ["{} of {}".format(*rate(rows, target, size, judge)) for size in SIZES]
            lines.append(f"| `{target}` | {name} | {' | '.join(cells)} |")
    return lines


def draw(rows: Sequence[Row]) -> None:
    """Draw how often each size was found."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "power"  # the same picture is the same file
    from matplotlib import pyplot

    targets = list(dict.fromkeys(row["target"] for row in rows))
    figure, axes = pyplot.subplots(1, len(JUDGES), figsize=(9.0, 3.2), layout="constrained", sharey=True)
    for part, (judge, name) in zip(axes, JUDGES.items(), strict=True):
        for target in targets:
            many = [rate(rows, target, size, judge) for size in SIZES]
            shares = [100.0 * some / max(1, whole) for some, whole in many]
            part.plot([100.0 * size for size in SIZES], shares, marker="o", label=target.split(",")[0].split(".", 1)[1])
        part.set(title=name, xlabel="planted slow-down in per cent", ylim=(-5.0, 105.0))
        part.grid(alpha=0.3)
    axes[0].set_ylabel("found, in per cent")
    axes[0].legend(frameon=False, fontsize="small")
    figure.savefig(FIGURE, metadata={"Date": None})
    pyplot.close(figure)


def write(rows: Sequence[Row], about: Mapping[str, str]) -> None:
    """Store the rounds, and write the table and the figure."""
    FILE.write_text(json.dumps({"machine": dict(about), "rows": list(rows)}) + "\n", encoding="utf-8")
    draw(rows)
    put(MARKS, table(rows))


def put(marks: tuple[str, str], lines: Sequence[str]) -> None:
    """Write a table between its marks in docs/performance.md."""
    begin, end = marks
    inner = "\n".join([begin, "", *lines, "", end])
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(re.sub(f"{begin}.*{end}", lambda _: inner, text, flags=re.DOTALL), encoding="utf-8")


class Failure(click.ClickException):
    """Nothing can be told, as in `asv_benchmarks.__main__`."""

    exit_code = 2


@click.command(help=(__doc__ or "").replace("\n\n    ", "\n\n\b\n    "))
@click.option("--rounds", type=click.IntRange(1), default=20, show_default=True, help="How many there shall be in all.")
def main(rounds: int) -> None:
    """Ask until there are so many rounds."""
    try:
        stored = read(FILE) if FILE.exists() else {"rows": []}
    except ArchiveError as error:
        raise Failure(str(error)) from error
    rows: Any = stored.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) and row.keys() >= KEYS for row in rows):
        raise Failure(f"rounds: got {FILE}, needs rows with {', '.join(sorted(KEYS))}: take it away to begin anew")
    # Rounds that are there already tell of where they ran.
    about = stored.get("machine", {}) if rows else machine.describe()
    with tempfile.TemporaryDirectory() as folder:
        homes = {size: check_out(WORKING_TREE, Path(folder) / f"{size}") for size in SIZES}
        for size, home in homes.items():
            plant(home, size)
        for number in range(rounds):
            for expression in TARGETS:
                if any(row["round"] == number and re.search(expression, row["target"]) for row in rows):
                    continue
                begun = time.monotonic()
                rows += ask(expression, homes, number)
                write(rows, about)
                click.echo(f"round {number + 1} of {rounds}, {rows[-1]['target']}: {time.monotonic() - begun:.0f} s")
    write(rows, about)
    click.echo("\n".join(table(rows)))


if __name__ == "__main__":
    main(prog_name="python -m asv_benchmarks.power")
