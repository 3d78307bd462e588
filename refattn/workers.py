"""Other processes: started, asked, waited for no longer than a deadline, and ended with all that they started.

A `Process` is any program, a `Worker` a Python that answers questions, bytes for bytes, by a function of a module.
Each runs in a session of its own, so that Ctrl-C reaches this process alone, and its environment has a mark that what
it starts inherits: `close` finds by both what is left behind (on Linux, in /proc; elsewhere by the process group alone)
and kills it. If this process is killed itself, the guard that it has started does the same: see `refattn.guard`.

What a worker prints, in C too, comes on a pipe of its own and never among the answers. Nothing here unpickles anything.

There are no threads. Whoever waits for a process reads all pipes that are open meanwhile, and looks at times whether
Ctrl-C or SIGTERM has come: see `refattn.interrupts`.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import importlib
import io
import math
import os
import secrets
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, cast

from refattn import guard, interrupts
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


class LateError(EndedError):
    """It did not end, or answer, within its time limit."""


class Pipes:
    """What comes through the pipes of processes, read by whoever waits for one of them.

    Attributes
    ----------
    events
        What workers have answered and nobody has taken, each with its worker; None for one that has ended.
    workers
        Those whose end is an event.
    """

    def __init__(self) -> None:
        self.events: deque[Event] = deque()
        self.workers: list[Worker] = []
        self._selector = selectors.PollSelector()

    def add(self, stream: Stream, take: Callable[[], bool]) -> None:
        """Call `take` whenever something has come through a stream, until it returns False."""
        os.set_blocking(stream.fileno(), False)
        self._selector.register(stream, selectors.EVENT_READ, take)

    def remove(self, stream: Any) -> None:
        """Read a stream no longer; one that is not read stays so."""
        with contextlib.suppress(KeyError, ValueError):  # ValueError: it is closed
            self._selector.unregister(stream)

    def release(self, worker: Worker, stream: Stream) -> None:
        """Wait for no more answers of a worker, nor for its end."""
        self.remove(stream)
        if worker in self.workers:
            self.workers.remove(worker)

    def read(self, seconds: float, writing: Stream | None = None) -> None:
        """Take what has come, once. Wait at most so long for something to come, or until one can be written to."""
        if writing is not None:
            with contextlib.suppress(KeyError):
                both = selectors.EVENT_READ | selectors.EVENT_WRITE
                self._selector.modify(writing, both, self._selector.get_key(writing).data)
        for key, what in self._selector.select(seconds):
            if key.events & selectors.EVENT_WRITE:
                self._selector.modify(key.fileobj, selectors.EVENT_READ, key.data)
            if what & selectors.EVENT_READ and not key.data():
                self.remove(key.fileobj)
        for worker in [*self.workers]:
            worker.look()

    def next(self) -> Event:
        """Wait for the next event and return it."""
        for _ in slices(math.inf):
            if self.events:
                break
            self.read(SLICE)
        return self.events.popleft()


class Tail:
    """The end of what comes through a pipe."""

    def __init__(self, stream: IO[bytes], pipes: Pipes) -> None:
        self.data, self.count, self._stream, self._pipes = b"", 0, stream, pipes
        pipes.add(stream, self._take)

    def _take(self) -> bool:
        try:
            part = os.read(self._stream.fileno(), _AT_ONCE)
        except BlockingIOError:
            return True
        self.add(part)
        if not part:
            self._pipes.remove(self._stream)
            self._stream.close()
        return bool(part)

    def add(self, part: bytes) -> None:
        """Take some more."""
        self.data, self.count = (self.data + part)[-SAID:], self.count + len(part)

    def text(self, since: int = 0) -> str:
        """Return what has come after so many bytes as text; bytes that are no UTF-8 are replaced."""
        return self.data[max(0, len(self.data) - (self.count - since)) :].decode(errors="replace")

    @property
    def open(self) -> bool:
        """Whether more may come."""
        return not self._stream.closed

    def close(self) -> None:
        """Read no more."""
        self._pipes.remove(self._stream)
        self._stream.close()


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
        self._code: int | None = None  # once it is closed
        _tell_guard(f"+ {self._mark}")
        try:
            self.process = subprocess.Popen([*command], env=env, start_new_session=True, **how)
        except (OSError, ValueError):
            _tell_guard(f"- {self._mark}")
            raise
        _tell_guard(f"+ {self._mark} {self.process.pid}")
        self._undo = interrupts.remember(functools.partial(guard.end, self._mark, self.process.pid))

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> int:
        """End it and all that it has started; return its exit code, that of its own end if that came first."""
        if self._code is None:
            guard.end(self._mark, self.process.pid)
            try:
                self._code = self.process.wait(guard.LONGEST)
            except subprocess.TimeoutExpired:  # another user's, or it waits for a device
                self._code = -signal.SIGKILL
            interrupts.forget(self._undo)
            _tell_guard(f"- {self._mark}")
        return self._code


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
    pipes
        Where what it prints is read, together with that of others; its own if absent.

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
        pipes: Pipes | None = None,
    ) -> None:
        pipe = subprocess.PIPE
        streams = {"stdin": subprocess.DEVNULL, "stdout": pipe, "stderr": pipe, "bufsize": 0}
        super().__init__(command, environment, pass_fds=keeps, **streams)
        assert self.process.stdout is not None and self.process.stderr is not None
        self.pipes = Pipes() if pipes is None else pipes
        self.out, self.err = Tail(self.process.stdout, self.pipes), Tail(self.process.stderr, self.pipes)

    def wait(self, seconds: float, watch: Callable[[], Any] = lambda: None) -> int:
        """Return the code with which it ends, calling `watch` now and then; LateError if that takes too long."""
        for _ in slices(seconds):
            if self.out.open or self.err.open:
                self.pipes.read(SLICE)
            else:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(SLICE)
            if (code := self.process.poll()) is not None:
                return code
            watch()
        raise LateError(f"did not end within {seconds:g} s")

    def close(self) -> int:
        """End it and all that it has started; return its exit code, that of its own end if that came first."""
        code = super().close()
        end = time.monotonic() + 1.0  # what could not be ended may hold a pipe
        while (self.out.open or self.err.open) and (left := end - time.monotonic()) > 0.0:
            self.pipes.read(left)
        self.out.close()
        self.err.close()
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


def slices(seconds: float) -> Iterator[None]:
    """Yield until the time is over, or a signal ends the command; what it is stopped for counts as one slice."""
    left, before = seconds, time.monotonic()
    while left > 0.0:
        interrupts.check()
        yield
        now = time.monotonic()
        left, before = left - min(now - before, 2 * SLICE), now


def lines(stream: IO[Any]) -> Iterator[str]:
    """Yield the lines that come through a pipe, which nobody else reads; a signal ends the command meanwhile."""
    poll, rest = select.poll(), b""
    poll.register(stream, select.POLLIN)
    for _ in slices(math.inf):
        if poll.poll(1000.0 * SLICE):
            part = os.read(stream.fileno(), _AT_ONCE)
            if not part:
                yield from filter(None, [rest.decode(errors="replace")])
                return
            *whole, rest = (rest + part).split(b"\n")
            yield from (line.decode(errors="replace") for line in whole)


Event = tuple["Worker", bytes | None]
Stream = IO[bytes] | socket.socket


class Worker(Process):
    """A Python that answers questions by a function of bytes that returns bytes.

    Parameters
    ----------
    target
        The function, as MODULE:NAME.
    pipes
        Where its answers come, as (the worker, the answer), and (the worker, None) when no more will come: what several
        workers have in common, and `Pipes.next` waits for. Without it its own, which `ask` waits for.
    """

    def __init__(self, target: str, pipes: Pipes | None = None) -> None:
        self.limit = 1 << 62  # bytes of an answer
        self._stray = b""  # what came and was no answer
        self._begun = bytearray()  # the next answer, as far as it has come
        self._listens = True
        self._socket, theirs = socket.socketpair()
        with theirs:
            home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
            # The package itself comes from where this one is from; a file refattn.py elsewhere is not it.
            begin = f"import sys; sys.path[:] = {[home, *sys.path]!r}; import refattn; del sys.path[0]"
            serve = f"from refattn import workers; workers.serve({target!r}, {theirs.fileno()})"
            super().__init__([sys.executable, "-c", f"{begin}; {serve}"], keeps=[theirs.fileno()], pipes=pipes)
        self.pipes.add(self._socket, self._take)
        self.pipes.workers.append(self)

    def send(self, question: bytes, seconds: float = math.inf) -> None:
        """Send a question; if the worker has ended its event says so. LateError if it takes none in time."""
        for part in (_HEAD.pack(_BEGINS, len(question)), question):
            rest = memoryview(part)
            for _ in slices(seconds):
                try:
                    while rest:
                        rest = rest[self._socket.send(rest) :]
                    break
                except BlockingIOError:
                    self.pipes.read(SLICE, self._socket)
                except OSError:
                    return
                if not self._listens:
                    return
            else:
                raise LateError(f"did not end within {seconds:g} s")

    def ask(self, question: bytes, seconds: float) -> bytes:
        """Send a question and return the answer; EndedError, and the worker is closed, if there is none in time."""
        self.pipes.read(0.0)
        begun = self.err.count
        try:
            self.send(question, seconds)
            for _ in slices(seconds):
                if self.pipes.events:
                    break
                self.pipes.read(SLICE)
            else:
                raise LateError(f"did not end within {seconds:g} s")
            answer = self.pipes.events.popleft()[1]
            if answer is None:
                raise EndedError(self._end(begun))
            self.pipes.read(0.0)  # what it printed before it answered
            return answer
        except BaseException:  # the user's interrupt, too
            self.close()
            raise

    def close(self) -> int:
        """End it, and all that it has started."""
        self.pipes.release(self, self._socket)
        code = super().close()
        self._socket.close()
        return code

    def look(self) -> None:
        """See whether the process has ended; what it has left behind may hold the other end of the socket."""
        if self.process.poll() is not None:
            while (part := self._receive()) and self._understand(part):
                pass
            self._stop()

    def _take(self) -> bool:
        part = self._receive()
        if part is None or self._understand(part):
            return True
        self._stop()
        return False

    def _receive(self) -> bytes | None:
        """Return what has come, b"" at the end, None if it has to be waited for."""
        try:
            return self._socket.recv(1 << 20)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def _understand(self, part: bytes) -> bool:
        """Make events of what has come; return whether more is wanted."""
        self._begun += part
        while len(self._begun) >= _HEAD.size:
            begins, size = _HEAD.unpack_from(self._begun)
            if begins != _BEGINS or size > self.limit:
                self._stray = bytes(self._begun[: _HEAD.size])
                return False
            end = _HEAD.size + size
            if len(self._begun) < end:
                break
            self.pipes.events.append((self, bytes(memoryview(self._begun)[_HEAD.size : end])))
            self._begun = self._begun[end:]
        return bool(part)

    def _stop(self) -> None:
        """Wait for no more answers."""
        if self._listens:
            self._listens = False
            self.pipes.release(self, self._socket)
            self.pipes.events.append((self, None))

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
    pipes = Pipes()
    waiting = iter(enumerate(questions))
    busy: dict[Worker, int] = {}

    def give(worker: Worker | None) -> None:
        for number, question in waiting:
            worker = worker or Worker(target, pipes)
            busy[worker] = number
            worker.send(question)
            return
        if worker is not None:
            worker.close()

    try:
        for _ in range(jobs):
            give(None)
        while busy:
            worker, answer = pipes.next()
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
