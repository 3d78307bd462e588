"""A folder comes to its place whole, and one that is replaced is not lost, whenever a process is killed. Host side.

What is written stands beside its place in ``.refattn-RANDOM.part``, which its process holds locked; where the place is
an empty folder, which may be a mount, it stands in there, and moves up when it is whole. What it replaces stands for a
moment in ``.refattn-RANDOM.old-NAME``, NAME being that of the place. Whoever then misses NAME takes the old one back,
or moves up the rest of a whole one (`recover`), and the next writer removes what nobody holds (`sweep`); both names are
our mark.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from refattn.files import LEFT_BEHIND, fresh_name


def recover(place: Path, whole: Callable[[Path], bool], last: str) -> None:
    """Where a folder is missing, put back the whole one that a process had set aside when it was killed.

    Where a process was killed that moved a whole one up into its place, move the rest; `last` is what comes last.
    """
    if os.path.lexists(place):
        for part in _folders(place, LEFT_BEHIND):
            with contextlib.suppress(OSError):
                handle = _locked(part)
                try:
                    if (part / last).is_file() and not os.path.lexists(place / last):
                        settle(part, place, last)
                finally:
                    os.close(handle)
        return
    for aside in _set_aside(place):
        if whole(aside):
            with contextlib.suppress(OSError):  # another process was first, or the disk is read-only
                os.rename(aside, place)
            return


def sweep(place: Path) -> None:
    """Remove what writers have left behind in this folder and beside it, where nobody holds it; their files alone."""
    for part in (*_folders(place.parent, LEFT_BEHIND), *_folders(place, LEFT_BEHIND)):
        with contextlib.suppress(OSError):
            handle = _locked(part)
            _remove(part)
            os.close(handle)
    if os.path.lexists(place):
        for aside in _set_aside(place):
            _remove(aside)


@contextlib.contextmanager
def fresh_folder(place: Path) -> Iterator[Path]:
    """Give a new folder, in a place that is an empty one, else beside it; it is removed where the block raises.

    Nobody else removes it before.
    """
    home = place if is_empty(place) else place.parent
    handle = None
    while handle is None:
        part = home / fresh_name()
        part.mkdir()
        try:
            handle = _locked(part)
        except (BlockingIOError, FileNotFoundError):
            continue  # one who sweeps was quicker
        except OSError:
            break  # a file system without locks, where nobody sweeps
    try:
        yield part
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)  # a fresh folder, in which nobody else wrote
        raise
    finally:
        if handle is not None:
            os.close(handle)


def settle(part: Path, place: Path, last: str) -> None:
    """Bring a folder to a place that is new, or what is in it to the empty folder around it; `last` comes last."""
    if part.parent != place:
        os.rename(part, place)
        return
    for path in sorted(part.iterdir(), key=lambda path: path.name == last):
        os.rename(path, place / path.name)
    part.rmdir()


def is_empty(folder: Path) -> bool:
    """Tell whether a folder holds nothing, but for what writers may have left there, or write now."""
    return folder.is_dir() and not any(path for path in folder.iterdir() if not LEFT_BEHIND.fullmatch(path.name))


def exchange(part: Path, place: Path) -> Path:
    """Bring a folder to the place of another, and return where this one is now."""
    aside = place.with_name(fresh_name().removesuffix("part") + f"old-{place.name}")
    while True:
        try:
            os.rename(place, aside)
            os.rename(part, place)
            return aside
        except BaseException as error:
            if not os.path.lexists(place):
                os.rename(aside, place)
            elif isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                continue  # somebody has missed the old one meanwhile, and taken it back
            raise


def _set_aside(place: Path) -> list[Path]:
    return _folders(place.parent, re.compile(rf"\.refattn-[0-9a-f]{{16}}\.old-{re.escape(place.name)}"))


def _folders(folder: Path, names: re.Pattern[str]) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [Path(x.path) for x in entries if names.fullmatch(x.name) and x.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _locked(folder: Path) -> int:
    """Return an open folder that this process holds; BlockingIOError where another does, FileNotFoundError if gone."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(handle), os.lstat(folder)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(folder))
    except BaseException:
        os.close(handle)
        raise
    return handle


def _remove(folder: Path) -> None:
    """Remove a folder with what a set consists of, as far as that goes; anything else in it stays, and it with that."""
    with contextlib.suppress(OSError):
        for inner in (*(path for path in folder.iterdir() if stat.S_ISDIR(path.lstat().st_mode)), folder):
            for path in inner.iterdir():
                if path.suffix in (".safetensors", ".json") and stat.S_ISREG(path.lstat().st_mode):
                    path.unlink()
            inner.rmdir()
