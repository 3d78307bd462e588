"""What commands say: the text and the facts that were asked for, and how far a long run has come."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import AbstractContextManager
from typing import Any

import click

from refattn import interrupts
from refattn.cli.arguments import Problem
from refattn.files import reason, write_output

Wrap = Callable[[Iterable[Any]], Iterable[Any]]


def deliver(text: Callable[..., str] | None, data: Any = None, file: str | None = None) -> None:
    """Write the facts to the file where one is given, and print the text: to standard error if the facts go out."""
    if text is not None:
        say(text, file)
    if file is None:
        return
    facts = json.dumps(data, indent=2, allow_nan=False, default=str) + "\n"
    if file == "-":
        click.echo(facts.rstrip("\n"), file=sys.stdout)
    else:
        write_text(file, facts, "--json")


def say(text: Callable[..., str], file: str | None = None) -> None:
    """Print a text: to standard error if facts go to standard output."""
    stream = sys.stderr if file == "-" else sys.stdout
    implementation: dict[str, Any] = {"colour": is_terminal(stream)}
    if stream.isatty():
        implementation["width"] = shutil.get_terminal_size().columns
    click.echo(text(**implementation), file=stream)


def wrote(file: str) -> Callable[..., str]:
    """Return the text that names a file that was written."""
    return lambda **_: f"wrote {file}"


def write_text(file: str, text: str, option: str) -> None:
    """Write a file; that it cannot be written is the user's problem."""
    write_data(file, text.encode("utf-8", "backslashreplace"), option)


def write_data(file: str, data: bytes, option: str) -> None:
    """Write a file whole or not at all; that it cannot be written is the user's problem."""
    try:
        write_output(file, data)
    except (OSError, ValueError) as error:
        raise Problem(f"{option}: {file!r} cannot be written: {reason(error)}") from error


def progress(what: str, unit: str) -> AbstractContextManager[Wrap]:
    """Return a context that gives a function to wrap a sequence in: a bar on a terminal, elsewhere a line at times."""
    return _bar(what) if is_terminal(sys.stderr) else contextlib.nullcontext(lambda items: _lines(items, what, unit))


def is_terminal(stream: Any) -> bool:
    """Tell whether escape codes are welcome."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


@contextlib.contextmanager
def _bar(what: str) -> Iterator[Wrap]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Any) -> Text:
            return Text(f"{task.speed:.3g}/s" if task.speed else "")

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Rate(), TimeRemainingColumn())
    with interrupts.undo(show_cursor), Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield lambda items: _checked(bar.track(items, description=what))


def show_cursor() -> None:
    """Have a terminal show its cursor again, which a bar hides."""
    os.write(2, b"\x1b[?25h\n")


def _checked(items: Iterable[Any]) -> Iterator[Any]:
    """Pass items on; between two of them a signal ends the command."""
    for item in items:
        interrupts.check()
        yield item


def _lines(items: Iterable[Any], what: str, unit: str) -> Iterator[Any]:
    """Pass items on; say at each quarter, and every ten seconds, how many are done, how quickly, and what is left."""
    todo = items if isinstance(items, Sized) else list(items)  # what comes as it is ready is not waited for
    begun = said = time.monotonic()
    size = len(todo)
    for done, item in enumerate(_checked(todo), start=1):
        yield item
        quarter = 4 * done // size > 4 * (done - 1) // size
        if quarter or time.monotonic() - said > 10.0:
            said = time.monotonic()
            rate = done / max(said - begun, 1e-9)
            left = f", {rate:.3g}/s, {(size - done) / rate:.0f} s left" if done < size else ""
            click.echo(f"{what}: {done} of {size} {unit}{left}", file=sys.stderr)
