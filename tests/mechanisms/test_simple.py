"""A mechanism from three files, those of the tutorial: its core, its block, and what may stand in their place."""

from __future__ import annotations

import importlib
import math
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import backends, tree
from refattn.args import Real
from refattn.cli.show import standalone
from refattn.mechanisms.cache import KeyValueStream
from refattn.mechanisms.projections import State
from refattn.mechanisms.record import Mechanism
from refattn.mechanisms.simple import core_of, mechanism
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
    with pytest.raises(TypeError, match=r"params: got Params of .*, needs a Params of refattn.mechanisms.softmax"):
        ra.mechanism("softmax").block.start(params, X, ra.Context())


def other_definition(sigmoid: Any) -> ModuleType:
    """Return the definition under another name: a core is a module that others find by its name."""
    other = ModuleType("other.definition")
    vars(other).update(forward=sigmoid.definition.forward, backward=sigmoid.definition.backward)
    return other


def test_a_core_refuses_what_another_one_saved(record: Mechanism, sigmoid: Any) -> None:
    core: Any = record.core
    q = X[:, None]
    out, saved = core.forward(q, q, q)
    with pytest.raises(TypeError, match=r"saved: got Saved of sigmoid\.core, needs the Saved of other\.core"):
        core_of(other_definition(sigmoid)).backward(saved, out)
    copy = pickle.loads(pickle.dumps(saved))
    assert np.array_equal(core.backward(copy, out)["q"], core.backward(saved, out)["q"])


def test_the_record_says_what_an_option_has_to_be(sigmoid: Any) -> None:
    q, definition = X[:, None], other_definition(sigmoid)
    wide, positive = core_of(definition), core_of(definition, {"scale": Real(0.0, above=True)})
    assert wide.forward(q, q, q, scale=0.0)[0].shape == q.shape
    assert np.array_equal(positive.forward(q, q, q, scale=0.5)[0], wide.forward(q, q, q, scale=0.5)[0])
    assert np.array_equal(positive.forward(q, q, q)[0], wide.forward(q, q, q, scale=None)[0])
    for wrong in (0.0, -0.0, -1.0, math.inf):
        with pytest.raises(ValueError, match=rf"scale: got {wrong}, needs a finite number above 0"):
            positive.forward(q, q, q, scale=wrong)
    with pytest.raises(ValueError, match="options: got 'scal', needs one of scale"):
        core_of(definition, {"scal": Real()})
    made = mechanism("", "", definition, sigmoid.loops, cases=(), options={"scale": Real(0.0, above=True)})
    with pytest.raises(ValueError, match="scale: got 0.0, needs a finite number above 0"):
        made.core.forward(q, q, q, scale=0.0)  # type: ignore[union-attr]


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
