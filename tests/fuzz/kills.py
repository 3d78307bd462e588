"""A fuzzer of ends: ``python -m tests.fuzz.kills [--kills N] [--seed S]``.

Processes are killed (SIGKILL) at random moments of their lives, some of them several times in turn, and then let go on
to their end, which has to be that of a process that nobody killed, by the SHA-256 of all that it leaves:

- train: a run with a checkpoint after each step, that is resumed
- growth: the same, of blocks that get wider on the way
- golden: a set of golden vectors that takes the place of another; after each kill there is a whole set, once
  there was one
- output: a trace into a file; after each kill the file is the one that was there, or the new one

What comes of a life is counted: killed, or ended before it was; and of the last life the same or other bytes.
"""

from __future__ import annotations

import hashlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refattn.golden import vectors
from tests.fuzz.command import Bad, Totals, command
from tests.train.runs import ENVIRONMENT, arguments, remains, write_text

# The picture of a run needs as much time as all else together, and is no part of what it computes.
COMMAND = "import sys; sys.modules['matplotlib.figure'] = None; import refattn.cli; refattn.cli.main()"


@dataclass(frozen=True)
class Kind:
    """What is killed: the words of the command for a place, what is left there, and what holds after each kill."""

    words: Callable[[Path], list[str]]
    left: Callable[[Path], str]
    holds: Callable[[Path], bool] = lambda place: True


def life(words: list[str], seconds: float | None = None) -> bool:
    """Run a command line, and kill it after some time; return whether it had ended before. AssertionError: badly."""
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *words], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
    _, errors = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), errors.decode()
    return process.returncode == 0


def hashed(data: object) -> str:
    """Return the SHA-256 of something as Python writes it."""
    return hashlib.sha256(repr(data).encode()).hexdigest()


def of_folder(folder: Path) -> str:
    """Return the SHA-256 of all files of a folder with their names."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashed([(path.relative_to(folder).as_posix(), hashlib.sha256(path.read_bytes()).digest()) for path in files])


def keeps_a_set() -> Callable[[Path], bool]:
    """Return what tells whether a folder has a whole set, or never had one."""
    seen: set[Path] = set()

    def kept(folder: Path) -> bool:
        try:
            whole = bool(vectors.read(folder).cases)
        except vectors.SetError as error:
            return error.empty and folder not in seen
        seen.add(folder)
        return whole

    return kept


def kinds_in(home: Path) -> dict[str, Kind]:
    """Return what is killed, by name."""
    text = write_text(home)
    settings: dict[str, Any] = {"steps": 30, "checkpoint_every": 1, "sample_bytes": 20, "score_bytes": 1000}
    growth = settings | {"grow": [5, 12], "context": 8, "width": 8}

    def of_run(place: Path) -> str:
        return hashed(remains(place))

    def grown(place: Path) -> list[str]:
        words = arguments(text, place, "--resume", **growth)
        return ["train", "growing", *words[2:]]

    def file_of(place: Path) -> str:
        return hashlib.sha256(place.read_bytes()).hexdigest()

    def written(place: Path) -> list[str]:
        return ["golden", "write", str(place), "growing", "--replace", "--size", "small"]

    return {
        "train": Kind(lambda place: arguments(text, place, "--resume", **settings), of_run),
        "growth": Kind(grown, of_run),
        "golden": Kind(written, of_folder, keeps_a_set()),
        "output": Kind(
            lambda place: ["trace", "growing", "--json", str(place)],
            file_of,
            lambda place: not place.exists() or bool(file_of(place)),
        ),
    }


def run(kills: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Return how often what came, and a line for each life that did not end as it should."""
    draw = random.Random(seed)
    counts: Counter[str] = Totals("kills")
    bad: list[str] = Bad()
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        whole: dict[str, tuple[str, float]] = {}
        kinds = kinds_in(home)
        number = 0
        while counts["killed"] < kills:
            number += 1
            kind = list(kinds)[number % len(kinds)]
            about = kinds[kind]
            if kind not in whole:
                began = time.monotonic()
                assert life(about.words(home / f"{kind}-whole"))
                whole[kind] = about.left(home / f"{kind}-whole"), time.monotonic() - began
            right, duration = whole[kind]
            place = home / f"{kind}-{number}"
            words = about.words(place)
            try:
                for _ in range(draw.randrange(1, 4)):
                    ended = life(words, draw.uniform(0.2, 1.0) * duration)
                    counts["ended" if ended else "killed"] += 1
                    counts[kind] += not ended
                    if not about.holds(place):
                        raise AssertionError("half of it is there")
                    if counts["killed"] == kills:
                        break
                life(words)
                same = about.left(place) == right
            except (AssertionError, OSError, ValueError) as error:
                counts["bad"] += 1
                bad.append(f"{kind} {number}: {' '.join(str(error).split())[:200]}")
                continue
            counts["the same" if same else "other"] += 1
            if not same:
                bad.append(f"{kind} {number}: other bytes")
    return counts, bad


if __name__ == "__main__":
    command("kills", "kills", 100, run)
