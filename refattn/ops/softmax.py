"""The softmax of rows in which some positions may be -inf; a row of nothing else gives 0."""

from __future__ import annotations

import math

from refattn.ops.tiles import by_rows
from refattn.xp import Array, max_last, namespace


def softmax_forward(scores: Array) -> Array:
    """Return the weights of scores (..., j)."""
    return softmax_and_sums(scores)[0]


def softmax_and_sums(scores: Array) -> tuple[Array, Array, Array]:
    """Return the weights of scores (..., j), and of each row the largest score and the sum of exp(score - largest).

    Where a row is nothing but -inf these two are -inf and 1.
    """

    weights, top, total = by_rows(_rows, scores)
    return weights, top, total


def _rows(scores: Array) -> tuple[Array, Array, Array]:
    xp = namespace(scores)
    top = max_last(scores)
    alive = top != -math.inf
    exponentials = xp.exp(scores - xp.where(alive, top, 0.0))
    total = xp.where(alive, xp.sum(exponentials, axis=-1, keepdims=True), 1.0)
    return exponentials / total, top, total


def softmax_backward(weights: Array, d_weights: Array) -> Array:
    """Return the gradient of the scores: w_j (dw_j - sum_l w_l dw_l), which is 0 where the score is -inf."""

    (d_scores,) = by_rows(_rows_backward, weights, d_weights)
    return d_scores


def _rows_backward(weights: Array, d_weights: Array) -> tuple[Array]:
    inner = namespace(weights).sum(weights * d_weights, axis=-1, keepdims=True)
    return (weights * (d_weights - inner),)
