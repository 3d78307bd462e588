"""The experiment on higher-order attention: its script, its results, and that its page says what these say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from docs.experiments import higher_order
from docs.experiments.higher_order import MECHANISMS, SEEDS, TASKS, grid
from docs.experiments.runs import read

WHOLE = grid(tuple(MECHANISMS), tuple(TASKS), SEEDS)
QUICK = ["--steps", "3", "--jobs", "1", "--seeds", "1", "--task", "recall"]


def script(*words: str) -> Result:
    return CliRunner().invoke(higher_order.main, list(words))


def timeless(path: Path) -> list[Any]:
    return [line | {"result": line["result"] | {"seconds": 0}} for line in read(path)]


def test_the_script_goes_on_where_it_was_stopped_and_gives_the_same_bytes(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    names = ["--mechanism", "softmax", "--mechanism", "elu"]
    done = script("run", "--results", str(whole), *QUICK, *names)
    assert done.exit_code == 0, done.output
    assert [line["run"]["options"] for line in read(whole)] == [{}, {"kind": "elu"}]
    assert "recall softmax seed 0: " in done.output
    # The second one alone, and what a killed process leaves of the first.
    assert script("run", "--results", str(parts), *QUICK, "--mechanism", "elu").exit_code == 0
    first = parts.read_bytes()
    parts.write_bytes(first + whole.read_bytes()[:70])
    assert script("run", "--results", str(parts), *QUICK, *names).exit_code == 0
    assert timeless(parts) == timeless(whole)
    assert parts.read_bytes().splitlines()[1] == first.splitlines()[0]  # it was not run again
