"""``refattn trace``: every equation of one run, with its value."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

import refattn
from refattn.cli.arguments import Problem, backend_of, backend_option, check_writable, json_option, record_of
from refattn.cli.output import deliver, write_data

if TYPE_CHECKING:
    from refattn.verify.traced import Traced


@click.command("trace", short_help="Show every equation of one run, with its value.")
@click.argument("mechanism")
@click.option("--case", metavar="NAME", help="The designed case of the core; tiny by default.")
@click.option("--block", is_flag=True, help="Run one step of the block; so does a mechanism without a core.")
@click.option("--dtype", default="float64", metavar="NAME", help="float64 (default), float32, float16 or bfloat16.")
@backend_option
@json_option
@click.option("--safetensors", metavar="FILE", help="Write every array, equations by id, in the safetensors format.")
def trace(
    mechanism: str, case: str | None, block: bool, dtype: str, backend: str, file: str | None, safetensors: str | None
) -> None:
    """Run MECHANISM on a case, forward and backward, and show each equation in the order that it ran.

    Shown are its id, formula, file and line, variable, axes and value; and the arguments and results.
    """
    record = record_of(mechanism)
    from refattn.golden.storage import DTYPES
    from refattn.verify import traced
    from refattn.verify.show import trace as traced_text

    if dtype not in DTYPES:
        raise Problem(f"--dtype: got {dtype!r}, needs one of {', '.join(DTYPES)}")
    block = block or record.core is None
    if block and case is not None:
        raise Problem(f"--case: got {case!r}, needs none: the block of {mechanism} is run, which has no cases")
    if case is not None and case not in (names := [each.name for each in record.cases]):
        raise Problem(f"--case: got {case!r}, needs one of {', '.join(names)}")
    library = backend_of(backend)
    if (reason := library.why_unavailable()) is not None:
        raise Problem(f"--backend: {backend} cannot be used: {reason}")
    if dtype == "float64":
        library.enable_float64()
        if not library.float64():
            raise Problem(f"--dtype: got float64, which {backend} does not have here; --dtype float32 is one it has")
    check_writable(file)
    if safetensors == "-":
        raise Problem("--safetensors: got '-', needs a file: it is no text that could be printed")
    check_writable(safetensors, "--safetensors")
    with library.full_precision():
        if block:
            found = traced.trace_block(record, dtype, library)
        else:
            found = traced.trace_core(record, case or "tiny", dtype, library)
    if safetensors is not None:
        _write(found, safetensors)
    deliver(lambda **form: traced_text.text(found, **form), {**found.to_json(), "version": refattn.__version__}, file)


def _write(found: Traced, file: str) -> None:
    from safetensors.numpy import save

    metadata = {name: getattr(found, name) for name in ("mechanism", "part", "case", "dtype")}
    axes = {f"axes {step.id}": ", ".join(step.place.axes or ()) for step in found.steps}
    data = save(found.tensors(), {**metadata, "version": refattn.__version__, **axes})
    write_data(file, data, "--safetensors")
