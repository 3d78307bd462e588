"""The commands behind `make bench`, `make bench-compare` and `make bench-publish`."""

from __future__ import annotations

import contextlib
import math
import os
import re
import statistics
import sys
import tempfile
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

from asv_benchmarks import archive, cost, counts, culprit, history, machine, touched
from asv_benchmarks import changes as steplist
from asv_benchmarks import compare as versions
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
        """Return it; a name with its parameters, as `run` prints it, is taken as it is."""
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
    """Nothing can be told. Exit 1 is for what got worse."""

    exit_code = 2


def _writable(ctx: click.Context, param: click.Parameter, value: str | None) -> Path | None:
    """Look before anything is measured whether a file can be written."""
    if value is None:
        return None
    file = Path(value)
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise click.BadParameter(f"got {value!r}, needs a file that can be written", ctx, param)
    return file


def _finite(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"got {value}, needs a finite number", ctx, param)
    return value


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Turn the errors of a command into a line and an exit with 2."""
    try:
        yield
    except versions.VersionError as error:
        raise click.UsageError(str(error)) from error
    except (history.RunError, archive.ArchiveError, counts.CountError) as error:
        raise Failure(str(error)) from error


class Commands(click.Group):
    """Commands that exit with 130 or 143 where they are interrupted; 1 would say that something got worse."""

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


@cli.command("run", short_help="Run the benchmarks and compare them with the last stored results.")
@_profile
@_bench
@click.option("--quick", is_flag=True, help="A few benchmarks of each mechanism, in a minute.")
def run_command(profile: str | None, bench: str | None, quick: bool) -> None:
    """Run the benchmarks with asv, store the results, and compare them with the last ones of this machine."""
    console = _console()
    chosen = _chosen(profile, bench, PROFILES["quick"] if quick else "")
    with _told():
        found = history.run(chosen, lambda line: console.print(line, markup=False, soft_wrap=True), quick=quick)
    if found.before is None:
        console.print(f"stored as {found.after}; there were no earlier results of this machine to compare with")
    else:
        title = f"{found.before} -> {found.after}, at different times"
        show(list(_ours(found.verdicts)), title, console)
        if found.moved:
            console.print(f"[bold]{found.moved}[/]: believe no ratio near that; make bench-compare is robust to it")
        for (name, python), stored in history.steps(chosen).items():
            mine = {one: many for one, many in stored.items() if one.commits[-1].startswith(found.after)}
            if any(mine.values()):
                show_steps(mine, f"since earlier runs, {name}, {python.removesuffix('.json')}", console)
    if found.stopped:
        raise found.stopped
    sys.exit(1 if any(verdict.word == "fails" for verdict in found.verdicts) else 0)


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


@cli.command("bisect", short_help="Find the commit since which a benchmark differs.")
@click.argument("good")
@click.argument("bad")
@click.argument("benchmark")
def bisect_command(good: str, bad: str, benchmark: str) -> None:
    """Find the first commit after GOOD, up to BAD, with the difference that BENCHMARK has between the two.

    BENCHMARK is a name with its parameters, or a regular expression of one. Every commit that git asks about runs
    beside GOOD in alternating rounds, each from a folder of its own; nothing is checked out here.
    """
    console = _console()
    with tempfile.TemporaryDirectory() as folder, _told():
        found = culprit.search(
            good, bad, benchmark, Path(folder), lambda line: console.print(line, markup=False, soft_wrap=True)
        )
    if len(found.commits) > 1:
        console.print(f"one of these, which could not be measured: {', '.join(c[:10] for c in found.commits)}")
        return
    told = machine.git("show", "-s", "--format=%h %an, %ad: %s", "--date=short", found.commits[0])
    console.print(f"first with the difference: {told}", markup=False, soft_wrap=True)
    if found.step is not None:
        show([found.step], "it beside its first parent", console)


@cli.command("record", short_help="Add results of commits to those that come with the repository.")
@click.argument("commits", nargs=-1, required=True, metavar="COMMIT...")
@click.option("--machine", "name", required=True, metavar="NAME", help="What this machine is called there.")
@click.option("--profile", type=click.Choice(list(PROFILES)), default="history", help="Which benchmarks.")
@_bench
@click.option("--rounds", type=click.IntRange(1), default=2, show_default=True, help="How often all are run, in turn.")
def record_command(commits: tuple[str, ...], name: str, profile: str, bench: str | None, rounds: int) -> None:
    """Run this checkout's benchmarks on each COMMIT in turn, and add what they give.

    A benchmark that a commit has already is measured again. Nothing is installed. This is for a quiet machine.
    """
    console = _console()
    with _told():
        files = history.record(
            commits,
            bench or PROFILES[profile],
            name,
            lambda line: console.print(line, markup=False, soft_wrap=True),
            rounds=rounds,
        )
    for file in files:
        console.print(f"wrote {file}", markup=False)


@cli.command("publish", short_help="Make web pages of all stored results.")
def publish_command() -> None:
    """Make web pages of all stored results, with asv."""
    console = _console()
    with _told():
        newest, every = history.publish(lambda line: console.print(line, markup=False))
    console.print(f"the newest commit: {newest}", markup=False)
    console.print(f"every curve, through a web server: python -m http.server -d {every.parent}", markup=False)


@cli.command("changes", short_help="Say since which commits benchmarks cost more, or less.")
@_bench
@click.option(
    "--least", type=click.FloatRange(1.0), callback=_finite, help="The factor that a step must exceed; else by kind."
)
def changes_command(bench: str | None, least: float | None) -> None:
    """Find the steps in all stored results, those that come with the repository included.

    asv's own detector finds them. What is counted and shares of the allowed error have no noise: any change is told.
    Exits with 1 where something got worse.
    """
    console = _console()
    with _told():
        stored = history.steps(bench or "", least)
    for (name, python), found in stored.items():
        show_steps(found, f"{name}, {python.removesuffix('.json')}", console)
    every = {series: steps for found in stored.values() for series, steps in found.items()}
    sys.exit(1 if any(series.fails or any(step.worse for step in steps) for series, steps in every.items()) else 0)


def show_steps(found: Mapping[steplist.Series, list[steplist.Change]], title: str, console: Console) -> None:
    """Print steps as a table, with the curves that they are in."""
    steps = steplist.worst_first(step for many in found.values() for step in many)
    longest = max((len(series.commits) for series in found), default=0)
    console.print(f"[bold]{escape(title)}[/]: {len(steps)} steps in {len(found)} series of up to {longest} commits")
    for series in found:
        if series.fails:
            console.print(f"[red]fails[/] at {series.fails[:8]}: {escape(str(series.benchmark))}", soft_wrap=True)
    if not steps:
        return
    curves = {
        series.benchmark: steplist.sparkline(series.values, [series.commits.index(step.commit) for step in many])
        for series, many in found.items()
    }
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("", "commit", "benchmark", "factor", "curve"):
        table.add_column(name, justify="right" if name == "factor" else "left", overflow="fold")
    for step in steps:
        commits, factor = f"{step.before[:8]}..{step.commit[:8]}", times(step.benchmark.kind, step.factor, 3)
        cells = [step.word, commits, str(step.benchmark), factor, curves[step.benchmark]]
        of_machine = step.benchmark.name.startswith(MACHINE)
        table.add_row(*map(escape, cells), style=None if of_machine else "red" if step.worse else "green")
    console.print(table)


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
