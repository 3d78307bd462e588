"""What the flow of graph energy attention is good for: sparsity, robustness, and scores that have converged.

    python -m docs.experiments.graph_energy run     # some 7 minutes of one core; goes on where it was stopped

Each variant learns the text with three seeds, and one more time, with one seed, for four times as many steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from docs.experiments.runs import Run, trains
from docs.experiments.tasks import Batch, Task, Text
from docs.experiments.training import Plan, fresh, score, trained
from refattn import model, philox, tree
from refattn.mechanisms.graph_energy import residual

RESULTS = Path(__file__).with_name("graph_energy.jsonl")

TEXT = Text(context=32, scored=1 << 19, every=64)
PLAN = Plan(
    width=48,
    heads=4,
    layers=2,
    mlp=True,
    embedding=0.02,
    steps=250,
    batch=16,
    learning_rate=3e-3,
    warmup=25,
    weight_decay=0.1,
)
SHORT, LONG = (0, 1, 2), (0,)
TIMES = 4

STILL = {"steps": 1, "step": 1e-9}
SOFT = {"threshold": "soft(tau=0.4)", "learn_tau": True}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax", {}),
    "no flow": ("graph_energy", STILL),
    "flow": ("graph_energy", {"steps": 4}),
    "no flow, soft": ("graph_energy", {**STILL, **SOFT}),
    "flow, soft": ("graph_energy", {"steps": 4, **SOFT}),
    "symmetric past": ("graph_energy", {"state": "query", "steps": 8, "step": 0.05}),
}
"""By name: mechanism and options. "no flow" weighs attention with where scores start: the flow adds the rest."""

NOISE = (0.05, 0.15)
"""Shares of the bytes that are replaced by any others."""


@dataclass(frozen=True)
class Perturbed:
    """A task whose held-out sequences have some tokens replaced; what is asked for stays."""

    task: Task
    share: float

    @property
    def vocabulary(self) -> int:
        """Number of different tokens."""
        return self.task.vocabulary

    @property
    def context(self) -> int:
        """Tokens of a sequence."""
        return self.task.context

    def batch(self, size: int, *, seed: int, step: int) -> Batch:
        """Return sequences as they are."""
        return self.task.batch(size, seed=seed, step=step)

    def held_out(self) -> Iterator[Batch]:
        """Yield the sequences with other tokens."""
        for n, batch in enumerate(self.task.held_out()):
            where = philox.uniform(batch.inputs.shape, seed=n, purpose="perturbed.where") < self.share
            other = philox.integers(batch.inputs.shape, 0, self.vocabulary, seed=n, purpose="perturbed.token")
            yield batch._replace(inputs=np.where(where, other, batch.inputs))


@dataclass(frozen=True)
class Trial(Run):
    """A training, after which the model is asked more."""

    def result(self) -> dict[str, Any]:
        """Train and ask."""
        params, scores = trained(self.mechanism, self.options, self.task, self.plan, self.seed)
        asked = {f"bits, {share} replaced": score(params, Perturbed(self.task, share))["bits"] for share in NOISE}
        if self.mechanism == "graph_energy":
            asked |= self._flows(params)
        return scores | asked

    def _flows(self, params: model.Params) -> dict[str, Any]:
        """Return what the flow does on the first held-out sequences, and the bits when it goes on to its rest."""
        batch = next(iter(self.task.held_out()))
        _, saved = model.forward(params, batch.inputs)
        cores = [layer.block.core for layer in saved.layers]
        past = np.tril(np.ones((self.task.context,) * 2, np.bool_))
        zeros = [float(np.mean(core.weights[..., past] == 0.0)) for core in cores]
        spreads = []
        for core in cores:
            # Of the tokens that a query sees: how far scores are apart, relative to their mean.
            ends = (core.inner.flow.states[0], core.scores)
            spreads.append([float(np.mean(np.std(x, axis=2)) / np.mean(np.abs(x))) for x in ends])
        found: dict[str, Any] = {"zeros": zeros, "spreads": spreads}
        if self.options["steps"] > 1:
            found["residual"] = [float(np.max(residual(core))) for core in cores]
            rest = fresh(self.mechanism, {**self.options, "steps": 60}, self.task, self.plan, 0)
            found["bits at rest"] = score(tree.unflatten(rest, tree.flatten(params)), self.task)["bits"]
        return found


def grid(name: str, plan: Plan, seeds: Sequence[int]) -> list[Run]:
    """Return the runs of a variant."""
    mechanism, options = VARIANTS[name]
    return [Trial(mechanism, TEXT, plan, seed, options) for seed in seeds]


def every() -> list[Run]:
    """Return all runs, those of a seed together."""
    runs = [run for seed in SHORT for name in VARIANTS for run in grid(name, PLAN, [seed])]
    return runs + [run for seed in LONG for name in VARIANTS for run in grid(name, longer(), [seed])]


def longer() -> Plan:
    """Return the plan with four times as many steps."""
    return replace(PLAN, steps=TIMES * PLAN.steps)


main = click.Group(help=__doc__)


@trains(main, RESULTS, "Train all models that have no line in the results yet.")
def run() -> list[Run]:
    """Train all models that have no line in the results yet."""
    return every()


if __name__ == "__main__":
    main()
