"""What a call computes, writes and holds, counted: the same source gives the same numbers on any machine."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

from .common import FORMS, core_call


class Work:
    """Forward and backward of every form, on arrays that count (`refattn.instruments.counting`)."""

    version = "1"
    timeout = 120.0
    unit = "operations or bytes"
    kind = "work"
    param_names = ["form", "n", "d", "backend"]
    params = [FORMS, [64, 512], [64], ["numpy"]]

    def setup(self, form: str, n: int, d: int, backend: str) -> None:
        try:
            import refattn.instruments.counting  # noqa: F401  (a version from before it has it not)
        except ImportError as error:
            raise NotImplementedError("this version counts nothing") from error
        call = core_call(form, n, d, "float64", backend)
        assert call.counts is not None
        self.tallies = call.counts()

    def track_operations(self, form: str, n: int, d: int, backend: str) -> float:
        return float(sum(tally.flops for tally in self.tallies))

    def track_written(self, form: str, n: int, d: int, backend: str) -> int:
        return sum(tally.written for tally in self.tallies)

    def track_held(self, form: str, n: int, d: int, backend: str) -> int:
        return max(tally.peak for tally in self.tallies)


class Launches:
    """The kernels that forward and backward of every form launch on a GPU, counted on the test double of CuPy."""

    version = "1"
    timeout = 120.0
    unit = "launches"
    kind = "work"
    param_names = ["form", "n", "d"]
    params = [FORMS, [64], [64]]

    def setup(self, form: str, n: int, d: int) -> None:
        if importlib.util.find_spec("cupy") is None:
            sys.path.append(str(Path(__file__).parents[2] / "tests" / "backends" / "double"))
        try:
            double = importlib.import_module("cupy._double")
        except ImportError as error:
            raise NotImplementedError("they are counted on the test double of CuPy alone") from error
        call = core_call(form, n, d, "float32", "cupy")
        double.reset()
        call.both()
        self.launches = int(double.tally["launches"])

    def track_launches(self, form: str, n: int, d: int) -> int:
        return self.launches
