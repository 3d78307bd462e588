"""The damping schedule, and the weight of a force that acts through a damped step.

    eta(t) = c_log log t + c_lin t,   alpha(t) = eta'(t) = c_log / t + c_lin
    a(t, h) = eta(t + h) - eta(t) = c_log log(1 + h / t) + c_lin h, between -clip and clip, with no gradient there
    phi(a) = (1 - e^-a) / a,   phi'(a) = (e^-a - phi(a)) / a

With c_log = 3 this is Nesterov's 3/t. The step h times phi(a) is what a force that stays the same adds to the momentum
in that step; below 1/2 both functions come from their series, which loses no digits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from refattn.xp import Array, namespace

_TERMS = 15


@dataclass(frozen=True)
class Decay:
    """a(t, h), and its derivatives."""

    a: Array
    by_c_log: Array
    by_c_lin: Array
    by_t: Array
    by_h: Array


def decay(c_log: Array, c_lin: Array, t: Array, h: Array, clip: float) -> Decay:
    """Return a(t, h) with its derivatives; all are arrays of one element."""
    xp = namespace(t)
    log = xp.log1p(h / t)
    a = c_log * log + c_lin * h
    free = xp.abs(a) < clip
    by_h = c_log / (t + h) + c_lin
    by_t = -c_log * h / (t * (t + h))
    derivatives = (xp.where(free, x, 0.0) for x in (log, h, by_t, by_h))
    return Decay(xp.clip(a, -clip, clip), *derivatives)


def phi(a: Array) -> tuple[Array, Array]:
    """Return phi(a) and phi'(a)."""
    xp = namespace(a)
    small = xp.abs(a) < 0.5
    safe = xp.where(small, 1.0, a)
    whole = (1.0 - xp.exp(-safe)) / safe
    slope = (xp.exp(-safe) - whole) / safe
    near = xp.where(small, a, 0.0)
    series = derivative = xp.zeros_like(a)
    for k in range(_TERMS, -1, -1):  # phi = sum_k (-a)^k / (k + 1)!
        series = series * near + (-1.0) ** k / math.factorial(k + 1)
    for k in range(_TERMS, 0, -1):
        derivative = derivative * near + (-1.0) ** k * k / math.factorial(k + 1)
    return xp.where(small, series, whole), xp.where(small, derivative, slope)
