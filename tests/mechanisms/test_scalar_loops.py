"""Scalars of second derivations: what the chain rule gives is what differences give."""

from __future__ import annotations

from typing import Any

import numpy as np

from refattn.mechanisms.scalar_autodiff import copies, dot, exp, scalar, scalars, slopes, softmax, sweep, total, values


def loss(x: Any) -> tuple[Any, Any]:
    """A number that is made in every way, some of the numbers twice, and what has been copied on the way."""
    weights = copies(softmax([*x[0], scalar(-np.inf)]))
    products = [a * b / (1.0 + exp(-c)) for a, b, c in zip(x[0], x[1], weights[:-1], strict=True)]
    return total([dot(weights[:-1], x[1]), 2.0 - total(products), np.float64(3.0) * x[1, 0]]), weights


def test_slopes_are_differences() -> None:
    x, h = np.random.default_rng(0).standard_normal((2, 4)), 1e-6
    leaves = scalars(x)
    found, weights = loss(leaves)
    sweep(found, 1.0)
    for at in np.ndindex(x.shape):
        step = np.zeros(x.shape)
        step[at] = h
        moved = [values(loss(scalars(x + sign * step))[0]) for sign in (1.0, -1.0)]
        np.testing.assert_allclose((moved[0] - moved[1]) / (2.0 * h), slopes(leaves)[at], rtol=0, atol=1e-9)
    np.testing.assert_allclose(np.sum(values(weights)), 1.0, rtol=1e-15)
    assert slopes(weights)[-1] == 0.0 and np.all(slopes(weights)[:-1] != 0.0)
