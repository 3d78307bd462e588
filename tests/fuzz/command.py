"""The command line of a fuzzer: so many tries from a seed, a line for each that failed, and one of counts."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable

EVERY = 10.0
"""Seconds between two lines of counts on the way."""


class Totals(Counter[str]):
    """Counts that are printed on the way, so that a fuzzer that is stopped has said what it found."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.said = name, time.monotonic()

    def __setitem__(self, key: str, value: int) -> None:
        super().__setitem__(key, value)
        if time.monotonic() > self.said + EVERY:
            self.said = time.monotonic()
            print(f"{self.name}, so far: {dict(sorted(self.items()))}", file=sys.stderr, flush=True)


class Bad(list[str]):
    """Lines of what failed, printed as they come."""

    def append(self, line: str) -> None:
        super().append(line)
        print(line, file=sys.stderr, flush=True)


def command(name: str, unit: str, usual: int, run: Callable[[int, int], tuple[Counter[str], list[str]]]) -> None:
    """Run a fuzzer, ``run(count, seed)``, as the arguments of the process say, and print what it found."""
    options = argparse.ArgumentParser()
    options.add_argument(f"--{unit}", type=int, default=usual, dest="count")
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    counts, bad = run(given.count, given.seed)
    print(f"{name}, seed {given.seed}: {given.count} {unit}: {dict(sorted(counts.items()))}, {len(bad)} bad")
