"""The command line: parse, call, print.

Exit codes: 0 all that ran agree; 1 something disagrees, raises or has the wrong shape; 2 bad usage or input; 3 nothing
was run; 130 interrupted, 143 terminated. What is asked for goes to standard output; progress and errors go to standard
error.

A command is a small file here; what it needs is imported inside its function, so that help comes at once.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import click

import refattn
from refattn import interrupts
from refattn.cli import stdio
from refattn.cli.analyse import analyse
from refattn.cli.arguments import BAD_INPUT, INTERRUPTED, Group, read_help
from refattn.cli.check import check
from refattn.cli.golden import golden
from refattn.cli.inspect import backends, list_
from refattn.cli.runs import plot, sample
from refattn.cli.show import show
from refattn.cli.trace import trace
from refattn.cli.train import train
from refattn.cli.verify import verify
from refattn.interrupts import Interrupted
from refattn.messages import shown


class Commands(Group):
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
            ctx.exit(_explain(error, ctx.invoked_subcommand))


def _explain(error: BaseException, command: str | None = None) -> int:
    """Print an error of a command, or of what stands before it, as one line; return its exit code."""
    if isinstance(error, Interrupted):
        click.echo(f"refattn: {error.word}", file=sys.stderr)
        return error.code
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        click.echo("refattn: interrupted", file=sys.stderr)
        return INTERRUPTED
    if isinstance(error, click.UsageError):
        # What click's parser itself raises, an option without its value, has no context.
        path = error.ctx.command_path if error.ctx else f"refattn {command or ''}".rstrip()
        message = error.format_message().removesuffix(".")
        message = f"{message[:1].lower()}{message[1:]}; see {path} --help"
    elif isinstance(error, click.ClickException):
        message = error.format_message()
    elif isinstance(error, OSError) and error.filename is not None:
        message = f"{os.fsdecode(error.filename)}: {error.strerror}"
    else:
        message = f"{type(error).__name__}: {error} (refattn --debug shows where)"
    click.echo(f"refattn: error: {shown(' '.join(message.split()))}", file=sys.stderr)
    return BAD_INPUT


@click.group(cls=Commands, invoke_without_command=True, context_settings={"max_content_width": 100})
@click.version_option(refattn.__version__, prog_name="refattn", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """The golden reference for attention: step through it, let it check itself, verify other kernels against
    it, and train a model with it.

    Exit codes: 0 all that ran agree; 1 something disagrees, raises or has the wrong shape; 2 bad usage or input; 3
    nothing was run; 130 interrupted, 143 terminated.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), file=sys.stderr)
        ctx.exit(BAD_INPUT)


for _command in (list_, show, backends, check, verify, trace, train, sample, plot, analyse, golden):
    cli.add_command(_command)
if cli.help is None:  # python -OO
    read_help(cli)


def main() -> None:
    """Run the command line: the console entry point."""
    output = stdio.hold()
    interrupts.listen("refattn: ")
    try:
        cli(prog_name="refattn")
    except SystemExit as ended:
        sys.stdout.flush()
        code = ended.code
        if output.failure is not None and not code:
            click.echo(f"refattn: error: standard output: {output.failure.strerror}", file=sys.stderr)
            code = BAD_INPUT
        sys.exit(interrupts.finish(code))
