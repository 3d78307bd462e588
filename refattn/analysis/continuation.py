"""Branches of equilibria of a family of flows, x' = v(x; lambda), by steps along the branch.

The branch is parametrised by its own length, so that it may turn back in lambda: from a point z = (x, lambda) with the
unit tangent t the next one is sought where t . (z' - z) is the step, by Newton's method for v = 0 and this equation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.linalg import eigvals, eigvalsh, svd

from refattn.analysis.graph_flow import GraphFlow, with_number
from refattn.analysis.graphs import Floats

ITERATIONS = 12
EXACT = 1e-13
"""Largest change by Newton's method, in units of the largest number or 1, after which a point is known."""

LONGEST, SHORTEST = 0.02, 1e-7
"""The longest and the shortest step, in units of the range of lambda or, if that is less, 1."""

STRAIGHT = 0.98
"""Smallest product of the tangents of two neighbours: a step that turns more is halved."""

POINTS = 4000

APART = 1e-4
"""The step of differences by b and t."""


@dataclass(frozen=True)
class Family:
    """x' = v(x; lambda): v, its Jacobian (n, n) with respect to x, and its derivative (n,) with respect to lambda.

    `weights` are those of detailed balance, in whose inner product J is symmetric; None where there are none.
    """

    rate: Callable[[Floats, float], Floats]
    jacobian: Callable[[Floats, float], Floats]
    by_parameter: Callable[[Floats, float], Floats]
    weights: Floats | None = None

    def eigenvalues(self, x: Floats, at: float) -> Floats:
        """Return the real parts of the eigenvalues of J, the largest first."""
        matrix = self.jacobian(x, at)
        if self.weights is None:
            return np.sort(eigvals(matrix).real)[::-1]
        root = np.sqrt(self.weights)
        even = root[:, None] * matrix / root
        return np.asarray(eigvalsh(0.5 * (even + even.T))[::-1], np.float64)


def family_of(flow: GraphFlow, parameter: str) -> Family:
    """Return the flows that differ from this one in `mu`, `kappa` or `b`, or those on its line by `t`."""

    def at(value: float) -> GraphFlow:
        return with_number(flow, parameter, value)

    def by_parameter(x: Floats, value: float) -> Floats:
        if parameter in ("mu", "kappa"):
            return at(value).by_mu(x) if parameter == "mu" else at(value).by_kappa(x)
        return (at(value + APART).rate(x) - at(value - APART).rate(x)) / (2.0 * APART)

    same = parameter != "t" or (flow.towards is not None and np.array_equal(flow.matrix, flow.towards.matrix))
    return Family(
        lambda x, value: at(value).rate(x),
        lambda x, value: at(value).jacobian(x),
        by_parameter,
        flow.balance if same else None,
    )


@dataclass(frozen=True)
class Branch:
    """Points of a branch, in order: lambda (m,), x (m, n), tangents (m, n + 1), and eigenvalues of J (m, n)."""

    at: Floats
    x: Floats
    tangents: Floats
    eigenvalues: Floats

    @property
    def unstable(self) -> Floats:
        """The number of unstable directions of each point, (m,)."""
        return np.sum(self.eigenvalues > 0.0, axis=1)


def follow(family: Family, x: Floats, at: float, low: float, high: float, limit: float = 1e3) -> Branch:
    """Return the branch through the equilibrium x (n,) at lambda = `at`, both ways, within the range of lambda.

    It ends at the ends of the range, where a score is larger than `limit`, where it closes, or where no step succeeds.
    Branches that come nearer to each other than a step are taken for ones that cross.
    """
    back = _one_way(family, x, at, low, high, limit, -1.0)
    forth = _one_way(family, x, at, low, high, limit, 1.0)
    closed = len(back) > 2 and np.allclose(back[-1][0], back[0][0], rtol=0.0, atol=1e-12)
    points = back[::-1] if closed else [*[(z, -t) for z, t in back[:0:-1]], *forth]
    z = np.stack([point for point, _ in points])
    values = np.stack([family.eigenvalues(each[:-1], float(each[-1])) for each in z])
    return Branch(z[:, -1], z[:, :-1], np.stack([t for _, t in points]), values)


def corrected(family: Family, z: Floats, tangent: Floats) -> Floats | None:
    """Return the point of the branch in the plane through z that `tangent` stands upright on; None if not near."""
    guess = z
    for _ in range(ITERATIONS):
        x, at = z[:-1], float(z[-1])
        bordered = np.block([[family.jacobian(x, at), family.by_parameter(x, at)[:, None]], [tangent[None, :]]])
        right = np.append(family.rate(x, at), tangent @ (z - guess))
        try:
            change = np.linalg.solve(bordered, right)
        except np.linalg.LinAlgError:
            return None
        z = z - change
        if not np.isfinite(z).all():
            return None
        if np.max(np.abs(change)) <= EXACT * (1.0 + np.max(np.abs(z))):
            return z
    return z if np.max(np.abs(family.rate(z[:-1], float(z[-1])))) <= EXACT * (1.0 + np.max(np.abs(z))) else None


def tangent_at(family: Family, z: Floats, along: Floats) -> Floats:
    """Return the unit tangent of the branch at z that points as `along` does."""
    x, at = z[:-1], float(z[-1])
    wide = np.column_stack([family.jacobian(x, at), family.by_parameter(x, at)])
    t = svd(wide)[2][-1]
    return np.asarray(t if t @ along >= 0.0 else -t, np.float64)


def at_parameter(family: Family, x: Floats, at: float) -> Floats | None:
    """Return the equilibrium near x at this lambda, or None."""
    upright = np.zeros(len(x) + 1)
    upright[-1] = 1.0
    z = corrected(family, np.append(x, at), upright)
    return None if z is None else z[:-1]


def _one_way(
    family: Family, x: Floats, at: float, low: float, high: float, limit: float, sign: float
) -> list[tuple[Floats, Floats]]:
    """Return points and tangents of a branch, in one direction."""
    scale = min(high - low, 1.0)
    longest, shortest = LONGEST * scale, SHORTEST * scale
    z, along = np.append(x, at), np.zeros(len(x) + 1)
    along[-1] = sign
    t = tangent_at(family, z, along)
    points, step, way = [(z, t)], longest, 0.0
    while len(points) < POINTS and step > shortest:
        following = corrected(family, z + step * t, t)
        if following is None or np.linalg.norm(following - z) > 1.5 * step:
            step *= 0.5
            continue
        turned = tangent_at(family, following, t)
        if turned @ t < STRAIGHT:
            step *= 0.5
            continue
        if not low <= following[-1] <= high:
            edge = low if following[-1] < low else high
            share = (edge - z[-1]) / (following[-1] - z[-1])
            last = at_parameter(family, z[:-1] + share * (following[:-1] - z[:-1]), edge)
            if last is not None and share > 1e-9:
                end = np.append(last, edge)
                points.append((end, tangent_at(family, end, t)))
            break
        way += step
        begin = points[0][0]
        if way > 3.0 * longest and np.linalg.norm(following - begin) < step and turned @ points[0][1] > STRAIGHT:
            points.append(points[0])
            break
        z, t = following, turned
        points.append((z, t))
        if np.max(np.abs(z[:-1])) > limit:
            break
        step = min(1.4 * step, longest)
    return points
