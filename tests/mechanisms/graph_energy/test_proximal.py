"""A threshold after every step: what it minimises, its gradients, and what it does not go with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.mechanisms.graph_energy.system import weights_of
from tests.mechanisms.graph_energy.calls import STATES, SYMMETRIC, qkv, run

TAU = {"token": 0.1, "prefix": 0.1, "query": 0.1, "feature": 0.3}
BOUNDED = ("sin", "tanh", "identity", "arctan")


@pytest.mark.parametrize("symmetrise", SYMMETRIC)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("coupling", BOUNDED)
def test_energy_and_sizes_fall_together(coupling: str, state: str, symmetrise: str) -> None:
    """E + tau sum pi |x| is no larger after a step of at most 1/L, and at rest no rate is larger than tau."""
    options: dict[str, Any] = {"coupling": coupling, "state": state, "symmetrise": symmetrise, "kind": "proximal"}
    _, saved = run(**options, steps=400, tau=TAU[state])
    inner, pi, tau = saved.inner.flow, weights_of(saved.inner.graph), TAU[state]
    sizes = [np.sum(pi * tau * np.abs(x), axis=(2, 3)) for x in inner.states]
    levels = ra.graph_energy.energy(saved) + np.stack(sizes, axis=-1)
    # 30 roundings of a sum of such a size.
    assert np.max(np.diff(levels, axis=-1) / (1.0 + np.abs(levels[..., 1:]))) < 30 * 2.0**-53
    assert np.all(levels[..., -1] < levels[..., 0])
    x = saved.scores
    rate = saved.system.rate(x)
    zero = x == 0.0
    assert np.any(zero) or state in ("token", "prefix")
    np.testing.assert_allclose(rate[~zero], tau * np.sign(x[~zero]), rtol=0, atol=1e-13)
    most = np.abs(rate[zero]) if state == "feature" else rate[zero]
    assert np.max(most, initial=0.0) <= tau + 1e-13


def test_without_a_flow_it_is_a_soft_threshold() -> None:
    """mu = kappa = 0: each step takes h tau away."""
    for state in STATES:
        options: dict[str, Any] = {"state": state, "mu": 0.0, "kappa": 0.0, "step": 0.25}
        out, saved = run(**options, kind="proximal", steps=2, tau=0.1)
        other, _ = run(**options, kind="soft", steps=2, tau=0.05)
        np.testing.assert_allclose(out, other, rtol=0, atol=1e-13)
        assert np.array_equal(saved.inner.readout.kept, saved.scores)


def test_a_row_of_zeros_goes_to_the_largest_attention() -> None:
    out, saved = run(kind="proximal", tau=5.0, steps=8)
    assert not np.any(saved.scores)
    attention, v = saved.inner.graph.attention, np.repeat(qkv()[2], 2, axis=1)
    best = np.argmax(attention, axis=-1)
    assert np.array_equal(out, np.take_along_axis(v, best[..., None], axis=2))
