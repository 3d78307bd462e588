"""The amplitude of a growth step: a search along one line, from the loss, its slope and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from refattn.mechanisms.growing.growth.options import Options


@dataclass(frozen=True)
class Found:
    """An amplitude, the loss before and there, the slope at 0, and how many losses were computed.

    An amplitude of 0 says that none was found at which the loss falls.
    """

    amplitude: float
    before: float
    after: float
    slope: float
    evaluations: int

    @property
    def predicted(self) -> float:
        """The change of the loss to first order."""
        return self.amplitude * self.slope

    @property
    def actual(self) -> float:
        """The change of the loss."""
        return self.after - self.before


def search(loss: Callable[[float], float], before: float, slope: float, options: Options) -> Found:
    """Find an amplitude at which the loss falls enough, and about as far as it does.

    An amplitude is good where the loss there is at most ``before + decrease * amplitude * slope`` and below `before`
    (Armijo). From the first amplitude it grows by 1 / factor while that is good and still better, or else falls by
    `factor` until it is good, and then while it still gets better. A loss that is not finite is no good.

    Parameters
    ----------
    loss
        The loss at an amplitude above 0.
    before, slope
        The loss at 0 and its derivative, below 0.
    options
        The first `amplitude`, `decrease`, `factor`, and `evaluations`, the most calls of `loss`.
    """
    count = 0

    def at(amplitude: float) -> float:
        nonlocal count
        count += 1
        found = float(loss(amplitude))
        return found if math.isfinite(found) else math.inf

    def good(amplitude: float, found: float) -> bool:
        return found <= before + options.decrease * amplitude * slope and found < before

    if not slope < 0.0:
        return Found(0.0, before, before, slope, 0)
    amplitude, step = options.amplitude, 1.0 / options.factor
    found = at(amplitude)
    if not good(amplitude, found):
        step = options.factor
        while not good(amplitude, found) and count < options.evaluations:
            amplitude *= options.factor
            found = at(amplitude)
    if not good(amplitude, found):
        return Found(0.0, before, before, slope, count)
    while count < options.evaluations:
        following = at(amplitude * step)
        if not (following < found and good(amplitude * step, following)):
            break
        amplitude, found = amplitude * step, following
    return Found(amplitude, before, found, slope, count)
