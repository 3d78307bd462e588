"""What sizes of rounding errors are made from where a folder has them by hand; see `refattn.instruments.sized`.

`inputs` holds the arguments of the call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from refattn.ops.heads import repeat_heads
from refattn.xp import Array, max_last, namespace

Given = Mapping[str, Any]


def of_sum(terms: int, value: Array, squares: Array) -> Array:
    """Return the size of the error of a sum, from its value and the sum of the squares of its terms."""
    xp = namespace(value)
    return math.sqrt(terms) * (xp.abs(value) + xp.sqrt(squares))


def of_all(value: Array, terms: Array) -> Array:
    """Return the size of the sum of all terms."""
    return of_sum(max(math.prod(terms.shape), 1), value, namespace(terms).sum(terms * terms))


def of_exponents(weights: Array, scores: Array) -> Array:
    """Return the size of weights: what is rounded are exponents, of the size of scores, and a sum over the row."""
    xp = namespace(weights)
    sizes = xp.where(xp.isfinite(scores), xp.abs(scores), 0.0)
    return weights * (2.0 + sizes + max_last(sizes) + math.sqrt(max(weights.shape[-1], 1)))


def heads_of(inputs: Given, name: str) -> Array:
    """Return keys or values, repeated for the query heads that share them."""
    return repeat_heads(inputs[name], inputs["q"].shape[1])


def scale_of(inputs: Given) -> float:
    """Return the size of the scale of a call."""
    return abs(inputs["scale"] if "scale" in inputs else 1.0 / math.sqrt(inputs["q"].shape[-1]))
