"""What verification is worth: how many wrong kernels it catches, and how many honest ones it rejects.

    python -m tools.rates                     # every mechanism, float32 and bfloat16; some minutes on one core
    python -m tools.rates softmax --survivors # one of them, and what was not caught, with the reason
    python -m tools.rates --runs 0            # wrong kernels alone

A rate is of the mutants that are not equivalent, since those change no result. Honest runs are those of
tests/verify/honest.py. The exit code is 1 where something was missed that exact arithmetic shows, or a rate is lower
than it may be, or an honest run is rejected.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter

import click
import numpy as np

import refattn as ra
from refattn.backends.blas import one_thread
from refattn.verify.blame.mutants import census, kill_rate
from tests.verify.honest import runs

LEAST = {"float32": 0.98, "bfloat16": 0.95}


def row(name: str, dtype: str, honest: int) -> tuple[str, list[str], bool]:
    """Return the line of a mechanism in a storage type, its survivors with reasons, and whether all is well."""
    record = ra.mechanism(name)
    fates = census(record, dtype)
    known = importlib.import_module(f"tests.mechanisms.{name}.survivors").SURVIVORS[dtype]
    counts, rate = Counter(fate.status for fate in fates), kill_rate(fates)
    judged = (
        [all(verdict.agrees for verdict in verdicts) for _, verdicts in runs(record, dtype, honest)] if honest else []
    )
    line = (
        f"{name}, {dtype}: {counts['caught']} of {len(fates)} mutants caught, {counts['equivalent']} equivalent: "
        f"{100.0 * rate:.1f} %"
    )
    if honest:
        line += f"; {judged.count(False)} of {len(judged)} honest runs rejected"
    survivors = [
        f"  {fate.status}: {fate.mutant}: {known.get(str(fate.mutant), 'NO REASON KNOWN')}"
        for fate in fates
        if fate.status != "caught"
    ]
    return line, survivors, not counts["missed"] and rate >= LEAST[dtype] and all(judged)


@click.command()
@click.argument("mechanisms", nargs=-1, metavar="[MECHANISM]...")
@click.option("--survivors", is_flag=True, help="List what was not caught, with the reason.")
@click.option("--runs", "honest", default=1000, help="Honest runs of each mechanism and type, at least.")
def main(mechanisms: tuple[str, ...], survivors: bool, honest: int) -> None:
    """Print the rates of the mechanisms, all or those named."""
    well = True
    with one_thread(), np.errstate(all="ignore"):  # a flow of other numbers than its own may diverge
        for name in mechanisms or ra.list_mechanisms():
            for dtype in LEAST:
                line, survived, good = row(name, dtype, honest)
                click.echo("\n".join((line, *survived)) if survivors else line)
                well &= good
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
