"""Ctrl-C: once, the step is finished and saved; twice, everything stops at once. SIGTERM counts as once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType


class Stop(threading.Event):
    """Whether to stop, and the number of the signal that asked for it."""

    number = 0


@contextmanager
def interruptible(say: Callable[[str], None]) -> Iterator[Stop]:
    """Give an event that the first Ctrl-C (or SIGTERM) sets; the second raises KeyboardInterrupt.

    Outside of the main thread, where Python allows no handlers, it is never set. A signal that is ignored, as for a
    process in the background of a script, stays ignored.
    """
    stop = Stop()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            if callable(
                first := before[signal.Signals(number)]
            ):  # the command's own, which tells one signal from the other
                first(number, frame)
            raise KeyboardInterrupt
        stop.number = number
        stop.set()
        with suppress(RuntimeError, OSError):  # the line that it came into the middle of, or nobody who reads
            say("interrupted: the step is finished and saved; once more stops at once")

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
