"""``refattn check``: the reference by itself."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from refattn.cli.arguments import (
    NOTHING_RUN,
    Name,
    Problem,
    backend_of,
    backend_option,
    campaign_options,
    check_writable,
    json_option,
    records_of,
)
from refattn.cli.output import deliver, progress, say

if TYPE_CHECKING:
    from refattn.many_runs import Where
    from refattn.verify.outcome import CheckReport


@click.command("check", short_help="Let the reference certify itself.")
@click.argument("mechanisms", type=Name(), nargs=-1, metavar="[MECHANISM]...")
@backend_option
@json_option
@click.option("--require-all", is_flag=True, help="Exit with 3 where something could not be run.")
@click.option("--full", is_flag=True, help="Run every case, dtype and sample of a property, and more directions.")
@click.option(
    "--devices", type=click.IntRange(1), metavar="N", help="Of JAX: check implementations on arrays over N devices."
)
@click.option("--mesh", metavar="SIZES", help="How they share the work: heads=2,tokens=4; tokens=N by default.")
@campaign_options()
@click.option("-v", "--verbose", is_flag=True, help="Show every check, not only those of a mechanism that disagrees.")
@click.pass_context
def check(
    ctx: click.Context,
    mechanisms: tuple[str, ...],
    backend: str,
    file: str | None,
    require_all: bool,
    full: bool,
    devices: int | None,
    mesh: str | None,
    where: Where,
    verbose: bool,
) -> None:
    """Let the reference certify itself: implementations, equations, properties and gradients of all mechanisms, or of
    those named, also by MODULE:NAME of a record.

    A line for each mechanism, and a table of its checks where something disagrees. A sample is run unless --full asks
    for everything: each case in one dtype, properties in half of their combinations, differences along one direction.
    """
    records = records_of(mechanisms)
    library = backend_of(backend, usable=False)  # its report says why nothing was run
    check_writable(file)
    sizes = _mesh(library.name, devices, mesh)
    from refattn.verify.report import tables
    from refattn.verify.selfcheck import check

    found: list[CheckReport] = []
    names = [record.address for record in records]
    unavailable = library.why_unavailable() is not None
    asked: dict[str, Any] = {"full": full, "require_all": require_all, "where": where, "mesh": sizes}
    with progress("check", "parts") as wrap:
        for one in check.check_all(names, library.name, progress=wrap, **asked):
            table = verbose or sizes is not None or one.exit_code != 0
            # A backend that cannot be used has the same table for every mechanism.
            say(partial(tables.checked, one, table=table and not (unavailable and found)), file)
            found.append(one)
    codes = {one.exit_code for one in found}
    code = 1 if 1 in codes else NOTHING_RUN if codes == {NOTHING_RUN} or require_all and NOTHING_RUN in codes else 0
    data = {"checks": [one.to_json() for one in found], "exit_code": code}
    deliver(None, data, file)
    ctx.exit(code)


def _mesh(library: str, devices: int | None, text: str | None) -> dict[str, int] | None:
    """Return the sizes of the mesh that is asked for, and see to so many devices; None where none is asked for."""
    if devices is None and text is None:
        return None
    if library != "jax":
        raise Problem(f"--devices and --mesh: got the backend {library}, needs --backend jax")
    from refattn import backends
    from refattn.shards import mesh

    try:
        sizes = {"tokens": devices or 1} if text is None else mesh.sizes_of(text)
        if devices is not None and math.prod(sizes.values()) != devices:
            raise Problem(f"--mesh: got {text}, needs sizes whose product is {devices}, the number of devices")
        if backends.get("jax").why_unavailable() is None:
            mesh.use_devices(math.prod(sizes.values()))
    except ValueError as error:
        raise Problem(str(error)) from error
    return sizes
