"""How often the sums that higher-order attention divides by are near 0 or below, in a model before its training."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from docs.experiments.page import table
from docs.experiments.tasks import Task
from docs.experiments.training import Plan, fresh
from refattn import model

SMALL = 0.1


def small_sums(task: Task, plan: Plan, order: int, alpha: float) -> float:
    """Return the part of all queries whose weights sum to less than `SMALL` times the number of their keys."""
    params = fresh("higher_order", {"order": order, "alpha": alpha, "normaliser": "signed"}, task, plan, 0)
    _, saved = model.forward(params, task.batch(plan.batch, seed=0, step=1).inputs)
    sums = np.concatenate([layer.block.core.normaliser for layer in saved.layers])  # (layer and batch, head, query)
    return float(np.mean(sums < SMALL * np.arange(1, task.context + 1)))


def small_sums_table(task: Task, plan: Plan, orders: Iterable[int], alphas: Iterable[float]) -> str:
    """Return the table of the page."""
    alphas = list(alphas)
    rows = [
        [f"order {order}", *(f"{100 * small_sums(task, plan, order, alpha):.1f} %" for alpha in alphas)]
        for order in orders
    ]
    return table([["", *(f"alpha = {alpha:g}" for alpha in alphas)], *rows])
