"""``refattn golden``: write sets of golden vectors, check them, and look into them."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import refattn
from refattn.cli.arguments import (
    BAD_INPUT,
    NOTHING_RUN,
    Group,
    Name,
    Place,
    Problem,
    campaign_options,
    check_writable,
    completing,
    json_option,
    record_of,
    records_of,
)
from refattn.cli.output import deliver, progress
from refattn.files import reason
from refattn.mechanisms import registry
from refattn.messages import meant

if TYPE_CHECKING:
    from refattn.golden.vectors import GoldenSet
    from refattn.many_runs import Where
    from refattn.mechanisms.record import Case, Mechanism

PART = 16
"""Cases that are computed again together: a set that is no larger needs no second process."""


@click.group(cls=Group, short_help="Write, check and show golden vectors.")
def golden() -> None:
    """Golden vectors: inputs, every equation's value, results, gradients, and what a kernel may differ by.

    Without DIR, the set that comes with the package is meant.
    """


@golden.command(short_help="Write a set.")
@click.argument("folder", type=Place(), metavar="DIR")
@click.argument("mechanisms", type=Name(), nargs=-1, metavar="[MECHANISM]...")
@click.option("--size", default="small", metavar="NAME", help="small (default), or full: the cases as designed.")
@click.option("--replace", is_flag=True, help="Put it in the place of the whole set that is there.")
@click.option(
    "--format",
    "kind",
    default="safetensors",
    metavar="NAME",
    help="safetensors (default), a set that is checked and read again; or onnx, models with test data.",
)
@click.pass_context
def write(ctx: click.Context, folder: str, mechanisms: tuple[str, ...], size: str, replace: bool, kind: str) -> None:
    """Write the designed cases of all mechanisms, or of those that are named, into DIR, a new or empty folder.

    The same version gives the same bytes on the same machine. --format onnx writes the cases that the operator
    Attention has, and runs them with ONNX Runtime and ONNX's reference evaluator: exit code 1 where one disagrees.
    """
    records = records_of(mechanisms)
    from refattn.golden import vectors
    from refattn.verify import freeze

    if size not in freeze.SIZES:
        raise Problem(f"--size: got {size!r}, needs one of {', '.join(freeze.SIZES)}")
    path = Path(folder)
    todo = list(freeze.frozen_cases(records, size))
    if kind != "safetensors":
        _write_onnx(ctx, path, todo, kind, replace)
        return
    try:
        if path.exists() and not path.is_dir():
            raise Problem(f"DIR: got {folder!r}, a file, needs a folder")
        with progress("golden", "cases") as wrap:
            frozen = (freeze.freeze(record, case) for record, case in wrap(todo))
            manifest = vectors.write(path, freeze.about(records, size, refattn.__version__), frozen, replace=replace)
    except vectors.SetError as error:
        raise Problem(f"DIR: {error}") from error
    except OSError as error:
        raise Problem(f"DIR: {folder!r} cannot be written: {reason(error, named=True)}") from error
    total = sum(entry["bytes"] for entry in manifest["cases"])
    click.echo(f"{folder}: {manifest['count']} cases, {total} bytes, sha256 {manifest['sha256']}", file=sys.stdout)


def _write_onnx(ctx: click.Context, path: Path, todo: list[tuple[Mechanism, Case]], kind: str, replace: bool) -> None:
    """Write cases as models of ONNX; exit where a runtime disagrees with one."""
    from refattn.verify import onnx_export

    if kind not in onnx_export.FORMATS:
        raise Problem(f"--format: got {kind!r}, needs one of {', '.join(onnx_export.FORMATS)}")
    if replace:
        raise Problem("--replace: only a set of safetensors vouches for its files")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise Problem(f"DIR: got {str(path)!r}, needs a new or empty folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
        with progress("golden", "cases") as wrap:
            models, sets, left = onnx_export.write_onnx(path, wrap(todo))
        wrong = list(onnx_export.checked(path, {case.name: case for _, case in todo}, todo[0][0]))
    except ImportError as error:
        raise Problem(f"--format onnx: {error}, needs refattn[onnx]") from error
    except ValueError as error:
        raise Problem(f"--format onnx: {error}") from error
    except OSError as error:
        raise Problem(f"DIR: {str(path)!r} cannot be written: {reason(error, named=True)}") from error
    click.echo(
        f"{path}: {models} models, {sets} test data sets, checked with ONNX Runtime and ONNX's reference evaluator"
    )
    for place, runtime, told in wrong:
        click.echo(f"  {runtime} disagrees: {place}: {told}")
    for why, cases in left.items():
        click.echo(f"  left out, {len(cases)}: {why}")
    ctx.exit(1 if wrong else 0)


@golden.command(short_help="Check that a set is whole, and that the reference still computes it.")
@click.argument("folder", type=Place(), metavar="[DIR]", required=False)
@click.argument("mechanisms", type=Name(), nargs=-1, metavar="[MECHANISM]...")
@json_option
@campaign_options()
@click.pass_context
def check(ctx: click.Context, folder: str | None, mechanisms: tuple[str, ...], file: str | None, where: Where) -> None:
    """Check that the set in DIR is whole, and compute every case of it again: inputs, values and budgets.

    MECHANISM names one of another package that the set has: no file of a set loads it.

    Exit codes: 0 all cases agree; 1 some do not; 2 the set is incomplete or was changed; 3 there are none.
    """
    check_writable(file)
    found = read_set(ctx, folder)
    from refattn import many_runs
    from refattn.golden import vectors
    from refattn.verify import freeze
    from refattn.verify.parallel import named
    from refattn.verify.report import golden as golden_text

    addresses, names = (
        {record.name: record.address for record in map(record_of, mechanisms)},
        found.manifest["mechanisms"],
    )
    if unknown := [name for name in addresses if name not in names]:
        raise Problem(f"MECHANISM: got {unknown[0]!r}, needs one of the set: {', '.join(names)}")
    records = [_of_set(name, addresses) for name in names]
    _check_about(found, freeze.about(records, "small", ""))
    cases, path, vouched = found.cases, str(found.folder.resolve()), found.manifest["sha256"]
    told = " ".join([vouched, *map(named, records)])
    units = [
        many_runs.Unit(
            f"golden check {told} {n}", _shares, (path, vouched, addresses, range(n, min(n + PART, len(cases))))
        )
        for n in range(0, len(cases), PART)
    ]
    shares: dict[int, tuple[float, str]] = {}
    with progress("golden", "parts") as wrap:
        for unit, part in many_runs.run(units, where, progress=wrap):
            shares |= zip(unit.arguments[3], part, strict=True)
    rows = [
        {"mechanism": entry["mechanism"], "case": entry["case"], "share": shares[n][0], "where": shares[n][1]}
        for n, entry in enumerate(cases)
    ]
    failed = [row for row in rows if not row["share"] <= 1.0]
    listed = [row | {"share": row["share"] if math.isfinite(row["share"]) else None} for row in failed]
    data = {"folder": str(found.folder), "sha256": found.manifest["sha256"], "cases": len(rows), "failed": listed}
    lacking = {record.name: words for record in records if (words := vectors.without_vector(found, record))}
    data |= {"without_vector": lacking}
    deliver(lambda **implementation: golden_text.agreement(rows, lacking, **implementation), data, file)
    ctx.exit(1 if failed else 0)


def _check_about(found: GoldenSet, now: dict[str, Any]) -> None:
    """Raise where a set says something else of all its cases than this version does."""
    for field in ("limits", "conventions", "generator", "inputs", "truth"):
        if found.manifest[field] != now[field]:
            raise Problem(f"{found.folder}: {field}: got {found.manifest[field]}, needs {now[field]}")
    for name, own in now["mechanisms"].items():
        for field in ("defaults", "outputs"):
            if (stored := found.manifest["mechanisms"][name][field]) != (needs := json.loads(json.dumps(own[field]))):
                raise Problem(f"{found.folder}: mechanisms.{name}.{field}: got {stored}, needs {needs}")


def _of_set(name: str, addresses: Mapping[str, str]) -> Mechanism:
    """Return the record that a set calls so: one of the library, or the one that the user has named."""
    try:
        return record_of(addresses[name]) if name in addresses else registry.listed(name)
    except ValueError as error:
        raise Problem(f"{error}: refattn golden check DIR MECHANISM") from error


def _shares(folder: str, vouched: str, addresses: Mapping[str, str], part: Sequence[int]) -> list[tuple[float, str]]:
    """Return `_recomputed` of some cases of the set in a folder, which has to be the one that is vouched for."""
    from refattn.golden import vectors

    found = vectors.read(Path(folder))
    if found.manifest["sha256"] != vouched:
        raise Problem(f"{folder}: got a set whose sha256 is {found.manifest['sha256']}, needs {vouched}")
    return [_recomputed(found, found.cases[n], addresses) for n in part]


def _recomputed(found: GoldenSet, entry: dict[str, Any], addresses: Mapping[str, str]) -> tuple[float, str]:
    """Return the largest used share of an allowed error of a stored case, and where; infinity where facts differ."""
    from refattn.golden import agreement, tensors
    from refattn.verify import freeze
    from refattn.verify.selfcheck.samples import shrunk

    record = _of_set(entry["mechanism"], addresses)
    if entry["case"] not in [case.name for case in record.cases]:
        return math.inf, "there is no such case now"
    case = record.case(entry["case"])
    now, data = freeze.freeze(record, shrunk(case) if found.manifest["size"] == "small" else case)
    difference = agreement.first_difference(entry, found.arrays(entry), now, tensors.decode(data))
    return (math.inf, difference) if difference is not None else freeze.recompute(record, found, entry)


def _entries(ctx: click.Context) -> Iterator[str]:
    """Yield the names of all cases, as `--case` takes them."""
    for name in registry.list_mechanisms():
        yield from (f"{name}/{case.name}" for case in registry.listed(name).cases)


@golden.command(short_help="Show what a set holds.")
@click.argument("folder", type=Place(), metavar="[DIR]", required=False)
@click.option("--case", metavar="MECHANISM/CASE", shell_complete=completing(_entries), help="Every array of this case.")
@json_option
@click.pass_context
def show(ctx: click.Context, folder: str | None, case: str | None, file: str | None) -> None:
    """Show the cases of the set in DIR, or the arrays of one of them."""
    check_writable(file)
    found = read_set(ctx, folder)
    from refattn.verify.report import golden as golden_text

    if case is None:
        deliver(lambda **implementation: golden_text.cases(found.manifest, **implementation), found.manifest, file)
        return
    entries = {f"{entry['mechanism']}/{entry['case']}": entry for entry in found.cases}
    if case not in entries:
        raise Problem(f"--case: got {case!r}{meant(case, entries)}, needs one of {', '.join(entries)}")
    arrays = found.arrays(entries[case])
    deliver(lambda **implementation: golden_text.arrays(entries[case], arrays, **implementation), entries[case], file)


def read_set(ctx: click.Context, folder: str | None, mechanism: Mechanism | None = None) -> GoldenSet:
    """Return the set, without a folder that of the mechanism's package; where it is no whole one, say so and exit."""
    from refattn.golden import vectors

    try:
        usual = vectors.SHIPPED if mechanism is None else vectors.shipped(mechanism)
        return vectors.read(Path(folder) if folder is not None else usual)
    except vectors.SetError as error:
        click.echo(f"refattn: error: {error}", file=sys.stderr)
        there = folder is None or os.path.isdir(folder)  # False for a name that is too long, too
        ctx.exit(NOTHING_RUN if error.empty and there else BAD_INPUT)
