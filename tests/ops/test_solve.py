"""Linear systems and their adjoints on every library."""

from __future__ import annotations

from typing import Any

import numpy as np

from refattn import philox
from refattn.ops.solve import solve, solve_backward


def normal(name: str, *shape: int) -> Any:
    return philox.normal(shape, seed=2, purpose=name)


def test_the_adjoint(backend: Any) -> None:
    a, b, d_x = normal("a", 3, 4, 4), normal("b", 3, 4, 5), normal("d", 3, 4, 5)
    d_a, d_b = (backend.host(x) for x in solve_backward(*map(backend.array, (a, np.linalg.solve(a, b), d_x))))
    h = 1e-6
    for leaf, gradient in ((a, d_a), (b, d_b)):
        step = normal("step", *leaf.shape)
        moved = [np.linalg.solve(*((a + s * h * step, b) if leaf is a else (a, b + s * h * step))) for s in (1, -1)]
        slope = np.sum((moved[0] - moved[1]) * d_x) / (2.0 * h)
        np.testing.assert_allclose(np.sum(gradient * step), slope, rtol=1e-6)


def test_a_singular_matrix_does_not_spoil_the_others(backend: Any) -> None:
    a, b = normal("a", 3, 4, 4), normal("b", 3, 4, 1)
    exact = np.linalg.solve(a, b)
    a[1] = 0.0
    x = backend.host(solve(backend.array(a), backend.array(b)))
    np.testing.assert_allclose(x[[0, 2]], exact[[0, 2]], rtol=1e-12)
    assert not np.all(np.abs(x[1]) < 1e10)


def test_matrices_that_a_nudge_leaves_singular() -> None:
    """Of rank 1: what is added once to the diagonal of some of these is lost to rounding, or cancels."""
    u, v = normal("u", 400, 3, 1), normal("v", 400, 1, 3)
    assert np.all(np.isfinite(solve(u @ v, np.ones((400, 3, 1)))))
