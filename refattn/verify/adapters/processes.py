"""A process of foreign code: spoken with over pipes of which none is waited for, and ended with all that it started.

It runs in a session of its own, and its environment has a mark. What it starts inherits both: a process that it leaves
behind is found by them (on Linux, by /proc; elsewhere by its process group alone) and killed when it has ended itself.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

SLICE = 0.05
"""Seconds that are waited at once: for output, and before it is looked whether the process still runs."""

LARGEST = 256 << 20
"""Bytes of results that are taken beside 64 times those of the inputs."""

_MARK = "REFATTN_FOREIGN"
_AT_ONCE = 1 << 16
_PIPE = 1 << 20  # more than a pipe holds

Sink = Callable[[bytes], None]


class Tail:
    """The last bytes of what a process prints."""

    def __init__(self, size: int) -> None:
        self.size, self.data = size, b""

    def __call__(self, part: bytes) -> None:
        """Take some more."""
        self.data = (self.data + part)[-self.size :]

    def text(self) -> str:
        """Return them as text; bytes that are no UTF-8 are replaced."""
        return self.data.decode(errors="replace")


class Process:
    """A command with pipes to its standard streams, in a session of its own. Close it.

    Parameters
    ----------
    command
        The program and its arguments.
    out, err
        What takes the bytes of its standard output and error.

    Raises
    ------
    OSError
        Where it cannot be run.
    """

    def __init__(self, command: Sequence[str | os.PathLike[str]], out: Sink, err: Sink) -> None:
        self._mark = secrets.token_hex(16)
        self._process = subprocess.Popen(
            [*command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, _MARK: self._mark},
            start_new_session=True,  # a signal to it reaches what it has started, and Ctrl-C is ours alone
        )
        self._pending = memoryview(b"")
        self._open = selectors.DefaultSelector()
        for stream, sink in ((self._process.stdout, out), (self._process.stderr, err)):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self._open.register(stream, selectors.EVENT_READ, sink)
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)

    def send(self, data: bytes) -> None:
        """Have bytes sent to its standard input, by and by."""
        self._pending = memoryview(data)
        self._open.register(self._input(), selectors.EVENT_WRITE)

    def end_input(self) -> None:
        """Close its standard input: nothing more comes."""
        stream = self._input()
        with contextlib.suppress(KeyError):
            self._open.unregister(stream)
        stream.close()

    def slice(self, seconds: float) -> float:
        """Move what can be moved, for `SLICE` at most; return what is then left of `seconds`.

        Time in which this process is stopped counts as one slice.
        """
        before = time.monotonic()
        wait = max(0.0, min(seconds, SLICE))
        if self._open.get_map():
            self._move(wait)
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(wait)
        return seconds - min(time.monotonic() - before, 2 * SLICE)

    def code(self) -> int | None:
        """Return the code with which it has ended, or None while it runs; what it printed has arrived then."""
        code = self._process.poll()
        if code is not None:
            self.drain()
        return code

    def drain(self) -> None:
        """Take what it has printed, but no more than a pipe holds: something may print without end."""
        for _ in range(_PIPE // _AT_ONCE):
            if not self._move(0.0):
                break

    def close(self) -> int:
        """End it and all that it has started; return its exit code, that of its own end where that came first."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        while left := _left_behind(self._process.pid, self._mark):
            for each in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(each, signal.SIGKILL)
        self._open.close()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()
        return code

    def _input(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    def _move(self, seconds: float) -> bool:
        """Wait no longer than this, and move what can be moved; return whether anything came."""
        came = False
        for key, _ in self._open.select(seconds):
            if key.data is None:
                try:
                    self._pending = self._pending[os.write(key.fd, self._pending[:_AT_ONCE]) :]
                except BlockingIOError:
                    continue
                except OSError:  # nobody reads it any more
                    self._pending = memoryview(b"")
                if not self._pending:
                    self._open.unregister(key.fileobj)
                continue
            try:
                part = os.read(key.fd, _AT_ONCE)
            except BlockingIOError:
                continue
            if not part:
                self._open.unregister(key.fileobj)
                continue
            came = True
            key.data(part)
        return came


def _left_behind(session: int, mark: str) -> list[int]:
    """Return the processes of a session, and those whose environment has the mark; none where there is no /proc."""
    found = []
    sign = f"{_MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # After the name, which may hold anything: state, parent, process group, session.
            state, _, _, of = (folder / "stat").read_bytes().rpartition(b")")[2].split()[:4]
            belongs = int(of) == session or sign in (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or is another user's
            continue
        if belongs and state not in (b"Z", b"X"):
            found.append(int(folder.name))
    return found
