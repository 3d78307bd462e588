"""Other processes: started, asked, waited for no longer than a deadline, and ended with all that they started.

A `Process` is any program, a `Worker` a Python that answers questions, bytes for bytes, by a function of a module.
Each runs in a session of its own, so that Ctrl-C reaches this process alone, and its environment has a mark that what
it starts inherits: `close` finds by both what is left behind (on Linux, in /proc; elsewhere by the process group alone)
and kills it. If this process is killed itself, the guard that it has started does the same: see `refattn.guard`.

What a worker prints, in C too, comes on a pipe of its own and never among the answers. Nothing here unpickles anything.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import importlib
import io
import os
import queue
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, cast

from refattn import guard
from refattn.messages import shown

SLICE = 0.05
"""Seconds that are waited at once, before it is looked whether a process still runs."""

SAID = 4000
"""Bytes that are kept of what a process prints: the last ones."""

_HEAD = struct.Struct("<8sQ")  # the beginning of every message, and its size
_BEGINS = b"refattn\n"
_AT_ONCE = 1 << 16


class EndedError(Exception):
    """A process has ended, or did not answer in time; the message says how."""


class Tail:
    """The end of what comes through a pipe, read by a thread so that nobody who prints is held up."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.data, self.count, self._stream = b"", 0, stream
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while part := os.read(self._stream.fileno(), _AT_ONCE):
            self.add(part)
        self._stream.close()

    def add(self, part: bytes) -> None:
        """Take some more."""
        self.data, self.count = (self.data + part)[-SAID:], self.count + len(part)

    def text(self, since: int = 0) -> str:
        """Return what has come after so many bytes as text; bytes that are no UTF-8 are replaced."""
        return self.data[max(0, len(self.data) - (self.count - since)) :].decode(errors="replace")

    def wait(self) -> None:
        """Wait until all has come, but not for ever: what could not be ended may hold the pipe."""
        self._thread.join(1.0)


class Started:
    """A command in a session of its own, which ends with all that it has started. Close it, or use it as a context.

    Parameters
    ----------
    command
        The program and its arguments.
    environment
        What its environment has beside that of this process.
    **how
        Arguments of `subprocess.Popen`.

    Raises
    ------
    OSError, ValueError
        If it cannot be run.
    """

    def __init__(
        self, command: Sequence[str | os.PathLike[str]], environment: Mapping[str, str] | None = None, **how: Any
    ) -> None:
        self._mark = f"{os.environ.get(guard.MARK, '')}/{secrets.token_hex(16)}"
        env = {**os.environ, **(environment or {}), guard.MARK: self._mark}
        _tell_guard(f"+ {self._mark}")
        try:
            self.process = subprocess.Popen([*command], env=env, start_new_session=True, **how)
        except (OSError, ValueError):
            _tell_guard(f"- {self._mark}")
            raise
        _tell_guard(f"+ {self._mark} {self.process.pid}")

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> int:
        """End it and all that it has started; return its exit code, that of its own end if that came first."""
        guard.end(self._mark, self.process.pid)
        try:
            code = self.process.wait(guard.LONGEST)
        except subprocess.TimeoutExpired:  # another user's, or it waits for a device
            code = -signal.SIGKILL
        _tell_guard(f"- {self._mark}")
        return code


class Process(Started):
    """A command with nothing on its standard input, and the ends of what it prints. Close it, or use it as a context.

    Parameters
    ----------
    command
        The program and its arguments.
    keeps
        Descriptors that it inherits.
    environment
        What its environment has beside that of this process.

    Raises
    ------
    OSError, ValueError
        If it cannot be run.
    """

    def __init__(
        self,
        command: Sequence[str | os.PathLike[str]],
        keeps: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        pipe = subprocess.PIPE
        streams = {"stdin": subprocess.DEVNULL, "stdout": pipe, "stderr": pipe, "bufsize": 0}
        super().__init__(command, environment, pass_fds=keeps, **streams)
        assert self.process.stdout is not None and self.process.stderr is not None
        self.out, self.err = Tail(self.process.stdout), Tail(self.process.stderr)

    def wait(self, seconds: float, watch: Callable[[], Any] = lambda: None) -> int:
        """Return the code with which it ends, calling `watch` now and then; EndedError if that takes too long."""
        for _ in _slices(seconds):
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(SLICE)
            watch()
        raise EndedError(f"did not end within {seconds:g} s")

    def close(self) -> int:
        """End it and all that it has started; return its exit code, that of its own end if that came first."""
        code = super().close()
        for tail in (self.out, self.err):
            tail.wait()
        return code


_starting = threading.Lock()


def _tell_guard(line: str) -> None:
    """Tell the guard of this process what is open; one that cannot be started, or was ended, is done without."""
    with contextlib.suppress(OSError), _starting:
        told = _guard(os.getpid()).stdin
        assert told is not None
        told.write(f"{line}\n".encode())


@functools.cache
def _guard(parent: int) -> subprocess.Popen[bytes]:
    home, name = os.path.split(guard.__file__)  # so that whoever kills all that has refattn in its command spares it
    command = [sys.executable, "-I", "-S", name, str(parent)]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    process = subprocess.Popen(
        command, bufsize=0, stdin=pipe, stdout=null, stderr=null, cwd=home, start_new_session=True
    )
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)

    def leave() -> None:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(2.0)
        except subprocess.TimeoutExpired:  # somebody has stopped it
            process.kill()

    atexit.register(leave)
    return process


def _slices(seconds: float) -> Iterator[None]:
    """Yield until the time is over; time in which this process is stopped counts as one slice."""
    left, before = seconds, time.monotonic()
    while left > 0.0:
        yield
        now = time.monotonic()
        left, before = left - min(now - before, 2 * SLICE), now


Event = tuple["Worker", bytes | None]


class Worker(Process):
    """A Python that answers questions by a function of bytes that returns bytes.

    Parameters
    ----------
    target
        The function, as MODULE:NAME.
    events
        Where answers go, (the worker, the answer), and (the worker, None) when no more will come. Without it a queue of
        its own, which `ask` waits for.
    """

    def __init__(self, target: str, events: queue.SimpleQueue[Event] | None = None) -> None:
        self.limit = 1 << 62  # bytes of an answer
        self._stray = b""  # what came and was no answer
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue() if events is None else events
        self._socket, theirs = socket.socketpair()
        with theirs:
            begin = f"import sys; sys.path[:] = {sys.path!r}; from refattn import workers"
            serve = f"workers.serve({target!r}, {theirs.fileno()})"
            super().__init__([sys.executable, "-c", f"{begin}; {serve}"], keeps=[theirs.fileno()])
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._listen, self._reap)]
        for thread in self._threads:
            thread.start()

    def send(self, question: bytes) -> None:
        """Send a question; if the worker has ended its event says so."""
        with contextlib.suppress(OSError):
            self._socket.sendall(_HEAD.pack(_BEGINS, len(question)))
            self._socket.sendall(question)

    def ask(self, question: bytes, seconds: float) -> bytes:
        """Send a question and return the answer; EndedError, and the worker is closed, if there is none in time."""
        begun = self.err.count
        try:
            self.send(question)
            for _ in _slices(seconds):
                with contextlib.suppress(queue.Empty):
                    answer = self.events.get(timeout=SLICE)[1]
                    break
            else:
                raise EndedError(f"did not end within {seconds:g} s")
            if answer is None:
                raise EndedError(self._end(begun))
            return answer
        except BaseException:  # the user's interrupt, too
            self.close()
            raise

    def close(self) -> int:
        """End it, and all that it has started."""
        code = super().close()
        for thread in self._threads:
            thread.join(1.0)
        self._socket.close()
        return code

    def _listen(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                head = _exactly(self._socket, _HEAD.size)
                begins, size = _HEAD.unpack(head)
                if begins != _BEGINS or size > self.limit:
                    self._stray = head
                    break
                self.events.put((self, _exactly(self._socket, size)))
        self.events.put((self, None))

    def _reap(self) -> None:
        self.process.wait()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # what it has left behind may hold the other end

    def _end(self, begun: int) -> str:
        """Return how it has ended, in words."""
        if self._stray:
            return f"wrote to the pipe of its answers: {self._stray!r}, which is no answer"
        with contextlib.suppress(EndedError):
            self.wait(2.0)
        code = self.close()
        if code < 0:
            known = -code in {each.value for each in signal.Signals}
            return f"ended its process by {signal.Signals(-code).name if known else f'signal {-code}'}"
        words = [line.strip() for line in self.err.text(begun).splitlines() if line.strip()]
        last = f"its last words: {shown(words[-1], 300)}" if words else "it said nothing"
        return f"ended its process with exit code {code}; {last}"


def each(target: str, questions: Sequence[bytes], jobs: int) -> Iterator[tuple[int, bytes | None]]:
    """Have workers answer questions; yield each number with its answer, None if its worker ended, as they come."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    waiting = iter(enumerate(questions))
    busy: dict[Worker, int] = {}

    def give(worker: Worker | None) -> None:
        for number, question in waiting:
            worker = worker or Worker(target, events)
            busy[worker] = number
            worker.send(question)
            return
        if worker is not None:
            worker.close()

    try:
        for _ in range(jobs):
            give(None)
        while busy:
            worker, answer = events.get()
            if worker not in busy:  # the end of one that was closed
                continue
            number = busy.pop(worker)
            if answer is None:
                worker.close()
            give(None if answer is None else worker)
            yield number, answer
    finally:
        for worker in busy:
            worker.close()


def _exactly(stream: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = stream.recv(min(count - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


# --- the other process


def serve(target: str, descriptor: int) -> None:
    """Answer questions until nobody asks any more: the other process."""
    os.set_inheritable(descriptor, False)
    stream, own = socket.socket(fileno=descriptor), os.getpid()
    os.dup2(2, 1)
    for output in (sys.stdout, sys.stderr):  # whatever the locale is, what is printed is no error
        cast(io.TextIOWrapper, output).reconfigure(encoding="utf-8", errors="backslashreplace")
    faulthandler.enable()
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    while True:
        try:
            _, size = _HEAD.unpack(_exactly(stream, _HEAD.size))
            question = _exactly(stream, size)
        except EOFError:
            os._exit(0)
        except OSError:
            _end("it read from a descriptor that was not its own")
        try:
            answer = function(question)
        finally:
            if os.getpid() != own:  # foreign code has forked, and this process has come back from it, too
                os._exit(0)
        with contextlib.suppress(Exception):  # it may be closed, or anything
            sys.stdout.flush()
        try:
            stream.sendall(_HEAD.pack(_BEGINS, len(answer)) + answer)
        except OSError:
            _end("it closed a descriptor that was not its own")


def _end(why: str) -> Any:
    with contextlib.suppress(OSError):
        os.write(2, f"\n{why}\n".encode())
    os._exit(1)
