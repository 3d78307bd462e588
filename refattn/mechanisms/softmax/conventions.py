"""Plausible wrong readings of softmax attention: what an implementation computes that follows another convention.

Each has the signature of the core without `form` and returns (out, lse). Verification has to tell them from the core.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from refattn.mechanisms import readings
from refattn.mechanisms.softmax import core
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
) -> tuple[Array, Array]:
    """Mask first: the soft-cap then lifts -inf to -softcap, and hidden keys are attended a little."""
    if softcap is None or (mask is None and causal is False):
        return _core(q, k, v, mask=mask, causal=causal, scale=scale, softcap=softcap)
    xp = namespace(q, k, v)
    queries, keys = q.shape[2], k.shape[2]
    factor = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    allowed = allowed_pairs(mask, causal_offset(causal, queries, keys), (0, queries), (0, keys), q)
    scores = xp.where(allowed, q @ xp.matrix_transpose(k) * factor, -math.inf)
    weights = xp.exp(softcap * xp.tanh(scores / softcap))
    total = xp.sum(weights, axis=-1, keepdims=True)
    return weights @ v / total, xp.log(total)[..., 0]


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
    groups = q.shape[1] // max(k.shape[1], 1)
    mean = xp.repeat(xp.mean(v, axis=2, keepdims=True), groups, axis=1)
    return xp.where(xp.isfinite(lse)[..., None], out, mean), lse


def lse_to_base_2(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    """Return the logarithm to base 2."""
    out, lse = _core(q, k, v, **options)
    return out, lse / math.log(2.0)


CONVENTIONS: dict[str, Wrong] = {
    **readings.of_masks(_core),
    "soft-cap after the mask": softcap_after_mask,
    "soft-cap left out": no_softcap,
    "keys missing in the denominator": keys_missing_in_total,
    "scale of the model's width": readings.scale_of_all_heads(_core),
    "empty rows get the mean": uniform_empty_rows,
    "lse to base 2": lse_to_base_2,
}
