"""The command line of a fuzzer: so many tries from a seed, a line for each that failed, and one of counts."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable


def command(name: str, unit: str, usual: int, run: Callable[[int, int], tuple[Counter[str], list[str]]]) -> None:
    """Run a fuzzer, ``run(count, seed)``, as the arguments of the process say, and print what it found."""
    options = argparse.ArgumentParser()
    options.add_argument(f"--{unit}", type=int, default=usual, dest="count")
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    counts, bad = run(given.count, given.seed)
    print("\n".join([*bad, f"{name}, seed {given.seed}: {given.count} {unit}: {dict(sorted(counts.items()))}"]))
