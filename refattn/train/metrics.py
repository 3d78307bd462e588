"""The record of a run: ``metrics.jsonl``, one JSON object in each line, each with its step. Host side."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from refattn.args import Maybe, Named, Real, Whole, check_json, check_whole, checked
from refattn.files import (
    MIB,
    HeldPath,
    Place,
    in_folder,
    open_to_append,
    parse_json,
    read_regular,
    write_atomically,
)

LARGEST = 256 * MIB
"""The most bytes that the file may have."""

_SCHEMA = {"step": Whole(), **dict.fromkeys(("loss", "rate", "norm", "seconds", "heldout_bits"), Maybe(Real()))} | {
    "tokens": Maybe(Whole()),
    "growth": Maybe({"grown": bool}),
}


class Metrics(AbstractContextManager["Metrics"]):
    """Appends lines to a file, each by one write, so that a run that is killed leaves at most its last line broken.

    Before a run goes on, `cut` brings the file into order. Use it in a ``with`` block, or `close` it. If the file is a
    link, or no regular file, that is an OSError.
    """

    def __init__(self, path: Place) -> None:
        self._path = str(path)
        with in_folder(path) as place:
            self._file = open_to_append(place)

    def append(self, row: Mapping[str, Any]) -> None:
        """Append one line.

        Parameters
        ----------
        row
            What JSON holds, with ``"step"``, a whole number. Numbers that are not finite become null, which is all
            that JSON has for them.

        Raises
        ------
        TypeError, ValueError
            Where there is no step, a value is one that JSON does not have, or one of `read`'s fields has another type.
        OSError
            Where the line cannot be written.
        """
        if "step" not in row:
            raise ValueError(f"row: got the keys {', '.join(map(repr, row)) or 'none'}, needs 'step' among them")
        check_whole("row['step']", row["step"], 0)
        row = _finite(row)
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        check_json(row, _SCHEMA)
        try:
            written = self._file.write(line)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._path) from error
        if written != len(line):  # what is left of a full disk
            raise OSError(errno.ENOSPC, f"wrote {written} of {len(line)} bytes", self._path)

    def sync(self) -> None:
        """Bring all lines to the disk, so that no checkpoint is there before the lines of the steps that it is of."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()


@checked(path=(HeldPath, Named))
def read(path: Place) -> list[dict[str, Any]]:
    """Return the lines in order, without a broken last one.

    Raises
    ------
    OSError
        Where there is no file, or it is a link, or no regular file of at most `LARGEST` bytes.
    ValueError
        Where another line is broken.
    """
    rows: list[dict[str, Any]] = []
    with in_folder(path) as place:
        lines = read_regular(place, LARGEST).splitlines()
    for number, line in enumerate(lines, 1):
        row = None
        try:
            row = parse_json(line)
            check_json(row, _SCHEMA)
        except ValueError as error:
            if row is None and number == len(lines):
                break
            raise ValueError(f"{path}: line {number} is no JSON object with a step: {error}") from error
        rows.append(row)
    return rows


def cut(path: Place, step: int) -> None:
    """Keep the lines of steps up to `step`, so that a run that goes on from there has each step once.

    A broken last line goes too. The file is replaced at once or not at all; where there is none, none is made.
    """
    check_whole("step", step, 0)
    with in_folder(path) as place:
        try:
            rows = [row for row in read(place) if row["step"] <= step]
        except FileNotFoundError:
            return
        write_atomically(place, "".join(json.dumps(row) + "\n" for row in rows).encode())


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value
