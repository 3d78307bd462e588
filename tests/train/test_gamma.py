"""The rate that falls where the gradient of an energy is large, of mechanisms whose diagnostics tell it."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import refattn as ra
from refattn import backends, philox
from refattn.messages import BoundWarning
from refattn.train import loop, metrics, settings, step
from refattn.train.optimiser import adaptive_rate
from tests.cli.command import run
from tests.train.runs import SMALL, arguments, train, write_text

GAMMA = 1.2e-4  # forces are about 0.06 here, and rates up to 3e-3


def chosen(data: str, **changes: Any) -> settings.Settings:
    block = {"steps": 3, "threshold": "soft", "learn_step": True, "learn_tau": True}
    return settings.build("graph_energy", SMALL | {"data": data, "gamma": GAMMA, "block": block} | changes)


def test_a_step_that_is_too_long_is_warned_of_once_with_the_least_bound(tmp_path: Path) -> None:
    """The strengths of the classes are learned, and with them the longest step changes from step to step."""
    block = {"state": "prefix", "classes": 4, "step": 1.9, "steps": 2}
    plan = chosen(write_text(tmp_path), gamma=None, steps=4, warmup=1, block=block)
    with mock.patch.object(loop, "_least_bound", contextlib.nullcontext), pytest.warns(BoundWarning) as every:
        train(plan, tmp_path / "every")
    with pytest.warns(BoundWarning) as once:
        train(plan, tmp_path / "once")
    bounds = {each.message.bound for each in every if isinstance(each.message, BoundWarning)}
    assert len(every) > len(bounds) > 1
    (shown,) = once
    assert str(shown.message).startswith(f"step: got more than 2/L = {min(bounds):.3g}, ")


def test_the_rate_is_bounded_by_the_schedule_and_by_the_force(tmp_path: Path) -> None:
    plan = chosen(write_text(tmp_path))
    rows = metrics.read(train(plan, tmp_path / "run").folder / "metrics.jsonl")
    assert len(rows) == SMALL["steps"]
    below = [row["rate"] < plan.schedule(row["step"]) for row in rows]
    assert any(below) and not all(below)
    for row in rows:
        assert row["force"] > 0.0
        assert row["rate"] == min(plan.schedule(row["step"]), GAMMA / (row["force"] + 1e-12))
    plain = metrics.read(train(chosen(plan.data, gamma=None), tmp_path / "plain").folder / "metrics.jsonl")
    assert "force" not in plain[0] and [row["rate"] for row in plain] == [plan.schedule(n) for n in range(1, 13)]
    # The first step of both has the same parameters and batch, and the warm-up's rate is the smaller one.
    assert plain[0] == {**{n: x for n, x in rows[0].items() if n != "force"}, "seconds": plain[0]["seconds"]}


def test_the_command_takes_it_and_names_what_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "plot", mock.Mock())  # which would take most of the time
    data = write_text(tmp_path)
    words = arguments(data, tmp_path / "run", gamma=GAMMA, steps=2)
    words[1] = "graph_energy"
    assert run(*words).exit_code == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["settings"]["gamma"] == GAMMA
    refused = run(*arguments(data, tmp_path / "other", gamma=GAMMA))
    assert refused.exit_code == 2 and "gamma: got 0.00012 with softmax, needs one of graph_energy" in refused.output
    with pytest.raises(ValueError, match=r"gamma: got 0.0, needs a finite number above 0"):
        chosen(data, gamma=0.0)


def test_the_force_is_the_norm_of_the_gradient_of_the_energy() -> None:
    """By differences of the energy, where the graph is symmetric and there is one, of one head at a time."""
    record = ra.mechanism("graph_energy")
    x = philox.normal((1, 5, 4), seed=3, purpose="gamma")
    params = record.block.init(record.block.Config(width=4, heads=1, graph="min", steps=2), like=x)
    context = ra.Context()
    _, saved = record.block.forward(params, record.block.start(params, x, context), context)
    system: Any = saved.core.system
    start, end = system.start, saved.core.scores

    def energy(at: Any) -> float:
        between = at[0, 0, :, 0][None, :] - at[0, 0, :, 0][:, None]
        own = 0.5 * float(system.mu.item()) * np.sum((at - start) ** 2)
        return float(own + 0.5 * float(system.kappa.item()) * np.sum(system.links[0, 0] * (1.0 - np.cos(between))))

    h, slopes = 1e-5, []
    for j in range(5):
        moved = np.zeros(end.shape)
        moved[0, 0, j, 0] = h
        slopes.append((energy(end + moved) - energy(end - moved)) / (2.0 * h))
    squares, count = record.diagnostics.force(saved)
    assert count == 1
    np.testing.assert_allclose(math.sqrt(float(squares)), np.linalg.norm(slopes), rtol=1e-8)


def test_forces_do_not_depend_on_workers_or_portions(tmp_path: Path) -> None:
    plan = chosen(write_text(tmp_path), batch=128)
    params = loop.fresh(plan).params
    tokens = (philox.uniform((128, 17), seed=1, purpose="tokens") * 256).astype("int32")
    batch = tokens[:, :-1], tokens[:, 1:]
    found = []
    for workers in (1, 3):
        with backends.use_workers(workers):
            found.append(step.measured(params, *batch, forces=True)[2] or 0.0)
    assert found[0] == found[1] > 0.0
    np.testing.assert_allclose(step.measured(params, *batch, 4, forces=True)[2] or 0.0, found[0], rtol=1e-6)
    assert step.measured(params, *batch)[2] is None


def test_the_rate_has_a_largest_value() -> None:
    assert adaptive_rate(0.0, 0.1, 0.5) == 0.5 and adaptive_rate(2.0, 0.1, 0.5) == 0.1 / (2.0 + 1e-12)
