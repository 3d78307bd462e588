"""Instructions of a call, of two versions: what they say does not depend on who else uses the machine.

valgrind counts one process of each version, all benchmarks in it; `asv_benchmarks.counter` is that process. What is
left to chance is taken away: where memory lies, how text is hashed, which kernels a library chooses, how many threads.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

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


def counted(home: Path, chosen: Sequence[Benchmark]) -> dict[Benchmark, float | str | None]:
    """Return by benchmark the instructions of a call in a version; its error as text, or None where it cannot run.

    Raises
    ------
    CountError
        Where the process ends otherwise.
    """
    fixed = ("setarch", "-R") if shutil.which("setarch") else ()
    with tempfile.TemporaryDirectory() as place:
        asked, answers, said = (Path(place) / name for name in ("asked", "answers", "said"))
        lines = [json.dumps([one.name, one.params]) + "\n" for one in chosen]
        asked.write_text("".join(lines), encoding="utf-8")
        command = [*fixed, *COUNT, f"--callgrind-out-file={place}/counts", sys.executable]
        command += ["-m", "asv_benchmarks.counter"]
        env = {**ALONE, "PYTHONPATH": str(home), "PYTHONSAFEPATH": ""}
        with asked.open() as stdin, answers.open("w") as stdout, said.open("w") as stderr:
            pipes = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
            with Started(command, env, cwd=home, **pipes) as one:
                code = one.process.wait()
        told = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
        if code or len(told) != len(chosen):
            words = said.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise CountError(f"valgrind counted nothing (exit code {code}): {words[-1] if words else 'no message'}")
        parts = iter(range(1, 2 * len(chosen) + 1))
        found: dict[Benchmark, float | str | None] = {}
        for benchmark, answer in zip(chosen, told, strict=True):
            if "error" in answer:
                found[benchmark] = None if answer["missing"] else str(answer["error"])
            else:
                once, twice = (_total(Path(place) / f"counts.{next(parts)}") for _ in range(2))
                found[benchmark] = (twice - once) / answer["calls"]
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
    base, head = (counted(home, chosen) for home in homes)
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
