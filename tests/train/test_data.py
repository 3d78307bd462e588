"""Texts: how they are found and split, batches as pure functions, and windows that score each byte once."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refattn.train import data
from refattn.train.data import Counts, Text


def array(text: bytes) -> Any:
    return np.frombuffer(text, dtype=np.uint8)


def is_held_out(name: str) -> bool:
    return int(hashlib.sha256(name.encode()).hexdigest()[:16], 16) % 10 == 0


# --- the standard library


@pytest.fixture(scope="module")
def stdlib() -> Text:
    return data.load("stdlib")


def test_the_standard_library_is_source_text(stdlib: Text) -> None:
    assert len(stdlib.train) > 3_000_000 and len(stdlib.heldout) > 200_000
    assert b"class OrderedDict" in stdlib.train.tobytes() + stdlib.heldout.tobytes()
    assert 0.04 < len(stdlib.heldout) / len(stdlib.train) < 0.25
    assert stdlib.files.train > 8 * stdlib.files.heldout / 2 > 0
    assert stdlib.files.unreadable == 0
    assert 0 not in stdlib.train and 0 not in stdlib.heldout


# --- files and folders


def make(folder: Path, count: int = 40) -> dict[str, bytes]:
    contents = {f"part {n % 3}/{n}.txt": f"text {n}\n".encode() * (n % 5) for n in range(count)}
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return contents


def test_a_folder_is_split_by_the_names_of_its_files(tmp_path: Path) -> None:
    contents = make(tmp_path)
    text = data.load(tmp_path)
    names = sorted(contents)
    assert text.train.tobytes() == b"".join(contents[name] for name in names if not is_held_out(name))
    assert text.heldout.tobytes() == b"".join(contents[name] for name in names if is_held_out(name))
    heldout = sum(map(is_held_out, names))
    assert text.files == Counts(train=len(names) - heldout, heldout=heldout)
    assert text.source == str(tmp_path)


def test_a_file_is_cut_at_its_last_tenth(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(256)) * 4)
    text = data.load(str(path))
    assert len(text.heldout) == 102
    assert text.train.tobytes() + text.heldout.tobytes() == path.read_bytes()
    assert text.files == Counts(train=1)


@pytest.mark.parametrize("chosen", [True, False])
def test_a_folder_with_one_side_is_cut_at_its_last_tenth(tmp_path: Path, chosen: bool) -> None:
    names = [name for name in (f"{n}.txt" for n in range(100)) if is_held_out(name) is chosen][:3]
    for name in names:
        (tmp_path / name).write_text(name * 10)
    text = data.load(tmp_path)
    joined = "".join(name * 10 for name in sorted(names)).encode()
    assert text.train.tobytes() + text.heldout.tobytes() == joined
    assert len(text.heldout) == len(joined) // 10
    assert text.files == Counts(train=3)


def test_what_is_no_text_is_passed_over(tmp_path: Path) -> None:
    contents = make(tmp_path)
    plain = data.load(tmp_path)
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "part 1" / "archive").write_bytes(b"PK\0")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "part 1" / "up").symlink_to("..")
    os.mkfifo(tmp_path / "pipe")
    text = data.load(tmp_path)
    assert text.fingerprint == plain.fingerprint
    assert text.files == dataclasses.replace(plain.files, binary=2, unreadable=2)
    assert text.files.train + text.files.heldout == len(contents)


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"^data: got .*absent': No such file or directory; needs 'stdlib', 'repeats', a"
    ):
        data.load(tmp_path / "absent")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match=r"^data: got .*loop': .*; needs 'stdlib', 'repeats', a file or a folder"):
        data.load(tmp_path / "loop")
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match=r"^data: got .*empty', which is empty; needs a file with text"):
        data.load(tmp_path / "empty")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"^data: got .*pipe', which is neither a file nor a folder; needs"):
        data.load(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "binary").write_bytes(b"\0")
    (tmp_path / "folder" / "empty").touch()
    with pytest.raises(ValueError, match=r"folder' with no text in it \(1 empty files, 1 binary, 0 not readable"):
        data.load(tmp_path / "folder")


def test_the_fingerprint_tells_texts_and_places_of_the_cut_apart() -> None:
    seen = {data._text("x", *parts, Counts()).fingerprint for parts in [(b"ab", b"c"), (b"a", b"bc"), (b"ab", b"d")]}
    assert len(seen) == 3 and all(len(digest) == 64 for digest in seen)
    assert data._text("y", b"ab", b"c", Counts(binary=1)).fingerprint in seen


# --- batches


@given(
    length=st.integers(2, 300),
    size=st.integers(1, 5),
    seed=st.integers(0, 2**64 - 1),
    step=st.integers(0, 2**32 - 1),
    draw=st.data(),
)
def test_a_batch_is_cut_from_the_text(length: int, size: int, seed: int, step: int, draw: Any) -> None:
    context = draw.draw(st.integers(1, length - 1))
    part = (np.arange(length) * 7 % 251).astype(np.uint8)
    inputs, targets = data.batch(part, size=size, context=context, seed=seed, step=step)
    assert inputs.shape == targets.shape == (size, context)
    assert inputs.dtype == targets.dtype == np.int64
    assert np.array_equal(inputs[:, 1:], targets[:, :-1])
    text = part.tobytes()
    for row, last in zip(inputs, targets[:, -1], strict=True):
        assert bytes([*row, last]) in text
    again = data.batch(part, size=size, context=context, seed=seed, step=step)
    assert np.array_equal(inputs, again[0]) and np.array_equal(targets, again[1])


def test_every_start_is_equally_likely() -> None:
    """A text of 20 bytes has 17 windows of 3 and a target; each is drawn about 1000 times."""
    part = array(bytes(range(20)))
    starts = [data.batch(part, size=100, context=3, seed=5, step=step)[0][:, 0] for step in range(170)]
    counts = np.bincount(np.concatenate(starts), minlength=17)
    assert len(counts) == 17
    assert np.sum((counts - 1000.0) ** 2 / 1000.0) < 39.3  # chi square with 16 degrees of freedom, p = 0.001


# --- windows


@given(
    length=st.integers(0, 200),
    context=st.integers(1, 30),
    size=st.integers(1, 6),
    every=st.sampled_from([1, 1, 2, 3, 16]),
)
def test_each_byte_after_the_first_is_scored_once(length: int, context: int, size: int, every: int) -> None:
    part = np.arange(length, dtype=np.uint8)  # each byte is its own place
    scored, before = [], []
    for inputs, targets in data.windows(part, context=context, size=size, every=every):
        assert inputs.shape == targets.shape and inputs.dtype == targets.dtype == np.int64
        assert 1 <= inputs.shape[0] <= size and 1 <= inputs.shape[1] <= context
        assert np.array_equal(inputs + 1, targets)
        scored += targets.reshape(-1).tolist()
        before += inputs[:, 0].tolist()
    last = max(0, length - 1)
    starts = range(0, last, context)[::every]
    assert before == list(starts)
    assert scored == [n + 1 for start in starts for n in range(start, min(start + context, last))]


def test_wrong_sizes_are_refused_at_once() -> None:
    part = array(b"abcdef")
    for name in ("context", "size", "every"):
        arguments: dict[str, Any] = {"context": 2, "size": 1, "every": 3} | {name: 0}
        with pytest.raises(ValueError, match=f"^{name}: got 0, needs a whole number of at least 1"):
            data.windows(part, **arguments)
    for name in ("context", "size"):
        arguments = {"context": 2, "size": 1, "seed": 0, "step": 0} | {name: 0}
        with pytest.raises(ValueError, match=f"^{name}: got 0, needs a whole number of at least 1"):
            data.batch(part, **arguments)


def test_no_name_is_not_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="^data: got '', needs 'stdlib', 'repeats', a file or a folder"):
        data.load("")


def test_a_text_that_no_memory_holds_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(8 << 30)
    with pytest.raises(OSError, match=r"^data: got '.*huge': got 8589934592 bytes, needs at most"):
        data.load(str(tmp_path / "huge"))
    for name in "ab":
        (tmp_path / name).write_text("x" * 60)
    assert data.load(str(tmp_path)).files.unreadable == 1
    monkeypatch.setattr(data, "LARGEST", 100)
    with pytest.raises(ValueError, match=r"^data: got '.*' with more than 100 bytes of text"):
        data.load(str(tmp_path))


def test_words_that_are_said_four_times() -> None:
    text = data.load("repeats")
    assert text.fingerprint == data.load("repeats").fingerprint and text.source == "repeats"
    words = set()
    for part in (text.train, text.heldout):
        for line in part.tobytes().decode().splitlines():
            first, *others = line.split(" ")
            assert len(first) == 7 and others == [first] * 3
            words.add(first)
    assert len(words) > 0.99 * 2**15 and set("".join(words)) == set("abcdefghijklmnopqrstuvwxyz")
    assert len(text.heldout) == 32 * (2**15 // 10)
