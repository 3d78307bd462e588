"""The energy around equilibria: where they are marked, and what is drawn beside them."""

from __future__ import annotations

import numpy as np
import pytest

from refattn.analysis.equilibria import find_equilibria
from refattn.analysis.graph_flow import GraphFlow
from refattn.analysis.graphs import complete_graph, cycle_graph, path_graph
from refattn.analysis.landscape import landscape_of

WELLS = GraphFlow(path_graph(2), "identity", "double_well", kappa=0.2)
TRIANGLE = GraphFlow(complete_graph(3))
PUSHED = GraphFlow(path_graph(3), "identity", "double_well", b=(0.1, 0.2, 0.3), kappa=0.2)


@pytest.mark.parametrize(("flow", "count"), [(WELLS, 9), (TRIANGLE, 31), (GraphFlow(cycle_graph(5)), 3), (PUSHED, 2)])
def test_marks_lie_where_the_energy_has_no_slope(flow: GraphFlow, count: int) -> None:
    shape = landscape_of(find_equilibria(flow, 200), points=41)
    assert shape is not None and len(shape.marks) >= count
    np.testing.assert_allclose(shape.axes @ shape.axes.T, np.eye(2), rtol=0, atol=1e-14)
    for at, energy, _ in shape.marks:
        x = shape.centre + at @ shape.axes
        assert np.max(np.abs(flow.rate(x))) < 1e-3  # the plane goes by at 1e-4
        assert float(flow.energy(x)) == pytest.approx(energy, abs=1e-6)
    grid = np.stack(np.meshgrid(*shape.coordinates), axis=-1)
    assert np.array_equal(shape.energy, flow.energy(shape.centre + grid @ shape.axes))


def test_two_scores_are_their_own_axes() -> None:
    found = find_equilibria(WELLS, 200)
    shape = landscape_of(found)
    assert shape is not None and shape.names == ("x of node 0", "x of node 1")
    assert {tuple(np.round(at, 6)) for at, _, _ in shape.marks} == {tuple(np.round(one.x, 6)) for one in found.isolated}


def test_three_stable_equilibria_span_the_plane() -> None:
    """On a ring of nine nodes: consensus, and both ways of going round once and twice."""
    shape = landscape_of(find_equilibria(GraphFlow(cycle_graph(9)), 800), points=3)
    assert shape is not None and sum(negative == 0 for _, _, negative in shape.marks) == 5


def test_one_direction_is_a_line_and_a_directed_graph_has_none() -> None:
    shape = landscape_of(find_equilibria(GraphFlow(path_graph(2)), 20))
    assert shape is not None and len(shape.axes) == len(shape.coordinates) == 1 and shape.energy.ndim == 1
    assert landscape_of(find_equilibria(GraphFlow(np.tril(np.ones((3, 3)), -1), "tanh", "anchor"), 4)) is None
