"""``refattn show``: the definition of a mechanism as one file that runs on NumPy alone."""

from __future__ import annotations

import sys

import click

import refattn
from refattn.cli.arguments import Name, Place, Problem, check_writable, record_of
from refattn.cli.output import write_text


@click.command("show", short_help="Print the definition of a mechanism as one file.")
@click.argument("mechanism", type=Name())
@click.option("--out", type=Place(), metavar="FILE", help="Write the file there; - is standard output, as without it.")
@click.option("--all", "everything", is_flag=True, help="With all that may be chosen, not only what is by default.")
def show(mechanism: str, out: str | None, everything: bool) -> None:
    """Print the definition of MECHANISM as one file that runs on NumPy alone, forward and backward.

    It is made from the source: the equations, the two functions that compute them, and the few that these use. Of what
    may be chosen, such as one of several kernels, it has the default, with any numbers and masks. As a program it runs
    a small case.
    """
    record = record_of(mechanism)
    check_writable(out, "--out")
    from refattn.show import page

    try:
        text = page(record, refattn.__version__, everything=everything)
    except ValueError as error:
        raise Problem(str(error)) from error
    if out is None or out == "-":
        click.echo(text.rstrip("\n"), file=sys.stdout)
    else:
        write_text(out, text, "--out")
