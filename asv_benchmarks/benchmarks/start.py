"""The time to begin: what importing costs, each time in a fresh interpreter; and the machine by itself."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import numpy as np

import refattn
from refattn import philox

from .common import MECHANISMS, Timed

HOME = str(Path(str(refattn.__file__)).parents[1])
TIMES = 5
PLACES = ["refattn", "refattn.cli", *(f"refattn.mechanisms.{name}" for name in MECHANISMS)]


class Import:
    """CPU time of a fresh interpreter that imports a module, its own start included: the least of some."""

    version = "1"
    timeout = 120.0
    unit = "seconds"
    kind = "time"
    factor = 1.2  # what a difference must exceed: processes start with more luck than they go on
    param_names = ["module"]
    params = [PLACES]

    def setup(self, module: str) -> None:
        # The interpreter would look for an installed refattn; the one that is meant is that of this process.
        self.code = f"import sys; sys.path.insert(0, {HOME!r}); import {module}"
        self.once()  # so that the modules are compiled

    def once(self) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", self.code], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def track_import(self, module: str) -> float:
        return min(self.once() for _ in range(TIMES))


class Machine(Timed):
    """The machine by itself, NumPy and Python alone: where this changes, so does everything."""

    param_names = ["what"]
    params = [["product", "exp", "python"]]

    def setup(self, what: str) -> None:
        self.x = philox.normal((256, 256), seed=0, purpose="benchmarks.machine")

    def time_numpy(self, what: str) -> None:
        if what == "product":
            self.x @ self.x
        elif what == "exp":
            np.exp(self.x)
        else:
            sum(range(10_000))
