"""One training: its loss, its score, and that it ends with the same numbers whenever it is run."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from docs.experiments import training
from docs.experiments.tasks import Recall
from docs.experiments.training import Plan, fresh, loss_and_gradients, score, train
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


def test_the_score_of_a_model_that_knows_nothing() -> None:
    """With embeddings of 0 all logits are 0: log2 of the vocabulary, and the first token, a key, is no answer."""
    params = fresh("softmax", {}, TASK, replace(PLAN, embedding=0.0), 0)
    assert score(params, TASK) == {"bits": 3.0, "accuracy": 0.0}


def test_embeddings_start_at_the_size_that_was_asked_for() -> None:
    params = fresh("softmax", {}, TASK, PLAN, 0)
    assert float(np.std(params.token_embedding)) == pytest.approx(0.16, rel=0.1)
    assert float(np.std(params.position_embedding)) == pytest.approx(0.16, rel=0.1)


@pytest.mark.parametrize(("mechanism", "options"), KINDS)
def test_a_training_ends_with_the_same_numbers(mechanism: str, options: dict[str, Any]) -> None:
    first, again = (train(mechanism, options, TASK, PLAN, 1) for _ in range(2))
    assert {**first, "seconds": 0} == {**again, "seconds": 0}
    assert first["diverged"] is None and json.loads(json.dumps(first)) == first
    assert len(first["losses"]) == len(first["norms"]) == training.PIECES
    assert train(mechanism, options, TASK, PLAN, 2)["losses"] != first["losses"]


@pytest.mark.slow
def test_softmax_attention_learns_to_recall() -> None:
    result = train("softmax", {}, TASK, replace(PLAN, steps=300, batch=64, width=32), 0)
    assert result["accuracy"] > 0.95
    assert result["losses"][0] > 20.0 * result["losses"][-1]


def test_what_is_kept_of_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms of 1 to 20, two in each piece, with a limit that four of them are above."""
    norms = iter(range(1, 21))
    monkeypatch.setattr(training, "clip", lambda gradients, limit: (gradients, float(next(norms))))
    result = train("softmax", {}, TASK, replace(PLAN, steps=20, clip=16.0), 0)
    assert result["clipped"] == 0.2
    assert result["norms"][3] == [7.1, 7.5, 7.9, 8.0]


def test_numbers_that_are_not_finite_end_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = itertools.chain([1.0, 1.0], itertools.repeat(math.inf))
    monkeypatch.setattr(training, "clip", lambda gradients, limit: (gradients, next(steps)))
    result = train("softmax", {}, TASK, PLAN, 0)
    assert result["diverged"].startswith("step 3: the norm of the gradients is not finite")
    assert result["bits"] is None and len(result["losses"]) == 2
    json.dumps(result, allow_nan=False)
