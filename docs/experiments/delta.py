"""Linear recurrences in small models: what gates, the delta rule, decays of channels and momentum buy.

    python -m docs.experiments.delta run     # some 16 minutes of one core; goes on where it was stopped

Every model learns each task with three seeds, and with the first of them again, four times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from docs.experiments.runs import Run, choice, steps_option, trains
from docs.experiments.tasks import Overwriting, Parity, Task, Text
from docs.experiments.training import Plan

RESULTS = Path(__file__).with_name("delta.jsonl")

SEEDS = (0, 1, 2)
LONGER, LONGER_SEEDS = 4, (0,)
"""How many times as long the second training is, and the seeds that have one."""

PLAN = Plan(
    width=32,
    heads=1,
    layers=1,
    mlp=False,
    embedding=0.16,
    steps=300,
    batch=32,
    learning_rate=1e-2,
    warmup=30,
    weight_decay=0.0,
)

TASKS: dict[str, tuple[Task, Plan]] = {
    "overwriting": (Overwriting(pairs=4, rounds=3), PLAN),
    "parity": (Parity(context=24), replace(PLAN, heads=4, embedding=0.5, learning_rate=2e-2)),
    "text": (
        Text(context=32, every=64),
        replace(PLAN, width=48, layers=2, embedding=0.02, steps=150, batch=16, learning_rate=3e-3, weight_decay=0.1),
    ),
}
"""By name: what is learnt, and how."""

LAYER: dict[str, Any] = {"conv": 4}
"""What the layers of all rules have: convolutions of four taps, and the defaults, normalised keys and heads."""

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax", {}),
    "linear": ("delta", {"rule": "linear", **LAYER}),
    "gated": ("delta", {"rule": "gated", **LAYER}),
    "gated by channel": ("delta", {"rule": "gated", "decay": "channel", **LAYER}),
    "delta": ("delta", {"rule": "delta", **LAYER}),
    "gated delta": ("delta", {"rule": "gated_delta", **LAYER}),
    "KDA": ("delta", {"rule": "gated_delta", "decay": "channel", **LAYER}),
    "momentum delta": ("delta", {"rule": "momentum", **LAYER}),
    "delta, beta to 2": ("delta", {"rule": "delta", "beta_max": 2.0, **LAYER}),
}
"""By name: the mechanism, and the options of its block."""


def grid(
    names: Sequence[str], tasks: Sequence[str], seeds: Sequence[int], steps: int | None = None, longer: int = 1
) -> list[Run]:
    """Return the runs of some models on some tasks, one seed after the other."""
    return [_run(name, task, seed, steps, longer) for seed in seeds for task in tasks for name in names]


def whole() -> list[Run]:
    """Return all runs of the experiment: the three seeds, and then the longer ones."""
    names, tasks = tuple(MODELS), tuple(TASKS)
    return grid(names, tasks, SEEDS) + grid(names, tasks, LONGER_SEEDS, longer=LONGER)


def _run(name: str, task: str, seed: int, steps: int | None, longer: int) -> Run:
    (mechanism, options), (what, plan) = MODELS[name], TASKS[task]
    plan = replace(plan, steps=longer * (plan.steps if steps is None else steps))
    return Run(mechanism, what, plan, seed, options)


main = click.Group(help=__doc__)


@trains(main, RESULTS, "Train all models that have no line in the results yet.")
@steps_option()
@choice("--task", "tasks", TASKS)
@choice("--model", "names", MODELS)
def run(steps: int | None, tasks: tuple[str, ...], names: tuple[str, ...]) -> list[Run]:
    """Train all models that have no line in the results yet. A part is of one seed."""
    part = steps is not None or tasks or names
    return grid(names or tuple(MODELS), tasks or tuple(TASKS), SEEDS[:1], steps) if part else whole()


if __name__ == "__main__":
    main()
