"""Growth on the way: when, what the optimiser's state becomes, and a run that is resumed to the bit across a growth."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import model, tree
from refattn.train import checkpoint, data, loop, metrics
from refattn.train.growing import History, Schedule, due, widened
from refattn.train.optimiser import AdamW, Group
from refattn.train.settings import Settings, build
from tests.train.runs import SMALL, Listener, Stopping, remains, train, write_text

GROWS = [name for name in ra.list_mechanisms() if ra.mechanism(name).grow is not None]
GROWTH = {"most": 2, "sequences": 16}


def settings_of(text: str, name: str = "growing", **changes: Any) -> Settings:
    given = SMALL | {
        "data": text,
        "grow": [3, 7],
        "growth": GROWTH,
        "layers": 2,
        "block": {"head_width": 2, "value_width": 8},
    }
    return build(name, given | changes)


@pytest.fixture
def text(tmp_path: Path) -> str:
    return write_text(tmp_path)


# --- when


def losses_of(*values: float) -> History:
    return History(tuple(values))


def test_growth_is_due_at_a_plateau() -> None:
    schedule = Schedule(every=4, window=4, plateau=0.01, cooldown=8)
    still, falling = losses_of(2.0, 2.0, 2.0, 1.99), losses_of(2.0, 2.0, 1.9, 1.9)
    assert due(schedule, still, 8)
    assert not due(schedule, falling, 8)
    assert not due(schedule, still, 9)  # no step of a look
    assert not due(schedule, losses_of(2.0, 2.0, 2.0), 8)  # too little is known
    assert not due(schedule, replace(still, grown=4), 8)  # too soon after the last
    assert due(schedule, replace(still, grown=4), 12)
    rising = losses_of(2.0, 2.0, 2.1, 2.1)
    assert due(schedule, rising, 8)


# --- settings


@pytest.mark.parametrize(
    ("values", "error", "problem"),
    [
        ({"grow": "always"}, ValueError, "grow: got 'always', needs null, \"auto\" or a list of steps"),
        ({"grow": [0]}, ValueError, "grow: got 0, needs a whole number of at least 1"),
        ({"grow": [3, 9], "steps": 8}, ValueError, "grow: got step 9, needs steps of at most 8, which is the last one"),
        ({"grow": [3, 3]}, ValueError, "grow: got [3, 3], needs each step once"),
        ({"grow": ["a"]}, TypeError, "grow: got 'a', needs a whole number"),
        ({"growth": {"most": 1}}, ValueError, "growth: got most, needs grow as well"),
        ({"grow": "auto", "growth": {"width": 1}}, ValueError, "growth: got 'width', needs some of every, window"),
        ({"grow": "auto", "growth": {"most": -1}}, ValueError, "growth.most: got -1, needs a whole number"),
        ({"grow": "auto", "growth": {"window": 1}}, ValueError, "growth.window: got 1, needs a whole number of at"),
        ({"grow": "auto", "growth": {"moments": "lose"}}, ValueError, "growth.moments: got 'lose', needs one of keep"),
        ({"grow": "auto", "growth": 3}, TypeError, "growth: got 3, needs a Mapping"),
    ],
)
def test_wrong_settings_are_named(values: dict[str, Any], error: type[Exception], problem: str) -> None:
    with pytest.raises(error) as caught:
        build("growing", values)
    assert str(caught.value).startswith(problem)


def test_who_does_not_grow_says_who_does() -> None:
    with pytest.raises(ValueError, match="grow: got 'auto', but softmax does not grow; needs one of growing"):
        build("softmax", {"grow": "auto"})


# --- the optimiser


def params_with(width: int) -> dict[str, Any]:
    return {"w": np.ones((2, 3, width)), "other": np.ones((4, 3))}


def test_new_columns_come_with_zeros_and_a_count_of_their_own() -> None:
    adam = AdamW(0.1, groups=(Group("*"),))
    params = params_with(2)
    state = adam.start(params)
    for _ in range(3):
        params, state = adam.update(state, params, tree.map_leaves(np.ones_like, params))
    grown = {**params, "w": np.concatenate([params["w"], np.zeros((2, 3, 2))], axis=2)}
    wide = widened(state, grown)
    for part, old in ((wide.first, state.first), (wide.second, state.second)):
        np.testing.assert_array_equal(part["w"][..., :2], old["w"])
        assert not np.any(part["w"][..., 2:]) and part["w"].shape == (2, 3, 4)
        assert part["other"] is old["other"]
    np.testing.assert_array_equal(wide.count["w"], [[[3.0, 3.0, 0.0, 0.0]]])
    assert wide.count["other"].shape == ()
    # Test 23: the first step of a new column has the size of the rate, since its bias correction starts anew.
    after, following = adam.update(wide, grown, tree.map_leaves(np.ones_like, grown))
    np.testing.assert_allclose(after["w"][..., 2:], -0.1 / (1.0 + 1e-8), rtol=1e-12)
    again = widened(following, {**after, "w": np.concatenate([after["w"], np.zeros((2, 3, 1))], axis=2)})
    np.testing.assert_array_equal(again.count["w"], [[[4.0, 4.0, 1.0, 1.0, 0.0]]])
    reset = widened(state, grown, reset=True)
    assert (
        not np.any(reset.first["w"]) and not np.any(reset.count["w"]) and reset.first["other"] is state.first["other"]
    )


def test_in_mode_zero_the_old_columns_go_on_as_if_nothing_had_happened(text: str) -> None:
    """Test 23, its second part, in the model: without clipping, whose norm the new columns belong to."""
    chosen = settings_of(text, growth={**GROWTH, "mode": "zero"}, clip=None, dtype="float64", grow=[1])
    loaded = data.load(text)
    before, _ = loop.step(loop.fresh(chosen), chosen, loaded)
    grown, facts = loop.grow(before, chosen, loaded)
    assert facts["grown"] and facts["widths"] == [4, 4] and facts["after"] == pytest.approx(facts["before"], rel=1e-12)
    plain = loop.step(before, chosen, loaded)[0].params
    other = tree.flatten(loop.step(grown, chosen, loaded)[0].params)
    for name, expected in tree.flatten(plain).items():
        found = other[name][tuple(slice(n) for n in expected.shape)]
        # Weight decay, the rate and all moments are the same, so the step is.
        np.testing.assert_allclose(found, expected, rtol=0.0, atol=1e-12, err_msg=name)
    new = other["layers.0.block.w_k"][..., 2:]
    np.testing.assert_allclose(np.abs(new), chosen.schedule(2), rtol=1e-3)


# --- runs


RUNS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "default": ({}, (2, 4, 9)),  # before the first growth, between both and after the second
    "additive": ({"mode": "additive", "scale": "rescale"}, (4,)),
    "uneven": ({"uneven": True, "most": 1}, (4,)),
    "exact": ({"metric": "exact", "method": "optimal_als", "moments": "reset", "sequences": 4}, (4,)),
}
"""Options of growth, and the steps after which a run is stopped."""

# So few sequences leave the exact metric nearly singular: its solve ends with a residual, and says so.
EXACT = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:residual:refattn.mechanisms.precision.PrecisionWarning"),
]


@pytest.mark.parametrize("name", GROWS)
@pytest.mark.parametrize("how", [pytest.param(how, marks=EXACT if how == "exact" else ()) for how in RUNS])
def test_a_run_grows_and_goes_on_to_the_bit(tmp_path: Path, text: str, name: str, how: str) -> None:
    growth, stops = RUNS[how]
    chosen = settings_of(text, name, growth=GROWTH | growth, checkpoint_every=2)
    whole = train(chosen, tmp_path / "whole")
    rows = [row for row in metrics.read(whole.folder / "metrics.jsonl") if "growth" in row]
    looks = [row["growth"] for row in rows]
    columns = GROWTH["most"] if how != "uneven" else 1
    widths = [[2 + columns] * 2, [2 + 2 * columns] * 2]
    assert [row["step"] for row in rows] == [3, 7] and all(look["grown"] for look in looks)
    assert all(look["after"] <= look["before"] * (1.0 + 1e-6) for look in looks)
    if how == "uneven":
        each = [layer["each"] for look in looks for layer in look["layers"].values()]
        assert all(sum(columns) == 2 for columns in each) and any(columns != [1, 1] for columns in each)
    else:
        assert [look["widths"] for look in looks] == widths and whole.facts["widths"] == widths[1]
        last = checkpoint.newest(whole.folder / "checkpoints", print)
        assert last is not None and [block["head_width"] for block in last.facts["growth"]["blocks"]] == widths[1]
        assert last.arrays["params.layers.0.block.w_q"].shape == (2, 16, 6)
        assert last.arrays["optimiser.count.layers.0.block.w_q"].shape == (1, 1, 6)
    for stop in stops:  # as a process that is killed there
        path = tmp_path / f"stopped{stop}"
        with pytest.raises(InterruptedError):
            train(chosen, path, Stopping(stop, InterruptedError))
        assert remains(train(chosen, path, resume=True).folder) == remains(whole.folder), stop


def test_where_nothing_is_gained_nothing_grows(tmp_path: Path, text: str) -> None:
    growth = {"every": 2, "window": 2, "plateau": 1.0, "cooldown": 0, "sequences": 8, "gain": 1e9}
    chosen = settings_of(text, grow="auto", growth=growth)
    report = Listener()
    found = train(chosen, tmp_path / "run", report)
    assert found.facts["widths"] == [2, 2]
    assert "step 2: nothing to gain by growing, widths [2, 2]" in report.lines
    plain = train(settings_of(text, grow=None, growth={}), tmp_path / "plain", Listener())
    assert plain.facts["heldout_bits"] == found.facts["heldout_bits"] and "widths" not in plain.facts


def test_columns_of_an_automatic_growth_are_confirmed(tmp_path: Path, text: str) -> None:
    growth = {"every": 4, "window": 4, "plateau": 1.0, "cooldown": 8, "sequences": 64, "gain": 0.0, "trust": 0.0}
    found = train(settings_of(text, grow="auto", growth=growth), tmp_path / "run", Listener())
    assert all(width > 2 for width in found.facts["widths"])
    rows = [row["growth"] for row in metrics.read(tmp_path / "run" / "metrics.jsonl") if "growth" in row]
    assert [row["grown"] for row in rows] == [True, True]  # after 4 and 12 steps: 8 is too soon after 4
    assert all(row["actual"] < 0.0 and row["predicted"] < 0.0 for row in rows)


def test_an_option_that_does_not_fit_is_named(tmp_path: Path, text: str) -> None:
    """A model is causal, and hidden keys have no mean: nothing to do with numbers that are not finite."""
    chosen = settings_of(text, growth={**GROWTH, "center_keys": True})
    with pytest.raises(ValueError, match="center_keys: got True with a mask, needs False"):
        train(chosen, tmp_path / "run", Listener())


def test_statistics_do_not_depend_on_workers_or_parts(text: str) -> None:
    chosen = settings_of(text)
    state, loaded = loop.fresh(chosen), data.load(text)
    results = []
    for workers in (1, 3):
        with ra.backends.use_workers(workers):
            grown, facts = loop.grow(replace(state, step=3), chosen, loaded)
        results.append((json.dumps(facts), {n: x.tobytes() for n, x in tree.flatten(grown.params).items()}))
    assert results[0] == results[1]


def test_the_model_tells_what_each_block_is_given() -> None:
    config = model.Config("growing", vocabulary=11, context=8, width=8, heads=2, layers=3)
    params = model.init(config, seed=0, like=np.zeros(1))
    logits, saved = model.forward(params, np.arange(16).reshape(2, 8) % 11)
    seen: list[tuple[int, Any]] = []
    found = model.backward(params, saved, logits, watch=lambda i, p, s, d: seen.append((i, (p, s, d))))
    assert [index for index, _ in seen] == [2, 1, 0]
    for index, (block, block_saved, d_state) in seen:
        assert block is params.layers[index].block
        _, again, _ = config.record.block.backward(block, block_saved, d_state)
        np.testing.assert_array_equal(again.w_q, found.layers[index].block.w_q)
