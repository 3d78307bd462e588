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
from docs.experiments.runs import Run, run_all
from docs.experiments.tasks import Recall, Task, Text
from docs.experiments.training import Plan
from refattn.cli.arguments import campaign_options
from refattn.many_runs import Where

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


@click.group(help=__doc__)
def main() -> None:
    """Run the experiment."""


@main.command(short_help="Train all models that have no line in the results yet.")
@click.option("--results", type=click.Path(dir_okay=False, path_type=Path), default=RESULTS, help="The file of lines.")
@campaign_options(keep=False)
@click.option("--seeds", type=click.IntRange(1), default=len(SEEDS), help="How many seeds: 0, 1, ...")
@click.option("--steps", type=click.IntRange(1), help="Updates of every training, for a quick look.")
@click.option("--task", "tasks", type=click.Choice(list(TASKS)), multiple=True, help="Only this one, or these.")
@click.option("--mechanism", "names", type=click.Choice(list(MECHANISMS)), multiple=True, help="The same.")
def run(
    results: Path, where: Where, seeds: int, steps: int | None, tasks: tuple[str, ...], names: tuple[str, ...]
) -> None:
    """Train all models that have no line in the results yet."""
    wanted = grid(names or tuple(MECHANISMS), tasks or tuple(TASKS), range(seeds), steps)
    lines = run_all(wanted, results, where)
    for each, line in zip(wanted, lines, strict=True):
        click.echo(each.told(line["result"]))
    click.echo(f"{sum(line['result']['seconds'] for line in lines):.0f} s of the CPU, {results}")


@main.command(short_help="Train models that divide by something else than their sums, four times as long.")
@click.option("--results", type=click.Path(dir_okay=False, path_type=Path), default=RESULTS, help="The file of lines.")
@campaign_options(keep=False)
def divide(results: Path, where: Where) -> None:
    """Train models that divide by something else than their sums, four times as long."""
    wanted = divided()
    lines = run_all(wanted, results, where)
    for each, line in zip(wanted, lines, strict=True):
        click.echo(each.told(line["result"]))
    click.echo(f"{sum(line['result']['seconds'] for line in lines):.0f} s of the CPU, {results}")


if __name__ == "__main__":
    main()
