"""Side-by-side comparisons with other libraries: the one place where ratios come from.

    python -m asv_benchmarks.peers                      all comparisons
    python -m asv_benchmarks.peers softmax --quick      one, its smaller points, few rounds: a look, no result
    python -m asv_benchmarks.peers --out docs/benchmarks

What is compared stands in `asv_benchmarks/comparisons`, how it is timed in `asv_benchmarks/sides.py`.
"""

from __future__ import annotations

import datetime
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console

from asv_benchmarks import machine, report
from asv_benchmarks.comparison import Comparison, Point, Side, describe, load, names
from asv_benchmarks.measured import Result, Row, Timed
from asv_benchmarks.sides import STEADY, SideError, Worker, alternate, closing, held_to


def run(
    comparison: Comparison,
    *,
    command: str = "",
    quick: bool = False,
    only: str = "",
    progress: Callable[[Row], None] = lambda row: None,
) -> Result:
    """Run a comparison, all its points or the quick or the named ones; `progress` sees each row when it is done."""
    started = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %z")
    result = Result(comparison, command, started, machine.describe(), [])
    for point in comparison.grid:
        if (quick and not comparison.quick(point)) or only not in describe(point):
            continue
        for threads in comparison.threads:
            result.rows.append(measure(comparison, point, threads))
            progress(result.rows[-1])
    return result


def measure(comparison: Comparison, point: Point, threads: int | None) -> Row:
    """Start the sides of one point, time them in alternation, and measure what memory a call takes."""
    load, others = machine.load(), machine.Others()
    timed = {side.label: Timed() for side in comparison.sides}
    workers: dict[str, Worker] = {}
    with closing(workers), tempfile.TemporaryDirectory() as folder:
        for side in comparison.sides:
            try:
                workers[side.label] = _start(side, threads)
                timed[side.label].facts = workers[side.label].ask("make", target=side.target, params=dict(point))
            except SideError as error:
                timed[side.label] = Timed(error=str(error), missing=error.missing)
                if side.label in workers:
                    workers.pop(side.label).close()
        rounds, errors = alternate(dict(workers), comparison.plan)
        for label, why in errors.items():
            timed[label].error = why
            workers.pop(label).close()
        for label in rounds:
            timed[label].rounds = rounds[label]
            timed[label].peak = workers[label].ask("memory")["bytes"]
        if comparison.agree is not None:
            whole = {side.label for side in comparison.sides if not side.bound}
            computed = {label: worker for label, worker in workers.items() if label in whole}
            for label, difference in _differences(computed, Path(folder)).items():
                timed[label].differs = difference
    return Row(point, threads, (load, machine.load()), others.used(), timed)


def _start(side: Side, threads: int | None) -> Worker:
    reason = side.why_not()
    if reason is not None:
        raise SideError(reason, missing=True)
    return Worker({**held_to(threads), **STEADY, **side.env})


def _differences(workers: dict[str, Worker], folder: Path) -> dict[str, float]:
    """Return by side the largest difference of its results from those of the first side."""
    first: list[Any] = []
    found = {}
    for n, (label, worker) in enumerate(workers.items()):
        file = folder / f"{n}.npz"
        worker.ask("result", file=str(file))
        with np.load(file) as saved:
            arrays = [saved[name] for name in saved.files]
        file.unlink()
        if n:
            found[label] = _difference(first, arrays)
        else:
            first = arrays
    return found


def _difference(expected: list[Any], got: list[Any]) -> float:
    """Return the largest difference, relative to the largest element of its array; infinite where shapes differ."""
    if [x.shape for x in expected] != [x.shape for x in got]:
        return math.inf
    sizes = [float(np.max(np.abs(x), initial=0.0)) or 1.0 for x in expected]
    errors = [float(np.max(np.abs(x - y), initial=0.0)) for x, y in zip(expected, got, strict=True)]
    return max((error / size for error, size in zip(errors, sizes, strict=True)), default=0.0)


@click.command(help=(__doc__ or "").partition("\n")[0])
@click.argument("chosen", nargs=-1, metavar="[NAME]...")
@click.option("--quick", is_flag=True, help="Fewer points and rounds: a look, no result.")
@click.option("--rounds", type=click.IntRange(1), help="Rounds of each point.")
@click.option("--threads", multiple=True, metavar="N", help="Numbers of threads; all: each library's own choice.")
@click.option("--only", default="", metavar="TEXT", help="Only the points whose description has this text in it.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Write NAME.md, .json and .svg here.")
@click.option("--list", "listing", is_flag=True, help="Show the comparisons and their points.")
def main(
    chosen: tuple[str, ...],
    quick: bool,
    rounds: int | None,
    threads: tuple[str, ...],
    only: str,
    out: Path | None,
    listing: bool,
) -> None:
    """Run comparisons, print their tables and write their reports.

    Exits with 1 where a side failed or computed something else, and with 3 where there was nothing to compare with.
    """
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    try:
        comparisons = [load(name) for name in dict.fromkeys(chosen) or names()]
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if listing:
        for comparison in comparisons:
            console.print(f"[bold]{comparison.name}[/]: {comparison.title}")
            for point in comparison.grid:
                console.print(f"  {describe(point)}", markup=False)
        return
    failed: list[str] = []
    empty = False
    for comparison in comparisons:
        comparison = _adjusted(comparison, quick, rounds, threads)
        console.print(f"[bold]{comparison.title}[/]")

        def show(row: Row, comparison: Comparison = comparison) -> None:
            console.print(f"  {row.label}: {report.in_words(comparison, row)}", markup=False)

        command = " ".join(["python -m asv_benchmarks.peers", comparison.name, *_options(sys.argv[1:], chosen)])
        result = run(comparison, command=command, quick=quick, only=only, progress=show)
        if not result.rows:
            raise click.UsageError(f"--only: got {only!r}, which no point of {comparison.name} has")
        failed += result.failed
        if not result.compared and result.missing:
            empty = True
            console.print(f"nothing to compare with: {'; '.join(result.missing)}\n", markup=False)
            continue
        report.show(result, console)
        if out is not None:
            for path in report.write(result, out):
                console.print(f"wrote {path}", markup=False)
    for line in failed:
        console.print(f"failed: {line}", markup=False)
    sys.exit(1 if failed else 3 if empty else 0)


def _adjusted(comparison: Comparison, quick: bool, rounds: int | None, threads: tuple[str, ...]) -> Comparison:
    """Return the comparison with what the command line asks for."""
    plan = comparison.plan
    if quick:
        plan = replace(plan, rounds=5, seconds=5.0, round_seconds=0.05, warm_seconds=0.1, at_least=3)
    if rounds is not None:
        plan = replace(plan, rounds=rounds, seconds=math.inf)
    numbers = comparison.threads[:1] if quick else comparison.threads
    if threads:
        if bad := [text for text in threads if text != "all" and not (text.isdecimal() and int(text))]:
            raise click.UsageError(f"--threads: got {bad[0]!r}, needs a whole number from 1, or all")
        numbers = tuple(None if text == "all" else int(text) for text in threads)
    return replace(comparison, plan=plan, threads=numbers)


def _options(arguments: list[str], chosen: tuple[str, ...]) -> list[str]:
    """Return the command line without the names of comparisons."""
    return [word for word in arguments if word not in chosen]


if __name__ == "__main__":
    main()
