"""Linear attention: its two implementations, its equations from the Hamiltonian, and the normaliser of the prefix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refattn import Context
from refattn.mechanisms.sympformer.forces import linear, prefix
from tests.mechanisms.sympformer.calls import back, draw, run, stack


@settings(max_examples=25)
@given(st.integers(1, 200), st.integers(1, 9), st.sampled_from([1, -1, 0]))
def test_forms_agree(n: int, m: int, side: int) -> None:
    a, b, c = (draw(name, 2, n, m) for name in "abc")
    gram, state = prefix.mix_gram(a, b, c, side), prefix.mix_state(a, b, c, side)
    np.testing.assert_allclose(state, gram, rtol=0.0, atol=1e-12 * np.max(np.abs(gram)))


@pytest.mark.parametrize("side", [1, -1, 0])
def test_the_sum_is_that_of_scalar_loops(side: int) -> None:
    a, b, c = (draw(name, 1, 5, 3)[0] for name in "abc")
    expected = np.zeros((5, 3))
    for i in range(5):
        for j in range(5):
            if side * (i - j) >= 0:
                expected[i] += sum(a[i, d] * b[j, d] for d in range(3)) * c[j]
    np.testing.assert_allclose(prefix.mix_gram(a[None], b[None], c[None], side)[0], expected, rtol=1e-13)


@pytest.mark.parametrize("causal", [True, False])
def test_stacks_of_both_forms_agree(causal: bool) -> None:
    x, d_x, context = draw("x", 1, 150, 6), draw("d_x", 1, 150, 6), Context(causal=causal)
    found = [
        back(params, *run(params, x, context), d_x)
        for params in (
            stack(2, oracle=f"linear(implementation={implementation!r})") for implementation in ("gram", "state")
        )
    ]
    for name, value in found[0].items():
        np.testing.assert_allclose(found[1][name], value, rtol=0.0, atol=1e-11 * np.max(np.abs(value)), err_msg=name)


def hamiltonian(u: Any, p: Any, a: Any, v: Any) -> float:
    n = u.shape[0]
    return float(np.sum((u @ a @ u.T) * (p @ p.T)) / (2.0 * n) - 0.5 * np.sum(u * (u @ v)))


def test_force_and_velocity_are_the_canonical_equations() -> None:
    """With symmetric A and V, all tokens attended and none normalised: f = dH/dp, g = -dH/dx, by differences."""
    a, v = (w + w.T for w in (draw("a", 6, 6), draw("v", 6, 6)))
    x, p, h = draw("x", 4, 6), draw("p", 4, 6), 1e-5
    kernel = linear.Kernel(x[None], (x @ a)[None], np.full((4, 1), 4.0), 0, "gram", None)
    speed = linear.velocity(p[None], kernel)[0]
    force = x @ v - prefix.mix(p[None], p[None], (x @ a)[None], 0, "gram")[0] / 4.0
    for i in range(4):
        for c in range(6):
            step = np.zeros((4, 6))
            step[i, c] = h
            by_p = (hamiltonian(x, p + step, a, v) - hamiltonian(x, p - step, a, v)) / (2.0 * h)
            by_x = (hamiltonian(x + step, p, a, v) - hamiltonian(x - step, p, a, v)) / (2.0 * h)
            assert abs(speed[i, c] - by_p) < 1e-8
            assert abs(force[i, c] + by_x) < 1e-8


def test_a_block_has_these_forces() -> None:
    (params,) = stack(1, oracle="linear", start="linear", moved=0.3)
    x = draw("x", 1, 5, 6)
    _, saves = run((params,), x, Context(causal=True))
    saved = saves[0].attention
    y, p = saved.asked.kernel.y[0], saved.entering[0]
    for i in range(5):
        seen = range(i + 1)
        force = y[i] @ params.w_v - sum((p[i] @ p[j]) * (y[j] @ params.w_a) for j in seen) / (i + 1.0)
        speed = sum((y[i] @ params.w_a @ y[j]) * saved.momentum[0, j] for j in seen) / (i + 1.0)
        np.testing.assert_allclose(saved.force[0, i], force, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(saved.speed[0, i], speed, rtol=1e-12, atol=1e-13)


def test_parameters_of_a_softmax_are_not_there() -> None:
    (params,) = stack(1, oracle="linear")
    assert params.w_q is None and params.w_k is None and params.w_o is None and params.w_b is None
