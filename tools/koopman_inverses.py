"""How often the perturbations of Koopman attention have no inverse: in calls with random numbers, and in a training.

Usage: python -m tools.koopman_inverses
"""

from __future__ import annotations

from typing import Any

import refattn as ra
from refattn import philox
from refattn.train import data, loop, settings
from refattn.train.diagnose import DivergedError

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


STEPS = 60
TRAINED = {"preset": "tie2024", "width": 32, "layers": 2, "context": 64, "batch": 4, "steps": STEPS}


def training(updates: int) -> str:
    """Return how often the article's settings drew again in a training, or at which step no draw was left."""
    chosen = settings.build("koopman", {**TRAINED, "block": {"updates": updates}})
    text, state, again = data.load(chosen.data), loop.fresh(chosen), 0
    for step in range(1, STEPS + 1):
        try:
            state, row = loop.step(state, chosen, text)
        except DivergedError:  # of a KoopmanInverseError
            return f"no draw left at step {step}"
        again += row.get("redrawn", 0)
    return f"{again} drawn again beside {STEPS * chosen.model.layers * (updates - 1)} needed, in {STEPS} steps"


if __name__ == "__main__":
    for name, setting in SETTINGS.items():
        found = [f"{kind} {failures(kind, **setting) / CALLS:.1%}" for kind in ("identity", "shift")]
        print(f"{name}: {', '.join(found)}")
    for updates in (2, 4):
        print(f"tie2024 with {updates} updates: {training(updates)}")
