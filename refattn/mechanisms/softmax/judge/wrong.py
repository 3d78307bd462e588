"""Plausible wrong readings of softmax attention: what an implementation computes that follows another convention.

Each has the signature of the core without `form` and returns (out, lse). Verification has to tell them from the core.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from refattn.mechanisms import wrong as readings
from refattn.mechanisms.softmax import core
from refattn.mechanisms.softmax.judge.placed import PLACED
from refattn.mechanisms.softmax.judge.wrong_gradients import WRONG_GRADIENTS
from refattn.mechanisms.wrong import conventions, gradients
from refattn.ops.heads import repeat_heads
from refattn.ops.masks import allowed_pairs, causal_offset
from refattn.xp import Array, namespace

Wrong = Callable[..., tuple[Array, Array]]


def _core(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    out, saved = core.forward(q, k, v, **options)
    return out, saved.lse


def softcap_after_mask(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Array | None = None,
    causal: Any = False,
    scale: float | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Array, Array]:
    """Mask first: the soft-cap then lifts -inf to -softcap, and hidden keys are attended a little."""
    if options or softcap is None or (mask is None and causal is False):
        return _core(q, k, v, mask=mask, causal=causal, scale=scale, softcap=softcap, **options)
    xp = namespace(q, k, v)
    queries, keys = q.shape[2], k.shape[2]
    factor = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    allowed = allowed_pairs(mask, causal_offset(causal, queries, keys), queries, keys, q)
    scores = xp.where(allowed, q @ xp.matrix_transpose(repeat_heads(k, q.shape[1])) * factor, -math.inf)
    weights = xp.exp(softcap * xp.tanh(scores / softcap))
    total = xp.sum(weights, axis=-1, keepdims=True)
    return weights @ repeat_heads(v, q.shape[1]) / total, xp.log(total)[..., 0]


def no_softcap(q: Array, k: Array, v: Array, *, softcap: float | None = None, **options: Any) -> tuple[Array, Array]:
    """Leave the soft-cap out."""
    return _core(q, k, v, **options)


def keys_missing_in_total(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    """Leave the last three keys out of the denominator alone."""
    out, lse = _core(q, k, v, **options)
    short = {**options}
    keys = k.shape[2]
    if keys <= 3:
        return out, lse
    xp = namespace(q, k, v)
    kept = xp.arange(keys) < keys - 3
    mask = short.pop("mask", None)
    _, fewer = _core(q, k, v, mask=kept if mask is None else mask & kept, **short)
    changed = xp.isfinite(lse) & xp.isfinite(fewer)
    factor = xp.where(changed, xp.exp(xp.where(changed, lse, 0.0) - xp.where(changed, fewer, 0.0)), 1.0)
    return out * xp.astype(factor, out.dtype)[..., None], xp.where(changed, fewer, lse)


def uniform_empty_rows(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    """Give the mean of all values to a query that may attend nothing."""
    out, lse = _core(q, k, v, **options)
    if k.shape[2] == 0:
        return out, lse
    xp = namespace(q, k, v)
    mean = repeat_heads(xp.mean(v, axis=2, keepdims=True), q.shape[1])
    return xp.where(xp.isfinite(lse)[..., None], out, mean), lse


def nan_in_empty_rows(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    """Divide 0 by 0 for a query that may attend nothing."""
    out, lse = _core(q, k, v, **options)
    return namespace(q).where(namespace(q).isfinite(lse)[..., None], out, math.nan), lse


def softcap_before_scale(
    q: Array, k: Array, v: Array, *, scale: float | None = None, softcap: float | None = None, **options: Any
) -> tuple[Array, Array]:
    """Cap q . k and scale after it, so that scores are bounded by scale * softcap."""
    if softcap is None:
        return _core(q, k, v, scale=scale, **options)
    factor = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    # factor softcap tanh(q . k / softcap) is a soft-cap of factor * softcap on factor q . k.
    return _core(q, k, v, scale=factor, softcap=factor * softcap, **options)


def softmax_over_queries(
    q: Array, k: Array, v: Array, *, softcap: float | None = None, **options: Any
) -> tuple[Array, Array]:
    """Normalise over the queries of a key, not over the keys of a query."""
    out, lse = _core(q, k, v, softcap=softcap, **options)
    if softcap is not None or 0 in (q.shape[2], k.shape[2]) or set(options) - {"mask", "causal", "scale"}:
        return out, lse
    return readings.attend_over_queries(q, k, v, **options), lse


def lse_without_maximum(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    """Return the logarithm of the sum that was divided by, in which the largest score counts 0."""
    xp = namespace(q)
    out, saved = core.forward(q, k, v, **options)
    if k.shape[2] == 0:
        return out, saved.lse
    # A value of 1 on the key with the largest weight alone: its weight w is 1 / sum.
    largest = _largest_weight(q, k, **options)
    return out, xp.where(xp.isfinite(saved.lse), -xp.log(xp.where(largest > 0.0, largest, 1.0)), saved.lse)


def _largest_weight(q: Array, k: Array, **options: Any) -> Array:
    xp, keys = namespace(q), k.shape[2]
    unit = xp.zeros((k.shape[0], k.shape[1], keys, keys), dtype=q.dtype) + xp.eye(keys, dtype=q.dtype)
    weights, _ = _core(q, k, unit, **options)
    return xp.max(weights, axis=-1)


def zero_for_masked_scores(
    q: Array, k: Array, v: Array, *, mask: Array | None = None, scale: float | None = None, **options: Any
) -> tuple[Array, Array]:
    """Multiply the scores by the mask, so that a masked key has a score of 0 and a weight of 1."""
    if mask is None or options:
        return _core(q, k, v, mask=mask, scale=scale, **options)
    xp, heads = namespace(q, k, v), q.shape[1]
    factor = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    scores = q @ xp.matrix_transpose(repeat_heads(k, heads)) * factor
    powers = xp.exp(xp.where(mask, scores, 0.0))
    total = xp.sum(powers, axis=-1, keepdims=True)
    return powers @ repeat_heads(v, heads) / total, xp.log(total)[..., 0]


def lse_to_base_2(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    """Return the logarithm to base 2."""
    out, lse = _core(q, k, v, **options)
    return out, lse / math.log(2.0)


READINGS: dict[str, Wrong] = {
    **readings.of_masks(_core),
    **readings.of_scales(_core),
    "soft-cap after the mask": softcap_after_mask,
    "soft-cap left out": no_softcap,
    "soft-cap before the scale": softcap_before_scale,
    "softmax over the queries": softmax_over_queries,
    "masked keys have a score of 0": zero_for_masked_scores,
    "keys missing in the denominator": keys_missing_in_total,
    "scale of the model's width": readings.scale_of_all_heads(_core),
    "empty rows get the mean": uniform_empty_rows,
    "empty rows are NaN": nan_in_empty_rows,
    "lse to base 2": lse_to_base_2,
    "lse without the maximum": lse_without_maximum,
    **PLACED,
}

WRONG = {
    **conventions(READINGS, ("lse",)),
    **readings.of_group_gradients(core),
    **gradients(WRONG_GRADIENTS),
}
