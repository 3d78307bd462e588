"""Wrong readings that any attention with masks and groups allows: what a room's conventions begin with.

Each is made from a core, as a call ``core(q, k, v, **options)`` that returns the outputs, and has its signature; wrong
gradients are made from the module of a core, and take ``d_out`` as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

from refattn.ops.heads import repeat_heads
from refattn.ops.masks import allowed_pairs, causal_offset
from refattn.xp import Array, namespace

Outputs = tuple[Array, ...]
Core = Callable[..., Outputs]
Backward = Callable[..., dict[str, Array]]


def of_masks(core: Core) -> dict[str, Core]:
    """Return wrong readings of masks, causality and groups by name."""

    def ignored_mask(q: Array, k: Array, v: Array, *, mask: Array | None = None, **options: Any) -> Outputs:
        """Let every query attend masked keys."""
        return core(q, k, v, **options)

    def inverted_mask(q: Array, k: Array, v: Array, *, mask: Array | None = None, **options: Any) -> Outputs:
        """Take True for "may not attend"."""
        return core(q, k, v, mask=None if mask is None else ~mask, **options)

    def top_left_causality(q: Array, k: Array, v: Array, *, causal: Any = False, **options: Any) -> Outputs:
        """Align the causal mask at the first key, whatever was asked."""
        if options.get("offset") is not None:  # which aligns the queries
            return core(q, k, v, causal=causal, **options)
        return core(q, k, v, causal="top_left" if causal else False, **options)

    def bottom_right_causality(q: Array, k: Array, v: Array, *, causal: Any = False, **options: Any) -> Outputs:
        """Align the causal mask at the last key, whatever was asked."""
        if options.get("offset") is not None:
            return core(q, k, v, causal=causal, **options)
        return core(q, k, v, causal="bottom_right" if causal else False, **options)

    def strict_causality(q: Array, k: Array, v: Array, *, causal: Any = False, **options: Any) -> Outputs:
        """Hide a token from itself."""
        if causal is False:
            return core(q, k, v, **options)
        if {"offset", "q_lengths", "k_lengths"} & set(options):
            return core(q, k, v, causal=causal, **options)
        mask = options.pop("mask", None)
        queries, keys = q.shape[2], k.shape[2]
        offset = causal_offset(causal, queries, keys)
        assert offset is not None
        past = allowed_pairs(mask, offset - 1, queries, keys, q)
        return core(q, k, v, mask=past, causal=causal, **options)

    def interleaved_groups(q: Array, k: Array, v: Array, **options: Any) -> Outputs:
        """Give query head h the key/value head h mod g, not floor(h g / h_total)."""
        xp = namespace(q, k, v)
        times = q.shape[1] // max(k.shape[1], 1)
        return core(q, xp.concat([k] * times, axis=1), xp.concat([v] * times, axis=1), **options)

    return {
        "mask ignored": ignored_mask,
        "mask inverted": inverted_mask,
        "top-left causality": top_left_causality,
        "bottom-right causality": bottom_right_causality,
        "a token does not see itself": strict_causality,
        "interleaved groups": interleaved_groups,
    }


def attend_over_queries(
    q: Array, k: Array, v: Array, *, mask: Array | None = None, causal: Any = False, scale: float | None = None
) -> Array:
    """Return the output of an attention that is normalised over the queries of a key."""
    xp = namespace(q, k, v)
    heads, queries, keys = q.shape[1], q.shape[2], k.shape[2]
    factor = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    scores = q @ xp.matrix_transpose(repeat_heads(k, heads)) * factor
    allowed = allowed_pairs(mask, causal_offset(causal, queries, keys), queries, keys, q)
    if allowed is not None:
        scores = xp.where(allowed, scores, -math.inf)
    exponentials = xp.exp(scores)
    total = xp.sum(exponentials, axis=-2, keepdims=True)
    return exponentials / xp.where(total == 0.0, 1.0, total) @ repeat_heads(v, heads)


def of_scales(core: Core) -> dict[str, Core]:
    """Return wrong readings of the scale of the scores by name."""

    def given(q: Array, scale: float | None) -> float:
        return 1.0 / math.sqrt(q.shape[3]) if scale is None else scale

    def no_scale(q: Array, k: Array, v: Array, *, scale: float | None = None, **options: Any) -> Outputs:
        """Leave the scale out."""
        return core(q, k, v, scale=1.0, **options)

    def scale_twice(q: Array, k: Array, v: Array, *, scale: float | None = None, **options: Any) -> Outputs:
        """Scale q and the scores, each by the whole factor."""
        return core(q, k, v, scale=given(q, scale) ** 2, **options)

    def scale_of_values(q: Array, k: Array, v: Array, *, scale: float | None = None, **options: Any) -> Outputs:
        """Take 1 / sqrt(width of v) where no scale is given."""
        return core(q, k, v, scale=1.0 / math.sqrt(v.shape[3]) if scale is None else scale, **options)

    return {
        "scale left out": no_scale,
        "scale applied twice": scale_twice,
        "scale of the values' width": scale_of_values,
    }


def of_group_gradients(core: ModuleType) -> dict[str, Backward]:
    """Return wrong sums over the query heads that share a key/value head, by name."""

    def mean_of_group(q: Array, k: Array, v: Array, *, d_out: Array, **options: Any) -> dict[str, Array]:
        """Average the gradients of k and v over the heads of a group."""
        _, saved = core.forward(q, k, v, **options)
        gradients: dict[str, Array] = core.backward(saved, d_out)
        times = q.shape[1] // max(k.shape[1], 1)
        return gradients | {name: gradients[name] / times for name in ("k", "v")}

    def one_of_group(q: Array, k: Array, v: Array, *, d_out: Array, **options: Any) -> dict[str, Array]:
        """Keep the gradients of k and v of the last head of a group alone, which overwrote the others."""
        xp, times = namespace(q, k, v), q.shape[1] // max(k.shape[1], 1)
        _, saved = core.forward(q, xp.repeat(k, times, axis=1), xp.repeat(v, times, axis=1), **options)
        gradients: dict[str, Array] = core.backward(saved, d_out)
        return gradients | {name: gradients[name][:, times - 1 :: times, ...] for name in ("k", "v")}

    return {
        "gradients averaged over a group": mean_of_group,
        "gradients of the last head of a group": one_of_group,
    }


def scale_of_all_heads(core: Core) -> Core:
    """Return the core with 1 / sqrt(heads * width) where no scale is given."""

    def reading(q: Array, k: Array, v: Array, *, scale: float | None = None, **options: Any) -> Outputs:
        """Take 1 / sqrt(heads * width) where no scale is given."""
        factor = 1.0 / math.sqrt(q.shape[1] * q.shape[3]) if scale is None else scale
        return core(q, k, v, scale=factor, **options)

    return reading
