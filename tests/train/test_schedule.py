"""The schedule: its ends, its shape, torch's scheduler around it, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refattn.train.schedule import WarmupCosine


@st.composite
def schedules(draw: Any) -> WarmupCosine:
    steps = draw(st.integers(1, 10**6))
    warmup = draw(st.integers(0, steps - 1))
    return WarmupCosine(draw(st.floats(1e-8, 1e3)), warmup, steps, draw(st.floats(0.0, 1.0)))


@given(schedules())
def test_the_ends_are_exact(schedule: WarmupCosine) -> None:
    assert schedule(schedule.warmup) == schedule.peak
    assert schedule(schedule.steps) == schedule(schedule.steps + 7) == schedule.peak * schedule.floor
    assert schedule(0) == (0.0 if schedule.warmup else schedule.peak)


def test_numbers() -> None:
    schedule = WarmupCosine(peak=2.0, warmup=4, steps=12, floor=0.1)
    assert [schedule(n) for n in range(5)] == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert schedule(8) == pytest.approx(2.0 * 0.55, rel=1e-15)  # half way down
    assert schedule(6) == pytest.approx(2.0 * (0.1 + 0.9 * (1.0 + math.sqrt(0.5)) / 2.0), rel=1e-15)
    assert schedule(12) == 0.2
    assert WarmupCosine(1.0, 0, 1)(1) == 0.1


def test_torch_s_scheduler_gives_the_same_rates() -> None:
    torch = pytest.importorskip("torch")
    schedule = WarmupCosine(peak=3e-4, warmup=10, steps=50)
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda n: schedule(n + 1))
    for step in range(1, 60):
        assert optimiser.param_groups[0]["lr"] == pytest.approx(schedule(step), rel=1e-12)
        optimiser.step()
        warmup.step()


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"peak": 0.0}, ValueError, "peak: got 0.0, needs a finite number above 0"),
        ({"peak": math.inf}, ValueError, "peak: got inf, needs a finite number above 0"),
        ({"peak": "1"}, TypeError, "peak: got '1', needs a finite number"),
        ({"warmup": -1}, ValueError, "warmup: got -1, needs a whole number of at least 0"),
        ({"warmup": 1.5}, TypeError, "warmup: got 1.5, needs a whole number"),
        ({"warmup": 10}, ValueError, "warmup: got 10, needs a number below the 10 steps"),
        ({"steps": 0}, ValueError, "steps: got 0, needs a whole number of at least 1"),
        ({"steps": True}, TypeError, "steps: got True, needs a whole number"),
        ({"floor": 1.1}, ValueError, "floor: got 1.1, needs a finite number from 0 to 1"),
        ({"floor": math.nan}, ValueError, "floor: got nan, needs a finite number from 0 to 1"),
    ],
)
def test_what_is_refused(changed: dict[str, Any], error: type[Exception], text: str) -> None:
    arguments: dict[str, Any] = {"peak": 1.0, "warmup": 2, "steps": 10, "floor": 0.1}
    with pytest.raises(error) as caught:
        WarmupCosine(**arguments | changed)
    assert text in str(caught.value)


def test_steps_are_counted_from_0() -> None:
    with pytest.raises(ValueError, match="^step: got -1, needs a whole number of at least 0"):
        WarmupCosine(1.0, 2, 10)(-1)
