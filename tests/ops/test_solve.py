"""Linear systems and their adjoints on every library."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from refattn import philox
from refattn.ops.solve import condition, solve, solve_backward


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


def test_only_what_means_singular_is_taken_for_it() -> None:
    """Shapes that do not fit are an error, and no system that is moved."""
    with pytest.raises(ValueError, match="mismatch|core dimension"):
        solve(np.eye(3), np.ones((4, 1)))
    with pytest.raises((ValueError, TypeError)):
        solve(np.ones((2, 3)), np.ones((2, 1)))


def test_a_library_that_does_not_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy returns NaN and infinities for singular matrices: these are moved, and the others keep their bits."""
    plain = np.linalg.solve

    def silent(a: Any, b: Any) -> Any:
        x = np.full(np.broadcast_shapes(a.shape[:-2], b.shape[:-2]) + b.shape[-2:], np.inf)
        x[..., 0, :] = np.nan
        with np.errstate(invalid="ignore"):
            regular = np.linalg.slogdet(a)[0] != 0.0
        x[regular] = plain(a[regular], b[regular])
        return x

    a, b = normal("a", 3, 4, 4), normal("b", 3, 4, 2)
    exact = plain(a, b)
    a[1] = np.ones((4, 4))
    monkeypatch.setattr(np.linalg, "solve", silent)
    x = solve(a, b)
    np.testing.assert_array_equal(x[[0, 2]], exact[[0, 2]])
    assert np.all(np.isfinite(x))
    assert np.max(np.abs(x[1])) > 1e10
    a[0, 0, 0] = np.nan
    assert np.all(np.isnan(solve(a, b)[0, 0]))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_beside_a_singular_matrix(bad: float) -> None:
    """NumPy raises for the one, and then also looks at the other."""
    a, b = normal("a", 3, 4, 4), normal("b", 3, 4, 1)
    exact = np.linalg.solve(a, b)
    a[0], a[1, 2, 2] = 0.0, bad
    x = solve(a, b)
    np.testing.assert_array_equal(x[2], exact[2])
    assert not np.any(np.isfinite(x[1]))
    assert np.all(np.isfinite(x[0]))


def test_the_condition(backend: Any) -> None:
    a = np.stack([np.eye(3), np.diag([1.0, 1.0, 1e-6]), np.zeros((3, 3))])
    found = backend.host(condition(backend.array(a)))
    np.testing.assert_allclose(found[:2], [1.0, np.sqrt(2.0) * 1e6 / 3.0], rtol=1e-6)
    assert found[2] == np.inf


def test_axes_in_front_broadcast(backend: Any) -> None:
    a, b = normal("a", 2, 1, 4, 4), normal("b", 3, 4, 2)
    found = backend.host(solve(backend.array(a), backend.array(b)))
    np.testing.assert_allclose(found, np.linalg.solve(a, b), rtol=1e-10)
