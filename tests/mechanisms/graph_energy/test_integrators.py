"""Flows that stop, and states that are computed again: laws and gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.mechanisms.graph_energy import core
from tests.mechanisms.graph_energy.calls import STATES, B, H, check_gradients, draw, forward, kept, qkv, run
from tests.mechanisms.graph_energy.test_gradients import numbers_of

# --- stopping, by channel


def test_every_channel_has_steps_of_its_own() -> None:
    """A head by itself stops where it does beside others."""
    q, k, v = qkv()
    for state in STATES:
        options: dict[str, Any] = {"stop_force": 1e-3, "steps": 60, "state": state}
        out, saved = forward(q, k, v, **options)
        alone, other = forward(q[1:, 2:3], k[1:, 1:2], v[1:, 1:2], **options)
        np.testing.assert_allclose(out[1:, 2:3], alone, rtol=0, atol=1e-14)
        counts = ra.graph_energy.steps_taken(saved)
        assert np.array_equal(counts[1:, 2:3], ra.graph_energy.steps_taken(other))
        assert state == "token" or len(set(counts.ravel().tolist())) > 1


# --- gradients


CALLS: list[dict[str, Any]] = [
    {"stop_force": 0.2, "state": "feature", "coupling": "sin"},
    {"stop_plateau": 0.05, "state": "query"},
    {"stop_level": 0.0009, "state": "token"},
    {"stop_force": 0.2, "state": "prefix", "integrator": "heun", "symmetrise": "mean", "intrinsic": "double_well"},
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_gradients_are_those_of_autograd(call: dict[str, Any]) -> None:
    """Of the steps that were taken."""
    arrays = dict(zip("qkv", qkv(5), strict=True)) | numbers_of(call["state"]) | {"step": np.asarray(0.4)}
    options = {**call, "steps": 6, "kind": "soft", "mask": kept("mask", B, 1, 5, 5, keep=0.8)}
    counts = ra.graph_energy.steps_taken(forward(**arrays, **options)[1])
    assert 0 < np.sum(counts) < 6 * counts.size
    check_gradients(arrays, **options)


# --- checkpoints


@pytest.mark.parametrize("checkpoint", [1, 3, 4, 50])
@pytest.mark.parametrize(
    "options",
    [
        {"integrator": "heun"},
        {"integrator": "rk4", "state": "query"},
        {"stop_force": 0.05},
    ],
    ids=str,
)
def test_checkpoints_change_no_bit(options: dict[str, Any], checkpoint: int) -> None:
    out, saved = run(**options, steps=10)
    again, kept_less = run(**options, steps=10, checkpoint=checkpoint)
    assert np.array_equal(out, again)
    assert all(step.stages == () for step in kept_less.inner.flow.steps)
    assert len(kept_less.inner.flow.states) == 1 + math.ceil(len(saved.inner.flow.steps) / checkpoint)
    d_out = draw("d_out", *out.shape)
    plain, checked = core.backward(saved, d_out), core.backward(kept_less, d_out)
    assert all(np.array_equal(x, checked[name]) for name, x in plain.items())


# --- stopping


def test_what_stops_a_flow() -> None:
    limits: dict[str, dict[str, Any]] = {
        "force": {"stop_force": 1e-2},
        "plateau": {"stop_plateau": 1e-4},
        "level": {"stop_level": 0.01, "state": "feature", "coupling": "identity", "intrinsic": "none"},
    }
    for name, options in limits.items():
        _, saved = run(**options, steps=200)
        counts = ra.graph_energy.steps_taken(saved)
        assert np.all(counts < 200) and len(saved.inner.flow.steps) == np.max(counts)
        if name == "force":
            assert np.max(ra.graph_energy.residual(saved)) <= 1e-2
            before = [saved.inner.flow.states[int(n) - 1][b, h] for (b, h, _), n in np.ndenumerate(counts)]
            # One step earlier it was not at rest: a step of Euler is h times the rate.
            ends = zip(np.ndindex(B, H), before, strict=True)
            steps = [np.max(np.abs(saved.scores[at] - x)) for at, x in ends]
            assert np.min(steps) > 1e-2 * saved.options.step * 0.9999
    every = run(state="feature", steps=40)[1].inner.flow
    for n, x in enumerate(run(state="feature", steps=40, stop_force=0.1)[1].inner.flow.states):
        where = np.max(np.abs(every.steps[n].stages[0][2]), axis=2) > 0.1 if n < 40 else None
        if where is not None:
            assert np.array_equal(np.swapaxes(x, 2, 3)[where], np.swapaxes(every.states[n], 2, 3)[where])


def test_a_batch_stops_element_by_element() -> None:
    q, k, v = qkv()
    out, saved = forward(q, k, v, stop_force=1e-4, steps=300)
    counts = ra.graph_energy.steps_taken(saved)
    assert len(set(counts.ravel().tolist())) > 1
    for b in range(B):
        for h in range(H):
            alone = q[b : b + 1, h : h + 1], *(x[b : b + 1, h // 2 : h // 2 + 1] for x in (k, v))
            one, _ = forward(*alone, steps=int(counts[b, h, 0]))
            np.testing.assert_allclose(out[b, h], one[0, 0], rtol=0, atol=1e-15)
