"""What the definition says of itself: the energy that its flow goes down, and where its scores stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from refattn.mechanisms.graph_energy import definition

SEEDS = range(20)


def drawn(seed: int) -> tuple[list[Any], float, float]:
    """q, k, v of some tokens, mu and kappa."""
    r = np.random.default_rng(seed)
    n, size = int(r.integers(2, 10)), float(r.choice([0.5, 1.0, 2.0]))
    mu, kappa = r.uniform(0.1, 2.0, 2)
    return list(size * r.standard_normal((3, 1, 2, n, 4))), float(mu), float(kappa)


def balance_of(q: Any, k: Any) -> Any:
    """pi_i = sum_l exp(r_il) as a column."""
    scores = q @ np.matrix_transpose(k) / np.sqrt(q.shape[-1])
    return np.sum(np.exp(0.5 * (scores + np.matrix_transpose(scores))), axis=-1, keepdims=True)


def energy(x: Any, saved: Any, pi: Any, mu: float, kappa: float) -> Any:
    """E of each head."""
    differences = np.matrix_transpose(x) - x
    held = 0.5 * mu * np.sum(pi * (x - saved.start) ** 2, axis=(-2, -1))
    return held + 0.5 * kappa * np.sum(pi * saved.links * (1.0 - np.cos(differences)), axis=(-2, -1))


@pytest.mark.parametrize("seed", SEEDS)
def test_every_step_up_to_the_longest_lowers_the_energy(seed: int) -> None:
    (q, k, v), mu, kappa = drawn(seed)
    longest = 2.0 / (mu + 2.0 * kappa)
    for step in (0.5 * longest, longest):
        saved, pi = definition.forward(q, k, v, mu=mu, kappa=kappa, step=step, steps=30)[1], balance_of(q, k)
        energies = np.stack([energy(x, saved, pi, mu, kappa) for x, _, _ in saved.path])
        assert np.all(np.diff(energies, axis=0) <= 1e-13 * np.max(np.abs(energies)))


@pytest.mark.parametrize("seed", SEEDS)
def test_scores_stay_between_0_and_1(seed: int) -> None:
    (q, k, v), mu, kappa = drawn(seed)
    saved = definition.forward(q, k, v, mu=mu, kappa=kappa, step=1.0 / (mu + kappa), steps=30)[1]
    assert all(np.all((x >= 0.0) & (x <= 1.0)) for x, _, _ in saved.path)


@pytest.mark.parametrize("seed", SEEDS)
def test_ten_steps_leave_2_percent_of_the_way(seed: int) -> None:
    (q, k, v), _, _ = drawn(seed)
    saved, rest = definition.forward(q, k, v, steps=11)[1], definition.forward(q, k, v, steps=200)[1].path[-1][0]
    begin, end = np.max(np.abs(saved.start - rest), axis=2), np.max(np.abs(saved.path[-1][0] - rest), axis=2)
    assert np.all(end <= (2.0 / 3.0) ** 10 * begin)
