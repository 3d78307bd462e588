"""A mechanism from three files, those of the tutorial: its core, its block, and what may stand in their place."""

from __future__ import annotations

import importlib
import math
import pickle
import shutil
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
from refattn.mechanisms.case_builders import qkv
from refattn.mechanisms.projections import State
from refattn.mechanisms.record import Mechanism, Unsupported
from refattn.mechanisms.simple import core_of, mechanism
from refattn.ops.heads import repeat_heads
from refattn.train import settings
from refattn.verify import check, locate, traced, verify

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


# --- options that reach the block, numbers with a gradient, further implementations


def halves(sigmoid: Any) -> ModuleType:
    """An implementation of sigmoid attention that takes half of the queries at a time, and no mask."""
    own = ModuleType("other.halves", "As in the definition, queries in two parts.")

    def forward(q: Any, k: Any, v: Any, mask: Any, offset: Any, scale: Any = None) -> Any:
        if mask is not None or offset is not None:
            raise Unsupported("implementation: got halves, needs a call without a mask that is not causal")
        n = q.shape[2] // 2
        parts = [sigmoid.definition.forward(x, k, v, None, scale) for x in (q[:, :, :n], q[:, :, n:])]
        return np.concatenate([out for out, _ in parts], axis=2), (n, [saved for _, saved in parts])

    def backward(saved: Any, d_out: Any) -> Any:
        n, parts = saved
        first, second = (
            sigmoid.definition.backward(own, d)
            for own, d in zip(parts, (d_out[:, :, :n], d_out[:, :, n:]), strict=True)
        )
        joined = np.concatenate([first["q"], second["q"]], axis=2)
        return {"q": joined, "k": first["k"] + second["k"], "v": first["v"] + second["v"]}

    vars(own).update(forward=forward, backward=backward)
    return own


def test_options_reach_the_block(record: Mechanism) -> None:
    block = record.block
    outs = []
    for options in ({}, {"scale": None}, {"scale": 0.25}, {"scale": 0.5}):
        params = block.init(block.Config(width=8, heads=2, **options), like=X)
        state, saved = block.forward(params, State(X), ra.Context(causal=True))
        assert block.backward(params, saved, state)[0].x.shape == X.shape
        outs.append(state.x)
    assert np.array_equal(outs[0], outs[1]) and np.array_equal(outs[0], outs[3])  # 1 / sqrt(4)
    assert not np.allclose(outs[0], outs[2])
    config = block.Config(width=8, heads=2, scale=0.25)
    assert pickle.loads(pickle.dumps(config)) == config != block.Config(width=8, heads=2)
    for wrong in ("wide", [0.5], math.nan):
        with pytest.raises((TypeError, ValueError), match="scale: got .*, needs a finite number"):
            block.Config(width=8, heads=2, scale=wrong)
    chosen = settings.build(record, {"width": 8, "heads": 2, "layers": 1, "context": 8, "block": {"scale": 0.25}})
    assert chosen.model.block(0).scale == 0.25
    with pytest.raises(ValueError, match="options: got 'beta', sigmoid has .*scale"):
        settings.build(record, {"width": 8, "heads": 2, "block": {"beta": 1.0}})


def test_an_option_may_not_be_called_as_one_of_the_block(sigmoid: Any) -> None:
    taken = ModuleType("other.definition")

    def forward(q: Any, k: Any, v: Any, allowed: Any = None, head_width: int = 2) -> Any:
        return v, None

    vars(taken).update(forward=forward, backward=sigmoid.definition.backward)
    with pytest.raises(ValueError, match="options: got 'head_width', which a block calls one of its own"):
        mechanism("", "", taken, sigmoid.loops, cases=())


def with_scale_gradient(sigmoid: Any, factor: float = 1.0) -> ModuleType:
    """Return a definition whose backward has the gradient of the scale, too, times a factor."""
    definition = other_definition(sigmoid)

    def backward(saved: Any, d_out: Any) -> Any:
        q, k, v, weights, scale = saved
        k_heads, v_heads = (repeat_heads(x, q.shape[1]) for x in (k, v))
        scores = q @ k_heads.swapaxes(-1, -2)
        d_scale = np.sum(d_out @ v_heads.swapaxes(-1, -2) * weights * (1.0 - weights) * scores)
        return {**sigmoid.definition.backward(saved, d_out), "scale": np.asarray(factor * d_scale)}

    vars(definition).update(backward=backward)
    return definition


def test_numbers_have_gradients_if_they_are_given(sigmoid: Any) -> None:
    definition = with_scale_gradient(sigmoid)
    core = core_of(definition, {"scale": Real(0.0, above=True)}, differentiable=("scale",))
    q, k, v, d = np.random.default_rng(1).standard_normal((4, 1, 2, 3, 4))
    out, saved = core.forward(q, k, v)
    assert set(core.backward(saved, out)) == {"q", "k", "v"}

    def loss(scale: Any) -> float:
        return float(np.sum(core.forward(q, k, v, scale=scale)[0] * d))

    for scale in (0.7, np.asarray(0.7)):
        found = core.backward(core.forward(q, k, v, scale=scale)[1], d)["scale"]
        assert found.shape == () and np.isclose(found, (loss(0.7 + 1e-6) - loss(0.7 - 1e-6)) / 2e-6, rtol=1e-6)
    for wrong in (0.0, np.asarray(0.0), np.ones(2)):
        with pytest.raises(ValueError, match="scale: got .*, needs a finite number above 0"):
            core.forward(q, k, v, scale=wrong)
    with pytest.raises(ValueError, match="differentiable: got 'scal', needs one of scale"):
        core_of(definition, differentiable=("scal",))
    made = mechanism("", "", definition, sigmoid.loops, cases=(), differentiable=("scale",))
    assert made.differentiable == ("scale",)


@pytest.mark.parametrize(("factor", "scale", "says"), [
    (1.0, 0.5, ""),
    (1.001, 0.5, "gradient of scale, implementation dense"),
    (1.001, None, "gradient of scale: no case gives this option a number"),
])  # fmt: skip
def test_a_wrong_gradient_of_an_option_is_named(
    sigmoid: Any, factor: float, scale: float | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a sample, too: no row may pass it over because other cases were drawn."""
    monkeypatch.setitem(sys.modules, "other", ModuleType("other"))
    sizes: dict[str, Any] = {"b": 1, "h": 1, "n_q": 3, "d": 2}
    cases = tuple(qkv(name, "plain", "", **sizes) for name in ("tiny", "plain"))
    cases += (qkv("scaled", "scaled", "", **sizes, scale=scale),)
    definition = with_scale_gradient(sigmoid, factor)
    made = mechanism("", "", definition, sigmoid.loops, cases=cases, differentiable=("scale",))
    report = check(made, progress=lambda tasks: [task for task in tasks if task.name == "core, differences"])
    (row,) = report.rows
    assert (row.status == "agrees") is (factor == 1.0) and says in row.detail


def test_implementations_beside_the_definition(sigmoid: Any) -> None:
    definition, other = other_definition(sigmoid), halves(sigmoid)
    made = mechanism("", "", definition, sigmoid.loops, cases=(), more={"halves": other})
    assert made.implementations == ("dense", "halves") and made.block_modules == (other,)
    assert made.equation_modules[:2] == (definition, other)
    core: Any = made.core
    q, k, v, d = np.random.default_rng(1).standard_normal((4, 1, 2, 6, 4))
    found = {}
    for name in ("auto", "dense", "halves"):
        out, saved = core.forward(q, k, v, scale=0.3, implementation=name)
        assert saved.implementation == ("halves" if name == "halves" else "dense")
        found[name] = {"out": out, **core.backward(saved, d)}
    for name, x in found["dense"].items():
        np.testing.assert_allclose(found["halves"][name], x, rtol=1e-12, atol=1e-14)
    for options in ({"causal": True}, {"mask": np.ones((1, 1, 6, 6), bool)}):
        with pytest.raises(Unsupported, match="implementation: got halves"):
            core.forward(q, k, v, implementation="halves", **options)
    with pytest.raises(ValueError, match="implementation: got 'thirds', needs one of auto, dense, halves"):
        core.forward(q, k, v, implementation="thirds")


# --- what is there without a word of its author


def test_cases_and_wrong_readings_are_there_by_default(sigmoid: Any) -> None:
    made = mechanism("", "", sigmoid.definition, sigmoid.loops)
    assert [case.name for case in made.cases] == ["tiny", "causal-fewer", "mask", "grouped"]
    core: Any = made.core

    def top_left(q: Any, k: Any, v: Any, *, causal: Any = False, **options: Any) -> Any:
        return core.forward(q, k, v, causal=causal and "top_left", **options)[0]

    found = locate(made, verify(made, top_left, dtypes=["float64"])).suspects
    assert found is not None and found.ranked[0].kind == "top-left causality" and len(found.ranked[0].cases) == 1
    assert {"mask ignored", "scale left out", "gradients averaged over a group"} <= {*made.wrong}
    own = {"mine": made.wrong["mask ignored"]}
    for wrong in (own, lambda core: own):
        more = mechanism("", "", sigmoid.definition, sigmoid.loops, wrong=wrong)
        assert list(more.wrong) == [*made.wrong, "mine"]


def test_a_case_of_ones_own_stands_in_place_of_a_usual_one(sigmoid: Any) -> None:
    small: dict[str, Any] = {"b": 1, "h": 2, "n_q": 3, "d": 2}
    own = (qkv("mine", "causal", "", **small, n_k=5, causal=True, g=1), qkv("mask", "plain", "", **small))
    made = mechanism("", "", sigmoid.definition, sigmoid.loops, cases=own)
    assert [case.name for case in made.cases] == ["mine", "mask", "tiny"]


def test_a_gradient_that_nobody_declared_is_an_error(sigmoid: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "other", ModuleType("other"))
    made = mechanism("", "", with_scale_gradient(sigmoid), sigmoid.loops)
    report = check(made, progress=lambda tasks: [task for task in tasks if task.name == "core, differences"])
    assert "backward: returned the gradient of scale, needs differentiable=('scale',)" in report.rows[0].detail


def test_axes_of_comments_are_checked(sigmoid: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "swapped"
    shutil.copytree(Path(sigmoid.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / "definition.py"
    file.write_text(file.read_text().replace("# (b, h, i, j) [dSIG.2]", "# (b, h, j, i) [dSIG.2]"))
    monkeypatch.syspath_prepend(str(tmp_path))
    made = importlib.import_module("swapped").record
    report = check(made, progress=lambda tasks: [task for task in tasks if task.section == "equations"])
    (row,) = [row for row in report.rows if row.status == "disagrees"]
    assert row.detail == "dSIG.2 has shape (2, 4, 11, 17), its comment (b, h, j, i) is (2, 4, 17, 11)"
