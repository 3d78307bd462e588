"""Settings: what is read, what is refused and how, and what goes into JSON and back."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refattn.train import settings
from refattn.train.settings import Settings, build, differences, from_json, merge, parse


@pytest.mark.parametrize(
    ("texts", "values"),
    [
        ([], {}),
        (["steps=3"], {"steps": 3}),
        (["learning_rate=1e-3", "mlp=true", "clip=null"], {"learning_rate": 1e-3, "mlp": True, "clip": None}),
        (["gelu=exact", "data=a=b", "device="], {"gelu": "exact", "data": "a=b", "device": ""}),
        (["steps=3", "steps=4"], {"steps": 4}),
        (["block.bias=true", "block.kv_heads=1"], {"block": {"bias": True, "kv_heads": 1}}),
        (["block.kv_heads=1", 'block={"bias": true}'], {"block": {"bias": True, "kv_heads": 1}}),
        (["model.decode=pointer", "model.width=8"], {"decode": "pointer", "width": 8}),
        (["model.steps=3"], {"model.steps": 3}),
        (["data=[1", "block.=3", "other.name=3"], {"data": "[1", "block.": 3, "other.name": 3}),
    ],
)
def test_assignments(texts: list[str], values: dict[str, Any]) -> None:
    assert parse(texts) == values


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("steps", "--set: got 'steps', needs NAME=VALUE"),
        ("=3", "--set: got '=3', needs NAME=VALUE"),
        ("", "--set: got '', needs NAME=VALUE"),
        ("block=3", "block: got 3, needs block.NAME=VALUE"),
    ],
)
def test_assignments_that_are_none(text: str, problem: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse([text, "block.bias=true"])
    assert str(caught.value) == problem


@pytest.mark.parametrize(
    ("name", "near"),
    [("widht", "width"), ("step", "steps"), ("learningrate", "learning_rate"), ("heads_", "heads"), ("Seed", "seed")],
)
def test_a_near_miss_is_named(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=rf"setting: got '{name}' \(did you mean {near}\?\), needs one of context, wi"):
        build("softmax", {name: 3})


def test_what_is_unknown_gets_the_whole_list() -> None:
    with pytest.raises(ValueError) as caught:
        build("softmax", {"colour": 3})
    known = [field.name for field in dataclasses.fields(Settings) if field.name not in ("mechanism", "block", "growth")]
    assert (
        str(caught.value) == f"setting: got 'colour', needs one of {', '.join(known)}, preset, block.NAME, growth.NAME"
    )
    with pytest.raises(ValueError, match="setting: got 'mechanism', needs"):
        build("softmax", {"mechanism": "softmax"})  # which is an argument of its own


@pytest.mark.parametrize(
    ("values", "error", "problem"),
    [
        ({"steps": 1.5}, TypeError, "steps: got 1.5, needs a whole number of at least 1"),
        ({"steps": True}, TypeError, "steps: got True, needs a whole number"),
        ({"steps": 0}, ValueError, "steps: got 0, needs a whole number of at least 1"),
        ({"warmup": "ten"}, TypeError, "warmup: got 'ten', needs a whole number of at least 0"),
        ({"warmup": -1}, ValueError, "warmup: got -1, needs a whole number of at least 0"),
        ({"learning_rate": "fast"}, TypeError, "learning_rate: got 'fast', needs a finite number above 0"),
        ({"learning_rate": 0}, ValueError, "learning_rate: got 0.0, needs a finite number above 0"),
        ({"learning_rate": float("nan")}, ValueError, "learning_rate: got nan, needs a finite number above 0"),
        (
            {"learning_rate": 10**400},
            ValueError,
            "learning_rate: got a whole number of 1329 bits, needs a finite",
        ),
        ({"weight_decay": -1}, ValueError, "weight_decay: got -1.0, needs a finite number from 0"),
        ({"beta2": 1}, ValueError, "beta2: got 1.0, needs a finite number from 0 to below 1"),
        ({"clip": 0}, ValueError, "clip: got 0.0, needs a finite number above 0"),
        ({"floor": 2}, ValueError, "floor: got 2.0, needs a finite number from 0 to 1"),
        ({"temperature": -0.1}, ValueError, "temperature: got -0.1, needs a finite number from 0"),
        ({"sample_bytes": -1}, ValueError, "sample_bytes: got -1, needs a whole number of at least 0"),
        ({"seed": -1}, ValueError, "seed: got -1, needs a whole number of at least 0"),
        ({"data": 3}, TypeError, "data: got 3, needs a text"),
        ({"device": 0}, TypeError, "device: got 0, needs a text"),
        ({"backend": None}, TypeError, "backend: got None, needs a text"),
        ({"dtype": "float16"}, ValueError, "dtype: got 'float16', needs one of float32, float64"),
        ({"accumulate": 3}, ValueError, "accumulate: got 3, needs a divisor of the batch of 16"),
        ({"width": 16.0}, TypeError, "width: got 16.0, needs a whole number of at least 1"),
        ({"heads": 3}, ValueError, "heads: got 3, needs a divisor of the width 128"),
        ({"mlp": 1}, TypeError, "mlp: got 1, needs true or false"),
        ({"gelu": "relu"}, ValueError, "gelu: got 'relu', needs one of"),
        ({"block": {"windows": 3}}, ValueError, "options: got 'windows', softmax has kv_heads"),
        ({"block": 3}, TypeError, "options: got 3, needs a"),
        ({"block": {"softcap": -1.0}}, ValueError, "block.softcap: got -1.0, needs a finite number above 0"),
        ({"block": {"width": 3}}, ValueError, "options: got 'width', softmax has kv_heads"),
    ],
)
def test_wrong_values_are_named(values: dict[str, Any], error: type[Exception], problem: str) -> None:
    with pytest.raises(error) as caught:
        build("softmax", values)
    assert str(caught.value).startswith(problem)


@pytest.mark.parametrize(
    ("mechanism", "block", "problem"),
    [
        ("graph_energy", {"state": "query"}, "block.step: got None with causal scores"),
        ("graph_energy", {"regulariser": "level"}, 'block.regulariser: got "level" on a graph without symmetry'),
        ("graph_energy", {"graph": "mean", "step": 0.1}, 'block.graph: got "mean" with causal scores'),
        (
            "graph_energy",
            {"integrator": "euler(stop_force=1e-3)"},
            "block.integrator: got 'euler(stop_force=1e-3)'; stop_force: got a number with causal scores",
        ),
        ("sympformer", {"oracle": "hamiltonian"}, "block.oracle: got hamiltonian with causal=True"),
        ("sympformer", {"integrator": "classical"}, "block.mlp: got 'attention_velocity', classical has no steps"),
    ],
)
def test_a_block_that_no_model_can_have_is_refused_at_once(mechanism: str, block: Any, problem: str) -> None:
    with pytest.raises(ValueError) as caught:
        build(mechanism, {"width": 8, "heads": 2, "block": block})
    assert str(caught.value).startswith(problem) and "needs" in str(caught.value)


numbers = st.fixed_dictionaries(
    {},
    optional={
        "steps": st.integers(1, 10**9),
        "warmup": st.integers(0, 10**9),
        "learning_rate": st.floats(1e-300, 1e300) | st.integers(1, 10**18),
        "clip": st.none() | st.floats(1e-9, 1e9),
        "seed": st.integers(0, 2**64 - 1),
        "data": st.text(),
        "device": st.none() | st.text(),
        "mlp": st.none() | st.booleans(),
        "block": st.fixed_dictionaries({}, optional={"bias": st.booleans(), "kv_heads": st.sampled_from([None, 1, 2])}),
    },
)


@given(values=numbers)
def test_settings_come_back_from_json(values: dict[str, Any]) -> None:
    chosen = build("softmax", values)
    stored = json.loads(json.dumps(chosen.to_json(), allow_nan=False))
    assert from_json(stored) == chosen and differences(stored, chosen.to_json()) == []
    assert build("softmax", merge(stored, {})) == chosen
    assert build("softmax", merge(stored, {"layers": 7})) == dataclasses.replace(chosen, layers=7)
    assert differences(stored, dataclasses.replace(chosen, layers=7).to_json()) == ["layers"]
    for step in (1, chosen.steps):
        assert 0.0 <= chosen.schedule(step) <= chosen.learning_rate


def test_a_whole_number_is_as_good_as_a_real_one() -> None:
    assert build("softmax", {"clip": 1, "temperature": 0}).to_json() == build("softmax", {"temperature": 0.0}).to_json()
    assert isinstance(build("softmax", {"clip": 1}).clip, float)


def test_options_of_the_block_are_merged_and_compared_one_by_one() -> None:
    stored = build("softmax", {"block": {"bias": True}}).to_json()
    chosen = build("softmax", merge(stored, {"block": {"kv_heads": 2}}))
    assert chosen.block == {"bias": True, "kv_heads": 2} and chosen.model.block(0).kv_heads == 2
    assert differences(stored, chosen.to_json()) == ["block.kv_heads"]
    assert differences(stored, build("softmax", {"block": {"bias": False}, "seed": 1}).to_json()) == [
        "seed",
        "block.bias",
    ]
    assert differences({"old": 1, "same": 2}, {"new": 1, "same": 2}) == ["old", "new"]


def test_the_parts_take_their_numbers_from_the_settings() -> None:
    chosen = build(
        "softmax", {"weight_decay": 0.3, "beta1": 0.8, "width": 32, "context": 8, "layers": 3, "gelu": "exact"}
    )
    assert (chosen.optimiser.beta1, chosen.optimiser.beta2, chosen.optimiser.epsilon) == (0.8, 0.95, 1e-8)
    assert [group.weight_decay for group in chosen.optimiser.groups] == [0.0, 0.0, 0.0, 0.3, 0.0]
    config = chosen.model
    assert (config.width, config.context, config.layers, config.gelu, config.vocabulary) == (32, 8, 3, "exact", 256)


def test_every_field_is_described() -> None:
    described = (settings.Settings.__doc__ or "").split("----------")[1]
    for field in dataclasses.fields(Settings):
        assert field.name in described, field.name
