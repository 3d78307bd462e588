"""The time to begin: what importing costs, each time in a fresh interpreter; and the machine by itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import refattn
from refattn import counter

from .common import MECHANISMS, Timed

HOME = str(Path(str(refattn.__file__)).parents[1])
PLACES = ["refattn", "refattn.cli", *(f"refattn.mechanisms.{name}" for name in MECHANISMS)]


class Import:
    """Wall time of an import."""

    version = "1"
    rounds = 2
    repeat = (3, 10, 1.0)
    number = 1
    factor = 1.2  # what a difference must exceed: processes start with more luck than they go on
    param_names = ["module"]
    params = [PLACES]

    def timeraw_import(self, module: str) -> tuple[str, str]:
        # The interpreter would look for an installed refattn; the one that is meant is that of this process.
        return f"import {module}", f"import sys; sys.path.insert(0, {HOME!r})"


class Machine(Timed):
    """The machine by itself: NumPy alone. Where this changes, so does everything, and refattn has no part in it."""

    param_names = ["what"]
    params = [["product", "exp"]]

    def setup(self, what: str) -> None:
        self.x = counter.normal((256, 256), seed=0, purpose="benchmarks.machine")

    def time_numpy(self, what: str) -> None:
        if what == "product":
            self.x @ self.x
        else:
            np.exp(self.x)
