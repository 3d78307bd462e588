"""``refattn check`` and ``refattn verify``: the reference by itself, and others against it."""

from __future__ import annotations

import contextlib
import sys

import click

from refattn.cli.arguments import (
    NOTHING_RUN,
    Problem,
    backend_of,
    backend_option,
    check_writable,
    json_option,
    record_of,
)
from refattn.cli.output import deliver, progress
from refattn.mechanisms import registry


@click.command("check", short_help="Let the reference certify itself.")
@click.argument("mechanisms", nargs=-1, metavar="[MECHANISM]...")
@backend_option
@json_option
@click.option("--require-all", is_flag=True, help="Exit with 3 where something could not be run.")
@click.pass_context
def check(ctx: click.Context, mechanisms: tuple[str, ...], backend: str, file: str | None, require_all: bool) -> None:
    """Let the reference certify itself: forms, equations, laws and gradients of all mechanisms, or of those named."""
    records = [record_of(name) for name in dict.fromkeys(mechanisms) or registry.list_mechanisms()]
    library = backend_of(backend)
    check_writable(file)
    from refattn.verify import check, report

    found = []
    for record in records:
        with progress(f"check {record.name}", "checks") as wrap:
            found.append(check.check(record, library, require_all=require_all, progress=wrap))
    codes = {one.exit_code for one in found}
    code = 1 if 1 in codes else NOTHING_RUN if codes == {NOTHING_RUN} or require_all and NOTHING_RUN in codes else 0
    data = {"checks": [one.to_json() for one in found], "exit_code": code}
    deliver(lambda **form: "\n\n".join(report.checked(one, **form) for one in found), data, file)
    ctx.exit(code)


@click.command("verify", short_help="Verify an implementation against the reference.")
@click.argument("mechanism")
@click.option(
    "--impl", required=True, metavar="MODULE_OR_FILE:FUNCTION", help="The implementation, such as kernel.py:attend."
)
@click.option("--grad", is_flag=True, help="Judge the gradients too.")
@click.option(
    "--dtype", "dtypes", multiple=True, metavar="NAME", help="float64, float32, float16 or bfloat16; all by default."
)
@json_option
@click.pass_context
def verify(
    ctx: click.Context, mechanism: str, impl: str, grad: bool, dtypes: tuple[str, ...], file: str | None
) -> None:
    """Verify an implementation of MECHANISM against the reference, on its designed cases.

    The implementation is f(q, k, v, *, mask=None, causal=False, scale=None, **options) with NumPy arrays (batch, heads,
    tokens, dim); it returns an array of any library, or refattn.Decline("why") for what it does not do.
    """
    record = record_of(mechanism)
    if record.core is None:
        raise Problem(f"mechanism: got {mechanism!r}, which is no map of q, k and v, needs one that is")
    from refattn.verify import adapter, run

    for name in dtypes:
        if name not in run.DTYPES:
            raise Problem(f"--dtype: got {name!r}, needs one of {', '.join(run.DTYPES)}")
    check_writable(file)
    if "" not in sys.path:
        sys.path.append("")  # a module in the working directory is found, and shadows none that is installed
    dtypes = tuple(dict.fromkeys(dtypes)) or run.DTYPES
    # Whatever foreign code prints is kept out of the report.
    with progress(f"verify {record.name}", "cases") as wrap, contextlib.redirect_stdout(sys.stderr):
        try:
            implementation = adapter.load(impl)
            found = run.verify(record, implementation, label=impl, dtypes=dtypes, grad=grad, progress=wrap)
        except adapter.LoadError as error:
            raise Problem(str(error)) from error
    from refattn.verify import report

    deliver(lambda **form: report.verified(found, record, **form), found.to_json(), file)
    ctx.exit(found.exit_code)
