"""One comparison a file: `COMPARISON`, and the factories of its sides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HELD: tuple[tuple[str, Mapping[str, Any], int], ...] = (
    ("train", {"width": 128, "layers": 4, "context": 128, "batch": 16}, 1),
    ("train", {"width": 256, "layers": 4, "context": 256, "batch": 16}, 2),
    ("softmax", {"n": 4096, "dtype": "float32", "run": "both"}, 1),
    ("higher_order", {"n": 4096, "d": 64, "run": "both", "causal": False}, 1),
    ("higher_order", {"n": 4096, "d": 64, "run": "both", "causal": True}, 1),
    ("higher_order", {"n": 4096, "d": 16, "run": "both", "causal": True}, 1),
    ("sympformer", {"batch": 4, "tokens": 256, "width": 256, "heads": 8}, 1),
    ("graph_energy", {"n": 1024, "steps": 20, "dtype": "float32"}, 1),
    ("koopman", {"n": 1024, "run": "both", "causal": True}, 1),
    ("delta", {"rule": "KDA", "n": 4096, "run": "both"}, 1),
)
"""Points of comparisons where a call of refattn holds more than 15 MiB, each in seconds, and with how many threads."""
