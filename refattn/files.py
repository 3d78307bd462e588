"""Files: read with bounds, and written whole or not at all; folders held by what they are, not by name. Host side.

What is read is a regular file of bounded size, JSON is UTF-8 without a name twice, and every error names the file and
the field. What is written gets a fresh name first, ``.refattn-RANDOM.part`` in the same folder, and then takes the
place of the file of its own name. Its process locks such a part, so that a later one knows and removes the parts of
processes that were killed.

A folder in which refattn also replaces and removes files is a `HeldFolder`: a descriptor. ``folder / name`` is a file
in it, a `HeldPath`, which is no path: whoever opens it by name has made a mistake, and gets a TypeError.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from refattn import interrupts

MIB = 1 << 20

LEFT_BEHIND = re.compile(r"\.refattn-[0-9a-f]{16}\.part")
"""Names of what a process writes before it has its own name; one that was killed leaves it so."""


def fresh_name() -> str:
    """Return a name that nobody has, of the kind `LEFT_BEHIND`."""
    return f".refattn-{secrets.token_hex(8)}.part"


# --- folders


@dataclass(frozen=True, eq=False)
class HeldFolder:
    """A folder that is held by its descriptor: it is the same one, wherever it is moved and whatever takes its name.

    Attributes
    ----------
    path
        The name that it had when it was opened, for messages.
    handle
        The descriptor.
    """

    path: Path
    handle: int

    def __truediv__(self, name: str) -> HeldPath:
        """Return what has a name in the folder."""
        return HeldPath(self, name)

    def names(self) -> list[str]:
        """Return the names in the folder."""
        with _named(self.path):
            return os.listdir(self.handle)

    def is_at(self, place: Place) -> bool:
        """Tell whether a name is that of this very folder."""
        return _is_at(place, self.handle)


@dataclass(frozen=True)
class HeldPath:
    """A name in a folder that is held. A link of that name is not followed."""

    folder: HeldFolder
    name: str

    def __str__(self) -> str:
        return str(self.folder.path / self.name)


Place = str | os.PathLike[str] | HeldPath
"""A path, or a name in a folder that is held."""


@contextlib.contextmanager
def hold_folder(place: Place | HeldFolder, *, make: bool = False, follow: bool = False) -> Iterator[HeldFolder]:
    """Open a folder and hold it; one that is held is given as it is.

    Parameters
    ----------
    place
        Where it is. Links on the way to its parent are followed.
    make
        Whether it is made where it is missing.
    follow
        Whether it may be a link itself.

    Raises
    ------
    OSError
        If there is none, or it is a link and `follow` is false; the error has its path.
    """
    if isinstance(place, HeldFolder):
        yield place
        return
    if make:
        name, within = _located(place)
        with _named(place), contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=within)
    handle = _open(place, os.O_RDONLY | os.O_DIRECTORY | (0 if follow else os.O_NOFOLLOW))
    try:
        yield HeldFolder(Path(_text(place)), handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def in_folder(place: Place) -> Iterator[HeldPath]:
    """Hold the folder of a file meanwhile, and give the name of the file in it."""
    if isinstance(place, HeldPath):
        yield place
        return
    with hold_folder(Path(place).parent, follow=True) as folder:
        yield folder / Path(place).name


def is_link(place: Place) -> bool:
    """Tell whether a name is that of a symbolic link."""
    name, within = _located(place)
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=within, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _is_at(place: Place, handle: int) -> bool:
    name, within = _located(place)
    try:
        return os.path.samestat(os.fstat(handle), os.stat(name, dir_fd=within, follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _located(place: Place) -> tuple[str | os.PathLike[str], int | None]:
    """Return a name and the folder that it is in, None for the working directory, as functions of `os` take them."""
    return (place.name, place.folder.handle) if isinstance(place, HeldPath) else (place, None)


def _text(place: Place) -> str:
    return str(place) if isinstance(place, HeldPath) else os.fspath(place)


@contextlib.contextmanager
def _named(place: Place) -> Iterator[None]:
    """Have errors of the system name the whole path."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), _text(place)) from error


def _open(place: Place, flags: int) -> int:
    """Return a descriptor of what is in a place; in a folder that is held a link is an error."""
    name, within = _located(place)
    flags |= os.O_CLOEXEC | (os.O_NOFOLLOW if within is not None else 0)
    with _named(place):
        try:
            return os.open(name, flags, 0o666, dir_fd=within)
        except ValueError as error:  # a NUL in the name
            raise OSError(errno.EINVAL, str(error)) from error
        except OSError as error:
            if flags & os.O_NOFOLLOW and is_link(place):  # systems differ in what they say of it
                what = "folder" if flags & os.O_DIRECTORY else "file"
                raise OSError(errno.ELOOP, f"is a link, needs the {what} itself") from error
            raise


# --- reading


def largest() -> int:
    """Return how many bytes a file of the user's, or what it unpacks to, may have: 2 GiB, or ``REFATTN_LARGEST``."""
    given = os.environ.get("REFATTN_LARGEST", "")
    if given and not re.fullmatch("[1-9][0-9]{0,17}", given):
        raise ValueError(f"REFATTN_LARGEST: got {given[:80]!r}, needs a number of bytes")
    return int(given or 2048 * MIB)


def reason(error: Exception, named: bool = False) -> str:
    """Return why a file cannot be read or written, with the file that an OSError names if that is asked for."""
    if not isinstance(error, OSError):
        return str(error)
    why = error.strerror or str(error) or type(error).__name__
    return f"{why} ({error.filename})" if named and error.filename is not None else why


def check_size(size: int, what: str = "") -> None:
    """Raise ValueError if something of the user's has more bytes than `largest` says."""
    if size > (most := largest()):
        raise ValueError(f"{what}got {size} bytes, needs at most {most}; REFATTN_LARGEST={size} raises the limit")


def read_users(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of a regular file of the user's; ValueError, which names it, if it cannot be read."""
    try:
        with contextlib.suppress(OSError):
            check_size(os.stat(path).st_size)
        return read_regular(path, largest())
    except OSError as error:
        raise ValueError(f"{os.fspath(path)}: needs a file that can be read ({reason(error)})") from error
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from error


def read_regular(path: Place, limit: int) -> bytes:
    """Return the bytes of a regular file of at most `limit` bytes.

    Raises
    ------
    OSError
        If it cannot be opened, is a folder, pipe or device, or is larger, or a link in a folder that is held; the error
        has its path.
    """
    handle = _open_regular(path, os.O_RDONLY)
    size = os.fstat(handle).st_size
    with open(handle, "rb") as file:
        try:
            data = file.read(limit + 1) if size <= limit else b""  # one more: a file may have grown since
        except OSError as error:
            raise OSError(error.errno, error.strerror, _text(path)) from error
    if data is None:  # it has the mode of a file, as /proc/kmsg, and would be waited for
        raise OSError(errno.EINVAL, "is no regular file", _text(path))
    if (size := max(size, len(data))) > limit:
        raise OSError(errno.EFBIG, f"got {size} bytes, needs at most {limit}", _text(path))
    return data


def _open_regular(path: Place, flags: int) -> int:
    # Without O_NONBLOCK the opening of a pipe would wait for its other end.
    handle = _open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is no regular file", _text(path))
    return handle


def read_json(path: Place, limit: int, schema: Any = None) -> Any:
    """Return what a JSON file holds, checked by a schema of `refattn.args`.

    Raises
    ------
    OSError
        As `read_regular` does.
    ValueError
        If it is no such JSON; the message begins with the path.
    """
    from refattn.args import check_json  # here, and not above: most of what uses files needs no array library

    try:
        found = parse_json(read_regular(path, limit))
        check_json(found, schema)
    except ValueError as error:
        raise ValueError(f"{_text(path)}: {error}") from error
    return found


def parse_json(data: bytes) -> Any:
    """Return what JSON says; ValueError if it is not UTF-8, has a name twice or is nested too deeply."""
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_without_doubles)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"is no JSON, or cut off: {error}") from error


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"has the name {name[:80]!r} twice")
        found[name] = value
    return found


@functools.cache
def source_digest(package: str = "refattn") -> str:
    """Return the SHA-256 of all Python files of a package: their paths and what they hold."""
    top, digest = Path(sys.modules[package].__file__ or "").parent, hashlib.sha256()
    # The symlink to backends/ is not followed by the first pattern.
    for file in sorted({*top.glob("**/*.py"), *top.glob("backends/*.py")}):
        digest.update(f"{file.relative_to(top).as_posix()}\n".encode() + file.read_bytes())
    return digest.hexdigest()


# --- writing


def write_atomically(path: Place, data: bytes) -> None:
    """Write a file that is there in full or not at all, whatever happens meanwhile; one that was there is replaced.

    Links are not followed: one that was there is replaced too, and what it leads to stays.

    Raises
    ------
    OSError
        If it cannot be written; the file that was there is untouched then, or already replaced.
    """
    with _named(path), in_folder(path) as place:
        folder = place.folder.handle
        part, file = _new_part(place.folder)
        try:
            with interrupts.undo(functools.partial(remove, part)), file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                os.replace(part.name, place.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part.name, dir_fd=folder)
            raise
        _sync(folder)


def create(path: HeldPath) -> IO[bytes]:
    """Return a new file, open for writing; OSError if there is anything of that name."""
    opener = functools.partial(os.open, mode=0o666, dir_fd=path.folder.handle)
    with _named(path):
        return open(path.name, "xb", opener=opener)


def open_to_append(path: HeldPath) -> IO[bytes]:
    """Return a regular file, made where it is missing, to which bytes are appended, each time by one write.

    Raises OSError if it is a link, or as `read_regular` does.
    """
    return os.fdopen(_open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab", buffering=0)


def remove(path: HeldPath) -> None:
    """Remove a file, or a link itself; OSError, with its path, if that cannot be done."""
    with _named(path):
        os.unlink(path.name, dir_fd=path.folder.handle)


def write_output(path: str | os.PathLike[str], data: bytes) -> None:
    """Write what a user asked for as `write_atomically` does; into a pipe or a device, as it is. Raises OSError."""
    if _is_stream(path):
        with open(path, "wb") as file:
            file.write(data)
    else:
        write_atomically(path, data)


def check_output(path: str | os.PathLike[str]) -> None:
    """Raise OSError or ValueError if `write_output` could not write; nothing is left behind."""
    if _is_stream(path):
        return
    if os.path.isdir(path):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if os.path.isfile(path) and not os.path.islink(path) and not os.access(path, os.W_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
    with contextlib.suppress(FileNotFoundError):
        os.lstat(path)  # tells what is no name
    part = Path(path).with_name(fresh_name())
    part.touch(exist_ok=False)
    part.unlink()


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Return a folder that is gone at the end of the ``with`` block, also if a signal ends the command within it."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="refattn-", ignore_cleanup_errors=True) as name:
        with interrupts.undo(lambda: shutil.rmtree(name, ignore_errors=True)):
            yield Path(name)


def _is_stream(path: str | os.PathLike[str]) -> bool:
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def rename(one: HeldPath, other: HeldPath) -> None:
    """Give a file or a folder another name; OSError, with that one's path, if it cannot be done."""
    with _named(other):
        os.rename(one.name, other.name, src_dir_fd=one.folder.handle, dst_dir_fd=other.folder.handle)


def exchange(one: HeldPath, other: HeldPath) -> bool:
    """Give two files or folders each other's names in one step; False if nothing was done: Linux alone can do it."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    ends = [(x.folder.handle, os.fsencode(x.name)) for x in (one, other)]
    swap = 2
    return rename is not None and rename(*ends[0], *ends[1], swap) == 0


def _sync(folder: int) -> None:
    """Bring the names in a folder to the disk."""
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that does this only for files
            raise


# --- parts, and what is left of them


def _new_part(folder: HeldFolder) -> tuple[HeldPath, IO[bytes]]:
    """Return a new file of a fresh name, which is locked until it is closed."""
    while True:
        part = folder / fresh_name()
        file = create(part)
        if lock(part, file.fileno()):
            return part, file
        file.close()  # one who removes what is left behind was quicker


def lock(place: Place, handle: int, without: bool = True) -> bool:
    """Lock what has this name and is open as `handle`, until it is closed; return whether that is done.

    It is not if another process has locked it, or has removed it or put something else in its place meanwhile. A file
    system may have no locks: then the answer is `without`.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return without
    return _is_at(place, handle)


def left_behind(
    folder: HeldFolder, names: re.Pattern[str] = LEFT_BEHIND, *, folders: bool = False
) -> Iterator[HeldPath]:
    """Yield the files, or folders, of such names that processes left when they were killed; each is locked meanwhile.

    What a process that lives holds locked is none of them, nor is a link. On a file system without locks nothing is.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY if folders else os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
    for name in folder.names():
        if not names.fullmatch(name):
            continue
        try:
            handle = _open(folder / name, flags)
        except OSError:  # it is of the other kind, or has gone
            continue
        try:
            if (folders or stat.S_ISREG(os.fstat(handle).st_mode)) and lock(folder / name, handle, without=False):
                yield folder / name
        finally:
            os.close(handle)


def remove_left_behind(folder: HeldFolder) -> None:
    """Remove the files that processes of ours left in a folder when they were killed."""
    for part in left_behind(folder):
        remove(part)
