"""What is written again in NumPy alone, as a bound, computes what it says: bounds of another function bind nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asv_benchmarks.comparisons import train
from asv_benchmarks.substep_in_numpy import substep
from refattn import philox

TOKENS, WIDTH = 6, 4


def test_a_training_step_in_numpy_takes_the_steps_of_the_trainer() -> None:
    sides = {
        side.label: getattr(train, side.target.partition(":")[2])
        for side in train.COMPARISON.sides
        if side.label in ("refattn", "operations")
    }
    point: dict[str, Any] = {"width": 64, "layers": 2, "context": 16, "batch": 2}
    calls = [make(**point) for make in sides.values()]
    ours, bare = ([call() for _ in range(3)][-1] for call in calls)
    np.testing.assert_allclose(bare, ours, rtol=1e-5)
    assert len(set(ours)) == 3, "each step changes the loss"


@pytest.mark.parametrize("name", ["x", "p", "q", "k", "v", "o", "b"])
def test_the_adjoint_of_the_substep_in_numpy_is_its_slope(name: str) -> None:
    def draw(which: str, *shape: int) -> Any:
        return philox.normal(shape, seed=0, purpose=f"substep.{which}")

    arrays = {each: draw(each, WIDTH, WIDTH) / 2.0 for each in "qkvob"} | {
        each: draw(each, TOKENS, WIDTH) for each in "xp"
    }
    order = ["x", "p", "q", "k", "v", "o", "b"]

    def called(given: dict[str, Any]) -> tuple[Any, ...]:
        return substep({each: given[each] for each in "qkvob"}, given["x"], given["p"], heads=2)

    direction, step = draw("direction", *arrays[name].shape), 1e-5
    ends = [called(arrays | {name: arrays[name] + sign * step * direction}) for sign in (1.0, -1.0)]
    slope = sum(np.sum(a - b) for a, b in zip(ends[0][:2], ends[1][:2], strict=True)) / (2.0 * step)
    gradient = called(arrays)[2:][order.index(name)]
    assert slope == pytest.approx(np.sum(gradient * direction), rel=1e-5, abs=1e-7)
