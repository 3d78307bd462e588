"""``refattn train``: a small language model of a mechanism's blocks, trained by its hand-written gradients."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from refattn import interrupts
from refattn.cli.arguments import INTERRUPTED, TERMINATED, Name, Place, Problem, a_backend, record_of
from refattn.cli.output import is_terminal, show_cursor

if TYPE_CHECKING:
    from refattn.train.loop import Report, Result


@click.command(short_help="Train a small language model.")
@click.argument("mechanism", type=Name())
@click.option(
    "--data",
    metavar="stdlib|repeats|PATH",
    help="The text: Python's own library (default), generated, a file or folder.",
)
@click.option("--steps", type=int, metavar="N", help="Number of updates.")
@click.option(
    "--out",
    type=Place(),
    metavar="DIR",
    help="The folder of the run; runs/MECHANISM by default, or the next free name.",
)
@click.option(
    "--resume", is_flag=True, help="Go on with the run in the folder, to the bit; with more --steps beyond its end."
)
@click.option("--exact", is_flag=True, help="With --resume: only where versions, code and machine are the same.")
@click.option(
    "--grow", metavar="auto|N,N,...", help="Make blocks wider: where it is worth while, or after these steps."
)
@click.option("--backend", metavar="NAME", shell_complete=a_backend, help="The array library; numpy by default.")
@click.option(
    "--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Any setting; block.KEY for the block's."
)
@click.option(
    "--config",
    type=Place(),
    metavar="FILE",
    help="Settings as TOML; other options hold over it.",
)
@click.pass_context
def train(
    ctx: click.Context,
    mechanism: str,
    data: str | None,
    steps: int | None,
    out: str | None,
    resume: bool,
    exact: bool,
    grow: str | None,
    backend: str | None,
    assignments: tuple[str, ...],
    config: str | None,
) -> None:
    """Train a byte-level language model of MECHANISM's blocks, with hand-written gradients.

    Ctrl-C once finishes the step and saves, twice stops at once; --resume goes on. The settings for --set, with their
    defaults, stand in config.json of any run.
    """
    record = record_of(mechanism)
    from refattn.train import folder, loop, settings
    from refattn.train.checkpoint import CheckpointError
    from refattn.train.diagnose import DivergedError

    options = {"data": data, "steps": steps, "backend": backend, "grow": _steps(grow)}
    given = {name: value for name, value in options.items() if value is not None}
    try:
        if twice := [name for name in settings.parse(assignments) if name in given]:
            raise ValueError(f"{twice[0]}: got --{twice[0]} and --set {twice[0]}=..., needs one of them")
        given = settings.parse(assignments) | given
        if config is not None:
            given = settings.merge(settings.read_toml(config), given)
        given = settings.expanded(record, given)
        path = Path(out) if out is not None else folder.of_mechanism(record.name, resume)
        stored = folder.stored_config(path, given | {"mechanism": record}) if resume else None
        chosen = settings.build(record, settings.merge(stored["settings"] if stored else {}, given))
    except (ValueError, TypeError, folder.RunError) as error:
        raise Problem(str(error)) from error
    except OSError as error:
        raise Problem(_of_system(error, Path(out or "runs"))) from error
    try:
        with _report() as report:
            found = loop.run(chosen, path, report, resume=resume, exact=exact)
    except (ImportError, ValueError, TypeError, folder.RunError, CheckpointError) as error:
        raise Problem(str(error)) from error
    except OSError as error:
        saved = error.strerror is not None and os.path.exists(path / "config.json")
        goes_on = f"; --resume --out {path} goes on from what is saved" if saved else ""
        raise Problem(_of_system(error, path) + goes_on) from error
    except DivergedError as error:
        click.echo(f"refattn: error: {error}", file=sys.stderr)
        ctx.exit(1)
    if not found.finished:
        click.echo(
            f"stopped after step {found.step} of {chosen.steps}; go on with --resume --out {path}", file=sys.stderr
        )
        ctx.exit(TERMINATED if found.signal == signal.SIGTERM else INTERRUPTED)
    click.echo(_told(found), file=sys.stdout)


def _steps(grow: str | None) -> str | list[int] | None:
    """Return the steps of a list of them; any other text as it is."""
    return [int(n) for n in grow.split(",")] if grow and re.fullmatch(r"\d+(,\d+)*", grow) else grow


def _of_system(error: OSError, path: Path) -> str:
    """Return an error of the operating system in words; the file is that of the error, or else `path`."""
    return str(error) if error.strerror is None else f"{error.filename or path}: {error.strerror}"


def _told(found: Result) -> str:
    """Return the scores as a table, and the sample."""
    facts = found.facts
    rows = [
        (f"model, {facts['parameters']} parameters", facts["heldout_bits"]),
        ("bigram", facts["bigram_bits"]),
        ("gzip -9", facts["gzip_bits"]),
    ]
    lines = [f"bits per byte of {facts['heldout_bytes']} held-out bytes"]
    for name, bits in rows:
        ratio = facts["heldout_bits"] / bits
        lines.append(
            f"  {name:<28} {bits:6.3f}" + ("" if name == rows[0][0] else f"   the model has {ratio:.2f} of it")
        )
    speed = f"{facts['tokens_per_second']:.0f} tokens/s" if facts["tokens_per_second"] else "no step timed"
    lines += [
        f"{facts['step']} steps, {facts['tokens']} tokens, {facts['seconds']:.0f} s, {speed}",
        f"run: {found.folder}",
    ]
    if found.sample:
        lines += ["", "sample:", printable(found.sample)]
    return "\n".join(lines)


def printable(sample: bytes) -> str:
    """Return bytes of a model as text, without what a terminal would take for orders."""
    text = sample.decode("utf-8", "replace")
    return "".join(x if x.isprintable() or x in "\n\t" else "\ufffd" for x in text)


@contextlib.contextmanager
def _report() -> Iterator[Report]:
    """Return a bar on a terminal, elsewhere lines at times."""
    if not is_terminal(sys.stderr):
        from refattn.train.progress import Lines

        yield Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = ("train", BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with interrupts.undo(show_cursor), Progress(*columns, console=Console(stderr=True)) as bar:
        yield _Bar(bar)


class _Bar:
    def __init__(self, bar: Any) -> None:
        from refattn.train.progress import Speed

        self.bar, self.task, self.speed = bar, None, Speed()

    def say(self, text: str) -> None:
        self.bar.console.print(text, markup=False, highlight=False)

    def step(self, row: Mapping[str, Any], steps: int) -> None:
        told = self.speed.of(row)
        if self.task is None:
            self.task = self.bar.add_task(told, total=steps, completed=row["step"])
        self.bar.update(self.task, completed=row["step"], description=told)
