"""Ctrl-C and SIGTERM in a command: noted at once, acted on where nothing can break.

An exception out of a signal handler comes at any line. Inside `threading.Thread.start` it releases a lock that is not
held. Inside a callback of a weak reference, a `__del__` or an `atexit` function it is swallowed, and the signal is
lost. So nothing is raised out of a handler here. The handler of C writes the number of the signal to a pipe, which a
thread reads. From then on `check` raises `Interrupted` in ordinary code: wherever a command waits for another process,
and between two pieces of work. The command unwinds as from any error.

A command that has come to no `check` after `COMPUTES` seconds is in the middle of a computation. The thread then ends
the process itself: it ends the processes that are open, removes what is half written (`undo`), prints the line and
exits. Where no command listens, as in a notebook, nothing here does anything, and Ctrl-C is Python's own.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

COMPUTES = 1.0
"""Seconds in which a command has to come to a `check` after a signal."""

UNWINDS = 15.0
"""Seconds from a `check` that raised to the end of the process: a process that cannot be killed takes 10 of them."""

UNDOES = 0.7
"""Seconds in which the thread undoes what is open before it exits."""

TWICE = 0.1
"""Seconds in which a second signal is the first one again: ``timeout`` sends one to the process and to its group."""

WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


class Interrupted(KeyboardInterrupt):
    """A signal has come; raised by `check`.

    Attributes
    ----------
    number
        That of the signal.
    """

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__()
        self.number = signal.Signals(number)

    @property
    def code(self) -> int:
        """The exit code of a command that it ends: 130 or 143."""
        return 128 + self.number

    @property
    def word(self) -> str:
        """What a command says of it."""
        return WORDS[self.number]


_undos: dict[object, Callable[[], Any]] = {}
_listener: _Listener | None = None


class _Listener:
    def __init__(self, name: str) -> None:
        self.name = name
        self.number = 0  # of the first signal
        self.came: float | None = None  # when the thread read it
        self.again = False  # whether another one came
        self.answered: float | None = None  # when the command began to end because of it
        self.ending: float | None = None  # when the thread began to end the process
        self.over = False  # whether the command has done its work, and only the end of Python is left
        self.bear: Callable[[int], Any] | None = None  # is given the first signal, after which the command goes on
        self.end_once = threading.Lock()
        self.heard = {
            number
            for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL))
            if signal.getsignal(number) is usual
        }
        self.reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in self.heard:
            signal.signal(number, self.note)
        atexit.register(self.stop)  # the first that is registered is the last that runs
        threading.Thread(target=self.watch, name="refattn-signals", daemon=True).start()

    def note(self, number: int, frame: FrameType | None) -> None:
        """Note a signal, so that the very next `check` knows of it: the handler, which never raises."""
        self.number = self.number or number

    def watch(self) -> None:
        """Read signals, and end the process when its time is over: the thread."""
        while True:
            left = self.deadline() - time.monotonic()
            if left <= 0.0:
                self.end()
            # A deadline may come nearer while the thread waits.
            if select.select([self.reading], [], [], None if self.came is None else max(0.0, min(left, 0.1)))[0]:
                for number in os.read(self.reading, 64):
                    if number in self.heard:
                        self.take(number)

    def take(self, number: int) -> None:
        """Take a signal that the thread has read."""
        now = time.monotonic()
        if self.came is not None:
            self.again = self.again or now > self.came + TWICE
            return
        self.number, self.came = self.number or number, now
        if self.bear is not None:
            with contextlib.suppress(Exception):
                self.bear(self.number)

    def deadline(self) -> float:
        """Return until when the process has to end."""
        if self.came is None or self.again:
            return math.inf if self.came is None else 0.0
        if self.ending is not None:
            return self.ending + UNDOES
        if self.bear is not None:
            return math.inf
        if self.answered is not None:
            return self.answered + UNWINDS
        return 0.0 if self.over else self.came + COMPUTES

    def answer(self) -> None:
        """Note that the command ends by itself."""
        self.answered = self.answered or time.monotonic()

    def check(self) -> None:
        """Raise `Interrupted` if a signal has come."""
        if self.number and self.bear is None:
            self.answer()
            raise Interrupted(self.number)

    def end(self) -> None:
        """End the process from the thread, which goes on to watch; exit at once if that takes too long, or again."""
        if self.ending is None and self.end_once.acquire(blocking=False):
            self.ending, self.again = time.monotonic(), False
            try:
                threading.Thread(target=self.exit, daemon=True).start()
            except RuntimeError:  # there can be no more threads
                self.exit()
            return
        time.sleep(0.0 if self.ending else 0.05)  # the command has just come to its end
        if self.deadline() <= time.monotonic():
            os._exit(Interrupted(self.number).code)

    def exit(self) -> None:
        """Undo what is open, say why, and exit."""
        for action in [*_undos.values()][::-1]:
            with contextlib.suppress(Exception):
                action()
        if not (self.over and self.answered):  # otherwise the command has said it
            self.say()
        os._exit(Interrupted(self.number).code)

    def say(self) -> None:
        """Say what ends the command, unless that would have to wait for a reader."""
        with contextlib.suppress(OSError, ValueError):
            if select.select([], [2], [], 0.0)[1]:
                os.write(2, f"{self.name}{Interrupted(self.number).word}\n".encode())

    def finish(self, code: Any) -> Any:
        """Return the exit code; if the process is being ended, wait for that."""
        self.over = True
        with self.end_once:
            if self.number and not self.answered:
                self.answer()
                self.say()
                return Interrupted(self.number).code
        return code

    def stop(self) -> None:
        """Leave signals to the system, by which they end the process; a last one may have come just before."""
        for number in self.heard:
            signal.signal(number, signal.SIG_DFL)
        code = self.finish(None)
        if code is not None:
            os._exit(code)


def listen(name: str = "") -> None:
    """Listen to Ctrl-C and SIGTERM for the rest of the process, a command, whose lines begin with `name`.

    A signal that this process ignores, or does something else with, stays as it is.
    """
    global _listener
    if _listener is None and threading.current_thread() is threading.main_thread():
        _listener = _Listener(name)


def listening() -> bool:
    """Tell whether this process is a command that listens."""
    return _listener is not None


def check() -> None:
    """Raise `Interrupted` if a signal has come: a place where a command may end."""
    if _listener is not None:
        _listener.check()


def leave_to_python() -> None:
    """Leave Ctrl-C to Python, for a debugger."""
    if _listener is not None and signal.SIGINT in _listener.heard:
        _listener.heard.discard(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def finish(code: Any) -> Any:
    """Return the exit code of a command that is done, or that of a signal that came too late for a `check`."""
    return code if _listener is None else _listener.finish(code)


@contextlib.contextmanager
def undo(action: Callable[[], Any]) -> Iterator[None]:
    """Do something if a signal ends the process within the ``with`` block, which is then never left.

    The action runs in another thread, while the block may be at work.
    """
    key = remember(action)
    try:
        yield
    finally:
        forget(key)


def remember(action: Callable[[], Any]) -> object:
    """Do what `undo` does until `forget` is called with what this returns."""
    key = object()
    _undos[key] = action
    return key


def forget(key: object) -> None:
    """Forget an action; one that is forgotten already stays so."""
    _undos.pop(key, None)


@contextlib.contextmanager
def bearing(bear: Callable[[int], Any]) -> Iterator[None]:
    """Have a command that listens go on after the first signal, whose number `bear` is given; a second one ends it.

    `bear` is called in another thread.
    """
    assert _listener is not None
    _listener.bear = bear
    try:
        yield
    finally:
        if _listener.number:
            _listener.answer()
        _listener.bear = None


def whole(action: Callable[[], Any]) -> None:
    """Do something to its end, such as writing a report; one signal waits for that, a second one does not."""
    listener = _listener
    if listener is None or listener.bear is not None:
        action()
        return
    listener.bear = lambda number: None
    try:
        action()
    finally:
        now = time.monotonic()
        listener.came = listener.came and now
        listener.answered = listener.answered and now
        listener.bear = None


def _after_fork() -> None:
    """A forked child is no command: signals that it gets are its own, and what is open belongs to its parent."""
    global _listener
    _undos.clear()
    if _listener is not None:
        signal.set_wakeup_fd(-1)
        for number in _listener.heard:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
        atexit.unregister(_listener.stop)
        _listener = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
