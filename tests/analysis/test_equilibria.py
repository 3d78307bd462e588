"""Equilibria of flows on graphs: how many there are, and which of them are stable."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from refattn import philox
from refattn.analysis import equilibria
from refattn.analysis.equilibria import find_equilibria, find_equilibrium, tree_equilibria
from refattn.analysis.graph_flow import GraphFlow
from refattn.analysis.graphs import (
    Floats,
    complete_graph,
    cycle_graph,
    from_links,
    path_graph,
    star_graph,
)
from refattn.analysis.stability import stability
from refattn.mechanisms.graph_energy.forces import polynomial
from tests.rows import holds

TRIANGLES = [(0, 1), (1, 2), (0, 2)], [(2, 3), (3, 4), (2, 4)]


def draw(name: str, *shape: int) -> Floats:
    return philox.normal(shape, seed=7, purpose=f"equilibria.{name}")


def states(flow: GraphFlow, starts: int, seed: int = 0) -> set[tuple[float, ...]]:
    found = find_equilibria(flow, starts, seed=seed)
    return {tuple(np.round(one.x, 5) + 0.0) for one in found.isolated}


# --- laws


def test_nodes_in_another_order_have_the_same_equilibria() -> None:
    graph, order = path_graph(3), [2, 0, 1]
    b = np.asarray([0.1, -0.2, 0.05])
    here = GraphFlow(graph, "tanh", "double_well", b, 1.0, 0.1)
    there = GraphFlow(graph[np.ix_(order, order)], "tanh", "double_well", b[order], 1.0, 0.1)
    first, second = states(here, 600), states(there, 600)
    assert len(first) == 27
    assert {tuple(np.asarray(x)[order]) for x in first} == second


def test_the_flow_decides_where_a_start_belongs() -> None:
    """Newton's method alone ends at saddles; after the flow every start ends at rest, and most where it stays."""
    flow = GraphFlow(complete_graph(4), "sin", "none")
    begin = 3.0 * draw("begin", 40, 4)
    alone = equilibria.newton(flow, begin)
    assert any(stability(flow, x).label == "unstable" for x in alone)
    for start in begin[:20]:
        found = find_equilibrium(flow, start)
        assert found.stability.label == "stable" and found.residual < 1e-13


def test_an_energy_that_has_no_minimum_has_no_equilibrium_to_flow_to() -> None:
    with pytest.raises(ArithmeticError, match="leads to no equilibrium"):
        find_equilibrium(GraphFlow(path_graph(2), "cubic"), np.asarray([0.0, 9.0]), steps=4000)


# --- trees, T5: each edge alone has g = 0


@pytest.mark.parametrize(
    ("graph", "coupling", "zeros", "starts"),
    [(path_graph(4), "sin", 2, 200), (star_graph(5), "sin", 2, 300), (path_graph(4), "cubic", 3, 800)],
)
def test_equilibria_of_trees(graph: Floats, coupling: str, zeros: int, starts: int) -> None:
    """Zeros of g to the power of the edges; unstable directions are as many as edges with g' < 0."""
    flow = GraphFlow(graph, coupling)
    found = find_equilibria(flow, starts)
    assert len(found.isolated) == zeros ** (flow.n - 1) and len(found.stable) == 1 and not found.degenerate
    assert holds("graph_energy", "on a tree equilibria").startswith(
        "as said: zeros^(n-1) of them, stable where g rises"
    )
    assert found.lost == 0  # of the cubic coupling some flows have no end; Newton's method then starts where they did
    ends = np.argwhere(np.triu(graph))
    for one in found.isolated:
        between = one.x[ends[:, 1]] - one.x[ends[:, 0]]
        assert np.max(np.abs(flow.system.coupling.force(between))) < 1e-12
        assert one.stability.negative == int(np.sum(flow.system.coupling.slope(between) < 0.0))


# --- cycles, T6


def predicted(n: int) -> int:
    """The number of equilibria of sin on a cycle of n nodes, n odd.

    All edges have one sine: n - m of them the difference a, with |a| < pi/2, and m of them pi - a. They add up to whole
    turns: (n - 2m) a = (2q - m) pi. That leaves the q with |2q - m| < |n - 2m| / 2, for each choice of the m edges.
    """
    fits = ((m, q) for m in range(n + 1) for q in range(-n, n + 1) if 2 * abs(2 * q - m) < abs(n - 2 * m))
    return sum(math.comb(n, m) for m, _ in fits)


@pytest.mark.parametrize(("n", "starts"), [(3, 150), (5, 900)])
def test_all_equilibria_of_cycles(n: int, starts: int) -> None:
    assert len(find_equilibria(GraphFlow(cycle_graph(n)), starts).isolated) == predicted(n)


@pytest.mark.parametrize(("n", "starts"), [(5, 200), (8, 200), (9, 800)])
def test_stable_equilibria_of_cycles(n: int, starts: int) -> None:
    """They are the twisted ones x_k = 2 pi q k / n with |q| < n / 4: 2 ceil(n / 4) - 1 of them."""
    flow = GraphFlow(cycle_graph(n))
    found = find_equilibria(flow, starts)
    assert len(found.stable) == 2 * math.ceil(n / 4) - 1
    assert holds("graph_energy", "on a ring with sin") == "as said: 2 ceil(n/4) - 1 stable ones"
    twists = {round(float(np.sum(flow.turned(np.roll(one.x, -1) - one.x))) / (2.0 * np.pi), 9) for one in found.stable}
    assert twists == {float(q) for q in range(-(n - 1) // 4, n) if 4 * abs(q) < n}


@pytest.mark.parametrize(("n", "count"), [(5, 3), (8, 3), (9, 5), (12, 5), (13, 7)])
def test_twisted_states(n: int, count: int) -> None:
    flow, k, labels = GraphFlow(cycle_graph(n)), np.arange(n), []
    for q in range(-(n // 2), (n + 1) // 2):
        x = 2.0 * np.pi * q * k / n
        assert np.max(np.abs(flow.rate(x))) < 1e-13
        known = stability(flow, x)
        labels.append(known.label)
        wanted = np.sort(np.cos(2.0 * np.pi * q / n) * (2.0 - 2.0 * np.cos(2.0 * np.pi * k[1:] / n)))
        np.testing.assert_allclose(known.eigenvalues, wanted, rtol=0, atol=1e-12)
    assert labels.count("stable") == count == 2 * math.ceil(n / 4) - 1
    assert labels.count("degenerate") == (2 if n % 4 == 0 else 0)  # q = n/4 and -n/4


# --- lines and surfaces of equilibria, T6b to T9


def test_four_nodes_in_a_ring_have_lines_of_equilibria() -> None:
    flow, zeros = GraphFlow(cycle_graph(4)), []
    for a in (0.3, 1.1, math.pi / 2.0):
        x = np.cumsum([0.0, a, math.pi - a, a])
        assert np.max(np.abs(flow.rate(x))) < 1e-14
        zeros.append(stability(flow, x).zero + flow.free)
    assert zeros == [2, 2, 4]


def test_a_triangle_of_cubic_coupling_has_a_circle_of_equilibria() -> None:
    """Differences with the sum 0 and the sum of squares 12."""
    flow = GraphFlow(complete_graph(3), "cubic")
    for angle in np.linspace(0.1, 6.0, 7):
        d = math.sqrt(8.0) * np.cos(angle + 2.0 * np.pi * np.arange(3) / 3.0)
        x = np.cumsum([0.0, d[0], d[1]])
        assert np.max(np.abs(flow.rate(x))) < 1e-13
        assert stability(flow, x).zero + flow.free == 2
    said = holds("graph_energy", "the dimension of manifolds of equilibria")
    assert said.endswith("but for translations; a ring of four and a triangle reach it")


@pytest.mark.parametrize("coupling", ["sin", "cubic", polynomial((-1.0, 1.0))])
@pytest.mark.parametrize(
    ("graph", "cycles"),
    [
        (path_graph(4), 0),
        (cycle_graph(4), 1),
        (complete_graph(3), 1),
        (from_links(4, [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)]), 2),
        (complete_graph(4), 3),
    ],
    ids=["path", "ring", "triangle", "two triangles", "complete"],
)
def test_manifolds_of_equilibria_have_no_more_dimensions_than_cycles(graph: Floats, cycles: int, coupling: Any) -> None:
    """What flows along links at rest is a sum of cycles, and g takes each value on single points.

    So many zero eigenvalues has most of what is found there; where manifolds meet there are more.
    """
    zeros = sorted(one.stability.zero for one in find_equilibria(GraphFlow(graph, coupling), 200).degenerate)
    assert not zeros or zeros[len(zeros) // 2] <= cycles


@pytest.mark.parametrize("groups", [(3, 2), (3, 3), (3, 3, 2)])
def test_complete_graphs(groups: tuple[int, ...]) -> None:
    """Phases that balance each other are at rest, at the highest energy; every start ends in consensus."""
    n = sum(groups)
    flow = GraphFlow(complete_graph(n))
    phases = np.concatenate([0.4 + 0.7 * k + 2.0 * np.pi * np.arange(m) / m for k, m in enumerate(groups)])
    assert abs(np.sum(np.exp(1j * phases))) < 1e-12
    known = stability(flow, phases)
    assert known.zero + flow.free == n - 2 and known.negative == 2
    assert float(flow.energy(phases)) == pytest.approx(0.5 * n * n, abs=1e-12)
    found = find_equilibria(flow, 100)
    assert [np.max(np.abs(one.x)) < 1e-9 for one in found.stable] == [True]


def test_equilibria_of_blocks_are_glued() -> None:
    """Two triangles that share a node: 6 equilibria each, 36 together, and unstable directions add up."""
    flow = GraphFlow(from_links(5, [*TRIANGLES[0], *TRIANGLES[1]]))
    one = find_equilibria(GraphFlow(complete_graph(3)), 150).isolated
    assert len(one) == 6
    wanted = sorted(
        (tuple(np.round(flow.reduced(np.concatenate([first.x, first.x[2] + second.x[1:] - second.x[0]])), 5) + 0.0))
        for first, second in itertools.product(one, one)
    )
    for first, second in itertools.product(one, one):
        x = np.concatenate([first.x, first.x[2] + second.x[1:] - second.x[0]])
        assert np.max(np.abs(flow.rate(x))) < 1e-12
        assert stability(flow, x).negative == first.stability.negative + second.stability.negative
    assert len(set(wanted)) == 36
    assert len(find_equilibria(flow, 600).isolated) == 36


def test_consensus_of_each_component() -> None:
    """T4 and T10: one zero for each component, stable where g'(0) > 0, unstable where it is negative."""
    graph = from_links(6, [(0, 1), (1, 2), (0, 2), (3, 4), (4, 5)])
    for coupling, label in (("tanh", "stable"), ("sinh", "stable"), (polynomial((-1.0, 1.0)), "unstable")):
        flow = GraphFlow(graph, coupling)
        known = stability(flow, np.asarray([0.4, 0.4, 0.4, -1.0, -1.0, -1.0]))
        assert (flow.free, known.zero, len(known.eigenvalues), known.label) == (2, 0, 4, label)
    begin = draw("begin", 6)
    found = find_equilibrium(GraphFlow(graph, "tanh"), begin)
    for part in (slice(0, 3), slice(3, 6)):
        assert np.ptp(found.x[part]) < 1e-10
        assert abs(float(np.mean(found.x[part]) - np.mean(begin[part]))) < 1e-12


@pytest.mark.parametrize(("graph", "coupling"), [(path_graph(3), "tanh"), (cycle_graph(4), "arctan")])
def test_scores_that_are_far_apart_are_no_equilibrium(graph: Floats, coupling: str) -> None:
    """Newton's method goes far where g is level, and there g is not 0: the consensus is the only rest."""
    found = find_equilibria(GraphFlow(graph, coupling), 400)
    assert (len(found.isolated), len(found.degenerate)) == (1, 0) and not np.any(found.isolated[0].x.round(9))
    assert found.lost > 0 and found.isolated[0].stability.label == "stable"
    far = np.arange(float(len(graph)))[None] * [[1e10], [0.0]]
    assert equilibria.at_rest(found.flow, far).tolist() == [False, True]


# --- two coupled double wells, T11


@pytest.mark.parametrize(
    ("kappa", "count", "stable"), [(0.05, 9, 4), (0.2, 9, 4), (0.3, 9, 4), (0.4, 5, 2), (0.6, 3, 2)]
)
def test_two_coupled_double_wells(kappa: float, count: int, stable: int) -> None:
    found = find_equilibria(GraphFlow(path_graph(2), "identity", "double_well", kappa=kappa), 200)
    assert (len(found.isolated), len(found.stable), found.lost) == (count, stable, 0)
    assert max(one.residual for one in found.isolated) < 1e-14


@pytest.mark.parametrize(("graph", "coupling", "count"), [(star_graph(4), "sin", 8), (path_graph(3), "cubic", 9)])
def test_the_zeros_of_the_coupling_decide_on_a_tree(graph: Any, coupling: str, count: int) -> None:
    """All of them, as many random starts find them; the consensus alone is stable."""
    flow = GraphFlow(graph, coupling)
    known, found = tree_equilibria(flow), find_equilibria(flow, starts=300)
    every = [{tuple(np.round(flow.reduced(one.x), 5) + 0.0) for one in each} for each in (known, found.isolated)]
    assert every[0] == every[1] and len(known) == count
    assert [one.stability.label for one in known] == ["stable"] + ["unstable"] * (count - 1)
    assert not np.any(known[0].x)


@pytest.mark.parametrize(
    ("flow", "message"),
    [
        (GraphFlow(cycle_graph(4)), "graph: got one that is no tree"),
        (GraphFlow(from_links(4, [(0, 1), (2, 3)])), "graph: got one that is no tree"),
        (GraphFlow(path_graph(3), intrinsic="anchor"), 'flow: got intrinsic="anchor"'),
        (GraphFlow(path_graph(3), polynomial((1.0, -1.0))), "flow: got .* the coupling polynomial"),
        (GraphFlow(path_graph(20)), r"graph: got 20 nodes, whose equilibria are 2\^19, more than 10000"),
    ],
    ids=["a cycle", "two parts", "an intrinsic force", "no known zeros", "a long path"],
)
def test_what_zeros_do_not_decide(flow: GraphFlow, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tree_equilibria(flow)
