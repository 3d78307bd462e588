"""The experiment on linear recurrences: its script, its results, and that its page says what these say."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from docs.experiments import delta
from docs.experiments.delta import LONGER, LONGER_SEEDS, MODELS, PAGE, RESULTS, SEEDS, TASKS, grid, whole
from docs.experiments.page import put
from docs.experiments.runs import found, read


def test_every_rule_learns_every_task_and_longer_once() -> None:
    runs = [run.to_json() for run in whole()]
    assert len({json.dumps(run, sort_keys=True) for run in runs}) == len(runs)
    assert len(runs) == len(MODELS) * len(TASKS) * (len(SEEDS) + len(LONGER_SEEDS))
    assert all(run["plan"]["steps"] == LONGER * TASKS[_task(run)][1].steps for run in runs[-len(MODELS) * 3 :])


def _task(run: dict[str, dict[str, str]]) -> str:
    return run["task"]["name"]


def test_the_script(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    words = ["--steps", "2", "--jobs", "1", "--task", "parity", "--model", "delta, beta to 2"]
    done = CliRunner().invoke(delta.main, ["run", "--results", str(path), *words])
    assert done.exit_code == 0, done.output
    (line,) = read(path)
    assert line["run"]["options"] == {"rule": "delta", "beta_max": 2.0, "conv": 4}
    assert line["result"]["diverged"] is None


def test_the_page_says_what_the_results_say(tmp_path: Path) -> None:
    from docs.experiments import delta_page

    lines = found(whole(), RESULTS)
    for (task, name), results in delta_page.grouped(lines, TASKS, MODELS).items():
        wanted = [*grid([name], [task], SEEDS), *grid([name], [task], LONGER_SEEDS, longer=LONGER)]
        assert [line["result"] for line in found(wanted, RESULTS)] == results
    text = PAGE.read_text(encoding="utf-8")
    copy = tmp_path / "page.md"
    copy.write_text(text, encoding="utf-8")
    put(copy, delta_page.tables(lines, TASKS, MODELS, len(SEEDS)))
    assert copy.read_text(encoding="utf-8") == text
    delta_page.draw(lines, TASKS, MODELS, len(SEEDS), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes()[1:4] == b"PNG"
