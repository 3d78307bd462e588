"""What others may have changed is read with bounds, and what is written overwrites nothing that is not ours."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
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
    more = {kind: f".refattn-{n:016x}.part" for n, kind in enumerate(("folder", "fifo", "link"))}
    (tmp_path / more["folder"]).mkdir()
    os.mkfifo(tmp_path / more["fifo"])
    (tmp_path / more["link"]).symlink_to("a.part")
    with files.hold_folder(tmp_path) as folder:
        files.remove_left_behind(folder)
    assert sorted(os.listdir(tmp_path)) == sorted([*stay, *more.values()])


def test_what_a_process_writes_at_this_moment_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace
    seen: list[list[str]] = []

    def swept(*names: Any, **folders: Any) -> None:
        with files.hold_folder(tmp_path) as folder:
            files.remove_left_behind(folder)
            seen.append(folder.names())
        replace(*names, **folders)

    monkeypatch.setattr(os, "replace", swept)
    files.write_atomically(tmp_path / "facts.json", b"new")
    assert os.listdir(tmp_path) == ["facts.json"] and len(seen) == 1
    assert len(seen[0]) == 1 and files.LEFT_BEHIND.fullmatch(seen[0][0])


def test_a_part_that_is_removed_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, calls = fcntl.flock, itertools.count()

    def late(handle: int, how: int) -> None:
        if next(calls) == 0:
            (part,) = tmp_path.iterdir()
            part.unlink()
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    files.write_atomically(tmp_path / "facts.json", b"new")
    assert (tmp_path / "facts.json").read_bytes() == b"new" and len(os.listdir(tmp_path)) == 1


def test_without_locks_files_are_written_and_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refused)
    (tmp_path / ".refattn-0123456789abcdef.part").touch()
    files.write_atomically(tmp_path / "facts.json", b"new")
    with files.hold_folder(tmp_path) as folder:
        files.remove_left_behind(folder)
        assert sorted(folder.names()) == [".refattn-0123456789abcdef.part", "facts.json"]


def test_a_fresh_name_that_is_taken_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").write_text("mine")
    name = files.fresh_name()
    assert files.LEFT_BEHIND.fullmatch(name) and files.fresh_name() != name
    (tmp_path / name).symlink_to("mine")
    monkeypatch.setattr(files, "fresh_name", lambda: name)
    with pytest.raises(FileExistsError):
        files.write_atomically(tmp_path / "facts.json", b"new")
    assert (tmp_path / "mine").read_text() == "mine" and not (tmp_path / "facts.json").exists()


# --- folders that are held


def test_a_folder_that_is_held_is_the_same_one_wherever_it_is(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "old").write_text("old")
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    with files.hold_folder(tmp_path / "one") as held:
        assert held.is_at(tmp_path / "one") and not held.is_at(tmp_path / "other")
        (tmp_path / "one").rename(tmp_path / "moved")
        assert not held.is_at(tmp_path / "one")  # nothing is there
        (tmp_path / "other").rename(tmp_path / "one")
        assert held.is_at(tmp_path / "moved") and not held.is_at(tmp_path / "one")
        files.write_atomically(held / "facts", b"new")
        with files.open_to_append(held / "lines") as file:
            file.write(b"one")
        with files.create(held / "created"), pytest.raises(FileExistsError):
            files.create(held / "created")
        files.rename(held / "created", held / "renamed")
        with files.hold_folder(held / "inner", make=True) as inner:
            files.write_atomically(inner / "facts", b"new")
        assert files.read_regular(held / "lines", 10) == b"one"
        files.remove(held / "old")
        assert sorted(held.names()) == ["facts", "inner", "lines", "renamed"] == sorted(os.listdir(tmp_path / "moved"))
    assert os.listdir(tmp_path / "one") == ["old"] and os.listdir(tmp_path / "moved" / "inner") == ["facts"]
    (tmp_path / "link").symlink_to("moved")
    assert not held.path.samefile(tmp_path / "link")


def test_a_name_in_a_held_folder_is_no_path(tmp_path: Path) -> None:
    """Who opens it by name has lost the folder."""
    with files.hold_folder(tmp_path) as held:
        uses: list[Any] = [open, os.stat, os.fspath, Path]
        for use in uses:
            with pytest.raises(TypeError):
                use(held / "facts")


@pytest.mark.parametrize("leads", ["mine", "nowhere", "folder"])
def test_links_in_a_held_folder_are_refused(tmp_path: Path, leads: str) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "link").symlink_to(f"../{leads}")
    uses: list[Callable[[files.HeldPath], Any]] = [
        lambda link: files.read_regular(link, 10),
        files.open_to_append,
        lambda link: files.read_json(link, 10),
        lambda link: files.hold_folder(link).__enter__(),
        lambda link: files.hold_folder(link, make=True).__enter__(),
    ]
    with files.hold_folder(tmp_path / "home") as held:
        for use in uses:
            with pytest.raises(OSError, match=r"is a link, needs the (file|folder) itself") as caught:
                use(held / "link")
            assert caught.value.filename == str(tmp_path / "home" / "link")
        files.write_atomically(held / "link", b"new")
        assert not files.is_link(held / "link") and files.read_regular(held / "link", 10) == b"new"
    assert (tmp_path / "mine").read_text() == "mine" and os.listdir(tmp_path / "folder") == []
    assert sorted(os.listdir(tmp_path)) == ["folder", "home", "mine"]


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.timeout(10)
def test_nothing_is_appended_to_what_is_no_regular_file(kind: str, tmp_path: Path) -> None:
    STRANGE[kind](tmp_path / "strange")
    with files.hold_folder(tmp_path) as held, contextlib.ExitStack() as opened:
        if kind == "sparse":
            opened.enter_context(files.open_to_append(held / "strange"))
        else:
            with pytest.raises(OSError) as caught:
                files.open_to_append(held / "strange")
            assert caught.value.filename == str(tmp_path / "strange")


def test_many_write_one_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    contents = [bytes([n]) * 5000 for n in range(8)]
    threads = [threading.Thread(target=files.write_atomically, args=(path, data)) for data in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_bytes() in contents and os.listdir(tmp_path) == ["facts.json"]
