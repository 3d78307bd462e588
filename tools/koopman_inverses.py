"""How often the perturbations of Koopman attention have no inverse, in calls with random numbers.

Usage: python -m tools.koopman_inverses
"""

from __future__ import annotations

from typing import Any

import refattn as ra
from refattn import philox

CALLS = 300
SETTINGS: dict[str, dict[str, Any]] = {
    "8 tokens, width 4": {},
    "the same, causal": {"causal": True},
    "the same, four updates": {"updates": 4},
    "8 tokens, width 16": {"d": 16},
    "32 tokens, width 16": {"n": 32, "d": 16},
}


def failures(perturbation: str, *, n: int = 8, d: int = 4, **options: Any) -> int:
    """Return in how many of `CALLS` calls of the core, of two heads, psi was not inverted for some query."""
    failed = 0
    for seed in range(CALLS):
        arrays = (philox.normal((1, 2, n, d), seed=seed, purpose=name) for name in "qkv")
        try:
            ra.koopman.forward(*arrays, perturbation=perturbation, **options)
        except ra.koopman.KoopmanInverseError:
            failed += 1
    return failed


if __name__ == "__main__":
    for name, setting in SETTINGS.items():
        found = [f"{kind} {failures(kind, **setting) / CALLS:.1%}" for kind in ("identity", "shift")]
        print(f"{name}: {', '.join(found)}")
