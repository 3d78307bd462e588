"""``refattn trace``: every equation of one run, with its value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import click

import refattn
from refattn.cli.arguments import (
    Name,
    Place,
    Problem,
    a_case,
    a_type,
    backend_of,
    backend_option,
    check_writable,
    json_option,
    record_of,
)
from refattn.cli.output import deliver, write_data, write_text, wrote
from refattn.messages import meant

if TYPE_CHECKING:
    from refattn.mechanisms.record import Mechanism
    from refattn.verify.traced import Run, Traced


@click.command("trace", short_help="Show every equation of one run, with its value.")
@click.argument("mechanism", type=Name())
@click.option(
    "--case",
    metavar="NAME",
    shell_complete=a_case,
    help="The designed case; by default one that the paper itself has.",
)
@click.option("--block", is_flag=True, help="Run one step of the block; so does a mechanism without a core.")
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help="Any option of the core, or with --block of the block. With implementation=dense the general code runs.",
)
@click.option(
    "--dtype",
    default="float64",
    metavar="NAME",
    shell_complete=a_type,
    help="float64 (default), float32, float16 or bfloat16.",
)
@backend_option
@json_option
@click.option("--only", metavar="ID", multiple=True, help="Print this equation alone, all its passes; may be repeated.")
@click.option(
    "--html",
    type=Place(),
    metavar="FILE",
    help="Write the tour, a page that explains the mechanism, and print its name alone; of a run that no tour covers,"
    " the page has all values.",
)
@click.option(
    "--safetensors", type=Place(), metavar="FILE", help="Write every array, equations by id, in the safetensors format."
)
def trace(
    mechanism: str,
    case: str | None,
    block: bool,
    assignments: tuple[str, ...],
    dtype: str,
    backend: str,
    file: str | None,
    only: tuple[str, ...],
    html: str | None,
    safetensors: str | None,
) -> None:
    """Run MECHANISM on a case, forward and backward, and show each equation in the order that it ran.

    The definition runs if the call is the paper's own. With an option that the paper does not have the general code
    runs, and the first line says so. Shown are the id, formula, file and line that ran, variable, axes and value of
    each equation; and the arguments and results.
    """
    record = record_of(mechanism)
    from refattn.golden.storage_types import DTYPES
    from refattn.verify import traced
    from refattn.verify.report import trace as traced_text

    if dtype not in DTYPES:
        raise Problem(f"--dtype: got {dtype!r}, needs one of {', '.join(DTYPES)}{meant(dtype, DTYPES)}")
    example = record.example is not None and case is None and not block and not assignments
    block = block or (record.core is None and not example)
    if block and case is not None:
        raise Problem(f"--case: got {case!r}, needs none: the block of {mechanism} is run, which has no cases")
    if case is not None and case not in (names := [each.name for each in record.cases]):
        raise Problem(f"--case: got {case!r}{meant(case, names)}, needs one of {', '.join(names)}")
    library = backend_of(backend)
    if dtype == "float64":
        library.enable_float64()
        if not library.float64():
            raise Problem(f"--dtype: got float64, which {backend} does not have here; --dtype float32 is one it has")
    check_writable(file)
    if safetensors == "-":
        raise Problem("--safetensors: got '-', needs a file: it is no text that could be printed")
    check_writable(safetensors, "--safetensors")
    if html == "-":
        raise Problem("--html: got '-', needs a file: it is a page for a browser")
    if html is not None and (dtype, backend) != ("float64", "numpy"):
        raise Problem(
            f"--html: got --dtype {dtype} --backend {backend}, needs float64 and numpy: others are not replayed"
        )
    check_writable(html, "--html")
    chosen = _chosen(record, block, assignments)
    with library.full_precision():
        try:
            if block:
                run = traced.block_run(record, dtype, library, **chosen)
            elif example:
                run = traced.example_run(record, dtype, library)
            else:
                run = traced.read_run(record, case or traced.first_case(record), dtype, library, **chosen)
            found = traced.record(record, run, library)
        except (TypeError, ValueError) as error:
            if not chosen:
                raise
            raise Problem(str(error)) from error
    ran = dict.fromkeys(step.id.partition("[")[0] for step in found.steps)
    for id in only:
        if id not in ran and id not in [step.id for step in found.steps]:
            raise Problem(f"--only: got {id!r}, needs one of those that ran: {', '.join(ran)}")
    if html is not None:
        _page(record, run, found, html, case, chosen)
    if safetensors is not None:
        _write(found, safetensors)
    # The page may be of another run than these values: a tour has a sentence of its own.
    printed = wrote(html) if html is not None else partial(traced_text.text, found, only)
    deliver(
        printed,
        {**found.to_json(), "version": refattn.__version__},
        file,
    )


def _chosen(mechanism: Mechanism, block: bool, assignments: tuple[str, ...]) -> dict[str, Any]:
    from refattn.train import settings

    try:
        chosen = settings.parse(assignments)
    except ValueError as error:
        raise Problem(str(error)) from error
    fields = (field.name for field in dataclasses.fields(mechanism.block.Config))
    known = tuple(fields if block else mechanism.defaults)
    for name in chosen:
        if name not in known:
            raise Problem(f"--set: got {name!r}, needs one of {', '.join(known)}")
    return chosen


def _page(
    mechanism: Mechanism, run: Run, found: Traced, file: str, case: str | None, chosen: Mapping[str, Any]
) -> None:
    """Write the tour, of its own sentence or of the case that is named; if no tour covers the run, a table."""
    from refattn.explorer.page import page
    from refattn.explorer.tour import build

    tour: Any = "a step of the block runs"
    arrays = None
    if found.part != "block":
        q, k, v = (run.arguments.get(name) for name in "qkv")
        arrays = (q, k, v) if case is not None and q is not None and k is not None and v is not None else None
        tour = build.taken(mechanism, chosen if case is None else {**run.options, **_others(run)}, arrays)
    asked = [*([f"--case {case}"] if case is not None else []), *(f"--set {name}={x}" for name, x in chosen.items())]
    command = " ".join(["refattn trace", mechanism.address, *asked, "--html FILE"])
    try:
        if isinstance(tour, str):
            text = page(mechanism, run, found, tour)
        else:
            words, knobs = tour
            text = build.page(mechanism, None if arrays is None else words, knobs, command)
    except ValueError as error:
        raise Problem(f"--html: {error}") from None
    write_text(file, text, "--html")


def _others(run: Run) -> dict[str, Any]:
    """Return the arrays of a run beside q, k, v and upstream gradients."""
    return {name: x for name, x in run.arguments.items() if name not in (*"qkv",) and not name.startswith("d_")}


def _write(found: Traced, file: str) -> None:
    from safetensors.numpy import save

    metadata = {name: getattr(found, name) for name in ("mechanism", "part", "case", "dtype")}
    axes = {f"axes {step.id}": ", ".join(step.place.axes or ()) for step in found.steps}
    data = save(found.tensors(), {**metadata, "version": refattn.__version__, **axes})
    write_data(file, data, "--safetensors")
