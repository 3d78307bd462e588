"""What the adapters of transformers share: the additive mask that its models make, whose lowest number hides."""

from __future__ import annotations

from typing import Any

import torch
from common import four


def additive(q: Any, k: Any, mask: Any, causal: Any, window: Any, offset: Any, bias: Any) -> Any:
    """Return a mask like (b, h, i, j) in the type of q; None if nothing is hidden or added."""
    if mask is None and not causal and window is None:
        return four(bias)
    n_q, n_k = q.shape[2], k.shape[2]
    first = (0 if causal == "top_left" else n_k - n_q) if offset is None else offset
    behind = torch.arange(n_q)[:, None] + first - torch.arange(n_k)  # how far a key is behind a query
    seen = torch.ones(n_q, n_k, dtype=torch.bool) if mask is None else mask
    if causal:
        seen = seen & (behind >= 0)
    if window is not None:
        left, right = (n_k + n_q + abs(first) if bound is None else bound for bound in window)
        seen = seen & (behind <= left) & (behind >= -right)
    hidden = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, torch.finfo(q.dtype).min)
    return four(hidden) if bias is None else four(hidden) + four(bias)
