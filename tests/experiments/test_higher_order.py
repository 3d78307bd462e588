"""The experiment on higher-order attention: its script, its results, and that its page says what these say."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from docs.experiments import higher_order, normalisers
from docs.experiments.higher_order import MECHANISMS, PAGE, RESULTS, SEEDS, TASKS, divided, grid
from docs.experiments.page import put, ranged, table
from docs.experiments.runs import found, read
from tests.experiments.pages import says
from tests.rows import holds

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


def test_the_page_says_what_the_results_say(tmp_path: Path) -> None:
    from docs.experiments import higher_order_page

    lines = found(WHOLE, RESULTS)
    more = {"divisors": normalisers.divisors_table(found(divided(), RESULTS), higher_order_page.SCORES)}
    assert says(PAGE, higher_order_page.tables(lines) | more, tmp_path)
    models = [of for name in MECHANISMS for of, options in MECHANISMS[name] if "order" not in options]
    assert Counter(models) == {"softmax": 1, higher_order.LINEAR: 2}
    said = "orders and alphas beside softmax and two linear attentions: docs/experiments/higher_order.md"
    assert holds("higher_order", "announced, for it was tested on random data alone") == said
    higher_order_page.draw(lines, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes()[1:4] == b"PNG"


def test_what_pages_are_made_of(tmp_path: Path) -> None:
    assert ranged([1.0, 2.0, 6.0], 1) == "3.0 [1.0, 6.0]"
    assert table([["", "a"], ["b", "1"]]) == "|  | a |\n| --- | --- |\n| b | 1 |"
    page = tmp_path / "page.md"
    page.write_text("x\n<!-- one -->\nold\n<!-- /one -->\ny\n")
    put(page, {"one": "new"})
    put(page, {"one": "new"})
    assert page.read_text() == "x\n<!-- one -->\n\nnew\n\n<!-- /one -->\ny\n"
    with pytest.raises(ValueError, match="no place for 'two', needs the lines <!-- two --> and <!-- /two -->"):
        put(page, {"two": "new"})
