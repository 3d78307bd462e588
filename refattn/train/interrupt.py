"""Ctrl-C: once, the step is finished and saved; twice, everything stops at once. SIGTERM counts as once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from refattn import interrupts


class Stop(threading.Event):
    """Whether to stop, and the number of the signal that asked for it."""

    number = 0


@contextmanager
def interruptible(say: Callable[[str], None]) -> Iterator[Stop]:
    """Give an event that the first Ctrl-C (or SIGTERM) sets; the second does what it did before, in a command ends it.

    Outside of the main thread, where Python allows no handlers, it is never set. A signal that is ignored, as for a
    process in the background of a script, stays ignored.
    """
    stop = Stop()

    def bear(number: int) -> None:
        stop.number = number
        stop.set()
        with contextlib.suppress(Exception):  # the line that it came into the middle of, or nobody who reads
            say("interrupted: the step is finished and saved; once more stops at once")

    def handle(number: int, frame: FrameType | None) -> None:
        restore()
        bear(number)

    before: dict[int, Any] = {}

    def restore() -> None:
        for each, handler in [*before.items()]:
            signal.signal(each, handler)

    if threading.current_thread() is not threading.main_thread():
        yield stop
    elif interrupts.listening():
        with interrupts.bearing(bear):
            yield stop
    else:
        numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) not in (signal.SIG_IGN, None)]
        try:
            for number in numbers:
                before[number] = signal.getsignal(number)
                signal.signal(number, handle)
            yield stop
        finally:
            restore()
