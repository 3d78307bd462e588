"""How near a form comes to what the machine can do: its matrix products beside a product of large matrices."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from refattn import philox

from .common import FORMS, core_call

SECONDS = 0.2
"""How long a call is repeated; the fastest one counts."""


def fastest(call: Callable[[], Any]) -> float:
    """Return the CPU seconds of the fastest call, after one that is not timed."""
    call()
    least, stop = float("inf"), time.perf_counter() + SECONDS
    while True:
        start = time.process_time()
        call()
        least = min(least, time.process_time() - start)
        if time.perf_counter() > stop:
            return least


@functools.cache
def products(dtype: str, size: int = 1024) -> float:
    """Return the operations per second of a product of square matrices: the peak that NumPy's BLAS reaches here."""
    x, y = (philox.normal((size, size), seed=0, purpose=f"benchmarks.peak.{n}").astype(dtype) for n in "xy")
    return 2.0 * size**3 / fastest(lambda: x @ y)


class Peak:
    """Operations of matrix products per second, as a share of those of a product of large matrices.

    The operations are counted in the call itself. What is missing to 1 are functions of each element, small products,
    and overhead.
    """

    version = "1"
    timeout = 120.0
    unit = "share of the peak"
    kind = "rate"
    param_names = ["form", "n", "d", "dtype", "backend"]
    params = [FORMS, [64, 512], [64], ["float32", "float64"], ["numpy"]]

    def setup(self, form: str, n: int, d: int, dtype: str, backend: str) -> None:
        self.call = core_call(form, n, d, dtype, backend)

    def track_forward(self, form: str, n: int, d: int, dtype: str, backend: str) -> float:
        return self.share(self.call.forward, 0, dtype)

    def track_backward(self, form: str, n: int, d: int, dtype: str, backend: str) -> float:
        return self.share(self.call.backward, 1, dtype)

    def share(self, call: Callable[[], Any], part: int, dtype: str) -> float:
        assert self.call.counts is not None
        return float(self.call.counts()[part].products) / fastest(call) / products(dtype)
