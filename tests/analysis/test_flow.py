"""Attention as particles: the equations against their Hamiltonians, and what these conserve."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.integrate import solve_ivp

import refattn as ra
from refattn.analysis import moments
from refattn.analysis.particles import Damping, Exponential, Linear, accelerate, attention, descend, hamiltonian
from tests.analysis.flow_systems import HELD, LINEAR, REPO, SOFTMAX, SYSTEMS, D, N, X, Y, draw, positive

TIMES = np.linspace(1.0, 1.8, 5)
DAMPED = Damping(3.0, 0.2)


def slope(value: Any, at: Any, h: float = 1e-5) -> Any:
    """The derivative of a number by every entry of an array, from differences of fourth order."""
    found = np.zeros_like(at)
    for index in np.ndindex(at.shape):
        step = np.zeros_like(at)
        step[index] = h
        near, far = value(at + step) - value(at - step), value(at + 2.0 * step) - value(at - 2.0 * step)
        found[index] = (8.0 * near - far) / (12.0 * h)
    return found


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_equations_are_canonical(name: str) -> None:
    """Differences of a value of size H lose eps H / h, some 1e-9 where H is N^2 times as large."""
    system = SYSTEMS[name]
    velocity = slope(lambda y: hamiltonian(system, X, y), Y)
    force = -slope(lambda x: hamiltonian(system, x, Y), X)
    allowed = 1e-10 * (1.0 + abs(hamiltonian(system, X, Y)))
    np.testing.assert_allclose(system.velocity(X, Y), velocity, rtol=0.0, atol=allowed)
    np.testing.assert_allclose(system.force(X, Y), force, rtol=0.0, atol=allowed)


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("damping", [Damping(0.0, 2.0), Damping(3.0, 0.0), Damping(0.0, 0.0)])
def test_the_energy_falls_by_twice_the_kinetic_one(name: str, damping: Damping) -> None:
    system, times = SYSTEMS[name], np.linspace(1.0, 1.04, 5)
    xs, ys = accelerate(system, X, Y, times, damping, rtol=1e-12)
    energies = [hamiltonian(system, x, y) for x, y in zip(xs, ys, strict=True)]
    h = times[1] - times[0]
    rate = (8.0 * (energies[3] - energies[1]) - (energies[4] - energies[0])) / (12.0 * h)
    loss = -2.0 * damping.alpha(times[2]) * system.kinetic(xs[2], ys[2])
    scale = 1.0 + abs(loss) + abs(energies[2])
    assert rate == pytest.approx(loss, abs=2e-6 * scale)
    if damping.alpha(1.0):
        assert np.all(np.diff(energies) < 0.0)
    else:
        assert np.ptp(energies) < 1e-10 * scale


@pytest.mark.parametrize("name", SYSTEMS)
def test_attention_is_the_acceleration_of_particles_at_rest(name: str) -> None:
    """From rest X(h) = X + h^2/2 attention + O(h^4): without damping the way back is the way there."""
    system, rest = SYSTEMS[name], np.zeros_like(X)
    moved = []
    for h in (2e-3, 1e-3):
        xs, _ = accelerate(system, X, rest, np.asarray([1.0, 1.0 + h]), Damping(0.0, 0.0), rtol=1e-13)
        moved.append((xs[1] - X) / (0.5 * h * h))
    size = np.max(np.abs(attention(system, X)))
    np.testing.assert_allclose(
        (4.0 * moved[1] - moved[0]) / 3.0, attention(system, X), rtol=0.0, atol=1e-7 * (1 + size)
    )


def test_without_momentum_particles_attend_with_a_softmax() -> None:
    v = SOFTMAX.b @ SOFTMAX.a
    scores = X @ SOFTMAX.a @ X.T
    weights = np.exp(scores) / np.sum(np.exp(scores), axis=1, keepdims=True)
    np.testing.assert_allclose(attention(SOFTMAX, X), weights @ X @ v.T, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(attention(REPO, X), N**2 * (weights @ X @ v.T), rtol=1e-13, atol=1e-12)
    linear = X @ LINEAR.a @ X.T @ X @ LINEAR.v / N
    np.testing.assert_allclose(attention(LINEAR, X), linear, rtol=1e-13, atol=1e-14)


def test_the_force_is_that_of_the_mechanism() -> None:
    """Its oracle, with A for queries and values, all tokens seen by all."""
    kinetic = np.sum(Y * (Y @ SOFTMAX.b), axis=1)
    given = {"q": X @ SOFTMAX.a, "k": X, "v": X @ SOFTMAX.a, "kinetic": kinetic[:, None]}
    core = ra.mechanism("sympformer").core
    assert core is not None
    out, saved = core.forward(**{n: v[None, None] for n, v in given.items()}, scale=1.0)
    np.testing.assert_allclose(SOFTMAX.force(X, Y), out[0, 0], rtol=1e-12, atol=1e-13)
    velocity = Y @ SOFTMAX.b * np.exp(-saved.log_z[0, 0])[:, None]
    np.testing.assert_allclose(SOFTMAX.velocity(X, Y), velocity, rtol=1e-13)


def test_the_scaling_of_the_authors_program() -> None:
    """There z is a sum, x' = N B y / z, and the force N/2 sum_j M_ij (s_i + s_j + 2) A x_j with s of that z."""
    growth = np.exp(X @ REPO.a @ X.T)
    z = np.sum(growth, axis=1)
    s = np.sum(Y * (Y @ REPO.b), axis=1) / z**2
    force = 0.5 * N * (growth * (s[:, None] + s[None, :] + 2.0)) @ X @ REPO.a
    np.testing.assert_allclose(REPO.velocity(X, Y), N * (Y @ REPO.b) / z[:, None], rtol=1e-13)
    np.testing.assert_allclose(REPO.force(X, Y), force, rtol=1e-12, atol=1e-12)
    kinetic_alone = Exponential(REPO.a, REPO.b, attraction=0.0).force(X, Y)
    np.testing.assert_allclose(
        REPO.force(X, Y) - kinetic_alone, N**2 * (SOFTMAX.force(X, Y) - kinetic_alone), rtol=1e-10, atol=1e-10
    )


def test_without_attraction_particles_are_damped_oscillators() -> None:
    """A critically damped direction, and one that swings, in closed form."""
    u, damping = np.diag([0.01, 1.0]), Damping(0.0, 0.2)
    system = Exponential(np.zeros((2, 2)), np.eye(2), u, attraction=0.0)
    x, times = draw("oscillators", 4, 2), np.linspace(1.0, 9.0, 9)
    xs, _ = accelerate(system, x, np.zeros_like(x), times, damping, rtol=1e-12)
    t, w = times - 1.0, math.sqrt(0.99)
    slow = (1.0 + 0.1 * t) * np.exp(-0.1 * t)
    fast = np.exp(-0.1 * t) * (np.cos(w * t) + 0.1 / w * np.sin(w * t))
    np.testing.assert_allclose(xs, x * np.stack([slow, fast], axis=1)[:, None, :], rtol=0.0, atol=1e-9)


@pytest.mark.parametrize("own", [True, False])
def test_linear_attention_closes_in_its_moments(own: bool) -> None:
    """For any momenta; and Y = X P with a symmetric P remains so."""
    p = 0.5 * (draw("p", D, D) + draw("p", D, D).T)
    x = X + 0.4
    y = Y if own else x @ p
    xs, ys = accelerate(LINEAR, x, y, TIMES, DAMPED)

    def closed(t: float, flat: Any) -> Any:
        s, c = flat[: D * D].reshape(D, D), flat[D * D : 2 * D * D].reshape(D, D)
        slopes = moments.moments_slope(LINEAR, s, c, flat[2 * D * D :], DAMPED.alpha(t))
        return np.concatenate([each.ravel() for each in slopes])

    start = np.concatenate([each.ravel() for each in moments.moments(x, y)])
    found = solve_ivp(closed, (TIMES[0], TIMES[-1]), start, method="DOP853", t_eval=TIMES, rtol=1e-11, atol=1e-13).y.T
    for row, x_now, y_now in zip(found, xs, ys, strict=True):
        together = np.concatenate([each.ravel() for each in moments.moments(x_now, y_now)])
        np.testing.assert_allclose(row, together, rtol=0.0, atol=1e-8)
    if own:
        return

    def momentum(t: float, flat: Any) -> Any:
        s, p_now = flat.reshape(2, D, D)
        turn = LINEAR.a @ s @ p_now
        slopes = (turn.T @ s + s @ turn, moments.linear_momentum_slope(LINEAR, s, p_now, DAMPED.alpha(t)))
        return np.stack(slopes).ravel()

    start = np.stack([moments.moments(x, y)[0], p]).ravel()
    found = solve_ivp(momentum, (TIMES[0], TIMES[-1]), start, method="DOP853", t_eval=TIMES, rtol=1e-11, atol=1e-13).y.T
    for row, x_now, y_now in zip(found, xs, ys, strict=True):
        p_now = row.reshape(2, D, D)[1]
        np.testing.assert_allclose(p_now, p_now.T, rtol=0.0, atol=1e-12)
        np.testing.assert_allclose(y_now, x_now @ p_now, rtol=0.0, atol=1e-8)


def test_linear_attention_is_a_stein_variational_flow() -> None:
    """With the kernel x^T A y in the potential -1/2 x^T V x, written out particle by particle."""
    flow = np.zeros_like(X)
    for i in range(N):
        for j in range(N):
            flow[i] += float(X[j] @ LINEAR.a @ X[i]) * (LINEAR.v @ X[j]) / N  # the kernel times -grad potential
    np.testing.assert_allclose(attention(LINEAR, X), flow, rtol=1e-12, atol=1e-14)
    xs = descend(LINEAR, X, TIMES - 1.0)
    start = moments.moments(X, X)[0].ravel()
    found = solve_ivp(
        lambda t, s: moments.riccati_slope(LINEAR, s.reshape(D, D)).ravel(),
        (0.0, 0.8),
        start,
        method="DOP853",
        t_eval=TIMES - 1.0,
        rtol=1e-11,
        atol=1e-13,
    ).y.T
    for row, x in zip(found, xs, strict=True):
        np.testing.assert_allclose(row.reshape(D, D), x.T @ x / N, rtol=1e-8)


@pytest.mark.parametrize("v", [0.4, -0.7])
def test_the_riccati_equation_in_one_dimension(v: float) -> None:
    """S = S_0 / (1 - 2 a v S_0 t)."""
    a, x = 0.8, draw("line", 6, 1)
    s = float(np.mean(x**2))
    until = 0.5 / (2.0 * a * abs(v) * s)
    times = np.linspace(0.0, until, 4)
    xs = descend(Linear(np.asarray([[a]]), np.asarray([[v]])), x, times)
    np.testing.assert_allclose(np.mean(xs**2, axis=(1, 2)), s / (1.0 - 2.0 * a * v * s * times), rtol=1e-8)


def test_centred_particles_stay_centred() -> None:
    """Linear attention, whatever the momenta; softmax attention, where particles come in pairs x, -x."""
    centred = X - X.mean(axis=0)
    xs, _ = accelerate(LINEAR, centred, Y, TIMES, DAMPED)
    assert np.max(np.abs(xs.mean(axis=1))) < 1e-12
    pairs, momenta = np.concatenate([X, -X]), np.concatenate([Y, -Y])
    xs, _ = accelerate(HELD, pairs, momenta, TIMES, DAMPED)
    assert np.max(np.abs(xs.mean(axis=1))) < 1e-12
    xs, _ = accelerate(HELD, centred, Y, TIMES, DAMPED)
    assert np.max(np.abs(xs.mean(axis=1))) > 1e-3  # centred alone is not enough there


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Linear(draw("a", 3, 3), np.eye(3)), r"a: got a matrix of shape \(3, 3\), needs a symmetric"),
        (lambda: Exponential(np.eye(3), positive("b"), draw("u", 3, 2)), r"u: got a matrix of shape \(3, 2\)"),
        (lambda: Exponential(np.eye(3), np.eye(3), scaling="sum"), "scaling: got 'sum', needs one of mean_field, repo"),
    ],
)
def test_a_wrong_system(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_an_energy_without_bound_blows_up() -> None:
    one = np.ones((1, 1))
    with pytest.raises(ValueError, match="times: got 0 to 5, needs an earlier end"):
        descend(Linear(one, one), np.ones((2, 1)), np.asarray([0.0, 5.0]))
