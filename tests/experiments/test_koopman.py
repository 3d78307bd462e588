"""The experiment on Koopman attention: its script, its results, and that its page says what these say."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

import refattn as ra
from docs.experiments import repeated_attention, training
from docs.experiments.baselines import REPEATED_ATTENTION
from docs.experiments.koopman import (
    MODELS,
    PATHS,
    RESULTS,
    SEEDS,
    SMALLER,
    TASKS,
    UPDATES,
    grid,
    measures,
)
from docs.experiments.koopman_paths import HEADS, TrainedPath
from docs.experiments.koopman_paths import Path as Measured
from docs.experiments.tasks import Text
from docs.experiments.training import fresh
from refattn import Context, philox, tree

WHOLE = grid(tuple(MODELS), tuple(TASKS), SEEDS)


def test_all_models_of_a_task_have_as_many_parameters() -> None:
    assert len({json.dumps(run.to_json(), sort_keys=True) for run in WHOLE}) == len(WHOLE) == 7 * 3 * 3
    for task in TASKS:
        counts = []
        for run in grid(tuple(MODELS), [task], [0]):
            params = fresh(run.mechanism, run.options, run.task, run.plan, 0)
            counts.append(sum(x.size for x in tree.flatten(params).values()))
        assert max(counts) < 1.04 * min(counts)


def test_attention_that_is_repeated() -> None:
    """The control is softmax attention of what attention gave, forward and backward."""
    block, x = REPEATED_ATTENTION.block, philox.normal((2, 5, 8), seed=1, purpose="x")
    params = block.init(block.Config(width=8, heads=1, fit="separable(tau=1.0)", residual=False), seed=0, like=x)
    context = Context(causal=True)
    state, saved = block.forward(params, block.start(params, x, context), context)
    q, k, v = ((x @ getattr(params, f"w_{name}"))[:, None] for name in "qkv")
    first, first_saved = ra.softmax.forward(q, k, v, causal=True)
    second, second_saved = ra.softmax.forward(first, k, v, causal=True)
    np.testing.assert_allclose(state.x, second[:, 0] @ params.w_o, rtol=0, atol=1e-5)
    upstream = philox.normal(state.x.shape, seed=1, purpose="d")
    _, d_params, _ = block.backward(params, saved, type(state)(upstream))
    d_second = ra.softmax.backward(second_saved, (upstream @ params.w_o.T)[:, None])
    d_first = ra.softmax.backward(first_saved, d_second["q"])
    d_k = np.sum(np.swapaxes(x, 1, 2) @ (d_first["k"] + d_second["k"])[:, 0], axis=0)
    np.testing.assert_allclose(d_params.w_k, d_k, rtol=0, atol=1e-4)
    wrong = block.init(block.Config(width=8, heads=1), seed=0, like=x)
    with pytest.raises(ValueError, match=r"tau: got 0.0, needs 1"):
        repeated_attention.forward(wrong, block.start(wrong, x, context), context)


@pytest.mark.parametrize("ridge", [0.001, 1.0])
def test_one_transition_leaves_what_the_operator_has_seen_of_it(ridge: float) -> None:
    """With x . y alone K maps q' to x_1 (x_0 . q') / (|x_0|^2 + ridge), and has seen the cosine of x_0 and q'."""
    q, k, v = (philox.normal((1, HEADS, 32, 4), seed=0, purpose=name) for name in "qkv")
    start, _ = ra.softmax.forward(q, k, v)
    attended, _ = ra.softmax.forward(start, k, v)
    product, length = np.abs(np.sum(q * attended, axis=-1)), np.linalg.norm(attended, axis=-1)
    moved = product / (np.sum(q**2, axis=-1) + ridge) * np.linalg.norm(start, axis=-1) / length
    result = Measured(1, ridge=ridge, kernel="linear", width=4).result()
    assert result["seen"] == pytest.approx(np.median(product / (length * np.linalg.norm(q, axis=-1))), abs=1e-4)
    assert result["length"] == pytest.approx(np.median(moved), rel=0.1)  # epsilon moves it by its part of phi


def test_the_path_of_attention_has_one_operator() -> None:
    """The path before it is that of softmax attention again and again: with one transition there is no other."""
    assert Measured(1, path="attention").result() == Measured(1).result()
    assert Measured(3, path="attention").result()["length"] > 5.0 * Measured(3).result()["length"]


def test_what_is_measured_is_what_is_stored() -> None:
    stored = measures(RESULTS)
    for n in (0, 5, 20, 33):
        assert PATHS[n].result() == pytest.approx(stored[PATHS[n]], abs=2e-4)


def test_layers_of_a_trained_model_are_measured() -> None:
    (run,) = grid(["Koopman, ridge to 0"], ["text"], [0], steps=1)
    result = TrainedPath(run).result()
    assert len(result["layers"]) == 2 and all(0.0 < layer["length"] < layer["seen"] < 1.0 for layer in result["layers"])


def test_the_preset_is_what_is_trained() -> None:
    assert UPDATES["Tie"][1] == dict(ra.mechanism("koopman").presets["tie2024"]["block"])
    for task, plan in SMALLER.values():
        counts = []
        for mechanism, options in UPDATES.values():
            counts.append(sum(x.size for x in tree.flatten(fresh(mechanism, options, task, plan, 0)).values()))
        assert set(counts) == {counts[0], counts[0] + 2 * plan.layers}


def test_a_model_with_a_law_draws_in_every_step_and_says_how_often_again() -> None:
    """The numbers of a step are those of its seed and step, and calls are judged as large as they are trained."""
    task, plan = Text(context=16, scored=1000), replace(SMALLER["text"][1], batch=3, steps=3)
    params = fresh("koopman", UPDATES["Tie"][1], task, plan, 0)
    batch = task.batch(plan.batch, seed=0, step=1)
    losses = [training.loss_and_gradients(params, batch, chance=(0, step))[0] for step in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2] != training.loss_and_gradients(params, batch)[0]
    result = training.train("koopman", UPDATES["Tie, 3 updates"][1], task, plan, 0)
    assert result["diverged"] is None and result["redrawn"] > 0
    assert "redrawn" not in training.train("koopman", {}, task, replace(plan, steps=1), 0)


def test_batches_are_cut() -> None:
    batch = SMALLER["text"][0].batch(5, seed=0, step=1)
    parts = list(training.cut(batch, 2))
    assert [len(part.inputs) for part in parts] == [2, 2, 1]
    for name in batch._fields:
        np.testing.assert_array_equal(np.concatenate([getattr(part, name) for part in parts]), getattr(batch, name))
