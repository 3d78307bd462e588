"""A program that saves checkpoints in forked children and kills them: ``python killed.py FOLDER points|random COUNT``.

After each death it looks for the newest checkpoint, which has to be whole and no older than the last one that the child
was told is saved. It prints one line with what it saw, or ends with a traceback.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from refattn import files
from refattn.train import checkpoint

SIZE = 30_000


def arrays(step: int) -> dict[str, Any]:
    return {"w": np.full(SIZE, float(step)), "count": np.asarray(step)}


def save_on(folder: Path, saved: int) -> None:
    """Save steps from the newest one on, and tell each by a line to `saved`."""
    found = checkpoint.newest(folder, fail)
    step = 0 if found is None else found.step
    while True:
        step += 1
        checkpoint.save(folder, step, arrays(step), {"step": step})
        os.write(saved, b"%d\n" % step)


def die_at(point: int) -> None:
    """Make the call number `point` of those that change the disk the last thing that this process does."""
    calls = 0

    def counted(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == point:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    class File:
        """Writes in two halves."""

        def __init__(self, path: Any, mode: str) -> None:
            self.file = open(path, mode, buffering=0)

        def write(self, data: bytes) -> None:
            for half in (data[: len(data) // 2], data[len(data) // 2 :]):
                counted(self.file.write)(half)

        def flush(self) -> None:
            self.file.flush()

        def fileno(self) -> int:
            return self.file.fileno()

        def __enter__(self) -> File:
            return self

        def __exit__(self, *error: object) -> None:
            self.file.close()

    for name in ("fsync", "replace", "unlink"):
        setattr(os, name, counted(getattr(os, name)))
    Path.unlink = counted(Path.unlink)  # type: ignore[method-assign]

    def opened(path: Any, mode: str, **options: Any) -> Any:
        return counted(File)(path, mode) if mode == "wb" else open(path, mode, **options)

    files.open = opened  # type: ignore[attr-defined]


def fail(line: str) -> None:
    raise AssertionError(f"a broken checkpoint was left: {line}")


def life(folder: Path, point: int | None, seconds: float) -> int:
    """Fork a child that saves; return the last step that it was told is saved, 0 for none."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        if point is not None:
            die_at(point)
        os.write(writer, b"0\n")
        save_on(folder, writer)
    os.close(writer)
    assert os.read(reader, 2) == b"0\n"  # on a busy machine it begins later
    if point is None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    with os.fdopen(reader) as lines:
        return max((int(line) for line in lines), default=0)


def main(folder: Path, mode: str, count: int) -> None:
    draw = random.Random(0)
    died_before, seen = 0, 0
    with tempfile.TemporaryDirectory() as name:  # how long a save takes here, and now
        began = time.monotonic()
        checkpoint.save(Path(name), 1, arrays(1), {"step": 1})
        most = max(0.03, 5.0 * (time.monotonic() - began))
    for n in range(count):
        told = life(folder, n + 1 if mode == "points" else None, most * draw.random())
        found = checkpoint.newest(folder, fail)
        step = 0 if found is None else found.step
        assert step >= max(told, seen), f"step {told} was saved, step {step} is found"
        if found is not None:
            assert all(np.array_equal(found.arrays[name], x) for name, x in arrays(step).items())
            assert found.facts == {"step": step}
        died_before += told == seen or told == 0
        seen = step
    print(f"{count} deaths, {died_before} before a save was done, {seen} steps")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
