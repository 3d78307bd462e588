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
from docs.experiments.runs import run_all
from refattn.cli.arguments import campaign_options
from refattn.many_runs import Where

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


@click.group(help=__doc__)
def main() -> None:
    """Run the experiment."""


@main.command(short_help="Train all that has no line in the results yet.")
@click.option("--results", type=click.Path(dir_okay=False, path_type=Path), default=RESULTS, help="The file of lines.")
@campaign_options(keep=False)
@click.option("--seeds", type=click.IntRange(1), default=len(SEEDS), help="How many seeds: 0, 1, ...")
@click.option("--steps", type=click.IntRange(4), help="Updates of every training, for a quick look.")
@click.option("--task", "tasks", type=click.Choice(list(TASKS)), multiple=True, help="Only this one, or these.")
@click.option("--way", "ways", type=click.Choice(list(WAYS)), multiple=True, help="The same.")
def run(
    results: Path, where: Where, seeds: int, steps: int | None, tasks: tuple[str, ...], ways: tuple[str, ...]
) -> None:
    """Train all that has no line in the results yet."""
    wanted = grid(tasks or tuple(TASKS), range(seeds), ways, steps)
    lines = run_all(wanted, results, where)
    for each, line in zip(wanted, lines, strict=True):
        click.echo(each.told(line["result"]))
    click.echo(f"{sum(line['result']['seconds'] for line in lines):.0f} s of the CPU, {results}")


if __name__ == "__main__":
    main()
