"""Files that others may have changed: read with bounds and checked, written whole or not at all. Host side.

Nothing waits and nothing is believed: what is read is a regular file of bounded size, JSON is UTF-8 without a name
twice and of bounded depth, and every error names the file and the field. What is written gets a fresh name first,
``.refattn-RANDOM.part`` in the same folder, which follows no link and overwrites nothing; that name is the mark by
which a later process knows what an earlier one left behind.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIB = 1 << 20

DEPTH = 64
"""How deep JSON may be nested."""

LEFT_BEHIND = re.compile(r"\.refattn-[0-9a-f]{16}\.part")
"""Names of what a process writes before it has its own name; one that was killed leaves it so."""


def fresh_name() -> str:
    """Return a name that nobody has, of the kind `LEFT_BEHIND`."""
    return f".refattn-{secrets.token_hex(8)}.part"


# --- reading


def read_regular(path: str | os.PathLike[str], limit: int) -> bytes:
    """Return the bytes of a regular file of at most `limit` bytes.

    Raises
    ------
    OSError
        Where it cannot be opened, is a folder, pipe or device, or is larger; the error has its path.
    """
    handle = _open_regular(path, os.O_RDONLY)
    with open(handle, "rb") as file:
        size = os.fstat(handle).st_size
        data = file.read(size + 1) if size <= limit else b""  # one more: a file may have grown since
    if len(data) > limit or size > limit:
        raise OSError(errno.EFBIG, f"got {max(size, len(data))} bytes, needs at most {limit}", os.fspath(path))
    return data


def open_to_append(path: str | os.PathLike[str]) -> Any:
    """Return a regular file, made where it is missing, to which bytes are appended, each time by one write.

    Raises OSError where it is a link, or as `read_regular` does.
    """
    return open(_open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW), "ab", buffering=0)


def _open_regular(path: str | os.PathLike[str], flags: int) -> int:
    try:
        # Without O_NONBLOCK the opening of a pipe would wait for its other end.
        handle = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)
    except ValueError as error:  # a NUL in the name
        raise OSError(errno.EINVAL, str(error), os.fspath(path)) from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is no regular file", os.fspath(path))
    return handle


def read_json(path: str | os.PathLike[str], limit: int, schema: Any = None) -> Any:
    """Return what a JSON file holds, checked as `parse_json` and `check` do.

    Raises
    ------
    OSError
        As `read_regular` does.
    ValueError
        Where it is no such JSON; the message begins with the path.
    """
    try:
        found = parse_json(read_regular(path, limit))
        if schema is not None:
            check(found, schema)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from error
    return found


def parse_json(data: bytes) -> Any:
    """Return what JSON says; ValueError where it is not UTF-8, has a name twice or is nested deeper than `DEPTH`."""
    if data.startswith(b"\xef\xbb\xbf"):
        raise ValueError("begins with a byte order mark, needs UTF-8 without one")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"is no UTF-8: {error.reason} at byte {error.start}") from error
    try:
        found = json.loads(text, object_pairs_hook=_without_doubles)
    except RecursionError:
        raise ValueError(f"is nested deeper than {DEPTH}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is no JSON, or cut off: {error}") from error
    level = [found]
    for _ in range(DEPTH):
        level = [x for y in level for x in (y.values() if isinstance(y, dict) else y if isinstance(y, list) else ())]
        if not level:
            return found
    raise ValueError(f"is nested deeper than {DEPTH}")


def check_tensor_names(data: bytes) -> None:
    """Raise ValueError where the header of a safetensors file is no JSON object or names a tensor twice."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise ValueError("no safetensors file: the header is cut off")
    try:
        check(parse_json(data[8 : 8 + length].rstrip(b" ")), dict, "header")
    except ValueError as error:
        raise ValueError(f"no safetensors file: {error}") from error


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for n, name in enumerate(names) if name in names[:n])
        raise ValueError(f"has the name {twice[:80]!r} twice")
    return found


# --- schemas


@dataclass(frozen=True)
class Whole:
    """A whole number, from `low` to `high`."""

    low: int = 0
    high: int = 2**63 - 1


@dataclass(frozen=True)
class Real:
    """A number that is finite or, with `infinite`, not NaN; from `low` on."""

    low: float = float("-inf")
    infinite: bool = False


@dataclass(frozen=True)
class Matching:
    """A text of some implementation, described by `what`."""

    pattern: str
    what: str


@dataclass(frozen=True)
class Each:
    """An object whose values are all of one schema, whatever their names."""

    schema: Any


@dataclass(frozen=True)
class Maybe:
    """Null, or what the schema says; a field that may be missing."""

    schema: Any


SHA256 = Matching(r"[0-9a-f]{64}", "64 hexadecimal digits")

_KINDS = {str: "a text", dict: "an object", list: "a list", bool: "true or false"}


def check(value: Any, schema: Any, at: str = "") -> None:
    """Raise ValueError, which names the field, where a value of JSON is not what a schema says.

    A schema is a class (`str`, `dict`, `list`, `bool`), one of the kinds above, ``[schema]`` for a list of such, a
    mapping from the names that an object has at least to their schemas, or None for anything.
    """
    needs = _lack(value, schema)
    if needs is not None:
        got = type(value).__name__ if isinstance(value, dict | list) else repr(value)[:80]
        raise ValueError(f"{at or 'the file'}: got {got}, needs {needs}")
    if isinstance(schema, Maybe) and value is not None:
        check(value, schema.schema, at)
    elif isinstance(schema, list):
        for n, entry in enumerate(value):
            check(entry, schema[0], f"{at}[{n}]")
    elif isinstance(schema, Each):
        for name, entry in value.items():
            check(entry, schema.schema, _within(at, name))
    elif isinstance(schema, Mapping):
        for name, own in schema.items():
            if name in value:
                check(value[name], own, _within(at, name))
            elif not isinstance(own, Maybe):
                raise ValueError(f"{_within(at, name)}: is missing")


def _within(at: str, name: str) -> str:
    return f"{at}.{name[:80]}" if at else name[:80]


def _lack(value: Any, schema: Any) -> str | None:
    """Return what a schema asks for, not looking into lists and objects; None where the value has it."""
    if schema is None or isinstance(schema, Maybe):
        return None
    if isinstance(schema, type):
        return None if isinstance(value, schema) else _KINDS[schema]
    if isinstance(schema, list):
        return None if isinstance(value, list) else "a list"
    if isinstance(schema, Whole):
        fits = isinstance(value, int) and not isinstance(value, bool) and schema.low <= value <= schema.high
        upper = f" to {schema.high}" if schema.high < 2**63 - 1 else ""
        return None if fits else f"a whole number from {schema.low}{upper}"
    if isinstance(schema, Real):
        real = isinstance(value, int | float) and not isinstance(value, bool) and value >= schema.low
        fits = real and (schema.infinite or abs(value) < float("inf"))
        return None if fits else "a number" + (f" from {schema.low:g}" if schema.low > float("-inf") else "")
    if isinstance(schema, Matching):
        return None if isinstance(value, str) and re.fullmatch(schema.pattern, value) else schema.what
    return None if isinstance(value, dict) else "an object"


# --- writing


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file that is there in full or not at all, whatever happens meanwhile; one that was there is replaced.

    Links are not followed: one that was there is replaced too, and what it leads to stays.

    Raises
    ------
    OSError
        Where it cannot be written; the file that was there is untouched then, or already replaced.
    """
    path = Path(path)
    part = path.with_name(fresh_name())
    try:
        try:
            handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            with open(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(handle)
            os.replace(part, path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
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
    """Raise OSError or ValueError where `write_output` could not write; nothing is left behind."""
    if _is_stream(path):
        return
    if os.path.isdir(path):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if os.path.isfile(path) and not os.path.islink(path) and not os.access(path, os.W_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
    with contextlib.suppress(FileNotFoundError):
        os.lstat(path)  # tells what is no name
    part = os.path.join(os.path.dirname(path), fresh_name())
    os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
    os.unlink(part)


def _is_stream(path: str | os.PathLike[str]) -> bool:
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


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
    """Remove the files that a process of ours left in a folder when it was killed; what is a folder stays."""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if LEFT_BEHIND.fullmatch(name) and (os.path.islink(path) or not os.path.isdir(path)):
            os.unlink(path)


def check_own_folder(folder: str | os.PathLike[str], inside: str | os.PathLike[str]) -> None:
    """Raise OSError where a folder that is there is a link, or lies elsewhere than in the folder `inside`."""
    if os.path.islink(folder) or not lies_in(folder, inside):
        raise OSError(errno.ELOOP, f"is a link, or lies outside of {os.fspath(inside)}", os.fspath(folder))


def lies_in(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> bool:
    """Tell whether a path lies in a folder when all links are resolved."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))
