"""Kuramoto's order parameter: how nearly the scores of a graph agree, and how it grows with kappa.

    R = |mean_j exp(i x_j)|                 1 where all scores are equal, up to whole turns

Two systems have a critical kappa. Kuramoto's own has a frequency w_i at each node in place of an intrinsic force, and
every node is linked to every other one, w_ij = 1 / n::

    x_i' = w_i + kappa / n sum_j sin(x_j - x_i)

For n to infinity R leaves 0 at kappa_c = 2 / (pi g(0)), with g the density of the frequencies, which has its largest
value at 0 and is even. Nodes with several wells have equilibria apart from each other; there the critical kappa is that
of the bifurcation at which the last of these loses its stability, see `refattn.analysis.diagram`.

Source: Y. Kuramoto, Chemical Oscillations, Waves, and Turbulence, section 5.4; S. Strogatz 2000, From Kuramoto to
Crawford, sections 3 and 4, for R where kappa is above kappa_c.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import ive

from refattn import philox
from refattn.analysis.equilibria import reach_of, settled
from refattn.analysis.graph_flow import GraphFlow
from refattn.analysis.graphs import Floats, complete_graph
from refattn.args import Real, Whole, checked
from refattn.mechanisms.graph_energy.forces import Intrinsic
from refattn.xp import namespace

CRITICAL = 2.0 * math.sqrt(2.0 / math.pi)
"""kappa_c of normal frequencies of the standard deviation 1, 2 / (pi g(0)) with g(0) = 1 / sqrt(2 pi)."""

FREQUENCY = Intrinsic(
    name="frequency",
    force=lambda x, b, mu: mu * b + 0.0 * x,
    potential=lambda x, b, mu: -mu * b * x,
    d_x=lambda x, b, mu: namespace(x).zeros_like(x),
    d_b=lambda x, b, mu: mu + 0.0 * x,
    d_mu=lambda x, b, mu: b + 0.0 * x,
    potential_b=lambda x, b, mu: -mu * x,
    potential_mu=lambda x, b, mu: -b * x,
    largest_slope=lambda mu, size: 0.0 * mu,
)
"""f = mu b: a score that is alone moves at a constant rate."""


def order_parameter(x: Floats) -> Any:
    """Return R (...) of scores x (..., n).

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.analysis.order import order_parameter
    >>> bool(order_parameter(np.zeros(5)) == 1.0)
    True
    >>> round(float(order_parameter(np.array([-1.0, 1.0]))), 6) == round(float(np.cos(1.0)), 6)
    True
    """
    return np.abs(np.mean(np.exp(1j * np.asarray(x, np.float64)), axis=-1))


@checked(n=Whole(2, 10_000), kappa=Real(0.0))
def kuramoto(n: int, kappa: float) -> GraphFlow:
    """Return Kuramoto's system with the quantiles of the standard normal distribution as frequencies."""
    frequencies = [NormalDist().inv_cdf((j + 0.5) / n) for j in range(n)]
    return GraphFlow(complete_graph(n) / n, "sin", FREQUENCY, frequencies, 1.0, kappa)


@checked(kappa=Real(0.0))
def kuramoto_limit(kappa: float) -> float:
    """Return R of Kuramoto's system with normal frequencies as n goes to infinity.

    Below `CRITICAL` it is 0, above it the solution of 1 = kappa int cos^2(t) g(kappa R sin t) dt over half a turn. With
    y = (kappa R)^2 / 4 the integral is sqrt(pi / 8) exp(-y) (I_0(y) + I_1(y)).
    """
    if kappa <= CRITICAL:
        return 0.0

    def missing(r: float) -> float:
        y = (kappa * r) ** 2 / 4.0
        return kappa * math.sqrt(math.pi / 8.0) * float(ive(0, y) + ive(1, y)) - 1.0

    return float(brentq(missing, 1e-9, 1.0))


@checked(flow=GraphFlow, time=Real(0.0), step=Real(0.0), seed=Whole())
def order_in_time(flow: GraphFlow, time: float = 60.0, step: float = 0.1, seed: int = 0) -> Floats:
    """Return R after each step, of the classical Runge-Kutta method, from scores that are drawn from a whole turn."""
    x = math.pi * (2.0 * philox.uniform((flow.n,), seed=seed, purpose="order.start") - 1.0)
    found = []
    for _ in range(round(time / step)):
        first = flow.rate(x)
        second = flow.rate(x + 0.5 * step * first)
        third = flow.rate(x + 0.5 * step * second)
        last = flow.rate(x + step * third)
        x = x + step / 6.0 * (first + 2.0 * second + 2.0 * third + last)
        found.append(order_parameter(x))
    return np.asarray(found)


@checked(flow=GraphFlow, starts=Whole(1, 1_000_000), steps=Whole(1, 1_000_000), seed=Whole())
def order_at_rest(
    flow: GraphFlow, kappas: Sequence[float], *, starts: int = 200, steps: int = 4000, seed: int = 0
) -> Floats:
    """Return R (kappas, starts) where random starts are after many steps of the flow, for each kappa.

    Starts are the same for all kappas, from the cube in which `refattn.analysis.equilibria` looks for equilibria.

    Examples
    --------
    >>> from refattn.analysis.graph_flow import GraphFlow
    >>> from refattn.analysis.graphs import path_graph
    >>> from refattn.analysis.order import order_at_rest
    >>> wells = GraphFlow(path_graph(2), "identity", "double_well")
    >>> agreed = order_at_rest(wells, [0.2, 0.4], starts=50) > 1.0 - 1e-9
    >>> bool(agreed[0].all()), bool(agreed[1].all())
    (False, True)
    """
    reach = reach_of(flow)
    x = reach * (2.0 * philox.uniform((starts, flow.n), seed=seed, purpose="order.starts") - 1.0)
    return np.stack([order_parameter(settled(replace(flow, kappa=float(kappa)), x, steps)) for kappa in kappas])
