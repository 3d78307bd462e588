"""Higher-order attention of orders 0 to 4 and alpha 1 to 5, learning a text and associative recall.

    python -m docs.experiments.higher_order run     # at most 20 minutes on two cores; goes on where it was stopped
    python -m docs.experiments.higher_order divide  # what normalisation does, at four times the training; so does it

Beside it softmax attention and the two linear attentions of `linear_attention` learn the same, each with three seeds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from docs.experiments import normalisers
from docs.experiments.runs import Run, choice, seeds_option, steps_option, trains
from docs.experiments.tasks import Recall, Task, Text
from docs.experiments.training import Plan

RESULTS = Path(__file__).with_name("higher_order.jsonl")

ORDERS = (1, 2, 3, 4)
LIMIT = 20
"""An order at which the polynomial is the exponential, for all scores that alpha = 1 allows."""

ALPHAS = (1.0, 2.0, 3.0, 4.0, 5.0)
SEEDS = (0, 1, 2)
FEW: dict[str, Sequence[int]] = {"text": (0, 1), "recall": (0, 1)}
"""Seeds of the models that divide by something else, which are trained four times as long."""

TASKS: dict[str, tuple[Task, Plan]] = {
    "text": (
        Text(context=64),
        Plan(
            width=64,
            heads=2,
            layers=2,
            mlp=True,
            embedding=0.02,
            steps=300,
            batch=16,
            learning_rate=3e-3,
            warmup=30,
            weight_decay=0.1,
        ),
    ),
    "recall": (
        Recall(pairs=6, keys=16, values=16),
        Plan(
            width=32,
            heads=1,
            layers=2,
            mlp=False,
            embedding=0.16,
            steps=1200,
            batch=64,
            learning_rate=3e-3,
            warmup=30,
            weight_decay=0.0,
        ),
    ),
}

LINEAR = "docs.experiments.baselines:LINEAR_ATTENTION"

MECHANISMS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "softmax": [("softmax", {})],
    "elu": [(LINEAR, {"kind": "elu"})],
    "separate": [(LINEAR, {"kind": "separate"})],
    # Weights of even orders are above 0, and this normaliser then changes nothing. Order 0 knows no alpha.
    "higher_order": [
        ("higher_order", {"order": order, "alpha": alpha, "normaliser": "signed"})
        for order, alpha in [(0, 3.0), *itertools.product(ORDERS, ALPHAS)]
    ],
    # The same as order 1, alpha 1, but for what divides: is it that which hurts?
    "floor": [
        ("higher_order", {"order": 1, "alpha": 1.0, "normaliser": normaliser})
        for normaliser in ("signed(eps=1.0)", "clamp(eps=32.0)")
    ],
    "limit": [("higher_order", {"order": LIMIT, "alpha": alpha, "normaliser": "signed"}) for alpha in ALPHAS],
}


def grid(names: Sequence[str], tasks: Sequence[str], seeds: Sequence[int], steps: int | None = None) -> list[Run]:
    """Return the runs of some mechanisms, one mechanism after the other, and of each one seed after the other."""
    return [
        Run(mechanism, task, plan if steps is None else replace(plan, steps=steps), seed, options)
        for name in names
        for seed in seeds
        for task, plan in (TASKS[task] for task in tasks)
        for mechanism, options in MECHANISMS[name]
    ]


def divided() -> list[Run]:
    """Return the longer runs, of models that divide by something else than their sums."""
    return normalisers.divided((*TASKS[task], seeds) for task, seeds in FEW.items())


main = click.Group(help=__doc__)


@trains(main, RESULTS, "Train all models that have no line in the results yet.")
@seeds_option(len(SEEDS))
@steps_option()
@choice("--task", "tasks", TASKS)
@choice("--mechanism", "names", MECHANISMS)
def run(seeds: int, steps: int | None, tasks: tuple[str, ...], names: tuple[str, ...]) -> list[Run]:
    """Train all models that have no line in the results yet."""
    return grid(names or tuple(MECHANISMS), tasks or tuple(TASKS), range(seeds), steps)


@trains(main, RESULTS, "Train models that divide by something else than their sums, four times as long.")
def divide() -> list[Run]:
    """Train models that divide by something else than their sums, four times as long."""
    return divided()


if __name__ == "__main__":
    main()
