"""The learning rate as a function of the step: a straight line up, then half a cosine down."""

from __future__ import annotations

import math
from dataclasses import dataclass

from refattn.args import Real, Whole, check_all, check_whole


@dataclass(frozen=True)
class WarmupCosine:
    """The rate of update number `step`, counted from 1.

    With t = step, w = warmup, T = steps and f = floor the rate is::

        peak * t / w                                                  t < w
        peak * (f + (1 - f) * (1 + cos(pi * (t - w) / (T - w))) / 2)  w <= t <= T
        peak * f                                                      t > T

    so that it is exactly `peak` at the end of the warm-up (from the start, where there is none) and exactly
    ``peak * floor`` from the last step on.

    Attributes
    ----------
    peak
        The largest rate, above 0.
    warmup
        Length of the straight line, from 0 to less than `steps`.
    steps
        Length of the whole schedule, at least 1.
    floor
        The last rate as a part of the peak, from 0 to 1.

    Raises
    ------
    TypeError, ValueError
        Where a number is of another type or out of its range.

    Notes
    -----
    Loshchilov and Hutter 2017 (arXiv:1608.03983), equation 5, without restarts.

    Examples
    --------
    >>> from refattn.train.schedule import WarmupCosine
    >>> rate = WarmupCosine(peak=0.5, warmup=2, steps=6, floor=0.5)
    >>> [round(float(rate(step)), 3) for step in range(1, 8)]
    [0.25, 0.5, 0.463, 0.375, 0.287, 0.25, 0.25]
    """

    peak: float
    warmup: int
    steps: int
    floor: float = 0.1

    def __post_init__(self) -> None:
        check_all(self, peak=Real(0.0, above=True), warmup=Whole(), steps=Whole(1), floor=Real(0.0, 1.0))
        if self.warmup >= self.steps:
            raise ValueError(f"warmup: got {self.warmup}, needs a number below the {self.steps} steps")

    def __call__(self, step: int) -> float:
        """Return the rate of a step from 0 on."""
        check_whole("step", step, 0)
        if step < self.warmup:
            return float(self.peak * step / self.warmup)
        progress = min(1.0, (step - self.warmup) / (self.steps - self.warmup))
        wave = 0.5 * (1.0 + math.cos(math.pi * progress))  # exactly 1 at the start, 0 at the end
        return float(self.peak * (self.floor + (1.0 - self.floor) * wave))
