"""The softmax of rows in which some positions may be -inf; a row of nothing else gives 0."""

from __future__ import annotations

import math

from refattn.xp import Array, max_last, namespace


def softmax_forward(scores: Array) -> Array:
    """Return the weights of scores (..., j)."""
    xp = namespace(scores)
    top = max_last(scores)
    alive = top != -math.inf
    exponentials = xp.exp(scores - xp.where(alive, top, 0.0))
    return exponentials / xp.where(alive, xp.sum(exponentials, axis=-1, keepdims=True), 1.0)


def softmax_backward(weights: Array, d_weights: Array) -> Array:
    """Return the gradient of the scores: w_j (dw_j - sum_l w_l dw_l), which is 0 where the score is -inf."""
    xp = namespace(weights)
    return weights * (d_weights - xp.sum(weights * d_weights, axis=-1, keepdims=True))
