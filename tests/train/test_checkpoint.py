"""Checkpoints: round trips, damaged files, faults at every call, full disks, and processes that are killed."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refattn import files
from refattn.files import write_atomically
from refattn.train import checkpoint
from refattn.train.checkpoint import CheckpointError, newest, save

ROOT = Path(__file__).resolve().parents[2]
KILLED = Path(__file__).with_name("killed.py")
DTYPES = (
    "bool",
    "int8",
    "uint8",
    "int16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
    ">f4",
)


def arrays(step: int) -> dict[str, Any]:
    return {"layers.0.w": np.full((3, 4), float(step)), "count": np.asarray(step, dtype="float32")}


def fail(line: str) -> None:
    raise AssertionError(line)


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return sorted(found) == sorted(expected) and all(
        found[name].shape == x.shape and found[name].dtype.name == x.dtype.name and np.array_equal(found[name], x)
        for name, x in expected.items()
    )


def is_of(found: Any, step: int) -> bool:
    return bool(found and found.step == step and found.facts == {"step": step} and same(found.arrays, arrays(step)))


def fill(folder: Path, *steps: int, keep: int = 9) -> None:
    for step in steps:
        save(folder, step, arrays(step), {"step": step}, keep=keep)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def pairs(*steps: int) -> list[str]:
    return sorted(f"step-{step:08d}.{kind}" for step in steps for kind in ("json", "safetensors"))


# --- round trips

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
entries = st.builds(
    lambda dtype, shape, flip: (
        (np.arange(math.prod(shape)) % 2).reshape(shape).astype(dtype).transpose()
        if flip
        else (np.arange(math.prod(shape)) % 2).reshape(shape).astype(dtype)
    ),
    st.sampled_from(DTYPES),
    shapes,
    st.booleans(),
)
facts = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@given(
    step=st.integers(0, 10**10),
    given_arrays=st.dictionaries(st.text(max_size=8).filter(lambda x: x != "__metadata__"), entries, max_size=4),
    given_facts=st.dictionaries(st.text(max_size=5), facts, max_size=4),
)
def test_round_trip(step: int, given_arrays: dict[str, Any], given_facts: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save(folder, step, given_arrays, given_facts)
        found = newest(folder, fail)
    assert found is not None and found.step == step
    assert same(found.arrays, given_arrays)
    assert found.facts == given_facts


def test_arrays_without_axes_or_elements_and_with_odd_strides(tmp_path: Path) -> None:
    x = np.arange(24.0).reshape(2, 3, 4)
    given_arrays: dict[str, Any] = {
        "number": np.asarray(2.5),
        "scalar": np.float32(3.5),
        "empty": np.zeros((0, 3)),
        "transposed": x.T,
        "every other": x[:, ::2, ::-1],
        "broadcast": np.broadcast_to(np.asarray([1.0, 2.0]), (3, 2)),
        "nan": np.asarray([math.nan, math.inf, -0.0]),
    }
    save(tmp_path, 1, given_arrays, {})
    found = newest(tmp_path, fail)
    assert found is not None and sorted(found.arrays) == sorted(given_arrays)
    for name, y in given_arrays.items():
        assert found.arrays[name].shape == y.shape and found.arrays[name].dtype == y.dtype
        assert found.arrays[name].tobytes() == y.tobytes()


def test_equal_arrays_and_facts_give_equal_bytes(tmp_path: Path) -> None:
    given_facts = {"b": [1, 2.5], "a": {"y": None, "x": "text"}}
    turned = {"a": {"x": "text", "y": None}, "b": (1, 2.5)}
    save(tmp_path / "one", 7, arrays(7), given_facts)
    save(tmp_path / "two", 7, dict(reversed(arrays(7).items())), turned)
    assert names(tmp_path / "one") == names(tmp_path / "two") == pairs(7)
    for name in pairs(7):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_facts_come_back_as_json_has_them(tmp_path: Path) -> None:
    save(tmp_path, 1, {}, {"sizes": (3, 4), "by step": {10: "x", 9: "y"}})
    found = newest(tmp_path, fail)
    assert found is not None and found.facts == {"sizes": [3, 4], "by step": {"10": "x", "9": "y"}}


def test_other_tools_read_the_files(tmp_path: Path) -> None:
    from safetensors import safe_open

    fill(tmp_path, 200)
    with safe_open(tmp_path / "step-00000200.safetensors", "np") as file:
        assert sorted(file.keys()) == ["count", "layers.0.w"]
        assert np.array_equal(file.get_tensor("layers.0.w"), arrays(200)["layers.0.w"])
    content = json.loads((tmp_path / "step-00000200.json").read_text())
    assert content["step"] == 200 and content["facts"] == {"step": 200}
    assert sorted(content) == ["bytes", "digest", "facts", "format", "sha256", "step"]


# --- which ones stay


def test_the_newest_ones_are_kept(tmp_path: Path) -> None:
    for step in (100, 200, 300, 1000):
        fill(tmp_path, step, keep=2)
    assert names(tmp_path) == pairs(300, 1000)
    fill(tmp_path, 1100, keep=1)
    assert names(tmp_path) == pairs(1100)
    assert is_of(newest(tmp_path, fail), 1100)


def test_what_is_left_of_other_runs_is_removed(tmp_path: Path) -> None:
    fill(tmp_path, 40)
    stale = ["step-00000050.safetensors", "step-00000950.safetensors", files.fresh_name(), files.fresh_name()]
    others = ["config.json", "metrics.jsonl", "step-1.json", "notes.part", "astep-00000001.json", "step-00000001.txt"]
    others += ["step-00000040.json.part", "step-00000100.safetensors.part"]  # a user's, for all we know
    for name in (*stale, *others):
        (tmp_path / name).write_text("left")
    assert is_of(newest(tmp_path, fail), 40)
    fill(tmp_path, 100)
    assert names(tmp_path) == sorted([*others, *pairs(40, 100)])


def test_checkpoints_of_later_steps_are_not_touched(tmp_path: Path) -> None:
    """A run goes on from the last whole checkpoint; a damaged later one is replaced when its step comes."""
    fill(tmp_path, 100, 200, 300, 400)
    (tmp_path / "step-00000400.safetensors").write_bytes(b"")
    (tmp_path / "step-00000300.json").write_bytes(b"")
    fill(tmp_path, 250, keep=1)
    assert names(tmp_path) == pairs(250, 300, 400)
    warnings: list[str] = []
    assert is_of(newest(tmp_path, warnings.append), 250)
    assert len(warnings) == 2
    fill(tmp_path, 300, 400, keep=2)
    assert names(tmp_path) == pairs(300, 400)
    assert is_of(newest(tmp_path, fail), 400)


def test_a_step_is_replaced(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2)
    save(tmp_path, 2, {"other": np.ones(3)}, {})
    found = newest(tmp_path, fail)
    assert found is not None and found.step == 2 and list(found.arrays) == ["other"]


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    (tmp_path / "step-00000001.safetensors").write_bytes(b"")
    assert newest(tmp_path, fail) is None
    assert newest(tmp_path / "absent", fail) is None


# --- damage


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def edit(path: Path, sign: bool = True, **changes: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8")) | changes
    if sign:
        content.pop("digest")
        content["digest"] = checkpoint._digest(content)
    path.write_text(json.dumps(content), encoding="utf-8")


NO_JSON = "is no JSON of a checkpoint"
OTHER_BYTES = "its bytes do not match the digest"
DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "empty json": ("json", lambda path: path.write_bytes(b""), NO_JSON),
    "short json": ("json", lambda path: path.write_bytes(path.read_bytes()[:50]), NO_JSON),
    "list": ("json", lambda path: path.write_text("[1, 2]"), NO_JSON),
    "number": ("json", lambda path: path.write_text("7"), NO_JSON),
    "no digest": ("json", lambda path: path.write_text("{}"), NO_JSON),
    "deep": ("json", lambda path: path.write_text("[" * 10**5), NO_JSON),
    "no text": ("json", lambda path: path.write_bytes(b"\xff\xfe\0\0"), NO_JSON),
    "zeros": ("json", lambda path: path.write_bytes(bytes(300)), NO_JSON),
    "not finite": ("json", lambda path: edit(path, sign=False, bytes=math.nan), NO_JSON),
    "other fact": ("json", lambda path: edit(path, sign=False, facts={"step": 9}), OTHER_BYTES),
    "other sum": ("json", lambda path: edit(path, sign=False, sha256="0" * 64), OTHER_BYTES),
    "other step": ("json", lambda path: edit(path, step=200), "is of step 200"),
    "other format": ("json", lambda path: edit(path, format=2), "has format 2, this version reads 1"),
    "no file": ("json", lambda path: (path.unlink(), path.mkdir()), "is no regular file"),  # type: ignore[func-returns-value]
    "no arrays": ("safetensors", lambda path: path.unlink(), "No such file or directory"),
    "empty arrays": ("safetensors", lambda path: path.write_bytes(b""), "truncated: 0 bytes of SIZE"),
    "short arrays": ("safetensors", lambda path: path.write_bytes(bytes(120)), "truncated: 120 bytes of SIZE"),
    "long arrays": ("safetensors", lambda path: path.write_bytes(path.read_bytes() + b"\0"), "got "),
    "flipped bit": ("safetensors", lambda path: flip(path, -1), OTHER_BYTES),
    "flipped header": ("safetensors", lambda path: flip(path, 20), OTHER_BYTES),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, damage: str) -> None:
    kind, do, reason = DAMAGE[damage]
    fill(tmp_path, 100, 200, 300)
    path = tmp_path / f"step-00000300.{kind}"
    size = path.stat().st_size
    do(path)
    warnings: list[str] = []
    assert is_of(newest(tmp_path, warnings.append), 200)
    (warning,) = warnings
    assert warning.startswith(f"{path}: {reason.replace('SIZE', str(size))}") and "\n" not in warning


@pytest.mark.parametrize("kind", ["json", "safetensors"])
def test_no_flipped_bit_goes_unnoticed(tmp_path: Path, kind: str) -> None:
    fill(tmp_path, 100, 200)
    path = tmp_path / f"step-00000200.{kind}"
    whole = path.read_bytes()
    for place in range(len(whole)):
        flip(path, place)
        found = newest(tmp_path, lambda line: None)
        # white space may change in JSON, and the text still says the same
        assert is_of(found, 100) or (kind == "json" and is_of(found, 200) and chr(whole[place]).isspace())
        path.write_bytes(whole)
    assert is_of(newest(tmp_path, fail), 200)


def test_a_file_under_another_name_is_not_believed(tmp_path: Path) -> None:
    fill(tmp_path, 100, 200)
    for kind in ("json", "safetensors"):
        (tmp_path / f"step-00000200.{kind}").rename(tmp_path / f"step-00000300.{kind}")
    warnings: list[str] = []
    assert is_of(newest(tmp_path, warnings.append), 100)
    assert warnings == [f"{tmp_path}/step-00000300.json: is of step 200"]


def test_where_none_is_whole_all_are_named(tmp_path: Path) -> None:
    fill(tmp_path, 100, 200)
    for step in (100, 200):
        (tmp_path / f"step-{step:08d}.safetensors").write_bytes(b"")
    warnings: list[str] = []
    with pytest.raises(CheckpointError) as caught:
        newest(tmp_path, warnings.append)
    assert str(caught.value) == (
        f"{tmp_path}: none of the checkpoints is whole: step-00000100.json, step-00000200.json"
    )
    assert len(warnings) == 2


# --- faults


class Faults:
    """Counts the calls that touch the disk, and lets one of them fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.calls: list[str] = []
        self.failing: int | None = None
        self.number = number
        faults = self

        class File:
            """Fails in the middle: half of the bytes are written."""

            def __init__(self, path: Any, mode: str) -> None:
                self.file = open(path, mode)

            def write(self, data: bytes) -> None:
                self.file.write(data[: len(data) // 2])
                self.file.flush()
                faults.count("write")
                self.file.write(data[len(data) // 2 :])

            def read(self, size: int) -> bytes:
                return bytes(self.file.read(size))

            def flush(self) -> None:
                faults.count("flush")
                self.file.flush()

            def fileno(self) -> int:
                return self.file.fileno()

            def __enter__(self) -> File:
                return self

            def __exit__(self, *error: object) -> None:
                self.file.close()

        monkeypatch.setattr(files, "open", self.before("open", File), raising=False)
        for name in ("open", "fsync", "replace", "listdir"):
            monkeypatch.setattr(os, name, self.before(f"os.{name}", getattr(os, name)))
        for name in ("unlink", "mkdir"):
            monkeypatch.setattr(Path, name, self.before(name, getattr(Path, name)))

    def before(self, name: str, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.count(name)
            return function(*arguments, **options)

        return call

    def count(self, name: str) -> None:
        if self.failing is None:
            return
        self.failing -= 1
        self.calls.append(name)
        if self.failing == -1:
            raise OSError(self.number, os.strerror(self.number))

    @contextmanager
    def at(self, point: int) -> Iterator[None]:
        self.calls, self.failing = [], point
        try:
            yield
        finally:
            self.failing = None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EINVAL])
@pytest.mark.parametrize("earlier", [0, 1, 3])
def test_after_a_fault_at_any_point_a_whole_checkpoint_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: int, number: int
) -> None:
    faults = Faults(monkeypatch, number)
    last = 100 * earlier
    reached: set[str] = set()
    written = 0
    for point in itertools.count():
        folder = tmp_path / str(point)
        fill(folder, *range(100, last + 1, 100))
        error = None
        with faults.at(point):
            try:
                fill(folder, last + 100, keep=2)
            except CheckpointError as caught:
                error = str(caught)
        done = len(faults.calls) <= point
        reached |= set(faults.calls)
        cannot_sync_folders = number == errno.EINVAL and faults.calls[point - 1 : point + 1] == ["os.open", "os.fsync"]
        found = newest(folder, fail)
        if error is None:
            assert is_of(found, last + 100)
            assert done or cannot_sync_folders
        else:
            assert not cannot_sync_folders
            assert str(folder) in error and os.strerror(number) in error
            assert is_of(found, last + 100) or (is_of(found, last) if earlier else found is None)
            assert [name for name in names(folder) if name.endswith(".part")] == []
            if "is written" in error:
                written += 1
                assert is_of(found, last + 100)
            else:
                assert "the earlier checkpoints are untouched" in error
                assert set(pairs(*range(100, last + 1, 100))) <= set(names(folder))
        fill(folder, last + 100, keep=2)
        assert names(folder) == (pairs(last, last + 100) if earlier else pairs(100))
        if done:
            break
    assert point >= 13 and reached >= {"open", "write", "flush", "os.open", "os.fsync", "os.replace", "mkdir"}
    assert written == (7 if earlier == 3 else 3)  # faults while two old ones, or none, are looked for and removed


def test_an_interrupt_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, 1)

    def interrupt(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fill(tmp_path, 2)
    assert names(tmp_path) == pairs(1)


def test_everything_is_on_the_disk_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of calls: content, then name, arrays before JSON; what is old goes last."""
    fill(tmp_path, 1)
    faults = Faults(monkeypatch, 0)
    with faults.at(10**6):
        fill(tmp_path, 2, keep=1)
    written = ["os.open", "open", "write", "flush", "os.fsync", "os.replace", "os.open", "os.fsync"]
    assert faults.calls == ["mkdir", *written, *written, "os.listdir", "unlink", "os.listdir", "unlink", "os.listdir"]


def test_a_disk_that_takes_no_more(tmp_path: Path) -> None:
    """A real limit of the operating system on the size of files."""
    code = """
import resource, sys
import numpy as np
from refattn.train.checkpoint import CheckpointError, newest, save
folder = sys.argv[1]
save(folder, 1, {"w": np.ones(10)}, {})
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
for arrays, facts in (({"w": np.ones(1000)}, {}), ({"w": np.ones(10)}, {"long": "x" * 5000})):
    try:
        save(folder, 2, arrays, facts)
    except CheckpointError as error:
        print(error)
    found = newest(folder, print)
    print(found.step, found.arrays["w"].size)
"""
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    untouched = "File too large; the earlier checkpoints are untouched"
    assert result.stdout.splitlines() == [
        f"{tmp_path}/step-00000002.safetensors: {untouched}",
        "1 10",
        f"{tmp_path}/step-00000002.json: {untouched}",
        "1 10",
    ]
    assert names(tmp_path) == sorted([*pairs(1), "step-00000002.safetensors"])


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError) as caught:
        fill(tmp_path / "file" / "run", 1)
    assert str(caught.value).startswith(f"{tmp_path}/file/run: Not a directory; the earlier")


def test_a_folder_that_may_not_be_written() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fill(folder, 1)
        folder.chmod(0o555)
        user = os.geteuid()
        try:
            if user == 0:
                os.seteuid(65534)
            with pytest.raises(CheckpointError) as caught:
                fill(folder, 2)
        except PermissionError as error:
            pytest.skip(f"this root may not become another user: {error}")
        finally:
            os.seteuid(user)
            folder.chmod(0o755)
        assert f"{folder}/step-00000002.safetensors: Permission denied; the earlier" in str(caught.value)
        assert isinstance(caught.value.__cause__, PermissionError)
        assert names(folder) == pairs(1)


# --- processes that are killed


@pytest.mark.parametrize(
    ("mode", "count"), [("points", 80), ("random", 20), pytest.param("random", 100, marks=pytest.mark.slow)]
)
def test_a_killed_process_leaves_a_whole_checkpoint(tmp_path: Path, mode: str, count: int) -> None:
    """Killed at each call that changes the disk in turn, or at any moment: nothing that was saved is lost."""
    result = subprocess.run(
        [sys.executable, str(KILLED), str(tmp_path), mode, str(count)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"{count} deaths, ")
    steps = int(result.stdout.split()[-2])
    assert steps > (80 if mode == "points" else 0)


# --- single files


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    write_atomically(path, b"one")
    write_atomically(str(path), b"two")
    assert path.read_bytes() == b"two" and names(tmp_path) == ["config.json"]


def test_a_file_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    write_atomically(path, b"one")
    faults = Faults(monkeypatch, errno.ENOSPC)
    for point in range(5):
        with faults.at(point), pytest.raises(OSError) as caught:
            write_atomically(path, b"two")
        assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(path)
        assert path.read_bytes() == b"one" and names(tmp_path) == ["config.json"]
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomically(tmp_path / "folder", b"x")
    assert names(tmp_path) == ["config.json", "folder"]


# --- what is refused


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"step": -1}, ValueError, "step: got -1, needs a whole number of at least 0"),
        ({"keep": 0}, ValueError, "keep: got 0, needs a whole number of at least 1"),
        ({"arrays": {"a": [1.0]}}, TypeError, "arrays: got list for 'a', needs a NumPy array"),
        ({"arrays": {"a": np.asarray(["x"])}}, TypeError, "arrays: got dtype <U1 for 'a', needs booleans or numbers"),
        ({"arrays": {"a": np.asarray([None])}}, TypeError, "arrays: got dtype object for 'a', needs booleans"),
        ({"arrays": {"a": np.asarray([1j])}}, TypeError, "arrays: got dtype complex128 for 'a', needs booleans"),
        (
            {"arrays": {"__metadata__": np.ones(1)}},
            ValueError,
            "arrays: got the name '__metadata__', which safetensors",
        ),
        ({"facts": {"loss": math.nan}}, ValueError, "facts: got what JSON cannot hold: "),
        ({"facts": {"x": np.float32(1.0)}}, TypeError, "facts: got what JSON cannot hold: Object of type float32"),
    ],
)
def test_what_is_refused(tmp_path: Path, arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    given_arguments: dict[str, Any] = {"step": 1, "arrays": {}, "facts": {}} | arguments
    with pytest.raises(error) as caught:
        save(tmp_path / "run", **given_arguments)
    assert str(caught.value).startswith(text)
    assert not (tmp_path / "run").exists()
