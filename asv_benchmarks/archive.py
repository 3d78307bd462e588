"""What asv has stored: results of this machine, and those of another one over many commits, which the repository has.

asv reads them itself. A file that it cannot read is named, for it is somebody's measurements: nothing passes over it.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asv_benchmarks import changes
from asv_benchmarks.machine import git
from asv_benchmarks.sides import ROOT
from asv_benchmarks.suite import Benchmark, benchmarks, version

RESULTS = ROOT / "asv_benchmarks" / "results"
RECORDED = ROOT / "asv_benchmarks" / "recorded"

Samples = dict[str, list[float]]
"""Benchmark with its parameters -> what was measured."""


class ArchiveError(Exception):
    """There are no results, or a file of them cannot be read."""


def recorded() -> list[Path]:
    """Return the results that come with the repository."""
    return _files(RECORDED)


def files() -> list[Path]:
    """Return the results of this machine, those that were stored first before the others."""
    return sorted(_files(RESULTS), key=lambda file: file.stat().st_mtime)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*/*.json") if path.name != "machine.json"]


def read(file: Path) -> dict[str, Any]:
    """Return the object that a file holds.

    Raises
    ------
    ArchiveError
        Where it cannot be read, or holds none.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(file, error) from error
    if not isinstance(found, dict):
        raise _damaged(file, f"it holds a {type(found).__name__}")
    return found


def results(file: Path) -> Any:
    """Return the results of a file, as asv's `Results`.

    Raises
    ------
    ArchiveError
        Where asv cannot read it, or is missing.
    """
    try:
        from asv.results import Results
        from asv.util import UserError
    except ImportError as error:
        raise ArchiveError(f'results are read by asv, which is missing ({error}): pip install -e ".[bench]"') from error

    read(file)
    try:
        found = Results.load(str(file))
        if not isinstance(found.date, int | float) or not isinstance(found.commit_hash, str):
            raise ValueError(f"its commit is {found.commit_hash} of {found.date}")
        for name in found.get_all_result_keys():
            values = found.get_result_value(name, found.get_result_params(name))
            many = found.get_result_samples(name, found.get_result_params(name))
            numbers = [*values, *(x for some in many for x in some or ())]
            if not all(x is None or isinstance(x, int | float) and not float(x) < 0.0 for x in numbers):
                raise ValueError(f"{name} has {str(numbers)[:80]}, which are no numbers of at least 0")
    except (UserError, AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise _damaged(file, error) from error
    return found


def _damaged(file: Path, why: object) -> ArchiveError:
    return ArchiveError(
        f"results: got {file}, which is no file of results ({why}); needs one as asv writes it: "
        "bring it back (git restore, if it was recorded) or take it away"
    )


def short(file: Path) -> str:
    """Return the hash that results are stored under."""
    return file.name.partition("-")[0]


def environment(file: Path) -> tuple[str, str]:
    """Return the machine and the interpreter of results: only those of the same are compared."""
    return file.parent.name, file.name.partition("-")[2]


def last() -> dict[tuple[str, str], tuple[str, Samples]]:
    """Return by environment the hash that was stored last, and the last samples of each benchmark."""
    found: dict[tuple[str, str], tuple[str, Samples]] = {}
    for file in files():
        _, earlier = found.get(environment(file), ("", {}))
        found[environment(file)] = short(file), {**earlier, **samples(results(file))}
    return found


def samples(stored: Any, known: Sequence[Benchmark] | None = None) -> Samples:
    """Return what `results` hold: all samples of a time, the value of everything else, [] where it failed.

    `known` are the benchmarks to look for; None: all of this checkout.
    """
    found: Samples = {}
    for benchmark in benchmarks() if known is None else known:
        if benchmark.name not in stored.get_all_result_keys():
            continue
        params = [[repr(value)] for value in benchmark.params]
        if stored.benchmark_version.get(benchmark.name) not in (None, version(benchmark.name)):
            continue  # its numbers do not compare with those of today
        had = stored.get_result_params(benchmark.name)
        if len(had) != len(params) or not all(value in many for (value,), many in zip(params, had, strict=True)):
            continue  # what that version had not
        (value,) = stored.get_result_value(benchmark.name, params)
        (many,) = stored.get_result_samples(benchmark.name, params)
        if value is None:
            found[str(benchmark)] = []
        elif math.isfinite(value):  # NaN is n/a
            found[str(benchmark)] = many or [value]
    return found


def series(known: Sequence[Benchmark]) -> dict[tuple[str, str], list[changes.Series]]:
    """Return the series of each machine and interpreter, those that come with the repository included.

    Commits stand in the order of `ordered`.

    Raises
    ------
    ArchiveError
        Where there is no number of any benchmark, and where a file cannot be read.
    """
    found: dict[tuple[str, str], list[tuple[str, float, Samples]]] = {}
    dates: dict[str, float] = {}
    for file in [*recorded(), *files()]:
        stored = results(file)
        dates[stored.commit_hash] = stored.date
        row = (stored.commit_hash, file.stat().st_mtime, samples(stored, known))
        found.setdefault(environment(file), []).append(row)
    place_of = {commit: n for n, commit in enumerate(ordered(dates))}
    by_place: dict[tuple[str, str], list[changes.Series]] = {}
    for place, rows in found.items():
        rows.sort(key=lambda row: (place_of[row[0]], row[1]))
        newest, _, last_numbers = rows[-1]
        for benchmark in known:
            have = [(commit, many[str(benchmark)]) for commit, _, many in rows if many.get(str(benchmark))]
            if have:
                values = tuple(statistics.median(many) for _, many in have)
                fails = newest if last_numbers.get(str(benchmark)) == [] else ""
                one = changes.Series(benchmark, tuple(commit for commit, _ in have), values, fails)
                by_place.setdefault(place, []).append(one)
    if not by_place:
        raise ArchiveError("there are no results yet: make bench")
    return by_place


def ordered(dates: Mapping[str, float]) -> list[str]:
    """Return commits, parents before their children; one that git does not know stands where its date says.

    Dates alone would not do: a commit that was rebased keeps the date of its author.
    """
    here = [commit for commit in dates if git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}")]
    found = git("rev-list", "--date-order", "--reverse", *here).split() if here else []
    order = [commit for commit in found if commit in dates]
    for commit in sorted(set(dates) - set(order), key=lambda commit: (dates[commit], commit)):
        order.insert(max((n for n, x in enumerate(order, 1) if dates[x] <= dates[commit]), default=0), commit)
    return order
