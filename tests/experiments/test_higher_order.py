"""The experiment on higher-order attention: its script, its results, and that its page says what these say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from docs.experiments import higher_order, normalisers, runs
from docs.experiments.higher_order import MECHANISMS, PAGE, RESULTS, SEEDS, TASKS, divided, grid
from docs.experiments.normalisers import small_sums
from docs.experiments.page import put, ranged, table
from docs.experiments.runs import found, read

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


def test_nothing_is_run_that_has_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.jsonl"
    (run,) = grid(["softmax"], ["recall"], [0], 3)
    path.write_text(json.dumps({"run": run.to_json(), "result": {"bits": 1.0}}) + "\n")
    monkeypatch.setattr(runs, "_lines", lambda missing, where: iter(missing))
    assert runs.run_all([run], path)[0]["result"] == {"bits": 1.0}


def test_a_broken_line_within_the_results_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"run": \n{"run": {}}\n')
    with pytest.raises(ValueError, match="results.jsonl: line 1 is no JSON"):
        read(path)


def test_all_runs_of_the_grid_differ() -> None:
    keys = {json.dumps(run.to_json(), sort_keys=True) for run in WHOLE}
    assert len(keys) == len(WHOLE) == 2 * 3 * (3 + 1 + 5 * 5 + 2)


def test_the_page_says_what_the_results_say(tmp_path: Path) -> None:
    from docs.experiments import higher_order_page

    lines = found(WHOLE, RESULTS)
    text = PAGE.read_text(encoding="utf-8")
    copy = tmp_path / "page.md"
    copy.write_text(text, encoding="utf-8")
    more = {"divisors": normalisers.divisors_table(found(divided(), RESULTS), higher_order_page.SCORES)}
    put(copy, higher_order_page.tables(lines) | more)
    assert copy.read_text(encoding="utf-8") == text
    higher_order_page.draw(lines, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes()[1:4] == b"PNG"


def test_what_normalisation_does() -> None:
    """Of the committed results, at four times the training: what the page says of divisors."""
    wanted = divided()
    results: dict[Any, list[Any]] = {}
    for run, line in zip(wanted, found(wanted, RESULTS), strict=True):
        key = (type(run.task).__name__.lower(), run.options["order"], run.options["alpha"], run.options["normaliser"])
        results.setdefault(key, []).append(line["result"])

    def bits(*key: Any) -> list[float]:
        return [result["bits"] for result in results["text", *key]]

    # Order 1 is as good where it is not normalised at all, and is not where it is.
    for a, b in zip(bits(1, 1.0, "clamp(eps=32.0)"), bits(1, 1.0, "clamp(eps=512.0)"), strict=True):
        assert abs(a - b) < 0.03
    assert all(result["replaced"] == 1.0 for result in results["text", 1, 1.0, "clamp(eps=512.0)"])
    assert min(bits(1, 1.0, "signed")) > max(bits(1, 1.0, "clamp(eps=512.0)")) + 0.3
    # Order 2, normalised, is better than without, and than order 1 without.
    assert max(bits(2, 1.0, "signed")) < min(bits(2, 1.0, "clamp(eps=2048.0)"))
    assert max(bits(2, 1.0, "signed")) < min(bits(1, 1.0, "clamp(eps=32.0)")) - 0.05
    assert all(result["accuracy"] > 0.99 for result in results["recall", 1, 1.0, "clamp(eps=32.0)"])
    assert all(result["replaced"] > 0.99 for result in results["recall", 1, 1.0, "clamp(eps=32.0)"])


def test_the_parts_of_sums() -> None:
    from docs.experiments.training import fresh

    task, plan = TASKS["recall"]
    options = {"order": 1, "alpha": 1.0, "normaliser": "clamp(eps=512.0)"}
    batch = task.batch(4, seed=0, step=1)
    params = fresh("higher_order", options, task, plan, 0)
    assert normalisers.parts_of_sums(params, batch, options)["replaced"] == 1.0
    signed = options | {"normaliser": "signed"}
    none = normalisers.parts_of_sums(fresh("higher_order", signed, task, plan, 0), batch, signed)
    assert none["replaced"] == 0.0 and 0.0 <= none["small"] < 0.5


def test_the_tables() -> None:
    from docs.experiments import higher_order_page

    def line(task: str, options: dict[str, Any], bits: float | None) -> dict[str, Any]:
        norms = [[9.0, 9.0, 9.0, 9.0], [1.0, 2.0, 4.0, 6.0], [1.0, 2.0, 9.0, 10.0]]
        result = {"bits": bits, "diverged": None if bits else "step 3", "norms": norms}
        return {"run": {"mechanism": "softmax", "options": options, "task": {"name": task}}, "result": result}

    order = {"order": 2, "alpha": 1.0}
    lines = [line("text", order, 2.0), line("text", order, 3.0), line("text", {}, None), line("recall", order, 9.0)]
    groups = higher_order_page.grouped(lines, "text")
    assert list(groups) == [("order 2", 1.0), ("softmax", None)]
    assert higher_order_page.scores(groups["order 2", 1.0], "text") == "2.500 [2.000, 3.000]"
    assert higher_order_page.scores(groups["softmax", None], "text") == "not finite: 1"
    # the geometric mean of 4 and 9, and 10 over 2
    assert higher_order_page.steady(groups["order 2", 1.0]) == "6.00, 5.0"


@pytest.mark.parametrize(("order", "alpha", "some"), [(1, 1.0, True), (1, 5.0, False), (2, 1.0, False), (3, 1.0, True)])
def test_only_odd_orders_with_a_small_alpha_have_sums_near_0(order: int, alpha: float, some: bool) -> None:
    found = small_sums(*TASKS["text"], order, alpha)
    assert 0.0 < found < 0.1 if some else found == 0.0


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
