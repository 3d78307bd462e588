"""Which results each equation can disturb: computed, by disturbing them one by one.

An equation that cannot change a result is not to blame for an error in it, and one whose error would show in a result
is not to blame where that result agrees.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn import counter, equations
from refattn.mechanisms.record import Case, Mechanism
from refattn.verify.blame.mutants import Change, core_tags
from refattn.verify.judge.budget import evaluate

SIZE = 0.1
"""Relative size of a disturbance: far above rounding, and small enough that nothing overflows."""

SEEN = 1e-9
"""A result is disturbed where it changes by this much of its largest element; rounding alone changes it by 1e-13."""


def reach(
    mechanism: Mechanism, case: Case, inputs: Mapping[str, NDArray[Any]], upstream: NDArray[Any] | None
) -> dict[str, tuple[str, ...]]:
    """Return by equation of the core the results that change when it is disturbed; () for one that does not run.

    `inputs` and `upstream` are those of the case, in float64. The gradients of learned inputs are among the results
    where there is an upstream gradient.
    """

    def run(id: str, change: Change) -> dict[str, Any]:
        with equations.mutate(id, change), np.errstate(all="ignore"):
            try:
                return evaluate(mechanism, inputs, case.options, upstream)
            except ArithmeticError:  # it finds no result: nothing is as it was
                return {name: np.full_like(x, np.nan) for name, x in exact.items()}

    exact = evaluate(mechanism, inputs, case.options, upstream)
    learned = [f"d_{name}" for name, x in inputs.items() if x.dtype != np.bool_]
    names = [name for name in ("out", *mechanism.outputs, *learned) if name in exact]
    found = {}
    for tag in core_tags(mechanism):
        disturbed = [run(tag.id, change) for change in disturbances(tag.id)]
        found[tag.id] = tuple(name for name in names if any(differ(one[name], exact[name]) for one in disturbed))
    return found


def disturbances(id: str) -> tuple[Change, ...]:
    """Return what is done to an equation: a random change of every element, all signs flipped, and all zeroed.

    One alone could be something that does not matter, such as a factor of what is normalised afterwards.
    """
    return (
        lambda x: x * (1.0 + SIZE * counter.normal(x.shape, seed=0, purpose=f"reach.{id}")),
        lambda x: -x,
        lambda x: x * 0.0,
    )


def differ(got: Any, expected: Any) -> bool:
    """Tell whether a result has changed by more than rounding."""
    size = float(np.max(np.abs(expected[np.isfinite(expected)]), initial=0.0))
    return not np.allclose(got, expected, rtol=0.0, atol=SEEN * size, equal_nan=True)
