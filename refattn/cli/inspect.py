"""``refattn list`` and ``refattn backends``: what there is."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict

import click

from refattn.cli.arguments import Name, check_writable, json_option, records_of
from refattn.cli.output import deliver
from refattn.mechanisms import registry
from refattn.messages import shown


@click.command("list", short_help="Show the mechanisms, or what their sources claim.")
@click.argument("mechanisms", nargs=-1, metavar="[MECHANISM]...", type=Name())
@click.option("--claims", is_flag=True, help="Show what the sources claim, whether it holds, and what shows it.")
@json_option
def list_(mechanisms: tuple[str, ...], claims: bool, file: str | None) -> None:
    """Show the mechanisms of the library and of installed packages, or those that are named."""
    check_writable(file)
    records, failed = records_of(mechanisms), dict[str, str]()
    with contextlib.redirect_stdout(sys.stderr):  # where a package prints when it is imported
        for name, found in registry.of_packages().items() if not mechanisms else ():
            if isinstance(found, str):
                failed[name] = found
            else:
                records.append(found)
    for problem in failed.values():
        click.echo(f"refattn: warning: {shown(problem)}", file=sys.stderr)
    from refattn.verify.report import tables

    if claims:
        rows = [{"mechanism": record.name, **asdict(claim)} for record in records for claim in record.claims]
        deliver(lambda **implementation: tables.claims(records, **implementation), rows, file)
    else:
        data = [
            {"name": m.name, "title": m.title, "implementations": list(m.implementations), "source": m.source}
            for m in records
        ]
        data += [{"name": name, "error": problem} for name, problem in failed.items()]
        deliver(lambda **implementation: tables.mechanisms(records, **implementation), data, file)


@click.command("backends", short_help="Show the array libraries.")
def backends() -> None:
    """Show the array libraries: which can be used here, and why others cannot."""
    from refattn.backends import describe
    from refattn.verify.report import tables

    rows = describe()
    deliver(lambda **implementation: tables.backends(rows, **implementation))
