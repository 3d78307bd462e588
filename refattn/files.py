"""Files: read with bounds, and written whole or not at all. Host side.

What is read is a regular file of bounded size, JSON is UTF-8 without a name twice, and every error names the file and
the field. What is written gets a fresh name first, ``.refattn-RANDOM.part`` in the same folder, and then takes the
place of the file of its own name. A process that is killed may leave such a part behind; a later one removes it by its
name.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import json
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Any

MIB = 1 << 20

LEFT_BEHIND = re.compile(r"\.refattn-[0-9a-f]{16}\.part")
"""Names of what a process writes before it has its own name; one that was killed leaves it so."""


def fresh_name() -> str:
    """Return a name that nobody has, of the kind `LEFT_BEHIND`."""
    return f".refattn-{secrets.token_hex(8)}.part"


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


def read_regular(path: str | os.PathLike[str], limit: int) -> bytes:
    """Return the bytes of a regular file of at most `limit` bytes.

    Raises
    ------
    OSError
        If it cannot be opened, is a folder, pipe or device, or is larger; the error has its path.
    """
    try:
        # Without O_NONBLOCK the opening of a pipe would wait for its other end.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except ValueError as error:  # a NUL in the name
        raise OSError(errno.EINVAL, str(error), os.fspath(path)) from error
    about = os.fstat(handle)
    if not stat.S_ISREG(about.st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is no regular file", os.fspath(path))
    with open(handle, "rb") as file:
        try:
            data = file.read(limit + 1) if about.st_size <= limit else b""  # one more: a file may have grown since
        except OSError as error:
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    if data is None:  # it has the mode of a file, as /proc/kmsg, and would be waited for
        raise OSError(errno.EINVAL, "is no regular file", os.fspath(path))
    if (size := max(about.st_size, len(data))) > limit:
        raise OSError(errno.EFBIG, f"got {size} bytes, needs at most {limit}", os.fspath(path))
    return data


def read_json(path: str | os.PathLike[str], limit: int, schema: Any = None) -> Any:
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
        raise ValueError(f"{os.fspath(path)}: {error}") from error
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
def source_digest() -> str:
    """Return the SHA-256 of all Python files of the package: their paths and what they hold."""
    top, digest = Path(__file__).parent, hashlib.sha256()
    # The symlink to backends/ is not followed by the first pattern.
    for file in sorted({*top.glob("**/*.py"), *top.glob("backends/*.py")}):
        digest.update(f"{file.relative_to(top).as_posix()}\n".encode() + file.read_bytes())
    return digest.hexdigest()


# --- writing


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file that is there in full or not at all, whatever happens meanwhile; one that was there is replaced.

    Links are not followed: one that was there is replaced too, and what it leads to stays.

    Raises
    ------
    OSError
        If it cannot be written; the file that was there is untouched then, or already replaced.
    """
    path = Path(path)
    part = path.with_name(fresh_name())
    try:
        file = open(part, "xb")
        try:
            with file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
        sync_folder(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


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


def _is_stream(path: str | os.PathLike[str]) -> bool:
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def exchange(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Give two files or folders each other's names in one step; False if nothing was done: Linux alone can do it."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and rename(here, os.fsencode(one), here, os.fsencode(other), swap) == 0


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Bring the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that does this only for files
            raise
    finally:
        os.close(handle)


def remove_left_behind(folder: str | os.PathLike[str]) -> None:
    """Remove the files that a process of ours left in a folder when it was killed."""
    for name in os.listdir(folder):
        if LEFT_BEHIND.fullmatch(name) and not os.path.isdir(path := os.path.join(folder, name)):
            os.unlink(path)
