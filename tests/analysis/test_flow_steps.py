"""The integrators of particles: their orders, and what they keep exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from refattn.analysis.flow_steps import STEPS, State, steps
from refattn.analysis.particles import Damping, Exponential
from tests.analysis.flow_systems import HELD, LINEAR, SYSTEMS, D, N, X, Y, draw, positive

SECOND = ("presymplectic", "strang", "ab2", "etd_ab2")
DAMPED = Damping(3.0, 0.3)
TIME = 0.4
LINEAR_IN_X = tuple(name for name in STEPS if name not in ("presymplectic", "strang"))


def last(system: Any, integrator: str, number: int, x: Any = X, y: Any = Y, time: float = TIME) -> State:
    *_, state = steps(system, x, y, integrator=integrator, damping=DAMPED, h=time / number, number=number)
    return state


@pytest.mark.parametrize("integrator", STEPS)
@pytest.mark.parametrize("name", ["linear", "held"])
def test_order(name: str, integrator: str) -> None:
    first = 40
    found = [last(SYSTEMS[name], integrator, times * first).x for times in (1, 2, 4)]
    order = np.log2(np.linalg.norm(found[0] - found[1]) / np.linalg.norm(found[1] - found[2]))
    assert order == pytest.approx(2.0 if integrator in SECOND else 1.0, abs=0.1)


def shape(x: Any) -> Any:
    """The inner products of whitened particles, (x_i - m)^T S^-1 (x_j - m): a linear map of all keeps them."""
    centred = x - x.mean(axis=0)
    return centred @ np.linalg.solve(centred.T @ centred / len(x), centred.T)


class Normalised:
    """Linear attention that sees layer-normalised particles, as the blocks do."""

    @staticmethod
    def seen(x: Any) -> Any:
        centred = x - x.mean(axis=1, keepdims=True)
        return centred / np.sqrt(np.mean(centred**2, axis=1, keepdims=True) + 1e-5)

    def velocity(self, x: Any, y: Any) -> Any:
        return LINEAR.velocity(self.seen(x), y)

    def force(self, x: Any, y: Any) -> Any:
        return LINEAR.force(self.seen(x), y)


@pytest.mark.parametrize("integrator", LINEAR_IN_X)
def test_elliptical_laws_stay_elliptical(integrator: str) -> None:
    """Radii and angles of whitened particles, of a law with heavy tails, for any momenta; not with a layer norm."""
    x = 0.4 + 0.5 * X / np.abs(draw("radius", N, 1))
    state = last(LINEAR, integrator, 8, x)
    assert np.linalg.norm(state.x - x) > 1e-2 * np.linalg.norm(x)
    np.testing.assert_allclose(shape(state.x), shape(x), rtol=0.0, atol=1e-12)
    if integrator != "conformal":
        state = last(Normalised(), integrator, 8, x)
        assert np.max(np.abs(shape(state.x) - shape(x))) > 1e-4


@pytest.mark.parametrize("integrator", STEPS)
def test_so_do_they_with_momenta_linear_in_the_particles(integrator: str) -> None:
    """Without a mean: the rotation of the doubled integrators mixes particles and momenta."""
    p = 0.5 * (draw("p", D, D) + draw("p", D, D).T)
    state = last(LINEAR, integrator, 8, X, X @ p)
    np.testing.assert_allclose(shape(state.x), shape(X), rtol=0.0, atol=1e-12)
    if integrator in ("presymplectic", "strang"):
        state = last(LINEAR, integrator, 8)
        assert np.max(np.abs(shape(state.x) - shape(X))) > 1e-7


@pytest.mark.parametrize("integrator", LINEAR_IN_X)
def test_centred_particles_stay_centred(integrator: str) -> None:
    state = last(LINEAR, integrator, 8, X - X.mean(axis=0))
    assert np.max(np.abs(state.x.mean(axis=0))) < 1e-12


def jacobian(system: Any, integrator: str, damping: Damping, h: float, x: Any, y: Any) -> Any:
    """The derivative of one step by (x, y), from steps in the imaginary direction."""
    columns = []
    for index in range(2 * x.size):
        point = np.concatenate([x.ravel(), y.ravel()]).astype(complex)
        point[index] += 1e-30j
        at_x, at_y = point.reshape(2, *x.shape)
        *_, state = steps(system, at_x, at_y, integrator=integrator, damping=damping, h=h, number=1)
        columns.append(np.concatenate([state.x.ravel(), state.y.ravel()]).imag / 1e-30)
    return np.stack(columns, axis=1)


def residual(system: Any, integrator: str, h: float = 0.05) -> float:
    """How far J^T W J is from e^-a W, for the step from t = 1."""
    x, y = X[:4], Y[:4]
    j = jacobian(system, integrator, DAMPED, h, x, y)
    zero, one = np.zeros((x.size, x.size)), np.eye(x.size)
    form = np.block([[zero, one], [-one, zero]])
    kept = np.exp(-DAMPED.between(1.0, 1.0 + h))
    return float(np.max(np.abs(j.T @ form @ j - kept * form)))


SEPARABLE = Exponential(np.zeros((D, D)), positive("b"), positive("u"), attraction=0.0)


@pytest.mark.parametrize("integrator", ["presymplectic_euler", "half_damped", "conformal"])
def test_separable_systems_are_conformally_symplectic(integrator: str) -> None:
    assert residual(SEPARABLE, integrator) < 1e-10


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_implicit_kick_is_conformally_symplectic_for_all(name: str) -> None:
    h = 0.05 if name != "repo" else 0.01
    assert residual(SYSTEMS[name], "conformal", h) < 1e-10
    assert residual(SYSTEMS[name], "presymplectic_euler", h) > 1e-6


@pytest.mark.parametrize("integrator", ["forward_euler", "explicit_euler", "ab2"])
def test_others_are_not_even_for_separable_systems(integrator: str) -> None:
    assert residual(SEPARABLE, integrator) > 1e-4


def test_wrong_calls() -> None:
    with pytest.raises(ValueError, match="integrator: got 'plain_euler', needs one of presymplectic_euler, "):
        next(steps(HELD, X, Y, integrator="plain_euler", damping=DAMPED, h=0.1, number=1))
    with pytest.raises(ValueError, match=r"h: got 50.0, the implicit kick needs a smaller step"):
        list(steps(HELD, X, Y, integrator="conformal", damping=DAMPED, h=50.0, number=1))
