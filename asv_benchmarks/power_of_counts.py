"""How small a change the counted instructions show: changes of known size are planted, and others that run nothing.

    python -m asv_benchmarks.power_of_counts --rounds 100

Each round is a fresh process under valgrind, two of which run at once, as `make bench-compare` counts two versions. It
imports refattn from a folder whose name, and whose core.py files, have got a text of random length that nothing runs,
and counts the forward of every mechanism; then most of them again with loops before it, which take a share of `SIZES`
of its instructions. Either is compared with the counts of two rounds before. Rounds are stored as they end, in
docs/benchmarks/power_of_counts.json: a run that was stopped goes on. The table of docs/performance.md is written anew.
"""

from __future__ import annotations

import json
import py_compile
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from asv_benchmarks import counts, machine
from asv_benchmarks.compare import WORKING_TREE, check_out, listed
from asv_benchmarks.power import put
from asv_benchmarks.sides import ROOT
from asv_benchmarks.suite import Benchmark
from refattn.mechanisms.registry import list_mechanisms, mechanism

SIZES = (0.005, 0.01, 0.02, 0.05)
"""The shares of a call's instructions that are planted."""

TARGETS = [
    Benchmark(
        "core.Core.time_forward", (f"{name}.{mechanism(name).implementations[1]}", 16, 8, "float32", "numpy"), "time"
    )
    for name in list_mechanisms()
]
"""Small calls, most of whose instructions are Python's: those vary most."""

LOOPS = 10_000
"""So many are counted by themselves, to know what one takes."""

FILE = ROOT / "docs" / "benchmarks" / "power_of_counts.json"
MARKS = "<!-- power of counts: begin -->", "<!-- power of counts: end -->"

Row = dict[str, Any]


def disguised(home: Path, number: int) -> Path:
    """Give a version another name, and its core.py files a text that nothing runs; return its folder."""
    chance = random.Random(number)
    home = home.rename(home.parent / f"{home.name[0]}{number}{'x' * chance.randrange(100)}")
    for name in list_mechanisms():
        file = home / "refattn" / "mechanisms" / name / "core.py"
        before, _, _ = file.read_text(encoding="utf-8").partition("\n\ndef _planted")
        text = "x" * chance.randrange(10_000)
        file.write_text(f'{before}\n\ndef _planted{number}():\n    return "{text}"\n', encoding="utf-8")
        py_compile.compile(str(file))
    return home


def counted(homes: Sequence[Path], number: int, first: Row | None) -> list[Row]:
    """Return a round for each version; the first of all tells what a loop takes, and so how many loops a share is."""
    if first is None:
        planted = [(0, 0.0, LOOPS)]
    else:
        once = (first["planted"][0]["count"] - first["counts"][0]) / LOOPS
        turns = [(n, (number + n) % (len(SIZES) + 1)) for n in range(len(TARGETS))]
        sizes = [(n, SIZES[turn]) for n, turn in turns if turn < len(SIZES)]
        planted = [(n, size, round(size * first["counts"][n] / once)) for n, size in sizes]
    asked = [*TARGETS, *(TARGETS[n] for n, _, _ in planted)]
    rows = []
    for found in zip(
        *counts.counted(homes, asked, [0] * len(TARGETS) + [loops for _, _, loops in planted]), strict=True
    ):
        if not all(isinstance(count, float) for count in found):
            raise counts.CountError(f"counts: got {found}")
        rest = zip(planted, found[len(TARGETS) :], strict=True)
        told = [{"target": n, "size": size, "loops": loops, "count": count} for (n, size, loops), count in rest]
        rows.append({"load": machine.load(), "counts": found[: len(TARGETS)], "planted": told})
    return rows


def answers(rows: Sequence[Row]) -> Iterator[tuple[int, float, str]]:
    """Yield the target, the planted share and the word of each comparison.

    A round is compared with the one of its place in the pair before. What then is suspect is looked at again, as
    `make bench-compare` does: in the other round of the pair, whose processes are others and in which the same is
    planted.
    """
    for number in range(1, len(rows)):
        other = number + 1 if number % 2 else number - 1
        looks = [list(_looks(rows, n)) for n in (number, other) if n < len(rows)]
        for target, size, base, head in looks[0]:
            verdict = counts.judged(TARGETS[target], (base, head))
            if counts.suspect(verdict):
                seconds = [(b, h) for look in looks[1:] for t, s, b, h in look if (t, s) == (target, size)]
                verdict = counts.judged(TARGETS[target], (base, head), *seconds)
            yield target, size, verdict.word


def _looks(rows: Sequence[Row], number: int) -> Iterator[tuple[int, float, float, float]]:
    """Yield the target, the planted share and the counts of both versions for all that a round compares."""
    before, row = rows[max(0, number - 2)]["counts"], rows[number]
    for n, (base, head) in enumerate(zip(before, row["counts"], strict=True)):
        yield n, 0.0, base, head
    for one in row["planted"]:
        yield one["target"], one["size"], before[one["target"]], one["count"]


def table(rows: Sequence[Row]) -> list[str]:
    """Return the table of docs/performance.md: how often a change was reported, a planted one as more instructions."""
    heads = ["instructions of a call", "nothing (false alarms)", *(f"{100 * size:g}%" for size in SIZES)]
    lines = [f"| of | {' | '.join(heads)} |", "| --- |" + " --- |" * len(heads)]
    told = list(answers(rows))
    for n, target in enumerate(TARGETS):
        cells = []
        for size in (0.0, *SIZES):
            words = [word for m, planted, word in told if (m, planted) == (n, size)]
            seen = sum(word == "more instructions" if size else bool(word) for word in words)
            cells.append(f"{seen} of {len(words)}")
        lines.append(f"| `{target.params[0]}` | {rows[0]['counts'][n]:,.0f} | {' | '.join(cells)} |")
    return lines


def store(rows: Sequence[Row], about: Mapping[str, str]) -> None:
    """Store the rounds, one a line."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    FILE.write_text(f'{{"machine": {json.dumps(dict(about))}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")


@click.command(help=(__doc__ or "").replace("\n\n    ", "\n\n\b\n    "))
@click.option(
    "--rounds", type=click.IntRange(1), default=100, show_default=True, help="How many there shall be in all."
)
def main(rounds: int) -> None:
    """Count until there are so many rounds, beside the first one."""
    if reason := counts.why_not():
        raise click.ClickException(reason)
    stored: dict[str, Any] = (
        json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {"machine": machine.describe(), "rows": []}
    )
    rows: list[Row] = stored["rows"]
    with tempfile.TemporaryDirectory() as folder:
        homes = [check_out(WORKING_TREE, Path(folder) / name) for name in "ab"]
        for home in homes:
            listed(home, "^core")  # compiles what is imported
        while len(rows) <= rounds:
            begun, number = time.monotonic(), len(rows)
            homes = [disguised(home, number + n) for n, home in enumerate(homes)]
            rows += counted(homes, number // 2, rows[0]) if rows else counted(homes[:1], number, None)
            store(rows, stored["machine"])
            click.echo(f"{len(rows)} of {rounds + 1}: {time.monotonic() - begun:.0f} s, load {rows[-1]['load']:.1f}")
    put(MARKS, table(rows))


if __name__ == "__main__":
    main(prog_name="python -m asv_benchmarks.power_of_counts")
