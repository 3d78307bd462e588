"""Ctrl-C: once, the step is finished and saved; twice, everything stops at once. SIGTERM counts as once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class Stop:
    """Whether the user wants an end."""

    requested: bool = False


@contextmanager
def interruptible(say: Callable[[str], None]) -> Iterator[Stop]:
    """Give a `Stop` that the first Ctrl-C (or SIGTERM) sets; the second raises KeyboardInterrupt.

    Outside of the main thread, where Python allows no handlers, it is never set.
    """
    stop = Stop()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True
        say("interrupted: the step is finished and saved; once more stops at once")

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
