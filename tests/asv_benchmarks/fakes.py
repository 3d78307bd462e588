"""Sides for the tests. Those of `clocked` move the clock of their process themselves, so that times are exact."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

_now = 0.0


def clocked(milliseconds: float, log: str = "") -> Callable[[], Any]:
    """A call that takes so long by the clocks of its process, which stand still otherwise."""

    def work() -> Any:
        global _now
        _now += 1e-3 * milliseconds
        if log:
            with open(log, "a", encoding="utf-8") as file:
                file.write(f"{milliseconds:g}\n")
        return np.arange(3.0), {"x": np.ones((2, 2))}

    setattr(time, "perf_counter", lambda: _now)  # noqa: B010
    setattr(time, "process_time", lambda: _now)  # noqa: B010
    return work


def scaled(by: float, **params: Any) -> Callable[[], Any]:
    """A side whose result is another one."""
    work = clocked(1.0)
    return lambda: tuple(by * x if isinstance(x, np.ndarray) else x for x in work())


def raises(**params: Any) -> Callable[[], Any]:
    """A side that cannot be made."""
    raise ValueError("no such attention\nand a second line")


def absent(**params: Any) -> Callable[[], Any]:
    """A side whose library is not installed."""
    raise ImportError("fast_attention is not installed")


def needs_a_library(**params: Any) -> Callable[[], Any]:
    """A side that imports what is not there."""
    raise ModuleNotFoundError("No module named 'faster.kernels'", name="faster")


def dies(**params: Any) -> Callable[[], Any]:
    """A side that takes its process with it."""
    print("a last word", flush=True)
    os._exit(7)


def threads(**params: Any) -> Callable[[], float]:
    """The number of threads that the process is held to."""
    return lambda: float(os.environ["OMP_NUM_THREADS"]) + float(os.environ["REFATTN_WORKERS"])


def allocates(mebibytes: int) -> Callable[[], Any]:
    """A side that needs memory in small pieces, in its first call twice as much, and keeps what lies above them."""
    kept: list[Any] = []

    def work() -> None:
        pieces = [np.ones(1 << 13) for _ in range(mebibytes * (16 if kept else 32))]  # 64 KiB each
        kept.append(np.ones(1 << 13))
        del pieces

    return work


def slower(milliseconds: float) -> Callable[[], Any]:
    """Four times as long."""
    return clocked(4.0 * milliseconds)


def other(by: float) -> Callable[[], Any]:
    """A result that is off by a hundredth."""
    return scaled(1.01 * by)


def hangs() -> Callable[[], Any]:
    """A side that never comes back."""
    time.sleep(3600.0)
    raise AssertionError
