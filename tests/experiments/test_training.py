"""One training: its loss, its score, and that it ends with the same numbers whenever it is run."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import numpy as np
import pytest

from docs.experiments import training
from docs.experiments.tasks import Recall
from docs.experiments.training import Plan, fresh, loss_and_gradients, train
from refattn import model, tree
from refattn.ops.losses import cross_entropy_forward

TASK = Recall(pairs=2, keys=4, values=4, judged=64)
PLAN = Plan(
    width=16,
    heads=1,
    layers=2,
    mlp=False,
    embedding=0.16,
    steps=12,
    batch=8,
    learning_rate=3e-3,
    warmup=2,
    weight_decay=0.0,
)
LINEAR = "docs.experiments.baselines:LINEAR_ATTENTION"
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("softmax", {}),
    (LINEAR, {"kind": "elu"}),
    ("higher_order", {"order": 3, "alpha": 1.0, "normaliser": "signed"}),
]


def test_only_what_is_asked_for_counts() -> None:
    params = fresh("softmax", {}, TASK, PLAN, 0)
    batch = TASK.batch(5, seed=0, step=1)
    loss, gradients = loss_and_gradients(params, batch)
    losses, _ = cross_entropy_forward(model.forward(params, batch.inputs)[0], batch.targets)
    assert loss == pytest.approx(float(np.mean(losses[:, 4:])), rel=1e-6)
    moved = batch._replace(targets=np.where(batch.weights == 0.0, 7, batch.targets))
    other, same = loss_and_gradients(params, moved)
    assert other == loss
    found = tree.flatten(gradients)
    assert all(np.array_equal(found[name], leaf) for name, leaf in tree.flatten(same).items())


def test_the_gradients_are_those_of_the_loss() -> None:
    leaves = {name: leaf.astype(np.float64) for name, leaf in tree.flatten(fresh("softmax", {}, TASK, PLAN, 0)).items()}
    params = tree.unflatten(fresh("softmax", {}, TASK, PLAN, 0), leaves)
    batch = TASK.batch(5, seed=0, step=1)
    batch = batch._replace(weights=batch.weights.astype(np.float64))
    gradients = tree.flatten(loss_and_gradients(params, batch)[1])
    random, h = np.random.default_rng(0), 1e-5
    for name, leaf in leaves.items():
        direction = random.normal(size=leaf.shape)

        def along(step: float, name: str = name, direction: Any = direction) -> float:
            return loss_and_gradients(tree.unflatten(params, leaves | {name: leaves[name] + step * direction}), batch)[
                0
            ]

        slope = (8.0 * (along(h) - along(-h)) - (along(2 * h) - along(-2 * h))) / (12.0 * h)
        assert float(np.sum(gradients[name] * direction)) == pytest.approx(slope, rel=1e-7, abs=1e-9), name


@pytest.mark.parametrize(("mechanism", "options"), KINDS)
def test_a_training_ends_with_the_same_numbers(mechanism: str, options: dict[str, Any]) -> None:
    first, again = (train(mechanism, options, TASK, PLAN, 1) for _ in range(2))
    assert {**first, "seconds": 0} == {**again, "seconds": 0}
    assert first["diverged"] is None and json.loads(json.dumps(first)) == first
    assert len(first["losses"]) == len(first["norms"]) == training.PIECES
    assert train(mechanism, options, TASK, PLAN, 2)["losses"] != first["losses"]


def test_numbers_that_are_not_finite_end_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = itertools.chain([1.0, 1.0], itertools.repeat(math.inf))
    monkeypatch.setattr(training, "clip", lambda gradients, limit: (gradients, next(steps)))
    result = train("softmax", {}, TASK, PLAN, 0)
    assert result["diverged"].startswith("step 3: the norm of the gradients is not finite")
    assert result["bits"] is None and len(result["losses"]) == 2
    json.dumps(result, allow_nan=False)
