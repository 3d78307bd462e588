"""The experiment on linear recurrences: its script, its results, and that its page says what these say."""

from __future__ import annotations

from pathlib import Path

from docs.experiments.delta import LONGER, LONGER_SEEDS, MODELS, PAGE, RESULTS, SEEDS, TASKS, grid, whole
from docs.experiments.runs import found
from tests.experiments.pages import row, says
from tests.rows import holds


def test_the_page_says_what_the_results_say(tmp_path: Path) -> None:
    from docs.experiments import delta_page

    lines = found(whole(), RESULTS)
    for (task, name), results in delta_page.grouped(lines, TASKS, MODELS).items():
        wanted = [*grid([name], [task], SEEDS), *grid([name], [task], LONGER_SEEDS, longer=LONGER)]
        assert [line["result"] for line in found(wanted, RESULTS)] == results
    assert row("delta") == delta_page.verdict(delta_page.grouped(lines, TASKS, MODELS), len(SEEDS))
    grouped = delta_page.grouped(lines, TASKS, MODELS)
    parity = {name: [each["accuracy"] for each in grouped["parity", name]] for name in ("delta", "delta, beta to 2")}
    assert "beta up to 1 does not learn parity, up to 2 does" in holds("delta", "with beta up to 2 a state may turn")
    assert max(parity["delta"]) < 0.55 and parity["delta, beta to 2"][-1] > 0.99
    assert says(PAGE, delta_page.tables(lines, TASKS, MODELS, len(SEEDS)), tmp_path)
    delta_page.draw(lines, TASKS, MODELS, len(SEEDS), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes()[1:4] == b"PNG"
