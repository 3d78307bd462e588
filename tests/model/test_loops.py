"""Layers that are passed several times: a model with loops is one of as many layers with equal parameters."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refattn import model, tree
from refattn.model import decode
from refattn.train import data, loop
from refattn.train.settings import build

TABLES = {"start": "table", "integrator": "lie_trotter", "mlp": "momentum(ratio=1)", "look_ahead": True}
CASES = [
    ("softmax", {}, 1),
    ("sympformer", {"mlp": "attention_velocity(ratio=1)"}, 1),
    ("sympformer", {"integrator": "ab2", "mlp": "velocity(ratio=1, start='table')"}, 2),
    ("sympformer", TABLES, 2),
    ("koopman", {"draws": "beta"}, 1),
]
"""Mechanisms with blocks that do and do not depend on their place, and the numbers of layers."""


def tied(mechanism: str, options: dict[str, Any], layers: int, **more: Any) -> model.Params:
    sizes: dict[str, Any] = {"vocabulary": 5, "context": 5, "width": 4, "heads": 2, "mlp_ratio": 1}
    config = model.Config(mechanism, layers=layers, loops=3, options=options, **sizes, **more)
    return model.init(config, seed=1, like=np.zeros(1))


def untied(params: model.Params) -> model.Params:
    """Return the model of as many layers as there are passes, with their parameters."""
    config = dataclasses.replace(params.config, layers=params.config.depth, loops=1)
    return dataclasses.replace(params, config=config, layers=params.passes)


@pytest.mark.parametrize(("mechanism", "options", "layers"), CASES)
def test_it_is_a_deeper_model_with_equal_layers(mechanism: str, options: dict[str, Any], layers: int) -> None:
    params = tied(mechanism, options, layers)
    deep = untied(params)
    assert len(deep.layers) == 3 * layers
    fresh = model.init(deep.config, like=np.zeros(1))
    assert {n: x.shape for n, x in tree.flatten(deep).items()} == {n: x.shape for n, x in tree.flatten(fresh).items()}
    tokens = np.asarray([[0, 3, 1, 4], [2, 2, 0, 1]])
    logits, saved = model.forward(params, tokens, chance=(3, 4))
    wanted, deep_saved = model.forward(deep, tokens, chance=(3, 4))
    np.testing.assert_array_equal(logits, wanted)
    found = tree.flatten(model.backward(params, saved, np.cos(logits)))
    parts = tree.flatten(model.backward(deep, deep_saved, np.cos(logits)))
    sums = {name: x for name, x in parts.items() if not name.startswith("layers.")}
    for name in set(parts) - set(sums):
        _, place, rest = name.split(".", 2)
        whole = f"layers.{int(place) % layers}.{rest}"
        sums[whole] = sums.get(whole, 0.0) + parts[name]
    assert found.keys() == sums.keys() == tree.flatten(params).keys()
    for name, x in found.items():
        np.testing.assert_allclose(x, sums[name], rtol=1e-9, atol=1e-12, err_msg=name)


def test_gradients_are_those_of_differences() -> None:
    params = tied("sympformer", {"mlp": "attention_velocity(ratio=1)"}, 1)
    tokens, rng = np.asarray([[0, 3, 1, 4]]), np.random.default_rng(0)
    leaves = tree.flatten(params)
    along = {name: rng.normal(size=x.shape) for name, x in leaves.items()}

    def loss(step: float) -> float:
        moved = tree.unflatten(params, {name: x + step * along[name] for name, x in leaves.items()})
        return float(np.sum(np.sin(model.forward(moved, tokens)[0])))

    logits, saved = model.forward(params, tokens)
    found = tree.flatten(model.backward(params, saved, np.cos(logits)))
    slope = sum(float(np.sum(x * along[name])) for name, x in found.items())
    assert slope == pytest.approx((loss(1e-5) - loss(-1e-5)) / 2e-5, rel=1e-6)


@pytest.mark.parametrize(("mechanism", "options", "layers"), CASES)
def test_tokens_may_come_one_after_the_other(mechanism: str, options: dict[str, Any], layers: int) -> None:
    params, tokens = tied(mechanism, options, layers), np.asarray([[0, 3, 1, 4]])
    cache = decode.start(params, batch=1)
    assert cache.blocks is None or len(cache.blocks) == 3 * layers
    for n in range(4):
        logits, cache = decode.extend(params, cache, tokens[:, n : n + 1])
    np.testing.assert_allclose(logits, model.forward(params, tokens)[0][:, -1], rtol=0.0, atol=1e-9)


def test_a_trained_model_may_pass_its_layers_more_often() -> None:
    params = tied("sympformer", TABLES, 2)
    config = dataclasses.replace(params.config, loops=5)
    logits, saved = model.forward(dataclasses.replace(params, config=config), np.asarray([[0, 3, 1]]))
    assert len(saved.layers) == 10
    assert np.all(np.isfinite(logits))


def test_what_a_layer_learns_is_told_once() -> None:
    params = tied("sympformer", {"mlp": "attention_velocity(ratio=1)"}, 1)
    learned = loop._learned(params)["learned"]
    assert {"h_x", "h_y", "mu", "gamma", "c_log", "c_lin"} == set(learned)
    assert all(len(values) == 1 and values[0] is not None for values in learned.values())


SMALL = {"context": 8, "width": 4, "heads": 2, "layers": 1, "loops": 2, "batch": 2, "warmup": 1, "mlp_ratio": 1}


def test_growth_takes_all_passes_of_a_layer_together(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("to be or not to be, " * 40)
    given = SMALL | {"steps": 2, "grow": [1], "growth": {"most": 1, "sequences": 4}, "data": str(tmp_path / "text")}
    chosen, text = build("growing", given), data.load(tmp_path / "text")
    state, _ = loop.step(loop.fresh(chosen), chosen, text)
    grown, facts = loop.grow(state, chosen, text)
    assert len(facts["widths"]) == 1
    assert facts["after"] <= facts["before"]
    assert grown.params.passes[1] is grown.params.layers[0]
    assert loop.step(grown, chosen, text)[0].step == 2
