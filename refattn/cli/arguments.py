"""What commands take: options that several of them have, and names that must exist."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from refattn.files import check_output, reason
from refattn.mechanisms import registry
from refattn.messages import meant

if TYPE_CHECKING:
    from refattn.backends import Backend
    from refattn.mechanisms.record import Mechanism

BAD_INPUT, NOTHING_RUN, INTERRUPTED, TERMINATED = 2, 3, 130, 143


MOST_SEED = 2**63 - 1


class Problem(click.ClickException):
    """Something that the user can put right; the message names what was given and what is needed."""


class Place(click.ParamType):
    """The path of a file or a folder; an empty text, such as that of a variable that is not set, is none."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the path as it is."""
        if not value:
            named = "path" if param is None else next((x for x in param.opts if x[0] == "-"), param.metavar or "path")
            raise Problem(f"{named.strip('[]')}: got an empty text, needs a path")
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Have the shell complete it."""
        return [CompletionItem(incomplete, type="file")]


class Seconds(click.ParamType):
    """A time limit."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number."""
        try:
            if (seconds := float(value)) > 0.0:
                return seconds
        except ValueError:
            pass
        raise Problem(f"{'' if param is None else param.opts[0]}: got {str(value)[:80]!r}, needs seconds above 0")


class Name(click.ParamType):
    """What names a mechanism; a shell completes names, and `record_of` finds out whether there is such a one."""

    name = "text"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the names that begin so."""
        known = (*registry.list_mechanisms(), *registry.declared())
        return [CompletionItem(name) for name in known if name.startswith(incomplete)]


Completion = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def completing(names: Callable[[click.Context], Iterable[str]]) -> Completion:
    """Return what completes an option that takes names, of which several may stand in one text with commas between."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        before, comma, begun = incomplete.rpartition(",")
        return [CompletionItem(f"{before}{comma}{name}") for name in names(ctx) if name.startswith(begun)]

    return complete


def _cases(ctx: click.Context) -> list[str]:
    """Return the names of the designed cases of the mechanism that the line has so far."""
    # An option that waits for its value stops the parser before it has given the words their names.
    name = next((word for word in (ctx.params.get("mechanism"), *ctx.args) if word), "")
    # A completion loads no package of others.
    return [case.name for case in registry.listed(name).cases] if name in registry.list_mechanisms() else []


def _types(ctx: click.Context) -> tuple[str, ...]:
    from refattn.golden.storage_types import DTYPES, SCALED

    return (*DTYPES, *(SCALED if ctx.command.name == "verify" else ()))


def _backends(ctx: click.Context) -> tuple[str, ...]:
    from refattn import backends

    return tuple(backends.names())


a_case, a_type, a_backend = map(completing, (_cases, _types, _backends))

json_option = click.option(
    "--json",
    "file",
    type=Place(),
    metavar="FILE",
    help="Write the same facts as JSON; - is standard output, without the table.",
)

backend_option = click.option(
    "--backend",
    "backend",
    default="numpy",
    metavar="NAME",
    shell_complete=a_backend,
    help="The array library; numpy by default.",
)


def campaign_options(keep: bool = True, jobs: str = "one for each CPU") -> Callable[[Any], Any]:
    """Give a command the options of where its units of work run; it takes them as `where`."""

    def wrap(function: Any) -> Any:
        @functools.wraps(function)
        def run(*given: Any, jobs: int | None, scheduler: str | None, keep: str | None = None, **named: Any) -> Any:
            if jobs is not None and scheduler is not None:
                raise Problem("--jobs: got processes of this machine, needs no --scheduler beside it")
            from refattn.many_runs import CampaignError, Where

            where = Where(jobs, scheduler, None if keep is None else Path(keep))
            try:
                return function(*given, where=where, **named)
            except CampaignError as error:
                raise Problem(str(error)) from error

        options = [
            click.option(
                "-j", "--jobs", type=click.IntRange(1, 1024), metavar="N", help=f"Processes; {jobs} by default."
            ),
            click.option("--scheduler", metavar="ADDRESS", help="Run on the workers of this Dask cluster."),
        ]
        if keep:
            about = "Keep each part that has ended in DIR, and go on from there another time."
            options.append(click.option("--keep", type=Place(), metavar="DIR", help=about))
        return functools.reduce(lambda made, option: option(made), reversed(options), run)

    return wrap


class Group(click.Group):
    """A group of commands that says which there are where one is unknown."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Find the command of this name."""
        if args[0] not in self.commands:
            ctx.fail(
                f"command: got {args[0]!r}{meant(args[0], self.commands)}, needs one of {', '.join(self.commands)}"
            )
        return super().resolve_command(ctx, args)


def read_help(command: click.Command) -> None:
    """Give a command, and those below it, the help that ``python -OO`` has left out, from the source."""
    source = ast.parse(textwrap.dedent(inspect.getsource(command.callback)))  # type: ignore[arg-type]
    command.help = ast.get_docstring(source.body[0])  # type: ignore[arg-type]
    for below in getattr(command, "commands", {}).values():
        read_help(below)


def record_of(name: str) -> Mechanism:
    """Return the record of a mechanism that the user names, also one of another package or of the working directory."""
    if ":" in name and "" not in sys.path:
        sys.path.append("")  # a module in the working directory is found, and shadows none that is installed
    try:
        with contextlib.redirect_stdout(sys.stderr):  # where a package prints when it is imported
            return registry.mechanism(name)
    except (ImportError, TypeError, ValueError) as error:
        raise Problem(str(error)) from error


def records_of(names: Iterable[str]) -> list[Mechanism]:
    """Return the records of mechanisms that the user names, each once; all of the library if none is named."""
    return [record_of(name) for name in dict.fromkeys(names) or registry.list_mechanisms()]


def backend_of(name: str, *, usable: bool = True) -> Backend:
    """Return the backend of this name, one that can be used unless the caller itself reports why it cannot."""
    from refattn import backends

    try:
        return backends.usable(name) if usable else backends.get(name)
    except (ImportError, TypeError, ValueError) as error:
        raise Problem(str(error)) from error


def check_writable(file: str | None, option: str = "--json") -> None:
    """Fail now, not after a long run, where a file cannot be written."""
    if file is None or file == "-":
        return
    try:
        check_output(file)
    except (OSError, ValueError) as error:
        raise Problem(f"{option}: got {file!r}, needs a file that can be written ({reason(error)})") from error
