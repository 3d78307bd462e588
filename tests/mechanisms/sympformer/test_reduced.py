"""Reduced linear attention, whose momenta are matrices: the closure, one step spelled out, the integral."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from refattn import Context
from refattn.mechanisms.sympformer.forces import linear, reduced
from refattn.mechanisms.sympformer.integrators import coefficients
from refattn.mechanisms.sympformer.params import Layer
from tests.mechanisms.sympformer.calls import BLOCK, draw, run, stack

M = 6
OPTIONS: dict[str, Any] = {"integrator": "exponential_midpoint", "normalise": "none", "mlp": "none"}


def symmetric(w: Any) -> Any:
    return (w + w.T) / 2.0


def test_a_common_matrix_stays_one() -> None:
    """With p = P y for all tokens d(P y)/dt is the force of linear attention: the closure, without a mask."""
    _, params = stack(2, oracle="reduced", **OPTIONS)
    _, other = stack(2, oracle="linear", **OPTIONS)
    for name in ("w_a", "w_v"):
        object.__setattr__(other, name, symmetric(getattr(params, name)))
    object.__setattr__(other, "gain", params.gain)
    x, p = draw("x", 2, 5, M), symmetric(draw("p", M, M))
    matrices = np.broadcast_to(p, (2, 5, M, M))
    answer, saved = reduced.forward(Layer(reduced, params, {}, False), x, matrices)
    velocity = reduced.velocity(matrices, answer.context)
    y = saved[2][0]
    expected, _ = linear.forward(Layer(linear, other, {}, False), x, y @ p)
    assert answer.g is not None and expected.g is not None
    found = (answer.g @ y[..., None])[..., 0] + velocity @ p
    np.testing.assert_allclose(found, expected.g, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(velocity, linear.velocity(y @ p, expected.context), rtol=1e-12, atol=1e-12)


def test_a_step_spelled_out() -> None:
    """Token by token, as the formulas stand: two layers of the midpoint, causal."""
    params, x = stack(2, oracle="reduced", **OPTIONS), draw("x", 1, 5, M)
    state, saves = run(params, x)
    first, found, t = BLOCK.forward(params[0], BLOCK.start(params[0], x, Context()), Context(causal=True))[0], x[0], 1.0
    matrices = np.zeros((5, M, M))
    for each, saved in zip(params, saves, strict=True):
        numbers = {name: float(value[0]) for name, value in saved.numbers.items()}
        y = (found - found.mean(-1, keepdims=True)) / np.sqrt(found.var(-1, keepdims=True) + 1e-5) * each.gain
        a, v, h = symmetric(each.w_a), symmetric(each.w_v), numbers["h_y"]
        s = np.linspace(t, t + h, 20_001)
        decay = ((s / (t + h)) ** numbers["c_log"]) * np.exp(-numbers["c_lin"] * (t + h - s))
        integral = np.trapezoid(decay, s)
        moved = []
        for i in range(5):
            moments = sum(np.outer(y[j], y[j]) for j in range(i + 1)) / (i + 1)
            p = matrices[i].copy()
            force = v - a @ moments @ p @ p - p @ p @ moments @ a
            matrices[i] = decay[0] * p + integral * force
            moved.append(found[i] + numbers["h_x"] * (p + matrices[i]) / 2.0 @ moments @ a @ y[i])
        found, t = np.stack(moved), t + numbers["h_x"]
        if each is params[0]:
            np.testing.assert_allclose(first.p[0], matrices, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(state.x[0], found, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("c_log", "c_lin", "h"), [(3.0, 0.0, 0.3), (0.0, 0.7, 0.3), (3.0, 0.0, 2.0)])
def test_the_integral_of_a_damping_has_its_closed_form(c_log: float, c_lin: float, h: float) -> None:
    t = np.asarray([1.3])
    numbers = {"h_y": np.asarray([h]), "c_log": np.asarray([c_log]), "c_lin": np.asarray([c_lin])}
    value = coefficients.integral(Layer(None, stack(1)[0], numbers, True), t)[0]
    end = t + h
    exact = end / (c_log + 1.0) * (1.0 - (t / end) ** (c_log + 1.0)) if c_log else -np.expm1(-c_lin * h) / c_lin
    np.testing.assert_allclose(value, exact, rtol=1e-13)
