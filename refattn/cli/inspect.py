"""``refattn list`` and ``refattn backends``: what there is."""

from __future__ import annotations

import click

from refattn.cli.arguments import check_writable, json_option, record_of
from refattn.cli.output import deliver
from refattn.mechanisms import registry


@click.command("list", short_help="Show the mechanisms.")
@json_option
def list_(file: str | None) -> None:
    """Show the mechanisms of the library."""
    check_writable(file)
    records = [record_of(name) for name in registry.list_mechanisms()]
    data = [{"name": m.name, "title": m.title, "forms": list(m.forms), "source": m.source} for m in records]
    from refattn.verify.show import report

    deliver(lambda **form: report.mechanisms(records, **form), data, file)


@click.command("backends", short_help="Show the array libraries.")
def backends() -> None:
    """Show the array libraries: which can be used here, and why others cannot."""
    from refattn.backends import describe
    from refattn.verify.show import report

    rows = describe()
    deliver(lambda **form: report.backends(rows, **form))
