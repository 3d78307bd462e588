"""Text as bytes: where it is read from, how it is split, and how batches and scoring windows are cut from it.

The model reads bytes, so there is no vocabulary to learn and a loss in bits per byte can be compared with that of any
other model or compressor. Host side: NumPy.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from refattn import philox
from refattn.args import Axes, Named, Whole, check_whole, checked
from refattn.files import read_regular

Bytes = NDArray[np.uint8]
Tokens = NDArray[np.int64]

HELD_OUT = 10
"""One file in so many is held out, or the last of so many equal pieces of one text."""

LARGEST = 1 << 30
"""The most bytes that a text may have. It is held in memory, and larger files of a folder count as unreadable."""

LEFT_OUT = (
    # not Python's own
    *("site-packages", "dist-packages", "_distutils_system_mod.py"),
    # tests
    *("test", "tests", "idle_test"),
    # what is not in every installation, or was removed from later versions
    *("distutils", "ensurepip", "idlelib", "lib2to3", "macholib", "tkinter", "turtle.py", "turtledemo"),
)
"""Folders and files of the standard library's own that are no part of the text "stdlib"."""

MACHINE = ("_sysconfigdata", "config-", "sitecustomize", "__pycache__")
"""Beginnings of the names of what describes one machine."""


WORDS, LETTERS, SAID = 2**15, 7, 4
"""Of the text "repeats": how many words, letters of a word, and how often each is said."""


@dataclass(frozen=True)
class Counts:
    """How many files a text was made of, and how many were passed over.

    Attributes
    ----------
    train, heldout
        Files of each part. A text that was cut within one piece of text counts as files of the training part.
    binary
        Files with a NUL byte in them, which were left out.
    unreadable
        Files, folders and links that could not be read, which were left out.
    """

    train: int = 0
    heldout: int = 0
    binary: int = 0
    unreadable: int = 0


@dataclass(frozen=True, eq=False)
class Text:
    """A text in two parts that have no file in common.

    Attributes
    ----------
    source
        Where it is from, as it was given.
    train, heldout
        The bytes to learn from and the bytes to be judged by, uint8 (length,), read-only.
    files
        How many files it was made of.
    fingerprint
        SHA-256 of both parts, in hexadecimal digits: equal texts, split at the same place, have the same.
    """

    source: str
    train: Bytes
    heldout: Bytes
    files: Counts
    fingerprint: str


@checked(source=Named)
def load(source: str | os.PathLike[str]) -> Text:
    """Read a text and split it.

    Parameters
    ----------
    source
        ``"stdlib"``: the source text of the standard library of the Python that runs, without its tests and what not
        every installation has. It differs from one version of Python to the next; the fingerprint tells.
        ``"repeats"``: a generated text, a MiB of random words, each said four times in a line of its own, the last
        tenth of them held out. Letters of a word that is new cannot be known, and what follows can be copied: the
        fewest bits per byte are 7 log2(26) / 32 = 1.028, of windows that hold whole lines of 32 bytes.

        Otherwise the path of a file, whose last tenth is held out, or of a folder: all regular files below it, but for
        binary ones. (``"./stdlib"`` is a file or folder of that name.)

        Files of a folder are joined in the order of their paths. About one in ten is held out, chosen by the SHA-256
        of its path within the folder and by nothing else, so that a file stays on its side when others come or go.
        Where that leaves a part empty, the last tenth of the joined text is held out instead. Links to files are
        followed, links to folders are not.

    Raises
    ------
    FileNotFoundError
        Where there is nothing at the path.
    ValueError
        Where there is nothing to read, or nothing in it.
    OSError
        Where the file cannot be read.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> from refattn.train import data
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder) / "text"
    ...     _ = path.write_text("to be or not to be, " * 20)
    ...     text = data.load(path)
    >>> text.train.shape, text.heldout.shape
    ((360,), (40,))
    """
    name = os.fspath(source)
    if name == "stdlib":
        folder = Path(sysconfig.get_path("stdlib"))
        if not folder.is_dir():
            raise FileNotFoundError(f"data: got 'stdlib', but this Python has no folder {folder}; needs a path instead")
        return _of_folder(name, folder, stdlib=True)
    if name == "repeats":
        return _text(name, *_repeats(), Counts())
    needs, path = "needs 'stdlib', 'repeats', a file or a folder", Path(name)
    if not name:  # which would be the working directory
        raise ValueError(f"data: got '', {needs}")
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise type(error)(f"data: got {name!r}: {error.strerror}; {needs}") from error
    if stat.S_ISDIR(mode):
        return _of_folder(name, path, stdlib=False)
    if not stat.S_ISREG(mode):
        raise ValueError(f"data: got {name!r}, which is neither a file nor a folder; {needs}")
    return _text(name, *_cut(_read(name, path)), Counts(train=1))


def check_length(text: Text, context: int) -> None:
    """Raise ValueError where a part is too short for one window of `context` bytes and the byte after it."""
    check_whole("context", context, 1)
    for name, part in (("train", text.train), ("heldout", text.heldout)):
        if len(part) < context + 1:
            raise ValueError(
                f"data: got {len(part)} bytes in the {name} part of {text.source!r}, "
                f"needs at least {context + 1} for a context of {context}"
            )


@checked(part=Axes("n", "whole"), size=Whole(1, 2**31), context=Whole(1, 2**31))
def batch(part: Bytes, *, size: int, context: int, seed: int, step: int) -> tuple[Tokens, Tokens]:
    """Return the inputs and targets of a step: a pure function of the seed and the step.

    Parameters
    ----------
    part
        uint8 (length,), longer than `context`.
    size, context
        How many windows, and how long.
    seed, step
        The name of the draw: each window starts anywhere with equal probability, by `philox.integers` for the purpose
        ``"data"``.

    Returns
    -------
    inputs, targets
        int64 (size, context) each: bytes, and the byte after each.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.train.data import batch
    >>> text = np.arange(20, dtype=np.uint8)
    >>> inputs, targets = batch(text, size=2, context=4, seed=0, step=1)
    >>> inputs.tolist(), targets.tolist()
    ([[6, 7, 8, 9], [7, 8, 9, 10]], [[7, 8, 9, 10], [8, 9, 10, 11]])
    """
    if len(part) < context + 1:
        raise ValueError(f"part: got {len(part)} bytes, needs at least {context + 1} for a context of {context}")
    starts = philox.integers((size, 1), 0, len(part) - context, seed=seed, purpose="data", step=step)
    places = starts + np.arange(context)
    return part[places].astype(np.int64), part[places + 1].astype(np.int64)


@checked(part=Axes("n", "whole"), **dict.fromkeys(("context", "size", "every"), Whole(1, 2**31)))
def windows(part: Bytes, *, context: int, size: int, every: int = 1) -> Iterator[tuple[Tokens, Tokens]]:
    """Yield inputs and targets that predict each byte after the first exactly once, each from its own window.

    The windows do not overlap. What is left at the end comes as one shorter window of its own, so no target has to be
    masked, and the loss of the whole is the sum of all losses divided by the number of all targets.

    Parameters
    ----------
    part
        uint8 (length,).
    context
        Length of a window, but for the last one.
    size
        How many windows are yielded together, but for the last ones.
    every
        Above 1: only the first of so many windows, and so on. Which they are does not depend on `size`.

    Returns
    -------
    Iterator
        Pairs (inputs, targets) of int64 (windows, length) each.
    """
    count = max(0, len(part) - 1)  # bytes to predict
    whole, rest = divmod(count, context)
    starts = context * np.arange(0, whole, every)
    cuts = [(starts[n : n + size], context) for n in range(0, len(starts), size)]
    if rest and whole % every == 0:
        cuts.append((np.asarray([whole * context]), rest))

    def cut(starts: NDArray[np.int64], length: int) -> tuple[Tokens, Tokens]:
        places = starts[:, None] + np.arange(length)
        return part[places].astype(np.int64), part[places + 1].astype(np.int64)

    return (cut(*each) for each in cuts)


def _of_folder(name: str, folder: Path, *, stdlib: bool) -> Text:
    paths, unreadable = _find(folder, stdlib)
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    joined, binary, total = [], 0, 0
    for relative in sorted(paths):
        try:
            data = read_regular(folder / relative, LARGEST)
        except OSError:
            unreadable += 1
            continue
        if b"\0" in data:
            binary += 1
            continue
        parts[_is_held_out(relative)].append(data)
        joined.append(data)
        if (total := total + len(data)) > LARGEST:
            raise ValueError(f"data: got {name!r} with more than {LARGEST} bytes of text, needs at most that")
    if not any(joined):
        raise ValueError(
            f"data: got {name!r} with no text in it ({len(joined)} empty files, {binary} binary, {unreadable} not "
            "readable; links to folders are not followed), needs a folder with text files"
        )
    counts = Counts(len(parts[False]), len(parts[True]), binary, unreadable)
    train, heldout = b"".join(parts[False]), b"".join(parts[True])
    if not train or not heldout:
        train, heldout = _cut(b"".join(joined))
        counts = Counts(len(joined), 0, binary, unreadable)
    return _text(name, train, heldout, counts)


def _find(folder: Path, stdlib: bool) -> tuple[list[str], int]:
    """Return the regular files below a folder, by their POSIX paths within it, and how many entries cannot be read."""
    failed: list[OSError] = []
    found = []
    unreadable = 0
    for here, folders, files in os.walk(folder, onerror=failed.append):
        if stdlib:
            folders[:] = [name for name in folders if _belongs(name)]
            files = [name for name in files if _belongs(name) and name.endswith(".py")]
        for name in files:
            path = Path(here, name)
            try:
                regular = stat.S_ISREG(path.stat().st_mode)  # opening a pipe would wait for its writer
            except OSError:
                unreadable += 1
                continue
            if regular:
                found.append(path.relative_to(folder).as_posix())
    return found, unreadable + len(failed)


def _belongs(name: str) -> bool:
    return name not in LEFT_OUT and not name.startswith(MACHINE)


def _repeats() -> tuple[bytes, bytes]:
    letters = philox.integers((WORDS, 1, LETTERS), ord("a"), ord("z") + 1, seed=0, purpose="data.repeats")
    lines = np.full((WORDS, SAID, LETTERS + 1), ord(" "), dtype=np.uint8)
    lines[:, :, :LETTERS] = letters
    lines[:, -1, LETTERS] = ord("\n")
    place = WORDS - WORDS // HELD_OUT
    return lines[:place].tobytes(), lines[place:].tobytes()


def _is_held_out(relative: str) -> bool:
    digest = hashlib.sha256(relative.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT == 0


def _read(name: str, path: Path) -> bytes:
    try:
        data = read_regular(path, LARGEST)
    except OSError as error:
        raise type(error)(f"data: got {name!r}: {error.strerror}; needs a file that can be read") from error
    if not data:
        raise ValueError(f"data: got {name!r}, which is empty; needs a file with text in it")
    return data


def _cut(data: bytes) -> tuple[bytes, bytes]:
    place = len(data) - len(data) // HELD_OUT
    return data[:place], data[place:]


def _text(name: str, train: bytes, heldout: bytes, files: Counts) -> Text:
    digest = hashlib.sha256(len(train).to_bytes(8, "big"))
    digest.update(train)
    digest.update(heldout)
    # Arrays over the memory of bytes are read-only.
    parts = np.frombuffer(train, dtype=np.uint8), np.frombuffer(heldout, dtype=np.uint8)
    return Text(name, *parts, files, digest.hexdigest())
