"""A run from Python: the page's example, where it goes, and what it returns."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

import refattn as ra
from tests.train.runs import write_text

PAGE = Path(__file__).parents[2] / "docs" / "training.md"


def test_the_example_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """It runs as it stands, in fewer and smaller steps."""
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"## From Python\n.*?```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    write_text(tmp_path)
    small = 'data="text.txt", width=8, heads=2, layers=1, context=16, steps=3, warmup=1, sample_bytes=3, score_bytes=64'
    code, count = re.subn(r'"delta", .*?\)', f'"delta", {small})', code, count=1)
    assert count == 1
    names: dict[str, Any] = {}
    exec(code, names)
    result = names["result"]
    assert result.folder == Path("my_run") and [row["step"] for row in result.rows] == [1, 2, 3]
    assert names["bits"][0] == pytest.approx(8.0, abs=0.5) and [*names["scores"]] == [3]
    told = capsys.readouterr()
    assert "step 3 of 3: loss" in told.err and "bits per byte; held out" in told.out


def test_a_run_without_a_folder_gets_the_next_free_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path)
    settings = ra.train.Settings(
        "softmax", data="text.txt", width=4, heads=1, layers=1, context=8, steps=2, warmup=1, batch=2, sample_bytes=0
    )
    lines: list[str] = []

    class Mine:
        def say(self, text: str) -> None:
            lines.append(text)

        def step(self, row: Any, steps: int) -> None:
            lines.append(f"{row['step']} of {steps}")

    first, second = (ra.train.run(settings, report=Mine()) for _ in range(2))
    assert (first.folder, second.folder) == (Path("runs/softmax"), Path("runs/softmax-2"))
    assert "2 of 2" in lines
    assert [row["loss"] for row in first.rows] == [row["loss"] for row in second.rows]
    assert all(math.isfinite(row["loss"]) for row in first.rows)
    assert ra.train.run(settings, resume=True, report=Mine()).folder == second.folder
    with pytest.raises(AttributeError, match="has no attribute 'ran'"):
        getattr(ra.train, "ran")  # noqa: B009
