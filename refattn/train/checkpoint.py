"""Checkpoints that survive a kill, a full disk and a damaged file: safetensors and JSON, never pickle. Host side.

A checkpoint is two files, ``step-00000200.safetensors`` with the arrays and ``step-00000200.json``, which tells the
step, facts of the caller's, and the size and SHA-256 of the other file; last comes a digest of its own content. Each is
written under a fresh name beside it, brought to the disk, and then renamed, the JSON after the arrays. **The JSON's
appearance is the commit**: arrays without it are no checkpoint. Only then older checkpoints are removed.

The folder is held meanwhile, whatever becomes of its name. Where it is a link it is refused, and so is a file in it.

Equal arrays and facts give equal bytes: names are sorted and no time is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from refattn.args import SHA256, Each, Function, Named, Whole, checked
from refattn.files import (
    MIB,
    HeldFolder,
    HeldPath,
    Place,
    hold_folder,
    read_json,
    read_regular,
    remove,
    remove_left_behind,
    write_atomically,
)

FORMAT = 1

LARGEST = 64 * MIB
"""The most bytes that the JSON of a checkpoint may have."""

_NAME = re.compile(r"step-(\d{8,})\.(json|safetensors)")

_SCHEMA = {"format": Whole(), "step": Whole(), "facts": dict, "bytes": Whole(), "sha256": SHA256, "digest": SHA256}

Found = TypeVar("Found")

_FOLDER = (HeldFolder, HeldPath, Named)


class CheckpointError(OSError):
    """A checkpoint cannot be written, or there are checkpoints and none is whole."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What `save` was given.

    Attributes
    ----------
    step
        The step.
    arrays
        NumPy arrays by name.
    facts
        What JSON made of the facts: tuples are lists, keys are texts.
    """

    step: int
    arrays: dict[str, NDArray[Any]]
    facts: dict[str, Any]


@checked(folder=_FOLDER, step=Whole(), arrays=Each(None), facts=Each(None), keep=Whole(1))
def save(
    folder: Place | HeldFolder,
    step: int,
    arrays: Mapping[str, NDArray[Any]],
    facts: Mapping[str, Any],
    keep: int = 2,
) -> None:
    """Write a checkpoint, then remove all older ones but the newest `keep` - 1.

    Parameters
    ----------
    folder
        Where; it is made where it is missing, in a folder that is there. It may not be a link.
    step
        From 0. A checkpoint of the same step is replaced.
    arrays
        NumPy arrays by name, of real numbers or booleans, of any shape.
    facts
        Whatever JSON holds, without NaN and infinity.
    keep
        How many checkpoints stay, with the new one. Those of later steps are not counted and not touched.

    Raises
    ------
    TypeError, ValueError
        Where an array or a fact is one that the files cannot hold.
    CheckpointError
        Where a file cannot be written or removed; the earlier checkpoints are untouched, or the new one is whole.

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> from refattn.train.checkpoint import newest, save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in (10, 20, 30):
    ...         save(folder, step, {"w": np.ones(2)}, {"loss": 1.5}, keep=2)
    ...     newest(folder, warn=print).step
    30
    """
    tensors = _tensor_bytes(arrays)
    try:
        plain = json.loads(json.dumps(dict(facts), allow_nan=False))  # as it will be read: the digest is of that
    except (TypeError, ValueError) as error:
        raise type(error)(f"facts: got what JSON cannot hold: {error}") from error
    sha256 = hashlib.sha256(tensors).hexdigest()
    content = {"format": FORMAT, "step": step, "facts": plain, "bytes": len(tensors), "sha256": sha256}
    text = json.dumps(content | {"digest": _digest(content)}, sort_keys=True, indent=1) + "\n"
    state = "the earlier checkpoints are untouched"
    try:
        with hold_folder(folder, make=True) as held:
            write_atomically(_path(held, step, "safetensors"), tensors)
            write_atomically(_path(held, step, "json"), text.encode())
            state = f"the checkpoint of step {step} is written"
            prune(held, step, keep)
    except OSError as error:
        raise CheckpointError(f"{error.filename}: {error.strerror or error}; {state}") from error


@checked(folder=_FOLDER, warn=Function)
def newest(folder: Place | HeldFolder, warn: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest checkpoint that is whole, or None where there is none at all; the arguments are `newest_as`.

    >>> import tempfile, numpy as np
    >>> from refattn.train.checkpoint import newest, save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     newest(folder, warn=print)
    ...     save(folder, 10, {"w": np.ones(2)}, {"loss": 1.5})
    ...     found = newest(folder, warn=print)
    >>> found.step, found.arrays["w"].tolist(), found.facts
    (10, [1.0, 1.0], {'loss': 1.5})
    """
    return newest_as(lambda found: found, folder, warn)


def newest_as(
    read: Callable[[Checkpoint], Found], folder: Place | HeldFolder, warn: Callable[[str], None]
) -> Found | None:
    """Return what `read` makes of the newest checkpoint that is whole, or None where there is none at all.

    Parameters
    ----------
    read
        Raises ValueError where a checkpoint is whole and yet none that it can read: it is passed over then, too.
    folder
        Where to look; it may be missing. It may not be a link.
    warn
        Is told one line for each checkpoint that is passed over: the file, and what is wrong with it.

    Raises
    ------
    CheckpointError
        Where there are checkpoints, and none is whole.
    OSError
        Where the folder is a link, or cannot be read.
    """
    with contextlib.ExitStack() as opened:
        try:
            held = opened.enter_context(hold_folder(folder))
        except FileNotFoundError:
            return None
        steps = _steps(held)
        for step in reversed(steps):
            try:
                return read(_read(held, step))
            except _BrokenError as error:
                warn(str(error))
            except ValueError as error:
                warn(f"{_path(held, step, 'json')}: {error}")
    if steps:
        names = ", ".join(_path(held, step, "json").name for step in steps)
        raise CheckpointError(f"{held.path}: none of the checkpoints is whole: {names}")
    return None


def prune(folder: HeldFolder, step: int, keep: int = 2) -> None:
    """Remove checkpoints before `step` but the newest `keep` - 1, then what belongs to no checkpoint.

    `save` does so at its end; where a process died before that, whoever goes on does it.

    Raises
    ------
    OSError
        Where a file cannot be removed.
    """
    steps = _steps(folder)
    earlier = [n for n in steps if n < step]
    for n in earlier[: max(0, len(earlier) - (keep - 1))]:
        remove(_path(folder, n, "json"))  # first, so that no JSON is without its arrays
        steps.remove(n)
    for name in folder.names():
        found = _NAME.fullmatch(name)
        if found and int(found[1]) not in steps:
            remove(folder / name)
    remove_left_behind(folder)


class _BrokenError(Exception):
    """A checkpoint is not whole; the text names the file and says why."""


def _read(folder: HeldFolder, step: int) -> Checkpoint:
    path = _path(folder, step, "json")
    try:
        content = read_json(path, LARGEST, _SCHEMA)
        if content.pop("digest") != _digest(content):
            raise ValueError("its bytes do not match the digest")
        if content["format"] != FORMAT:
            raise ValueError(f"has format {content['format']}, this version reads {FORMAT}")
        if content["step"] != step:
            raise ValueError(f"is of step {content['step']}")
        path = _path(folder, step, "safetensors")
        data = read_regular(path, content["bytes"])
        if len(data) < content["bytes"]:
            raise ValueError(f"truncated: {len(data)} bytes of {content['bytes']}")
        if hashlib.sha256(data).hexdigest() != content["sha256"]:
            raise ValueError("its bytes do not match the digest")
        return Checkpoint(step, safetensors.numpy.load(data), content["facts"])
    except OSError as error:
        raise _BrokenError(f"{path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise _BrokenError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None


def _steps(folder: HeldFolder) -> list[int]:
    """Return the steps of all checkpoints, whole or not, in order."""
    names = set(folder.names())
    steps = {int(match[1]) for match in map(_NAME.fullmatch, names) if match}
    return sorted(step for step in steps if _path(folder, step, "json").name in names)


def _path(folder: HeldFolder, step: int, kind: str) -> HeldPath:
    return folder / f"step-{step:08d}.{kind}"


def _tensor_bytes(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    plain = {}
    for name in sorted(arrays):
        x = arrays[name]
        if not isinstance(x, np.ndarray | np.generic):
            raise TypeError(f"arrays: got {type(x).__name__} for {name!r}, needs a NumPy array")
        if x.dtype.kind not in "biuf" or x.dtype.itemsize > 8:
            raise TypeError(f"arrays: got dtype {x.dtype} for {name!r}, needs booleans or numbers of at most 64 bits")
        if name == "__metadata__":
            raise ValueError(f"arrays: got the name {name!r}, which safetensors uses itself")
        # safetensors writes the memory as it lies, whatever the strides say.
        plain[name] = np.asarray(x, order="C")
    return safetensors.numpy.save(plain)


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
