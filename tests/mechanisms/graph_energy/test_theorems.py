"""What is proved of the flow: energy, conservation, bounds, contraction, limits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.mechanisms.graph_energy.forces import COUPLINGS as REGISTRY
from refattn.mechanisms.graph_energy.forces import INTRINSICS
from refattn.mechanisms.graph_energy.options.integrator import INTEGRATORS
from refattn.mechanisms.graph_energy.system import weights_of
from tests.mechanisms.graph_energy.calls import (
    COUPLINGS,
    STATES,
    SYMMETRIC,
    B,
    D,
    E,
    H,
    N,
    draw,
    flow_of,
    forward,
    kept,
    qkv,
    run,
)
from tests.rows import holds

EPS = 2.0**-52


def softmax_out(**options: Any) -> Any:
    return ra.softmax.forward(*qkv(), **options)[0]


# --- couplings


@pytest.mark.parametrize("name", COUPLINGS)
def test_couplings_are_odd_and_their_derivatives_fit(name: str) -> None:
    known, x, h = REGISTRY[name], np.linspace(-3.0, 3.0, 401), 1e-5
    assert np.array_equal(known.force(-x), -known.force(x))
    assert known.potential(np.zeros(1))[0] == 0.0
    pairs_of = ((known.potential, known.force), (known.force, known.slope), (known.slope, known.curvature))
    for function, derivative in pairs_of:
        # The formula errs by h^2 f''' / 6, below 1e-9 here, rounding by 2^-53 f / h, below 1e-9 too.
        np.testing.assert_allclose((function(x + h) - function(x - h)) / (2.0 * h), derivative(x), rtol=0, atol=2e-9)
    for reach in (0.5, 2.0, 3.0):
        inside = known.slope(np.linspace(-reach, reach, 1001))
        assert np.max(np.abs(inside)) <= known.largest_slope(reach) * (1.0 + EPS)
    below = np.linspace(-min(known.increasing, 3.0), min(known.increasing, 3.0), 1001)[1:-1]
    assert np.min(known.slope(below)) > 0.0


# --- limits: where it is softmax attention


def test_queries_without_coupling_are_softmax_attention() -> None:
    mask = kept("mask", B, H, N, N)
    cases: list[dict[str, Any]] = [{}, {"causal": True}, {"mask": mask}]
    for options in cases:
        out, _ = run(state="query", kappa=0.0, tau=0.0, **options)
        np.testing.assert_allclose(out, softmax_out(**options), rtol=0, atol=1e-15)


def test_one_step_of_diffusion_is_softmax_attention() -> None:
    one: dict[str, Any] = {
        "state": "feature",
        "coupling": "identity",
        "mu": 0.0,
        "step": 1.0,
        "steps": 1,
        "symmetrise": "none",
    }
    for options in ({}, {"causal": True}):
        np.testing.assert_allclose(run(**one, **options)[0], softmax_out(**options), rtol=0, atol=2e-15)


def test_consensus_is_softmax_attention() -> None:
    out, saved = run(mu=0.0, steps=600, tau=0.0)
    assert np.max(np.ptp(saved.scores, axis=2)) < 1e-14
    np.testing.assert_allclose(out, softmax_out(), rtol=0, atol=2e-15)


# --- energy (T1)


@pytest.mark.parametrize("symmetrise", SYMMETRIC)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("coupling", ["sin", "tanh", "identity", "arctan"])
def test_energy_falls_with_steps_up_to_2_over_l(coupling: str, state: str, symmetrise: str) -> None:
    options: dict[str, Any] = {"coupling": coupling, "state": state, "symmetrise": symmetrise, "steps": 60}
    longest = ra.graph_energy.longest_step(run(**{**options, "steps": 0})[1])
    for factor in (0.5, 0.999999):
        levels = ra.graph_energy.energy(run(**options, step=factor * longest)[1])
        rises = np.diff(levels, axis=-1)
        assert np.all(rises <= 1e-13 * (1.0 + np.abs(levels[..., 1:])))
        assert np.all(levels[..., -1] < levels[..., 0])


def test_energy_rises_where_the_step_is_too_long() -> None:
    with pytest.warns(UserWarning, match="step: got more than 2/L"):
        _, saved = run(step=1.5, steps=30, kappa=4.0)
    assert holds("graph_energy", "the flow is computed in steps").startswith("with steps up to 2 / L the energy falls")
    assert np.any(np.diff(ra.graph_energy.energy(saved), axis=-1) > 1e-3)


@pytest.mark.parametrize("symmetrise", SYMMETRIC)
@pytest.mark.parametrize("intrinsic", INTRINSICS)
@pytest.mark.parametrize("state", STATES)
def test_the_rate_is_minus_the_gradient_of_the_energy(state: str, intrinsic: str, symmetrise: str) -> None:
    """v = -grad E / pi, with E by differences."""
    options: dict[str, Any] = {
        "state": state,
        "intrinsic": intrinsic,
        "symmetrise": symmetrise,
        "mu": 0.7,
        "kappa": 1.3,
    }
    mask = kept("symmetric", B, 1, N, N, keep=0.8)
    _, saved = run(**options, step=1e-3, steps=1, mask=mask | np.swapaxes(mask, 2, 3))
    balance = weights_of(saved.inner.graph)
    rate, x, h = saved.inner.flow.steps[0].stages[0][2], saved.inner.graph.start, 1e-5

    def energy(x: Any) -> Any:
        return np.sum(saved.system.energy(balance, x), axis=(2, 3))

    for at in ((0, 1, 2, 0), (1, 3, 0, 0), (1, 2, N - 1, 0)):
        moved = np.zeros(x.shape)
        moved[at] = h
        slope = (energy(x + moved) - energy(x - moved)) / (2.0 * h)
        pi = balance[at[:3]][0] if not isinstance(balance, float) else 1.0
        # 2^-53 E / h is about 1e-10, relative to pi, which is about 1/N.
        np.testing.assert_allclose(-slope[at[:2]] / pi, rate[at], rtol=0, atol=1e-8)


def test_a_directed_graph_has_no_energy() -> None:
    _, saved = run(causal=True)
    with pytest.raises(ValueError, match="an energy exists only for graphs with detailed balance"):
        ra.graph_energy.energy(saved)


def test_the_kernel_has_detailed_balance() -> None:
    _, saved = run(mask=kept("mask", B, H, N, N))
    flux = weights_of(saved.inner.graph) * saved.graph
    np.testing.assert_allclose(flux, np.swapaxes(flux, 2, 3), rtol=0, atol=1e-16)
    assert np.max(np.sum(saved.graph, axis=-1)) <= 1.0


def test_a_row_of_the_graph_is_the_softmax_of_mutual_scores() -> None:
    """Without the link of a node to itself, which pulls at nothing."""
    q, k, v = draw("q", 1, 2, N, D), draw("k", 1, 2, N, D), draw("v", 1, 2, N, E)
    scores = q @ np.swapaxes(k, 2, 3) / np.sqrt(D)
    powers = np.exp(0.5 * (scores + np.swapaxes(scores, 2, 3)))
    wanted = powers / np.sum(powers, axis=-1, keepdims=True) * (1.0 - np.eye(N))
    graph: Any = ra.graph_energy.forward(q, k, v)[1].graph
    np.testing.assert_allclose(graph, wanted, rtol=1e-13, atol=1e-16)


def test_a_step_of_the_tokens_is_what_the_equation_says() -> None:
    """x_i' = kappa sum_j w_ij sin(x_j - x_i), for a step of Euler from the values on."""
    q, k, v = draw("q", 1, 1, N, D), draw("k", 1, 1, N, D), draw("v", 1, 1, N, D)
    given: dict[str, Any] = {"intrinsic": "none", "coupling": "sin", "state": "feature", "kappa": 0.7}
    out, saved = ra.graph_energy.forward(q, k, v, steps=1, step=0.2, **given)
    graph: Any = saved.graph
    pulls = np.sum(graph[..., None] * np.sin(v[:, :, None, :, :] - v[:, :, :, None, :]), axis=3)
    np.testing.assert_allclose(out, v + 0.2 * 0.7 * pulls, rtol=1e-13, atol=1e-15)


# --- conservation, translation, bounds, contraction (T2, T3, T12, T13, T18)


@pytest.mark.parametrize(
    ("coupling", "integrator"),
    [*((name, "euler") for name in COUPLINGS), *(("sin", name) for name in INTEGRATORS if name != "euler")],
)
@pytest.mark.parametrize("symmetrise", SYMMETRIC)
def test_the_sum_of_scores_is_conserved(symmetrise: str, coupling: str, integrator: str) -> None:
    options: dict[str, Any] = {"symmetrise": symmetrise, "coupling": coupling, "integrator": integrator}
    _, saved = run(intrinsic="none", steps=100 if integrator == "euler" else 20, step=0.1, **options)
    balance, states = weights_of(saved.inner.graph), saved.inner.flow.states
    before, after = (np.sum(balance * x, axis=2) for x in (states[0], states[-1]))
    # 100 steps with N roundings each, of numbers below N: 1e-13, most of which cancel.
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-13)


@pytest.mark.parametrize("symmetrise", [*SYMMETRIC, "none"])
@pytest.mark.parametrize("state", ["token", "query"])
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_scores_stay_between_the_smallest_and_the_largest(coupling: str, state: str, symmetrise: str) -> None:
    _, saved = run(state=state, symmetrise=symmetrise, coupling=coupling, steps=40)
    start = saved.inner.graph.start
    low, high = np.min(start, axis=2, keepdims=True), np.max(start, axis=2, keepdims=True)
    for x in saved.inner.flow.states:
        assert np.all(x >= low - EPS) and np.all(x <= high + EPS)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_stays_a_distribution(causal: bool) -> None:
    """Scores of a query add up to 1 at every step, and its threshold never empties a row."""
    _, saved = run(state="query", causal=causal, steps=40, empty="error")
    visible = 1.0 if saved.inner.graph.visible is None else saved.inner.graph.visible
    for x in saved.inner.flow.states:
        np.testing.assert_allclose(np.sum(x, axis=2), np.ones((B, H, N)), rtol=0, atol=1e-14)
        assert np.all(x >= 0.0) and np.all(x * (1.0 - visible) == 0.0)


def test_an_equilibrium_is_reached_and_is_the_only_one() -> None:
    _, saved = run(steps=120)
    assert np.max(ra.graph_energy.residual(saved)) < 1e-13
    # With mu = kappa = 1 and h = 1/3 a step brings it closer by at least a third, in the norm of pi.
    _, early = run(steps=10)
    pi = weights_of(saved.inner.graph)
    norms = [np.sqrt(np.sum(pi * (x - saved.scores) ** 2, axis=2)) for x in (early.inner.graph.start, early.scores)]
    assert np.all(norms[1] <= (2.0 / 3.0) ** 10 * norms[0])


ORDERS = {"euler": 1, "heun": 2, "rk4": 4}


def test_integrators_have_their_order() -> None:
    graph, start = run()[1].graph, draw("start", B, H, N, 1)
    true, _ = flow_of(graph, start, step=1.0 / 256.0, steps=256, integrator="rk4")
    for integrator, order in ORDERS.items():
        errors = []
        for steps in (8, 16):
            x, _ = flow_of(graph, start, step=1.0 / steps, steps=steps, integrator=integrator)
            errors.append(np.max(np.abs(x - true)))
        assert abs(math.log2(errors[0] / errors[1]) - order) < 0.3


# --- causality


@pytest.mark.parametrize(
    ("state", "symmetrise", "integrator"),
    [
        *((state, links, "euler") for state in ("prefix", "query") for links in ("causal_mirror", "mean", "none")),
        *(("query", "causal_mirror", name) for name in ("heun", "rk4")),
        *((state, "none", "euler") for state in ("token", "feature")),
    ],
)
def test_nothing_flows_from_the_future(state: str, symmetrise: str, integrator: str) -> None:
    q, k, v = qkv()
    other = [x.copy() for x in (q, k, v)]
    for x in other:
        x[:, :, 4:] += 3.0
    options: dict[str, Any] = {"state": state, "causal": True, "symmetrise": symmetrise, "kappa": 2.0, "step": 0.05}
    options["integrator"] = integrator
    first, second = (forward(*x, **options)[0] for x in ((q, k, v), other))
    assert np.array_equal(first[:, :, :4], second[:, :, :4])
    assert not np.array_equal(first[:, :, 4:], second[:, :, 4:])


def test_the_scores_of_a_prefix_are_those_of_its_tokens_alone() -> None:
    """A causal model with an energy: what query c reads, and the energy, are those of the tokens up to c in "token"."""
    options: dict[str, Any] = {"coupling": "tanh", "kappa": 2.0, "step": 0.05, "steps": 20, "tau": 0.45}
    out, saved = run(state="prefix", causal=True, **options)
    energies = np.zeros((B, H, 21))
    for last in range(1, N + 1):
        cut = [x[:, :, :last] for x in qkv()]
        attention = forward(*cut, state="query", causal=True, kappa=0.0, tau=0.0)[1].weights
        below = np.tril(attention, -1)
        alone, other = forward(*cut, graph=below + np.swapaxes(below, 2, 3), **options)
        np.testing.assert_allclose(out[:, :, last - 1], alone[:, :, -1], rtol=0, atol=1e-14)
        np.testing.assert_allclose(saved.scores[:, :, :last, last - 1], other.scores[..., 0], rtol=0, atol=1e-14)
        each = ra.graph_energy.energy(other)
        assert last == 1 or np.all(np.diff(each, axis=-1) < 0.0)
        energies += each
    np.testing.assert_allclose(ra.graph_energy.energy(saved), energies, rtol=0, atol=1e-13)


@pytest.mark.parametrize("state", ["token", "feature"])
@pytest.mark.parametrize("symmetrise", [*SYMMETRIC, "causal_mirror"])
def test_a_graph_that_lets_the_future_act_is_refused(state: str, symmetrise: str) -> None:
    with pytest.raises(ValueError, match=rf'graph: got "{symmetrise}" with causal scores'):
        run(state=state, causal=True, symmetrise=symmetrise)


# --- one equilibrium, also where there are many (T14)


@pytest.mark.parametrize(("coupling", "intrinsic"), [("sin", "none"), ("sin", "double_well"), ("tanh", "anchor")])
def test_a_flow_ends_at_one_point(coupling: str, intrinsic: str) -> None:
    """The way of the second half of a long flow is nothing beside the whole, also on the circle of consensus."""
    graph = run(symmetrise="mean")[1].graph
    start = 2.0 * draw("start", B, H, N, 1)
    _, saved = flow_of(graph, start, coupling=coupling, intrinsic=intrinsic, step=0.02, steps=5000)
    ways = [float(np.max(np.abs(b - a))) for a, b in zip(saved.states[:-1], saved.states[1:], strict=True)]
    assert sum(ways[2500:]) < 1e-6 * sum(ways)
    said = "as said: the energy is analytic, so every bounded flow ends at one point, on a manifold of equilibria too"
    assert holds("graph_energy", "solutions converge to equilibria") == said
