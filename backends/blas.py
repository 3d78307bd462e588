"""Hold BLAS to one thread while several threads of Python use it.

The setting of most BLAS libraries holds for the whole process, so those who want it are counted: the first one limits
BLAS, the last one restores what was there.
"""

from __future__ import annotations

# `signal` looks for each handler in an enumeration, which takes ten times as long as the rest.
import _signal  # type: ignore[import-not-found]
import functools
import os
import signal
import sys
import threading
import weakref
from typing import Any


class _Hold:
    def __init__(self) -> None:
        self.lock = threading.RLock()  # `one_thread.__del__` may come in the middle of what holds it
        # Threads in a block, each with its block and with the limiter of the libraries that it sets for itself.
        self.blocks: dict[int, tuple[weakref.ref[one_thread], Any]] = {}
        self.limiter: Any = None

    def holds(self, thread: int) -> bool:
        """Tell whether a thread is in a block; a block that is no more was left by an interrupt."""
        block = self.blocks.get(thread)
        return block is not None and block[0]() is not None

    def enter(self, block: one_thread, shared: Any, own: Any) -> None:
        with self.lock:
            self.leave(block.thread)  # what an interrupt kept another block of this thread from
            self.blocks[block.thread] = weakref.ref(block), own.limit(limits=1)
            if self.limiter is None:
                _take_control()
                self.limiter = shared.limit(limits=1)
                _take_control()

    def leave(self, thread: int) -> None:
        with self.lock:
            if thread not in self.blocks:
                return
            _, own = self.blocks.pop(thread)
            own.restore_original_limits()
            if not self.blocks:
                self.restore()

    def restore(self) -> None:
        limiter, self.limiter = self.limiter, None
        if limiter is not None:
            _take_control()
            limiter.restore_original_limits()
            _take_control()


class one_thread:  # noqa: N801 (it is called as a function)
    """Hold the BLAS libraries of NumPy and SciPy to one thread for each thread that is in such a ``with`` block.

    A block within another one of its thread does nothing. An interrupt by the user, whenever it comes, leaves nothing
    held: what `__exit__` did not come to, `__del__` does, and what that did not come to, the thread's next block.
    """

    hold: _Hold | None = None
    thread: int = 0

    def __enter__(self) -> None:
        thread = threading.get_ident()
        if _hold.holds(thread):
            return
        with uninterrupted():
            shared, own = _controllers("scipy.linalg" in sys.modules)
            self.hold, self.thread = _hold, thread
            try:
                self.hold.enter(self, shared, own)
            except BaseException:
                self._leave()
                raise

    def __exit__(self, *error: object) -> None:
        if self.hold is not None:
            self._leave()

    def __del__(self) -> None:
        if self.hold is not None:
            self._leave()

    def _leave(self) -> None:
        with uninterrupted():
            hold, self.hold = self.hold, None
            if hold is not None:
                hold.leave(self.thread)


_hold = _Hold()


class uninterrupted:  # noqa: N801 (it is called as a function)
    """Let Ctrl-C wait until the end of a short ``with`` block; a block within another one ends with the outer one."""

    def __init__(self) -> None:
        self.handler: Any = None
        self.came: Any = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            handler = _signal.getsignal(signal.SIGINT)
            if callable(handler) and not isinstance(getattr(handler, "__self__", None), uninterrupted):
                self.handler = handler
                _signal.signal(signal.SIGINT, self.note)

    def note(self, *came: Any) -> None:
        self.came = came

    def __exit__(self, *error: object) -> None:
        if self.handler is not None:
            _signal.signal(signal.SIGINT, self.handler)
            if self.came is not None:
                self.handler(*self.came)


def threads(count: int) -> Any:
    """Return a context in which the libraries that threadpoolctl knows, of BLAS and OpenMP, use so many threads."""
    from threadpoolctl import threadpool_limits

    return threadpool_limits(limits=count)


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


def kernels() -> list[str]:
    """Return which BLAS libraries NumPy uses, with the processors that their kernels are for."""
    from threadpoolctl import threadpool_info

    found = {
        f"{lib['internal_api']} {lib['version']} {lib.get('architecture', '')}".strip()
        for lib in threadpool_info()
        if lib["user_api"] == "blas" and "scipy.libs" not in lib["filepath"]  # which is not always loaded
    }
    return sorted(found)
