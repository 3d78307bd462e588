"""A program whose forked children are killed: ``python -m tests.train.killed checkpoints|runs FOLDER``.

They are killed at one call after the other of those that change the disk. A checkpoint that was saved is found, whole,
and a run goes on and leaves what a run leaves that nobody kills. It prints how many died, or ends with a traceback.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from refattn.train import checkpoint
from tests.train.checkpoints import fail, fill, is_of
from tests.train.disk import watch
from tests.train.runs import remains, small, train, write_text

CHANGES = ("open", "write", "os.fsync", "os.replace", "os.rename", "os.unlink", "os.rmdir", "os.mkdir")


def life(work: Callable[[], object], point: int | None) -> bool:
    """Work in a child that is killed at its call number `point`; return whether it came to its end."""
    child = os.fork()
    if child == 0:
        calls = itertools.count(1)

        def before(name: str, *arguments: object) -> None:
            if name in CHANGES and next(calls) == point:
                os.kill(os.getpid(), signal.SIGKILL)

        watch(pytest.MonkeyPatch(), before)
        work()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)
    return status == 0


def checkpoints(folder: Path) -> int:
    step = 0
    for point in range(1, 81):
        reader, writer = os.pipe()

        def save(first: int = step + 1, saved: int = writer) -> None:
            for n in itertools.count(first):
                fill(folder, n, keep=2)
                os.write(saved, b".")

        assert not life(save, point)
        os.close(writer)
        with os.fdopen(reader, "rb") as lines:
            told = step + len(lines.read())
        found = checkpoint.newest(folder, fail)
        step = 0 if found is None else found.step
        assert step >= told and (step == 0 or is_of(found, step)), (step, told)
    assert step > 80
    return 80


def runs(folder: Path) -> int:
    chosen = small(write_text(folder), steps=3, checkpoint_every=1, score_every=3)
    whole = remains(train(chosen, folder / "whole").folder)
    for point in itertools.count(1, 2):
        out = folder / str(point)
        ended = life(lambda out=out: train(chosen, out), point)  # type: ignore[misc]
        assert life(lambda out=out: train(chosen, out, resume=True), None), point  # type: ignore[misc]
        assert remains(out) == whole, point
        shutil.rmtree(out)
        if ended:
            return point // 2
    raise AssertionError("a run has an end")


if __name__ == "__main__":
    print({"checkpoints": checkpoints, "runs": runs}[sys.argv[1]](Path(sys.argv[2])))
