"""What these adapters share: causal masks as boolean ones, and no arrays without elements."""

from __future__ import annotations

from typing import Any

import refattn


def seen(library: Any, q: Any, k: Any, mask: Any, causal: Any) -> Any:
    """Return which keys a causal mask and a mask let queries attend, boolean of `library`; None if there is neither."""
    if causal is False:
        return mask
    shift = 0 if causal == "top_left" else k.shape[2] - q.shape[2]
    past = library.tril(library.ones((q.shape[2], k.shape[2])), shift) > 0
    return past if mask is None else past & mask


def four(x: Any) -> Any:
    """Return an array with the four axes (b, h, i, j)."""
    return None if x is None else x[(None,) * (4 - x.ndim)]


def empty(*arrays: Any) -> refattn.Decline | None:
    """Return a refusal if an array has no elements."""
    return refattn.Decline("no empty arrays") if any(0 in x.shape for x in arrays) else None
