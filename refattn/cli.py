"""The command line: parse, call, print.

Exit codes: 0 all that ran agree; 1 something disagrees, raises or has the wrong shape; 2 bad usage or input; 3 nothing
was run; 130 interrupted. What is asked for goes to standard output; progress and errors go to standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import refattn
from refattn.mechanisms import registry

if TYPE_CHECKING:
    from refattn.mechanisms.record import Mechanism

Wrap = Callable[[Iterable[Any]], Iterable[Any]]

BAD_INPUT, NOTHING_RUN, INTERRUPTED = 2, 3, 130


class Problem(click.ClickException):
    """Something that the user can put right; the message names what was given and what is needed."""


class Commands(click.Group):
    """A group of commands that says every error in one line, and its traceback only with ``--debug``."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run, print and exit."""
        extra["standalone_mode"] = False
        try:
            code = super().main(*args, **extra)
        except (click.ClickException, click.Abort, OSError) as error:  # in what stands before the command
            code = _explain(error)
        sys.exit(code)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error becomes a line and an exit code."""
        try:
            return super().invoke(ctx)
        except click.exceptions.Exit:
            raise
        except BaseException as error:
            if ctx.params["debug"]:
                traceback.print_exc()
            ctx.exit(_explain(error))

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Find the command of this name; say which there are where there is none."""
        if args[0] not in self.commands:
            ctx.fail(f"command: got {args[0]!r}, needs one of {', '.join(self.commands)}")
        return super().resolve_command(ctx, args)


def _explain(error: BaseException) -> int:
    """Print an error as one line; return its exit code."""
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        click.echo("refattn: interrupted", err=True)
        return INTERRUPTED
    if isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx else "refattn"
        message = error.format_message().removesuffix(".")
        message = f"{message[:1].lower()}{message[1:]}; see {command} --help"
    elif isinstance(error, click.ClickException):
        message = error.format_message()
    else:
        message = f"{type(error).__name__}: {error} (refattn --debug shows where)"
    click.echo(f"refattn: error: {' '.join(message.split())}", err=True)
    return BAD_INPUT


@click.group(cls=Commands, invoke_without_command=True, context_settings={"max_content_width": 100})
@click.version_option(refattn.__version__, prog_name="refattn", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """The golden reference for attention: list it, let it check itself, verify other implementations against it.

    Exit codes: 0 all that ran agree; 1 something disagrees, raises or has the wrong shape; 2 bad usage or input; 3
    nothing was run.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(BAD_INPUT)


_json = click.option(
    "--json", "file", metavar="FILE", help="Write the same facts as JSON; - is standard output, without the table."
)


@cli.command("list", short_help="Show the mechanisms.")
@_json
def list_command(file: str | None) -> None:
    """Show the mechanisms of the library."""
    _check_writable(file)
    records = [registry.mechanism(name) for name in registry.list_mechanisms()]
    data = [{"name": m.name, "title": m.title, "forms": list(m.forms), "source": m.source} for m in records]
    from refattn.verify import report

    _deliver(lambda **form: report.mechanisms(records, **form), data, file)


@cli.command("backends", short_help="Show the array libraries.")
def backends_command() -> None:
    """Show the array libraries: which can be used here, and why others cannot."""
    from refattn import backends
    from refattn.verify import report

    rows = backends.describe()
    _deliver(lambda **form: report.backends(rows, **form))


@cli.command("check", short_help="Let the reference certify itself.")
@click.argument("mechanisms", nargs=-1, metavar="[MECHANISM]...")
@click.option("--backend", default="numpy", metavar="NAME", help="The array library; numpy by default.")
@_json
@click.option("--require-all", is_flag=True, help="Exit with 3 where something could not be run.")
@click.pass_context
def check_command(
    ctx: click.Context, mechanisms: tuple[str, ...], backend: str, file: str | None, require_all: bool
) -> None:
    """Let the reference certify itself: forms, equations, laws and gradients of all mechanisms, or of those named."""
    records = [_record(name) for name in dict.fromkeys(mechanisms) or registry.list_mechanisms()]
    from refattn import backends

    try:
        library = backends.get(backend)
    except (ImportError, TypeError, ValueError) as error:
        raise Problem(str(error)) from error
    _check_writable(file)
    from refattn.verify import report
    from refattn.verify.check import check

    found = []
    for record in records:
        with _progress(f"check {record.name}", "checks") as progress:
            found.append(check(record, library, require_all=require_all, progress=progress))
    codes = {one.exit_code for one in found}
    code = 1 if 1 in codes else NOTHING_RUN if codes == {NOTHING_RUN} or require_all and NOTHING_RUN in codes else 0
    data = {"checks": [one.to_json() for one in found], "exit_code": code}
    _deliver(lambda **form: "\n\n".join(report.checked(one, **form) for one in found), data, file)
    ctx.exit(code)


@cli.command("verify", short_help="Verify an implementation against the reference.")
@click.argument("mechanism")
@click.option(
    "--impl", required=True, metavar="MODULE_OR_FILE:FUNCTION", help="The implementation, such as kernel.py:attend."
)
@click.option("--grad", is_flag=True, help="Judge the gradients too.")
@click.option(
    "--dtype", "dtypes", multiple=True, metavar="NAME", help="float64, float32, float16 or bfloat16; all by default."
)
@_json
@click.pass_context
def verify_command(
    ctx: click.Context, mechanism: str, impl: str, grad: bool, dtypes: tuple[str, ...], file: str | None
) -> None:
    """Verify an implementation of MECHANISM against the reference, on its designed cases.

    The implementation is f(q, k, v, *, mask=None, causal=False, scale=None, **options) with NumPy arrays (batch, heads,
    tokens, dim); it returns an array of any library, or refattn.Decline("why") for what it does not do.
    """
    record = _record(mechanism)
    if record.core is None:
        raise Problem(f"mechanism: got {mechanism!r}, which is no map of q, k and v, needs one that is")
    from refattn.verify import adapter, run

    for name in dtypes:
        if name not in run.DTYPES:
            raise Problem(f"--dtype: got {name!r}, needs one of {', '.join(run.DTYPES)}")
    _check_writable(file)
    if "" not in sys.path:
        sys.path.append("")  # a module in the working directory is found, and shadows none that is installed
    dtypes = tuple(dict.fromkeys(dtypes)) or run.DTYPES
    # Whatever foreign code prints is kept out of the report.
    with _progress(f"verify {record.name}", "cases") as progress, contextlib.redirect_stdout(sys.stderr):
        try:
            implementation = adapter.load(impl)
            found = run.verify(record, implementation, label=impl, dtypes=dtypes, grad=grad, progress=progress)
        except adapter.LoadError as error:
            raise Problem(str(error)) from error
    from refattn.verify import report

    _deliver(lambda **form: report.verified(found, record, **form), found.to_json(), file)
    ctx.exit(found.exit_code)


def _record(name: str) -> Mechanism:
    if name not in registry.list_mechanisms():
        raise Problem(f"mechanism: got {name!r}, needs one of {', '.join(registry.list_mechanisms())}")
    return registry.mechanism(name)


def _check_writable(file: str | None) -> None:
    """Fail now, not after a long run, where a file cannot be written."""
    if file is None or file == "-":
        return
    try:
        existed = os.path.lexists(file)
        with open(file, "a", encoding="utf-8"):
            pass
        if not existed:
            os.unlink(file)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise Problem(f"--json: got {file!r}, needs a file that can be written ({why})") from error


def _deliver(text: Callable[..., str], data: Any = None, file: str | None = None) -> None:
    """Write the facts to the file where one is given, and print the text: to standard error if the facts go out."""
    facts = json.dumps(data, indent=2, allow_nan=False, default=str) + "\n"
    if file == "-":
        _print(facts.rstrip("\n"))
    elif file is not None:
        try:
            Path(file).write_text(facts, encoding="utf-8")
        except OSError as error:
            raise Problem(f"--json: {file!r} cannot be written: {error.strerror}") from error
    stream = sys.stderr if file == "-" else sys.stdout
    form: dict[str, Any] = {"colour": _is_terminal(stream)}
    if stream.isatty():
        form["width"] = shutil.get_terminal_size().columns
    _print(text(**form), stream)


def _print(text: str, stream: Any = None) -> None:
    """Print; that nobody reads on (``refattn list | head -1``) is no error, and no character is."""
    stream = stream or sys.stdout
    encoding = stream.encoding or "utf-8"
    try:
        click.echo(text.encode(encoding, "backslashreplace").decode(encoding), file=stream)
    except OSError as error:
        # What is left in the buffer would be tried, and complained about, once more at the end of the program.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if not isinstance(error, BrokenPipeError):
            raise


def _is_terminal(stream: Any) -> bool:
    """Tell whether escape codes are welcome."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _progress(what: str, unit: str) -> AbstractContextManager[Wrap]:
    """Return a context that gives a function to wrap a sequence in: a bar on a terminal, elsewhere a line at times."""
    return _bar(what) if _is_terminal(sys.stderr) else contextlib.nullcontext(lambda items: _lines(items, what, unit))


@contextlib.contextmanager
def _bar(what: str) -> Iterator[Wrap]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield lambda items: bar.track(list(items), description=what)


def _lines(items: Iterable[Any], what: str, unit: str) -> Iterator[Any]:
    """Pass items on; say at each quarter, and every ten seconds, how many are done."""
    todo = list(items)
    said = time.monotonic()
    for done, item in enumerate(todo, start=1):
        yield item
        quarter = 4 * done // len(todo) > 4 * (done - 1) // len(todo)
        if quarter or time.monotonic() - said > 10.0:
            said = time.monotonic()
            click.echo(f"{what}: {done} of {len(todo)} {unit}", err=True)


def main() -> None:
    """Run the command line: the console entry point."""
    cli(prog_name="refattn")
