"""Plausible wrong readings of the block's attention: what an implementation computes that follows another convention.

Each has the signature of the core without `form` and returns (out,). Verification has to tell them from the core.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from refattn.mechanisms import readings
from refattn.mechanisms.growing import core
from refattn.ops.heads import repeat_heads
from refattn.ops.masks import allowed_pairs, causal_offset
from refattn.xp import Array, namespace

Out = tuple[Array]
Wrong = Callable[..., Out]


def _core(q: Array, k: Array, v: Array, **options: Any) -> Out:
    return (core.forward(q, k, v, **options)[0],)


def scale_of_the_width(q: Array, k: Array, v: Array, *, scale: float | None = None, **options: Any) -> Out:
    """Take 1/sqrt(d) of the width that there is, whatever scale is stored: so a growth would change all scores."""
    return _core(q, k, v, **options)


def no_scale(q: Array, k: Array, v: Array, *, scale: float | None = None, **options: Any) -> Out:
    """Leave the scale out."""
    return _core(q, k, v, scale=1.0, **options)


def softmax_over_queries(
    q: Array, k: Array, v: Array, *, mask: Array | None = None, causal: Any = False, scale: float | None = None
) -> Out:
    """Normalise over the queries of a key, not over the keys of a query."""
    xp = namespace(q, k, v)
    heads, queries, keys = q.shape[1], q.shape[2], k.shape[2]
    factor = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    scores = q @ xp.matrix_transpose(repeat_heads(k, heads)) * factor
    allowed = allowed_pairs(mask, causal_offset(causal, queries, keys), (0, queries), (0, keys), q)
    if allowed is not None:
        scores = xp.where(allowed, scores, -math.inf)
    exponentials = xp.exp(scores)
    total = xp.sum(exponentials, axis=-2, keepdims=True)
    return (exponentials / xp.where(total == 0.0, 1.0, total) @ repeat_heads(v, heads),)


def uniform_empty_rows(q: Array, k: Array, v: Array, **options: Any) -> Out:
    """Give the mean of all values to a query that may attend nothing."""
    (out,) = _core(q, k, v, **options)
    if k.shape[2] == 0:
        return (out,)
    xp = namespace(q, k, v)
    (seen,) = _core(q, k, 0.0 * v + 1.0, **options)
    mean = repeat_heads(xp.mean(v, axis=2, keepdims=True), q.shape[1])
    return (xp.where(seen[..., :1] > 0.0, out, mean),)


CONVENTIONS: dict[str, Wrong] = {
    **readings.of_masks(_core),
    "the scale follows the width": scale_of_the_width,
    "scale of all heads": readings.scale_of_all_heads(_core),
    "scale left out": no_scale,
    "softmax over the queries": softmax_over_queries,
    "empty rows get the mean": uniform_empty_rows,
}
