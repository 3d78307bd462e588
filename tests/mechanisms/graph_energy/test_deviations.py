"""What the article claims and what does not hold."""

from __future__ import annotations

import math

import numpy as np
import pytest

from refattn.mechanisms.graph_energy.equilibrium import jacobian_of
from refattn.mechanisms.graph_energy.forces import COUPLINGS, INTRINSICS
from refattn.mechanisms.graph_energy.implementations.pairs import DENSE, between
from refattn.mechanisms.graph_energy.system import System
from tests.mechanisms.graph_energy.calls import COUPLINGS as NAMES
from tests.mechanisms.graph_energy.calls import run


@pytest.mark.parametrize("coupling", NAMES)
def test_coupling_alone_makes_no_zero(coupling: str) -> None:
    """Without a threshold no score is 0, however long it flows; with one some are."""
    _, saved = run(coupling=coupling, tau=0.0, steps=300)
    first, last = saved.inner.flow.states[0], saved.scores
    assert np.min(last) >= np.min(first) > 0.0
    assert np.array_equal(saved.inner.readout.kept, last)
    assert np.all(np.ptp(last, axis=2) < np.ptp(first, axis=2))
    assert np.any(run(coupling=coupling, steps=300)[1].inner.readout.kept == 0.0)


def _equilibria(kappa: float) -> set[tuple[float, float]]:
    """Where two nodes with two wells each come to rest, from a grid of starts; b = 0."""
    x = np.linspace(-1.5, 1.5, 14)
    start = np.stack(np.meshgrid(x, x + 0.013), axis=-1).reshape(-1, 1, 2, 1)
    graph = np.array([[0.0, 1.0], [1.0, 0.0]])[None, None] + np.zeros((len(start), 1, 1, 1))
    system = System(COUPLINGS["identity"], INTRINSICS["double_well"], 1.0, kappa, graph, 0.0 * start, None, DENSE)
    x = start
    for _ in range(4000):
        x = x + 0.05 * system.rate(x)
    return {tuple(np.round(each.reshape(2), 6) + 0.0) for each in x}


@pytest.mark.parametrize(("kappa", "stable"), [(0.05, 4), (0.2, 4), (0.3, 4), (0.4, 2), (0.6, 2)])
def test_two_wells_have_several_equilibria(kappa: float, stable: int) -> None:
    """4 stable ones below kappa = 1/3 and 2 above: which one scores reach depends on where they start."""
    assert len(_equilibria(kappa)) == stable


@pytest.mark.parametrize(
    ("nodes", "links"), [(3, ((0, 1), (1, 2))), (4, ((0, 1), (0, 2), (0, 3))), (5, ((0, 1), (1, 2), (2, 3), (3, 4)))]
)
def test_the_third_derivative_is_0_where_a_pitchfork_is(nodes: int, links: tuple[tuple[int, int], ...]) -> None:
    """x' = mu x - x^3 + kappa sum w tanh: scores of 0 lose their stability where mu is kappa times an eigenvalue.

    There the energy is flat along the eigenvector to third order, and two equilibria appear or vanish beside 0.
    """
    graph, kappa = np.zeros((nodes, nodes)), 0.7
    for i, j in links:
        graph[i, j] = graph[j, i] = 1.0
    laplacian = np.diag(graph.sum(axis=1)) - graph
    values, vectors = np.linalg.eigh(laplacian)
    zero = np.zeros((1, 1, nodes, 1))
    tanh, wells = COUPLINGS["tanh"], INTRINSICS["double_well"]

    def system(mu: float) -> System:
        return System(tanh, wells, mu, kappa, graph[None, None], zero, None, DENSE)

    def energy(at: float, mode: int, mu: float) -> float:
        x = at * vectors[:, mode].reshape(1, 1, nodes, 1)
        return float(system(mu).energy(1.0, x)[0, 0, 0, 0])

    for mode in range(nodes):
        # The second derivative is linear in mu: by the implicit Jacobian at two values, where it is 0.
        slopes = []
        for mu in (0.0, 1.0):
            slope = tanh.slope(between(zero))
            jacobian = jacobian_of(system(mu), slope, wells.d_x(zero, zero, mu))[0, 0, 0]
            slopes.append(float(vectors[:, mode] @ jacobian @ vectors[:, mode]))
        located = -slopes[0] / (slopes[1] - slopes[0])
        assert abs(located - kappa * values[mode]) < 1e-9
        h = 1e-2
        even = [energy(n * h, mode, located) for n in (-2, -1, 1, 2)]
        third = (even[3] - 2.0 * even[2] + 2.0 * even[1] - even[0]) / (2.0 * h**3)
        fourth = (even[0] - 4.0 * even[1] - 4.0 * even[2] + even[3]) / h**4  # + 6 E(0), which is 0
        assert abs(third) < 1e-8 and abs(fourth) > 0.1


def test_the_rate_needs_a_largest_value() -> None:
    """On E = x^2 / 2 with gamma = 0.05: steps of constant length end in a circle around 0."""
    ends = {}
    for largest in (math.inf, 1.0 / 3.0):
        x = 1.0
        for _ in range(2000):
            x -= min(largest, 0.05 / (abs(x) + 1e-12)) * x
        ends[largest] = abs(x)
    assert ends[math.inf] > 1e-3 and ends[1.0 / 3.0] < 1e-30
