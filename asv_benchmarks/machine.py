"""What a report has to say about where its numbers come from."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
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


def commit() -> str:
    """Return the commit that is checked out, with a + where files differ from it; "" where there is no repository."""
    return git("describe", "--always", "--abbrev=10", "--dirty=+") or "unknown"


def git(*arguments: str) -> str:
    """Return what git prints, or "" where it fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()
