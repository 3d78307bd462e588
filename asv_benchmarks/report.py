"""The report of a comparison: tables for the terminal and for a page, the numbers as JSON, and a figure."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from asv_benchmarks.comparison import Comparison
from asv_benchmarks.measured import Result, Row, Timed, ratio
from asv_benchmarks.sides import spread

READING = (
    "A ratio is the time of the first divided by that of the second: below 1 the first is faster. It is the median of "
    "the ratios of rounds that follow each other, with their quartiles in brackets; each side has its own process. "
    "Wall time is what a user waits for. CPU time counts all threads; on a machine that others use too it is the "
    "steadier of the two where one thread works, while with several those that wait for each other count as well. Peak "
    "memory is what a call adds to what is resident before it, its results included. Rows that are marked as disturbed "
    "are no result: threads that wait for each other on CPUs that others take can lose any factor."
)


def in_words(comparison: Comparison, row: Row) -> str:
    """Return the ratios of a row in one line."""
    words = []
    for ours, peer in comparison.pairs:
        wall, cpu = (ratio(row, ours, peer, clock) for clock in ("wall", "cpu"))
        if wall and cpu:
            words.append(f"{ours} / {peer} {wall[1]:.2f} (CPU {cpu[1]:.2f})")
    missing = [f"{label}: {side.error}" for label, side in row.sides.items() if side.error]
    return "; ".join(words + missing)


def named(row: Row) -> str:
    """Return the row in words, with a mark where others disturbed it."""
    return f"{row.label} (disturbed: others took {row.others:.1f} CPUs)" if row.disturbed else row.label


def tables(result: Result) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield title, head and rows of each table."""
    comparison = result.comparison
    body = []
    for row in result.rows:
        for n, (ours, peer) in enumerate(comparison.pairs):
            found = [ratio(row, ours, peer, clock) for clock in ("wall", "cpu")]
            cells = [f"{x[1]:.2f} [{x[0]:.2f}, {x[2]:.2f}]" if x else "n/a" for x in found]
            body.append([named(row) if n == 0 else "", f"{ours} / {peer}", *cells])
    yield "Ratios", ["", "times", "wall", "CPU"], body
    head = ["", "side", "wall, ms", "quartiles", "least", "CPU, ms", "peak memory, MiB", "rounds"]
    if comparison.work:
        head.append(f"{comparison.unit}/s")
    yield (
        "Times of a call",
        head,
        [
            [named(row) if n == 0 else "", label, *_times(result, row, side)]
            for row in result.rows
            for n, (label, side) in enumerate(row.sides.items())
        ],
    )


def _times(result: Result, row: Row, side: Timed) -> list[str]:
    work = result.comparison.work
    if side.rounds is None:
        return [f"{'n/a' if side.missing else 'failed'}: {side.error}", *[""] * (5 + (work is not None))]
    low, middle, high = spread(side.rounds.wall)
    cells = [_ms(middle), f"{_ms(low)} to {_ms(high)}", _ms(min(side.rounds.wall))]
    cells += [_ms(statistics.median(side.rounds.cpu)), "n/a" if side.peak is None else f"{side.peak / 2**20:.1f}"]
    cells.append(str(len(side.rounds.wall)))
    return cells + ([f"{work(row.point) / middle:.4g}"] if work else [])


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1.0 else f"{1e3 * seconds:.0f}"


def facts(result: Result) -> dict[str, list[str]]:
    """Return what the sides ran on: by number of threads and side, versions and libraries with their kernels."""
    found: dict[str, list[str]] = {}
    for row in result.rows:
        for label, side in row.sides.items():
            if side.facts:
                versions = ", ".join(f"{name} {version}" for name, version in side.facts["versions"].items())
                threads = "all threads" if row.threads is None else f"{row.threads} thread{'s' * (row.threads > 1)}"
                found[f"{label}, {threads}"] = [versions, *side.facts["threads"]]
    return found


def show(result: Result, console: Console) -> None:
    """Print the tables."""
    for title, head, body in tables(result):
        table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
        for n, name in enumerate(head):
            table.add_column(name, justify="left" if n < 2 else "right", overflow="fold")
        for cells in body:
            table.add_row(*cells)
        console.print(table)
    for name, what in facts(result).items():
        console.print(f"{name}: {'; '.join(what)}", markup=False)
    console.print(f"{_device(result)}\n", markup=False)


def _device(result: Result) -> str:
    device = result.machine
    loads = [load for row in result.rows for load in row.load]
    where = ", ".join(device[name] for name in ("cpu", "memory", "system", "python"))
    load = f"load average {min(loads):.1f} to {max(loads):.1f}"
    return f"{where}; {load}; refattn at {device['commit']}, {result.started}"


def write(result: Result, folder: Path) -> list[Path]:
    """Write the page, the numbers and the figure; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    name = result.comparison.name
    page, numbers, figure = (folder / f"{name}.{kind}" for kind in ("md", "json", "svg"))
    drawn = draw(result, figure)
    page.write_text(markdown(result, figure.name if drawn else None), encoding="utf-8")
    numbers.write_text(json.dumps(_rounded(to_json(result)), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return [page, numbers, *([figure] if drawn else [])]


def to_json(result: Result) -> dict[str, Any]:
    """Return all numbers as plain data: every round of every side."""
    comparison = result.comparison
    rows = []
    for row in result.rows:
        found = {
            f"{ours} / {peer}": {
                clock: dict(zip(("low", "median", "high"), quartiles, strict=True))
                for clock in ("wall", "cpu")
                if (quartiles := ratio(row, ours, peer, clock))
            }
            for ours, peer in comparison.pairs
        }
        data = dataclasses.asdict(row)
        for side in data["sides"].values():
            side["facts"].pop("refattn", None)  # a folder of one machine
        rows.append({**data, "point": dict(row.point), "ratios": found})
    return {
        "name": comparison.name,
        "title": comparison.title,
        "command": result.command,
        "date": result.started,
        "machine": result.machine,
        "rows": rows,
    }


def _rounded(data: Any) -> Any:
    """Return the data with its numbers to five digits, beyond which there is noise alone."""
    if isinstance(data, float):
        return float(f"{data:.5g}")
    if isinstance(data, dict):
        return {name: _rounded(value) for name, value in data.items()}
    return [_rounded(value) for value in data] if isinstance(data, list | tuple) else data


def markdown(result: Result, figure: str | None) -> str:
    """Return the page."""
    comparison = result.comparison
    lines = [f"# {comparison.title}", "", comparison.text, ""]
    if figure:
        lines += [f"![Ratios of times, refattn to the others; below 1 refattn is faster]({figure})", ""]
    for title, head, body in tables(result):
        lines += [f"## {title}", "", *_markdown_table(head, body), ""]
    lines += ["## How it was measured", "", READING, "", f"{_device(result)}.", ""]
    lines += ["```sh", result.command, "```", ""]
    lines += _markdown_table(["side", "runs on"], [[name, "; ".join(what)] for name, what in facts(result).items()])
    differ = [side.differs for row in result.rows for side in row.sides.values() if side.differs is not None]
    if differ:
        text = "The largest difference between the results of two sides, relative to the largest element of an array"
        lines += ["", f"{text}: {max(differ):.0e}."]
    if result.failed:
        lines += ["", "Failed:", "", *(f"- {line}" for line in result.failed)]
    return "\n".join(lines) + "\n"


def _markdown_table(head: list[str], body: Iterable[list[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join('---' for _ in head)} |"]
    return lines + [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |" for cells in body]


def draw(result: Result, file: Path) -> bool:
    """Draw the ratios with their quartiles; return whether there is something to draw with, and to be drawn."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = result.comparison.name  # the same picture is the same file
    from matplotlib import pyplot

    pairs = result.comparison.pairs
    figure, axes = pyplot.subplots(figsize=(9.0, 2.0 + 0.28 * len(result.rows)), layout="constrained")
    drawn = False
    for n, (ours, peer) in enumerate(pairs):
        for y, row in enumerate(result.rows):
            clock = "cpu" if row.threads == 1 else "wall"
            found = ratio(row, ours, peer, clock)
            if not found:
                continue
            low, middle, high = found
            axes.errorbar(
                middle,
                y + 0.6 * (n + 0.5) / len(pairs) - 0.3,
                xerr=[[middle - low], [high - middle]],
                fmt="o",
                color=f"C{n}",
                markerfacecolor="white" if row.disturbed else None,
                markersize=4,
                label=None if axes.get_legend_handles_labels()[1].count(f"{ours} / {peer}") else f"{ours} / {peer}",
            )
            drawn = True
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(range(len(result.rows)), [f"{row.label}{'*' * row.disturbed}" for row in result.rows])
    axes.invert_yaxis()
    lines = ["ratio of times, median and quartiles; below 1 the first is faster"]
    lines.append("CPU time with one thread, wall time with several")
    lines += ["* disturbed by others: no result"] if any(row.disturbed for row in result.rows) else []
    axes.set_xlabel("\n".join(lines))
    if drawn:
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
        figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)
    return drawn
