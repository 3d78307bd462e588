"""What a report has to say about where its numbers come from."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

from asv_benchmarks.sides import ROOT


def cpus() -> int:
    """Return how many CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe() -> dict[str, str]:
    """Return the device, the system and the interpreter, in words."""
    return {
        "cpu": f"{_cpu()}, {cpus()} usable",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.machine()}",
        "python": f"{sys.implementation.name} {platform.python_version()}",
        "commit": commit(),
    }


def load() -> float:
    """Return how many processes wanted a CPU in the last minute."""
    return os.getloadavg()[0]


class Others:
    """Tells how many CPUs other processes took on average since it was made."""

    def __init__(self) -> None:
        self._busy, self._own, self._start = _busy(), _own(), time.perf_counter()

    def used(self) -> float | None:
        """Return the number of CPUs; None where the system does not tell. Processes of ours have to have ended."""
        busy = _busy()
        if busy is None or self._busy is None:
            return None
        return max(0.0, busy - self._busy - (_own() - self._own)) / (time.perf_counter() - self._start)


def _busy() -> float | None:
    """Return the CPU seconds that all processes, and all machines that share this one's CPUs, have taken."""
    try:
        fields = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]
    except OSError:
        return None
    user, nice, system, _, _, interrupts, soft, stolen = map(int, fields)
    return (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK")


def _own() -> float:
    return sum(os.times()[:4])


def commit() -> str:
    """Return the commit that is checked out, with a + where files differ from it; "" where there is no repository."""
    return git("describe", "--always", "--abbrev=10", "--dirty=+") or "unknown"


def git(*arguments: str) -> str:
    """Return what git prints, or "" where it fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, encoding="utf-8", check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu() -> str:
    try:
        return named(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        return named("")


def named(cpuinfo: str) -> str:
    """Return the name of the processor, with family and model: some hosts call all of them AMD EPYC, quick and slow."""
    found = dict(re.findall(r"^(model name|cpu family|model)[ \t]*: *(.+?) *$", cpuinfo, re.MULTILINE))
    name = found.get("model name") or platform.processor() or platform.machine()
    which = [f"{word} {found[key]}" for word, key in (("family", "cpu family"), ("model", "model")) if key in found]
    return f"{name} ({' '.join(which)})" if which else name
