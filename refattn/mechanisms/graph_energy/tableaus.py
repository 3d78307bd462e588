"""Runge-Kutta methods, and sums that their steps are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from refattn.mechanisms.graph_energy.intrinsic import Number
from refattn.mechanisms.graph_energy.law import Law, Threshold
from refattn.mechanisms.graph_energy.means import along
from refattn.xp import Array, namespace, sum_wide


@dataclass(frozen=True)
class Tableau:
    """A Runge-Kutta method: stage n moves by the rates of the stages before it, weighted by stages[n].

    An implicit one has one stage, whose equation `refattn.mechanisms.graph_energy.implicit` solves.
    """

    stages: tuple[tuple[float, ...], ...]
    weights: tuple[float, ...]
    implicit: bool = False


TABLEAUS = {
    "euler": Tableau(((),), (1.0,)),
    "heun": Tableau(((), (1.0,)), (0.5, 0.5)),
    "rk4": Tableau(((), (0.5,), (0.0, 0.5), (0.0, 0.0, 1.0)), (1.0 / 6.0, 1.0 / 3.0, 1.0 / 3.0, 1.0 / 6.0)),
    "rk45": Tableau(
        (
            (),
            (1.0 / 5.0,),
            (3.0 / 40.0, 9.0 / 40.0),
            (44.0 / 45.0, -56.0 / 15.0, 32.0 / 9.0),
            (19372.0 / 6561.0, -25360.0 / 2187.0, 64448.0 / 6561.0, -212.0 / 729.0),
            (9017.0 / 3168.0, -355.0 / 33.0, 46732.0 / 5247.0, 49.0 / 176.0, -5103.0 / 18656.0),
        ),
        (35.0 / 384.0, 0.0, 500.0 / 1113.0, 125.0 / 192.0, -2187.0 / 6784.0, 11.0 / 84.0),
    ),
    "implicit_midpoint": Tableau(((),), (1.0,), implicit=True),
    "discrete_gradient": Tableau(((),), (1.0,), implicit=True),
}


def summed(terms: Array, like: Number) -> Array:
    """Return the sum of terms (b, h, j, c) over what a number was broadcast to: (h,), (h, j) or 0-d."""
    if isinstance(like, float) or len(like.shape) == 0:
        return sum_wide(terms)
    return namespace(terms).sum(terms, axis=(0, 3) if like.shape[-2] > 1 else (0, 2, 3))


def weighted(weights: Sequence[float], rates: Sequence[Array | None]) -> Array | None:
    """Return the sum of rates times weights; None where there is nothing to sum."""
    total = None
    for weight, rate in zip(weights, rates, strict=True):
        if weight != 0.0:
            part = rate if weight == 1.0 else weight * rate  # type: ignore[operator]
            total = part if total is None else total + part  # type: ignore[operator]
    return total


def moved(x: Array, step: Number, direction: Array | None) -> Array:
    return x if direction is None else x + step * direction


def shrink(threshold: Threshold | None, step: Number, x: Array) -> Array:
    """Return x after a threshold that acts after every step, of the step times tau; x itself for other thresholds."""
    if threshold is None or threshold.kind != "proximal":
        return x
    xp, least = namespace(x), step * threshold.tau
    size = xp.abs(x) if threshold.signed else x
    sign = xp.sign(x) if threshold.signed else 1.0
    return xp.where(size <= least, 0.0, sign * (size - least))


def plus(x: Array, factor: float | Array, y: Array | None) -> Array:
    return x if y is None else x + factor * y


def seen(visible: Array | None, x: Array) -> Array:
    return x if visible is None else visible * x


def first(law: Law, start: Array, visible: Array | None) -> Array:
    """Return the scores before the first step: b, and the jitter of nodes that exist."""
    return start if law.jitter is None else start + seen(visible, law.jitter)


def rate_at(law: Law, graph: Array, start: Array, visible: Array | None, x: Array, after: Array | None = None) -> Array:
    """Return v at x, or its mean from x to `after`."""
    own = along(law.intrinsic.force, x, after, start, law.mu)
    return seen(visible, own) + law.kappa * law.form.couple_forward(law.coupling, graph, visible, x, after)
