"""The equations of the densities that the particles stand for, in weak form.

For rho and a potential Phi of the momenta, with the functional derivative of H at a point that is no particle,

    d/dt int phi drho = int grad phi . v drho               v(x) = derivative of H by the momentum at x
    d_t Phi + alpha Phi + dH/drho = 0

and on particles y_i = grad Phi(x_i), whose slope is grad d_t Phi + (Hessian of Phi) v. Everything here is written from
the integrals over rho; the particles' own equations are what is tested.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from refattn.analysis import moments
from refattn.analysis.particles import Damping, Exponential, accelerate, attention
from tests.analysis.flow_systems import HELD, LINEAR, SOFTMAX, SYSTEMS, D, N, X, draw
from tests.rows import holds

DAMPED = Damping(3.0, 0.2)
NAMES = ("linear", "exponential", "held")
P, W = draw("quadratic", D, D), draw("wave", D)
P = 0.3 * (P + P.T)


def phi(x: Any) -> Any:
    """A potential of the momenta that is no quadratic."""
    return 0.5 * np.sum(x * (x @ P), axis=-1) + np.sin(x @ W)


def grad_phi(x: Any) -> Any:
    return x @ P + np.cos(x @ W)[..., None] * W


def hessian_phi(x: Any) -> Any:
    return P - np.sin(x @ W)[..., None, None] * W[:, None] * W


def density_velocity(name: str, point: Any) -> Any:
    """v at a point, from integrals over rho."""
    if name == "linear":
        return sum((point @ LINEAR.a @ other) * grad_phi(other) for other in X) / N
    z = sum(np.exp(point @ SOFTMAX.a @ other) for other in X) / N
    return SOFTMAX.b @ grad_phi(point) / z


def density_energy(name: str, point: Any) -> float:
    """The derivative of H by rho, at a point."""
    if name == "linear":
        kernel = sum((point @ LINEAR.a @ other) * (grad_phi(point) @ grad_phi(other)) for other in X) / N
        return float(kernel - 0.5 * point @ LINEAR.v @ point)
    growth = [np.exp(point @ SOFTMAX.a @ other) for other in X]
    z = sum(growth) / N
    value = 0.5 * grad_phi(point) @ SOFTMAX.b @ grad_phi(point) / z - z
    for other, e in zip(X, growth, strict=True):
        own = sum(np.exp(other @ SOFTMAX.a @ third) for third in X) / N
        value -= 0.5 * e * (grad_phi(other) @ SOFTMAX.b @ grad_phi(other)) / own**2 / N
    return float(value + (0.5 * point @ HELD.u @ point if name == "held" and HELD.u is not None else 0.0))


@pytest.mark.parametrize("name", NAMES)
def test_the_continuity_equation_in_weak_form(name: str) -> None:
    """The change of a smooth function's mean, from the flow half a step on (the other half is the flow backwards)."""
    h, y = 1e-3, grad_phi(X)
    flux = np.asarray([density_velocity(name, point) for point in X])
    ahead = accelerate(SYSTEMS[name], X, y, np.asarray([1.0, 1.0 + h, 1.0 + 2.0 * h]), DAMPED, rtol=1e-12)[0]
    behind = accelerate(SYSTEMS[name], X, y, np.asarray([1.0, 1.0 - h, 1.0 - 2.0 * h]), DAMPED, rtol=1e-12)[0]
    for number in range(3):
        k = draw(f"test function {number}", D)
        mean = [np.mean(np.cos(x @ k)) for x in (behind[2], behind[1], ahead[1], ahead[2])]
        rate = (8.0 * (mean[2] - mean[1]) - (mean[3] - mean[0])) / (12.0 * h)
        weak = np.mean(-np.sin(X @ k) * (flux @ k))
        assert rate == pytest.approx(weak, abs=1e-8)


@pytest.mark.parametrize("name", NAMES)
def test_the_equation_of_the_momenta_in_weak_form(name: str) -> None:
    """Vector fields as test functions: int psi . (slope of grad Phi along the flow) drho."""
    system, h = SYSTEMS[name], 1e-3
    slope = system.force(X, grad_phi(X)) - DAMPED.alpha(1.0) * grad_phi(X)
    wanted = np.zeros_like(X)
    for i, point in enumerate(X):
        for c, step in enumerate(h * np.eye(D)):
            at = [density_energy(name, point + n * step) for n in (-2, -1, 1, 2)]
            wanted[i, c] = -(8.0 * (at[2] - at[1]) - (at[3] - at[0])) / (12.0 * h)
        wanted[i] += hessian_phi(point) @ density_velocity(name, point) - DAMPED.alpha(1.0) * grad_phi(point)
    for number in range(3):
        k, turn = draw(f"test function {number}", D), draw(f"test field {number}", D, D)
        psi = np.cos(X @ k)[:, None] * (X @ turn)
        assert np.mean(psi * slope) == pytest.approx(np.mean(psi * wanted), abs=1e-8)


def test_a_quadratic_potential_of_the_momenta_stays_one_under_linear_attention() -> None:
    """Phi(t, x) = 1/2 x^T P(t) x solves its equation at every point, with P' of the moments."""
    s = X.T @ X / N
    p_slope = moments.linear_momentum_slope(LINEAR, s, P, DAMPED.alpha(1.0))
    for point in draw("points", 5, D):
        kernel = np.mean((X @ LINEAR.a @ point) * (X @ P @ P @ point))
        rest = kernel - 0.5 * point @ LINEAR.v @ point
        changed = 0.5 * point @ p_slope @ point
        assert changed + DAMPED.alpha(1.0) * 0.5 * point @ P @ point + rest == pytest.approx(0.0, abs=1e-12)


def gaussian_drift(x: Any, mean: Any, scatter: Any, samples: Any) -> Any:
    """Attention of points to a Gaussian law, by quadrature along a product grid of its whitened coordinates."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(samples)
    grid = np.stack(np.meshgrid(*[nodes] * len(mean), indexing="ij"), axis=-1).reshape(-1, len(mean))
    mass = np.prod(np.stack(np.meshgrid(*[weights] * len(mean), indexing="ij"), axis=-1), axis=-1).ravel()
    points = mean + grid @ np.linalg.cholesky(scatter).T
    growth = mass * np.exp(x @ SOFTMAX.a @ points.T)
    return growth @ (points @ SOFTMAX.a) @ SOFTMAX.b / np.sum(growth, axis=1, keepdims=True)


def test_softmax_attention_to_a_gaussian_law_is_affine() -> None:
    """V (m + Sigma A x): Gaussians stay Gaussian without momentum."""
    mean, scatter = draw("mean", D), 0.3 * np.eye(D) + 0.1 * np.outer(W, W)
    exact = (mean + X @ SOFTMAX.a @ scatter) @ SOFTMAX.a @ SOFTMAX.b
    np.testing.assert_allclose(gaussian_drift(X, mean, scatter, 20), exact, rtol=0.0, atol=1e-12)


def far_from_affine(x: Any, field: Any) -> float:
    """Return how much of a field at points is left beside the best affine map, as a share of its spread."""
    wide = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    rest = field - wide @ np.linalg.lstsq(wide, field)[0]
    return float(np.linalg.norm(rest) / np.linalg.norm(field - field.mean(axis=0)))


def test_a_gaussian_law_is_kept_without_momentum_alone() -> None:
    """Of many particles: without momentum the field is affine; with momenta that are affine, it is not."""
    drawn = draw("gaussian", 1000, D)
    drawn = drawn - drawn.mean(axis=0)
    drawn = drawn @ np.linalg.inv(np.linalg.cholesky(drawn.T @ drawn / len(drawn))).T
    x, near = 0.6 * drawn + 0.3, np.linalg.norm(drawn, axis=1) < 1.8  # those at the edge attend few particles
    strong = Exponential(3.0 * SOFTMAX.a, SOFTMAX.b)
    assert far_from_affine(x[near], attention(strong, x)[near]) < 0.02
    assert far_from_affine(x[near], strong.velocity(x, x @ P)[near]) > 0.1
    said = "as said without momentum: its field is affine for a Gaussian; with one no longer"
    assert holds("sympformer", "the flow of softmax attention keeps Gaussians") == said
