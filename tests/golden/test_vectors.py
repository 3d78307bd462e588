"""A set of golden vectors is read whole or not at all, and its arrays come back to the bit."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refattn import files
from refattn.golden import vectors
from refattn.golden.tensors import decode, encode
from refattn.verify import freeze
from tests.processes import python
from tests.test_files import STRANGE
from tests.verify.test_freeze import FEW, SOFTMAX_CASES, written

# --- arrays


def test_arrays_come_back_to_the_bit() -> None:
    x = np.asarray([[1.0, -0.0], [np.inf, np.nan]])
    stored = {
        "a": ("float64", x),
        "b": ("float32", x.astype(np.float32)),
        "c": ("float16", x.astype(np.float16)),
        "d": ("bfloat16", np.asarray([1.0, -2.5, 3e38], np.float32).view(np.uint32) & np.uint32(0xFFFF0000)),
        "e": ("bool", np.asarray([True, False])),
        "f": ("float64", np.asarray(0.3)),
        "g": ("float64", np.zeros((2, 0, 3))),
    }
    stored["d"] = ("bfloat16", stored["d"][1].view(np.float32))
    found = decode(encode(stored))
    assert list(found) == sorted(stored)
    for name, (dtype, values) in stored.items():
        assert found[name][0] == dtype and found[name][1].shape == values.shape
        assert found[name][1].tobytes() == values.tobytes()


@pytest.mark.parametrize(("dtype", "x"), [("float32", 1.0 + 2.0**-30), ("float16", 1e5), ("bfloat16", 1.0 + 2.0**-8)])
def test_a_type_that_does_not_hold_a_value_is_refused(dtype: str, x: float) -> None:
    with pytest.raises(ValueError, match=f"q: got values that {dtype} does not hold"):
        encode({"q": (dtype, np.asarray(x))})


def header(text: str, body: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text.encode() + body


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01",
        header("", length=2**63),  # a header that would be far larger than any memory
        header('{"q":{"dtype":"F64","shape":[4],"data_offsets":[0,32]}}', b"\0" * 8),
        header('{"q":{"dtype":"F64","shape":[4],"data_offsets":[0,8]}}', b"\0" * 8),
        header('{"q":{"dtype":"F64","shape":[1],"data_offsets":[8,0]}}', b"\0" * 8),
        header('{"q":{"dtype":"C64","shape":[1],"data_offsets":[0,8]}}', b"\0" * 8),
        header("[1, 2]"),
        b"\x80\x04K\x01.",
    ],
    ids=["nothing", "short", "huge", "beyond", "sizes", "backwards", "type", "list", "pickle"],
)
def test_what_is_no_safetensors_file_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="safetensors|got the type C64"):
        decode(data)


# --- the tripwire


def test_a_whole_set_is_read(whole: Path) -> None:
    found = vectors.read(whole)
    assert [entry["case"] for entry in found.cases] == list(SOFTMAX_CASES)
    entry = found.cases[0]
    assert {f"results/{name}" for name in entry["results"]} <= set(found.arrays(entry))


def manifest_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / vectors.MANIFEST).read_text()))


def _without_a_case(folder: Path) -> None:
    changed = manifest_of(folder)
    gone = changed["cases"].pop()
    (folder / gone["file"]).unlink()
    changed["manifest_sha256"] = vectors._of_manifest(changed)
    (folder / vectors.MANIFEST).write_text(json.dumps(changed))


def _without_cases(folder: Path) -> None:
    changed = manifest_of(folder) | {"cases": [], "count": 0, "sha256": vectors._of_all([])}
    changed["manifest_sha256"] = vectors._of_manifest(changed)
    (folder / vectors.MANIFEST).write_text(json.dumps(changed))


def _outside(folder: Path) -> None:
    changed = manifest_of(folder)
    changed["cases"][0]["file"] = "../elsewhere.safetensors"
    changed["sha256"] = vectors._of_all(changed["cases"])
    changed["manifest_sha256"] = vectors._of_manifest(changed)
    (folder / vectors.MANIFEST).write_text(json.dumps(changed))


def _edit(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def _emptied(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


BROKEN: dict[str, tuple[Callable[[Path], object], str, bool]] = {
    "no folder": (shutil.rmtree, "got no vectors", True),
    "empty": (_emptied, "got no vectors", True),
    "no cases": (_without_cases, "a set of no cases", True),
    "no manifest": (lambda folder: (folder / vectors.MANIFEST).unlink(), "not written to its end", False),
    "manifest cut": (_edit(vectors.MANIFEST, lambda data: data[: len(data) // 2]), "cut off", False),
    "manifest changed": (_edit(vectors.MANIFEST, lambda x: x.replace(b'"normal"', b'"NORMAL"', 1)), "changed", False),
    "another format": (_edit(vectors.MANIFEST, lambda x: x.replace(b'"format": 1', b'"format": 2')), "format 2", False),
    "a case less": (_without_a_case, "lists 2 cases, needs the 3", False),
    "a file missing": (lambda folder: (folder / "softmax/tiny.safetensors").unlink(), "tiny.*cannot be read", False),
    "a file cut": (_edit("softmax/tiny.safetensors", lambda data: data[:-8]), "tiny.*bytes, needs", False),
    "a bit changed": (
        _edit("softmax/tiny.safetensors", lambda data: data[:-1] + bytes([data[-1] ^ 1])),
        "tiny.*was changed",
        False,
    ),
    "a file too many": (
        lambda folder: shutil.copy(folder / "softmax/tiny.safetensors", folder / "softmax/more.safetensors"),
        "more.safetensors, which",
        False,
    ),
    "a file outside": (_outside, "needs MECHANISM/CASE.safetensors", False),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_set_that_is_not_whole_is_refused(how: str, copy: Path) -> None:
    vectors.read(copy)
    change, message, empty = BROKEN[how]
    change(copy)
    with pytest.raises(vectors.SetError, match=message) as caught:
        vectors.read(copy)
    assert caught.value.empty == empty


def test_nothing_is_written_over(whole: Path) -> None:
    with pytest.raises(vectors.SetError, match="needs a new or an empty one"):
        vectors.write(whole, {}, [])


# --- a user's files


def snapshot(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@functools.cache
def frozen() -> list[tuple[dict[str, Any], bytes]]:
    return [freeze.freeze(record, case) for record, case in freeze.frozen_cases([FEW], "small")]


def replaced(folder: Path) -> None:
    vectors.write(folder, freeze.about([FEW], "small", "1.2.4"), frozen(), replace=True)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot exchange two names")
def test_a_whole_set_is_there_at_any_time(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> None:
            function(*args, **options)
            assert vectors.read(copy).cases

        return run

    for name in ("rename", "replace", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    replaced(copy)
    assert vectors.read(copy).manifest["producer"]["refattn"] == "1.2.4"


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_whole_set_is_replaced(exchanges: bool, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not exchanges:  # other systems, and file systems that cannot do it
        monkeypatch.setattr(vectors, "exchange", lambda *names: False)
    before = snapshot(copy)
    replaced(copy)
    assert set(snapshot(copy)) == set(before) and vectors.read(copy).manifest["producer"]["refattn"] == "1.2.4"
    assert [path.name for path in copy.parent.iterdir()] == ["set"]


def _a_manifest_alone(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    (folder / vectors.MANIFEST).write_text('{"name": "my web page"}')


MINE: dict[str, Callable[[Path], object]] = {
    "another manifest": _a_manifest_alone,
    "a file beside": lambda folder: (folder / "thesis.txt").write_text("mine"),
    "a file within": lambda folder: (folder / "softmax/notes.txt").write_text("mine"),
    "an empty folder": lambda folder: (folder / "mine").mkdir(),
    "a link": lambda folder: (folder / "elsewhere").symlink_to("/tmp"),
    "a changed set": _edit("softmax/tiny.safetensors", lambda data: data + b"mine"),
}


@pytest.mark.parametrize("how", MINE)
def test_what_is_not_ours_is_not_replaced(how: str, copy: Path) -> None:
    MINE[how](copy)
    before = snapshot(copy.parent)
    with pytest.raises(vectors.SetError):
        replaced(copy)
    assert snapshot(copy.parent) == before


def test_a_link_is_not_written_through(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to("other")
    with pytest.raises(vectors.SetError, match="is a link"):
        written(tmp_path / "link")
    assert os.listdir(tmp_path / "other") == []


@pytest.mark.parametrize("replace", [False, True])
def test_a_write_that_fails_leaves_what_there_was(replace: bool, copy: Path) -> None:
    def cases() -> Any:
        yield {"mechanism": "softmax", "case": "tiny"}, b"x"
        raise KeyboardInterrupt

    before = snapshot(copy.parent)
    with pytest.raises(KeyboardInterrupt):
        vectors.write(copy if replace else copy.with_name("new"), {}, cases(), replace=replace)
    assert snapshot(copy.parent) == before and [path.name for path in copy.parent.iterdir()] == ["set"]


@pytest.mark.parametrize(("how", "deaths"), [("new", 12), ("old", 20), ("renames", 20)])
def test_the_next_writer_clears_up_after_one_that_was_killed_at_any_call(tmp_path: Path, how: str, deaths: int) -> None:
    assert int(python("-m", "tests.golden.killed", how, tmp_path, REFATTN_WORKERS="1")) >= deaths


def left(home: Path, *names: str) -> Path:
    """What a writer that was killed has left, with more of these names in it."""
    part = home / files.fresh_name()
    for name in ("softmax/tiny.safetensors", "softmax/mask-full.safetensors", files.fresh_name(), *names):
        (part / name).parent.mkdir(parents=True, exist_ok=True)
        (part / name).write_text("")
    return part


def test_of_what_was_left_behind_only_what_is_ours_is_removed(copy: Path) -> None:
    home = copy.parent
    gone = [left(home), left(home, vectors.MANIFEST), home / files.fresh_name()]
    gone[2].mkdir()
    mine = [left(home, name) for name in ("thesis.txt", "softmax/notes.txt", "softmax/more/tiny.safetensors", "x/.y")]
    for target in ("nowhere", "../mine"):
        mine.append(left(home))
        (mine[-1] / "softmax" / "link.safetensors").symlink_to(target)
    mine.append(left(home))
    (mine[-1] / "sympformer").symlink_to(copy / "softmax")
    mine.append(home / files.fresh_name())
    mine[-1].symlink_to("elsewhere")
    shutil.copytree(copy, home / "elsewhere")
    mine.append(home / files.fresh_name())
    mine[-1].write_text("mine")
    mine.append(home / "new.part")
    mine[-1].mkdir()
    before = {path.name: snapshot(path) for path in (*mine, home / "elsewhere")}
    replaced(copy)
    assert {path.name for path in home.iterdir()} == {"set", *before}
    assert {name: snapshot(home / name) for name in before} == before


def test_a_set_that_another_process_writes_is_not_removed(copy: Path) -> None:
    def cases() -> Any:
        yield frozen()[0]
        replaced(copy)  # as another process would
        (part,) = copy.parent.glob(".refattn-*.part")
        assert [path.name for path in (part / "softmax").iterdir()] == ["tiny.safetensors"]
        yield frozen()[1]

    vectors.write(copy.with_name("new"), freeze.about([FEW], "small", "1.2.5"), cases())
    assert sorted(os.listdir(copy.parent)) == ["new", "set"] and len(vectors.read(copy.with_name("new")).cases) == 2


@pytest.mark.parametrize("exchanges", [True, False])
def test_what_comes_to_the_place_of_a_set_meanwhile_stays(
    exchanges: bool, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the last moment another folder, whole set or not, takes the name."""
    shutil.copytree(copy, copy.with_name("other"))
    before = snapshot(copy)
    own: Any = files.exchange if exchanges else lambda *names: False

    def late(*names: Any) -> bool:
        if copy.with_name("other").exists():
            copy.rename(copy.with_name("moved"))
            copy.with_name("other").rename(copy)
        return own(*names)

    monkeypatch.setattr(vectors, "exchange", late)
    with pytest.raises(vectors.SetError, match="another folder came to its place meanwhile, which stays"):
        replaced(copy)
    assert sorted(os.listdir(copy.parent)) == ["moved", "set"]
    assert snapshot(copy) == before == snapshot(copy.with_name("moved"))


def test_a_set_that_another_process_replaces_is_refused(copy: Path) -> None:
    before = snapshot(copy)
    with files.hold_folder(copy) as held:
        assert files.lock(copy, held.handle)
        with pytest.raises(vectors.SetError, match="got a set that another process replaces at this moment"):
            replaced(copy)
    assert snapshot(copy) == before and os.listdir(copy.parent) == ["set"]


def test_a_set_over_a_mount_is_refused_at_once(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty one is written to: all that is made stands in it."""
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    with pytest.raises(vectors.SetError, match="got a set at the root of a mount"):
        vectors.write(copy, {}, (), replace=True)
    empty = copy.parent / "empty"
    empty.mkdir()
    vectors.write(empty, freeze.about([FEW], "small", "1.2.4"), frozen())
    assert vectors.read(empty).cases and sorted(os.listdir(copy.parent)) == ["empty", "set"]


def test_a_write_into_a_mount_that_fails_removes_its_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "ismount", lambda path: True)

    def cases(*names: str) -> Any:
        yield frozen()[0]
        for name in names:
            (tmp_path / name).write_text("mine")
        raise KeyboardInterrupt

    for names in ((), ("thesis.txt",)):
        with pytest.raises(KeyboardInterrupt):
            vectors.write(tmp_path, {}, cases(*names))
        assert [path.name for path in tmp_path.iterdir() if path.is_file()] == list(names)


def test_a_name_leads_nowhere_else(tmp_path: Path) -> None:
    for name in ("../softmax", "/tmp/softmax", "..", ""):
        with pytest.raises(ValueError, match="^mechanism: got"):
            vectors.write(tmp_path / "set", {}, [({"mechanism": name, "case": "tiny"}, b"x")])
    assert list(tmp_path.iterdir()) == []


# --- files that nobody could read


def _strange(name: str, kind: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        STRANGE[kind](folder / name)

    return change


@pytest.mark.parametrize("name", [vectors.MANIFEST, "softmax/tiny.safetensors"])
@pytest.mark.parametrize("kind", ["fifo", "folder"])
@pytest.mark.timeout(20)
def test_a_strange_file_is_refused_at_once(name: str, kind: str, copy: Path) -> None:
    _strange(name, kind)(copy)
    with pytest.raises(vectors.SetError, match=re.escape(name)):
        vectors.read(copy)


def _set(*path: Any, value: Any) -> Callable[[Path], object]:
    """Change a field of the manifest, with all sums right."""

    def change(folder: Path) -> None:
        changed: Any = manifest_of(folder)
        place = changed
        for key in path[:-1]:
            place = place[key]
        if value is None:
            del place[path[-1]]
        else:
            place[path[-1]] = value
        changed["manifest_sha256"] = vectors._of_manifest(changed)
        (folder / vectors.MANIFEST).write_text(json.dumps(changed))

    return change


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (_set("cases", value={}), "cases: got dict, needs a list"),
        (_set("cases", value=[[]]), r"cases\[0\]: got list, needs an object"),
        (_set("cases", 0, "sha256", value=None), r"cases\[0\].sha256: is missing"),
        (_set("cases", 0, "bytes", value=-1), r"cases\[0\].bytes: got -1"),
        (
            _set("cases", 0, "results", "out", "bias", value=[]),
            r"cases\[0\].results.out.bias: got list, needs a mapping",
        ),
        (_set("cases", 0, "equations", "SM.1", value=3), r"cases\[0\].equations.SM.1: got 3, needs an object"),
        (_set("limits", value="none"), "limits: got 'none', needs a mapping"),
        (_set("count", value=None), "count: is missing"),
        (_edit(vectors.MANIFEST, lambda data: data.replace(b"{", b'{"format": 1,', 1)), "the name 'format' twice"),
    ],
)
def test_a_wrong_field_is_named(change: Callable[[Path], object], field: str, copy: Path) -> None:
    change(copy)
    with pytest.raises(vectors.SetError, match=field) as caught:
        vectors.read(copy)
    assert str(copy / vectors.MANIFEST) in str(caught.value)
