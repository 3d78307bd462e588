"""Bifurcations: where they are, what they are, and what the article's condition says of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import refattn as ra
from refattn.analysis.bifurcations import APART, Bifurcation, bifurcations_on
from refattn.analysis.continuation import Family, at_parameter, family_of, follow
from refattn.analysis.diagram import check_range, diagram_of
from refattn.analysis.graph_flow import GraphFlow, flow_of_call, with_number
from refattn.analysis.graphs import Floats, complete_graph, cycle_graph, path_graph, star_graph

PLACE = 1e-9
Number = Callable[[float, float], float]


def scalar(rate: Number, slope: Number, by: Number) -> Family:
    """One number, with v, dv/dx and dv/dlambda."""
    return Family(
        lambda x, at: np.asarray([rate(x[0], at)]),
        lambda x, at: np.asarray([[slope(x[0], at)]]),
        lambda x, at: np.asarray([by(x[0], at)]),
        np.ones(1),
    )


def on(family: Family, x: list[float] | Floats, at: float, low: float = -1.0, high: float = 1.0) -> list[Bifurcation]:
    begin = at_parameter(family, np.asarray(x, np.float64), at)
    assert begin is not None
    return bifurcations_on(family, follow(family, begin, at, low, high))


def laplacian(graph: Floats) -> Floats:
    return np.diag(graph.sum(axis=1)) - graph


# --- normal forms


@pytest.mark.parametrize(
    ("family", "start", "kind", "numbers"),
    [
        (
            scalar(lambda x, at: at * x - x**3, lambda x, at: at - 3.0 * x**2, lambda x, at: x),
            0.0,
            "supercritical pitchfork",
            (0.0, 0.0, -6.0, 1.0),
        ),
        (
            scalar(lambda x, at: at * x + x**3, lambda x, at: at + 3.0 * x**2, lambda x, at: x),
            0.0,
            "subcritical pitchfork",
            (0.0, 0.0, 6.0, 1.0),
        ),
        (
            scalar(lambda x, at: at * x - x**2, lambda x, at: at - 2.0 * x, lambda x, at: x),
            0.0,
            "transcritical",
            (0.0, -2.0, 0.0, 1.0),
        ),
        (
            scalar(lambda x, at: at * x - x**2, lambda x, at: at - 2.0 * x, lambda x, at: x),
            -0.9,
            "transcritical",
            (0.0, -2.0, 0.0, 1.0),
        ),
    ],
)
def test_normal_forms(family: Family, start: float, kind: str, numbers: tuple[float, ...]) -> None:
    (found,) = on(family, [start], -0.9)
    assert found.label == kind and abs(found.at) < PLACE and abs(found.x[0]) < PLACE
    assert found.numbers is not None
    # Differences err by APART^2 times a higher derivative over 12, which is 0 here, and by rounding over APART^2.
    np.testing.assert_allclose(list(found.numbers.values()), numbers, rtol=0, atol=16 * 2.0**-52 / APART**2)


def test_a_pitchfork_whose_numbers_come_from_another_direction() -> None:
    """x' = x y, y' = lambda - y - x^2: y follows x, and leaves x (lambda - x^2)."""
    family = Family(
        lambda x, at: np.asarray([x[0] * x[1], at - x[1] - x[0] ** 2]),
        lambda x, at: np.asarray([[x[1], x[0]], [-2.0 * x[0], -1.0]]),
        lambda x, at: np.asarray([0.0, 1.0]),
    )
    (found,) = on(family, [0.0, -0.9], -0.9)
    assert found.label == "supercritical pitchfork" and abs(found.at) < PLACE
    assert found.numbers is not None
    np.testing.assert_allclose(list(found.numbers.values()), (0.0, 0.0, -6.0, 1.0), rtol=0, atol=1e-9)


def test_folds() -> None:
    family = scalar(lambda x, at: at + x - x**3, lambda x, at: 1.0 - 3.0 * x**2, lambda x, at: 1.0)
    found = on(family, [-1.3], -1.0)
    wanted = 2.0 / (3.0 * math.sqrt(3.0))
    assert [one.label for one in found] == ["fold", "fold"]
    for one, sign in zip(found, (1.0, -1.0), strict=True):
        assert abs(one.at - sign * wanted) < PLACE and abs(one.x[0] + sign / math.sqrt(3.0)) < PLACE
        assert one.article_condition


def test_a_pair_of_complex_eigenvalues_is_told_apart() -> None:
    turn = np.asarray([[0.0, -1.0], [1.0, 0.0]])
    family = Family(
        lambda x, at: at * x + turn @ x - x * (x @ x),
        lambda x, at: at * np.eye(2) + turn - (x @ x) * np.eye(2) - 2.0 * np.outer(x, x),
        lambda x, at: x,
    )
    found = on(family, [0.0, 0.0], -0.9)
    assert [(one.kind, one.zeros) for one in found] == [("hopf", 0)] and abs(found[0].at) < PLACE


# --- networks, T11: scores of 0 lose their stability at mu = kappa times an eigenvalue of the Laplacian


@pytest.mark.parametrize("graph", [path_graph(3), path_graph(5), star_graph(4), cycle_graph(5)])
def test_consensus_loses_its_stability_at_eigenvalues_of_the_graph(graph: Floats) -> None:
    kappa = 0.7
    flow = GraphFlow(graph, "tanh", "double_well", kappa=kappa)
    found = on(family_of(flow, "mu"), np.zeros(flow.n), -0.4, -0.4, 3.0)
    values, counts = np.unique(np.round(kappa * np.linalg.eigvalsh(laplacian(graph)), 9), return_counts=True)
    assert [one.zeros for one in found] == counts.tolist()
    exact = kappa * np.linalg.eigvalsh(laplacian(graph))[np.cumsum(counts) - 1]
    np.testing.assert_allclose([one.at for one in found], exact, rtol=0, atol=PLACE)
    assert values.shape == exact.shape
    for one in found:
        assert one.kind == ("pitchfork" if one.zeros == 1 else "multiple")
        if one.kind == "multiple":
            mode = laplacian(graph) @ one.null.T - one.at / kappa * one.null.T
            assert np.max(np.abs(mode)) < 1e-8 and one.numbers is None and one.article_condition is None
        else:
            v, links = one.null, np.argwhere(np.triu(graph))
            bends = np.sum((v[links[:, 1]] - v[links[:, 0]]) ** 4)
            assert one.numbers is not None
            # tanh x = x - x^3 / 3 + ...; the next term, 2 x^5 / 15, gives the error of the differences.
            assert one.numbers["c3"] == pytest.approx(-6.0 * np.sum(v**4) + 2.0 * kappa * bends, abs=50 * APART**2)
            assert one.numbers["cross"] == pytest.approx(1.0, abs=1e-9)


def test_a_softening_coupling_makes_high_modes_jump() -> None:
    """Three nodes in a row, the highest mode: subcritical, though each node by itself is supercritical."""
    flow = GraphFlow(path_graph(3), "tanh", "double_well", kappa=0.7)
    found = on(family_of(flow, "mu"), np.zeros(3), -0.4, -0.4, 3.0)
    assert [one.supercritical for one in found] == [True, True, False]
    hard = GraphFlow(path_graph(3), "sinh", "double_well", kappa=0.7)
    assert all(one.supercritical for one in on(family_of(hard, "mu"), np.zeros(3), -0.4, -0.4, 3.0))


def test_branches_that_cross_are_located_to_all_digits() -> None:
    """y = x - sin(lambda), y' = (lambda - 0.3) y - y^2: on the branch alone half the digits would be lost."""
    family = scalar(
        lambda x, at: (at - 0.3) * (x - math.sin(at)) - (x - math.sin(at)) ** 2,
        lambda x, at: at - 0.3 - 2.0 * (x - math.sin(at)),
        lambda x, at: x - math.sin(at) - math.cos(at) * (at - 0.3 - 2.0 * (x - math.sin(at))),
    )
    for start in (math.sin(-0.9), math.sin(-0.9) - 1.2):
        (found,) = on(family, [start], -0.9)
        assert found.kind == "transcritical" and abs(found.at - 0.3) < 1e-13
        assert abs(found.x[0] - math.sin(0.3)) < 1e-13


# --- diagrams


def test_the_diagram_of_two_coupled_wells() -> None:
    flow = GraphFlow(path_graph(2), "identity", "double_well")
    found = diagram_of(flow, "kappa", 0.0, 0.7, starts=120)
    third, half, a = 1.0 / 3.0, 0.5, 1.0 / math.sqrt(3.0)
    wanted = [(third, (-a, a), False), (third, (a, -a), False), (half, (0.0, 0.0), True)]
    for one, (at, x, supercritical) in zip(found.bifurcations, wanted, strict=True):
        assert one.kind == "pitchfork" and one.supercritical is supercritical and not one.article_condition
        assert abs(one.at - at) < PLACE and np.max(np.abs(one.x - x)) < PLACE
    assert len(found.branches) == 6
    assert [len(each.isolated) for each in found.sampled] == [9, 9, 5, 3, 3]
    assert [len(each.stable) for each in found.sampled] == [4, 4, 2, 2, 2]
    for branch in found.branches:
        family = family_of(flow, "kappa")
        rates = [np.max(np.abs(family.rate(x, at))) for x, at in zip(branch.x, branch.at, strict=True)]
        assert max(rates) < 1e-12
        # The formulas of the branches: x y = kappa where x and y have one sign and differ, x = -y, or x = y.
        x, y = branch.x.T
        gaps = [x - y, x + y, x * y + branch.at, x * y - branch.at]
        assert min(float(np.max(np.abs(gap))) for gap in gaps) < 1e-9


def test_unlike_wells_have_folds_that_the_article_sees() -> None:
    """b is not 0 and the energy not even: pitchforks break up into folds, where the third derivative is not 0."""
    flow = GraphFlow(path_graph(2), "identity", "double_well", np.asarray([0.05, 0.02]))
    found = diagram_of(flow, "kappa", 0.0, 0.7, starts=120)
    assert {one.kind for one in found.bifurcations} == {"fold"} and len(found.bifurcations) == 3
    assert all(one.article_condition for one in found.bifurcations)
    for one in found.bifurcations:
        at = GraphFlow(flow.graph, "identity", "double_well", flow.b, 1.0, one.at)
        assert np.max(np.abs(at.rate(one.x))) < 1e-13
        assert abs(np.linalg.det(at.jacobian(one.x))) < 1e-12


@pytest.mark.parametrize(
    ("intrinsic", "parameter", "low", "high", "problem"),
    [
        ("none", "kappa", 0.0, 1.0, "intrinsic: got"),
        ("anchor", "tau", 0.0, 1.0, "parameter: got 'tau'"),
        ("anchor", "mu", 1.0, 1.0, "mu: got the range 1.0:1.0"),
    ],
)
def test_what_has_no_diagram_is_refused(intrinsic: str, parameter: str, low: float, high: float, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_range(GraphFlow(path_graph(2), "sin", intrinsic), parameter, low, high)


# --- what the article says


@pytest.mark.parametrize("coupling", ["sin", "tanh", "identity", "arctan", "sinh", "cubic"])
def test_the_article_misses_every_pitchfork(coupling: str) -> None:
    """b = 0: the energy is even, its third derivative 0 at scores of 0, and all simple bifurcations are pitchforks."""
    flow = GraphFlow(path_graph(3), coupling, "double_well")
    found = on(family_of(flow, "mu"), np.zeros(3), -0.4, -0.4, 4.0)
    assert len(found) == 3
    for one in found:
        assert one.kind == "pitchfork" and one.numbers is not None and one.article_condition is False
        assert abs(one.numbers["b2"]) < 1e-12 and abs(one.numbers["c3"]) > 0.1


def test_the_second_derivatives_of_single_scores_say_nothing() -> None:
    """Where two coupled wells lose their symmetry no d2E/dx_i^2 is 0; and where one is, nothing happens."""
    flow = GraphFlow(complete_graph(2), "identity", "double_well")
    family = family_of(flow, "kappa")
    (found,) = on(family, np.zeros(2), 0.1, 0.0, 0.9)
    assert abs(found.at - 0.5) < PLACE
    np.testing.assert_allclose(np.diag(family.jacobian(found.x, found.at)), 0.5, rtol=0, atol=1e-9)
    # d2E/dx_i^2 = kappa - mu is 0 at kappa = 1, the eigenvalues of J are 1 and -1 there.
    assert np.array_equal(np.diag(family.jacobian(np.zeros(2), 1.0)), [0.0, 0.0])
    np.testing.assert_allclose(family.eigenvalues(np.zeros(2), 1.0), [1.0, -1.0], rtol=0, atol=1e-15)


# --- over b, and along a line


@pytest.mark.parametrize("parameter", ["b", "t"])
def test_a_well_ends_where_b_pushes_over_the_hill(parameter: str) -> None:
    """x^3 - x = b has three solutions for |b| < 2 / sqrt(27): a fold on either side, on the line as over b."""
    flow = GraphFlow(path_graph(2), "identity", "double_well", b=-1.0)
    flow = replace(flow, towards=replace(flow, b=1.0))
    low, high = (-1.0, 1.0) if parameter == "b" else (0.0, 1.0)
    found = diagram_of(flow, parameter, low, high, starts=40)
    at = np.asarray([one.at for one in found.bifurcations])
    at = at if parameter == "b" else 2.0 * at - 1.0
    assert [one.kind for one in found.bifurcations] == ["fold", "fold"]
    np.testing.assert_allclose(at, [-2.0 / math.sqrt(27.0), 2.0 / math.sqrt(27.0)], rtol=0, atol=1e-8)


def test_a_line_of_flows_needs_an_end() -> None:
    flow = GraphFlow(path_graph(2), "identity", "double_well")
    for line in (flow, replace(flow, towards=GraphFlow(path_graph(3)))):
        with pytest.raises(ValueError, match="t: got a flow without a line"):
            check_range(line, "t", 0.0, 1.0)
    with pytest.raises(ValueError, match="t: got a flow without a line"):
        with_number(flow, "t", 0.5)


@pytest.mark.parametrize("state", ["token", "query"])
def test_the_flow_of_a_call(state: str) -> None:
    """Its rate is that of the call, of a head."""
    q, k, v = (np.sin(np.arange(24.0).reshape(1, 2, 4, 3) * at) for at in (1.0, 2.0, 3.0))
    kappa = np.asarray([0.5, 2.0])
    _, saved = ra.graph_energy.forward(q, k, v, state=state, kappa=kappa, mu=0.7, causal=True, step=0.1)
    flow, x = flow_of_call(saved, head=1), saved.inner.graph.start + 0.3
    np.testing.assert_allclose(flow.rate(x[0, 1, :, -1]), saved.system.rate(x)[0, 1, :, -1], rtol=0, atol=1e-14)
    with pytest.raises(ValueError, match="head: got batch 0 and head 2"):
        flow_of_call(saved, head=2)
    _, saved = ra.graph_energy.forward(q, k, v, mu=np.ones((2, 4)) * np.arange(1.0, 5.0), step=0.1)
    with pytest.raises(ValueError, match="mu: got one for each node"):
        flow_of_call(saved)


def test_a_branch_is_not_left_for_one_nearby() -> None:
    """x^2 = lambda^2 + 1e-4: two branches that come as near as a step, and turn there."""
    family = scalar(lambda x, at: x**2 - at**2 - 1e-4, lambda x, at: 2.0 * x, lambda x, at: -2.0 * at)
    for sign in (1.0, -1.0):
        branch = follow(family, np.asarray([sign * math.sqrt(0.64 + 1e-4)]), -0.8, -1.0, 1.0)
        assert np.all(sign * branch.x > 0.0) and {branch.at[0], branch.at[-1]} == {-1.0, 1.0}
