"""Growing attention on the teacher task and on a text: grown, against the last width from the start.

    python -m docs.experiments.growing run     # at most 15 minutes on one core; goes on where it was stopped

Every way is read at equal steps and at equal operations, which are counted from the shapes; four seeds each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from docs.experiments.growing_training import WAYS, Plan, Run, Teacher, Written
from docs.experiments.runs import choice, seeds_option, steps_option, trains

RESULTS = Path(__file__).with_name("growing.jsonl")

SEEDS = (0, 1, 2, 3)

TEACHER = Plan(
    first=2,
    columns=2,
    grows=(600, 1200, 1800),
    sequences=512,
    steps=2400,
    batch=64,
    learning_rate=3e-3,
    warmup=1,
    beta2=0.999,
    weight_decay=0.0,
    clip=None,
    every=40,
)

WRITTEN = Plan(
    first=4,
    columns=4,
    grows=(100, 200, 300),
    sequences=128,
    steps=400,
    batch=16,
    learning_rate=3e-3,
    warmup=30,
    beta2=0.95,
    weight_decay=0.1,
    clip=1.0,
    every=20,
)

SOME = ("scratch", "random", "net2wider", "gradmax", "optimal", "damped", "auto")

TASKS: dict[str, tuple[Teacher | Written, Plan, tuple[str, ...]]] = {
    "condition 10": (Teacher(10.0), TEACHER, tuple(WAYS)),
    "condition 1": (Teacher(1.0), TEACHER, SOME),
    "text": (Written(), WRITTEN, ("narrow", *SOME, "additive")),
    "condition 30": (Teacher(30.0), TEACHER, ("scratch", "net2wider", "frobenius", "optimal", "damped", "auto")),
}
"""By name: a task, what all its trainings are given, and the ways."""


def grid(tasks: Sequence[str], seeds: Sequence[int], ways: Sequence[str] = (), steps: int | None = None) -> list[Run]:
    """Return the runs of some tasks: all ways or some, one seed after the other."""
    runs = []
    for name in tasks:
        task, plan, own = TASKS[name]
        if steps is not None:
            plan = replace(plan, steps=steps, grows=tuple(steps * (n + 1) // 4 for n in range(3)), every=1)
        runs += [Run(task, way, plan, seed) for seed in seeds for way in own if not ways or way in ways]
    return runs


main = click.Group(help=__doc__)


@trains(main, RESULTS, "Train all that has no line in the results yet.")
@seeds_option(len(SEEDS))
@steps_option(4)
@choice("--task", "tasks", TASKS)
@choice("--way", "ways", WAYS)
def run(seeds: int, steps: int | None, tasks: tuple[str, ...], ways: tuple[str, ...]) -> list[Run]:
    """Train all that has no line in the results yet."""
    return grid(tasks or tuple(TASKS), range(seeds), ways, steps)


if __name__ == "__main__":
    main()
