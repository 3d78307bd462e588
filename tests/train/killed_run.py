"""A program that kills runs: ``python -m tests.train.killed_run FOLDER TEXT``.

In forked children it kills a run at every other call that changes the disk, has another one go on, and compares what
is left with what a run leaves that nobody kills. It prints one line, or ends with a traceback.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
from pathlib import Path

from refattn.train.settings import Settings
from tests.train.killed import die_at
from tests.train.runs import remains, small, train


def life(chosen: Settings, out: Path, point: int | None) -> bool:
    """Run in a child that is killed at a point; return whether it came to its end."""
    child = os.fork()
    if child == 0:
        if point is not None:
            die_at(point)
        train(chosen, out, resume=out.exists())
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert status == 0
    return True


def main(folder: Path, text: str) -> None:
    chosen = small(text, steps=3, checkpoint_every=1, score_every=3)
    assert life(chosen, folder / "whole", None)
    whole = remains(folder / "whole")
    deaths = 0
    for point in itertools.count(1, 2):
        out = folder / str(point)
        ended = life(chosen, out, point)
        deaths += not ended
        assert life(chosen, out, None), point
        left = remains(out)
        assert left == whole, (point, sorted(left))
        shutil.rmtree(out)
        if ended:
            break
    print(f"{deaths} deaths")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
