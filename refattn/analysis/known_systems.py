"""Systems whose next state is known, for operators that are fitted to their transitions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.integrate import solve_ivp

States = Any
"""A NumPy array (n, d), a state a row."""

ROTATION = ((0.9, 0.3, 0.0, 0.0), (-0.3, 0.9, 0.1, 0.0), (0.0, 0.0, 0.7, 0.2), (0.1, 0.0, 0.0, -0.8))
"""The matrix of the linear system: a slow spiral, a decay and a sign that alternates."""

STEP = 0.1
"""The time between two states of an oscillator."""


@dataclass(frozen=True)
class System:
    """A map of states, and for a linear one its eigenvalues."""

    name: str
    width: int
    reach: float  # states to start from lie within +-reach
    advance: Callable[[States], States]
    eigenvalues: tuple[complex, ...] = ()

    def path(self, states: States, steps: int) -> States:
        """Return the states after 0, 1, ... steps, (steps + 1, n, d)."""
        found = [np.asarray(states, dtype=float)]
        for _ in range(steps):
            found.append(self.advance(found[-1]))
        return np.stack(found)


def flow(field: Callable[[States], States]) -> Callable[[States], States]:
    """Return the map that follows a vector field for the time `STEP`, to 1e-11."""

    def advance(states: States) -> States:
        def rate(_: float, flat: Any) -> Any:
            return field(flat.reshape(states.shape)).reshape(-1)

        # The error is a norm over all states, and so larger by the root of their number for a single one.
        found = solve_ivp(rate, (0.0, STEP), states.reshape(-1), "DOP853", (STEP,), rtol=1e-12, atol=1e-12)
        return found.y[:, -1].reshape(states.shape)

    return advance


def _van_der_pol(x: States) -> States:
    return np.stack([x[:, 1], (1.0 - x[:, 0] ** 2) * x[:, 1] - x[:, 0]], axis=-1)


def _duffing(x: States) -> States:
    return np.stack([x[:, 1], x[:, 0] - x[:, 0] ** 3 - 0.5 * x[:, 1]], axis=-1)


def _linear() -> System:
    matrix = np.asarray(ROTATION)
    values = tuple(complex(x) for x in np.linalg.eigvals(matrix))
    return System("linear", len(matrix), 2.0, lambda states: states @ matrix.T, values)


SYSTEMS = {
    system.name: system
    for system in (
        _linear(),
        System("van der Pol", 2, 2.0, flow(_van_der_pol)),
        System("Duffing", 2, 2.0, flow(_duffing)),
    )
}
"""By name: x' = A x; x'' = (1 - x^2) x' - x; x'' = x - x^3 - x' / 2, which has two wells."""
