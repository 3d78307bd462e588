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
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from asv_benchmarks.counter import CALLS
from asv_benchmarks.judge import Verdict, paired
from asv_benchmarks.sides import STEADY, held_to
from asv_benchmarks.suite import Benchmark
from refattn.workers import Started

SMALL = (
    r"^(core\.Core\.time_(forward|backward)\(.* 64, 16, 'float32', 'numpy'|"
    r"block\.Block\.time_(forward|backward)\(.* 64, 64, 'float32', 'numpy'|"
    r"stream\.Stream\.time_(step|prefill)\(.* 64, 256, 'float32', 'numpy'|language\.Step\..*'numpy')"
)
"""What is counted, as a regular expression: forward and backward of everything, small."""

FACTOR = 1.005
"""The ratio that a difference exceeds."""

ALONE = {**held_to(1), **STEADY, "PYTHONHASHSEED": "0", "OPENBLAS_CORETYPE": "Haswell"}
"""One thread, and kernels that valgrind can run: it knows no AVX-512."""

Counts = dict[Benchmark, float | str | None]
"""Of one version."""

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


def counted(homes: Sequence[Path], chosen: Sequence[Benchmark]) -> list[Counts]:
    """Return by version and benchmark the instructions of a call; an error as text; None where it cannot run.

    All versions are counted at once.

    Raises
    ------
    CountError
        Where a process ends otherwise.
    """
    fixed = ("setarch", "-R") if shutil.which("setarch") else ()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        places, running = [Path(folder) / str(n) for n in range(len(homes))], []
        for home, place in zip(homes, places, strict=True):
            place.mkdir()
            lines = [json.dumps([one.name, one.params]) + "\n" for one in chosen]
            (place / "asked").write_text("".join(lines), encoding="utf-8")
            command = [*fixed, *COUNT, f"--callgrind-out-file={place}/counts.%p", sys.executable]
            command += ["-m", "asv_benchmarks.counter"]
            pipes = {"stdin": stack.enter_context((place / "asked").open())}
            for pipe, name in (("stdout", "answers"), ("stderr", "said")):
                pipes[pipe] = stack.enter_context((place / name).open("w"))
            env = {**ALONE, "PYTHONPATH": str(home), "PYTHONSAFEPATH": ""}
            running.append(stack.enter_context(Started(command, env, cwd=home, **pipes)))
        codes = [one.process.wait() for one in running]
        return [_read(place, code, chosen) for place, code in zip(places, codes, strict=True)]


def _read(place: Path, code: int, chosen: Sequence[Benchmark]) -> Counts:
    told = [json.loads(line) for line in (place / "answers").read_text(encoding="utf-8").splitlines()]
    if code or len(told) != len(chosen):
        words = (place / "said").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise CountError(f"valgrind counted nothing (exit code {code}): {words[-1] if words else 'no message'}")
    found: Counts = {}
    for benchmark, answer in zip(chosen, told, strict=True):
        if "error" in answer:
            found[benchmark] = None if answer["missing"] else str(answer["error"])
        else:
            totals = [_total(place / f"counts.{answer['process']}.{n + 1}") for n in range(2 * CALLS)]
            found[benchmark] = float(statistics.median(totals[CALLS:]) - statistics.median(totals[:CALLS]))
    return found


def _total(file: Path) -> int:
    written = re.search(r"^totals: (\d+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    if written is None:
        raise CountError(f"valgrind wrote no total into {file.name}")
    return int(written[1])


def compared(homes: tuple[Path, Path], chosen: Sequence[Benchmark]) -> list[Verdict]:
    """Return a verdict on the instructions of each benchmark that a version has.

    Raises
    ------
    CountError
        Where valgrind fails.
    """
    base, head = counted(homes, chosen)
    return [judged(one, base[one], head[one]) for one in chosen if base[one] is not None or head[one] is not None]


def judged(benchmark: Benchmark, base: float | str | None, head: float | str | None) -> Verdict:
    """Judge the instructions of a call of two versions: what differs by more than `FACTOR` is a difference."""
    own = dataclasses.replace(benchmark, kind="instructions", factor=FACTOR)
    if isinstance(base, float) and isinstance(head, float):
        return paired(own, [([base], [head])])
    if isinstance(base, str) or isinstance(head, str):
        detail = "; ".join(f"{n}: {x}" for n, x in (("base", base), ("head", head)) if isinstance(x, str))
        return Verdict(own, "fails" if isinstance(head, str) else "works", detail=detail)
    return Verdict(own, "new" if base is None else "gone")
