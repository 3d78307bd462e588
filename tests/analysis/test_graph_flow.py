"""Flows on graphs as systems of their own: what they compute, on which graphs, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from refattn import philox
from refattn.analysis.equilibria import find_equilibria, find_equilibrium
from refattn.analysis.graph_flow import GraphFlow
from refattn.analysis.graphs import (
    Floats,
    balance_of,
    complete_graph,
    cycle_graph,
    from_links,
    graph_of,
)
from refattn.mechanisms.graph_energy.forces import COUPLINGS
from refattn.mechanisms.graph_energy.implementations.sparse import sparse_graph


def draw(name: str, *shape: int) -> Floats:
    return philox.normal(shape, seed=7, purpose=f"graph_flow.{name}")


# --- laws


@pytest.mark.parametrize("intrinsic", ["none", "anchor", "double_well"])
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_the_system_is_the_gradient_of_its_energy(coupling: str, intrinsic: str) -> None:
    flow = GraphFlow(cycle_graph(5) + 0.3 * complete_graph(5), coupling, intrinsic, draw("b", 5), 0.7, 1.3)
    x, h = draw("x", 5), 1e-5
    each = h * np.eye(5)
    slope = (flow.energy(x + each) - flow.energy(x - each)) / (2.0 * h)
    turn = (flow.rate(x + each) - flow.rate(x - each)) / (2.0 * h)
    # The formula errs by h^2 / 6 times the third derivative, 1e-9 here; rounding by 2^-53 E / h, 1e-9 too.
    np.testing.assert_allclose(-slope, flow.rate(x), rtol=0, atol=3e-9)
    np.testing.assert_allclose(turn.T, flow.jacobian(x), rtol=0, atol=3e-9)
    for by, name in ((flow.by_mu, "mu"), (flow.by_kappa, "kappa")):
        ends = [dataclasses.replace(flow, **{name: getattr(flow, name) + d}).rate(x) for d in (0.5, -0.5)]
        np.testing.assert_allclose(ends[0] - ends[1], by(x), rtol=0, atol=1e-14)


def test_what_has_no_effect_is_taken_off() -> None:
    """Two components, each of which may be raised, and every score turned round."""
    flow = GraphFlow(from_links(5, [(0, 1), (1, 2), (3, 4)]))
    x = draw("x", 5)
    moved = x + np.asarray([0.7, 0.7, 0.7, -1.9, -1.9]) + 2.0 * np.pi * np.asarray([1.0, 0.0, -2.0, 0.0, 3.0])
    np.testing.assert_allclose(flow.reduced(moved), flow.reduced(x), rtol=0, atol=1e-14)
    np.testing.assert_allclose(flow.rate(moved), flow.rate(x), rtol=0, atol=1e-14)
    held = GraphFlow(flow.graph, "sin", "anchor")
    assert np.array_equal(held.reduced(moved), moved) and held.period is None and held.free == 0


# --- weights, direction, sparse graphs


def test_detailed_balance_is_found() -> None:
    scores = draw("scores", 6, 6)
    kernel = np.exp(scores + scores.T)
    np.fill_diagonal(kernel, 0.0)
    sums = kernel.sum(axis=1)
    pi = balance_of(kernel / sums[:, None])
    assert pi is not None
    np.testing.assert_allclose(pi, sums / np.mean(sums), rtol=1e-13)
    even = balance_of(cycle_graph(5))
    assert even is not None and np.array_equal(even, np.ones(5))
    assert balance_of(np.asarray([[0.0, 1.0], [-1.0, 0.0]])) is None
    assert balance_of(np.exp(scores)) is None and balance_of(np.tril(np.ones((4, 4)), -1)) is None
    flow = GraphFlow(kernel / sums[:, None], "tanh", "anchor", draw("b", 6))
    found = find_equilibrium(flow, draw("b", 6))
    plain = np.sort(np.linalg.eigvals(-flow.jacobian(found.x)).real)
    np.testing.assert_allclose(found.stability.eigenvalues, plain, rtol=0, atol=1e-12)


def test_a_directed_graph_has_stability_and_no_energy() -> None:
    flow = GraphFlow(np.tril(np.abs(draw("w", 5, 5)), -1), "tanh", "anchor", draw("b", 5), 0.5)
    found = find_equilibrium(flow, np.zeros(5))
    assert found.energy is None and found.stability.label == "stable"
    np.testing.assert_allclose(found.stability.eigenvalues, np.sort(-np.diag(flow.jacobian(found.x))), rtol=1e-12)
    with pytest.raises(ValueError, match="needs a dense one with detailed balance"):
        flow.energy(found.x)


@pytest.mark.parametrize("intrinsic", ["none", "anchor"])
def test_a_sparse_graph_is_as_good_as_a_dense_one(intrinsic: str) -> None:
    n = 80
    graph = cycle_graph(n) + 0.5 * from_links(n, [(i, (7 * i + 3) % n) for i in range(0, n, 2)])
    b, begin = draw("b", n), draw("begin", n)
    both = [GraphFlow(each, "tanh", intrinsic, b) for each in (graph, sparse_graph(graph))]
    dense, sparse = (find_equilibrium(flow, begin, steps=60) for flow in both)
    np.testing.assert_allclose(both[1].jacobian(begin).toarray(), both[0].jacobian(begin), rtol=0, atol=1e-13)
    np.testing.assert_allclose(sparse.x, dense.x, rtol=0, atol=1e-9)
    assert sparse.stability.label == dense.stability.label == "stable"
    few = min(len(sparse.stability.eigenvalues), 6)
    np.testing.assert_allclose(sparse.stability.eigenvalues[:few], dense.stability.eigenvalues[:few], rtol=1e-9)


# --- graphs by name and from files


def test_a_graph_comes_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "links").write_text("# a triangle\n0 1\n1 2 0.5\n\n0 2  # the last\n")
    wanted = from_links(3, [(0, 1), (0, 2)])
    wanted[1, 2] = wanted[2, 1] = 0.5
    assert np.array_equal(graph_of(str(tmp_path / "links")), wanted)


@pytest.mark.parametrize("name", ["cycle:2", "cycle", "cycle:x", "path:0", "complete:201", "ring:4", "nothing.txt"])
def test_a_graph_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"graph: got '{name}', needs"):
        graph_of(name)


@pytest.mark.parametrize("line", ["0", "0 1 2 3", "0 0", "-1 2", "0 200", "a b", "0 1 inf"])
def test_a_line_that_is_no_link_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "links").write_text(f"0 1\n{line}\n")
    with pytest.raises(ValueError, match=r"graph: got .* in line 2 of .*, needs two different nodes"):
        graph_of(str(tmp_path / "links"))


# --- what is refused


def test_a_system_that_does_not_fit_is_refused() -> None:
    ring = cycle_graph(4)
    refused = {
        r"coupling: got 'cos', needs one of sin": lambda: GraphFlow(ring, "cos"),
        r"intrinsic: got 'wells', needs one of anchor": lambda: GraphFlow(ring, "sin", "wells"),
        r"graph: got shape \(4, 3\), needs \(n, n\)": lambda: GraphFlow(ring[:, :3]),
        r"b: got shape \(3,\), needs a number or \(4,\)": lambda: GraphFlow(ring, "sin", "anchor", np.zeros(3)),
        r"start: got shape \(2, 4\), needs \(4,\)": lambda: find_equilibrium(GraphFlow(ring), np.zeros((2, 4))),
        r"graph: got a sparse one, needs a dense one": lambda: find_equilibria(GraphFlow(sparse_graph(ring)), 2),
    }
    for message, call in refused.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_a_file_that_is_no_utf_8_is_named(tmp_path: Path) -> None:
    (tmp_path / "links").write_bytes("0 1  # Köln\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"graph: got .*links, needs UTF-8"):
        graph_of(str(tmp_path / "links"))


def test_a_file_of_links_without_bound_is_refused_at_once(tmp_path: Path) -> None:
    with open(tmp_path / "links", "wb") as file:
        file.truncate(8 << 30)
    with pytest.raises(ValueError, match=r"^graph: got .*links, needs a file .*got 8589934592 bytes"):
        graph_of(str(tmp_path / "links"))
