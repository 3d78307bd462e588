"""Instructions of a call, of two versions: what they say does not depend on who else uses the machine.

valgrind counts one process of each version, with a fork for each benchmark; `asv_benchmarks.counter` is that process.
What is left to chance is taken away: where memory lies, how text is hashed, which kernels a library chooses, how many
threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import platform
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from asv_benchmarks.counter import plan
from asv_benchmarks.judge import Verdict, paired
from asv_benchmarks.sides import STEADY, held_to
from asv_benchmarks.suite import Benchmark
from refattn.files import temporary_folder
from refattn.workers import Started, lines

SMALL = (
    r"^(core\.Core\.time_(forward|backward)\(.* 64, 16, 'float32', 'numpy'|"
    r"block\.Block\.time_(forward|backward)\(.* 64, 64, 'float32', 'numpy'|"
    r"stream\.Stream\.time_(step|prefill)\(.* 64, 256, 'float32', 'numpy'|language\.Step\..*'numpy')"
)
"""What is counted, as a regular expression: forward and backward of everything, small."""

FACTOR = 1.005
"""The ratio that a difference exceeds. What is below its square is counted again, with all addresses moved.

Addresses decide which names share a place in CPython's cache of attributes, and which objects one in a table: the same
files at other addresses differ by 0.1 to 0.2 % as a rule, and 3 times in 700 by more than 0.5 %.
"""

MOVED = 5000
"""Texts that lie before everything else at the second look."""

ALONE = {**held_to(1), **STEADY, "PYTHONHASHSEED": "0", "OPENBLAS_CORETYPE": "Haswell"}
"""One thread, and kernels that valgrind can run: it knows no AVX-512."""

QUICK = r"^(core|block.*forward|language)(?!.*\.(dense|recurrent)')"
"""Of these, what a quick look counts: fast implementations, the forward of blocks, and training steps."""

Count = float | str | None
"""Instructions of a call, an error as text, or None where the version cannot run it."""

COUNT = ("valgrind", "--tool=callgrind", "--instr-atstart=no")


class CountError(Exception):
    """valgrind ended without counts."""


def why_not() -> str:
    """Return why instructions cannot be counted here, and what helps; "" where they can be."""
    if shutil.which("valgrind") is None:
        return "instructions are not counted: valgrind is not installed (apt-get install valgrind)"
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return f"instructions are not counted on {platform.machine()}: needs x86-64"
    return ""


def counted(
    homes: Sequence[Path], chosen: Sequence[Benchmark], planted: Sequence[int] = (), moved: int = 0
) -> Iterator[tuple[Count, ...]]:
    """Yield for each benchmark the counts of all versions, which are counted at once.

    Parameters
    ----------
    planted
        So many empty loops are run before each call of a benchmark, one number for each; () plants nothing.
    moved
        So many small texts lie in memory before everything else.

    Raises
    ------
    CountError
        Where a process ends otherwise.
    """
    fixed = ("setarch", "-R") if shutil.which("setarch") else ()
    with temporary_folder() as folder, contextlib.ExitStack() as stack:
        places, running = [folder / str(n) for n in range(len(homes))], []
        for home, place in zip(homes, places, strict=True):
            place.mkdir()
            words = [json.dumps([one.name, one.params, *planted[n : n + 1]]) + "\n" for n, one in enumerate(chosen)]
            (place / "asked").write_text("".join(words), encoding="utf-8")
            command = [*fixed, *COUNT, f"--callgrind-out-file={place}/counts.%p", sys.executable]
            command += ["-m", "asv_benchmarks.counter", str(moved)]
            asked, said = (
                stack.enter_context((place / name).open(how)) for name, how in (("asked", "r"), ("said", "w"))
            )
            env = {**ALONE, "PYTHONPATH": str(home), "PYTHONSAFEPATH": ""}
            pipes: dict[str, Any] = {"stdin": asked, "stdout": subprocess.PIPE, "stderr": said}
            one = stack.enter_context(Started(command, env, cwd=home, **pipes))
            running.append((one, lines(stack.enter_context(one.process.stdout))))
        for benchmark in chosen:
            yield tuple(_read(*one, place, benchmark) for one, place in zip(running, places, strict=True))


def _read(one: Started, answers: Iterator[str], place: Path, benchmark: Benchmark) -> Count:
    line = next(answers, "")
    if not line:
        words = (place / "said").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        code = one.process.wait()
        raise CountError(f"valgrind counted nothing (exit code {code}): {words[-1] if words else 'no message'}")
    answer = json.loads(line)
    if "error" in answer:
        return None if answer["missing"] else str(answer["error"])
    _, calls = plan(benchmark.name)
    files = [place / f"counts.{answer['process']}.{n + 1}" for n in range(2 * calls)]
    totals = [_total(file) for file in files]
    for file in files:
        file.unlink()
    return float(statistics.median(totals[calls:]) - statistics.median(totals[:calls]))


def _total(file: Path) -> int:
    written = re.search(r"^totals: (\d+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    if written is None:
        raise CountError(f"valgrind wrote no total into {file.name}")
    return int(written[1])


def compared(
    homes: tuple[Path, Path],
    chosen: Sequence[Benchmark],
    progress: Callable[[list[Benchmark]], Iterator[Benchmark]],
) -> Iterator[Verdict]:
    """Yield a verdict on the instructions of each benchmark, "n/a" where no version has it; what is suspect comes last.

    `progress` wraps the list of benchmarks.

    Raises
    ------
    CountError
        Where valgrind fails.
    """
    again: dict[Benchmark, tuple[Count, Count]] = {}
    for benchmark, (base, head) in zip(progress(list(chosen)), counted(homes, chosen), strict=True):
        verdict = judged(benchmark, (base, head))
        if suspect(verdict):
            again[benchmark] = base, head
        else:
            yield verdict
    if again:
        counts = counted(homes, [*again], moved=MOVED)
        for benchmark, (base, head) in zip(progress([*again]), counts, strict=True):
            yield judged(benchmark, again[benchmark], (base, head))


def suspect(verdict: Verdict) -> bool:
    """Tell whether a difference is so small that addresses can make it, and worth a second look at other ones."""
    ratio = verdict.ratio[1] if verdict.word and verdict.ratio else 0.0
    return 0.0 < ratio and max(ratio, 1.0 / ratio) < FACTOR**2


def judged(benchmark: Benchmark, *looks: tuple[Count, Count]) -> Verdict:
    """Judge the instructions of a call of two versions, in one look or more.

    What differs by more than `FACTOR` is a difference, if every look goes half of that way.
    """
    own = dataclasses.replace(benchmark, kind="instructions", factor=FACTOR)
    numbers = [([base], [head]) for base, head in looks if isinstance(base, float) and isinstance(head, float)]
    if len(numbers) == len(looks):
        return paired(own, numbers)
    base, head = looks[0]
    if isinstance(base, str) or isinstance(head, str):
        detail = "; ".join(f"{n}: {x}" for n, x in (("base", base), ("head", head)) if isinstance(x, str))
        return Verdict(own, "fails" if isinstance(head, str) else "works", detail=detail)
    return Verdict(own, "n/a" if base is head else "new" if base is None else "gone")
