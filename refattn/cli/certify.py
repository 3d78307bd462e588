"""``refattn check`` and ``refattn verify``: the reference by itself, and others against it."""

from __future__ import annotations

import contextlib
import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import refattn
from refattn.cli.arguments import (
    NOTHING_RUN,
    Name,
    Place,
    Problem,
    backend_of,
    backend_option,
    campaign_options,
    check_writable,
    json_option,
    record_of,
)
from refattn.cli.begin import INITS, begin
from refattn.cli.golden import read_set
from refattn.cli.output import deliver, progress, say, write_text
from refattn.cli.user_cases import own_cases, own_given, seed_of, sizes_of_large, supported, without_float64
from refattn.mechanisms import registry

if TYPE_CHECKING:
    from refattn.campaign import Where
    from refattn.mechanisms.record import Mechanism
    from refattn.verify.adapters.isolate import Isolated
    from refattn.verify.outcome import CheckReport, Report


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
    those named.

    A line for each mechanism, and a table of its checks where something disagrees. A sample is run unless --full asks
    for everything: each case in one dtype, properties in half of their combinations, differences along one direction.
    """
    records = [record_of(name) for name in dict.fromkeys(mechanisms) or registry.list_mechanisms()]
    library = backend_of(backend)
    check_writable(file)
    sizes = _mesh(library.name, devices, mesh)
    from refattn.verify.report import tables
    from refattn.verify.selfcheck import check

    found: list[CheckReport] = []
    names = [record.name for record in records]
    asked: dict[str, Any] = {"full": full, "require_all": require_all, "where": where, "mesh": sizes}
    with progress("check", "parts") as wrap:
        for one in check.check_all(names, library.name, progress=wrap, **asked):
            say(partial(tables.checked, one, table=verbose or sizes is not None or one.exit_code == 1), file)
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


@click.command("verify", short_help="Verify a kernel against the reference.")
@click.argument("mechanism", type=Name())
@click.option("--impl", metavar="MODULE_OR_FILE:FUNCTION", help="The kernel, such as kernel.py:attend.")
@click.option("--exec", "program", metavar="CMD", help="A program of any language, run as CMD IN OUT for each case.")
@click.option(
    "--outputs", type=Place(), metavar="DIR", help="A folder of results, CASE.DTYPE.safetensors, of golden vectors."
)
@click.option(
    "--vectors",
    type=Place(),
    metavar="DIR",
    help="The golden vectors that --outputs is from; those of the package if absent.",
)
@click.option("--timeout", type=float, default=60.0, metavar="SECONDS", help="For each case; 60 by default.")
@click.option("--in-process", is_flag=True, help="Run --impl in this process: for a debugger, without a time limit.")
@click.option(
    "--rounding",
    metavar="NAME[=TYPE],...",
    help="What it rounds beside what every kernel does: ids of equations, products (=tf32, bf16x3, ...), q, k, v.",
)
@click.option("--grad", is_flag=True, help="Judge the gradients too.")
@click.option("--tangent", is_flag=True, help="Judge the derivative along a direction (forward mode) too.")
@click.option("--hessian", is_flag=True, help="Judge the gradients and their derivative along a direction too.")
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    metavar="NAME",
    help="float64, float32, float16, bfloat16: all by default; float8_e4m3fn, float8_e5m2, mxfp8, nvfp4.",
)
@click.option(
    "--large", "tokens", type=click.IntRange(min=8), metavar="N", help="Check laws on N tokens (with --shape h=2,d=16)."
)
@click.option(
    "--shape", "shapes", multiple=True, metavar="b=1,h=8,...", help="A shape of your own in place of the cases."
)
@click.option("--cases", "listed", metavar="FILE", help="Shapes of your own as JSON, a list or one in each line.")
@click.option("--inputs", metavar="FILE", help="Captured q, k, v, ... of your own as .safetensors or .npz.")
@click.option("--seed", default="0", metavar="N|random", help="Of the random numbers of all inputs; 0 by default.")
@click.option("--memory", is_flag=True, help="Check layouts and calls around a call, not the designed cases.")
@click.option("--bitwise", is_flag=True, help="Check that the same bits come, not the designed cases.")
@click.option("--mesh", metavar="SIZES", help="Run --impl over devices or processes: tokens=4, or heads=2,tokens=4.")
@campaign_options(jobs="1")
@click.option("--html", type=Place(), metavar="FILE", help="Write the report as one page for a browser, too.")
@click.option("--junit", type=Place(), metavar="FILE", help="Write the report as JUnit's XML, too.")
@click.option(
    "--init",
    type=click.Choice(INITS),
    help="Write an adapter to begin with (plain attention, which agrees) into this folder, and end.",
)
@click.option("-v", "--verbose", is_flag=True, help="Show every case that fails and all that is known of the suspects.")
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
    in_process: bool,
    rounding: str | None,
    grad: bool,
    tangent: bool,
    hessian: bool,
    dtypes: tuple[str, ...],
    tokens: int | None,
    shapes: tuple[str, ...],
    listed: str | None,
    inputs: str | None,
    seed: str,
    memory: bool,
    bitwise: bool,
    mesh: str | None,
    where: Where,
    html: str | None,
    junit: str | None,
    init: str | None,
    verbose: bool,
    file: str | None,
) -> None:
    """Verify a kernel of MECHANISM against the reference, on its designed cases.

    The kernel is f(q, k, v, *, mask=None, causal=False, scale=None, **options) with NumPy arrays (batch, heads,
    tokens, dim); it returns an array of any library, or refattn.Decline("why") for what it does not do.

    In place of the designed cases it is run on shapes and arrays of your own where these are given: --shape
    b=2,h=32,g=8,nq=1024,nk=4096,d=128,causal (several times), --cases and --inputs.
    """
    record = record_of(mechanism)
    if record.core is None:
        raise Problem(f"mechanism: got {mechanism!r}, which is no map of q, k and v, needs one that is")
    if init is not None:
        begin(init, mechanism)
        return
    given = [name for name, x in (("--impl", impl), ("--exec", program), ("--outputs", outputs)) if x is not None]
    if len(given) != 1:
        raise Problem(f"got {' and '.join(given) or 'no kernel'}, needs one of --impl, --exec and --outputs")
    if vectors is not None and outputs is None:
        raise Problem("--vectors: got a folder, needs --outputs beside it")
    if not timeout > 0.0:
        raise Problem(f"--timeout: got {timeout:g}, needs seconds above 0")
    if in_process and impl is None:
        raise Problem("--in-process: needs --impl beside it")
    others = [
        name for name, given in (("--large", tokens is not None), ("--memory", memory), ("--bitwise", bitwise)) if given
    ]
    wide = sizes_of_large(shapes) if tokens is not None and len(shapes) == 1 else None
    shapes = shapes if wide is None else ()
    if len(others) > 1:
        raise Problem(f"got {' and '.join(others)}, needs one of them")
    if others and own_given(shapes, listed, inputs):
        raise Problem(f"{others[0]}: got cases beside it, needs none: it runs its own")
    if (memory or bitwise) and (impl is None or html or rounding or tangent or hessian):
        raise Problem(f"{others[0]}: needs --impl, and neither --html, --rounding, --tangent nor --hessian")
    if tokens is not None and (outputs or html or rounding):
        raise Problem("--large: needs --impl or --exec, and neither --html nor --rounding, which are of designed cases")
    if mesh is not None and (impl is None or tokens is not None or memory or bitwise or tangent or hessian):
        raise Problem("--mesh: needs --impl, and neither --large, --memory, --bitwise, --tangent nor --hessian")
    asked_for = tuple(name for name, given in (("tangent", tangent), ("hessian", hessian)) if given)
    if asked_for and (outputs is not None or tokens is not None or program is not None):
        raise Problem(f"--{asked_for[0]}: needs --impl, whose derivatives it takes on the designed cases")
    own = own_given(shapes, listed, inputs)
    if (own or seed != "0") and (outputs is not None or tokens is not None):
        raise Problem("--shape, --cases, --inputs and --seed: need --impl or --exec, and neither --outputs nor --large")
    where = replace(where, jobs=where.jobs or 1)
    if not where.plain and (others or outputs is not None or in_process or html):
        raise Problem(
            "--jobs, --scheduler and --keep: need --impl or --exec on cases, and neither --in-process nor --html"
        )
    rounded = _roundings(record, rounding, outputs is not None)
    number = seed_of(seed)
    if mesh is not None:
        record, impl = _over_mesh(record, mesh), f"{impl}@{mesh}"
    if own:
        record, stored = own_cases(record, shapes, listed, inputs)
        dtypes = dtypes or stored
    from refattn.golden.storage import DTYPES, SCALED
    from refattn.verify import large, parallel, run, shrink, verify_bitwise, verify_memory
    from refattn.verify.adapters import adapter, dumped
    from refattn.verify.tolerance import derivatives, sampled

    for name in dtypes:
        if name not in (*DTYPES, *SCALED):
            raise Problem(f"--dtype: got {name!r}, needs one of {', '.join((*DTYPES, *SCALED))}")
        if name in SCALED and (impl is None or own or others):
            raise Problem(f"--dtype: got {name}, whose numbers have factors, needs --impl on the designed cases")
    if (memory or bitwise) and len(dtypes) > 1:
        raise Problem(f"{others[0]}: got --dtype {', '.join(dtypes)}, needs one")
    if tokens is not None and (len(dtypes) > 1 or {*dtypes} - {*large.DTYPES}):
        raise Problem(f"--large: got --dtype {', '.join(dtypes)}, needs one of {', '.join(large.DTYPES)}")
    if asked_for and (wrong := [name for name in dtypes if name not in derivatives.DTYPES]):
        raise Problem(f"--{asked_for[0]}: got --dtype {wrong[0]}, needs {' or '.join(derivatives.DTYPES)}")
    check_writable(file)
    check_writable(html, "--html")
    check_writable(junit, "--junit")
    if "" not in sys.path:
        sys.path.append("")  # a module in the working directory is found, and shadows none that is installed
    usual = derivatives.DTYPES if asked_for else large.DTYPES if others else DTYPES
    chosen, dtypes = dtypes, tuple(dict.fromkeys(dtypes)) or usual
    left_out = ""
    stand_in: tuple[Mechanism, Report] | None = None
    # Whatever foreign code prints is kept out of the report.
    with contextlib.ExitStack() as stack:
        wrap = stack.enter_context(progress(f"verify {record.name}", "cases" if where.plain else "parts"))
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        try:
            if outputs is not None:
                golden = read_set(ctx, vectors)
                record = dumped.as_stored(record, golden)
                found = dumped.verify_files(record, _folder(outputs), golden, dtypes=dtypes, grad=grad, progress=wrap)
            else:
                kernel, text = _implementation(stack, record, impl, program, timeout, in_process)
                if not own and not others:
                    more = () if asked_for else record.kernel_sizes
                    record = replace(record, cases=(*record.cases, *more), kernel_sizes=())
                    record, dtypes = supported(record, kernel, dtypes, given=bool(chosen))
                if dtypes == DTYPES and not (chosen or others or own) and impl is not None:
                    left_out = without_float64(record, kernel)
                    dtypes = DTYPES[1:] if left_out else DTYPES
                asked: dict[str, Any] = {"label": program or impl or "", "grad": grad or hessian, "progress": wrap}
                if memory or bitwise:
                    kind = verify_memory if memory else verify_bitwise
                    laws = kind(record, kernel, dtype=dtypes[0], seed=number, **asked)
                elif tokens is not None:
                    asked |= wide or {}
                    laws = large.verify_large(record, kernel, tokens, dtype=dtypes[0], **asked)
                else:
                    asked |= {"derivatives": asked_for, "rounding": rounded, "seed": number}
                    if not where.plain:
                        start = parallel.Given(_absolute(impl or ""), program or "", ("out", *record.outputs), timeout)
                        asked["outcomes"] = partial(parallel.outcomes, record, kernel, start, where)
                    found = replace(run.verify(record, kernel, dtypes=dtypes, **asked), left_out=left_out)
                    if not asked_for and mesh is None:  # a shorter sequence would not fit the mesh
                        least = shrink.least(record, kernel, found, rounding=rounded)
                        six = shrink.lines(record.name, *least, text, found.grad, rounded, number) if least else ()
                        found = replace(found, smallest=six, least=least)
                        stand_in = shrink.in_place_of_long(record, kernel, found, rounding=rounded)
        except (adapter.LoadError, sampled.TooLargeError) as error:
            raise Problem(str(error)) from error
    from refattn.verify.adapters.declared import read_roundings, roundings
    from refattn.verify.diagnose import suspects
    from refattn.verify.report import page, tables
    from refattn.verify.report import suspects as suspects_text
    from refattn.verify.report.junit import junit as as_junit
    from refattn.verify.tolerance.precision import explained

    if junit is not None:
        write_text(junit, as_junit(laws if others else found), "--junit")
    if others:
        deliver(lambda **implementation: tables.checked(laws, **implementation), laws.to_json(), file)
        ctx.exit(laws.exit_code)
    if not asked_for and any(outcome.status == "disagrees" for outcome in found.outcomes):
        told = {} if outputs is not None else roundings(kernel, record.equations)
        found = explained(record, found, read_roundings(rounded, record.equations) | told)
        with progress(f"suspects of {record.name}", "equations") as wrap:
            found = suspects.locate(record, found, progress=wrap)
            if stand_in and not found.suspects:
                found = replace(found, suspects=suspects.locate(*stand_in, progress=wrap).suspects)
    if html is not None:
        lines = suspects_text.lines(found.suspects) if found.suspects else ()
        instead = stand_in[1].outcomes if stand_in else ()
        write_text(html, page.page(found, record, refattn.__version__, lines, instead), "--html")
    deliver(
        lambda **implementation: tables.verified(found, record, details=verbose, **implementation),
        found.to_json(),
        file,
    )
    ctx.exit(found.exit_code)


def _over_mesh(record: Mechanism, text: str) -> Mechanism:
    """Return the record with cases whose axes are multiples of the sizes of a mesh."""
    from refattn.shards.mesh import sizes_of
    from refattn.verify.selfcheck.samples import fitted

    try:
        sizes = sizes_of(text)
    except ValueError as error:
        raise Problem(str(error)) from error
    found = (fitted(case, sizes, 2) for case in record.cases)
    return replace(record, cases=tuple(case for case in found if case is not None), kernel_sizes=())


def _implementation(
    stack: contextlib.ExitStack,
    record: Mechanism,
    impl: str | None,
    program: str | None,
    timeout: float,
    in_process: bool,
) -> tuple[Any, str]:
    """Return the kernel and how Python names it."""
    from refattn.verify.adapters.isolate import Isolated
    from refattn.verify.adapters.meshed import load
    from refattn.verify.adapters.program import Program

    if program is not None:
        named = ("out", *record.outputs)
        return Program(program, named, timeout), f"Program({program!r}, {named}, {timeout:g})"
    if in_process:
        return load(impl or ""), f"load({impl!r})"
    kernel = stack.enter_context(Isolated(impl or "", timeout))
    stack.callback(_told, kernel)
    return kernel, f"load({impl!r})"


def _told(kernel: Isolated) -> None:
    """Show what a kernel has printed, before the report."""
    if said := kernel.said.rstrip():
        plain = "".join(c if c.isprintable() or c in "\n\t" else "?" for c in said)
        click.echo(f"what it printed (the end of it):\n{plain}", file=sys.stderr)


def _absolute(impl: str) -> str:
    """Return what names a kernel as any folder has it."""
    place, colon, name = impl.rpartition(":")
    return f"{Path(place).resolve()}:{name}" if colon and Path(place).is_file() else impl


def _roundings(record: Mechanism, given: str | None, stored: bool) -> tuple[str, ...]:
    ids = tuple(id.strip() for id in (given or "").split(",") if id.strip())
    if given is not None and stored:
        raise Problem("--rounding: the budgets of golden vectors are stored in them; needs --impl or --exec")
    from refattn.verify.adapters.declared import read_roundings

    try:
        if given is not None and not ids:
            raise ValueError("name nothing")
        read_roundings(ids, record.equations)
    except ValueError as error:
        needs = f"{error}".partition(", needs ")[2] or f"ids of equations such as {next(iter(record.equations))}"
        raise Problem(f"--rounding: got {given!r}, needs {needs}") from error
    return ids


def _folder(name: str) -> Path:
    if not Path(name).is_dir():
        raise Problem(f"--outputs: got {name!r}, needs a folder")
    return Path(name)
