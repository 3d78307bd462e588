"""The experiment on Koopman attention: its script, its results, and that its page says what these say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import refattn as ra
from docs.experiments import repeated_attention
from docs.experiments.baselines import REPEATED_ATTENTION
from docs.experiments.koopman import MODELS, PAGE, PATHS, RESULTS, SEEDS, TASKS, grid, measures, trained_paths
from docs.experiments.koopman_paths import HEADS, TrainedPath
from docs.experiments.koopman_paths import Path as Measured
from docs.experiments.runs import found
from docs.experiments.training import fresh
from refattn import Context, philox, tree
from tests.experiments.pages import row, says

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


def test_a_conclusion_that_the_results_do_not_have_is_an_error() -> None:
    """Where the model with the update had the best scores, the page could not be written."""
    from docs.experiments import koopman_page

    groups = koopman_page.grouped(found(WHOLE, RESULTS), TASKS, MODELS)
    for name in ("Koopman", "Koopman + MLP"):
        groups["text", name] = [{**result, "bits": 1.0} for result in groups["text", name]]
    for said in (koopman_page.verdict, koopman_page.conclusions):
        with pytest.raises(ValueError, match="the results do not say: "):
            said(groups)


def test_the_page_says_what_the_results_say(tmp_path: Path) -> None:
    from docs.experiments import koopman_page

    lines = found(WHOLE, RESULTS)
    groups = koopman_page.grouped(lines, TASKS, MODELS)
    for (task, name), results in groups.items():
        own = [
            line["result"] for line in lines if line["run"] in [run.to_json() for run in grid([name], [task], SEEDS)]
        ]
        assert own == results
    assert row("koopman") == koopman_page.verdict(groups)
    assert says(PAGE, koopman_page.tables(lines, TASKS, MODELS), tmp_path)
    assert says(PAGE, koopman_page.path_tables(measures(RESULTS), found(trained_paths(), RESULTS)), tmp_path)
    koopman_page.draw(lines, TASKS, MODELS, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes()[1:4] == b"PNG"


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


def test_a_reason_that_the_results_do_not_have_is_an_error() -> None:
    from docs.experiments import koopman_page

    stored, trained = measures(RESULTS), found(trained_paths(), RESULTS)
    koopman_page.forgets(stored, trained)
    for changed, values in (
        (Measured(1, ridge=1.0), {"length": 0.02}),
        (Measured(3, ridge=1.0), {"length": 0.5}),
        (Measured(8), {"seen": 0.5}),
        (Measured(3, path="attention"), {"length": 0.1}),
    ):
        other = {**stored, changed: {**stored[changed], **values}}
        with pytest.raises(ValueError, match="the results do not say: "):
            koopman_page.forgets(other, trained)
