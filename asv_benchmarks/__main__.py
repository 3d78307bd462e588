"""The command behind `make bench-compare`; `make bench` and `make bench-publish` are those of asv."""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from asv_benchmarks import compare as versions
from asv_benchmarks import cost, counts, machine, touched
from asv_benchmarks.judge import LIMITS, WORSE, Verdict, number, summary, times
from asv_benchmarks.suite import MACHINE, PROFILES, Benchmark, benchmarks
from refattn import interrupts
from refattn.cli.output import show_cursor
from refattn.files import temporary_folder
from refattn.interrupts import Interrupted

_profile = click.option(
    "--profile", type=click.Choice(list(PROFILES)), help="Which benchmarks; without --bench: short, those of NumPy."
)


class Expression(click.ParamType):
    """A regular expression that matches a benchmark."""

    name = "regex"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return it; a name with its parameters, as the tables print it, is taken as it is."""
        if value in map(str, benchmarks()):
            return f"^{re.escape(value)}$"
        try:
            known = benchmarks(value)
        except re.error as error:
            self.fail(f"got {value!r}, needs a regular expression ({error})", param, ctx)
        if not known:
            example = re.escape(str(benchmarks()[0]))
            self.fail(f"got {value!r}, needs to match a benchmark with its parameters, as '{example}' does", param, ctx)
        return value


_bench = click.option("--bench", type=Expression(), metavar="REGEX", help="Only what it matches, name or parameters.")


def _chosen(profile: str | None, bench: str | None, quick: str) -> str:
    """Return the expression of the benchmarks that all options ask for; `quick` is the one of --quick, or ""."""
    usual = "" if quick or bench else PROFILES["short"]
    every = [one for one in (quick, PROFILES[profile] if profile else usual, bench) if one]
    whole = every[0] if len(every) == 1 else "^" * bool(every) + "".join(f"(?=.*?(?:{one}))" for one in every)
    if not benchmarks(whole):
        raise click.UsageError("--bench, --quick and --profile: got expressions that no benchmark matches together")
    return whole


class Failure(click.ClickException):
    """Nothing was measured: exit code 2, because 1 means that something got worse."""

    exit_code = 2


def _writable(ctx: click.Context, param: click.Parameter, value: str | None) -> Path | None:
    """Look before anything is measured whether a file can be written."""
    if value is None:
        return None
    file = Path(value)
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise click.BadParameter(f"got {value!r}, needs a file that can be written", ctx, param)
    return file


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Turn the errors of the command into a line and an exit with 2."""
    try:
        yield
    except versions.VersionError as error:
        raise click.UsageError(str(error)) from error
    except counts.CountError as error:
        raise Failure(str(error)) from error


class Commands(click.Group):
    """A command that exits with 130 or 143 where it is interrupted; 1 would say that something got worse."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command as click does."""
        try:
            sys.exit(super().main(*args, **{**extra, "standalone_mode": False}))
        except click.Abort as error:
            how = error.__cause__ if isinstance(error.__cause__, Interrupted) else Interrupted()
            click.echo(how.word, err=True)
            sys.exit(how.code)
        except click.ClickException as error:
            error.show()
            sys.exit(error.exit_code)


@click.group(cls=Commands, help=(__doc__ or "").strip())
def cli() -> None:
    """Group of the commands."""


@cli.command("compare", short_help="Compare two commits.")
@click.argument("base", default="HEAD")
@click.argument("head", default=versions.WORKING_TREE)
@_profile
@_bench
@click.option("--quick", is_flag=True, help="A few benchmarks of each mechanism.")
@click.option("--all", "everything", is_flag=True, help="Also what does not import any file that differs.")
@click.option("--markdown", callback=_writable, metavar="FILE", help="Write the tables there, too.")
@click.option("--json", "numbers", callback=_writable, metavar="FILE", help="Write all numbers there.")
def compare_command(
    base: str,
    head: str,
    profile: str | None,
    bench: str | None,
    quick: bool,
    everything: bool,
    markdown: Path | None,
    numbers: Path | None,
) -> None:
    """Compare the commit BASE with the commit HEAD, or with the files as they are (a dot).

    Counts the instructions of small calls first, if valgrind is there, and measures then. Both take only what imports
    a file that differs. Exits with 1 where something got slower or less exact, needs more memory or instructions, or
    fails, and with 2 where there is no such version.
    """
    console = _console()
    chosen, load = _chosen(profile, bench, versions.QUICK if quick else ""), machine.load()
    title, found = f"{base} -> {head}", list[Verdict]()
    with temporary_folder() as folder, _told():
        one, other = (versions.check_out(v, folder / n) for n, v in (("base", base), ("head", head)))
        asked = versions.known((one, other))
        if not everything:
            differing = touched.touched((one, other), list(asked))
            console.print(touched.reason(differing), markup=False, soft_wrap=True)
            asked = {benchmark: asked[benchmark] for benchmark in differing}
        try:
            with _progress(console) as progress:
                for verdict in _measured((one, other), asked, chosen, bench or "", quick, progress, console):
                    found.append(verdict)
        except BaseException:
            title += ", not to its end"
            raise
        finally:
            if found:
                interrupts.whole(lambda: told(found, title, console, markdown, numbers))
    console.print(f"load average {load:.1f} before, {machine.load():.1f} after")
    sys.exit(1 if any(verdict.word in WORSE for verdict in found) else 0)


def _measured(
    homes: versions.Homes,
    asked: Mapping[Benchmark, str],
    chosen: str,
    bench: str,
    quick: bool,
    progress: Any,
    console: Console,
) -> Iterator[Verdict]:
    """Yield verdicts on the instructions of small calls, or say why there are none; then those on everything else."""
    small = [one for one in asked if all(re.search(x, str(one)) for x in (counts.SMALL, counts.QUICK * quick, bench))]
    if small and (reason := counts.why_not()):
        console.print(reason, markup=False, soft_wrap=True)
    elif small:
        console.print(f"counting the instructions of {len(small)} small calls of both versions", markup=False)
        yield from counts.compared(homes, small, progress)
    rest = {one: word for one, word in asked.items() if re.search(chosen, str(one))}
    yield from _ours(versions.compare(homes, rest, progress))


def told(
    verdicts: Sequence[Verdict], title: str, console: Console, markdown: Path | None, numbers: Path | None
) -> None:
    """Print what a change costs each mechanism and then what differs; write both into the files that are asked for."""
    heads, rows = cost.costs(verdicts)
    if rows:
        table = Table(
            title=f"{escape(title)}: what it costs", box=box.SIMPLE_HEAD, title_justify="left", title_style="bold"
        )
        for name in heads:
            table.add_column(name, justify="right" if name else "left")
        for row in rows:
            table.add_row(*(f"[{_colour(word)}]{escape(text)}[/]" if word else escape(text) for text, word in row))
        console.print(table)
        console.print(cost.READING, soft_wrap=True)
    if line := cost.unchanged(verdicts):
        console.print(line, markup=False, soft_wrap=True)
    show(verdicts, title, console)
    if markdown is not None:
        markdown.write_text(as_markdown(verdicts, title), encoding="utf-8")
    if numbers is not None:
        cost.write(numbers, title, verdicts)


def _colour(word: str) -> str:
    return "red" if word in WORSE else "green"


def differing_first(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return what differs, what got worse first."""
    found = [verdict for verdict in verdicts if verdict.word not in ("", "n/a", "new")]
    return sorted(found, key=lambda verdict: (verdict.word not in WORSE, -(verdict.ratio or (0.0,) * 3)[1]))


def as_markdown(verdicts: Sequence[Verdict], title: str) -> str:
    """Return what a change costs, and what differs, as tables in Markdown."""
    heads, rows = cost.costs(verdicts)
    lines = _in_markdown(heads, [[f"**{text}**" if word in WORSE else text for text, word in row] for row in rows])
    differing = [_cells(verdict) for verdict in differing_first(verdicts)]
    listed = _in_markdown(
        ["", "benchmark", "base", "head", "head / base"],
        [[word, f"`{name}`", *(x.replace("|", "\\|") for x in rest)] for word, name, *rest in differing],
    )
    folded = ["<details><summary>what differs</summary>", "", *listed, "", "</details>"]
    tables = ["\n".join(part) for part in ((*lines, "", cost.READING), folded)] if rows else ["no difference"]
    every = [f"**{title}**", *tables, cost.unchanged(verdicts), summary(verdicts)]
    return "\n\n".join(part for part in every if part) + "\n"


def _in_markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    marks = ["---" if name in ("", "benchmark") else "---:" for name in heads]
    return [f"| {' | '.join(cells)} |" for cells in (heads, marks, *rows)]


def show(verdicts: Sequence[Verdict], title: str, console: Console) -> None:
    """Print what differs, worst first, and the counts."""
    differing = differing_first(verdicts)
    if differing:
        table = Table(title=escape(title), box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
        for name in ("", "benchmark", "base", "head", "head / base"):
            table.add_column(name, justify="left" if name in ("", "benchmark") else "right", overflow="fold")
        for verdict in differing:
            table.add_row(*map(escape, _cells(verdict)), style=_colour(verdict.word))
        console.print(table)
    else:
        console.print(f"[bold]{escape(title)}[/]: no difference")
    console.print(summary(verdicts))
    times = [v.ratio[1] for v in verdicts if v.ratio and v.benchmark.kind == "time"]
    if times:
        console.print(f"median of head / base over {len(times)} times: {statistics.median(times):.3f}")
    limits = ", ".join(f"{kind} {limit.factor:g}" for kind, limit in LIMITS.items())
    console.print(f"a difference is a ratio beyond: {limits} (a benchmark may ask for another)")


def _ours(verdicts: Iterable[Verdict]) -> Iterator[Verdict]:
    """Yield the verdicts but those on NumPy alone: there it is the machine that differs."""
    return (verdict for verdict in verdicts if not verdict.benchmark.name.startswith(MACHINE))


def _cells(verdict: Verdict) -> list[str]:
    kind = verdict.benchmark.kind
    ratio = ""
    if verdict.ratio:
        low, middle, high = verdict.ratio
        ratio = times(kind, middle, 3) if low == high else f"{middle:.3g} [{low:.3g}, {high:.3g}]"
    cells = [number(kind, verdict.base), number(kind, verdict.head), ratio or verdict.detail]
    return [verdict.word, str(verdict.benchmark), *cells]


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False)


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Any]:
    """Return what wraps a list of benchmarks: a bar on a terminal, elsewhere a line now and then."""
    if not console.is_terminal:
        yield _lines
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with interrupts.undo(show_cursor), Progress(*columns, console=console, transient=True) as bar:

        def wrap(benchmarks: list[Any]) -> Iterator[Any]:
            task = bar.add_task("", total=len(benchmarks))
            for benchmark in benchmarks:
                interrupts.check()
                bar.update(task, description=str(benchmark))
                yield benchmark
                bar.advance(task)

        yield wrap


def _lines(benchmarks: list[Any]) -> Iterator[Any]:
    begun = time.monotonic()
    for done, benchmark in enumerate(benchmarks, start=1):
        interrupts.check()
        yield benchmark
        left = (time.monotonic() - begun) / done * (len(benchmarks) - done) / 60.0
        click.echo(f"{done} of {len(benchmarks)}, {left:.1f} min left: {benchmark}", err=True)


if __name__ == "__main__":
    interrupts.listen()
    try:
        cli(prog_name="python -m asv_benchmarks")
    except SystemExit as ended:
        sys.exit(interrupts.finish(ended.code))
