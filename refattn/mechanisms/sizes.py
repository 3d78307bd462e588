"""The sizes of rounding errors in attention with a softmax: what the magnitudes of a room are made from.

A sum of n terms is rounded n times, each time relative to a partial sum. Partial sums of terms t wander about as far
as |sum t| + sqrt(sum t^2), and n independent errors of that size add up to sqrt(n) times it::

    size = sqrt(n) (|sum t| + sqrt(sum t^2))

whatever the order of the terms. `inputs` holds the arguments of the call and d_out; the other arguments are values of
equations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from refattn.ops.heads import repeat_heads, sum_heads
from refattn.xp import Array, namespace

Given = Mapping[str, Any]


def of_sum(terms: int, value: Array, squares: Array) -> Array:
    """Return the size of the error of a sum, from its value and the sum of the squares of its terms."""
    xp = namespace(value)
    return math.sqrt(terms) * (xp.abs(value) + xp.sqrt(squares))


def squares_of(a: Array, b: Array) -> Array:
    """Return the sum of the squares of the terms of the matrix product a b^T."""
    return (a * a) @ namespace(a).matrix_transpose(b * b)


def heads_of(inputs: Given, name: str) -> Array:
    """Return keys or values, repeated for the query heads that share them."""
    return repeat_heads(inputs[name], inputs["q"].shape[1])


def scale_of(inputs: Given) -> float:
    """Return the size of the scale of a call."""
    return abs(inputs["scale"] if "scale" in inputs else 1.0 / math.sqrt(inputs["q"].shape[-1]))


def scores(inputs: Given, value: Array) -> Array:
    """Return the size of scale q . k."""
    squares = squares_of(inputs["q"], heads_of(inputs, "k")) * scale_of(inputs) ** 2
    return of_sum(inputs["q"].shape[-1], value, squares)


def total(inputs: Given, value: Array) -> Array:
    """Return the size of the sum of the exponentials, which are all positive."""
    return math.sqrt(max(inputs["k"].shape[2], 1)) * value


def weights(value: Array, lse: Array) -> Array:
    """Return the size of the weights: kernels compute exp(m - lse), and round an exponent of the size of lse."""
    xp = namespace(value)
    return value * (2.0 + xp.abs(xp.where(xp.isfinite(lse), lse, 0.0)))


def out(inputs: Given, value: Array, weights: Array) -> Array:
    """Return the size of the sum of the values."""
    transposed = namespace(inputs["v"]).matrix_transpose(heads_of(inputs, "v"))
    return of_sum(inputs["k"].shape[2], value, squares_of(weights, transposed))


def d_weights(inputs: Given, value: Array) -> Array:
    """Return the size of do . v."""
    return of_sum(inputs["v"].shape[-1], value, squares_of(inputs["d_out"], heads_of(inputs, "v")))


def d_total(inputs: Given, d_weights: Array, weights: Array, value: Array, total: Array) -> Array:
    """Return the size of the adjoint of the sum of the exponentials; `value` is that of the output."""
    xp = namespace(inputs["q"])
    terms = d_weights * weights
    inner = xp.sum(terms, axis=-1, keepdims=True)
    over_keys = of_sum(inputs["k"].shape[2], inner, xp.sum(terms * terms, axis=-1, keepdims=True))
    # Kernels take the same number from the output, with the errors that it has by then: do_i . o_i.
    inherited = inputs["d_out"] * out(inputs, value, weights)
    over_width = xp.sqrt(xp.sum(inherited * inherited, axis=-1, keepdims=True))
    return (over_keys + over_width) / total + d_total_from_out(inputs, value, total)


def d_total_from_out(inputs: Given, value: Array, total: Array) -> Array:
    """Return the size of the same where the output was rounded to its storage type first."""
    xp = namespace(inputs["q"])
    return xp.sum(xp.abs(inputs["d_out"] * value), axis=-1, keepdims=True) / total


def d_q(inputs: Given, value: Array, d_scores: Array) -> Array:
    """Return the size of the gradient of q."""
    transposed = namespace(inputs["k"]).matrix_transpose(heads_of(inputs, "k"))
    return of_sum(inputs["k"].shape[2], value, squares_of(d_scores, transposed) * scale_of(inputs) ** 2)


def d_k(inputs: Given, value: Array, d_scores: Array) -> Array:
    """Return the size of the gradient of k."""
    return per_key(inputs, value, d_scores, inputs["q"], scale_of(inputs))


def d_v(inputs: Given, value: Array, weights: Array) -> Array:
    """Return the size of the gradient of v."""
    return per_key(inputs, value, weights, inputs["d_out"], 1.0)


def per_key(inputs: Given, value: Array, pairs: Array, rows: Array, factor: float) -> Array:
    """Return the size for a sum over the queries of all heads that share a key/value head."""
    xp = namespace(pairs)
    squares = sum_heads(squares_of(xp.matrix_transpose(pairs), xp.matrix_transpose(rows)), inputs["k"].shape[1])
    terms = rows.shape[2] * rows.shape[1] // max(inputs["k"].shape[1], 1)
    return of_sum(max(terms, 1), value, squares * factor**2)


def of_all(value: Array, terms: Array) -> Array:
    """Return the size of the sum of all terms."""
    return of_sum(max(math.prod(terms.shape), 1), value, namespace(terms).sum(terms * terms))
