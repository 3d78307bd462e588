"""Small systems of particles for the tests of flows."""

from __future__ import annotations

from typing import Any

import numpy as np

from refattn import philox
from refattn.analysis.particles import Exponential, Linear, System

N, D = 9, 3


def draw(name: str, *shape: int) -> Any:
    return philox.normal(shape, seed=5, purpose=name)


def positive(name: str) -> Any:
    """A symmetric positive definite matrix."""
    root = draw(name, D, D)
    return 0.3 * root @ root.T + 0.2 * np.eye(D)


def symmetric(name: str) -> Any:
    root = 0.3 * draw(name, D, D)
    return root + root.T


LINEAR = Linear(positive("a"), symmetric("v"))
SOFTMAX = Exponential(0.3 * symmetric("a"), positive("b"))
HELD = Exponential(0.3 * symmetric("a"), positive("b"), positive("u"))
REPO = Exponential(0.3 * symmetric("a"), positive("b"), scaling="repo")
SYSTEMS: dict[str, System] = {"linear": LINEAR, "exponential": SOFTMAX, "held": HELD, "repo": REPO}

X, Y = 0.7 * draw("x", N, D), 0.5 * draw("y", N, D)
