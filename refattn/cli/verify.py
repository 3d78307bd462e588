"""``refattn verify``: the kernels of others against the reference."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

import refattn
from refattn import interrupts
from refattn.cli.arguments import (
    Name,
    Place,
    Problem,
    Seconds,
    a_case,
    a_type,
    campaign_options,
    check_writable,
    json_option,
    record_of,
)
from refattn.cli.call import called
from refattn.cli.golden import read_set
from refattn.cli.init_adapter import INITS, begin
from refattn.cli.output import deliver, progress, say, write_text, wrote
from refattn.cli.user_cases import (
    of_dump,
    own_cases,
    renamed_by,
    seed_of,
    sizes_of_large,
    some_of,
    supported,
    without_float64,
)
from refattn.messages import meant, shown

if TYPE_CHECKING:
    from refattn.many_runs import Where
    from refattn.mechanisms.record import Mechanism
    from refattn.verify.outcome import CheckReport, Report

KERNEL = ("--impl", "--exec", "--outputs")
CASES = ("--shape", "--cases", "--inputs")
OTHERS = ("--large", "--memory", "--bitwise")
DERIVATIVES = ("--tangent", "--hessian")
LIMIT = 60.0
"""Seconds after which, on a terminal, a run of designed cases begins no further one."""

PARTS = ("--jobs", "--scheduler", "--keep")

NEEDS = {
    "--vectors": ("--outputs",),
    **dict.fromkeys(("--options", "--axes"), ("--inputs",)),
    "--rename": ("--inputs", "--impl"),
    **dict.fromkeys(("--in-process", "--interpret", "--memory", "--bitwise", "--mesh", *DERIVATIVES), ("--impl",)),
    **dict.fromkeys(("--shape", "--cases", "--seed", "--large", *PARTS), ("--impl", "--exec")),
    **dict.fromkeys(("--require-all", "--case", "--quick", "--limit"), ("--impl", "--exec")),
    "--inputs": ("--impl", "--exec"),  # or no kernel at all
    "--rounding": ("--impl", "--exec", "--inputs"),
}
"""Option -> those of which it needs one beside it."""

_DESIGNED = ("--html", "--rounding", *DERIVATIVES, "--mesh", *PARTS)  # what designed cases alone have
WITHOUT = {
    "--memory": (*OTHERS, "--require-all", "--cases", "--inputs", *_DESIGNED),
    "--bitwise": (*OTHERS, "--require-all", *CASES, *_DESIGNED),
    "--large": (*OTHERS, "--require-all", "--cases", "--inputs", "--seed", *_DESIGNED),
    **dict.fromkeys(("--case", "--quick"), (*OTHERS, *CASES, "--mesh")),
    "--mesh": (*DERIVATIVES, "--interpret"),
    "--in-process": PARTS,
    "--html": PARTS,
    "--limit": (*OTHERS, *PARTS),
}
"""Option -> those that it cannot be combined with."""


def check_combination(given: tuple[str, ...]) -> None:
    """Raise Problem if options cannot be given together, by the tables above."""
    kernels = [name for name in KERNEL if name in given]
    if len(kernels) > 1 or not kernels and "--inputs" not in given:
        needs = "one of --impl, --exec and --outputs, or a file for --inputs with out in it"
        raise Problem(f"got {' and '.join(kernels) or 'no kernel'}, needs {needs}")
    for name, needed in NEEDS.items():
        if name in given and not {*needed} & {*given} and (kernels or name != "--inputs"):
            raise Problem(f"{name}: needs {' or '.join(needed)} beside it, got {(kernels or ['--inputs'])[0]}")
    for name, others in WITHOUT.items():
        if name in given and (wrong := [other for other in others if other in given and other != name]):
            raise Problem(f"{name}: cannot be combined with {_listed(wrong)}")


def _listed(names: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


class Asked(SimpleNamespace):
    """What the options of a verification say, each by its name."""

    @property
    def own(self) -> bool:
        """Whether there are cases of the user's own."""
        return self.tokens is None and bool(self.shapes or self.listed is not None or self.inputs is not None)

    @property
    def dump(self) -> bool:
        """Whether what a file holds is judged, without a kernel."""
        return self.inputs is not None and self.impl is None and self.program is None

    @property
    def seconds(self) -> float | None:
        """After how long no further case begins; None for no limit. Somebody at a terminal waits, a script does not."""
        usual = not (self.own or self.names or self.in_process or self.require_all) and self.where.plain
        usual = usual and sys.stderr.isatty()
        return (LIMIT if self.limit is None and usual else self.limit) or None

    @property
    def other(self) -> str:
        """The option of what is checked in place of cases; "" if these are run."""
        kinds = {"--large": self.tokens is not None, "--memory": self.memory, "--bitwise": self.bitwise}
        return next((name for name, given in kinds.items() if given), "")


@click.command("verify", short_help="Verify a kernel against the reference.")
@click.argument("mechanism", type=Name())
@click.argument("words", nargs=-1, metavar="[WORD=VALUE]...")
@click.option(
    "--call", "function", metavar="MODULE_OR_FILE:FUNCTION", help="Any function, called as the WORDs say; no adapter."
)
@click.option("--adapt", is_flag=True, help="Find the WORDs of --call by trial, and write an adapter with them.")
@click.option("--impl", metavar="MODULE_OR_FILE:FUNCTION", help="The kernel: kernel.py:attend, or a model, attn.onnx.")
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
@click.option("--timeout", type=Seconds(), default=60.0, metavar="SECONDS", help="For each case; 60 by default.")
@click.option(
    "--limit",
    type=click.FloatRange(0.0),
    metavar="SECONDS",
    help="Begin no case after so long, the most telling first; 60 by default on a terminal, 0 for none.",
)
@click.option("--in-process", is_flag=True, help="Run --impl in this process: for a debugger, without a time limit.")
@click.option(
    "--interpret",
    is_flag=False,
    flag_value="triton",
    metavar="[triton[=N]|pallas[=tpu]]",
    help="Run its kernels for a GPU on the CPU; Triton's by default, in the Nth configuration of autotune, or in all.",
)
@click.option(
    "--rounding",
    metavar="NAME[=TYPE],...",
    help="What it rounds beside what all kernels do: ids of equations, products (=tf32, ...), q, k, v, exponent.",
)
@click.option("--grad", is_flag=True, help="Judge the gradients too.")
@click.option("--tangent", is_flag=True, help="Judge the derivative along a direction (forward mode) too.")
@click.option("--hessian", is_flag=True, help="Judge the gradients and their derivative along a direction too.")
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    metavar="NAME",
    shell_complete=a_type,
    help="float64, float32, float16, bfloat16: all by default; float8_e4m3fn, float8_e5m2, mxfp8, nvfp4.",
)
@click.option(
    "--large",
    "tokens",
    type=click.IntRange(min=8),
    metavar="N",
    help="Properties on N tokens (with --shape h=2,d=16).",
)
@click.option(
    "--shape", "shapes", multiple=True, metavar="b=1,h=8,...", help="A shape of your own in place of the cases."
)
@click.option(
    "--case",
    "names",
    multiple=True,
    metavar="NAME,...",
    shell_complete=a_case,
    help="Run these designed cases alone (several times).",
)
@click.option("--quick", is_flag=True, help="Run the fewest designed cases that have every feature once.")
@click.option("--cases", "listed", metavar="FILE", help="Shapes of your own as JSON, a list or one in each line.")
@click.option(
    "--inputs",
    metavar="FILE",
    help="Your q, k, v, ... (.safetensors, .npz, .pt); with out in it a dump, judged without a kernel.",
)
@click.option("--rename", multiple=True, metavar="THEIRS=OURS,...", help="What names in --inputs mean: query=q, x=-.")
@click.option("--options", multiple=True, metavar="NAME=VALUE,...", help="Of the call in --inputs: causal,scale=0.3.")
@click.option("--axes", metavar="bhnd|bnhd", help="How arrays in --inputs lie, if shapes do not tell.")
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
    help="Write an adapter that agrees (NumPy: of any mechanism, others: attention), or benchmarks for asv, and end.",
)
@click.option("--require-all", is_flag=True, help="Exit with 3 where no case ran that crosses a tile or chunk.")
@click.option("-v", "--verbose", is_flag=True, help="Show every case that fails and all that is known of the suspects.")
@json_option
@click.pass_context
def verify(
    ctx: click.Context,
    /,
    mechanism: str,
    words: tuple[str, ...],
    function: str | None,
    adapt: bool,
    where: Where,
    init: str | None,
    html: str | None,
    junit: str | None,
    verbose: bool,
    file: str | None,
    **given: Any,
) -> None:
    """Verify a kernel of MECHANISM against the reference, on its designed cases.

    The kernel is f(q, k, v, *, mask=None, causal=False, scale=None, **options) with NumPy arrays (batch, heads,
    tokens, dim); it returns an array of any library, or refattn.Decline("why") for what it does not do. Its attribute
    supports = {"d": [64, 128], "fixed": {"causal": True}} says in which sizes it runs, and which options it always has.

    A function with other names or axes needs no adapter: --call package.module:function layout=bnhd
    causal=is_causal:top_left scale=sm_scale returns=out,lse. With --adapt the words are found;
    docs/verifying/function.md lists them.

    A model, --impl attn.onnx, runs in ONNX Runtime. A dump, --inputs dump.safetensors with q, k, v and out in it, is
    judged without a kernel; .npz and .pt too.

    In place of the designed cases a kernel is run on shapes and arrays of your own where these are given: --shape
    b=2,h=32,g=8,nq=1024,nk=4096,d=128,causal (several times), --cases and --inputs.
    """
    record = record_of(mechanism)
    if record.core is None:
        raise Problem(f"mechanism: got {mechanism!r}, which is no map of q, k and v, needs one that is")
    if init is not None:
        begin(init, record)
        return
    given["impl"] = called(record, function, words, given["impl"], adapt=adapt)
    where = replace(where, jobs=where.jobs or 1)
    options = [(max(one.opts, key=len), ctx.params[one.name or ""], one.default) for one in ctx.command.params]
    named = tuple(
        {"--call": "--impl"}.get(name, name) for name, x, usual in options if x not in (usual, None, (), False)
    )
    check_combination(tuple(name for name in named if not (where.plain and name in PARTS)))
    derivatives = tuple(name for name in ("tangent", "hessian") if given.pop(name))
    given |= {"seed": seed_of(given["seed"]), "rounding": _roundings(record, given["rounding"])}
    asked = Asked(**given, derivatives=derivatives, where=where)
    if asked.mesh is not None:
        record = _over_mesh(record, asked.mesh)
        asked.impl = f"{asked.impl}@{asked.mesh}"
    if asked.impl is not None and asked.impl.endswith(".onnx"):
        if names := ",".join(f"{theirs}={ours}" for theirs, ours in renamed_by(asked).items()):
            asked.impl = f"{asked.impl}@{names}"
    elif asked.rename and asked.inputs is None:
        raise Problem("--rename: needs --inputs, or a model for --impl, such as attn.onnx")
    if asked.interpret is not None:
        from refattn.verify.adapters import interpreted

        try:
            interpreted.check(asked.interpret)
        except interpreted.NoInterpreterError as error:
            raise Problem(f"--{error}") from error
        asked.impl = f"{asked.impl}@{asked.interpret}"
    if asked.axes not in (None, "bhnd", "bnhd"):
        raise Problem(f"--axes: got {asked.axes!r}, needs bhnd (batch, heads, tokens, width) or bnhd")
    _check_sizes(asked)
    remarks: tuple[str, ...] = ()
    if asked.own and not asked.dump:
        record, stored, remarks = own_cases(record, asked)
        asked.dtypes = asked.dtypes or stored
    for place, option in ((file, "--json"), (html, "--html"), (junit, "--junit")):
        check_writable(place, option)
    if "" not in sys.path:
        sys.path.append("")  # a module in the working directory is found, and shadows none that is installed
    from refattn.verify.adapters import adapter, devices
    from refattn.verify.report import tables
    from refattn.verify.tolerance import sampled

    interrupt: list[KeyboardInterrupt] = []
    stand_in: tuple[Mechanism, Report] | None = None
    known: Mapping[str, str] = {}
    missing: tuple[str, ...] = ()
    # Whatever foreign code prints is kept out of the report.
    with contextlib.ExitStack() as stack:
        wrap = stack.enter_context(progress(f"verify {record.name}", "cases" if where.plain else "parts"))
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        try:
            if asked.outputs is not None:
                record, found = _stored_results(ctx, record, asked, wrap)
            elif asked.dump:
                record, found, stand_in = of_dump(record, asked)
                known = adapter.read_roundings(asked.rounding, record)
            else:
                kernel, text = _kernel(stack, record, asked)
                if asked.other:
                    checked = _invariances(record, kernel, asked, wrap)
                else:
                    record, found, stand_in, known = _cases(record, kernel, text, asked, wrap, interrupt.append)
                    found = replace(found, remarks=(*found.remarks, *remarks))
                    missing = devices.missing_types(adapter.Adapter.of(kernel).device)
        except (adapter.LoadError, sampled.TooLargeError) as error:
            raise Problem(str(error)) from error
        except (TypeError, ValueError) as error:
            if not asked.own:
                raise
            sources = [name for name, x in zip(CASES, (asked.shapes, asked.listed, asked.inputs), strict=True) if x]
            raise Problem(f"{' or '.join(sources)}: {error}") from error
    with contextlib.ExitStack() as reports:  # each is written whatever becomes of the others
        if asked.other:
            reports.callback(interrupts.whole, lambda: _write_junit(junit, checked))
            reports.callback(
                interrupts.whole, lambda: deliver(partial(tables.checked, checked), checked.to_json(), file)
            )
            ctx.exit(checked.exit_code)
        reports.callback(interrupts.whole, lambda: _write_junit(junit, found))
        reports.callback(interrupts.whole, lambda: _write_page(html, found, record, stand_in, file))
        told = partial(tables.verified, mechanism=record, details=verbose)
        reports.callback(interrupts.whole, lambda: deliver(partial(told, found), found.to_json(), file))
        if not interrupt and not derivatives and any(outcome.status == "disagrees" for outcome in found.outcomes):
            found = _explained(record, found, known, stand_in, missing)
    if interrupt:
        raise interrupt[0]
    ctx.exit(found.exit_code)


def _write_junit(file: str | None, report: Report | CheckReport) -> None:
    if file is not None:
        from refattn.verify.report.junit import junit

        write_text(file, junit(report), "--junit")


def _write_page(
    html: str | None, report: Report, record: Mechanism, stand_in: tuple[Mechanism, Report] | None, file: str | None
) -> None:
    """Write the page and print its name: to standard error if facts go to standard output."""
    if html is not None:
        from refattn.verify.report import page

        instead = stand_in[1].outcomes if stand_in else ()
        write_text(html, page.page(report, record, refattn.__version__, instead), "--html")
        say(wrote(html), file)


def _check_sizes(asked: Asked) -> None:
    """Raise Problem if what is asked for does not run in the types, or with the shape, that are asked for."""
    from refattn.golden.storage_types import DTYPES, SCALED
    from refattn.verify.tolerance import derivatives

    if asked.tokens is not None:
        sizes_of_large(asked.shapes)
    names = asked.dtypes
    if unknown := [name for name in names if name not in (*DTYPES, *SCALED)]:
        near = [name for name in SCALED if name.startswith(unknown[0].lower().replace("fp8", "float8"))]
        says = f" (did you mean {' or '.join(near)}?)" if near else meant(unknown[0], (*DTYPES, *SCALED))
        raise Problem(f"--dtype: got {unknown[0]!r}, needs one of {', '.join((*DTYPES, *SCALED))}{says}")
    if (scaled := [name for name in names if name in SCALED]) and (
        asked.impl is None or asked.inputs is not None or asked.other
    ):
        raise Problem(f"--dtype: got {scaled[0]}, whose numbers have factors, needs --impl on designed cases or shapes")
    if asked.other and len(names) > 1:
        raise Problem(f"{asked.other}: got --dtype {', '.join(names)}, needs one of {', '.join(DTYPES)}")
    if asked.derivatives and (wrong := [name for name in names if name not in derivatives.DTYPES]):
        needs = " or ".join(derivatives.DTYPES)
        raise Problem(f"--{asked.derivatives[0]}: got --dtype {wrong[0]}, needs {needs}")


def _stored_results(ctx: click.Context, record: Mechanism, asked: Asked, wrap: Any) -> tuple[Mechanism, Report]:
    """Judge files of results of golden vectors."""
    from refattn.golden.storage_types import DTYPES
    from refattn.verify.adapters import result_files

    folder = Path(asked.outputs or "")
    golden = read_set(ctx, asked.vectors, record)
    record = result_files.as_stored(record, golden)
    if not folder.is_dir():
        raise Problem(f"--outputs: got {asked.outputs!r}, needs a folder")
    dtypes = tuple(dict.fromkeys(asked.dtypes)) or DTYPES
    return record, result_files.verify_files(record, folder, golden, dtypes=dtypes, grad=asked.grad, progress=wrap)


def _invariances(record: Mechanism, kernel: Any, asked: Asked, wrap: Any) -> CheckReport:
    """Check what must hold without a truth (--large), in any memory (--memory), or bit for bit (--bitwise)."""
    from refattn.verify import verify_bitwise, verify_large, verify_memory

    common: dict[str, Any] = {"label": asked.program or asked.impl or "", "grad": asked.grad, "progress": wrap}
    common |= {"dtype": asked.dtypes[0]} if asked.dtypes else {}
    if asked.tokens is not None:
        return verify_large(record, kernel, asked.tokens, **common | sizes_of_large(asked.shapes))
    if asked.memory:
        return verify_memory(record, kernel, seed=asked.seed, cases=record.cases if asked.own else (), **common)
    return verify_bitwise(record, kernel, seed=asked.seed, **common)


def _cases(
    record: Mechanism,
    kernel: Any,
    text: str,
    asked: Asked,
    wrap: Any,
    interrupted: Callable[[KeyboardInterrupt], Any],
) -> tuple[Mechanism, Report, tuple[Mechanism, Report] | None, Mapping[str, str]]:
    """Run a kernel on designed cases or the user's own; an interrupt is passed on, and ends them.

    Returns the record with these cases, the report, what stands for cases that are too long to look for suspects in,
    and what the kernel rounds.
    """
    from refattn.golden.storage_types import DTYPES
    from refattn.mechanisms.case_features import fewest
    from refattn.verify import last_failures, run
    from refattn.verify.adapters.adapter import Adapter, read_roundings
    from refattn.verify.tolerance import derivatives

    dtypes = tuple(dict.fromkeys(asked.dtypes)) or (derivatives.DTYPES if asked.derivatives else DTYPES)
    left_out = ""
    if not asked.own:
        more = () if asked.derivatives and not asked.names else record.kernel_sizes
        record = record.changed(cases=(*record.cases, *more), kernel_sizes=())
        record = record.changed(cases=some_of(record, asked.names))
        designed = record
        record, dtypes = supported(record, kernel, dtypes, given=bool(asked.dtypes))
        if asked.quick:
            record = record.changed(cases=fewest(record.cases))
        if dtypes == DTYPES and not asked.dtypes and asked.impl is not None:
            left_out = without_float64(record, kernel)
            dtypes = DTYPES[1:] if left_out else DTYPES
    known: dict[str, Any] = {"grad": asked.grad or "hessian" in asked.derivatives, "seed": asked.seed}
    known |= {"rounding": asked.rounding, "derivatives": asked.derivatives, "label": asked.program or asked.impl or ""}
    if not asked.where.plain:
        from refattn.verify import parallel

        outputs = ("out", *record.outputs)
        start = parallel.Given(_absolute(asked.impl or ""), asked.program or "", outputs, asked.timeout)
        known["outcomes"] = partial(parallel.outcomes, record, kernel, start, asked.where)
    name = asked.program or _absolute(asked.impl or "")
    before = last_failures.recall(record.name, name)
    stopped: list[KeyboardInterrupt] = []

    def stop(error: KeyboardInterrupt) -> None:
        stopped.append(error)
        interrupted(error)

    known["interrupted"] = stop
    found = run.verify(record, kernel, dtypes=dtypes, progress=wrap, first=before, limit=asked.seconds, **known)
    last_failures.remember(record.name, name, found, before)
    states_no_sizes = {*(Adapter.of(kernel).supports or {})} <= {"options", "dtypes"}
    if states_no_sizes and not (asked.own or asked.names or asked.derivatives or stopped):
        record, found = _in_sizes_that_run(designed, record, kernel, dtypes, asked, found, known, wrap)
    found = replace(found, left_out=left_out, require_all=asked.require_all)
    stand_in = None
    # A shorter sequence would not fit a mesh.
    if found.failed and not stopped and not asked.derivatives and asked.mesh is None:
        from refattn.verify import shrink

        try:
            least = shrink.least(record, kernel, found, rounding=asked.rounding)
            six = shrink.lines(record.address, *least, text, found.grad, asked.rounding, asked.seed) if least else ()
            found = replace(found, smallest=six, least=least)
            stand_in = shrink.in_place_of_long(record, kernel, found, rounding=asked.rounding)
        except KeyboardInterrupt as error:  # all cases have run
            interrupted(error)
    rounds = read_roundings(asked.rounding, record) | Adapter.of(kernel).rounds(record)
    return record, found, stand_in, rounds


def _in_sizes_that_run(
    designed: Mechanism,
    record: Mechanism,
    kernel: Any,
    dtypes: tuple[str, ...],
    asked: Asked,
    before: Report,
    known: Mapping[str, Any],
    wrap: Any,
) -> tuple[Mechanism, Report]:
    """Return the report in sizes that a kernel runs, which are found by trial, if few cases ran in their own."""
    from refattn.mechanisms.case_features import fewest
    from refattn.verify import adapt, found_supports, run, user_cases

    if not (asked.where.plain and asked.mesh is None and found_supports.few_ran(before)):
        return record, before
    try:
        supports = found_supports.found(designed, kernel, dtypes)
    except KeyboardInterrupt as error:  # all cases have run
        known["interrupted"](error)
        supports = None
    if not {*(supports or ())} - {"options", "dtypes"}:  # what it declines in its own sizes it declines in others
        return record, before
    assert supports is not None
    fitting, types = user_cases.supported(designed, supports, dtypes, given=bool(asked.dtypes))
    cases = fewest(fitting.cases) if asked.quick else fitting.cases
    few = found_supports.beside(designed, cases, before)
    after = run.verify(few, kernel, dtypes=types, progress=wrap, limit=asked.seconds, **known)
    return found_supports.joined(before, after, record, supports, words=bool(adapt.split(asked.impl or "")[1]))


def _explained(
    record: Mechanism,
    found: Report,
    rounds: Mapping[str, str],
    stand_in: tuple[Mechanism, Report] | None,
    missing: tuple[str, ...],
) -> Report:
    """Return a report that says what would explain its failures, and where the error is."""
    from refattn.verify.diagnose import suspects
    from refattn.verify.tolerance.precision import explained

    found = explained(record, found, rounds, missing)
    with progress(f"suspects of {record.name}", "equations") as wrap:
        found = suspects.locate(record, found, progress=wrap)
        if stand_in and not found.suspects:
            found = replace(found, suspects=suspects.locate(*stand_in, progress=wrap).suspects)
    return found


def _over_mesh(record: Mechanism, text: str) -> Mechanism:
    """Return the record with cases whose axes are multiples of the sizes of a mesh."""
    from refattn.shards.mesh import sizes_of
    from refattn.verify.selfcheck.samples import fitted

    try:
        sizes = sizes_of(text)
    except ValueError as error:
        raise Problem(str(error)) from error
    found = (fitted(case, sizes, 2) for case in record.cases)
    return record.changed(cases=tuple(case for case in found if case is not None), kernel_sizes=())


def _kernel(stack: contextlib.ExitStack, record: Mechanism, asked: Asked) -> tuple[Any, str]:
    """Return the kernel and how Python names it."""
    from refattn.verify import Isolated, Program, load
    from refattn.verify.adapters.adapter import Adapter

    if asked.program is not None:
        named = ("out", *record.outputs)
        text = f"Program({asked.program!r}, {named}, {asked.timeout:g})"
        return Program(asked.program, named, asked.timeout), text
    impl = asked.impl or ""
    if asked.in_process:
        interrupts.leave_to_python()  # a debugger has Ctrl-C for itself
        return Adapter.of(load(impl)), f"load({impl!r})"
    kernel = Isolated(impl, asked.timeout)

    def told() -> None:
        if said := kernel.said.rstrip():
            click.echo(f"what it printed (the end of it):\n{shown(said, 8000)}", file=sys.stderr)

    stack.callback(told)  # after its process has ended, so that all of it has come
    stack.enter_context(kernel)
    return kernel, f"load({impl!r})"


def _absolute(impl: str) -> str:
    """Return what names a kernel as any folder has it."""
    from refattn.verify import adapt

    function, words = adapt.split(impl)
    place, colon, name = function.rpartition(":")
    path = f"{Path(place).resolve()}:{name}" if colon and Path(place).is_file() else function
    return f"{path} {words}" if words else path


def _roundings(record: Mechanism, given: str | None) -> tuple[str, ...]:
    from refattn.verify.adapters.adapter import read_roundings

    ids = tuple(id.strip() for id in (given or "").split(",") if id.strip())
    try:
        if given is not None and not ids:
            raise ValueError("name nothing")
        read_roundings(ids, record)
    except ValueError as error:
        needs = f"{error}".partition(", needs ")[2] or f"ids of equations such as {next(iter(record.equations))}"
        raise Problem(f"--rounding: got {given!r}, needs {needs}") from error
    return ids
