"""Plausible wrong readings of the block's attention: what an implementation computes that follows another convention.

Each has the signature of the core without `form` and returns (out,). Verification has to tell them from the core.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from refattn.mechanisms import readings
from refattn.mechanisms.growing import core
from refattn.ops.heads import repeat_heads
from refattn.xp import Array, namespace

Out = tuple[Array]
Wrong = Callable[..., Out]


def _core(q: Array, k: Array, v: Array, **options: Any) -> Out:
    return (core.forward(q, k, v, **options)[0],)


def scale_of_the_width(q: Array, k: Array, v: Array, *, scale: float | None = None, **options: Any) -> Out:
    """Take 1/sqrt(d) of the width that there is, whatever scale is stored: so a growth would change all scores."""
    return _core(q, k, v, **options)


def softmax_over_queries(q: Array, k: Array, v: Array, **options: Any) -> Out:
    """Normalise over the queries of a key, not over the keys of a query."""
    return (readings.attend_over_queries(q, k, v, **options),)


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
    **readings.of_scales(_core),
    "the scale follows the width": scale_of_the_width,
    "scale of all heads": readings.scale_of_all_heads(_core),
    "softmax over the queries": softmax_over_queries,
    "empty rows get the mean": uniform_empty_rows,
}
