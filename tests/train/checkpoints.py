"""Small checkpoints for the tests of them: what is saved for a step, and whether it was found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from refattn.train.checkpoint import save


def arrays(step: int) -> dict[str, Any]:
    return {"layers.0.w": np.full((3, 4), float(step)), "count": np.asarray(step, dtype="float32")}


def fail(line: str) -> None:
    raise AssertionError(line)


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return sorted(found) == sorted(expected) and all(
        found[name].shape == x.shape and found[name].dtype.name == x.dtype.name and np.array_equal(found[name], x)
        for name, x in expected.items()
    )


def is_of(found: Any, step: int) -> bool:
    return bool(found and found.step == step and found.facts == {"step": step} and same(found.arrays, arrays(step)))


def fill(folder: Path, *steps: int, keep: int = 9) -> None:
    for step in steps:
        save(folder, step, arrays(step), {"step": step}, keep=keep)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def pairs(*steps: int) -> list[str]:
    return sorted(f"step-{step:08d}.{kind}" for step in steps for kind in ("json", "safetensors"))
