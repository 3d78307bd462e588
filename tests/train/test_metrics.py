"""Metrics: one line for each step, also after a run was killed and went on from an earlier one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refattn.train import metrics
from refattn.train.metrics import Metrics, cut, read


def write(path: Path, *steps: int) -> None:
    with Metrics(path) as out:
        for step in steps:
            out.append({"step": step, "loss": 1.0 / step})


def steps(path: Path) -> list[int]:
    return [row["step"] for row in read(path)]


rows = st.lists(
    st.dictionaries(
        st.text(max_size=5).filter(lambda key: key not in metrics._SCHEMA),
        st.floats(allow_nan=False, allow_infinity=False) | st.text() | st.none() | st.integers(),
    ),
    max_size=5,
).map(lambda found: [row | {"step": n} for n, row in enumerate(found)])


@given(rows=rows)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]) -> None:
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    with Metrics(path) as out:
        for row in rows:
            out.append(row)
    assert read(path) == rows
    assert len(path.read_bytes().split(b"\n")) == len(rows) + 1


@given(step=st.integers(0, 6), lost=st.integers(0, 200))
def test_a_file_that_was_cut_off_anywhere(tmp_path_factory: pytest.TempPathFactory, step: int, lost: int) -> None:
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    write(path, 1, 2, 3, 4, 5)
    whole = path.read_bytes()
    data = whole[: max(0, len(whole) - lost)]
    path.write_bytes(data)
    # A line is there as soon as its closing bracket is.
    there = [n for n in range(1, 6) if n <= data.count(b"}")]
    assert steps(path) == there
    cut(path, step)
    assert steps(path) == [n for n in there if n <= step]
    write(path, step + 1)
    assert steps(path)[-1] == step + 1 and path.read_bytes().endswith(b"\n")


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for broken in ('{"step": 2, "lo', "[]", '{"loss": 1.0}', '{"step": "2"}', "", "\udcff"):
        lines = ['{"step": 1}', broken, '{"step": 3}', ""]
        path.write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))
        before = path.read_bytes()
        for function in (read, lambda path: cut(path, 5)):
            with pytest.raises(ValueError, match=r"metrics.jsonl: line 2 is no JSON object with a step: "):
                function(path)
        assert path.read_bytes() == before


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with Metrics(path) as out:
        out.append({"step": 1, "loss": math.nan, "norms": [math.inf, 1.0], "more": {"x": (-math.inf,)}})
        out.append({"step": 2, "loss": np.float64(2.0)})
    assert [json.loads(line) for line in path.read_text().splitlines()] == read(path)
    assert read(path) == [
        {"step": 1, "loss": None, "norms": [None, 1.0], "more": {"x": [None]}},
        {"step": 2, "loss": 2.0},
    ]


def test_what_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with Metrics(path) as out:
        with pytest.raises(ValueError, match="^row: got the keys 'loss', needs 'step' among them"):
            out.append({"loss": 1.0})
        with pytest.raises(TypeError, match=r"^row\['step'\]: got 1.5, needs a whole number"):
            out.append({"step": 1.5})
        with pytest.raises(TypeError, match="float32"):
            out.append({"step": 1, "loss": np.float32(1.0)})
        with pytest.raises(ValueError, match="^loss: got 'low', needs a "):  # what `read` would refuse
            out.append({"step": 1, "loss": "low"})
    assert path.read_bytes() == b""
    with pytest.raises(ValueError, match="^step: got -1, needs"):
        metrics.cut(path, -1)
