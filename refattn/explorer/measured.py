"""What each number of a run is made of, and what it feeds: measured, not declared.

A run is replayed under a hook that gives every equation the value that it had, but for one element of one equation or
argument, which is disturbed. Since all else is held, what an equation then computes differs from what it had only where
it reads that element itself: these are its direct children. The backward reads what the forward has saved, so that it
is measured in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from refattn import equations
from refattn.verify.traced import Run, Traced
from refattn.xp import Array

DISTURBANCE = 2.0**-10
"""Of an element, relative to its size or to 1 where it is smaller."""


@dataclass(frozen=True)
class Node:
    """An argument or an equation of a run: its name or its id with the pass, and its value."""

    name: str
    value: NDArray[np.generic]


Children = dict[str, tuple[int, ...]]
"""By the name of a node, the flat indices of the elements that change."""


def nodes(found: Traced) -> tuple[Node, ...]:
    """Return all nodes: the arguments, then the equations in the order that they ran."""
    given = tuple(Node(name, value) for name, value in found.arguments.items())
    return given + tuple(Node(step.id, step.value) for step in found.steps)


def links(run: Run, found: Traced) -> dict[str, list[Children]]:
    """Return, for each node and each of its elements, what changes where only this element does.

    Raises
    ------
    RuntimeError
        Where the replayed run does not take the values that it had, so that nothing could be concluded.
    """
    recorded = {node.name: node.value for node in nodes(found)}
    replay = _Replay({step.id: step.value for step in found.steps})
    measured = {}
    with equations.apply(replay):
        run.run(run.arguments, _nothing)
        # From arrays of another layout in memory the last bits may be others: what is compared with is a replay, too.
        for name, value in replay.computed.items():
            if not np.allclose(value, recorded[name], rtol=1e-9, atol=1e-12, equal_nan=True):
                raise RuntimeError(f"{run.about[0]}: a replayed run differs in {name}")
        replay.expected = replay.computed
        for name, value in recorded.items():
            of_elements = []
            for index in range(value.size):
                other = disturbed(value, index)
                replay.take(name, other)
                given = {**run.arguments, name: other} if name in run.arguments else run.arguments
                run.run(given, _nothing)
                of_elements.append(dict(replay.changed))
            measured[name] = of_elements
    return measured


def disturbed(value: NDArray[np.generic], index: int) -> NDArray[np.generic]:
    """Return a copy with one element changed by a little: a truth value turned, an infinite number made 0."""
    copy = np.array(value, order="C")
    flat = copy.reshape(-1)
    if copy.dtype == np.bool_:
        flat[index] = ~flat[index]
    elif np.issubdtype(copy.dtype, np.integer):
        flat[index] += 1
    else:
        old = float(flat[index])
        flat[index] = old + DISTURBANCE * max(abs(old), 1.0) if np.isfinite(old) else 0.0
    return copy


class _Replay:
    """The hook: equations take the values that they had, one of them another one; what they would have been is kept."""

    def __init__(self, recorded: Mapping[str, NDArray[np.generic]]) -> None:
        self.recorded = recorded
        self.computed: dict[str, NDArray[np.generic]] = {}
        self.expected: dict[str, NDArray[np.generic]] = {}
        self.changed: Children = {}
        self._passes: dict[str, int] = {}
        self._name: str | None = None
        self._value: NDArray[np.generic] | None = None

    def take(self, name: str | None, value: NDArray[np.generic] | None) -> None:
        """Begin a run in which `name` has this value, and nothing has changed yet."""
        self.changed, self._passes, self._name, self._value = {}, {}, name, value

    def __call__(self, id: str, variable: str, value: Array) -> Array:
        n = self._passes.get(id, 0)
        self._passes[id] = n + 1
        name = f"{id}[{n}]" if n else id
        had = self.expected.get(name)
        if had is None:
            self.computed[name] = np.array(value)
        else:
            same = (value == had) | ((value != value) & (had != had))
            if not np.all(same):
                self.changed[name] = tuple(int(i) for i in np.flatnonzero(~same))
        # A copy: what is recorded stays as it is, whatever the code does with it.
        return np.array(self._value if name == self._name else self.recorded[name])


def _nothing() -> None:
    pass
