"""Calls of the core with the numbers of its families by their own names: ``forward(q, k, v, ridge=0.2, tau=1.0)``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import refattn as ra
from refattn import philox
from refattn.mechanisms.koopman.options.spaces import Observables

RECORD = ra.mechanism("koopman")


def drawn(seed: int) -> Callable[..., Any]:
    """What draws normal numbers by a name and a shape, for the tests of a file."""

    def draw(name: str, *shape: int, seed: int = seed) -> Any:
        return philox.normal(shape, seed=seed, purpose=name)

    return draw


def options_of(**given: Any) -> dict[str, Any]:
    """The options of the core: each number in the family that has it."""
    own = {name: x for name, x in given.items() if name in RECORD.defaults}
    numbers = {name: x for name, x in given.items() if name not in own and x is not None}
    found = RECORD.with_numbers(own, numbers)
    whole = {**RECORD.defaults, **found}
    has = {name for family in RECORD.families for name in vars(RECORD.families[family](whole[family]))}
    assert set(numbers) <= has, f"no family has {set(numbers) - has}"
    return found


def forward(q: Any, k: Any, v: Any, **given: Any) -> Any:
    return ra.koopman.forward(q, k, v, **options_of(**given))


@dataclass(frozen=True)
class OneStep:
    """D^T kappa(x) = C g(x), what the one-step map of an update is beside tau x."""

    centres: Observables
    factors: Any

    def at(self, x: Any) -> Any:
        """Its values at any x, the sizes of its terms, and its Jacobian."""
        return self.centres.look(x, self.factors)

    def steepness(self) -> Any:
        return self.centres.steepness(self.factors)


def one_step_of(inner: Any) -> OneStep:
    """The one-step map of the last update of the dense implementation."""
    step = inner.updates[-1]
    return OneStep(step.kappa.centres, np.swapaxes(step.modes, -1, -2) @ step.kappa.dual)
