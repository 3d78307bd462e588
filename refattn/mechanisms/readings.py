"""Wrong readings that any attention with masks and groups allows: what a room's conventions begin with.

Each is made from a core, as a call ``core(q, k, v, **options)`` that returns the outputs, and has its signature.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from refattn.ops.masks import allowed_pairs, causal_offset
from refattn.xp import Array, namespace

Outputs = tuple[Array, ...]
Core = Callable[..., Outputs]


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
        return core(q, k, v, causal="top_left" if causal else False, **options)

    def bottom_right_causality(q: Array, k: Array, v: Array, *, causal: Any = False, **options: Any) -> Outputs:
        """Align the causal mask at the last key, whatever was asked."""
        return core(q, k, v, causal="bottom_right" if causal else False, **options)

    def strict_causality(q: Array, k: Array, v: Array, *, causal: Any = False, **options: Any) -> Outputs:
        """Hide a token from itself."""
        if causal is False:
            return core(q, k, v, **options)
        mask = options.pop("mask", None)
        queries, keys = q.shape[2], k.shape[2]
        offset = causal_offset(causal, queries, keys)
        assert offset is not None
        past = allowed_pairs(mask, offset - 1, (0, queries), (0, keys), q)
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


def scale_of_all_heads(core: Core) -> Core:
    """Return the core with 1 / sqrt(heads * width) where no scale is given."""

    def reading(q: Array, k: Array, v: Array, *, scale: float | None = None, **options: Any) -> Outputs:
        """Take 1 / sqrt(heads * width) where no scale is given."""
        factor = 1.0 / math.sqrt(q.shape[1] * q.shape[3]) if scale is None else scale
        return core(q, k, v, scale=factor, **options)

    return reading
