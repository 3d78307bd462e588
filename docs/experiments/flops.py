"""Floating-point operations of a model and of its growth, counted from the shapes.

Counted are matrix products, 2 m n k for (m, k) times (k, n), hidden scores as if they were computed, and the
factorisations of growth; what goes element by element is left out. A backward counts as two forwards.
"""

from __future__ import annotations

from typing import Any

from refattn import model

PLAN, POINT = 64, 40
"""Of the linear algebra of growth, in units of the cube of the width of the augmented tokens, for each head: one plan,
and the truncation at one point of the search. An SVD with its vectors takes 22 of them (Golub and Van Loan, section
8.6), an eigendecomposition 9, a product 2."""


def block(config: Any, tokens: int) -> int:
    """Return the operations of one forward of a growing block over one sequence."""
    h, d, e = config.sizes
    n, y = tokens, config.inputs
    projections = 2 * n * y * h * (2 * d + e) + 2 * n * (h * e + int(config.bias)) * config.width
    return projections + 2 * h * n * n * (d + e)


def network(params: model.Params, tokens: int) -> int:
    """Return the operations of one forward of a model of growing blocks over one sequence."""
    config = params.config
    perceptron = 4 * tokens * config.mlp_ratio * config.width**2 if config.has_mlp else 0
    head = 2 * tokens * config.width * config.vocabulary
    return head + sum(block(layer.block.config, tokens) + perceptron for layer in params.layers)


def statistics(config: Any, tokens: int) -> int:
    """Return the operations beyond a forward and a backward that the statistics of one sequence take."""
    n, y = tokens, config.inputs
    return config.sizes[0] * 2 * n * y * (n + y) + 2 * 2 * n * y * y


def per_sequence(config: Any, tokens: int) -> int:
    """Return the operations of the metric "mean" for one sequence: a pseudo-inverse, its square and its use."""
    n, y = tokens, config.inputs
    return 25 * n * y * y + 2 * n * y * y + config.sizes[0] * 4 * y**3


def algebra(config: Any, points: int) -> int:
    """Return the operations of a plan and of the truncations at some points of the search."""
    return config.sizes[0] * config.inputs**3 * (PLAN + POINT * points)
