"""Designed calls in which options meet sizes and each other: every pair that the designed cases leave out.

They stand beside the cases of golden vectors, and `refattn verify` runs both.
"""

from __future__ import annotations

from typing import Any

from refattn.mechanisms.sympformer.testing.cases import case

_KIND = "pairs"
_GROUPED: dict[str, Any] = {"h": 4, "g": 2, "d": 8, "e": 12, "scale": 0.3}

KERNEL_SIZES = (
    case("one-grouped", _KIND, "a token alone, values wider, in heads that share one", n=1, **_GROUPED),
    case("few-grouped", _KIND, "a few tokens, values wider, in heads that share one", n=6, causal=True, **_GROUPED),
    case("long-grouped", _KIND, "strips, values wider, in heads that share one", n=131, causal=True, **_GROUPED),
)
