"""What verification is worth: how many wrong kernels it catches, and how many honest ones it rejects.

    python -m tools.rates                     # every mechanism, float32 and bfloat16; some minutes of one core
    python -m tools.rates softmax --survivors # one of them, and what was not caught
    python -m tools.rates --runs 0            # wrong kernels alone
    python -m tools.rates softmax --paths     # known bugs, each in one path of a kernel alone: minutes of one core
    python -m tools.rates --scheduler tcp://10.0.0.1:8786 --keep rates    # on a Dask cluster: docs/campaigns.md

A rate is of the mutants that are not equivalent, since those change no result. Honest runs are those of
`tools.census`. The reasons why mutants are not caught stand in
tests/mechanisms/NAME/survivors.py. The exit code is 1 where something was missed that exact arithmetic shows, or a rate
is lower than it may be, or an honest run is rejected.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import click
import numpy as np

import refattn as ra
from refattn import many_runs
from refattn.backends.blas import one_thread
from refattn.cli.arguments import campaign_options
from refattn.cli.output import progress
from refattn.many_runs import HERE, Unit, Where
from refattn.mechanisms.case_features import features
from refattn.mechanisms.record import Case
from refattn.mechanisms.wrong import WrongKernel
from refattn.verify.bugs.fault import faults
from refattn.verify.diagnose.mutants import mutants
from refattn.verify.outcome import Truth
from tools.census import Fate, census, kill_rate, runs_with, truths_of

PATHS = (
    "one query",
    "2 to 8 queries",
    "more than 64 queries",
    "more than 64 keys",
    "more than 128 keys",
    "a head wider than 64",
    "values wider than keys",
    "values narrower than keys",
    "grouped heads",
    "queries share a state",
    "states share a query",
    "states share a key",
    "more than one batch",
    "other lengths of queries and keys",
)
"""What kernels have code of their own for, as `refattn.mechanisms.case_features` calls it."""

LEAST = {"float32": 0.98, "bfloat16": 0.95}


def rates(names: Iterable[str], least: int, where: Where = HERE) -> Iterator[tuple[str, list[str], bool]]:
    """Yield of each mechanism and type its line, its survivors, and whether all is well."""
    asked = list(itertools.product(names, LEAST))
    fates: dict[tuple[str, str], dict[int, Fate]] = {each: {} for each in asked}
    honest: dict[tuple[str, str], dict[int, list[bool]]] = {each: {} for each in asked}
    units = [unit for each in asked for unit in _mutants(*each)]
    with progress("rates", "parts") as wrap:
        # How many seeds make so many runs is known when they are over.
        while units := [*units, *(unit for each in asked for unit in _honest(*each, honest[each], least))]:
            for unit, part in many_runs.run(units, where, progress=wrap):
                each, about = unit.arguments[:2], unit.arguments[2]
                if unit.function is judged_of:
                    honest[each][about] = part
                else:
                    fates[each] |= {
                        n: Fate(_mutant(each[0], n), each[1], *one) for n, one in zip(about, part, strict=True)
                    }
            units = []
    for each in asked:
        judged = [agrees for seed in sorted(honest[each]) for agrees in honest[each][seed]]
        yield told(*each, [fates[each][n] for n in sorted(fates[each])], judged)


def of_paths(name: str, paths: Iterable[str] = PATHS, only: str = "") -> Iterator[tuple[str, tuple[Fate, ...]]]:
    """Yield paths, each with the fates of a mechanism's known bugs in float32 where the kernel is wrong there alone.

    Elsewhere it is right, so that cases of this path alone can show it. Bugs of tiles have small and large ones.
    """
    record = ra.mechanism(name)
    record = record.changed(cases=(*record.cases, *record.kernel_sizes), kernel_sizes=())
    tried = [
        replace(one, name=f"{one.name}{size}", sizes={size: one.sizes[size]})
        for one in faults(name)
        if only in one.name
        for size in dict.fromkeys(([*one.sizes][0], *[size for size in one.sizes if "128" in size][:1]))
    ]
    with one_thread(), np.errstate(all="ignore"):
        known = truths_of(record, "float32")
        for path in paths:
            inside = [(case, truth) for case, truth in known if path in features(case)]
            if inside:
                yield path, census(record, "float32", tried, truths=inside)


def _mutant(name: str, n: int) -> WrongKernel:
    return mutants(ra.mechanism(name))[n]


def _mutants(name: str, dtype: str) -> Iterator[Unit]:
    """Yield the mutants of each equation, and the others one by one."""
    found = mutants(ra.mechanism(name))
    for id, together in itertools.groupby(range(len(found)), lambda n: found[n].of):
        yield Unit(f"rates {name} {dtype} mutants of {id[0]}", fates_of, (name, dtype, [*together]))


def _honest(name: str, dtype: str, known: dict[int, list[bool]], least: int) -> Iterator[Unit]:
    """Yield the seeds that are needed beside those that are known, for so many honest runs; none more."""
    record = ra.mechanism(name)
    missing, most = least - sum(map(len, known.values())), len(record.cases) * len(record.implementations)
    for seed in range(len(known), len(known) - (-missing // most)):
        yield Unit(f"rates {name} {dtype} honest runs of seed {seed}", judged_of, (name, dtype, seed))


@functools.lru_cache(maxsize=2)
def _truths(name: str, dtype: str) -> list[tuple[Case, Truth]]:
    return truths_of(ra.mechanism(name), dtype)


def fates_of(name: str, dtype: str, numbers: list[int]) -> list[tuple[Any, ...]]:
    """Return the fates of some mutants."""
    record = ra.mechanism(name)
    tried = [mutants(record)[n] for n in numbers]
    with one_thread(), np.errstate(all="ignore"):  # a flow of other numbers than its own may diverge
        fates = census(record, dtype, tried, truths=_truths(name, dtype))
    return [(fate.status, fate.share, fate.case, fate.tensor) for fate in fates]


def judged_of(name: str, dtype: str, seed: int) -> list[bool]:
    """Return of the honest runs with a seed whether each is accepted."""
    with one_thread(), np.errstate(all="ignore"):
        runs = [*runs_with(ra.mechanism(name), dtype, seed)]
    return [all(verdict.agrees for verdict in verdicts) for _, verdicts in runs]


def told(name: str, dtype: str, fates: list[Fate], honest: list[bool]) -> tuple[str, list[str], bool]:
    """Return the line of a mechanism in a storage type, its survivors, and whether all is well."""
    counts, rate = Counter(fate.status for fate in fates), kill_rate(fates)
    line = (
        f"{name}, {dtype}: {counts['caught']} of {len(fates)} mutants caught, {counts['equivalent']} equivalent: "
        f"{100.0 * rate:.1f} %"
    )
    if honest:
        line += f"; {honest.count(False)} of {len(honest)} honest runs rejected"
    survivors = [f"  {fate.status}: {fate.mutant}" for fate in fates if fate.status != "caught"]
    return line, survivors, not counts["missed"] and rate >= LEAST[dtype] and all(honest)


@click.command()
@click.argument("mechanisms", nargs=-1, metavar="[MECHANISM]...")
@click.option("--survivors", is_flag=True, help="List what was not caught.")
@click.option("--runs", "honest", default=1000, help="Honest runs of each mechanism and type, at least.")
@click.option("--paths", is_flag=True, help="Known bugs in one path of a kernel alone, instead.")
@campaign_options()
def main(mechanisms: tuple[str, ...], survivors: bool, honest: int, paths: bool, where: Where) -> None:
    """Print the rates of the mechanisms, all or those named."""
    well = True
    for name in (mechanisms or ra.list_mechanisms()) if paths else ():
        for path, fates in of_paths(name):
            counts = Counter(fate.status for fate in fates)
            lost = [fate for fate in fates if fate.status in ("missed", "below rounding")]
            click.echo(
                f"{name}, {path}: {counts['caught']} of {len(fates)} caught, {counts['equivalent']} change no result"
            )
            shown = [fate for fate in fates if fate.status != "caught"] if survivors else lost
            click.echo("".join(f"  {fate.status}: {fate.mutant}\n" for fate in shown), nl=False)
            well &= not lost
    if paths:
        sys.exit(0 if well else 1)
    for line, survived, good in rates(mechanisms or ra.list_mechanisms(), honest, where):
        click.echo("\n".join((line, *survived)) if survivors else line)
        well &= good
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    importlib.import_module("tools.rates").main()  # so that workers find the functions there
