"""Ensembles in the geometry of their scores: gradients, what the connection is, and prefixes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from refattn import Context, tree
from refattn.mechanisms.sympformer.geometry import prefixes, step
from tests.mechanisms.sympformer.calls import BLOCK, draw, stack


def params_of(m: int, number: int = 0) -> step.Params:
    fresh = step.fresh(m, np.zeros(1), beta=0.6, gamma=0.3)
    return tree.map_leaves(lambda w: w + 0.2 * draw(f"moved {number} {w.shape}", *w.shape), fresh)


def tokens(name: str) -> Any:
    return 0.7 * draw(name, 2, 4, 3)


def published(params: step.Params, x: Any, v: Any, connection: str, temperature: float) -> tuple[Any, Any]:
    """A step for one ensemble (i, m), token by token, with A and B by their definitions."""
    m = x.shape[1]
    matrices = []
    for w, size in ((params.w_a, temperature / m), (params.w_b, m / temperature)):
        lower, entries = np.zeros((m, m)), iter(w)
        for row in range(m):
            for column in range(row + 1):
                lower[row, column] = next(entries)
            lower[row, row] = np.log1p(np.exp(lower[row, row])) + 1e-4
        matrices.append(size * lower @ lower.T)
    a, b = matrices
    weights = np.asarray([[np.exp(p @ a @ q) for q in x] for p in x])
    weights /= weights.sum(1, keepdims=True)
    force = np.asarray([sum(weights[i, j] * b @ a @ x[j] for j in range(len(x))) for i in range(len(x))])
    w = params.beta * v + params.gamma * force
    if connection == "none":
        return x + w, w
    u = v if connection == "old" else w
    s = [each @ np.linalg.inv(b) @ each for each in u]
    k = np.zeros_like(x)
    for i in range(len(x)):
        rate = sum(weights[i, j] * (u[i] @ a @ x[j] + x[i] @ a @ u[j]) for j in range(len(x)))
        k[i] = rate * u[i] - 0.5 * sum(weights[i, j] * (s[i] + s[j]) * b @ a @ x[j] for j in range(len(x)))
    return x + w - (k if connection == "old" else 0.5 * k), w - k


@pytest.mark.parametrize("connection", ["none", "old", "new"])
def test_a_step_is_that_of_the_authors(connection: str) -> None:
    params, x, v = params_of(3), tokens("x"), tokens("v")
    moved, later, _ = step.forward(params, x, v, connection=connection, temperature=1.3)
    for n in range(2):
        for found, wanted in zip((moved[n], later[n]), published(params, x[n], v[n], connection, 1.3), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-12)


@pytest.mark.parametrize(("connection", "normed"), [("none", False), ("old", True), ("new", False), ("new", True)])
def test_gradients_of_a_step_agree_with_differences(connection: str, normed: bool) -> None:
    options: dict[str, Any] = {"connection": connection, "normed": normed, "temperature": 1.3}
    whole, upstream = {"params": params_of(3), "x": tokens("x"), "v": tokens("v")}, (tokens("d_x"), tokens("d_v"))
    leaves = tree.flatten(whole)

    def loss(leaves: Any) -> float:
        moved, later, _ = step.forward(*tree.unflatten(whole, leaves).values(), **options)
        return float(np.sum(moved * upstream[0] + later * upstream[1]))

    _, _, saved = step.forward(*whole.values(), **options)
    d_x, d_v, d_params = step.backward(whole["params"], saved, *upstream)
    found = tree.flatten({"params": d_params, "x": d_x, "v": d_v})
    for name, leaf in leaves.items():
        for place in np.ndindex(*leaf.shape):
            h = np.zeros(leaf.shape)
            h[place] = 1e-6
            slope = (loss({**leaves, name: leaf + h}) - loss({**leaves, name: leaf - h})) / 2e-6
            assert found[name][place] == pytest.approx(slope, rel=1e-6, abs=1e-7), (name, place)


def test_fresh_matrices_are_inverse_and_the_numbers_those_of_a_damping() -> None:
    _, _, saved = step.forward(step.fresh(3, np.zeros(1), beta=0.5, gamma=0.1), tokens("x"), tokens("v"))
    np.testing.assert_allclose(saved[1][0], np.eye(3) / 3.0, atol=1e-15)
    np.testing.assert_allclose(saved[1][1], np.eye(3) * 3.0, atol=1e-14)
    h = 0.1**0.5
    assert step.coefficients(2) == pytest.approx((((1 + 2 * h) / (1 + 3 * h)) ** 3, 0.1))
    with pytest.raises(ValueError, match=r"factor: got shape \(6,\), needs \(3,\) for tokens of width 2"):
        step.forward(params_of(3), tokens("x")[..., :2], tokens("v")[..., :2])


def geodesic_acceleration(params: step.Params, x: Any, u: Any) -> Any:
    """The acceleration of the straight line of the metric sum_i z_i <v_i, B^-1 v_i>, by differences."""
    m = x.shape[1]
    lower = step.factor(params.w_a, m)
    a = lower @ lower.T / m
    lower = step.factor(params.w_b, m)
    inverse = np.linalg.inv(m * lower @ lower.T)

    def z(x: Any) -> Any:
        return np.exp(x @ a @ x.T).sum(1)

    def energy(x: Any) -> Any:
        return 0.5 * np.sum(z(x) * np.einsum("id,de,ie->i", u, inverse, u))

    h = 1e-5
    slope = np.zeros_like(x)
    for place in np.ndindex(*x.shape):
        e = np.zeros_like(x)
        e[place] = h
        slope[place] = (energy(x + e) - energy(x - e)) / (2 * h)
    rate = (z(x + h * u) - z(x - h * u)) / (2 * h)  # d/dt (z B^-1 u) = dE/dx
    return (np.linalg.solve(inverse, slope.T).T - rate[:, None] * u) / z(x)[:, None]


def test_the_connection_is_that_of_the_metric() -> None:
    """Without a force, v' - v is the acceleration of a straight line where tokens weigh z B^-1."""
    params, x, v = params_of(3), tokens("x")[:1], tokens("v")[:1]
    free = dataclasses.replace(params, beta=np.ones(1), gamma=np.zeros(1))
    _, later, _ = step.forward(free, x, v, connection="old")
    np.testing.assert_allclose((later - v)[0], geodesic_acceleration(params, x[0], v[0]), rtol=1e-6, atol=1e-8)


def test_prefixes_make_a_stack_causal_and_their_gradients_agree() -> None:
    layers, x, d_out = [params_of(3, n) for n in range(2)], tokens("x"), tokens("d")

    def evolve(part: Any) -> tuple[Any, Any]:
        moved, v, saves = part, 0.0 * part, []
        for params in layers:
            moved, v, saved = step.forward(params, moved, v, connection="new")
            saves.append(saved)
        return moved, saves

    def back(saves: Any, d_moved: Any) -> Any:
        d_v = 0.0 * d_moved
        for params, saved in zip(reversed(layers), reversed(saves), strict=True):
            d_moved, d_v, _ = step.backward(params, saved, d_moved, d_v)
        return d_moved

    out, saves = prefixes.forward(evolve, x)
    np.testing.assert_allclose(out[:, -1], evolve(x)[0][:, -1], rtol=1e-14)
    np.testing.assert_array_equal(prefixes.forward(evolve, x[:, :2])[0], out[:, :2])
    along, h = draw("along", *x.shape), 1e-6
    slope = np.sum((prefixes.forward(evolve, x + h * along)[0] - prefixes.forward(evolve, x - h * along)[0]) * d_out)
    assert np.sum(prefixes.backward(back, saves, d_out) * along) == pytest.approx(slope / (2.0 * h), rel=1e-7)


def test_the_force_of_a_hamiltonian_becomes_causal() -> None:
    (params,) = stack(1, oracle="hamiltonian", mlp="none", start="linear")
    x = draw("x", 1, 4, 6)

    def evolve(part: Any) -> tuple[Any, Any]:
        return BLOCK.forward(params, BLOCK.start(params, part, Context()), Context())[0].x, None

    out, _ = prefixes.forward(evolve, x)
    np.testing.assert_allclose(out[:, 1], evolve(x[:, :2])[0][:, 1], rtol=1e-14)
    assert np.any(evolve(x)[0][:, 1] != out[:, 1])
