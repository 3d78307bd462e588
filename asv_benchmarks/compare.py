"""Two versions of refattn against each other: each in its own folder and its own processes, in rounds that alternate.

The benchmarks are those of this checkout, for both versions. Nothing is installed and nothing is fetched.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from asv_benchmarks.judge import Verdict, paired, suspect
from asv_benchmarks.machine import git
from asv_benchmarks.sides import ROOT, STEADY, Plan, Rounds, SideError, Worker, alternate, closing, held_to, ran
from asv_benchmarks.suite import Benchmark

WORKING_TREE = "."
"""Stands for the files as they are, committed or not."""

PARTS = ("refattn", "backends")
"""What a version is made of; the benchmarks are always those of this checkout."""

LOOK = Plan(rounds=8, seconds=20.0, round_seconds=0.04, warm_seconds=0.05, at_least=4)
"""How a benchmark is timed. What then looks like a difference is timed again, with `STARTS` fresh processes a side."""

STARTS = 3

RATES = 4
"""How often a rate is asked of each version, in turn: a benchmark of a rate times some calls by itself."""

QUICK = (
    r"^(?!.*'(cupy|torch|jax|float64|float16|bfloat16)')(?!.*\.(dense|recurrent)')("
    r"(core\.Core|block\.Block)\.time_both\(.* 64, 64,|work.*(operations|held)\(.* 64, 64,|accuracy.*largest)"
)
"""What a quick look measures beside the instructions: what has no noise, and the clock."""

Homes = tuple[Path, Path]


class VersionError(Exception):
    """There is no such version, or it has no refattn."""


def check_out(version: str, folder: Path) -> Path:
    """Put a version and this checkout's benchmarks into a new folder.

    Raises
    ------
    VersionError
        Where the version is neither "." nor something that git knows.
    """
    folder.mkdir()
    clean = shutil.ignore_patterns("__pycache__", "results", "recorded", "html", "env")
    shutil.copytree(ROOT / "asv_benchmarks", folder / "asv_benchmarks", ignore=clean)
    if version == WORKING_TREE:
        for part in PARTS:
            shutil.copytree(ROOT / part, folder / part, ignore=clean, symlinks=True)
        return folder
    commit = git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{version}^{{commit}}")
    if not commit:
        raise VersionError(f"version: got {version!r}, needs a commit, or . for the files as they are")
    command = ["git", "archive", "--format=tar", commit, *PARTS]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as archive:
        out, error = archive.communicate()
    if archive.returncode:
        raise VersionError(f"version: got {version!r}, needs a commit, or . for the files as they are ({_line(error)})")
    file = folder / "version.tar"
    file.write_bytes(out)
    with tarfile.open(file) as tar:
        # Python has it since 3.11.4; before, an archive of git is taken as it is.
        tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
        tar.extractall(folder)
    file.unlink()
    return folder


def _line(error: bytes) -> str:
    return error.decode(errors="replace").strip().splitlines()[-1] if error.strip() else "no message"


def listed(home: Path, pattern: str) -> list[Benchmark]:
    """Return the benchmarks that a version has."""
    code, out, errors = ran("asv_benchmarks.suite", pattern, env={"PYTHONPATH": str(home)}, home=home)
    if code:
        raise VersionError(f"the benchmarks cannot be listed: {_line(errors.encode())}")
    lines = (json.loads(line) for line in out.splitlines())
    return [Benchmark(line["name"], tuple(line["params"]), line["kind"], line["factor"]) for line in lines]


def known(homes: Homes) -> dict[Benchmark, str]:
    """Return the benchmarks of both versions with "", and those that one of them has not with "new" or "gone"."""
    base, head = (listed(home, "") for home in homes)
    found = dict.fromkeys(base, "gone") | dict.fromkeys(head, "new")
    return found | dict.fromkeys(set(base) & set(head), "")


def compare(
    homes: Homes, asked: Mapping[Benchmark, str], progress: Callable[[list[Benchmark]], Iterator[Benchmark]]
) -> Iterator[Verdict]:
    """Measure benchmarks, as `known` returns them, on both versions; yield a verdict on each.

    `progress` wraps the list of benchmarks.
    """
    for benchmark in progress(list(asked)):
        if asked[benchmark]:
            yield Verdict(benchmark, asked[benchmark])
            continue
        verdict = measure(benchmark, homes, 1)
        yield measure(benchmark, homes, STARTS) if suspect(verdict) else verdict


def measure(benchmark: Benchmark, homes: Homes, starts: int) -> Verdict:
    """Measure one benchmark on both versions, with so many fresh processes of each."""
    found = []
    for _ in range(starts):
        pair, errors = _measure_once(benchmark, homes)
        if errors:
            return _failed(benchmark, errors)
        found.append(pair)
    return paired(benchmark, found)


def _measure_once(benchmark: Benchmark, homes: Homes) -> tuple[tuple[list[float], list[float]], dict[str, SideError]]:
    workers: dict[str, Worker] = {}
    errors: dict[str, SideError] = {}
    numbers: dict[str, list[float]] = {"base": [], "head": []}
    params: dict[str, Any] = {"name": benchmark.name, "params": benchmark.params}
    with closing(workers):
        clock = "cpu"
        for name, home in zip(numbers, homes, strict=True):
            workers[name] = Worker({**held_to(1), **STEADY}, home=home)
            try:
                made = workers[name].ask("make", target="asv_benchmarks.suite:prepare", params=params)
            except SideError as error:
                errors[name] = error
                continue
            clock = made["clock"]
            if Path(made["refattn"]).resolve().parent != home.resolve():
                raise VersionError(f"refattn was imported from {made['refattn']}, not from {home}")
        if errors:
            return ([], []), errors
        if benchmark.kind == "time":
            timed, failed = alternate(workers, LOOK)
            errors = {name: SideError(why) for name, why in failed.items()}
            numbers = {name: getattr(timed.get(name, Rounds()), clock) for name in numbers}
        else:
            command, answer = ("memory", "bytes") if _resident(benchmark) else ("value", "value")
            try:
                for n in range(RATES if benchmark.kind == "rate" else 1):
                    for name in list(numbers)[:: 1 if n % 2 == 0 else -1]:
                        numbers[name].append(workers[name].ask(command)[answer])
            except SideError as error:
                errors = {"head": error}
    if None in numbers["base"]:
        errors = dict.fromkeys(("base", "head"), SideError("this system does not tell the peak of memory", True))
    return (numbers["base"], numbers["head"]), errors


def _resident(benchmark: Benchmark) -> bool:
    """Tell whether the benchmark is about the memory of its process; others return their number."""
    return benchmark.name.rpartition(".")[2].startswith("peakmem_")


def _failed(benchmark: Benchmark, errors: dict[str, SideError]) -> Verdict:
    detail = "; ".join(f"{name}: {error}" for name, error in errors.items())
    if len(errors) == 2 and all(error.missing for error in errors.values()):
        return Verdict(benchmark, "n/a", detail=str(errors["base"]))
    return Verdict(benchmark, "works" if set(errors) == {"base"} else "fails", detail=detail)
