"""What higher-order attention divides by: how often its sums are near 0, and what comes of dividing by others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from docs.experiments.runs import Run
from docs.experiments.tasks import Batch, Task
from docs.experiments.training import Plan, fresh, trained
from refattn import model
from refattn.mechanisms.higher_order.options import NORMALISERS
from refattn.mechanisms.option_kinds import choose

SMALL = 0.1

LONGER = 4
"""How many times as long these models are trained as those of the grid."""

DIVISORS: dict[tuple[int, float], tuple[str, ...]] = {
    (1, 1.0): ("signed", "clamp(eps=32.0)", "clamp(eps=512.0)"),
    (2, 1.0): ("signed", "clamp(eps=32.0)", "clamp(eps=2048.0)"),
    (1, 5.0): ("signed", "clamp(eps=32.0)"),
}
"""By order and alpha: the last of each with alpha = 1 is above all sums that there can be, and so a constant."""


class Divided(Run):
    """A training whose result says, too, by what the trained model divides."""

    def result(self) -> dict[str, Any]:
        """Train, and look at the sums of the first batch that is held out."""
        params, found = trained(self.mechanism, self.options, self.task, self.plan, self.seed)
        return found | parts_of_sums(params, next(iter(self.task.held_out())), self.options)


def divided(tasks: Iterable[tuple[Task, Plan, Iterable[int]]]) -> list[Run]:
    """Return the trainings of `DIVISORS` on some tasks, each with its plan and its seeds."""
    return [
        Divided(
            "higher_order",
            task,
            replace(plan, steps=LONGER * plan.steps),
            seed,
            {"order": order, "alpha": alpha, "normaliser": normaliser},
        )
        for task, plan, seeds in tasks
        for seed in seeds
        for (order, alpha), normalisers in DIVISORS.items()
        for normaliser in normalisers
    ]


def parts_of_sums(params: model.Params, batch: Batch, options: Mapping[str, Any]) -> dict[str, float]:
    """Return which part of all queries of all heads has another number in place of its sum, and which a small sum."""
    _, saved = model.forward(params, batch.inputs)
    sums = np.concatenate([layer.block.core.normaliser for layer in saved.layers])  # (layer and batch, head, query)
    normaliser: Any = choose("normaliser", options["normaliser"], NORMALISERS)
    moved = np.abs(sums) <= normaliser.eps if options["normaliser"] == "signed" else sums <= normaliser.eps
    few = np.abs(sums) < SMALL * np.arange(1, batch.inputs.shape[1] + 1)
    return {"replaced": round(float(np.mean(moved)), 5), "small": round(float(np.mean(few)), 5)}


def small_sums(task: Task, plan: Plan, order: int, alpha: float) -> float:
    """Return the part of all queries whose weights sum to less than `SMALL` times the number of their keys."""
    params = fresh("higher_order", {"order": order, "alpha": alpha, "normaliser": "signed"}, task, plan, 0)
    _, saved = model.forward(params, task.batch(plan.batch, seed=0, step=1).inputs)
    sums = np.concatenate([layer.block.core.normaliser for layer in saved.layers])  # (layer and batch, head, query)
    return float(np.mean(sums < SMALL * np.arange(1, task.context + 1)))
