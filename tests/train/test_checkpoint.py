"""Checkpoints: round trips, which ones stay, damaged files, and what is refused."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refattn import files
from refattn.train import checkpoint
from refattn.train.checkpoint import CheckpointError, newest, save
from tests.train.checkpoints import arrays, fail, fill, is_of, names, pairs, same

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


def test_equal_arrays_and_facts_give_equal_bytes(tmp_path: Path) -> None:
    given_facts = {"b": [1, 2.5], "a": {"y": None, "x": "text"}}
    turned = {"a": {"x": "text", "y": None}, "b": (1, 2.5)}
    save(tmp_path / "one", 7, arrays(7), given_facts)
    save(tmp_path / "two", 7, dict(reversed(arrays(7).items())), turned)
    assert names(tmp_path / "one") == names(tmp_path / "two") == pairs(7)
    for name in pairs(7):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


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


NO_JSON = "is no JSON, or cut off"
OTHER_BYTES = "its bytes do not match the digest"
DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "empty json": ("json", lambda path: path.write_bytes(b""), NO_JSON),
    "list": ("json", lambda path: path.write_text("[1, 2]"), "the file: got list, needs an object"),
    "not finite": ("json", lambda path: edit(path, sign=False, bytes=math.nan), "bytes: got nan, needs a whole number"),
    "other fact": ("json", lambda path: edit(path, sign=False, facts={"step": 9}), OTHER_BYTES),
    "other step": ("json", lambda path: edit(path, step=200), "is of step 200"),
    "other format": ("json", lambda path: edit(path, format=2), "has format 2, this version reads 1"),
    "no file": ("json", lambda path: (path.unlink(), path.mkdir()), "is no regular file"),  # type: ignore[func-returns-value]
    "no arrays": ("safetensors", lambda path: path.unlink(), "No such file or directory"),
    "short arrays": ("safetensors", lambda path: path.write_bytes(bytes(120)), "truncated: 120 bytes of SIZE"),
    "long arrays": ("safetensors", lambda path: path.write_bytes(path.read_bytes() + b"\0"), "got "),
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


# --- what is refused


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"step": -1}, ValueError, "step: got -1, needs a whole number of at least 0"),
        ({"keep": 0}, ValueError, "keep: got 0, needs a whole number of at least 1"),
        ({"arrays": {"a": [1.0]}}, TypeError, "arrays: got list for 'a', needs a NumPy array"),
        ({"arrays": {"a": np.asarray(["x"])}}, TypeError, "arrays: got dtype <U1 for 'a', needs booleans or numbers"),
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
