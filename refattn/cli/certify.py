"""``refattn check`` and ``refattn verify``: the reference by itself, and others against it."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

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
from refattn.cli.golden import read_set
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
@click.option("--impl", metavar="MODULE_OR_FILE:FUNCTION", help="The implementation, such as kernel.py:attend.")
@click.option("--exec", "program", metavar="CMD", help="A program of any language, run as CMD IN OUT for each case.")
@click.option("--outputs", metavar="DIR", help="A folder of results, CASE.DTYPE.safetensors, of golden vectors.")
@click.option(
    "--vectors", metavar="DIR", help="The golden vectors that --outputs is from; those of the package if absent."
)
@click.option("--timeout", type=float, default=60.0, metavar="SECONDS", help="For each run of --exec; 60 by default.")
@click.option("--grad", is_flag=True, help="Judge the gradients too.")
@click.option(
    "--dtype", "dtypes", multiple=True, metavar="NAME", help="float64, float32, float16 or bfloat16; all by default."
)
@json_option
@click.pass_context
def verify(
    ctx: click.Context,
    mechanism: str,
    impl: str | None,
    program: str | None,
    outputs: str | None,
    vectors: str | None,
    timeout: float,
    grad: bool,
    dtypes: tuple[str, ...],
    file: str | None,
) -> None:
    """Verify an implementation of MECHANISM against the reference, on its designed cases.

    The implementation is f(q, k, v, *, mask=None, causal=False, scale=None, **options) with NumPy arrays (batch, heads,
    tokens, dim); it returns an array of any library, or refattn.Decline("why") for what it does not do.
    """
    record = record_of(mechanism)
    if record.core is None:
        raise Problem(f"mechanism: got {mechanism!r}, which is no map of q, k and v, needs one that is")
    given = [name for name, x in (("--impl", impl), ("--exec", program), ("--outputs", outputs)) if x is not None]
    if len(given) != 1:
        raise Problem(f"got {' and '.join(given) or 'no implementation'}, needs one of --impl, --exec and --outputs")
    if vectors is not None and outputs is None:
        raise Problem("--vectors: got a folder, needs --outputs beside it")
    from refattn.verify import adapter, dumped, run
    from refattn.verify.program import Program

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
            if outputs is not None:
                golden = read_set(ctx, vectors)
                record = dumped.as_stored(record, golden)
                found = dumped.verify_files(record, _folder(outputs), golden, dtypes=dtypes, grad=grad, progress=wrap)
            else:
                named = ("out", *record.outputs)
                implementation = Program(program, named, timeout) if program is not None else adapter.load(impl or "")
                label = program or impl or ""
                found = run.verify(record, implementation, label=label, dtypes=dtypes, grad=grad, progress=wrap)
        except adapter.LoadError as error:
            raise Problem(str(error)) from error
    from refattn.verify import report

    deliver(lambda **form: report.verified(found, record, **form), found.to_json(), file)
    ctx.exit(found.exit_code)


def _folder(name: str) -> Path:
    if not Path(name).is_dir():
        raise Problem(f"--outputs: got {name!r}, needs a folder")
    return Path(name)
