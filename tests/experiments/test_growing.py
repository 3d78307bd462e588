"""The experiment on growth: its script, what it counts, its results, and that its page says what these say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner, Result

import refattn as ra
from docs.experiments import flops, growing, teacher
from docs.experiments.growing import RESULTS, SEEDS, TASKS, grid
from docs.experiments.runs import found
from tests.experiments.stored import grouped, mean, ratios, scores
from tests.rows import holds

WHOLE = grid(tuple(TASKS), SEEDS)


ROOT = Path(__file__).parents[2]


def script(*words: str) -> Result:
    return CliRunner().invoke(growing.main, list(words))


def test_operations_are_those_of_the_matrix_products() -> None:
    """Twice the size of what a product gives, as a trace has it, times the length of its sums."""
    block = teacher.BLOCK
    for bias in (0, 1):
        config = block.Config(width=6, heads=2, head_width=2, value_width=5, bias=bool(bias))
        params = block.init(config, seed=0, like=np.zeros(1))
        with ra.trace() as t:
            block.forward(params, block.module.State(np.cos(np.arange(42.0)).reshape(1, 7, 6)), ra.Context())
        sums = {"GROW.queries": 6 + bias, "GROW.keys": 6 + bias, "GROW.values": 6 + bias, "SM.1": 2, "SM.5": 7}
        sums |= {"GROW.next": 2 * 5 + bias}
        assert flops.block(config, 7) == sum(2 * t[id].size * length for id, length in sums.items())


def results(task: str) -> dict[str, Any]:
    return grouped(found(WHOLE, RESULTS), task)


def test_what_growth_is_worth_on_the_teacher_task() -> None:
    """Of the committed results, condition 10: each first growth, and the means of four seeds after as many steps."""
    known = results("condition 10")
    assert max(ratios(known, "optimal", 0)) <= 0.7 and max(ratios(known, "damped", 0)) <= 0.7
    said = f"where the corrected step takes off {1.0 - mean(ratios(known, 'optimal', 0)):.2f} of it"
    assert said in holds("growing", "its step lowers the loss")
    assert said.removeprefix("where ") in (ROOT / "docs" / "deviations.md").read_text(encoding="utf-8")
    least = mean(scores(known, "optimal", "steps"))
    for way in ("random", "net2wider"):
        assert mean(scores(known, way, "steps")) >= 3.0 * least
    assert mean(ratios(known, "report", 0)) > 1.0 > max(ratios(known, "frobenius", 0))
    said = "loss rises on the teacher task, in the mean of four seeds"
    assert len(ratios(known, "report", 0)) == 4 and said in holds("growing", "its step lowers the loss")


def test_where_growth_is_worth_nothing() -> None:
    """Of the committed results: isotropic inputs, and the text where the metric is not damped."""
    known = results("condition 1")
    assert mean(scores(known, "optimal", "steps")) > 10.0 * mean(scores(known, "scratch", "steps"))
    known = results("text")
    means = {way: np.mean(scores(known, way, "steps")) for way in known}
    assert min(means["optimal"], means["additive"]) > means["scratch"] + 0.1
    assert means["damped"] < means["optimal"] - 0.1
    assert min(np.mean(scores(known, way, "operations")) for way in known) == np.mean(
        scores(known, "narrow", "operations")
    )
