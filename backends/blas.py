"""Hold BLAS to one thread while several threads of Python use it.

The setting of most BLAS libraries holds for the whole process, so those who want it are counted: the first one limits
BLAS, the last one restores what was there.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Hold:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.limiter: Any = None

    def enter(self, shared: Any) -> None:
        with self.lock:
            if self.count == 0:
                _take_control()
                self.limiter = shared.limit(limits=1)
                _take_control()
            self.count += 1

    def leave(self) -> None:
        with self.lock:
            self.count -= 1
            if self.count == 0:
                self.restore()

    def restore(self) -> None:
        limiter, self.limiter = self.limiter, None
        if limiter is not None:
            _take_control()
            limiter.restore_original_limits()
            _take_control()


_hold = _Hold()


@contextmanager
def one_thread() -> Iterator[None]:
    """Hold the BLAS libraries of NumPy and SciPy to one thread for each thread that is in such a ``with`` block."""
    shared, own = _controllers("scipy.linalg" in sys.modules)
    hold = _hold
    hold.enter(shared)
    limiter = own.limit(limits=1)
    try:
        yield
    finally:
        limiter.restore_original_limits()
        hold.leave()


@functools.cache
def _controllers(scipy: bool) -> tuple[Any, Any]:
    """Return threadpoolctl's controllers of the libraries set for the process, and of those set by each thread.

    Finding the libraries takes milliseconds, so it is done once, and again when SciPy has brought a BLAS of its own.
    """
    from threadpoolctl import ThreadpoolController

    blas = ThreadpoolController().select(user_api="blas")
    own = [c.filepath for c in blas.lib_controllers if c.internal_api == "openblas" and c.threading_layer == "openmp"]
    shared = [c.filepath for c in blas.lib_controllers if c.filepath not in own]
    return blas.select(filepath=shared), blas.select(filepath=own)


def _take_control() -> None:
    """Let this thread, and after it any other one, set OpenBLAS.

    From 3.8 on threadpoolctl obeys the first thread that sets OpenBLAS as long as that one lives, and ignores all
    others without a word; here the thread that restores the setting is often not the one that made it.
    """
    import threadpoolctl

    clear = getattr(getattr(threadpoolctl, "OpenBLASController", None), "clear_controlling_thread", None)
    if clear is not None:
        clear(force=True)


def _after_fork() -> None:
    """Start anew: of all threads a forked child has only the one that forked, and nobody will leave for the others."""
    global _hold
    inherited, _hold = _hold, _Hold()
    inherited.restore()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
