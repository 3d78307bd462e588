"""Classical blocks, Yurii's and those of SympFormer, at equal parameters and equal calls of the oracle.

    python -m docs.experiments.sympformer run     # some 45 minutes of one core; goes on where it was stopped
    python -m docs.experiments.sympformer paper --tokens DIR   # the size that was published, on token files; days

Each configuration learns the text with three seeds; most of them four times as long too, and at other rates. What a
short training says is not believed before the long one says it. A model asks for attention four times: in four layers,
or, where the integrator asks four times in a step, in one layer whose MLP is so much wider that it has as many
parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from docs.experiments.runs import Line, Run, choice, found, seeds_option, steps_option, trains
from docs.experiments.tasks import Text, TokenFiles
from docs.experiments.training import Plan

RESULTS = Path(__file__).with_name("sympformer.jsonl")
PAGE = Path(__file__).with_name("sympformer.md")

SEEDS = (0, 1, 2)

TEXT = Text(context=64)
PLAN = Plan(  # without an MLP of the model: the blocks have theirs
    width=64,
    heads=4,
    layers=4,
    mlp=False,
    embedding=0.02,
    steps=200,
    batch=12,
    learning_rate=3e-3,
    warmup=20,
    weight_decay=0.1,
)

WIDE = 22
"""Widths of an MLP that makes one layer as large as four: 4 + 2 * 22 = 4 (4 + 2 * 4) squares of the width."""

SAME = {"oracle": "softmax(mobility='identity')"}
"""Without B a layer of SympFormer has the four matrices of a classical one."""

YURII = {"integrator": "lie_trotter", "mlp": "momentum", "look_ahead": True}

VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "classical": (4, {"integrator": "classical", "mlp": "plain"}),
    "Yurii": (4, YURII),
    "presymplectic Euler": (4, SAME),
    "presymplectic Euler with B": (4, {}),
    "AB2, first momentum": (4, {**SAME, "integrator": "ab2", "start": "linear"}),
    "forward Euler, first momentum": (4, {**SAME, "integrator": "forward_euler", "start": "linear"}),
    "presymplectic Euler, first momentum": (4, {**SAME, "start": "linear"}),
    "presymplectic Euler, damping 0.3/t": (4, {**SAME, "damping": "loglin(c_log=0.3)"}),
    "Yurii, first momentum": (4, {**YURII, "start": "linear"}),
    "Strang, one layer": (1, {**SAME, "integrator": "strang", "mlp": f"attention_velocity(ratio={WIDE})"}),
    "classical, one layer": (1, {"integrator": "classical", "mlp": f"plain(ratio={WIDE})"}),
    "linear attention, presymplectic Euler": (4, {"oracle": "linear", "mlp": "attention_velocity(ratio=5)"}),
}
"""By name: layers and options. Linear attention has two matrices in place of four, and an MLP that is wider by one.

AB2 and forward Euler move tokens by the old momentum, and need one to begin with: a linear map of the tokens. Others
have it too, to tell what it is worth; and a classical model has one wide layer, to tell what that is worth.
"""

LONG = 4 * PLAN.steps
LONGER: dict[str, dict[float, int]] = {
    "classical": {1e-3: 1, 3e-3: 3, 1e-2: 1},
    "Yurii": {3e-3: 1},
    "presymplectic Euler": {1e-3: 1, 3e-3: 3, 1e-2: 1},
    "AB2, first momentum": {1e-3: 1, 3e-3: 3, 1e-2: 1},
    "forward Euler, first momentum": {1e-3: 1, 3e-3: 3, 1e-2: 1},
    "Strang, one layer": {1e-3: 1, 3e-3: 3, 1e-2: 1},
    "classical, one layer": {1e-3: 1, 3e-3: 3, 1e-2: 1},
}
"""What is trained for `LONG` steps: with how many seeds at which rate."""

PAPER = Plan(
    width=64,
    heads=4,
    layers=4,
    mlp=False,
    embedding=0.02,
    steps=10_000,
    batch=72,
    learning_rate=3e-4,
    warmup=150,
    weight_decay=0.1,
)
"""The published size: batches of 9216 tokens in sequences of 128. Of what its trainer does this leaves out a larger
rate for single numbers, decay of embeddings alone, and a last rate of 0.4 of the first."""


def grid(
    names: Sequence[str], seeds: Sequence[int], steps: int = PLAN.steps, rate: float = PLAN.learning_rate
) -> list[Run]:
    """Return the runs of some variants on the text, one seed after the other."""
    plan = replace(PLAN, steps=steps, learning_rate=rate)
    return [
        Run("sympformer", TEXT, replace(plan, layers=layers), seed, options)
        for seed in seeds
        for layers, options in (VARIANTS[name] for name in names)
    ]


def parts(names: Sequence[str] = tuple(VARIANTS), seeds: Sequence[int] = SEEDS) -> dict[str, list[Run]]:
    """Return the runs of the experiment by part: short, and long at each rate; of some variants and seeds."""
    found = {"short": grid(names, seeds)}
    for rate in sorted({rate for rates in LONGER.values() for rate in rates}):
        each = [
            grid([name], seeds[: rates.get(rate, 0)], LONG, rate) for name, rates in LONGER.items() if name in names
        ]
        found[f"{rate:g}"] = [run for runs in each for run in runs]
    return found


main = click.Group(help=__doc__)


@trains(main, RESULTS, "Train all models that have no line in the results yet.")
@steps_option()
@choice("--variant", "names", VARIANTS)
@seeds_option(len(SEEDS))
def run(steps: int | None, names: tuple[str, ...], seeds: int) -> list[Run]:
    """Train all models that have no line in the results yet. With steps it is the short ones alone."""
    if steps is not None:
        return grid(names or tuple(VARIANTS), range(seeds), steps)
    return [each for part in parts(names or tuple(VARIANTS), range(seeds)).values() for each in part]


@trains(main, None, "The published size, on token files that are not part of this project.")
@click.option(
    "--tokens", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True, help="See above."
)
@click.option("--steps", type=click.IntRange(1), default=PAPER.steps, help="Updates of every training.")
@click.option("--vocabulary", type=click.IntRange(2), default=50304, help="Number of different tokens.")
@choice("--variant", "names", VARIANTS)
@seeds_option(len(SEEDS))
def paper(tokens: Path, steps: int, vocabulary: int, names: tuple[str, ...], seeds: int) -> list[Run]:
    """Train the published size on `train.bin` and `val.bin` of a folder: tokens of 16 bits, the lower byte first."""
    task, plan = TokenFiles(str(tokens), vocabulary), replace(PAPER, steps=steps)
    return [
        Run("sympformer", task, replace(plan, layers=layers), seed, {**options, "spread": 0.02})
        for seed in range(seeds)
        for layers, options in (VARIANTS[name] for name in names or tuple(VARIANTS))
    ]


def by_part(results: Path) -> dict[str, dict[str, list[Line]]]:
    """Return the lines of each part, by variant: one for each seed."""
    found_lines: dict[str, dict[str, list[Line]]] = {}
    names = {str(VARIANTS[name]): name for name in VARIANTS}
    for part, runs in parts().items():
        of_part = found_lines.setdefault(part, {})
        for line in found(runs, results):
            run_of_it = line["run"]
            of_part.setdefault(names[str((run_of_it["plan"]["layers"], run_of_it["options"]))], []).append(line)
    return found_lines


if __name__ == "__main__":
    main()
