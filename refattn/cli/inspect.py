"""``refattn list`` and ``refattn backends``: what there is."""

from __future__ import annotations

from dataclasses import asdict

import click

from refattn.cli.arguments import Name, check_writable, json_option, record_of
from refattn.cli.output import deliver
from refattn.mechanisms import registry


@click.command("list", short_help="Show the mechanisms, or what their sources claim.")
@click.argument("mechanisms", nargs=-1, metavar="[MECHANISM]...", type=Name())
@click.option("--claims", is_flag=True, help="Show what the sources claim, whether it holds, and what shows it.")
@json_option
def list_(mechanisms: tuple[str, ...], claims: bool, file: str | None) -> None:
    """Show the mechanisms of the library, or those that are named."""
    check_writable(file)
    records = [record_of(name) for name in dict.fromkeys(mechanisms) or registry.list_mechanisms()]
    from refattn.verify.report import tables

    if claims:
        rows = [{"mechanism": record.name, **asdict(claim)} for record in records for claim in record.claims]
        deliver(lambda **implementation: tables.claims(records, **implementation), rows, file)
    else:
        data = [
            {"name": m.name, "title": m.title, "implementations": list(m.implementations), "source": m.source}
            for m in records
        ]
        deliver(lambda **implementation: tables.mechanisms(records, **implementation), data, file)


@click.command("backends", short_help="Show the array libraries.")
def backends() -> None:
    """Show the array libraries: which can be used here, and why others cannot."""
    from refattn.backends import describe
    from refattn.verify.report import tables

    rows = describe()
    deliver(lambda **implementation: tables.backends(rows, **implementation))
