"""Checkpoints and single files where the disk fails or is full, and where processes are killed."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from refattn.files import write_atomically
from refattn.train.checkpoint import CheckpointError, newest
from tests.train.checkpoints import fail, fill, is_of, names, pairs
from tests.train.disk import watch

# --- faults


class Faults:
    """Counts the calls that touch the disk, and lets one of them fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.calls: list[str] = []
        self.failing: int | None = None
        self.number = number
        watch(monkeypatch, self.count)

    def count(self, name: str, *arguments: object) -> None:
        if self.failing is None:
            return
        self.calls.append(name)
        if len(self.calls) == self.failing + 1:
            raise OSError(self.number, os.strerror(self.number))

    @contextmanager
    def at(self, point: int) -> Iterator[None]:
        self.calls, self.failing = [], point
        try:
            yield
        finally:
            self.failing = None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EINVAL])
@pytest.mark.parametrize("earlier", [0, 3])
def test_after_a_fault_at_any_point_a_whole_checkpoint_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: int, number: int
) -> None:
    faults = Faults(monkeypatch, number)
    last = 100 * earlier
    reached: set[str] = set()
    written = 0
    for point in itertools.count():
        folder = tmp_path / str(point)
        fill(folder, *range(100, last + 1, 100))
        error = None
        with faults.at(point):
            try:
                fill(folder, last + 100, keep=2)
            except CheckpointError as caught:
                error = str(caught)
        done = len(faults.calls) <= point
        reached |= set(faults.calls)
        cannot_sync_folders = number == errno.EINVAL and faults.calls[point - 1 : point + 1] == [
            "os.replace",
            "os.fsync",
        ]
        found = newest(folder, fail)
        if error is None:
            assert is_of(found, last + 100)
            assert done or cannot_sync_folders
        else:
            assert not cannot_sync_folders
            assert str(folder) in error and os.strerror(number) in error
            assert is_of(found, last + 100) or (is_of(found, last) if earlier else found is None)
            assert [name for name in names(folder) if name.endswith(".part")] == []
            if "is written" in error:
                written += 1
                assert is_of(found, last + 100)
            else:
                assert "the earlier checkpoints are untouched" in error
                assert set(pairs(*range(100, last + 1, 100))) <= set(names(folder))
        fill(folder, last + 100, keep=2)
        assert names(folder) == (pairs(last, last + 100) if earlier else pairs(100))
        if done:
            break
    assert point >= 12 and reached >= {"open", "write", "flush", "os.open", "os.fsync", "os.replace", "os.mkdir"}
    assert written == (7 if earlier == 3 else 3)  # faults while two old ones, or none, are looked for and removed


def test_everything_is_on_the_disk_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of calls: content, then name, arrays before JSON; what is old goes last."""
    fill(tmp_path, 1)
    faults = Faults(monkeypatch, 0)
    with faults.at(10**6):
        fill(tmp_path, 2, keep=1)
    written = ["open", "os.open", "write", "flush", "os.fsync", "os.replace", "os.fsync"]
    pruned = ["os.listdir", "os.unlink", "os.listdir", "os.unlink", "os.listdir"]
    assert faults.calls == ["os.mkdir", "os.open", *written, *written, *pruned]


# --- single files


def test_a_file_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    write_atomically(path, b"one")
    faults = Faults(monkeypatch, errno.ENOSPC)
    for point in range(5):
        with faults.at(point), pytest.raises(OSError) as caught:
            write_atomically(path, b"two")
        assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(path)
        assert path.read_bytes() == b"one" and names(tmp_path) == ["config.json"]
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomically(tmp_path / "folder", b"x")
    assert names(tmp_path) == ["config.json", "folder"]
