"""Kuramoto's order parameter: what it is, where it leaves 0, and that flows in wells agree from a pitchfork on."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.integrate import quad

from refattn.analysis.diagram import diagram_of
from refattn.analysis.graph_flow import GraphFlow
from refattn.analysis.graphs import path_graph
from refattn.analysis.order import (
    CRITICAL,
    FREQUENCY,
    kuramoto,
    kuramoto_limit,
    order_at_rest,
    order_in_time,
    order_parameter,
)
from refattn.mechanisms.graph_energy.forces import check_intrinsic


def test_the_order_parameter_knows_no_turn() -> None:
    x = np.sin(np.arange(12.0)).reshape(3, 4)
    assert order_parameter(x).shape == (3,)
    np.testing.assert_allclose(order_parameter(x + 5.0), order_parameter(x), rtol=1e-13)
    np.testing.assert_allclose(order_parameter(x + 2.0 * math.pi * np.arange(4.0)), order_parameter(x), rtol=1e-13)
    assert order_parameter(np.arange(8.0) * math.pi / 4.0) == pytest.approx(0.0, abs=1e-15)


def test_a_frequency_is_a_force_of_the_mechanism() -> None:
    """Its derivatives and its potential are those that it claims."""
    check_intrinsic(FREQUENCY, np.zeros(1))
    flow = kuramoto(5, 0.0)
    np.testing.assert_allclose(flow.rate(np.ones(5)), flow.anchors, rtol=1e-13)
    assert np.sum(flow.anchors) == pytest.approx(0.0, abs=1e-13)


@pytest.mark.parametrize("kappa", [1.65, 2.0, 4.0])
def test_the_limit_solves_the_equation_of_kuramoto(kappa: float) -> None:
    """1 = kappa int cos^2(t) g(kappa R sin t) dt, by quadrature; and 0 up to the critical kappa."""
    r = kuramoto_limit(kappa)

    def density(t: float) -> float:
        return math.cos(t) ** 2 * math.exp(-0.5 * (kappa * r * math.sin(t)) ** 2) / math.sqrt(2.0 * math.pi)

    assert kappa * quad(density, -math.pi / 2.0, math.pi / 2.0)[0] == pytest.approx(1.0, rel=1e-10)
    assert kuramoto_limit(CRITICAL) == 0.0 < kuramoto_limit(1.001 * CRITICAL) < 0.1
    assert pytest.approx(2.0 / (math.pi / math.sqrt(2.0 * math.pi))) == CRITICAL


def test_many_nodes_come_near_the_limit() -> None:
    for kappa in (2.5, 4.0):
        late = order_in_time(kuramoto(100, kappa), time=30.0)[-100:]
        assert np.mean(late) == pytest.approx(kuramoto_limit(kappa), abs=0.01)


def test_a_step_is_of_fourth_order() -> None:
    """Half the step, a sixteenth of the error."""
    flow = kuramoto(6, 1.5)
    ends = [order_in_time(flow, time=2.0, step=0.2 / n)[-1] for n in (1, 2, 4)]
    assert (ends[0] - ends[1]) / (ends[1] - ends[2]) == pytest.approx(16.0, rel=0.15)


def test_wells_agree_from_the_last_bifurcation_on() -> None:
    """Two of them from kappa = 1/3, where states of opposite signs lose their stability."""
    flow = GraphFlow(path_graph(2), "identity", "double_well")
    found = diagram_of(flow, "kappa", 0.0, 0.7, starts=100, seed=0)
    (last,) = {round(one.at, 9) for one in found.bifurcations if one.supercritical is False}
    assert last == pytest.approx(1.0 / 3.0)
    before, after = order_at_rest(replace(flow, kappa=1.0), [last - 0.02, last + 0.02], starts=60)
    assert before.min() < 0.9 and after.min() > 1.0 - 1e-9
