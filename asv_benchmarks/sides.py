"""Sides that are timed against each other: each in a process of its own, in rounds that alternate.

Whatever slows the machine down for a while then hits all sides alike, and nothing that one side does to its process
(threads that linger, memory that is kept) touches another. Results are therefore judged pair by pair: a ratio is that
of two rounds that follow each other, and what is reported is the median of these ratios with its quartiles.
"""

from __future__ import annotations

import json
import math
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from refattn.workers import Started

ROOT = Path(__file__).resolve().parents[1]

THREADS = (
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"),
    "REFATTN_WORKERS",
)
"""The environment variables that hold libraries to a number of threads."""


STEADY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""The environment that makes glibc keep what is freed.

Otherwise it gives memory back to the system and takes it again in every call, or does not, as the addresses happen to
lie: 50 page faults, a quarter of the time of a small call, appeared and vanished with the length of a source file that
the call does not even use. Nothing is compared with that luck. Users have what is measured after
`backends.get("numpy").keep_memory()`.
"""


class SideError(Exception):
    """What a side raised, or how its process ended.

    Attributes
    ----------
    missing
        Whether the side is only not available here: a library that is not installed, or nothing to run.
    """

    def __init__(self, message: str, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing


def held_to(threads: int | None) -> dict[str, str]:
    """Return the environment that holds every library to so many threads; None leaves each as it is."""
    return {} if threads is None else dict.fromkeys(THREADS, str(threads))


def started(words: Sequence[str], env: Mapping[str, str], **how: Any) -> Started:
    """Start a module as a program, which ends with this process at the latest."""
    from refattn.workers import Started  # here: what is measured imports this file, too, and may be an older version

    return Started([sys.executable, "-m", *words], env, **how)


class Worker:
    """A side's process; see `asv_benchmarks.worker` for its commands.

    Parameters
    ----------
    env
        Environment variables beside those of this process.
    home
        The folder from which it imports refattn and asv_benchmarks.
    timeout
        Seconds that an answer may take.
    """

    def __init__(self, env: Mapping[str, str] | None = None, *, home: Path = ROOT, timeout: float = 600.0) -> None:
        self.timeout = timeout
        self._errors = tempfile.TemporaryFile()
        self._started = started(
            ["asv_benchmarks.worker"],
            {"PYTHONPATH": str(home), **(env or {}), "PYTHONSAFEPATH": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=home,
        )
        self._process = self._started.process

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send a command; return the answer.

        Raises
        ------
        SideError
            Where the side raised, its process ended, or the answer took too long; the last two end it.
        """
        from refattn.workers import SLICE, slices

        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        with suppress(BrokenPipeError):
            stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            stdin.flush()
        for _ in slices(self.timeout):
            if select.select([stdout], [], [], SLICE)[0]:
                break
        else:
            self.close()
            raise SideError(f"no answer to {do!r} for {self.timeout:.0f} s")
        line = stdout.readline()
        if not line:
            raise SideError(self._ended())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise SideError(answer["error"], answer["missing"])
        return answer

    def _ended(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return f"the process ended ({how}){': ' + said[-1] if said else ''}"

    def close(self) -> None:
        """End the process."""
        self._started.close()
        self._process.communicate()
        self._errors.close()


def ran(module: str, *words: str, env: Mapping[str, str], home: Path = ROOT) -> tuple[int, str, str]:
    """Run a module as a program to its end; return its exit code, its output and its errors."""
    from refattn.workers import SLICE, slices

    pipe = subprocess.PIPE
    with started([module, *words], env, cwd=home, stdout=pipe, stderr=pipe, encoding="utf-8") as one:
        for _ in slices(math.inf):
            with suppress(subprocess.TimeoutExpired):
                out, errors = one.process.communicate(timeout=SLICE)
                break
    return one.process.returncode, out, errors


@contextmanager
def closing(workers: Mapping[str, Worker]) -> Iterator[None]:
    """End all processes at the end of the ``with`` block, also those that are added within it."""
    try:
        yield
    finally:
        for worker in workers.values():
            worker.close()


@dataclass
class Rounds:
    """What a side took in each round, in seconds for each call."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """How long sides are timed.

    Attributes
    ----------
    rounds
        How many rounds; the time of a side in one round is one number.
    seconds
        No new round is begun after so many seconds, once there are `at_least` of them.
    round_seconds
        A round is as many calls as take this long, and at least one.
    warm_seconds
        How long a side is called before it is timed.
    """

    rounds: int = 11
    seconds: float = 30.0
    round_seconds: float = 0.1
    warm_seconds: float = 0.3
    at_least: int = 5


def alternate(workers: dict[str, Worker], plan: Plan) -> tuple[dict[str, Rounds], dict[str, str]]:
    """Time sides that are made, round by round in changing order.

    Returns
    -------
    rounds
        By side, of the sides that never raised: the n-th numbers of all belong to the same round.
    errors
        By side, of those that raised.
    """
    errors: dict[str, str] = {}
    calls: dict[str, int] = {}
    found = {name: Rounds() for name in workers}

    def ask(name: str, do: str, **arguments: Any) -> dict[str, Any] | None:
        try:
            return workers[name].ask(do, **arguments)
        except SideError as error:
            errors[name] = str(error)
            return None

    for name in workers:
        warmed = ask(name, "warm", seconds=plan.warm_seconds)
        if warmed is not None:
            calls[name] = max(1, round(plan.round_seconds / max(warmed["wall"], 1e-9)))
    stop = time.perf_counter() + plan.seconds
    for n in range(plan.rounds):
        if n >= plan.at_least and time.perf_counter() > stop:
            break
        names = list(workers)
        order = names if n % 2 == 0 else names[::-1]  # nobody always follows the same neighbour
        turn = n // 2 % len(names)
        for name in order[turn:] + order[:turn]:
            if name in errors:
                continue
            timed = ask(name, "round", calls=calls[name])
            if timed is not None:
                found[name].wall.append(timed["wall"])
                found[name].cpu.append(timed["cpu"])
    return {name: rounds for name, rounds in found.items() if name not in errors}, errors


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def ratios(of: Sequence[float], to: Sequence[float]) -> list[float]:
    """Return the ratios round by round."""
    return [ratio(a, b) for a, b in zip(of, to, strict=True)]


def ratio(of: float, to: float) -> float:
    """Return of / to; 1 where both are 0."""
    return of / to if to else math.inf if of else 1.0
