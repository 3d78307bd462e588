"""The time of each form of each core."""

from __future__ import annotations

import os
import time

from refattn import backends

from .common import BACKENDS, FORMS, Timed, core_call

CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Core(Timed):
    """Forward, backward, and both."""

    param_names = ["form", "n", "d", "dtype", "backend"]
    params = [FORMS, [64, 1024], [16, 64], ["float32", "float64"], BACKENDS]

    def setup(self, form: str, n: int, d: int, dtype: str, backend: str) -> None:
        self.call = core_call(form, n, d, dtype, backend)
        self.timer = self.call.timer

    def time_forward(self, form: str, n: int, d: int, dtype: str, backend: str) -> None:
        self.call.forward()

    def time_backward(self, form: str, n: int, d: int, dtype: str, backend: str) -> None:
        self.call.backward()

    def time_both(self, form: str, n: int, d: int, dtype: str, backend: str) -> None:
        self.call.both()


class Causal(Timed):
    """With the future hidden: half of the work, where a form leaves it out."""

    param_names = ["form", "n", "dtype", "backend"]
    params = [FORMS, [1024], ["float32"], BACKENDS]

    def setup(self, form: str, n: int, dtype: str, backend: str) -> None:
        self.call = core_call(form, n, 64, dtype, backend, causal=True)
        self.timer = self.call.timer

    def time_both(self, form: str, n: int, dtype: str, backend: str) -> None:
        self.call.both()


class Parallel(Timed):
    """Wall time with a worker for every CPU that this process may use."""

    timer = time.perf_counter
    param_names = ["form", "n", "dtype", "backend"]
    params = [FORMS, [1024], ["float32"], BACKENDS]
    factor = 1.3  # what a difference must exceed: nobody but this process decides how many CPUs it gets

    def setup(self, form: str, n: int, dtype: str, backend: str) -> None:
        self.call = core_call(form, n, 64, dtype, backend)
        if not backends.get(backend).pools:
            raise NotImplementedError(f"{backend} has no workers")

    def time_both(self, form: str, n: int, dtype: str, backend: str) -> None:
        with backends.use_workers(CPUS):
            self.call.both()
