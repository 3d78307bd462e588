"""A program whose forked children are killed while they write a set: ``python -m tests.golden.killed new|old|renames
FOLDER``.

They are killed at one call after the other of those that change the disk: while they write a new set, put one in the
place of an old one, or do so where two names cannot be exchanged in one step. Whoever writes next finds the old set or
the new one, and leaves nothing of the dead. It prints how many died, or ends with a traceback.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import pytest

from refattn.golden import vectors
from refattn.verify import freeze
from tests.train.killed import life
from tests.verify.test_freeze import FEW

CASES = [freeze.freeze(record, case) for record, case in freeze.frozen_cases([FEW], "small")][:2]


def write(place: Path, version: str, *, replace: bool = True) -> None:
    vectors.write(place, freeze.about([FEW], "small", version), CASES, replace=replace)


def sets(how: str, folder: Path) -> int:
    patches = pytest.MonkeyPatch()
    if how == "renames":
        patches.setattr(vectors, "exchange", lambda *places: False)
    for point in itertools.count(1):
        home = folder / str(point)
        place = home / "set"
        if how != "new":
            write(place, "old")
        ended = life(lambda place=place: write(place, "new"), point)  # type: ignore[misc]
        if how == "old":
            assert vectors.read(place).cases, point
        if how == "renames":
            if not place.exists():
                assert any(".old-set" in name for name in os.listdir(home)), (point, os.listdir(home))
            with pytest.raises(vectors.SetError, match="got a folder with something in it"):
                write(place, "other", replace=False)
            assert vectors.read(place).cases, point
        write(place, "last")
        assert os.listdir(home) == ["set"], (point, os.listdir(home))
        assert vectors.read(place).manifest["producer"]["refattn"] == "last"
        if ended:
            return point - 1
    raise AssertionError("a write has an end")


if __name__ == "__main__":
    print(sets(sys.argv[1], Path(sys.argv[2])))
