"""The energy of a flow on a plane through its equilibria."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
from scipy.linalg import eigh

from refattn.analysis.equilibria import Equilibria, Equilibrium
from refattn.analysis.graph_flow import GraphFlow
from refattn.analysis.graphs import Floats

IMAGES_UP_TO = 5
"""The most nodes for which all images of an equilibrium under the period are looked for."""

ON_THE_PLANE = 1e-4


@dataclass(frozen=True)
class Landscape:
    """Energies over a plane, or a line.

    Attributes
    ----------
    centre
        The state with the coordinates 0, (n,).
    axes
        The unit vectors that span it, (1, n) or (2, n).
    names
        What the coordinates are called.
    coordinates
        Of each axis, (k,).
    energy
        (k,) or (k, k), the second axis first.
    marks
        The equilibria that lie on it: coordinates, energy and number of unstable directions.
    """

    centre: Floats
    axes: Floats
    names: tuple[str, ...]
    coordinates: tuple[Floats, ...]
    energy: Floats
    marks: tuple[tuple[Floats, float, int], ...]


def landscape_of(found: Equilibria, points: int = 121) -> Landscape | None:
    """Return the energy around the equilibria that were found; None where there is no energy, or none was found.

    Of two nodes the plane is that of their scores; of more it is the one through the first equilibrium and two other
    stable ones, or where there are not enough of them along the softest directions of the first.
    """
    flow = found.flow
    if flow.balance is None or not found.isolated:
        return None
    centre, axes = _centred(flow, found.isolated[0].x), _axes(found)
    names = (
        ("x of node 0", "x of node 1")
        if np.array_equal(axes, np.eye(2))
        else ("along the first axis", "along the second axis")
    )
    if np.array_equal(axes, np.eye(len(axes))):
        centre = np.zeros(flow.n)
    marks = []
    for one in (*found.isolated, *found.degenerate):
        for image in _images(flow, one):
            at = axes @ (image - centre)
            if np.max(np.abs(centre + at @ axes - image)) < ON_THE_PLANE:
                marks.append((at, float(flow.energy(image)), one.stability.negative))
    spread = np.stack([at for at, _, _ in marks]) if marks else np.zeros((1, len(axes)))
    low, high = np.min(spread, axis=0), np.max(spread, axis=0)
    margin = 0.2 * np.max(high - low) + 0.5
    coordinates = tuple(np.linspace(a - margin, b + margin, points) for a, b in zip(low, high, strict=True))
    grid = np.stack(np.meshgrid(*coordinates), axis=-1)
    return Landscape(centre, axes, names[: len(axes)], coordinates, flow.energy(centre + grid @ axes), tuple(marks))


def _axes(found: Equilibria) -> Floats:
    flow, first = found.flow, found.isolated[0]
    count = min(2, flow.n - flow.free)
    if flow.n <= 2 and not flow.free:
        return np.eye(flow.n)
    axes: list[Floats] = []
    directions = [_centred(flow, other.x) - _centred(flow, first.x) for other in found.stable]
    softest = eigh(-flow.jacobian(first.x))[1].T
    for direction in (*directions, *(_centred(flow, each) for each in softest)):
        rest = direction - sum(((axis @ direction) * axis for axis in axes), np.zeros(flow.n))
        if len(axes) < count and np.linalg.norm(rest) > max(0.1 * float(np.linalg.norm(direction)), 1e-6):
            axes.append(rest / np.linalg.norm(rest))
    return np.stack(axes) if axes else np.eye(1, flow.n)


def _images(flow: GraphFlow, one: Equilibrium) -> list[Floats]:
    """Return a state, and where there is a period and few nodes those that differ from it by a period of some nodes."""
    if flow.period is None or flow.n > IMAGES_UP_TO:
        return [_centred(flow, one.x)]
    turns = np.asarray(list(product((-1.0, 0.0, 1.0), repeat=flow.n - 1)))
    every = one.x + flow.period * np.concatenate([np.zeros((len(turns), 1)), turns], axis=1)
    inside = np.max(np.abs(every - np.mean(every, axis=-1, keepdims=True)), axis=-1) <= 0.75 * flow.period
    return [_centred(flow, x) for x in every[inside]]


def _centred(flow: GraphFlow, x: Floats) -> Floats:
    """Return x with the mean of each component 0, where nothing holds it."""
    if not flow.moves_freely:
        return x
    sums = np.bincount(flow.component, weights=x) / np.bincount(flow.component)
    return np.asarray(x - sums[flow.component], np.float64)
