"""Koopman updates of queries in small models: against attention alone, and against attention with an MLP.

    python -m docs.experiments.koopman run     # some 32 minutes of one core; goes on where it was stopped

All models of a task have the same number of parameters, to 4 per cent; each learns with three seeds. Smaller ones are
the preset tie2024 and longer paths, trained once, and once for four times as many steps. `PATHS` are no
trainings: they measure what an update leaves of a query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

import refattn as ra
from docs.experiments.koopman_paths import Path as Measured
from docs.experiments.koopman_paths import TrainedPath
from docs.experiments.runs import Job, Run, choice, found, seeds_option, steps_option, trains
from docs.experiments.tasks import Recall, Task, Text
from docs.experiments.training import Plan
from refattn.mechanisms.koopman.layer import draws

RESULTS = Path(__file__).with_name("koopman.jsonl")

SEEDS = (0, 1, 2)

RECALL = Plan(
    width=32,
    heads=1,
    layers=2,
    mlp=False,
    embedding=0.16,
    steps=800,
    batch=32,
    learning_rate=3e-3,
    warmup=30,
    weight_decay=0.0,
)

TASKS: dict[str, tuple[Task, Plan, int]] = {
    "text": (
        Text(context=32, every=32),
        replace(RECALL, width=64, heads=2, embedding=0.02, steps=300, batch=16, weight_decay=0.1),
        40,
    ),
    "recall": (Recall(pairs=6, keys=16, values=16), RECALL, 19),
    "one layer": (Recall(pairs=6, keys=16, values=16), replace(RECALL, layers=1), 20),
}
"""By name: what is learnt, the plan without MLPs, and the width at which a model with MLPs has as many parameters."""

REPEATED = "docs.experiments.baselines:REPEATED_ATTENTION"

MODELS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "attention": ("softmax", {}, False),
    "attention + MLP": ("softmax", {}, True),
    "attention twice": (REPEATED, {"updates": 2, "fit": "separable(tau=1.0)"}, False),
    "Koopman, ridge to 0": ("koopman", {"updates": 2}, False),
    "Koopman": ("koopman", {"updates": 2, "fit": "separable(tau=1.0)"}, False),
    "Koopman, 3 updates": ("koopman", {"updates": 3, "fit": "separable(tau=1.0)"}, False),
    "Koopman + MLP": ("koopman", {"updates": 2, "fit": "separable(tau=1.0)"}, True),
}
"""By name: the mechanism, the options of its block, and whether there are MLPs."""

TIE = dict(ra.mechanism("koopman").presets["tie2024"]["block"])

SMALLER: dict[str, tuple[Task, Plan]] = {
    "text": (
        Text(context=16, every=64),
        replace(RECALL, width=32, heads=2, embedding=0.02, steps=150, batch=8, weight_decay=0.1),
    ),
    "recall": (Recall(pairs=4, keys=8, values=8, judged=512), replace(RECALL, width=16, steps=200, batch=16)),
}
"""What the preset tie2024 learns: one draw serves all queries of a call, so that calls have to be small."""

UPDATES: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("softmax", {}),
    "Koopman": ("koopman", {}),
    "Koopman, 4 updates": ("koopman", {"updates": 4}),
    "Koopman, 8 updates": ("koopman", {"updates": 8}),
    "to the identity, 4 updates": ("koopman", {"updates": 4, "fit": "separable(tau=1.0)"}),
    "Tie": ("koopman", TIE),
    "Tie, 3 updates": ("koopman", TIE | {"updates": 3}),
    "Tie, 4 updates": ("koopman", TIE | {"updates": 4}),
}
"""By name, as `MODELS`, none with an MLP."""

TIMES = (1, 4)
"""How often the steps of `SMALLER` each is trained."""

ONCE = ("Koopman, 8 updates", "Tie, 3 updates", "Tie, 4 updates")
"""What is not trained for longer: a step takes too long."""

RATES, LAWS = (3e-2, 1e-2, 3e-3, 1e-3), (9.0, 3.0, 1.0, 1.0 / 3.0)
"""What is varied of the preset on the text: the rate, and b of the law Beta(1, b): the smaller, the less is near 0."""

BESIDE = ("attention", "Koopman")
"""What is trained at the same rates."""

RIDGES, TRANSITIONS = (0.001, 0.1, 1.0), (1, 2, 3, 4, 8)
"""What is measured of random numbers."""

OTHERS: dict[str, Sequence[Any]] = {
    "fit": ("stein",),
    "tau": (1,),
    "kernel": ("linear", "matern52"),
    "keys": (8, 128),
    "width": (4, 64),
}

PATHS: list[Measured] = [
    *(Measured(n, ridge, path=path) for path in ("own", "attention") for n in TRANSITIONS for ridge in RIDGES),
    *(replace(Measured(n), **{name: value}) for n in (1, 3) for name, values in OTHERS.items() for value in values),
]
"""Transitions, ridge and path; then one thing at a time is another."""


def updates_grid(seeds: Sequence[int] = SEEDS) -> list[Run]:
    """Return the runs of all `UPDATES`, one seed after the other, then those for longer."""
    return [
        Run(mechanism, task, replace(plan, steps=times * plan.steps), seed, options)
        for times in TIMES
        for seed in seeds
        for task, plan in SMALLER.values()
        for name, (mechanism, options) in UPDATES.items()
        if times == 1 or name not in ONCE
    ]


def laws_grid(seeds: Sequence[int] = SEEDS[:2]) -> dict[tuple[str, float], list[Run]]:
    """Return the runs at all `RATES`, by option or name and rate: the preset with all `LAWS`, and those of `BESIDE`."""
    task, plan = SMALLER["text"]
    kinds = {law_option(b)["draws"]: ("koopman", TIE | law_option(b)) for b in LAWS}
    return {
        (name, rate): [Run(mechanism, task, replace(plan, learning_rate=rate), seed, options) for seed in seeds]
        for name, (mechanism, options) in (kinds | {name: UPDATES[name] for name in BESIDE}).items()
        for rate in RATES
    }


def law_option(b: float) -> dict[str, str]:
    """Return the option of a law, for the preset's own that of the preset."""
    law: Any = draws.law_of(TIE["draws"])
    return {"draws": TIE["draws"] if b == law.b else f"beta(b={b:g}, candidates={law.candidates})"}


def measures(results: Path) -> dict[Measured, dict[str, float]]:
    """Return what a file says of all `PATHS`."""
    return dict(zip(PATHS, (line["result"] for line in found(PATHS, results)), strict=True))


def trained_paths(seeds: Sequence[int] = SEEDS) -> list[TrainedPath]:
    """Return the models of the text whose paths are measured, the ridge to 0 and to the identity."""
    return [TrainedPath(run) for run in grid(("Koopman, ridge to 0", "Koopman"), ("text",), seeds)]


def grid(names: Sequence[str], tasks: Sequence[str], seeds: Sequence[int], steps: int | None = None) -> list[Run]:
    """Return the runs of some models on some tasks, one seed after the other."""
    return [_run(name, task, seed, steps) for seed in seeds for task in tasks for name in names]


def _run(name: str, task: str, seed: int, steps: int | None) -> Run:
    mechanism, options, mlp = MODELS[name]
    what, plan, narrow = TASKS[task]
    plan = replace(plan, mlp=True, width=narrow) if mlp else plan
    return Run(mechanism, what, plan if steps is None else replace(plan, steps=steps), seed, options)


main = click.Group(help=__doc__)


@trains(main, RESULTS, "Train all models that have no line in the results yet.")
@seeds_option(len(SEEDS))
@steps_option()
@choice("--task", "tasks", TASKS)
@choice("--model", "names", MODELS)
def run(seeds: int, steps: int | None, tasks: tuple[str, ...], names: tuple[str, ...]) -> list[Job]:
    """Train all models that have no line in the results yet."""
    wanted: list[Job] = [*grid(names or tuple(MODELS), tasks or tuple(TASKS), range(seeds), steps)]
    if not (names or tasks or steps):
        wanted += [*PATHS, *trained_paths(range(seeds)), *updates_grid(range(seeds))]
        wanted += [run for runs in laws_grid().values() for run in runs]
    return wanted


if __name__ == "__main__":
    main()
