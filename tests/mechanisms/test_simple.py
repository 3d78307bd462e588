"""A mechanism from three files, those of the tutorial: its core, its block, and what may stand in their place."""

from __future__ import annotations

import importlib
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import backends, tree
from refattn.cli.show import standalone
from refattn.mechanisms.cache import KeyValueStream
from refattn.mechanisms.projections import State
from refattn.mechanisms.record import Mechanism
from refattn.verify import check, traced

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"

X = np.random.default_rng(0).normal(size=(2, 5, 8))


@pytest.fixture(scope="module")
def sigmoid() -> Any:
    sys.path.insert(0, str(TUTORIALS))
    try:
        yield importlib.import_module("sigmoid")
    finally:
        sys.path.remove(str(TUTORIALS))


@pytest.fixture(scope="module")
def record(sigmoid: Any) -> Mechanism:
    found: Mechanism = sigmoid.record
    return found


def test_three_files_pass_every_check(record: Mechanism, sigmoid: Any) -> None:
    assert sorted(path.name for path in Path(sigmoid.__file__).parent.glob("*.py")) == [
        "__init__.py",
        "definition.py",
        "loops.py",
    ]
    report = check(record)
    missing = [row for row in report.rows if row.status != "agrees"]
    assert report.exit_code == 0 and len(report.rows) == 21
    without_torch = [] if backends.get("torch").why_unavailable() is None else ["core, autograd", "block, autograd"]
    assert [row.name for row in missing] == ["every stored case", *without_torch]


def test_options_are_those_of_the_definition(record: Mechanism) -> None:
    assert record.defaults == {"mask": None, "causal": False, "implementation": "auto", "scale": None}
    assert record.core is not None
    with pytest.raises(TypeError, match=r"window: got an option that sigmoid.definition does not have"):
        record.core.forward(*[X[:, None]] * 3, window=3)


def test_a_reader_meets_the_definition(record: Mechanism, sigmoid: Any) -> None:
    run = traced.read_run(record, "causal", "float64", backends.get("numpy"))
    assert run.about[1] == "definition" and run.why == ""
    own: dict[str, Any] = {}
    exec(standalone(sigmoid.definition), own)
    q, k = X[:, None], X[:, :1, None, :].repeat(5, axis=2)
    assert np.array_equal(own["forward"](q, k, k)[0], sigmoid.definition.forward(q, k, k)[0])


def test_a_configuration_can_be_pickled(record: Mechanism) -> None:
    config = record.block.Config(width=8, heads=2)
    assert pickle.loads(pickle.dumps(config)) == config


def test_two_mechanisms_do_not_take_each_others_parameters(record: Mechanism) -> None:
    params = record.block.init(record.block.Config(width=8, heads=2), like=X)
    with pytest.raises(TypeError, match=r"params: got Params, needs a Params of refattn.mechanisms.softmax"):
        ra.mechanism("softmax").block.start(params, X, ra.Context())


@pytest.mark.parametrize("bias", [False, True])
def test_the_gradient_of_a_memory(record: Mechanism, bias: bool) -> None:
    config = record.block.Config(width=8, heads=2, kv_heads=1, bias=bias)
    params = record.block.init(config, seed=1, like=X)
    memory, d = np.cos(X[:, ::-1]), np.sin(np.arange(X.size)).reshape(X.shape)

    def out(memory: Any) -> Any:
        context = ra.Context(memory=memory, memory_mask=np.arange(5) < [[5], [3]])
        return record.block.forward(params, State(X), context)

    _, d_params, found = record.block.backward(params, out(memory)[1], State(d))
    step = 1e-6 * np.cos(3.0 * memory)
    change = np.sum(d * (out(memory + step)[0].x - out(memory - step)[0].x)) / 2e-6
    assert np.allclose(np.sum(found["memory"] * step) / 1e-6, change, rtol=1e-7)
    assert set(tree.flatten(d_params)) == set(config.shapes())


def test_a_stream_of_keys_and_values_fits(record: Mechanism) -> None:
    block, causal = record.block, ra.Context(causal=True)
    params, stream = block.init(block.Config(width=8, heads=2), like=X), KeyValueStream(block)
    whole = block.forward(params, State(X), causal)[0].x
    cache, parts = stream.start(params, 2), []
    for n in range(5):
        state, cache = stream.step(params, cache, State(X[:, n : n + 1]), causal)
        parts.append(state.x)
    assert np.allclose(np.concatenate(parts, axis=1), whole, rtol=1e-12, atol=1e-12)
