"""Standard output and error as commands need them: nobody has to read them, and they take every character.

A command goes on where its words cannot be written: its exit code, its files and its training are wanted all the same.
That standard output was full is said at the end; that it was closed, or that its reader has left (``refattn list |
head -1``), is no error.
"""

from __future__ import annotations

import io
import os
import select
import sys
from typing import Any


class Stream(io.FileIO):
    """A descriptor that takes whatever is written to it.

    Attributes
    ----------
    failure
        The first error of writing, but for a reader that has left.
    """

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Write what can be written, and say that it was everything."""
        try:
            while (written := super().write(data)) is None:  # a full pipe that does not block
                select.select([], [self], [])
            return written
        except BrokenPipeError:
            pass
        except OSError as error:
            self.failure = self.failure or error
        return len(data)


def hold() -> Stream:
    """Replace `sys.stdout` and `sys.stderr` for the rest of the process; return the descriptor of standard output."""
    # What was closed among 0 to 2 is opened, so that no file that a command writes is taken for a standard stream.
    while (handle := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(handle)
    streams = []
    for number, name in ((1, "stdout"), (2, "stderr")):
        # A descriptor of its own: a kernel in this process may close the other one, or put a file in its place.
        old, stream = getattr(sys, name), Stream(os.dup(number), "wb")
        # A signal handler may write to standard error in the middle of another line; a buffer would refuse that.
        made = io.TextIOWrapper(
            io.BufferedWriter(stream) if number == 1 else stream,
            encoding="utf-8" if old is None else old.encoding,
            errors="backslashreplace",
            line_buffering=old is None or old.line_buffering,
            write_through=number == 2 or (old is not None and old.write_through),
        )
        setattr(sys, name, made)
        streams.append(stream)
    return streams[0]
