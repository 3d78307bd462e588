"""What others may have changed is read with bounds, and what is written overwrites nothing that is not ours."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from refattn import files
from refattn.args import SHA256, Each, Maybe, Real, Whole, check_json


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(8 << 30)


STRANGE: dict[str, Callable[[Path], object]] = {
    "fifo": _fifo,
    "zero": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "loop": _loop,
    "sparse": _sparse,
    "memory": lambda path: path.symlink_to("/proc/self/mem"),
}
"""What may lie where a file is looked for, and would hang the reader or fill its memory."""


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.timeout(10)
def test_only_regular_files_of_bounded_size_are_read(kind: str, tmp_path: Path) -> None:
    STRANGE[kind](tmp_path / "strange")
    with pytest.raises(OSError) as caught:
        files.read_regular(tmp_path / "strange", 1 << 20)
    assert caught.value.filename == str(tmp_path / "strange") and caught.value.strerror


@pytest.mark.timeout(10)
def test_what_may_have_no_end_is_not_waited_for(tmp_path: Path) -> None:
    """Messages of the kernel are read if there are some, and are no reason to wait for more."""
    (tmp_path / "messages").symlink_to("/proc/kmsg")
    with contextlib.suppress(OSError):
        assert len(files.read_regular(tmp_path / "messages", 1 << 20)) <= 1 << 20


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a": 1, "a": 2}', "has the name 'a' twice"),
        (b'\xef\xbb\xbf{"a": 1}', "BOM"),
        ('{"a": 1}'.encode("utf-16"), "codec can't decode"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
        (b'{"a": ', "no JSON, or cut off"),
    ],
)
def test_json_that_readers_would_take_differently_is_refused(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "facts.json").write_bytes(data)
    with pytest.raises(ValueError, match=message) as caught:
        files.read_json(tmp_path / "facts.json", 1 << 20)
    assert str(caught.value).startswith(f"{tmp_path}/facts.json: ")


SCHEMA: Any = {"name": str, "sizes": [Whole(1, 9)], "rates": Each(Real(0.0)), "sum": SHA256, "more": Maybe({"x": bool})}
GOOD: dict[str, Any] = {"name": "a", "sizes": [1, 9], "rates": {"b": 0.5}, "sum": "0" * 64, "other": None}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 3}, "name: got 3, needs a text"),
        ({"sizes": {}}, "sizes: got dict, needs a list"),
        ({"sizes": [1, True]}, r"sizes\[1\]: got True, needs a whole number of at least 1"),
        ({"sizes": [10]}, r"sizes\[0\]: got 10, needs"),
        ({"sizes": [1.0]}, r"sizes\[0\]: got 1.0, needs"),
        ({"rates": {"b": -1.0}}, "rates.b: got -1.0, needs a finite number from 0"),
        ({"rates": {"b": float("nan")}}, "rates.b: got nan"),
        ({"rates": {"b": float("inf")}}, "rates.b: got inf"),
        ({"sum": "0" * 63 + "g"}, "sum: got '0+g', needs 64 hexadecimal digits"),
        ({"more": {"x": 0}}, "more.x: got 0, needs true or false"),
        ({"more": {}}, "more.x: is missing"),
    ],
)
def test_a_field_that_is_wrong_is_named(change: dict[str, Any], message: str) -> None:
    check_json(GOOD, SCHEMA)
    check_json(GOOD | {"more": {"x": True}}, SCHEMA)
    with pytest.raises(ValueError, match=f"^{message}"):
        check_json(GOOD | change, SCHEMA)
    with pytest.raises(ValueError, match="^the file: got list, needs an object"):
        check_json([], SCHEMA)
    with pytest.raises(ValueError, match="^sizes: is missing"):
        check_json({"name": "a"}, SCHEMA)


def test_writing_follows_no_link_and_overwrites_nothing_else(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("mine")
    home = tmp_path / "home"
    home.mkdir()
    for name in ("facts.json", "facts.json.part"):
        (home / name).symlink_to("../outside")
    files.write_atomically(home / "facts.json", b"new")
    assert outside.read_text() == "mine" and (home / "facts.json").read_bytes() == b"new"
    assert sorted(os.listdir(home)) == ["facts.json", "facts.json.part"] and (home / "facts.json.part").is_symlink()


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    stay = ["a.part", ".refattn-1.part", ".refattn-0123456789abcdeg.part", "x.refattn-0123456789abcdef.part"]
    for name in [*stay, ".refattn-0123456789abcdef.part"]:
        (tmp_path / name).touch()
    stay.append(".refattn-00000000000000ff.part")
    (tmp_path / stay[-1]).mkdir()
    with files.hold_folder(tmp_path) as folder:
        files.remove_left_behind(folder)
    assert sorted(os.listdir(tmp_path)) == sorted(stay)


def test_many_write_one_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    contents = [bytes([n]) * 5000 for n in range(8)]
    threads = [threading.Thread(target=files.write_atomically, args=(path, data)) for data in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_bytes() in contents and os.listdir(tmp_path) == ["facts.json"]
