"""Calls of graph energy attention that its tests share."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn import counter
from refattn.mechanisms.graph_energy import core

Floats = NDArray[np.float64]

STATES = ("token", "query", "feature")
COUPLINGS = ("sin", "tanh", "identity", "arctan", "sinh", "cubic")
SYMMETRIC = ("kernel", "mean", "min")
B, H, G, N, D, E = 2, 4, 2, 7, 3, 5


def draw(name: str, *shape: int) -> Floats:
    return counter.normal(shape, seed=23, purpose=f"graph_energy.{name}")


def kept(name: str, *shape: int, keep: float = 0.7) -> NDArray[np.bool_]:
    return np.asarray(counter.uniform(shape, seed=23, purpose=f"graph_energy.{name}") < keep)


def qkv(n: int = N) -> tuple[Floats, Floats, Floats]:
    return draw("q", B, H, n, D), draw("k", B, G, n, D), draw("v", B, G, n, E)


def run(n: int = N, **options: Any) -> tuple[Any, Any]:
    return core.forward(*qkv(n), **options)


def step_of(state: str) -> dict[str, float]:
    """A step for a state whose scores have no bound."""
    return {"step": 0.1} if state == "feature" else {}
