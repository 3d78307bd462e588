"""Finds and ends what a process has started. Host side.

As a program, ``python guard.py PARENT``, it waits until its parent has ended, however that was, and then ends what the
parent had open. Lines on its standard input say what that is: ``+ MARK`` before a process is started, ``+ MARK
SESSION`` once it runs, ``- MARK`` when it is closed. It imports little, so that it costs little.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterator

MARK = "REFATTN_PROCESSES"
"""The environment variable whose value begins with the mark of a process, in all that it starts."""

SLICE = 0.1
"""Seconds between two looks at the parent: what it has forked may hold the input open."""

LONGEST = 10.0
"""Seconds after which it gives up: a process that waits for a device that is gone ends for nobody."""


def end(mark: str, session: int | None = None) -> None:
    """Kill the processes of a session, and those whose environment has a mark, but this one."""
    if session is not None:
        _killed(-session)
    stop = time.monotonic() + LONGEST
    while any([_killed(each) for each in _found(mark, session)]) and time.monotonic() < stop:
        pass


def _killed(number: int) -> bool:
    """Kill a process, or a group by its negative number; False if it has ended, or is another user's."""
    try:
        os.kill(number, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _found(mark: str, session: int | None) -> Iterator[int]:
    """Yield from /proc, where there is one, the processes of a session and those that have a mark."""
    sign = f"{MARK}={mark}".encode()
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        try:
            # After the name, which may hold anything: state, parent, process group, session.
            state, _, _, of = _read(f"/proc/{name}/stat").rpartition(b")")[2].split()[:4]
            if state in (b"Z", b"X"):
                continue
            if int(of) == session or any(x.startswith(sign) for x in _read(f"/proc/{name}/environ").split(b"\0")):
                yield int(name)
        except OSError:  # it has ended, or is another user's
            continue


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def main(parent: int) -> None:
    """Wait for the end of the parent, and end what it had open."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    known: dict[str, int | None] = {}
    rest, ended = b"", False
    while not ended:
        if select.select([0], [], [], SLICE)[0]:
            data = os.read(0, 1 << 16)
            ended = not data
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                sign, mark, *session = line.decode().split()
                known.pop(mark, None)
                if sign == "+":
                    known[mark] = int(session[0]) if session else None
        else:
            ended = os.getppid() != parent
    for _ in range(5 if known else 0):  # what was just being started gets its mark a moment later
        for mark, of in known.items():
            end(mark, of)
        time.sleep(SLICE)


if __name__ == "__main__":
    main(int(sys.argv[1]))
